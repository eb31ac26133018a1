"""Heads of more than 256 channels on compiled code: ``pytest --compiled sm_90``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.cases import Case, check

# Two tiles of queries and of keys, the last ones ragged; grouped heads.
CALL = Case(heads=1, group=2, length=70, kv_length=70, dims=(512, 512), dtype=torch.bfloat16, block=64)
CALLS = {
    "gemma4": CALL,
    "absorbed": replace(CALL, dims=(576, 512), mask=("window", 31)),
    "three pieces": replace(CALL, dims=(320, 264), mask=("bits", 3), dtype=torch.float16),
    "documents": replace(CALL, mask=("causal documents of rows", 6), batch=2, dims=(384, 448), sinks=True),
    "few rows": replace(CALL, length=3, kv_length=150, group=4, mask=("prefix", 100)),
    "split keys": replace(CALL, length=20, kv_length=150, options={"SPLIT_KV": 2}),
    "no descriptors": replace(CALL, layout="one channel"),
    "ring": replace(CALL, world=2, schedule="ring", balancer="ptrr", length=130, kv_length=130),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", CALLS)
def test_wide_heads(name: str) -> None:
    check(CALLS[name])
