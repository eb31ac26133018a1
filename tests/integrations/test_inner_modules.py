"""Tests of ContextParallel on modules with the exact signatures of torchtitan's inner attention and of the
wrappers in torch's own tests, on two ranks."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

import tritoncp
from tests.multiprocess import ranks
from tritoncp import ContextParallel, make_plan, shard, unshard
from tritoncp.reference.dense import dense_attention

S, HEADS, KV_HEADS, DIM, BLOCK = 96, 4, 2, 8, 16

pytestmark = pytest.mark.usefixtures("cpu_engine")


class FlexAttention(nn.Module):
    """torchtitan's FlexAttention, layout [B, L, N, H]."""

    def forward(self, q_BLNH, k_BLNH, v_BLNH, *, attention_masks, score_mod=None, scale=None,
                enable_gqa=False, out_transform=None, **kwargs):  # fmt: skip
        raise AssertionError("this forward should have been replaced")


class PackedFlexAttention(nn.Module):
    """torchtitan's later shape, layout [T, N, H]."""

    def forward(self, q_THK, k_THK, v_THV, *, attention_masks=None, scale=None, layer_id=7, **kwargs):
        raise AssertionError("this forward should have been replaced")


class ScaledDotProductAttention(nn.Module):
    """torchtitan's module around scaled_dot_product_attention, layout [B, L, N, H]."""

    def forward(self, q_BLNH, k_BLNH, v_BLNH, *, attention_masks=None, scale=None, enable_gqa=False,
                is_causal=True, **kwargs):  # fmt: skip
        raise AssertionError("this forward should have been replaced")


class FlexAttentionWrapper(nn.Module):
    """The wrapper in torch's tests of context parallelism."""

    def forward(self, *args, **kwargs):
        return flex_attention(*args, **kwargs)


class SDPAWrapper(nn.Module):
    """The other wrapper in torch's tests."""

    def forward(self, *args, **kwargs):
        return scaled_dot_product_attention(*args, **kwargs)


def mask(heads=1):
    ids = torch.arange(S) // 20
    reach = torch.tensor([8, 96, 17, 40])
    windows = (lambda h, q, kv: q - kv < reach[h]) if heads > 1 else (lambda h, q, kv: ids[q] == ids[kv])
    return tritoncp.create_block_mask(
        lambda b, h, q, kv: windows(h, q, kv) & (q >= kv), 1, heads, S, S, BLOCK_SIZE=BLOCK
    )


def alibi(slopes):
    return lambda score, b, h, q, kv: score - slopes[h] * (q - kv)


def tensors(batch=1):
    """Return q, k, v as [B, H, S, D]."""
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randn(batch, heads, S, DIM, dtype=torch.float64, generator=generator)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def slopes():
    return torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)


def dense(mask, score_mod=None, **options):
    q, k, v = tensors()
    return dense_attention(q, k, v, mask, score_mod, **options)


def with_sinks(out, lse):
    """Rescale as torchtitan's gpt-oss does: [..., heads] of lse beside [..., heads, channels] of out."""
    return out * torch.sigmoid(lse - slopes()).unsqueeze(-1)


def whole(x, plan, mesh, dim):
    return unshard(x.detach(), plan, mesh, dim=dim)


# -- signatures and layouts ------------------------------------------------------------------------------


