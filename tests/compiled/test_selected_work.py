"""What compiled kernels of selected keys execute: work by the number of selected keys, any order of programs,
indices that are no keys: ``pytest --compiled sm_90``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.conftest import COMPILED
from tritoncp.analysis.jobs import Chosen, Variant
from tritoncp.analysis.launches import CallTensors
from tritoncp.executor import compiled_kernels
from tritoncp.kernels.engine import TritonEngine
from tritoncp.kernels.operands import Mods
from tritoncp.perf.problem import Problem
from tritoncp.planning.build import build
from tritoncp.planning.selected_rows import SelectedRows
from tritoncp.planning.step_tables import BackwardStep, ForwardStep
from tritoncp.selection import key_gradients
from tritoncp.selection.selection import Selection
from tritoncp.selection.triton_engine import SelectedTritonEngine
from tritoncp.selection.visible import VisiblePairs

PROBLEM = Problem("full", 64, 4, 1, 16, 16)
CHOSEN = {"tokens": Chosen(16), "blocks": Chosen(2, 16), "blocks of two heads": Chosen(2, 32, 1, 2)}


def instructions(kernel: str, chosen: Chosen, length: int) -> float:
    """Count the instructions that a kernel executes for each query and head."""
    problem = replace(PROBLEM, seq=length, kv_heads=chosen.shares)
    shapes = [(1, heads, length, 16) for heads in (4, chosen.shares, chosen.shares, 4)]
    inputs = [torch.randn(shape).bfloat16() for shape in shapes]
    tensors = CallTensors(problem, torch.device("cpu"), inputs, Variant(problem, chosen=chosen))
    for result in (*tensors.results("route").values(), *tensors.results("delta").values()):
        result.zero_()
    launch = tensors.launch(kernel, None, COMPILED)
    with compiled_kernels(COMPILED, count=True, check=False) as device:
        launch()
    return sum(record.counts.totals()["instructions"] for record in device.launches) / length / 4


@pytest.mark.parametrize(
    "chosen", [pytest.param(name, marks=[pytest.mark.nightly] * (name != "tokens")) for name in CHOSEN]
)
@pytest.mark.parametrize("kernel", ["forward", "dq"])
def test_a_query_takes_equal_work_in_any_sequence(kernel: str, chosen: str) -> None:
    counts = [instructions(kernel, CHOSEN[chosen], length) for length in (128, 256)]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("heads", [1, pytest.param(4, marks=pytest.mark.nightly)])
def test_gradients_of_a_key_take_equal_work_in_any_sequence(heads: int) -> None:
    """The selected keys of a query lie 16, 32 or 64 keys apart on average."""
    counts = [instructions("dkdv", Chosen(8, shares=heads), length) for length in (128, 256, 512)]
    assert max(counts) <= 1.1 * min(counts)


@pytest.mark.nightly
@pytest.mark.parametrize("kernel", ["forward", "dq", "dkdv"])
@pytest.mark.parametrize("chosen", ["tokens", "blocks"])
def test_work_is_proportional_to_selected_keys(chosen: str, kernel: str) -> None:
    """Equal numbers of keys, drawn from 1,024, 2,048 and 4,096."""
    counts = [instructions(kernel, CHOSEN[chosen], length) for length in (1024, 2048, 4096)]
    assert max(counts) <= 1.1 * min(counts)


@pytest.mark.nightly
def test_work_doubles_with_the_selected_keys() -> None:
    """Up to what a query costs alone: twice the keys, less than twice the work, and as much for each of the
    next keys."""
    first, second, third = (instructions("forward", Chosen(count), 256) for count in (64, 128, 192))
    assert third - second == second - first > 0.3 * first


def passes(selection: Selection, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Run all passes of a call with 72 queries and keys, and a causal mask."""
    g = torch.Generator().manual_seed(1)
    problem = Problem("causal", 72, 4, 2, 16, 16)
    q, k, v, dout = (torch.randn(1, heads, 72, 16, generator=g).to(dtype) for heads in (4, 2, 2, 4))
    mask = problem.block_mask(block=32)
    plan = build(mask, 1)
    tables = plan.tables("cpu", 1, 4)
    base = TritonEngine(Mods(), 0.25)
    rows = SelectedRows(*selection.unique(), plan.positions, 4, 2, selection.indices.shape[1])
    engine = SelectedTritonEngine(base, rows, VisiblePairs(mask, mask.mask_mod))
    out, (lse, delta) = torch.empty_like(dout), torch.empty(2, *q.shape[:3])
    engine.forward(ForwardStep(q, k, v, tables, out, lse, None, None, False, False))()
    engine.delta(out, dout, None, delta)()
    step = BackwardStep(q, k, v, dout, lse, delta, tables)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    engine.dq(step, dq)()
    engine.dkdv(step, dk, dv, dq)()
    return [out, lse, dq, dk, dv]


def drawn(block_size: int, query_block: int = 1) -> Selection:
    g = torch.Generator().manual_seed(3)
    rows, keys = -(-72 // query_block), -(-72 // block_size)
    indices = torch.randint(-1, keys, (1, 2, rows, 9 if block_size == 1 else 3), generator=g)
    return Selection(indices.int(), block_size, query_block)


@pytest.mark.parametrize(
    ("block_size", "query_block"),
    [
        pytest.param(1, 1, marks=pytest.mark.long),
        pytest.param(16, 1, marks=pytest.mark.long),
        pytest.param(32, 24, marks=pytest.mark.nightly),
    ],
)
def test_indices_of_no_key_are_read_as_no_address(block_size: int, query_block: int) -> None:
    """Indices past the end that nothing checked, and below -1, give the bits of -1. The executor faults at
    any access outside of a tensor."""
    selection = drawn(block_size, query_block)
    place = torch.rand(selection.indices.shape, generator=torch.Generator().manual_seed(4)) < 0.4
    keys = -(-72 // block_size)
    strange = torch.tensor([keys, keys + 7, 2**31 - 1, -2, -(2**31)]).int()
    number = strange[torch.arange(place.numel()).view(place.shape) % len(strange)]
    none = selection._replace(indices=selection.indices.masked_fill(place, -1))
    wild = selection._replace(indices=torch.where(place, number, selection.indices))
    for x, y in zip(passes(wild), passes(none), strict=True):
        assert torch.equal(x, y)


@pytest.mark.long
def test_chunks_of_queries_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five chunks, of which the first, the last and those between are launches of their own kind."""
    whole = passes(drawn(1))
    monkeypatch.setattr(key_gradients, "LEAST_ROWS", 1)
    monkeypatch.setattr(key_gradients, "ROWS_OF_KEY", 1)
    assert key_gradients.rows_of_chunk(72, 9, 72, 2) == 16
    for x, y in zip(passes(drawn(1)), whole, strict=True):
        torch.testing.assert_close(x, y, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize(
    "block_size",
    [pytest.param(1, marks=pytest.mark.long), pytest.param(16, marks=pytest.mark.nightly)],
)
def test_bits_do_not_depend_on_the_order_of_execution(block_size: int) -> None:
    """The seed orders programs and warps, and the executor reports races."""
    results = []
    for seed in (None, 1, 2):
        with compiled_kernels(COMPILED, seed=seed):
            results.append(passes(drawn(block_size)))
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))
