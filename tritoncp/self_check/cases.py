"""The cases of the self-check, and their problems: tensors with exact results and allowed errors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritoncp.masks.mask import Mask
from tritoncp.ops import engine_factory
from tritoncp.planning import SCHEDULES
from tritoncp.planning.problem import Problem
from tritoncp.reference.dense import allowed_error, dense_attention, eager_attention

ONE_DEVICE = "one-device"
# The names of masks in a report -> keys of planning.problem.MASKS.
MASKS = {
    "causal": "causal",
    "documents": "few-documents",
    "window": "third-window",
    "score_mod": "causal",
    "sinks": "causal",
}
GRADIENTS = ("dq", "dk", "dv", "dbias", "dsinks")  # of the last two, the sum over ranks is compared
PERIOD = 61  # entries of the score_mod's table: with many, the largest error varies little between draws
DRAWS = 4  # random inputs per problem: the largest error of eager attention on one small tensor varies a lot


class CheckCase(NamedTuple):
    """The name of a schedule's forward and backward pass over a mask, in one dtype. A case holds no
    :class:`~tritoncp.planning.problem.Problem`, whose sizes depend on the device and the number of ranks."""

    schedule: str
    mask: str
    dtype: str

    @property
    def name(self) -> str:
        """
        >>> CheckCase("ring", "window", "float32").name
        'ring-window-float32'
        """
        return "-".join(self)


@dataclass(frozen=True)
class Result:
    """The result of a case: the tensor whose error is largest relative to the allowed error.

    tensor, error, allowed: None for a case that did not run to its end
    rank:  the rank that holds that part of the tensor; None for a sum over ranks, or without an error
    ranks: all ranks with a wrong part
    why:   the reason why there is no error to report
    """

    case: CheckCase
    tensor: str | None = None
    error: float | None = None
    allowed: float | None = None
    rank: int | None = None
    ranks: tuple[int, ...] = ()
    right: bool = False
    why: str | None = None

    @property
    def ran(self) -> bool:
        return not (self.why or "").startswith("not run")

    def as_json(self) -> dict[str, Any]:
        fields = {name: value for name, value in vars(self).items() if name != "case"}
        return {**self.case._asdict(), **fields, "ranks": list(self.ranks)}


def choose_sizes(device: torch.device, world_size: int) -> Problem:
    """Choose the sizes for a device, of a length that is not a multiple of its blocks. On a GPU: shards of a
    multiple of 16 tokens, because other lengths need more kernels. Interpreted: the smallest length with
    several blocks."""
    if device.type == "cuda":
        return Problem("causal", 1424, 8, 2)
    heads, kv_heads = (4, 2) if world_size % 2 and world_size > 1 else (2, 1)
    return Problem("causal", 100, heads, kv_heads, 16, 16)


def choose_dtypes(device: torch.device) -> tuple[torch.dtype, torch.dtype]:
    """Choose the 16-bit dtype; float32 always comes second. Interpreted kernels run in float16, because the
    interpreter truncates to bfloat16 where a GPU rounds."""
    interpreted = device.type == "cpu" and engine_factory.uses_triton(device)
    return (torch.float16 if interpreted else torch.bfloat16), torch.float32


def choose_degree(world_size: int, heads: int) -> int | None:
    """Choose how many ranks exchange heads under "ulysses+ring": the smallest divisor of the world size that
    leaves a ring of at least two ranks; None where there is none.

    >>> choose_degree(4, 4), choose_degree(9, 4), choose_degree(3, 4), choose_degree(25, 4)
    (2, 3, None, None)
    """
    divisors = (d for d in range(2, min(world_size - 1, heads) + 1) if world_size % d == 0)
    return next(divisors, None)


def list_cases(world_size: int, device: torch.device, only: str = "*") -> list[CheckCase]:
    """List the cases that fit the world and match ``only``; cases that share kernels are adjacent. Raises
    ValueError where there are none."""
    fitting = [ONE_DEVICE]
    if world_size > 1:
        fitting += [name for name in SCHEDULES if name != "ulysses+ring"]
    if choose_degree(world_size, choose_sizes(device, world_size).heads):
        fitting.append("ulysses+ring")
    names = (str(dtype).removeprefix("torch.") for dtype in choose_dtypes(device))
    parts = itertools.product(names, MASKS, fitting)
    cases = [CheckCase(schedule, mask, dtype) for dtype, mask, schedule in parts]
    if not (chosen := [case for case in cases if fnmatch(case.name, only)]):
        raise ValueError(
            f"--only {only!r} matches no case of {world_size} ranks; a case's name is, say, {cases[-1].name}"
        )
    return chosen


# -- problems and their exact results ---------------------------------------------------------------------


@dataclass(frozen=True)
class CheckProblem:
    """Unsharded tensors with their exact results, identical on every rank.

    bias:    [H, PERIOD], captured by the score_mod, or None
    sinks:   [H], or None
    exact:   float64 results: "out", "lse" and GRADIENTS
    allowed: the allowed error of each
    """

    mask: Mask
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    bias: Tensor | None
    sinks: Tensor | None
    exact: dict[str, Tensor]
    allowed: dict[str, float]


def make_score_mod(bias: Tensor | None) -> Callable[..., Tensor] | None:
    """Make a score_mod that adds a learned bias for each head and for the distance modulo PERIOD."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        assert bias is not None
        return score + bias[h, (q_idx - kv_idx) % PERIOD]

    return None if bias is None else score_mod


