"""Closed forms as mask_mods, row intervals and windows: all three are the same mask."""

from itertools import product

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import flex_attention as flex

from tests.draws import few
from tests.zoo import MASKS, Sizes
from tritoncp import (
    and_masks,
    causal,
    document,
    flex_attention,
    from_block_mask,
    not_,
    or_masks,
    prefix_lm,
    sliding_window,
    tree,
)
from tritoncp.masks import MaskMod, create_block_mask
from tritoncp.masks.closed_forms import PartOfMask
from tritoncp.masks.mask_mod import num_batch_rows
from tritoncp.reference.dense import dense_attention

N = 48  # tokens every drawn closed form covers
CLOSED_FORMS = ("causal", "window", "documents", "causal documents of rows", "prefix", "trees")
FEW = few()


@st.composite
def simple_forms(draw: st.DrawFn) -> MaskMod:
    """Draw closed forms of the zoo, and documents and prefixes that are not in it."""
    number = draw(st.integers(0, 999))
    ids = torch.randint(-2, 5, (2, N), generator=torch.Generator().manual_seed(number))
    return draw(
        st.sampled_from(
            [
                *(MASKS[name](Sizes(2, 1, N, N), number).mod for name in CLOSED_FORMS),
                document(ids=ids.sort(descending=True).values),
                document(ids=ids),  # a document in pieces: no interval
                prefix_lm(torch.tensor([number % N, number // 3 % N])),
                tree([-1, 0, 0, 2], [number % N, 0, (N - number % N) // 2, (N - number % N + 1) // 2]),
            ]
        )
    )


@given(simple_forms())
@FEW
def test_a_mask_mod_has_no_truth_value(form: MaskMod) -> None:
    """`causal() and window` is the window alone."""
    for one in (form, form & causal(), form | causal(), ~form, PartOfMask(form, heads=(0,))):
        for ask in (bool, lambda one: not one, lambda one: one and causal(), lambda one: one or causal()):
            with pytest.raises(TypeError, match=r"has no truth value.*combine masks with & \| ~"):
                ask(one)
        with pytest.raises(TypeError, match="has no truth value"):
            torch.compile(lambda x, one=one: x + 1 if one else x, backend="eager")(torch.ones(1))


@st.composite
def forms(draw: st.DrawFn) -> MaskMod:
    parts = draw(st.lists(simple_forms(), min_size=1, max_size=3))
    join = draw(st.sampled_from([and_masks, or_masks, lambda *p: not_(p[0])]))
    mod = parts[0] if len(parts) == 1 and draw(st.booleans()) else join(*parts)
    rows = draw(st.sampled_from([None, (1, 0), (1,)]))
    return PartOfMask(mod, rows) if rows else mod


lengths = st.integers(1, N)


def dense(mod: MaskMod, q_len: int, kv_len: int) -> Tensor:
    return flex.create_mask(mod, 2, 1, q_len, kv_len, device="cpu")


DESCENDING = document(ids=-(torch.arange(N) // 7))
GAP = or_masks(PartOfMask(sliding_window(1, 0), start=9), sliding_window(1, 0))
TOUCH = and_masks(PartOfMask(sliding_window(0, -1), start=1), causal())  # keys from q + 1 on, and up to q


@example(mod=GAP, q_len=20, kv_len=40)
@example(mod=TOUCH, q_len=9, kv_len=9)
@example(mod=sliding_window(0, 0), q_len=9, kv_len=5)  # query 5 is beyond the last key by one
@given(forms(), lengths, lengths)
def test_intervals_equal_the_mask(mod: MaskMod, q_len: int, kv_len: int) -> None:
    intervals = mod.intervals(q_len, kv_len)
    if intervals is not None:
        lo, hi = intervals
        kv = torch.arange(kv_len)
        assert lo.dtype == hi.dtype == torch.int64
        assert lo.shape[1:] == hi.shape[1:] == (1, q_len)
        assert torch.equal((lo[..., None] <= kv) & (kv < hi[..., None]), dense(mod, q_len, kv_len)[: len(lo)])
        assert len(lo) == 2 or torch.equal(*dense(mod, q_len, kv_len))
        assert bool((((lo >= 0) & (lo < hi) & (hi <= kv_len)) | ((lo == 0) & (hi == 0))).all())


@few(2)
@example(one=DESCENDING, two=causal(), q_len=N, kv_len=N)
@given(simple_forms(), simple_forms(), lengths, lengths)
def test_every_mask_of_one_interval_per_row_has_intervals(
    one: MaskMod, two: MaskMod, q_len: int, kv_len: int
) -> None:
    for mod, rows in ((one, kv_len), (and_masks(one, two), q_len), (or_masks(one, two), q_len)):
        visible = dense(mod, rows, kv_len)
        starts = visible[..., :1].sum(-1) + (visible[..., 1:] & ~visible[..., :-1]).sum(-1)
        parts_have = all(m.intervals(q_len, kv_len) is not None for m in (one, two))
        if bool((starts <= 1).all()) and (parts_have or mod is one):
            assert mod.intervals(rows, kv_len) is not None


def test_intervals_that_touch_or_overlap_are_joined() -> None:
    """Intervals of keys 0 to 4, the empty one at 0."""
    bounds = [(0, 0), *((lo, hi) for lo in range(5) for hi in range(lo + 1, 5))]
    for one, two in product(bounds, bounds):
        keys = sorted({*range(*one), *range(*two)})
        got = or_masks(causal(), causal())._join_intervals(torch.tensor(one), torch.tensor(two))
        has_gap = keys != list(range(keys[0], keys[-1] + 1)) if keys else False
        assert (got is None) == has_gap
        assert has_gap or list(range(*map(int, got))) == keys


@pytest.mark.parametrize(
    ("prefix", "rows"), [(3, 1), (torch.tensor(3), 1), (torch.tensor([3]), 1), (torch.tensor([3, 4]), 2)]
)
def test_a_prefix_has_the_batch_rows_of_its_tensor(prefix: int | Tensor, rows: int) -> None:
    assert num_batch_rows(prefix_lm(prefix)) == rows


@given(st.lists(st.tuples(st.integers(-1, 9), st.integers(-1, 9)), min_size=1, max_size=3), lengths, lengths)
def test_windows_equal_the_mask(windows: list[tuple[int, int]], q_len: int, kv_len: int) -> None:
    mod = and_masks(*(sliding_window(*w) for w in windows))
    assert mod.window is not None
    left, right = mod.window
    far = q_len + kv_len
    distance = torch.arange(q_len)[:, None] - torch.arange(kv_len)
    want = (distance <= (far if left == -1 else left)) & (-distance <= (far if right == -1 else right))
    assert torch.equal(dense(mod, q_len, kv_len)[0, 0], want)
    assert create_block_mask(mod, 1, 1, q_len, kv_len, BLOCK_SIZE=8).window == mod.window


@FEW
@given(forms(), lengths, lengths, st.integers(3, 9), st.integers(3, 9))
def test_arithmetic_and_evaluation_build_the_same_mask(
    mod: MaskMod, q_len, kv_len, q_block, kv_block
) -> None:
    block = (q_block, kv_block)
    bm = flex.create_block_mask(mod, 2, 1, q_len, kv_len, device="cpu", BLOCK_SIZE=block)
    mask = create_block_mask(mod, 2, 1, q_len, kv_len, BLOCK_SIZE=block)
    evaluated = create_block_mask(lambda *index: mod(*index), 2, 1, q_len, kv_len, BLOCK_SIZE=block)
    assert mask.runs == evaluated.runs == from_block_mask(bm).runs
    assert mask.window == mod.window
    assert torch.equal(mask.to_dense(), dense(mod, q_len, kv_len))


def test_edits_of_what_a_mask_captures_are_seen() -> None:
    ids, prefix = torch.zeros(8, dtype=torch.int64), torch.tensor([2, 3])
    docs, lm = document(ids=ids), prefix_lm(prefix)
    docs.intervals(8, 8), lm.intervals(8, 8)
    ids[4:] = 1
    prefix[0] = 6
    assert docs.intervals(8, 8)[0].tolist() == [[[0] * 4 + [4] * 4]]
    assert lm.intervals(8, 8)[1][0].tolist() == [[6] * 6 + [7, 8]]
    assert create_block_mask(docs, 1, 1, 8, 8, BLOCK_SIZE=4).runs.to_kinds().tolist() == [[[[1, 3], [3, 1]]]]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "mod",
    [
        causal(),
        sliding_window(7, 3),
        sliding_window(-1, -1),
        and_masks(causal(), document(lengths=[10, 22, 16])),
        and_masks(causal(), document(ids=(torch.arange(2 * N) // 17).view(2, N))),
        prefix_lm(torch.tensor([5, 20])),
        or_masks(sliding_window(4), not_(causal())),
    ],
    ids=repr,
)
def test_torch_takes_closed_forms_as_mask_mods(mod: MaskMod) -> None:
    """make_fx traces closed forms, and torch's flex_attention with them agrees with dense attention."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, N, 8, generator=g, dtype=torch.float64) for _ in range(3))
    bm = flex.create_block_mask(mod, 2, 1, N, N, device="cpu", BLOCK_SIZE=16)
    eager = torch.compile(flex.flex_attention, backend="eager", fullgraph=True)
    want = dense_attention(q, k, v, create_block_mask(mod, 2, 1, N, N, BLOCK_SIZE=16)).out
    torch.testing.assert_close(eager(q, k, v, block_mask=bm), want, atol=1e-12, rtol=0)
    with TransformGetItemToIndex():
        traced = make_fx(mod)(*torch.zeros(4, dtype=torch.int64).unbind())
    for at in ((0, 0, 9, 9), (1, 0, 9, 8), (1, 0, 2, 40), (1, 0, 40, 2)):
        assert bool(traced(*torch.tensor(at).unbind())) == bool(dense(mod, N, N)[at])


ONE_ROW = {
    "document": document(ids=torch.tensor([[0, 1, 0, 1, 2, 2, 1, 0]])),
    "prefix": prefix_lm(torch.tensor([3])),
    "tree": tree([[-1, 0, 0]], [[2, 3, 3]]),
    "tree with a window": tree([[-1, 0, 0]], [[2, 3, 3]], window=(1, -1)),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ONE_ROW)
def test_tensors_of_one_batch_row_serve_every_row(name: str) -> None:
    mod, index = ONE_ROW[name], torch.arange(8)
    rows = [mod(torch.tensor(b), torch.tensor(0), index[:, None], index) for b in range(3)]
    assert all(torch.equal(row, rows[0]) for row in rows) and mod.reads == (False, False)
    q = torch.randn(3, 2, 8, 16, generator=torch.Generator().manual_seed(0))
    whole = flex.create_block_mask(mod, None, None, 8, 8, device="cpu", BLOCK_SIZE=4)
    for mask in (mod, create_block_mask(mod, None, None, 8, 8, BLOCK_SIZE=4), whole):
        torch.testing.assert_close(flex_attention(q, q, q, mask), dense_attention(q, q, q, rows[0]).out)
