"""The kernel that evaluates a mask_mod at pairs gives torch's answers for every shape of the query."""

import pytest
import torch

from tritoncp import mods
from tritoncp.kernels import mask_eval
from tritoncp.masks import create_block_mask
from tritoncp.masks.classification.classify import torch_evaluator

IDS = torch.randint(0, 4, (2, 300)).sort(1).values.int()


@pytest.mark.parametrize(
    "mod",
    [
        lambda b, h, q, kv: q >= kv,
        lambda b, h, q, kv: (IDS[b, q] == IDS[b, kv]) & (q + h >= kv),
        lambda b, h, q, kv: b == h,  # the same for a whole tile
        lambda b, h, q, kv: (q * 7 + kv * 3) % 5 < 2,
    ],
)
@pytest.mark.parametrize(("n", "i", "j"), [(0, 16, 16), (1, 1, 1), (5, 4, 4), (3, 16, 12), (2, 128, 100)])
def test_the_kernel_answers_as_torch_does(mod, n: int, i: int, j: int) -> None:
    arguments = (
        torch.randint(0, 2, (n,)),
        torch.randint(0, 3, (n,)),
        torch.randint(0, 300, (n, i)),
        torch.randint(0, 300, (n, j)),
    )
    translated = mods.mask_mod(mod)
    evaluate = mask_eval.make_evaluator(translated.fn, translated.caps(), torch.device("cpu"))
    visible = evaluate(*arguments)
    assert visible.shape == (n, i, j)
    if n:
        assert torch.equal(visible, torch_evaluator(mod, "cpu")(*arguments))


def test_a_mask_built_by_the_kernel_is_the_one_built_by_torch() -> None:
    mod = lambda b, h, q, kv: (IDS[b, q] == IDS[b, kv]) & ((q + kv) % 9 < 8)  # noqa: E731
    translated = mods.mask_mod(mod)
    evaluate = mask_eval.make_evaluator(translated.fn, translated.caps(), torch.device("cpu"))
    kernel_mask = create_block_mask(mod, 2, None, 300, 290, BLOCK_SIZE=32, evaluate=evaluate)
    assert kernel_mask.runs == create_block_mask(mod, 2, None, 300, 290, BLOCK_SIZE=32).runs
