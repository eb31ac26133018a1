"""Running the cases of the self-check, with time limits: in simulated worlds on one device, or on the ranks
of torchrun."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console

from tritoncp.core.process_environment import torchrun_world_size, use_loopback_interface
from tritoncp.core.worker_pool import Lost, WorkerPool, count_cores
from tritoncp.distributed.failures import GroupClosed
from tritoncp.ops.engine_factory import name_functions
from tritoncp.self_check.cases import CheckCase, CheckRequest, Result, choose_degree, choose_sizes, list_cases
from tritoncp.self_check.comparison import Errors, Ranks, judge_case, run_case
from tritoncp.self_check.report import CheckReport, collect_facts, print_case, print_report

GRACE = 5.0  # seconds, after the timeout of a message, for ranks to exchange their results
LINGER = 2.0  # seconds that a rank waits after a loss before it exits, since slower ranks may need it


def main(request: CheckRequest, as_json: bool) -> int:
    """Run the check, print its report, and return the exit code. Exits the process if a rank was lost."""
    many = (torchrun_world_size() or 1) > 1
    rank, world_size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE")) if many else (0, 1)
    console = Console(stderr=as_json)
    if many:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent by torchrun if a rank has died: report it first
    report = run_check(request, console if rank == 0 else None, many)
    if rank == min(set(range(world_size)) - set(report.absent)):  # the first one that is not lost
        ended = [result for result in report.results if result.ran] if rank else ()
        for number, result in enumerate(ended, start=1):  # print again: rank 0, which had, is lost
            print_case(console, result, number, len(report.results))
        print_report(console, report)
        if as_json:
            print(json.dumps(report.as_json(), indent=2), flush=True)  # a hanging worker delays the exit
    code = 0 if report.right else 1
    if report.stopped and (many or torch.cuda.is_initialized()):
        # A normal exit would wait for messages of the lost rank, or for a hanging kernel.
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(LINGER if many else 0)
        os._exit(code)
    return code


def run_check(request: CheckRequest, console: Console | None, many: bool) -> CheckReport:
    """Run all cases and return the report. many: on the ranks of torchrun, which (if not lost) return the
    same report; else in simulated worlds on one device. console: where this rank prints finished cases, or
    None"""
    device = select_device(many)
    world_size = int(os.environ["WORLD_SIZE"]) if many else request.world_size
    cases = list_cases(world_size, device, request.only)
    ranks = join_groups(request, device, world_size) if many else Ranks(device, world_size)
    kind = f"ranks, {dist.get_backend()}" if many else f"simulated ranks on {device}"
    facts = collect_facts(device, f"{world_size} {kind}")
    if many:
        compile_share(cases, ranks, request)
        set_up_process(device)
        outcomes = run_cases(cases, ranks, request)
    else:
        outcomes = run_in_processes(split_into_parts(cases), ranks, request.jobs or count_cores(), request)
    results: dict[CheckCase, Result] = {}
    stop: GroupClosed | None = None
    try:
        for result in outcomes:
            results[result.case] = result
            if console is not None:
                print_case(console, result, len(results), len(cases))
        if many:
            own = {"host": platform.node(), "device": str(device), "name": facts["device"]}
            facts["ranks"] = ranks.gather(own)
            dist.destroy_process_group()
    except GroupClosed as error:
        stop = error
    listed = [results.get(case) or Result(case, why=f"not run: {stop}") for case in cases]
    seconds, why = time.monotonic() - request.began, str(stop) if stop else None
    return CheckReport(request, facts, listed, seconds, why, stop.absent if stop else ())


def split_into_parts(cases: Sequence[CheckCase]) -> list[list[CheckCase]]:
    """Split cases, in order, into parts of one dtype and mask, which share kernels."""
    return [list(part) for _, part in groupby(cases, lambda case: (case.dtype, case.mask))]


def run_in_processes(
    parts: Sequence[Sequence[CheckCase]], ranks: Ranks, jobs: int, request: CheckRequest
) -> Iterator[Result]:
    """Run parts in up to ``jobs`` processes on one device, where most time is spent in compilation (GPU) or
    in Python (CPU). A case whose process dies has failed. Raises Stopped at a time limit."""

    def check_budget() -> None:
        if request.over:
            raise Stopped(request.late)

    method = "fork" if ranks.device.type == "cpu" else "spawn"
    work, set_up = partial(run_part, ranks, request), partial(set_up_process, ranks.device)
    with WorkerPool(work, jobs, setup=set_up, method=method) as pool:
        for case, result in pool.run(parts, check_budget):
            yield Result(case, why=result.why) if isinstance(result, Lost) else result


def run_part(ranks: Ranks, request: CheckRequest, cases: Sequence[CheckCase]) -> Iterator[Result]:
    """Run cases in a worker process, until one makes its device unusable."""
    with contextlib.suppress(Stopped):
        yield from run_cases(cases, ranks, request)


def set_up_process(device: torch.device) -> None:
    """Set up a process so that its cache keys of compiled kernels equal those of other processes."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*heads cannot be divided")  # some cases are of this kind
    if device.type == "cuda":
        torch.cuda.set_device(device)
        name_functions()


