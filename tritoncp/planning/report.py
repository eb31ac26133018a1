"""Reports of a plan as text and JSON: owners of blocks, work of ranks, cost of each schedule."""

from __future__ import annotations

import colorsys
import re
import textwrap
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor

from tritoncp.masks.expressions import format_mask
from tritoncp.planning import cost
from tritoncp.planning.explanation import format_meaning, owner_shares
from tritoncp.planning.memory import Sizes
from tritoncp.planning.metrics import Metrics
from tritoncp.planning.plan_data import PlanData
from tritoncp.planning.units import (
    format_bytes,
    format_ranks,
    format_tokens,
    shorten,
)

WIDTH = 64  # characters across the mask
LINES = 16  # most ranks for which a bar each is printed; with more, the mask has half the width

Colour = tuple[int, int, int]
# Paul Tol's "bright" palette, distinct under colour blindness, and two more colours.
BRIGHT = (
    (68, 119, 170), (238, 102, 119), (34, 136, 51), (204, 187, 68),
    (102, 204, 238), (170, 51, 119), (221, 136, 68), (120, 120, 120),
)  # fmt: skip


class Line(NamedTuple):
    """A line of text, and the rank that it describes, if only one."""

    text: str
    rank: int | None = None


@dataclass(frozen=True)
class Facts:
    """The facts about a plan for one layer that text, JSON and pictures show.

    >>> from tritoncp import causal, create_block_mask, make_plan
    >>> plan = make_plan(create_block_mask(causal(), 1, 1, 65536, 65536), world_size=4, rank=0)
    >>> facts = Facts.of(plan, heads=16, kv_heads=16)
    >>> facts.auto == facts.costs[0].schedule
    True
    >>> sorted(facts.bytes_sent)
    ['allgather', 'fetch', 'ring', 'ulysses']
    """

    plan: PlanData
    shape: cost.Shape
    hardware: cost.Hardware
    expression: str  # the mask as its author wrote it

    @classmethod
    def of(cls, plan: PlanData, hardware: cost.Hardware | None = None, **shape: int) -> Facts:
        """Return the facts for a layer of this ``shape``, on the assumed hardware if none is passed."""
        mod = plan.mask.mask_mod
        layer = cost.Shape.of_layer(plan, **shape)
        expression = "" if mod is None else format_mask(mod)
        return cls(plan, layer, hardware or cost.hardware_of(plan.world_size), expression)

    @cached_property
    def costs(self) -> tuple[cost.Cost, ...]:
        """Cost of every schedule for this placement, cheapest first; empty for one rank."""
        return cost.costs(self.plan, self.shape, self.hardware) if self.plan.world_size > 1 else ()

    @cached_property
    def own_cost(self) -> cost.Cost:
        """Cost of the plan's own schedule; "ulysses+ring" is estimated as "ulysses"."""
        if self.plan.world_size == 1:
            return cost.local_cost(self.plan, self.shape, self.hardware)
        name = self.plan.schedule.partition("+")[0]
        return next(one for one in self.costs if one.schedule == name)

    @cached_property
    def bytes_sent(self) -> dict[str, list[int]]:
        """Bytes that each rank sends in a forward and a backward pass, by schedule."""
        return {
            estimate.schedule: cost.bytes_sent(self.plan, estimate.schedule, self.shape)
            for estimate in self.costs
        }

    @cached_property
    def most_sent(self) -> int:
        """Bytes that the rank which sends most sends in a forward and a backward pass."""
        schedule = self.plan.schedule  # bytes_sent has all but schedules between rows of ranks
        return max(self.bytes_sent.get(schedule) or cost.bytes_sent(self.plan, schedule, self.shape))

    @cached_property
    def auto(self) -> str:
        """The schedule that `schedule="auto"` chooses, by the costs of a standard layer, not of this
        layer."""
        standard = cost.Shape(batch=self.plan.batch)
        estimates = self.costs if standard == self.shape else cost.costs(self.plan, standard, self.hardware)
        return estimates[0].schedule if estimates else self.plan.schedule

    @cached_property
    def metrics(self) -> Metrics:
        """Figures of the plan's own schedule."""
        return Metrics.of(self.plan, self.shape, self.own_cost)

    @property
    def shard_bytes(self) -> int:
        """Bytes of this rank's queries, keys, values, outputs and lse."""
        return Sizes.of(self.plan, self.shape).shards

    @property
    def reads(self) -> Tensor:
        """Bytes of rank s's keys and values that rank r's queries see, at [r, s]: int64 [W, W]."""
        rows = self.plan.traffic * (1 if self.plan.batched else self.shape.batch)
        return rows * (self.shape.row // self.shape.batch * self.shape.itemsize)

    def as_json(self) -> dict[str, Any]:
        """Return the facts as JSON values: the output of ``tritoncp plan --json``."""
        plan, mask = self.plan, self.plan.mask
        return {
            "mask": {
                "expression": self.expression or None,
                "q_len": mask.q_len, "kv_len": mask.kv_len, "block_size": [mask.q_block, mask.kv_block],
                "sparsity": mask.sparsity(), "runs": len(mask.runs.runs),
            },
            "world_size": plan.world_size,
            "balancer": plan.balancer,
            "schedule": plan.schedule,
            "reason": plan.reason,
            "auto": self.auto,
            "layer": asdict(self.shape),
            "hardware": asdict(self.hardware),
            "tokens": [int(slots[0, :, 2].sum()) for slots in plan.q.slots],
            "work": plan.work,
            "imbalance": plan.imbalance,
            "shard_bytes": self.shard_bytes,
            "metrics": self.metrics._asdict(),
            "schedules": {
                estimate.schedule: {
                    "forward_ms": estimate.forward * 1e3,
                    "backward_ms": estimate.backward * 1e3,
                    "extra_bytes": estimate.memory,
                    "sent_bytes": self.bytes_sent[estimate.schedule],
                }
                for estimate in self.costs
            },
            "reads_bytes": self.reads.tolist(),
        }  # fmt: skip


def format_text(facts: Facts) -> str:
    """Format all facts about a plan as text."""
    return "\n".join(line.text for line in format_lines(facts))


def format_lines(facts: Facts) -> list[Line]:
    """Format a line for each query block (or group of blocks): its owner, then the key blocks that it sees,
    from █ all to · none. Below them the queries of each rank, its work in blocks, the cost of each schedule,
    and what that means in plain words."""
    plan, gap = facts.plan, Line("")
    mask = [Line(f"mask: {facts.expression}")] if facts.expression else []
    parts = [Line(format_title(plan)), *mask, gap, *format_blocks(plan), gap]
    parts += [*format_shares(plan), gap] if plan.world_size > 1 else []
    parts += [*format_work(plan), gap, *map(Line, format_costs(facts))]
    parts.append(Line(f"shard of a rank (q, k, v, out, lse): {_mib(facts.shard_bytes)} MiB"))
    parts += [Line(format_metrics(facts.metrics)), gap, Line("what this means:")]
    for sentence in format_meaning(plan, facts.metrics, facts.most_sent):
        lines = textwrap.wrap(sentence, 2 * WIDTH, initial_indent="  ", subsequent_indent="    ")
        parts += map(Line, lines)
    return parts


def format_metrics(metrics: Metrics) -> str:
    """Format the memory of a layer and its remote keys as one line."""
    return (
        f"memory of a rank, most: forward {_mib(metrics.forward_peak_bytes)} MiB, backward with gradients "
        f"{_mib(metrics.backward_peak_bytes)} MiB; {100 * metrics.remote_share:.3g} % of keys read are remote"
    )


def format_title(plan: PlanData) -> str:
    """Format sizes, ranks, balancer and schedule of a plan as one line."""
    mask = plan.mask
    size = f"{mask.q_len} queries × {mask.kv_len} keys, blocks of {mask.q_block} × {mask.kv_block}"
    ranks = "1 rank" if plan.world_size == 1 else f"{plan.world_size} ranks, this is {plan.rank}"
    why = f" ({plan.reason})" if plan.reason else ""
    return f"Plan: {size}; {ranks}; order {plan.balancer}; schedule {plan.schedule}{why}"


def format_blocks(plan: PlanData) -> list[Line]:
    """Format the mask, a line for each query block or group of blocks, with the owners in front."""
    most = WIDTH if plan.world_size <= LINES else WIDTH // 2
    drawing = plan.mask.draw(most).split("\n")
    scale = max(1, -(-max(plan.mask.runs.shape[2:]) // most))  # blocks that share a character
    owners = [sorted(set(owner.tolist())) for owner in plan.owners[0].split(scale)]
    names = [shorten(format_ranks(ranks)) for ranks in owners]
    width = max([len("rank"), *map(len, names)])
    rows = [
        Line(f"{name:>{width}}  {line}", ranks[0] if len(ranks) == 1 and ranks[0] >= 0 else None)
        for name, line, ranks in zip(names, drawing, owners)
    ]
    return [Line(f"{'rank':>{width}}  sees"), *rows]


def format_shares(plan: PlanData) -> list[Line]:
    """Format the part of the sequence whose queries each rank has, from token 0 on the left to the last one:
    █ all of it, ▒ some. More than 16 ranks stand in two columns, more than 64 in groups."""
    columns = 1 if plan.world_size <= LINES else 2
    shares = owner_shares(plan, WIDTH, WIDTH // columns)
    groups: list[list[int]] = [[] for _ in shares]
    for rank in range(plan.world_size):
        groups[rank * len(shares) // plan.world_size].append(rank)
    names, mark = [format_ranks(ranks) for ranks in groups], "·▒█"
    width = max([len("rank"), *map(len, names)])
    strips = [
        f"{name:>{width}}  " + "".join(mark[(share > 0) + (share >= 1)] for share in line)
        for name, line in zip(names, shares.tolist())
    ]
    title = f"whose queries: token 0 (left) to {format_tokens(plan.mask.q_len)} (right)"
    if columns == 1:
        return [Line(title), *(Line(strip, rank) for rank, strip in enumerate(strips))]
    half = -(-len(strips) // 2)
    return [Line(title), *(Line("   ".join(strips[i::half])) for i in range(half))]


def format_work(plan: PlanData) -> list[Line]:
    """Format mean, largest and relative work, and a bar for each rank if there are few."""
    work, most = plan.work, max(plan.work)
    mean = sum(work) / len(work)
    result = [Line(f"work: blocks, mean {mean:g}, most {most:g}, max/mean {plan.imbalance:.3f}")]
    if most and len(work) <= LINES:
        result += [
            Line(f"{rank:>4}  {'█' * round(32 * w / most):<32}  {w:g}", rank) for rank, w in enumerate(work)
        ]
    return result


def format_costs(facts: Facts) -> list[str]:
    """Format the cost of each schedule, with an arrow at the plan's own."""
    shape, hardware = facts.shape, facts.hardware
    if not facts.costs:
        return ["one rank: nothing travels"]
    result = [
        f"batch {shape.batch}, {shape.heads}:{shape.kv_heads} heads of {shape.head_dim}, on {hardware.name} "
        f"({hardware.source}); the slowest rank, predicted:",
        f"  {'schedule':<10} {'forward ms':>11} {'backward ms':>12} {'MiB more':>9} {'MiB sent, mean':>15} "
        f"{'most':>9}",
    ]
    for estimate in facts.costs:
        sent = facts.bytes_sent[estimate.schedule]
        mark = "→" if facts.plan.schedule.partition("+")[0] == estimate.schedule else " "
        result.append(
            f"{mark} {estimate.schedule:<10} {estimate.forward * 1e3:>11.3f} "
            f"{estimate.backward * 1e3:>12.3f} {_mib(estimate.memory):>9} {_mib(sum(sent) / len(sent)):>15} "
            f"{_mib(max(sent)):>9}"
        )
    return [*result, format_choice(facts)]


def format_choice(facts: Facts) -> str:
    """Format the schedule that "auto" takes, and its time relative to the alternatives for this layer."""
    estimates = facts.costs
    times = {estimate.schedule: estimate.total for estimate in estimates}
    best, other = estimates[0], estimates[1]
    if facts.auto == best.schedule:
        times_as_fast = times[other.schedule] / best.total
        return f"auto takes {best.schedule}: {times_as_fast:.2f} times as fast as {other.schedule}"
    return (
        f"auto takes {facts.auto}, compared for the usual layer; for this one {best.schedule} is "
        f"{times[facts.auto] / best.total:.2f} times as fast: schedule={best.schedule!r}"
    )


def strip_addresses(text: str) -> str:
    """Remove memory addresses from a repr, so that it is the same in every process.

    >>> strip_addresses("and_masks(causal(), <function near at 0x7f2b8c0d3e20>)")
    'and_masks(causal(), <function near>)'
    """
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def _mib(count: float) -> str:
    """Format a number of bytes in MiB."""
    return f"{count / 2**20:.1f}"


def format_headline(facts: Facts) -> tuple[str, str]:
    """Format the two title lines of a picture: the mask, and the plan's placement."""
    plan, mask = facts.plan, facts.plan.mask
    suffix = f" · {shorten(facts.expression, 72)}" if facts.expression else ""
    ranks = "1 rank" if plan.world_size == 1 else f"{plan.world_size} ranks"
    listed = 100 - mask.sparsity()
    return (
        f"{format_tokens(mask.q_len)} tokens on {ranks}{suffix}",
        f"balancer {plan.balancer} · schedule {plan.schedule} · blocks of {mask.q_block} x {mask.kv_block} · "
        f"{listed:.3g} % of all pairs lie in listed blocks · max/mean work {plan.imbalance:.3f}",
    )


def format_remote_bytes(facts: Facts) -> tuple[str, str]:
    """Format the bytes of remote keys and values: the largest of a pair of ranks, and the total."""
    remote = facts.reads.clone().fill_diagonal_(0)
    return format_bytes(int(remote.max())), format_bytes(int(remote.sum()))


def colours(world_size: int) -> list[Colour]:
    """Return a colour for each rank: a distinct palette for up to eight; beyond, hues from blue over green,
    yellow and red to purple, so that a hue lies on one stretch of ranks."""
    if world_size <= len(BRIGHT):
        return list(BRIGHT[:world_size])
    result = []
    for rank in range(world_size):
        rgb = colorsys.hls_to_rgb((0.62 - 0.8 * rank / world_size) % 1, (0.40, 0.56)[rank % 2], 0.62)
        result.append((round(255 * rgb[0]), round(255 * rgb[1]), round(255 * rgb[2])))
    return result
