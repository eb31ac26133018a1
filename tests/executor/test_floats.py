"""Floating-point instructions, bit by bit, against exact rationals and a table of special cases."""

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from tests.executor.support.ptx import run_instruction
from tests.executor.support.rounding import FORMATS, Format, bits_of, samples, value_of

NAN = math.nan
Value = Fraction | float
UNSIGNED = {16: "u2", 32: "u4", 64: "u8"}


def combined(operation: str, x: Value, y: Value, z: Value = Fraction(0)) -> Value:
    """x + y, x - y, x * y or x * y + z: exact, or a float where one is infinite or NaN."""
    floats = [float(v) if isinstance(v, float) else math.copysign(1.0, v) if v else 0.0 for v in (x, y, z)]
    if all(isinstance(v, Fraction) for v in (x, y, z)):
        return {"add": x + y, "sub": x - y, "mul": x * y, "fma": x * y + z}[operation]
    a, b, c = floats
    return {"add": a + b, "sub": a - b, "mul": a * b, "fma": a * b + c}[operation]


def zero_is_negative(operation: str, signs: list[int]) -> bool:
    """The sign of an exact zero: of sums of equal signs, else plus; of products, both signs."""
    a, b, *c = signs
    if operation == "mul":
        return bool(a ^ b)
    if operation == "sub":
        b ^= 1
    return bool(((a ^ b) & c[0]) if operation == "fma" else (a & b))


def expected(operation: str, operands: list[int], formats: list[Format], out: Format) -> int | None:
    """Bits of the result; None is any NaN."""
    values = [value_of(bits, f) for bits, f in zip(operands, formats)]
    exact = combined(operation, *values)
    if isinstance(exact, float):
        if math.isnan(exact):
            return None
        return out.infinity | (out.sign_bit if exact < 0 else 0)
    signs = [int(bool(bits & f.sign_bit)) for bits, f in zip(operands, formats)]
    return bits_of(exact, out, zero_is_negative(operation, signs))


def flushed(bits: int, f: Format) -> int:
    return bits & f.sign_bit if bits & ~f.sign_bit < 1 << f.fraction else bits


def operands(formats: list[Format], count: int) -> list[list[int]]:
    """Columns of bits; special numbers meet each other as well as random ones."""
    rng = np.random.default_rng(len(formats))
    columns = [samples(f, count, seed) for seed, f in enumerate(formats)]
    return [[c[int(j)] for j in rng.integers(len(c), size=4 * len(columns[0]))] for c in columns]


def differences(got: np.ndarray, want: list[int | None], out: Format) -> list[tuple[int, int, int | None]]:
    return [
        (n, int(g), w)
        for n, (g, w) in enumerate(zip(got, want, strict=True))
        if not (out.is_nan(int(g)) if w is None else int(g) == w)
    ]


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("opcode", "operation", "types", "to"),
    [
        *((f"{name}.rn.{t}", name, (t, t), t) for name in ("add", "sub", "mul") for t in FORMATS),
        *((f"fma.rn.{t}", "fma", (t, t, t), t) for t in ("f16", "bf16", "f32")),
        *(
            (f"{name}.rn.f32.{t}", name, (t, "f32"), "f32")
            for name in ("add", "sub")
            for t in ("f16", "bf16")
        ),
        *((f"fma.rn.f32.{t}", "fma", (t, t, "f32"), "f32") for t in ("f16", "bf16")),
    ],
)
def test_arithmetic_rounds_the_exact_result_once(
    opcode: str, operation: str, types: tuple[str, ...], to: str
) -> None:
    formats, out = [FORMATS[t] for t in types], FORMATS[to]
    columns = operands(formats, 200)
    text = f"{opcode} {{d}}, " + ", ".join(f"{{{x}}}" for x in "abc"[: len(types)]) + ";"
    arrays = [np.array(c, UNSIGNED[f.width]) for c, f in zip(columns, formats)]
    got = run_instruction(text, UNSIGNED[out.width], *arrays)
    want = [expected(operation, list(row), formats, out) for row in zip(*columns, strict=True)]
    assert not differences(got, want, out)


