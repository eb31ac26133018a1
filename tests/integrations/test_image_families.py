"""docs/models.md: every family that embeds images is listed, and trains on ranks as the list says."""

from __future__ import annotations

import pytest

from tests.integrations import families, image_families

HEADS = image_families.list_families()
OTHERS = [pytest.mark.nightly, pytest.mark.integrations]


def test_every_family_with_images_is_listed() -> None:
    assert HEADS.keys() <= image_families.read_list().keys()


@pytest.mark.usefixtures("cpu_engine")
@pytest.mark.parametrize("family", [pytest.param(family, marks=OTHERS) for family in HEADS])
def test_a_family_with_images_does_as_listed(family: str) -> None:
    result = families.shorten(image_families.check_in_child(family, HEADS[family]))
    listed = image_families.read_list()[family]
    assert result == listed, "run python -m tests.integrations.image_families --write"
