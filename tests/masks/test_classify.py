"""Classification of random mask_mods: the blocks of torch's builder, and bounds that are never wrong."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from tests.draws import few
from tests.masks.random_masks import MaskText, assert_same_lists
from tritoncp.masks import create_block_mask
from tritoncp.masks.classification.interval_arithmetic import (
    BOOL_RULES,
    COPIES,
    OPERAND_RULES,
    RESULT_RULES,
    ValueRange,
    cast_range,
    limit_range,
)
from tritoncp.masks.classification.tile_bounds import Bounds, trace

B, H, LENGTH = 2, 3, 40  # tables have an element for every index
INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
FLOATS = (torch.float32, torch.float64, torch.bfloat16)
INTEGERS = (  # 0 * q turns a number into a tensor
    "({} + {})", "({} - {})", "({} * {})", "torch.maximum(1 * {} + 0 * q, {} + 0 * q)", "({} // 7)",
    "({} % 5)", "({} >> 1)", "({} & 6)", "({} ^ 3)", "({} + 0 * q).abs()", "({} + 0 * q).clamp(2, 20)",
    "({} + 0 * q).clamp(min=2)", "({} + 0 * q).clamp(max=20)",
    "(-{})", "torch.where({c}, {}, {})", "{t}[({} + 0 * q).clamp(0, 39)]", "({} // -3)", "({} << 2)",
    "({} + 0 * q).int()", "(({} + 0 * q) * 0.37).long()", "({} + {n})",
    "torch.stack([q, {} + 0 * q]).max(0)[0]",
    "({} + 0 * q).to(torch.uint8)", "torch.sign({} + 0 * q)", "torch.isin({} + 0 * q, {t}).long()",
    "torch.div({} + 0 * q, 3, rounding_mode='trunc')",
)  # fmt: skip
REALS = (
    "({} * 0.3)", "({} + {})", "({} / 3)", "({i} / 7)", "({} - {i})", "{}.sqrt()", "{}.floor()", "{}.float()",
    "({} * {})", "({} / {})", "{}.exp()", "({} - {}).abs()", "({} + {}).clamp(0, 1)", "({i} * {}).relu()",
)  # fmt: skip
BOOLEANS = (
    "({} & {})", "({} | {})", "(~{})", "({} ^ {})", "torch.where({}, {}, {})", "({} & (q >= kv))",
    "torch.logical_and({}, {i} + 0 * q)", "({} & (q > {n}))",
)  # fmt: skip


@st.composite
def expressions(draw: st.DrawFn) -> MaskText:
    """Trees of arithmetic, comparisons and logic over b, h, q, kv and captured tables."""
    captures: dict[str, Tensor] = {}

    def table(*shape: int, dtypes: tuple[torch.dtype, ...] = INTS) -> str:
        dtype = draw(st.sampled_from(dtypes))
        g = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        values = torch.randint(0, draw(st.sampled_from([3, 40])), shape, generator=g)
        values = values.sort(-1).values if shape and draw(st.booleans()) else values
        name = f"t{len(captures)}"
        if dtype.is_floating_point:
            values = values / 4
            values[..., 3::11] = draw(st.sampled_from([0.5, float("inf"), float("-inf"), float("nan")]))
        captures[name] = (values if shape else values - 1).to(dtype)
        return name

    def gathered(dtypes: tuple[torch.dtype, ...]) -> str:
        i = draw(st.sampled_from(["q", "kv", "q", "kv", "(q // 2)", "(kv - 40)", "(39 - q)", "(-q - 1)"]))
        form = draw(
            st.sampled_from(["{t}[{i}]", "{t}[b, {i}]", "{t}[b][{i}]", "{t}[{i}, h]", "{t}[q // 8, kv // 8]"])
        )
        shape = {"{t}[{i}]": (LENGTH,), "{t}[{i}, h]": (LENGTH, H), "{t}[q // 8, kv // 8]": (5, 5)}
        return form.format(t=table(*shape.get(form, (B, LENGTH)), dtypes=dtypes), i=i)

    def integer(depth: int) -> str:
        if not depth:
            leaf = st.sampled_from(["q", "kv", "q", "kv", "b", "h", str(draw(st.integers(-9, 40)))])
            return draw(leaf) if draw(st.integers(0, 3)) else gathered(INTS)
        operand = integer(depth - 1)
        form = draw(st.sampled_from(INTEGERS))
        operands = [integer(depth - 1) for _ in range(form.count("{}") - 1)]
        c = boolean(0) if "{c}" in form else ""
        t, n = (table(*shape) if mark in form else "" for mark, shape in (("{t}", (LENGTH,)), ("{n}", ())))
        return form.format(operand, *operands, c=c, t=t, n=n)

    def real(depth: int) -> str:
        if not depth:
            return gathered(FLOATS)
        form = draw(st.sampled_from(REALS))
        parts = [real(depth - 1) for _ in range(form.count("{}"))]
        return form.format(*parts, i=f"({integer(1)} + 0 * q)" if "{i}" in form else "")

    def boolean(depth: int) -> str:
        if not depth:
            number, depth_of = draw(st.sampled_from([(integer, 2), (integer, 1), (real, 1), (integer, 0)]))
            compare = draw(st.sampled_from([">=", "<", "==", "<=", ">", "!="]))
            return f"({number(depth_of)} + 0 * q {compare} {number(depth_of)})"
        form = draw(st.sampled_from(BOOLEANS))
        parts = [boolean(depth - 1) for _ in range(form.count("{}"))]
        n = table() if "{n}" in form else ""
        return form.format(*parts, i=integer(0) if "{i}" in form else "", n=n)

    return MaskText(boolean(draw(st.integers(0, 2))), captures)


def check_blocks(mod, q_len: int, kv_len: int, block: tuple[int, int]) -> None:
    """Assert that full and partial blocks are torch's."""
    mask = create_block_mask(mod, B, H, q_len, kv_len, BLOCK_SIZE=block)
    torchs = flex.create_block_mask(mod, B, H, q_len, kv_len, device="cpu", BLOCK_SIZE=block)
    assert_same_lists(mask.to_block_mask(), torchs)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@few(2)
