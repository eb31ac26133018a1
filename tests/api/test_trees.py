"""Training on prefix trees: logits, losses and gradients of one dense forward pass per trajectory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import tritoncp
from tests.draws import few
from tests.zoo import BALANCERS
from tritoncp.api.trees import PackedTree, TreeEdges
from tritoncp.reference.dense import dense_attention

pytestmark = [
    pytest.mark.usefixtures("cpu_engine"),
    pytest.mark.filterwarnings("ignore:in natural order"),
]
VOCABULARY, HEADS, KV_HEADS, DIM = 5, 4, 2, 6
SCHEDULES = ("allgather", "ring", "fetch", "ulysses", "ulysses+ring")
Attend = Callable[..., list[Tensor]]


class Model(nn.Module):
    """Two layers in float64: rotary embeddings by depth, grouped query heads, a learned slope by depth."""

    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        width = HEADS * DIM
        shapes = {"embedding": (VOCABULARY, width), "slopes": (2, HEADS), "head": (width, VOCABULARY)}
        shapes |= {"into": (2, width, (HEADS + 2 * KV_HEADS) * DIM), "out": (2, width, width)}
        for name, shape in shapes.items():
            values = torch.randn(shape, generator=g, dtype=torch.float64)
            setattr(self, name, nn.Parameter(values * shape[-2] ** -0.5))

    def forward(self, tokens: Sequence[Tensor], depth: Sequence[Tensor], attend: Attend) -> list[Tensor]:
        """Compute the logits [B, S, vocabulary] of each rank's tokens [B, S] at depth [B, S].

        attend: (queries, keys, values, slopes [heads]) of all ranks -> outs.
        """
        xs = [self.embedding[ids] for ids in tokens]
        for layer in range(2):
            parts: tuple[list[Tensor], ...] = ([], [], [])
            for x, at in zip(xs, depth, strict=True):
                heads = (x @ self.into[layer]).unflatten(-1, (-1, DIM)).transpose(1, 2)
                q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
                for part, tensor in zip(parts, (rotated(q, at), rotated(k, at), v), strict=True):
                    part.append(tensor)
            outs = attend(*parts, self.slopes[layer])
            xs = [
                x + out.transpose(1, 2).flatten(2) @ self.out[layer] for x, out in zip(xs, outs, strict=True)
            ]
        return [x.tanh() @ self.head for x in xs]


def rotated(x: Tensor, at: Tensor) -> Tensor:
    """Rotate x [B, heads, S, DIM] by its positions [B or 1, S]."""
    angle = at[:, None, :, None] / torch.tensor([1.0, 4.0, 16.0], dtype=torch.float64)
    one, other = x.chunk(2, -1)
    return torch.cat([one * angle.cos() - other * angle.sin(), one * angle.sin() + other * angle.cos()], -1)


def alone(model: Model, trajectory: Tensor, left: int) -> Tensor:
    """Compute a trajectory's logits [L, vocabulary] by dense attention."""
    index = torch.arange(len(trajectory))
    distance = index[:, None] - index
    visible = (distance >= 0) & ((distance <= left) | (left < 0))

    def attend(q: list[Tensor], k: list[Tensor], v: list[Tensor], slopes: Tensor) -> list[Tensor]:
        score_mod = lambda score, b, h, q, kv: score - slopes[h] * (q - kv)  # noqa: E731
        return [dense_attention(q[0], k[0], v[0], visible, score_mod).out]

    return model([trajectory[None]], [index[None]], attend)[0][0]


def label_logits(logits: Tensor, trajectory: Tensor) -> Tensor:
    """Return the log-probability of each label of a trajectory, given its logits [L, vocabulary]."""
    return logits[:-1].log_softmax(-1)[torch.arange(len(trajectory) - 1), trajectory[1:]]


