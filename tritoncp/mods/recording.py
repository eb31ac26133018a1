"""Recordings of a function's operations, to compare functions whose state has no fingerprint.

The function and its gradient run once on 0-d tensors while `mods.tracing.GraphRecorder` records their graph.
Functions with equal graphs are equal, no matter which state they read. A recording takes about a millisecond,
a fingerprint microseconds. Neither needs a translation to Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tritoncp.core.caller import warn_caller
from tritoncp.core.host_copy import on_host, plain_autograd, refuse_dtensor
from tritoncp.mods.fingerprint import Fingerprint, ModState
from tritoncp.mods.tracing import GraphRecorder, TensorIndexing
from tritoncp.mods.user_code import describe, origin


def read_state(fn: Callable[..., Any], is_score: bool, dtype: torch.dtype = torch.float32) -> ModState:
    """Return the fingerprint of a function, or a recording if it reads incomparable state.

    Warns once about that state, since a recording takes a hundred times as long.
    """
    fingerprint = Fingerprint(fn)
    for tensor in fingerprint.tensors:
        refuse_captured_dtensor(tensor)
    if fingerprint.key is not None:
        return fingerprint
    _warn_incomparable(fn, fingerprint.incomparable)
    device = next((t.device for t in fingerprint.tensors if t.ndim), torch.device("cpu"))
    numbers, recording = fingerprint.numbers, record(fn, is_score, dtype, device)
    if recording is None:
        return ModState(None, fingerprint.tensors, numbers, fingerprint.incomparable)
    operations, tensors = recording
    return ModState(("recording", operations), tensors, numbers, fingerprint.incomparable)


_WARNED: set[tuple[str, str]] = set()


def refuse_captured_dtensor(tensor: Tensor) -> None:
    """Raise TypeError if a mod captures a DTensor: each rank calls the mod alone, with indices into whole
    tensors."""
    remedy = (
        "capture the whole tensor, x.full_tensor(); if it is learned, x.full_tensor(grad_placements=...), "
        "with Partial() for dimensions of the mesh that shard the query, and Replicate() for others"
    )
    refuse_dtensor(tensor, "a tensor that a mask_mod or score_mod captures", remedy)


def _warn_incomparable(fn: Callable[..., Any], reason: str) -> None:
    """Warn once for each function's name and line."""
    name = describe(fn)
    if (name, origin(fn)) not in _WARNED:
        _WARNED.add((name, origin(fn)))
        warn_caller(
            f"{name} reads state that cannot be compared between calls ({reason}), so that it is run again "
            "at every call, for about a millisecond, to detect changes. Read the value once and capture it "
            "instead: `cap = config.cap` in an enclosing function, and `cap` in the mask_mod or score_mod"
        )


@on_host
def record(
    fn: Callable[..., Any], is_score: bool, dtype: torch.dtype, device: torch.device
) -> tuple[tuple[Any, ...], list[Tensor]] | None:
    """Return (key of the operations of fn(score?, b, h, q_idx, kv_idx) and its gradient, captured tensors).

    None if fn cannot run on 0-d tensors.
    """
    for index in (0, 1):  # index 0 fails if fn divides by it, index 1 if fn reads a table of one entry
        recorder = GraphRecorder()
        try:
            with plain_autograd(), torch.set_grad_enabled(is_score), TensorIndexing():
                arguments = [torch.full((), index, dtype=torch.int64, device=device) for _ in range(4)]
                if is_score:
                    arguments.insert(0, torch.ones((), dtype=dtype, device=device, requires_grad=True))
                recorder.record(partial(_call_and_differentiate, fn, recorder), arguments)
        except Exception:  # raised by user code; a later translation raises it again
            continue
        return _describe(recorder)
    return None


def _call_and_differentiate(fn: Callable[..., Any], recorder: GraphRecorder, *arguments: Tensor) -> Any:
    """Return fn's result and its gradients with respect to the score and the captured tensors."""
    # Clone the score: fn may edit it in place.
    out = fn(*[x.clone() if x.requires_grad else x for x in arguments])
    if not isinstance(out, Tensor) or not out.requires_grad:
        return out
    inputs = [x for x in (*arguments, *recorder.root.buffers()) if x.requires_grad]
    return out, torch.autograd.grad(out, inputs, torch.ones_like(out), allow_unused=True)


def _describe(recorder: GraphRecorder) -> tuple[tuple[Any, ...], list[Tensor]]:
    """Return (hashable form of a recorded graph, captured tensors in order of first use)."""
    lines: list[Any] = []
    captured: list[Tensor] = []
    for node in recorder.graph.nodes:
        lines.append((node.op, str(node.target), repr(node.args), repr(node.kwargs)))
        if node.op == "get_attr":
            tensor = recorder.root.get_buffer(str(node.target))
            lines.append((tensor.dtype, tensor.shape, tensor.requires_grad, tensor.device))
            if all(user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users):
                lines.append(repr(tensor.tolist()))  # a constant tensor that the function makes
            else:
                captured.append(tensor)
    return tuple(lines), captured
