"""Attention by the CPU engine, beside torch's attention on the CPU: contenders of host cases.

torch's flex attention has no backward pass on the CPU, and its eager form materialises all scores.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import flex_attention as torch_flex

from tritoncp.api.attention import flex_attention
from tritoncp.perf.records.history import OURS
from tritoncp.perf.suite.baselines import Inputs, split
from tritoncp.perf.suite.timing import Run
from tritoncp.planning.problem import Problem

CPU = torch.device("cpu")
THREADS = 2
LARGEST_EAGER = 2048  # tokens: scores of torch's eager flex attention take 16 bytes for each pair and head
LARGEST_DENSE = 16384  # tokens: a dense mask in float32, 1 GiB
SIZES_COMPILED = 2048, 4096  # tokens: torch.compile takes seconds for each mask, and at two sizes
LONG = 8192  # tokens: an execution takes seconds from here on, and a case is timed in few rounds
# Least speedups over baselines, by mask, from SHORTEST tokens on; of a forward pass with a score_mod besides
SHORTEST = 2048
GOALS = {"causal": {"sdpa-dense": 1.0}, "prefix": {"sdpa-dense": 1.0}}
GOALS |= {mask: {"sdpa-dense": 2.0} for mask in ("document", "window")}
GOALS |= {mask: {"flex-eager": 3.0} for mask in ("alibi", "softcap")}
Makers = dict[str, Callable[[], Run]]


@contextmanager
def cpu_engine() -> Iterator[None]:
    """Run calls on the CPU engine with THREADS threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(min(THREADS, os.cpu_count() or 1))
    try:
        with mock.patch.dict(os.environ, TRITON_INTERPRET="0"):
            yield
    finally:
        torch.set_num_threads(threads)


def goal_of(operation: str, problem: Problem) -> dict[str, float]:
    """Return the least speedups of a case over baselines; a baseline that has no time is not judged."""
    if problem.seq < SHORTEST:
        return {}
    if problem.world > 1:
        return {"one-device": round(1 / 1.3, 3)}
    compiled = {"flex-compiled": 0.5}
    if operation == "compile":
        return compiled
    scored = bool(problem.score_mod(CPU))
    return GOALS.get(problem.mask, {}) | (compiled if operation == "attend" and not scored else {})


def rounds_of(problem: Problem) -> int:
    """Return the least number of rounds of a case, besides the first."""
    return 2 if problem.seq >= LONG else 5


def make_contenders(problem: Problem, operation: str) -> Makers:
    """Return functions that prepare one execution, by contender.

    operation: "attend" (a forward pass), "compile" (one with COMPILE), "train" (both passes)
    """
    train, compile = operation == "train", operation == "compile"
    score, closed, seq = problem.score_mod(CPU), problem.closed_form(), problem.seq
    plain: Any = problem.plain_mod(CPU)
    ours: Any = flex_attention
    sdpa: Any = F.scaled_dot_product_attention
    flex: Any = torch_flex.flex_attention
    sizes = [(problem.heads, problem.dim), (problem.kv_heads, problem.dim), (problem.kv_heads, problem.v_dim)]
    leaves = [torch.randn(1, heads, seq, dim, requires_grad=train) for heads, dim in sizes]
    start = torch.randn(1, problem.heads, seq, problem.v_dim)
    options = {"COMPILE": True} if compile else None
    functions: dict[str, Callable[[], Tensor]] = {
        OURS: lambda: ours(*leaves, score, closed, enable_gqa=True, kernel_options=options)
    }
    if problem.world > 1:
        one_device = _maker(functions[OURS], leaves, start if train else None)
        return {OURS: _simulated(problem, leaves, start, train), "one-device": one_device}
    if score is None and seq <= LARGEST_DENSE:
        dense = _dense_mask(plain, seq)
        functions["sdpa-dense"] = lambda: sdpa(*leaves, attn_mask=dense, enable_gqa=True)
    if problem.mask == "causal":
        functions["sdpa-causal"] = lambda: sdpa(*leaves, is_causal=True, enable_gqa=True)
    if not train and seq in (*SIZES_COMPILED, 1024):
        lists = None
        if plain is not None:
            lists = torch_flex.create_block_mask(plain, None, None, seq, seq, device="cpu")
        arguments: dict[str, Any] = {"score_mod": score, "block_mask": lists, "enable_gqa": True}
        if seq in SIZES_COMPILED and (compile or score is None):
            torch.compiler.reset()  # past Dynamo's limit of recompilations flex attention would run eagerly
            functions["flex-compiled"] = lambda: _compiled_flex()(*leaves, **arguments)
        if seq <= LARGEST_EAGER and not compile:
            functions["flex-eager"] = lambda: flex(*leaves, **arguments)
    return {name: _maker(function, leaves, start if train else None) for name, function in functions.items()}


def _simulated(problem: Problem, leaves: list[Tensor], start: Tensor, train: bool) -> Callable[[], Run]:
    """Return a function that prepares one execution of all ranks of a simulated world."""
    q, k, v = (x.detach() for x in leaves)
    contender = split(problem, Inputs(q, k, v, start))
    call: Any = contender.call

    def run() -> Any:
        outs = call()
        return torch.autograd.grad(outs, contender.leaves, contender.dout) if train else outs

    return lambda: run


def _maker(function: Callable[[], Tensor], leaves: list[Tensor], start: Tensor | None) -> Callable[[], Run]:
    """Return a function that prepares one execution; with ``start`` it includes the backward pass."""

    def run() -> Any:
        out = function()
        return out if start is None else torch.autograd.grad(out, leaves, start)

    return lambda: run


def _dense_mask(plain: Callable[..., Tensor] | None, seq: int) -> Tensor:
    """Return 0 for visible pairs, -inf for hidden ones: float32 [seq, seq]."""
    if plain is None:
        return torch.zeros(seq, seq)
    index, zero = torch.arange(seq), torch.zeros((), dtype=torch.int64)
    return torch.zeros(seq, seq).masked_fill_(~plain(zero, zero, index[:, None], index), -torch.inf)


@lru_cache(1)
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(torch_flex.flex_attention)
