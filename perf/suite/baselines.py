"""Contenders of the benchmark: tritoncp, PyTorch's compiled flex attention in variants, and SDPA's kernels.

A contender gets q, k and v in the layout of its API. The conversion of its results to [batch, heads, seq,
dim], for comparison, is not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention import flex_attention as torch_flex

from tritoncp.api.attention import flex_attention
from tritoncp.api.plans import make_plan
from tritoncp.api.reshard import unshard
from tritoncp.api.shards import shard
from tritoncp.api.simulate import simulate
from tritoncp.call.sinks import with_sinks
from tritoncp.perf.problem import Problem, document_lengths, window_of
from tritoncp.perf.records.history import variant

# torch.compile mode and kernel options of each flex variant. The first one is the default.
FLEX: dict[str, tuple[str | None, dict[str, Any]]] = {
    "flex": (None, {}),
    "flex flash": (None, {"BACKEND": "FLASH"}),
    "flex prescale tma": (None, {"PRESCALE_QK": True, "USE_TMA": True}),
    "flex max-autotune": ("max-autotune-no-cudagraphs", {}),
}
PASSES = ("forward", "backward")
# Pass -> prefixes of tritoncp's kernel options that do not affect it.
_IRRELEVANT_PREFIXES = {
    "forward": ("bwd_", "FUSED_BACKWARD"),
    "backward": ("fwd_", "ROUTE", "PACK_GQA", "SPLIT_KV"),
}


@dataclass(frozen=True)
class Inputs:
    """Tensors of a problem: q, k, v [batch, heads, seq, dim], leaves that require grad, and dout."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


