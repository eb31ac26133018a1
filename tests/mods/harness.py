"""Runs of mods over a tile of (q, kv) by a kernel, and by torch in eager mode."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

from tritoncp.kernels.scores import Closure, Queries, modify_scores
from tritoncp.mods import Mod

N = 16
FORMULAS = tomllib.loads(Path(__file__).with_name("formulas.toml").read_text())


def read_formulas(table: str, arguments: str, scope: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """Return the functions of a table of formulas.toml, with captured tensors of ``scope``."""
    return {name: eval(f"lambda {arguments}: {text}", scope) for name, text in FORMULAS[table].items()}


@triton.jit
def mask_kernel(out, b, h, q0, k0, caps, MOD: tl.constexpr, N: tl.constexpr):
    rows, cols = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    visible = MOD(b, h, q0 + rows, k0 + cols, caps)
    tl.store(out + rows * N + cols, tl.broadcast_to(visible.to(tl.int8), (N, N)))


@triton.jit
def score_kernel(out, scores, b, h, q0, k0, caps, MOD: tl.constexpr, N: tl.constexpr):
    rows, cols = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    product = 4 * tl.load(scores + rows * N + cols)
    queries = Queries(b, h, q0 + rows, None)
    score = modify_scores(product, queries, k0 + cols, Closure(MOD, caps), 0.25)
    tl.store(out + rows * N + cols, score)


@triton.jit
def grad_kernel(out, dscores, scores, b, h, q0, k0, caps, dcaps, keeps, MOD: tl.constexpr, N: tl.constexpr):
    rows, cols = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    score = tl.load(scores + rows * N + cols)
    dscore = tl.load(dscores + rows * N + cols)
    keep = tl.load(keeps + rows * N + cols) != 0
    dscore = MOD(dscore, score, b, h, q0 + rows, k0 + cols, keep, caps, dcaps)
    tl.store(out + rows * N + cols, tl.broadcast_to(dscore, (N, N)))


def run_mask(mod: Mod, b: int = 0, h: int = 0, q0: int = 0, k0: int = 0) -> Tensor:
    out = torch.full((N, N), 7, dtype=torch.int8)
    mask_kernel[(1,)](out, b, h, q0, k0, mod.caps(), mod.fn, N)
    assert set(out.unique().tolist()) <= {0, 1}
    return out.bool()


def run_score(mod: Mod, scores: Tensor, b: int = 0, h: int = 0, q0: int = 0, k0: int = 0) -> Tensor:
    out = torch.full_like(scores, float("nan"))
    score_kernel[(1,)](out, scores, b, h, q0, k0, mod.caps(), mod.fn, N)
    return out


def run_grad(
    mod: Mod, dscores: Tensor, scores: Tensor, keep: Tensor, b: int = 0, h: int = 0, q0: int = 0, k0: int = 0
) -> tuple[Tensor, list[Tensor]]:
    out = torch.full_like(scores, float("nan"))
    grads = [torch.zeros(mod.tensors[i].shape, dtype=scores.dtype) for i in mod.wants]
    args = (b, h, q0, k0, mod.caps(), mod.dcaps(grads), keep.to(torch.int8), mod.grad, N)
    grad_kernel[(1,)](out, dscores, scores, *args)
    return out, grads


def tile(b: int, h: int, q0: int, k0: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.tensor(b), torch.tensor(h), q0 + torch.arange(N), k0 + torch.arange(N)


def over_tile(fn: Callable[..., Any], is_score: bool) -> Callable[..., Any]:
    """Map fn over [N] rows and [N] columns by vmap, as torch's eager flex attention does."""
    lead = (0,) if is_score else ()
    inner = torch.vmap(fn, in_dims=(*lead, None, None, None, 0))
    return torch.vmap(inner, in_dims=(*lead, None, None, 0, None))


def eager_mask(fn: Callable[..., Any], b: int = 0, h: int = 0, q0: int = 0, k0: int = 0) -> Tensor:
    with TransformGetItemToIndex():
        return over_tile(fn, False)(*tile(b, h, q0, k0)).expand(N, N)


def eager_score(
    fn: Callable[..., Any], scores: Tensor, b: int = 0, h: int = 0, q0: int = 0, k0: int = 0
) -> Tensor:
    with TransformGetItemToIndex():
        return over_tile(fn, True)(scores, *tile(b, h, q0, k0))
