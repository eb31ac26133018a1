"""Integer and bit instructions against Python's integers, and conversions against tables of bits."""

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from tests.executor.support.ptx import Array, module, run_instruction, run_module
from tests.executor.support.rounding import FORMATS, bits_of, samples, value_of

Function = Callable[..., int]


def numbers(bits: int, count: int, seed: int) -> list[int]:
    """Unsigned numbers: of all sizes, and the ends of both ranges."""
    rng = np.random.default_rng(seed)
    ends = [0, 1, 2, (1 << bits) - 1, 1 << (bits - 1), (1 << (bits - 1)) - 1, (1 << (bits - 1)) + 1]
    drawn = [
        int.from_bytes(rng.bytes(8), "little") >> (64 - int(n)) for n in rng.integers(1, bits + 1, count)
    ]
    return [int(x) for x in rng.permutation(np.array(3 * ends + drawn, dtype="u8"))]


def signed(x: int, bits: int) -> int:
    return x - (1 << bits) if x >> (bits - 1) else x


def check(opcode: str, function: Function, widths: tuple[int, ...], out: int, is_signed: bool) -> None:
    """Compare an instruction with a function of Python's integers, modulo 2^out."""
    columns = [numbers(w, 100, seed) for seed, w in enumerate(widths)]
    text = f"{opcode} {{d}}, " + ", ".join(f"{{{x}}}" for x in "abce"[: len(widths)]) + ";"
    arrays = [np.array(c, f"u{w // 8}") for c, w in zip(columns, widths)]
    got = run_instruction(text, f"u{out // 8}", *arrays)
    rows = zip(*columns, strict=True)
    if is_signed:
        rows = (tuple(signed(x, w) for x, w in zip(row, widths)) for row in rows)  # type: ignore[assignment]
    want = [function(*row) % (1 << out) for row in rows]
    assert got.tolist() == want


def quotient(a: int, b: int) -> int:
    """Towards zero; all bits set where the divisor is zero."""
    return -1 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


@pytest.mark.sample(25)
@pytest.mark.parametrize("bits", [16, 32, 64])
@pytest.mark.parametrize("sign", ["u", "s"])
@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("add", lambda a, b: a + b),
        ("sub", lambda a, b: a - b),
        ("mul.lo", lambda a, b: a * b),
        ("min", min),
        ("max", max),
        ("div", quotient),
        ("rem", lambda a, b: a if b == 0 else a - quotient(a, b) * b),
    ],
)
def test_two_operands(name: str, function: Function, sign: str, bits: int) -> None:
    check(f"{name}.{sign}{bits}", function, (bits, bits), bits, sign == "s")


@pytest.mark.parametrize("sign", ["u", "s"])
@pytest.mark.parametrize(("name", "function"), [("add", lambda a, b: a + b), ("min", min), ("max", max)])
def test_pairs_of_16_bits(name: str, function: Function, sign: str) -> None:
    def of_pairs(a: int, b: int) -> int:
        halves = [(x & 0xFFFF, x >> 16) for x in (a, b)]
        if sign == "s":
            halves = [(signed(low, 16), signed(high, 16)) for low, high in halves]
        low, high = (function(x, y) & 0xFFFF for x, y in zip(*halves, strict=True))
        return low | high << 16

    check(f"{name}.{sign}16x2", of_pairs, (32, 32), 32, False)


@pytest.mark.parametrize("sign", ["u", "s"])
@pytest.mark.parametrize("bits", [16, 32, 64])
def test_products(sign: str, bits: int) -> None:
    is_signed = sign == "s"
    check(f"mul.hi.{sign}{bits}", lambda a, b: a * b >> bits, (bits, bits), bits, is_signed)
    check(f"mad.lo.{sign}{bits}", lambda a, b, c: a * b + c, (bits, bits, bits), bits, is_signed)
    check(f"mad.hi.{sign}{bits}", lambda a, b, c: (a * b >> bits) + c, (bits, bits, bits), bits, is_signed)
    if bits < 64:
        check(f"mul.wide.{sign}{bits}", lambda a, b: a * b, (bits, bits), 2 * bits, is_signed)
        widths = bits, bits, 2 * bits
        check(f"mad.wide.{sign}{bits}", lambda a, b, c: a * b + c, widths, 2 * bits, is_signed)


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_shifts(bits: int) -> None:
    """A count of the width or more leaves zero, or the sign."""
    for opcode, function, is_signed in (
        (f"shl.b{bits}", lambda a, n: a << min(n, bits), False),
        (f"shr.u{bits}", lambda a, n: a >> min(n, bits), False),
        (f"shr.s{bits}", lambda a, n: signed(a, bits) >> min(n, bits), False),
    ):
        check(opcode, lambda a, n, f=function: f(a, n), (bits, 32), bits, is_signed)


