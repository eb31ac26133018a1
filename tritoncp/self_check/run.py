"""Running the cases of the self-check, with time limits: in simulated worlds on one device, or on the ranks
of torchrun; a line for each case, the machine, the verdict."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tritoncp import doctor
from tritoncp.call.engine_factory import name_functions
from tritoncp.command_base import INTERRUPTED, make_bar, make_console
from tritoncp.core.environment import DEBUG
from tritoncp.core.processes import Lost, WorkerPool, torchrun_world_size, use_loopback_interface
from tritoncp.distributed.failures import GroupClosed
from tritoncp.perf.suite import machine
from tritoncp.self_check import cases
from tritoncp.self_check.cases import CheckCase, CheckRequest, Errors, Ranks, Result, judge_case, run_case

CTRL_C = "interrupted by Ctrl-C"  # the reason for which a check stopped
TRACE = 4000  # max characters of a traceback (its end) that ranks send to each other
GRACE = 5.0  # seconds, after the timeout of a message, for ranks to exchange their results
LINGER = 2.0  # seconds that a rank waits after a loss before it exits, since slower ranks may need it


@dataclass(frozen=True)
class CheckReport:
    """The result of a check.

    facts:   facts of `tritoncp doctor`, and more about the machine
    results: a result for each case, in the order of the cases
    stopped: the reason if the check ended before its last case
    absent:  the ranks that were lost
    """

    request: CheckRequest
    facts: dict[str, Any]
    results: Sequence[Result]
    seconds: float
    stopped: str | None = None
    absent: Sequence[int] = ()

    @property
    def right(self) -> bool:
        """Whether no case was wrong and all cases ran. Unless the command is strict, one case of each
        schedule is enough when the budget is over."""
        if not all(result.right for result in self.results if result.ran):
            return False
        if all(result.ran for result in self.results):
            return self.stopped in (None, self.request.late)
        return self.stopped == self.request.late and not self.request.strict and not self.untested

    @property
    def untested(self) -> list[str]:
        """Schedules for which no case ran."""
        tested = {result.case.schedule for result in self.results if result.ran}
        return [x for x in dict.fromkeys(result.case.schedule for result in self.results) if x not in tested]

    def as_json(self) -> dict[str, Any]:
        cases = [result.as_json() for result in self.results]
        fields = {"facts": self.facts, "seconds": self.seconds, "stopped": self.stopped, "right": self.right}
        return fields | {"cases": cases}


def main(request: CheckRequest, as_json: bool) -> int:
    """Run the check, print its report, and return the exit code. Exits the process if a rank was lost."""
    many = (torchrun_world_size() or 1) > 1
    rank, world_size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE")) if many else (0, 1)
    # Without markup: brackets in the message of an error are text.
    console, quiet = (
        make_console(stderr=as_json, quiet=quiet, markup=False, highlight=False, soft_wrap=True)
        for quiet in (False, True)
    )
    if many:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent by torchrun if a rank has died: report it first
    report = run_check(request, quiet if rank else console, many)
    if rank == min(set(range(world_size)) - set(report.absent)):  # the first rank that is not lost
        ended = [result for result in report.results if result.ran] if rank else ()
        for number, result in enumerate(ended, start=1):  # print again, since rank 0, which printed, is lost
            print_case(console, result, number, len(report.results))
        doctor.show(report.facts, console)
        for line in format_verdict(report):
            console.print(line, style="green" if report.right else "red")
        if as_json:
            print(json.dumps(report.as_json(), indent=2), flush=True)  # a hanging worker delays the exit
    code = INTERRUPTED if report.stopped == CTRL_C else 0 if report.right else 1
    if report.stopped and (many or torch.cuda.is_initialized()):
        # A normal exit would wait for messages of the lost rank, or for a hanging kernel.
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(LINGER if many else 0)
        os._exit(code)
    return code


def run_check(request: CheckRequest, console: Any, many: bool) -> CheckReport:
    """Run all cases and return the report. many: run on the ranks of torchrun, which (if not lost) return the
    same report; else in simulated worlds on one device. console: prints cases when they end"""
    device = select_device(many)
    world_size = int(os.environ["WORLD_SIZE"]) if many else request.world_size
    requested = cases.list_cases(world_size, device, request.only)
    ranks = join_groups(request, device, world_size) if many else Ranks(device, world_size)
    kind = f"ranks, {dist.get_backend()}" if many else f"simulated ranks on {device}"
    facts = collect_facts(device, f"{world_size} {kind}")
    outcomes = run_cases(requested, ranks, request) if many else run_in_processes(requested, ranks, request)
    results: dict[CheckCase, Result] = {}
    stop: GroupClosed | None = None
    bar = make_bar(console)
    task = bar.add_task("", total=len(requested))
    try:
        with bar:
            for result in outcomes:
                results[result.case] = result
                print_case(console, result, len(results), len(requested))
                bar.update(task, completed=len(results), refresh=True)
        if many:
            devices = ranks.gather(f"{platform.node()} {device}")
            facts["check"] |= {f"rank {rank}": name for rank, name in enumerate(devices)}
            dist.destroy_process_group()
    except GroupClosed as error:
        stop = error
    except KeyboardInterrupt:
        stop = Stopped(CTRL_C)
    listed = [results.get(case) or Result(case, why=f"not run: {stop}") for case in requested]
    seconds, why = time.monotonic() - request.began, str(stop) if stop else None
    return CheckReport(request, facts, listed, seconds, why, stop.absent if stop else ())


def collect_facts(device: torch.device, world: str) -> dict[str, Any]:
    """Collect the facts of `tritoncp doctor`, and the driver and the world."""
    facts = doctor.examine()
    if "float16" in cases.choose_dtypes(device):
        facts["advice"].append("float16 replaces bfloat16, to which the interpreter truncates")
    return facts | {"check": {"driver": machine.environment(device).get("driver", "none"), "world": world}}


def select_device(many: bool) -> torch.device:
    """Return the CPU on a machine without GPUs; else the current GPU, or with ``many`` the GPU of this local
    rank. Raises ValueError if a machine has fewer GPUs than ranks."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if many:
        ranks, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
        if gpus < ranks:
            raise ValueError(
                f"torchrun started {ranks} ranks on a machine with {gpus} GPUs: start one rank per GPU, or "
                "run `tritoncp check` without torchrun, which simulates ranks on one GPU"
            )
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.device("cuda", torch.cuda.current_device())


