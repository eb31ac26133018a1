"""docs/observability.md and docs/troubleshooting.md: programs run as printed; quoted messages, loggers,
ranges and figures are those of the package."""

from __future__ import annotations

import ast
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import tritoncp

ROOT = Path(__file__).parents[2]
OBSERVABILITY, TROUBLESHOOTING = (
    ROOT / "docs" / f"{name}.md" for name in ("observability", "troubleshooting")
)
PAGES = (OBSERVABILITY, TROUBLESHOOTING)
GAP = "\0"  # stands for a value in a message of the source, as … does in a quotation


def quotations(text: str) -> list[str]:
    """List the messages that a page quotes, each a line that begins with "> "."""
    return re.findall(r"^> (.*)$", text, re.MULTILINE)


def messages(code: str) -> Iterator[str]:
    """Yield the texts of a module, with gaps in place of values."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else GAP for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%[sd]|%\.\df|\{\w*\}", GAP, node.value)


def is_quoted_from(quotation: str, message: str) -> bool:
    """Whether the parts of a quotation between its … follow each other in a message, from its start."""
    position = 0
    for index, part in enumerate(part.strip() for part in quotation.split("…")):
        at = message.find(part, position)
        if at < 0 or (index == 0 and at > 0):
            return False
        position = at + len(part)
    return True


def sources() -> list[str]:
    files = [path for folder in ("tritoncp", "kernels") for path in (ROOT / folder).rglob("*.py")]
    return [path.read_text() for path in files]


@pytest.fixture(scope="module")
def all_messages() -> list[str]:
    return [message for code in sources() for message in messages(code) if len(message) > 12]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_quoted_message_is_in_the_source(page, all_messages):
    quoted = quotations(page.read_text())
    assert quoted
    for quotation in quoted:
        assert len(re.findall(r"\w{3,}", quotation)) >= 3, f"{quotation}: too short to be a quotation"
        assert any(is_quoted_from(quotation, message) for message in all_messages), quotation


def test_a_message_that_is_not_in_the_source_is_seen(all_messages):
    for wrong in ("the ranks disagree in …: … (…)", "… failed … (…), so all ranks go on. Rank … says: …"):
        assert not any(is_quoted_from(wrong, message) for message in all_messages)
    code = 'raise ValueError(f"rank {rank} sends {rows} rows of " "a tensor" f" that has {len(x)}")'
    (message,) = [text for text in messages(code) if GAP in text]
    assert is_quoted_from("rank … sends … rows of a tensor that has …", message)
    assert not is_quoted_from("rank … sends … rows of a list that has …", message)


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


def cells(page: str, header: str) -> list[str]:
    """List the first cells of a table, without their code marks."""
    lines = page.partition(f"| {header} |")[2].split("\n\n")[0].splitlines()[2:]
    return [line.split("|")[1].strip().strip("`") for line in lines]


def test_tables_list_every_figure_and_every_logger():
    page = OBSERVABILITY.read_text()
    plan = tritoncp.make_plan(tritoncp.full_mask(256, 256), world_size=2, rank=0)
    assert cells(page, "name") == list(plan.metrics())
    areas = {area for code in sources() for area in re.findall(r'area_logger\("(\w+)"\)', code)}
    assert sorted(cells(page, "logger")) == sorted(f"tritoncp.{area}" for area in areas)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_and_public_names_exist(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([\w.]+)(?:#[\w-]+)?\)", text):
        assert (page.parent / target).is_file(), target
    for name in re.findall(r"tritoncp\.(\w+)\(", text):
        assert hasattr(tritoncp, name), name


def test_rows_that_see_no_key_are_as_the_page_says():
    q = torch.randn(1, 1, 32, 16, requires_grad=True)
    mask = tritoncp.create_block_mask(lambda b, h, q, kv: kv < q, 1, 1, 32, 32)
    out, lse = tritoncp.flex_attention(q, q, q, None, mask, return_lse=True)
    assert (out[:, :, 0] == 0).all() and lse[0, 0, 0] == -torch.inf
    (out.sum() + lse.masked_fill(lse == -torch.inf, 0).sum()).backward()
    assert q.grad is not None and q.grad.isfinite().all()
