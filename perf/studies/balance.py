"""`python -m tritoncp.perf.studies.balance`: imbalance, traffic and planning time of every balancer.

No attention runs: work and traffic are read from the plan, counted in blocks and rows.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch

from tritoncp.masks.mask import Mask
from tritoncp.planning.balance import balancers
from tritoncp.planning.build import build
from tritoncp.planning.plan import Plan
from tritoncp.planning.problem import Problem
from tritoncp.planning.work import MASKED_BLOCK_COST

SIZES = (64, 128, 256, 512, 1024)
WORLDS = (8, 16, 64)


# The name of each mask in the page: a key of planning.problem.MASKS, and a note.
STUDIED = {
    "causal": ("causal", "Every block sees all before it: any even placement moves most of the keys."),
    "window 1K": ("window", "Natural order is even already, and sends a window to each neighbour."),
    "window 4K": ("window4k", "In natural order the first rank has less to do: short windows at the start."),
    "documents": ("corpus", "As a corpus packs: many short documents, a few long ones."),
    "long documents": (
        "document",
        "Fifteen documents of fixed shares of the sequence, the longest a quarter of it.",
    ),
    "documents, window 1K": ("corpus-window", "The documents of the corpus, each in a sliding window."),
    "prefix-LM": ("prefix", "Causal, and all see the first quarter."),
    "shared question": (
        "shared-question",
        "All see the first quarter, and behind it only their own answer; causal. No closed "
        "form: the mask is asked about every pair, so only the short lengths are here.",
    ),
}
MAX_TRACED_SIZE = {"shared question": 64}  # thousands of tokens, by mask without a closed form
EVEN = 1.02
ABOUT = """# Balancers compared

Made by `python -m tritoncp.perf.studies.balance --out docs/balance.md`; nothing here ran attention or
used a GPU.

Each cell: largest work of a rank over the mean (1.000 is even; above 1.02 in bold) · keys that travel with
`schedule="fetch"`, in per cent of what a full gather moves · seconds of one core to make the plan. Blocks of
128 tokens; work is visible blocks, a masked one counted {masked} times. All of these balancers give ranks
equal numbers of blocks, so contiguous pieces cannot be made even by making them longer or shorter: that would
put other layers, which cost the same for every token, out of balance.

What each promises of the work: `locality` at most 1.02 times the mean, or what the best contiguous
placement has where ranks have too few blocks for that (a window at 64K tokens on 64 ranks); `ptrr` that
two ranks differ by no more than the costliest block; `ptrr_unweighted` the same of listed blocks, masked
and full counted alike; `head_tail` an even causal mask, and nothing of others. `contiguous` and
`per_document` promise no bound: `per_document` keeps documents whole, and whole documents with equal
numbers of blocks need not have equal work (up to 1.23 in these tables). Cells in bold are those above
1.02.

Which to take: `ptrr`, the default, where all keys travel anyway (`schedule="allgather"`, dense masks);
`ptrr_unweighted` where placements have to agree with torch's; `locality` where the mask is sparse and
`schedule="fetch"` or `"ring"` moves only what is seen; `per_document` where planning time counts and a few
per cent of work do not. `balancer="auto"` weighs them all by predicted time. A function of your own goes in
the same place: `make_plan(mask, mesh, balancer=mine)`, see `tritoncp.planning.work.Work`."""


class Numbers(click.ParamType):
    """Comma-separated whole numbers."""

    name = "numbers"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(int(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a comma-separated list of whole numbers, as 64,128", param, ctx)
        if not numbers or min(numbers) < 1:
            self.fail(f"{value!r}: numbers must be at least 1", param, ctx)
        return numbers


class Quality(NamedTuple):
    """The quality of a placement.

    imbalance: largest work of a rank over the mean
    travels:   rows of keys that all ranks fetch, in per cent of the rows that a full all-gather moves
    seconds:   time of one core to build the plan
    """

    imbalance: float
    travels: float
    seconds: float


def measure_quality(mask: Mask, world_size: int, balancer: str) -> Quality:
    """Build a plan and return its quality."""
    begin = time.process_time()
    plan = build(mask, world_size, balancer=balancer, schedule="fetch")
    seconds = time.process_time() - begin
    return Quality(plan.imbalance, 100 * fetched_rows(plan) / ((world_size - 1) * plan.kv.length), seconds)


def fetched_rows(plan: Plan) -> int:
    """Count the rows of keys and values that all ranks together fetch, for one batch row."""
    return int(plan.traffic.clone().fill_diagonal_(0).sum()) // max(plan.mask.B, plan.q.batch)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--sizes", default=SIZES, type=Numbers(), show_default=True, help="Thousands (1024) of tokens.")
@click.option("--worlds", default=WORLDS, type=Numbers(), show_default=True, help="Numbers of ranks.")
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="Where the page goes, else stdout."
)
def main(sizes: Sequence[int], worlds: Sequence[int], out: Path | None) -> None:
    """Measure every balancer over the mask zoo, on one CPU core, and write the page of docs/balance.md."""
    torch.set_num_threads(1)
    parts = [ABOUT.format(masked=MASKED_BLOCK_COST)]
    for name, (mask_name, note) in STUDIED.items():
        rows = []
        for size in sizes:
            if name in MAX_TRACED_SIZE and size > MAX_TRACED_SIZE[name]:
                continue
            mask = Problem(mask_name, size * 1024).block_mask()
            for world_size in worlds:
                qualities = [measure_quality(mask, world_size, balancer) for balancer in balancers]
                rows.append(f"| {size}K | {world_size} | " + " | ".join(map(_format_cell, qualities)) + " |")
                click.echo(f"{name}, {size}K tokens, {world_size} ranks", err=True)
        head = f"| tokens | ranks | {' | '.join(balancers)} |\n|{'---|' * (len(balancers) + 2)}"
        parts.append("\n".join([f"## {name[:1].upper()}{name[1:]}\n", f"{note}\n", head, *rows]))
    text = "\n\n".join(parts) + "\n"
    if out is None:
        click.echo(text, nl=False)
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text)


def _format_cell(result: Quality) -> str:
    """
    >>> _format_cell(Quality(1.0149, 12.345, 0.512)), _format_cell(Quality(2.5, 0.04, 0.001))
    ('1.015 · 12.3 % · 0.51 s', '**2.500** · 0.0 % · 0.00 s')
    """
    uneven = "**" * (result.imbalance > EVEN)
    return f"{uneven}{result.imbalance:.3f}{uneven} · {result.travels:.1f} % · {result.seconds:.2f} s"


if __name__ == "__main__":
    main()
