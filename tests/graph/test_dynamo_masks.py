"""Tests of masks, plans and shards that are made inside functions compiled by torch.compile."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import tritoncp
from tests.command_process import run_code
from tests.draws import by_turns
from tests.graph.compiled_calls import Compiled
from tritoncp import causal, create_block_mask, flex_attention, make_plan, shard, simulate
from tritoncp.graph import handle_ops

pytestmark = pytest.mark.usefixtures("cpu_engine", "fresh_dynamo")  # compiled code is outside the kernels

S = 64


def documents(*lengths):
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def in_documents(ids):
    return lambda b, h, q, kv: (ids[q] == ids[kv]) & (q >= kv)


def model(x, mask_mod):
    mask = create_block_mask(mask_mod, None, None, x.shape[2], x.shape[2], BLOCK_SIZE=16)
    return flex_attention(x.sin(), x, x, block_mask=mask).cos()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("dynamic", "backend"),
    [(None, "aot_eager"), (True, "aot_eager"), pytest.param(None, "inductor", marks=pytest.mark.long)],
)
def test_new_documents_do_not_compile_again(dynamic, backend):
    """New lengths do not either, if lengths are dynamic."""
    case = Compiled(model, dynamic=dynamic, backend=backend)
    cuts, lengths = (10, 30, 50), ((S, 48, 56) if dynamic else (S, S, S))
    xs = [torch.randn(1, 2, length, 8, requires_grad=True) for length in lengths]
    mods = [in_documents(documents(n, length - n)) for n, length in zip(cuts, lengths)]
    outs = list(map(case.check, xs, mods))
    assert case.counter.frame_count == 1
    grads = [torch.autograd.grad(out.sum(), xs[1])[0] for out in (outs[1], model(xs[1], mods[1]))]
    torch.testing.assert_close(*grads)


def test_one_mask_made_in_a_graph_serves_layers_batches_and_heads():
    """All arguments of `create_block_mask`, and two layers that take its mask."""

    def layers(x, lens):
        mask = create_block_mask(
            lambda b, h, q, kv: (kv < 20 + 10 * b) & (q >= kv - 2 * h), 2, 2, S, S, "cpu", BLOCK_SIZE=(16, 32)
        )
        return flex_attention(flex_attention(x, x, x, block_mask=mask), x, x, lens, mask)

    bias = torch.tensor([0.5, 0.25])
    Compiled(layers).check(torch.randn(2, 2, S, 8), lambda s, b, h, q, kv: s + bias[h] * (q - kv))


def test_a_mask_is_made_once_for_the_same_documents(monkeypatch):
    masks, make = [], handle_ops.create_block_mask
    monkeypatch.setattr(handle_ops, "create_block_mask", lambda *args: masks.append(args) or make(*args))
    fast = torch.compile(model, backend="aot_eager", fullgraph=True)
    x, ids = torch.randn(1, 2, S, 8), documents(10, 54)
    for _ in range(3):
        fast(x, in_documents(ids))
    assert len(masks) == 1
    ids.copy_(documents(20, 44))
    torch.testing.assert_close(fast(x, in_documents(ids)), model(x, in_documents(ids)))
    fast(x, in_documents(documents(20, 44)))
    assert len(masks) == 3


IDS = documents(10, 30, 24)
COMBINED = {
    "and": lambda n: tritoncp.sliding_window(n) & tritoncp.document(ids=IDS),
    "or": lambda n: tritoncp.sliding_window(n, n) | tritoncp.prefix_lm(n) | causal(),
    "not": lambda n: tritoncp.not_(tritoncp.sliding_window(n)) & causal(),
    "not not": lambda n: tritoncp.not_(tritoncp.not_(causal() & tritoncp.document(ids=IDS))),
    "a function first": lambda n: (lambda b, h, q, kv: q - kv < n) & causal(),
    "a function last": lambda n: causal() | tritoncp.not_(lambda b, h, q, kv: q - kv < n),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "dynamic"), by_turns(COMBINED, (None, True), rare=("not", "a function first"))
)
def test_masks_combined_inside_are_in_the_graph(name, dynamic):
    combine = COMBINED[name]

    def layer(x, n):
        mask = create_block_mask(combine(n), None, None, S, S)
        return flex_attention(flex_attention(x.sin(), x, x, block_mask=mask), x, x, block_mask=combine(n))

    case = Compiled(layer, dynamic=dynamic, backend="eager")
    for n in (3, 9, 14, 20):
        case.check(torch.randn(1, 2, S, 8), n)
    assert case.counter.frame_count <= 2


def test_the_complement_of_a_mask_breaks_a_graph_once():
    def layer(x, mask):
        return flex_attention(x.sin(), x, x, block_mask=~mask & causal()).cos()

    case = Compiled(layer, fullgraph=False)
    case.check(torch.randn(1, 2, S, 8), tritoncp.sliding_window(9))


@pytest.mark.long
def test_a_mask_may_leave_the_graph():
    x, mod = torch.randn(1, 2, S, 8), in_documents(documents(10, 54))
    fast = torch.compile(
        lambda x: (x + 1, create_block_mask(mod, None, None, S, S, BLOCK_SIZE=16)),
        fullgraph=True,
        backend="aot_eager",
    )
    mask = fast(x)[1]
    want = create_block_mask(mod, None, None, S, S, BLOCK_SIZE=16)
    assert (mask.q_len, mask.sparsity(), mask.draw()) == (S, want.sparsity(), want.draw())
    out = flex_attention(x, x, x, want)
    assert torch.equal(flex_attention(x, x, x, block_mask=mask), out)
    assert torch.equal(flex_attention(x, x, x, mask), out)
    assert torch.equal(flex_attention(x, x, x, make_plan(mask)), out)
    again = torch.compile(flex_attention, fullgraph=True, backend="aot_eager")
    assert torch.equal(again(x, x, x, block_mask=mask), out)
    world = simulate(2)
    xs = list(x.chunk(2, 2))
    torch.testing.assert_close(torch.cat(world.flex_attention(xs, xs, xs, mask), 2), out)


def padded(x, padding):
    """A mask_mod around a tensor of the graph, as transformers makes them."""
    visible = padding > 0

    def mask_mod(b, h, q, kv):
        return (q >= kv) & visible[kv]

    return model(x, mask_mod)


def test_a_mask_mod_made_inside_around_tensors():
    case = Compiled(padded)
    for length in (3, 5):
        case.check(torch.randn(1, 2, S, 8), torch.arange(S) - length)
    assert case.counter.frame_count == 1


@pytest.mark.long
def test_host_calls_break_the_graph_in_two():
    """Dynamo traces no code of tritoncp at a break."""
    mask = create_block_mask(causal(), 1, 1, S, S, BLOCK_SIZE=16)
    world = simulate(2)
    spread = world.make_plan(mask)

    def planned(x):
        return flex_attention(x * 2, x, x, make_plan(mask)) + 1

    def simulated(x):
        xs = world.shard(x * 2, spread, dim=2)
        return world.unshard(world.flex_attention(xs, xs, xs, spread), spread, dim=2) + 1

    def reordered(x):
        return tritoncp.dual_chunk_to_contiguous(x * 2, torch.tensor([0, S]), world_size=2, dim=2) + 1

    def selected(x):
        return flex_attention(x * 2, x, x, mask[0]) + 1

    for fn in (planned, simulated, reordered, selected):
        case = Compiled(fn, fullgraph=False)
        case.check(torch.randn(1, 2, S, 8))
        assert case.counter.frame_count <= 3, fn.__name__
        torch._dynamo.reset()
        if fn is selected:  # an operator of the user's mask
            continue
        with pytest.raises(Exception, match=r"(?s)inside torch.compile.* outside the compiled function"):
            Compiled(fn).fast(torch.randn(1, 2, S, 8))


def test_tensors_are_sharded_inside_a_graph():
    plan = make_plan(create_block_mask(causal(), 1, 1, S, S, BLOCK_SIZE=16), world_size=2, rank=1)

    def local(x):
        return shard(x, plan, dim=2) + tritoncp.positions(plan)[0][:, None]

    local(torch.randn(1, 2, S, 8))
    case = Compiled(local)
    case.check(torch.randn(1, 2, S, 8))
    assert case.counter.frame_count == 1


@pytest.mark.long
def test_a_backward_pass_inside_is_not_traced():
    plan = make_plan(create_block_mask(causal(), 1, 1, S, S, BLOCK_SIZE=16))

    class Counting:
        calls = 0

        def __call__(self, s, b, h, q, kv):
            self.calls += 1  # this cannot be in a graph
            return s * 2

    mod = Counting()

    def step(x, weight):
        flex_attention(x * weight, x, x, mod, plan).sum().backward()
        return weight.grad * 2

    counter, x = CompileCounterWithBackend("aot_eager"), torch.randn(1, 2, S, 8)
    weights = [torch.ones(8, requires_grad=True) for _ in range(2)]
    got = torch.compile(step, backend=counter)(x, weights[0])
    torch.testing.assert_close(got, step(x, weights[1]))
    assert counter.frame_count <= 3


@pytest.mark.long
def test_masks_and_methods_under_checkpointing():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.slopes = torch.nn.Parameter(torch.ones(2))

        def score_mod(self, s, b, h, q, kv):
            return s * self.slopes[h]

        def attend(self, x):
            mask = create_block_mask(causal(), None, None, x.shape[2], x.shape[2])
            return flex_attention(x.sin(), x, x, self.score_mod, mask)

        def forward(self, x):
            return checkpoint(self.attend, x, use_reentrant=False) * 2

    layer, x = Layer(), torch.randn(1, 2, S, 8, requires_grad=True)
    out = Compiled(layer).check(x)
    got = torch.autograd.grad(out.square().sum(), layer.slopes)
    torch.testing.assert_close(got, torch.autograd.grad(layer(x).square().sum(), layer.slopes))


FIRST_CALL = """
import sys, torch, tritoncp
tritoncp.create_block_mask
assert "torch._dynamo" not in sys.modules
def model(x):
    mask = tritoncp.create_block_mask(tritoncp.causal(), 1, 1, 64, 64)
    return tritoncp.flex_attention(x, x, x, mask)
x = torch.randn(1, 1, 64, 8)
out = torch.compile(model, backend="eager", fullgraph=True)(x)
assert torch.equal(out, model(x))
"""


@pytest.mark.long
def test_the_first_call_of_a_process_may_be_compiled():
    """Marks on entry points do not import Dynamo, and a mask may be traced before any other call."""
    run_code(FIRST_CALL)
