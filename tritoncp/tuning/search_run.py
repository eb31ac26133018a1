"""A run of `tritoncp autotune`: its output files, and its table of results."""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from tritoncp.analysis.compile_pool import Compilers
from tritoncp.core import environment
from tritoncp.ops import tile_tables
from tritoncp.ops.tile_tables import Device
from tritoncp.perf.suite import machine
from tritoncp.tuning.device_bench import DeviceBench
from tritoncp.tuning.journal import TuningJournal
from tritoncp.tuning.progress import Tally
from tritoncp.tuning.search import Choice, Tuner
from tritoncp.tuning.targets import Target, candidates

COMPILE_TIMEOUT = 60.0  # seconds for one kernel


def output_folder() -> Path:
    """Return the first folder in which calls look for tiles, other than the package's. Raises ValueError if
    calls use no measured tiles, RuntimeError if there is no such folder."""
    if environment.CONFIG_DIR.read() == "-":
        raise ValueError(
            "TRITONCP_CONFIG_DIR=-: calls use no measured tiles; pass --out with a folder for the results, "
            "or unset the variable"
        )
    folder = next(
        (path for path in tile_tables.folders() if path != tile_tables.SHIPPED), tile_tables.user_folder()
    )
    if folder is None:
        raise RuntimeError(
            "there is no folder for results, since platformdirs is not installed: pass one with --out or "
            "TRITONCP_CONFIG_DIR"
        )
    return folder


class TuningResult(NamedTuple):
    """The result of a run: an entry for each target's choice, counters, journal, whether Ctrl-C ended it."""

    rows: list[dict[str, Any]]
    tally: Tally
    journal: Path
    interrupted: bool


def autotune(
    targets: Sequence[Target], device: Device, budget: float, resume: bool, folder: Path, jobs: int | None,
    console: Any,
) -> TuningResult:  # fmt: skip
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
    with Tally(total, console) as tally, closing(journal), Compilers(jobs, COMPILE_TIMEOUT) as pool:
        tuner = Tuner(device.arch, journal, pool.compile_jobs, deadline, keep, tally=tally)
        try:
            tuner.run(targets, _device_bench())
        except KeyboardInterrupt:
            interrupted = True
    return TuningResult(rows, tally, path, interrupted)


def _device_bench() -> DeviceBench:
    return DeviceBench(torch.device("cuda", torch.cuda.current_device()))


def show(result: TuningResult, console: Any) -> None:
    """Print the choices as a table."""
    from rich.table import Table

    from tritoncp.analysis.inspect_run import tiles

    table = Table("kernel", "mask", "D", "tiles", "ms", "rule ms", "gain", box=None, padding=(0, 2, 0, 0))
    for row in result.rows:
        mask, width = " ".join(filter(None, (row["mask"], row.get("score")))), row["shape"].split(",")[1]
        times = str(row["ms"]), str(row["rule_ms"]), f"{row['gain']:.2f}"
        table.add_row(row["kernel"], mask, width, tiles(row["config"]), *times)
    console.print(table)
