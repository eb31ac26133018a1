"""A case of tests.cases on real processes, one for each rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import tritoncp
from tests.cases import AUX, SIDES, Answers, Case, agree, answers, expected, tensors
from tests.multiprocess import ranks


def on_rank(group: Any, case: Case, mesh_of: Callable[[Any], Any]) -> Answers:
    """Return the answers for the whole, equal on every rank."""
    mesh = mesh_of(group)
    plan = tritoncp.make_plan(case.block_mask(), mesh, balancer=case.balancer, schedule=case.schedule)

    def call(case: Case, q: Tensor, k: Tensor, v: Tensor, learned: Any = None) -> list[Tensor]:
        own = (tritoncp.shard(x, plan, dim=2, side=side) for x, side in zip((q, k, v), SIDES))
        score, options = case.score_mod(learned), {"enable_gqa": True, "return_aux": AUX, "mesh": mesh}
        out, aux = tritoncp.flex_attention(*own, score, plan, case.scale, **options)
        # Every rank computes the whole loss: its shards take their slice of the gradient.
        return [tritoncp.unshard(x, plan, mesh, dim=2, grad="slice") for x in (out, aux.lse, aux.max_scores)]

    result = answers(case, tensors(case), call)
    for name, grad in result.items():
        if name.startswith("gradient"):  # zeros but for this rank's part
            torch.distributed.all_reduce(grad, group=group)
    return result


def check_ranks(*cases: Case, mesh_of: Callable[[Any], Any] = lambda group: group) -> None:
    """Assert that real ranks answer as dense attention, in schedules of one case; ``mesh_of``: the mesh of
    the calls, from the group."""
    want = expected(cases[0])

    def run(group: Any) -> list[Answers]:
        return [on_rank(group, case, mesh_of) for case in cases]

    for got in ranks.run(cases[0].world, run, timeout=300):
        for case, own in zip(cases, got, strict=True):
            agree(case, own, want)
