"""Streams of a GPU: inputs, tables and captured tensors that one stream writes and another one reads."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

import tritoncp
from tests.device import DEVICE, ON_GPU
from tests.device import TOKENS as N
from tests.kernels.support.harness import QKV, agree, cotangents, oracle, run, same
from tests.kernels.support.harness import qkv as draw
from tritoncp import Mask, create_block_mask, document, make_plan

DELAY = 1 << 30  # cycles: half a second
BLOCK = 128 if ON_GPU else 64


def documents(length: int) -> Mask:
    """A mask of block lists and row intervals, without a mask_mod in the kernel."""
    return create_block_mask(document(lengths=[length, N - length]), 1, 1, N, N, BLOCK_SIZE=BLOCK)


def striped(length: int) -> Mask:
    """A mask_mod that reads a tensor on the CPU."""
    ids = torch.arange(N, device="cpu") // length
    return create_block_mask(lambda b, h, q, kv: (ids[q] + ids[kv]) % 2 == 0, 1, 1, N, N, BLOCK_SIZE=BLOCK)


def bits(length: int) -> Mask:
    """A mask_mod that cannot be translated: the kernel reads a bitmap."""
    ids = torch.arange(N, device="cpu") // length
    return create_block_mask(
        lambda b, h, q, kv: torch.cumsum(ids, 0).msort()[q] % 3 != kv % 3, 1, 1, N, N, BLOCK_SIZE=BLOCK
    )


MASKS: dict[str, Callable[[int], Mask]] = {"documents": documents, "captures": striped, "bits": bits}


def qkv() -> QKV:
    return draw(N, heads=2, kv_heads=1, dim=64, dtype=torch.bfloat16)


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
    start = cotangents(x)
    synchronize()
    for stream in streams:  # compiled, and memory of these sizes holds another mask's tables
        with on(stream):
            run(x, make_plan(MASKS[kind](N // 5)), start=start)
    synchronize()
    gc.collect()
    plan, results = make_plan(mask), []
    for stream, delay in zip(streams, (DELAY, 0), strict=True):
        with on(stream, delay):
            results.append(run(x, plan, start=start))
    synchronize()
    for result in results:
        agree(result, oracle(x, mask, start=start))


@pytest.mark.parametrize("kind", MASKS)
def test_a_plan_that_is_dropped_while_a_kernel_runs(kind: str) -> None:
    """Its memory is not reused before the kernel has ended."""
    x, mask, side = qkv(), MASKS[kind](N // 3), new_stream()
    start = cotangents(x)
    before = torch.cuda.memory_allocated() if ON_GPU else 0
    plan, expected = make_plan(mask), MASKS[kind](N // 3)
    tritoncp.flex_attention(*x, plan, enable_gqa=True)  # copied on the default stream
    nbytes = torch.cuda.memory_allocated() - before if ON_GPU else 1 << 12
    with on(side):
        run(x, plan, start=start)  # compiled
    synchronize()
    with on(side, DELAY):
        result = run(x, plan, start=start)
    tables = weakref.ref(plan.tables(DEVICE, 1, 2))
    del plan, mask
    make_plan(expected)  # a new plan frees plans whose handles are freed
    gc.collect()
    assert tables() is None
    sizes = [1 << n for n in range(9, max(10, 2 * nbytes).bit_length())]
    rooms = [torch.zeros(size, dtype=torch.uint8) for size in sizes for _ in range(64)]
    synchronize()
    assert all(not room.any() for room in rooms)
    agree(result, oracle(x, expected, start=start))


def test_another_stream_waits_for_its_inputs() -> None:
    x, plan, stream = qkv(), make_plan(documents(N // 3)), new_stream()
    start = cotangents(x)
    first = run(x, plan, start=start)
    synchronize()
    with on(stream, DELAY):
        second = run(x._replace(q=x.q * 1.0), plan, start=start)
    synchronize()
    same((*second[:3], *second.grads), (*first[:3], *first.grads))
