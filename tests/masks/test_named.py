"""Ready-made score_mods: their formulas and their arguments."""

import math

import pytest
import torch

from tritoncp import alibi, softcap

ZERO = torch.zeros(())


@pytest.mark.parametrize("cap", [0.5, 30.0, 50])
def test_softcap_is_the_scaled_tanh_within_its_cap(cap):
    score = torch.linspace(-1000, 1000, 101, dtype=torch.float64)
    capped = softcap(cap)(score, 0, 0, 0, 0)
    want = torch.tensor([cap * math.tanh(x / cap) for x in score.tolist()], dtype=torch.float64)
    torch.testing.assert_close(capped, want)
    assert bool((capped.abs() <= cap).all() & (capped.diff() >= 0).all())


def slopes(heads: int) -> list[float]:
    """Slopes of the authors' code (ofirpress/attention_with_linear_biases, fairseq/models/transformer.py)."""

    def power_of_two(n: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(heads).is_integer():
        return power_of_two(heads)
    closest = 2 ** math.floor(math.log2(heads))
    return power_of_two(closest) + slopes(2 * closest)[0::2][: heads - closest]


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 8, 12, 16, 20, 32])
def test_alibi_has_the_slopes_of_the_paper(heads):
    mod = alibi(heads)
    got = [mod(ZERO, 0, h, 9, 8).item() for h in range(heads)]  # a key one position before its query
    assert got == pytest.approx([-slope for slope in slopes(heads)])
