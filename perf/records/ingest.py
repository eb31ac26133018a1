"""`tritoncp perf ingest`: adds the results of `make gpu` in a folder to the repository.

Lines of histories are added to a history that does not hold them yet.  Tile shapes that beat the rule are
shipped, if the journal of `tritoncp autotune` (see tritoncp/tuning/journal.py) holds a right answer and times
for them; and forward routes that beat the loops in lines of cases (see route_choices.py).  Unreadable lines
are named and left out.
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

from tritoncp.perf.records.history import Problem, files, merge, parse_lines, same_line
from tritoncp.perf.records.route_choices import DAY, choices_of
from tritoncp.perf.records.schema import finite

from tritoncp.core.checked_json import parse_json
from tritoncp.core.paths import HISTORY_FILE, checked_name, path_inside
from tritoncp.ops import tile_tables
from tritoncp.ops.tile_tables import Device

KINDS = ("case", "left out", "resources")
Config = tuple[tuple[str, Any], ...]  # sorted items


class Choice(NamedTuple):
    """The time of a choice of tiles and its entry; None: the tiles of the rule."""

    time: str
    entry: dict[str, Any] | None


Choices = dict[tuple[Any, ...], Choice]  # by tile_tables.entry_key(entry)


class Ingested(NamedTuple):
    """Numbers of lines added to the history, and present before; files of tile shapes with the numbers of
    entries gained or changed, and lost; problems with lines that were left out."""

    added: int
    present: int
    shipped: dict[Path, tuple[int, int]]
    problems: list[Problem]


class Refused(Exception):
    """Raised where a folder holds a file that `make gpu` never writes: nothing of it is imported."""


def ingest(folder: Path, history: Path, configs: Path) -> Ingested:
    """Import the files of a folder: ``*.jsonl`` into ``history``, wins in ``configs/`` into ``configs``.

    All files are read and all output paths checked before the first write. A second import changes nothing.
    Raises FileNotFoundError where the folder has neither, Refused for links and anything but plain files,
    for names that are not allowed in file names, for journals with lines that no version of tritoncp autotune
    writes (nested deeply, NaN), and where a link leads out of ``history`` or ``configs``.
    """
    lines, journals = sorted(folder.glob("*.jsonl")), sorted((folder / "configs").glob("*/*.jsonl"))
    if not lines and not journals:
        raise FileNotFoundError(f"{folder} holds no *.jsonl and no configs/*/*.jsonl: no results of make gpu")
    for path in (*lines, *journals):
        _check_plain(path, folder)
    problems: list[Problem] = []
    good = {_history_file(history, path): list(_read_valid_lines(path, problems)) for path in lines}
    chosen: dict[tuple[Device, str], Choices] = defaultdict(dict)
    for path in journals:
        for run in runs(path, problems):
            target = Device(run.facts["arch"], run.facts["device"]), run.facts["triton"]
            _update_choices(run, chosen[target], problems)
    for rows in good.values():
        for route in choices_of(rows):
            choice = Choice(route.time, route.entry)
            _update_choice(chosen[route.device, route.triton], route.key, choice)
    places = {target: _config_file(configs, *target) for target in chosen}
    counts = [_append_lines(path, rows) for path, rows in good.items()]
    shipped = {}
    for (device, triton), choices in chosen.items():
        path, changes = places[device, triton], (0, 0)
        try:
            changes = _write_choices(choices, configs, device, triton)
        except (ValueError, RecursionError) as error:
            problems.append(Problem(path, 1, f"{error}; mend or remove it, and ingest again"))
        if any(changes):
            shipped[path] = changes
    added, present = (sum(x) for x in zip(*counts)) if counts else (0, 0)
    return Ingested(added, present, shipped, problems)


def _check_plain(path: Path, folder: Path) -> None:
    """Raise Refused unless a file is a plain file, in folders that are no links."""
    for level in (path, *path.parents):
        if level == folder:
            break
        if level.is_symlink():
            raise Refused(f"{level} is a symbolic link; make gpu leaves none: remove it, and ingest again")
    if not path.is_file():
        raise Refused(f"{path} is no plain file; remove it, and ingest again")


def _history_file(history: Path, source: Path) -> Path:
    """Return the history file for the lines of a file."""
    try:
        name = checked_name(source.name, HISTORY_FILE, "history file", "2026-01-01-nvidia-h200.jsonl")
        path = path_inside(history, history / name)
    except ValueError as error:
        raise Refused(f"{source}: {error}") from error
    if path.exists() and not path.is_file():
        raise Refused(f"{path} is no plain file: nothing can be added to it")
    return path


def _config_file(configs: Path, device: Device, triton: str) -> Path:
    """Return the file for the tile shapes of a device."""
    try:
        return path_inside(configs, tile_tables.path_in(configs, device, triton))
    except ValueError as error:
        raise Refused(str(error)) from error


def _read_valid_lines(path: Path, problems: list[Problem]) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file that belong in a history; report the rest as problems."""
    for number, line in parse_lines(path):
        if isinstance(line, str):
            problems.append(Problem(path, number, line))
        elif line["kind"] not in KINDS:
            problems.append(Problem(path, number, f"no history has lines of kind {line['kind']!r:.40}"))
        else:
            yield line


