"""Tests of the ParallelStyle, and of checkpointing that does not repeat communication."""

import itertools
import re
import warnings
from functools import partial
from unittest import mock

import pytest
import torch
from einops import rearrange
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import create_block_mask as torch_mask
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import tritoncp
from tests.multiprocess import ranks
from tritoncp import ContextParallel, checkpoint_policy, make_plan, shard, unshard
from tritoncp.api.inner_attention import KNOWN
from tritoncp.call import autograd
from tritoncp.core.suggestions import INSTEAD
from tritoncp.distributed import collectives
from tritoncp.distributed.schedules import SCHEDULES
from tritoncp.reference.dense import dense_attention

S, HEADS, DIM = 96, 2, 8

pytestmark = pytest.mark.usefixtures("cpu_engine", "in_pieces")


def slopes():
    return torch.tensor([0.5, 0.125], dtype=torch.float64)


def mask():
    ids = torch.arange(S) // 20
    return tritoncp.create_block_mask(
        lambda b, h, q, kv: (ids[q] == ids[kv]) & (q >= kv), 1, 1, S, S, BLOCK_SIZE=16
    )


def alibi(slopes):
    return lambda s, b, h, q, kv: s - slopes[h] * (q - kv)


class FlexAttention(nn.Module):
    """An attention module as training libraries write it, around torch's call."""

    def forward(self, q, k, v, *, score_mod=None, block_mask=None, scale=None, enable_gqa=False):
        return flex_attention(q, k, v, score_mod, block_mask, scale, enable_gqa)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.qkv = nn.Linear(HEADS * DIM, 3 * HEADS * DIM, dtype=torch.float64)
        self.inner = FlexAttention()

    def forward(self, x, score_mod, block_mask):
        heads = rearrange(self.qkv(x), "b s (qkv h d) -> qkv b h s d", qkv=3, h=HEADS)
        out = self.inner(*heads, score_mod=score_mod, block_mask=block_mask)
        return x + rearrange(out, "b h s d -> b s (h d)")


def whole_input():
    return torch.randn(1, S, HEADS * DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def on_one_rank():
    """Compute the output and the weights' gradient with the dense oracle."""
    block = Block()
    block.inner.forward = lambda q, k, v, score_mod, block_mask: (
        dense_attention(q, k, v, block_mask, score_mod).out
    )
    out = block(whole_input(), alibi(slopes()), mask())
    out.square().sum().backward()
    return out.detach(), block.qkv.weight.grad


def on_ranks(group, order):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    block = parallelize_module(Block(), mesh["cp"], {"inner": ContextParallel()})
    plan = make_plan(mask(), mesh["cp"])
    placed = plan if order == "plan" else mask()
    x = shard(whole_input(), placed, mesh["cp"], dim=1)
    out = block(x, alibi(slopes()), placed)
    out.square().sum().backward()
    weight = block.qkv.weight.grad
    torch.distributed.all_reduce(weight)
    return unshard(out.detach(), placed, mesh["cp"], dim=1), weight


@pytest.mark.sample(1)
@pytest.mark.parametrize("order", ["plan", "natural"])
def test_a_parallelized_module_on_two_ranks_is_the_oracle_on_one(order):
    want = on_one_rank()
    for got in ranks.run(2, on_ranks, order):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-8)


class Turned(nn.Module):
    """A module of layout [B, S, H, D], with other argument names, a mask and settings fixed by
    forward."""

    def forward(self, xq, xk, xv, attention_masks=None):
        raise AssertionError("this forward should have been replaced")


def turned_on_ranks(group):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    plan = make_plan(mask(), mesh)
    style = ContextParallel(plan, seq_dim=1, scale=0.3, enable_gqa=True, return_lse=True)
    module = parallelize_module(Turned(), mesh, style)
    q, k = (shard(x, plan, dim=1) for x in turned())
    out, lse = module(q, k, xv=k)
    second, _ = module(q, k, k, attention_masks=plan)
    natural = make_plan(mask(), mesh, balancer=None)
    tensors = [DTensor.from_local(shard(x, natural, dim=1), mesh, [Shard(1)]) for x in turned()]
    spread, _ = module(*tensors, tensors[1], attention_masks=natural)
    with pytest.raises(ValueError, match=r"ContextParallel needs plain shards, or .* \(Shard\(1\),\)"):
        module(*tensors, DTensor.from_local(k, mesh, [Shard(2)]))
    assert torch.equal(out, second)
    return unshard(out, plan, mesh, dim=1), unshard(lse, plan, mesh, dim=2), spread.full_tensor()