def every_signature(group):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    plan = make_plan(mask(), mesh)
    apart = [shard(x, plan, dim=2) for x in tensors()]
    rows = [x.transpose(1, 2) for x in apart]
    packed = [x[0].transpose(0, 1) for x in apart]
    titan = parallelize_module(FlexAttention(), mesh, ContextParallel(seq_dim=1))
    later = parallelize_module(PackedFlexAttention(), mesh, ContextParallel(seq_dim=0, enable_gqa=True))
    wrapper = parallelize_module(FlexAttentionWrapper(), mesh, ContextParallel())
    gqa = {"enable_gqa": True, "attention_masks": plan}
    outs = {
        "torchtitan": titan(*rows, **gqa, scale=0.4, score_mod=None, layer=None).transpose(1, 2),
        "out_transform": titan(*rows, **gqa, scale=0.4, out_transform=with_sinks).transpose(1, 2),
        "score_mod": titan(*rows, **gqa, score_mod=alibi(slopes())).transpose(1, 2),
        "packed": later(*packed, attention_masks=plan, scale=0.4, layer_id=7).transpose(0, 1)[None],
        "packed out_transform": later(
            *packed, attention_masks=plan, scale=0.4, out_transform=with_sinks
        ).transpose(0, 1)[None],
        "wrapper": wrapper(*apart, alibi(slopes()), plan, enable_gqa=True),
        "wrapper by name": wrapper(
            query=apart[0], key=apart[1], value=apart[2], block_mask=plan, scale=0.4, enable_gqa=True
        ),
    }
    return {name: whole(out, plan, mesh, 2) for name, out in outs.items()}


@pytest.mark.long
def test_signatures_of_torchtitan_and_of_torchs_tests():
    plain, biased = dense(mask(), scale=0.4), dense(mask(), alibi(slopes()))
    sunk = with_sinks(plain.out.transpose(1, 2), plain.lse.transpose(1, 2)).transpose(1, 2)
    want = {
        "torchtitan": plain.out, "out_transform": sunk, "score_mod": biased.out, "packed": plain.out,
        "packed out_transform": sunk, "wrapper": biased.out, "wrapper by name": plain.out,
    }  # fmt: skip
    for outs in ranks.run(2, every_signature):
        assert outs.keys() == want.keys()
        for name, out in outs.items():
            torch.testing.assert_close(out, want[name], rtol=0, atol=1e-8, msg=name)


# -- modules that call scaled_dot_product_attention ------------------------------------------------------


def sdpa_modules(group, compiled):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    plan = make_plan(mask(), mesh)
    assert plan.of_sdpa(True) is plan.of_sdpa(True) and torch.equal(plan.of_sdpa(True).owners, plan.owners)
    rows = [shard(x, plan, dim=2).transpose(1, 2).requires_grad_() for x in tensors()]
    style = ContextParallel(seq_dim=1)
    sdpa, flex = (parallelize_module(m, mesh, style) for m in (ScaledDotProductAttention(), FlexAttention()))
    fixed = parallelize_module(ScaledDotProductAttention(), mesh, ContextParallel(plan, seq_dim=1))
    wrapper = parallelize_module(SDPAWrapper(), mesh, ContextParallel(enable_gqa=True))
    pieces = [shard(x, None, mesh, dim=2) for x in tensors()]
    call = {"attention_masks": plan, "enable_gqa": True}
    outs = {
        "causal": sdpa(*rows, **call), "full": sdpa(*rows, **call, is_causal=False),
        "documents": flex(*rows, **call), "fixed": fixed(*rows, enable_gqa=True),
    }  # fmt: skip
    if compiled:
        fast = torch.compile(sdpa, backend="aot_eager", fullgraph=True)(*rows, **call)
        torch.testing.assert_close(fast, outs["causal"])
    natural = {
        "causal": wrapper(*pieces, is_causal=True, dropout_p=0.0, attn_mask=None),
        "full": wrapper(*pieces),
    }
    sum(out.square().sum() for out in outs.values()).backward()
    grads = [whole(x.grad, plan, mesh, 1).transpose(1, 2) for x in rows]
    outs = {name: whole(out, plan, mesh, 1).transpose(1, 2) for name, out in outs.items()}
    return outs, grads, {name: whole(out, tritoncp.full_mask(S, S), mesh, 2) for name, out in natural.items()}