def join_groups(request: CheckRequest, device: torch.device, world_size: int) -> Ranks:
    """Set up this process and its groups, for tensors and for results on the host. NCCL's timeout is longer
    than the check's wait for the GPU, since NCCL kills a process when a message times out."""
    set_up_process(device)
    if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:
        use_loopback_interface()
    budget, wait = timedelta(seconds=request.budget), timedelta(seconds=request.timeout)
    store, rank, _ = next(iter(dist.rendezvous("env://", timeout=budget)))  # other ranks may start late
    options: dict[str, Any] = {"store": store, "rank": rank, "world_size": world_size}
    grace = timedelta(seconds=GRACE)
    if device.type == "cuda":
        longer = 3 * (wait + grace) + timedelta(seconds=30)
        dist.init_process_group("nccl", timeout=longer, device_id=device, **options)
    else:
        dist.init_process_group("gloo", timeout=wait, **options)
    host = dist.new_group(backend="gloo", timeout=wait + grace)
    mesh = None
    if cases.has_pairs(world_size):
        mesh = dist.init_device_mesh(device.type, (world_size // 2, 2), mesh_dim_names=("rows", "heads"))
    return Ranks(device, world_size, dist.group.WORLD, mesh, host)


def set_up_process(device: torch.device) -> None:
    """Set up a process so that it has the same cache keys of compiled kernels as other processes."""
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        name_functions()


def run_in_processes(requested: Sequence[CheckCase], ranks: Ranks, request: CheckRequest) -> Iterator[Result]:
    """Run cases of simulated worlds in several processes on one device, since compilation (GPU) or Python
    (CPU) takes up much of the time. One process runs the cases of a dtype and mask, which share kernels. If a
    process dies, its case failed. Raises Stopped at a time limit."""

    def check_budget() -> None:
        if request.over:
            raise Stopped(request.late)

    parts = [list(part) for _, part in groupby(requested, lambda case: (case.dtype, case.mask))]
    method = "fork" if ranks.device.type == "cpu" else "spawn"
    work, set_up = partial(run_part, ranks, request), partial(set_up_process, ranks.device)
    with WorkerPool(work, request.jobs, setup=set_up, method=method) as pool:
        for case, result in pool.run(parts, check_budget):
            yield Result(case, why=result.why) if isinstance(result, Lost) else result


def run_part(ranks: Ranks, request: CheckRequest, part: Sequence[CheckCase]) -> Iterator[Result]:
    """Run cases in a worker process, until one makes its device unusable."""
    with contextlib.suppress(Stopped):
        yield from run_cases(part, ranks, request)


class Stopped(GroupClosed):
    """Raised if the check cannot continue. absent: the lost ranks that are known"""


class Failure(NamedTuple):
    """The failure of a case in one process: the reason, whether it is a timeout in waiting for another rank
    or the device, and with TRITONCP_DEBUG=1 the traceback."""

    why: str
    waited: bool
    trace: str


def run_cases(part: Iterable[CheckCase], ranks: Ranks, request: CheckRequest) -> Iterator[Result]:
    """Run cases one after another on all ranks, and yield their results. Raises Stopped if the rest cannot
    run."""
    for case in part:
        try:
            attempts, over = zip(*ranks.gather((attempt_case(case, ranks, request), request.over)))
        except GroupClosed as error:
            absent = error.absent or (0,)  # if none is known, the store is lost, which rank 0 hosts
            yield Result(case, rank=absent[0], ranks=absent, why=str(error))
            lost = ", ".join(map(str, absent))
            raise Stopped(f"lost while {case.name} ran: rank {lost}", absent) from error
        failures = {rank: one for rank, one in enumerate(attempts) if isinstance(one, Failure)}
        if failures:  # the group is closed, or the device may be unusable
            # Ranks that failed come before ranks that timed out waiting for them.
            rank = min(failures, key=lambda rank: (failures[rank].waited, rank))
            why = failures[rank].why if len(attempts) == 1 else f"rank {rank}: {failures[rank].why}"
            yield Result(case, rank=rank, ranks=tuple(failures), why=why, trace=failures[rank].trace)
            raise Stopped(f"{case.name} failed, and its process or its group with it")
        yield judge_case(case, ranks.device, attempts)
        if any(over):
            raise Stopped(request.late)


def attempt_case(case: CheckCase, ranks: Ranks, request: CheckRequest) -> Errors | Failure:
    """Run a case in this process; return a Failure for an exception."""
    try:
        return run_case(ranks, case, request.timeout)
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[0][:500]
        waited = isinstance(error, GroupClosed | TimeoutError | dist.DistError)
        trace = traceback.format_exc()[-TRACE:] if DEBUG.read() else ""
        return Failure(f"{type(error).__name__}: {line}", waited, trace)


def print_case(console: Any, result: Result, number: int, total: int) -> None:
    """Print the row of a case: its number, verdict, name and error; below it the traceback, if there is
    one."""
    case, width = result.case, len(str(total))
    name = f"{case.schedule:12} {case.mask:9} {case.dtype:8}"
    line = f"{number:{width}}/{total} {result.verdict:6} {name}  {describe(result)}"
    console.print(line, style="" if result.right else "red")
    if result.trace:
        console.print(result.trace)


def describe(result: Result) -> str:
    """Format the error of a case, or the reason if there is none."""
    if result.error is None:
        return result.why or ""
    place = "summed over ranks" if result.rank is None else f"on rank {result.rank}"
    also = ", ".join(str(rank) for rank in result.ranks if rank != result.rank)
    numbers = f"{result.error:.1e} off, {result.allowed:.1e} allowed"
    return f"{result.tensor} {numbers}, {place}{f' (also {also})' if also else ''}"


def format_verdict(report: CheckReport) -> Iterator[str]:
    """Format the last lines: counts, cases that did not run, the worst case, and a line for a bug report."""
    ran = [result for result in report.results if result.ran]
    wrong = [result for result in ran if not result.right]
    yield f"{len(ran) - len(wrong)} of {len(ran)} cases are right, {report.seconds:.1f} s"
    if left_out := [result.case for result in report.results if not result.ran]:
        kinds = ", ".join(dict.fromkeys(f"{case.mask} {case.dtype}" for case in left_out))
        yield f"not run: {len(left_out)} more, of {kinds}: {report.stopped}"
    elif report.stopped:
        yield f"stopped: {report.stopped}"
    if report.untested and report.stopped == report.request.late:
        yield f"no case ran of {', '.join(report.untested)}: pass more seconds, --budget"
    if wrong:
        # Failed cases, which have no error, come first.
        worst = max(wrong, key=lambda x: math.inf if x.error is None else x.error / (x.allowed or 1.0))
        line = f"{worst.case.name}: {describe(worst)}"
        yield f"worst: {line}"
        if not DEBUG.read() and any(result.verdict == "FAILED" for result in wrong):
            yield "TRITONCP_DEBUG=1 shows the traceback of a case that failed"
        facts = (text.replace("\n", "; ") for _, text in doctor.summary_rows(report.facts) if text != "none")
        yield f"for a report: {', '.join(facts)}, {line}"
