"""A run of `tritoncp autotune`: its request, its display, its results."""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tritoncp.analysis.compile_pool import Compilers
from tritoncp.analysis.cross_compile import TARGETS, check_target
from tritoncp.core import environment
from tritoncp.core.paths import path_inside
from tritoncp.ops import tile_tables
from tritoncp.tuning.journal import Journal
from tritoncp.tuning.search import Bench, Choice, Tally, Tuner
from tritoncp.tuning.targets import Target, candidates


def entry_of(target: Target, choice: Choice) -> dict[str, Any]:
    """Make the file entry of a choice. A rule that no candidate beats is an entry too: it has been
    measured."""
    times = {"ms": round(choice.ms, 5), "rule_ms": round(choice.rule_ms, 5)}
    return {**target.entry, "config": asdict(choice.config), **times}


class Screen:
    """The progress display: a bar on a terminal, else a line for each target and each twentieth candidate."""

    def __init__(self, total: int, console: Any) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        text = TextColumn(
            "{task.fields[tally].target}  tried {task.completed} pruned {task.fields[tally].pruned} failed "
            "{task.fields[tally].failed} best {task.fields[tally].best}"
        )
        self._console = console
        self._bar = Progress(
            BarColumn(), text, TimeElapsedColumn(), console=console, disable=not console.is_terminal
        )
        self._tally = Tally()
        self._task = self._bar.add_task("", total=total, tally=self._tally)
        self._step, self._why = ("", -1), ""

    def __enter__(self) -> Screen:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()
        self._print_progress()

    def __call__(self, tally: Tally) -> None:
        self._tally = tally
        self._bar.update(self._task, completed=tally.tried, tally=tally)
        if tally.why != self._why:
            self._why = tally.why
            self._print(f"{tally.target}: {tally.why}")
        step = (tally.target + tally.best, tally.tried // 20)
        if step != self._step:
            self._step = step
            self._print_progress()

    def _print_progress(self) -> None:
        if not self._console.is_terminal:
            self._print(str(self._tally) if self._tally.target else "nothing tried")

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Request:
    """The command's request. static: only the stage that needs no GPU runs. folder: where choices and the
    journal are written; None: nowhere."""

    targets: tuple[Target, ...]
    device: tile_tables.Device
    static: bool
    budget: float
    resume: bool
    folder: Path | None
    processes: int | None
    timeout: float

    @property
    def journal(self) -> Path | None:
        """The path of the journal, if there is a folder. Raises ValueError for a folder that a link leads out
        of."""
        if self.folder is None:
            return None
        path = tile_tables.path_in(self.folder, self.device).with_suffix(".jsonl")
        return path_inside(self.folder, path)

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


def device(arch: str | None) -> tile_tables.Device:
    """The device to tune for: this process's GPU, or an architecture that is only compiled for. Raises
    RuntimeError without either, ValueError for an unknown architecture."""
    if arch is not None:
        check_target(arch)
        return tile_tables.Device(arch, "offline")
    if torch.cuda.is_available():
        return tile_tables.device_of(torch.device("cuda", torch.cuda.current_device()))
    raise RuntimeError(
        "torch finds no GPU here, and only a GPU can say how fast a kernel is; --target sm_90 compiles "
        f"the candidates without one (of {', '.join(TARGETS)}), and --dry-run lists "
        "them"
    )


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
    """For each target its choice or, statically, the survivors; whether Ctrl-C ended the run; and how many of
    all candidates had no time."""

    rows: list[dict[str, Any]]
    interrupted: bool
    left_out: int = 0
    candidates: int = 0


def autotune(request: Request, console: Any, bench: Bench | None = None) -> TuningResult:
    """Tune the requested targets, writing each choice when it is made: an interrupt loses none."""
    journal = Journal(request.journal, request.conditions, request.resume)
    total = sum(len(candidates(target, request.device.arch)) for target in request.targets)
    rows: list[dict[str, Any]] = []

    def keep(target: Target, choice: Choice) -> None:
        entry = entry_of(target, choice)
        rows.append(entry | {"gain": round(choice.gain, 3)})
        assert request.folder is not None, "a run that measures has a folder"
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        facts = {"code": request.conditions["code"], "time": now}
        tile_tables.write(request.folder, request.device, [entry], facts)

    compilers = Compilers(request.processes, request.timeout)
    deadline = time.monotonic() + request.budget
    with Screen(total, console) as screen:
        arch = request.device.arch
        tuner = Tuner(arch, journal, compilers.compile_jobs, deadline, keep, tally=Tally(show=screen))
        try:
            if request.static:
                for target in request.targets:
                    survivors = tuner.static(target)
                    rows += [
                        {"target": target.name, "config": asdict(c), **report} for c, report in survivors
                    ]
            else:
                tuner.run(request.targets, bench or _device_bench())
        except KeyboardInterrupt:
            return TuningResult(rows, True, tuner.tally.left_out, total)
        finally:
            compilers.end()
            journal.close()
    return TuningResult(rows, False, tuner.tally.left_out, total)


def _device_bench() -> Bench:
    from tritoncp.tuning.device_bench import DeviceBench

    return DeviceBench(torch.device("cuda", torch.cuda.current_device()))


def show(result: TuningResult, static: bool, console: Any) -> None:
    """Print the rows as a table."""
    from rich.table import Table

    from tritoncp.analysis.inspect_run import tiles

    style: dict[str, Any] = {"box": None, "padding": (0, 2, 0, 0)}
    if static:
        table = Table("kernel", "tiles", "regs", "shared", "TMA", **style)
        for row in result.rows:
            sizes = [str(row[name]) for name in ("registers", "shared_bytes", "tma")]
            table.add_row(row["target"], tiles(row["config"]), *sizes)
    else:
        table = Table("kernel", "mask", "D", "tiles", "ms", "rule ms", "gain", **style)
        for row in result.rows:
            mask = " ".join(filter(None, (row["mask"], row.get("score"))))
            width = row["shape"].split(",")[1]
            columns = row["kernel"], mask, width, tiles(row["config"])
            table.add_row(*columns, str(row["ms"]), str(row["rule_ms"]), f"{row['gain']:.2f}")
    console.print(table)
    for line in () if static else compare_fused(result.rows):
        console.print(line, markup=False, highlight=False)


def compare_fused(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Compare the fused kernel with dQ and dK/dV, where all three of a backward pass were measured.

    >>> call = {"shape": "8x8,64,4096", "mask": "causal", "dtype": "float16"}
    >>> times = {"dq": 1.0, "dkdv": 2.0, "fused": 2.4}
    >>> compare_fused([{**call, "kernel": name, "ms": ms} for name, ms in times.items()])[0].partition(":")[2]
    ' dq and dkdv take 3 ms, fused 2.4 ms: 1.25 times as fast'
    """
    passes: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        call = tuple(row[name] for name in ("shape", "mask", "score", "dtype") if row.get(name))
        passes.setdefault(call, {})[row["kernel"]] = row["ms"]
    lines = []
    for call, ms in passes.items():
        if {"dq", "dkdv", "fused"} <= set(ms):
            apart, one = ms["dq"] + ms["dkdv"], ms["fused"]
            times = f"dq and dkdv take {apart:g} ms, fused {one:g} ms: {apart / one:.2f} times as fast"
            lines.append(f"{' '.join(call)}: {times}")
    if lines:
        lines.append(
            'fused serves calls with kernel_options={"FUSED_BACKWARD": True}; it adds up in any order, and '
            "bits differ from run to run"
        )
    return lines
