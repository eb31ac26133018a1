"""`python docs/tables.py`: the tables of docs/schedules.md.

Evenness, traffic, planning time and memory of every balancer; predicted steps of packers. No attention runs:
work and traffic are read from the plan, counted in blocks and rows.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import click
import torch
from torch.nn.attention import flex_attention

from tritoncp.api.plans import make_plan
from tritoncp.masks.closed_forms import causal, document
from tritoncp.masks.mask import Mask, create_block_mask
from tritoncp.perf.problem import Problem
from tritoncp.perf.suite.everyday_masks import everyday_masks
from tritoncp.perf.suite.host_memory import peak_since, start_peak
from tritoncp.planning.balance import balancers
from tritoncp.planning.build import build
from tritoncp.planning.costs.cost import BACKWARD_RATIO
from tritoncp.planning.costs.hardware import hardware_of
from tritoncp.planning.packer import pack_batches
from tritoncp.planning.plan import Plan
from tritoncp.report.units import format_tokens

ROOT = Path(__file__).resolve().parents[1]
SIZES = ((1 << 17, 8), (1 << 20, 64))  # tokens and ranks of the table "balance"
SCALES = ((1 << 20, 64), (8 << 20, 1024))  # of the table "scaling"
SCALED = "causal", "corpus", "window4k", "prefix", "corpus-window4k"
MIB = 1 << 20

# The name of each mask in the page: a key of perf.problem.MASKS.
STUDIED = {
    "causal": "causal",
    "window 4K": "window4k",
    "documents": "corpus",
    "long documents": "document",
    "documents, window 1K": "corpus-window",
    "prefix-LM": "prefix",
    "shared question": "shared-question",
}
COMPARED = tuple(name for name in balancers if name not in ("ptrr_unweighted", "spt"))
TIMED = (  # names of everyday_masks
    "documents",
    "window",
    "prefix-LM documents",
    "documents with padding",
    "window and sinks",
    "chunks",
    "images both ways",
    "block diffusion",
    "dilated window",
    "random padding",
    "tree",
    "neighbours of a grid",
    "window of each head",
    "32 packed rows",
)
EVEN = 1.02
FITTED, FITTED_SCHEDULES = ("causal", "corpus", "window4k"), ("allgather", "ring", "fetch", "ulysses")
LENGTHS = range(1 << 17, 1 << 24, 1 << 17)  # tokens
FREE_BYTES = 80e9 - 16e9 - 10e9  # without the state of 8 billion parameters, MLP and fragmentation


class Quality(NamedTuple):
    """The quality of a placement.

    imbalance: maximum work of a rank over the mean
    travels:   rows of keys that all ranks fetch, in per cent of the rows that a full all-gather moves
    seconds:   time of one core to build a rank's plan with the tables of its first step
    peak:      maximum memory beyond what the process held before, in bytes; None except on Linux
    schedule:  the plan's schedule
    """

    imbalance: float
    travels: float
    seconds: float
    peak: int | None
    schedule: str


def measure_quality(mask: Mask, world_size: int, balancer: str, schedule: str = "fetch") -> Quality:
    """Build a plan, with the tables of the first step unless the schedule is "fetch", and return its
    quality."""
    start = start_peak()
    begin = time.process_time()
    plan = build(mask, world_size, world_size // 2, balancer=balancer, schedule=schedule)
    if schedule != "fetch":
        buffers: dict[str, int | str] = {"ring": plan.rank, "fetch": "fetched"}
        plan.tables("cpu", 1, 1, buffers.get(plan.schedule, "gathered"))
    seconds = time.process_time() - begin
    peak = peak_since(start)
    travels = 100 * fetched_rows(plan) / ((world_size - 1) * plan.kv.length)
    return Quality(plan.imbalance, travels, seconds, peak, plan.schedule)


def fetched_rows(plan: Plan) -> int:
    """Count the rows of keys and values that all ranks together fetch, for one batch row."""
    return int(plan.traffic.clone().fill_diagonal_(0).sum()) // max(plan.mask.B, plan.q.batch)


def format_balance() -> str:
    """Measure balancers over masks, lengths and ranks, and format a table."""
    rows = []
    for name, mask_name in STUDIED.items():
        for tokens, world_size in SIZES:
            mask = Problem(mask_name, tokens).block_mask()
            cells = [_format_cell(measure_quality(mask, world_size, balancer)) for balancer in COMPARED]
            rows.append([name, f"{format_tokens(tokens)} × {world_size}", *cells])
            click.echo(f"{name}, {tokens} tokens, {world_size} ranks", err=True)
    return _format_table(["mask", "tokens × ranks", *COMPARED], rows)


def format_scale() -> str:
    """Measure whole plans with `schedule="auto"`, and format the maxima over masks for each balancer."""
    rows = {balancer: [balancer] for balancer in COMPARED}
    heads = ["balancer"]
    for tokens, world_size in SCALES:
        masks = [Problem(name, tokens).block_mask() for name in SCALED]
        for balancer, row in rows.items():
            results = [measure_quality(mask, world_size, balancer, "auto") for mask in masks]
            row.append(f"{max(result.seconds for result in results):.2f}")
            row.append(_format_mib(max(result.peak or 0 for result in results)))
            click.echo(f"{tokens} tokens, {world_size} ranks, {balancer}", err=True)
        size = f"{format_tokens(tokens)} × {world_size}"
        heads += [f"{size}, s", f"{size}, MiB"]
    return _format_table(heads, list(rows.values()))


def format_python_masks(tokens: int, torch_tokens: int) -> str:
    """Measure masks of Python functions with their first plans, and format a table."""
    ours, torchs = everyday_masks(tokens), everyday_masks(torch_tokens)
    rows = []
    for name in TIMED:
        item, small = ours[name], torchs[name]
        base = start_peak()
        start = time.process_time()
        mask = create_block_mask(item.mod, item.B, item.H, item.length, item.length)
        make_plan(mask, world_size=16, rank=1)
        seconds = time.process_time() - start
        memory = _format_mib(peak_since(base))
        start = time.process_time()
        flex_attention.create_block_mask(
            small.mod, small.B, small.H, small.length, small.length, device="cpu"
        )
        rows.append([name, f"{seconds:.2f}", memory, f"{time.process_time() - start:.2f}"])
        click.echo(f"{name}, {tokens} tokens", err=True)
    return _format_table(["mask", "s", "MiB", f"torch, {format_tokens(torch_tokens)} tokens, s"], rows)


def _format_mib(count: int | None) -> str:
    return f"{count / MIB:.0f}" if count else "–"


def format_fit() -> str:
    """Find the longest sequence that fits on 8 ranks of 80 GB, and format a table of masks and schedules."""
    rows = []
    for name in FITTED:
        cells = []
        for schedule in FITTED_SCHEDULES:
            fits = bisect.bisect(
                LENGTHS, False, key=lambda size: needed_bytes(name, size, schedule) > FREE_BYTES
            )
            cells.append(format_tokens(LENGTHS[fits - 1]) if fits else "–")
            click.echo(f"{name}, {schedule}: {cells[-1]}", err=True)
        rows.append([name, *cells])
    return _format_table(["mask", *FITTED_SCHEDULES], rows)


def needed_bytes(name: str, tokens: int, schedule: str, world_size: int = 8) -> float:
    """Predict the bytes of attention and of the inputs of 32 layers of 4096 channels, on a rank."""
    plan = build(Problem(name, tokens).block_mask(), world_size, 0, balancer="locality", schedule=schedule)
    return plan.metrics()["backward_peak_bytes"] + 32 * tokens // world_size * 4096 * 2


def _format_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows))


def _format_cell(result: Quality) -> str:
    """
    >>> _format_cell(Quality(2.5, 3.6, 0.512, None, "fetch"))
    '**2.500** · 4 %'
    """
    uneven = "**" * (result.imbalance > EVEN)
    return f"{uneven}{result.imbalance:.3f}{uneven} · {result.travels:.0f} %"


# -- packers ------------------------------------------------------------------------------------------------

SEQUENCES = 256  # of a global batch
TOKENS_PER_RANK = 8192
CLUSTERS = ((8, 1), (8, 4), (8, 8), (16, 4))  # (ranks of a replica, replicas)
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP = 4096, 32, 8, 128, 14336  # Llama-3 8B
WEIGHTS = HIDDEN * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS) + 3 * HIDDEN * MLP  # of a layer
FLOPS_OF_PAIR = (1 + BACKWARD_RATIO) * 4 * HEADS * HEAD_DIM
FLOPS_OF_TOKEN = 3 * 2 * WEIGHTS
BYTES_OF_KEY = 2 * KV_HEADS * HEAD_DIM * (2 + 2 + 4)  # K and V in both passes, float32 gradients home


class Row(NamedTuple):
    """Sequences that a group of ranks computes together in one step. zig_zag: the group cuts every sequence
    into 2 x ranks pieces, and gathers its keys; else a plan places the row."""

    sequences: list[int]
    ranks: int
    zig_zag: bool = False


Packing = list[list[Row]]  # the rows of each step


def pack_evenly(lengths: Sequence[int], ranks: int, replicas: int) -> Packing:
    """Pack by `tritoncp.pack_batches`."""
    cost = FLOPS_OF_TOKEN / FLOPS_OF_PAIR
    batches = pack_batches(lengths, TOKENS_PER_RANK, ranks=ranks, data_parallel=replicas, token_cost=cost)
    return _cut_steps([batch.sequences for batch in batches], ranks, replicas)


def pack_first_fit(lengths: Sequence[int], ranks: int, replicas: int) -> Packing:
    """Put each sequence, in order, into the first row with room. Rows form steps in order."""
    rows: list[list[int]] = []
    room: list[int] = []
    for i, length in enumerate(lengths):
        at = next((at for at, left in enumerate(room) if left >= length), len(rows))
        if at == len(rows):
            rows.append([])
            room.append(ranks * TOKENS_PER_RANK)
        rows[at].append(i)
        room[at] -= length
    return _cut_steps(rows, ranks, replicas)


def pack_by_differencing(lengths: Sequence[int], ranks: int, replicas: int) -> Packing:
    """Partition by Karmarkar and Karp's differencing over 6 h L + L^2, as slime and verl do, into the fewest
    rows that hold their tokens; rows of similar cost form a step."""
    work = [6 * HIDDEN * length + length * length for length in lengths]
    most = ranks * TOKENS_PER_RANK
    count = -(-sum(lengths) // (most * replicas)) * replicas
    rows = partition_by_differences(work, count)
    while any(sum(lengths[i] for i in row) > most for row in rows):
        count += replicas
        rows = partition_by_differences(work, count)
    rows.sort(key=lambda row: -sum(work[i] for i in row))
    return _cut_steps(rows, ranks, replicas)


def partition_by_differences(work: Sequence[int], count: int) -> list[list[int]]:
    """Partition numbers by the largest differencing method: merge the two partitions with the largest spread,
    largest parts with smallest.

    >>> partition_by_differences([8, 7, 6, 5, 4], 2)
    [[0, 2], [4, 1, 3]]
    """
    number = itertools.count()
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = [
        (-x, next(number), [(0, [])] * (count - 1) + [(x, [i])]) for i, x in enumerate(work)
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        one, two = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        parts = sorted(
            ((x + y, a + b) for (x, a), (y, b) in zip(one, reversed(two))), key=lambda part: part[0]
        )
        heapq.heappush(heap, (parts[0][0] - parts[-1][0], next(number), parts))
    return [part for _, part in heap[0][2]]


def pack_in_powers_of_two(lengths: Sequence[int], ranks: int, replicas: int) -> Packing:
    """Form a group of 2^n ranks for each sequence, the fewest that hold it, as Megatron's hybrid context
    parallelism does: the longest first, on free ranks, else with others in the least busy group of its size
    that has room, unless that group is then 5 % above the busiest one. What is left over waits for the next
    step. Groups double while ranks are free."""
    pending = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    steps = []
    while pending:
        free, rest = ranks * replicas, []
        groups: list[tuple[int, list[int]]] = []  # (ranks, sequences)

        def busy(group: tuple[int, list[int]]) -> float:
            return sum(lengths[i] ** 2 for i in group[1]) / group[0]

        for i in pending:
            size = 1 << max(0, -(-lengths[i] // TOKENS_PER_RANK) - 1).bit_length()
            if size <= free:
                groups.append((size, [i]))
                free -= size
                continue
            limit = 1.05 * max(map(busy, groups))
            fitting = [
                group
                for group in groups
                if group[0] == size
                and lengths[i] + sum(lengths[j] for j in group[1]) <= size * TOKENS_PER_RANK
                and busy(group) + lengths[i] ** 2 / size <= limit
            ]
            if fitting:
                min(fitting, key=busy)[1].append(i)
            else:
                rest.append(i)
        while growing := [group for group in groups if group[0] <= free]:
            group = max(growing, key=busy)
            groups[groups.index(group)] = (2 * group[0], group[1])
            free -= group[0]
        steps.append([Row(sequences, size, True) for size, sequences in groups])
        pending = rest
    return steps


def _cut_steps(rows: Sequence[list[int]], ranks: int, replicas: int) -> Packing:
    return [
        [Row(row, ranks) for row in rows[at : at + replicas] if row] for at in range(0, len(rows), replicas)
    ]


PACKERS = {
    "pack_batches": pack_evenly,
    "powers of two": pack_in_powers_of_two,
    "Karmarkar-Karp": pack_by_differencing,
    "first fit": pack_first_fit,
}


class Drawn(NamedTuple):
    """A distribution of lengths: log-normal, by median and spread, a share of the sequences by another."""

    median: int
    spread: float
    share: float = 0.0
    other_median: int = 1
    other_spread: float = 0.0
    most: int = 1 << 16

    def lengths(self, count: int) -> list[int]:
        generator = torch.Generator().manual_seed(0)
        normal = torch.randn(count, generator=generator, dtype=torch.float64)
        other = torch.rand(count, generator=generator) < self.share
        scale = torch.where(other, self.other_median, self.median)
        spread = torch.where(other, self.other_spread, self.spread)
        return (scale * torch.exp(spread * normal)).long().clamp(16, self.most).tolist()


DRAWN = {
    "long SFT": Drawn(800, 1.0, 0.1, 24000, 0.6),  # chats, one in ten a document of 8K to 64K tokens
    "RL rollouts": Drawn(5000, 0.9, most=1 << 15),  # chains of thought with a long tail, cut at 32K
    "books and web": Drawn(700, 1.1, 0.02, 90000, 0.6),  # web pages, one in fifty a book cut at 64K
}


def measure_row(lengths: Sequence[int], row: Row) -> float:
    """Predict a layer's time on the slowest rank of a row, forward and backward, in seconds."""
    inside = [lengths[i] for i in row.sequences]
    hardware = hardware_of(row.ranks)
    pairs = sum(length * (length + 1) // 2 for length in inside) / row.ranks
    rows, received = sum(inside), 0
    if row.zig_zag and row.ranks > 1:
        rows = sum(-(-length // (2 * row.ranks)) * 2 * row.ranks for length in inside)
        received = rows * (row.ranks - 1) // row.ranks
        rows //= row.ranks
    elif row.ranks > 1:
        mod = causal() & document(lengths=inside)
        mask = create_block_mask(mod, 1, 1, sum(inside), sum(inside))
        plan = build(mask, row.ranks, 0, balancer="locality", schedule="fetch")
        remote = plan.traffic.clone().fill_diagonal_(0)
        received = int(torch.maximum(remote.sum(0), remote.sum(1)).max())
        pairs, rows = pairs * plan.imbalance, plan.s_local
    wire = received * BYTES_OF_KEY / hardware.bandwidth
    return max(pairs * FLOPS_OF_PAIR / hardware.flops, wire) + rows * FLOPS_OF_TOKEN / hardware.flops


def measure_packing(lengths: Sequence[int], packing: Packing) -> float:
    """Sum the seconds of the slowest row of each step; see :func:`measure_row`."""
    return sum(max(measure_row(lengths, row) for row in step) for step in packing)


def format_packers(count: int = SEQUENCES) -> str:
    """Predict the time of every packer over distributions and clusters, and format a table."""
    rows = []
    for name, drawn in DRAWN.items():
        lengths = drawn.lengths(count)
        for ranks, replicas in CLUSTERS:
            packings = [pack(lengths, ranks, replicas) for pack in PACKERS.values()]
            cells = [f"{1e3 * measure_packing(lengths, packing):.0f}" for packing in packings]
            rows.append([name, f"{ranks} × {replicas}", *cells])
            click.echo(f"{name}, {ranks} x {replicas} ranks", err=True)
    return _format_table(["lengths", "ranks × replicas", *PACKERS], rows)


TABLES: dict[str, Callable[[], str]] = {
    "balance": format_balance,
    "masks": lambda: format_python_masks(1 << 20, 1 << 13),
    "scaling": format_scale,
    "fit": format_fit,
    "packers": format_packers,
}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("name", type=click.Choice([*TABLES]))
@click.option(
    "--write", is_flag=True, help="Write the tables into docs/schedules.md instead of printing them."
)
def main(name: str, write: bool) -> None:
    """Measure balancers, plans and packers on one CPU core, and make tables of docs/schedules.md."""
    torch.set_num_threads(1)
    path: Path = ROOT / "docs/schedules.md"
    tables = TABLES[name]()
    if write:
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        head, _, rest = path.read_text().partition(begin)
        path.write_text(f"{head}{begin}\n\n{tables}\n\n{end}{rest.partition(end)[2]}")
    else:
        click.echo(tables)


if __name__ == "__main__":
    main()
