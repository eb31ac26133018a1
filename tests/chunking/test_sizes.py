"""Sizes of chunks: what torch knows of them, in blocks that never read a size of their input."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._inductor.utils import fresh_cache
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from tests.chunking.models import ROW_FUNCTIONS, compiled
from tests.chunking.test_trainers import WIDTH, Block, Model, results
from tests.draws import by_turns
from tritoncp.chunking import Pass, chunk, mark

pytestmark = pytest.mark.usefixtures("cpu_engine", "fresh_dynamo")
DIMS = ("batch", "seq")


class Rows(nn.Module):
    """A layer of a function of rows and a linear map."""

    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fn, self.out = fn, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.fn(x))


def marked(dim: str, chunks: int) -> Tensor:
    """Make an input whose last chunk is shorter."""
    rows = 4 * chunks - 1
    x = torch.randn(*((rows, 20) if dim == "batch" else (9, rows)), WIDTH)
    mark(x, DIMS.index(dim), chunks)
    return x


def compute_values_again(gm: GraphModule) -> None:
    """Compute the values of a graph's nodes from the values of its inputs, as inductor does."""
    values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    mode: Any = detect_fake_mode(values)
    mode.shape_env.fake_tensor_cache.clear()
    FakeTensorProp(copy.deepcopy(gm), mode=mode).propagate_dont_convert_inputs(*values)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("chunks", "dim"), by_turns((2, 3, 5), DIMS))
def test_torch_knows_that_every_chunk_has_a_row(chunks, dim):
    model, seen = Model(Rows(torch.sin)), []

    def rewrite(gm: GraphModule) -> None:
        chunk(gm, dim=dim, chunks=chunks)
        cut = [node for node in gm.graph.nodes if "tritoncp_chunk" in (node.meta.get("custom") or {})]
        for x in (node.meta["val"] for node in cut):
            sizes = (*x.shape, *x.stride(), x.numel()) if isinstance(x, Tensor) else (x,)
            seen.extend(n for n in sizes if isinstance(n, torch.SymInt))

    compiled(model, rewrite)(marked(dim, chunks)).sum().backward()
    known = (lambda n: n > 0, lambda n: n >= 0, lambda n: n != 0, lambda n: 7 * n > 0, lambda n: 48 * n > 0)
    assert len({str(n) for n in seen}) >= 4
    assert not [n for n in seen for law in known if not statically_known_true(law(n))]


@pytest.mark.long
@pytest.mark.parametrize(
    ("dim", "seed", "count"),
    [pytest.param(dim, 0, 1, marks=[pytest.mark.long] * (dim == "seq")) for dim in DIMS]
    + [pytest.param(*rest, 4, marks=pytest.mark.long) for rest in product(DIMS, range(3))],
)
def test_blocks_that_read_no_size_are_cut_without_a_guard(dim, seed, count):
    draw = random.Random(f"{dim} {seed}")
    layers = [Rows(ROW_FUNCTIONS[name]) for name in draw.sample(sorted(ROW_FUNCTIONS), count)] + [Block()]
    chunks, model = draw.choice((2, 3, 4)), Model(*draw.sample(layers, len(layers)))
    whole, x = copy.deepcopy(model), marked(dim, chunks)
    call = compiled(model, lambda gm: chunk(gm, dim=dim, chunks=chunks), finish=compute_values_again)
    torch.testing.assert_close(results(model, call, x), results(whole, whole, x), rtol=1e-4, atol=1e-4)


@pytest.mark.long  # needs a C++ compiler
@pytest.mark.parametrize("dim", DIMS)
def test_inductor_compiles_chunks_of_blocks_that_read_no_size(dim):
    model, cut = Model(Block(), Rows(ROW_FUNCTIONS["layer norm"])), Pass(dim=dim)
    whole, x = copy.deepcopy(model), marked(dim, 2)
    call = torch.compile(model, fullgraph=True, options={"joint_custom_pre_pass": cut})
    with fresh_cache():
        got = results(model, call, x)
    torch.testing.assert_close(got, results(whole, whole, x), rtol=1e-4, atol=1e-4)
    assert cut.reports[0].regions == ("layers.0", "layers.1")
