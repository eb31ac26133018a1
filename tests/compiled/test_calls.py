"""Calls that run every kernel, kind of mask and route on compiled code: ``pytest --compiled sm_90``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.cases import Case, check
from tests.compiled.routes import check_route
from tests.kernels.support.harness import transposed_products

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# Two tiles of queries and of keys, the last ones ragged.
CALL = Case(heads=1, group=2, length=150, kv_length=150, dims=(64, 64), dtype=BF16, block=128)
SHORT = replace(CALL, length=90, kv_length=90, dtype=F32, block=64)  # float32 has small tiles
# Batch rows and heads of unlike strides in tensors, lists of blocks and intervals. Either batch row sees a
# block that the other one does not see.
ROWS = replace(
    CALL, mask=("causal documents of rows", 6), batch=2, heads=2, group=1, length=100, kv_length=100,
    own_lists=(True, True), block=32,
)  # fmt: skip
ONE_STEP = {
    "causal": CALL,
    "everything": replace(CALL, mask=("everything", 0), score="softcap", dims=(128, 128), dtype=F16, group=1),
    "documents": replace(ROWS, score="alibi", layout="heads inside"),
    "window": replace(CALL, mask=("window", 31), dims=(80, 96), layout="heads inside"),
    "trees": replace(CALL, mask=("trees", 30), batch=2, group=1),
    "bits": replace(SHORT, mask=("bits", 3), own_lists=(False, True)),
    "hidden rows": replace(CALL, mask=("hidden rows", 2), score="hides", sinks=True),
    "wide": replace(CALL, dims=(192, 128), score="slopes", scale=-0.2, group=1),
    "widest": replace(CALL, dims=(256, 256), group=1),
    "a graph": replace(CALL, compiled=True, score="slopes", group=1),
    "narrow": replace(SHORT, dims=(16, 16), mask=("prefix", 40)),
    "no descriptors": replace(CALL, layout="one channel"),
    "odd blocks": replace(CALL, group=1, block=100, mask=("prefix", 130)),
    "one key": replace(
        CALL, length=37, kv_length=1, group=1, dims=(16, 1), dtype=F16, score="by row", block=4
    ),
    "few rows": replace(CALL, length=3, kv_length=300, group=4, mask=("prefix", 200)),
    "split keys": replace(
        CALL, length=20, kv_length=300, mask=("everything", 0), options={"SPLIT_KV": 3}, loss="forward"
    ),
}
RANKS = {
    "ring": replace(CALL, world=2, schedule="ring", balancer="ptrr", block=64),
    "fetch": replace(
        CALL, mask=ROWS.mask, batch=2, group=1, world=2, schedule="fetch", balancer="ptrr", block=64
    ),
}
RANKS["ring, forward"] = replace(RANKS["ring"], loss="forward")
# Each run has a call with a backward pass and one with split keys, make test-all has all calls. Pointers in
# place of descriptors are in test_launches.py.
FIRST = "causal", "split keys"
TRANSPOSED = {
    "fused": replace(CALL, options={"FUSED_BACKWARD": True}),
    "fused, more channels": replace(CALL, dims=(128, 128), options={"FUSED_BACKWARD": True}),
    "flip": replace(CALL, length=300, kv_length=300, group=1, options={"bwd_FLIP": True}),
}
# Three tiles of queries and of keys. In 128 channels, sums are rescaled in two pieces.
SPLIT = replace(CALL, options={"ROUTE": "specialized"}, loss="forward", group=1, length=300, kv_length=300)
SPECIALIZED = {
    "causal": replace(SPLIT, dims=(128, 128), group=2),
    "everything": replace(SPLIT, mask=("everything", 0), score="softcap", dims=(64, 128), dtype=F16),
    "documents": replace(SPLIT, mask=("causal documents of rows", 6), batch=2, score="alibi"),
    "window": replace(SPLIT, mask=("window", 31), dims=(128, 64), layout="heads inside"),
    "hidden rows": replace(SPLIT, mask=("hidden rows", 2), score="hides", sinks=True),
    "a bias of keys": replace(SPLIT, score="bias of keys", dims=(128, 128)),  # loaded for each score
    "ring": replace(SPLIT, world=2, schedule="ring", balancer="ptrr", length=512, kv_length=512),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name not in FIRST)) for name in ONE_STEP]
)
def test_call(name: str) -> None:
    check(ONE_STEP[name])


@pytest.mark.long
@pytest.mark.parametrize("name", RANKS)
def test_ranks(name: str) -> None:
    check(RANKS[name])


@pytest.mark.long
@pytest.mark.parametrize("name", TRANSPOSED)
def test_transposed_products(name: str) -> None:
    with transposed_products():
        check(TRANSPOSED[name])


@pytest.mark.long
@pytest.mark.parametrize("name", SPECIALIZED)
def test_specialized(name: str) -> None:
    """Warps with roles of their own, in several orders. Only Blackwell has the route: other GPUs take the
    loops, and say so."""
    check_route("specialized", SPECIALIZED[name])
