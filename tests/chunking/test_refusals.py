"""Graphs and sizes that are refused, each on its node and with the reason; a refused graph is unchanged."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import product
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from tests.chunking.models import ROW_FUNCTIONS
from tritoncp import causal, create_block_mask, flex_attention, full_mask, make_plan
from tritoncp.chunking import attention_nodes, chunk, concretise
from tritoncp.chunking.regions import describe_modules, is_backward, regions_of
from tritoncp.chunking.sizes import free_symbols
from tritoncp.core import handles
from tritoncp.graph.spec import decode_spec, encode_spec

pytestmark = pytest.mark.usefixtures("cpu_engine")
X = torch.randn(4, 8, 6)
FRAMES = {  # stack of a call, from the outermost frame: (file, line of code)
    "train.py": "loss = model(x)",
    "model.py": "return layer(x)",
    attention_nodes.__file__: "return forward_op(q, k, v)",
    torch.__file__: "return op(*args)",
}
STACK = "".join(
    f'  File "{file}", line 7, in forward\n    {code}\n    ~~^^^\n' for file, code in FRAMES.items()
)


def forward_graph(fn: Callable[..., Any], x: Tensor = X, mode: str = "symbolic") -> GraphModule:
    """Trace a function of x and a weight as the forward graph of one layer."""
    gm = make_fx(fn, tracing_mode=mode)(x, torch.eye(6))
    for node in gm.graph.nodes:
        if node.op == "call_function":
            node.meta["nn_module_stack"] = {"": ("L['self'].layers.0", "Layer")}
            node.meta["stack_trace"] = STACK
    return gm


def attend_by(mask: Any, biased: bool = False) -> Callable[[Tensor, Tensor], Tensor]:
    """Make attention of one head of x @ w, whose queries are its keys and values. biased: with a score_mod
    that captures a number of each token"""

    def attend(x: Tensor, w: Tensor) -> Tensor:
        q, bias = (x @ w).unsqueeze(1), x[0, :, 0]
        score = (lambda s, b, h, q, kv: s + bias[kv]) if biased else None
        return flex_attention(q, q, q, score, mask).squeeze(1)

    return attend


attend = attend_by(causal())


def node_of(gm: GraphModule, name: str) -> Node:
    return next(node for node in gm.graph.nodes if name in str(node.target))


def with_target(name: str, target: Any) -> Callable[[GraphModule], None]:
    """Return an edit that gives a node another op."""
    return lambda gm: setattr(node_of(gm, name), "target", target)


def in_backward(gm: GraphModule) -> None:
    for node in gm.graph.nodes:
        node.meta["fwd_nn_module_stack"] = node.meta.pop("nn_module_stack", None)


def with_backward(name: str) -> Callable[[GraphModule], None]:
    """Return an edit that moves a node out of the layer, to the backward pass."""
    return lambda gm: node_of(gm, name).meta.update(nn_module_stack={}, partitioner_tag="is_backward")


def outside(*names: str) -> Callable[[GraphModule], None]:
    """Return an edit that moves nodes out of the layer."""

    def edit(gm: GraphModule) -> None:
        for node in gm.graph.nodes:
            if node.name in names:
                node.meta["nn_module_stack"] = {"": ("norm", "Norm")}

    return edit


def with_constant(gm: GraphModule) -> None:
    view = [node for node in gm.graph.nodes if "view" in str(node.target)][-1]
    view.args = (view.args[0], [view.args[1][0], 8, *view.args[1][2:]])


def with_call(**constants: Any) -> Callable[[GraphModule], None]:
    """Return an edit that changes constants of the attention's call."""

    def edit(gm: GraphModule) -> None:
        node = node_of(gm, "tritoncp.forward")
        spec = decode_spec(node.args[-1])._replace(**constants)
        node.args = (*node.args[:-1], encode_spec(*spec))

    return edit


def unchanged(gm: GraphModule) -> None:
    pass


