"""`python -m tritoncp.perf.studies.scale`: planning cost of up to 8M tokens on up to 1024 ranks.

No attention runs: plans are built on one CPU core, and their figures read. Each plan is written as a line of
JSON as soon as it is built; plans whose lines the file already has are not built again.
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch

from tritoncp.masks.closed_forms import causal, document, prefix_lm, sliding_window
from tritoncp.masks.mask import Mask, create_block_mask
from tritoncp.masks.mask_mod import MaskMod, and_masks
from tritoncp.perf.studies.balance import Numbers, corpus_lengths
from tritoncp.planning import cost
from tritoncp.planning.balance import balancers
from tritoncp.planning.plan import Plan, build
from tritoncp.planning.traffic import Hop

SIZES = (128, 512, 1024, 2048, 8192)
WORLDS = (8, 64, 256, 1024)
SCHEDULES = ("allgather", "ring", "fetch", "ulysses")
LAYER = cost.Shape()

MASKS: dict[str, Callable[[int], MaskMod]] = {
    "causal": lambda seq: causal(),
    "documents": lambda seq: and_masks(causal(), document(lengths=corpus_lengths(seq))),
    "window": lambda seq: sliding_window(4095),
    "prefix-LM": lambda seq: prefix_lm(seq // 4),
    "documents, window": lambda seq: and_masks(
        causal(), document(lengths=corpus_lengths(seq)), sliding_window(4095)
    ),
}


class Point(NamedTuple):
    """The inputs of one plan of the study."""

    mask: str
    tokens: int  # in thousands (1024)
    world: int
    balancer: str


class PeakMemory:
    """Peak memory of this process above its memory at the start, in MiB.

    Python's tracemalloc does not count allocations of torch; the high-water mark of resident memory counts
    all, once the allocator has returned its free memory.
    """

    def __init__(self) -> None:
        _release_free_memory()
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        self.initial = _read_status("VmRSS")

    def peak_mib(self) -> float:
        return max(0.0, _read_status("VmHWM") - self.initial)


def _release_free_memory() -> None:
    ctypes.CDLL(None).malloc_trim(0)


def _read_status(name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {name}: memory is measured on Linux only")


def measure(mask: Mask, point: Point) -> dict[str, Any]:
    """Build the plan of a point, choose a schedule as "auto" does, and build each schedule's tables."""
    memory, begin = PeakMemory(), time.process_time()
    plan = build(mask, point.world, balancer=point.balancer, schedule="allgather")
    line: dict[str, Any] = {
        **point._asdict(),
        "place": _measure_cost(begin, memory),
        "imbalance": plan.imbalance,
    }
    line["schedules"] = {name: of_schedule(plan, name) for name in SCHEDULES}
    memory, begin = PeakMemory(), time.process_time()
    costs = cost.costs(plan, LAYER, cost.hardware_of(point.world))
    line["choose"], line["auto"] = _measure_cost(begin, memory), costs[0].schedule
    remote = int(plan.traffic.sum() - plan.traffic.diagonal().sum())
    line["travels"] = 100 * remote / ((plan.world_size - 1) * plan.kv.length)
    for estimate in costs:
        sent = max(cost.sent(plan, estimate.schedule, LAYER))
        line["schedules"][estimate.schedule] |= {
            "sent": sent,
            "ms": 1e3 * estimate.total,
            "extra": estimate.memory,
        }
    return line


