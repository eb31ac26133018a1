"""Tests of the registered ops: their contracts with torch, saved tensors, and edits between the passes."""

import gc
import pickle
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.library import opcheck
from torch.nn.attention.flex_attention import AuxRequest
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import tritoncp
from tritoncp import causal, create_block_mask, make_plan
from tritoncp.call import autograd, op_arguments
from tritoncp.mods import snapshot
from tritoncp.reference.dense import dense_attention

S = 120


def inputs(heads=2, kv_heads=2, dim=16, length=S, dtype=torch.float32):
    return [torch.randn(1, n, length, dim, dtype=dtype) for n in (heads, kv_heads, kv_heads)]


def table_mask():
    """Make a mask whose masked blocks call the mask_mod, and the tensor that it captures."""
    table = torch.rand(S, S) < 0.4
    return create_block_mask(lambda b, h, q, kv: table[q, kv], 1, 1, S, S, BLOCK_SIZE=32), table


def bias_of(heads, **options):
    bias = torch.randn(heads, **options)
    return (lambda s, b, h, q, kv: s * 1.5 + bias[h] * (q - kv) / 7), bias


def recorded(monkeypatch, name, call):
    """Record the arguments of a call of an op, without their autograd history."""
    calls = []
    op = getattr(autograd, name)

    def record(*args):
        calls.append(tree_map_only(torch.Tensor, torch.Tensor.detach, args))
        return op(*args)

    record._opname = op._opname
    with monkeypatch.context() as patch:
        patch.setattr(autograd, name, record)
        patch.setattr(autograd, "needs_dispatcher", lambda tensors: True)
        call()
    return calls[0]


def plain(q, k, v):
    return tritoncp.flex_attention(q, k, v, create_block_mask(causal(), 1, 1, S, S, BLOCK_SIZE=32))


def grouped(q, k, v):
    return tritoncp.flex_attention(q, k[:, :1], v[:, :1, :, :8], table_mask()[0], enable_gqa=True)


def captures(q, k, v):
    score_mod, _ = bias_of(2, requires_grad=True)
    return tritoncp.flex_attention(q, k, v, score_mod, table_mask()[0], scale=0.3)


def all_outputs(q, k, v):
    aux = AuxRequest(lse=True, max_scores=True)
    out, more = tritoncp.flex_attention(q, k, v, table_mask()[0], return_aux=aux)
    return out + more.lse[..., None]


def transposed(q, k, v):
    """Make q, k, v as a projection does: [B, S, H, D] viewed as [B, H, S, D]. Values have fewer channels."""
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v[..., :8]))
    return tritoncp.flex_attention(q, k, v, table_mask()[0])


@pytest.mark.sample(1)
@pytest.mark.parametrize("call", [plain, grouped, captures, all_outputs, transposed])
@pytest.mark.usefixtures("cpu_engine")
def test_opcheck(call, monkeypatch):
    tensors = inputs()
    sample = recorded(monkeypatch, "forward_op", lambda: call(*tensors))
    opcheck(autograd.forward_op, sample)

    def backward():
        call(*(x.requires_grad_() for x in tensors)).square().sum().backward()

    sample = recorded(monkeypatch, "backward_op", backward)
    opcheck(autograd.backward_op, sample)


@pytest.mark.sample(1)
@pytest.mark.usefixtures("cpu_engine")
@pytest.mark.parametrize("form", ["mask", "torch's", "plan"])
def test_an_eager_call_is_not_encoded_and_reads_the_mask_once_per_pass(form, monkeypatch):
    mask, _ = table_mask()
    block_mask = {"mask": mask, "torch's": mask.to_block_mask(), "plan": make_plan(mask)}[form]
    q, k, v = (x.requires_grad_() for x in inputs())
    score_mod, bias = bias_of(2, requires_grad=True)
    want = tritoncp.flex_attention(q, k, v, score_mod, block_mask)
    reads, read = [], snapshot.read_state
    monkeypatch.setattr(snapshot, "read_state", lambda *args, **more: reads.append(1) or read(*args, **more))
    monkeypatch.setattr(op_arguments, "handle_of", None)  # which an encoded call needs
    out = tritoncp.flex_attention(q, k, v, score_mod, block_mask)
    assert torch.equal(out, want) and len(reads) == 1
    out.sum().backward()
    assert bias.grad is not None and len(reads) == 2
    fast = torch.compile(tritoncp.flex_attention, backend="aot_eager", fullgraph=True)
    for _ in range(2):  # the first call also compiles
        reads.clear()
        out = fast(q, k, v, score_mod, block_mask)
        assert torch.equal(out, want)
    assert len(reads) == 1
    out.sum().backward()
    assert len(reads) == 2


