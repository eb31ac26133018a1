"""Chunks of joint graphs: bits of eager chunking, and the results of the whole."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.utils import fresh_cache
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.chunking.graphs import ATEN
from tests.chunking.models import Model, Shape, compiled, in_chunks
from tritoncp import (
    and_masks,
    causal,
    checkpoint_policy,
    create_block_mask,
    document,
    make_plan,
    sliding_window,
)
from tritoncp.chunking import Pass, attention_nodes, chunk, concretise, mark
from tritoncp.chunking.concrete import hints
from tritoncp.chunking.rewrite import Rewrite
from tritoncp.chunking.sizes import free_symbols

B, S = 6, 48  # no size of a chunk is one of the model's
CUTS = (("batch", 2), ("seq", 2), ("seq", 3), ("seq", 4))
DENSE = Shape()
EXPERTS = Shape(experts=3, biased=True)
UNBIASED = Shape(experts=3)
SORTED = replace(EXPERTS, dispatch="sorted")
IDS = torch.tensor([0] * 20 + [1] * 28)
ROWS = torch.tensor([48, 30, 17, 40, 5, 33])
SLOPES = 0.5 ** torch.arange(1, 7)
BIAS = torch.randn(S, generator=torch.Generator().manual_seed(1))


def listed(mod: Callable[..., Any], batch: int | None = None) -> Any:
    return create_block_mask(mod, batch, None, S, S, BLOCK_SIZE=16)


def of_rows(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) & (kv < ROWS[b])


def by_batch(bias: Tensor) -> Callable[..., Tensor]:
    """Make a score_mod that reads b."""
    return lambda score, b, h, q, kv: score - SLOPES[b] * (q - kv)


def biased(bias: Tensor) -> Callable[..., Tensor]:
    """Make a score_mod whose capture wants a gradient."""
    return lambda score, b, h, q, kv: score + bias[kv]


MASKS: dict[str, Callable[[], Any]] = {
    "causal": lambda: listed(causal()),
    "closed form": causal,
    "window": lambda: listed(sliding_window(9)),
    "documents": lambda: listed(and_masks(causal(), document(ids=IDS))),
    "plan": lambda: make_plan(listed(causal())),
    "batch rows": lambda: listed(of_rows, B),
    "two-sided": lambda: listed(lambda b, h, q, kv: (q - kv).abs() < 20),
}


@pytest.fixture(autouse=True)
def sizes_from_data(fresh_dynamo: None) -> Iterator[None]:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        yield


class Case:
    """One model, run as a graph in chunks, by Eager, and whole, forward and backward."""

    def __init__(
        self, shape: Shape, dim: str, chunks: int, mask: Any, score: Any = None,
        dtype: torch.dtype = torch.float32, rows: int = S, unbacked: bool = True,
    ) -> None:  # fmt: skip
        torch.manual_seed(0)
        self.dim, self.chunks, self.mask, self.score, self.unbacked = dim, chunks, mask, score, unbacked
        self.model = Model(shape).to(dtype)
        self.x, self.turn = torch.randn(B, rows, shape.width, dtype=dtype), torch.rand(rows, 4).to(dtype)
        self.grad = torch.randn_like(self.x)
        self.reports: list[Any] = []
        self.graphs: list[torch.fx.GraphModule] = []

    def run(self, model: Any, call: Any, mark_inputs: bool = False) -> dict[str, Tensor]:
        """Return the output, all gradients and all buffers of one step."""
        x, turn = self.x.clone().requires_grad_(), self.turn.clone()
        if mark_inputs:
            for tensor, dim in ((x, 0),) if self.dim == "batch" else ((x, 1), (turn, 0)):
                if self.unbacked:
                    mark(tensor, dim, self.chunks)
                else:
                    torch._dynamo.mark_dynamic(tensor, dim, min=8, max=4096)
        bias = BIAS.clone().requires_grad_()
        out = call(x, turn, self.mask, self.score and self.score(bias))
        out.backward(self.grad)
        results = {"out": out.detach(), "dx": x.grad}
        results |= {} if bias.grad is None else {"dbias": bias.grad}
        results |= {f"d {name}": p.grad for name, p in model.named_parameters()}
        return results | dict(model.named_buffers())

    def in_graph(self) -> dict[str, Tensor]:
        def rewrite(gm: torch.fx.GraphModule) -> None:
            clones_one_head = copies_one_head(gm.graph)
            for node in filter(attention_nodes.is_attention, gm.graph.nodes):
                whole = {x for x in node.all_input_nodes if getattr(x.meta.get("val"), "ndim", 0) < 3}
                assert attention_nodes.whole_inputs(node) == whole  # the plan, vectors and numbers of mods
            self.reports.append(chunk(gm, dim=self.dim, chunks=self.chunks))
            self.graphs.append(gm)
            assert clones_one_head or not copies_one_head(gm.graph)  # inductor would sort unbacked strides
            for node in gm.graph.find_nodes(op="call_function", target=ATEN.split_with_sizes.default):
                x, sizes, *dim = map_arg(node.args, lambda x: x.meta["val"])
                assert statically_known_true(sum(sizes) == x.shape[dim[0] if dim else 0]), node.format_node()

        model = copy.deepcopy(self.model)
        return self.run(model, compiled(model, rewrite), mark_inputs=True)

    def by_eager(self) -> dict[str, Tensor]:
        model = in_chunks(self.model, self.chunks, self.dim)
        results = self.run(model, model)
        return {name.replace(".module.", "."): value for name, value in results.items()}

    def whole(self) -> dict[str, Tensor]:
        model = copy.deepcopy(self.model)
        return self.run(model, model)


def copies_one_head(graph: torch.fx.Graph) -> bool:
    """Return whether a node copies a value [B, 1, S, D]."""
    clones = graph.find_nodes(op="call_function", target=ATEN.clone.default)
    shapes = [node.meta["val"].shape for node in clones]
    return any(len(shape) == 4 and statically_known_true(shape[1] == 1) for shape in shapes)


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert not [name for name in one if not torch.equal(one[name], other[name])]


CASES = [(DENSE, "batch", 2, "batch rows", by_batch, torch.float32)]
SHAPES = (replace(DENSE, layers=2), EXPERTS, replace(SORTED, layers=2), replace(EXPERTS, layers=3))
LONG = [
    (SORTED, "seq", 2, "documents", None, torch.float32),
    (SORTED, "seq", 3, "documents", None, torch.float32),
    (EXPERTS, "batch", 2, "batch rows", by_batch, torch.float32),
    *[(shape, *cut, "documents", None, torch.float32) for shape in SHAPES for cut in CUTS],
    *[(DENSE, *cut, mask, None, torch.bfloat16) for mask in MASKS for cut in CUTS if mask != "two-sided"],
    *[(SORTED, *cut, "causal", score, torch.float32) for score in (by_batch, biased) for cut in CUTS],
]
AT_NIGHT = {  # of each shape, mask and score_mod two of the three cuts by sequence, in turn
    case
    for i, of_one in enumerate(LONG[at : at + len(CUTS)] for at in range(3, len(LONG), len(CUTS)))
    for case in of_one
    if case[1] == "seq" and case[2] != 2 + i % 3
}


@lru_cache(1)
def run_case(case: tuple[Any, ...]) -> tuple[Case, dict[str, Tensor]]:
    """Run a case as a graph in chunks."""
    shape, dim, chunks, mask, score, dtype = case
    run = Case(shape, dim, chunks, MASKS[mask](), score, dtype)
    return run, run.in_graph()


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        *CASES,
        *(
            pytest.param(case, marks=pytest.mark.nightly if case in AT_NIGHT else pytest.mark.long)
            for case in LONG
        ),
    ],
    ids=lambda case: (
        f"{case[0].dispatch if case[0].experts else 'mlp'}-{case[0].layers}-{case[1:4]}"
        f"-{getattr(case[4], '__name__', None)}-{case[5]}"
    ),
)
def test_chunks_have_the_bits_of_eager_chunking(case, cpu_engine):
    shape, dim, chunks, *_ = case
    run, in_graph = run_case(case)
    by_eager = run.by_eager()
    if dim == "batch" and shape.layers > 1:
        # Eager joins and cuts the rows between layers, the graph does not: BLAS sees them at other addresses.
        torch.testing.assert_close(in_graph, by_eager)
    else:
        assert_same_bits(in_graph, by_eager)
    if dim == "seq":
        assert run.reports[0].keys == tuple(range(1, chunks + 1))


@pytest.mark.long
def test_concrete_graphs_have_numbers_and_keep_their_marks(cpu_engine):
    (symbolic,) = run_case(LONG[0])[0].graphs
    concrete = concretise(symbolic)
    known = set(hints(symbolic))
    assert known and not hints(concrete)
    assert not [n for n in concrete.graph.nodes if free_symbols(n.meta.get("val")) & known]
    assert len(concrete.graph.nodes) < len(symbolic.graph.nodes)
    check = torch.ops.aten._assert_scalar.default
    checks = [len(gm.graph.find_nodes(op="call_function", target=check)) for gm in (symbolic, concrete)]
    assert 0 < checks[1] < checks[0]  # symbols of data stay
    nodes = [
        [n for n in gm.graph.nodes if isinstance(n.meta.get("val"), Tensor)] for gm in (symbolic, concrete)
    ]
    marks = [[n.meta["custom"] for n in part if "custom" in n.meta] for part in nodes]
    assert marks[0] == marks[1] and marks[0]


@pytest.mark.long
def test_chunks_with_two_sided_masks_and_backed_sizes_have_the_results_of_the_whole(cpu_engine, monkeypatch):
    around, depths = [], []

    def value(self: Rewrite, node: torch.fx.Node, c: int, call: Any = Rewrite.value) -> torch.fx.Node:
        around.append(node)
        depths.append(len(around))
        result = call(self, node, c)
        around.pop()
        return result

    monkeypatch.setattr(Rewrite, "value", value)
    run = Case(DENSE, "seq", 2, MASKS["two-sided"](), biased, unbacked=False)
    results, whole = run.in_graph(), run.whole()
    for name, value in results.items():
        torch.testing.assert_close(value, whole[name], rtol=1e-4, atol=1e-4, msg=name)
    assert max(depths) < 5  # for paths of any length in a chunk
    report = run.reports[0]
    assert report.keys == (2, 2) and report.waits_for_all_keys
    assert "2 by seq of 24 of 48 rows" in str(report)


@pytest.mark.long
def test_interpreted_kernels_have_the_bits_of_eager_chunking():
    run = Case(DENSE, "seq", 2, causal(), rows=32)
    assert_same_bits(run.in_graph(), run.by_eager())


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(DENSE, marks=pytest.mark.nightly, id="mlp"),
        pytest.param(UNBIASED, marks=pytest.mark.long, id="experts"),
    ],
)
def test_inductor_compiles_chunks(shape, cpu_engine):
    run = Case(shape, "seq", 2, MASKS["causal"]())
    model, cut = copy.deepcopy(run.model), Pass(dim="seq")
    call = torch.compile(model, fullgraph=True, options={"joint_custom_pre_pass": cut})
    with fresh_cache():
        results, whole = run.run(model, call, mark_inputs=True), run.whole()
    for name, value in results.items():
        if not name.endswith("calls"):  # each chunk is one call
            torch.testing.assert_close(value, whole[name], rtol=1e-4, atol=1e-4, msg=name)
    assert cut.reports[0].keys == (1, 2)


class Columns(torch.nn.Module):
    """A layer whose result is a view with gaps in memory: half of the columns of a product."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)[..., 2:6]


