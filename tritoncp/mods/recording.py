"""Recording of a function's operations, to compare functions whose state cannot be compared.

The function runs once on 0-d tensors while a dispatch mode notes each operation, forward and backward, with
its constants and the tensors it takes. Equal recordings are equal graphs, however the states differ. It
takes about a millisecond where a fingerprint takes microseconds, and needs no translation to Triton.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from tritoncp.core.tracing import HostDispatchMode, TensorIndexing
from tritoncp.core.user_code import describe, origin
from tritoncp.mods.fingerprint import Fingerprint


class State(NamedTuple):
    """The state of a mask_mod or score_mod at one moment.

    key: hashable; equal keys mean equal graphs. None where the function can neither be compared nor recorded
    tensors: captured tensors in a fixed order
    numbers: Python numbers read from globals and attributes
    incomparable: the state that made a recording necessary, in words; empty for a fingerprint
    """

    key: Any
    tensors: Sequence[Tensor]
    numbers: Sequence[int | float]
    incomparable: str = ""


def read_state(fn: Callable[..., Any], is_score: bool, dtype: torch.dtype = torch.float32) -> State:
    """Read the fingerprint of a function, or record the function where it reads incomparable state.

    Warns once, naming that state, since a recording takes a hundred times as long.
    """
    fingerprint = Fingerprint(fn)
    if fingerprint.key is not None:
        return State(fingerprint.key, fingerprint.tensors, fingerprint.numbers)
    _warn_incomparable(fn, fingerprint.reason)
    device = next((t.device for t in fingerprint.tensors if t.ndim), torch.device("cpu"))
    recording = record(fn, is_score, dtype, device)
    if recording is None:
        return State(None, fingerprint.tensors, (), fingerprint.reason)
    operations, tensors = recording
    return State(("recording", operations), tensors, (), fingerprint.reason)


_WARNED: set[tuple[str, str]] = set()


def _warn_incomparable(fn: Callable[..., Any], reason: str) -> None:
    """Warn once for each function's name and line."""
    name = describe(fn)
    if (name, origin(fn)) not in _WARNED:
        _WARNED.add((name, origin(fn)))
        warnings.warn(
            f"{name} reads state that cannot be compared between calls: {reason}. It is run again at every "
            "call, about a millisecond, to see whether it changed. Read the value once and capture it "
            "instead: `cap = config.cap` in an enclosing function, and `cap` in the mask_mod or score_mod",
            stacklevel=5,
        )


def record(
    fn: Callable[..., Any], is_score: bool, dtype: torch.dtype, device: torch.device
) -> tuple[tuple[Any, ...], list[Tensor]] | None:
    """Record the operations of fn(score?, b, h, q_idx, kv_idx) and of its gradient, and the captured tensors.

    None where it cannot run on 0-d tensors.
    """
    # The caller's hooks for saved tensors, as for offloaded activations, must not see the recording.
    hooks = saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    for index in (0, 1):  # a function may divide by an index, or read a table of one entry
        recorder = _Recorder()
        try:
            with torch.inference_mode(False), torch.set_grad_enabled(is_score), hooks:
                arguments = [torch.full((), index, dtype=torch.int64, device=device) for _ in range(4)]
                if is_score:
                    arguments.insert(0, torch.ones((), dtype=dtype, device=device, requires_grad=True))
                _run(fn, arguments, recorder)
        except Exception:  # of the user's code; a translation, if one is needed, raises it again
            continue
        return tuple(recorder.operations), recorder.captured
    return None


def _run(fn: Callable[..., Any], arguments: list[Tensor], recorder: _Recorder) -> None:
    recorder.number(arguments)
    scores = [x for x in arguments if x.requires_grad]
    with recorder, TensorIndexing():
        # A copy of the score: the function may edit it in place.
        out = fn(*[x.clone() if x.requires_grad else x for x in arguments])
    recorder.operations.append(("result", *map(recorder.describe, tree_leaves(out))))
    if isinstance(out, Tensor) and out.requires_grad:
        inputs = [*scores, *(t for t in recorder.captured if t.requires_grad)]
        with recorder:
            torch.autograd.grad(out, inputs, torch.ones_like(out), allow_unused=True)


class _Recorder(HostDispatchMode):
    """Dispatch mode that records each operation with its constants and the origins of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Any] = []
        self.captured: list[Tensor] = []  # in order of first use
        self._numbers: dict[int, int] = {}
        self._references: list[Tensor] = []

    def number(self, tensors: Sequence[Any]) -> None:
        """Number these tensors, so that later operations refer to them."""
        for tensor in tensors:
            self._numbers[id(tensor)] = len(self._references)
            self._references.append(tensor)

    def describe(self, leaf: Any) -> Any:
        """A hashable form of an argument or result."""
        if not isinstance(leaf, Tensor):
            return type(leaf).__name__, repr(leaf)
        if id(leaf) in self._numbers:
            return "value", self._numbers[id(leaf)]
        place = next((i for i, tensor in enumerate(self.captured) if tensor is leaf), len(self.captured))
        if place == len(self.captured):
            self.captured.append(leaf)
        return "captured", place, leaf.dtype, leaf.shape, leaf.requires_grad, leaf.device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs or {}))
        if func is torch.ops.aten.lift_fresh.default:  # a tensor of Python numbers, inside the function
            arguments: list[Any] = [("constant", args[0].dtype, args[0].shape, repr(args[0].tolist()))]
        else:
            arguments = [*map(self.describe, leaves)]
        out = func(*args, **(kwargs or {}))
        results = tree_leaves(out)
        self.number([result for result in results if isinstance(result, Tensor)])
        constants = [self.describe(result) for result in results if not isinstance(result, Tensor)]
        self.operations.append((str(func), tuple(arguments), tuple(constants)))
        return out
