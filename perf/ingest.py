"""`tritoncp perf ingest`: what `make gpu` left in a folder, for keeps.

Lines of histories are added to a history that does not hold them yet.  Tile shapes that beat the rule are
shipped: not what some file claims, but what the journal of `tritoncp autotune` holds a right answer and times
for (tritoncp/tune/journal.py says what is in one).  What cannot be read is named and costs nothing else.
"""

from __future__ import annotations

import datetime
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tritoncp import tuned
from tritoncp.checked_json import parse_json
from tritoncp.paths import HISTORY_FILE, checked_name, path_inside
from tritoncp.perf.lines import finite
from tritoncp.perf.record import Problem, checked, files, merge, same_line
from tritoncp.tuned import Device

DAY = 86400.0  # seconds by which clocks of two machines may differ
KINDS = ("case", "left out", "resources")
Config = tuple[tuple[str, Any], ...]  # sorted items


class Choice(NamedTuple):
    """When tiles were chosen, and the entry about them; None = those of the rule."""

    time: str
    entry: dict[str, Any] | None


Choices = dict[tuple[Any, ...], Choice]  # by what tuned.about says


class Ingested(NamedTuple):
    """Lines that were added to the history and that it held already; files of tile shapes with how many
    entries each has gained or changed, and lost; what was refused."""

    added: int
    known: int
    shipped: dict[Path, tuple[int, int]]
    problems: list[Problem]


class Refused(Exception):
    """What no `make gpu` leaves: nothing of the folder is taken over."""


def ingest(folder: Path, history: Path, configs: Path) -> Ingested:
    """Take over what is in a folder: ``*.jsonl`` into ``history``, wins in ``configs/`` into ``configs``.

    Everything is read and every place to write to is known before anything is written. Doing it again changes
    nothing. Raises FileNotFoundError where there is neither, Refused for links and anything but plain files,
    for names that no file may be called after, for journals with lines that no version of tritoncp autotune
    writes (nested deeply, NaN), and where a link leads out of ``history`` or ``configs``.
    """
    lines, journals = sorted(folder.glob("*.jsonl")), sorted((folder / "configs").glob("*/*.jsonl"))
    if not lines and not journals:
        raise FileNotFoundError(f"{folder} holds no *.jsonl and no configs/*/*.jsonl: nothing of make gpu's")
    for path in (*lines, *journals):
        _check_plain(path, folder)
    problems: list[Problem] = []
    good = {_history_file(history, path): list(_good(path, problems)) for path in lines}
    chosen: dict[tuple[Device, str], Choices] = defaultdict(dict)
    for path in journals:
        for run in runs(path, problems):
            of = Device(run.about["arch"], run.about["device"]), run.about["triton"]
            _choose(run, chosen[of], problems)
    places = {of: _config_file(configs, *of) for of in chosen}
    counts = [_keep(path, found) for path, found in good.items()]
    shipped = {}
    for (device, triton), choices in chosen.items():
        path, changes = places[device, triton], (0, 0)
        try:
            changes = _shipped(choices, configs, device, triton)
        except (ValueError, RecursionError) as error:
            problems.append(Problem(path, 1, f"{error}; mend or remove it, and ingest again"))
        if any(changes):
            shipped[path] = changes
    added, known = (sum(x) for x in zip(*counts)) if counts else (0, 0)
    return Ingested(added, known, shipped, problems)


def _check_plain(path: Path, folder: Path) -> None:
    """Raises Refused unless a file is a plain one, in folders that are no links."""
    for level in (path, *path.parents):
        if level == folder:
            break
        if level.is_symlink():
            raise Refused(f"{level} is a symbolic link; make gpu leaves none: remove it, and ingest again")
    if not path.is_file():
        raise Refused(f"{path} is no plain file; remove it, and ingest again")


def _history_file(history: Path, source: Path) -> Path:
    """Where the lines of a file go."""
    try:
        name = checked_name(source.name, HISTORY_FILE, "history file", "2026-01-01-nvidia-h200.jsonl")
        path = path_inside(history, history / name)
    except ValueError as error:
        raise Refused(f"{source}: {error}") from error
    if path.exists() and not path.is_file():
        raise Refused(f"{path} is no plain file: nothing can be added to it")
    return path


