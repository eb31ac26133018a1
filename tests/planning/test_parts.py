"""Plans of chunks: results of the whole, from the keys that their queries need."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tritoncp import and_masks, causal, create_block_mask, document, flex_attention, make_plan, sliding_window
from tritoncp.core.records import replace
from tritoncp.masks.runs.block_runs import Kind, Runs
from tritoncp.planning.parts import chunk_range, rows_of_placement
from tritoncp.planning.placement import by_blocks

S = 96
IDS = torch.tensor([0] * 40 + [1] * 56)
ROWS = torch.tensor([96, 50])
OPTIONS = {"PACK_GQA": False, "SPLIT_KV": 1, "BLOCK_M": 16, "BLOCK_N": 16}
MASKS: dict[str, Callable[[], Any]] = {
    "causal": lambda: create_block_mask(causal(), None, None, S, S, BLOCK_SIZE=32),
    "window": lambda: create_block_mask(sliding_window(20), None, None, S, S, BLOCK_SIZE=32),
    "documents": lambda: create_block_mask(
        and_masks(causal(), document(ids=IDS)), None, None, S, S, BLOCK_SIZE=32
    ),
    "two-sided": lambda: create_block_mask(
        lambda b, h, q, kv: (q - kv).abs() < 9, None, None, S, S, BLOCK_SIZE=32
    ),
    "batch rows": lambda: create_block_mask(
        lambda b, h, q, kv: (q >= kv) & (kv < ROWS[b]), 2, None, S, S, BLOCK_SIZE=32
    ),
}


def tensors(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(2, heads, S, 16, dtype=dtype, requires_grad=True) for heads in (2, 1, 1)]


@pytest.mark.sample(19)
@pytest.mark.parametrize("chunks", [2, 3, 6, 7])
@pytest.mark.parametrize("name", MASKS)
def test_needs_are_the_chunks_of_visible_keys(name, chunks):
    plan = make_plan(MASKS[name]())
    dense = plan.mask.to_dense().flatten(0, 1).any(0)
    tiles = [rows.chunk(chunks, 1) for rows in dense.chunk(chunks)]
    seen = torch.tensor([[bool(tile.any()) for tile in row] for row in tiles])
    assert torch.equal(plan.needs(chunks), seen)


def test_whole_blocks_are_needed_as_listed():
    """A list of all blocks of a causal mask; half of them have no visible key."""
    every = Runs.from_kinds(torch.full((1, 1, 3, 3), int(Kind.MASKED), dtype=torch.uint8))
    assert make_plan(replace(MASKS["causal"](), runs=every)).needs(3).all()


def test_slots_outside_a_chunk_are_empty():
    """Rank 0 holds two blocks of the first batch row and one of the second."""
    placed = by_blocks(12, 4, [[[1, 2], [0]], [[2], [0, 1]]])
    part = rows_of_placement(placed, [range(4, 8), range(0)])
    assert part.slots[0].tolist() == [[[0, 8, 4]], [[0, 0, 0]]]


def test_chunks_are_as_long_as_the_first_but_the_last_which_is_not_empty():
    for rows, count in itertools.product(range(30), range(1, 9)):
        bounds = [min(chunk * -(-rows // count), rows) for chunk in range(count + 1)]
        if bounds[-2] == rows > 0:
            with pytest.raises(
                ValueError, match=f"keys in {count} chunks of {bounds[1]} leave none for the last"
            ):
                chunk_range(rows, 0, count, "keys")
        else:
            ranges = [chunk_range(rows, chunk, count, "keys") for chunk in range(count)]
            assert ranges == [range(a, b) for a, b in itertools.pairwise(bounds)]


@pytest.mark.parametrize("axis", ["b", "h"])
def test_blocks_that_are_listed_for_other_rows_or_heads_too_are_needed_whole(axis):
    """Row or head 0 sees even halves of blocks, row or head 1 odd halves, by lists of row and head 0."""

    def halves(b, h, q, kv):
        return (q >= kv) & ((kv % 32 < 16) == ({"b": b, "h": h}[axis] == 0))

    plan = make_plan(create_block_mask(halves, None, None, S, S, BLOCK_SIZE=32))
    blocks = torch.ones(3, 3, dtype=torch.bool).tril()
    assert torch.equal(plan.needs(6), blocks.repeat_interleave(2, 0).repeat_interleave(2, 1))


def test_chunks_have_numbers_and_the_keys_that_they_see():
    """Chunk i of a causal mask sees the keys of the first i + 1 chunks."""
    plan = make_plan(MASKS["causal"]())
    for index, keys in itertools.product(range(-1, 5), (None, *range(-1, 5))):
        if 0 <= index < 3 and (keys is None or index < keys <= 3):
            assert plan.part(index, 3, keys=keys).kv.length == S
            continue
        message = f"index={index} of 3 chunks; pass 0 to 2"
        if 0 <= index < 3:
            message = f"keys={keys}; pass a number of chunks from 1 to 3"
            if keys in (1, 2):
                message = f"of chunk {index} see keys of chunk {index}; pass keys={index + 1} or None"
        with pytest.raises(ValueError, match=message):
            plan.part(index, 3, keys=keys)


@pytest.mark.sample(6)
@pytest.mark.parametrize("chunks", [2, 6, 7])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.usefixtures("cpu_engine")
def test_parts_have_the_results_of_the_whole(name, chunks):
    plan, rows, (q, k, v) = make_plan(MASKS[name]()), -(-S // chunks), tensors()
    out = flex_attention(q, k, v, block_mask=plan, enable_gqa=True)
    grad = torch.randn_like(out)
    whole = [out, *torch.autograd.grad(out, (q, k, v), grad)]
    parts = []
    for i in range(chunks):
        keys = int(plan.needs(chunks)[i].nonzero().max()) + 1
        cut, part = slice(i * rows, (i + 1) * rows), plan.part(i, chunks, keys=keys)
        pair = [x[:, :, : keys * rows] for x in (k, v)]
        parts.append(flex_attention(q[:, :, cut], *pair, block_mask=part, enable_gqa=True))
    out = torch.cat(parts, 2)
    for x, y in zip([out, *torch.autograd.grad(out, (q, k, v), grad)], whole, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_interpreted_kernels_give_parts_the_bits_of_the_whole(dtype):
    plan, (q, k, v) = make_plan(MASKS["causal"]()), tensors(dtype)
    out = flex_attention(q, k, v, block_mask=plan, enable_gqa=True, kernel_options=OPTIONS)
    grad = torch.randn_like(out)
    (dq,) = torch.autograd.grad(out, q, grad)
    for keys in (2, None):
        part, rows = plan.part(1, 3, keys=keys), S if keys is None else 64
        own = q[:, :, 32:64].detach().requires_grad_()
        cut = flex_attention(
            own, k[:, :, :rows], v[:, :, :rows], block_mask=part, enable_gqa=True, kernel_options=OPTIONS
        )
        assert torch.equal(cut, out[:, :, 32:64])
        assert torch.equal(torch.autograd.grad(cut, own, grad[:, :, 32:64])[0], dq[:, :, 32:64])


@pytest.mark.parametrize("name", ["causal", "batch rows"])
@pytest.mark.usefixtures("cpu_engine")
def test_mods_of_batch_rows_get_indices_in_the_whole_batch(name):
    plan, (q, k, v), slopes = make_plan(MASKS[name]()), tensors(), torch.tensor([0.5, 0.1])

    def score(s, b, h, qi, ki):
        return s - slopes[b] * (qi - ki)

    whole = flex_attention(q, k, v, score, plan, enable_gqa=True)
    part = plan.batch_rows(1, 1)
    torch.testing.assert_close(flex_attention(q[1:], k[1:], v[1:], score, part, enable_gqa=True), whole[1:])
