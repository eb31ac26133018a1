"""Emitted source against golden files. To accept a change: `ACCEPT=1 pytest` with this file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tritoncp.mods import Mod, mask_mod, score_mod

GOLDEN = Path(__file__).parent / "golden"
DOCUMENTS = torch.zeros(2, 64, dtype=torch.int32)
BIAS = torch.zeros(8, 127, requires_grad=True)


def windowed_documents(window: int) -> Callable[..., Any]:
    def document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        same = DOCUMENTS[b, q_idx] == DOCUMENTS[b, kv_idx]
        return same & (q_idx >= kv_idx) & (q_idx - kv_idx < window)

    return document


def relative_bias(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.tanh(score / 30) * 30 + BIAS[h][q_idx - kv_idx + 63]


MODS: dict[str, Callable[[], Mod]] = {
    "windowed_documents": lambda: mask_mod(windowed_documents(1024)),
    "relative_bias": lambda: score_mod(relative_bias),
}


@pytest.mark.parametrize("name", MODS)
def test_emitted_source(name: str) -> None:
    path, source = GOLDEN / f"{name}.txt", MODS[name]().source
    if os.environ.get("ACCEPT"):
        path.write_text(source)
    assert source == path.read_text()
