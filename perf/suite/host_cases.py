"""Measurements without a GPU: time and memory of masks and plans, and the Python time of a call.

Cases are written, compared and shown in the format of attention cases. The device of their series is the CPU.
"""

from __future__ import annotations

import ctypes
import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.nn.attention import flex_attention as torch_flex

from tritoncp.api.attention import flex_attention
from tritoncp.api.simulate import simulate
from tritoncp.masks.mask import Mask, create_block_mask
from tritoncp.ops.tile_tables import SHIPPED
from tritoncp.perf.records.history import OURS, Journal, Point, kernel_name, read
from tritoncp.perf.suite import cpu_attention
from tritoncp.perf.suite.cases import MASKS, TIERS, position
from tritoncp.perf.suite.timing import Run, WallClock, time_interleaved
from tritoncp.planning.build import build

CPU = torch.device("cpu")
# The layer whose bytes a plan's figures count
LAYER = {"batch": 1, "heads": 32, "kv_heads": 8, "head_dim": 128}
Makers = dict[str, Callable[[], Run]]


@dataclass(frozen=True)
class HostCase:
    """A case on the CPU.

    operation: "mask" (build it), "plan" (balance it and list a rank's steps), "forward" or "backward" (a call
               whose launches do nothing), "attend" (a forward pass of the CPU engine), "train" (both passes)
    seq:       tokens
    world:     ranks, in lockstep in this process for calls
    """

    operation: str
    mask: str
    seq: int
    world: int = 1
    schedule: str = ""
    tier: str = "core"

    @property
    def name(self) -> str:
        """
        >>> HostCase("plan", "document", 1 << 20, 64, "fetch").name, HostCase("forward", "causal", 1024).name
        ('plan-document-w64-fetch-1m', 'call-causal-1k-fwd')
        """
        whole = f"{self.seq >> 20}m" if self.seq % (1 << 20) == 0 else f"{self.seq >> 10}k"
        kinds = {"forward": "call", "backward": "call", "attend": "cpu", "train": "cpu"}
        parts = [kinds.get(self.operation, self.operation), self.mask]
        parts += [f"w{self.world}", self.schedule] * (self.world > 1)
        passes = {"forward": ["fwd"], "backward": ["bwd"], "attend": ["fwd"], "train": ["fwd", "bwd"]}
        return "-".join([*parts, whole, *passes.get(self.operation, [])])

    @property
    def tags(self) -> dict[str, str]:
        ranks = {"ranks": f"{self.world} ranks, {self.schedule}"} if self.world > 1 else {}
        kinds = {"mask": "mask", "plan": "plan", "attend": "cpu forward", "train": "cpu both"}
        kind = kinds.get(self.operation, f"call {self.operation}")
        return {"mask": self.mask, "pass": kind, "dtype": "", "shape": f"{self.seq} tokens"} | ranks


def _calls(tier: str, world: int = 1, schedule: str = "", *masks: str) -> list[HostCase]:
    passes = ("forward", "backward")
    return [HostCase(operation, mask, 1024, world, schedule, tier) for mask in masks for operation in passes]


CASES: tuple[HostCase, ...] = (
    HostCase("mask", "document", 4096, tier="smoke"),
    HostCase("plan", "document", 65536, 8, "fetch", tier="smoke"),
    *_calls("smoke", 1, "", "causal"),
    *(HostCase("mask", mask, 1 << 20) for mask in ("causal", "document", "window", "prefix")),
    *(HostCase("mask", mask, 4096) for mask in ("causal", "window")),
    *(
        HostCase("plan", mask, size, world, schedule)
        for size, world in ((131072, 8), (1 << 20, 64))
        for mask, schedule in (
            ("causal", "ring"), ("causal", "allgather"), ("causal", "ulysses"),
            ("document", "fetch"), ("document", "ring"), ("window", "fetch"),
        )
    ),
    *_calls("core", 1, "", "full", "document", "alibi"),
    *(
        case
        for schedule in ("allgather", "ring", "fetch", "ulysses")
        for case in _calls("core", 2, schedule, "causal")
    ),
    *(
        HostCase(operation, mask, seq)
        for mask in ("causal", "document", "window", "alibi")
        for seq in (1024, 4096)
        for operation in ("attend", "train")
    ),
    *(HostCase(operation, "causal", 16384, tier="full") for operation in ("attend", "train")),
    HostCase("mask", "document", 8 << 20, tier="full"),
    HostCase("plan", "document", 8 << 20, 1024, "fetch", tier="full"),
)  # fmt: skip


def select(tier: str = "core", only: str | Sequence[str] = "*") -> list[HostCase]:
    """Select the cases of a tier and the tiers before it whose names match a pattern."""
    tiers = TIERS[: TIERS.index(tier) + 1]
    return [case for case in CASES if case.tier in tiers and position(case.name, only) is not None]


def run(
    cases: Sequence[HostCase],
    journal: Journal,
    deadline: float,
    seconds: float,
    resumed_points: Sequence[Point] = (),
) -> int:
    """Measure cases on one core and write a line for each. Returns the number of failures."""
    torch.set_num_threads(1)
    measured_names, failures = {point.case for point in resumed_points}, 0
    for case in cases:
        if case.name in measured_names:
            continue
        if time.monotonic() > deadline:
            journal.leave_out(case.name)
            continue
        try:
            contenders, work = measure(case, seconds)
        except Exception as error:  # the other cases go on
            contenders, work = {OURS: {"why": f"{type(error).__name__}: {error}"[:300]}}, {}
            failures += 1
        journal.point(case.name, contenders, tags=case.tags, work=work)
    return failures


