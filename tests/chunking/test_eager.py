"""Eager chunking: what is cut, memories that all chunks see, checkpoints, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.chunking.models import compiled
from tritoncp import causal, checkpoint_policy, create_block_mask, flex_attention
from tritoncp.chunking import Eager, chunk, mark
from tritoncp.chunking.eager import split_axis

pytestmark = pytest.mark.usefixtures("cpu_engine", "fresh_dynamo")
B, S, WIDTH = 3, 16, 16
X = torch.randn(4, 8, 6)
SLOPES = torch.arange(1.0, B + 1)


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, -1)).transpose(1, 2)


def steeper_by_row(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Score_mod that reads b and both positions."""
    return score - SLOPES[b] * (q - 2 * kv).abs()


def step(module: Callable[..., Tensor], parameters: Any, x: Tensor, *args: Any) -> list[Tensor]:
    """Return the output and all gradients of a step."""
    inputs = [x.clone().requires_grad_(), *(arg.clone().requires_grad_() for arg in args)]
    out = module(*inputs)
    leaves = [*inputs, *parameters]
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves, allow_unused=True)]


def test_eager_chunking_refuses_keys_of_later_chunks():

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return flex_attention(x[:, None], x[:, None], x[:, None])[:, 0]

    with pytest.raises(ValueError, match="queries of a chunk see keys of a later chunk"):
        Eager(Layer(), 2, "seq")(X)
    torch.testing.assert_close(Eager(Layer(), 2, "batch")(X), Layer()(X))
    for dim in ("seq", "batch"):
        assert torch.equal(Eager(Layer(), 1, dim)(X), Layer()(X))
        with pytest.raises(ValueError, match='chunks=0: pass dim="batch" or "seq", and chunks >= 1'):
            Eager(Layer(), 0, dim)


def test_eager_chunking_splits_other_tensors_where_they_have_the_size():
    batch, rows = 3, 5
    x, either = torch.empty(batch, rows, 2), (1, batch)
    places = {
        1: (either, (rows,)),
        2: (either, (1,), (rows,)),
        0: ((rows,),),
    }  # sizes up to the place, in order
    for shape in (shape for n in range(5) for shape in product((1, 2, batch, rows), repeat=n)):
        value = torch.empty(shape)
        seq = [
            place
            for place, sizes in places.items()
            if len(shape) >= len(sizes) and all(size in own for size, own in zip(shape, sizes))
        ]
        assert split_axis(value, x, "seq") == (seq[0] if seq else None)
        assert split_axis(value, x, "batch") == (0 if shape[:1] == (batch,) else None)


# -- memories -------------------------------------------------------------------------------------------


class Cross(nn.Module):
    """Attention to a memory, which is an argument, the result of attention to an argument, or a parameter."""

    def __init__(self, source: str, rows: int, mask: Any) -> None:
        super().__init__()
        self.query, self.keys = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.out, self.learned = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(B, rows, WIDTH))
        self.source, self.mask = source, mask

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        if self.source == "parameter":
            memory = self.learned
        elif self.source == "attended":
            memory = flex_attention(*[heads(memory)] * 3).transpose(1, 2).flatten(2)
        k, v = self.keys(memory).chunk(2, -1)
        out = flex_attention(heads(self.query(x)), heads(k), heads(v), steeper_by_row, self.mask)
        return x + self.out(out.transpose(1, 2).flatten(2))


def some_pairs(rows: int) -> Any:
    """Make a mask of S queries and the rows of a memory."""
    return create_block_mask(lambda b, h, q, kv: (q + 3 * kv) % 5 < 3, None, None, S, rows, BLOCK_SIZE=8)


