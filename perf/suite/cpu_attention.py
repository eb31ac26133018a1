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
from tritoncp.perf.suite.timing import Run
from tritoncp.planning.problem import Problem

CPU = torch.device("cpu")
THREADS = 2
LARGEST_EAGER = 2048  # tokens: scores of torch's eager flex attention take 16 bytes for each pair and head
LARGEST_DENSE = 8192  # tokens: a dense mask in float32
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


def make_contenders(problem: Problem, train: bool) -> Makers:
    """Return functions that prepare one execution of a forward pass, or of both passes, by contender."""
    score, closed, seq = problem.score_mod(CPU), problem.closed_form(), problem.seq
    plain: Any = problem.plain_mod(CPU)
    ours: Any = flex_attention
    sdpa: Any = F.scaled_dot_product_attention
    flex: Any = torch_flex.flex_attention
    sizes = [(problem.heads, problem.dim), (problem.kv_heads, problem.dim), (problem.kv_heads, problem.v_dim)]
    leaves = [torch.randn(1, heads, seq, dim, requires_grad=train) for heads, dim in sizes]
    functions: dict[str, Callable[[], Tensor]] = {OURS: lambda: ours(*leaves, score, closed, enable_gqa=True)}
    if score is None and seq <= LARGEST_DENSE:
        dense = _dense_mask(plain, seq)
        functions["sdpa, dense mask"] = lambda: sdpa(*leaves, attn_mask=dense, enable_gqa=True)
    if problem.mask == "causal":
        functions["sdpa, causal"] = lambda: sdpa(*leaves, is_causal=True, enable_gqa=True)
    if not train:
        lists = None
        if plain is not None:
            lists = torch_flex.create_block_mask(plain, None, None, seq, seq, device="cpu")
        arguments: dict[str, Any] = {"score_mod": score, "block_mask": lists, "enable_gqa": True}
        functions["flex, compiled"] = lambda: _compiled_flex()(*leaves, **arguments)
        if seq <= LARGEST_EAGER:
            functions["flex, eager"] = lambda: flex(*leaves, **arguments)
    start = torch.randn(1, problem.heads, seq, problem.v_dim)
    return {name: _maker(function, leaves, start if train else None) for name, function in functions.items()}


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
