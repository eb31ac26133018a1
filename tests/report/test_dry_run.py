"""Tests of dry runs: bytes worked out by hand; the ranks and turns that are taken have the most of all."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.planning.test_placement import placements
from tritoncp import Plan, and_masks, causal, create_block_mask, document, full_mask, sliding_window
from tritoncp.core.records import replace
from tritoncp.planning.build import build
from tritoncp.planning.costs.layer import Shape
from tritoncp.report import dry_run
from tritoncp.report.dry_run import Peak, largest_peak, measure
from tritoncp.report.memory_meter import MemoryMeter

SCHEDULES = ["allgather", "ring", "fetch", "ulysses", "ulysses+ring"]


# -- by hand ----------------------------------------------------------------------------------------------

W, ROWS, HEADS, D, E = 4, 32, 4, 8, 16  # ranks, and rows, query heads and head dims of each
KV = ROWS * 2 * (D + E)  # elements of K and V of a rank: two heads
Q, O, STAT = ROWS * HEADS * D, ROWS * HEADS * E, ROWS * HEADS
STATE = O + 2 * STAT  # (acc, m, l)
# Elements that are alive at the largest moment: in the layer's dtype, and in float32. Backward, delta and the
# wide dQ are there too, and the results do not count. Every rank sees all keys.
BY_HAND = {
    "allgather": ((W * KV + KV, 0), (W * KV - KV, (W + 2) * KV + STAT)),  # at the end a rank's sums twice
    "ring": ((2 * KV, STATE), (2 * KV - Q - KV, 3 * KV + STAT + Q)),
    "fetch": (
        (2 * (W - 1) * KV, STATE),  # the rows sent, and those fetched
        (KV + (W - 1) * KV - Q - KV, KV + 2 * (W - 1) * KV + KV + STAT + Q),  # gradients, and a rank's part
    ),
}


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("schedule", BY_HAND)
def test_bytes_are_those_worked_out_by_hand(schedule: str, itemsize: int) -> None:
    plan = build(full_mask(W * ROWS, W * ROWS, block=8), W, schedule=schedule)
    shape = Shape(1, HEADS, 2, D, E, itemsize)
    forward, backward = (item * itemsize + wide * 4 for item, wide in BY_HAND[schedule])
    assert measure(plan, shape) == (forward, backward)


def test_a_rank_without_others_allocates_delta_alone() -> None:
    plan = build(full_mask(64, 64, block=8), 1)
    assert largest_peak(plan, Shape(2, 4, 2, 8, 16)) == (0, 2 * 4 * 64 * 4)


def test_freed_memory_is_counted_no_more() -> None:
    given_before = torch.empty(100, dtype=torch.uint8, device="meta")
    with MemoryMeter([given_before]) as meter:
        parts = list(torch.empty(10, dtype=torch.uint8, device="meta").split(5))
        given_before[:4].add_(1)
        sizes = [meter.live]
        for part in (parts.pop, parts.pop):
            part()
            sizes.append(meter.live)
    assert sizes == [10, 10, 0] and meter.peak == 10


def test_operations_on_the_host_are_those_without_a_meter() -> None:
    rows = torch.arange(6)
    with MemoryMeter() as meter:
        got = (
            torch.cat([rows % 4, rows // 4]),
            torch.stack((rows, rows))[rows[:2]],
            torch.zeros_like(rows).add_(1),
        )
    want = (
        torch.cat([rows % 4, rows // 4]),
        torch.stack((rows, rows))[rows[:2]],
        torch.zeros_like(rows).add_(1),
    )
    assert all(map(torch.equal, got, want)) and meter.peak == 0


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_sizes_in_a_meter_are_those_that_torch_gives(dim: int) -> None:
    x, rows = (
        torch.empty(2, 3, 4, device="meta").transpose(0, 2),
        torch.empty(5, dtype=torch.int64, device="meta"),
    )

    def sizes() -> list[tuple[object, ...]]:
        made = (
            torch.cat([x, x], dim),
            torch.stack((x, x), dim),
            x[rows],
            x[rows, rows],
            torch.empty_like(x),
            rows % 2,
        )
        made += torch.zeros_like(x, dtype=torch.float64), rows // 2, x.clone().add_(x)
        return [(one.shape, one.dtype, one.device) for one in made]

    with MemoryMeter([x, rows]):
        got = sizes()
    assert got == sizes()


# -- ranks and turns --------------------------------------------------------------------------------------


@st.composite
def shapes(draw: Callable, batch: int, latents: bool = False) -> Shape:
    """Draw layers of every dtype, grouped heads and head dims."""
    group, kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    dims = draw(st.sampled_from([(8, 8), (4, 16), (24, 8)]))
    latent = draw(st.integers(1, 40)) if latents else 0
    return Shape(batch, group * kv_heads, kv_heads, *dims, draw(st.sampled_from([1, 2, 4, 8])), latent)


@st.composite
def sparse_plans(draw: Callable) -> Plan:
    """Draw plans of up to 24 ranks whose masks leave ranks out: documents and windows."""
    world, length = draw(st.integers(2, 24)), draw(st.integers(24, 200))
    cuts = sorted(draw(st.sets(st.integers(1, length - 1), max_size=8)))
    documents = document(lengths=[b - a for a, b in pairwise([0, *cuts, length])])
    window = sliding_window(draw(st.integers(0, length)), draw(st.sampled_from([0, 3, length])))
    mod = draw(
        st.sampled_from([and_masks(causal(), documents), documents, window, and_masks(window, documents)])
    )
    mask = create_block_mask(mod, 1, 1, length, length, BLOCK_SIZE=draw(st.integers(1, 8)))
    return build(mask, world, balancer=draw(st.sampled_from(["ptrr", "contiguous", None])))


@st.composite
def layers(draw: Callable, latents: bool = False) -> tuple[Plan, Shape]:
    """Draw a plan of any schedule, and a layer."""
    plan = draw(st.one_of(placements(draw(st.integers(1, 8)), draw(st.integers(1, 30))), sparse_plans()))
    schedules = SCHEDULES[:3] if latents else SCHEDULES
    plan = replace(plan, schedule=draw(st.sampled_from(schedules)), handle=None)
    return plan, draw(
        shapes(plan.batch * draw(st.sampled_from([1, 2]) if plan.batch == 1 else st.just(1)), latents)
    )


def of_every_rank_and_turn(plan: Plan, shape: Shape) -> Peak:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dry_run, "differing_turns", tuple)
        peaks = [measure(plan.for_rank(rank), shape) for rank in range(plan.world_size)]
    return Peak(*map(max, zip(*peaks, strict=True)))


@pytest.mark.long
@given(layers())
def test_the_ranks_and_turns_that_are_measured_have_the_most_of_all(layer: tuple[Plan, Shape]) -> None:
    assert largest_peak(*layer) == of_every_rank_and_turn(*layer)


@given(layers(latents=True))
def test_the_expanded_keys_of_a_latent_are_measured_beside_every_buffer(layer: tuple[Plan, Shape]) -> None:
    """A turn of a ring counts as one that reads its keys."""
    plan, shape = layer
    got, want = largest_peak(plan, shape), of_every_rank_and_turn(plan, shape)
    if plan.schedule == "ring" and not plan.is_local:
        assert all(a >= b for a, b in zip(got, want, strict=True))
    else:
        assert got == want
