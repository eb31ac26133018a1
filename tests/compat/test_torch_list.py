"""Every test of torch's list has one place: rows of the table, tests here, or a reason why there is none."""

import importlib
import re
from pathlib import Path

import pytest

from tests.compat.torch_cases import CASES
from tests.compat.torch_list import ELSEWHERE, NOT_HERE, count

HERE = Path(__file__).parent


@pytest.mark.parametrize("test", ELSEWHERE)
def test_the_named_tests_exist(test: str) -> None:
    for name in ELSEWHERE[test]:
        module, function = name.split(".")
        assert callable(getattr(importlib.import_module(f"tests.compat.{module}"), function))


def test_no_test_is_both_tested_and_left_out() -> None:
    assert not {*ELSEWHERE, *(case.test for case in CASES)} & {*NOT_HERE}
    assert count().splitlines()[-1].endswith("not here")


def test_each_documented_difference_is_tested() -> None:
    table = (HERE.parents[1] / "docs/compatibility.md").read_text()
    sources = "".join(path.read_text() for path in HERE.parent.rglob("test_*.py"))
    for row in re.findall(r"^\| \*\*(.+?)\*\* \|", table, re.MULTILINE):
        assert f'documented("{row}")' in sources, row