def of_schedule(plan: Plan, schedule: str) -> dict[str, float]:
    """Measure one rank's planning between placement and first step: seconds of one core, peak MiB."""
    view = replace(plan, schedule=schedule, rank=plan.world_size // 2, _shared={})
    memory, begin = PeakMemory(), time.process_time()
    if schedule == "ring":  # later turns build their tables when they start
        hops: Sequence[Hop] = view.ring
        view.tables(buffer=hops[0].owner)
    elif schedule == "fetch":
        view.tables(buffer=view.rank)
        view.tables(buffer="fetched")
    elif schedule == "ulysses":
        rows = view.rows(view.degree_for(LAYER.heads), LAYER.heads)
        rows.tables(buffer="gathered" if rows.world_size == 1 else "fetched")
    else:
        view.tables()
    return _measure_cost(begin, memory)


def _measure_cost(begin: float, memory: PeakMemory) -> dict[str, float]:
    return {"s": time.process_time() - begin, "mib": memory.peak_mib()}


# -- the study ---------------------------------------------------------------------------------------


def points(sizes: Iterable[int], worlds: Iterable[int]) -> list[Point]:
    """List the plans of the study, grouped by mask. Ranks hold at least eight blocks of 128 tokens."""
    return [
        Point(mask, size, world, balancer)
        for mask in MASKS
        for size in sizes
        for world in worlds
        if size >= world
        for balancer in balancers
    ]


def run(sizes: Sequence[int], worlds: Sequence[int], results: Path) -> list[dict[str, Any]]:
    """Measure the points that are not in the file yet; return the lines of all."""
    lines_by_key = {key(line): line for line in read(results)}
    all_points = points(sizes, worlds)
    missing = [point for point in all_points if tuple(point) not in lines_by_key]
    results.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines_by_key.values())
    results.write_text(text)  # drops an incomplete line
    cached_mask: tuple[tuple[str, int], Mask, float] | None = None
    for number, point in enumerate(missing, 1):
        if cached_mask is None or cached_mask[0] != (point.mask, point.tokens):
            begin, seq = time.process_time(), point.tokens * 1024
            mask = create_block_mask(MASKS[point.mask](seq), None, None, seq, seq)
            cached_mask = (point.mask, point.tokens), mask, time.process_time() - begin
        line = measure(cached_mask[1], point) | {
            "mask_s": cached_mask[2],
            "runs": len(cached_mask[1].runs.runs),
        }
        with results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        lines_by_key[tuple(point)] = line
        click.echo(
            f"{number}/{len(missing)} {' '.join(map(str, point))}: {plan_cost(line)['s']:.2f} s", err=True
        )
    return [lines_by_key[tuple(point)] for point in all_points]


def read(results: Path) -> list[dict[str, Any]]:
    """Read the complete lines of a file of results, without a line that was cut short."""
    lines = []
    for text in results.read_text().splitlines() if results.exists() else ():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


