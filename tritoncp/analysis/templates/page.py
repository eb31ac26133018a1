"""Pages that compare tritoncp's kernels with torch's templates: a summary in perf/NOTES.md, and all rows in
perf/TEMPLATES.md.

``python -m tritoncp.analysis.templates.page`` prints the summary; ``--write`` puts both into the pages;
``--update`` first compiles what the table lacks, and ``--all`` everything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from tritoncp.analysis import resource_table
from tritoncp.analysis.disassembly import KINDS
from tritoncp.analysis.templates import table
from tritoncp.analysis.templates.comparison import Comparison, comparisons, fits, is_serial, scaled, verdict
from tritoncp.analysis.templates.flex import MASKS
from tritoncp.analysis.templates.table import AUTOTUNED, HEAD_DIMS, KERNELS, TABLE, Row
from tritoncp.perf.dashboard.readme_figures import ROOT, rewrite
from tritoncp.perf.exit_codes import PerfCommand

LIMITS = {"mufu": "exponentials", "issue": "instructions", "tensor cores": "products", "tensor": "products"}
NOTES, PAGE = ROOT / "perf/NOTES.md", ROOT / "perf/TEMPLATES.md"
BEGIN, END = "<!-- templates: begin -->", "<!-- templates: end -->"
ARCHITECTURES = ("sm_90", "sm_80")
COMPARED = ("forward", "gluon", "dq", "dkdv", "backward")
VERDICTS = ("ahead", "equal", "behind")
SUMMARY_HEAD = ("GPU", "kernel", "D", "tritoncp", "bound, %", "torch", "bound, %", "", "best", "bound, %", "")
KIND_NAMES = (*KINDS, "other")
DETAIL_HEAD = (
    "tile",
    "registers",
    "spilled",
    "KiB",
    *KIND_NAMES,
    "loop",
    "masked",
    "programs",
    "bound, %",
    "limit",
)


def format_summary(path: Path = TABLE) -> str:
    """Format the counts of verdicts, and a table with a row for each GPU, kernel and head dim: tiles and
    bounds for full, causal and documents masks of tritoncp, and of torch at its default and best tiles."""
    places = comparisons(path)
    lines = [format_counts(places, arch) for arch in ARCHITECTURES]
    lines += ["", f"| {' | '.join(SUMMARY_HEAD)} |", "|---|---|--:|---|--:|---|--:|---|---|--:|---|"]
    for arch in ARCHITECTURES:
        for kernel in COMPARED:
            for dim in HEAD_DIMS:
                if (kernel, arch, dim, "full") in places:
                    rows = [places[kernel, arch, dim, mask] for mask in MASKS]
                    cells = _format_comparison(rows)
                    cells[5:] = cells[5:] if arch == AUTOTUNED else ["–"] * 3
                    lines.append(_format_line([arch, kernel, str(dim), *cells]))
    return "\n".join(lines)


def format_counts(places: Mapping[tuple[str, str, int, str], Comparison], arch: str) -> str:
    """Format the number of bounds that are ahead of torch's, equal and behind, on one GPU: of the default
    route, for each kernel, head dim and mask."""
    own = [row for (kernel, gpu, *_), row in places.items() if gpu == arch and kernel in KERNELS]
    default = Counter(verdict(row.own, row.default) for row in own)
    best = Counter(verdict(row.own, row.best) for row in own)
    counts = [", ".join(f"{count[word]} {word}" for word in VERDICTS) for count in (default, best)]
    line = f"- {arch}, {len(own)} bounds: {counts[0]} against torch's default tiles"
    return f"{line}; {counts[1]} against its best candidate." if arch == AUTOTUNED else f"{line}."


def _format_comparison(rows: Sequence[Comparison]) -> list[str]:
    own = [row.own for row in rows]
    cells = _format_bounds(own)
    for other in ([row.default for row in rows], [row.best for row in rows]):
        verdicts = [verdict(*pair) for pair in zip(own, other, strict=True)]
        cells += [*_format_bounds(other), join_values(verdicts)]
    return cells


def _format_bounds(rows: Sequence[Row]) -> list[str]:
    """Format the tiles of three masks, marked if one of them spills or is serial, and their bounds."""
    tiles = " / ".join(dict.fromkeys(format_tile(row) for row in rows))
    marks = " spills" * any(row["spill_bytes"] for row in rows) + " serial" * any(map(is_serial, rows))
    return [tiles + marks, join_values([_percent(row) for row in rows])]


def _percent(row: Row) -> str:
    return f"{100 * row['bound']:.0f}"


def join_values(values: Iterable[Any]) -> str:
    """Join the values of three masks: one if they are equal.

    >>> join_values([1, 1, 1]), join_values([1, 2, 2])
    ('1', '1 / 2 / 2')
    """
    texts = [str(value) for value in values]
    return texts[0] if len(set(texts)) == 1 else " / ".join(texts)


def format_tile(row: Mapping[str, Any]) -> str:
    """Format a tile: rows × columns, warps, stages.

    >>> format_tile({"tile": [128, 64], "warps": 4, "stages": 3, "tma": True})
    '128×64 4w 3s TMA'
    """
    rows, columns = row["tile"]
    return f"{rows}×{columns} {row['warps']}w {row['stages']}s" + " TMA" * row["tma"]


def format_details(path: Path = TABLE) -> str:
    """Format a table for each GPU, kernel and head dim: a row for each tile, with the figures of full, causal
    and documents masks; instructions by kind are of a causal mask, for 128 × 128 scores."""
    rows = table.read_rows(path)
    parts = []
    for arch in ARCHITECTURES:
        for kernel in KERNELS:
            for dim in HEAD_DIMS:
                own = [row for row in rows if (row["arch"], row["head_dim"]) == (arch, dim)]
                own = [row for row in own if row["kernel"] in (kernel, {"forward": "gluon"}.get(kernel))]
                parts += [f"## {kernel}, {dim} channels, {arch}", _format_detail_table(own)]
    return "\n\n".join(parts)


def _format_detail_table(rows: Sequence[Row]) -> str:
    tiles: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        name = row["source"] if row["kernel"] != "gluon" else "tritoncp gluon"
        name += " default" * (row["source"] == "torch" and row["default"])
        tile = *row["tile"], row["warps"], row["stages"], row["tma"]
        tiles.setdefault((name, *tile), {})[row["mask"]] = row
    lines = [f"| | {' | '.join(DETAIL_HEAD)} |", "|---|---|" + "--:|" * (len(DETAIL_HEAD) - 2) + "---|"]
    for (name, *_), by_mask in tiles.items():
        lines.append(
            _format_line([name, *_format_figures([by_mask[mask] for mask in MASKS if mask in by_mask])])
        )
    return "\n".join(lines)


def _format_figures(rows: Sequence[Row]) -> list[str]:
    """Format the cells of a tile from its rows for the masks."""
    causal = next(row for row in rows if row["mask"] == "causal")
    first, *second = causal["limit"].split(";")[0].split(" after ")
    limit = " after ".join(LIMITS.get(name, name) for name in (first, *second))
    values = [
        format_tile(causal) + " serial" * any(map(is_serial, rows)),
        join_values(row["registers"] for row in rows),
        join_values(row["spill_bytes"] for row in rows),
        str(round(max(row["shared_bytes"] for row in rows) / 1024)),
        *(f"{scaled(causal, causal['mix'].get(kind, 0)):.0f}" for kind in KIND_NAMES),
        join_values(f"{scaled(row, row['loop']):.0f}" for row in rows),
        join_values(f"{scaled(row, row['masked_loop'] or 0):.0f}" for row in rows if row["mask"] != "full"),
        join_values(row["programs"] for row in rows),
        join_values(_percent(row) for row in rows),
        limit if all(map(fits, rows)) else "does not fit",
    ]
    return values


def _format_line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def update(everything: bool = False, processes: int | None = None, path: Path = TABLE) -> None:
    """Compile the kernels that the table lacks, or all, and write them as they are done; tritoncp's also into
    the table of resources."""
    rows = [] if everything or not table.is_current(path) else table.read_rows(path)
    for i, row in enumerate(table.compile_template_rows(table.stale_templates(rows), processes)):
        rows.append(row)
        if i % 50 == 49:
            table.write_rows(rows, path)
    reports = []
    for row, report in table.compile_own(table.stale_own(rows, resource_table.read_table()), processes):
        rows.append(row)
        reports.append(report)
    resource_table.write(reports)
    table.write_rows(rows, path)


@click.command(cls=PerfCommand, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--write", is_flag=True, help="Write perf/NOTES.md and perf/TEMPLATES.md instead of printing.")
@click.option("--update", "compiles", is_flag=True, help="Compile what the table lacks.")
@click.option("--all", "everything", is_flag=True, help="Compile everything.")
@click.option("--jobs", type=click.IntRange(1), help="Kernels compiled at a time. [default: one a core]")
def main(write: bool, compiles: bool, everything: bool, jobs: int | None) -> None:
    """Compare tritoncp's kernels with torch's templates, compiled for GPUs that need not be here."""
    if compiles or everything:
        update(everything, jobs)
    if not write:
        return click.echo(format_summary())
    rewrite(NOTES, f"\n{format_summary()}\n", BEGIN, END)
    rewrite(PAGE, f"\n{format_details()}\n", BEGIN, END)


if __name__ == "__main__":
    main()
