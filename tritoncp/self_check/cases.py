"""The cases of the self-check, and their problems: tensors with exact answers and allowed errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritoncp import engines
from tritoncp.closed_forms import and_masks, causal, document, sliding_window
from tritoncp.masks import Mask, create_block_mask
from tritoncp.reference import allowed_error, dense_attention, eager_attention
from tritoncp.sinks import with_sinks

ONE_DEVICE = "one-device"
SCHEDULES = (ONE_DEVICE, "allgather", "ring", "fetch", "ulysses", "ulysses+ring")
MASKS = ("causal", "documents", "window", "score_mod", "sinks")
PASSES = ("forward", "backward")
TENSORS = {"forward": ("out", "lse"), "backward": ("dq", "dk", "dv", "dbias", "dsinks")}
REPLICATED = ("dbias", "dsinks")  # gradients of replicated parameters: the sum over ranks is compared
PERIOD = 61  # of the score_mod's table: many entries, so that the largest error of them is no matter of luck
DRAWS = 4  # one draw's largest error is a matter of luck where a tensor is small: eager attention has several


class Case(NamedTuple):
    """One pass of a schedule over a mask, in one dtype."""

    schedule: str
    mask: str
    dtype: str
    direction: str

    @property
    def name(self) -> str:
        """
        >>> Case("ring", "window", "float32", "backward").name
        'ring-window-float32-backward'
        """
        return "-".join(self)


@dataclass(frozen=True)
class Result:
    """The outcome of a case: of the tensor that is furthest off, as a part of what is allowed.

    tensor, error, allowed: None for a case without an answer
    rank:  the rank whose part that is; None for a sum over ranks, and where there is no answer
    ranks: all ranks with a part that is wrong
    why:   the reason why there is no answer
    """

    case: Case
    tensor: str | None = None
    error: float | None = None
    allowed: float | None = None
    ms: float | None = None
    rank: int | None = None
    ranks: tuple[int, ...] = ()
    right: bool = False
    why: str | None = None

    @property
    def excess(self) -> float:
        """The error as a part of what is allowed."""
        return math.inf if self.error is None or self.allowed is None else self.error / self.allowed

    def as_json(self) -> dict[str, Any]:
        schedule, mask, dtype, direction = self.case
        fields = {name: value for name, value in vars(self).items() if name != "case"}
        if self.error is not None and not math.isfinite(self.error):  # JSON has no such number
            fields |= {
                "error": None,
                "why": f"{self.tensor} has values that are no numbers, or another shape",
            }
        case = {"schedule": schedule, "mask": mask, "dtype": dtype, "pass": direction}
        return {**case, **fields, "ranks": list(self.ranks)}


class Sizes(NamedTuple):
    """Sizes of the tensors: ``length`` tokens, which are no multiple of a block."""

    length: int
    block: int
    head_dim: int
    heads: int
    kv_heads: int


def sizes(device: torch.device, world_size: int) -> Sizes:
    """On a GPU, blocks as users have them, and shards of a multiple of 16 tokens, as other lengths double the
    kernels to compile. Where kernels are interpreted, as little as has several blocks."""
    if device.type == "cuda":
        return Sizes(1424, 128, 128, 8, 2)
    heads, kv_heads = (4, 2) if world_size % 2 and world_size > 1 else (2, 1)
    return Sizes(100, 64, 16, heads, kv_heads)


def dtypes(device: torch.device) -> tuple[torch.dtype, torch.dtype]:
    """The narrow dtype and float32. The interpreter truncates bfloat16 where kernels round: float16 there."""
    interpreted = device.type == "cpu" and engines.uses_triton(device)
    return (torch.float16 if interpreted else torch.bfloat16), torch.float32


def degree_of(world_size: int, heads: int) -> int | None:
    """Ranks that trade heads under "ulysses+ring": the smallest divisor of the world that leaves a ring.

    >>> degree_of(4, 4), degree_of(9, 4), degree_of(3, 4), degree_of(25, 4)
    (2, 3, None, None)
    """
    divisors = (d for d in range(2, min(world_size - 1, heads) + 1) if world_size % d == 0)
    return next(divisors, None)


def all_cases(world_size: int, device: torch.device, only: str = "*") -> list[Case]:
    """Every case that fits the world and is named like ``only``, those that share kernels side by side."""
    fitting = [ONE_DEVICE]
    if world_size > 1:
        fitting += [name for name in SCHEDULES[1:] if name != "ulysses+ring"]
    if degree_of(world_size, sizes(device, world_size).heads):
        fitting.append("ulysses+ring")
    names = (str(dtype).removeprefix("torch.") for dtype in dtypes(device))
    cases = (
        Case(schedule, mask, dtype, direction)
        for dtype in names
        for mask in MASKS
        for schedule in fitting
        for direction in PASSES
    )
    return [case for case in cases if fnmatch(case.name, only)]


# -- problems and their exact answers ---------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """Tensors of one mask and dtype, whole, with their exact answers; the same on every rank.

    bias:    [H, PERIOD], captured by the score_mod, or None
    sinks:   [H], or None
    exact:   float64, by the names of TENSORS
    allowed: the largest error of each
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


