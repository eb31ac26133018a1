"""Tables and captured tensors that a plan copied on one stream, read by kernels on another."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

import tritoncp
from tests.gpu.support import BLOCK, DEVICE, ON_GPU, N, check, qkv, run
from tritoncp import Mask, create_block_mask, document, make_plan

DELAY = 1 << 30  # cycles: half a second


def documents(length: int) -> Mask:
    """A mask of block lists and row intervals, without a mask_mod in the kernel."""
    return create_block_mask(document(lengths=[length, N - length]), 1, 1, N, N, BLOCK_SIZE=BLOCK)


def striped(length: int) -> Mask:
    """A mask_mod that reads a tensor on the CPU."""
    ids = torch.arange(N) // length
    return create_block_mask(lambda b, h, q, kv: (ids[q] + ids[kv]) % 2 == 0, 1, 1, N, N, BLOCK_SIZE=BLOCK)


def bits(length: int) -> Mask:
    """A mask_mod that cannot be translated: the kernel reads a bitmap."""
    ids = torch.arange(N) // length
    return create_block_mask(
        lambda b, h, q, kv: torch.cumsum(ids, 0).msort()[q] % 3 != kv % 3, 1, 1, N, N, BLOCK_SIZE=BLOCK
    )


MASKS: dict[str, Callable[[int], Mask]] = {"documents": documents, "captures": striped, "bits": bits}


def new_stream() -> Any:
    return torch.cuda.Stream() if ON_GPU else None


def on(stream: Any, delay: int = 0) -> AbstractContextManager[Any]:
    """Queue work on a stream, after a delay of ``delay`` cycles."""
    if stream is None:
        return nullcontext()
    with torch.cuda.stream(stream):
        if delay:
            torch.cuda._sleep(delay)
    return torch.cuda.stream(stream)


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


@pytest.mark.parametrize("kind", MASKS)
def test_the_first_use_of_a_plan_on_two_streams_at_once(kind: str) -> None:
    """One stream is busy when the copies are queued on it; the other one waits for them."""
    x, mask, streams = qkv(), MASKS[kind](N // 3), [new_stream() for _ in range(2)]
    for stream in streams:  # compiled, and memory of these sizes holds another mask's tables
        with on(stream):
            run(x, make_plan(MASKS[kind](N // 5)))
    synchronize()
    gc.collect()
    plan, results = make_plan(mask), []
    for stream, delay in zip(streams, (DELAY, 0), strict=True):
        with on(stream, delay):
            results.append(run(x, plan))
    synchronize()
    for result in results:
        check(x, mask, got=result)


@pytest.mark.parametrize("kind", MASKS)
def test_a_plan_that_is_dropped_while_a_kernel_runs(kind: str) -> None:
    """Its memory is not reused before the kernel has ended."""
    x, mask, side = qkv(), MASKS[kind](N // 3), new_stream()
    before = torch.cuda.memory_allocated() if ON_GPU else 0
    plan, expected = make_plan(mask), MASKS[kind](N // 3)
    tritoncp.flex_attention(*x, plan, enable_gqa=True)  # copied on the default stream
    nbytes = torch.cuda.memory_allocated() - before if ON_GPU else 1 << 12
    with on(side):
        run(x, plan)  # compiled
    synchronize()
    with on(side, DELAY):
        result = run(x, plan)
    tables = weakref.ref(plan.tables(DEVICE, 1, 2))
    del plan, mask
    make_plan(expected)  # a new plan frees plans whose handles are freed
    gc.collect()
    assert tables() is None
    sizes = [1 << n for n in range(9, max(10, 2 * nbytes).bit_length())]
    rooms = [torch.zeros(size, dtype=torch.uint8, device=DEVICE) for size in sizes for _ in range(64)]
    synchronize()
    assert all(not room.any() for room in rooms)
    check(x, expected, got=result)