def field(a: int, p: int, n: int, bits: int, is_signed: bool) -> int:
    p, n = p & 255, n & 255
    sign = a >> min(p + n - 1, bits - 1) & 1 if n else 0
    value = sum(
        (a >> k if k < bits else sign * is_signed) & 1 and 1 << j
        for j, k in enumerate(range(p, p + min(n, bits)))
    )
    if is_signed and sign:
        value |= ~((1 << min(n, bits)) - 1)
    return value


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("sign", ["u", "s"])
def test_fields_of_bits(sign: str, bits: int) -> None:
    rng = np.random.default_rng(0)
    a = np.array(numbers(bits, 200, 0), f"u{bits // 8}")
    p, n = (rng.integers(0, 80, len(a), dtype="u4") for _ in range(2))
    got = run_instruction(f"bfe.{sign}{bits} {{d}}, {{a}}, {{b}}, {{c}};", f"u{bits // 8}", a, p, n)
    rows = zip(a.tolist(), p.tolist(), n.tolist(), strict=True)
    assert got.tolist() == [field(x, i, j, bits, sign == "s") % (1 << bits) for x, i, j in rows]


def test_inserted_fields() -> None:
    a = np.array([0x12345678] * 4, "u4")
    text = "bfi.b32 {d}, {b}, {a}, {c}, 8;"
    got = run_instruction(text, "u4", a, np.array([0xFF] * 4, "u4"), np.array([0, 4, 28, 40], "u4"))
    assert [hex(x) for x in got.tolist()] == ["0x123456ff", "0x12345ff8", "0xf2345678", "0x12345678"]


@pytest.mark.parametrize(
    ("text", "function"),
    [
        ("popc.b32 {d}, {a};", lambda a: a.bit_count()),
        ("clz.b32 {d}, {a};", lambda a: 32 - a.bit_length()),
        ("brev.b32 {d}, {a};", lambda a: int(f"{a:032b}"[::-1], 2)),
        ("bfind.u32 {d}, {a};", lambda a: a.bit_length() - 1),
        ("not.b32 {d}, {a};", lambda a: ~a),
        ("abs.s32 {d}, {a};", lambda a: abs(signed(a, 32))),
        ("neg.s32 {d}, {a};", lambda a: -a),
        ("min.relu.s32 {d}, {a}, 5;", lambda a: max(0, min(signed(a, 32), 5))),
        (
            "shf.l.wrap.b32 {d}, {a}, 0x80000001, 36;",
            lambda a: (0x80000001 << 4) | a >> 28,
        ),
        ("shf.r.clamp.b32 {d}, {a}, 7, 99;", lambda a: 7),
        (
            "prmt.b32 {d}, {a}, 0x44332211, 0x8354;",
            lambda a: (0xFF if a >> 7 & 1 else 0) << 24 | (a >> 24) << 16 | 0x2211,
        ),
        ("lop3.b32 {d}, {a}, 0x0F0F0F0F, 0x00FF00FF, 0xCA;", lambda a: (a & 0x0F0F0F0F) | (~a & 0x00FF00FF)),
    ],
)
def test_bits(text: str, function: Function) -> None:
    a = numbers(32, 200, 0)
    got = run_instruction(text, "u4", np.array(a, "u4"))
    assert got.tolist() == [function(x) % (1 << 32) for x in a]