def test_float64_fma_rounds_once() -> None:
    """Where neither the product nor its error leaves the normal numbers."""
    f, rng = FORMATS["f64"], np.random.default_rng(0)
    columns = [
        [int(x) for x in rng.integers(1 << 52, size=600) & rng.integers(1 << 52, size=600)] for _ in "abc"
    ]
    columns = [[x | int(e) << 52 for x, e in zip(c, rng.integers(980, 1060, size=600))] for c in columns]
    got = run_instruction("fma.rn.f64 {d}, {a}, {b}, {c};", "u8", *(np.array(c, "u8") for c in columns))
    want = [expected("fma", list(row), [f, f, f], f) for row in zip(*columns, strict=True)]
    assert not differences(got, want, f)


@pytest.mark.parametrize("operation", ["add", "sub", "mul", "fma"])
def test_ftz_flushes_operands_and_results(operation: str) -> None:
    f, rounding = FORMATS["f32"], ".rn"
    columns = operands([f] * (3 if operation == "fma" else 2), 200)
    names = ", ".join(f"{{{x}}}" for x in "abc"[: len(columns)])
    text = f"{operation}{rounding}.ftz.f32 {{d}}, {names};"
    got = run_instruction(text, "u4", *(np.array(c, "u4") for c in columns))
    want = []
    for row in zip(*columns, strict=True):
        bits = expected(operation, [flushed(x, f) for x in row], [f] * len(row), f)
        want.append(None if bits is None else flushed(bits, f))
    assert not differences(got, want, f)


def f32(x: float) -> int:
    return int(np.float32(x).view("u4"))


SUBNORMAL, MINUS_ZERO, ANY = 0x00000001, 0x80000000, None


@pytest.mark.parametrize(
    ("opcode", "operands", "want"),
    [
        ("add.sat.f32", (f32(0.75), f32(0.5)), f32(1.0)),
        ("add.sat.f32", (f32(-0.75), f32(0.5)), 0),
        ("add.sat.f32", (f32(NAN), f32(0.5)), 0),
        ("fma.rn.sat.f32", (f32(2), f32(2), f32(0)), f32(1.0)),
        ("min.f32", (MINUS_ZERO, 0), MINUS_ZERO),
        ("min.f32", (0, MINUS_ZERO), MINUS_ZERO),
        ("max.f32", (MINUS_ZERO, 0), 0),
        ("max.f32", (0, MINUS_ZERO), 0),
        ("max.f32", (MINUS_ZERO, MINUS_ZERO), MINUS_ZERO),
        ("min.f32", (f32(NAN), f32(2)), f32(2)),
        ("max.f32", (f32(2), f32(NAN)), f32(2)),
        ("max.f32", (f32(NAN), f32(NAN)), 0x7FFFFFFF),
        ("max.NaN.f32", (f32(2), f32(NAN)), 0x7FFFFFFF),
        ("min.NaN.f32", (f32(NAN), f32(2)), 0x7FFFFFFF),
        ("max.ftz.f32", (SUBNORMAL, MINUS_ZERO), 0),
        ("max.f32", (SUBNORMAL, 0), SUBNORMAL),
        ("max.xorsign.abs.f32", (f32(-2), f32(1)), f32(-2)),
        ("max.xorsign.abs.f32", (f32(-2), f32(-1)), f32(2)),
        ("copysign.f32", (f32(-1), f32(3)), f32(-3)),
        ("div.rn.f32", (f32(1), f32(3)), f32(1 / 3)),
        ("div.full.f32", (f32(1), f32(0)), f32(math.inf)),
    ],
)
def test_special_cases(opcode: str, operands: tuple[int, ...], want: int) -> None:
    text = f"{opcode} {{d}}, " + ", ".join(f"{{{x}}}" for x in "abc"[: len(operands)]) + ";"
    got = run_instruction(text, "u4", *(np.array([x], "u4") for x in operands))
    assert hex(int(got[0])) == hex(want)


