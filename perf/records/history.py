"""Histories of measurements: files of self-contained JSON lines, to which several runs may append.

A line of kind "case" is one measurement of one case, a `Point`; lines of other kinds, of older versions, are
skipped. A reader returns every valid line and reports every broken one.
"""

from __future__ import annotations

import datetime
import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import click

from tritoncp.core.files import parse_json
from tritoncp.perf.exit_codes import InputError
from tritoncp.perf.progress import Progress

VERSION = 1
OURS = "tritoncp"
# Family of baselines -> contender that needs a time; without it, the family counts as untuned.
TUNED = {"flex": "flex max-autotune"}
# First words of the tag "pass" of host cases, which are timed on a CPU that others may use too
HOST_PASSES = ("mask", "plan", "call", "cpu")
# Attributes that may differ between the points of a series, and may be the cause of a change.
ATTRIBUTES = ("commit", "tritoncp", "torch", "triton", "ptxas", "driver", "cuda", "cudnn", "python")


class Series(NamedTuple):
    """A series: device, power limit and clocks. Times of a case are comparable only within a series."""

    device: str
    power_limit: str = ""
    clocks: str = ""

    def __str__(self) -> str:
        """
        >>> str(Series("NVIDIA H200", "700.00 W", "default"))
        'NVIDIA H200, 700.00 W, clocks default'
        """
        parts = [self.device, self.power_limit, self.clocks and f"clocks {self.clocks}"]
        return ", ".join(part for part in parts if part)


class BrokenLine(NamedTuple):
    """An invalid line of a history: its file, number and error."""

    path: Path
    line: int
    why: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.why}; skipped"


@dataclass(frozen=True)
class Point:
    """One measurement of one case.

    run, time:  identifier of the run, and time of the measurement (ISO 8601, UTC)
    env:        ATTRIBUTES and other facts about the machine
    contenders: by name ("tritoncp", "flex tma", ...) either figures (ms, low, high = median and quartiles;
                optionally samples, host_ms, setup_s, peak_bytes, tflops) or {"why": reason of the failure};
                peak_bytes are those of the device, and of the host for masks and plans
    tags:       mask, pass, dtype, shape, model, ranks
    work:       flops, wire_bytes
    state:      clock, power and temperature after the rounds; goal: min speedups worth shipping
    """

    run: str
    time: str
    case: str
    series: Series
    env: dict[str, Any]
    contenders: dict[str, dict[str, Any]]
    tags: dict[str, str] = field(default_factory=dict)
    work: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    goal: dict[str, float] = field(default_factory=dict)

    @property
    def own(self) -> dict[str, Any]:
        """The figures of tritoncp, or {"why": reason of the failure}."""
        return self.contenders.get(OURS) or {"why": "tritoncp did not take part"}

    @property
    def ms(self) -> float | None:
        """The median time of tritoncp; None if it failed."""
        return self.own.get("ms")

    @property
    def on_host(self) -> bool:
        """Whether it is the time of a host case."""
        return self.tags.get("pass", "").split(" ")[0] in HOST_PASSES

    def baselines(self) -> dict[str, float]:
        """Return the best median of each family of baselines. Untuned families, which have no time of the
        contender in TUNED, are left out, since ratios to them would be misleading.

        >>> figures = {"tritoncp": {"ms": 2.0}, "flex": {"ms": 4.0}, "cudnn": {"ms": 1.5}, "x": {"why": ""}}
        >>> Point("r", "t", "c", Series("d"), {}, figures).baselines()
        {'cudnn': 1.5}
        >>> Point("r", "t", "c", Series("d"), {}, figures | {"flex max-autotune": {"ms": 3.0}}).baselines()
        {'flex': 3.0, 'cudnn': 1.5}
        """
        best = self.best_of_families()
        untuned = {family for family, name in TUNED.items() if "ms" not in self.contenders.get(name, {})}
        return {family: ms for family, ms in best.items() if family not in untuned}

    def best_of_families(self) -> dict[str, float]:
        """Return the best median of each family of baselines (the first word of a contender's name)."""
        best: dict[str, float] = {}
        for name, figures in self.contenders.items():
            family = name.split()[0]
            if family != OURS and "ms" in figures:
                best[family] = min(figures["ms"], best.get(family, figures["ms"]))
        return best

    def speedups(self) -> dict[str, float]:
        """Return the best time of each tuned family over tritoncp's; empty if tritoncp failed."""
        return {name: ms / self.ms for name, ms in self.baselines().items()} if self.ms else {}

    @property
    def worst(self) -> float | None:
        """The worst speedup over its goal; without goals the worst speedup; None if tritoncp failed or no
        baseline was timed.

        >>> contenders = {"tritoncp": {"ms": 2.0}, "cudnn": {"ms": 3.0}, "flash": {"ms": 1.8}}
        >>> Point("r", "t", "c", Series("d"), {}, contenders, goal={"cudnn": 1.2}).worst
        1.25
        """
        speedups = self.speedups()
        of_goals = [speedups[name] / goal for name, goal in self.goal.items() if name in speedups]
        return min(of_goals or speedups.values(), default=None)

    def as_line(self) -> dict[str, Any]:
        """Return the line of JSON, without empty fields."""
        line = {"v": VERSION, "kind": "case", **vars(self), "series": self.series._asdict()}
        return {name: value for name, value in line.items() if value not in ({}, "")}


