"""Plans as text: owners of blocks, work of ranks, cost of each schedule, and the plan in plain words."""

from __future__ import annotations

import textwrap
from typing import NamedTuple

import torch

from tritoncp.masks.runs.block_runs import merge_ranges
from tritoncp.planning.plan import Plan
from tritoncp.report.facts import PlanFacts
from tritoncp.report.units import format_bytes, format_ranks, format_tokens, shorten

WIDTH = 64  # characters across the mask
MOST_RANKS = 24  # characters of a list of ranks
LINES = 16  # most ranks for which a bar each is printed; with more, the mask has half the width
EVEN, NEARLY_EVEN = 1.02, 1.1  # largest work over the mean, up to which work is called so
MESSAGES = {
    "allgather": "every rank receives all keys and values, visible or not",
    "ring": "keys and values are sent from rank to rank, each as far as the last rank that sees them",
    "fetch": "each rank receives only the blocks of keys and values that its queries see",
    "ulysses": "ranks exchange heads and tokens, so a rank computes some heads for tokens of several ranks",
    "ulysses+ring": "ranks exchange heads and tokens; keys and values go around a ring between rows of ranks",
}


class Line(NamedTuple):
    """A line of text, and the rank that it describes, if that is a single one."""

    text: str
    rank: int | None = None


def format_lines(facts: PlanFacts) -> list[Line]:
    """Format a line for each query block (or group of blocks): its owner, then the key blocks that it sees,
    from █ all to · none. Below them the work of each rank in blocks, the cost of each schedule, and
    what that means in plain words."""
    plan, gap = facts.plan, Line("")
    mask = [f"mask: {facts.expression}"] if facts.expression else []
    costs = [*format_costs(facts), format_memory(facts), "", "what this means:"]
    for sentence in format_meaning(facts):
        costs += textwrap.wrap(sentence, 2 * WIDTH, initial_indent="  ", subsequent_indent="    ")
    head = map(Line, [format_title(plan), *mask])
    return [*head, gap, *format_blocks(plan), gap, *format_work(plan), gap, *map(Line, costs)]


def format_text(facts: PlanFacts) -> str:
    """Format the lines as one text without colours: ``print(plan)``."""
    return "\n".join(line.text for line in format_lines(facts))


def format_memory(facts: PlanFacts) -> str:
    """Format the memory of a layer as one line."""
    names = ("shard_bytes", "forward_peak_bytes", "backward_peak_bytes")
    shard, forward, backward = (_mib(facts.metrics[name]) for name in names)
    return (
        f"MiB of a rank: shard (q, k, v, out, lse) {shard}; at most in a pass: forward "
        f"{forward}, backward with gradients {backward}"
    )


def format_meaning(facts: PlanFacts) -> list[str]:
    """Format sentences about the tokens of each rank, the evenness of the work, and the keys that are
    sent."""
    plan = facts.plan
    if plan.world_size == 1:
        return ["Who computes what: one rank computes all.", "What is sent: nothing (remote share 0 %)."]
    word = "yes" if plan.imbalance <= EVEN else "nearly" if plan.imbalance <= NEARLY_EVEN else "no"
    return [
        f"Who computes what: {_format_pieces(plan)}.",
        f"Is it even: {word}, the busiest rank has {100 * (plan.imbalance - 1):.2g} % more work than the "
        f"mean, so ranks wait {100 * (1 - 1 / plan.imbalance):.2g} % of the time in attention.",
        f"What is sent: {100 * facts.metrics['remote_share']:.3g} % of the keys that queries see are on "
        "another rank (remote share).",
        f"How it is sent: {plan.schedule}: {MESSAGES[plan.schedule]}; at most "
        f"{format_bytes(max(facts.bytes_sent[plan.schedule]))} sent by a rank, forward and backward.",
    ]