def key(line: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(line[name] for name in Point._fields)


def plan_cost(line: dict[str, Any]) -> dict[str, float]:
    """Return seconds and peak MiB of one rank's plan: placement, choice, tables of the chosen schedule."""
    parts = (line["place"], line["choose"], line["schedules"][line["auto"]])
    return {"s": sum(part["s"] for part in parts), "mib": max(part["mib"] for part in parts)}


# -- the page ----------------------------------------------------------------------------------------

GIB = 2**30
TABLES = ((1024, 64), (8192, 1024))  # thousands of tokens, ranks
LIMITS = {"s": 1.0, "mib": 64.0}  # limits of the whole plan of 1M tokens on 64 ranks
INTRODUCTION = """# Plans at scale

Made by `python -m tritoncp.perf.studies.scale --out docs/scaling.md` ({count} plans; one CPU core, no GPU;
nothing here ran attention). Masks: causal; documents as a corpus packs them (log-normal lengths, median 1400
tokens, in a causal mask); a causal window of 4096 tokens; a prefix of a quarter of the sequence; documents
in that window. Blocks of 128 tokens; a layer of 32 query and 8 key heads of 128 in bfloat16. What schedules
would take is predicted by the cost model behind `schedule="auto"`, from datasheets, and not measured.

The time of a plan is one rank's: to place the blocks, to choose a schedule, and to make the tables of its
first step. Its memory is the most the process held beyond what it held before. The mask is made before, and
counted apart."""


def page(lines: Sequence[dict[str, Any]], folder: str) -> str:
    """Format the page, with its tables and links to its pictures in ``folder``."""
    parts = [INTRODUCTION.format(count=len(lines)), *verdicts(lines)]
    for name, (title, caption) in PICTURES.items():
        parts += [f"## {title}", caption, f"![{title}]({folder}/{name}.svg)"]
    sizes = [(line["tokens"], line["world"]) for line in lines]
    for tokens, world in [size for size in TABLES if size in sizes] or [max(sizes)]:
        rows = [line for line in lines if (line["tokens"], line["world"]) == (tokens, world)]
        parts += [f"## {tokens_of(tokens)} tokens on {world} ranks", table(rows)]
    return "\n\n".join(parts) + "\n"


def verdicts(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Format the limits that the figures show, and which one is reached first."""
    paragraphs = ["## What holds, and what gives first"]
    near = [line for line in lines if (line["tokens"], line["world"]) == (1024, 64)]
    if near:
        slow, wide = _largest(near, "s"), _largest(near, "mib")
        paragraphs.append(
            f"**1M tokens on 64 ranks**: the slowest whole plan ({_plan_label(slow)}) takes "
            f"{plan_cost(slow)['s']:.2f} s, the largest ({_plan_label(wide)}) {plan_cost(wide)['mib']:.0f} "
            f"MiB; the limits are {LIMITS['s']:g} s and {LIMITS['mib']:g} MiB. Masks took "
            f"{max(line['mask_s'] for line in near):.2f} s at most."
        )
    far = [line for line in lines if (line["tokens"], line["world"]) == (8192, 1024)]
    if far:
        slow, wide = _largest(far, "s"), _largest(far, "mib")
        other_seconds = max(plan_cost(line)["s"] for line in far if line["balancer"] != "locality")
        paragraphs += [
            f"**8M tokens on 1024 ranks**: every balancer and schedule finishes. {_plan_label(slow)} takes "
            f"{plan_cost(slow)['s']:.0f} s and every other balancer at most {other_seconds:.1f} s; the most "
            f"memory is {plan_cost(wide)['mib']:.0f} MiB ({_plan_label(wide)}).",
            *FIRST,
        ]
    return paragraphs


FIRST = (
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
5. **Planning time of `locality`.** One rank after the other takes the best windows of what is left: ranks x
   blocks x 16 sizes. That is half a second at 1M tokens on 64 ranks and 25 s at 8M on 1024. All other
   balancers place 8M tokens in less than half a second; to choose a schedule is to look at what every rank
   sees, ranks x blocks, and takes a second there.
6. **Memory of a plan.** Which blocks each rank sees is a byte for each pair, 64 MiB at 8M tokens on 1024
   ranks, and some of its rows are held as sums while what travels is counted. It is made once for all views
   of a plan, and only for `ring`, `fetch`, "auto" and rows of `ulysses`.""",
)


def _largest(lines: Sequence[dict[str, Any]], unit: str) -> dict[str, Any]:
    return max(lines, key=lambda line: plan_cost(line)[unit])


def _plan_label(line: dict[str, Any]) -> str:
    return f"{line['mask']}, {line['balancer']}"


def table(rows: Sequence[dict[str, Any]]) -> str:
    head = "mask", "balancer", "max/mean", "keys that travel", "place", "choose", "tables", "most", "auto"
    rows_of_text = [" | ".join(("", *head, *(f"{name} sends, GiB" for name in SCHEDULES), "")).strip()]
    rows_of_text.append("|" + "---|" * (len(head) + len(SCHEDULES)))
    for line in rows:
        own = line["schedules"][line["auto"]]
        cells = [
            line["mask"],
            line["balancer"],
            f"{line['imbalance']:.3f}",
            f"{line['travels']:.1f} %",
            *(f"{part['s']:.2f} s" for part in (line["place"], line["choose"], own)),
            f"{plan_cost(line)['mib']:.0f} MiB",
            line["auto"],
            *(f"{line['schedules'][name]['sent'] / GIB:.3g}" for name in SCHEDULES),
        ]
        rows_of_text.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows_of_text)


def tokens_of(thousands: int) -> str:
    """
    >>> tokens_of(128), tokens_of(8192)
    ('128K', '8M')
    """
    return f"{thousands}K" if thousands % 1024 else f"{thousands // 1024}M"


# -- pictures ----------------------------------------------------------------------------------------

PICTURES = {
    "planning": (
        "Time and memory of one rank's whole plan",
        'Packed documents, `schedule="auto"`; dashed: one second, 64 MiB.',
    ),
    "balance": (
        "Evenness against blocks a rank",
        "Every length and number of ranks; a point is a plan; dashed: 2 %. What counts is blocks a rank.",
    ),
    "schedules": (
        "What each schedule sends, keeps and takes",
        "The longest sequence, placed by `per_document`; the busiest rank of a layer, forward and backward.",
    ),
}
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#aa3377")


