"""Runs and masks, compared with dense maps, with torch's builder and pair by pair with the definition."""

import itertools
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from tritoncp.masks import (
    ABSENT,
    Kind,
    Mask,
    Runs,
    and_masks,
    block_lists,
    causal,
    classify,
    create_block_mask,
    document,
    from_block_mask,
    full_mask,
    sliding_window,
)
from tritoncp.masks.from_torch import with_intervals

LAWS = settings(max_examples=60, deadline=None)
FEW = settings(max_examples=25, deadline=None)


@st.composite
def kinds_maps(draw: st.DrawFn) -> Tensor:
    """Dense kinds uint8 [B, H, R, C]: noise, or long runs, from nearly empty to full."""
    b, h, r, c = (draw(st.integers(1, n)) for n in (2, 3, 9, 9))
    g = torch.Generator().manual_seed(draw(st.integers(0, 1 << 16)))
    kinds = torch.randint(0, 4, (b, h, r, c), generator=g, dtype=torch.uint8)
    if draw(st.booleans()):
        kinds = kinds.sort(dim=draw(st.sampled_from([2, 3]))).values
    kinds[torch.rand(b, h, r, c, generator=g) < draw(st.sampled_from([0.0, 0.3, 0.9]))] = ABSENT
    return kinds


@st.composite
def geometries(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """(q_len, kv_len, q_block, kv_block), ragged more often than not."""
    return tuple(draw(st.integers(*bounds)) for bounds in ((1, 40), (1, 40), (3, 9), (3, 9)))


def make_mask_mod(seed: int, q_len: int, kv_len: int):
    """Return a mask_mod by its seed. Its tables are as long as the sequences: an index past them raises."""
    g = torch.Generator().manual_seed(seed)
    lo = torch.randint(0, kv_len, (2, 3, q_len), generator=g)
    hi = lo + torch.randint(0, kv_len, (2, 3, q_len), generator=g)
    keys = torch.rand(kv_len, generator=g) < 0.7
    rows = torch.rand(q_len, generator=g) < 0.7
    return [
        lambda b, h, q, kv: (lo[b, h, q] <= kv) & (kv < hi[b, h, q]),
        lambda b, h, q, kv: q + h >= kv + b,
        lambda b, h, q, kv: keys[kv] & rows[q],
        lambda b, h, q, kv: (kv <= q) & rows[q],
        lambda b, h, q, kv: (q - kv).abs() % 5 < 2,
    ][seed % 5]


def visible_by_definition(mod, kinds: Tensor, mask: Mask) -> Tensor:
    """Return the pairs that are listed and not hidden by the mask_mod in a MASKED block: bool, dense."""
    b, h = kinds.shape[:2]
    fine = kinds.repeat_interleave(mask.q_block, 2).repeat_interleave(mask.kv_block, 3)
    fine = fine[:, :, : mask.q_len, : mask.kv_len]
    visible = flex.create_mask(mod, b, h, mask.q_len, mask.kv_len, device="cpu")
    return (fine == Kind.FULL) | (fine == Kind.BOUNDED) | (fine == Kind.MASKED) & visible


def assert_same_lists(a: flex.BlockMask, b: flex.BlockMask) -> None:
    for side in ("kv", "full_kv", "q", "full_q"):
        num, num2 = (getattr(m, f"{side}_num_blocks") for m in (a, b))
        indices, indices2 = (getattr(m, f"{side}_indices") for m in (a, b))
        assert torch.equal(num, num2), side
        listed = torch.arange(indices.shape[-1]) < num[..., None]
        assert torch.equal(indices[listed], indices2[listed]), side


# -- runs ---------------------------------------------------------------------------------------------


@LAWS
@given(kinds_maps())
def test_runs_keep_every_block(kinds: Tensor) -> None:
    runs = Runs.from_kinds(kinds)
    assert torch.equal(runs.to_kinds(), kinds)
    masked, full = runs.counts()
    assert torch.equal(full, (kinds == Kind.FULL).sum(-1))
    assert torch.equal(masked, ((kinds == Kind.MASKED) | (kinds == Kind.BOUNDED)).sum(-1))


@LAWS
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


@LAWS
@given(kinds_maps())
def test_transpose_swaps_rows_and_columns(kinds: Tensor) -> None:
    runs = Runs.from_kinds(kinds)
    assert runs.transpose() == Runs.from_kinds(kinds.transpose(2, 3))
    assert runs.transpose().transpose() == runs


@LAWS
@given(kinds_maps(), st.data())
def test_take_selects_reorders_and_repeats_rows(kinds: Tensor, data: st.DataObject) -> None:
    runs = Runs.from_kinds(kinds)
    b, h, r, c = kinds.shape
    assert runs.take(torch.arange(r)[None]) == runs
    batch = data.draw(st.sampled_from([1, b] if b > 1 else [1, 3]))
    rows = data.draw(
        st.lists(st.lists(st.integers(-1, r - 1), min_size=4, max_size=4), min_size=batch, max_size=batch)
    )
    padded = torch.cat([kinds, torch.full((b, h, 1, c), ABSENT, dtype=torch.uint8)], 2)  # -1 = the last row
    want = torch.stack([padded[min(i, b - 1), :, rows[min(i, batch - 1)]] for i in range(max(b, batch))])
    assert runs.take(torch.tensor(rows)) == Runs.from_kinds(want)


@LAWS
@given(kinds_maps(), st.data())
def test_remap_drops_and_repeats_columns(kinds: Tensor, data: st.DataObject) -> None:
    runs = Runs.from_kinds(kinds)
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


@LAWS
@given(kinds_maps())
def test_expand_repeats_batch_and_heads(kinds: Tensor) -> None:
    one = Runs.from_kinds(kinds[:1, :1])
    assert one.expand(3, 2) == Runs.from_kinds(kinds[:1, :1].repeat(3, 2, 1, 1))
    assert Runs.from_kinds(kinds[:, :1]).expand(kinds.shape[0], 2) == Runs.from_kinds(
        kinds[:, :1].repeat(1, 2, 1, 1)
    )


@LAWS
@given(geometries(), st.integers(0, 999), st.sampled_from([1, 4, 40]))
def test_intervals_list_the_blocks_they_touch(geometry, seed: int, longest: int) -> None:
    """Intervals in any order and with gaps between them; blocks are counted pair by pair."""
    q_len, kv_len, q_block, kv_block = geometry
    g = torch.Generator().manual_seed(seed)
    lo = torch.randint(0, kv_len + 1, (2, 1, q_len), generator=g)
    hi = (lo + torch.randint(0, longest + 1, lo.shape, generator=g)).clamp(max=kv_len)
    kv = torch.arange(kv_len)
    visible = (lo[..., None] <= kv) & (kv < hi[..., None])
    pad = (0, -kv_len % kv_block, 0, -q_len % q_block)
    tiles = torch.nn.functional.pad(visible, pad).unflatten(3, (-1, kv_block)).unflatten(2, (-1, q_block))
    count = tiles.sum((3, 5))
    kinds = torch.where(count == 0, ABSENT, torch.where(count == q_block * kv_block, Kind.FULL, Kind.MASKED))
    assert Runs.from_intervals(lo, hi, q_block, kv_block, kv_len) == Runs.from_kinds(kinds.to(torch.uint8))


def test_runs_are_equal_by_value() -> None:
    kinds = torch.tensor([[[[0, 1, 3]]]], dtype=torch.uint8)
    runs = Runs.from_kinds(kinds)
    assert runs == Runs.from_kinds(kinds.clone())
    assert runs != Runs.from_kinds(torch.tensor([[[[2, 1, 3]]]], dtype=torch.uint8))
    assert runs != Runs.from_kinds(torch.tensor([[[[0, 1]]]], dtype=torch.uint8))
    assert runs != Runs.from_kinds(torch.tensor([[[[0, 1, 3]], [[3, 3, 3]]]], dtype=torch.uint8))


def test_transpose_of_half_a_million_rows_costs_what_its_runs_cost() -> None:
    n = 1 << 19  # a dense map of this would take 256 GiB
    lo, hi = torch.arange(n)[None, None], torch.arange(1, n + 1)[None, None]
    diagonal = Runs.from_intervals(lo, hi, 1, 1, n)
    assert diagonal.transpose() == diagonal


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r: r.take(torch.tensor([[0, 2]])), r"rows must lie in \[-1, 2\)"),
        (lambda r: r.take(torch.tensor([0, 1])), "rows must be int64"),
        (lambda r: r.take(torch.zeros(3, 1, dtype=torch.int64)), "3 batch rows, the mask has 2"),
        (lambda r: r.remap(torch.tensor([[0, 1]])), r"first must be int64 \[B, 4\]"),
        (lambda r: r.remap(torch.tensor([[0, 2, 1, 3]])), "non-decreasing"),
        (lambda r: Runs.from_kinds(r.to_kinds().int()), "must be uint8"),
        (lambda r: Runs(r.ptr.long(), r.runs, 3), "ptr must be int32"),
        (lambda r: Runs(r.ptr, r.runs[:, :2], 3), "runs must be int32"),
    ],
)
def test_runs_refuse_arguments_of_wrong_shape_or_range(call, message: str) -> None:
    runs = Runs.from_kinds(torch.zeros(2, 1, 2, 3, dtype=torch.uint8))
    with pytest.raises(ValueError, match=message):
        call(runs)


