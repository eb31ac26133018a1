"""The cases of the self-check, and their problems: tensors with exact results and allowed errors."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
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
# Name of a mask in the report -> key of planning.problem.MASKS.
MASKS = {
    "causal": "causal",
    "documents": "few-documents",
    "window": "third-window",
    "score_mod": "causal",
    "sinks": "causal",
}
LEARNED = ("bias", "sinks")  # replicated tensors: the sum of their gradients over ranks is compared
PERIOD = 61  # length of the score_mod's table; with a long one, the largest error varies little between draws
DRAWS = 4  # random inputs per problem: the largest error of eager attention varies much between small tensors


@dataclass
class CheckRequest:
    """The command's options, and the time when the check began.

    jobs:   worker processes, None for one per core
    strict: whether cases that did not run within the budget are failures
    """

    only: str = "*"
    jobs: int | None = None
    world_size: int = 4
    budget: float = 60.0
    timeout: float = 20.0
    strict: bool = False
    began: float = field(default_factory=time.monotonic)

    @property
    def late(self) -> str:
        """The reason to stop when the budget is over."""
        return f"the budget of {self.budget:g} s is over"

    @property
    def over(self) -> bool:
        """Whether the budget is over."""
        return time.monotonic() - self.began > self.budget


class CheckCase(NamedTuple):
    """A case: forward and backward pass of a schedule with a mask, in one dtype. (Sizes, as in
    :class:`~tritoncp.planning.problem.Problem`, depend on the device and the number of ranks.)"""

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
    """The result of a case: the tensor with the largest ratio of error to allowed error.

    tensor, error, allowed: None for a case that did not complete
    rank:  the rank that holds that shard of the tensor; None for a sum over ranks, or without an error
    ranks: all ranks with a wrong shard
    why:   the reason if there is no error
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
    """Choose problem sizes for a device, with a length that is not a multiple of the block size. On a GPU
    shards have a multiple of 16 tokens, since other lengths need more kernels; interpreted, the length is the
    smallest with several blocks."""
    if device.type == "cuda":
        return Problem("causal", 1424, 8, 2)
    heads, kv_heads = (4, 2) if world_size % 2 and world_size > 1 else (2, 1)
    return Problem("causal", 100, heads, kv_heads, 16, 16)


def choose_dtypes(device: torch.device) -> tuple[torch.dtype, torch.dtype]:
    """Return (a 16-bit dtype, float32). Interpreted kernels run in float16, since the interpreter truncates
    to bfloat16 where a GPU rounds."""
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
    """List the cases for a world size that match ``only``; cases that share kernels are adjacent. Raises
    ValueError if there is none."""
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
            f"--only {only!r} matches no case of {world_size} ranks; pass for example {cases[-1].name}"
        )
    return chosen


# -- problems and their exact results ---------------------------------------------------------------------


@dataclass(frozen=True)
class CheckProblem:
    """Unsharded tensors with their exact results, equal on all ranks.

    leaves:  q, k, v, and the score_mod's captured bias [H, PERIOD], or sinks [H]
    starts:  gradients of out and lse
    exact:   float64 results: "out", "lse" and the gradients of leaves, as "dq"
    allowed: allowed error of each result
    """

    mask: Mask
    leaves: dict[str, Tensor]
    starts: dict[str, Tensor]
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
    """Draw the problem of a mask and a dtype; its allowed errors are maxima over DRAWS random inputs."""
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
    leaves = {"q": q, "k": k, "v": v}
    leaves |= {"score_mod": {"bias": bias}, "sinks": {"sinks": sinks}}.get(name, {})

    wide = {key: x.double().requires_grad_() for key, x in leaves.items()}
    score_mod = make_score_mod(wide.get("bias"))
    out, lse, _ = dense_attention(wide["q"], wide["k"], wide["v"], mask, score_mod, sinks=wide.get("sinks"))
    grads = torch.autograd.grad([out, lse], [*wide.values()], [dout.double(), dlse.double()])
    exact = {"out": out.detach(), "lse": lse.detach()} | {f"d{key}": x for key, x in zip(wide, grads)}

    captured = [leaves["bias"].clone().requires_grad_()] if "bias" in leaves else []
    score_mod = make_score_mod(captured[0] if captured else None)
    eager = eager_attention(q, k, v, mask, dout, dlse, score_mod, captured, sinks=leaves.get("sinks"))
    results = eager.out, eager.lse, eager.dq, eager.dk, eager.dv, *eager.captured
    allowed = {key: allowed_error(result, exact[key]) for key, result in zip(exact, results)}
    # lse is float32 for every dtype; this is the tolerance of tests/gpu.
    allowed["lse"] = 1e-4 + 1e-5 * float(exact["lse"].abs().max())
    return CheckProblem(mask, leaves, {"out": dout, "lse": dlse}, exact, allowed)