def _append_lines(path: Path, good: list[dict[str, Any]]) -> tuple[int, int]:
    """Add lines to a file of the history. Returns the numbers added and already present."""
    path.parent.mkdir(parents=True, exist_ok=True)
    siblings = [sibling for sibling in files([path.parent]) if sibling.name != path.name]
    lines = (line for sibling in siblings for _, line in parse_lines(sibling))
    stored = {same_line(line) for line in lines if not isinstance(line, str)}
    added = merge(path, [line for line in good if same_line(line) not in stored])
    return added, len(good) - added


# -- journals ------------------------------------------------------------------------------------------------


@dataclass
class Evidence:
    """The results of a run for one target. wrong: the error in the answer of a config, or None; times:
    milliseconds of configs, by the number of rounds."""

    line: int
    entry: dict[str, Any] = field(default_factory=dict)
    rule: Config = ()
    wrong: dict[Config, str | None] = field(default_factory=dict)
    times: dict[int, dict[Config, float]] = field(default_factory=lambda: defaultdict(dict))

    def choice(self) -> tuple[Config, float, float] | None:
        """Choose among checked configs as tritoncp autotune does: a config, its time, and the rule's time."""
        for turn in sorted(self.times, reverse=True):
            right_times = {
                c: ms for c, ms in self.times[turn].items() if self.wrong.get(c, "unknown") is None
            }
            if self.rule in right_times and len(right_times) > 1:
                fastest = min(right_times, key=right_times.__getitem__)
                won = right_times[self.rule] / right_times[fastest] > tile_tables.MIN_SPEEDUP
                return fastest if won else self.rule, right_times[fastest], right_times[self.rule]
        return None


@dataclass
class Run:
    """A run of tritoncp autotune. facts: device, arch, triton, code; time: when it began."""

    path: Path
    facts: dict[str, str]
    time: float
    targets: dict[str, Evidence] = field(default_factory=dict)


def runs(path: Path, problems: list[Problem]) -> Iterator[Run]:
    """Read the runs in a journal, each as far as it can be read. Raises Refused for a journal that no version
    of tritoncp autotune has written."""
    runs_read: list[Run] = []
    current, orphans = False, []
    for number, text in enumerate(path.read_bytes().splitlines(), 1):
        if not text.strip():
            continue
        try:
            line = _parse_line(path, number, text)
            if line["stage"] == "begin":
                current = False
                runs_read.append(_start_run(path, number, line))
                current = True
            elif current:
                _add_evidence(runs_read[-1], number, line)
            else:
                orphans.append(number)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            detail = f"{type(error).__name__}: {error}"
            problems.append(Problem(path, number, f"not a line of tritoncp autotune: {detail}"))
    if orphans:
        why = f"{len(orphans)} lines from here on belong to a run whose beginning cannot be read"
        problems.append(Problem(path, orphans[0], why))
    yield from runs_read


def _parse_line(path: Path, number: int, text: bytes) -> Any:
    """Parse a line. Raises ValueError for one that is cut off."""
    try:
        line = parse_json(text)
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        raise _refuse_line(path, number, str(error)) from error
    if not finite(line):
        raise _refuse_line(path, number, "a number is NaN or infinite")
    return line


def _refuse_line(path: Path, number: int, why: str) -> Refused:
    return Refused(f"{path}:{number}: {why}; no tritoncp autotune wrote this: remove the file")


def _start_run(path: Path, number: int, line: dict[str, Any]) -> Run:
    """Read the run that a line begins. Raises Refused for an architecture or a Triton version that is not
    allowed in a file name."""
    facts = {name: line["about"][name] for name in ("device", "arch", "triton", "code")}
    if not all(isinstance(value, str) and value for value in facts.values()):
        raise ValueError("device, arch, triton and code have to be text")
    try:
        tile_tables.path_in(Path(), Device(facts["arch"], facts["device"]), facts["triton"])
    except ValueError as error:
        raise Refused(f"{path}:{number}: {error}") from error
    began = _require_positive(line["time"])
    if began > time.time() + DAY:  # its choices would count as the newest for ever
        raise ValueError(f"the run began in the future: {began:g} seconds after 1970")
    return Run(path, facts, began)


