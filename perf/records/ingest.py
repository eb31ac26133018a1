"""`tritoncp perf ingest`: adds the results of `make gpu` in a folder to the repository.

Lines of histories are added to a history that does not hold them yet. Tile shapes and routes that beat the
rule are shipped from the files that `tritoncp autotune` wrote: it writes only checked answers, with the time
of the rule beside theirs. Lines and entries that cannot be used are named and left out.
"""

from __future__ import annotations

import datetime
import math
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tritoncp.core.checked_json import read_json
from tritoncp.core.paths import HISTORY_FILE, checked_name, path_inside
from tritoncp.ops import tile_tables
from tritoncp.ops.tile_tables import Device
from tritoncp.perf.records.history import Problem, files, merge, parse_lines, same_line

KINDS = ("case", "left out", "resources")
DAY = 86400.0  # seconds by which the clocks of two machines may differ
Entry = dict[str, Any]
Target = tuple[Device, str]  # a device, and the version of Triton


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
    for names that are not allowed in file names, and where a link leads out of ``history`` or ``configs``.
    """
    lines, tables = sorted(folder.glob("*.jsonl")), sorted((folder / "configs").glob("*/*.json"))
    if not lines and not tables:
        raise FileNotFoundError(f"{folder} holds no *.jsonl and no configs/*/*.json: no results of make gpu")
    for path in (*lines, *tables):
        _check_plain(path, folder)
    problems: list[Problem] = []
    good = {_history_file(history, path): list(_read_valid_lines(path, problems)) for path in lines}
    measured: dict[Target, dict[tuple[Any, ...], Entry]] = defaultdict(dict)
    for path in tables:
        for target, entry in _read_valid_entries(path, problems):
            key = tile_tables.entry_key(entry)
            if _time_of(measured[target].get(key)) <= entry["time"]:
                measured[target][key] = entry
    places = {target: _config_file(configs, *target) for target in measured}
    counts = [_append_lines(path, rows) for path, rows in good.items()]
    shipped = {}
    for (device, triton), entries in measured.items():
        path = places[device, triton]
        try:
            changes = _ship(entries, configs, device, triton)
        except (ValueError, RecursionError) as error:
            problems.append(Problem(path, 1, f"{error}; mend or remove it, and ingest again"))
            continue
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


# -- tile shapes ---------------------------------------------------------------------------------------------


def _read_valid_entries(path: Path, problems: list[Problem]) -> Iterator[tuple[Target, Entry]]:
    """Yield the entries of a file of `tritoncp autotune` with its time and code; report those without times
    as problems. Raises Refused for an architecture or a version that may not be part of a file name."""
    try:
        header, entries = read_json(path), tile_tables.read(path)
        names = [header[name] for name in ("device", "arch", "triton", "code")]
        if not all(isinstance(name, str) and name for name in names):
            raise ValueError("device, arch, triton and code have to be text")
        when = _parse_utc(header["time"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        problems.append(Problem(path, 1, f"{type(error).__name__}: {error}"))
        return
    device, triton = Device(names[1], names[0]), names[2]
    _config_file(path.parent, device, triton)
    for number, entry in enumerate(entries, 2):
        times = entry.get("ms", 0), entry.get("rule_ms", 0)
        if all(type(x) in (int, float) and 0 < x < math.inf for x in times):
            yield (device, triton), {**entry, "time": when, "code": names[3]}
        else:
            problems.append(Problem(path, number, "ms and rule_ms are not two positive numbers"))


def _parse_utc(text: str) -> str:
    """Convert a time to UTC in ISO 8601. Raises ValueError for a text that is no time, has no zone, or is in
    the future: it would count as the newest for ever."""
    when = datetime.datetime.fromisoformat(text)
    if when.tzinfo is None or when.timestamp() > time.time() + DAY:
        raise ValueError(f"{text!r:.60} is no past time with a zone")
    return when.astimezone(datetime.UTC).isoformat(timespec="seconds")


def _time_of(entry: Entry | None) -> str:
    return str((entry or {}).get("time", ""))


def _ship(
    entries: dict[tuple[Any, ...], Entry], configs: Path, device: Device, triton: str
) -> tuple[int, int]:
    """Write the entries that beat the rule to the shipped file, and remove older ones that no longer do.
    Returns the numbers of both. Raises ValueError for a file that cannot be read, which is then not replaced,
    and the errors of :func:`tile_tables.locked`."""
    path = tile_tables.path_in(configs, device, triton)
    won = {key for key, entry in entries.items() if entry["rule_ms"] / entry["ms"] > tile_tables.MIN_SPEEDUP}
    if not path.exists() and not won:
        return 0, 0
    with tile_tables.locked(path):
        shipped = tile_tables.read(path) if path.exists() else []
        old = {tile_tables.entry_key(entry): entry for entry in shipped}
        newer = {key for key, entry in entries.items() if _time_of(old.get(key)) <= entry["time"]}
        new = [entries[key] for key in entries if key in won & newer and old.get(key) != entries[key]]
        drop = (newer & set(old)) - won
        if new or drop:
            tile_tables.write(configs, device, new, {}, triton, drop)
    return len(new), len(drop)
