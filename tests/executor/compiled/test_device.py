"""The executor as Triton's device: faults that name source lines, seeds that keep bits, counts."""

import copy
import doctest
import gc
import importlib
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.driver import driver as drivers

from tests.conftest import COMPILED
from tritoncp.executor import ExecutionFault, compiled_kernels

assert COMPILED


def test_the_example_of_the_docstring_runs() -> None:
    failed, tried = doctest.testmod(importlib.import_module("tritoncp.executor.device"))
    assert tried > 0 and failed == 0


@triton.jit
def add(X, Y, OUT, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + i, mask=i < n)  # the line that a fault must name
    tl.store(OUT + i, x + tl.load(Y + i, mask=i < n), mask=i < n)


@triton.jit
def normalise(X, OUT, N: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    x = tl.load(X + row * N + tl.arange(0, N)[None, :])
    e = tl.exp(x - tl.max(x, 1)[:, None])
    tl.store(OUT + row * N + tl.arange(0, N)[None, :], e / tl.sum(e, 1)[:, None])


@triton.jit(repr=lambda specialization: f"add_{specialization.constants['BLOCK']}")
def add_one(X, OUT, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(OUT + i, tl.load(X + i) + 1)


def test_kernels_that_name_their_compiled_form_run() -> None:
    """Kernels of triton_kernels do so."""
    x, out = torch.randn(64), torch.empty(64)
    kernel: Any = add_one
    with compiled_kernels(COMPILED) as device:
        kernel[(1,)](x, out, 64)
    assert torch.equal(out, x + 1)
    assert [launch.kernel for launch in device.launches] == ["add_64"]


def test_a_fault_names_kernel_line_threads_and_tensor() -> None:
    x, y, out = torch.randn(100), torch.randn(128), torch.empty(128)
    with pytest.raises(ExecutionFault) as raised, compiled_kernels(COMPILED):
        add[(1,)](x, y, out, 128, 128)
    (fault,) = raised.value.faults
    assert fault.kind == "out of bounds global load"
    assert fault.kernel == "add"
    file, line = fault.source.rsplit(":", 1)
    assert file.endswith("test_device.py")
    with open(__file__) as text:
        assert "the line that a fault must name" in text.read().splitlines()[int(line) - 1]
    assert fault.count == 28
    assert fault.threads == (100, 101, 102, 103)
    assert fault.program == (0, 0, 0)
    assert fault.tensor == "X"
    assert fault.address is not None and fault.address >= x.data_ptr() + 400
    assert "past the end of X" in str(raised.value)


def test_kernels_that_are_dropped_later_leave_other_drivers_alone(monkeypatch: Any) -> None:
    """Triton 3.8 and newer unload the module of a kernel that is dropped, by the driver that is active."""
    raised: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", raised.append)
    monkeypatch.setattr(add, "device_caches", copy.copy(add.device_caches))
    add.device_caches.clear()
    x, out = torch.randn(2, 128)
    with compiled_kernels(COMPILED):
        compiled = add[(1,)](x, x, out, 128, 128)
        compiled[1, 1, 1](x, x, out, 128, 128)  # like launches that keep their kernels
    assert torch.equal(out, 2 * x)
    dropped = weakref.ref(compiled)
    add.device_caches.clear()
    with monkeypatch.context() as patch:
        patch.setattr(drivers, "_active", None)  # on a machine without a GPU: Triton finds none
        del compiled
        gc.collect()
    assert dropped() is None and not raised


def test_modules_of_a_gpu_are_unloaded_by_its_driver(monkeypatch: Any) -> None:
    """Their kernels may be dropped while the executor runs others."""
    unloaded: list[int] = []
    gpu = SimpleNamespace(utils=SimpleNamespace(unload_module=unloaded.append))
    monkeypatch.setattr(drivers, "_default", gpu)
    with compiled_kernels(COMPILED):
        drivers.active.utils.unload_module(7)
    assert unloaded == [7]


def test_faults_without_raising() -> None:
    x, out = torch.randn(100), torch.zeros(128)
    with compiled_kernels(COMPILED, raise_faults=False) as device:
        add[(2,)](x, out, out, 128, 64)
    assert [f.kind for f in device.faults] == ["out of bounds global load"]


@pytest.mark.bar(7)
def test_a_tensor_beside_another_is_out_of_bounds() -> None:
    """Both halves are allocated: a GPU would not notice."""
    memory = torch.zeros(128)
    with pytest.raises(ExecutionFault, match="past the end of X, in Y"), compiled_kernels(COMPILED):
        add[(1,)](memory[:64], memory[64:], torch.empty(128), 128, 128)


def test_elements_outside_of_a_launch_are_never_written() -> None:
    """The first launch writes one half of its output, the second one reads it whole."""
    x = torch.randn(128)
    with compiled_kernels(COMPILED, raise_faults=False) as device:
        half, out = torch.empty_like(x), x.new_empty(128)
        add[(1,)](x, x, half, 128, 64)
        assert device.faults == []
        add[(2,)](half, x, out, 128, 64)
    (fault,) = device.faults
    assert fault.kind == "read of global memory that was never written"
    assert fault.text == "byte 256 of X"
    assert torch.equal(out[:64], 3 * x[:64])


def test_seeds_keep_bits_and_the_launch_is_recorded() -> None:
    x = torch.randn(24, 256)
    results = []
    for seed in (None, 1, 2):
        out = torch.empty_like(x)
        with compiled_kernels(COMPILED, seed=seed) as device:
            normalise[(6,)](x, out, 256, 4)
        (record,) = device.launches
        assert (record.kernel, record.grid, record.warps) == ("normalise", (6, 1, 1), 4)
        results.append(out)
    assert torch.allclose(results[0], x.softmax(1), atol=1e-6)
    assert all(torch.equal(out, results[0]) for out in results)


def test_counts_include_every_warp() -> None:
    x, y, out = (torch.zeros(4096) for _ in range(3))
    with compiled_kernels(COMPILED, count=True) as device:
        add[(4,)](x, y, out, 4096, 1024)
    counts = device.launches[0].counts
    assert counts is not None
    totals = counts.totals()
    assert (totals["global nbytes"], totals["global units"], totals["global least"]) == (49152, 1536, 1536)
    assert (totals["distinct sectors read"], totals["distinct sectors write"]) == (1024, 512)
    assert totals["active"] == totals["slots"]


def test_architectures_take_turns() -> None:
    """Triton keeps kernels by device, and each architecture is a separate device."""
    x = torch.randn(64)
    for architecture in ("sm_80", "sm_90", "sm_80"):
        out = torch.empty(64)
        with compiled_kernels(architecture) as device:
            add[(1,)](x, x, out, 64, 64)
        assert device.architecture == architecture
        assert torch.equal(out, 2 * x)


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(ValueError, match="sm_70"), compiled_kernels("sm_70"):
        pass


@triton.jit
def from_pointers(P, OUT, n: tl.constexpr):
    i = tl.arange(0, n)
    x = tl.load(P).to(tl.pointer_type(tl.float32))
    tl.store(OUT + i, tl.load(x + i))


@pytest.mark.parametrize("n", [64, 128])
def test_pointers_in_memory_are_checked_by_place(n: int) -> None:
    """A table of pointers: an address that came out of memory may lie in any tensor of the launch."""
    x, out = torch.randn(64), torch.empty(n)
    kernel: Any = from_pointers
    with pytest.raises(ExecutionFault, match="out of bounds global load"), compiled_kernels(COMPILED):
        kernel[(1,)](torch.tensor([x.data_ptr()]), out, n)


@triton.jit
def sine_and_cosine(X, SIN, COS, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(SIN + i, tl.sin(tl.load(X + i)))
    tl.store(COS + i, tl.cos(tl.load(X + i)))


def test_functions_that_the_compiler_calls() -> None:
    """float64 sines of large angles: PTX has a `.func` that reduces them."""
    x = torch.tensor([0.5, 100.0, 1e8, -3e15, 1e20, 1e300, 1e308, 2.0**32], dtype=torch.float64).repeat(8)
    sine, cosine = torch.empty_like(x), torch.empty_like(x)
    kernel: Any = sine_and_cosine
    assert "call.uni" in kernel[(1,)](x, sine, cosine, 64).asm["ptx"]
    torch.testing.assert_close(sine, x.sin(), rtol=1e-15, atol=1e-15)
    torch.testing.assert_close(cosine, x.cos(), rtol=1e-15, atol=1e-15)


@triton.jit
def add_atomically(X, OUT, n: tl.constexpr):
    i = tl.program_id(0) * n + tl.arange(0, n)
    tl.atomic_add(OUT + i % 8, tl.load(X + i))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int32])
def test_atomic_sums(dtype: torch.dtype) -> None:
    """Atomic updates of 16 bits are pairs, vectors of pairs, or loops around a compare-and-swap."""
    x, out = torch.randint(0, 3, (256,)).to(dtype), torch.zeros(8, dtype=dtype)
    kernel: Any = add_atomically
    kernel[(2,)](x, out, 128)
    assert torch.equal(out.double(), x.double().view(-1, 8).sum(0))


@triton.jit
def double_boxes(X, OUT, M, N: tl.constexpr, ROWS: tl.constexpr):
    x = tl.make_tensor_descriptor(X, shape=[M, N], strides=[N, 1], block_shape=[ROWS, N])
    out = tl.make_tensor_descriptor(OUT, shape=[M, N], strides=[N, 1], block_shape=[ROWS, N])
    out.store([tl.program_id(0) * ROWS, 0], 2 * x.load([tl.program_id(0) * ROWS, 0]))


def test_descriptors_that_a_kernel_makes() -> None:
    """The last box ends outside of the tensor."""
    x, out = torch.randn(80, 32), torch.zeros(80, 32)
    kernel: Any = double_boxes
    compiled = kernel[(3,)](x, out, 80, 32, 32)
    assert torch.equal(out, 2 * x)
    assert ("tensormap.replace" in compiled.asm["ptx"]) == (COMPILED != "sm_80")