def block_mask(name: str, size: Sizes, device: torch.device) -> Mask:
    n, block = size.length, size.block
    lengths = [n // 3 + 1, 2, n // 5]
    forms = {
        "documents": and_masks(causal(), document(lengths=[*lengths, n - sum(lengths)])),
        "window": sliding_window(n // 3, 3),
    }
    return create_block_mask(forms.get(name, causal()), 1, 1, n, n, str(device), block)


def relative(bias: Tensor) -> Callable[..., Tensor]:
    """A score_mod: a learned number for each head and distance, which comes again after a period."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + bias[h, (q_idx - kv_idx) % PERIOD]

    return score_mod


def make_problem(name: str, dtype: torch.dtype, size: Sizes, device: torch.device) -> Problem:
    """Draw unit normals, and compute what is exact and how far off a result may be."""
    problem, *others = (draw(name, dtype, size, device, seed) for seed in range(DRAWS))
    allowed = {key: max(one.allowed[key] for one in (problem, *others)) for key in problem.exact}
    return replace(problem, allowed=allowed)


def draw(name: str, dtype: torch.dtype, size: Sizes, device: torch.device, seed: int) -> Problem:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    n, d, heads, kv_heads = size.length, size.head_dim, size.heads, size.kv_heads
    q, dout, k, v = (normal(1, count, n, d) for count in (heads, heads, kv_heads, kv_heads))
    dlse, bias, sinks = (
        normal(*shape, dtype=torch.float32) for shape in ((1, heads, n), (heads, PERIOD), (heads,))
    )
    problem = Problem(
        block_mask(name, size, device), q, k, v, dout, dlse, bias if name == "score_mod" else None,
        sinks if name == "sinks" else None, {}, {},
    )  # fmt: skip
    problem.exact.update(exact_answer(problem))
    eager = eager_answer(problem)
    problem.allowed.update({key: allowed_error(eager[key], x) for key, x in problem.exact.items()})
    # Statistics are float32 whatever the dtype: the tolerance of tests/gpu.
    problem.allowed["lse"] = 1e-4 + 1e-5 * float(problem.exact["lse"].abs().max())
    return problem


def exact_answer(problem: Problem) -> dict[str, Tensor]:
    """Dense attention in float64; a sink is one more term of the softmax's denominator."""
    p = problem
    wide = [None if x is None else x.double().requires_grad_() for x in (p.q, p.k, p.v, p.bias, p.sinks)]
    q, k, v, bias, sinks = wide
    assert q is not None and k is not None and v is not None
    out, lse, _ = dense_attention(q, k, v, p.mask, None if bias is None else relative(bias))
    if sinks is not None:
        total = torch.logaddexp(lse, sinks[:, None])
        out, lse = out * torch.exp(lse - total)[..., None], total
    return differentiated(out, lse, p.dout.double(), p.dlse.double(), wide)


def eager_answer(problem: Problem) -> dict[str, Tensor]:
    """Torch's eager flex attention in the problem's dtype, and sinks as a user of it has them."""
    p = problem
    ends: dict[str, Tensor] = {}

    def gradients(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        ends.update(out=out, lse=lse)
        if p.sinks is None:
            return p.dout, p.dlse
        leaves = [x.detach().requires_grad_() for x in (out, lse, p.sinks)]
        ends["out"], ends["lse"] = (x for x in with_sinks(*leaves))
        dout, dlse, ends["dsinks"] = torch.autograd.grad((ends["out"], ends["lse"]), leaves, (p.dout, p.dlse))
        return dout, dlse

    captured = [] if p.bias is None else [p.bias.detach().requires_grad_()]
    mod = relative(captured[0]) if captured else None
    eager = eager_attention(p.q, p.k, p.v, p.mask, gradients, mod, captured)
    ends |= {"dq": eager.dq, "dk": eager.dk, "dv": eager.dv}
    if captured:
        ends["dbias"] = eager.captured[0]
    return {name: x.detach() for name, x in ends.items()}


def differentiated(
    out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor, leaves: Sequence[Tensor | None]
) -> dict[str, Tensor]:
    """Results and gradients by name, of the leaves (q, k, v, bias, sinks) that there are."""
    named = {name: x for name, x in zip(TENSORS["backward"], leaves) if x is not None}
    grads = torch.autograd.grad([out, lse], list(named.values()), [dout, dlse])
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(named, grads))}
