"""A run of `tritoncp autotune`: what was asked for, what is shown, what is written."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tritoncp import tuned
from tritoncp.kernels.configs import family
from tritoncp.offline import Job, compile_all
from tritoncp.tune.journal import Journal
from tritoncp.tune.search import Bench, Choice, Tally, Tuner
from tritoncp.tune.targets import MASKS, Target, candidates


def entry_of(target: Target, choice: Choice) -> dict[str, Any]:
    """A choice as files hold it. A rule that nothing beats is kept too: it has been measured."""
    about = {"kernel": target.kernel, "dtype": target.dtype, "head_dim": target.head_dim}
    shape = f"{target.heads}x{target.kv_heads},{target.head_dim},{target.seq}"
    times = {"ms": round(choice.ms, 5), "rule_ms": round(choice.rule_ms, 5)}
    return {**about, "mask": MASKS[target.mask][0], "config": asdict(choice.config), **times, "shape": shape}


def seconds(text: str) -> float:
    """
    >>> seconds("15m"), seconds("90s"), seconds("1.5h"), seconds("20")
    (900.0, 90.0, 5400.0, 20.0)
    """
    unit = {"s": 1, "m": 60, "h": 3600}.get(text[-1:])
    try:
        found = float(text[:-1]) * unit if unit else float(text)
    except ValueError as error:
        raise ValueError(f"budget {text!r} is no time: 90s, 15m, 1.5h") from error
    if not 0 < found < float("inf"):
        raise ValueError(f"budget {text!r} is no time to work in")
    return found


class Screen:
    """A bar on a terminal, lines elsewhere (one for each target and each twentieth candidate)."""

    def __init__(self, total: int, console: Any) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        text = TextColumn(
            "{task.fields[target]}  tried {task.completed} pruned {task.fields[pruned]} failed "
            "{task.fields[failed]} best {task.fields[best]}"
        )
        self._console = console
        self._bar = Progress(
            BarColumn(), text, TimeElapsedColumn(), console=console, disable=not console.is_terminal
        )
        self._task = self._bar.add_task("", total=total, target="", pruned=0, failed=0, best="–")
        self._step, self._said = ("", -1), "nothing tried"

    def __enter__(self) -> Screen:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()
        self._say()

    def __call__(self, tally: Tally) -> None:
        shown: dict[str, Any] = {
            "target": tally.target,
            "pruned": tally.pruned,
            "failed": tally.failed,
            "best": tally.best or "–",
        }
        self._bar.update(self._task, completed=tally.tried, **shown)
        self._said = f"{tally.target}: tried {tally.tried}, pruned {tally.pruned}, failed {tally.failed}, "
        self._said += f"best {tally.best or '–'}"
        step = (tally.target + tally.best, tally.tried // 20)
        if step != self._step:
            self._step = step
            self._say()

    def _say(self) -> None:
        if not self._console.is_terminal:
            self._console.print(self._said, markup=False, highlight=False)


@dataclass(frozen=True)
class Request:
    """What the command was asked for. ``arch`` without a GPU: the static stage alone."""

    wanted: tuple[Target, ...]
    device: tuned.Device
    static: bool
    budget: float
    resume: bool
    folder: Path
    processes: int | None
    timeout: float

    @property
    def journal(self) -> Path:
        return tuned.path_in(self.folder, self.device).with_suffix(".jsonl")

    @property
    def about(self) -> dict[str, Any]:
        """Under what conditions findings may be taken over."""
        import triton

        from tritoncp.perf.machine import sources

        code = sources(Path(tuned.__file__).parent)
        return {
            "device": self.device.name,
            "arch": self.device.arch,
            "triton": triton.__version__,
            "code": code,
        }


def request(
    wanted: Sequence[Target],
    arch: str | None,
    budget: str,
    resume: bool,
    folder: Path | None,
    processes: int | None,
    timeout: float,
) -> Request:
    """What the command's words mean here.  Without ``arch`` a GPU is needed: RuntimeError where there is
    none."""
    if arch is not None:
        family(arch)  # ValueError for what is no architecture
        device = tuned.Device(arch, "offline")
    elif torch.cuda.is_available():
        device = tuned.device_of(torch.device("cuda", torch.cuda.current_device()))
    else:
        raise RuntimeError(
            "torch finds no GPU here, and only a GPU can say how fast a kernel is; --target sm_90 compiles "
            "the candidates and shows their bounds without one"
        )
    found = folder or next((one for one in tuned.folders() if one != tuned.SHIPPED), tuned.user_folder())
    if found is None:
        raise RuntimeError(
            "platformdirs, which knows the folder for configurations, is not installed: name one with --out, "
            "or in TRITONCP_CONFIG_DIR"
        )
    return Request(
        tuple(wanted), device, arch is not None, seconds(budget), resume, found, processes, timeout
    )


class Found(NamedTuple):
    """For each target the config that was chosen or, statically, the survivors; whether Ctrl-C ended it."""

    rows: list[dict[str, Any]]
    interrupted: bool


def autotune(request: Request, console: Any, bench: Bench | None = None) -> Found:
    """Tune what was asked for, writing each choice when it is made: an interrupt loses nothing."""
    journal = Journal(request.journal, request.about, request.resume)
    total = sum(len(candidates(target, request.device.arch)) for target in request.wanted)
    rows: list[dict[str, Any]] = []

    def keep(target: Target, choice: Choice) -> None:
        entry = entry_of(target, choice)
        rows.append(entry | {"gain": round(choice.gain, 3)})
        tuned.write(request.folder, request.device, [entry], {"code": request.about["code"]})

    def compiled(jobs: list[Job]) -> Generator[tuple[Job, dict[str, Any]]]:
        if jobs:
            yield from compile_all(jobs, request.processes, request.timeout)

    deadline = time.monotonic() + request.budget
    with Screen(total, console) as screen:
        arch = request.device.arch
        tuner = Tuner(arch, journal, compiled, deadline, keep, tally=Tally(show=screen))
        try:
            if request.static:
                for target in request.wanted:
                    alive = tuner.static(target)
                    rows += [{"target": target.name, "config": asdict(c), **found} for c, found in alive]
            else:
                tuner.run(request.wanted, bench or _device_bench())
        except KeyboardInterrupt:
            return Found(rows, True)
        finally:
            journal.close()
    return Found(rows, False)


def _device_bench() -> Bench:
    from tritoncp.tune.bench import DeviceBench

    return DeviceBench(torch.device("cuda", torch.cuda.current_device()))


def show(found: Found, static: bool, console: Any) -> None:
    """The rows as a table."""
    from rich.table import Table

    from tritoncp.inspect import tiles

    looks: dict[str, Any] = {"box": None, "padding": (0, 2, 0, 0)}
    if static:
        table = Table("kernel", "tiles", "regs", "shared", "TMA", "bound", "limited by", **looks)
        for row in found.rows:
            bound = f"{row['bound']:.0%}" if row.get("bound") is not None else "–"
            sizes = [str(row[name]) for name in ("registers", "shared_bytes", "tma")]
            table.add_row(row["target"], tiles(row["config"]), *sizes, bound, row.get("limit", "–"))
    else:
        table = Table("kernel", "mask", "D", "tiles", "ms", "rule ms", "gain", **looks)
        for row in found.rows:
            about = row["kernel"], row["mask"], str(row["head_dim"]), tiles(row["config"])
            table.add_row(*about, str(row["ms"]), str(row["rule_ms"]), f"{row['gain']:.2f}")
    console.print(table)
