"""What a run found, so that a later one need not find it again, and anyone can see what a choice rests on.

A line each, in JSON, appended as it is found; "stage" says what it is:

    begin                         about: device, arch, triton and code; time (seconds since 1970)
    target                        target: its name; entry: what calls look up; rule: the config of the rule
    compile, steps, check, time   target, config, turn (of time: how many rounds) and what was found
"""

from __future__ import annotations

import fcntl
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tritoncp.kernels.configs import Config
from tritoncp.perf.lines import decoded
from tritoncp.tune.targets import Target


class Journal:
    """With ``resume`` the findings of the last run under the same conditions (``about``) count as found;
    otherwise a run begins anew, below the old lines.

    Raises RuntimeError while another process writes to the file.
    """

    def __init__(self, path: Path, about: dict[str, Any], resume: bool) -> None:
        self._found: dict[str, dict[str, Any]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # let go when the process ends, however
        except BlockingIOError as error:
            self._file.close()
            raise RuntimeError(
                f"another tritoncp autotune writes to {path}; wait for it, or name another folder with --out"
            ) from error
        text = path.read_bytes()
        current = False
        for line in text.splitlines():
            entry = _entry(line)
            if entry.get("stage") == "begin":
                current = resume and entry.get("about") == about
                self._found = {}
            elif current and "target" in entry:
                self._found[_key(entry)] = entry.get("found", entry)
        if text and not text.endswith(b"\n"):
            self._file.write(b"\n")
        if not current:
            self._append({"stage": "begin", "about": about, "time": time.time()})

    def begin(self, target: Target, rule: Config) -> None:
        """Say what is looked for from here on."""
        line = {"stage": "target", "target": target.name, "entry": target.entry, "rule": asdict(rule)}
        if _key(line) not in self._found:
            self._found[_key(line)] = line
            self._append(line)

    def known(self, stage: str, target: Target, config: Config, turn: int = 0) -> dict[str, Any] | None:
        return self._found.get(_key(_about(stage, target, config, turn)))

    def add(self, stage: str, target: Target, config: Config, found: dict[str, Any], turn: int = 0) -> None:
        line = _about(stage, target, config, turn)
        self._found[_key(line)] = found
        self._append(line | {"found": found})

    def close(self) -> None:
        self._file.close()

    def _append(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()


def _entry(line: bytes) -> dict[str, Any]:
    """A line; nothing for what was being written when a run was cut off, or is not ours."""
    try:
        found = decoded(line)
    except ValueError:
        return {}
    usual = isinstance(found, dict) and all(
        isinstance(found.get(name, {}), dict) for name in ("config", "found")
    )
    return found if usual else {}


def _about(stage: str, target: Target, config: Config, turn: int) -> dict[str, Any]:
    return {"stage": stage, "target": target.name, "config": asdict(config), "turn": turn}


def _key(line: dict[str, Any]) -> str:
    config = sorted(line.get("config", {}).items())
    return json.dumps([line.get("stage"), line["target"], config, line.get("turn", 0)])
