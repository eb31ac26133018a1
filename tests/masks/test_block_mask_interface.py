"""Members that Mask and Plan share with torch's BlockMask: the same values, blocks and answers."""

import itertools

import numpy as np
import pytest
import torch
from torch.nn.attention import flex_attention as flex

import tritoncp
from tritoncp import causal, create_block_mask, document, make_plan
from tritoncp.masks.mask_mod import num_batch_rows

IDS = torch.tensor([[0] * 100 + [1] * 156, [0] * 200 + [1] * 56, [0] * 256])
MODS = {
    "causal": causal(),
    "documents": causal() & document(ids=IDS),
    "lambda": lambda b, h, q, kv: (q >= kv) & (q - kv <= 40 * (h + 1) + 7 * b),
    "table": lambda b, h, q, kv: (IDS[b, q] == IDS[b, kv]) | (h == 1),
}


def pair(name, B=3, H=2, q_len=256, kv_len=256, block=64):
    """Return (tritoncp's mask, torch's BlockMask) of one mask_mod."""
    sizes = B, H, q_len, kv_len
    theirs = flex.create_block_mask(MODS[name], *sizes, device="cpu", BLOCK_SIZE=block)
    return create_block_mask(MODS[name], *sizes, BLOCK_SIZE=block), theirs


def listed(bm: flex.BlockMask) -> torch.Tensor:
    """Kinds of blocks: 0 absent, 1 masked, 2 full."""
    full = flex.BlockMask.from_kv_blocks(bm.full_kv_num_blocks, bm.full_kv_indices, BLOCK_SIZE=bm.BLOCK_SIZE)
    return bm.to_dense() + full.to_dense()


@pytest.mark.parametrize("name", MODS)
@pytest.mark.parametrize(("q_len", "kv_len"), [(256, 256), (100, 200)])
def test_a_mask_has_the_members_of_torchs(name, q_len, kv_len) -> None:
    ours, theirs = pair(name, q_len=q_len, kv_len=kv_len)
    assert ours.shape == theirs.shape and ours.numel() == theirs.numel()
    assert ours.seq_lengths == theirs.seq_lengths and ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    assert ours.sparsity() == pytest.approx(theirs.sparsity())
    assert ours.ndim == ours.dim() == len(theirs.shape) == 4
    assert torch.equal(listed(ours.to_block_mask()), listed(theirs))


def test_a_mask_and_a_plan_are_unchanged_by_moves_to_devices_and_dtypes() -> None:
    mask = create_block_mask(causal(), 1, 1, 256, 256)
    plan = make_plan(mask, world_size=2)
    for thing in (mask, plan):
        for same in (
            thing.contiguous(),
            thing.to("cpu"),
            thing.to("cuda", non_blocking=True),
            thing.to(torch.bool),
            thing.to(device=torch.device("cpu"), dtype=torch.bfloat16),
        ):
            assert same is thing
        for wrong in ({}, None, "nowhere"):
            with pytest.raises((TypeError, RuntimeError)):
                thing.to(wrong, 3)
    assert (plan.shape, plan.ndim, plan.numel(), plan.BLOCK_SIZE) == ((1, 1, 256, 256), 4, 65536, (128, 128))
    assert plan.sparsity() == mask.sparsity() and plan.seq_lengths == (256, 256) and plan.dim() == 4


INDICES = {
    "row": 1,
    "last row": -1,
    "rows": slice(1, 3),
    "every other row": slice(None, None, 2),
    "rows in another order": torch.tensor([2, 0]),
    "three rows without one distance": torch.tensor([2, 0, 1]),
    "three rows in another order": torch.tensor([0, 2, 1]),
    "rows by bools": torch.tensor([True, False, True]),
    "head": (slice(None), 1),
    "row and head": (2, 0),
    "rows and head": (slice(0, 2), slice(1, 2)),
    "0-d tensor": torch.tensor(1),
    "blocks": (slice(None), slice(None), slice(1, 3)),
    "block": (1, 1, 3),
    "block tensor": (slice(0, 2), slice(None), torch.tensor([2])),
    "ellipsis": (1, ...),
    "four": (1, slice(None), slice(2, None), slice(None)),
    "all": slice(None),
}