@pytest.mark.long
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
def test_one_plan_serves_modules_of_flex_attention_and_of_sdpa(compiled):
    q, k, v = (x.requires_grad_() for x in tensors())
    causal = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    full = scaled_dot_product_attention(q, k, v, enable_gqa=True)
    want = {
        "causal": causal,
        "full": full,
        "documents": dense_attention(q, k, v, mask()).out,
        "fixed": causal,
    }
    grads = torch.autograd.grad(sum(out.square().sum() for out in want.values()), (q, k, v))
    for outs, parts, natural in ranks.run(2, sdpa_modules, compiled, timeout=120):
        for name, out in outs.items():
            torch.testing.assert_close(out, want[name].detach(), rtol=0, atol=1e-8, msg=name)
        for name, out in natural.items():
            torch.testing.assert_close(out, want[name].detach(), rtol=0, atol=1e-8, msg=name)
        for grad, part in zip(grads, parts, strict=True):
            torch.testing.assert_close(part, grad, rtol=0, atol=1e-8)


# -- DTensors whose heads another dimension of the mesh shards -------------------------------------------


def sharded_heads(group, heads, compiled):
    """Run on a mesh 2 x 2 (context, tensor): DTensors over both dimensions, and over the second alone."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    plan = make_plan(mask(heads), mesh["cp"])
    module = parallelize_module(FlexAttention(), mesh["cp"], ContextParallel(seq_dim=1))
    local = [shard(x, plan, dim=2).transpose(1, 2) for x in tensors()]
    over_heads = [distribute_tensor(x, mesh["tp"], [Shard(2)], src_data_rank=None) for x in local]
    over_both = [
        DTensor.from_local(
            x.to_local().detach().requires_grad_(), mesh, [Shard(1), Shard(2)], run_check=False
        )
        for x in over_heads
    ]
    bias = slopes().requires_grad_()
    call = {"attention_masks": plan, "score_mod": alibi(bias), "enable_gqa": True}
    out = module(*over_both, **call)
    assert out.placements == (Shard(1), Shard(2)) and out.shape == (1, S, HEADS, DIM)
    second = module(*over_heads, **call)
    torch.testing.assert_close(second.to_local(), out.to_local(), rtol=0, atol=0)
    if compiled:
        fast = torch.compile(module, backend="aot_eager", fullgraph=True)(*over_both, **call)
        torch.testing.assert_close(fast.to_local(), out.to_local(), rtol=0, atol=1e-12)
    out.to_local().square().sum().backward()
    torch.distributed.all_reduce(bias.grad)
    gathered = second.redistribute(mesh["tp"], [Replicate()]).to_local()
    return whole(gathered, plan, mesh["cp"], 1).transpose(1, 2), bias.grad


COMPILED = pytest.param(HEADS, True, marks=pytest.mark.long)


@pytest.mark.long
@pytest.mark.parametrize(("heads", "compiled"), [(1, False), (HEADS, False), COMPILED])
def test_heads_sharded_on_another_dimension_of_the_mesh(heads, compiled):
    bias = slopes().requires_grad_()
    want = dense(mask(heads), alibi(bias)).out
    want.square().sum().backward()
    for out, grad in ranks.run(4, sharded_heads, heads, compiled, timeout=120):
        torch.testing.assert_close(out, want.detach(), rtol=0, atol=1e-8)
        torch.testing.assert_close(grad, bias.grad, rtol=0, atol=1e-8)


# -- refusals --------------------------------------------------------------------------------------------


def refusals(group):
    q, k, v = (x.transpose(1, 2) for x in tensors())
    heads = init_device_mesh("cpu", (1, 1), mesh_dim_names=("cp", "tp"))
    parts = [DTensor.from_local(x, heads, [Shard(1), Shard(2)], run_check=False) for x in (q, k, v)]
    module = parallelize_module(FlexAttention(), heads["cp"], ContextParallel(seq_dim=1, enable_gqa=True))
    with pytest.raises(ValueError, match="pass the plan of the mask of all heads"):
        module(*parts, attention_masks=mask(HEADS))
    other = DTensor.from_local(k, heads, [Shard(1), Replicate()], run_check=False)
    with pytest.raises(ValueError, match="query, key or value is a DTensor"):
        module(parts[0], other, parts[2], attention_masks=mask())


def test_sharded_heads_without_a_meaning_are_refused():
    """tests/call/mistakes.toml has the other arguments."""
    ranks.run(1, refusals)
