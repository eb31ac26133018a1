"""Row intervals of mask_mods: they are exact, cheap, and found for masks that people write."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import flex_attention as flex

import tritoncp
from tests.draws import few
from tests.masks.random_masks import MaskText, assert_same_lists
from tritoncp.masks.classification import solve
from tritoncp.masks.classification.row_intervals import MOST, RowIntervals
from tritoncp.perf.suite.everyday_masks import everyday_masks

ROWS, KEYS, B, H = 21, 19, 2, 3
ENDS = {torch.int8: 120, torch.int16: 32_700, torch.int32: (1 << 31) - 9, torch.int64: 1 << 40}


@st.composite
def tables(draw: st.DrawFn) -> Tensor:
    """Values of tokens: sorted or not, with repeats and gaps, negative, near the end of their type, or floats
    with NaN; for all batch rows and heads or for each."""
    g = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    shape = draw(st.sampled_from([(ROWS,), (B, ROWS), (H, ROWS)]))
    dtype = draw(st.sampled_from([*ENDS, torch.uint8, torch.float32, torch.float64, torch.bfloat16]))
    values = torch.randint(0, draw(st.sampled_from([2, 4, 40])), shape, generator=g)
    order = draw(st.sampled_from(["any", "up", "down", "runs"]))
    if order in ("up", "down"):
        values = values.sort(-1, descending=order == "down").values
    elif order == "runs":
        values = values[..., torch.arange(ROWS) // 4 * 4]
    if dtype in ENDS and draw(st.booleans()):
        values = values + draw(st.sampled_from([-5, ENDS[dtype] - 40]))
    table = values.to(dtype)
    if dtype.is_floating_point and draw(st.booleans()):
        table[..., :: draw(st.integers(3, 9))] = float("nan")
    return table


@st.composite
def mask_texts(draw: st.DrawFn) -> MaskText:
    """Draw "and", "or" and "not" of comparisons and predicates of queries, keys, distances and pairs."""
    captures: dict[str, Tensor] = {}

    def read(index: str) -> str:
        table, name = draw(tables()), f"t{len(captures)}"
        captures[name] = table
        return f"{name}[{ {1: '', B: 'b, ', H: 'h, '}[1 if table.ndim == 1 else len(table)] }{index}]"

    def side(index: str) -> str:
        forms = (
            index,
            f"{index} // 4",
            f"{index} % 5",
            f"({index} - 3)",
            f"({index} + 2 * b - h)",
            f"-{index}",
        )
        return draw(st.sampled_from([read(index), read(index), *forms]))

    def atom() -> str:
        op = draw(st.sampled_from(["<", "<=", ">", ">=", "==", "!="]))
        number = draw(st.sampled_from(["0", "3", "-2", "h", "2.5"]))
        kind = draw(st.integers(0, 8))
        if kind < 4:
            sides = [side("q"), side("kv")]
            return f"({' '.join([sides.pop(draw(st.integers(0, 1))), op, *sides])})"
        forms = [
            f"({side('q')} {op} {number})", f"({side('kv')} {op} {number})",
            f"({side('q')} - {side('kv')} {op} {number})",
            f"((q - kv).abs() {op} {side('q')})", f"((q - kv) % 3 {op} {number})", f"(q * kv % 7 {op} 3)",
            f"(torch.maximum(q, kv) {op} {side('q')} + 0 * q)", f"(torch.where(q > 5, q, kv) {op} kv)",
        ]  # fmt: skip
        return draw(st.sampled_from(forms))

    def expression(depth: int) -> str:
        if not depth or draw(st.integers(0, 3)) == 0:
            return atom()
        one, two = expression(depth - 1), expression(depth - 1)
        form = draw(st.sampled_from(["({0} & {1})", "({0} | {1})", "(~{0})", "({0} ^ {1})", "({0} == {1})"]))
        return form.format(one, two)

    return MaskText(expression(2), captures)


@few(2)
@given(mask_texts())
def test_drawn_masks_have_torchs_blocks_and_exact_intervals(drawn: MaskText) -> None:
    sizes = B, H, ROWS, KEYS
    mask = tritoncp.create_block_mask(drawn.mod, *sizes, BLOCK_SIZE=(5, 4))
    assert_same_lists(
        mask.to_block_mask(), flex.create_block_mask(drawn.mod, *sizes, device="cpu", BLOCK_SIZE=(5, 4))
    )
    dense = flex.create_mask(drawn.mod, *sizes, device="cpu")
    if (intervals := mask.row_intervals()) is not None:
        assert torch.equal(visible(intervals), dense)
        assert_sorted(intervals)
    if (interval := mask.with_intervals().interval) is not None:
        masked = mask.runs.to_kinds() == 0
        masked = masked.repeat_interleave(5, 2).repeat_interleave(4, 3)[:, :, :ROWS, :KEYS]
        assert torch.equal(visible(torch.stack(interval, 2)) & masked, dense & masked)


def visible(intervals: Tensor) -> Tensor:
    """Return the pairs of row intervals [B, H, 2m, rows]: bool [B, H, rows, keys]."""
    keys = torch.arange(KEYS)
    lo, hi = (intervals[:, :, first::2, :, None] for first in (0, 1))
    return ((lo <= keys) & (keys < hi)).any(2)


def assert_sorted(intervals: Tensor) -> None:
    """The intervals of a row ascend, with a gap between any two; unused ones are last."""
    lo, hi = intervals[:, :, ::2], intervals[:, :, 1::2]
    assert bool((lo <= hi).all()) and bool(((lo == hi) <= (lo == KEYS)).all())
    assert bool(((hi[:, :, :-1] < lo[:, :, 1:]) | (lo[:, :, 1:] == KEYS)).all())


def test_a_comparison_may_depend_only_on_keys() -> None:
    mask = tritoncp.create_block_mask(lambda b, h, q, kv: torch.where(q > 5, q, kv) == kv, 1, 1, ROWS, KEYS)
    assert mask.row_intervals()[0, 0, :, [0, 5, 6]].T.tolist() == [[0, KEYS], [0, KEYS], [6, 7]]


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", everyday_masks(2048))
def test_everyday_masks_are_found_as_intervals(name: str) -> None:
    """Masks have torch's blocks, with a list or without."""
    mod, length, heads, most = (item := everyday_masks(2048)[name]).mod, item.length, item.H, item.most
    mask = tritoncp.create_block_mask(mod, item.B, heads, length, length, BLOCK_SIZE=64)
    torchs = flex.create_block_mask(mod, item.B, heads, length, length, device="cpu", BLOCK_SIZE=64)
    assert_same_lists(mask.to_block_mask(), torchs)
    intervals = mask.row_intervals()
    assert not most or (intervals is not None and intervals.shape[2] <= 2 * most)
    assert most != 1 or mask.interval is not None