def select_device(many: bool) -> torch.device:
    """Return the CPU on a machine without GPUs; else the current GPU, or with ``many`` that of this local
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


# -- the ranks of torchrun --------------------------------------------------------------------------------


def join_groups(request: CheckRequest, device: torch.device, world_size: int) -> Ranks:
    """Make the process groups, for tensors and for results on the host. NCCL's timeout is longer than the
    check's wait for the GPU, since NCCL kills a process when a message times out."""
    if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:
        use_loopback_interface()
    budget = timedelta(seconds=request.budget)
    store, rank, _ = next(iter(dist.rendezvous("env://", timeout=budget)))  # other ranks may start late
    gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if gpu else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=3 * (request.timeout + GRACE) + 30 if gpu else request.timeout),
        device_id=device if gpu else None,
    )
    host = dist.new_group(backend="gloo", timeout=timedelta(seconds=request.timeout + GRACE))
    degree, mesh = choose_degree(world_size, choose_sizes(device, world_size).heads), None
    if degree:
        shape = world_size // degree, degree
        mesh = dist.init_device_mesh(device.type, shape, mesh_dim_names=("rows", "heads"))
    return Ranks(device, world_size, dist.group.WORLD, mesh, host)


def compile_share(cases: Sequence[CheckCase], ranks: Ranks, request: CheckRequest) -> None:
    """Compile this rank's share of the kernels on a GPU into Triton's cache on disk, and wait for the other
    ranks. It runs its share of the cases in a simulated world and drops the results. Raises RuntimeError with
    the ranks that have not finished in time."""
    if ranks.device.type != "cuda":
        return
    local, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    jobs = request.jobs or max(1, count_cores() // local_size)
    with contextlib.suppress(Stopped):  # the real run ends for the same reason
        parts = split_into_parts(cases)[local::local_size]
        for _ in run_in_processes(parts, Ranks(ranks.device, ranks.world_size), jobs, request):
            pass
    dist.monitored_barrier(ranks.host, timedelta(seconds=request.budget), wait_all_ranks=True)


# -- cases in turn in one process ----------------------------------------------------------------------------


class Stopped(GroupClosed):
    """Raised if the check cannot continue. absent: the lost ranks, as far as known"""


class Failure(NamedTuple):
    """The failure of a case in one process: the reason, and whether it is a timeout in waiting for another
    rank or the device."""

    why: str
    waited: bool


def run_cases(cases: Iterable[CheckCase], ranks: Ranks, request: CheckRequest) -> Iterator[Result]:
    """Run cases one after another on all ranks, and yield their results. Raises Stopped if the rest cannot
    run."""
    for case in cases:
        try:
            attempts, over = zip(*ranks.gather((attempt_case(case, ranks, request), request.over)))
        except GroupClosed as error:
            absent = error.absent or (0,)  # if none is known, the store is lost, which is in rank 0
            yield Result(case, rank=absent[0], ranks=absent, why=str(error))
            lost = ", ".join(map(str, absent))
            raise Stopped(f"lost while {case.name} ran: rank {lost}", absent) from error
        failures = {rank: one for rank, one in enumerate(attempts) if isinstance(one, Failure)}
        if failures:  # the group is closed, or the device may be unusable
            # Ranks that failed themselves, before ranks that only timed out in waiting for them.
            rank = min(failures, key=lambda rank: (failures[rank].waited, rank))
            why = failures[rank].why if len(attempts) == 1 else f"rank {rank}: {failures[rank].why}"
            yield Result(case, rank=rank, ranks=tuple(failures), why=why)
            raise Stopped(f"{case.name} failed, and its process or its group with it")
        yield judge_case(case, ranks.problem(case).allowed, attempts)
        if any(over):
            raise Stopped(request.late)


def attempt_case(case: CheckCase, ranks: Ranks, request: CheckRequest) -> Errors | Failure:
    """Run a case in this process; return a Failure for an exception."""
    try:
        return run_case(ranks, case, lambda: wait_for_device(ranks.device, request.timeout))
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[0][:500]
        waited = isinstance(error, GroupClosed | TimeoutError | dist.DistError)
        return Failure(f"{type(error).__name__}: {line}", waited)


def wait_for_device(device: torch.device, timeout: float) -> None:
    """Wait until a GPU has finished its queued work. Raises TimeoutError after the timeout, as for a hanging
    kernel or a message from a lost rank."""
    if device.type != "cuda":
        return
    event, end = torch.cuda.Event(), time.monotonic() + timeout
    event.record(torch.cuda.current_stream(device))
    while not event.query():
        if time.monotonic() > end:
            raise TimeoutError(f"the GPU did not finish its work within {timeout:g} s")
        time.sleep(0)