@dataclass(frozen=True)
class Contender:
    """An implementation of attention, ready to run one problem.

    call:   runs a forward pass on ``leaves``; returns a list of outputs if several ranks are on one device
    leaves: q, k, v in the contender's layout, requiring grad; for several ranks all q, then all k, all v
    dout:   gradients in the layout of the outputs
    to_bhsd: converts out, dq, dk or dv (or the list of the ranks' shards) to [batch, heads, seq, dim]
    repeat: number of copies of each KV head in the leaves
    passes: the passes to time: those that the contender's options affect
    """

    call: Callable[[], Any]
    leaves: tuple[Tensor, ...]
    dout: Any
    to_bhsd: Callable[[Any], Tensor] = lambda x: x
    repeat: int = 1
    passes: tuple[str, ...] = PASSES

    def forward(self) -> Tensor:
        """Return out [batch, heads, seq, v_dim], detached."""
        out = self.call()
        with torch.no_grad():
            return self.to_bhsd(out).detach()

    def backward(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk, dv in the layout of the problem's q, k, v."""
        grads = torch.autograd.grad(self.call(), self.leaves, self.dout)
        ranks = len(grads) // 3
        with torch.no_grad():
            per_tensor = (
                grads[i] if ranks == 1 else grads[i : i + ranks] for i in range(0, len(grads), ranks)
            )
            dq, dk, dv = (self.to_bhsd(x) for x in per_tensor)
        return dq, *(x.unflatten(1, (-1, self.repeat)).sum(2) for x in (dk, dv))


def inputs(problem: Problem, device: torch.device, seed: int = 0) -> Inputs:
    """Draw unit-normal tensors for a problem."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(heads: int, width: int, rows: int = problem.seq) -> Tensor:
        shape = (problem.batch, heads, rows, width)
        return torch.randn(shape, generator=generator, device=device).to(problem.torch_dtype)

    q, k = normal(problem.heads, problem.dim, problem.rows), normal(problem.kv_heads, problem.dim)
    v, dout = normal(problem.kv_heads, problem.v_dim), normal(problem.heads, problem.v_dim, problem.rows)
    return Inputs(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout)


def one_device(problem: Problem, tensors: Inputs, options: dict[str, Any] | None = None) -> Contender:
    """Prepare tritoncp on one device, with the mask in closed form."""
    mask: Any = problem.closed_form()
    device = tensors.q.device
    score, sinks = problem.score_mod(device), problem.sinks(device)
    leaves = tensors.q, tensors.k, tensors.v

    def call() -> Tensor:
        return flex_attention(*leaves, score, mask, enable_gqa=True, kernel_options=options, sinks=sinks)

    return Contender(call, leaves, tensors.dout, passes=_passes_of(options))


def _passes_of(options: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the passes that kernel options affect.

    >>> _passes_of({"ROUTE": "gluon", "fwd_BLOCK_N": 64}), _passes_of({"num_warps": 8})
    (('forward',), ('forward', 'backward'))
    """
    names = [*(options or {})]
    return tuple(
        p for p in PASSES if not names or not all(name.startswith(_IRRELEVANT_PREFIXES[p]) for name in names)
    )


def split(
    problem: Problem, tensors: Inputs, group: Any = None, kernel_options: dict[str, Any] | None = None
) -> Contender:
    """Prepare tritoncp with the problem's schedule: this rank of a process group, or, without a group, all
    ranks simulated on this device."""
    schedule: Any = problem.schedule
    mask, score = problem.block_mask(), problem.score_mod(tensors.q.device)
    options: dict[str, Any] = {"enable_gqa": True, "sinks": problem.sinks(tensors.q.device)}
    options["kernel_options"] = kernel_options
    unsharded = (tensors.q, tensors.k, tensors.v, tensors.dout)
    if group is not None:
        plan = make_plan(mask, group, schedule=schedule)
        q, k, v, dout = (shard(x.detach(), plan, dim=2).requires_grad_() for x in unsharded)
        call = partial(flex_attention, q, k, v, score, plan, mesh=group, **options)
        return Contender(
            call, (q, k, v), dout.detach(), lambda x: unshard(x.detach(), plan, mesh=group, dim=2)
        )
    world = simulate(problem.world)
    plan = world.make_plan(mask, schedule=schedule)
    qs, ks, vs, douts = (
        [x.requires_grad_() for x in world.shard(x.detach(), plan, dim=2)] for x in unsharded
    )
    attend: Callable[[], Any] = partial(world.flex_attention, qs, ks, vs, score, plan, **options)
    leaves = (*qs, *ks, *vs)
    to_bhsd = partial(world.unshard, plan=plan, dim=2)
    return Contender(attend, leaves, douts, to_bhsd, passes=_passes_of(kernel_options))


def torch_split(problem: Problem, tensors: Inputs, group: Any) -> Contender:
    """Prepare PyTorch's context-parallel flex attention: all-gather of keys, blocks assigned by PTRR."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.experimental import _attention

    api: Any = _attention  # private: PyTorch has no public API for this
    device = tensors.q.device
    mod: Any = problem.closed_form(device)
    length = problem.seq, problem.seq
    mesh = DeviceMesh.from_group(group, device.type)
    mask = torch_flex.create_block_mask(mod, None, None, *length, device=device.type)
    balancer = api._PTRRLoadBalancer(mask, group.size())
    unsharded = [x.detach() for x in (tensors.q, tensors.k, tensors.v, tensors.dout)]
    *shards, local_mask = api._context_parallel_shard(mesh, [*unsharded, mask], [2] * 5, balancer)
    q, k, v, dout = (x.requires_grad_(tensors.q.requires_grad) for x in shards)

    class Attention(torch.nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
            return torch_flex.flex_attention(query, key, value, block_mask=local_mask, enable_gqa=True)

    module = api._ContextParallel(2, api._ContextParallel.AttentionType.FLEX)._apply(Attention(), mesh)
    run = torch.compile(module, dynamic=False) if device.type == "cuda" else module

    def to_bhsd(x: Tensor) -> Tensor:
        return api.context_parallel_unshard(mesh, [x.detach()], [2], balancer)[0]

    return Contender(lambda: run(q, k, v), (q, k, v), dout.detach(), to_bhsd)


def flex(problem: Problem, tensors: Inputs, variant: str = "flex", compiled: bool | None = None) -> Contender:
    """Prepare torch's flex attention. compiled: None: on a GPU"""
    device = tensors.q.device
    mode, options = FLEX[variant]
    mod, score, sinks = problem.closed_form(device), problem.score_mod(device), problem.sinks(device)
    length = (problem.seq, problem.seq)
    mask = None if mod is None else torch_flex.create_block_mask(mod, None, None, *length, device=device.type)
    leaves = tensors.q, tensors.k, tensors.v

    attention: Any = torch_flex.flex_attention

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if sinks is None:
            return attention(q, k, v, score, mask, enable_gqa=True, kernel_options=options)
        want = torch_flex.AuxRequest(lse=True)
        out, aux = attention(q, k, v, score, mask, enable_gqa=True, return_aux=want, kernel_options=options)
        return with_sinks(out, aux.lse, sinks)[0]  # flex attention does not support sinks

    # A separate code object, so that Dynamo does not reuse the compilation of another variant.
    call.__code__ = call.__code__.replace(co_name=variant.replace(" ", "_"))
    if device.type == "cuda" if compiled is None else compiled:
        run = torch.compile(call, fullgraph=True, dynamic=False, mode=mode)
    else:
        run = call
    return Contender(lambda: run(*leaves), leaves, tensors.dout)


def dense(problem: Problem, tensors: Inputs, backend: SDPBackend) -> Contender:
    """Prepare one backend of scaled_dot_product_attention, for the masks that it supports without a tensor.

    A backend that refuses grouped heads gets K and V repeated for each query head, which is not timed.
    """
    is_causal = problem.mask == "causal"
    group = problem.heads // problem.kv_heads

    def contender(repeat: int) -> Contender:
        k, v = tensors.k, tensors.v
        if repeat > 1:
            k, v = (x.detach().repeat_interleave(repeat, 1).requires_grad_() for x in (k, v))

        def call() -> Tensor:
            with sdpa_kernel(backend):
                return functional.scaled_dot_product_attention(
                    tensors.q, k, v, is_causal=is_causal, enable_gqa=repeat != group
                )

        return Contender(call, (tensors.q, k, v), tensors.dout, repeat=repeat)

    grouped = contender(1)
    if group > 1:
        try:
            grouped.backward()
        except RuntimeError:  # "No available kernel": the backend refuses grouped heads
            return contender(group)
    return grouped


def packed(problem: Problem, tensors: Inputs) -> Contender:
    """Prepare FlashAttention-2 by varlen_attn: packed documents or causal windows, tensors
    [tokens, heads, dim]."""
    from torch.nn.attention import varlen

    varlen_attn: Any = varlen.varlen_attn
    lengths = document_lengths(problem.seq) if problem.mask == "document" else [problem.seq]
    lengths *= problem.batch
    edges = torch.tensor([0, *lengths]).cumsum(0).to(tensors.q.device, torch.int32)
    left = window_of(problem.seq) if problem.mask == "window" else -1
    options = {"window_size": (left, 0), "enable_gqa": problem.heads != problem.kv_heads}

    def rows(x: Tensor) -> Tensor:
        return x.detach().transpose(1, 2).flatten(0, 1).contiguous()

    def to_bhsd(x: Tensor) -> Tensor:
        return x.unflatten(0, (problem.batch, -1)).transpose(1, 2)

    q, k, v = (rows(x).requires_grad_() for x in (tensors.q, tensors.k, tensors.v))
    call = partial(varlen_attn, q, k, v, edges, edges, max(lengths), max(lengths), **options)
    return Contender(call, (q, k, v), rows(tensors.dout), to_bhsd)


def contenders(
    problem: Problem,
    tensors: Inputs,
    variants: Sequence[str],
    options: Sequence[dict[str, Any]] = (),
    group: Any = None,
) -> dict[str, Callable[[], Contender]]:
    """Return functions that prepare the contenders of a problem, by name; a name's first word is its family.

    variants: keys of FLEX; options: kernel options to try tritoncp with, besides its defaults; group: the
    process group of a problem of several ranks. A problem whose ranks are simulated on one device has the
    contender "whole": tritoncp without splitting.
    """
    if group is not None:
        return {
            "tritoncp": partial(split, problem, tensors, group),
            "torch": partial(torch_split, problem, tensors, group),
        }
    attend: Callable[..., Contender] = (
        partial(split, problem, tensors, None) if problem.together else partial(one_device, problem, tensors)
    )
    makers: dict[str, Callable[[], Contender]] = {"tritoncp": attend}
    makers |= {variant(option_set): partial(attend, option_set) for option_set in options}
    if problem.together:
        makers["whole"] = partial(one_device, problem, tensors)
    makers |= {name: partial(flex, problem, tensors, name) for name in variants}
    if problem.mask in ("full", "causal"):
        makers["flash"] = partial(dense, problem, tensors, SDPBackend.FLASH_ATTENTION)
        makers["cudnn"] = partial(dense, problem, tensors, SDPBackend.CUDNN_ATTENTION)
        makers["efficient"] = partial(dense, problem, tensors, SDPBackend.EFFICIENT_ATTENTION)
    elif problem.mask in ("document", "window"):
        makers["flash"] = partial(packed, problem, tensors)
    return makers
