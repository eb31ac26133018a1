"""The journal of a tuning run: its findings, so that a resumed run need not repeat them and a choice can be
traced to its measurements.

A line each, in JSON, appended at once; "stage" names its kind:

    begin                         about: device, arch, triton and code; time (seconds since 1970)
    target                        target: its name; entry: the key of calls; rule: the config of the rule
    compile, steps, check, time   target, config, turn (of time: number of rounds) and found, the finding
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from tritoncp.core.checked_json import parse_json, read_bounded
from tritoncp.kernels.tile_rules import Config
from tritoncp.tuning.targets import Target

MAX_BYTES = 1 << 30  # of a journal: three million findings


class Journal:
    """An append-only file of findings. With ``resume`` the findings of the last run under the same
    ``conditions`` are valid; otherwise a run begins anew, below the old lines. Without a path the findings
    are not written.

    Raises RuntimeError while another process writes to the file, OSError and ValueError for a path that is no
    file to write to.
    """

    def __init__(self, path: Path | None, conditions: dict[str, Any], resume: bool) -> None:
        self._findings: dict[str, dict[str, Any]] = {}
        self._file: BinaryIO | None = None
        if path is not None:
            self._open(path, conditions, resume)

    def _open(self, path: Path, conditions: dict[str, Any], resume: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK  # a pipe would wait for a reader
        self._file = file = os.fdopen(os.open(path, flags, 0o666), "ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # let go when the process ends, however
        except BlockingIOError as error:
            file.close()
            raise RuntimeError(
                f"another tritoncp autotune writes to {path}; wait for it, or name another folder with --out"
            ) from error
        try:
            text = read_bounded(path, MAX_BYTES)
        except (OSError, ValueError):
            file.close()
            raise
        current = False
        for line in text.splitlines():
            entry = _entry(line)
            if entry.get("stage") == "begin":
                current = resume and entry.get("about") == conditions
                self._findings = {}
            elif current and "target" in entry:
                self._findings[_key(entry)] = entry.get("found", entry)
        if text and not text.endswith(b"\n"):
            file.write(b"\n")
        if not current:
            self._append({"stage": "begin", "about": conditions, "time": time.time()})

    def begin(self, target: Target, rule: Config) -> None:
        """Write down the target of the findings that follow."""
        line = {"stage": "target", "target": target.name, "entry": target.entry, "rule": asdict(rule)}
        if _key(line) not in self._findings:
            self._findings[_key(line)] = line
            self._append(line)

    def finding(self, stage: str, target: Target, config: Config, turn: int = 0) -> dict[str, Any] | None:
        return self._findings.get(_key(_finding_key(stage, target, config, turn)))

    def add(self, stage: str, target: Target, config: Config, finding: dict[str, Any], turn: int = 0) -> None:
        line = _finding_key(stage, target, config, turn)
        self._findings[_key(line)] = finding
        self._append(line | {"found": finding})

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _append(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line).encode() + b"\n")
            self._file.flush()


def _entry(line: bytes) -> dict[str, Any]:
    """Parse a line; empty for a line that was cut off or is none of a journal."""
    try:
        entry = parse_json(line)
    except ValueError:
        return {}
    is_entry = isinstance(entry, dict) and (entry.get("stage") == "begin" or _is_finding(entry))
    return entry if is_entry else {}


def _is_finding(entry: dict[str, Any]) -> bool:
    """Whether a line has the fields of its stage."""
    stage, finding = entry.get("stage"), entry.get("found")
    if not isinstance(entry.get("config", {}), dict):
        return False
    if stage == "target":
        return True
    if not isinstance(finding, dict):
        return False
    if stage == "time":
        return _is_number(finding.get("ms")) and finding["ms"] > 0
    if stage == "check":
        return isinstance(finding.get("wrong", 0), str | None)
    sizes = (finding.get(name) for name in ("shared_bytes", "spill_bytes"))
    return isinstance(finding.get("failed"), str) or all(map(_is_number, sizes))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300


def _finding_key(stage: str, target: Target, config: Config, turn: int) -> dict[str, Any]:
    return {"stage": stage, "target": target.name, "config": asdict(config), "turn": turn}


def _key(line: dict[str, Any]) -> str:
    config = sorted(line.get("config", {}).items())
    return json.dumps([line.get("stage"), line["target"], config, line.get("turn", 0)])
