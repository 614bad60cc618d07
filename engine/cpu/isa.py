"""What the compiled kernels need to know about this processor."""

from __future__ import annotations

import functools
import os
import platform
from dataclasses import dataclass
from typing import Literal

import llvmlite.binding

DotProduct = Literal["vnni512", "vnni256", "maddubs", "usdot", "widening"]


@dataclass(frozen=True, slots=True)
class Isa:
    """`dot_product`: how eight-bit products are summed; `tile_rows`: rows of a matrix tile that registers can hold."""

    dot_product: DotProduct
    tile_rows: int


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
        return Isa("vnni512", 16)
    return Isa("vnni256" if "avxvnni" in features else "maddubs", 4)


@dataclass(frozen=True, slots=True)
class HostCpu:
    """What code is compiled for, in LLVM's words; `features` is "+present,-absent,..."."""

    name: str
    features: str


@functools.cache
def host_cpu() -> HostCpu:
    """This processor, or the one that `NUMBA_CPU_NAME` and `NUMBA_CPU_FEATURES` put in its place, as numba has it."""
    name = os.environ.get("NUMBA_CPU_NAME")
    features = os.environ.get("NUMBA_CPU_FEATURES", "" if name and name.lower() == "generic" else None)
    if features is None:
        features = llvmlite.binding.get_host_cpu_features().flatten()
    return HostCpu(name or llvmlite.binding.get_host_cpu_name(), features)


@functools.cache
def host_isa() -> Isa | None:
    """The way of the processor that kernels are compiled for."""
    names = {entry[1:] for entry in host_cpu().features.split(",") if entry.startswith("+")}
    return choose_isa(platform.machine(), frozenset(names))
