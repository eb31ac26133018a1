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


@triton.jit
def erfc(x):
    """1 - erf(x), in float64: by Cephes' ndtr.c for |x| >= 1, where exp(-x^2) is split so that x^2 has no
    rounding; float32: 1 eps, float64: 8 eps."""
    z = x.to(tl.float64)
    a = tl.where(tl.abs(z) > 40, 40.0, tl.abs(z))
    p = (2.46196981473530512524e-10 * a + 5.64189564831068821977e-1) * a + 7.46321056442269912687
    p = (p * a + 4.86371970985681366614e1) * a + 1.96520832956077098242e2
    p = (p * a + 5.26445194995477358631e2) * a + 9.34528527171957607540e2
    p = (p * a + 1.02755188689515710272e3) * a + 5.57535335369399327526e2
    q = (a + 1.32281951154744992508e1) * a + 8.67072140885989742329e1
    q = (q * a + 3.54937778887819891062e2) * a + 9.75708501743205489753e2
    q = (q * a + 1.82390916687909736289e3) * a + 2.24633760818710981792e3
    q = (q * a + 1.65666309194161350182e3) * a + 5.57535340817727675546e2
    r = (5.64189583547755073984e-1 * a + 1.27536670759978104416) * a + 5.01905042251180477414
    r = ((r * a + 6.16021097993053585195) * a + 7.40974269950448939160) * a + 2.97886665372100240670
    s = (a + 2.26052863220117276590) * a + 9.39603524938001434673
    s = (s * a + 1.20489539808096656605e1) * a + 1.70814450747565897222e1
    s = (s * a + 9.60896809063285878198) * a + 3.36907645100081516050
    short = a.to(tl.float32).to(tl.float64)
    power = tl.exp(-short * short) * tl.exp((short - a) * (short + a))
    tail = power * tl.where(a < 8, p / q, r / s)
    out = tl.where(a < 1, 1 - tl.erf(z), tl.where(z < 0, 2 - tail, tail))
    return out.to(x.dtype)


@triton.jit
def erfinv(x):
    """The inverse of erf, by the polynomials in w = -log(1 - x^2) of M. Giles, "Approximating the erfinv
    function" (GPU Computing Gems, 2010); float32: 5 eps, float64: 20 eps."""
    w = -tl.log((1 - x) * (1 + x))
    if x.dtype == tl.float64:
        p = erfinv_factor(w)
    else:
        c = w - 2.5
        p = (2.81022636e-08 * c + 3.43273939e-07) * c - 3.5233877e-06
        p = ((p * c - 4.39150654e-06) * c + 0.00021858087) * c - 0.00125372503
        p = ((p * c - 0.00417768164) * c + 0.246640727) * c + 1.50140941
        t = tl.sqrt(tl.where(w < 5, 5.0, w).to(x.dtype)) - 3
        r = (-0.000200214257 * t + 0.000100950558) * t + 0.00134934322
        r = ((r * t - 0.00367342844) * t + 0.00573950773) * t - 0.0076224613
        r = ((r * t + 0.00943887047) * t + 1.00167406) * t + 2.83297682
        p = tl.where(w < 5, p, r)
    edge = tl.where(x > 0, float("inf"), float("-inf")).to(x.dtype)
    return tl.where(tl.abs(x) == 1, edge, p * x)


@triton.jit
def erfinv_factor(w):
    """erfinv(x) / x in float64 from w = -log(1 - x^2): the double-precision polynomials of Giles."""
    c = tl.where(w < 6.25, w, 6.25) - 3.125
    p = (-3.6444120640178196996e-21 * c - 1.685059138182016589e-19) * c + 1.2858480715256400167e-18
    p = ((p * c + 1.115787767802518096e-17) * c - 1.333171662854620906e-16) * c + 2.0972767875968561637e-17
    p = ((p * c + 6.6376381343583238325e-15) * c - 4.0545662729752068639e-14) * c - 8.1519341976054721522e-14
    p = ((p * c + 2.6335093153082322977e-12) * c - 1.2975133253453532498e-11) * c - 5.4154120542946279317e-11
    p = ((p * c + 1.051212273321532285e-09) * c - 4.1126339803469836976e-09) * c - 2.9070369957882005086e-08
    p = ((p * c + 4.2347877827932403518e-07) * c - 1.3654692000834678645e-06) * c - 1.3882523362786468719e-05
    p = ((p * c + 0.0001867342080340571352) * c - 0.00074070253416626697512) * c - 0.0060336708714301490533
    p = (p * c + 0.24015818242558961693) * c + 1.6536545626831027356
    m = tl.sqrt(tl.where(w < 6.25, 6.25, w)) - 3.25
    q = (2.2137376921775787049e-09 * m + 9.0756561938885390979e-08) * m - 2.7517406297064545428e-07
    q = ((q * m + 1.8239629214389227755e-08) * m + 1.5027403968909827627e-06) * m - 4.013867526981545969e-06
    q = ((q * m + 2.9234449089955446044e-06) * m + 1.2475304481671778723e-05) * m - 4.7318229009055733981e-05
    q = ((q * m + 6.8284851459573175448e-05) * m + 2.4031110387097893999e-05) * m - 0.0003550375203628474796
    q = ((q * m + 0.00095328937973738049703) * m - 0.0016882755560235047313) * m + 0.0024914420961078508066
    q = ((q * m - 0.0037512085075692412107) * m + 0.005370914553590063617) * m + 1.0052589676941592334
    q = q * m + 3.0838856104922207635
    t = m - 1.75
    r = (-2.7109920616438573243e-11 * t - 2.5556418169965252055e-10) * t + 1.5076572693500548083e-09
    r = ((r * t - 3.7894654401267369937e-09) * t + 7.6157012080783393804e-09) * t - 1.4960026627149240478e-08
    r = ((r * t + 2.9147953450901080826e-08) * t - 6.7711997758452339498e-08) * t + 2.2900482228026654717e-07
    r = ((r * t - 9.9298272942317002539e-07) * t + 4.5260625972231537039e-06) * t - 1.9681778105531670567e-05
    r = ((r * t + 7.5995277030017761139e-05) * t - 0.00021503011930044477347) * t - 0.00013871931833623122026
    r = (r * t + 1.0103004648645343977) * t + 4.8499064014085844221
    return tl.where(w < 6.25, p, tl.where(w < 16, q, r)) + w * 0


