"""The programs of docs/trl.md, on two ranks, and the numbers that it prints."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from tests.multiprocess import ranks

PAGE = (Path(__file__).parents[2] / "docs/trl.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.integrations
@pytest.mark.parametrize("index", range(2))
def test_a_program_of_the_page_trains(index: int, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAMS[index])
    printed = ranks.run_torchrun(2, tmp_path / "program.py", tmp_path)
    if index == 0:
        assert len(re.findall(r"'num_tokens': '(\d+)'", printed)) == 3, printed
    else:
        parts = re.findall(r"loss \S+, the tree has (\d+)% of the tokens", printed)
        assert len(parts) == 4 and all(int(part) < 60 for part in parts), printed


def test_the_page_states_what_the_tree_saves() -> None:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(PROGRAMS[2], {})
    numbers = re.compile(r"[\d,.]+(?= (?:tokens|TFLOP|MiB))")
    rows, tree = map(numbers.findall, out.getvalue().splitlines())
    stated = " ".join(PAGE.split())
    assert f"{rows[0]} tokens, {rows[1]} TFLOP and {rows[2]} MiB by rows" in stated, rows
    assert f"{tree[0]} tokens, {tree[1]} TFLOP and {tree[2]} MiB by the tree" in stated, tree