@pytest.mark.usefixtures("cpu_engine")
def test_editing_a_capture_of_a_score_mod_before_backward_is_an_error():
    q, k, v = (x.requires_grad_() for x in inputs())
    score_mod, bias = bias_of(2)
    out = tritoncp.flex_attention(q, k, v, score_mod, table_mask()[0])
    bias.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.usefixtures("cpu_engine")
def test_the_first_derivative_under_create_graph_is_right_and_a_second_is_refused():
    tensors = [x.requires_grad_() for x in inputs()]
    graph_grads = torch.autograd.grad(plain(*tensors).square().sum(), tensors, create_graph=True)
    freed = torch.autograd.grad(plain(*tensors).square().sum(), tensors)
    assert all(map(torch.equal, graph_grads, freed))
    with pytest.raises(RuntimeError, match=r"no second derivative: .*tritoncp\.reference\.dense\."):
        graph_grads[0].sum().backward()


def test_the_remedy_for_a_second_derivative_computes_it():
    score_mod, mask = bias_of(1, dtype=torch.float64)[0], create_block_mask(causal(), 1, 1, 4, 4)
    x = torch.randn(1, 1, 4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: dense_attention(x, x, x, mask, score_mod).out, x)


@pytest.mark.sample(1)
def test_the_backward_pass_runs_on_another_thread(engine):
    """The backward pass runs in another thread, as on a GPU."""
    tensors = [x.requires_grad_() for x in inputs(dtype=torch.float64)]
    score_mod, bias = bias_of(2, dtype=torch.float64, requires_grad=True)
    mask, _ = table_mask()
    want = torch.autograd.grad(
        dense_attention(*tensors, mask, score_mod).out.square().sum(), [*tensors, bias]
    )
    out = tritoncp.flex_attention(*tensors, score_mod, mask)
    thread = threading.Thread(target=lambda: out.square().sum().backward())
    thread.start()
    thread.join()
    for x, grad in zip([*tensors, bias], want, strict=True):
        torch.testing.assert_close(x.grad, grad, rtol=0, atol=1e-8)


def test_functionalize_is_allowed():
    """tests/call/mistakes.toml has the transforms that are refused."""
    x = inputs()
    for source in (causal(), create_block_mask(lambda b, h, q, kv: q % 7 <= kv, 1, 1, S, S)):

        def attend(q, k, v, mask=source):  # its plan and tables are made under functionalize
            return tritoncp.flex_attention(q, k, v, mask)

        out = torch.func.functionalize(attend)(*x)
        assert torch.equal(out, attend(*x))