@given(
    expressions(),
    st.integers(1, LENGTH),
    st.integers(1, LENGTH),
    st.sampled_from([(8, 8), (16, 4), (5, 7), (40, 33)]),
)
def test_any_expression_gives_torchs_blocks(expression: MaskText, q_len: int, kv_len: int, block) -> None:
    """Full and partial blocks agree with torch's for any expression tree and any captured tensors."""
    check_blocks(expression.mod, q_len, kv_len, block)


def run_rule(name: str, dtype: torch.dtype, *operands: Tensor) -> Tensor:
    """Run the operation of a rule on operands of the type that it computes in."""
    rounding = {"div_floor": "floor", "div_trunc": "trunc"}
    if name in rounding:
        return torch.div(*operands, rounding_mode=rounding[name])
    return operands[0].to(dtype) if name in COPIES else getattr(torch.ops.aten, name)(*operands)


COUNTS = {"where": 3, "clamp": 3} | dict.fromkeys(
    ("neg", "abs", "sign", "sgn", "square", "bitwise_not", "relu", "floor", "ceil", "trunc", "round",
     "logical_not", *COPIES), 1)  # fmt: skip
BITS = (
    "where",
    *(name for name in RESULT_RULES if name.startswith(("bitwise_", "__")) and "shift" not in name),
)
OF_BITS = {*BITS} - {"where", "bitwise_not"}
UNBOUNDED = {  # operations whose results have no bounds, by the type of the operands
    torch.bool: set(),
    **dict.fromkeys(INTS, OF_BITS | {"div"}),  # a quotient of integers is no integer
    torch.uint8: OF_BITS | {"div", "bitwise_not"},
    torch.float32: {name for name in RESULT_RULES if name.startswith(("bitwise_", "__"))}
    | {"div_floor", "div_trunc", "floor_divide", "remainder"},
}
RULES = {
    torch.bool: {name: RESULT_RULES[name] for name in BITS} | BOOL_RULES | OPERAND_RULES,
    **dict.fromkeys((*INTS, torch.float32), RESULT_RULES | OPERAND_RULES),
}


def draw_operand(dtype: torch.dtype, g: torch.Generator) -> tuple[ValueRange, Tensor]:
    """Draw a range of up to four integers, or quarters, of any size, and all values in it."""
    limits = torch.iinfo(dtype) if dtype in INTS else torch.finfo(torch.float32)
    size = [1, 4, 60, 200, 1 << 16][int(torch.randint(0, 5, (), generator=g))]
    least, most = max(-size, int(limits.min)), min(size, int(limits.max))
    if dtype is torch.bool:
        least, most = 0, 1
    lo = int(torch.randint(least, most + 1, (), generator=g))
    points = torch.arange(lo, min(most, lo + int(torch.randint(0, 4, (), generator=g))) + 1)
    ends = points[[0, -1]].double() if dtype in INTS else points[[0, -1]].to(dtype)
    if dtype is torch.float32:
        return ValueRange(*(ends / 4), dtype), points / 4
    return ValueRange(*ends, dtype), points.to(dtype)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", RULES, ids=str)
