"""Running a case on the ranks of a world, and comparison of each rank's shards with the exact results."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tritoncp.api.attention import flex_attention
from tritoncp.api.plans import make_plan
from tritoncp.api.shards import shard
from tritoncp.api.simulate import simulate
from tritoncp.distributed import collectives
from tritoncp.masks.mask import Mask
from tritoncp.planning.plan import Plan
from tritoncp.reference.dense import largest_error
from tritoncp.self_check.cases import (
    LEARNED,
    ONE_DEVICE,
    CheckCase,
    CheckProblem,
    Result,
    choose_degree,
    make_problem,
    make_score_mod,
)

Errors = dict[tuple[int | None, str], float]  # by rank (None: the sum over ranks) and tensor


@dataclass(frozen=True)
class Ranks:
    """The ranks that this process runs: its own one of a process group, or all of a simulated world.

    world_size: ranks of the group, or of the simulated world
    group:      the process group for tensors; None for a simulated world
    host:       a group of the same ranks for results on the host
    """

    device: torch.device
    world_size: int
    group: dist.ProcessGroup | None = None
    mesh: Any = None  # a mesh of two dimensions, for "ulysses+ring"
    host: dist.ProcessGroup | None = None

    def problem(self, case: CheckCase) -> CheckProblem:
        return make_problem(case.mask, case.dtype, self.device, self.world_size)

    def plan(self, schedule: str, mask: Mask, heads: int) -> Plan | None:
        """Make a plan for a schedule; None for a single device."""
        if schedule == ONE_DEVICE:
            return None
        if self.group is None:
            plan = make_plan(mask, world_size=self.world_size, rank=0, schedule=schedule)
            degree = choose_degree(self.world_size, heads) if schedule == "ulysses+ring" else 0
            return replace(plan, degree=degree or 0).pinned()  # the size of a 2-D mesh's second dimension
        return make_plan(mask, self.mesh if schedule == "ulysses+ring" else self.group, schedule=schedule)

    def members(self, plan: Plan | None) -> list[int]:
        """Return the ranks whose shards this process holds under a plan."""
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
        text = pickle.dumps(own)
        sizes = [row[0] for row in collectives.exchange([len(text)], self.host, "the result of a case")]
        texts = collectives.exchange_bytes(text, max(sizes), self.host, "the result of a case")
        return [pickle.loads(padded[:size]) for padded, size in zip(texts, sizes)]


def run_case(ranks: Ranks, case: CheckCase, wait: Callable[[], None]) -> Errors:
    """Run both passes of a case, and compare this process's results with its shards of the exact tensors.
    wait: blocks until the device has finished its work"""
    problem = ranks.problem(case)
    plan = ranks.plan(case.schedule, problem.mask, problem.leaves["q"].shape[1])
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
    wait()
    qkv = leaves["q"], leaves["k"], leaves["v"]
    outs, lses = ranks.run_forward(plan, problem.mask, qkv, make_score_mod(bias), sinks)
    wait()

    grads = iter(torch.autograd.grad([*outs, *lses], [x for xs in leaves.values() for x in xs], starts))
    results = {"out": outs, "lse": lses}
    results |= {f"d{key}": [next(grads) for _ in xs] for key, xs in leaves.items()}
    errors: Errors = {}
    for name, parts in results.items():
        leaf = name.removeprefix("d")
        is_sum = leaf in LEARNED and plan is not None
        if is_sum and ranks.group is not None:
            dist.all_reduce(parts[0], group=ranks.group)
        wait()
        for rank, x, exact in zip(members, parts, cut(problem.exact[name], leaf)):
            x = x.detach()
            if name == "lse":  # -inf, or the sink, in padding rows
                x = torch.where(exact == -math.inf, exact, x.to(exact.dtype))
            errors[None if is_sum else rank, name] = largest_error(x, exact)
    return errors


def judge_case(case: CheckCase, allowed: dict[str, float], processes: Sequence[Errors]) -> Result:
    """Combine the errors of all processes into the result of a case."""
    errors = {key: error for part in processes for key, error in part.items()}
    excess = {key: error / allowed[key[1]] for key, error in errors.items()}
    rank, name = worst = max(excess, key=lambda key: excess[key])
    if not math.isfinite(errors[worst]):
        why = f"{name} has NaN or infinite values, or the wrong shape"
        return Result(case, name, rank=rank, why=why)
    wrong = tuple(sorted({at for (at, _), ratio in excess.items() if at is not None and not ratio <= 1}))
    return Result(case, name, errors[worst], allowed[name], rank, wrong, right=excess[worst] <= 1)
