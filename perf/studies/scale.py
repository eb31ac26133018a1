"""`python -m tritoncp.perf.studies.scale`: planning cost of up to 8M tokens on up to 1024 ranks, as a page.

The page has the cost of the plans and pictures of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import torch
from tritoncp.perf.studies.balance import Numbers
from tritoncp.perf.studies.plan_costs import GIB, LIMITS, SCHEDULES, measure_points, plan_cost
from tritoncp.perf.studies.scale_charts import PICTURES, draw

from tritoncp.planning.units import format_tokens

SIZES = (128, 512, 1024, 2048, 8192)
WORLDS = (8, 64, 256, 1024)
TABLES = ((1024, 64), (8192, 1024))  # thousands of tokens, ranks
INTRODUCTION = """# Plans at scale

Made by `python -m tritoncp.perf.studies.scale --out docs/scaling.md` ({count} plans; one CPU core, no GPU;
nothing here ran attention). Masks: causal; documents as a corpus packs them (log-normal lengths, median 1400
tokens, in a causal mask); a causal window of 4096 tokens; a prefix of a quarter of the sequence; documents
in that window. Blocks of 128 tokens; a layer of 32 query and 8 key heads of 128 in bfloat16. What schedules
would take is predicted by the cost model behind `schedule="auto"`, from datasheets, and not measured.

The time of a plan is one rank's: to place the blocks, to choose a schedule, and to make the tables of its
first step. Its memory is the most the process held beyond what it held before. The mask is made before, and
counted apart."""


def format_page(lines: Sequence[dict[str, Any]], folder: str) -> str:
    """Format the page, with its tables and links to its pictures in ``folder``."""
    parts = [INTRODUCTION.format(count=len(lines)), *format_limits(lines)]
    for name, (title, caption) in PICTURES.items():
        parts += [f"## {title}", caption, f"![{title}]({folder}/{name}.svg)"]
    sizes = [(line["tokens"], line["world"]) for line in lines]
    for tokens, world in [size for size in TABLES if size in sizes] or [max(sizes)]:
        rows = [line for line in lines if (line["tokens"], line["world"]) == (tokens, world)]
        parts += [f"## {format_tokens(tokens * 1024)} tokens on {world} ranks", format_table(rows)]
    return "\n\n".join(parts) + "\n"


def format_limits(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Format the limits that the figures show, and which one is reached first."""
    paragraphs = ["## What holds, and what gives first"]
    lines_1m = [line for line in lines if (line["tokens"], line["world"]) == (1024, 64)]
    if lines_1m:
        (seconds, slowest), (mib, largest) = _find_largest(lines_1m, "s"), _find_largest(lines_1m, "mib")
        paragraphs.append(
            f"**1M tokens on 64 ranks**: the slowest whole plan ({slowest}) takes "
            f"{seconds:.2f} s, the largest ({largest}) {mib:.0f} MiB; the limits are "
            f"{LIMITS['s']:g} s and {LIMITS['mib']:g} MiB. Masks took "
            f"{max(line['mask_s'] for line in lines_1m):.2f} s at most."
        )
    lines_8m = [line for line in lines if (line["tokens"], line["world"]) == (8192, 1024)]
    if lines_8m:
        (seconds, slowest), (mib, largest) = _find_largest(lines_8m, "s"), _find_largest(lines_8m, "mib")
        other_seconds = max(plan_cost(line)["s"] for line in lines_8m if line["balancer"] != "locality")
        paragraphs += [
            "**8M tokens on 1024 ranks**: every balancer and schedule finishes. "
            f"{slowest} takes {seconds:.0f} s and every other balancer at most "
            f"{other_seconds:.1f} s; the most memory is {mib:.0f} MiB ({largest}).",
            *SCALING_LIMITS,
        ]
    return paragraphs


