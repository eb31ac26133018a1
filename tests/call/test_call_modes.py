"""Tests of calls that are traced outside torch.compile, and of tensors that have shapes and no values."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.attention import flex_attention as torch_flex

import tritoncp
from tritoncp import causal, create_block_mask, make_plan, sliding_window

S, HEADS = 64, 4
DOCUMENTS = torch.arange(S) // 24

pytestmark = pytest.mark.usefixtures("cpu_engine")


def mask_mod():
    documents = DOCUMENTS

    def mod(b, h, q, kv):
        return (documents[q] == documents[kv]) & (q >= kv)

    return mod


MASKS = {
    "none": lambda: None,
    "closed form": causal,
    "mask": lambda: create_block_mask(mask_mod(), 1, 1, S, S, BLOCK_SIZE=16),
    "torch's": lambda: torch_flex.create_block_mask(mask_mod(), 1, 1, S, S, "cpu", BLOCK_SIZE=16),
    "plan": lambda: make_plan(create_block_mask(mask_mod(), 1, 1, S, S, BLOCK_SIZE=16)),
}


def qkv(device: str = "cpu", s: int = S, batch: int = 2, requires_grad: bool = False):
    shapes = [(batch, s, HEADS, 16), (batch, s, 2, 16), (batch, s, 2, 8)]
    make = torch.randn if device == "cpu" else torch.empty
    x = [make(shape, device=device) for shape in shapes]
    return [t.transpose(1, 2).requires_grad_(requires_grad) for t in x]


def attend(q, k, v, mask=None, score_mod=None):
    return tritoncp.flex_attention(q, k, v, score_mod, mask, enable_gqa=True)


def check_shapes(x, mask, **options):
    """Compare dtypes, shapes and strides of results and gradients with a call on values."""
    real = qkv(requires_grad=True)

    def results(q, k, v):
        outs = tritoncp.flex_attention(q, k, v, None, mask, enable_gqa=True, return_lse=True, **options)
        grads = torch.autograd.grad([*outs], [q, k, v], [torch.ones_like(out) for out in outs])
        return *outs, *grads

    for got, want in zip(results(*x), results(*real), strict=True):
        assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
        assert type(got) is type(x[0]) and got.device == x[0].device


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("inside", [True, False])
def test_fake_tensors(name, inside):
    """A call on fake tensors returns fake results, within their mode and after it."""
    mask, mode = MASKS[name](), FakeTensorMode(allow_non_fake_inputs=False)
    with mode:
        x = qkv(requires_grad=True)
        if inside:
            out = attend(*x, mask)
            torch.autograd.grad(out.sum(), x)
            assert isinstance(out, FakeTensor)
    check_shapes(x, mask)


@pytest.mark.parametrize("name", MASKS)
def test_meta_tensors(name):
    check_shapes(qkv("meta", requires_grad=True), MASKS[name]())


def test_meta_tensors_with_a_mask_on_meta():
    mask = MASKS["torch's"]().to("meta")
    assert attend(*qkv("meta"), mask).is_meta


def test_masks_and_plans_made_among_fake_tensors_have_values():
    with FakeTensorMode():
        mask = create_block_mask(mask_mod(), 1, 1, S, S, BLOCK_SIZE=16)
        plan = make_plan(mask)
        lists = torch_flex.create_block_mask(lambda b, h, q, kv: q >= kv, 1, 1, S, S, "cpu")
        x = qkv()
        for one in (mask, plan, lists):
            assert attend(*x, one).shape == (2, HEADS, S, 8)
    assert torch.equal(mask.to_dense(), MASKS["mask"]().to_dense())
    real = qkv()
    assert torch.equal(attend(*real, plan), attend(*real, MASKS["plan"]()))


def test_a_wrong_length_is_reported_for_fake_and_meta_tensors():
    for mode in (FakeTensorMode(), torch.device("meta")):
        with mode:
            x = qkv("cpu", s=S + 1) if isinstance(mode, FakeTensorMode) else qkv("meta", s=S + 1)
            with pytest.raises(ValueError, match=f"{S + 1} rows"):
                attend(*x, MASKS["plan"]())


def test_captures_of_score_mods_among_fake_tensors_get_gradients():
    bias = torch.randn(HEADS, requires_grad=True)

    def score_mod():
        table, factor = bias, 0.5
        return lambda score, b, h, q, kv: score + table[h] * factor

    with FakeTensorMode():
        out = attend(*qkv(), causal(), score_mod())
        (grad,) = torch.autograd.grad(out.sum(), [bias])
        assert grad.shape == bias.shape


def test_simulated_worlds_take_fake_and_meta_tensors():
    world = tritoncp.simulate(2)
    plan = world.make_plan(create_block_mask(mask_mod(), 1, 1, S, S, BLOCK_SIZE=16))
    xs = [world.shard(x, plan, dim=2) for x in qkv("meta")]
    assert [x.shape for x in world.flex_attention(*xs, plan, enable_gqa=True)] == [(2, HEADS, 32, 8)] * 2
    with FakeTensorMode():
        xs = [[torch.empty(x.shape) for x in rank] for rank in xs]
        outs = world.flex_attention(*xs, plan, enable_gqa=True)
    assert [x.shape for x in outs] == [(2, HEADS, 32, 8)] * 2


@pytest.mark.sample(5)
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("name", MASKS)
def test_make_fx(name, mode):
    mask = MASKS[name]()
    graph = make_fx(lambda q, k, v: attend(q, k, v, mask), tracing_mode=mode)(*qkv())
    assert any(node.target is torch.ops.tritoncp.forward.default for node in graph.graph.nodes)
    x = qkv()
    assert torch.equal(graph(*x), attend(*x, mask))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["none", "closed form"])
def test_make_fx_keeps_backed_sizes_symbolic(name):
    """A graph traced with one batch and length serves others, backward pass included."""

    def gradients(q, k, v):
        out = attend(q, k, v, MASKS[name]())
        return torch.autograd.grad(out.square().sum(), [q, k, v])

    graph = make_fx(gradients, tracing_mode="symbolic")(*qkv(requires_grad=True))
    for s, batch in ((S, 2), (48, 3), (S + 17, 1)):
        x = qkv(s=s, batch=batch, requires_grad=True)
        for got, want in zip(graph(*x), gradients(*x), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_make_fx_takes_a_mask_as_input():
    """The plan is made inside the graph: an index tensor that is traced does not become a constant."""

    def layer(q, k, v, documents):
        return attend(q, k, v, tritoncp.document(ids=documents))

    x = qkv()
    for mode in ("fake", "real"):
        graph = make_fx(layer, tracing_mode=mode)(*x, DOCUMENTS)
        other = torch.arange(S) // 10
        assert torch.equal(graph(*x, other), layer(*x, other))


@pytest.mark.sample(5)
@pytest.mark.parametrize("sizes", ["batch", "length", "both"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dim", [16, 8])
def test_unbacked_sizes(sizes, transposed, dim):
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env):
        batch = env.create_unbacked_symint() if sizes != "length" else 2
        length = env.create_unbacked_symint() if sizes != "batch" else S
        for size in (batch, length):
            if isinstance(size, torch.SymInt):
                torch._check_is_size(size)
        q, v = (
            torch.empty(batch, length, HEADS, d).transpose(1, 2)
            if transposed
            else torch.empty(batch, HEADS, length, d)
            for d in (16, dim)
        )
        q.requires_grad_()
        out = tritoncp.flex_attention(q, q, v, causal())
        (grad,) = torch.autograd.grad(out, [q], out)
    assert out.shape[3] == dim
    assert str(out.shape[0]) == str(batch)
    assert str(out.shape[2]) == str(grad.shape[2]) == str(length)


@pytest.mark.parametrize("size", ["batch", "length"])
def test_make_fx_with_an_unbacked_size(size):
    def layer(x, n):
        count = n.item()
        shape = (count, HEADS, S, 16) if size == "batch" else (2, HEADS, count, 16)
        y = x.new_ones(shape)
        return tritoncp.flex_attention(y, y, y, sliding_window(5))

    graph = make_fx(layer, tracing_mode="symbolic")(torch.randn(1), torch.tensor(3))
    for n in (3, 7, 40):
        want = layer(torch.randn(1), torch.tensor(n))
        assert torch.equal(graph(torch.randn(1), torch.tensor(n)), want)


class Layer(torch.nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.mask = mask

    def forward(self, q, k, v):
        return attend(q, k, v, self.mask)


@pytest.mark.sample(1)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ["closed form", "torch's", "plan"])
def test_export(name, strict):
    mask, x = MASKS[name](), qkv()
    program = torch.export.export(Layer(mask), tuple(x), strict=strict)
    assert torch.equal(program.module()(*x), attend(*x, mask))


def test_export_with_dynamic_sizes():
    sizes = {0: torch.export.Dim("B"), 2: torch.export.Dim("S")}
    program = torch.export.export(
        Layer(causal()), tuple(qkv()), dynamic_shapes=(sizes,) * 3, strict=False
    ).module()
    x = qkv(s=48, batch=3)
    assert torch.equal(program(*x), attend(*x, causal()))


def test_a_compiled_call_leaves_masks_valid():
    """Compilers leave attributes on captured tensors, which are no state of a mask_mod."""
    mask = create_block_mask(mask_mod(), 1, 1, S, S, BLOCK_SIZE=16)
    try:
        torch._dynamo.mark_static_address(DOCUMENTS, guard=False)
        assert any(name.startswith("_dynamo_") for name in vars(DOCUMENTS))
        make_plan(mask)
    finally:
        vars(DOCUMENTS).clear()
