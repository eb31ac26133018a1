"""Tests of runs of blocks, stored by row or by column, compared with dense maps."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.masks.random_masks import geometries, kinds_maps, kinds_of_pairs
from tritoncp.masks import ABSENT, Kind, Runs
from tritoncp.masks.runs.transposed_runs import transpose


def by_column(kinds: Tensor) -> Runs:
    return transpose(Runs.from_kinds(kinds.transpose(2, 3)))


STORED = pytest.mark.parametrize("make", [Runs.from_kinds, by_column], ids=["by row", "by column"])


@STORED
@given(kinds_maps())
def test_runs_keep_every_block(make, kinds: Tensor) -> None:
    runs = make(kinds)
    assert torch.equal(runs.to_kinds(), kinds)
    masked, full = runs.counts()
    assert torch.equal(full, (kinds == Kind.FULL).sum(-1))
    assert torch.equal(masked, ((kinds == Kind.MASKED) | (kinds == Kind.BOUNDED)).sum(-1))


@given(kinds_maps())
def test_runs_are_maximal_and_in_order(kinds: Tensor) -> None:
    runs = Runs.from_kinds(kinds)
    follows = 0
    for begin, mid, end in runs.ptr.view(-1, 3).tolist():
        assert begin == follows <= mid <= end
        follows = end
        for group, allowed in ((runs.runs[begin:mid], {0, 2}), (runs.runs[mid:end], {1})):
            triples = group.tolist()
            assert {kind for _, _, kind in triples} <= allowed
            assert all(s < e for s, e, _ in triples)
            for (_, end1, kind1), (start2, _, kind2) in itertools.pairwise(triples):
                assert end1 < start2 or (end1 == start2 and kind1 != kind2)
    assert follows == len(runs.runs)


@given(kinds_maps())
def test_transpose_swaps_rows_and_columns(kinds: Tensor) -> None:
    runs = Runs.from_kinds(kinds)
    other = Runs.from_kinds(kinds.transpose(2, 3))
    assert transpose(runs) == other and transpose(other) == runs
    assert transpose(runs).by_rows == other


@pytest.mark.sample(1)
@STORED
@given(kinds_maps(), st.data())
def test_take_selects_reorders_and_repeats_rows(make, kinds: Tensor, data: st.DataObject) -> None:
    runs = make(kinds)
    b, h, r, c = kinds.shape
    assert runs.take(torch.arange(r)[None]) == runs
    batch = data.draw(st.sampled_from([1, b] if b > 1 else [1, 3]))
    rows = data.draw(
        st.lists(st.lists(st.integers(-1, r - 1), min_size=4, max_size=4), min_size=batch, max_size=batch)
    )
    if data.draw(st.booleans()):  # in order, and rows that list nothing come last
        rows = [sorted(row, key=lambda i: i % (r + 1)) for row in rows]
    padded = torch.cat([kinds, torch.full((b, h, 1, c), ABSENT, dtype=torch.uint8)], 2)  # -1 = the last row
    want = torch.stack([padded[min(i, b - 1), :, rows[min(i, batch - 1)]] for i in range(max(b, batch))])
    assert runs.take(torch.tensor(rows)) == Runs.from_kinds(want)
    weight, group = torch.tensor([[1, 2, 4, 8]]).expand(batch, 4), torch.tensor([0, 1, 1, 0])
    listed = (want != ABSENT).sum(1) * torch.tensor([1, 2, 4, 8])[:, None]  # [B, 4, C]
    sums = torch.stack([listed[:, group == i].sum(1) for i in range(2)])
    assert torch.equal(runs.sum_readers(torch.tensor(rows), weight, group, 2), sums)


@pytest.mark.sample(1)
@STORED
@given(kinds_maps(), st.data())
def test_remap_drops_and_repeats_columns(make, kinds: Tensor, data: st.DataObject) -> None:
    runs = make(kinds)
    b, _, _, c = kinds.shape
    assert runs.remap(torch.arange(c + 1)[None]) == runs
    batch = data.draw(st.sampled_from([1, b] if b > 1 else [1, 3]))
    copies = data.draw(st.lists(st.permutations([i % 3 for i in range(c)]), min_size=batch, max_size=batch))
    times = torch.tensor(copies)
    first = torch.nn.functional.pad(times.cumsum(1), (1, 0))
    want = torch.stack(
        [kinds[min(i, b - 1)].repeat_interleave(times[min(i, batch - 1)], 2) for i in range(max(b, batch))]
    )
    assert runs.remap(first) == Runs.from_kinds(want)
    keep = times[0] > 0
    subset = torch.nn.functional.pad(keep.long().cumsum(0), (1, 0))[None]
    assert torch.equal(runs.remap(subset).to_kinds(), kinds[..., keep])


@pytest.mark.sample(1)
@STORED
@given(kinds_maps(), st.data(), st.integers(1, 3))
def test_cells_count_blocks_and_squares_unite_them(
    make, kinds: Tensor, data: st.DataObject, size: int
) -> None:
    runs, listed = make(kinds), (kinds != ABSENT).float()
    edges = [torch.tensor(sorted({0, n, *data.draw(st.sets(st.integers(0, n)))})) for n in kinds.shape[2:]]
    for got, marks in zip(
        runs.count_in_cells(*edges), (kinds == Kind.MASKED, (kinds != Kind.MASKED) & (kinds != ABSENT))
    ):
        before = torch.nn.functional.pad(marks.sum((0, 1)).cumsum(0).cumsum(1), (1, 0, 1, 0))
        assert torch.equal(got, before[edges[0]][:, edges[1]].diff(dim=0).diff(dim=1))
    squares = torch.nn.functional.max_pool2d(listed.amax((0, 1))[None, None], size, ceil_mode=True)
    want = torch.where(squares > 0, int(Kind.FULL), ABSENT).to(torch.uint8)
    assert torch.equal(runs.unite(size).to_kinds(), want)
    bounded = kinds.masked_fill(kinds == Kind.FULL, int(Kind.BOUNDED))
    assert torch.equal(runs.with_full_bounded().to_kinds(), bounded)


@pytest.mark.sample(1)
@STORED
@given(kinds_maps())
def test_expand_repeats_batch_and_heads(make, kinds: Tensor) -> None:
    one = make(kinds[:1, :1])
    assert one.expand(3, 2) == Runs.from_kinds(kinds[:1, :1].repeat(3, 2, 1, 1))
    assert make(kinds[:, :1]).expand(kinds.shape[0], 2) == Runs.from_kinds(kinds[:, :1].repeat(1, 2, 1, 1))


@given(geometries(), st.integers(0, 999), st.sampled_from([1, 4, 40]))
def test_intervals_list_the_blocks_they_touch(geometry, seed: int, longest: int) -> None:
    """Intervals in any order and with gaps between them; blocks are counted pair by pair."""
    q_len, kv_len, q_block, kv_block = geometry
    g = torch.Generator().manual_seed(seed)
    lo = torch.randint(0, kv_len + 1, (2, 1, q_len), generator=g)
    hi = (lo + torch.randint(0, longest + 1, lo.shape, generator=g)).clamp(max=kv_len)
    kv = torch.arange(kv_len)
    visible = (lo[..., None] <= kv) & (kv < hi[..., None])
    kinds = kinds_of_pairs(visible, q_block, kv_block)
    assert Runs.from_intervals(lo, hi, q_block, kv_block, kv_len) == Runs.from_kinds(kinds)


def test_runs_are_equal_by_value() -> None:
    kinds = torch.tensor([[[[0, 1, 3]]]], dtype=torch.uint8)
    runs = Runs.from_kinds(kinds)
    assert runs == Runs.from_kinds(kinds.clone())
    assert runs != Runs.from_kinds(torch.tensor([[[[2, 1, 3]]]], dtype=torch.uint8))
    assert runs != Runs.from_kinds(torch.tensor([[[[0, 1]]]], dtype=torch.uint8))
    assert runs != Runs.from_kinds(torch.tensor([[[[0, 1, 3]], [[3, 3, 3]]]], dtype=torch.uint8))


@pytest.mark.long
def test_transpose_of_half_a_million_rows_costs_what_its_runs_cost() -> None:
    n = 1 << 19  # a dense map of this would take 256 GiB
    lo, hi = torch.arange(n)[None, None], torch.arange(1, n + 1)[None, None]
    diagonal = Runs.from_intervals(lo, hi, 1, 1, n)
    assert transpose(diagonal) == diagonal