SCALING_LIMITS = (
    """What gives first, in this order:

1. **Memory of `allgather`.** Every rank holds two head groups of all keys and values and their gradients: 12
   GiB at 1M tokens, 24 at 2M, 96 at 8M, whatever the number of ranks. `fetch` of a dense mask is no better.
   `ring` and `ulysses` hold less with every rank that is added.
2. **A ring of ranks that are no neighbours.** In natural order a window or a corpus is a matter of
   neighbouring ranks, and a ring of 1024 takes 2 to 12 ms at 1M tokens. Dealt evenly, documents lie on ranks
   far apart; one reader on the other side of the ring makes keys travel all the way, and the same masks take
   440 ms. What is dealt goes with `fetch` or `ulysses`, which "auto" finds.
3. **Evenness, when ranks hold few blocks.** A block is the least that can be given away. With eight blocks a
   rank (1M tokens on 1024), one block of a long document is more than a rank's share of a packed corpus:
   max/mean is 1.4 at best and 1.8 with `ptrr`. With 16 blocks a rank `locality` is at 1.01, `per_document` at
   1.15 and `ptrr` at up to 1.3; with 64 all are below 1.09, with 256 below 1.03. Where there are so many
   ranks, blocks of 64 tokens make twice as many to deal.
4. **Messages.** A schedule in which 1024 ranks all talk to each other pays a thousand latencies of 20 us: 20
   ms each way, more than the attention of a packed corpus takes. `ptrr` spreads every document over all
   ranks, so that its `fetch` takes 220 ms at 8M tokens where that of `per_document` takes 33 and that of
   natural order 7. Ulysses cuts the peers by the ranks that trade heads, 32 here.
5. **Planning time of `locality`.** One rank after the other takes the best windows of what is left:
   ranks x pieces x up to 16 sizes. That is a third of a second at 1M tokens on 64 ranks and half a second
   at 8M on 64. From 256 ranks on, groups of ranks are placed first and each group's blocks then on its own
   ranks, which takes 1.2 to 1.8 s at 8M on 1024. All other balancers place 8M tokens in less than half a
   second; to choose a schedule is to look at what every rank sees, ranks x blocks, and takes a second
   there.
6. **Memory of a plan.** Which blocks each rank sees is a byte for each pair, 64 MiB at 8M tokens on 1024
   ranks, and some of its rows are held as sums while what travels is counted. It is made once for all views
   of a plan, and only for `ring`, `fetch`, "auto" and rows of `ulysses`.""",
)


def _find_largest(lines: Sequence[dict[str, Any]], unit: str) -> tuple[float, str]:
    """Return the largest cost of a plan, and the plan's mask and balancer."""
    largest = max(lines, key=lambda line: plan_cost(line)[unit])
    return plan_cost(largest)[unit], f"{largest['mask']}, {largest['balancer']}"


def format_table(rows: Sequence[dict[str, Any]]) -> str:
    head = "mask", "balancer", "max/mean", "keys that travel", "place", "choose", "tables", "most", "auto"
    rows_of_text = [" | ".join(("", *head, *(f"{name} sends, GiB" for name in SCHEDULES), "")).strip()]
    rows_of_text.append("|" + "---|" * (len(head) + len(SCHEDULES)))
    for line in rows:
        chosen_schedule = line["schedules"][line["auto"]]
        cells = [
            line["mask"],
            line["balancer"],
            f"{line['imbalance']:.3f}",
            f"{line['travels']:.1f} %",
            *(f"{part['s']:.2f} s" for part in (line["place"], line["choose"], chosen_schedule)),
            f"{plan_cost(line)['mib']:.0f} MiB",
            line["auto"],
            *(f"{line['schedules'][name]['sent'] / GIB:.3g}" for name in SCHEDULES),
        ]
        rows_of_text.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows_of_text)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--sizes", default=SIZES, type=Numbers(), show_default=True, help="Thousands (1024) of tokens.")
@click.option("--worlds", default=WORLDS, type=Numbers(), show_default=True, help="Numbers of ranks.")
@click.option(
    "--results",
    default=Path("scale.jsonl"),
    show_default=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="File of one line for each plan; plans with a line are not built again.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where the page goes, its pictures in a folder beside it; without it, none is made.",
)
def main(sizes: Sequence[int], worlds: Sequence[int], results: Path, out: Path | None) -> None:
    """Make plans of every mask, length, world and balancer on one CPU core, and the page of docs/scaling.md.

    About half an hour; a run that was stopped goes on where it was.
    """
    torch.set_num_threads(1)
    lines = measure_points(sizes, worlds, results)
    if out is not None:
        draw(lines, out.with_suffix(""))
        out.write_text(format_page(lines, out.stem))


if __name__ == "__main__":
    main()
