"""Attention, sharded batches and a Trainer for models of Hugging Face transformers (5.23 and 5.24).

>>> from tritoncp.integrations.transformers import register
>>> register()  # then attn_implementation="tritoncp"
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tritoncp.integrations.transformers.attention import register as register
    from tritoncp.integrations.transformers.batches import shard_batch as shard_batch
    from tritoncp.integrations.transformers.trainer import ContextParallelTrainer as ContextParallelTrainer

_MODULE_OF = {"register": "attention", "shard_batch": "batches", "ContextParallelTrainer": "trainer"}
__all__ = ["ContextParallelTrainer", "register", "shard_batch"]


def __getattr__(name: str) -> Any:
    """Import public names lazily: only the Trainer needs accelerate."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
