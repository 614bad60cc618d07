"""`WeightRecord`: what kernels read of one group of a tile of weights (`engine.layers.packed_weight`).

Used by `engine.cpu.matrix_tile` and `engine.cpu.amx_tile`; `engine.cpu.row_kernels` reads single codes.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from engine.cpu.activations import GROUP, LANES
from engine.cpu.lanes import Emitter, Lanes

QUADS = GROUP // 4
"""Vectors of codes in a group, each four inputs of sixteen outputs."""

PREFETCH_BYTES = 4096
"""How far ahead weights are fetched: reading them is what a decode step waits for, and the processor's own
prefetcher reaches two thirds of what this does (docs/log.md, 2026-11-21)."""
_LINE_BYTES = 64
_VECTOR_BYTES = 4 * LANES
_NUMBER_BYTES = 2


def code_bytes(bits: int) -> int:
    """What the codes of a record take."""
    return LANES * GROUP * bits // 8


def weight_bytes(bits: int, is_symmetric: bool) -> int:
    """What a record takes: codes, scales, and minimums if there are any."""
    return code_bytes(bits) + LANES * _NUMBER_BYTES * (1 if is_symmetric else 2)


@dataclass(frozen=True, slots=True)
class WeightRecord:
    """The record at `address`, to be read by emitted code."""

    emit: Emitter
    bits: int
    is_symmetric: bool
    address: ir.Value

    @property
    def next_address(self) -> ir.Value:
        """Of the next group's record."""
        return self.emit.at(self.address, weight_bytes(self.bits, self.is_symmetric))

    def prefetch(self) -> None:
        """Fetch what lies ahead of the record."""
        for line in range(0, weight_bytes(self.bits, self.is_symmetric), _LINE_BYTES):
            self.emit.prefetch(self.address, PREFETCH_BYTES + line)

    def codes(self) -> list[Lanes]:
        """Four unsigned bytes per lane: one vector for each four inputs."""
        stored = [self.emit.load_ints(self.address, place) for place in range(0, code_bytes(self.bits), _VECTOR_BYTES)]
        if self.bits == 8:
            return stored
        return [both & 0x0F0F0F0F for both in stored] + [(both >> 4) & 0x0F0F0F0F for both in stored]

    def scales(self) -> Lanes:
        return self.emit.load_halves(self.address, code_bytes(self.bits))

    def minimums(self) -> Lanes:
        assert not self.is_symmetric
        return self.emit.load_halves(self.address, code_bytes(self.bits) + LANES * _NUMBER_BYTES)