@pytest.mark.sample(11)
@pytest.mark.parametrize("name", MODS)
@pytest.mark.parametrize("index", INDICES)
def test_an_index_selects_the_same_blocks_as_in_torch(name, index) -> None:
    ours, theirs = pair(name)
    index = INDICES[index]
    parts = index if isinstance(index, tuple) else (index,)
    if Ellipsis in parts:
        theirs = theirs[tuple(part for part in parts if part is not Ellipsis)]
    elif isinstance(index, torch.Tensor) and index.ndim == 0:
        theirs = theirs[int(index)]
    else:
        theirs = theirs[parts[:3]]
    part = ours[index]
    assert num_batch_rows(part.mask_mod) == (part.B if num_batch_rows(ours.mask_mod) > 1 else 1)
    assert torch.equal(listed(part.to_block_mask()), listed(theirs))
    # and the pairs equal the whole mask's: an int keeps its dimension
    dense = ours.to_dense()
    steps = (1, 1, 64)
    for dim, (selected, step) in enumerate(zip(parts, steps)):
        if selected is Ellipsis:
            break
        numbers = torch.arange(ours.runs.shape[dim])[selected].reshape(-1)
        places = (numbers[:, None] * step + torch.arange(step)).flatten()
        dense = dense.index_select(dim, places)
    assert part.shape == dense.shape and torch.equal(part.to_dense(), dense)


@pytest.mark.parametrize("name", MODS)
def test_a_slice_of_a_torch_mask_is_taken_if_it_has_the_length_of_its_blocks(name) -> None:
    ours, theirs = pair(name)
    part = theirs[:, :, 1:3]
    part.mask_mod = lambda b, h, q, kv: MODS[name](b, h, q + 64, kv)
    if part.shape[2] == 256:  # torch 2.13 and before
        with pytest.raises(ValueError, match=r"lists 2 rows of blocks.*give the global mask"):
            tritoncp.from_block_mask(part)
    else:
        want = ours[:, :, 1:3]
        got = tritoncp.from_block_mask(part)
        assert got.shape == want.shape and torch.equal(got.to_dense(), want.to_dense())


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["lambda", "table"])
@pytest.mark.parametrize("index", [1, (slice(1, 3), 1), (torch.tensor([2, 0, 1]),), (slice(None), 0, 1)])
def test_attention_with_a_selected_mask_equals_the_selected_rows(name, index) -> None:
    ours, _ = pair(name, block=128)
    q, k, v = (torch.randn(3, 2, 256, 16, dtype=torch.float64) for _ in range(3))
    whole = tritoncp.flex_attention(q, k, v, block_mask=ours)
    places = [torch.arange(n) for n in (3, 2, 2)]
    parts = index if isinstance(index, tuple) else (index,)
    places = [p[i].reshape(-1) for p, i in zip(places, (*parts, slice(None), slice(None)))]
    rows = (places[2][:, None] * 128 + torch.arange(128)).flatten()
    select = lambda x: x[places[0]][:, places[1]]  # noqa: E731
    out = tritoncp.flex_attention(select(q)[:, :, rows], select(k), select(v), block_mask=ours[index])
    torch.testing.assert_close(out, select(whole)[:, :, rows])


def test_integers_of_other_libraries_and_types_select_rows() -> None:
    mask, _ = pair("documents")
    for row in (np.int64(1), np.uint8(1), torch.tensor(1, dtype=torch.uint8)):
        assert torch.equal(mask[row].to_dense(), mask[1].to_dense())
    assert torch.equal(mask[torch.tensor([2, 1], dtype=torch.uint8)].to_dense(), mask[[2, 1]].to_dense())
    assert torch.equal(torch.cat([row.to_dense() for row in mask]), mask.to_dense()), "iteration ends"


def test_a_plan_is_indexed_by_batch_rows() -> None:
    mask = create_block_mask(MODS["documents"], 3, 1, 256, 256)
    plan = make_plan(mask)
    assert plan[1].first_row == 1 and plan[1].mask.B == 1 and plan[-2:].mask.B == 2
    for wrong in ((0, 0), slice(0, 3, 2), 3):
        with pytest.raises(IndexError):
            plan[wrong]
    shared = make_plan(create_block_mask(causal(), 1, 1, 256, 256))  # serves every batch row
    for first, count in itertools.product(range(-1, 4), range(4)):
        for one, has_rows in ((plan, first + count <= 3), (shared, True)):
            if first >= 0 and count >= 1 and has_rows:
                rows = one.batch_rows(first, count).mask.B
                assert rows == (1 if one is shared else count)
            else:
                with pytest.raises(ValueError, match=f"batch rows {first} to {first + count - 1} of a plan"):
                    one.batch_rows(first, count)
