"""Mods of attention-gym's kinds as laws: plain, on kernels and compiled whole, each is dense attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask

import tritoncp
from tests.compat import gym_mods as gym
from tests.compat.dense import F32, F64, agree, answer, exact

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Law(NamedTuple):
    """A mask_mod or score_mod, bound to captured tensors that require gradients, and the sizes of a call."""

    mask: Callable[[], Any] | None = None
    score: Callable[..., Any] | None = None
    learned: tuple[tuple[int, ...], ...] = ()  # shapes of what ``score`` is bound to
    q: int = 48
    kv: int | None = None
    batch: int = 1
    heads: int = 2


OFFSETS = gym.offsets_of([11, 1, 20, 16])
TREE = gym.ancestors([-1, 0, 1, 1, 3, 3, 0, 6, 7, 2])
SINGLE = torch.Generator().manual_seed(7)
CHOSEN = torch.rand(1, 2, 4, 4, generator=SINGLE) < 0.6
LISTED = torch.stack([torch.randperm(4, generator=SINGLE)[:2] for _ in range(8)]).view(1, 2, 4, 2)
EDGES = torch.rand(2, 24, 24, generator=SINGLE) < 0.08
APART = gym.distances(EDGES, 4)
KINDS = torch.randint(0, 5, (2, 24, 24, 3), generator=SINGLE)

MASKS: dict[str, Law] = {
    "causal": Law(lambda: gym.causal),
    "window": Law(lambda: gym.window(9)),
    "window of the whole": Law(lambda: gym.window(100)),
    "window of one": Law(lambda: gym.window(0)),
    "dilated window": Law(lambda: gym.dilated_window(20, 3)),
    "attention sinks": Law(lambda: gym.first_keys_and_window(3, 7)),
    "prefix LM": Law(lambda: gym.prefix_lm(13)),
    "prefix LM of a long prefix": Law(lambda: gym.prefix_lm(48)),
    "global tokens": Law(lambda: gym.global_tokens(4, torch.arange(48) % 17 == 0)),
    "causal global tokens": Law(
        lambda: tritoncp.and_masks(gym.causal, gym.global_tokens(4, torch.arange(48) % 17 == 0))
    ),
    "strided": Law(lambda: gym.strided(6)),
    "documents": Law(lambda: gym.in_documents(gym.anything, OFFSETS)),
    "causal documents": Law(lambda: gym.in_documents(gym.causal, OFFSETS)),
    "windows in documents": Law(lambda: gym.in_documents(gym.window(5), OFFSETS)),
    "packed causal documents": Law(lambda: gym.packed_causal(OFFSETS)),
    "batches in a row": Law(lambda: gym.in_pieces(gym.anything, 16)),
    "causal batches in a row": Law(lambda: gym.in_pieces(gym.causal, 13)),
    "shared prefix": Law(lambda: gym.shared_prefix(OFFSETS, torch.tensor([0, 0, 2, 2]))),
    "last image": Law(lambda: gym.last_image(torch.arange(48) // 12, 8), kv=24),
    "block diffusion": Law(lambda: gym.noised_and_clean(24, 8)),
    "block diffusion, odd blocks": Law(lambda: gym.noised_and_clean(24, 7)),
    "tree": Law(lambda: gym.tree(14, TREE), q=10, kv=24),
    "tree without a prefix": Law(lambda: gym.tree(0, TREE), q=10),
    "drafts": Law(lambda: gym.drafts(9, 8), q=32, kv=41),
    "neighbourhood": Law(lambda: gym.neighbourhood(8, 6, 3, gym.by_rows(8))),
    "neighbourhood, tiled": Law(lambda: gym.neighbourhood(8, 6, 3, gym.by_tiles(8, 2))),
    "neighbourhood, Morton order": Law(lambda: gym.neighbourhood(8, 8, 5, gym.by_morton_code), q=64),
    "tile window, 2D": Law(lambda: gym.tile_window((8, 6), (4, 6), (2, 2))),
    "tile window, 2D with text": Law(lambda: gym.tile_window((8, 4), (4, 4), (2, 2), 9), q=44, kv=44),
    "tile window, 3D": Law(lambda: gym.tile_window((4, 4, 2), (2, 4, 2), (2, 2, 2), 5), q=37, kv=37),
    "spatial head": Law(lambda: gym.spatial_head(3, 9, 2, False, 4)),
    "spatial head with a sink": Law(lambda: gym.spatial_head(3, 9, 2, True, 4)),
    "temporal head": Law(lambda: gym.temporal_head(3, 9, 5, 2)),
    "chosen tiles": Law(lambda: gym.chosen_tiles(CHOSEN, 12, torch.tensor([12, 5, 12, 1]))),
    "listed tiles": Law(lambda: gym.listed_tiles(LISTED, 12)),
}

SCORES: dict[str, Law] = {
    "ALiBi": Law(score=lambda: gym.alibi(2)),
    "softcap": Law(score=lambda: gym.softcap(3.0)),
    "sandwich": Law(score=lambda: gym.sandwich(2, 48)),
    "bias by distance": Law(
        score=lambda table: gym.bias_by_distance(table, APART), learned=((2, 6),), q=24, batch=2
    ),
    "bias of a path": Law(
        score=lambda *tables: gym.bias_of_path(tables, KINDS, (APART % 5).clamp(max=3)),
        learned=((2, 5),) * 3,
        q=24,
        batch=2,
    ),
    "ALiBi in causal documents": Law(
        score=lambda: gym.of_visible(gym.in_documents(gym.causal, OFFSETS), gym.alibi(2))
    ),
    "softcap under a window": Law(mask=lambda: gym.window(9), score=lambda: gym.softcap(2.0)),
    **{
        f"{name} instead of softmax": Law(score=lambda f=f, c=c: gym.logarithm_of(f, c))
        for name, f, c in (
            ("gelu", functional.gelu, 1.0),
            ("relu", torch.relu, 1.0),
            ("sigmoid", torch.sigmoid, 0.5),
            ("silu", functional.silu, 1.0),
            ("softplus", functional.softplus, 0.1),
            ("square", torch.square, 0.25),
        )
    },
}
LAWS = {**MASKS, **SCORES}
COMPILED = [name for name in LAWS if not ("softcap" in name or "instead of softmax" in name)]
ON_KERNELS = [
    "attention sinks",
    "windows in documents",
    "packed causal documents",
    "shared prefix",
    "block diffusion",
    "tree",
    "neighbourhood, tiled",
    "chosen tiles",
    "sandwich",
    "bias of a path",
    "ALiBi in causal documents",
    "gelu instead of softmax",
]
BY_ROW = ("chosen tiles", "listed tiles", "bias by distance", "bias of a path")


def sizes(law: Law) -> tuple[int, int]:
    return law.q, law.kv or law.q


def block_mask(name: str, law: Law) -> Any:
    if law.mask is None:
        return None
    lists = (law.batch, law.heads) if name in BY_ROW else (None, None)
    return tritoncp.create_block_mask(law.mask(), *lists, *sizes(law), BLOCK_SIZE=32)


def verify(name: str, wrap: Callable[[Any], Any] = lambda call: call, dtype: torch.dtype = F64) -> None:
    """Assert that the call of a law, wrapped, gives the dense answer and its gradients."""
    law = LAWS[name]
    q, kv = sizes(law)
    x = [torch.randn(law.batch, law.heads, n, 16, dtype=dtype).requires_grad_() for n in (q, kv, kv)]
    learned = [torch.randn(shape, dtype=dtype).requires_grad_() for shape in law.learned]
    score, mask = law.score and law.score(*learned), block_mask(name, law)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return tritoncp.flex_attention(q, k, v, score, mask, return_lse=True)

    out, lse = wrap(layer)(*x)
    start = [torch.randn_like(out), torch.randn_like(lse)]
    want = exact(x, law.score, learned, law.mask and law.mask(), start)
    agree(answer(out, lse, [*x, *learned], start), want, dtype, factor=5)


@pytest.mark.parametrize("engine", ["cpu"], indirect=True)
@pytest.mark.parametrize("name", LAWS)
def test_plain(name: str, engine: str) -> None:
    verify(name)


@pytest.mark.parametrize("engine", ["kernels"], indirect=True)
@pytest.mark.parametrize("name", ON_KERNELS)
def test_on_kernels(name: str, engine: str) -> None:
    verify(name, dtype=F32)


@pytest.mark.long
@pytest.mark.parametrize("engine", ["kernels"], indirect=True)
@pytest.mark.parametrize("name", [name for name in LAWS if name not in ON_KERNELS])
def test_the_other_laws_on_kernels(name: str, engine: str) -> None:
    verify(name, dtype=F32)


@pytest.mark.long
@pytest.mark.parametrize("engine", ["cpu"], indirect=True)
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_whole(name: str, engine: str) -> None:
    verify(name, lambda call: torch.compile(call, fullgraph=True, backend="eager"))


@pytest.mark.parametrize("engine", ["cpu"], indirect=True)
@pytest.mark.parametrize("name", ["causal documents", "sandwich", "bias by distance"])
def test_compiled_with_aot_autograd(name: str, engine: str) -> None:
    verify(name, lambda call: torch.compile(call, fullgraph=True, backend="aot_eager"))


# -- what surrounds a call ------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [functional.gelu, torch.relu, torch.sigmoid])
def test_an_activation_instead_of_softmax(activation: Callable[[Tensor], Tensor], engine: str) -> None:
    q, k, v = (torch.randn(1, 2, 33, 16, dtype=F64) for _ in range(3))
    out, lse = tritoncp.flex_attention(q, k, v, gym.logarithm_of(activation, 1.0), return_lse=True)
    undone = out * lse.exp()[..., None] - v.sum(2, keepdim=True)
    torch.testing.assert_close(undone, activation(q @ k.mT / 4) @ v, rtol=1e-9, atol=1e-9)


def test_outputs_without_their_share_of_the_value(engine: str) -> None:
    """Exclusive self-attention: out without its part along the row's own value is orthogonal to it."""
    q, k, v = (torch.randn(1, 2, 33, 16, dtype=F64) for _ in range(3))
    out = tritoncp.flex_attention(q, k, v, tritoncp.create_block_mask(gym.causal, None, None, 33, 33))
    rest = out - (out * v).sum(-1, keepdim=True) / v.square().sum(-1, keepdim=True) * v
    want = exact([q, k, v], None, [], gym.causal, None).out
    torch.testing.assert_close(
        rest + (want * v).sum(-1, keepdim=True) / v.square().sum(-1, keepdim=True) * v, want
    )
    assert bool(((rest * v).sum(-1).abs() < 1e-10).all()) and bool((rest[:, :, 0].abs() < 1e-10).all())


