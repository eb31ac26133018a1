"""The program of docs/compiled_kernels.md runs for each architecture, with the fault that the page shows."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import COMPILED

PAGE = (Path(__file__).parents[3] / "docs/compiled_kernels.md").read_text()


@pytest.mark.long
def test_the_page_shows_the_fault_of_its_program(tmp_path: Path, capsys: Any) -> None:
    (program,) = re.findall("```python\n(.*?)```", PAGE, re.S)
    (printed,) = re.findall("```\n(right: .*?)```", PAGE, re.S)
    path = tmp_path / "bias_on_h100.py"
    path.write_text(program.replace('"sm_90"', f'"{COMPILED}"'))
    runpy.run_path(str(path))
    # Instructions, threads and addresses depend on tile and architecture, the folder on Triton's cache.
    lasting = r"right: .*\n|^out of bounds global |kernel \w+; |\w+.py:\d+|tensor .+?;|past the end of \S+"
    parts = re.findall(lasting, capsys.readouterr().out, re.M)
    assert len(parts) == 6
    assert parts == re.findall(lasting, printed, re.M)