def _add_evidence(run: Run, number: int, line: dict[str, Any]) -> None:
    """Add a line to the evidence of a run."""
    stage, name = line["stage"], line["target"]
    if stage == "target":
        tile_tables.check({**line["entry"], "config": line["rule"]})
        evidence = run.targets.setdefault(name, Evidence(number))
        evidence.entry, evidence.rule = line["entry"], _sorted_items(line["rule"])
        return
    config, result = _sorted_items(line["config"]), line["found"]
    hash((name, config))
    if stage == "check":
        if result["wrong"] is not None and not isinstance(result["wrong"], str):
            raise TypeError("wrong is neither null nor a reason")
        run.targets.setdefault(name, Evidence(number)).wrong[config] = result["wrong"]
    elif stage == "time":
        turn, ms = int(line["turn"]), _require_positive(result["ms"])
        run.targets.setdefault(name, Evidence(number)).times[turn][config] = ms
    elif stage not in ("compile", "steps") or not isinstance(result, dict):
        raise ValueError(f"there is no stage {stage!r}")


def _sorted_items(config: dict[str, Any]) -> Config:
    return tuple(sorted(config.items()))


def _require_positive(x: Any) -> float:
    if type(x) not in (int, float) or not 0 < x <= sys.float_info.max:
        raise ValueError(f"{x!r} is no positive number")
    return float(x)


# -- tile shapes ---------------------------------------------------------------------------------------------


def _update_choices(run: Run, choices: Choices, problems: list[Problem]) -> None:
    """Replace the choices of older runs by the choices of a run."""
    when = datetime.datetime.fromtimestamp(run.time, datetime.UTC).isoformat(timespec="seconds")
    for name, evidence in run.targets.items():
        timed = dict.fromkeys(config for times in evidence.times.values() for config in times)
        for config in [config for config in timed if config not in evidence.wrong]:
            why = f"{name}: {dict(config)} was timed, and no line says that its answer is right"
            problems.append(Problem(run.path, evidence.line, why))
        if not evidence.entry:
            problems.append(
                Problem(run.path, evidence.line, f"{name}: the line that describes this target is missing")
            )
            continue
        if (winner := evidence.choice()) is None:
            continue
        config, ms, rule_ms = winner
        evidence_fields = {"ms": ms, "rule_ms": rule_ms, "time": when, "code": run.facts["code"]}
        entry = {**evidence.entry, "config": dict(config), **evidence_fields}
        try:
            tile_tables.check(entry)
        except (ValueError, KeyError, TypeError) as error:
            problems.append(Problem(run.path, evidence.line, f"{name}: {error}"))
            continue
        choice = Choice(when, None if config == evidence.rule else entry)
        _update_choice(choices, tile_tables.entry_key(entry), choice)


def _update_choice(choices: Choices, key: tuple[Any, ...], choice: Choice) -> None:
    """Add a choice, unless there is a newer one."""
    if key not in choices or choices[key].time <= choice.time:
        choices[key] = choice


def _write_choices(choices: Choices, configs: Path, device: Device, triton: str) -> tuple[int, int]:
    """Write the winning entries to the shipped file, and remove older entries that no longer beat the rule.
    Returns the numbers of both. Raises ValueError for a file that cannot be read, which is then not replaced,
    and the errors of :func:`tile_tables.locked`."""
    path = tile_tables.path_in(configs, device, triton)
    if not path.exists() and all(entry is None for _, entry in choices.values()):
        return 0, 0
    with tile_tables.locked(path):
        entries = tile_tables.read(path) if path.exists() else ()
        old = {tile_tables.entry_key(entry): entry for entry in entries}
        times = {key: str(entry.get("time", "")) for key, entry in old.items()}
        newer = {key for key, choice in choices.items() if times.get(key, "") > choice.time}
        new = [
            entry
            for key, (_, entry) in choices.items()
            if entry is not None and key not in newer and not _keeps_route(old.get(key), entry)
        ]
        drop = {key for key, (_, entry) in choices.items() if entry is None} & set(old) - newer
        if new or drop:
            tile_tables.write(configs, device, new, {}, triton, drop)
    return len(new), len(drop)


def _keeps_route(old: dict[str, Any] | None, entry: dict[str, Any]) -> bool:
    """Whether the old entry equals the new one, or has the same route with tuned tiles, which lines of cases
    do not measure."""
    bare = entry["kernel"] == "route" and set(entry["config"]) == {"ROUTE"}
    return old == entry or bool(bare and old and old["config"]["ROUTE"] == entry["config"]["ROUTE"])
