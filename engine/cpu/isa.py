"""What the compiled kernels need to know about this processor."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

_CPU_INFO = Path("/proc/cpuinfo")
_IDENTIFYING = ("vendor_id", "cpu family", "model", "stepping", "model name", "flags")
_FLAGS = {
    "avx2": "avx2",
    "fma": "fma",
    "f16c": "f16c",
    "avx512f": "avx512f",
    "avx512bw": "avx512bw",
    "avx512vnni": "avx512_vnni",
    "avxvnni": "avx_vnni",
    "amx-tile": "amx_tile",
    "amx-int8": "amx_int8",
    "amx-bf16": "amx_bf16",
}
"""LLVM's names of the features that `choose_isa` asks for, and Linux's."""

# Of Linux on x86-64: https://docs.kernel.org/arch/x86/xstate.html
_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA = 158, 0x1023, 18

DotProduct = Literal["vnni512", "vnni256", "maddubs", "usdot", "widening"]


@dataclass(frozen=True, slots=True)
class Isa:
    """How this processor multiplies.

    `dot_product`: how eight-bit products are summed; `tile_rows`: rows of a matrix tile that registers can hold;
    `has_amx` and `has_amx_floats`: whether there is a unit that multiplies whole tiles, of eight-bit numbers and of
    bfloat16.
    """

    dot_product: DotProduct
    tile_rows: int
    has_amx: bool = False
    has_amx_floats: bool = False


def choose_isa(machine: str, features: frozenset[str]) -> Isa | None:
    """The best way for a processor, `machine` as of `platform.machine()`, with these LLVM features.

    "widening" multiplies 16-bit numbers, in plain LLVM, and needs nothing.  None: the processor cannot convert
    float16, as x86 before AVX2, so compiled kernels do not run on it.
    """
    if machine in ("aarch64", "arm64", "ARM64"):
        return Isa("usdot" if "i8mm" in features else "widening", 4)
    if machine not in ("x86_64", "AMD64") or not {"avx2", "fma", "f16c"} <= features:
        return None
    if {"avx512vnni", "avx512f", "avx512bw"} <= features:
        has_amx, has_amx_floats = ({"amx-tile", numbers} <= features for numbers in ("amx-int8", "amx-bf16"))
        return Isa("vnni512", 16, has_amx=has_amx, has_amx_floats=has_amx_floats)
    return Isa("vnni256" if "avxvnni" in features else "maddubs", 4)


@dataclass(frozen=True, slots=True)
class HostCpu:
    """What code is compiled for, in LLVM's words; `features` is "+present,-absent,..."."""

    name: str
    features: str


@functools.cache
def host_cpu() -> HostCpu:
    """This processor, or the one that `NUMBA_CPU_NAME` and `NUMBA_CPU_FEATURES` put in its place, as numba has it.

    Loads LLVM, for which a start whose kernels are all on disk has no other use.
    """
    import llvmlite.binding

    features = _chosen_features()
    if features is None:
        features = llvmlite.binding.get_host_cpu_features().flatten()
    return HostCpu(_chosen_name() or llvmlite.binding.get_host_cpu_name(), features)


@functools.cache
def host_isa() -> Isa | None:
    """The way of the processor that kernels are compiled for.

    Where it has AMX, the process may use it from now on, unless the system refuses.
    """
    isa = choose_isa(platform.machine(), _features())
    if isa is not None and (isa.has_amx or isa.has_amx_floats) and not _allow_amx():
        return replace(isa, has_amx=False, has_amx_floats=False)
    return isa


def _features() -> frozenset[str]:
    """Those in LLVM's words that kernels may use; of Linux's own list only what `choose_isa` asks for."""
    features = _chosen_features()
    if features is None:
        flags = _cpu_info().get("flags")
        if flags is not None:
            return frozenset(feature for feature, flag in _FLAGS.items() if flag in flags.split())
        features = host_cpu().features
    return frozenset(entry[1:] for entry in features.split(",") if entry.startswith("+"))


def _allow_amx() -> bool:
    """Ask Linux for the tile registers, which a process must before its first use of them; whether it may."""
    if not sys.platform.startswith("linux"):
        return False
    system_call = ctypes.CDLL(None).syscall
    return bool(system_call(_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA) == 0)


@functools.cache
def describe_processor() -> str:
    """The processor that kernels are compiled for, in words that no other shares; they are the system's or LLVM's."""
    info = _cpu_info()
    own = [info[field] for field in _IDENTIFYING if field in info] or [host_cpu().name, host_cpu().features]
    return "\n".join((sys.platform, platform.machine(), *own, str(_chosen_name()), str(_chosen_features())))


def _chosen_name() -> str | None:
    return os.environ.get("NUMBA_CPU_NAME")


def _chosen_features() -> str | None:
    name = _chosen_name()
    return os.environ.get("NUMBA_CPU_FEATURES", "" if name and name.lower() == "generic" else None)


@functools.cache
def _cpu_info() -> Mapping[str, str]:
    """What Linux says of the first x86 processor; empty elsewhere."""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return {}
    try:
        first, _, _ = _CPU_INFO.read_text().partition("\n\n")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
