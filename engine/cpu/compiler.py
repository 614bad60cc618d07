"""From a kernel's body to object code, through numba.

numba wraps what it compiles so that a Python error could be reported from it, which refers to symbols that numba
alone provides.  Kernels raise nothing, so the wrapper's other half is never reached: once only the wrapper can be
called from outside, LLVM finds that out and drops it.  Imported when a kernel is in no cache: a start that finds all
of them loads no numba.  Called by `engine.cpu.code_cache`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import llvmlite.binding as llvm
import numba
from numba import types

from engine.cpu.isa import host_cpu
from engine.cpu.kernel import ENTRY, Kernel

_OPTIMISATION_LEVEL = 3


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """`object_code` refers to the `externals` of this process, which are the C library's where all is well.

    `function` is numba's own, loaded into this process as long as it lives.
    """

    object_code: bytes
    externals: tuple[str, ...]
    function: numba.core.ccallback.CFunc


def compile_kernel(kernel: Kernel) -> CompiledKernel:
    """Compile for this processor; takes tenths of a second to seconds."""
    body = getattr(importlib.import_module(kernel.module), kernel.factory)(*kernel.constants)
    signature = types.void(*[types.int64] * kernel.num_parameters)
    # Under numpy's rules a division by zero raises nothing.
    function = numba.cfunc(signature, error_model="numpy")(body)
    machine = _target_machine()
    module = llvm.parse_assembly(function.inspect_llvm())
    _leave_one_entry(module, function.native_name, machine)
    values = (*module.functions, *module.global_variables)
    externals = tuple(value.name for value in values if value.is_declaration and not value.name.startswith("llvm."))
    return CompiledKernel(machine.emit_object(module), externals, function)


def _leave_one_entry(module: llvm.ModuleRef, entry: str, machine: llvm.TargetMachine) -> None:
    """Make `entry` the only symbol that others see, and remove what it never reaches."""
    for index, value in enumerate((*module.functions, *module.global_variables)):
        if not value.is_declaration and value.name != entry:
            value.linkage = "internal"
            # numba's names count what the process has compiled before.
            value.name = f"part{index}"
    module.get_function(entry).name = ENTRY
    passes = llvm.create_new_module_pass_manager()
    passes.add_ipsccp_pass()
    passes.add_simplify_cfg_pass()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options()))


def _target_machine() -> llvm.TargetMachine:
    """This processor, with numba's own options for code that runs where it is compiled."""
    cpu = host_cpu()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    return target.create_target_machine(
        cpu=cpu.name,
        features=cpu.features,
        opt=_OPTIMISATION_LEVEL,
        reloc="static" if target.name.startswith("x86") else "default",
        codemodel="jitdefault",
        jit=True,
    )
