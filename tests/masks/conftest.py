"""Fixtures of tests of masks."""

import pytest

from tritoncp.masks.classification import classify


@pytest.fixture
def evaluated_pairs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """List the number of pairs of each call of a mask_mod, 1 where it is traced."""
    sizes: list[int] = []
    torch_evaluator, trace = classify.torch_evaluator, classify.trace

    def counting(mask_mod, device):
        evaluate = torch_evaluator(mask_mod, device)
        return lambda b, h, q, kv: sizes.append(len(q) * q.shape[1] * kv.shape[1]) or evaluate(b, h, q, kv)

    monkeypatch.setattr(classify, "torch_evaluator", counting)
    monkeypatch.setattr(classify, "trace", lambda *args: sizes.append(1) or trace(*args))
    return sizes