@triton.jit
def lgamma(x):
    """log |gamma(x)|, in float64, by Cephes' gamma.c and the reflection formula for negative x.

    float32: 1 eps; float64: 20 eps, and near its zeros 1e-14 (1 + |x|) absolutely.
    """
    z = x.to(tl.float64)
    a = tl.abs(z)
    large = a >= 13
    u, product = tl.where(large, 2.0, a), tl.where(large, 1.0, 1.0).to(tl.float64)
    for _ in tl.static_range(10):
        down = u >= 3
        u = tl.where(down, u - 1, u)
        product = tl.where(down, product * u, product)
    for _ in tl.static_range(2):
        up = u < 2
        product = tl.where(up, product / u, product)
        u = tl.where(up, u + 1, u)
    v = tl.where((a >= 1) & (a < 2), a - 1, tl.where(a < 1, a, u - 2))  # u - 2 without its rounding
    top = (-1.37825152569120859100e3 * v - 3.88016315134637840924e4) * v - 3.31612992738871184744e5
    top = ((top * v - 1.16237097492762307383e6) * v - 1.72173700820839662146e6) * v - 8.53555664245765465627e5
    bottom = ((v - 3.51815701436523470549e2) * v - 1.70642106651881159223e4) * v - 2.20528590553854454839e5
    bottom = (bottom * v - 1.13933444367982507207e6) * v - 2.53252307177582951285e6
    near = tl.log(product) + v * top / (bottom * v - 2.01889141433532773231e6)
    b = tl.where(large & (a < float("inf")), a, 13.0)
    s = 1 / (b * b)
    series = (8.11614167470508450300e-4 * s - 5.95061904284301438324e-4) * s + 7.93650340457716943945e-4
    series = (series * s - 2.77777777777730099687e-3) * s + 8.33333333333331927722e-2
    far = (b - 0.5) * tl.log(b) - b + 0.91893853320467274178 + series / b
    out = tl.where(large, far, near)
    sine = tl.abs(tl.sin(3.141592653589793 * fraction(z)))
    out = tl.where(z < 0, tl.log(3.141592653589793 / sine) - tl.log(a) - out, out)
    out = tl.where((a == float("inf")) | (a == 0), float("inf"), out)
    return out.to(x.dtype)


@triton.jit
def fraction(z):
    """z minus the nearest integer; 0 for infinities."""
    z = tl.where(tl.abs(z) < 4503599627370496.0, z, 0.0)
    return z - tl.floor(z + 0.5)


@triton.jit
def digamma(x):
    """The derivative of lgamma, in float64, by Cephes' psi.c: recurrence to x >= 10, asymptotic series, and
    the reflection formula for negative x. float32: 1 eps; float64: 1e-13 (1 + |value|) absolutely."""
    z = x.to(tl.float64)
    u = tl.where(z > 0, z, 1 - z)
    total = u * 0
    for _ in tl.static_range(10):
        low = u < 10
        total = tl.where(low, total + 1 / u, total)
        u = tl.where(low, u + 1, u)
    s = 1 / (u * u)
    p = (8.33333333333333333333e-2 * s - 2.10927960927960927961e-2) * s + 7.57575757575757575758e-3
    p = ((p * s - 4.16666666666666666667e-3) * s + 3.96825396825396825397e-3) * s - 8.33333333333333333333e-3
    out = tl.log(u) - 0.5 / u - (p * s + 8.33333333333333333333e-2) * s - total
    angle = 3.141592653589793 * fraction(z)
    mirrored = out - 3.141592653589793 * tl.cos(angle) / tl.sin(angle)
    mirrored = tl.where((angle == 0) | (z == float("-inf")), float("nan"), mirrored)
    out = tl.where(z > 0, out, mirrored)
    out = tl.where(z == 0, -copysign(z * 0 + float("inf"), z), tl.where(z != z, z, out))
    return out.to(x.dtype)
