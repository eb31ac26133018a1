"""The benchmark itself: problem by problem, check everyone, then time everyone, and say so at once."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from tritoncp.masks import create_block_mask, full_mask
from tritoncp.perf import baselines, check, machine
from tritoncp.perf.baselines import FLEX, Contender
from tritoncp.perf.cases import GOALS, MASKS, SEARCHED, Case
from tritoncp.perf.timing import Clock, DeviceClock, Figure, Run, WallClock, interleaved
from tritoncp.perf.work import Shape, Work, of_plan
from tritoncp.plan import build

Write = Callable[[dict[str, Any]], None]
QUICK = ["flex", "flex prescale", "flex tma"]
THOROUGH = ["flex prescale tma", "flex max-autotune"]
assert set(FLEX) == {*QUICK, *THOROUGH}


@dataclass
class Bench:
    """One run.

    write:    takes each finding when it is made: a dict that JSON can hold
    deadline: time.monotonic() after which no problem is started that would not end in time
    seconds:  what the rounds of one case may take
    options:  kernel options to try tritoncp with, besides its own choice
    """

    device: torch.device
    write: Write
    deadline: float
    seconds: float = 1.5
    options: Sequence[dict[str, Any]] = ()
    failures: int = 0
    best: dict[str, list[str]] = field(
        default_factory=dict
    )  # mask -> flex variants that won at its first size

    def run(self, cases: Sequence[Case]) -> None:
        """Every case with what compiles fast, then what compiles slowly against the best of that."""
        if self.device.type == "cpu":
            cases = [case.shrunk() for case in cases]
        groups = [list(group) for _, group in itertools.groupby(cases, key=lambda case: case.problem)]
        slowest = 0.0
        for group in groups:
            slowest = max(slowest, self._in_time(group, self._variants(group[0]), slowest))
        first: dict[str, list[Case]] = {}
        for group in groups:
            if group[0].tier == "core" and group[0].mask in self.best:
                first.setdefault(group[0].mask, group)
        for mask, group in first.items() if self.device.type == "cuda" else ():
            slowest = max(slowest, self._in_time(group, [*self.best[mask], *THOROUGH], slowest))

    def _variants(self, case: Case) -> list[str]:
        """Which flex variants take part: the winners of the mask's first size, so that most compilations
        are done once; masks that are not searched take those of the causal mask."""
        if case.tier == "smoke":
            return QUICK[:1]
        return self.best.get(case.mask if case.mask in SEARCHED else "causal", QUICK)

    def _in_time(self, cases: list[Case], variants: Sequence[str], slowest: float) -> float:
        """Measure one problem if there is time; how long it took."""
        begin = time.monotonic()
        if begin + slowest > self.deadline:
            for case in cases:
                self.write({"kind": "left out", "case": case.name, "why": "the time budget is used up"})
            return 0.0
        self._problem(cases, variants)
        return time.monotonic() - begin

    def _problem(self, cases: list[Case], variants: Sequence[str]) -> None:
        case = cases[0]
        torch.compiler.reset()
        given = baselines.inputs(case, self.device)
        passes = [case.which for case in cases]
        expected = check.reference(case, given)
        standing = {}
        for name, make in baselines.contenders(case, given, variants, self.options).items():
            contender = self._checked(case, name, make, expected, passes)
            if contender is not None:
                standing[name] = contender
        del expected
        winners = []
        for case in cases:
            figures = self._timed(case, standing)
            flex = {name: found.ms for name, found in figures.items() if name.startswith("flex")}
            winners += [min(flex, key=flex.__getitem__)] if flex else []
        if case.tier != "smoke" and case.mask in SEARCHED and winners:
            self.best.setdefault(case.mask, list(dict.fromkeys(winners)))

    def _checked(
        self, case: Case, name: str, make: Callable[[], Contender], expected: check.Answer, passes: list[str]
    ) -> Contender | None:
        """The contender if it can do the problem and is right; a line says so, or why not."""
        line: dict[str, Any] = {"kind": "check", "case": case.problem.name.removesuffix("-fwd")}
        line |= {"contender": name, "ok": False}
        begin, before = time.monotonic(), self._allocated()
        contender = None
        try:
            contender = make()
            got = {"out": contender.forward()} if "forward" in passes else {}
            if "backward" in passes:
                got |= zip(("dq", "dk", "dv"), contender.backward())
            found = {key: check.errors(x, getattr(expected, key)) for key, x in got.items()}
            line["errors"] = {key: [float(f"{e:.3g}") for e in pair] for key, pair in found.items()}
            line["ok"] = all(check.acceptable(pair, case.torch_dtype) for pair in found.values())
            if not line["ok"]:
                line["why"] = "wrong: relative error of the whole or of the worst rows is out of tolerance"
        except Exception as error:  # whatever a compiler or a backend throws: the others go on
            line["why"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300]}"
        line["setup_s"] = round(time.monotonic() - begin, 2)
        line["peak_bytes"] = self._peak() - before
        self.write(line)
        if not line["ok"] and name == "tritoncp":
            self.failures += 1
        return contender if line["ok"] else None

    def _allocated(self) -> int:
        """Bytes in use; what is in use at most is counted from here on."""
        if self.device.type != "cuda":
            return 0
        torch.cuda.reset_peak_memory_stats(self.device)
        return torch.cuda.memory_allocated(self.device)

    def _peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0

    def _timed(self, case: Case, standing: dict[str, Contender]) -> dict[str, Figure]:
        """Times of one pass; a line for each contender, and one for how tritoncp stands."""
        if not standing:
            return {}
        runs = {name: partial(_prepared, contender, case.which) for name, contender in standing.items()}
        figures = interleaved(runs, self._clock(), self.seconds)
        work = work_of(case)
        for name, found in figures.items():
            tflops = round(work.flops / found.ms / 1e9, 1)
            line = {"kind": "time", "case": case.name, "contender": name, **found.rounded(), "tflops": tflops}
            self.write(line | {"flops": work.flops, "hbm_bytes": work.hbm})
        if "tritoncp" in figures:
            gpu = machine.state() if self.device.type == "cuda" else {}
            self.write({"kind": "standing", "case": case.name, **standing_of(case, figures), **gpu})
        return figures

    def _clock(self) -> Clock:
        return DeviceClock(self.device) if self.device.type == "cuda" else WallClock()


def _prepared(contender: Contender, which: str) -> Run:
    if which == "forward":
        return contender.call
    out = contender.call()
    return lambda: torch.autograd.grad(out, contender.leaves, contender.dout)


def standing_of(case: Case, figures: dict[str, Figure]) -> dict[str, Any]:
    """Time of each family's best over tritoncp's, and what it has to be.

    >>> done = {"tritoncp": 2.0, "flex": 4.0, "flex tma": 3.0, "flash": 2.2}
    >>> standing_of(Case("full", "forward", 8192), {k: Figure(ms, ms, ms, 0.1, 9) for k, ms in done.items()})
    {'ms': 2.0, 'speedup': {'flex': 1.5, 'flash': 1.1}, 'goal': {'flex': 1.2, 'flash': 1.3, 'cudnn': 0.8}}
    """
    families: dict[str, float] = {}
    for name, found in figures.items():
        family = name.split()[0]
        families[family] = min(found.ms, families.get(family, found.ms))
    own = figures["tritoncp"].ms
    speedup = {name: round(ms / own, 3) for name, ms in families.items() if name != "tritoncp"}
    return {"ms": round(own, 5), "speedup": speedup, "goal": GOALS.get((case.mask, case.which), {})}


def work_of(case: Case) -> Work:
    """What one device has to do for a case."""
    closed = MASKS[case.mask].closed(case.seq)
    length = (case.seq, case.seq)
    mask = full_mask(*length) if closed is None else create_block_mask(closed, 1, 1, *length)
    shape = Shape(case.batch, case.heads, case.kv_heads, case.dim, case.v_dim, case.torch_dtype.itemsize)
    return of_plan(build(mask), shape, case.which)


def ceilings(device: torch.device) -> dict[str, float]:
    """What this device reaches at best: a bf16 matrix product and a copy, both too large for its caches."""
    clock, n = DeviceClock(device), 8192
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.randn(1 << 30, device=device)
    target = torch.empty_like(source)
    found = interleaved(
        {"matmul": lambda: lambda: a @ b, "copy": lambda: lambda: target.copy_(source)}, clock, 0.3
    )
    return {
        "matmul_tflops": round(2 * n**3 / found["matmul"].ms / 1e9, 1),
        "copy_gbytes_per_s": round(2 * source.nbytes / found["copy"].ms / 1e6, 1),
    }