@lru_cache(1)  # adjacent cases have one problem
def make_problem(mask: str, dtype: str, device: torch.device, world_size: int) -> CheckProblem:
    """Draw the problem of a mask and a dtype; its allowed errors are the largest over DRAWS random inputs."""
    sizes = replace(choose_sizes(device, world_size), mask=MASKS[mask], dtype=dtype)
    problem, *redraws = (draw_problem(mask, sizes, device, seed) for seed in range(DRAWS))
    allowed = {key: max(draw.allowed[key] for draw in (problem, *redraws)) for key in problem.exact}
    return replace(problem, allowed=allowed)


def draw_problem(name: str, sizes: Problem, device: torch.device, seed: int) -> CheckProblem:
    """Draw unit-normal inputs, and compute their exact results and allowed errors."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    n, d, heads, kv_heads = sizes.seq, sizes.dim, sizes.heads, sizes.kv_heads
    q, dout, k, v = (
        normal(1, count, n, d, dtype=sizes.torch_dtype) for count in (heads, heads, kv_heads, kv_heads)
    )
    dlse, bias, sinks = (normal(*shape) for shape in ((1, heads, n), (heads, PERIOD), (heads,)))
    mask = sizes.block_mask(str(device), 128 if device.type == "cuda" else 64)
    leaves = {"dq": q, "dk": k, "dv": v}  # by the names of their gradients
    leaves |= {"score_mod": {"dbias": bias}, "sinks": {"dsinks": sinks}}.get(name, {})

    wide = {key: x.double().requires_grad_() for key, x in leaves.items()}
    score_mod = make_score_mod(wide.get("dbias"))
    qkv = wide["dq"], wide["dk"], wide["dv"]
    out, lse, _ = dense_attention(*qkv, mask, score_mod, sinks=wide.get("dsinks"))
    grads = torch.autograd.grad([out, lse], [*wide.values()], [dout.double(), dlse.double()])
    exact = {"out": out.detach(), "lse": lse.detach(), **dict(zip(wide, grads))}

    captured = [leaves["dbias"].clone().requires_grad_()] if "dbias" in leaves else []
    score_mod = make_score_mod(*captured) if captured else None
    eager = eager_attention(q, k, v, mask, dout, dlse, score_mod, captured, sinks=leaves.get("dsinks"))
    results = eager.out, eager.lse, eager.dq, eager.dk, eager.dv, *eager.captured
    allowed = {key: allowed_error(result, exact[key]) for key, result in zip(exact, results)}
    # lse is float32 for every dtype; this is the tolerance of tests/gpu.
    allowed["lse"] = 1e-4 + 1e-5 * float(exact["lse"].abs().max())
    learned = leaves.get("dbias"), leaves.get("dsinks")
    return CheckProblem(mask, q, k, v, dout, dlse, *learned, exact, allowed)