@dataclass(frozen=True)
class History:
    """The points of history files, in the order of files and lines, and their broken lines."""

    points: list[Point]
    problems: list[BrokenLine]


def variant(options: Mapping[str, Any]) -> str:
    """Return the contender name of tritoncp with kernel options.

    >>> variant({"ROUTE": "gluon", "num_stages": 3})
    'tritoncp ROUTE=gluon num_stages=3'
    """
    return " ".join([OURS, *(f"{name}={value}" for name, value in options.items())])


def append(path: Path, line: dict[str, Any]) -> None:
    """Append one line to a file atomically, under a lock against concurrent writers.

    An incomplete line of an earlier writer is ended first. Raises InputError if there is no space.
    """
    text = json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
    file, num_written = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644), 0
    try:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed or the process dies
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            text = b"\n" + text
        while num_written < len(text):
            num_written += os.write(file, text[num_written:])
    except OSError as error:
        if num_written:
            os.ftruncate(file, size)
        raise InputError(
            f"{path}: {error.strerror}. All earlier lines are complete; make room (or name another file with "
            "--out) and run again with --resume"
        ) from error
    finally:
        os.close(file)


def files(places: Iterable[Path]) -> list[Path]:
    """List files, and the .jsonl and .json files in folders, by name.

    Raises FileNotFoundError for a missing path, OSError for a device, which may be endless.
    """
    paths: list[Path] = []
    for place in places:
        if not place.exists():
            raise FileNotFoundError(
                f"{place} does not exist: name a history file, or a folder of *.jsonl files"
            )
        if place.is_dir():
            paths += sorted(path for path in place.glob("*.json*") if is_history(path) and not path.is_dir())
        elif place.is_char_device() or place.is_block_device():
            raise OSError(f"{place} is a device: name a history file, or a folder of *.jsonl files")
        else:
            paths.append(place)
    return paths


def is_history(path: Path) -> bool:
    """Return whether a file's name is the name of a history, or of a file that `pytest --benchmark-autosave`
    writes."""
    return path.suffix == ".jsonl" or (path.suffix == ".json" and path.name[:4].isdigit())


def benchmark_points(saved: dict[str, Any]) -> list[Point]:
    """Make the points of a file of pytest-benchmark: one for each benchmark, whose case is its full name.

    Raises KeyError, TypeError, ValueError or AttributeError for another file.
    """
    commit, machine = saved["commit_info"], saved["machine_info"]
    revision = str(commit["id"]) + "+" * bool(commit.get("dirty"))
    env = {"commit": revision, "python": machine["python_version"]}
    series = Series(str(machine.get("cpu", {}).get("brand_raw") or machine["machine"]))
    points = []
    for benchmark in saved["benchmarks"]:
        stats = benchmark["stats"]
        times = {"ms": stats["median"], "low": stats["q1"], "high": stats["q3"]}
        figures = {name: 1000 * seconds for name, seconds in times.items()}
        if stats.get("data"):
            figures["samples"] = [1000 * seconds for seconds in stats["data"]]
        line = {
            "run": saved["datetime"],
            "time": saved["datetime"],
            "case": benchmark["fullname"],
            "env": env,
        }
        points.append(point_of({**line, "series": series._asdict(), "contenders": {OURS: figures}}))
    return points


