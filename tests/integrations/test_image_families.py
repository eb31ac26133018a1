"""docs/models.md: families that embed images train on ranks as its list says."""

from __future__ import annotations

import pytest

from tests.integrations import families, image_families

LISTED = image_families.read_list()
OTHERS = [pytest.mark.nightly, pytest.mark.integrations]


def test_ten_families_train_with_images() -> None:
    assert sum(result == "yes" for result in LISTED.values()) >= 10
    assert LISTED.keys() <= families.read_table().keys()


@pytest.mark.usefixtures("cpu_engine")
@pytest.mark.parametrize("family", [pytest.param(family, marks=OTHERS) for family in LISTED])
def test_a_family_with_images_does_as_listed(family: str) -> None:
    head = image_families.list_families()[family]
    result = families.shorten(image_families.check_in_child(family, head))
    assert result == LISTED[family], "run python -m tests.integrations.image_families --write"
