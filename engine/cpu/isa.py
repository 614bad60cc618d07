"""What the compiled kernels need to know about this processor."""

from __future__ import annotations

import functools
import platform
from dataclasses import dataclass
from typing import Literal

import llvmlite.binding
from numba.core import config

DotProduct = Literal["vnni512", "vnni256", "maddubs", "usdot", "widening"]


@dataclass(frozen=True, slots=True)
class Isa:
    """`dot_product`: how eight-bit products are summed; `tile_rows`: rows of a matrix tile that registers can hold."""

    dot_product: DotProduct
    tile_rows: int


def choose_isa(machine: str, features: frozenset[str]) -> Isa:
    """The best way for a processor, `machine` as of `platform.machine()`, with these LLVM features.

    "widening" multiplies 16-bit numbers, in plain LLVM, and serves every processor.
    """
    if machine in ("x86_64", "AMD64"):
        if {"avx512vnni", "avx512f", "avx512bw"} <= features:
            return Isa("vnni512", 16)
        if "avxvnni" in features or {"avx512vnni", "avx512vl"} <= features:
            return Isa("vnni256", 4)
        return Isa("maddubs" if "avx2" in features else "widening", 4)
    return Isa("usdot" if "i8mm" in features else "widening", 4)


@functools.cache
def host_isa() -> Isa:
    """The way of the processor numba compiles for, which `NUMBA_CPU_FEATURES` may have narrowed."""
    if config.CPU_FEATURES is not None:
        names = {entry[1:] for entry in config.CPU_FEATURES.split(",") if entry.startswith("+")}
    else:
        names = {name for name, present in llvmlite.binding.get_host_cpu_features().items() if present}
    return choose_isa(platform.machine(), frozenset(names))