def draw(lines: Sequence[dict[str, Any]], folder: Path) -> None:
    """Draw the pictures, as SVG files. Needs Matplotlib: pip install 'tritoncp[study]'."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update(
        {"svg.hashsalt": "tritoncp", "svg.fonttype": "none", "font.size": 9, "font.family": "sans-serif",
         "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e9ecef"}
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    for name in PICTURES:
        figure = {"planning": _draw_planning, "balance": _draw_balance, "schedules": _draw_schedules}[name](
            lines
        )
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None}, bbox_inches="tight")


def _make_panels(rows: int, columns: int, **options: Any) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.1 * columns + 0.6, 2.5 * rows + 0.6), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def _draw_planning(lines: Sequence[dict[str, Any]]) -> Any:
    worlds = sorted({line["world"] for line in lines})[1:] or [lines[0]["world"]]
    figure, panels = _make_panels(2, len(worlds), sharex=True, sharey="row")
    for row, (unit, label) in enumerate({"s": "seconds of one core", "mib": "MiB"}.items()):
        for panel, world in zip(panels[row], worlds):
            for name, colour in zip(balancers, COLOURS):
                values = [
                    (line["tokens"], max(plan_cost(line)[unit], 1e-3))
                    for line in lines
                    if (line["mask"], line["world"], line["balancer"]) == ("documents", world, name)
                ]
                panel.plot(*zip(*sorted(values)), "o-", color=colour, label=name, markersize=3, linewidth=1.2)
            panel.axhline(LIMITS[unit], color="#212529", linestyle="--", linewidth=0.8)
            panel.set(xscale="log", yscale="log", title=f"{world} ranks" if row == 0 else "")
            _label_tokens(panel, lines)
        panels[row][0].set_ylabel(label)
    _add_legend(figure, panels[0][0])
    return figure


def _draw_balance(lines: Sequence[dict[str, Any]]) -> Any:
    figure, panels = _make_panels(1, len(MASKS), sharey=True)
    for panel, mask in zip(panels[0], MASKS):
        for name, colour in zip(balancers, COLOURS):
            values = [
                (line["tokens"] * 8 / line["world"], max(100 * (line["imbalance"] - 1), 0.01))
                for line in lines
                if (line["mask"], line["balancer"]) == (mask, name)
            ]
            panel.plot(*zip(*values), "o", color=colour, label=name, markersize=3.5, alpha=0.8)
        panel.axhline(2, color="#212529", linestyle="--", linewidth=0.8)
        panel.set(xscale="log", yscale="log", title=mask, xlabel="blocks a rank", ylim=(0.007, 2000))
        panel.set_yticks([0.01, 0.1, 1, 10, 100, 1000], ["≤ 0.01", "0.1", "1", "10", "100", "1000"])
        panel.minorticks_off()
    panels[0][0].set_ylabel("% that the busiest rank\nhas more work than the mean")
    _add_legend(figure, panels[0][0])
    return figure


def _draw_schedules(lines: Sequence[dict[str, Any]]) -> Any:
    longest = max(line["tokens"] for line in lines)
    figures: dict[str, Callable[[dict[str, float]], float]] = {
        "GiB sent": lambda costs: costs["sent"] / GIB,
        "GiB beyond the shard": lambda costs: costs["extra"] / GIB,
        "predicted ms": lambda costs: costs["ms"],
    }
    figure, panels = _make_panels(len(figures), len(MASKS), sharex=True, sharey="row")
    for row, (label, value) in enumerate(figures.items()):
        for panel, mask in zip(panels[row], MASKS):
            for name, colour in zip(SCHEDULES, COLOURS):
                values = [
                    (line["world"], max(value(line["schedules"][name]), 1e-3))
                    for line in lines
                    if (line["mask"], line["tokens"], line["balancer"]) == (mask, longest, "per_document")
                ]
                panel.plot(*zip(*sorted(values)), "o-", color=colour, label=name, markersize=3, linewidth=1.2)
            panel.set(xscale="log", yscale="log", title=mask if row == 0 else "")
            worlds = sorted({line["world"] for line in lines})
            panel.set_xticks(worlds, map(str, worlds), minor=False)
            panel.minorticks_off()
        panels[row][0].set_ylabel(f"{label}, {tokens_of(longest)} tokens")
    for panel in panels[-1]:
        panel.set_xlabel("ranks")
    _add_legend(figure, panels[0][0])
    return figure


def _label_tokens(panel: Any, lines: Sequence[dict[str, Any]]) -> None:
    sizes = sorted({line["tokens"] for line in lines})
    panel.set_xticks(sizes, map(tokens_of, sizes), minor=False)
    panel.minorticks_off()


def _add_legend(figure: Any, panel: Any) -> None:
    figure.legend(*panel.get_legend_handles_labels(), loc="outside upper center", ncols=5, frameon=False)


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
    lines = run(sizes, worlds, results)
    if out is not None:
        draw(lines, out.with_suffix(""))
        out.write_text(page(lines, out.stem))


if __name__ == "__main__":
    main()
