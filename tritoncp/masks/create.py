"""Creation of masks on the host: the device that evaluates a mask_mod, and the progress bar."""

from __future__ import annotations

import time
from typing import Any

import torch

from tritoncp.core.dynamo_boundary import host_only
from tritoncp.core.tracing import graph_of
from tritoncp.core.upload import upload
from tritoncp.masks.classification.classify import Ask
from tritoncp.masks.closed_forms import as_int
from tritoncp.masks.mask import Mask, create_block_mask
from tritoncp.masks.mask_data import Device
from tritoncp.masks.mask_mod import MaskFn

_BAR_DELAY = 2.0  # seconds before the progress bar appears


@host_only
def create_on_device(
    mask_mod: MaskFn, B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, device: Device | None,
    BLOCK_SIZE: int | tuple[int, int],
) -> Mask:  # fmt: skip
    """Make a mask, evaluated on ``device`` (None: that of the captured tensors), with a progress bar."""
    _check_function(mask_mod)
    B, H = (None if size is None else _size(name, size) for name, size in (("B", B), ("H", H)))
    Q_LEN, KV_LEN, block = _size("Q_LEN", Q_LEN), _size("KV_LEN", KV_LEN), _as_block(BLOCK_SIZE)
    place = torch.device(device) if device is not None else _capture_device(mask_mod)
    ask = None if place.type == "cpu" else _triton_ask(mask_mod, place)
    with _Bar(f"create_block_mask {Q_LEN} x {KV_LEN}") as bar:
        return create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, place, block, ask=ask, progress=bar.show)


def _check_function(mask_mod: Any) -> None:
    """Raise TypeError for a mask_mod that is no function."""
    if callable(mask_mod):
        return
    remedy = "pass a function, lambda b, h, q_idx, kv_idx: ..."
    if mask_mod is None:
        remedy = "tritoncp.full_mask(Q_LEN, KV_LEN) hides nothing, and neither does block_mask=None"
    elif isinstance(mask_mod, torch.Tensor):
        remedy = "capture the tensor, lambda b, h, q_idx, kv_idx: visible[q_idx, kv_idx]"
    raise TypeError(f"create_block_mask: mask_mod is a {type(mask_mod).__name__}, no function; {remedy}")


def _size(name: str, size: Any) -> int:
    return as_int(f"create_block_mask: {name}", size)


def _as_block(size: Any) -> tuple[int, int]:
    """Return a BLOCK_SIZE as a pair (q, kv)."""
    pair = size if isinstance(size, tuple | list) else (size, size)
    if len(pair) != 2:
        raise ValueError(f"create_block_mask: BLOCK_SIZE={size}; an int or a pair (q, kv) is needed")
    return _size("BLOCK_SIZE", pair[0]), _size("BLOCK_SIZE", pair[1])


def _capture_device(mask_mod: MaskFn) -> torch.device:
    """Return the accelerator of the tensors that the mask_mod captures; the CPU if there are none."""
    graph = graph_of(mask_mod) if torch.accelerator.is_available() else None
    nodes = graph.graph.nodes if graph is not None else ()
    devices = [getattr(graph, str(node.target)).device for node in nodes if node.op == "get_attr"]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))


def _triton_ask(mask_mod: MaskFn, device: torch.device) -> Ask | None:
    """Return the mask_mod as a Triton kernel; None if it cannot be translated."""
    from tritoncp import mods
    from tritoncp.kernels.mask_eval import make_evaluator

    try:
        mod = mods.mask_mod(mask_mod)
    except mods.Untranslatable:
        return None
    return make_evaluator(mod.fn, mod.caps(upload(mod.tensors, device)), device)


class _Bar:
    """A progress bar on stderr that appears after _BAR_DELAY seconds."""

    def __init__(self, title: str) -> None:
        self.title, self.start = title, time.monotonic()
        self.bar: Any = None

    def __enter__(self) -> _Bar:
        return self

    def show(self, fraction: float) -> None:
        """Advance the bar to a fraction from 0 to 1."""
        if self.bar is None and time.monotonic() - self.start > _BAR_DELAY:
            from rich.console import Console
            from rich.progress import Progress

            self.bar = Progress(console=Console(stderr=True), transient=True)
            self.bar.add_task(self.title, total=1.0)
            self.bar.start()
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=fraction)

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()