def test_carries_make_sums_and_products_of_128_bits() -> None:
    lines = "ld.param.b64 %d1, [p0]; ld.param.b64 %d2, [p1]; mov.u32 %r1, %tid.x;\n"
    lines += "mad.wide.u32 %d3, %r1, 32, %d1; mad.wide.u32 %d4, %r1, 64, %d2;\n"
    lines += "ld.global.v2.b64 {%d5, %d6}, [%d3]; ld.global.v2.b64 {%d7, %d8}, [%d3+16];\n"
    lines += "add.cc.u64 %d10, %d5, %d7; addc.u64 %d11, %d6, %d8; st.global.v2.b64 [%d4], {%d10, %d11};\n"
    lines += "sub.cc.u64 %d10, %d5, %d7; subc.u64 %d11, %d6, %d8; st.global.v2.b64 [%d4+16], {%d10, %d11};\n"
    lines += "mad.lo.cc.u64 %d10, %d5, %d7, %d6; madc.hi.u64 %d11, %d5, %d7, %d8;\n"
    lines += "st.global.v2.b64 [%d4+32], {%d10, %d11};\n"
    lines += "mad.lo.cc.u64 %d10, %d5, %d7, %d6; madc.hi.cc.u64 %d11, %d5, %d7, %d8;\n"
    lines += "addc.u64 %d11, %d11, 0;\n"
    lines += "st.global.v2.b64 [%d4+48], {%d10, %d11}; ret;"
    x = np.array(numbers(64, 107, 1)[:128], "u8").reshape(32, 4)
    out = np.zeros((32, 8), "u8")
    assert not run_module(module(lines, 2), x, out)
    for (a0, a1, b0, b1), row in zip(x.tolist(), out.tolist(), strict=True):
        a, b, whole = a0 | a1 << 64, b0 | b1 << 64, 1 << 128
        product = a0 * b0 + a1 + (b1 << 64)
        want = [
            (a + b) % whole,
            (a - b) % whole,
            product % whole,
            (product + (product // whole << 64)) % whole,
        ]
        assert [row[n] | row[n + 1] << 64 for n in (0, 2, 4, 6)] == want


ORDERS: dict[str, Callable[[float, float], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


@pytest.mark.parametrize("order", ORDERS)
def test_comparisons_with_nan(order: str) -> None:
    """An ordered relation is false for NaN, an unordered one true."""
    values = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan]
    a, b = (np.array(x, "f4").reshape(-1) for x in np.meshgrid(values, values))
    lost = np.isnan(a) | np.isnan(b)
    want = np.array([ORDERS[order](x, y) for x, y in zip(a, b)])
    for suffix, of_nan in (("", False), ("u", True)):
        text = f"setp.{order}{suffix}.f32 {{d}}, {{a}}, {{b}};"
        got = run_instruction(text, "b", a.view("u4"), b.view("u4"))
        assert np.array_equal(got, np.where(lost, of_nan, want)), text
    got = run_instruction("setp.nan.f32 {d}, {a}, {b};", "b", a.view("u4"), b.view("u4"))
    assert np.array_equal(got, lost)


@pytest.mark.parametrize("order", ORDERS)
def test_integer_comparisons(order: str) -> None:
    a, b = np.array(numbers(32, 100, 0), "u4"), np.array(numbers(32, 100, 1), "u4")
    for t in "us":
        got = run_instruction(f"setp.{order}.{t}32 {{d}}, {{a}}, {{b}};", "b", a, b)
        x, y = (v.view("i4") if t == "s" else v for v in (a, b))
        assert np.array_equal(got, ORDERS[order](x, y))  # type: ignore[arg-type]


# conversions


def f32(*values: float) -> Array:
    return np.array(values, "f4").view("u4")


@pytest.mark.parametrize(
    ("opcode", "source", "out", "want"),
    [
        ("cvt.rzi.s32.f32", f32(1.9, -1.9, 3e9, -3e9, math.nan), "u4", [1, 2**32 - 1, 2**31 - 1, 2**31, 0]),
        ("cvt.rni.s32.f32", f32(0.5, 1.5, 2.5, -0.5), "u4", [0, 2, 2, 0]),
        ("cvt.rmi.s32.f32", f32(-0.5, 0.5), "u4", [2**32 - 1, 0]),
        ("cvt.rpi.s32.f32", f32(-0.5, 0.5), "u4", [0, 1]),
        ("cvt.rzi.u32.f32", f32(-1, 5e9), "u4", [0, 2**32 - 1]),
        ("cvt.rzi.s64.f32", f32(1e30, math.nan), "u8", [2**63 - 1, 2**63]),
        ("cvt.rzi.u64.f32", f32(1e19, 1e30, -1), "u8", [9999999980506447872, 2**64 - 1, 0]),
        ("cvt.rn.bf16.f32", f32(1 + 2**-8, 1 + 3 * 2**-8, math.nan), "u2", [0x3F80, 0x3F82, 0x7FFF]),
        ("cvt.rn.relu.bf16.f32", f32(-1, 1), "u2", [0, 0x3F80]),
        ("cvt.rz.bf16.f32", f32(1 + 2**-8 + 2**-9), "u2", [0x3F80]),
        (
            "cvt.rn.f16.f32",
            f32(65520, 65519, 2**-25, 3 * 2**-25, math.nan),
            "u2",
            [0x7C00, 0x7BFF, 0, 2, 0x7FFF],
        ),
        ("cvt.rna.tf32.f32", f32(1 + 2**-11, 1 + 2**-12), "u4", [0x3F802000, 0x3F800000]),
        ("cvt.rn.tf32.f32", f32(1 + 2**-11, 1 + 3 * 2**-11), "u4", [0x3F800000, 0x3F804000]),
        ("cvt.sat.s8.s32", np.array([200, -200 % 2**32, 5], "u4"), "u2", [127, 0xFF80, 5]),
        ("cvt.rn.satfinite.e4m3x2.f32", None, "u2", []),
    ],
)
def test_conversions(opcode: str, source: Array | None, out: str, want: list[int]) -> None:
    if source is None:  # two sources: the first one is the upper byte
        a, b = f32(1.0, 1000, math.nan, -0.0), f32(-2.0, -1000, 0.5, 2**-9)
        got = run_instruction(f"{opcode} {{d}}, {{a}}, {{b}};", out, a, b)
        assert [hex(x) for x in got.tolist()] == ["0x38c0", "0x7efe", "0x7f30", "0x8001"]
        return
    got = run_instruction(f"{opcode} {{d}}, {{a}};", out, source)
    assert [hex(x) for x in got.tolist()] == [hex(x) for x in want]


@pytest.mark.parametrize("to", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("of", ["u32", "s32", "u64", "s64"])
def test_integers_to_floats_round_once(of: str, to: str) -> None:
    bits, f = int(of[1:]), FORMATS[to]
    source = numbers(bits, 300, 0)
    got = run_instruction(
        f"cvt.rn.{to}.{of} {{d}}, {{a}};", f"u{f.width // 8}", np.array(source, f"u{bits // 8}")
    )
    values = [signed(x, bits) if of[0] == "s" else x for x in source]
    assert got.tolist() == [bits_of(Fraction(x), f) for x in values]


@pytest.mark.parametrize(
    ("of", "to"), [("f32", "f16"), ("f32", "bf16"), ("f64", "f32"), ("f16", "f32"), ("bf16", "f32")]
)
def test_floats_to_floats_round_once(of: str, to: str) -> None:
    source = samples(FORMATS[of], 500, 0)
    mode = ".rn" if FORMATS[of].width > FORMATS[to].width else ""
    got = run_instruction(
        f"cvt{mode}.{to}.{of} {{d}}, {{a}};",
        f"u{FORMATS[to].width // 8}",
        np.array(source, f"u{FORMATS[of].width // 8}"),
    )
    for g, bits in zip(got.tolist(), source, strict=True):
        x = value_of(bits, FORMATS[of])
        if isinstance(x, Fraction):
            assert g == bits_of(x, FORMATS[to], bool(bits & FORMATS[of].sign_bit))
        else:
            assert (
                FORMATS[to].is_nan(g) if math.isnan(x) else g & ~FORMATS[to].sign_bit == FORMATS[to].infinity
            )