def _config_file(configs: Path, device: Device, triton: str) -> Path:
    """Where the tile shapes of a device go."""
    try:
        return path_inside(configs, tuned.path_in(configs, device, triton))
    except ValueError as error:
        raise Refused(str(error)) from error


def _good(path: Path, problems: list[Problem]) -> Iterator[dict[str, Any]]:
    """The lines of one file that a history holds."""
    for number, line in checked(path):
        if isinstance(line, str):
            problems.append(Problem(path, number, line))
        elif line["kind"] not in KINDS:
            problems.append(Problem(path, number, f"no history has lines of kind {line['kind']!r:.40}"))
        else:
            yield line


def _keep(path: Path, good: list[dict[str, Any]]) -> tuple[int, int]:
    """Add lines to a file of the history; how many were added, and how many were there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    others = [other for other in files([path.parent]) if other.name != path.name]
    lines = (line for other in others for _, line in checked(other))
    elsewhere = {same_line(line) for line in lines if not isinstance(line, str)}
    added = merge(path, [line for line in good if same_line(line) not in elsewhere])
    return added, len(good) - added


# -- journals ------------------------------------------------------------------------------------------------


@dataclass
class Evidence:
    """What a run found out about one target. wrong: why the answer of a config is not to be trusted, or None;
    times: milliseconds of configs, by how many rounds they were taken in."""

    line: int
    entry: dict[str, Any] = field(default_factory=dict)
    rule: Config = ()
    wrong: dict[Config, str | None] = field(default_factory=dict)
    times: dict[int, dict[Config, float]] = field(default_factory=lambda: defaultdict(dict))

    def choice(self) -> tuple[Config, float, float] | None:
        """As tritoncp autotune chooses, among what was checked: a config, its time, and the rule's."""
        for turn in sorted(self.times, reverse=True):
            right = {c: ms for c, ms in self.times[turn].items() if self.wrong.get(c, "unknown") is None}
            if self.rule in right and len(right) > 1:
                fastest = min(right, key=right.__getitem__)
                won = right[self.rule] / right[fastest] > tuned.WIN
                return fastest if won else self.rule, right[fastest], right[self.rule]
        return None

    def unchecked(self) -> list[Config]:
        """Configs that were timed and that nothing is said about."""
        timed = dict.fromkeys(c for taken in self.times.values() for c in taken)
        return [config for config in timed if config not in self.wrong]


@dataclass
class Run:
    """A run of tritoncp autotune. about: device, arch, triton, code; time: when it began."""

    path: Path
    about: dict[str, str]
    time: float
    targets: dict[str, Evidence] = field(default_factory=dict)


def runs(path: Path, problems: list[Problem]) -> Iterator[Run]:
    """The runs in a journal, each as far as it can be read. Raises Refused for a journal that no version of
    tritoncp autotune has written."""
    found: list[Run] = []
    current, orphans = False, []
    for number, text in enumerate(path.read_bytes().splitlines(), 1):
        if not text.strip():
            continue
        try:
            line = _line(path, number, text)
            if line["stage"] == "begin":
                current = False
                found.append(_begun(path, number, line))
                current = True
            elif current:
                _read(found[-1], number, line)
            else:
                orphans.append(number)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"{type(error).__name__}: {error}"
            problems.append(Problem(path, number, f"not a line of tritoncp autotune: {what}"))
    if orphans:
        why = f"{len(orphans)} lines from here on belong to a run whose beginning cannot be read"
        problems.append(Problem(path, orphans[0], why))
    yield from found


def _line(path: Path, number: int, text: bytes) -> Any:
    """What a line holds. Raises ValueError for one that is cut off."""
    try:
        line = parse_json(text)
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        raise _foreign(path, number, str(error)) from error
    if not finite(line):
        raise _foreign(path, number, "a number is NaN or infinite")
    return line


def _foreign(path: Path, number: int, why: str) -> Refused:
    return Refused(f"{path}:{number}: {why}; no tritoncp autotune wrote this: remove the file")


