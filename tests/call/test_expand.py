"""Tests of ``expand=``: keys and values computed on arrival from latents, by all schedules that send keys."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import AuxRequest
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import tritoncp
from tests.distributed.test_schedules import record_requests
from tests.draws import few
from tests.multiprocess import ranks
from tests.planning.test_placement import placements, random_mask
from tests.report.sent_bytes import sent_bytes
from tritoncp import Plan, causal, create_block_mask, flex_attention, full_mask, sliding_window
from tritoncp.chunking.eager import Eager
from tritoncp.core.records import replace
from tritoncp.distributed import collectives
from tritoncp.distributed.collectives import Ticket
from tritoncp.planning.build import build
from tritoncp.planning.costs.layer import Shape
from tritoncp.planning.costs.message_bytes import bytes_sent
from tritoncp.reference.dense import dense_attention
from tritoncp.report.dry_run import largest_peak

cpu_engine = pytest.mark.usefixtures("cpu_engine", "in_pieces")
SCHEDULES = ["allgather", "ring", "fetch"]
F64 = torch.float64
HEADS, KV_HEADS, LATENT, ROPE, D, E = 4, 2, 6, 2, 5, 3


def expand_latent(latent: Tensor, weight: Tensor, scale: Tensor, power: int) -> tuple[Tensor, Tensor]:
    """Normalise the first channels, map them to all heads, and append the channels that are rotated already,
    as DeepSeek's models do. Any heads of the latent are joined."""
    x, rope = latent.split([LATENT, ROPE], -1)
    x = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 0.1) * scale**power).mean(1)
    key, value = (x @ weight).unflatten(-1, (KV_HEADS, -1)).transpose(1, 2).split([D - ROPE, E], -1)
    return torch.cat([key, rope.mean(1, keepdim=True).expand(-1, KV_HEADS, -1, -1)], -1), value


def inputs(
    length: int, batch: int = 2, kv_batch: int | None = None, heads: int = 1, dtype=F64
) -> list[Tensor]:
    """Draw query, latent, weight and scale, and a gradient of out."""
    shapes = [
        (batch, HEADS, length, D), (kv_batch or batch, heads, length, LATENT + ROPE),
        (LATENT, KV_HEADS * (D - ROPE + E)), (LATENT,), (batch, HEADS, length, E),
    ]  # fmt: skip
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def plain_and_compiled(names: Iterable[str], few: int) -> list[Any]:
    """Pair names with False and True; compiled, all but the last ``few`` are marked long."""
    pairs, compiled = [(name, False) for name in names], [(name, True) for name in names]
    return pairs + [pytest.param(*x, marks=pytest.mark.long) for x in compiled[:-few]] + compiled[-few:]


def leaves_of(x: list[Tensor]) -> list[Tensor]:
    return [one.clone().requires_grad_() for one in x[:4]]


def over_ranks(x: list[Tensor], plan: Plan, **options: Any) -> list[Tensor]:
    """Return out and the gradients of query, latent, weight and scale in a simulated world."""
    world, leaves = tritoncp.simulate(plan.world_size), leaves_of(x)
    q, latent = (world.shard(t, plan, dim=2, side=side) for t, side in zip(leaves, ("q", "kv")))
    call = {"enable_gqa": True, "expand": (expand_latent, *leaves[2:], 2), **options}
    outs = world.flex_attention(q, latent, None, plan, **call)
    out = world.unshard(outs, plan, dim=2)
    return [out.detach(), *torch.autograd.grad(out, leaves, x[4])]


def expanded(x: list[Tensor], plan: Plan, score: Any = None) -> list[Tensor]:
    """Return the same from dense attention over keys and values that autograd expands."""
    leaves = leaves_of(x)
    q, latent, *parameters = leaves
    key, value = expand_latent(latent, *parameters, 2)
    keys = [t.expand(len(q), -1, -1, -1) for t in (key, value)]
    out = dense_attention(q, *keys, plan.mask, score)[0] if score else dense_attention(q, *keys, plan.mask)[0]
    return [out.detach(), *torch.autograd.grad(out, leaves, x[4])]


def agree(got: list[Tensor], want: list[Tensor], limit: float = 1e-10) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(
            a.to(F64), b.to(F64), rtol=0, atol=limit * max(1, float(b.detach().abs().max()))
        )


def biased(bias: Tensor) -> Callable[..., Tensor]:
    return lambda score, b, h, i, j: score * bias[h] + b


