"""A plan as text: who owns which blocks, and how even the work is."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tritoncp.plan import Plan

WIDTH = 64  # characters across the mask
LINES = 16  # ranks that get a bar of their own


def picture(plan: Plan) -> str:
    """What `print(plan)` shows.

    One line for each query block (or group of them): the rank that owns it, then what it sees, from █ all
    to · nothing. Below, the work of each rank in blocks.
    """
    return "\n".join([title(plan), "", *blocks(plan), "", *bars(plan)])


def title(plan: Plan) -> str:
    mask = plan.mask
    size = f"{mask.q_len} queries × {mask.kv_len} keys, blocks of {mask.q_block} × {mask.kv_block}"
    ranks = "1 rank" if plan.world_size == 1 else f"{plan.world_size} ranks, this is {plan.rank}"
    why = f" ({plan.reason})" if plan.reason else ""
    return f"Plan: {size}; {ranks}; order {plan.balancer}; schedule {plan.schedule}{why}"


def blocks(plan: Plan) -> list[str]:
    lines = plan.mask.draw(WIDTH).split("\n")
    scale = max(1, -(-max(plan.mask.runs.shape[2:]) // WIDTH))  # blocks that share a character
    owners = plan.owners[0].split(scale)
    names = [spans(sorted(set(owner.tolist()))) for owner in owners]
    width = max([len("rank"), *map(len, names)])
    return [f"{'rank':>{width}}  sees", *(f"{name:>{width}}  {line}" for name, line in zip(names, lines))]


def spans(ranks: list[int]) -> str:
    """
    >>> spans([0, 1, 2, 5]), spans([3])
    ('0-2,5', '3')
    """
    groups: list[list[int]] = []
    for rank in ranks:
        if groups and groups[-1][-1] == rank - 1:
            groups[-1].append(rank)
        else:
            groups.append([rank])
    return ",".join(f"{g[0]}-{g[-1]}" if len(g) > 1 else str(g[0]) for g in groups)


def bars(plan: Plan) -> list[str]:
    work, most = plan.work, max(plan.work)
    mean = sum(work) / len(work)
    lines = [f"work: blocks, mean {mean:g}, most {most:g}, max/mean {plan.imbalance:.3f}"]
    if most and len(work) <= LINES:
        lines += [f"{rank:>4}  {'█' * round(32 * w / most):<32}  {w:g}" for rank, w in enumerate(work)]
    return lines
