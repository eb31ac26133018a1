"""docs/models.md: every family of the installed transformers has a row, and rows that are drawn are right."""

from __future__ import annotations

import datetime
import random

import pytest

from tests.integrations import families

HEADS = families.list_families()
FIXED = ("bert", "big_bird", "doge", "glm4v_moe", "mobilebert", "qwen3_next", "xlstm")
TODAY = datetime.date.today().toordinal()


def check(family: str) -> None:
    row = families.cells_of(families.check_in_child(family, HEADS[family]))
    assert row == families.read_table()[family], "run python -m tests.integrations.families --write"


def test_every_family_has_a_row() -> None:
    assert families.read_table().keys() == HEADS.keys()


@pytest.mark.usefixtures("cpu_engine")
@pytest.mark.parametrize("family", [*FIXED, *random.Random(TODAY).sample(sorted(HEADS), 2)])
def test_a_drawn_family_does_as_its_row_says(family: str) -> None:
    check(family)


@pytest.mark.nightly
@pytest.mark.integrations
@pytest.mark.usefixtures("cpu_engine")
@pytest.mark.parametrize("family", HEADS)
def test_every_family_does_as_its_row_says(family: str) -> None:
    check(family)