def resources(journal: Journal, only: str | Sequence[str] = "*") -> None:
    """Write the resources of each shipped kernel (from the table of `tritoncp inspect`) where they differ
    from the history."""
    table = SHIPPED / "resources.json"
    if not table.exists():
        return
    document = json.loads(table.read_text())
    place = journal.path.parent if journal.path.suffix == ".jsonl" else journal.path
    recorded = {kernel_name(line): line for line in (read(place).kernels() if place.is_dir() else ())}
    for row in document["rows"]:
        line = {"kind": "resources", "triton": document["triton"], **row}
        recorded_line = recorded.get(kernel_name(row), {})
        if position(kernel_name(row), only) is None:
            continue
        if any(recorded_line.get(key) != line[key] for key in line):
            journal.write(line)


def measure(case: HostCase, seconds: float) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Measure every contender of a case. Returns their figures and facts about the work."""
    contender_makers, work = make_contenders(case)
    with surroundings(case):
        figures = time_interleaved(contender_makers, WallClock(), seconds, least=5)
        peak = measure_growth(contender_makers[OURS]())
    contenders = {name: figure.rounded(samples=name == OURS) for name, figure in figures.items()}
    if peak is not None:
        contenders[OURS]["peak_bytes"] = peak
    return contenders, work


def make_contenders(case: HostCase) -> tuple[Makers, dict[str, Any]]:
    """Return functions that prepare one execution of a case, by contender, and facts about the work."""
    if case.operation in ("attend", "train"):
        return cpu_attention.make_contenders(case.mask, case.seq, case.operation == "train"), {}
    return {"mask": _mask_contenders, "plan": _plan_contenders}.get(case.operation, _call_contenders)(case)


def _mask_contenders(case: HostCase) -> tuple[Makers, dict[str, Any]]:
    plain: Any = MASKS[case.mask].plain(case.seq, CPU)
    length = (case.seq, case.seq)
    functions: Makers = {OURS: lambda: lambda: _make_mask(case)}
    if case.seq <= 4096:  # torch's builder takes memory quadratic in the length
        functions["torch"] = lambda: (
            lambda: torch_flex.create_block_mask(plain, None, None, *length, device="cpu")
        )
    return functions, {}


def _make_mask(case: HostCase) -> Mask:
    closed: Any = MASKS[case.mask].closed(case.seq)
    return create_block_mask(closed, 1, 1, case.seq, case.seq)


def _plan_contenders(case: HostCase) -> tuple[Makers, dict[str, Any]]:
    mask = _make_mask(case)

    def plan() -> None:
        result = build(mask, case.world, schedule=case.schedule)
        first: Any = {"ring": 0, "fetch": "fetched"}.get(case.schedule, "gathered")
        assert case.schedule != "ring" or result.ring
        result.tables(buffer=first)

    result = build(mask, case.world, schedule=case.schedule)
    rank_bytes = [result.for_rank(rank).bytes_sent(**LAYER, backward=False) for rank in range(case.world)]
    work: dict[str, Any] = {"imbalance": round(result.imbalance, 5), "wire_bytes": max(rank_bytes)}
    if case.world <= 64:
        work |= {"rank_work": [round(x) for x in result.work], "rank_bytes": rank_bytes}
    return {OURS: lambda: plan}, work


def _call_contenders(case: HostCase) -> tuple[Makers, dict[str, Any]]:
    world: Any = simulate(case.world)
    score = MASKS[case.mask].score(4, CPU)
    heads, dim = (4, 2, 2), 64
    unsharded = [torch.randn(1, n, case.seq, dim) for n in heads]
    closed = MASKS[case.mask].closed(case.seq)
    if case.world == 1:
        q, k, v = leaves = [x.requires_grad_() for x in unsharded]

        def forward() -> Any:
            return flex_attention(q, k, v, score, closed, enable_gqa=True)
    else:
        plan = world.make_plan(_make_mask(case), schedule=case.schedule)
        shards = [[x.requires_grad_() for x in world.shard(x, plan, dim=2)] for x in unsharded]
        leaves = [x for shard in shards for x in shard]

        def forward() -> Any:
            return world.flex_attention(*shards, score, plan, enable_gqa=True)

    def backward() -> Run:
        outs = forward()
        douts = [torch.ones_like(x) for x in outs] if isinstance(outs, list) else torch.ones_like(outs)
        return lambda: torch.autograd.grad(outs, leaves, douts)

    return {OURS: (lambda: forward) if case.operation == "forward" else backward}, {}


def surroundings(case: HostCase) -> AbstractContextManager[None]:
    """Return the context in which a case is measured: the CPU engine, or no launches."""
    return cpu_attention.cpu_engine() if case.operation in ("attend", "train") else no_launches()


@contextmanager
def no_launches() -> Iterator[None]:
    """Prepare kernel launches without running them, to time the rest of a call."""
    from tritoncp.kernels.launch import Launch

    with mock.patch.object(Launch, "__call__", return_value=None):
        yield


def measure_growth(run: Run) -> int | None:
    """Measure the peak growth of this process, in bytes, while ``run`` runs; None except on Linux."""
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not reset.exists():
        return None
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # so that allocations do not reuse free memory of the process
    reset.write_text("5")
    initial = _read_kilobytes(status, "VmRSS")
    result = run()
    peak = _read_kilobytes(status, "VmHWM")
    del result
    return max(0, peak - initial) * 1024


def _read_kilobytes(status: Path, name: str) -> int:
    return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(name))
