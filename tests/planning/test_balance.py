"""Tests of balancers: every block is assigned once, evenly; PTRR equals torch's; locality sends few rows."""

from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _load_balancer as theirs

from tests.planning.test_plan import masks
from tritoncp import (
    Mask,
    Plan,
    and_masks,
    balancers,
    causal,
    create_block_mask,
    document,
    make_plan,
    sliding_window,
    tree,
)
from tritoncp.masks.runs.block_runs import ABSENT, Kind, Runs
from tritoncp.perf.problem import Problem, corpus_lengths, document_lengths
from tritoncp.planning.balance import assign_blocks, contiguous, head_tail, locality, per_document, ptrr
from tritoncp.planning.build import build
from tritoncp.planning.locality.branches import whole_branches
from tritoncp.planning.locality.pieces import even_counts, loads
from tritoncp.planning.locality.search import count_remote, even_work
from tritoncp.planning.locality.windows import FreeBlocks
from tritoncp.planning.work import MASKED_BLOCK_COST, Work, work_of_rows

SCHEDULING = ["lpt", "spt"]
EVEN_COUNTS = sorted({*balancers} - {*SCHEDULING})
costs_lists = st.lists(st.integers(0, 20), max_size=60)
MOST = {  # share of a full gather that locality fetches on 8 ranks, by mask of perf.problem.MASKS
    "causal": 0.75, "window": 0.02, "window4k": 0.09, "corpus": 0.13, "document": 0.17,
    "corpus-window": 0.03, "prefix": 0.78, "shared-question": 0.29,
}  # fmt: skip


def fetched_rows(plan: Plan) -> int:
    """Count the rows of keys and values that all ranks together fetch, for one batch row."""
    return int(plan.traffic.clone().fill_diagonal_(0).sum()) // max(plan.mask.B, plan.q.batch)


def fetched_share(plan: Plan) -> float:
    """Return the number of rows that a fetch sends, divided by the rows of an all-gather."""
    return fetched_rows(plan) / ((plan.world_size - 1) * plan.kv.length)


# -- every balancer -----------------------------------------------------------------------------------


def assert_assigned(ranks: list[list[int]], n: int) -> None:
    """Assert that every block is on one rank, in order, and that numbers of blocks differ by one at most."""
    assert sorted(chain(*ranks)) == list(range(n))
    assert all(rank == sorted(rank) for rank in ranks)
    assert max(map(len, ranks)) - min(map(len, ranks)) <= 1


@given(costs_lists, st.integers(1, 9), st.sampled_from(EVEN_COUNTS))
@pytest.mark.bar(13)
def test_every_balancer_assigns_each_block_once_in_order_and_evenly(
    costs: list[int], world_size: int, name: str
) -> None:
    ranks = balancers[name](Work(torch.tensor(costs, dtype=torch.int64), world_size))
    assert len(ranks) == world_size
    assert_assigned(ranks, len(costs))
    assert name != "contiguous" or list(chain(*ranks)) == list(range(len(costs)))
    means = [sum(rank) / len(rank) for rank in ranks if rank]
    assert name != "locality" or (means == sorted(means) and all(ranks[: len(means)]))


