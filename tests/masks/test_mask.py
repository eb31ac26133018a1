"""Tests of masks, compared with torch's builder and pair by pair with the definition."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from tests.masks.random_masks import (
    FEW,
    assert_same_lists,
    at_pairs,
    geometries,
    make_mask_mod,
    visible_by_definition,
)
from tritoncp import Mask, and_masks, causal, document, from_block_mask, full_mask, sliding_window
from tritoncp.masks import ABSENT, Kind, create_block_mask
from tritoncp.masks.classification import classify
from tritoncp.masks.visible_keys import count_visible_keys


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
    converted = from_block_mask(torchs).with_intervals()
    assert converted.runs == mask.runs
    mask = mask.with_intervals()
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
    mask = from_block_mask(bm).with_intervals()
    want = visible_by_definition(mod, kinds, mask)
    assert torch.equal(mask.to_dense(), want)
    cut = torch.zeros(shape, dtype=torch.bool)
    cut[:, :, -1] |= q_len % q_block != 0
    cut[..., -1] |= kv_len % kv_block != 0
    assert torch.equal(mask.runs.to_kinds() == Kind.BOUNDED, cut & (kinds == Kind.FULL))
    assert_interval_exact(mask, kinds == Kind.MASKED, want)


def assert_interval_exact(mask: Mask, masked: Tensor, visible: Tensor) -> None:
    """The mask has intervals if and only if it can have them, and they are exactly the visible pairs."""
    masked = at_pairs(masked, mask)
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
        assert bool((lo <= hi).all())


@pytest.mark.sample(1)
@pytest.mark.parametrize("chunk", [1, 100])
def test_the_size_of_evaluated_chunks_does_not_affect_a_mask(
    monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    for limit in ("PAIRS", "_TILES", "_BLOCKS", "_UNMERGED_TILES"):
        monkeypatch.setattr(classify, limit, chunk)
    for seed in range(5):
        mod = make_mask_mod(seed, 14, 17)
        mask = create_block_mask(mod, 2, 3, 14, 17, BLOCK_SIZE=(6, 5))
        converted = from_block_mask(
            flex.create_block_mask(mod, 2, 3, 14, 17, device="cpu", BLOCK_SIZE=(6, 5))
        )
        assert torch.equal(mask.to_dense(), flex.create_mask(mod, 2, 3, 14, 17, device="cpu"))
        assert mask.runs == converted.runs
        mask, converted = mask.with_intervals(), converted.with_intervals()
        assert (mask.interval is None) == (converted.interval is None)


def test_the_mask_mod_is_evaluated_in_masked_blocks_in_range_only() -> None:
    bm = flex.create_block_mask(causal(), 1, 1, 37, 37, device="cpu", BLOCK_SIZE=8)
    table = torch.arange(37)

    def picky(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        masked = (q // 8 == kv // 8) | (q >= 32)  # the diagonal, and the last row, which q_len cuts
        return table[torch.where(masked, q, 1000)] >= table[kv]  # an index error anywhere else

    bm.mask_mod = picky
    mask = from_block_mask(bm).with_intervals()
    assert mask.interval is not None
    assert mask.interval[1].tolist() == [[list(range(1, 38))]]


def test_partial_blocks_are_full_without_a_mask_mod() -> None:
    num, indices = torch.full((1, 1, 2), 2, dtype=torch.int32), torch.tensor([[[[2, 0, 1], [1, 0, 2]]]]).int()
    mask = from_block_mask(flex.BlockMask.from_kv_blocks(num, indices, BLOCK_SIZE=4, seq_lengths=(8, 10)))
    assert mask.runs.to_kinds().tolist() == [[[[1, 3, 2], [1, 1, 3]]]]
    assert mask.mask_mod is None and mask.reads == (False, False)
    assert mask.interval is None


@given(geometries())
def test_full_mask_shows_everything(geometry) -> None:
    q_len, kv_len, *block = geometry
    mask = full_mask(q_len, kv_len, 2, 3, tuple(block))
    assert bool(mask.to_dense().all())
    assert mask.to_dense().shape == (2, 3, q_len, kv_len)
    assert mask.mask_mod is None and mask.reads == (False, False)
    assert from_block_mask(mask.to_block_mask()).runs == mask.runs


@pytest.mark.long
def test_a_full_mask_takes_memory_for_its_rows_of_blocks_alone() -> None:
    """A dense map of its blocks would take 1 TiB."""
    mask = full_mask(1 << 30, (1 << 30) - 5, block=1024)
    assert sum(int(blocks.sum()) for blocks in mask.runs.counts()) == 1 << 40
    assert mask.runs.runs.nbytes + mask.runs.ptr.nbytes < 64 << 20


@FEW
@given(st.integers(0, 1 << 16), geometries(), st.sampled_from([0.0, 0.02, 0.5]))
def test_rows_have_intervals_if_their_masked_blocks_hide_no_key_between(seed, geometry, share) -> None:
    """share: of rows with hidden keys, one or a few, within their interval."""
    g = torch.Generator().manual_seed(seed)
    q_len, kv_len, q_block, kv_block = geometry
    ends = torch.randint(0, kv_len + 1, (2, 2, 2, q_len, 1), generator=g).sort(0).values
    key = torch.arange(kv_len)
    first = torch.randint(0, kv_len, (2, 2, q_len, 1), generator=g)
    hidden = (first <= key) & (key < first + 1 + seed % (2 * kv_block))
    hidden &= torch.rand(2, 2, q_len, 1, generator=g) < share
    visible = (ends[0] <= key) & (key < ends[1]) & ~hidden

    def mod(b, h, q, kv):
        return visible[b, h, q, kv]

    mask = create_block_mask(mod, 2, 2, q_len, kv_len, BLOCK_SIZE=(q_block, kv_block))
    masked = at_pairs(mask.runs.to_kinds(), mask) == Kind.MASKED
    seen = visible & masked
    lo = torch.where(seen, key, kv_len).amin(3)
    hi = torch.where(seen, key + 1, 0).amax(3)
    between = (lo[..., None] <= key) & (key < hi[..., None]) & masked
    interval = mask.with_intervals().interval
    assert (interval is not None) == torch.equal(between, seen)
    if interval is not None:
        assert torch.equal(interval[1], hi.int()) and torch.equal(
            interval[0], torch.where(hi > 0, lo, 0).int()
        )


@pytest.mark.parametrize("block", [255, 256, 257])
def test_intervals_end_at_the_last_key_of_a_block(block: int) -> None:
    """Keys of an evaluated block are numbered in a type that holds all of them."""

    def compared_by_steps(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return torch.stack([q, kv]).max(0).values == q  # query and key are not compared

    mask = create_block_mask(compared_by_steps, 1, 1, 2 * block, 2 * block, BLOCK_SIZE=block)
    lo, hi = mask.with_intervals().interval
    rows = torch.arange(2 * block)
    assert torch.equal(lo[0, 0], (rows // block * block).int()) and torch.equal(hi[0, 0], (rows + 1).int())


@pytest.mark.parametrize(
    ("mod", "reads"),
    [
        (lambda b, h, q, kv: q >= kv, (False, False)),
        (flex.and_masks(lambda b, h, q, kv: q >= kv, flex.noop_mask), (False, False)),
        (lambda b, h, q, kv: torch.stack([q, kv]).max(0).values == q, (False, False)),
        (lambda b, h, q, kv: q >= kv + b, (True, False)),
        (lambda b, h, q, kv: (q >= kv) & (h < 1), (False, True)),
        (document(ids=torch.zeros(1, 64, dtype=torch.int64)), (False, False)),
        (document(ids=torch.zeros(64, dtype=torch.int64)), (False, False)),
        (and_masks(causal(), lambda b, h, q, kv: h >= 0), (False, True)),
    ],
)
def test_an_interval_found_for_one_batch_row_does_not_serve_others_it_may_not_hold_for(mod, reads) -> None:
    for mask in (
        create_block_mask(mod, None, None, 64, 64, BLOCK_SIZE=16).with_intervals(),
        from_block_mask(
            flex.create_block_mask(
                lambda b, h, q, kv: mod(b, h, q, kv) & (q >= kv), 1, 1, 64, 64, device="cpu", BLOCK_SIZE=16
            )
        ).with_intervals(),
    ):
        assert mask.reads == reads
        assert mask.interval is not None
        assert mask.interval_for(1, 1) is mask.interval
        assert (mask.interval_for(4, 1) is None) == reads[0]
        assert (mask.interval_for(1, 4) is None) == reads[1]
        assert (mask.listed_rows(1, 1).interval is None) == reads[0]
        assert mask[[0, 0]].interval is not None and (mask[:, [0, 0]].interval is None) == reads[1]
    assert create_block_mask(mod, 2, 2, 64, 64, BLOCK_SIZE=16)[0, 1].reads == (False, False)


@pytest.mark.parametrize("size", [(5, 8), (8, 5), (5, 5), (8, 8)])
def test_pairs_past_the_last_query_or_key_are_invisible(size) -> None:
    grid = classify.Grid(*size, 4, 4)
    blocks = torch.cartesian_prod(*map(torch.arange, (1, 1, 2, 2)))
    (chunk,) = classify.evaluate_blocks(lambda *_: torch.ones(4, 4, 4, dtype=torch.bool), blocks, grid)
    visible = chunk[1].view(2, 2, 4, 4).transpose(1, 2).reshape(8, 8)
    assert bool(visible[: size[0], : size[1]].all()) and int(visible.sum()) == size[0] * size[1]


def test_pickle_and_pictures() -> None:
    mask = create_block_mask(sliding_window(20), 2, 1, 100, 100, BLOCK_SIZE=16)
    copy = pickle.loads(pickle.dumps(mask))
    assert copy.runs == mask.runs
    assert str(copy) == str(mask)
    hidden = create_block_mask(lambda b, h, q, kv: (q + kv) % 2 == 0, 1, 1, 64, 64, BLOCK_SIZE=16)
    texts = "rows see intervals", "nothing masked inside blocks", "rows see a mask_mod"
    for one, text in zip((mask, full_mask(8, 8), hidden), texts):
        assert "sparsity=" in repr(one) and repr(one).endswith(f", {text})") and "\n" not in repr(one)
    assert "b=0, h=0 of 2 x 1" in str(mask) and "b=0" not in str(full_mask(8, 8))
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
    assert torch.equal(part.to_dense(), rebuilt.to_dense())
    if stop == q_len or stop % block[0] == 0:
        assert part.runs == rebuilt.runs
    if part.interval is not None:
        lo, hi = (t[..., None] for t in part.interval)
        inside = (lo <= torch.arange(kv_len)) & (torch.arange(kv_len) < hi)
        masked = at_pairs(part.runs.to_kinds() == Kind.MASKED, part)
        assert torch.equal(part.to_dense() & masked, inside & masked)


@FEW
@given(geometries(), st.integers(0, 999), st.sampled_from([1, 3]), st.integers(0, 2))
def test_heads_of_a_mask_have_the_same_visible_pairs(geometry, seed: int, heads: int, first: int) -> None:
    q_len, kv_len, *block = geometry
    mod = make_mask_mod(seed, q_len, kv_len)
    part = create_block_mask(mod, 2, heads, q_len, kv_len, BLOCK_SIZE=tuple(block)).head_range(first, 1)
    b, h, q, kv = torch.meshgrid(*map(torch.arange, (2, 1, q_len, kv_len)), indexing="ij")
    assert torch.equal(part.mask_mod(b, h, q, kv), mod(b, h + first, q, kv))
    if heads > 1:
        whole = create_block_mask(mod, 2, heads, q_len, kv_len, BLOCK_SIZE=tuple(block))
        assert torch.equal(part.to_dense(), whole.to_dense()[:, first : first + 1])
        shifted = create_block_mask(
            lambda b, h, q, kv: kv <= q + h, 2, heads, q_len, kv_len, BLOCK_SIZE=tuple(block)
        )
        shifted = shifted.with_intervals()
        assert (shifted[:, first].interval is None) == (shifted.interval is None)


def test_keys_that_each_batch_row_and_head_sees_are_counted_apart() -> None:
    """The mask_mod has no intervals, so that all pairs of masked blocks are evaluated."""
    mod = lambda b, h, q, k: (q * (b + 2) + k * (h + 1)) % 3 == 0  # noqa: E731
    mask = create_block_mask(mod, 2, 4, 40, 33, BLOCK_SIZE=16)
    assert torch.equal(count_visible_keys(mask, 2, 4), mask.to_dense().sum(-1))