@pytest.mark.long
@pytest.mark.parametrize("dim", [pytest.param("batch", marks=pytest.mark.long), "seq"])
def test_views_of_values_with_gaps_have_the_strides_of_their_chunks(dim):
    torch.manual_seed(0)
    layers = torch.nn.ModuleList([Columns(), Columns()])
    x = torch.randn(6, 9, 4)
    mark(x, ("batch", "seq").index(dim), 3)

    def model(x: Tensor) -> Tensor:
        between = layers[0](x.repeat(1, 1, 2)[..., 1:5]).unsqueeze(0).squeeze(0)
        return layers[1](between).flatten(0, 1).square()

    results = []
    for call in (model, compiled(model, lambda gm: chunk(gm, "*", dim=dim, chunks=3))):
        layers.zero_grad()
        call(x).sum().backward()
        results.append([parameter.grad.clone() for parameter in layers.parameters()])
    torch.testing.assert_close(*results)


class Turned(torch.nn.Module):
    """A layer that views its rows in the order in which they lie in memory: for each token, those of the
    batch."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.transpose(0, 1)
        return self.up(rows.flatten(0, 1)).unflatten(0, rows.shape[:2]).transpose(0, 1)


@pytest.mark.long
def test_a_piece_of_the_batch_is_copied_where_tokens_lie_before_it_in_memory():
    torch.manual_seed(0)
    layers, x = torch.nn.ModuleList([Turned()]), torch.randn(6, 9, 4)
    mark(x, 0, 3)

    def model(x: Tensor) -> Tensor:
        return layers[0]((2 * x).transpose(0, 1).contiguous().transpose(0, 1)).square()

    got = compiled(model, lambda gm: chunk(gm, "*", dim="batch", chunks=3))(x)
    torch.testing.assert_close(got, model(x))


class Half(torch.nn.Module):
    """A layer of one weight of small integers, transposed and used in the dtype of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(256.0).view(16, 16) % 7 - 3)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T.to(x.dtype)