# -- simulated worlds -------------------------------------------------------------------------------------


@st.composite
def plans(draw: Callable) -> Plan:
    """Draw plans of 1 to 8 ranks, of every schedule that takes latents."""
    plan = draw(placements(draw(st.integers(1, 8)), draw(st.integers(1, 30))))
    return replace(plan, schedule=draw(st.sampled_from(SCHEDULES)), handle=None)


@pytest.mark.long
@cpu_engine
@few(2)
@given(plans(), st.sampled_from([1, 3]), st.booleans())
def test_any_plan_gives_the_attention_of_expanded_keys(plan: Plan, heads: int, one_row: bool) -> None:
    x = inputs(plan.q.length, kv_batch=1 if one_row and plan.kv.batch == 1 else 2, heads=heads)
    agree(over_ranks(x, plan), expanded(x, plan))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("world_size", "schedule", "options"),
    [(1, "ring", {}), *((3, name, {}) for name in SCHEDULES), (3, "ring", {"FUSED_BACKWARD": True})],
)
def test_kernels_take_expanded_keys(world_size: int, schedule: str, options: dict[str, Any]) -> None:
    mask = create_block_mask(causal(), None, None, 40, 40, BLOCK_SIZE=16)
    plan, x = build(mask, world_size, schedule=schedule), inputs(40, batch=1, dtype=torch.float32)
    want = expanded([one.double() for one in x], plan)
    agree(over_ranks(x, plan, kernel_options=options), want, 1e-5)


