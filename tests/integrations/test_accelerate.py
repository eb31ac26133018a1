"""Masks and plans in batches that accelerate moves, casts and distributes."""

import pytest
import torch

from tests.containers.samples import MASKS, SAMPLES, attend, x_of

pytestmark = [pytest.mark.integrations, pytest.mark.usefixtures("cpu_engine")]


def prepared(batch):
    """Return a batch as the loop of a trainer gets it."""
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    loader = Accelerator(cpu=True).prepare(DataLoader([batch], batch_size=None))
    (out,) = loader
    return out


def moved(batch):
    from accelerate.utils import send_to_device

    return send_to_device(batch, torch.device("cpu"), non_blocking=True)


def widened(batch):
    from accelerate.utils import convert_to_fp32

    return convert_to_fp32(batch)


@pytest.mark.parametrize("walk", [moved, widened, prepared])
def test_accelerate_leaves_masks_the_same(walk):
    for name, make in SAMPLES.items():
        mask, x = make(), x_of()
        out = walk({"mask": mask, "more": [mask, x]})
        assert torch.equal(attend(x, out["mask"]), attend(x, mask)), name
        assert name not in MASKS or out["mask"] is out["more"][0] is mask  # with its caches