class Batch:
    """Trees of several batch rows, padded to one number of segments and of tokens, on simulated ranks."""

    def __init__(
        self, packed: Sequence[PackedTree], left: int, world_size: int, **options: str | None
    ) -> None:
        self.packed = packed
        n, size = max(len(x.parent) for x in packed) + 1, max(len(x.tokens) for x in packed) + 1
        rows = []
        for x in packed:  # empty roots, and one that holds the padding
            parent = nn.functional.pad(x.parent, (0, n - len(x.parent)), value=-1)
            lengths = nn.functional.pad(x.lengths, (0, n - len(x.lengths)))
            lengths[-1] = size - len(x.tokens)
            padding = (0, size - len(x.tokens))
            rows.append((parent, lengths, *(nn.functional.pad(t, padding) for t in (x.tokens, x.weights))))
        parent, lengths, self.tokens, self.weights = map(torch.stack, zip(*rows, strict=True))
        self.tree = tritoncp.tree(parent, lengths, window=(left, -1))
        self.world = tritoncp.simulate(world_size)
        mask = tritoncp.create_block_mask(self.tree, len(packed), None, size, size, BLOCK_SIZE=4)
        self.plan = self.world.make_plan(mask, **options)
        self.ranks = [self.plan.for_rank(rank) for rank in range(world_size)]

    def logits(self, model: Model) -> list[Tensor]:
        """Compute each rank's logits [B, S_local, vocabulary]."""
        depth = self.tree.depth

        def attend(q: list[Tensor], k: list[Tensor], v: list[Tensor], slopes: Tensor) -> list[Tensor]:
            score_mod = lambda score, b, h, q, kv: score - slopes[h] * (depth[b, q] - depth[b, kv])  # noqa: E731
            return self.world.flex_attention(q, k, v, score_mod, self.plan, enable_gqa=True)

        at = [tritoncp.positions(plan, self.tree) for plan in self.ranks]
        return model(self.world.shard(self.tokens, self.plan, dim=1), at, attend)

    def edges(self) -> list[TreeEdges]:
        return [tritoncp.tree_edges(plan, self.tree, self.tokens, self.weights) for plan in self.ranks]


def edge_losses(logits: Tensor, edges: TreeEdges) -> Tensor:
    logits = logits.flatten(0, 1)
    return logits.logsumexp(-1)[edges.rows] - logits[edges.rows, edges.labels]


trajectories = st.lists(st.lists(st.integers(0, VOCABULARY - 1), max_size=11), min_size=1, max_size=6)
# Few letters and common beginnings: deep chains, stars, combs, forests, equal and nested trajectories.
common = st.builds(
    lambda prompt, lists: [prompt[: len(x) * 3] + x for x in lists],
    st.lists(st.integers(0, 1), max_size=20),
    trajectories,
)
batches = st.lists(common.filter(any), min_size=1, max_size=2)


