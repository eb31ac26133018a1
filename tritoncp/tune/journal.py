"""What a run found, so that a later one need not find it again."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tritoncp.kernels.configs import Config
from tritoncp.tune.targets import Target


class Journal:
    """Findings, a line each, appended as they are made. With ``resume`` those of the last run under the same
    conditions (``about``) count as found; otherwise a run begins anew, below the old lines."""

    def __init__(self, path: Path, about: dict[str, Any], resume: bool) -> None:
        self._found: dict[str, dict[str, Any]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text() if path.exists() else ""
        current = False
        for line in text.splitlines():
            try:
                entry = json.loads(line)
            except ValueError:  # what was being written when a run was cut off
                continue
            if entry["stage"] == "begin":
                current = resume and entry["about"] == about
                self._found = {}
            elif current:
                self._found[self._key(**entry)] = entry["found"]
        self._file = path.open("a")
        if text and not text.endswith("\n"):
            self._file.write("\n")
        if not current:
            self._append({"stage": "begin", "about": about, "time": time.time()})

    def known(self, stage: str, target: Target, config: Config, turn: int = 0) -> dict[str, Any] | None:
        return self._found.get(self._key(stage, target.name, asdict(config), turn))

    def add(self, stage: str, target: Target, config: Config, found: dict[str, Any], turn: int = 0) -> None:
        entry = {"stage": stage, "target": target.name, "config": asdict(config), "turn": turn}
        self._found[self._key(stage, target.name, asdict(config), turn)] = found
        self._append(entry | {"found": found})

    def close(self) -> None:
        self._file.close()

    @staticmethod
    def _key(stage: str, target: str, config: dict[str, Any], turn: int = 0, **found: Any) -> str:
        return json.dumps([stage, target, sorted(config.items()), turn])

    def _append(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()
