"""Captures and models of trainers: blocks that are compiled alone, shared parameters, torch's attention, and
graphs of torch.export and AOTAutograd, with the bits of eager chunking."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.functional_export import dynamo_graph_capture_for_export
from torch._functorch._aot_autograd.descriptors import GradAOTOutput
from torch._functorch.aot_autograd import (
    aot_export_joint_simple,
    aot_export_joint_with_descriptors,
    aot_export_module,
)
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, export
from torch.func import functional_call
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy

from tests.chunking import models
from tests.chunking.models import compiled, in_chunks
from tests.draws import by_turns
from tritoncp import causal, flex_attention
from tritoncp.chunking import Eager, Pass, chunk, mark

B, S, WIDTH = 4, 32, 16
pytestmark = pytest.mark.usefixtures("cpu_engine", "fresh_dynamo")


class Block(nn.Module):
    """Causal attention of two heads, tritoncp's or torch's."""

    def __init__(self, torch_attention: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.torch_attention = torch_attention

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if self.torch_attention:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            out = flex_attention(q, k, v, causal())
        return x + self.out(out.transpose(1, 2).flatten(2))


class Plain(nn.Module):
    """A layer without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(x).tanh()


class Model(nn.Module):
    """Layers, each called ``calls`` times one after the other."""

    def __init__(self, *layers: nn.Module, calls: int = 1) -> None:
        super().__init__()
        self.first, self.layers, self.calls = nn.Linear(WIDTH, WIDTH), nn.ModuleList(layers), calls

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            for _ in range(self.calls):
                x = layer(x)
        return x


class Counted(Model):
    """Layers that read how often the model was called, which it counts outside of them."""

    def __init__(self) -> None:
        super().__init__(Plain())
        self.register_buffer("count", torch.ones(()))
        self.layers[0].register_buffer("count", self.count)
        self.layers[0].register_forward_pre_hook(lambda layer, args: args[0] + layer.count)

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.count.add_(1)
        return out


