"""Runs a case's schedule on the ranks of a world, and compares each rank's part with the exact results."""

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
    GRADIENTS,
    ONE_DEVICE,
    CheckCase,
    CheckProblem,
    Result,
    choose_degree,
    make_score_mod,
)

Errors = dict[tuple[int | None, str], float]  # by rank (None: the sum over ranks) and tensor


@dataclass(frozen=True)
class Ranks:
    """The ranks that this process computes: its own in a process group, all of them in a simulated world.

    world_size: ranks of the group, or of the simulated world
    group:      None for a simulated world
    host:       the same ranks, for results on the host
    """

    device: torch.device
    world_size: int
    group: dist.ProcessGroup | None = None
    mesh: Any = None  # a mesh of two dimensions, for "ulysses+ring"
    host: dist.ProcessGroup | None = None

    def plan(self, schedule: str, mask: Mask, heads: int) -> Plan | None:
        """Make the schedule's plan, None for one device."""
        if schedule == ONE_DEVICE:
            return None
        if self.group is None:
            plan = make_plan(mask, world_size=self.world_size, rank=0, schedule=schedule)
            degree = choose_degree(self.world_size, heads) if schedule == "ulysses+ring" else 0
            return replace(plan, degree=degree or 0).pinned()  # a mesh would give its second dimension here
        return make_plan(mask, self.mesh if schedule == "ulysses+ring" else self.group, schedule=schedule)

    def members(self, plan: Plan | None) -> list[int]:
        """List the ranks whose shards this process holds under a plan."""
        if self.group is not None:
            return [self.group.rank()]
        return [0] if plan is None else list(range(self.world_size))

    def attend(
        self, plan: Plan | None, mask: Mask, qkv: Sequence[list[Tensor]], score: Any, sinks: Any
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Run the forward pass: out and lse of each member."""
        options: dict[str, Any] = {"enable_gqa": True, "return_lse": True, "sinks": sinks}
        q, k, v = qkv
        if plan is not None and self.group is None:
            return simulate(self.world_size).flex_attention(q, k, v, score, plan, **options)
        mesh = None if plan is None else self.mesh if plan.degree else self.group
        out, lse = flex_attention(q[0], k[0], v[0], score, plan or mask, mesh=mesh, **options)
        return [out], [lse]

    def gather(self, own: Any) -> list[Any]:
        """Gather a value of every process, in order of rank. Raises GroupClosed, which names the absent
        ranks."""
        if self.host is None:
            return [own]
        text = pickle.dumps(own)
        sizes = [row[0] for row in collectives.exchange([len(text)], self.host, "the result of a case")]
        texts = collectives.exchange_bytes(text, max(sizes), self.host, "the result of a case")
        return [pickle.loads(padded[:size]) for padded, size in zip(texts, sizes)]


def shard_tensor(x: Tensor, name: str, plan: Plan | None, ranks: Sequence[int]) -> list[Tensor]:
    """Cut a tensor [B, H, S, ...] into the shards of the members."""
    if plan is None:
        return [x]
    side, pad = "kv" if name in ("k", "v", "dk", "dv") else "q", -math.inf if name == "lse" else 0
    return [shard(x, plan.for_rank(rank), dim=2, side=side, pad=pad) for rank in ranks]


def run_case(ranks: Ranks, p: CheckProblem, schedule: str, wait: Callable[[], None]) -> Errors:
    """Run both passes of a problem, and return the errors of this process. ``wait`` blocks until the device
    has finished its work."""
    plan = ranks.plan(schedule, p.mask, p.q.shape[1])
    members = ranks.members(plan)
    qkv = [
        [x.detach().requires_grad_() for x in shard_tensor(full, name, plan, members)]
        for name, full in (("q", p.q), ("k", p.k), ("v", p.v))
    ]
    bias, sinks = (None if x is None else x.detach().clone().requires_grad_() for x in (p.bias, p.sinks))
    starts = [*shard_tensor(p.dout, "dout", plan, members), *shard_tensor(p.dlse, "dlse", plan, members)]
    wait()
    outs, lses = ranks.attend(plan, p.mask, qkv, make_score_mod(bias), sinks)
    wait()

    tensors: list[list[Any]] = [*qkv, [bias], [sinks]]
    parts = {name: xs for name, xs in zip(GRADIENTS, tensors) if xs[0] is not None}
    grads = iter(torch.autograd.grad([*outs, *lses], [x for xs in parts.values() for x in xs], starts))
    results = {"out": outs, "lse": lses, **{name: [next(grads) for _ in xs] for name, xs in parts.items()}}
    if plan is not None and ranks.group is not None:
        for name in GRADIENTS[3:]:
            for x in results.get(name, ()):
                dist.all_reduce(x, group=ranks.group)
    wait()
    return compare_results(p, results, plan, members)


def compare_results(
    problem: CheckProblem, results: dict[str, list[Tensor]], plan: Plan | None, members: Sequence[int]
) -> Errors:
    """Compare each member's results with its shards of the exact tensors."""
    errors: Errors = {}
    for name, parts in results.items():
        exact_tensor = problem.exact[name]
        if name in GRADIENTS[3:] and plan is not None:
            errors[None, name] = largest_error(parts[0].detach(), exact_tensor)
            continue
        for rank, x, exact in zip(members, parts, shard_tensor(exact_tensor, name, plan, members)):
            x = x.detach()
            if name == "lse":  # padding rows have -inf, or the sink
                x = torch.where(exact == -math.inf, exact, x.to(exact.dtype))
            errors[rank, name] = largest_error(x, exact)
    return errors


def judge_case(case: CheckCase, allowed: dict[str, float], processes: Sequence[Errors]) -> Result:
    """Judge a case by the errors of every process."""
    errors = {key: error for part in processes for key, error in part.items()}
    excess = {key: error / allowed[key[1]] for key, error in errors.items()}
    rank, name = worst = max(excess, key=lambda key: excess[key])
    if not math.isfinite(errors[worst]):
        why = f"{name} has NaN or infinite values, or the wrong shape"
        return Result(case, name, rank=rank, why=why)
    wrong = tuple(sorted({at for (at, _), ratio in excess.items() if at is not None and not ratio <= 1}))
    return Result(case, name, errors[worst], allowed[name], rank, wrong, right=excess[worst] <= 1)
