"""The example program and the programs of docs/transformers.md, on ranks."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import transformers  # noqa: F401 - before ranks are forked

from tests.multiprocess import ranks

ROOT = Path(__file__).parents[2]
PROGRAMS = re.findall(r"```python\n(.*?)```", (ROOT / "docs/transformers.md").read_text(), re.DOTALL)


@pytest.mark.long
@pytest.mark.usefixtures("cpu_engine")
def test_the_example_has_the_losses_of_one_process() -> None:
    train = runpy.run_path(str(ROOT / "examples/transformers_long_context.py"))["train"]
    expected = train()
    assert len(expected) == 2 and expected[0] != expected[1]
    for losses in ranks.run(2, train):
        assert losses == pytest.approx(expected, abs=1e-5)


@pytest.mark.integrations
@pytest.mark.parametrize("index", range(3))
def test_a_program_of_the_page_runs_as_printed(index: int, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAMS[index])
    lines = ranks.run_torchrun(2 if index else 1, tmp_path / "program.py", tmp_path).splitlines()
    if index == 1:
        assert len({line.split("loss ")[1] for line in lines if line.startswith("rank ")}) == 1, lines
    else:
        assert any("loss" in line for line in lines), lines


@pytest.mark.integrations
@pytest.mark.parametrize("index", [3, 4])
def test_a_loop_of_another_library_has_the_weights_of_one_process(index: int, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAMS[index])
    printed = ranks.run_torchrun(4, tmp_path / "program.py", tmp_path)
    differences = re.findall(r"rank \d: weights differ by (\S+)", printed)
    assert len(differences) == 4 and all(float(one) < 1e-6 for one in differences), printed
