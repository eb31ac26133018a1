"""Tests of slices, transposes, unions and intersections of masks, by their visible pairs."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.masks.random_masks import (
    FEW,
    at_pairs,
    geometries,
    kinds_of_pairs,
    make_mask_mod,
)
from tritoncp.masks import (
    Kind,
    Mask,
    Runs,
    causal,
    create_block_mask,
    document,
    from_block_mask,
    sliding_window,
)


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
        masked = at_pairs(part.runs.to_kinds() == Kind.MASKED, part)
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
    assert torch.equal(combined.runs.to_kinds(), kinds_of_pairs(want, *block))


def test_masks_of_other_geometry_do_not_combine() -> None:
    one, other = (create_block_mask(causal(), None, None, 16, 16, BLOCK_SIZE=b) for b in (8, 4))
    with pytest.raises(ValueError, match="same lengths and BLOCK_SIZE"):
        one & other


@pytest.mark.parametrize("other", [causal(), lambda b, h, q, kv: q >= kv, None])
def test_a_mask_combines_with_masks_alone(other) -> None:
    mask = create_block_mask(causal(), 1, 1, 64, 32, BLOCK_SIZE=16)
    for combine in (lambda: mask & other, lambda: mask | other):
        with pytest.raises(TypeError, match=r"make it one with create_block_mask\(mask_mod, B, H, 64, 32"):
            combine()


def test_closed_forms_combine_with_operators() -> None:
    ids = torch.tensor([0] * 10 + [1] * 22)
    near = (causal() & sliding_window(4, 4)) | ~document(ids=ids)
    q, kv = torch.arange(32)[:, None], torch.arange(32)
    want = ((q >= kv) & (q - kv <= 4)) | (ids[q] != ids[kv])
    assert torch.equal(near(None, None, q, kv), want)
    assert torch.equal(create_block_mask(near, None, None, 32, 32, BLOCK_SIZE=8).to_dense()[0, 0], want)