class Tied(nn.Module):
    """An embedding, a layer and a head with the embedding's weight, in one region."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(11, WIDTH), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.embed(x)) @ self.embed.weight.T


def results(model: nn.Module, call: Callable[..., Any], x: Tensor) -> list[Tensor]:
    """Return the output and all gradients of one step."""
    out = call(x)
    out.square().sum().backward()
    return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def assert_bits_of_eager(model: nn.Module, dim: str = "seq", chunks: int = 2) -> None:
    """Compare a step in a graph, made for as many batch rows as tokens, with eager chunking; then a step of
    twice as many."""
    eager, cut, rows = in_chunks(model, chunks, dim), ("batch", "seq").index(dim), 4 * chunks
    call = compiled(model, lambda gm: chunk(gm, dim=dim, chunks=chunks))
    for size in (rows, 2 * rows):
        x = torch.randn(*((size, rows) if dim == "batch" else (rows, size)), WIDTH)
        want = results(eager, eager, x)
        mark(x, cut, chunks)
        assert all(map(torch.equal, results(model, call, x), want))
        model.zero_grad()
        eager.zero_grad()


def shared() -> Model:
    model = Model(Plain(), Plain(), Block())
    model.layers[1].out.weight = model.layers[0].out.weight
    model.layers[2].out.weight = model.layers[0].out.weight
    return model


MODELS = {
    "a parameter of three layers": (shared, "seq", 2),
    "a layer called three times": (lambda: Model(Plain(), calls=3), "seq", 2),
    "a counter of calls": (Counted, "seq", 3),
    "attention": (lambda: Model(Block()), "batch", 2),
    "torch's attention": (lambda: Model(Block(torch_attention=True)), "batch", 2),
}


OF_LONG = ("a parameter of three layers", "a layer called three times", "torch's attention")


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in OF_LONG)) for name in MODELS]
)
def test_models_of_trainers_have_the_bits_of_eager_chunking(name):
    make, dim, chunks = MODELS[name]
    assert_bits_of_eager(make(), dim, chunks)


@pytest.mark.long
@pytest.mark.parametrize(
    ("dim", "chunks", "rows"), [("seq", 3, 7), pytest.param("batch", 3, 7, marks=pytest.mark.long)]
)
def test_the_last_chunk_is_shorter_where_chunks_do_not_divide_the_rows(dim, chunks, rows):
    """The mean over tokens is taken outside of the region, and gives each token the same weight."""
    model, reports, where = Model(Block(), Plain()), [], ("batch", "seq").index(dim)
    x = torch.randn(*((rows, S) if dim == "batch" else (2, rows)), WIDTH)
    whole, eager = copy.deepcopy(model), copy.deepcopy(model)
    eager.layers = nn.ModuleList([Eager(nn.Sequential(*eager.layers), chunks, dim)])
    want, losses = results(eager, eager, x), [whole(x).square().mean()]
    mark(x, where, chunks)
    call = compiled(model, lambda gm: reports.append(chunk(gm, dim=dim, chunks=chunks)))
    assert all(map(torch.equal, results(model, call, x), want))
    losses.append(call(x).square().mean())
    torch.testing.assert_close(*losses)
    assert f"of {rows} rows, the last of " in str(reports[0])


@pytest.mark.long
def test_a_view_that_does_not_divide_a_chunk_is_refused_with_its_shapes():
    class Pairs(Plain):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.out(x).view(B, -1, 2, WIDTH).flip(2).reshape(x.shape)

    for rows, refused in ((54, False), (50, True)):  # 14, 14, 14, 12, and 13, 13, 13, 11
        x = torch.randn(B, rows, WIDTH)
        mark(x, 1, 4)
        call = compiled(Model(Pairs()).requires_grad_(False), lambda gm: chunk(gm, dim="seq", chunks=4))
        reason = r"node view\w* .*cannot view \[4, 13, 16\] as \[4, 6, 2, 16\] in chunk 0"
        with pytest.raises(Exception, match=reason) if refused else ExitStack():
            call(x)


@pytest.mark.long
def test_one_graph_serves_sizes_that_chunks_divide_and_others():
    model, graphs = Model(Block()), []
    eager = in_chunks(model, 3, "seq")
    call = compiled(model, lambda gm: graphs.append(chunk(gm, dim="seq", chunks=3)))
    for rows in (48, 31, 62, 8):
        x = torch.randn(B, rows, WIDTH)
        want = results(eager, eager, x)
        torch._dynamo.mark_dynamic(x, 1, min=4, max=4096)
        assert all(map(torch.equal, results(model, call, x), want))
        model.zero_grad()
        eager.zero_grad()
    assert len(graphs) == 1
    with pytest.raises(ValueError, match="5 rows of dimension 1 in 4 chunks of 2 leave none"):
        Eager(Block(), 4, "seq")(torch.randn(B, 5, WIDTH))


@pytest.mark.long
def test_an_embedding_and_its_tied_head_in_one_region_differ_in_the_order_of_the_sum_alone():
    """Eager chunking adds both gradients of a chunk, then both gradients of the chunk before."""
    model, x = Tied(), torch.randint(11, (B, S))
    eager = copy.deepcopy(model)
    out, weight, *others = results(eager, Eager(eager, 2, "seq"), x)
    mark(x, 1, 2)
    got = results(model, compiled(model, lambda gm: chunk(gm, "", dim="seq")), x)
    assert torch.equal(got[0], out) and all(map(torch.equal, got[2:], others))
    torch.testing.assert_close(got[1], weight, rtol=1e-5, atol=1e-4)


def test_a_block_that_is_compiled_alone_is_cut_as_a_whole_graph():
    """Trainers compile each block; a hook marks its inputs outside of the graph."""
    model, x, cut = Model(Plain(), Plain()), torch.randn(B, S, WIDTH), Pass("", dim="seq")
    eager = in_chunks(model, 2, "seq")
    for i, block in enumerate(model.layers):
        model.layers[i] = compiled(block, lambda gm: cut(gm.graph))
        model.layers[i].register_forward_pre_hook(lambda module, args: mark(args[0], 1, 2))
    assert all(map(torch.equal, results(model, model, x), results(eager, eager, x)))
    assert [report.regions for report in cut.reports] == [("",), ("",)]


@pytest.mark.long  # needs a C++ compiler
def test_a_pass_that_finds_no_region_warns_at_the_callers_line_of_the_modules_that_it_found():
    block, x = Model(Plain()), torch.randn(B, S, WIDTH)
    call = torch.compile(block, options={"joint_custom_pre_pass": Pass("blocks.*", dim="seq")})
    with warnings.catch_warnings(record=True) as caught, fresh_cache():
        warnings.simplefilter("always")
        call(x)
    (one,) = [one for one in caught if "region='blocks.*'" in str(one.message)]
    assert "Its modules are first, layers.0.out, layers.0;" in str(one.message) and one.filename == __file__


@pytest.mark.long
@pytest.mark.parametrize("dim", ["batch", "seq"])
def test_an_auxiliary_loss_of_a_block_is_refused_alike_in_graphs_and_eagerly(dim):
    class Router(Plain):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = super().forward(x)
            return y, y.square().mean()

    class Trained(Model):
        def forward(self, x: Tensor) -> Tensor:
            y, loss = self.layers[0](self.first(x))
            return y.sum() + loss

    model, x = Trained(Router()), torch.randn(B, S, WIDTH)
    with pytest.raises(ValueError, match=r"has no rows to concatenate.*auxiliary loss as"):
        Eager(model.layers[0], 2, dim)(x)
    mark(x, ("batch", "seq").index(dim), 2)
    with pytest.raises(Exception, match=r"node mean.* has no rows to concatenate.*auxiliary loss as"):
        compiled(model, lambda gm: chunk(gm, dim=dim))(x)


@pytest.mark.long
@pytest.mark.parametrize(
    ("strict", "size"), [(False, 2 * Dim("n", min=2, max=200)), (True, Dim("s", min=4, max=400))], ids=str
)
def test_exported_programs_are_cut(strict, size):
    model, x = Model(Block()), torch.randn(B, S, WIDTH)
    program = export(model, (x,), dynamic_shapes={"x": {1: size}}, strict=strict)
    report = chunk(program.graph_module, dim="seq")
    assert report.keys == (1, 2) and report.rows == S
    assert torch.equal(program.module()(x), in_chunks(model, 2, "seq")(x))


@pytest.mark.parametrize(
    ("rows", "reason"),
    [(22, r"are 2 \* s\w+: .*pad them to a multiple of 8"), (10, "in 4 chunks of 2 leave none")],
)
def test_an_exported_multiple_is_cut_in_its_units_or_refused(rows, reason):
    """2 * Dim has an even number of rows, and chunks are multiples of the Dim alone."""
    dynamic = {"x": {1: 2 * Dim("n", min=2, max=200)}}
    program = export(Model(Block()), (torch.randn(B, rows, WIDTH),), dynamic_shapes=dynamic)
    with pytest.raises(ValueError, match=f"{rows} rows {reason}"):
        chunk(program.graph_module, dim="seq", chunks=4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("change", [tuple, lambda d: d[1:], lambda d: [*d, None]], ids=["all", "few", "many"])
def test_a_joint_graph_with_descriptors_is_cut(change):
    model, x = Model(Plain()), torch.randn(B, S, WIDTH)
    mark(x, 1, 2)
    gm: Any = dynamo_graph_capture_for_export(model)(x)
    with ExitStack() as stack, torch._guards.tracing(gm.meta["tracing_context"]):
        joint = aot_export_joint_with_descriptors(stack, gm, (x,))
        described = joint.graph_module.graph.output_node().meta
        described["desc"] = change(described["desc"])
        assert chunk(joint.graph_module, dim="seq").live_outs == {"cat": 2, "sum": 1}


def test_a_gradient_that_is_also_a_result_is_not_summed_over_chunks():
    model, x = Model(Plain()), torch.randn(B, S, WIDTH)
    mark(x, 1, 2)
    gm: Any = dynamo_graph_capture_for_export(model)(x)
    with ExitStack() as stack, torch._guards.tracing(gm.meta["tracing_context"]):
        joint = aot_export_joint_with_descriptors(stack, gm, (x,)).graph_module
        output = joint.graph.output_node()
        results, described = output.args[0], output.meta["desc"]
        *_, of_layer = (x for x, d in zip(results, described) if isinstance(d, GradAOTOutput))
        output.args, output.meta["desc"] = ((*results, of_layer),), (*described, described[0])
        with pytest.raises(ValueError, match="not a gradient"):
            chunk(joint, dim="seq")


def simple_joint(block: nn.Module, x: Tensor) -> GraphModule:
    """Export the joint graph of a block whose weights are inputs, all sizes symbols."""
    names, weights = zip(*block.named_parameters())
    mode = FakeTensorMode(shape_env=ShapeEnv())
    inputs = [mode.from_tensor(tensor) for tensor in (*weights, x)]
    with mode:
        return aot_export_joint_simple(
            lambda *args: (functional_call(block, dict(zip(names, args)), args[-1:]),),
            inputs,
            trace_joint=True,
        )


@pytest.mark.long
def test_a_simple_joint_graph_is_cut_as_a_whole():
    block, x = Plain(), torch.randn(B, S, WIDTH, requires_grad=True)
    gm = simple_joint(block, x)
    assert chunk(gm, "", dim="seq").live_outs == {"cat": 2, "sum": 1}
    eager, grad = copy.deepcopy(block), torch.randn(B, S, WIDTH)
    out = Eager(eager, 2, "seq")(x)
    out.backward(grad)
    results = gm([eager.out.weight.detach(), x.detach()], [grad])
    assert all(
        map(torch.equal, torch.utils._pytree.tree_leaves(results), [out, eager.out.weight.grad, x.grad])
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("region", "reason"), [("layers.*", "nodes have no module paths"), ("", "no node is marked")]
)
def test_a_joint_graph_that_is_traced_again_is_refused_with_the_captures_that_suit(region, reason):
    class Loss(Model):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (super().forward(x).square().sum(),)

    dynamic = {"x": {1: Dim("s", min=4, max=400)}}
    module = export(Loss(Plain()), (torch.randn(B, S, WIDTH),), dynamic_shapes=dynamic).module()
    (fake,) = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    with fake.fake_mode:
        gm, _ = aot_export_module(module, (fake,), trace_joint=True, output_loss_index=0)
    with pytest.raises(ValueError, match=f"{reason}.*aot_export_joint_with_descriptors.*aot_export_module"):
        chunk(gm, region, dim="seq")


def annotated(model: nn.Module) -> nn.Module:
    """Annotate nodes with paths of modules, as torchtitan's graph trainer does."""
    for name, module in model.named_modules():
        if name:
            module.forward = torch.fx.traceback.annotate_fn({"module_fqn": name})(module.forward)
    return model


