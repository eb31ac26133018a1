"""The cases of the self-check: problems with exact results and allowed errors. A case runs on the ranks of a
world, and each rank's shards are compared with the exact results."""

from __future__ import annotations

import itertools
import math
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tritoncp.api.attention import flex_attention
from tritoncp.api.plans import make_plan
from tritoncp.api.shards import shard
from tritoncp.api.simulate import simulate
from tritoncp.call import engine_factory
from tritoncp.core.records import replace
from tritoncp.distributed import collectives
from tritoncp.masks.mask import Mask
from tritoncp.perf.problem import Problem
from tritoncp.planning import SCHEDULES
from tritoncp.planning.plan import Plan
from tritoncp.reference.dense import allowed_error, dense_attention, eager_attention, largest_error

ONE_DEVICE, BOTH = "one-device", "ulysses+ring"
# Name of a mask in the report -> key of perf.problem.MASKS.
MASKS = {
    "causal": "causal",
    "documents": "few-documents",
    "window": "third-window",
    "score_mod": "causal",
    "sinks": "causal",
}
# Causal calls with heads above 256 channels, as of Gemma 4 and of absorbed latent attention: their sizes.
WIDE = {
    "heads512": {"dim": 512, "v_dim": 512},
    "mqa576": {"kv_heads": 1, "dim": 576, "v_dim": 512},
}
WIDE_SCHEDULES = (ONE_DEVICE, "ring")  # kernels without a state and with one; other schedules launch the same
LEARNED = ("bias", "sinks")  # replicated tensors: the sum of their gradients over ranks is compared
PERIOD = 61  # length of the score_mod's table; in a long table, the max error varies little between draws
DRAWS = 4  # random inputs per problem, since the max error of eager attention varies between small tensors
TEXT = 1 << 13  # bytes that each process sends after a case
Errors = dict[tuple[int | None, str], float]  # errors by rank (None: of the sum over ranks) and tensor


