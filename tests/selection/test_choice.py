"""Tests of the choice of keys: against sorting all scores, with scores of integers, whose sums are exact."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.draws import few
from tritoncp import Mask, causal, create_block_mask, document
from tritoncp.selection import choice as tiles
from tritoncp.selection.choice import ACTIVATIONS, KeyChoice, choose
from tritoncp.selection.visible import VisiblePairs


@functools.cache
def mask_of(kind: str, length: int) -> Mask:
    third = length // 3
    mods = {
        "causal": causal(),
        "documents": causal() & document(lengths=[third, 0, 2 * third, length - 3 * third]),
        "a mask_mod of b and h": lambda b, h, q, kv: (kv <= q + h) & ((kv + b) % 3 != 0),
        "the future": lambda b, h, q, kv: kv > q,
    }
    batch, heads = (2, 4) if kind.startswith("a mask_mod") else (1, 1)
    return create_block_mask(mods[kind], batch, heads, length, length, BLOCK_SIZE=(16, 32))


def sort_all_scores(
    query: Tensor, key: Tensor, weights: Tensor | None, choice: KeyChoice, visible: Tensor
) -> Tensor:
    """Choose keys as :func:`choose` does, by all scores. visible: [B, Hq, rows, keys], equal in all heads if
    the heads are summed"""
    size, rows, length = choice.block_size, query.shape[2], key.shape[2]
    blocks = -(-length // size)
    pad = (0, blocks * size - length)
    in_blocks = torch.nn.functional.pad(visible, pad).unflatten(3, (blocks, size))
    act = ACTIVATIONS[choice.activation]
    if size > 1 and choice.pool == "mean":
        key = torch.stack([part.mean(2) for part in key.split(size, 2)], 2)
        scores = act(query @ key.mT)
    else:
        scores = act(query @ key.mT)
    if weights is not None:
        scores = (scores * weights[..., None]).sum(1, keepdim=True)
        in_blocks = in_blocks[:, :1]
    if size > 1 and choice.pool == "max":
        scores = torch.nn.functional.pad(scores, pad).unflatten(3, (blocks, size))
        scores = scores.masked_fill(~in_blocks, -torch.inf).amax(4)
    candidates = in_blocks.any(4)
    own = (torch.arange(rows) // size)[:, None]
    order = candidates.cumsum(3)
    before = candidates & (torch.arange(blocks) <= own)
    forced = order <= choice.first
    if choice.own:
        forced = forced | (torch.arange(blocks) == own)
    from_end = before.flip(3).cumsum(3).flip(3)
    forced = forced | (before & (from_end <= choice.last))
    scores = scores.masked_fill(forced, torch.inf).masked_fill(~candidates, -torch.inf)
    found = scores.sort(dim=3, descending=True, stable=True)
    count = min(choice.top, blocks)
    shown = candidates.expand_as(scores).gather(3, found.indices)[..., :count]
    chosen = torch.where(shown, found.indices[..., :count], -1)
    return torch.nn.functional.pad(chosen, (0, choice.top - count), value=-1).sort(3).values.int()


@few(2)
@given(
    st.sampled_from(["causal", "documents", "a mask_mod of b and h", "the future"]),
    st.sampled_from([1, 16, 32]),
    st.sampled_from(["mean", "max"]),
    st.booleans(),
    st.sampled_from(sorted(ACTIVATIONS)),
    st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 3)),
    st.integers(0, 2**31),
)
def test_chosen_keys_have_the_highest_scores(
    kind: str, block_size: int, pool: str, summed: bool, activation: str, forced: tuple[bool, int, int],
    seed: int,
) -> None:  # fmt: skip
    g = torch.Generator().manual_seed(seed)
    length, heads = 136 + 8 * (seed % 2), 4  # two tiles of rows; means of the last block are exact too
    activation = activation if activation in ("relu", "identity") else "relu"  # exact in any order of sums
    choice = KeyChoice(1 + seed % 9, block_size, activation, pool, *forced)
    mask = mask_of(kind, length)
    if summed and mask.H > 1:
        mask = mask[:, 0]
    query = torch.randint(-3, 4, (2, heads, length, 8), generator=g).float()
    key = torch.randint(-3, 4, (2, 1 + 3 * (seed % 2), length, 8), generator=g).float()
    weights = torch.randint(-3, 4, (2, heads, length), generator=g).float() if summed else None
    pairs = VisiblePairs(mask, mask.mask_mod)
    want = sort_all_scores(query, key, weights, choice, mask.to_dense(2, heads))
    found = choose(query, key, weights, choice, pairs, torch.arange(length)[None])
    torch.testing.assert_close(found, want, rtol=0, atol=0)
    order = torch.randperm(length + 20, generator=g)  # a shard: rows in any order, and padding
    at = torch.where(order < length, order, -1)
    query, weights = (
        x if x is None else torch.where((at >= 0).view(-1, *[1] * (x.ndim - 3)), x[:, :, at], torch.nan)
        for x in (query, weights)
    )
    shard = choose(query, key, weights, choice, pairs, at[None])
    assert torch.equal(shard[:, :, at >= 0], want[:, :, at[at >= 0]])
    assert bool((shard[:, :, at < 0] == -1).all())


@pytest.mark.parametrize("keys", [32, 64])
def test_tiles_of_keys_do_not_change_the_choice(keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(keys)
    query, key = (torch.randint(-2, 3, (1, 2, 300, 4), generator=g).float() for _ in range(2))
    mask = mask_of("causal", 300)
    for choice in (
        KeyChoice(9),
        KeyChoice(9, first=2, last=3),
        KeyChoice(3, 16, own=True),
        KeyChoice(3, 16, pool="max"),
    ):
        arguments = query, key, None, choice, VisiblePairs(mask, mask.mask_mod), torch.arange(300)[None]
        want = choose(*arguments)
        with monkeypatch.context() as patch:
            patch.setattr(tiles, "KEYS", keys)
            assert torch.equal(choose(*arguments), want)