def test_rules_give_the_min_and_max_result(dtype: torch.dtype) -> None:
    """All values in small ranges of the operands, near zero and where narrow types wrap."""
    g, known = torch.Generator().manual_seed(0), set()
    for name, rule in list(RULES[dtype].items()) * 40:
        types = [torch.bool if name == "where" and not i else dtype for i in range(COUNTS.get(name, 2))]
        ranges, values = zip(*(draw_operand(t, g) for t in types))
        result = dtype if name in RESULT_RULES else torch.bool
        try:
            got = run_rule(name, dtype, *(x.view(-1, *[1] * i) for i, x in enumerate(values)))
        except RuntimeError:  # a division by zero, or an operation that the type lacks
            continue
        if got.dtype != result:  # a quotient of integers
            continue
        bounds = limit_range(rule(result, *ranges), result)
        lo, hi, numbers = bounds.lo.double(), bounds.hi.double(), got.double()
        if not bool(lo.isnan() | hi.isnan()):
            known.add(name)
            least, greatest = numbers.min(), numbers.max()
            if name == "remainder" and (len(values[1]) > 1 or len((values[0] // values[1]).unique()) > 1):
                least, greatest = 0, values[1].max() - 1  # of several periods
            assert (lo, hi) == (least, greatest), (name, ranges)
    assert RULES[dtype].keys() - known == UNBOUNDED[dtype]


@pytest.mark.parametrize("source", RULES, ids=str)
def test_casts_give_the_min_and_max_result(source: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    for target in list(RULES) * 40:
        range_, values = draw_operand(source, g)
        bounds, numbers = cast_range(range_, target), values.to(target).double()
        if target in INTS and bool((values.double().trunc() != numbers).any()):
            assert bool(bounds.lo.isnan() & bounds.hi.isnan()), (range_, target)  # it wraps
        elif not bool(bounds.lo.double().isnan()) or target not in INTS:
            assert (bounds.lo, bounds.hi) == (numbers.min(), numbers.max()), (range_, target)
        else:
            assert numbers.abs().max() > torch.iinfo(target).max, (range_, target)


@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_integers_have_bounds_up_to_the_ends_of_their_type(dtype: torch.dtype) -> None:
    """Bounds end at 2^51."""
    info, most = torch.iinfo(dtype), 1 << 51
    ends = torch.tensor([max(info.min, -most), min(info.max, most)]).double()
    assert torch.equal(torch.stack(limit_range(ValueRange(*ends, dtype), dtype)[:2]), ends)
    for beyond in (torch.tensor([-1, 0]), torch.tensor([0, 1])):
        assert bool(limit_range(ValueRange(*ends + beyond, dtype), dtype).lo.isnan())


ROWS, CELLS = torch.rand(B, H, LENGTH) * LENGTH, torch.rand(LENGTH, LENGTH)
ENDLESS = torch.rand(LENGTH).index_fill(0, torch.arange(0, LENGTH, 7), float("inf"))
NARROW = torch.arange(LENGTH).to(torch.int8) - 125
WIDE = (torch.arange(LENGTH) // 9).to(torch.uint16)


def edits_through_a_view(b, h, q, kv):
    x = q + 0
    x.detach().clamp_(max=30)
    return x >= kv + 8 * (b + h)


@pytest.mark.parametrize(
    "mod",
    [
        lambda b, h, q, kv: (ENDLESS[q] - ENDLESS[kv]).clamp(0, 1) >= 0,  # inf - inf
        lambda b, h, q, kv: ((q - 20) * ENDLESS[kv]).abs() >= 0,  # 0 * inf
        lambda b, h, q, kv: (q - 20) / kv >= float("-inf"),  # 0 / 0
        lambda b, h, q, kv: (q - kv).to(torch.uint16).to(torch.int64) >= 60000,  # wraps
        lambda b, h, q, kv: WIDE[q] == WIDE[kv],  # a dtype without bounds
        lambda b, h, q, kv: -(NARROW[q] ^ 3) > 0,  # longer than either operand
        lambda b, h, q, kv: torch.stack([q, kv]).max(0).values >= 10,  # several results
        lambda b, h, q, kv: torch.sign(q >= kv),  # of a bool
        lambda b, h, q, kv: torch.rsub(q, 5, alpha=2) >= -kv,
        lambda b, h, q, kv: torch.add(q, kv, alpha=-2) >= 0,
        lambda b, h, q, kv: (q - kv) ** 1 >= 3,  # not a square
        lambda b, h, q, kv: ROWS[torch.where(b.sin() > 0.5, b, 0 * b + 1), h, q] > kv,  # one of two rows
        edits_through_a_view,
    ],
)
def test_expressions_that_broke_interval_arithmetic_give_torchs_blocks(mod) -> None:
    """Expressions that no rule covers, or that were once classified wrongly."""
    check_blocks(mod, LENGTH, LENGTH, (8, 8))


@pytest.mark.parametrize(
    ("mod", "error"),
    [
        (lambda b, h, q, kv: torch.ones(LENGTH)[q + 1] > 0, IndexError),
        (lambda b, h, q, kv: q % (8 - kv).clamp(min=0) >= 0, RuntimeError),
    ],
)
def test_no_bounds_hide_an_error(mod, error: type[Exception]) -> None:
    """An index past the end and a division by zero raise, although all other pairs are visible."""
    with pytest.raises(error):
        create_block_mask(mod, 1, 1, LENGTH, LENGTH, BLOCK_SIZE=8)


def decide_tiles(mod, tiles: Tensor) -> list[tuple[tuple[bool, bool], tuple[bool, bool]]]:
    """Return the bounds of tiles, whether some pair may be and every pair must be visible, and the truth."""
    bounds = Bounds(trace(mod))
    assert bounds is not None
    dense = flex.create_mask(mod, B, H, LENGTH, LENGTH, device="cpu")
    parts = [dense[b, h, q0:q1, k0:k1] for b, h, q0, q1, k0, k1 in tiles.tolist()]
    decided = zip(*(x.expand(len(tiles)).tolist() for x in bounds(*tiles.unbind(1))), strict=True)
    return list(zip(decided, [(bool(part.any()), bool(part.all())) for part in parts], strict=True))


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch.isin has no batching rule
@given(expressions(), st.integers(0, 999))
def test_no_decided_tile_is_decided_wrongly(expression: MaskText, seed: int) -> None:
    """Compare with every pair of the tile, for tiles of any size and position."""
    g = torch.Generator().manual_seed(seed)
    edges = [torch.randint(0, LENGTH + 1, (64, 2), generator=g).sort(1).values for _ in range(2)]
    b, h = torch.randint(0, B, (64,), generator=g), torch.randint(0, H, (64,), generator=g)
    tiles = torch.cat([b[:, None], h[:, None], *edges], 1)
    tiles = tiles[(tiles[:, 2] < tiles[:, 3]) & (tiles[:, 4] < tiles[:, 5])]
    for (may, must), (some, every) in decide_tiles(expression.mod, tiles):
        assert may >= some and every >= must


@pytest.mark.sample(10)
@pytest.mark.parametrize(
    "mod",
    [
        lambda b, h, q, kv: q >= kv,
        lambda b, h, q, kv: (q - kv).abs() == 3 * b + h,
        lambda b, h, q, kv: (q - kv) ** 2 > 9 + 5 - h,
        lambda b, h, q, kv: q.float() + 0.5 < kv,
        lambda b, h, q, kv: (q - kv).clamp(2, 9) != 2,
        lambda b, h, q, kv: q.clamp(min=12) >= kv,
        lambda b, h, q, kv: kv.clamp(max=20) <= q,
        lambda b, h, q, kv: (
            torch.div(-q, 3, rounding_mode="floor") == torch.div(q, -7, rounding_mode="trunc")
        ),
        lambda b, h, q, kv: (q << h) > (kv >> b),
        lambda b, h, q, kv: torch.where(h > 1, q, kv) > 5,
        lambda b, h, q, kv: torch.logical_and(b, q > 5),
        lambda b, h, q, kv: torch.logical_not(h) ^ (q > 5),
        lambda b, h, q, kv: ROWS[0][h, q] > kv,
        lambda b, h, q, kv: ROWS[b, h, q] < kv,
        lambda b, h, q, kv: ROWS[b][h][kv] >= ROWS[1, h, q - LENGTH],
        lambda b, h, q, kv: CELLS[q, kv] > 0.1,
        lambda b, h, q, kv: ROWS.cumsum(-1)[0][h, q] > kv,  # no rule, but all tiles are alike
    ],
)
def test_tiles_of_single_comparisons_are_all_decided(mod) -> None:
    """Tiles of a single cell of a table."""
    for size in (1, 2, 8):
        starts = torch.arange(0, LENGTH, size)
        b, h, q, kv = torch.cartesian_prod(torch.arange(B), torch.arange(H), starts, starts[:4]).unbind(1)
        for decided, truth in decide_tiles(mod, torch.stack([b, h, q, q + size, kv, kv + size], 1)):
            assert decided == truth
