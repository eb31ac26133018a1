"""The program of docs/observability.md runs as printed, and rows without a key are as docs say."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
OBSERVABILITY = ROOT / "docs" / "observability.md"


@pytest.fixture
def loggers() -> Iterator[None]:
    """Restore the level of the package's logger."""
    log = logging.getLogger("tritoncp")
    level = log.level
    yield
    log.setLevel(level)


class Board(ModuleType):
    """Stands in for wandb and for torch.utils.tensorboard, which the tests do without."""

    def __init__(self) -> None:
        super().__init__("board")
        self.figures: dict[str, float] = {}
        self.SummaryWriter = lambda: self

    def log(self, figures: dict[str, float]) -> None:
        self.figures |= figures

    def add_scalar(self, name: str, value: float, step: int) -> None:
        assert isinstance(value, float | int) and step == 0
        self.figures[name] = value


@pytest.mark.usefixtures("cpu_engine", "loggers")
def test_the_program_of_the_page_runs_as_printed(monkeypatch, capsys, caplog):
    boards = {"wandb": Board(), "torch.utils.tensorboard": Board()}
    for name, board in boards.items():
        monkeypatch.setitem(sys.modules, name, board)
    program = "\n".join(re.findall(r"```python\n(.*?)```", OBSERVABILITY.read_text(), re.DOTALL))
    names: dict[str, Any] = {}
    exec(compile(program, str(OBSERVABILITY), "exec"), names)
    printed = capsys.readouterr().out
    steps = [event.key.removeprefix("tritoncp::ring/") for event in names["steps"]]
    assert {"step 0", "step 3", "backward step 0 delta", "backward step 3 dq"} <= set(steps)
    assert "tritoncp::ring/step 3 " in printed
    plans = [record.getMessage() for record in caplog.records if record.name == "tritoncp.plan"]
    assert any("order ptrr" in plan and "4 ranks" in plan for plan in plans)
    figures = {f"plan/{name}" for name in names["plan"].metrics()}
    assert all(board.figures.keys() == figures for board in boards.values())
