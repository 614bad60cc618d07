"""Merging the chunks of a context, and moving rows in and out of tiles.

A chunk's state is what `engine.cpu.attention_tile` leaves: weights are relative to the chunk's own peak.
Used by `engine.cpu.attention_kernels`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.cpu.attention_tile import STATISTICS_BYTES, VECTOR_BYTES, exp2, larger
from engine.cpu.lanes import Emitter, Loop


@intrinsic
def merge_states(typing_context: Any, total: Any, chunk: Any, num_rows: Any, row_vectors: Any) -> tuple[Any, Any]:
    """Merge the state of the next chunk into that of the chunks before; rows have 16 · `row_vectors` columns.

    Both are put relative to the larger peak first (Dao et al. 2022, https://arxiv.org/abs/2205.14135).  `chunk` is
    overwritten.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        emit = Emitter(builder)
        target, added, count, num_vectors = arguments
        peaks, added_peaks = emit.load_floats(target), emit.load_floats(added)
        highest = larger(emit, peaks, added_peaks)
        factors, added_factors = exp2(emit, peaks - highest), exp2(emit, added_peaks - highest)
        sums, added_sums = (emit.load_floats(state, VECTOR_BYTES) for state in (target, added))
        emit.store_floats(highest, target)
        emit.store_floats(sums * factors + added_sums * added_factors, target, VECTOR_BYTES)
        # The factors of single rows are read from memory, where the chunk's statistics were.
        emit.store_floats(factors, added)
        emit.store_floats(added_factors, added, VECTOR_BYTES)
        rows = Loop(emit, count, [added, emit.at(target, STATISTICS_BYTES), emit.at(added, STATISTICS_BYTES)])
        statistics, place, added_place = rows.values
        factor, added_factor = emit.load_splat(statistics, 0), emit.load_splat(statistics, VECTOR_BYTES)
        vectors = Loop(emit, num_vectors, [place, added_place])
        place, added_place = vectors.values
        value = emit.load_floats(place) * factor + emit.load_floats(added_place) * added_factor
        emit.store_floats(value, place)
        ends = vectors.close([emit.at(place, VECTOR_BYTES), emit.at(added_place, VECTOR_BYTES)])
        rows.close([emit.at(statistics, 4), *ends])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def scale_row(typing_context: Any, source: Any, target: Any, factor: Any, num_vectors: Any) -> tuple[Any, Any]:
    """Write source · factor to `target`, 16 · `num_vectors` float32."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        emit = Emitter(builder)
        loop = Loop(emit, arguments[3], [arguments[0], arguments[1]])
        place, target_place = loop.values
        emit.store_floats(emit.load_floats(place) * emit.splat(arguments[2]), target_place)
        loop.close([emit.at(place, VECTOR_BYTES), emit.at(target_place, VECTOR_BYTES)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.int64), generate