def trace_step(step: Callable[..., Any], inputs: list[Tensor]) -> GraphModule:
    """Trace a step as torchtitan's graph trainer does: nodes of the backward pass have a mark, and the
    annotations of the nodes that they belong to."""
    with (
        torch.fx.traceback.preserve_node_meta(),
        torch.autograd.set_multithreading_enabled(False),
        torch.compiler._non_strict_tracing_context(),
        torch.compiler._patch_engine_backward(),
    ):
        gm = make_fx(step, tracing_mode="symbolic")(*inputs)
    calls = [node for node in gm.graph.nodes if "seq_nr" in node.meta]
    forward = {x.meta["seq_nr"]: x for x in reversed(calls) if not x.meta.get("autograd_backward")}
    for node in calls:
        if node.meta.get("autograd_backward") and node.meta["seq_nr"] in forward:
            node.meta["custom"] = dict(forward[node.meta["seq_nr"]].meta.get("custom") or {})
    return gm


@pytest.mark.long
def test_a_step_of_torchtitans_graph_trainer_is_cut_by_a_pass_of_its_list():
    """It traces the loss and its gradients with make_fx; a pass takes and returns the graph."""
    model, x = Model(Block()), torch.randn(B, S, WIDTH)
    names, weights = zip(*model.named_parameters())
    traced = annotated(copy.deepcopy(model))

    def step(*inputs: Tensor) -> list[Tensor]:
        loss = functional_call(traced, dict(zip(names, inputs)), inputs[-1:]).square().sum()
        return [loss, *torch.autograd.grad(loss, inputs[:-1])]

    reports = []

    def cut_layers(gm: GraphModule, example_inputs: Any) -> GraphModule:
        reports.append(chunk(gm, "layers.*", dim="seq"))
        return gm

    mode = FakeTensorMode(shape_env=ShapeEnv())
    dynamic = StatelessSymbolicContext([DimDynamic.STATIC, DimDynamic.DYNAMIC, DimDynamic.STATIC])
    fakes = [mode.from_tensor(weight, static_shapes=True) for weight in weights]
    inputs = [*fakes, mode.from_tensor(x, symbolic_context=dynamic)]
    gm = cut_layers(trace_step(step, inputs), inputs)
    eager = in_chunks(model, 2, "seq")
    loss = eager(x).square().sum()
    want = [loss, *torch.autograd.grad(loss, list(eager.parameters()))]
    assert all(map(torch.equal, gm(*(weight.detach() for weight in weights), x), want))
    (report,) = reports
    assert report.regions == ("layers.0",) and report.live_outs == {"cat": 2, "sum": 2}