@dataclass
class CheckRequest:
    """The options of the command, and the time when the check began.

    world_size: ranks of a simulated world
    jobs:       worker processes, None for one per core
    budget:     seconds for the whole check
    timeout:    seconds to wait for another rank, or for a kernel
    strict:     whether cases that did not run within the budget are failures
    """

    only: str = "*"
    world_size: int = 4
    jobs: int | None = None
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
    :class:`~tritoncp.perf.problem.Problem`, depend on the device and the number of ranks.)

    mask: a key of MASKS, or of WIDE for a causal mask and wide heads
    """

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
    """The result of a case, for the tensor with the max ratio of error to allowed error.

    tensor, error, allowed: None for a case that did not complete
    rank:  the rank whose shard has this error; None for a sum over ranks, or without an error
    ranks: all ranks with a wrong shard
    why:   the reason if there is no error
    trace: the traceback of a case that raised, with TRITONCP_DEBUG=1
    """

    case: CheckCase
    tensor: str | None = None
    error: float | None = None
    allowed: float | None = None
    rank: int | None = None
    ranks: tuple[int, ...] = ()
    right: bool = False
    why: str | None = None
    trace: str = ""

    @property
    def ran(self) -> bool:
        return not (self.why or "").startswith("not run")

    @property
    def verdict(self) -> str:
        """ "right"; "WRONG" for a result with too large an error; "FAILED" for a case without a result."""
        return "right" if self.right else "WRONG" if self.tensor else "FAILED"

    def as_json(self) -> dict[str, Any]:
        fields = {name: value for name, value in vars(self).items() if name not in ("case", "trace")}
        return {**self.case._asdict(), **fields, "ranks": list(self.ranks)}


def choose_sizes(device: torch.device) -> Problem:
    """Choose problem sizes for a device. The length is not a multiple of the block size. On a GPU shards have
    a multiple of 16 tokens, since other lengths need more kernels; for interpreted kernels the length is the
    min with several blocks."""
    sizes = (1424, 8, 2) if device.type == "cuda" else (100, 2, 1, 16, 16)
    return Problem("causal", *sizes)


def choose_dtypes(device: torch.device) -> tuple[str, str]:
    """Return (a 16-bit dtype, float32). Interpreted kernels run in float16, since the interpreter truncates
    to bfloat16 where a GPU rounds."""
    interpreted = device.type == "cpu" and engine_factory.uses_triton(device)
    return ("float16" if interpreted else "bfloat16"), "float32"


def has_pairs(world_size: int) -> bool:
    """Return whether pairs of ranks can exchange heads in a ring of at least two pairs, as BOTH needs."""
    return world_size % 2 == 0 and world_size > 2


def list_cases(world_size: int, device: torch.device, only: str = "*") -> list[CheckCase]:
    """List the cases for a world size that match ``only``. Every schedule in every dtype with one mask comes
    first, wide heads last, and cases that share kernels are adjacent. Wide heads are checked in 16 bits:
    float32 needs more shared memory than some GPUs have. Raises ValueError if no case matches."""
    fitting, dtypes = [ONE_DEVICE], choose_dtypes(device)
    if world_size > 1:
        fitting += [name for name in SCHEDULES if name != BOTH or has_pairs(world_size)]
    parts = [*itertools.product(MASKS, dtypes, fitting)]
    parts += itertools.product(WIDE, dtypes[:1], [name for name in fitting if name in WIDE_SCHEDULES])
    cases = [CheckCase(schedule, mask, dtype) for mask, dtype, schedule in parts]
    if not (chosen := [case for case in cases if fnmatch(case.name, only)]):
        raise ValueError(
            f"--only {only!r} matches no case of {world_size} ranks; pass for example {cases[-1].name}"
        )
    return chosen


@dataclass(frozen=True)
class CheckProblem:
    """Unsharded tensors with their exact results, equal on all ranks.

    leaves:  q, k, v, and the score_mod's captured bias [H, PERIOD], or sinks [H]
    starts:  gradients of out and lse
    exact:   float64 results: "out", "lse" and the gradients of leaves, such as "dq"
    allowed: allowed error of each result
    """

    mask: Mask
    leaves: dict[str, Tensor]
    starts: dict[str, Tensor]
    exact: dict[str, Tensor]
    allowed: dict[str, float]


def make_score_mod(bias: Tensor | None) -> Callable[..., Tensor] | None:
    """Make a score_mod that adds a learned bias for each head and for the distance modulo PERIOD."""
    if bias is None:
        return None
    return lambda score, b, h, q_idx, kv_idx: score + bias[h, (q_idx - kv_idx) % PERIOD]


@lru_cache(1)  # adjacent cases share a problem
def make_problem(mask: str, dtype: str, device: torch.device) -> CheckProblem:
    """Draw the problem of a mask and a dtype. Allowed errors are the max over DRAWS random inputs."""
    sizes = replace(choose_sizes(device), mask=MASKS.get(mask, "causal"), dtype=dtype, **WIDE.get(mask, {}))
    problem, *redraws = (draw_problem(mask, sizes, device, seed) for seed in range(DRAWS))
    allowed = {key: max(draw.allowed[key] for draw in (problem, *redraws)) for key in problem.exact}
    return replace(problem, allowed=allowed)


def draw_problem(name: str, sizes: Problem, device: torch.device, seed: int) -> CheckProblem:
    """Draw unit-normal inputs, and compute their exact results and allowed errors."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    n, heads, kv_heads, d, e = sizes.seq, sizes.heads, sizes.kv_heads, sizes.dim, sizes.v_dim
    q, dout, k, v = (
        normal(1, count, n, channels, dtype=sizes.torch_dtype)
        for count, channels in ((heads, d), (heads, e), (kv_heads, d), (kv_heads, e))
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
    # lse is float32 for every dtype; this is the tolerance of tests on a GPU.
    allowed["lse"] = 1e-4 + 1e-5 * float(exact["lse"].abs().max())
    return CheckProblem(mask, leaves, {"out": dout, "lse": dlse}, exact, allowed)


@dataclass(frozen=True)
class Ranks:
    """The ranks that this process runs: one rank of a process group, or all ranks of a simulated world.

    world_size: ranks of the group, or of the simulated world
    group:      the process group for tensors; None for a simulated world
    host:       a group of the same ranks for results on the host
    """

    device: torch.device
    world_size: int
    group: dist.ProcessGroup | None = None
    mesh: Any = None  # a mesh of pairs, for BOTH
    host: dist.ProcessGroup | None = None

    def plan(self, schedule: Any, mask: Mask) -> Plan | None:
        """Make a plan for a schedule, by its name; None for a single device."""
        if schedule == ONE_DEVICE:
            return None
        if self.group is None:
            plan = make_plan(mask, world_size=self.world_size, rank=0, schedule=schedule)
            return replace(plan, degree=2 if schedule == BOTH else 0).pinned()  # the size of a group of heads
        return make_plan(mask, self.mesh if schedule == BOTH else self.group, schedule=schedule)

    def members(self, plan: Plan | None) -> list[int]:
        """Return the ranks whose shards this process has under a plan."""
        if self.group is not None:
            return [self.group.rank()]
        return [0] if plan is None else list(range(self.world_size))

    def run_forward(
        self, plan: Plan | None, mask: Mask, qkv: Sequence[list[Tensor]], score: Any, sinks: Any
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Run the forward pass; return out and lse of each member."""
        options: dict[str, Any] = {"enable_gqa": True, "return_lse": True, "sinks": sinks}
        q, k, v = qkv
        if plan is not None and self.group is None:
            return simulate(self.world_size).flex_attention(q, k, v, score, plan, **options)
        mesh = None if plan is None else self.mesh if plan.degree else self.group
        out, lse = flex_attention(q[0], k[0], v[0], score, plan or mask, mesh=mesh, **options)
        return [out], [lse]

    def gather(self, own: Any) -> list[Any]:
        """Gather a value from all processes, by rank. Raises GroupClosed with the absent ranks."""
        if self.host is None:
            return [own]
        texts = collectives.exchange_bytes(pickle.dumps(own), TEXT, self.host, "the result of a case")
        return list(map(pickle.loads, texts))  # a text is padded with zeros, which loads() ignores


def run_case(ranks: Ranks, case: CheckCase, timeout: float) -> Errors:
    """Run both passes of a case, and compare this process's results with its shards of the exact tensors.
    timeout: seconds that the device may take for its work"""
    problem = make_problem(case.mask, case.dtype, ranks.device)
    plan = ranks.plan(case.schedule, problem.mask)
    members = ranks.members(plan)

    def cut(x: Tensor, name: str) -> list[Tensor]:
        """Shard a tensor [B, H, S, ...], or its gradient, for the members."""
        if plan is None or name in LEARNED:
            return [x]
        side, pad = "kv" if name in ("k", "v") else "q", -math.inf if name == "lse" else 0
        return [shard(x, plan.for_rank(rank), dim=2, side=side, pad=pad) for rank in members]

    leaves = {
        name: [part.detach().requires_grad_() for part in cut(x, name)] for name, x in problem.leaves.items()
    }
    bias, sinks = (leaves.get(name, [None])[0] for name in LEARNED)
    starts = [part for x in problem.starts.values() for part in cut(x, "q")]
    qkv = leaves["q"], leaves["k"], leaves["v"]
    outs, lses = ranks.run_forward(plan, problem.mask, qkv, make_score_mod(bias), sinks)
    grads = iter(torch.autograd.grad([*outs, *lses], [x for xs in leaves.values() for x in xs], starts))
    results = {"out": outs, "lse": lses}
    results |= {f"d{key}": [next(grads) for _ in xs] for key, xs in leaves.items()}
    summed = [f"d{key}" for key in LEARNED if key in leaves and plan is not None]
    for name in summed if ranks.group is not None else ():
        dist.all_reduce(results[name][0], group=ranks.group)
    wait_for_device(ranks.device, timeout)
    errors: Errors = {}
    for name, parts in results.items():
        for rank, x, exact in zip(members, parts, cut(problem.exact[name], name.removeprefix("d"))):
            if name == "lse":  # -inf, or the sink, in padding rows
                x = torch.where(exact == -math.inf, exact, x.to(exact.dtype))
            errors[None if name in summed else rank, name] = largest_error(x.detach(), exact)
    return errors


def judge_case(case: CheckCase, device: torch.device, processes: Sequence[Errors]) -> Result:
    """Combine the errors of all processes into the result of a case."""
    allowed = make_problem(case.mask, case.dtype, device).allowed
    errors = {key: error for part in processes for key, error in part.items()}
    excess = {key: error / allowed[key[1]] for key, error in errors.items()}
    rank, name = worst = max(excess, key=lambda key: excess[key])
    if not math.isfinite(errors[worst]):
        why = f"{name} has NaN or infinite values, or the wrong shape"
        return Result(case, name, rank=rank, why=why)
    wrong = tuple(sorted({at for (at, _), ratio in excess.items() if at is not None and not ratio <= 1}))
    return Result(case, name, errors[worst], allowed[name], rank, wrong, right=excess[worst] <= 1)


def wait_for_device(device: torch.device, timeout: float) -> None:
    """Wait until a GPU has finished its queued work. Raises TimeoutError after the timeout, as for a hanging
    kernel or a message from a lost rank."""
    if device.type != "cuda":
        return
    event, end = torch.cuda.Event(), time.monotonic() + timeout
    event.record(torch.cuda.current_stream(device))
    while not event.query():
        if time.monotonic() > end:
            raise TimeoutError(f"the GPU did not finish its work within {timeout:g} s")
        time.sleep(0)
