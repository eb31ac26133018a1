"""Runs a case's schedule on the ranks of a world, and compares each rank's part with the exact results."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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
    ONE_DEVICE,
    REPLICATED,
    Answers,
    CheckCase,
    Result,
    choose_degree,
    make_score_mod,
)


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

    @property
    def own(self) -> int:
        """This process's rank, 0 where there is no group."""
        return 0 if self.group is None else self.group.rank()

    def plan(self, schedule: str, mask: Mask, heads: int) -> Plan | None:
        """The schedule's plan, None for one device."""
        if schedule == ONE_DEVICE:
            return None
        if self.group is None:
            plan = make_plan(mask, world_size=self.world_size, rank=0, schedule=schedule)
            degree = choose_degree(self.world_size, heads) if schedule == "ulysses+ring" else 0
            return replace(plan, degree=degree or 0).pinned()  # a mesh would give its second dimension here
        mesh = self.mesh if schedule == "ulysses+ring" else self.group
        return make_plan(mask, mesh, schedule=schedule)

    def members(self, plan: Plan | None) -> list[int]:
        """The ranks whose shards this process holds under a plan."""
        return list(range(self.world_size)) if plan is not None and self.group is None else [self.own]

    def attend(
        self, plan: Plan | None, problem: Answers, qkv: Sequence[list[Tensor]], score: Any, sinks: Any
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Run the forward pass: out and lse of each member."""
        options: dict[str, Any] = {"enable_gqa": True, "return_lse": True, "sinks": sinks}
        q, k, v = qkv
        if plan is not None and self.group is None:
            return simulate(self.world_size).flex_attention(q, k, v, score, plan, **options)
        mesh = None if plan is None else self.mesh if plan.degree else self.group
        out, lse = flex_attention(q[0], k[0], v[0], score, plan or problem.mask, mesh=mesh, **options)
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


class PassErrors(NamedTuple):
    """Errors of one pass, as far as one process can compute them.

    errors: by rank and tensor
    sums:   this process's part of the gradients of replicated parameters, float64 on the host; summing over
            processes gives the gradients to compare
    """

    errors: dict[tuple[int, str], float]
    sums: dict[str, Tensor]


def shard_tensor(x: Tensor, name: str, plan: Plan | None, ranks: Sequence[int]) -> list[Tensor]:
    """Cut a tensor [B, H, S, ...] into the shards of the members."""
    if plan is None:
        return [x]
    side, pad = "kv" if name in ("k", "v", "dk", "dv") else "q", -math.inf if name == "lse" else 0
    return [shard(x, plan.for_rank(rank), dim=2, side=side, pad=pad) for rank in ranks]


def run_passes(
    ranks: Ranks, problem: Answers, schedule: str, wait: Callable[[], None]
) -> Iterator[PassErrors]:
    """Run the forward pass, then the backward pass, and yield the errors of each. ``wait`` blocks until the
    device has finished its work."""
    p = problem
    plan = ranks.plan(schedule, p.mask, p.q.shape[1])
    members = ranks.members(plan)
    qkv = [
        [x.detach().requires_grad_() for x in shard_tensor(full, name, plan, members)]
        for name, full in (("q", p.q), ("k", p.k), ("v", p.v))
    ]
    bias, sinks = (None if x is None else x.detach().clone().requires_grad_() for x in (p.bias, p.sinks))
    starts = [*shard_tensor(p.dout, "dout", plan, members), *shard_tensor(p.dlse, "dlse", plan, members)]
    wait()

    outs, lses = ranks.attend(plan, p, qkv, None if bias is None else make_score_mod(bias), sinks)
    wait()
    results = {"out": [x.detach() for x in outs], "lse": [x.detach() for x in lses]}
    yield PassErrors(compare_results(p, results, plan, members), {})

    replicated = {name: x for name, x in zip(REPLICATED, (bias, sinks)) if x is not None}
    inputs = [*qkv[0], *qkv[1], *qkv[2], *replicated.values()]
    grads = torch.autograd.grad([*outs, *lses], inputs, starts)
    wait()
    n = len(members)
    results = {name: list(grads[i * n : i * n + n]) for i, name in enumerate(("dq", "dk", "dv"))}
    sums = dict(zip(replicated, grads[3 * n :]))
    errors = compare_results(p, results, plan, members)
    if plan is None:  # each rank has computed the full gradients: nothing to sum
        errors |= {(ranks.own, name): largest_error(x, p.exact[name]) for name, x in sums.items()}
        sums = {}
    yield PassErrors(errors, {name: x.double().cpu() for name, x in sums.items()})


def compare_results(
    problem: Answers, results: dict[str, list[Tensor]], plan: Plan | None, members: Sequence[int]
) -> dict[tuple[int, str], float]:
    """Compare each member's results with its shards of the exact tensors: errors by member and tensor."""
    errors = {}
    for name, parts in results.items():
        for rank, x, exact in zip(members, parts, shard_tensor(problem.exact[name], name, plan, members)):
            if name == "lse":  # padding rows have -inf, or the sink
                x = torch.where(exact == -math.inf, exact, x.to(exact.dtype))
            errors[rank, name] = largest_error(x, exact)
    return errors


def judge_case(case: CheckCase, problem: Answers, processes: Sequence[PassErrors]) -> Result:
    """Judge a case by the errors of every process."""
    errors: dict[tuple[int | None, str], float]  # by rank, None for sums, and tensor
    errors = {key: error for part in processes for key, error in part.errors.items()}
    for name in processes[0].sums:
        total = torch.stack([part.sums[name] for part in processes]).sum(0)
        errors[None, name] = largest_error(total, problem.exact[name].cpu())
    excess = {key: error / problem.allowed[key[1]] for key, error in errors.items()}
    rank, name = worst = max(excess, key=lambda key: excess[key])
    if not math.isfinite(errors[worst]):
        why = f"{name} has NaN or infinite values, or the wrong shape"
        return Result(case, name, rank=rank, why=why)
    wrong = tuple(sorted({at for (at, _), ratio in excess.items() if at is not None and not ratio <= 1}))
    right = excess[worst] <= 1
    return Result(case, name, errors[worst], problem.allowed[name], rank, wrong, right)
