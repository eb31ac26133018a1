"""The journal of a tuning run: a file of its findings, to resume the run and to trace a choice to
measurements.

JSON lines, each appended at once. The first has the conditions of the run (device, architecture, Triton,
code); each other line is a finding, with stage (compile, check, time), target, config and number of rounds.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from tritoncp.core.files import parse_json
from tritoncp.kernels.tile_rules import Config
from tritoncp.tuning.targets import Target


class TuningJournal:
    """A file of findings. With ``resume``, findings of the last run are kept if it had the same
    ``conditions``; otherwise the file is emptied.

    Raises RuntimeError if another process writes to the file, and OSError.
    """

    def __init__(self, path: Path, conditions: dict[str, Any], resume: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = path.open("ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when the process ends or dies
        except BlockingIOError as error:
            self._file.close()
            raise RuntimeError(
                f"another tritoncp autotune writes to {path}; wait for it, or name another folder with --out"
            ) from error
        lines = []
        for text in path.read_bytes().splitlines():
            with contextlib.suppress(ValueError):  # the line was cut off
                lines.append(parse_json(text))
        self._findings: dict[str, dict[str, Any]] = {}
        if resume and lines[:1] == [{"about": conditions}]:
            findings = [line for line in lines if isinstance(line, dict) and "finding" in line]
            self._findings = {json.dumps(line["finding"]): line["found"] for line in findings}
            self._file.write(b"\n")  # ends an incomplete line
        else:
            self._file.truncate(0)
            self._append({"about": conditions})

    def finding(self, stage: str, target: Target, config: Config, rounds: int = 0) -> dict[str, Any] | None:
        """Return the finding of a stage about a config, or None."""
        return self._findings.get(json.dumps([stage, target.name, asdict(config), rounds]))

    def add(
        self, finding: dict[str, Any], stage: str, target: Target, config: Config, rounds: int = 0
    ) -> None:
        key = [stage, target.name, asdict(config), rounds]
        self._findings[json.dumps(key)] = finding
        self._append({"finding": key, "found": finding})

    def close(self) -> None:
        self._file.close()

    def _append(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()