def tensors(lists: Sequence[Sequence[int]]) -> list[Tensor]:
    return [torch.tensor(x, dtype=torch.int64) for x in lists]


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", SCHEDULES)
@few(20)
@given(
    batches, st.integers(1, 8), st.sampled_from(BALANCERS), st.sampled_from([-1, 3, 14]), st.integers(0, 99)
)
def test_a_tree_is_one_forward_for_each_trajectory(schedule, batch, world_size, balancer, left, seed) -> None:
    """They have the same logits, loss and gradients of all parameters."""
    g = torch.Generator().manual_seed(seed)
    batch = [tensors(lists) for lists in batch]
    weights = [[torch.rand(len(x), generator=g, dtype=torch.float64) for x in row] for row in batch]
    packed = [tritoncp.pack_trajectories(row, w) for row, w in zip(batch, weights, strict=True)]
    model = Model()
    over_ranks = Batch(packed, left, world_size, balancer=balancer, schedule=schedule)
    logits = over_ranks.logits(model)
    edges = over_ranks.edges()
    loss = sum((edge_losses(x, e) * e.weights).sum() for x, e in zip(logits, edges, strict=True))
    whole = over_ranks.world.unshard([x.detach() for x in logits], over_ranks.plan, dim=1)
    expected = torch.zeros((), dtype=torch.float64)
    for row, trajectory, weight in [
        (row, x, w) for row, (xs, ws) in enumerate(zip(batch, weights)) for x, w in zip(xs, ws)
    ]:
        if len(trajectory):
            own = alone(model, trajectory, left)
            expected = expected - (label_logits(own, trajectory) * weight[1:]).sum()
            number = next(j for j, x in enumerate(batch[row]) if x is trajectory)
            got = packed[row].unpack(whole[row, : len(packed[row].tokens)])[number]
            torch.testing.assert_close(got, own.detach(), atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(loss, expected, atol=1e-10, rtol=1e-10)
    parameters = list(model.parameters())
    wants, gots = (
        (torch.autograd.grad(x, parameters, allow_unused=True) for x in (expected, loss))
        if (expected.requires_grad)
        else ((), ())
    )
    for got, want in zip(gots, wants, strict=True):
        torch.testing.assert_close(got, want, atol=1e-10, rtol=1e-10)


@few()
@given(batches, st.integers(1, 8), st.sampled_from([None, "ptrr", "locality"]))
def test_edges_are_the_pairs_of_neighbours_on_paths(batch, world_size, balancer) -> None:
    """Each edge is on the one rank that holds its source, and shapes are the same on all ranks."""
    batch = Batch([tritoncp.pack_trajectories(x) for x in batch], -1, world_size, balancer=balancer)
    size = batch.tokens.shape[1]
    pairs = {
        (b * size + int(source), b * size + int(target))
        for b, packed in enumerate(batch.packed)
        for path in packed.paths
        for source, target in pairwise(path)
    }
    padding = {b * size + i for b, x in enumerate(batch.packed) for i in range(len(x.tokens), size)}
    seen = []
    for plan, edges in zip(batch.ranks, batch.edges(), strict=True):
        real = edges.targets >= 0
        at = plan.positions.expand(len(batch.packed), -1) + torch.arange(len(batch.packed))[:, None] * size
        sources = at.flatten()[edges.rows[real]].tolist()
        seen += [pair for pair in zip(sources, edges.targets[real].tolist()) if pair[1] not in padding]
        assert torch.equal(edges.labels[real], batch.tokens.flatten()[edges.targets[real]])
        assert torch.equal(edges.weights[real], batch.weights.flatten()[edges.targets[real]])
        assert not edges.weights[~real].any() and not edges.rows[~real].any()
        assert bool((edges.rows[real].diff() >= 0).all())
    assert len({len(edges.rows) for edges in batch.edges()}) == 1
    assert len(seen) == len(set(seen)) and set(seen) == pairs


@given(common.filter(any))
def test_unpack_inverts_pack(lists) -> None:
    """Beginnings that trajectories share are stored once, and their weight is the number of trajectories."""
    packed = tritoncp.pack_trajectories(lists)
    assert [x.tolist() for x in packed.unpack(packed.tokens)] == lists
    values = torch.ones(len(packed.tokens), dtype=torch.float64, requires_grad=True)
    (count,) = torch.autograd.grad(sum(x.sum() for x in packed.unpack(values)), values)
    assert torch.equal(count, packed.weights.double())
    beginnings = [tuple(x[: i + 1]) for x in lists for i in range(len(x))]
    assert len(packed.tokens) == len(set(beginnings))
    for path, x in zip(packed.paths, lists, strict=True):
        assert packed.weights[path].tolist() == [beginnings.count(tuple(x[: i + 1])) for i in range(len(x))]
    depth = tritoncp.tree(packed.parent, packed.lengths).depth
    assert all(torch.equal(x.long(), torch.arange(len(x))) for x in packed.unpack(depth))
    children = packed.parent[packed.parent >= 0].bincount(minlength=len(packed.parent))
    ends = {int(path[-1]) for path in packed.paths if len(path)}
    last = packed.lengths.cumsum(0) - 1
    assert all(
        int(end) in ends or n > 1 for n, end in zip(children, last, strict=True)
    )  # none could be merged


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("leaves", "leaf"),
    [(8, 2048), (10, 1000), (13, 2048), (16, 8192), (20, 1000), (32, 2048), (2, 8192), (9, 8192), (10, 4096)],
)
def test_a_rank_fetches_little_beside_the_prefix(leaves: int, leaf: int) -> None:
    """A prefix with leaves on 8 ranks, assigned by locality. One rank holds the ends of an eighth of the
    leaves, rounded up, and so sees them and the prefix whole."""
    prefix, size = 8192, 8192 + leaves * leaf
    mask_mod = tritoncp.tree([-1] + [0] * leaves, [prefix] + [leaf] * leaves)
    mask = tritoncp.create_block_mask(mask_mod, 1, 1, size, size)
    plan = tritoncp.make_plan(mask, world_size=8, balancer="locality", schedule="fetch")
    remote = plan.traffic.clone().fill_diagonal_(0).sum(1)
    least = prefix + -(-leaves // 8) * leaf - plan.s_local
    assert plan.imbalance <= 1.02 and least <= int(remote.max()) <= 1.12 * max(prefix, least)


@pytest.mark.parametrize("first", [torch.nan, torch.inf])
def test_padding_of_edges_has_weight_0(first: float) -> None:
    mask_mod = tritoncp.tree([-1, 0, 0], [2, 1, 2])
    mask = tritoncp.create_block_mask(mask_mod, 1, 1, 5, 5, BLOCK_SIZE=2)
    plan = tritoncp.make_plan(mask, world_size=2, rank=1, balancer=None)
    weights = torch.tensor([first, 1, 1, 1, 1])
    edges = tritoncp.tree_edges(plan, mask_mod, torch.arange(10, 15, dtype=torch.int32), weights)
    assert edges.weights.tolist() == [1, 0, 0] and edges.labels.tolist() == [14, 0, 0]
    assert edges.labels.dtype == torch.int32 and edges.targets.tolist() == [4, -1, -1]
