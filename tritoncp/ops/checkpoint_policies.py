"""The warning of a selective checkpoint that saves torch's flex attention, and computes tritoncp's again."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from tritoncp.core.caller import warn_caller

TORCH_FLEX = torch.ops.higher_order.flex_attention


def warn_if_repeated(op: Any, *tensors: Any) -> None:
    """Warn if the policy of a selective checkpoint around a call saves torch's flex attention but not ``op``,
    which is what runs. tensors: query, key and value, with which the policy is asked about both."""
    for mode in _get_current_dispatch_mode_stack():
        policy = getattr(mode, "policy_fn", None)
        if policy is not None and _saves(policy, TORCH_FLEX, tensors) and not _saves(policy, op, tensors):
            warn_caller(
                "the policy of this selective checkpoint saves torch's flex_attention, which does not run "
                "here: tritoncp's is another op, and the backward pass will compute it, and exchange its "
                "keys between ranks, again. Add tritoncp.SAVE_OPS to the ops that the policy saves, or pass "
                "tritoncp.checkpoint_policy(policy)"
            )


def _saves(policy: Any, op: Any, tensors: Any) -> bool:
    """Return whether a policy saves an op. One that fails for an op has no place for it."""
    from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

    try:
        answer = policy(SelectiveCheckpointContext(is_recompute=False), op, *tensors)
    except Exception:  # of the user's function, which was not written for this op
        return False
    return answer not in (False, CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