def _format_pieces(plan: Plan) -> str:
    """Format the number of tokens of each rank, and the positions of rank 0."""
    tokens = [int(slots[0, :, 2].sum()) for slots in plan.q.slots]
    amount = " to ".join(format_tokens(count) for count in sorted({min(tokens), max(tokens)}))
    _, position, count = plan.q.slots[0][0][plan.q.slots[0][0, :, 2] > 0].unbind(1)
    share = f"each of the {plan.world_size} ranks computes the queries of {amount} tokens"
    if not len(position):
        return share
    ranges = torch.stack(merge_ranges(position, position + count), 1).tolist()
    names = [f"{format_tokens(start)}-{format_tokens(end)}" for start, end in ranges]
    where = f"at {', '.join(names)}" if len(names) <= 4 else f"in {len(names)} pieces"
    return f"{share}; those of rank 0 are {where}"


def format_title(plan: Plan) -> str:
    """Format sizes, ranks, balancer and schedule of a plan, and why it has that schedule, as one line."""
    return format_heading(plan) + (f" ({plan.reason})" if plan.reason else "")


def format_heading(plan: Plan) -> str:
    """Format sizes, ranks, balancer and schedule of a plan."""
    mask = plan.mask
    size = f"{mask.q_len} queries × {mask.kv_len} keys, blocks of {mask.q_block} × {mask.kv_block}"
    ranks = "1 rank" if plan.world_size == 1 else f"{plan.world_size} ranks, this is {plan.rank}"
    return f"Plan: {size}; {ranks}; order {plan.balancer}; schedule {plan.schedule}"


def format_blocks(plan: Plan) -> list[Line]:
    """Format the mask, a line for each query block or group of blocks, with the owners in front."""
    most = WIDTH if plan.world_size <= LINES else WIDTH // 2
    drawing = plan.mask.draw(most).split("\n")
    scale = max(1, -(-max(plan.mask.runs.shape[2:]) // most))  # blocks that share a character
    owners = [sorted(set(owner.tolist())) for owner in plan.owners[0].split(scale)]
    names = [shorten(format_ranks(ranks), MOST_RANKS) for ranks in owners]
    width = max([len("rank"), *map(len, names)])
    rows = [
        Line(f"{name:>{width}}  {row}", ranks[0] if len(ranks) == 1 and ranks[0] >= 0 else None)
        for name, ranks, row in zip(names, owners, drawing)
    ]
    return [Line(f"{'rank':>{width}}  sees"), *rows]


def format_work(plan: Plan) -> list[Line]:
    """Format mean, largest and relative work, and a bar for each rank if there are few."""
    work, most = plan.work, max(plan.work)
    mean = sum(work) / len(work)
    result = [Line(f"work: blocks, mean {mean:g}, most {most:g}, max/mean {plan.imbalance:.3f}")]
    if most and len(work) <= LINES:
        bars = [f"{rank:>4}  {'█' * round(32 * w / most):<32}  {w:g}" for rank, w in enumerate(work)]
        result += [Line(bar, rank) for rank, bar in enumerate(bars)]
    return result


def format_costs(facts: PlanFacts) -> list[str]:
    """Format the cost of each schedule, with an arrow at the plan's own."""
    shape, hardware = facts.shape, facts.hardware
    if facts.plan.world_size == 1:
        return ["one rank: nothing is sent"]
    result = [
        f"batch {shape.batch}, {shape.heads}:{shape.kv_heads} heads of {shape.head_dim}, on {hardware.name} "
        f"({hardware.source}); the slowest rank, predicted:",
        f"  {'schedule':<10} {'forward ms':>11} {'backward ms':>12} {'MiB more':>9} {'MiB sent, mean':>15} "
        f"{'most':>9}",
    ]
    for estimate in facts.costs:
        sent, extra = facts.bytes_sent[estimate.schedule], max(facts.peak(estimate.schedule))
        mark = "→" if facts.plan.schedule.partition("+")[0] == estimate.schedule else " "
        result.append(
            f"{mark} {estimate.schedule:<10} {estimate.forward * 1e3:>11.3f} "
            f"{estimate.backward * 1e3:>12.3f} {_mib(extra):>9} {_mib(sum(sent) / len(sent)):>15} "
            f"{_mib(max(sent)):>9}"
        )
    return result


def _mib(count: float) -> str:
    """Format a number of bytes in MiB."""
    return f"{count / 2**20:.1f}"
