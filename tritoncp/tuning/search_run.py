"""A run of `tritoncp autotune`: its request, its display, its results."""

from __future__ import annotations

import datetime
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tritoncp.analysis.compile_pool import Compilers
from tritoncp.core import environment
from tritoncp.ops import tile_tables
from tritoncp.tuning.journal import TuningJournal
from tritoncp.tuning.progress import Tally
from tritoncp.tuning.search import Choice, LaunchBench, Tuner
from tritoncp.tuning.targets import Target, candidates


@dataclass(frozen=True)
class TuningRequest:
    """The command's request. folder: where choices and the journal are written."""

    targets: tuple[Target, ...]
    device: tile_tables.Device
    budget: float
    resume: bool
    folder: Path
    jobs: int | None
    timeout: float

    @property
    def journal(self) -> Path:
        return tile_tables.path_in(self.folder, self.device).with_suffix(".jsonl")

    @property
    def conditions(self) -> dict[str, Any]:
        """The conditions under which findings are valid."""
        import triton

        from tritoncp.perf.suite.machine import sources

        return {
            "device": self.device.name,
            "arch": self.device.arch,
            "triton": triton.__version__,
            "code": sources(tile_tables.PACKAGE),
        }


def output_folder() -> Path:
    """Return the folder of configurations that calls search first, except the shipped one. Raises ValueError
    where calls search none, RuntimeError where there is none."""
    if environment.CONFIG_DIR.read() == "-":
        raise ValueError(
            "with TRITONCP_CONFIG_DIR=- calls use no measured tiles: name a folder for the results with "
            "--out, or unset the variable"
        )
    folder = next(
        (path for path in tile_tables.folders() if path != tile_tables.SHIPPED), tile_tables.user_folder()
    )
    if folder is None:
        raise RuntimeError(
            "platformdirs, which knows the folder for configurations, is not installed: name one with --out, "
            "or in TRITONCP_CONFIG_DIR"
        )
    return folder


class TuningResult(NamedTuple):
    """The entry of each target's choice, the counts, and whether Ctrl-C ended the run."""

    rows: list[dict[str, Any]]
    tally: Tally
    interrupted: bool


def autotune(request: TuningRequest, console: Any, bench: LaunchBench | None = None) -> TuningResult:
    """Tune the requested targets, writing each choice when it is made: an interrupt loses none."""
    arch, conditions = request.device.arch, request.conditions
    journal = TuningJournal(request.journal, conditions, request.resume)
    rows: list[dict[str, Any]] = []

    def keep(target: Target, choice: Choice) -> None:
        """Write a choice; the rule too, where no candidate beats it: it has been measured."""
        times = {"ms": round(choice.ms, 5), "rule_ms": round(choice.rule_ms, 5)}
        entry = {**target.entry, "config": asdict(choice.config), **times}
        rows.append(entry | {"gain": round(choice.gain, 3)})
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        facts = {"code": conditions["code"], "time": now}
        tile_tables.write(request.folder, request.device, [entry], facts)

    total = sum(len(candidates(target, arch)) for target in request.targets)
    deadline, interrupted = time.monotonic() + request.budget, False
    with Tally(total, console) as tally, closing(journal), Compilers(request.jobs, request.timeout) as pool:
        tuner = Tuner(arch, journal, pool.compile_jobs, deadline, keep, tally=tally)
        try:
            tuner.run(request.targets, bench or _device_bench())
        except KeyboardInterrupt:
            interrupted = True
    return TuningResult(rows, tally, interrupted)


def _device_bench() -> LaunchBench:
    from tritoncp.tuning.device_bench import DeviceBench

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