@pytest.mark.parametrize("top", [1, 2, 4])
def test_tiles_chosen_by_their_mean_scores(top: int, engine: str) -> None:
    """Video sparse attention: lists of blocks from scores of tiles, short tiles masked."""
    tile, lengths = 12, torch.tensor([12, 5, 12, 1])
    x = [torch.randn(1, 2, 48, 16, requires_grad=True) for _ in range(3)]
    q, k = (t.detach().unflatten(2, (4, tile)).mean(3) for t in x[:2])
    chosen = (q @ k.mT).topk(top).indices.sort(-1).values.to(torch.int32)
    whole = lengths[chosen] == tile
    lists = []
    for kind in (~whole, whole):
        order = torch.argsort((~kind).int(), dim=-1, stable=True)
        padded = torch.zeros(1, 2, 4, 4, dtype=torch.int32)
        padded[..., :top] = chosen.gather(-1, order)
        lists += [kind.sum(-1).int(), padded]
    mask = BlockMask.from_kv_blocks(
        *lists, BLOCK_SIZE=tile, mask_mod=lambda b, h, q, kv: kv % tile < lengths[kv // tile]
    )
    table = torch.zeros(1, 2, 4, 4, dtype=torch.bool).scatter_(-1, chosen.long(), True)
    out, lse = tritoncp.flex_attention(*x, mask, return_lse=True)
    start = [torch.randn_like(out), torch.randn_like(lse)]
    want = exact(x, None, [], gym.chosen_tiles(table, tile, lengths), start)
    agree(answer(out, lse, x, start), want, F32)
