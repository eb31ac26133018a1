"""Contenders of host cases: attention by the CPU engine, and torch's attention on the CPU.

torch's flex attention has no backward pass on the CPU, and its eager form materialises all scores.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import flex_attention as torch_flex

from tritoncp.perf.records.history import OURS
from tritoncp.perf.suite.baselines import Contender, Inputs, inputs, one_device, split
from tritoncp.perf.suite.timing import Run
from tritoncp.planning.problem import Problem

CPU = torch.device("cpu")
THREADS = 2
LARGEST_EAGER = 2048  # tokens: scores of torch's eager flex attention take 16 bytes for each pair and head
LARGEST_DENSE = 16384  # tokens: a dense mask in float32, 1 GiB
SIZES_COMPILED = 2048, 4096  # tokens: torch.compile takes seconds for each mask, and at two sizes
LONG = 8192  # tokens: an execution takes seconds from here on, and a case is timed in few rounds
# Goals: least speedups over baselines, by mask, from SHORTEST tokens on; and of a forward pass with a
# score_mod
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
    """Return the goals of a case: least speedups over baselines. (A baseline without a time is ignored.)"""
    if problem.seq < SHORTEST:
        return {}
    if problem.world > 1:
        return {"one-device": round(1 / 1.3, 3)}
    is_compared = operation == "attend" and not problem.score_mod(CPU)
    return GOALS.get(problem.mask, {}) | ({"flex-compiled": 0.5} if is_compared else {})


def make_contenders(problem: Problem, operation: str) -> Makers:
    """Return functions that prepare one execution, by contender.

    operation: "attend" (a forward pass), "train" (both passes)
    """
    train = operation == "train"
    x = inputs(problem, CPU)
    if not train:  # calls without gradients
        x = Inputs(*(tensor.detach() for tensor in (x.q, x.k, x.v, x.dout)))
    prepare = partial(one_device, problem, x)
    if problem.world > 1:
        contenders = {OURS: split(problem, x), "one-device": prepare()}
    else:
        contenders = {OURS: prepare()}
        leaves = x.q, x.k, x.v
        for name, call in _torch_calls(problem, leaves, train).items():
            contenders[name] = Contender(call, leaves, x.dout)
    return {name: partial(_execution, contender, train) for name, contender in contenders.items()}


def _execution(contender: Contender, train: bool) -> Run:
    """Return a function that runs a forward pass, with ``train`` both passes."""
    if not train:
        return contender.call
    return lambda: torch.autograd.grad(contender.call(), contender.leaves, contender.dout)


def _torch_calls(
    problem: Problem, leaves: tuple[Tensor, ...], train: bool
) -> dict[str, Callable[[], Tensor]]:
    """Return calls of torch's attention for a problem, by contender."""
    score, seq = problem.score_mod(CPU), problem.seq
    plain: Any = problem.plain_mod(CPU)
    sdpa: Any = F.scaled_dot_product_attention
    flex: Any = torch_flex.flex_attention
    calls: dict[str, Callable[[], Tensor]] = {}
    if score is None and seq <= LARGEST_DENSE:
        dense = _dense_mask(plain, seq)
        calls["sdpa-dense"] = lambda: sdpa(*leaves, attn_mask=dense, enable_gqa=True)
    if problem.mask == "causal":
        calls["sdpa-causal"] = lambda: sdpa(*leaves, is_causal=True, enable_gqa=True)
    if not train and seq in (*SIZES_COMPILED, 1024):
        lists = plain and torch_flex.create_block_mask(plain, None, None, seq, seq, device="cpu")
        arguments: dict[str, Any] = {"score_mod": score, "block_mask": lists, "enable_gqa": True}
        if seq in SIZES_COMPILED and score is None:
            torch.compiler.reset()  # past Dynamo's limit of recompilations flex attention would run eagerly
            calls["flex-compiled"] = lambda: _compiled_flex()(*leaves, **arguments)
        if seq <= LARGEST_EAGER:
            calls["flex-eager"] = lambda: flex(*leaves, **arguments)
    return calls


def _dense_mask(plain: Callable[..., Tensor] | None, seq: int) -> Tensor:
    """Return the mask as a bias: 0 for visible pairs, -inf for hidden ones, float32 [seq, seq]."""
    if plain is None:
        return torch.zeros(seq, seq)
    index, zero = torch.arange(seq), torch.zeros((), dtype=torch.int64)
    return torch.zeros(seq, seq).masked_fill_(~plain(zero, zero, index[:, None], index), -torch.inf)


@lru_cache(1)
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(torch_flex.flex_attention)