def read(*places: Path) -> History:
    """Read history files and folders. Broken lines are listed in the result, and never raise. A .json file is
    one of pytest-benchmark.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "a.jsonl")
    >>> append(path, Point("r", "2026-01-01", "c", Series("GPU"), {}, {"tritoncp": {"ms": 1.5}}).as_line())
    >>> _ = path.open("a").write('{"kind": "case", "ru')
    >>> history = read(path)
    >>> history.points[0].ms, history.problems[0].why
    (1.5, 'the line is cut off after 20 characters')
    """
    history = History([], [])
    for path in files(places):
        if path.suffix == ".json":
            try:
                history.points.extend(benchmark_points(parse_json(path.read_bytes())))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                why = f"no file of pytest-benchmark: {type(error).__name__}: {error}"
                history.problems.append(BrokenLine(path, 1, why))
            continue
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                point = _parse_line(text) if text.strip() else None
                if isinstance(point, Point):
                    history.points.append(point)
                elif point is not None:
                    history.problems.append(BrokenLine(path, number, point))
    return history


def _parse_line(text: bytes) -> Point | str | None:
    """Return the point of a line, None if it is of another kind, or an error message."""
    try:
        line = parse_json(text)
    except ValueError as error:  # includes UnicodeDecodeError
        if text.endswith(b"\n"):
            return f"not JSON: {error}"
        return f"the line is cut off after {len(text)} characters"
    if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
        return 'not a line of a history: it has no "kind"'
    if line["kind"] != "case":
        return None
    if line.get("v") != VERSION:
        return f"written in version {line.get('v')!r} of the format; this tritoncp reads version {VERSION}"
    try:
        return point_of(line)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return f"not a measurement: {type(error).__name__}: {error}"


def point_of(line: dict[str, Any]) -> Point:
    """Make a Point from a line of kind "case". Raises KeyError, TypeError, ValueError or AttributeError for
    an invalid line."""
    for kind, names in ((str, ("run", "time", "case")), (dict, ("env", "tags", "work", "state", "goal"))):
        for name in names:
            if not isinstance(line[name] if kind is str else line.get(name, {}), kind):
                raise TypeError(f"{name} is no {'text' if kind is str else 'object'}")
    for name, figures in line["contenders"].items():
        times = [figures[key] for key in ("ms", "low", "high") if key in figures]
        if not times and not isinstance(figures.get("why"), str):
            raise KeyError(f"{name} has neither ms nor why")
        if not all(type(x) in (int, float) and x > 0 for x in [*times, *figures.get("samples", ())]):
            raise ValueError(f"the times of {name} are not positive")
    fields = {name: line[name] for name in Point.__dataclass_fields__ if name in line}
    return Point(**{"env": {}} | fields | {"series": Series(**line["series"])})


@dataclass
class Journal:
    """Writer of one run's points, each as soon as it is measured.

    as_json:  whether points are printed as JSON, too
    left_out: names of cases for which there was no time
    """

    path: Path
    run: str
    series: Series
    env: dict[str, Any]
    progress: Progress = field(default_factory=lambda: Progress(shown=False))
    as_json: bool = False
    points: list[Point] = field(default_factory=list)
    left_out: set[str] = field(default_factory=set)

    def leave_out(self, case: str) -> None:
        """Note a case for which there was no time."""
        self.left_out.add(case)
        self.progress.show(f"{case:<32} left out: the time budget is used up", measured=True)

    def point(self, case: str, contenders: dict[str, dict[str, Any]], **parts: Any) -> None:
        """Write the figures of a case. Raises InputError if there is no space."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        point = Point(self.run, now, case, self.series, self.env, contenders, **parts)
        self.points.append(point)
        append(self.path, line := point.as_line())
        if self.as_json:
            click.echo(json.dumps(line, ensure_ascii=False))
        took = f"{point.ms:>8.4g} ms" if point.ms else f"failed: {point.own['why']}"
        self.progress.show(f"{case:<32} {took}", measured=True)


def find_unfinished(folder: Path, series: Series, env: dict[str, Any]) -> tuple[Path, list[Point]] | None:
    """Return (file, points) of the newest run with the same code, versions and device; None without one."""
    newest: tuple[Path, list[Point]] | None = None
    identity = ("sources", *ATTRIBUTES[1:])  # equal sources under another commit are the same code
    for path in files([folder]) if folder.exists() else ():
        runs: dict[str, list[Point]] = {}
        for point in read(path).points:
            is_same = all(point.env.get(name) == env.get(name) for name in identity)
            if point.series == series and is_same:
                runs.setdefault(point.run, []).append(point)
        for points in runs.values():
            if newest is None or points[-1].time >= newest[1][-1].time:
                newest = path, points
    return newest