# -- masks --------------------------------------------------------------------------------------------


@FEW
@given(geometries(), st.integers(0, 999), st.sampled_from([(None, None), (2, 1), (2, 3)]))
def test_same_blocks_as_torch(geometry, seed: int, batch) -> None:
    q_len, kv_len, *block = geometry
    mod = make_mask_mod(seed, q_len, kv_len)
    torchs = flex.create_block_mask(mod, *batch, q_len, kv_len, device="cpu", BLOCK_SIZE=tuple(block))
    mask = create_block_mask(mod, *batch, q_len, kv_len, BLOCK_SIZE=tuple(block))
    assert_same_lists(mask.to_block_mask(), torchs)
    assert mask.sparsity() == pytest.approx(torchs.sparsity())
    assert torch.equal(mask.to_dense(), flex.create_mask(mod, *batch, q_len, kv_len, device="cpu"))
    converted = from_block_mask(torchs)
    assert converted.runs == mask.runs
    mask = with_intervals(mask, mod)
    assert (converted.interval is None) == (mask.interval is None)
    assert converted.interval is None or all(map(torch.equal, converted.interval, mask.interval))


@FEW
@given(geometries(), st.integers(0, 999), st.integers(1, 3), st.booleans())
def test_block_lists_are_authoritative_and_intervals_exact(
    geometry, seed: int, heads: int, q_lists: bool
) -> None:
    """Block lists are drawn independently of the mask_mod: unsorted, some blocks absent, ragged ones full."""
    q_len, kv_len, q_block, kv_block = geometry
    g = torch.Generator().manual_seed(seed)
    shape = (2, heads, -(-q_len // q_block), -(-kv_len // kv_block))
    kinds = torch.tensor([0, 1, ABSENT], dtype=torch.uint8)[torch.randint(0, 3, shape, generator=g)]
    mod = make_mask_mod(seed, q_len, kv_len)
    order = torch.randperm(shape[-1], generator=g)
    lists = []
    for kind in (Kind.MASKED, Kind.FULL):
        listed = kinds[..., order] == kind
        lists += [
            listed.sum(-1).int(),
            order[listed.int().argsort(dim=-1, descending=True, stable=True)].int(),
        ]
    bm = flex.BlockMask.from_kv_blocks(
        *lists,
        BLOCK_SIZE=(q_block, kv_block),
        mask_mod=mod,
        seq_lengths=(q_len, kv_len),
        compute_q_blocks=q_lists,
    )
    mask = from_block_mask(bm)
    want = visible_by_definition(mod, kinds, mask)
    assert torch.equal(mask.to_dense(), want)
    cut = torch.zeros(shape, dtype=torch.bool)
    cut[:, :, -1] |= q_len % q_block != 0
    cut[..., -1] |= kv_len % kv_block != 0
    assert torch.equal(mask.runs.to_kinds() == Kind.BOUNDED, cut & (kinds == Kind.FULL))
    assert_interval_exact(mask, kinds == Kind.MASKED, want)


def assert_interval_exact(mask: Mask, masked: Tensor, visible: Tensor) -> None:
    """The mask has intervals if and only if it can have them, and they are exactly the visible pairs."""
    masked = masked.repeat_interleave(mask.q_block, 2).repeat_interleave(mask.kv_block, 3)
    masked = masked[:, :, : mask.q_len, : mask.kv_len]
    inside = masked & visible
    kv = torch.arange(mask.kv_len)
    first = torch.where(inside, kv, mask.kv_len).amin(-1, keepdim=True)
    last = torch.where(inside, kv, -1).amax(-1, keepdim=True)
    possible = bool((inside == (masked & (first <= kv) & (kv <= last))).all())
    assert (mask.interval is not None) == possible
    if mask.interval is not None:
        lo, hi = mask.interval
        assert lo.dtype == hi.dtype == torch.int32
        assert lo.shape == hi.shape == masked.shape[:3]
        assert torch.equal(inside, masked & (lo[..., None] <= kv) & (kv < hi[..., None]))
        assert bool(((lo == 0) & (hi == 0))[~inside.any(-1)].all())


def test_an_interval_may_span_full_blocks_between_masked_ones() -> None:
    bm = flex.BlockMask.from_kv_blocks(
        torch.tensor([[[2]]], dtype=torch.int32), torch.tensor([[[[2, 0, 0]]]], dtype=torch.int32),
        torch.tensor([[[1]]], dtype=torch.int32), torch.tensor([[[[1, 0, 0]]]], dtype=torch.int32),
        BLOCK_SIZE=4, mask_mod=lambda b, h, q, kv: (kv >= 2) & (kv < 9) & (kv != 5), seq_lengths=(4, 12),
    )  # fmt: skip
    mask = from_block_mask(bm)  # key 5, in the full block, is visible whatever the mask_mod says
    assert mask.interval is not None
    assert mask.interval[0].tolist() == [[[2] * 4]]
    assert mask.interval[1].tolist() == [[[9] * 4]]
    assert mask.to_dense()[0, 0, 0].nonzero()[:, 0].tolist() == [2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("chunk", [1, 100])
def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    for limit in ("PAIRS", "_TILES", "_BLOCKS", "_FIRST_BLOCKS", "_UNMERGED_RUNS"):
        monkeypatch.setattr(classify, limit, chunk)
    monkeypatch.setattr("tritoncp.masks.mask.PAIRS", chunk)
    monkeypatch.setattr(block_lists, "MAX_ENTRIES", chunk)
    for seed in range(5):
        mod = make_mask_mod(seed, 14, 17)
        mask = create_block_mask(mod, 2, 3, 14, 17, BLOCK_SIZE=(6, 5))
        converted = from_block_mask(
            flex.create_block_mask(mod, 2, 3, 14, 17, device="cpu", BLOCK_SIZE=(6, 5))
        )
        assert torch.equal(mask.to_dense(), flex.create_mask(mod, 2, 3, 14, 17, device="cpu"))
        assert mask.runs == converted.runs
        mask = with_intervals(mask, mod)
        assert (mask.interval is None) == (converted.interval is None)


def test_the_mask_mod_is_evaluated_in_masked_blocks_in_range_only() -> None:
    mod = causal()
    bm = flex.create_block_mask(mod, 1, 1, 37, 37, device="cpu", BLOCK_SIZE=8)
    table = torch.arange(37)

    def picky(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        masked = (q // 8 == kv // 8) | (q >= 32)  # the diagonal, and the last row, which q_len cuts
        return table[torch.where(masked, q, 1000)] >= table[kv]  # an index error anywhere else

    mask = from_block_mask(bm, evaluate=picky)
    assert mask.mask_mod is mod
    assert mask.interval is not None
    assert mask.interval[1].tolist() == [[list(range(1, 38))]]


def test_without_a_mask_mod_partial_blocks_are_full() -> None:
    num, indices = torch.full((1, 1, 2), 2, dtype=torch.int32), torch.tensor([[[[2, 0, 1], [1, 0, 2]]]]).int()
    mask = from_block_mask(flex.BlockMask.from_kv_blocks(num, indices, BLOCK_SIZE=4, seq_lengths=(8, 10)))
    assert mask.runs.to_kinds().tolist() == [[[[1, 3, 2], [1, 1, 3]]]]
    assert mask.mask_mod is None
    assert mask.interval is None


def test_full_blocks_of_a_mask_that_reads_nothing_are_not_evaluated() -> None:
    def never(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        raise AssertionError("no block is partial, so there is nothing to evaluate")

    one, zero = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, dtype=torch.int32)
    bm = flex.BlockMask.from_kv_blocks(
        zero, zero[..., None], one, zero[..., None], BLOCK_SIZE=8, mask_mod=never
    )
    mask = from_block_mask(bm)
    assert mask.mask_mod is never
    assert mask.interval is not None
    assert bool(mask.to_dense().all())


@given(geometries())
@LAWS
def test_full_mask_shows_everything(geometry) -> None:
    q_len, kv_len, *block = geometry
    mask = full_mask(q_len, kv_len, 2, 3, tuple(block))
    assert bool(mask.to_dense().all())
    assert mask.to_dense().shape == (2, 3, q_len, kv_len)
    assert mask.mask_mod is None
    assert from_block_mask(mask.to_block_mask()).runs == mask.runs


@pytest.mark.parametrize(
    ("mod", "reads"),
    [
        (lambda b, h, q, kv: q >= kv, (False, False)),
        (flex.and_masks(lambda b, h, q, kv: q >= kv, flex.noop_mask), (False, False)),
        (lambda b, h, q, kv: q >= kv + b, (True, False)),
        (lambda b, h, q, kv: (q >= kv) & (h < 1), (False, True)),
        (document(ids=torch.zeros(1, 64, dtype=torch.int64)), (True, False)),
        (document(ids=torch.zeros(64, dtype=torch.int64)), (False, False)),
        (and_masks(causal(), lambda b, h, q, kv: h >= 0), (False, True)),
    ],
)
def test_an_interval_found_for_one_batch_row_does_not_serve_others_it_may_not_hold_for(mod, reads) -> None:
    for mask in (
        with_intervals(create_block_mask(mod, None, None, 64, 64, BLOCK_SIZE=16), mod),
        from_block_mask(
            flex.create_block_mask(
                lambda b, h, q, kv: mod(b, h, q, kv) & (q >= kv), 1, 1, 64, 64, device="cpu", BLOCK_SIZE=16
            )
        ),
    ):
        assert mask.reads == reads
        assert mask.interval is not None
        assert mask.interval_for(1, 1) is mask.interval
        assert (mask.interval_for(4, 1) is None) == reads[0]
        assert (mask.interval_for(1, 4) is None) == reads[1]


def test_lists_of_one_batch_row_take_only_its_interval_from_a_closed_form() -> None:
    mod = document(lengths=[[4, 12], [8, 8]])
    mask = from_block_mask(flex.create_block_mask(mod, 1, 1, 16, 16, device="cpu", BLOCK_SIZE=8))
    assert mask.interval is not None
    assert mask.interval[0].tolist() == [[[0] * 4 + [4] * 12]]
    assert mask.interval_for(2, 1) is None


def test_a_mask_listed_once_serves_every_batch_row_with_its_own_mask_mod() -> None:
    mod = lambda b, h, q, kv: q >= kv + b  # noqa: E731
    mask = create_block_mask(mod, None, None, 64, 64, BLOCK_SIZE=16)
    dense = mask.to_dense(B=3, H=2)
    kinds = mask.runs.to_kinds().expand(3, 2, -1, -1)
    assert torch.equal(dense, visible_by_definition(mod, kinds, mask))


def test_costs_weigh_blocks_and_sum_over_heads() -> None:
    mask = create_block_mask(causal(), 2, 3, 64, 64, BLOCK_SIZE=16)
    assert mask.costs().tolist() == [[3, 6, 9, 12]] * 2
    assert mask.costs().dtype == torch.int64
    assert mask.costs(full=1.0, partial=1.5).tolist() == [[4.5, 7.5, 10.5, 13.5]] * 2


def test_pickle_and_pictures() -> None:
    mask = create_block_mask(sliding_window(20), 2, 1, 100, 100, BLOCK_SIZE=16)
    copy = pickle.loads(pickle.dumps(mask))
    assert copy.runs == mask.runs
    assert str(copy) == str(mask)
    assert "sparsity=" in repr(mask)
    assert "\n" not in repr(mask)
    assert "b=0, h=0 of 2 x 1" in str(mask)
    picture = create_block_mask(causal(), None, None, 1 << 16, 1 << 16).draw()
    assert picture.splitlines() == ["█" * i + "▒" + "·" * (63 - i) for i in range(64)]
    assert max(len(line) for line in full_mask(129 * 100, 500).draw().splitlines()) <= 64


def test_empty_sequences() -> None:
    for q_len, kv_len in ((0, 5), (5, 0), (0, 0)):
        for mod in (causal(), lambda b, h, q, kv: q > kv):
            mask = create_block_mask(mod, 1, 1, q_len, kv_len)
            assert mask.to_dense().shape == (1, 1, q_len, kv_len)
            assert mask.sparsity() == 0
        full = full_mask(q_len, kv_len)
        assert from_block_mask(full.to_block_mask()).runs == full.runs
        assert isinstance(full.draw(), str)


def test_a_million_tokens_fit_in_sixteen_mebibytes() -> None:
    n = 1 << 20
    mask = create_block_mask(and_masks(causal(), document(lengths=[n // 128] * 128)), None, None, n, n)
    assert mask.interval is not None
    tensors = [mask.runs.ptr, mask.runs.runs, *mask.interval]
    assert sum(t.untyped_storage().nbytes() for t in tensors) <= 16 << 20
    assert mask.sparsity() > 99


def test_a_slice_is_refused_and_so_are_broken_lists() -> None:
    bm = flex.create_block_mask(causal(), 1, 1, 64, 64, device="cpu", BLOCK_SIZE=16)
    with pytest.raises(
        ValueError, match=r"lists 1 rows of blocks, but its q_len=64 has 4 of 16: give the global mask"
    ):
        from_block_mask(bm[:, :, :1])
    bm.full_kv_num_blocks, bm.full_kv_indices = bm.kv_num_blocks, bm.kv_indices
    with pytest.raises(ValueError, match=r"block \(q block 0, kv block 0\) more than once"):
        from_block_mask(bm)
    far = flex.create_block_mask(causal(), 1, 1, 64, 64, device="cpu", BLOCK_SIZE=16)
    far.kv_indices = far.kv_indices + 7
    with pytest.raises(ValueError, match="lists kv blocks 7 to 10, but kv_len has only 4 blocks"):
        from_block_mask(far)


def test_other_mistakes_say_what_to_do() -> None:
    with pytest.raises(TypeError, match=r"returns torch.int64; a mask_mod must return bool: compare"):
        create_block_mask(lambda b, h, q, kv: q - kv, None, None, 8, 8)
    with pytest.raises(ValueError, match="differs between 2 batch rows, but the mask has B=1: give B=2"):
        create_block_mask(document(lengths=[[4, 4], [2, 6]]), None, None, 8, 8)
    with pytest.raises(ValueError, match="BLOCK_SIZE must be a positive int"):
        create_block_mask(causal(), None, None, 8, 8, BLOCK_SIZE=0)
    with pytest.raises(ValueError, match="has 2 x 1 blocks, its runs have 1 x 1"):
        Mask(8, 8, 4, 8, full_mask(8, 8).runs, None, None, None)
    with pytest.raises(ValueError, match=r"16 x 1073741825; .* up to 1073741824 tokens"):
        full_mask(16, (1 << 30) + 1, block=1 << 24)
    assert full_mask(16, 1 << 30, block=1 << 24).kv_len == 1 << 30


# -- slices, transposes, unions, intersections --------------------------------------------------------


def as_listed(mask: Mask) -> Mask:
    """Return the mask's listed blocks as full blocks, without a mask_mod."""
    kinds = mask.runs.to_kinds()
    kinds[kinds == Kind.MASKED] = int(Kind.FULL)
    bm = replace(mask, runs=Runs.from_kinds(kinds), mask_mod=None, interval=None, window=None)
    return from_block_mask(bm.to_block_mask())


@FEW
@given(geometries(), st.integers(0, 999), st.data())
def test_rows_of_a_mask_have_the_same_visible_pairs(geometry, seed: int, data: st.DataObject) -> None:
    q_len, kv_len, *block = geometry
    mod = data.draw(st.sampled_from([make_mask_mod(seed, q_len, kv_len), causal(), sliding_window(3, 2)]))
    mask = create_block_mask(mod, 2, 1, q_len, kv_len, BLOCK_SIZE=tuple(block))
    start = data.draw(st.integers(0, (q_len - 1) // block[0])) * block[0]
    stop = data.draw(st.integers(start + 1, q_len))
    part = mask.rows(start, stop)
    assert torch.equal(part.to_dense(), mask.to_dense()[:, :, start:stop])
    rebuilt = create_block_mask(part.mask_mod, 2, 1, stop - start, kv_len, BLOCK_SIZE=tuple(block))
    assert part.runs == rebuilt.runs
    if part.interval is not None:
        lo, hi = (t[..., None] for t in part.interval)
        inside = (lo <= torch.arange(kv_len)) & (torch.arange(kv_len) < hi)
        masked = (part.runs.to_kinds() == Kind.MASKED).repeat_interleave(block[0], 2)
        masked = masked.repeat_interleave(block[1], 3)[:, :, : stop - start, :kv_len]
        assert torch.equal(part.to_dense() & masked, inside & masked)


def test_rows_start_at_a_block() -> None:
    with pytest.raises(ValueError, match=r"rows\(4, 16\).*multiple of 8"):
        create_block_mask(causal(), None, None, 16, 16, BLOCK_SIZE=8).rows(4, 16)


@FEW
@given(geometries(), st.integers(0, 999), st.booleans())
def test_transposed_twice_is_the_same(geometry, seed: int, window: bool) -> None:
    q_len, kv_len, *block = geometry
    mod = sliding_window(5, 1) if window else make_mask_mod(seed, q_len, kv_len)
    mask = create_block_mask(mod, 2, 3, q_len, kv_len, BLOCK_SIZE=tuple(block))
    flipped = mask.transpose()
    assert torch.equal(flipped.to_dense(), mask.to_dense().mT)
    assert flipped.transpose().runs == mask.runs
    size = tuple(reversed(block))
    assert flipped.runs == create_block_mask(flipped.mask_mod, 2, 3, kv_len, q_len, BLOCK_SIZE=size).runs


@FEW
@given(geometries(), st.integers(0, 999), st.lists(st.booleans(), min_size=2, max_size=2), st.booleans())
def test_masks_combine_as_their_pairs_do(geometry, seed: int, listed: list[bool], both: bool) -> None:
    """Masks combine by their visible pairs, also if block lists differ from the mask_mod, or without one."""
    q_len, kv_len, *block = geometry
    mods = make_mask_mod(seed, q_len, kv_len), make_mask_mod(seed + 1, q_len, kv_len)
    parts = [
        create_block_mask(mod, b, 1, q_len, kv_len, BLOCK_SIZE=tuple(block)) for mod, b in zip(mods, (1, 2))
    ]
    parts = [as_listed(mask) if only else mask for mask, only in zip(parts, listed)]
    one, other = (mask.to_dense(B=2) for mask in parts)
    combined, want = (parts[0] & parts[1], one & other) if both else (parts[0] | parts[1], one | other)
    assert torch.equal(combined.to_dense(), want)
    pad = -q_len % block[0], -kv_len % block[1]
    tiles = (
        torch.nn.functional.pad(want, (0, pad[1], 0, pad[0]))
        .unflatten(3, (-1, block[1]))
        .unflatten(2, (-1, block[0]))
    )
    count = tiles.sum((3, 5))
    kinds = torch.where(
        count == 0, ABSENT, torch.where(count == block[0] * block[1], int(Kind.FULL), int(Kind.MASKED))
    )
    assert torch.equal(combined.runs.to_kinds().long(), kinds)


def test_masks_of_other_geometry_do_not_combine() -> None:
    one, other = (create_block_mask(causal(), None, None, 16, 16, BLOCK_SIZE=b) for b in (8, 4))
    with pytest.raises(ValueError, match="same lengths and BLOCK_SIZE"):
        one & other


def test_closed_forms_combine_with_operators() -> None:
    ids = torch.tensor([0] * 10 + [1] * 22)
    near = (causal() & sliding_window(4, 4)) | ~document(ids=ids)
    q, kv = torch.arange(32)[:, None], torch.arange(32)
    want = ((q >= kv) & (q - kv <= 4)) | (ids[q] != ids[kv])
    assert torch.equal(near(None, None, q, kv), want)
    assert torch.equal(create_block_mask(near, None, None, 32, 32, BLOCK_SIZE=8).to_dense()[0, 0], want)


def test_expanded_tensors_count_once_in_nbytes() -> None:
    one, many = (create_block_mask(causal(), *size, 256, 256, BLOCK_SIZE=16) for size in ((1, 1), (8, 4)))
    intervals = 2 * 4 * 256
    assert one.nbytes == one.runs.ptr.nbytes + one.runs.runs.nbytes + intervals
    assert many.nbytes == many.runs.ptr.nbytes + many.runs.runs.nbytes + intervals