MEMORIES = list(product(("argument", "attended", "parameter"), (S // 2, 5, 31), (None, some_pairs)))


@pytest.mark.sample(4)
@pytest.mark.parametrize(("source", "rows", "mask"), MEMORIES)
def test_all_chunks_of_the_sequence_see_a_memory_of_any_length(source, rows, mask):
    torch.manual_seed(0)
    model = Cross(source, rows, mask and mask(rows))
    args = list(model.parameters()), torch.randn(B, S, WIDTH), torch.randn(B, rows, WIDTH)
    whole = step(model, *args)
    torch.testing.assert_close(step(Eager(model, 2, "seq"), *args), whole, rtol=1e-4, atol=1e-4)
    if source == "argument":
        torch.testing.assert_close(step(Eager(model, 2, "batch"), *args), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("source", "dim"),
    [
        ("attended", "seq"),
        *(pytest.param(*x, marks=pytest.mark.long) for x in (("parameter", "seq"), ("argument", "batch"))),
    ],
)
def test_chunks_in_a_graph_see_the_memory_that_eager_chunks_see(source, dim):
    torch.manual_seed(0)
    model, x, memory = Cross(source, 5, some_pairs(5)), torch.randn(B, S, WIDTH), torch.randn(B, 5, WIDTH)
    eager = copy.deepcopy(model)
    wanted = step(Eager(eager, 2, dim), list(eager.parameters()), x, memory)

    def marking(x: Tensor, memory: Tensor) -> Tensor:
        for one in (x, memory) if dim == "batch" else (x,):
            mark(one, ("batch", "seq").index(dim), 2)
        return call(x, memory)

    call = compiled(model, lambda gm: chunk(gm, "", dim=dim))
    torch.testing.assert_close(step(marking, list(model.parameters()), x, memory), wanted)


def test_a_tensor_edited_with_rows_of_a_chunk_is_not_a_memory():
    class Layer(nn.Module):
        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            keys = memory.clone().mul_(heads(x).mean())
            return flex_attention(heads(x), keys, keys).transpose(1, 2).flatten(2)

    with pytest.raises(ValueError, match=r"keys of a later chunk.*keys of a memory that all chunks see"):
        Eager(Layer(), 2, "seq")(torch.randn(B, S, WIDTH), heads(torch.randn(B, S // 2, WIDTH)))


# -- checkpoints ----------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Causal attention whose score_mod reads b."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(heads, self.qkv(x).chunk(3, -1))
        out = flex_attention(q, k, v, steeper_by_row, causal())
        return x + self.out(out.transpose(1, 2).flatten(2))


class Checkpointed(nn.Module):
    """A module that is computed again in the backward pass."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__()
        self.module, self.options = module, options

    def forward(self, *args: Any) -> Tensor:
        return checkpoint(self.module, *args, **self.options)


SAVE_ATTENTION = partial(create_selective_checkpoint_contexts, checkpoint_policy())
CHECKPOINTS = {
    "reentrant": {"use_reentrant": True},
    "plain": {"use_reentrant": False},
    "selective": {"use_reentrant": False, "context_fn": SAVE_ATTENTION},
}


@pytest.mark.sample(4)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("dim", ["batch", "seq"])
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_checkpoint_inside_is_refused_and_one_around_changes_no_bit(kind, dim):
    torch.manual_seed(0)
    layer, x, options = Layer(), torch.randn(B, S, WIDTH), CHECKPOINTS[kind]
    parameters = list(layer.parameters())
    wanted = step(Eager(layer, 2, dim), parameters, x)
    around = Checkpointed(Eager(layer, 2, dim), **options)
    inside = Eager(nn.Sequential(Checkpointed(layer, **options)), 2, dim)
    if kind == "reentrant":  # it has gradients by backward() alone
        leaf = x.clone().requires_grad_()
        around(leaf).square().sum().backward()
        got = [around(leaf).detach(), leaf.grad, *(p.grad for p in parameters)]
    else:
        got = step(around, parameters, x)
    assert all(map(torch.equal, got, wanted))
    with pytest.raises(ValueError, match=r"a checkpoint inside the module .* checkpoint\(Eager\("):
        step(inside, parameters, x)
    with torch.no_grad():
        assert torch.equal(inside(x), wanted[0])
