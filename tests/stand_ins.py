"""Fixtures in which torch reports another machine than this one, or runs its own attention in another way."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import flex_attention

CAPABILITIES = {"sm_80": (8, 0), "sm_90": (9, 0), "sm_100": (10, 0)}


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test as on a machine without a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let torch report two GPUs, on which nothing runs: H200 for ``gpus("sm_90")``, MI300X for
    ``gpus("gfx942")``. Fake tensors on a GPU need ``available=False``."""

    def report(architecture: str = "sm_90", current: int = 0, available: bool = True) -> None:
        is_amd = architecture.startswith("gfx")
        name = "MI300X" if is_amd else "NVIDIA H200"
        properties = SimpleNamespace(
            name=name, gcnArchName=f"{architecture}:sramecc+" if is_amd else name, total_memory=1 << 37,
            multi_processor_count=132, uuid="1234",
        )  # fmt: skip
        monkeypatch.setattr(torch.version, "hip", "6.4" if is_amd else None)
        for function, value in {
            "is_available": available,
            "device_count": 2,
            "current_device": current,
            "get_device_name": name,
            "get_device_properties": properties,
            "get_device_capability": CAPABILITIES.get(architecture, (9, 4)),
        }.items():
            monkeypatch.setattr(torch.cuda, function, lambda device=None, value=value: value)

    return report


@pytest.fixture
def eager_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch's own flex attention run eagerly, without the graph that it otherwise makes."""
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