class Expand(torch.nn.Module):
    """expand_latent with parameters of a module, and one of a module in it."""

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.weight, self.inner = weight, torch.nn.ParameterDict({"scale": scale})

    def forward(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        return expand_latent(latent, self.weight, self.inner["scale"], 2)


def edited(latent: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    return expand_latent(latent.mul_(3).div_(3), *arguments)


FORMS: dict[str, Callable[..., tuple[Any, ...]]] = {  # of the parameters weight and scale
    "list": lambda *two: (lambda latent, both: expand_latent(latent, *both, 2), [*two]),
    "dict": lambda weight, scale: (
        lambda latent, by: expand_latent(latent, by["w"], *by["s"]), {"w": weight, "s": (scale, 2)}
    ),
    "module": lambda *two: (Expand(*two),),
    "module as a parameter": lambda *two: (lambda latent, layer: layer(latent), Expand(*two)),
    "module in a dict": lambda *two: (
        lambda latent, by: Expand.forward(by["layer"], latent), {"layer": Expand(*two)}
    ),
    "edits its latent": lambda *two: (edited, *two, 2),
}  # fmt: skip


@pytest.mark.sample(1)
@cpu_engine
@pytest.mark.parametrize(("name", "compiled"), plain_and_compiled(FORMS, few=2))
def test_parameters_come_in_any_form(name: str, compiled: bool) -> None:
    """Calls are plain and in a simulated world, or compiled. The caller's latent is not edited."""
    torch.compiler.reset()
    x, mask = inputs(24), create_block_mask(causal(), None, None, 24, 24, BLOCK_SIZE=4)
    q, latent, weight, scale = leaves = [torch.nn.Parameter(one) for one in leaves_of(x)]
    expand, want = FORMS[name](weight, scale), expanded(x, build(mask))

    def alone(q: Tensor, latent: Tensor) -> Tensor:
        return flex_attention(q, latent, None, mask, enable_gqa=True, expand=expand)

    def apart(q: Tensor, latent: Tensor) -> Tensor:
        world, plan = tritoncp.simulate(3), build(mask, 3, schedule="fetch")
        shards = [world.shard(one, plan, dim=2) for one in (q, latent)]
        outs = world.flex_attention(*shards, None, plan, enable_gqa=True, expand=expand)
        return world.unshard(outs, plan, dim=2)

    fast = torch.compile(alone, backend="aot_eager", fullgraph=True)
    for call in (fast,) if compiled else (alone, apart):
        out = call(q, latent)
        agree([out.detach(), *torch.autograd.grad(out, leaves, x[4])], want)
        with torch.no_grad():
            agree([call(q, latent)], want[:1])
        assert torch.equal(latent.detach(), x[1])


@pytest.mark.sample(2)
@cpu_engine
@pytest.mark.parametrize(("rows", "compiled"), [(2, False), (7, False), (23, False), (2, True), (23, True)])
def test_a_function_that_cuts_rows_is_refused(rows: int, compiled: bool) -> None:
    """It is refused also if it passes the first check, which has two rows."""
    torch.compiler.reset()
    x = inputs(24)

    def call(q: Tensor, latent: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        def cut(latent: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
            return expand_latent(latent[:, :, :rows], *arguments)

        return flex_attention(q, latent, None, causal(), enable_gqa=True, expand=(cut, weight, scale, 2))

    fast = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
    with pytest.raises(
        ValueError, match=rf"key \(2, 2, {rows}, 5\) for a latent \(2, 1, 24, 8\).*each row by itself"
    ):
        fast(*x[:4])


def without_gradients(latent: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return expand_latent(latent, *arguments)


# Functions with a result that has no derivative, for some or all of the arguments.
CONSTANTS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "detached results": lambda *x: tuple([one.detach() for one in expand_latent(*x)]),
    "a detached key": lambda *x: (expand_latent(*x)[0].detach(), expand_latent(*x)[1]),
    "a detached latent": lambda latent, *x: expand_latent(latent.detach(), *x),
    "results without gradients": without_gradients,
    "views without gradients": lambda *x: tuple([one.mT.mT for one in without_gradients(*x)]),
}


@pytest.mark.sample(2)
@cpu_engine
@pytest.mark.parametrize(("name", "compiled"), plain_and_compiled(CONSTANTS, few=2))
def test_a_function_without_a_derivative_has_gradients_of_zero(name: str, compiled: bool) -> None:
    torch.compiler.reset()
    x, fn, mask = inputs(12), CONSTANTS[name], create_block_mask(causal(), 1, 1, 12, 12, BLOCK_SIZE=4)

    def call(q: Tensor, latent: Tensor, *arguments: Tensor) -> Tensor:
        return flex_attention(q, latent, None, mask, enable_gqa=True, expand=(fn, *arguments, 2))

    leaves = leaves_of(x)
    out = dense_attention(leaves[0], *fn(*leaves[1:], 2), mask)[0]
    want = torch.autograd.grad(out, leaves, x[4], allow_unused=True, materialize_grads=True)
    fast = torch.compile(call, backend="aot_eager") if compiled else call
    leaves = leaves_of(x)
    fast(*leaves).backward(x[4])
    agree([one.grad for one in leaves], [*want])


@pytest.mark.sample(2)
@cpu_engine
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_expanded_calls_take_captures_sinks_statistics_and_batch_offset(schedule: str) -> None:
    """Gradients of a score_mod's captures and of parameters do not mix."""
    x, bias, sinks = inputs(24), torch.randn(HEADS, dtype=F64), torch.randn(HEADS, dtype=F64)
    plan = build(create_block_mask(causal(), None, None, 24, 24, BLOCK_SIZE=4), 3, schedule=schedule)
    results = []
    for is_latent in (True, False):
        q, latent, weight, scale, own_bias, own_sinks = leaves = [
            one.clone().requires_grad_() for one in (*x[:4], bias, sinks)
        ]
        world = tritoncp.simulate(3)
        tensors, options = (latent, None), {"expand": (expand_latent, weight, scale, 2)}
        if not is_latent:
            tensors, options = expand_latent(latent, weight, scale, 2), {}
        shards = [None if t is None else world.shard(t, plan, dim=2) for t in (q, *tensors)]
        outs, aux = world.flex_attention(
            *shards, biased(own_bias), plan, enable_gqa=True, sinks=own_sinks, batch_offset=0,
            return_aux=AuxRequest(lse=True, max_scores=True), **options,
        )  # fmt: skip
        total = sum((o * o).sum() + lse.exp().sum() for o, lse in zip(outs, aux.lse))
        results.append([*outs, *aux.lse, *aux.max_scores, *torch.autograd.grad(total, leaves)])
    agree(*results)


@pytest.mark.sample(2)
@cpu_engine
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_padding_has_no_gradient_and_changes_none(schedule: str) -> None:
    """This holds also for a function that has no value for padding, or no derivative."""

    def divided(latent: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        return expand_latent(latent / latent.norm(dim=-1, keepdim=True), *arguments)

    plan = build(random_mask(2, 6, 3, 4, 5), 3, schedule=schedule)
    world, x, results = tritoncp.simulate(3), inputs(21), []
    shards = [world.shard(t, plan, dim=2) for t in x[:2]]
    for pad in (0.0, 7.0, torch.nan):
        latents = [
            torch.where(plan.for_rank(rank).valid[:, None, :, None], one, pad).requires_grad_()
            for rank, one in enumerate(shards[1])
        ]
        weight = x[2].clone().requires_grad_()
        outs = world.flex_attention(
            shards[0], latents, None, plan, enable_gqa=True, expand=(divided, weight, x[3], 2)
        )
        grads = torch.autograd.grad(sum(out.sum() for out in outs), [*latents, weight])
        results.append([*outs, *grads])
        assert all(one.isfinite().all() for one in results[-1])
        padding = torch.cat([~plan.for_rank(rank).valid for rank in range(3)], 1)
        assert padding.any() and not torch.cat(grads[:3], 2).transpose(1, 2)[padding].any()
    assert all(torch.equal(*pair) for one in results[1:] for pair in zip(results[0], one, strict=True))


@pytest.mark.sample(2)
@cpu_engine
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_messages_have_the_latents_channels(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = record_requests(monkeypatch)
    plan = build(random_mask(1, 8, 0, 4, 1), 4, schedule=schedule)
    over_ranks(inputs(32), plan)
    sent = sum(sent_bytes(request, 4, 0) for request in requests if not isinstance(request, Ticket))
    shape = Shape(2, HEADS, KV_HEADS, D, E, 8, latent=LATENT + ROPE)
    assert sent == sum(bytes_sent(plan, shape))[0] > 0
    whole = sum(bytes_sent(plan, replace(shape, latent=0)))[0]
    assert whole * (LATENT + ROPE) == sent * KV_HEADS * (D + E)


@cpu_engine
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_expanded_keys_live_for_one_step(schedule: str) -> None:
    """At each call of the function on one rank, the keys of its earlier calls are freed."""
    earlier: list[weakref.ref[Tensor]] = []

    def watched(latent: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        assert not [one for one in earlier if one() is not None]
        key, value = expand_latent(latent, *arguments)
        earlier.extend([weakref.ref(key), weakref.ref(value)])
        return key, value

    x = inputs(32, 1)
    plan = replace(build(full_mask(32, 32, block=4), 4, schedule=schedule).for_rank(0), handle=None)
    count = {"allgather": 2, "ring": 8, "fetch": 4}[schedule]
    only = mock.patch.object(collectives, "run_alone", lambda schedule: collectives.run_dry(schedule, 4))
    leaves = leaves_of(x)
    shards = [tritoncp.shard(t, plan, dim=2) for t in leaves[:2]]
    with only:
        world = mock.patch.object(tritoncp.call.check_shards, "check_ranks")
        with world:
            out = flex_attention(*shards, None, plan, enable_gqa=True, expand=(watched, *leaves[2:], 2))
        out.sum().backward()
    assert len(earlier) == 2 * (count + 1)  # and one call that finds the sizes


# -- modes, graphs and ranks ------------------------------------------------------------------------------


@cpu_engine
def test_a_call_under_modes_has_the_same_results() -> None:
    """Checkpointing, an op under a mode that counts operations, tracing, shapes, inference, and autocast."""
    x, mask = inputs(24), create_block_mask(causal(), None, None, 24, 24)
    plan = build(mask)
    q, latent, weight, scale = leaves = leaves_of(x)

    def call(q: Tensor, latent: Tensor) -> Tensor:
        expand = expand_latent, weight, scale, 2
        return flex_attention(q, latent, None, mask, enable_gqa=True, expand=expand)

    want = expanded(x, plan)
    out = checkpoint(call, q, latent, use_reentrant=False)
    agree([out.detach(), *torch.autograd.grad(out, leaves, x[4])], want)
    with FlopCounterMode(display=False) as counter:
        out = call(q, latent)
        agree([out.detach(), *torch.autograd.grad(out, leaves, x[4])], want)
    pairs = 2 * HEADS * 24 * 25 // 2
    assert counter.flop_counts["Global"][torch.ops.tritoncp.forward] == 2 * pairs * (D + E)
    assert counter.flop_counts["Global"][torch.ops.tritoncp.backward] == 2 * pairs * (3 * D + 2 * E)
    traced = make_fx(call)(q.detach(), latent.detach())
    agree([traced(q.detach(), latent.detach()).detach()], want[:1])
    weight, scale = (one.to("meta") for one in (weight, scale))
    assert call(q.to("meta"), latent.to("meta")).shape == x[4].shape
    weight, scale = leaves[2:]
    with torch.inference_mode():
        agree([call(q, latent)], want[:1])
    (first,) = torch.autograd.grad(call(q, latent).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        first.sum().backward()

    q, latent, weight, scale = leaves = [one.float().detach().requires_grad_() for one in x[:4]]
    with torch.autocast("cpu", torch.bfloat16):
        out = call(q, latent)
    assert out.dtype == torch.bfloat16
    agree([out.detach()], want[:1], 0.1)
    grads = torch.autograd.grad(out, leaves, x[4].bfloat16())
    assert {grad.dtype for grad in grads} == {torch.float32}
    agree(list(grads), want[1:], 0.1)


@pytest.mark.long
@cpu_engine
def test_a_graph_has_one_op_for_all_lengths_and_parameters() -> None:
    counter, power = CompileCounterWithBackend("aot_eager"), 2

    def call(q: Tensor, latent: Tensor, weight: Tensor, scale: Tensor, mask: Any) -> Tensor:
        def local(latent: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
            return expand_latent(latent, weight, scale, power)

        return flex_attention(2 * q, latent, None, mask, enable_gqa=True, expand=(local, weight, scale))

    fast = torch.compile(call, backend=counter, fullgraph=True)
    for seed in range(3):
        torch.manual_seed(seed)
        x, mask = inputs(24), create_block_mask(sliding_window(5 + seed), None, None, 24, 24, BLOCK_SIZE=8)
        leaves = leaves_of(x)
        out = fast(*leaves, mask)
        agree(
            [out.detach(), *torch.autograd.grad(out, leaves, x[4])],
            [g * (2 if i == 1 else 1) for i, g in enumerate(expanded([2 * x[0], *x[1:]], build(mask)))],
        )
    assert counter.frame_count <= 2


@pytest.mark.long
@cpu_engine
def test_a_function_that_no_graph_carries_breaks_it_once() -> None:
    x, mask = inputs(24), create_block_mask(causal(), None, None, 24, 24)
    counter, functions = CompileCounterWithBackend("aot_eager"), SimpleNamespace(expand=expand_latent)

    def by_name(latent: Tensor, *arguments: Any, name: str = "expand") -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = getattr(functions, name)(latent, *arguments)
        return result

    def call(q: Tensor, latent: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        expand = by_name, weight, scale, 2
        return flex_attention(q * 1, latent, None, mask, enable_gqa=True, expand=expand) * 1

    leaves = leaves_of(x)
    out = torch.compile(call, backend=counter)(*leaves)
    agree([out.detach(), *torch.autograd.grad(out, leaves, x[4])], expanded(x, build(mask)))
    assert counter.frame_count == 2
    with pytest.raises(Exception, match="getattr"):
        torch.compile(call, backend="aot_eager", fullgraph=True)(*leaves)


def rank_results(group: Any, x: list[Tensor]) -> list[list[Tensor]]:
    """Return out and this rank's gradients, of plain and compiled calls, under each schedule and for a raw
    mask."""
    results = []
    mask = create_block_mask(causal(), 1, 1, 44, 44, BLOCK_SIZE=4)

    def call(q: Tensor, latent: Tensor, weight: Tensor, scale: Tensor, plan: Any) -> Tensor:
        expand = expand_latent, weight, scale, 2
        return flex_attention(q, latent, None, plan, group, enable_gqa=True, expand=expand)

    fast = torch.compile(call, backend="aot_eager", fullgraph=True)
    for schedule in (*SCHEDULES, None):
        plan = tritoncp.make_plan(mask, group, schedule=schedule) if schedule else None
        for function in (call, fast):
            leaves = leaves_of(x)
            q, latent = (tritoncp.shard(t, plan, group, dim=2) for t in leaves[:2])
            out = function(q, latent, *leaves[2:], plan or mask)
            grads = torch.autograd.grad(out, leaves, tritoncp.shard(x[4], plan, group, dim=2))
            whole = tritoncp.unshard(out.detach(), plan or mask, group, dim=2)
            for grad in grads:
                dist.all_reduce(grad)  # each rank has its rows' gradients, and its share of parameters'
            results.append([whole, *grads])
    return results


@pytest.mark.long
@cpu_engine
@pytest.mark.filterwarnings("ignore:in natural order")
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_real_ranks_have_the_same_results_plain_and_compiled(size: int) -> None:
    x = inputs(44)
    want = expanded(x, build(create_block_mask(causal(), 1, 1, 44, 44, BLOCK_SIZE=4)))
    for results in ranks.run(size, rank_results, x):
        for one in results:
            agree(one, want)


@pytest.mark.long
@cpu_engine
def test_a_wrong_function_on_one_rank_raises_on_all_in_graphs() -> None:
    x = inputs(8)

    def call(group: Any) -> Any:
        plan = build(full_mask(16, 16, block=4), 2, schedule="ring").for_rank(group.rank()).pinned()

        def attend(q: Tensor, latent: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
            expand = (expand_latent, weight, scale, 2) if group.rank() else (lambda latent: latent,)
            return flex_attention(q, latent, None, plan, group, enable_gqa=True, expand=expand)

        return ranks.attempt(lambda: torch.compile(attend, backend="aot_eager")(*x[:4]))

    texts = ranks.run(2, call)
    assert f"expand: fn at {__file__}:" in texts[0], texts
    assert "returned a Tensor; a pair of tensors is needed" in texts[0], texts
    assert "returned a Tensor; a pair" in texts[1] and "rank 0" in texts[1], texts


@cpu_engine
@pytest.mark.parametrize("dim", ["batch", "seq"])
def test_chunks_without_a_graph_take_latents(dim: str) -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, latent: Tensor) -> Tensor:  # [B, S, ...]
            heads, expand = q.unflatten(2, (HEADS, D)).transpose(1, 2), (expand_latent, *x[2:4], 2)
            out = flex_attention(heads, latent[:, None], None, causal(), enable_gqa=True, expand=expand)
            return out.transpose(1, 2).flatten(2)

    x = inputs(24)
    q, latent = x[0].transpose(1, 2).flatten(2), x[1][:, 0]
    torch.testing.assert_close(Eager(Layer(), 2, dim)(q, latent), Layer()(q, latent))


# -- planning ---------------------------------------------------------------------------------------------


def test_auto_counts_the_latent_and_its_expansion() -> None:
    """For latents of few channels, "auto" chooses schedules of few steps instead of schedules that send few
    rows; a latent of many heads costs more to expand; Ulysses is never chosen."""
    mask = create_block_mask(causal(), 1, 1, 1 << 15, 1 << 15)
    layer = {"heads": 32, "kv_heads": 32, "head_dim": 192, "v_head_dim": 128}
    plan = tritoncp.make_plan(mask, world_size=8, rank=0, layer={**layer, "latent": 576})
    assert "ulysses" not in plan.reason and "ulysses" in tritoncp.make_plan(mask, world_size=8).reason
    assert "ulysses" not in plan.explain(**layer, latent=576)
    for schedule in SCHEDULES:
        one = tritoncp.make_plan(mask, world_size=8, rank=0, schedule=schedule)
        sent, latent = one.metrics(**layer), one.metrics(**layer, latent=576)
        wide = one.metrics(**layer, latent=1152)
        assert latent["forward_sent_bytes"] * 32 * 320 == sent["forward_sent_bytes"] * 576
        assert latent["shard_bytes"] < sent["shard_bytes"]
        assert wide["forward_sent_bytes"] == 2 * latent["forward_sent_bytes"]
        assert wide["backward_ms"] > latent["backward_ms"]
    alone = tritoncp.make_plan(mask)
    assert alone.metrics(**layer, latent=576)["forward_ms"] > alone.metrics(**layer)["forward_ms"]


def test_peaks_of_a_layer_have_its_expanded_keys_and_their_gradients() -> None:
    """The peak has keys in 16 bits; in the backward pass also their gradients, in 32 bits and rounded."""
    shape, elements = Shape(1, 4, 2, 5, 3, itemsize=2, latent=8), 64 * 2 * (5 + 3)
    delta = 64 * 4 * 4  # of 4 heads, in 32 bits
    assert largest_peak(build(full_mask(64, 64)), shape) == (2 * elements, delta + (2 + 2 + 4) * elements)


@cpu_engine
def test_raw_masks_take_a_schedule_for_latents() -> None:
    """Where queries and keys have equally many heads, "auto" takes Ulysses for keys, and none for latents."""
    world, x = tritoncp.simulate(4), torch.randn(1, 4, 64, 4)

    def twice(latent: Tensor) -> tuple[Tensor, Tensor]:
        return latent.expand(-1, 4, -1, -1), latent.expand(-1, 4, -1, -1)

    shards = x.chunk(4, 2)
    outs = world.flex_attention(shards, [s[:, :1] for s in shards], None, sliding_window(9), expand=(twice,))
    want = flex_attention(x, *twice(x[:, :1]), sliding_window(9))
    torch.testing.assert_close(torch.cat(outs, 2), want)