def assign_in_order(costs: list[int], world_size: int, descending: bool) -> list[set[int]]:
    """Assign blocks in the order of their work to the lightest rank with room, as defined."""
    ranks: list[list[int]] = [[] for _ in range(world_size)]
    for block in sorted(range(len(costs)), key=lambda i: (-costs[i] if descending else costs[i], i)):
        free = [rank for rank in ranks if len(rank) < -(-len(costs) // world_size)]
        min(free, key=lambda rank: sum(costs[i] for i in rank)).append(block)
    return list(map(set, ranks))


@given(costs_lists, st.integers(1, 9), st.sampled_from(SCHEDULING))
def test_blocks_by_processing_time_go_to_the_lightest_rank_with_room(
    costs: list[int], world_size: int, name: str
) -> None:
    ranks = balancers[name](Work(torch.tensor(costs, dtype=torch.int64), world_size))
    assert list(map(set, ranks)) == assign_in_order(costs, world_size, name == "lpt")
    assert all(rank == sorted(rank) for rank in ranks)


@given(masks(), st.integers(1, 12), st.sampled_from(EVEN_COUNTS), st.sampled_from(["q", "kv"]))
def test_balancers_assign_blocks_of_any_mask_and_are_deterministic(
    mask: Mask, world_size: int, name: str, side: str
) -> None:
    for work in work_of_rows([mask], world_size, side):
        ranks = assign_blocks(balancers[name], work)
        assert_assigned(ranks, len(work.costs))
        assert ranks == assign_blocks(balancers[name], work)


def work_of_blocks(visible: Tensor, world_size: int) -> Work:
    """Make the work of blocks that cost their number of ``visible`` columns: bool [n, n]."""
    runs = Runs.from_kinds(torch.where(visible, int(Kind.MASKED), ABSENT).to(torch.uint8)[None, None])
    return Work(visible.sum(1).double(), world_size, (runs,))


@given(st.integers(1, 11), st.integers(0, 10), st.sets(st.integers(0, 10), max_size=3), st.integers(1, 9))
def test_locality_takes_columns_that_all_blocks_see_and_rows_that_see_all_columns(
    n: int, column: int, rows: set[int], world_size: int
) -> None:
    """The block of such a column is a common prefix to locality, at any place and of any cost."""
    listed = torch.eye(n, dtype=torch.bool)
    listed[:, column % n] = True
    listed[[row % n for row in rows]] = True
    assert_assigned(assign_blocks(locality, work_of_blocks(listed, world_size)), n)


@given(masks(), st.integers(2, 6), st.integers(0, 99))
def test_remote_columns_are_seen_by_ranks_that_do_not_have_them(mask: Mask, ranks: int, seed: int) -> None:
    (work, *_), random = work_of_rows([mask], ranks), torch.Generator().manual_seed(seed)
    owner = torch.randint(ranks, work.costs.shape, generator=random)
    remote = torch.zeros(ranks, work.columns, dtype=torch.bool)
    for row, start, end in work.sees[0].tolist():
        remote[owner[row], start:end] = True
    if work.together:
        remote[owner, torch.arange(work.columns)] = False
    assert count_remote(owner, work) == int(remote.sum())


# -- torch's ------------------------------------------------------------------------------------------


WINDOW = and_masks(causal(), sliding_window(100))
TORCHS_MASKS = {
    "causal": causal(),
    "documents": and_masks(causal(), document(lengths=[100, 28, 300, 84])),
    "long and short documents": document(lengths=[7] * 32 + [288]),
    "windows": sliding_window(60, 20),
    "window and documents": and_masks(WINDOW, document(lengths=[200, 56, 256])),
    "full": lambda b, h, q, kv: q >= 0,
    "strips": lambda b, h, q, kv: (q // 16 % 3 == 0) | (kv > q),
    "batch rows": and_masks(causal(), document(lengths=[[100, 412], [300, 212]])),
}


@pytest.mark.sample(24)
@pytest.mark.parametrize("name", TORCHS_MASKS)
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_unweighted_ptrr_places_every_token_as_torch(name: str, world_size: int) -> None:
    batch = 2 if name == "batch rows" else 1
    mask = create_block_mask(TORCHS_MASKS[name], batch, 1, 512, 512, BLOCK_SIZE=16)
    want = theirs._PTRRLoadBalancer(mask.to_block_mask(), world_size)._generate_indices()
    plan = make_plan(mask, world_size=world_size, balancer="ptrr_unweighted" if world_size > 1 else "ptrr")
    positions = torch.cat([plan.for_rank(rank).positions for rank in range(world_size)], 1)
    if world_size > 1:
        assert torch.equal(positions, want)
    else:  # one rank keeps natural order, also in torch
        assert torch.equal(positions.expand_as(want), want)


@given(masks(), st.integers(2, 6))
def test_unweighted_ptrr_balances_listed_blocks(mask: Mask, world_size: int) -> None:
    """Counts are summed over heads; the counts of any two ranks differ by at most the max of a block."""
    for row, work in enumerate(work_of_rows([mask], world_size)):
        listed = (mask.runs.to_kinds() != 3).sum((1, 3))[row]
        assert torch.equal(work.listed, listed.double())
        sums = [int(listed[rank].sum()) for rank in balancers["ptrr_unweighted"](work)]
        assert max(sums) - min(sums) <= int(listed.max())


@given(st.integers(1, 6), st.integers(1, 6))
def test_head_tail_is_torchs_head_tail_order(piece: int, world_size: int) -> None:
    n = 2 * world_size * piece
    want = theirs._HeadTailLoadBalancer(n, world_size, "cpu")._generate_indices()
    assert list(chain(*head_tail(Work(torch.ones(n), world_size)))) == want[0].tolist()


@given(st.lists(st.floats(0, 1e6), max_size=60), st.integers(1, 9))
def test_ptrr_is_within_the_dearest_block_of_even(costs: list[float], world_size: int) -> None:
    """In zig-zag order the difference between two ranks telescopes to at most the largest cost."""
    work = torch.tensor(costs, dtype=torch.float64)
    sums = [float(work[rank].sum()) for rank in ptrr(Work(work, world_size))]
    assert max(sums) - min(sums) <= max(costs, default=0) * (1 + 1e-9)


# -- what a balancer is told --------------------------------------------------------------------------


@given(masks())
def test_views_hold_costs_and_visible_columns_of_every_block(mask: Mask) -> None:
    kinds = mask.runs.to_kinds()  # [B, H, rows, columns]
    masked, full = ((kinds == 0) | (kinds == 2)).sum((1, 3)), (kinds == 1).sum((1, 3))
    held = (torch.arange(mask.q_len) // mask.q_block).bincount(minlength=kinds.shape[2])
    for row, work in enumerate(work_of_rows([mask], 3)):
        whole = (masked * MASKED_BLOCK_COST + full)[row].double()
        torch.testing.assert_close(work.costs, whole * held / mask.q_block)
        visible = (kinds[row] != 3).any(0)  # [rows, columns]
        said = torch.zeros(len(work.costs), work.columns, dtype=torch.bool)
        for block, start, end in work.sees[0].tolist():
            assert start < end <= work.columns and not bool(said[block, start:end].any())
            said[block, start:end] = True
        unit = mask.q_block if work.together else mask.kv_block
        tokens = visible.repeat_interleave(mask.kv_block, 1)[:, : mask.kv_len]
        short = -mask.kv_len % unit
        assert torch.equal(said, torch.nn.functional.pad(tokens, (0, short)).unflatten(1, (-1, unit)).any(2))


@given(st.lists(st.integers(0, 40), max_size=24), st.integers(1, 6), st.integers(0, 99))
def test_locality_moves_and_swaps_blocks_only_where_that_helps(
    costs: list[int], world_size: int, seed: int
) -> None:
    work = Work(torch.tensor(costs, dtype=torch.float64), world_size)
    owner = torch.randint(-1, world_size, (len(costs),), generator=torch.Generator().manual_seed(seed))
    even = even_counts(owner, work)
    before, counts = owner[owner >= 0].bincount(minlength=world_size), even.bincount(minlength=world_size)
    share, longer = divmod(len(costs), world_size)
    most = sorted(range(world_size), key=lambda rank: (-int(before[rank]), rank))[:longer]
    assert counts.tolist() == [share + (rank in most) for rank in range(world_size)]
    assert int((owner != even).sum()) == int((before - counts).clamp(min=0).sum() + (owner < 0).sum())
    load = loads(even[owner == even], work.costs[owner == even], world_size)
    room = counts - even[owner == even].bincount(minlength=world_size)
    for block in sorted((owner != even).nonzero()[:, 0].tolist(), key=lambda i: (-costs[i], i)):
        assert load[even[block]] == load[room > 0].min()
        load[even[block]] += costs[block]
        room[even[block]] -= 1
    for rank in range(world_size):
        left, stayed = (work.costs[(owner == rank) & moved] for moved in (owner != even, owner == even))
        assert not len(left) or not len(stayed) or left.max() <= stayed.min()
    cap = 1.02 * float(work.costs.mean().nan_to_num()) * len(costs) / world_size
    swapped = even_work(even.clone(), work, cap)
    load = loads(swapped, work.costs, world_size)
    assert torch.equal(swapped.bincount(minlength=world_size), counts)
    assert load.max() <= loads(even, work.costs, world_size).max()
    busy = int(load.argmax())
    for other in range(world_size if load[busy] > cap else 0):
        change = work.costs[swapped == busy][:, None] - work.costs[swapped == other]
        assert not bool(((change > 0) & (change < load[busy] - load[other])).any())


def test_several_masks_each_count_for_one_layer() -> None:
    full = create_block_mask(causal(), None, 4, 64, 64, BLOCK_SIZE=8)
    near = create_block_mask(sliding_window(8), None, None, 64, 64, BLOCK_SIZE=8)
    (alone,), (both,) = work_of_rows([near], 2), work_of_rows([full, near], 2)
    (first,) = work_of_rows([full], 2)
    assert torch.equal(both.costs, first.costs / 4 + alone.costs)
    assert torch.equal(both.listed, first.listed / 4 + alone.listed)
    assert len(both.sees) == 2 and torch.equal(both.sees[1], alone.sees[0])


# -- custom balancers ---------------------------------------------------------------------------------


def deal_by_parity(work: Work) -> list[range]:
    """Assign even blocks to rank 0, odd ones to rank 1, and none to ranks 2 and 3."""
    n = len(work.costs)
    return [range(0, n, 2), range(1, n, 2), range(0), range(0)]


def test_a_balancer_function_may_leave_ranks_empty() -> None:
    mask = create_block_mask(causal(), None, None, 72, 72, BLOCK_SIZE=8)
    plan = make_plan(mask, world_size=4, balancer=deal_by_parity)
    assert plan.balancer == "deal_by_parity" and plan.owners.tolist() == [[0, 1] * 4 + [0]]
    assert [int((plan.for_rank(rank).positions >= 0).sum()) for rank in range(4)] == [40, 32, 0, 0]


# -- documents ----------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 40), min_size=8, max_size=30), st.integers(2, 4))
def test_documents_of_any_length_are_cut_only_where_they_must(lengths: list[int], world_size: int) -> None:
    """A document of whole blocks with less than half a rank's share of work is cut only for lack of room."""
    mod = and_masks(causal(), document(lengths=[4 * n for n in lengths]))
    size = 4 * sum(lengths)
    (work,) = work_of_rows([create_block_mask(mod, None, None, size, size, BLOCK_SIZE=4)], world_size)
    owner = torch.zeros(len(work.costs), dtype=torch.int64)
    for rank, blocks in enumerate(per_document(work)):
        owner[blocks] = rank
    most = float(work.costs.sum()) / (2 * world_size)
    small = [p for p, c in zip(owner.split(lengths), work.costs.split(lengths)) if float(c.sum()) < most]
    cut = [piece for piece in small if len(set(piece.tolist())) > 1]
    assert len(cut) < world_size


@given(st.integers(1, 700), st.integers(1, 5), st.sampled_from(EVEN_COUNTS))
def test_balancers_count_work_as_plans_do(length: int, world_size: int, name: str) -> None:
    """This holds also if the end of the sequence cuts a block."""
    mask = create_block_mask(causal(), None, None, length, length, BLOCK_SIZE=64)
    (work,) = work_of_rows([mask], world_size)
    plan = build(mask, world_size, balancer=name)
    of_ranks = torch.zeros(world_size, dtype=torch.float64).index_add_(0, plan.owners[0], work.costs)
    torch.testing.assert_close(torch.tensor(plan.work, dtype=torch.float64), of_ranks)


# -- locality -----------------------------------------------------------------------------------------


def test_blocks_are_swapped_with_any_rank_that_makes_the_busiest_less_busy() -> None:
    """The idlest rank, the second, has no block to swap."""
    owner, costs = torch.tensor([0, 0, 1, 2, 2]), torch.tensor([2, 2, 2, 1.5, 1.2], dtype=torch.float64)
    work: Any = SimpleNamespace(costs=costs, world_size=3)
    assert torch.equal(even_work(owner.clone(), work, 4), owner)  # no rank exceeds this work
    assert loads(even_work(owner, work, 3.6), costs, 3).tolist() == [3.5, 2, 3.2]
    work.costs, work.world_size = torch.tensor([2.0, 2.0] + [1.0] * 63, dtype=torch.float64), 64
    # The first of equally busy ranks is chosen.
    swapped = even_work(torch.tensor([0, *range(64)]), work, 3)
    assert loads(swapped, work.costs, 64).tolist() == [3, 2] + [1] * 62


def test_a_document_of_two_blocks_stays_on_one_rank() -> None:
    mask = and_masks(causal(), document(lengths=[*[4] * 4, 8, *[4] * 4]))
    (work,) = work_of_rows([create_block_mask(mask, None, None, 40, 40, BLOCK_SIZE=4)], 8)
    assert [4, 5] in map(sorted, per_document(work))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MOST)
def test_locality_and_ptrr_are_even_and_locality_sends_little(name: str) -> None:
    mask = Problem(name, 65536).block_mask()
    near, even = (build(mask, 8, balancer=balancer, schedule="fetch") for balancer in ("locality", "ptrr"))
    assert near.imbalance <= 1.02 and even.imbalance <= 1.02
    assert fetched_share(near) <= MOST[name] and fetched_share(near) < 0.8 * fetched_share(even)


def test_locality_weighs_the_bytes_of_all_masks() -> None:
    """Layers of block-diagonal masks do not constrain the order; documents of the remaining layers do."""
    n, own = 16, torch.arange(16)
    alone = create_block_mask(document(ids=own), None, None, n, n, BLOCK_SIZE=1)
    ring = create_block_mask(
        lambda b, h, q, kv: (q + 2) % n // 4 == (kv + 2) % n // 4, None, None, n, n, BLOCK_SIZE=1
    )
    assert locality(work_of_rows([alone], 4)[0]) == contiguous(Work(torch.ones(n), 4))
    assert sorted(locality(work_of_rows([alone, ring], 4)[0])) == [
        [0, 1, 14, 15], [2, 3, 4, 5], [6, 7, 8, 9], [10, 11, 12, 13],
    ]  # fmt: skip


def random_free_blocks(seed: int) -> tuple[FreeBlocks, Tensor]:
    """Draw the free blocks among 12, and the columns that they see: bool [n, 12]."""
    draw = torch.Generator().manual_seed(seed)
    visible, is_free = torch.rand(12, 12, generator=draw) < 0.3, torch.rand(12, generator=draw) < 0.7
    is_free[:2] = True
    return FreeBlocks(work_of_blocks(visible, 4), is_free), visible[is_free]


@given(st.integers(0, 999), st.integers(2, 9), st.integers(1, 12))
def test_windows_of_free_blocks_wrap_around_the_circle(seed: int, share: int, cuts: int) -> None:
    """Compares work, visible columns and starts of all windows, and the sizes that are tried."""
    (blocks, visible), sizes = random_free_blocks(seed), []
    n = len(blocks.ids)
    for size in range(1, n + 1):
        windows = (torch.arange(n)[:, None] + torch.arange(size)) % n
        assert blocks.work(size).tolist() == pytest.approx(blocks.cost[windows].sum(1).tolist())
        assert blocks.count_visible(size).tolist() == visible[windows].any(1).sum(1).tolist()
        with_hardest = (windows == int(blocks.cost.argmax())).any(1).nonzero()[:, 0]
        assert sorted(blocks.starts_with_hardest(size).tolist()) == with_hardest.tolist()
    blocks._pair = lambda size, rest, *_: sizes.append(size) or (0, 0, size, 0)
    blocks.choose(share, 1.0, cuts, 0.1)
    assert sizes == sorted({share * k // cuts for k in range(1, cuts + 1) if share * k >= cuts})


@given(st.integers(0, 999), st.floats(0, 40), st.floats(0.1, 40), st.integers(1, 12), st.integers(0, 11))
def test_the_two_windows_with_the_fewest_columns_are_chosen(
    seed: int, target: float, width: float, size: int, rest: int
) -> None:
    """One holds the costliest block; the other is the best of the missing work, if it does not overlap."""
    blocks, visible = random_free_blocks(seed)
    n = len(blocks.ids)
    size = min(size, n)
    rest = min(rest, n - size)

    def list_windows(count: int) -> list[tuple[int, int, set[int], float]]:
        """List the columns, start, blocks and work of every window."""
        windows = [[(start + i) % n for i in range(count)] for start in range(n)]
        columns = [int(visible[window].any(0).sum()) for window in windows]
        return list(zip(columns, range(n), map(set, windows), blocks.work(count).tolist()))

    pairs, second_windows = [], list_windows(rest)
    for columns, start, window, work in list_windows(size):
        missing = round((target - work) / width)
        fit = [second[:3] for second in second_windows if round(second[3] / width) == missing]
        if blocks.hardest in window and fit and window.isdisjoint((best := min(fit))[2]):
            pairs.append((columns + best[0], start, size, best[1]))
    assert blocks._pair(size, rest, target, width) == min(pairs, default=None)


@pytest.mark.parametrize(("prefix", "branches"), [(4, 1), (5, 1), (5, 2), (0, 2), (12, 1)])
def test_branches_are_held_whole_but_one_behind_a_long_prefix(prefix: int, branches: int) -> None:
    """Branches of blocks that see the four before, and a prefix that all 12 blocks see."""
    until = 8 if branches == 2 else 12

    def mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv < prefix) | (q >= kv) & (q < kv + 5) & ((q < until) == (kv < until))

    mask = create_block_mask(mod, None, None, 12, 12, BLOCK_SIZE=1)
    owner = whole_branches(work_of_rows([mask], 2)[0])
    assert (owner is not None) == ((prefix, branches) in [(4, 1), (5, 2)])
    if branches == 2 and owner is not None:
        assert len(set(owner[5:8].tolist())) == len(set(owner[8:].tolist())) == 1


@pytest.mark.parametrize("readers", [6, 7])
def test_more_than_half_of_the_blocks_see_a_prefix(readers: int) -> None:
    mod = and_masks(causal(), document(lengths=[readers] + [1] * (12 - readers)))
    (work,) = work_of_rows([create_block_mask(mod, None, None, 12, 12, BLOCK_SIZE=1)], 2)
    assert (whole_branches(work) is None) == (readers == 6)


def test_the_first_of_equally_cheap_blocks_are_moved() -> None:
    even = even_counts(torch.zeros(64, dtype=torch.int64), Work(torch.ones(64, dtype=torch.float64), 2))
    assert even.tolist() == [1] * 32 + [0] * 32


def test_branches_that_end_inside_blocks_are_held_whole() -> None:
    """Twelve answers to one question: a rank fetches of the question, and a block at the end of an answer."""
    mask = create_block_mask(tree([-1] + [0] * 12, [4096, *[2389] * 11, 2393]), None, None, 1 << 15, 1 << 15)
    remote = build(mask, 4, balancer="locality", schedule="fetch").traffic.fill_diagonal_(0).sum(1)
    assert int(remote.max()) <= 4096


def test_remote_keys_are_placed_near_their_readers() -> None:
    """In cross attention key blocks are assigned separately, in the same order of ranks."""
    mod = document(ids=torch.arange(512) // 128)
    wide = create_block_mask(lambda b, h, q, kv: mod(b, h, q, kv // 2), None, None, 512, 1024, BLOCK_SIZE=16)
    plan = build(wide, 4, balancer="locality", schedule="fetch")
    assert fetched_rows(plan) == 0 and plan.imbalance == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("blocks", "world_size"), [(4099, 24), (2500, 8), (9001, 64), (6144, 48), (16384, 1024), (5003, 300)]
)
def test_long_sequences_and_many_ranks_are_placed_as_evenly(blocks: int, world_size: int) -> None:
    """Numbers of blocks that neither ranks nor pieces divide; every rank has its share to within a block."""
    mod = and_masks(causal(), document(lengths=corpus_lengths(blocks * 128)))
    mask = create_block_mask(mod, None, None, blocks * 128, blocks * 128)
    plan = build(mask, world_size, balancer="locality", schedule="fetch")
    counts = plan.owners[0].bincount(minlength=world_size)
    assert int(counts.max() - counts.min()) <= 1 and int(counts.sum()) == blocks
    assert plan.imbalance <= 1.02
    assert fetched_share(plan) <= 0.95 * fetched_share(build(mask, world_size, balancer="per_document"))


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", [None, 0, 2, 3])
def test_long_documents_are_cut_for_few_keys(seed: int | None) -> None:
    """Documents of up to a quarter of the sequence on 8 ranks: a fifth of a full gather at most."""
    size = 1 << 17
    lengths = document_lengths(size)
    if seed is not None:
        draws = torch.randint(
            1, size // 4 + 1, (size // 1024,), generator=torch.Generator().manual_seed(seed)
        )
        lengths = draws[draws.cumsum(0) < size].tolist()
        lengths += [size - sum(lengths)]
    mask = create_block_mask(and_masks(causal(), document(lengths=lengths)), None, None, size, size)
    plan = build(mask, 8, balancer="locality", schedule="fetch")
    assert plan.owners[0].bincount().tolist() == [size // 128 // 8] * 8
    assert plan.imbalance <= 1.02 and fetched_share(plan) <= 0.2


@given(st.lists(st.integers(0, 20), min_size=1, max_size=60), st.integers(1, 9))
def test_ptrr_is_torchs_order(costs: list[int], world_size: int) -> None:
    costs = costs[: len(costs) // world_size * world_size]
    assume(costs)
    work = torch.tensor(costs)
    want = theirs._PTRRLoadBalancer.ptrr_scheduling(work, world_size).tolist()
    assert ptrr(Work(work, world_size)) == want