def turned():
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(2, S, heads, DIM, dtype=torch.float64, generator=generator) for heads in (4, 2)]


def test_modules_of_other_layouts_and_names_and_dtensors_are_parallelized():
    q, k = (x.transpose(1, 2) for x in turned())
    want = dense_attention(q, k, k, mask(), scale=0.3)
    for out, lse, spread in ranks.run(2, turned_on_ranks):
        torch.testing.assert_close(out, want.out.transpose(1, 2), rtol=0, atol=1e-8)
        torch.testing.assert_close(lse, want.lse, rtol=0, atol=1e-8)
        torch.testing.assert_close(spread, want.out.transpose(1, 2), rtol=0, atol=1e-8)


class Open(nn.Module):
    """A module whose forward takes any keyword, and names some."""

    def forward(self, q, k, v, *, mask=None, layer=7, softcap=0.0, **kwargs):
        raise AssertionError("this forward should have been replaced")


MISSPELLED = {f"{name}{end}" for name in KNOWN for end in ("s", "_")} - {*KNOWN}


@pytest.mark.sample(40)
@pytest.mark.parametrize("module", [Open, FlexAttention, nn.Module], ids=["open", "named", "any"])
@pytest.mark.parametrize("name", sorted({*INSTEAD, *MISSPELLED, "hint"} - {*KNOWN}))
def test_a_keyword_without_meaning_is_refused(name, module):
    """For any keywords of the module's forward: if it were ignored, a misspelled mask would be full
    attention."""
    inner = module()
    if module is nn.Module:
        inner.forward = lambda *args, **kwargs: None
    attend, x = ContextParallel()._apply(inner, None), torch.ones(1, 1, 16, 8)
    hint = "did you mean" if name in MISSPELLED else re.escape(INSTEAD.get(name, ". It has score_mod"))
    for value in (0.5, True, torch.ones(1), "on"):
        with pytest.raises(TypeError, match=f"{name}=.*has no argument '{name}'.*{hint}"):
            attend(x, x, x, **{name: value})
    out = attend(x, x, x, **{name: None}) if module is not FlexAttention else attend(x, x, x)
    assert torch.equal(out, tritoncp.flex_attention(x, x, x))


def test_a_default_of_forward_is_left_out_unless_it_changes_attention():
    x = torch.ones(1, 1, 16, 8)
    attend = ContextParallel()._apply(Open(), None)
    assert torch.equal(attend(x, x, x, layer=7, dropout_p=0.0, window=(-1, -1)), attend(x, x, x))
    capped = Open()
    capped.forward = lambda q, k, v, softcap=50.0: None
    with pytest.raises(TypeError, match=r"softcap=50.0: .*pass score_mod=softcap\(cap\)"):
        ContextParallel()._apply(capped, None)(x, x, x)


def compiled_on_ranks(group):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    block = parallelize_module(Block(), mesh["cp"], {"inner": ContextParallel()})
    fast = torch.compile(block, backend="aot_eager", fullgraph=True)
    plan = make_plan(mask(), mesh["cp"])
    results = []
    for placed in (plan, mask(), torch_mask(mask().mask_mod, 1, 1, S, S, "cpu", BLOCK_SIZE=16)):
        x = shard(whole_input(), placed, mesh["cp"], dim=1)
        for run in (block, fast):
            block.zero_grad()
            out = run(x, alibi(slopes()), placed)
            out.square().sum().backward()
            results.append((out.detach(), block.qkv.weight.grad.clone()))
    return results