def test_dispatch_modes_do_not_reach_into_the_ops():
    """A dispatch mode sees one op, not the collectives and launches inside, and the result is the same."""

    class Names(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    q, k, v = inputs()
    mask, _ = table_mask()
    plan = make_plan(mask)
    score_mod, _ = bias_of(2)
    want = tritoncp.flex_attention(q, k, v, score_mod, plan)  # the mods are translated before the mode looks
    with Names() as names:
        out = tritoncp.flex_attention(q, k, v, score_mod, plan)
    assert names.seen == ["tritoncp.forward.default"]
    assert torch.equal(out, want)


@pytest.mark.sample(1)
@pytest.mark.parametrize("wrong", ["query", "gradient", "capture"])
def test_lazily_negated_tensors_are_resolved(wrong, engine):
    """Kernels read memory, which does not include a lazy negation."""
    q, k, v, dout = (*inputs(dtype=torch.float64), torch.randn(1, 2, S, 16, dtype=torch.float64))
    slopes = torch.randn(2, dtype=torch.float64)

    def lazy(x):
        return torch.complex(torch.zeros_like(x), -x).conj().imag

    def answers(make):
        arguments = {"query": q, "gradient": dout, "capture": slopes}
        arguments[wrong] = make(arguments[wrong])
        assert arguments[wrong].is_neg() == (make is lazy)
        x = arguments["query"], k.clone().requires_grad_(), v.clone().requires_grad_()
        slope, mask = arguments["capture"], create_block_mask(causal(), 1, 1, S, S, BLOCK_SIZE=32)
        out = tritoncp.flex_attention(*x, lambda s, b, h, i, j: s + slope[h] * (i - j) / 9, mask)
        return out, *torch.autograd.grad(out, x[1:], arguments["gradient"])

    for a, b in zip(answers(torch.clone), answers(lazy), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("cpu_engine")
def test_a_traced_module_calls_the_op():
    tensors = inputs()
    plan = make_plan(create_block_mask(causal(), 1, 1, S, S, BLOCK_SIZE=32))
    want = tritoncp.flex_attention(*tensors, plan)
    traced = torch.jit.trace(
        lambda q, k, v: tritoncp.flex_attention(q, k, v, plan), tensors, check_trace=False
    )
    assert torch.equal(traced(*tensors), want) and "tritoncp::forward" in str(traced.graph)


@pytest.mark.parametrize(
    ("bad", "good"),
    [
        ({"PACK_GQA": 1}, {"PACK_GQA": True}),
        ({"SPLIT_KV": 2.0}, {"SPLIT_KV": 2}),
        ({"BLOCK_M": 64.0}, {"BLOCK_M": 64}),
        ({"BLOCK_N": [16]}, {"BLOCK_N": 16}),
    ],
)
def test_a_refused_option_does_not_affect_the_next_call(bad, good):
    q, k, v = inputs(2, 1, length=32)
    mask = create_block_mask(causal(), 1, 1, 32, 32, BLOCK_SIZE=32)
    with pytest.raises(ValueError, match="kernel option"):
        tritoncp.flex_attention(q, k, v, None, mask, enable_gqa=True, kernel_options=bad)
    tritoncp.flex_attention(q, k, v, None, mask, enable_gqa=True, kernel_options=good)


def test_kernels_are_launched_on_the_gpu_of_the_tensors(monkeypatch):
    """The thread's current GPU may be another one."""
    current = [0]

    class Device:
        def __init__(self, device: torch.device) -> None:
            self.index = device.index

        def __enter__(self) -> None:
            current.append(self.index)

        def __exit__(self, *_) -> None:
            current.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", Device)
    for device, devices in (("cuda:1", 1), ("cuda:0", 0), ("cpu", 0)):
        x: Any = SimpleNamespace(device=torch.device(device), is_cuda=device != "cpu")
        with autograd.current_device(x):
            assert current[-1] == devices
    assert current == [0]


COPIES = {  # of a saved tensor: each returns a function that gives it back
    "clone": lambda x: partial(torch.clone, x.detach().clone()),
    "numpy": lambda x: partial(torch.from_numpy, x.detach().numpy().copy()),
    "bytes": lambda x: partial(pickle.loads, pickle.dumps(x.detach())),
    "part of a buffer": lambda x: partial(torch.squeeze, torch.stack([x.detach()] * 2)[1:], 0),
}


@pytest.mark.sample(1)
@pytest.mark.usefixtures("cpu_engine", "fresh_dynamo")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", COPIES)
def test_saved_tensor_hooks_may_copy_what_a_call_saves(name, compiled):
    """No other reference to the plan exists in the backward pass, and other plans were made since."""
    call = tritoncp.flex_attention
    call = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
    x = [t.requires_grad_() for t in inputs(length=40)]

    def attend(call, mod):
        plan = make_plan(create_block_mask(mod, 1, 1, 40, 40, BLOCK_SIZE=16))
        with torch.autograd.graph.saved_tensors_hooks(COPIES[name], lambda saved: saved()):
            return call(*x, plan)

    mods = causal(), tritoncp.sliding_window(7)
    outs = [attend(call, mod) for mod in mods]
    gc.collect()
    for out, mod in zip(outs, mods):
        want = torch.autograd.grad(tritoncp.flex_attention(*x, mod).sum(), x)
        for a, b in zip(torch.autograd.grad(out.sum(), x), want, strict=True):
            torch.testing.assert_close(a, b)