def count_work(name: str, length: int, evaluated_pairs: list[int]) -> list[int]:
    """Make a mask and two plans; return the pairs of each call of its mask_mod."""
    item = everyday_masks(length)[name]
    del evaluated_pairs[:]
    mask = tritoncp.create_block_mask(item.mod, item.B, item.H, item.length, item.length)
    tritoncp.make_plan(mask, world_size=8, rank=1)
    calls = list(evaluated_pairs)
    tritoncp.make_plan(mask, world_size=8, rank=1)
    assert evaluated_pairs == calls, "a second plan reads the mask again"
    return calls


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [name for name, item in everyday_masks(2048).items() if item.most])
def test_intervals_take_no_evaluated_pair(name: str, evaluated_pairs: list[int]) -> None:
    """The mask_mod is traced, and called for one pair, which raises its errors."""
    assert count_work(name, 1 << 18, evaluated_pairs) == [1, 1]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", [name for name, item in everyday_masks(2048).items() if not item.most])
def test_other_masks_evaluate_pairs_in_proportion_to_their_edges(
    name: str, evaluated_pairs: list[int]
) -> None:
    """Four times the tokens take at most about four times the pairs and the calls."""
    few, many = (count_work(name, length, evaluated_pairs) for length in (1 << 16, 1 << 18))
    assert sum(many) <= 5 * sum(few) and sum(many) <= 256 << 18
    assert len(many) <= 4 * len(few) and len(many) <= 200


def test_vectors_of_captures_on_a_device_are_copied_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one copy to the host for the whole mask: of documents, positions and images."""
    copies: list[int] = []
    to_host = solve.to_host
    monkeypatch.setattr(solve, "is_remote", lambda tensor: True)
    monkeypatch.setattr(solve, "to_host", lambda tensors: copies.append(len(tensors)) or to_host(tensors))
    for name in ("documents and images", "prefix-LM documents", "window of each head"):
        del copies[:]
        item = everyday_masks(1024)[name]
        tritoncp.create_block_mask(item.mod, item.B, item.H, item.length, item.length)
        assert len(copies) == 1, name


def test_rows_with_too_many_intervals_have_no_list() -> None:
    lo = 2 * torch.arange(MOST + 1, dtype=torch.int32)[:, None, None].expand(-1, 1, 3)
    first, rest = (RowIntervals.sorted(x, x + 1, 40) for x in (lo[:MOST], lo[MOST:]))
    assert first.unite(rest) is None and first.unite(first) is not None
    assert repr(first.unite(first)) == repr(first)
