"""The journal of a tuning run: its findings, so that a resumed run need not repeat them and a choice can be
traced to its measurements.

A line each, in JSON, appended at once. The first has the conditions of the run (device, architecture, Triton,
code), the others a finding, by stage (compile, steps, check, time), target, config and number of rounds.
"""

from __future__ import annotations

import fcntl
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from tritoncp.core.checked_json import parse_json
from tritoncp.kernels.tile_rules import Config
from tritoncp.tuning.targets import Target


class TuningJournal:
    """A file of findings. With ``resume`` those of the last run are valid if it had the same ``conditions``;
    otherwise the file begins anew.

    Raises RuntimeError while another process writes to the file, and OSError.
    """

    def __init__(self, path: Path, conditions: dict[str, Any], resume: bool) -> None:
        self._findings: dict[str, dict[str, Any]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = path.open("ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # let go when the process ends, however
        except BlockingIOError as error:
            self._file.close()
            raise RuntimeError(
                f"another tritoncp autotune writes to {path}; wait for it, or name another folder with --out"
            ) from error
        lines = [_parse_line(text) for text in path.read_bytes().splitlines()]
        if resume and lines and lines[0].get("about") == conditions:
            self._findings = {_key(*line["finding"]): line["found"] for line in lines if "finding" in line}
            self._file.write(b"\n")  # ends a line that was cut off
        else:
            self._file.truncate(0)
            self._append({"about": conditions})

    def finding(self, stage: str, target: Target, config: Config, turn: int = 0) -> dict[str, Any] | None:
        return self._findings.get(_key(stage, target.name, asdict(config), turn))

    def add(self, stage: str, target: Target, config: Config, finding: dict[str, Any], turn: int = 0) -> None:
        at = stage, target.name, asdict(config), turn
        self._findings[_key(*at)] = finding
        self._append({"finding": at, "found": finding})

    def close(self) -> None:
        self._file.close()

    def _append(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()


def _key(stage: str, target: str, config: dict[str, Any], turn: int) -> str:
    return json.dumps([stage, target, sorted(config.items()), turn])


def _parse_line(text: bytes) -> dict[str, Any]:
    """Parse a line; empty for one that was cut off."""
    try:
        line = parse_json(text)
    except ValueError:
        return {}
    return line if isinstance(line, dict) else {}