def scores(x: Tensor, w: Tensor) -> Tensor:
    return (x @ x.mT).softmax(-1) @ x


def torch_attention(x: Tensor, w: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]


hop = torch.ops.higher_order.associative_scan
broadcast = torch.ops._c10d_functional.broadcast.default
REFUSED = {
    "mean": (lambda x, w: x.mean(), unchanged, r"mean.*mean over a chunk.*no node is marked"),
    "forward sum for the backward pass": (
        lambda x, w: (x @ w, x.sum().cosh()),
        with_backward("cosh"),
        r"node sum.* has no rows to concatenate",
    ),
    "dropout": (lambda x, w: F.dropout(x @ w), unchanged, "draws random numbers"),
    "two dimensions": (scores, unchanged, r"two dimensions of the size that is cut"),
    "two dimensions from outside": (
        lambda x, w: (x.sin().unsqueeze(1) * x.unsqueeze(2)).sum(-1).sum(-1),
        outside("sin", "unsqueeze", "unsqueeze_1", "mul", "sum_1"),
        "has 2 dimensions of the size that is cut; exactly one is needed",
    ),
    "rows of another order": (
        lambda x, w: x.sin() + x.cosh().view(-1, 6).cos().view(x.shape),
        outside("cosh", "view"),
        r"dimension 0 is s\d+\*s\d+, where the rows of a chunk are not adjacent",
    ),
    "higher-order op": (
        lambda x, w: (x @ w).sin(),
        with_target("sin", hop),
        "sin.*higher-order op associative_scan, whose function",
    ),
    "torch's attention": (torch_attention, unchanged, "torch's attention|two dimensions"),
    "collective": (
        lambda x, w: (x @ w).sin(),
        with_target("sin", broadcast),
        "sin.*is a collective that cannot be cut",
    ),
    "backward graph": (lambda x, w: x @ w, in_backward, "the graph is a backward graph"),
    "constant": (
        lambda x, w: (x @ w).sin().view(4, x.shape[1], 2, 3),
        with_constant,
        r"view.*traced at File .model.py., line 7, in forward; return layer.*the constant 8 for the size",
    ),
    "ranks": (
        attend,
        with_call(world="cp"),
        "tritoncp.forward.*traced at File .model.py.*exchanges keys between ranks.*repeat=True",
    ),
    "latent": (attend, with_call(sizes=(1, 8, 8)), "tritoncp.forward.*has expand="),
    "capture": (
        attend_by(causal(), biased=True),
        with_call(wants=(0,)),
        "tritoncp.forward.*capture that has the size that is cut and requires grad",
    ),
    "invariant": (attend, with_call(options=(("invariant", True),)), "tritoncp.forward.*invariant=True"),
    "update of an input": (
        lambda x, w: w.copy_(w + (x @ w).cos().sum((0, 1))),
        outside("cos", "copy_"),
        "a chunk needs a value of a later chunk",
    ),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", REFUSED)
def test_a_graph_is_refused_on_its_node_and_stays_as_it_was(name):
    fn, edit, reason = REFUSED[name]
    gm = forward_graph(fn)
    edit(gm)
    before = gm.graph.python_code("self").src
    with pytest.raises(ValueError, match=f"(?s){reason}") as error:
        chunk(gm, dim="seq")
    assert bool(re.search(r"used by \w+ \(", str(error.value))) is (name != "backward graph")
    gm.graph.lint()
    assert gm.graph.python_code("self").src == before


@pytest.mark.sample(2)
@pytest.mark.parametrize("places", [(), (0.0,), (0.5,)])
@pytest.mark.parametrize("names", [{}, {"dropout_p": 0.0}, {"dropout_p": 0.5}], ids=str)
def test_torchs_attention_is_cut_only_by_batch_and_without_dropout(places, names):
    gm = forward_graph(torch_attention)
    node = node_of(gm, "scaled_dot_product")
    node.args, node.kwargs = (*node.args[:3], *places), names
    if 0.5 in places or (not places and 0.5 in names.values()):
        with pytest.raises(ValueError, match="draws random numbers"):
            chunk(gm, dim="batch", chunks=2)
    else:
        assert chunk(gm, dim="batch", chunks=2)


def test_eight_modules_of_a_graph_are_named():
    graph = Graph()
    for number in range(9):
        graph.placeholder(f"x{number}").meta["nn_module_stack"] = {"": (f"layers.{number}", "")}
        assert re.findall(r"layers\.\d|\.\.\.", describe_modules(graph)) == [
            *(f"layers.{i}" for i in range(min(number + 1, 8))),
            *["..."] * (number == 8),
        ]


def test_nodes_without_a_module_are_inside_if_inputs_and_users_are():
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        a = x.sin()
        b = (a.cos().cosh() + x).tan()  # two nodes on the way, and a sum that adds from outside
        other = x.log().sinh()
        b.ceil()  # it has no user
        forward = b + other, b.exp().expm1(), (b * other).relu(), b.split(3, -1)[0], x.split(3, -1)[1]
        d, weight = a.atan(), torch.ones(6)
        return *forward, d + a, d + x, d + 1, (weight.erf() + weight.erfc()).floor()

    gm, backward = forward_graph(fn), False
    modules = {**dict.fromkeys(("sinh",), "layers.1"), "log": "norm"}
    names = ("sin", "tan", "relu", "split", "getitem_3", "atan", "erf", "erfc", "floor")
    modules |= dict.fromkeys(names, "layers.0")
    for node in gm.graph.nodes:
        node.meta["nn_module_stack"] = {"": (modules[node.name], "")} if node.name in modules else {}
        backward = backward or node.name == "atan"
        node.meta["partitioner_tag"] = "is_backward" if backward else "is_forward"
    inside = {node.name: region for node, region in regions_of(gm.graph, "layers.*").items()}
    between = dict.fromkeys(("cos", "cosh", "add", "getitem", "getitem_1", "add_2"), "layers.0") | {
        "mul": "layers.1"
    }
    outside = {"getitem_3", "log"}  # an item of a sequence from outside, in any module
    assert inside == {name: path for name, path in (modules | between).items() if name not in outside}


@pytest.mark.sample(1)
@pytest.mark.parametrize("dim", ["seq", "batch"])
def test_a_forward_graph_is_cut(dim):
    gm = forward_graph(attend)
    args = X, torch.randn(6, 6)
    whole, guards = gm(*args), node_of(gm, "mm").meta["val"].fake_mode.shape_env.guards
    before = len(guards)
    report = chunk(gm, dim=dim)
    assert len(guards) == before
    torch.testing.assert_close(gm(*args), whole)
    concrete = concretise(gm)
    assert torch.equal(concrete(*args), gm(*args))
    marks = [node.meta["custom"]["tritoncp_chunk"] for node in gm.graph.nodes if node.meta.get("custom")]
    assert set(marks) == {("layers.0", 0), ("layers.0", 1)}
    assert report.regions == ("layers.0",) and report.live_outs == {"cat": 1}
    assert report.keys == ((1, 2) if dim == "seq" else ()) and not report.waits_for_all_keys


def test_forward_values_are_joined_before_the_backward_pass():
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        inside = x.sin()
        return w.tan(), inside.cosh()

    gm = forward_graph(fn)
    for name in ("tan", "cosh"):
        with_backward(name)(gm)
    chunk(gm, dim="seq")
    backward = [is_backward(node) for node in gm.graph.nodes if node.op == "call_function"]
    assert backward == sorted(backward) and sum(backward) == 2


def test_chunks_of_the_backward_pass_run_from_the_last_to_the_first():
    gm = forward_graph(lambda x, w: x.sin().cos().tanh())
    for name in ("cos", "tanh"):
        node_of(gm, name).meta["partitioner_tag"] = "is_backward"
    chunk(gm, dim="seq")
    marks = [node.meta["custom"]["tritoncp_chunk"] for node in gm.graph.nodes if node.meta.get("custom")]
    assert [c for _, c in marks] == [0, 1, 1, 1, 0, 0]


def test_several_adjacent_rows_for_each_of_the_batch_are_cut_together():
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return x[:3].tan(), w[0].tanh(), x[..., 0].sin(), x[..., 0].repeat_interleave(2, 0).cos()

    gm = forward_graph(fn)
    outside(*{node.name for node in gm.graph.nodes} - {"tan", "tanh", "sin", "cos"})(gm)
    whole = gm(X, torch.eye(6))
    assert chunk(gm, dim="batch", chunks=2).live_outs == {"cat": 2}
    assert all(map(torch.equal, gm(X, torch.eye(6)), whole))


def test_concrete_graphs_check_their_sizes_and_call_graphs_without_symbols():
    def either(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    gm = make_fx(either, tracing_mode="symbolic")(X)
    (x,) = gm.graph.find_nodes(op="placeholder")
    with gm.graph.inserting_after(x):
        gm.graph.placeholder("rows").meta["val"] = x.meta["val"].shape[1]
    gm.recompile()
    concrete = concretise(gm)
    for graph, count in ((gm, 3), (concrete, 0)):
        parts = [part for part in graph.modules() if isinstance(part, GraphModule)]
        symbols = [free_symbols([node.meta.get("val") for node in part.graph.nodes]) for part in parts]
        assert list(map(len, symbols)) == [count] * 3
    assert torch.equal(concrete(X, 8), gm(X, 8))
    for x, rows, place in ((X[:, :7], 8, 0), (torch.ones(4, 9, 6), 8, 0), (X, 7, 1), (X, 9, 1)):
        with pytest.raises(ValueError, match=f"input {place} has the size"):
            concrete(x, rows)


def test_a_changed_mask_that_sees_later_keys_is_an_error():
    gm = forward_graph(lambda x, w: flex_attention(x[:, None], x[:, None], x[:, None])[:, 0])
    chunk(gm, dim="seq", needs=torch.tensor([[True, False], [True, True]]))
    with pytest.raises(ValueError, match=r"queries of chunk 0 see keys of chunk 1.*needs="):
        gm(X, torch.eye(6))


def test_chunks_of_a_sequence_share_their_keys_unless_they_repeat_the_exchange(monkeypatch):
    plan = make_plan(create_block_mask(causal(), 1, 1, 32, 32), world_size=2, rank=0, schedule="allgather")
    monkeypatch.setattr(attention_nodes, "plan_between_ranks", lambda node: plan)
    node = node_of(forward_graph(attend), "tritoncp.forward")
    for dim, repeat, carries in product(("seq", "batch"), (False, True), (False, True)):
        cut = SimpleNamespace(dim=dim, repeat=repeat, carries=lambda x, carries=carries: carries)
        assert attention_nodes.shares_keys(node, cut) == (dim == "seq" and carries and not repeat)


def test_the_first_plan_of_a_process_is_known_from_its_handle(monkeypatch):
    plan, module, graph = make_plan(full_mask(8, 8)), torch.nn.Module(), Graph()
    monkeypatch.setattr(handles, "_NUMBERS", WeakKeyDictionary())
    monkeypatch.setattr(handles, "new_number", lambda: 0)
    module.handle, node = handles.handle_of(plan), graph.get_attr("handle")
    owner = GraphModule(module, graph)
    assert owner.handle == 0 and attention_nodes.known_plan(node) is plan


def test_a_graph_whose_chunks_share_keys_refuses_other_plans_and_derivatives():
    plan = make_plan(create_block_mask(causal(), 1, 1, 32, 32), world_size=2, rank=0, schedule="ring")
    send = torch.ops.tritoncp.send_keys.default
    k, spec = torch.randn(1, 1, 16, 8), encode_spec(None, (), "", (), ())
    with pytest.raises(ValueError, match=r"schedule 'ring' on 2 ranks.*'allgather' or 'fetch'"):
        send(k, k, False, [], [], 1.0, plan.handle, spec)
    with pytest.raises(RuntimeError, match="tritoncp::send_keys has no derivative"):
        send(k.requires_grad_(), k, False, [], [], 1.0, plan.handle, spec)


# Functions of x [B, S, C] whose rows depend on other rows.
MIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "cumsum": lambda x: x.cumsum(1),
    "cumprod": lambda x: x.cumprod(-2),
    "cummax": lambda x: x.cummax(1).values,
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "topk": lambda x: x - x.topk(2, 1).values[:, -1:],
    "flip": lambda x: x.flip(1),
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(1),
    "convolution": lambda x: F.conv1d(x.mT, torch.ones(16, 1, 3), padding=1, groups=16).mT,
    "mean": lambda x: x - x.mean(1, keepdim=True),
    "sum": lambda x: x / x.square().sum(1, keepdim=True).sqrt(),
    "amax": lambda x: x * (1 + x.abs().amax()).reciprocal(),
    "var": lambda x: x / x.var(1, keepdim=True),
    "select": lambda x: x - x[:, 0].tanh()[:, None],
    "slice": lambda x: x - x[:, :1],
    "bmm": lambda x: (x @ (x.mT @ x)).tanh(),
}
UNMIXED: dict[str, Callable[[Tensor], Tensor]] = {
    **ROW_FUNCTIONS,
    "convolution of a row": lambda x: F.conv1d(x.mT, torch.ones(16, 16, 1)).mT,
    "convolution of channels": lambda x: F.conv1d(
        x.flatten(0, 1)[:, None], torch.ones(1, 1, 3), padding=1
    ).view_as(x),
    "counts of experts": lambda x: x * (x.argmax(2).flatten().bincount(minlength=16) > 2),
    "sorted tokens": lambda x: x.flatten(0, 1)[x.flatten(0, 1)[:, 0].argsort(stable=True).argsort()].view_as(
        x
    ),
}


def warnings_of(fn: Callable[[Tensor], Tensor], dim: str) -> list[str]:
    """Return the warnings of chunking a graph that calls a function twice."""
    gm = forward_graph(lambda x, w: fn(fn(x.sin())), torch.randn(4, 8, 16))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        chunk(gm, dim=dim)
    return [str(one.message) for one in caught if "it has only the rows of a chunk" in str(one.message)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MIXED)
def test_an_operator_along_the_sequence_warns_once_and_names_the_users_line(name: str) -> None:
    (message,) = warnings_of(MIXED[name], "seq")
    assert name in message and "model.py" in message


def some(functions: dict[str, Callable[[Tensor], Tensor]]) -> list[list[str]]:
    """Return names of functions in groups of five, from which a test makes one graph."""
    names = list(functions)
    return [names[i : i + 5] for i in range(0, len(names), 5)]


def one_after_another(functions: Sequence[Callable[[Tensor], Tensor]]) -> Callable[[Tensor], Tensor]:
    return lambda x: reduce(lambda y, fn: fn(y), functions, x)


@pytest.mark.sample(1)
@pytest.mark.parametrize("names", some(MIXED), ids=", ".join)
def test_operators_along_the_sequence_do_not_warn_where_the_batch_is_cut(names: list[str]) -> None:
    assert warnings_of(one_after_another([MIXED[name] for name in names]), "batch") == []


@pytest.mark.sample(1)
@pytest.mark.parametrize("names", some(UNMIXED), ids=", ".join)
def test_operators_of_rows_do_not_warn(names: list[str]) -> None:
    assert warnings_of(one_after_another([UNMIXED[name] for name in names]), "seq") == []
