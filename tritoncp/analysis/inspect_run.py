"""A run of `tritoncp inspect`: compiles kernels, and prints tables of resources."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import click
from rich.table import Table

from tritoncp.analysis.jobs import Job
from tritoncp.analysis.resource_table import (
    Row,
    find_regressions,
    inspect_jobs,
    key,
    read_table,
    write,
)
from tritoncp.perf.console import make_console
from tritoncp.perf.progress import Progress

# Heading of a column -> function from a row to its value.
COLUMNS: dict[str, Callable[[Row], Any]] = {
    "kernel": lambda row: row["kernel"],
    "D": lambda row: row["head_dim"],
    "dtype": lambda row: row["dtype"],
    "mask": lambda row: f"{row['variant']} ({row['source']})" if "source" in row else row["variant"],
    "tiles": lambda row: tiles(row["config"]),
    "regs": lambda row: row["registers"],
    "spill": lambda row: row["spill_bytes"],
    "shared": lambda row: row["shared_bytes"],
    "matrix": lambda row: row["matrix"] or "–",
    "TMA": lambda row: row["tma"] or "–",
}


def run(
    jobs: Sequence[Job],
    processes: int | None = None,
    timeout: float = 300.0,
    *,
    as_json: bool = False,
    check: bool = False,
    update: bool = False,
) -> list[str]:
    """Compile jobs and print their rows. check: compare them with the table; update: write them to it.
    Returns a line for each fault."""
    rows = compile_rows(jobs, processes, timeout)
    order = {key(job.identity): i for i, job in enumerate(jobs)}
    rows.sort(key=lambda row: order[key(row)])
    before = read_table()
    worse = [(row, why) for row in rows for why in find_regressions(row, before.get(key(row)))]
    faults = [f"{' '.join(map(str, key(row)))}: {why}" for row, why in worse if check or "failed" in row]
    if update and not check:
        for row, why in ((row, why) for row, why in worse if key(row) in before):
            click.echo(f"now worse: {' '.join(map(str, key(row)))}: {why}", err=True)
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        show(rows, make_console())
    if update:
        write(row for row in rows if "failed" not in row)
    return faults


def compile_rows(jobs: Sequence[Job], processes: int | None, timeout: float) -> list[Row]:
    """Compile the rows, and print a line for each with the time left."""
    progress, rows = Progress(), []
    progress.add(len(jobs))
    with closing(inspect_jobs(jobs, processes, timeout)) as done:
        for row in done:
            rows.append(row)
            failure = ": " + row["failed"] if "failed" in row else ""
            progress.show(" ".join(map(str, key(row))) + failure, measured=True)
    return rows


def tiles(config: dict[str, Any]) -> str:
    """Format a config: its route, tile sizes, warps and stages.

    >>> tiles({"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3})
    '128×64 8/3'
    >>> tiles({"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3, "USE_TMA": True})
    '128×64 8/3 TMA'
    >>> tiles({"ROUTE": "gluon", "BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3})
    'gluon 128×64 4/3'
    """
    shape = f"{config['BLOCK_M']}×{config['BLOCK_N']} {config['num_warps']}/{config['num_stages']}"
    route = f"{config['ROUTE']} " if "ROUTE" in config else ""
    return route + shape + " TMA" * config.get("USE_TMA", False)


def show(rows: Sequence[Row], console: Any) -> None:
    """Print a table for each architecture, with dashes for missing values."""
    for arch in dict.fromkeys(row["arch"] for row in rows):
        table = Table(*COLUMNS, title=arch, box=None, padding=(0, 1), title_justify="left")
        for row in rows:
            if row["arch"] == arch:
                table.add_row(*(_cell(of, row) for of in COLUMNS.values()))
        console.print(table)
    console.print(
        "\ntiles: M×N warps/stages, TMA if by descriptor; regs, spill (bytes): per thread; shared: bytes per "
        "CTA; matrix: instruction of matrix products; TMA: number of bulk copy instructions",
        style="dim",
    )


def _cell(value_of: Callable[[Row], Any], row: Row) -> str:
    try:
        return str(value_of(row))
    except KeyError:  # not compiled
        return "–"
