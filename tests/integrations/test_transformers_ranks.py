"""Models of transformers on ranks: losses and gradients are those of one process with transformers' own attention."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integrations import transformers_models as models
from tests.multiprocess import ranks

pytestmark = pytest.mark.usefixtures("cpu_engine")


def expected_of(name: str, batch: dict[str, Any]) -> Any:
    """Return loss and gradients of one process, by transformers' eager attention."""
    return models.loss_and_gradients(models.build_model(name, "eager"), batch)


@pytest.mark.parametrize("name", models.MODELS)
def test_two_ranks_have_the_loss_and_gradients_of_one(name: str) -> None:
    batch = models.text_batch()
    for result in ranks.run(2, models.on_ranks, name, batch):
        models.assert_equal(result, expected_of(name, batch))