def test_a_report_has_the_graph_before_and_after():
    program = export(Model(Plain()), (torch.randn(B, S, WIDTH),), dynamic_shapes={"x": {1: Dim("s", min=4)}})
    report = chunk(program.graph_module, dim="seq")
    assert [code.count("torch.ops.aten.tanh.default") for code in (report.before, report.after)] == [1, 2]
    assert "split_with_sizes" in report.after and "f32[4, s" in report.before
    assert "torch.ops" not in repr(report)


class Placed(Plain):
    """A layer that makes the positions of its rows itself, or reads the first rows of a table."""

    def __init__(self, reads_table: bool) -> None:
        super().__init__()
        self.reads_table = reads_table
        self.register_buffer("table", torch.randn(4 * S, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[1]
        turn = self.table[:rows] if self.reads_table else torch.arange(rows)[:, None].cos()
        return super().forward(x * turn)


@pytest.mark.long
@pytest.mark.parametrize(("dim", "reads_table"), by_turns(("batch", "seq"), (False, True)))
def test_positions_made_in_a_region_equal_eager_chunkings_and_warn(reads_table, dim):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_bits_of_eager(Model(Placed(reads_table)), dim)
    place_warnings = [one for one in caught if "first ones, not the ones at its place" in str(one.message)]
    assert {one.filename for one in place_warnings} == ({__file__} if dim == "seq" else set())
    assert all(("slice" if reads_table else "arange") in str(one.message) for one in place_warnings)


class Counted(Placed):
    """A layer that makes positions, and first reads a column, and rows of a buffer to which it adds."""

    def __init__(self) -> None:
        super().__init__(reads_table=False)
        self.register_buffer("steps", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        steps = self.steps[:1].clone()
        self.steps.add_(1)
        return super().forward((x - x[..., :1]) * steps)


@pytest.mark.long
def test_slices_of_a_chunk_and_of_a_buffer_that_chunks_change_hide_no_warning():
    with pytest.warns(UserWarning, match="arange.* first ones, not the ones at its place"):
        assert_bits_of_eager(Model(Counted()), "seq")


@pytest.mark.parametrize(
    "tag", [{"recompute": CheckpointPolicy.MUST_CPU_OFFLOAD}, {"custom": {"offload": 3}}]
)
def test_tags_of_offload_and_recomputation_stay_on_the_nodes_of_each_chunk(tag):
    program = export(Model(Plain()), (torch.randn(B, S, WIDTH),), dynamic_shapes={"x": {1: Dim("s", min=4)}})
    (node,) = program.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default)
    node.meta.update(copy.deepcopy(tag))
    chunk(program.graph_module, dim="seq")
    copies = program.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default)
    for c, one in enumerate(copies):
        assert {name: one.meta["custom"][name] for name in tag.get("custom", {})} == tag.get("custom", {})
        assert one.meta["custom"]["tritoncp_chunk"] == ("layers.0", c)
        assert one.meta.get("recompute") == tag.get("recompute")
    assert len(copies) == 2


def train(model: nn.Module, call: Callable[..., Tensor], marks: bool) -> list[float]:
    """Train four steps on fixed data, and return the loss of each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(4):
        x, turn = torch.randn(B, S, 16, generator=generator), torch.rand(S, 4, generator=generator)
        if marks:
            mark(x, 1, 2)
            mark(turn, 0, 2)
        loss = (call(x, turn, causal()) - x.roll(1, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.long
def test_layers_with_routed_experts_train_in_chunks_with_the_losses_of_the_whole():
    """Four steps of rotary attention and sorted experts, whose counters chunks share."""
    whole = models.Model(models.Shape(experts=3, dispatch="sorted"))
    cut, eager = copy.deepcopy(whole), in_chunks(whole, 2, "seq")
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        losses = train(cut, compiled(cut, lambda gm: chunk(gm, dim="seq")), marks=True)
    assert losses == train(eager, eager, marks=False)
    assert losses == pytest.approx(train(whole, whole, marks=False), rel=1e-5)
    assert losses[-1] < losses[0]
