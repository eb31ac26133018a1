"""Functions of one or two floats that Triton's core lacks, as formulas that also run in its interpreter.

Each docstring names the source of its formula and the largest error measured against mpmath, relative to the
exact value, in units of the dtype's eps (float32: 1.2e-7, float64: 2.2e-16). exp, log, sin and division are
then those of the interpreter; those of a GPU add their own errors. NaN and arguments outside of the domain
give NaN, as in torch.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from tritoncp.mods.translate.triton_helpers import expm1, log1p


@triton.jit
def sign_bits(x):
    """The bits of a float as a signed integer of its width: negative where the sign bit is set."""
    if x.dtype == tl.float64:
        return x.to(tl.int64, bitcast=True)
    else:
        return x.to(tl.int32, bitcast=True)


@triton.jit
def signbit(x):
    """Whether the sign bit is set, also of -0.0 and NaN."""
    return sign_bits(x) < 0


@triton.jit
def copysign(x, y):
    """x with the sign bit of y. Exact, also for zeros, infinities and NaN."""
    return tl.where(sign_bits(x) < 0, -x, x) * tl.where(sign_bits(y) < 0, -1.0, 1.0).to(x.dtype)


@triton.jit
def tan(x):
    """sin(x) / cos(x); 2 eps."""
    return tl.sin(x) / tl.cos(x)


@triton.jit
def atan(x):
    """Arctangent by Cephes' atanf.c and atan.c (Moshier): reduction to |x| < tan(pi/8), or 0.66; 2 eps."""
    a = tl.abs(x)
    large = a > 2.414213562373095
    if x.dtype == tl.float64:
        medium = a > 0.66
        t = tl.where(large, -1 / a, tl.where(medium, (a - 1) / (a + 1), a))
        z = t * t
        top = -8.750608600031904122785e-1 * z - 1.615753718733365076637e1
        top = ((top * z - 7.500855792314704667340e1) * z - 1.228866684490136173410e2) * z
        bottom = (z + 2.485846490142306297962e1) * z + 1.650270098316988542046e2
        bottom = (bottom * z + 4.328810604912902668951e2) * z + 4.853903996359136964868e2
        near = z * (top - 6.485021904942025371773e1) / (bottom * z + 1.945506571482613964425e2)
        near = (
            t * near
            + t
            + tl.where(large, 6.123233995736766e-17, tl.where(medium, 3.061616997868383e-17, 0.0))
        )
    else:
        medium = a > 0.4142135623730950
        t = tl.where(large, -1 / a, tl.where(medium, (a - 1) / (a + 1), a))
        z = t * t
        p = (8.05374449538e-2 * z - 1.38776856032e-1) * z + 1.99777106478e-1
        near = (p * z - 3.33329491539e-1) * z * t + t
    quarter = tl.full((), 0.7853981633974483, x.dtype)
    return copysign(near + tl.where(large, 2 * quarter, tl.where(medium, quarter, 0.0)), x)


@triton.jit
def asin(x):
    """atan(x / sqrt(1 - x^2)), with 1 - x^2 as (1 - x)(1 + x); 3 eps."""
    return atan(x / tl.sqrt((1 - x) * (1 + x)))


@triton.jit
def acos(x):
    """2 atan(sqrt((1 - x) / (1 + x))); 3 eps."""
    return 2 * atan(tl.sqrt((1 - x) / (1 + x)))


@triton.jit
def atan2(y, x):
    """The angle of (x, y) in [-pi, pi], with the signs of C's atan2 for zeros and infinities; 2 eps."""
    y, x = tl.broadcast(y, x)
    a, b = tl.abs(y), tl.abs(x)
    equal = (a == b) & ((a == 0) | (a == float("inf")))  # 0 / 0 and inf / inf
    ratio = tl.where(equal, tl.where(a == 0, 0.0, 1.0).to(x.dtype), a / tl.where(equal, 1.0, b).to(x.dtype))
    angle = atan(ratio)
    return copysign(tl.where(sign_bits(x) < 0, 3.141592653589793 - angle, angle), y)


@triton.jit
def sinh(x):
    """(e + e / (e + 1)) / 2 with e = expm1(|x|), as in fdlibm; above 20, exp(|x| / 2)^2 / 2; 4 eps."""
    a = tl.abs(x)
    e = expm1(tl.where(a > 20, 0.0, a).to(x.dtype))
    half = tl.exp(0.5 * a)
    return copysign(tl.where(a > 20, 0.5 * half * half, 0.5 * (e + e / (e + 1))), x)


@triton.jit
def cosh(x):
    """(h^2 + h^-2) / 2 with h = exp(|x| / 2), which does not overflow before the result; 3 eps."""
    half = tl.exp(0.5 * tl.abs(x))
    return 0.5 * half * half + 0.5 / half / half


@triton.jit
def asinh(x):
    """log1p(|x| + x^2 / (1 + sqrt(x^2 + 1))), as in fdlibm; above 1e9, log(|x|) + log(2); 4 eps."""
    a = tl.abs(x)
    large = a > 1e9
    b = tl.where(large, 1.0, a).to(x.dtype)
    near = log1p(b + b * b / (1 + tl.sqrt(b * b + 1)))
    return copysign(tl.where(large, tl.log(a) + 0.6931471805599453, near), x)


@triton.jit
def acosh(x):
    """log1p(t + sqrt(2 t + t^2)) with t = x - 1, as in fdlibm; above 1e9, log(x) + log(2); 4 eps."""
    large = x > 1e9
    t = tl.where(large, 1.0, x - 1).to(x.dtype)
    t = tl.where(t < 0, float("nan"), t).to(x.dtype)
    return tl.where(large, tl.log(x) + 0.6931471805599453, log1p(t + tl.sqrt(2 * t + t * t)))


@triton.jit
def atanh(x):
    """log1p(2 |x| / (1 - |x|)) / 2; 4 eps."""
    a = tl.abs(x)
    return copysign(0.5 * log1p(2 * a / (1 - a)), x)


@triton.jit
def fmax(a, b):
    """The larger operand; the other one where one is NaN."""
    return tl.where(a != a, b, tl.where(b != b, a, tl.where(a >= b, a, b)))


@triton.jit
def fmin(a, b):
    """The smaller operand; the other one where one is NaN."""
    return tl.where(a != a, b, tl.where(b != b, a, tl.where(a <= b, a, b)))
