"""The exact GELU, x · Φ(x) with Φ the normal distribution (Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415).

For a = |x|, x · Φ(x) is max(x, 0) - a · (1 - Φ(a)), and the binary logarithm of the tail 1 - Φ(a) is so smooth that a
polynomial gives it: no division and no erf.  Emitted by `engine.cpu.split_tile` and `engine.cpu.float_kernels`.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.polynomial import Chebyshev, Polynomial

from engine.cpu.attention_tile import exp2, larger
from engine.cpu.lanes import Emitter, Lanes

_LARGEST = 5.5
"""Beyond it the tail is taken as here: 2e-8, which moves the result by 1e-7."""
_DEGREE = 9
"""More brings nothing: the result is within 2.4e-7 of the exact one, half a unit in the last place at 4."""


@functools.cache
def _coefficients() -> tuple[float, ...]:
    """Of the polynomial in a that equals log2(1 - Φ(a)) at the Chebyshev nodes of [0, _LARGEST], lowest first."""

    def log_tail(places: np.ndarray) -> np.ndarray:
        return np.array([math.log2(math.erfc(place / math.sqrt(2)) / 2) for place in places])

    fitted = Chebyshev.interpolate(log_tail, _DEGREE, domain=[0.0, _LARGEST])
    return tuple(fitted.convert(kind=Polynomial).coef)


def gelu(emit: Emitter, values: Lanes) -> Lanes:
    """x · Φ(x) of each lane, to an absolute 1.5e-7 beyond its own rounding; NaN stays NaN."""
    size = values.magnitude()
    confined = _smaller(emit, size, emit.floats(_LARGEST))
    coefficients = _coefficients()
    exponent = emit.floats(coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        exponent = exponent * confined + emit.floats(coefficient)
    tail = exp2(emit, exponent)
    return larger(emit, emit.floats(0.0), values) - confined * tail


def _smaller(emit: Emitter, left: Lanes, right: Lanes) -> Lanes:
    """The smaller of two lanes; the right one's if the left is NaN."""
    is_smaller = emit.builder.fcmp_ordered("<", left.value, right.value)
    return Lanes(emit, emit.builder.select(is_smaller, left.value, right.value))
