"""IEEE arithmetic with exact rationals: numbers from their bits, and the bits of what they round to."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


class Format(NamedTuple):
    """A binary format: its width, bits of the exponent and of the fraction."""

    width: int
    exponent: int
    fraction: int

    @property
    def bias(self) -> int:
        return (1 << (self.exponent - 1)) - 1

    @property
    def infinity(self) -> int:
        return ((1 << self.exponent) - 1) << self.fraction

    def is_nan(self, bits: int) -> bool:
        return bits & ~self.sign_bit > self.infinity

    @property
    def sign_bit(self) -> int:
        return 1 << (self.width - 1)


FORMATS = {
    "f16": Format(16, 5, 10),
    "bf16": Format(16, 8, 7),
    "f32": Format(32, 8, 23),
    "f64": Format(64, 11, 52),
}


def value_of(bits: int, f: Format) -> Fraction | float:
    """A number, exactly, or an infinity or NaN as a float."""
    sign = -1 if bits & f.sign_bit else 1
    exponent, fraction = bits >> f.fraction & ((1 << f.exponent) - 1), bits & ((1 << f.fraction) - 1)
    if exponent == (1 << f.exponent) - 1:
        return math.nan if fraction else sign * math.inf
    scale = max(exponent, 1) - f.bias - f.fraction
    return sign * Fraction(fraction + ((exponent > 0) << f.fraction)) * Fraction(2) ** scale


def bits_of(x: Fraction, f: Format, negative_zero: bool = False) -> int:
    """The nearest number of a format, ties to even."""
    if x == 0:
        return f.sign_bit if negative_zero else 0
    sign, x = (f.sign_bit, -x) if x < 0 else (0, x)
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    if Fraction(2) ** exponent > x:
        exponent -= 1
    scale = max(exponent, 1 - f.bias) - f.fraction
    quotient = x / Fraction(2) ** scale
    whole = quotient.numerator // quotient.denominator
    rest = quotient - whole
    whole += rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole & 1)
    if whole == 0:
        return sign
    # A fraction that carries into the exponent is the next number; past the largest one it is infinity.
    biased = scale + f.fraction + f.bias if whole >> f.fraction else 0
    bits = whole if biased == 0 else ((biased - 1) << f.fraction) + whole
    return sign | min(int(bits), f.infinity)


def samples(f: Format, count: int, seed: int) -> list[int]:
    """Bits of numbers: of all magnitudes, near one another, with few bits set, subnormal, special."""
    rng = np.random.default_rng(seed)
    special = [0, 1, f.infinity - 1, f.infinity, f.infinity | 1 << (f.fraction - 1), f.bias << f.fraction]
    special += [1 << f.fraction, (1 << f.fraction) - 1, (1 << f.fraction - 1)]
    out = [x | s for x in special for s in (0, f.sign_bit)]
    for _ in range(count):
        kind = rng.integers(4)
        exponent = int(rng.integers(1 << f.exponent) if kind == 0 else f.bias + rng.integers(-4, 5))
        exponent = int(rng.integers(3)) if kind == 1 else exponent
        fraction = int(rng.integers(1 << f.fraction))
        if kind >= 2:  # few bits set, so that sums and products hit ties
            fraction &= int(rng.integers(1 << f.fraction)) & int(rng.integers(1 << f.fraction))
        out.append(int(rng.integers(2)) << (f.width - 1) | exponent << f.fraction | fraction)
    return out
