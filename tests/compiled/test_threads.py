"""The kernels of a first training step compile at once, in threads: each once, and none that the step does
not use."""

from __future__ import annotations

import gc
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

import tritoncp
from tritoncp import causal
from tritoncp.kernels import compiling
from tritoncp.kernels.backward import delta_kernel, dkdv_kernel, dq_kernel
from tritoncp.kernels.forward import forward_kernel
from tritoncp.kernels.toolchain import keeps_pending_kernels
from tritoncp.mods import Mod
from tritoncp.reference.dense import dense_attention

KERNELS: tuple[Any, ...] = (forward_kernel, delta_kernel, dq_kernel, dkdv_kernel)
NAMES = [fn.__name__ for fn in KERNELS]
LENGTH, DIM = 64, 16
pytestmark = [
    pytest.mark.skipif(not keeps_pending_kernels(), reason="Triton 3.6 compiles a pending kernel again"),
    pytest.mark.usefixtures("in_threads"),
]


class Seen(NamedTuple):
    """What Triton was asked to compile, in order; PTX and thread of each compilation."""

    asked: list[str]
    keys: list[str]
    compiled: dict[str, tuple[str, str]]


@pytest.fixture
def in_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile in threads on every machine. Python 3.11 parses in threads if no garbage is collected."""
    monkeypatch.setattr(compiling, "uses_threads", lambda: True)
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Seen:
    """Forget all compiled kernels, and record compilations."""
    found = Seen([], [], {})

    def ask(*, key: str, fn: Any, **_: Any) -> bool:
        found.asked.append(fn.name.rpartition(".")[2])
        found.keys.append(key)
        return False

    def listen(*, src: Any, metadata_group: dict[str, str], cache_hit: bool, **_: Any) -> None:
        assert not cache_hit
        (path,) = (path for name, path in metadata_group.items() if name.endswith(".ptx"))
        found.compiled[src.name] = Path(path).read_text(), threading.current_thread().name

    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", ask)
    monkeypatch.setattr(knobs.compilation, "listener", listen)
    for fn in KERNELS:
        monkeypatch.setattr(fn, "device_caches", defaultdict(fn.create_binder))
    return found


def qkv(**options: Any) -> list[Tensor]:
    return [torch.randn(1, 1, LENGTH, DIM, dtype=torch.float16, **options) for _ in range(3)]


def new_mask() -> Any:
    """Make a mask without engines of other tests, which keep their kernels."""
    return tritoncp.create_block_mask(causal(), 1, 1, LENGTH, LENGTH)


def check(results: Sequence[Tensor], x: Sequence[Tensor], dout: Tensor, mask: Any) -> None:
    """Compare out and the gradients of x with float64."""
    wide = [t.detach().double().requires_grad_() for t in x]
    expected = dense_attention(*wide, mask).out
    wanted = [expected, *torch.autograd.grad(expected, wide, dout.double())]
    for result, want in zip(results, wanted, strict=True):
        torch.testing.assert_close(result.double(), want, rtol=0, atol=0.02)


def train(*x: Tensor, dout: Tensor | None = None) -> None:
    """Run a training step, and compare its results with float64."""
    dout = torch.randn_like(x[0]) if dout is None else dout
    mask = new_mask()
    out = tritoncp.flex_attention(*x, None, mask)
    check([out, *torch.autograd.grad(out, x, dout)], x, dout, mask)


def test_a_step_compiles_each_kernel_once_and_all_at_once(seen: Seen) -> None:
    """The forward pass asks for all four; other steps ask for none."""
    x, mask = qkv(requires_grad=True), new_mask()
    out = tritoncp.flex_attention(*x, None, mask)
    assert sorted(seen.asked) == sorted(NAMES)
    torch.autograd.grad(out, x, torch.randn_like(out))
    assert sorted(seen.asked) == sorted(NAMES)
    assert sorted(seen.compiled) == sorted(NAMES)
    assert all(thread.startswith(compiling.NAME) for _, thread in seen.compiled.values())
    for other in (mask, new_mask()):
        torch.autograd.grad(tritoncp.flex_attention(*x, None, other), x, torch.randn_like(out))
    assert len(seen.asked) == len(NAMES)


@pytest.mark.parametrize(
    ("schedule", "kernels"),
    [("allgather", 4), ("fetch", 6), ("ring", 7), ("ulysses", 4), ("ulysses+ring", 4)],
)
def test_ranks_compile_a_step_at_once(seen: Seen, schedule: str, kernels: int) -> None:
    """The first rank to launch asks for the kernels of all steps, with and without a state, which the other
    rank needs too. A backward pass sends nothing for it."""
    everything, world = tritoncp.document(lengths=[LENGTH]), tritoncp.simulate(2)
    mask = tritoncp.create_block_mask(everything, 1, 1, LENGTH, LENGTH, BLOCK_SIZE=16)
    plan = world.make_plan(mask, schedule=schedule, balancer="contiguous")
    x = [torch.randn(1, 2, LENGTH, DIM, dtype=torch.float16, requires_grad=True) for _ in range(3)]
    shards = [world.shard(t, plan, dim=2) for t in x]
    out = world.unshard(world.flex_attention(*shards, None, plan), plan, dim=2)
    asked = list(seen.keys)
    assert len(asked) == len(set(asked)) == kernels and set(seen.asked) == set(NAMES)
    dout = torch.randn_like(out)
    check([out, *torch.autograd.grad(out, x, dout)], x, dout, mask)

    assert seen.keys == asked
    assert all(thread.startswith(compiling.NAME) for _, thread in seen.compiled.values())


@pytest.mark.long
def test_threads_compile_what_one_after_the_other_does(
    seen: Seen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    x = qkv(requires_grad=True)
    train(*x)
    in_threads = dict(seen.compiled)
    seen.compiled.clear()
    monkeypatch.setattr(compiling, "uses_threads", lambda: False)
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "alone"))
    for fn in KERNELS:
        monkeypatch.setattr(fn, "device_caches", defaultdict(fn.create_binder))
    train(*x)
    for name in NAMES:
        (ptx, thread), (alone, main) = in_threads[name], seen.compiled[name]
        assert ptx == alone
        assert thread.startswith(compiling.NAME) and not main.startswith(compiling.NAME)
    assert seen.keys[: len(NAMES)] != [] and sorted(seen.keys[: len(NAMES)]) == sorted(
        seen.keys[len(NAMES) :]
    )


def test_calls_without_a_backward_pass_compile_forward_only(seen: Seen) -> None:
    tritoncp.flex_attention(*qkv(), None, new_mask())
    for modes in (torch.no_grad, torch.inference_mode):
        with modes():
            tritoncp.flex_attention(*qkv(requires_grad=True), None, new_mask())
    assert seen.asked == ["forward_kernel"]


def test_a_backward_pass_alone_compiles_its_kernels_at_once(seen: Seen) -> None:
    """As after a forward pass of a compiled graph, of which nothing tells whether a backward pass follows."""
    x, mask = qkv(requires_grad=True), new_mask()
    with torch.no_grad():
        tritoncp.flex_attention(*x, None, mask)
    out = tritoncp.flex_attention(*x, None, mask)
    assert seen.asked == ["forward_kernel"]
    torch.autograd.grad(out, x, torch.randn_like(out))
    assert sorted(seen.asked) == sorted(NAMES)
    threads = {name: thread.startswith(compiling.NAME) for name, (_, thread) in seen.compiled.items()}
    assert threads == {name: name != "forward_kernel" for name in NAMES}


@pytest.mark.long
def test_a_cotangent_in_another_memory_order_needs_no_other_kernel(seen: Seen) -> None:
    dout = torch.randn(1, LENGTH, 1, DIM, dtype=torch.float16).transpose(1, 2)
    train(*qkv(requires_grad=True), dout=dout)
    assert sorted(seen.asked) == sorted(NAMES)


def test_a_gradient_of_lse_waits_for_its_own_kernel(seen: Seen) -> None:
    """Whether the lse that a call returns is differentiated, only its backward pass knows."""
    x = qkv(requires_grad=True)
    out, lse = tritoncp.flex_attention(*x, None, new_mask(), return_lse=True)
    assert sorted(seen.asked) == sorted(set(NAMES) - {"delta_kernel"})
    torch.autograd.grad([out, lse], x, [torch.randn_like(out), torch.randn_like(lse)])
    assert sorted(seen.asked) == sorted(NAMES)


@triton.jit
def same(score, b, h, q_idx, kv_idx, caps):
    return score


@triton.jit
def broken(dscore, score, b, h, q_idx, kv_idx, mask, caps, dcaps):
    tl.static_assert(False, "no gradient")
    return dscore


def test_a_fault_of_the_compiler_is_raised_where_the_kernel_is_needed(seen: Seen) -> None:
    """The forward pass is right; each backward pass raises."""
    x, mask = qkv(requires_grad=True), new_mask()
    expected = dense_attention(*[t.double() for t in x], mask).out
    for _ in range(2):
        out = tritoncp.flex_attention(*x, Mod.from_triton(same, broken), mask)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=0.01)
        with pytest.raises(triton.CompilationError):
            torch.autograd.grad(out, x, torch.randn_like(out))
    assert seen.compiled.keys() == {"forward_kernel", "delta_kernel"}


def test_a_launch_within_tritons_own_threads_is_warm_afterwards(seen: Seen) -> None:
    x, mask = qkv(), new_mask()
    with ThreadPoolExecutor(1) as pool, triton.AsyncCompileMode(pool):
        first = tritoncp.flex_attention(*x, None, mask)
    assert torch.equal(first, tritoncp.flex_attention(*x, None, mask)) and seen.asked == ["forward_kernel"]
