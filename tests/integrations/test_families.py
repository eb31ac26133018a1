"""docs/models.md: every family of the installed transformers has a row, and the row is right."""

from __future__ import annotations

import re

import pytest
import transformers

from tests.integrations import families
from tritoncp.integrations.transformers import shard_batch

HEADS = families.list_families()
# One of each kind: plain, refused on ranks, recurrent layers; and positions of three axes, custom code.
FEW = ("bert", "big_bird", "qwen3_next")
LONG = ("glm4v_moe", "mobilebert", "xlstm")
# Layers of each kind that have no mask, in one process.
RECURRENT = ("falcon_h1", "jamba", "lfm2", "mamba2", "minimax", "nemotron_h", "recurrent_gemma", "rwkv")
OTHERS = [pytest.mark.nightly, pytest.mark.integrations]


def test_every_family_has_a_row() -> None:
    rows = families.read_table().keys()
    assert HEADS.keys() <= rows
    releases = re.findall(r"^(?:Of )?transformers (\d\S*):", families.PAGE.read_text(), re.M)
    if transformers.__version__ == releases[-1]:  # an earlier one has fewer
        assert rows == HEADS.keys()


@pytest.mark.sample(1)
@pytest.mark.usefixtures("cpu_engine")
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family in FEW else pytest.mark.long if family in LONG else OTHERS)
        for family in HEADS
    ],
)
def test_a_family_does_as_its_row_says(family: str) -> None:
    row = families.cells_of(families.check_in_child(family, HEADS[family]))
    assert row == families.read_table()[family], "run python -m tests.integrations.families --write"


@pytest.mark.sample(1)
@pytest.mark.usefixtures("cpu_engine")
@pytest.mark.parametrize("family", RECURRENT)
def test_layers_without_masks_keep_packed_documents_apart(family: str) -> None:
    head, batch = HEADS[family], families.make_batch(True, family)
    variant, error = families.find_variant(family, head)
    assert not error
    model = families.build(family, head, "tritoncp", variant)
    packed = families.train(model, shard_batch(batch, model, BLOCK_SIZE=16))
    alone = families.train_alone(families.build(family, head, "eager", variant), batch, None)
    assert families.compare(packed, alone) == "yes"