@pytest.mark.long
def test_compiled_on_two_ranks_is_eager_on_two_ranks():
    for results in ranks.run(2, compiled_on_ranks):
        for eager, fast in zip(results[::2], results[1::2], strict=True):
            for a, b in zip(eager, fast, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


# -- checkpointing ---------------------------------------------------------------------------------------


def messages(group, schedule, wrap):
    """Run two layers under a way of checkpointing; return gradients and the messages of each pass."""
    start = mock.patch.object(collectives, "_start", wraps=collectives._start).start()
    plan = make_plan(mask(), group, schedule=schedule)
    q, k, v = (
        shard(torch.randn(1, HEADS, S, DIM, dtype=torch.float64), plan, dim=2).requires_grad_() for _ in "qkv"
    )
    bias = slopes().requires_grad_()

    def layer(q, k, v):
        out = tritoncp.flex_attention(q.sin(), k.cos(), v, alibi(bias), plan, mesh=group)
        return tritoncp.flex_attention(out.tanh(), k, v.exp(), plan, mesh=group).sin()

    loss = wrap(layer)(q, k, v).square().sum()
    forward = start.call_count
    loss.backward()
    return [x.grad for x in (q, k, v, bias)], forward, start.call_count - forward


def saving(*policy):
    contexts = partial(create_selective_checkpoint_contexts, checkpoint_policy(*policy))
    return lambda layer: partial(checkpoint, layer, use_reentrant=False, context_fn=contexts)


def own_policy(ctx, op, *args, **kwargs):
    save = op is torch.ops.aten.exp.default
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


def every_way(group, schedule):
    ways = {
        "none": lambda layer: layer,
        "plain": lambda layer: partial(checkpoint, layer, use_reentrant=False),
        "reentrant": lambda layer: partial(checkpoint, layer, use_reentrant=True),
        "saved": saving(),
        "ours and theirs": saving(own_policy),
        "ours and a list": saving([torch.ops.aten.sin.default]),
    }
    results = {}
    for name, way in ways.items():
        torch.manual_seed(0)
        results[name] = messages(group, schedule, way)
    return results


@pytest.mark.long
def test_a_checkpoint_that_saves_attention_sends_no_more_than_none():
    by_rank = ranks.run(2, lambda group: {schedule: every_way(group, schedule) for schedule in SCHEDULES})
    for schedule, results in itertools.chain.from_iterable(rank.items() for rank in by_rank):
        grads, forward, backward = results["none"]
        assert forward > 0
        assert backward > 0
        for way, (other_grads, sent, sent_again) in results.items():
            assert all(map(torch.equal, grads, other_grads)), (schedule, way)
            assert sent == forward, (schedule, way)
            assert sent_again == backward + (forward if way in ("plain", "reentrant") else 0), (schedule, way)


def test_a_policy_delegates_other_ops_to_the_passed_policy():
    save, recomputed = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
    exp, sin = torch.ops.aten.exp.default, torch.ops.aten.sin.default
    for policy in (checkpoint_policy(own_policy), checkpoint_policy([exp])):
        assert [policy(None, op) for op in (*tritoncp.SAVE_OPS, exp, sin)] == [save] * len(
            tritoncp.SAVE_OPS
        ) + [save, recomputed]
    assert checkpoint_policy()(None, exp) == recomputed
    assert torch.ops.tritoncp.forward.default in tritoncp.SAVE_OPS


def test_a_policy_saves_attention_under_torch_compile():
    """The partitioner saves the ops of the policy: attention runs once."""
    q = torch.randn(1, 2, S, DIM, requires_grad=True)
    plan = make_plan(mask())
    runs = []
    drive = autograd.drive

    def layer(x):
        return tritoncp.flex_attention(x.sin(), x, x, plan).cos()

    (want,) = torch.autograd.grad(layer(q).square().sum(), q)
    fast = torch.compile(saving()(layer), backend="aot_eager", fullgraph=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autograd, "drive", lambda *args: runs.append(1) or drive(*args))
        (got,) = torch.autograd.grad(fast(q).square().sum(), q)
    torch.testing.assert_close(got, want)
    assert len(runs) == 2  # one forward, one backward


@pytest.mark.sample(1)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_policy_that_saves_torch_flex_attention_alone_is_warned_of_at_the_callers_line(compiled):
    q, flex = torch.randn(1, 2, S, DIM, requires_grad=True), torch.ops.higher_order.flex_attention
    plan = make_plan(mask())

    def layer(x):
        return tritoncp.flex_attention(x.sin(), x, x, plan).cos()

    line = layer.__code__.co_firstlineno + 1

    def of_one_op(ctx, op, *args, **kwargs):
        return op._schema.name == "aten::sin"  # which OpOverloads alone have

    def warned(policy):
        torch.compiler.reset()
        contexts = partial(create_selective_checkpoint_contexts, policy)
        run = partial(checkpoint, layer, use_reentrant=False, context_fn=contexts)
        run = torch.compile(run, backend="aot_eager", fullgraph=True) if compiled else run
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run(q).square().sum().backward()
        return {(one.filename, one.lineno) for one in caught if "tritoncp.SAVE_OPS" in str(one.message)}

    assert warned([flex]) == {(__file__, line)}
    assert warned(lambda ctx, op, *args, **kwargs: op is flex) == {(__file__, line)}
    saved = [[flex, *tritoncp.SAVE_OPS], checkpoint_policy(lambda ctx, op, *args, **kwargs: op is flex)]
    for policy in (*saved, [torch.ops.aten.sin.default], of_one_op):
        assert not warned(policy)