@pytest.mark.parametrize(
    ("opcode", "operands", "want"),
    [
        ("fma.rn.relu.bf16", (0x3F80, 0x3F80, 0xC000), 0),  # 1 * 1 - 2
        ("add.sat.f16", (0x3C00, 0x3C00), 0x3C00),
        ("min.NaN.bf16", (0x7FC0, 0x3F80), 0x7FFF),
        ("max.bf16", (0x7FC0, 0x3F80), 0x3F80),
        ("neg.bf16", (0x3F80,), 0xBF80),
        ("abs.f16", (0xBC00,), 0x3C00),
    ],
)
def test_special_cases_of_16_bits(opcode: str, operands: tuple[int, ...], want: int) -> None:
    text = f"{opcode} {{d}}, " + ", ".join(f"{{{x}}}" for x in "abc"[: len(operands)]) + ";"
    got = run_instruction(text, "u2", *(np.array([x], "u2") for x in operands))
    assert hex(int(got[0])) == hex(want)


def test_pairs_compute_both_halves() -> None:
    rng = np.random.default_rng(0)
    x, y, z = (rng.standard_normal((64, 2)).astype("f4") for _ in range(3))
    packed = [np.ascontiguousarray(v).view("u8").reshape(-1) for v in (x, y, z)]
    got = run_instruction("fma.rn.f32x2 {d}, {a}, {b}, {c};", "u8", *packed).view("f4").reshape(-1, 2)
    half = run_instruction(
        "fma.rn.f32 {d}, {a}, {b}, {c};", "u4", *(v[:, 1].copy().view("u4") for v in (x, y, z))
    )
    assert np.array_equal(got[:, 1], half.view("f4"))
    a, b = ((rng.integers(1 << 16, size=64, dtype="u4")) for _ in range(2))
    low = run_instruction("mul.rn.bf16 {d}, {a}, {b};", "u2", a.astype("u2"), b.astype("u2"))
    both = run_instruction("mul.rn.bf16x2 {d}, {a}, {b};", "u4", a | a << 16, b | b << 16)
    assert np.array_equal(both, low.astype("u4") | low.astype("u4") << 16)


@pytest.mark.parametrize(
    ("opcode", "function", "low", "high", "error"),
    [  # errors that the PTX manual documents, relative unless the function is
        ("ex2.approx.ftz.f32", np.exp2, -120, 120, 2.0**-22),
        ("lg2.approx.f32", np.log2, 2.5, 1e30, 2.0**-22),
        ("rcp.approx.f32", lambda x: 1 / x, 1e-30, 1e30, 2.0**-23),
        ("sqrt.approx.f32", np.sqrt, 1e-30, 1e30, 2.0**-23),
        ("rsqrt.approx.f32", lambda x: 1 / np.sqrt(x), 1e-30, 1e30, 2.0**-22.9),
        ("tanh.approx.f32", np.tanh, 1e-3, 20, 2.0**-10.987),
    ],
)
def test_approximations_keep_the_documented_error(
    opcode: str, function: Callable[[np.ndarray], np.ndarray], low: float, high: float, error: float
) -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(low, high, 2000) if low < 0 else np.exp(rng.uniform(np.log(low), np.log(high), 2000))
    x = x.astype("f4")
    got = run_instruction(f"{opcode} {{d}}, {{a}};", "u4", x.view("u4")).view("f4")
    want = function(x.astype("f8"))
    assert (np.abs(got - want) <= error * np.abs(want)).all()


def test_exponentials_at_the_ends() -> None:
    operands = np.array([-math.inf, math.inf, -0.0, 1e-40, -200, 200], "f4").view("u4")
    got = run_instruction("ex2.approx.ftz.f32 {d}, {a};", "u4", operands).view("f4")
    assert got.tolist() == [0, math.inf, 1, 1, 0, math.inf]


def test_seeds_of_float64_divisions_have_20_bits() -> None:
    x = np.random.default_rng(0).uniform(0.1, 100, 500)
    got = run_instruction("rcp.approx.ftz.f64 {d}, {a};", "u8", x.view("u8"))
    assert not (got & np.uint64(0xFFFFFFFF)).any()
    assert (np.abs(got.view("f8") * x - 1) < 2.0**-19).all()
