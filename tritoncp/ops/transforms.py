"""Refusal of torch.func's transforms: the ops have no batching rule and no forward derivative, and only
autograd's own engine runs their backward pass."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch._C._functorch import TransformType, get_interpreter_stack, peek_interpreter_stack

_CALLERS = {
    TransformType.Grad: "torch.func.grad, vjp, jacrev or hessian",
    TransformType.Vmap: "torch.vmap, jacrev or jacfwd",
    TransformType.Jvp: "forward-mode AD, as torch.func.jvp, jacfwd or linearize",
}
_REMEDIES = {
    TransformType.Grad: "call torch.autograd.grad or backward(), which it supports once",
    TransformType.Vmap: "fold the mapped dimension into the batch dimension",
    TransformType.Jvp: "use reverse mode, torch.autograd.grad",
}


def refuse_transforms() -> None:
    """Raise RuntimeError under a transform of torch.func other than functionalize."""
    if peek_interpreter_stack() is None or torch.compiler.is_dynamo_compiling():
        return
    for interpreter in reversed(get_interpreter_stack() or []):
        refuse_transform(interpreter.key())


def refuse_transform(kind: Any) -> None:
    """Raise RuntimeError for a kind of transform that attention does not support."""
    if kind in _CALLERS:
        raise RuntimeError(
            f"tritoncp.flex_attention was called under {_CALLERS[kind]}, which it does not support: "
            f"{_REMEDIES[kind]}"
        )


def refuse_vmap(*args: Any) -> NoReturn:
    """Raise RuntimeError, as the vmap kernel of every op."""
    refuse_transform(TransformType.Vmap)
    raise AssertionError