@pytest.mark.long
def test_gradients_are_summed_before_their_cast():
    net, graphs = torch.nn.Module(), []
    net.layers = torch.nn.ModuleList([Half()])

    def rewrite(gm: torch.fx.GraphModule) -> None:
        chunk(gm, dim="seq")
        graphs.append(gm)

    x = torch.arange(256.0).view(2, 8, 16) % 5 - 2
    half = x.bfloat16()
    mark(half, 1, 2)
    compiled(lambda x: net.layers[0](x), rewrite)(half).float().square().sum().backward()
    (added,) = graphs[0].graph.find_nodes(op="call_function", target=ATEN.add.Tensor)
    assert added.meta["val"].dtype == torch.bfloat16
    parts, weight = [part.reshape(-1, 16) for part in x.split(4, 1)], Half().weight.detach().T
    first, last = ((part.T @ (2 * (part @ weight)).bfloat16().float()).bfloat16() for part in parts)
    assert torch.equal(net.layers[0].weight.grad.T, (last + first).float())


class Joined(torch.nn.Module):
    """A layer whose two weights have one gradient before their transposition."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Half().weight, Half().weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.a.T + self.b.T).to(x.dtype)


@pytest.mark.long
def test_a_gradient_of_two_weights_is_summed_once():
    net = torch.nn.Module()
    net.layers = torch.nn.ModuleList([Joined()])
    x = (torch.arange(256.0).view(2, 8, 16) % 5 - 2).bfloat16()
    mark(x, 1, 2)
    compiled(lambda x: net.layers[0](x), lambda gm: chunk(gm, dim="seq"))(x).float().sum().backward()
    rows = x.flatten(0, 1).float().sum(0).expand(16, 16)
    assert torch.equal(net.layers[0].a.grad, rows) and torch.equal(net.layers[0].b.grad, rows)


SAVE_ATTENTION = partial(create_selective_checkpoint_contexts, checkpoint_policy())


class Checkpointed(torch.nn.Module):
    """A layer whose operations but attention are computed again in the backward pass."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any) -> Tensor:
        return checkpoint(self.layer, *args, use_reentrant=False, context_fn=SAVE_ATTENTION)


@pytest.mark.long
def test_checkpointed_attention_runs_once_a_chunk(cpu_engine):
    run, graphs = Case(DENSE, "seq", 2, MASKS["causal"]()), []

    def keep(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append([node.target for node in gm.graph.nodes])
        return gm

    def partition(gm: torch.fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        chunk(gm, dim="seq")
        return min_cut_rematerialization_partition(gm, inputs, **kwargs)

    model = copy.deepcopy(run.model)
    model.layers[0] = Checkpointed(model.layers[0])
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=partition)
    results = run.run(model, torch.compile(model, backend=backend, fullgraph=True), mark_inputs=True)
    assert_same_bits({name.replace(".layer.", "."): x for name, x in results.items()}, run.by_eager())
    forward, backward = torch.ops.tritoncp.forward.default, torch.ops.tritoncp.backward.default
    assert [graph.count(forward) for graph in graphs] == [2, 0]
    assert [graph.count(backward) for graph in graphs] == [0, 2]
    assert graphs[1].count(torch.ops.aten.silu.default) == 2  # computed again