def _begun(path: Path, number: int, line: dict[str, Any]) -> Run:
    """The run that a line begins. Raises Refused for an architecture or a Triton that no file may be called
    after."""
    about = {name: line["about"][name] for name in ("device", "arch", "triton", "code")}
    if not all(isinstance(value, str) and value for value in about.values()):
        raise ValueError("device, arch, triton and code have to be text")
    try:
        tuned.path_in(Path(), Device(about["arch"], about["device"]), about["triton"])
    except ValueError as error:
        raise Refused(f"{path}:{number}: {error}") from error
    began = _positive(line["time"])
    if began > time.time() + DAY:  # what it says would count as newest for ever
        raise ValueError(f"the run began in the future: {began:g} seconds after 1970")
    return Run(path, about, began)


def _read(run: Run, number: int, line: dict[str, Any]) -> None:
    """One line into the evidence."""
    stage, name = line["stage"], line["target"]
    if stage == "target":
        tuned.check({**line["entry"], "config": line["rule"]})
        of = run.targets.setdefault(name, Evidence(number))
        of.entry, of.rule = line["entry"], _items(line["rule"])
        return
    config, found = _items(line["config"]), line["found"]
    hash((name, config))
    if stage == "check":
        if found["wrong"] is not None and not isinstance(found["wrong"], str):
            raise TypeError("wrong is neither null nor a reason")
        run.targets.setdefault(name, Evidence(number)).wrong[config] = found["wrong"]
    elif stage == "time":
        turn, ms = int(line["turn"]), _positive(found["ms"])
        run.targets.setdefault(name, Evidence(number)).times[turn][config] = ms
    elif stage not in ("compile", "steps") or not isinstance(found, dict):
        raise ValueError(f"there is no stage {stage!r}")


def _items(config: dict[str, Any]) -> Config:
    return tuple(sorted(config.items()))


def _positive(x: Any) -> float:
    if type(x) not in (int, float) or not 0 < x <= sys.float_info.max:
        raise ValueError(f"{x!r} is no positive number")
    return float(x)


# -- tile shapes ---------------------------------------------------------------------------------------------


def _choose(run: Run, choices: Choices, problems: list[Problem]) -> None:
    """Put what a run chose in place of what older ones did."""
    when = datetime.datetime.fromtimestamp(run.time, datetime.UTC).isoformat(timespec="seconds")
    for name, of in run.targets.items():
        for config in of.unchecked():
            why = f"{name}: {dict(config)} was timed, and no line says that its answer is right"
            problems.append(Problem(run.path, of.line, why))
        if not of.entry:
            problems.append(Problem(run.path, of.line, f"{name}: the line that says what it is is not there"))
            continue
        if (choice := of.choice()) is None:
            continue
        config, ms, rule_ms = choice
        took = {"ms": ms, "rule_ms": rule_ms, "time": when, "code": run.about["code"]}
        entry = {**of.entry, "config": dict(config), **took}
        try:
            tuned.check(entry)
        except (ValueError, KeyError, TypeError) as error:
            problems.append(Problem(run.path, of.line, f"{name}: {error}"))
            continue
        about = tuned.about(entry)
        if about not in choices or choices[about].time <= when:
            choices[about] = Choice(when, None if config == of.rule else entry)


def _shipped(choices: Choices, configs: Path, device: Device, triton: str) -> tuple[int, int]:
    """Put wins where calls look for what is shipped, and take away what is no better than the rule any more,
    unless what is there is newer; how many of each. Raises ValueError where there is what cannot be read."""
    old = _held(tuned.path_in(configs, device, triton))
    times = {about: str(entry.get("time", "")) for about, entry in old.items()}
    newer = {about for about, choice in choices.items() if times.get(about, "") > choice.time}
    fresh = [
        entry
        for about, (_, entry) in choices.items()
        if entry is not None and about not in newer and old.get(about) != entry
    ]
    drop = {about for about, (_, entry) in choices.items() if entry is None} & set(old) - newer
    if fresh or drop:
        tuned.write(configs, device, fresh, {}, triton, drop)
    return len(fresh), len(drop)


def _held(path: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """What a file of tile shapes holds. Raises ValueError for one that cannot be read: it is not ours to
    replace."""
    return {tuned.about(entry): entry for entry in tuned.read(path)} if path.exists() else {}
