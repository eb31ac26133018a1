"""A run of `tritoncp autotune`: its output files, and its table of results."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
import triton
from rich.table import Table

from tritoncp.analysis.compile_pool import Compilers
from tritoncp.analysis.inspect_run import tiles
from tritoncp.ops import tile_tables
from tritoncp.ops.tile_tables import Device
from tritoncp.perf.console import make_console
from tritoncp.perf.suite import machine
from tritoncp.tuning.device_bench import DeviceBench
from tritoncp.tuning.journal import TuningJournal
from tritoncp.tuning.search import Choice, Tuner
from tritoncp.tuning.targets import Target, candidates

COMPILE_TIMEOUT = 60.0  # seconds for one kernel


class TuningResult(NamedTuple):
    """The result of a run: an entry for each target's choice, the number of candidates and of those for which
    there was no time, the journal, whether Ctrl-C ended it."""

    rows: list[dict[str, Any]]
    total: int
    left_out: int
    journal: Path
    interrupted: bool


def autotune(
    targets: Sequence[Target], device: Device, budget: float, resume: bool, folder: Path, jobs: int | None
) -> TuningResult:
    """Tune targets within ``budget`` seconds. Choices and the journal are written to ``folder``, each choice
    when it is made: an interrupt loses none."""
    path = tile_tables.path_in(folder, device).with_suffix(".jsonl")
    code = machine.sources(tile_tables.PACKAGE)
    conditions = {"device": device.name, "arch": device.arch, "triton": triton.__version__, "code": code}
    journal = TuningJournal(path, conditions, resume)
    rows: list[dict[str, Any]] = []

    def keep(target: Target, choice: Choice) -> None:
        """Store a choice, also if it is the default, as a record that it was measured."""
        times = {"ms": round(choice.ms, 5), "rule_ms": round(choice.rule_ms, 5)}
        entry = {**target.entry, "config": asdict(choice.config), **times}
        rows.append(entry | {"gain": round(choice.gain, 3)})
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        tile_tables.write(folder, device, [entry], {"code": code, "time": now})

    total = sum(len(candidates(target, device.arch)) for target in targets)
    deadline, interrupted = time.monotonic() + budget, False
    with closing(journal), Compilers(jobs, COMPILE_TIMEOUT) as pool:
        tuner = Tuner(
            device.arch, journal, pool.compile_jobs, deadline, keep, show=partial(click.echo, err=True)
        )
        try:
            tuner.run(targets, _device_bench())
        except KeyboardInterrupt:
            interrupted = True
    return TuningResult(rows, total, tuner.counts["left out"], path, interrupted)


def _device_bench() -> DeviceBench:
    return DeviceBench(torch.device("cuda", torch.cuda.current_device()))


def show_result(result: TuningResult, as_json: bool) -> None:
    """Print the results of a run, as a table or in JSON, and the number of targets and candidates left
    out."""
    if as_json:
        click.echo(json.dumps(result.rows, indent=1))
    elif result.rows:
        columns = "kernel", "mask", "D", "tiles", "ms", "rule ms", "gain"
        table = Table(*columns, box=None, padding=(0, 2, 0, 0))
        for row in result.rows:
            mask, width = " ".join(filter(None, (row["mask"], row.get("score")))), row["shape"].split(",")[1]
            times = str(row["ms"]), str(row["rule_ms"]), f"{row['gain']:.2f}"
            table.add_row(row["kernel"], mask, width, tiles(row["config"]), *times)
        make_console().print(table)
    more = f"the journal is {result.journal}; pass --resume to continue"
    if result.interrupted:
        outcome = "the choices above are stored" if result.rows else "nothing was chosen yet"
        click.echo(f"interrupted: {outcome}; {more}", err=True)
    elif not result.rows:
        click.echo(f"the table is empty: no kernel was timed against its default tiles; {more}", err=True)
    if result.left_out and not result.interrupted:
        count = f"{result.left_out} of {result.total} candidates"
        click.echo(f"the budget left out {count}: pass a larger --budget; {more}", err=True)
