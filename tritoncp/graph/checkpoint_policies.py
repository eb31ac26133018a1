"""Warning about selective checkpoints that save torch's flex attention and recompute tritoncp's."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from tritoncp.core.caller import warn_caller

TORCH_FLEX = torch.ops.higher_order.flex_attention


def warn_if_repeated(op: Any, *tensors: Any) -> None:
    """Warn if the policy of a selective checkpoint around a call saves torch's flex attention but not ``op``,
    tritoncp's. tensors: query, key and value, which the policy gets as arguments of both ops."""
    for mode in _get_current_dispatch_mode_stack():
        policy = getattr(mode, "policy_fn", None)
        if policy is not None and _saves(policy, TORCH_FLEX, tensors) and not _saves(policy, op, tensors):
            warn_caller(
                "the policy of this selective checkpoint saves torch's flex_attention but not tritoncp's, so "
                "that the backward pass will compute it, and exchange its keys between ranks, again: add "
                "tritoncp.SAVE_OPS to the ops that the policy saves, or pass "
                "tritoncp.checkpoint_policy(policy)"
            )


def _saves(policy: Any, op: Any, tensors: Any) -> bool:
    """Return whether a policy saves an op; False where the policy raises."""
    from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

    try:
        answer = policy(SelectiveCheckpointContext(is_recompute=False), op, *tensors)
    except Exception:  # a user's policy, which need not handle this op
        return False
    return answer not in (False, CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
