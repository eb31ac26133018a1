"""Runs the cases: in this process, in worker processes that share the device, or on the ranks of torchrun."""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console

from tritoncp import comm
from tritoncp.demo.ranks import stay_on_this_machine, torchrun_world_size
from tritoncp.self_check import facts
from tritoncp.self_check.attempts import Limits, Request, Stopped, outcomes
from tritoncp.self_check.cases import Case, Result, all_cases, degree_of, sizes
from tritoncp.self_check.comparison import Ranks
from tritoncp.self_check.report import Display, Report, show_report
from tritoncp.self_check.workers import parts_of, start, work_in_processes

GRACE = 5.0  # seconds more than a message that the ranks have to say how it went
LINGER = 2.0  # seconds that a rank stays after a loss: to a slower one it would be lost too
Show = Callable[[Result], None]


def not_run(cases: Sequence[Case], results: Sequence[Result], why: str) -> list[Result]:
    """Results of the cases that have none."""
    known = {result.case for result in results}
    return [Result(case, why=f"not run: {why}") for case in cases if case not in known]


# -- one process ------------------------------------------------------------------------------------------


def check_alone(request: Request, limits: Limits, show: Show) -> Report:
    """Every case in a simulated world on one device, whose kernels compile in worker processes."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    cases = selected(request, request.world_size, device)
    machine = facts.local_facts(device)
    machine["world"] = f"{request.world_size} simulated ranks on {device}"
    if gpu and processes(request, parts_of(cases)) > 1:
        machine["notes"].append("processes share the GPU: ms are longer than in a process of its own")
    results: list[Result] = []
    stopped = None
    try:
        for result in simulated(cases, Ranks(device, request.world_size), limits):
            results.append(result)
            show(result)
    except Stopped as stop:
        stopped = str(stop)
        results += not_run(cases, results, stopped)
    results.sort(key=lambda result: cases.index(result.case))  # processes end in any order
    return Report(machine, results, limits.seconds, stopped)


def selected(request: Request, world_size: int, device: torch.device) -> list[Case]:
    cases = all_cases(world_size, device, request.only)
    if not cases:
        example = all_cases(world_size, device)[-1].name
        raise ValueError(
            f"--only {request.only!r} fits no case of {world_size} ranks; one is called {example}"
        )
    return cases


def simulated(cases: Sequence[Case], ranks: Ranks, limits: Limits) -> Iterator[Result]:
    """Results of cases in a simulated world, as they come."""
    parts = parts_of(cases)
    jobs = processes(limits.request, parts)
    if jobs == 1:
        start(ranks.device)
        yield from outcomes(cases, ranks, lambda own: [own], limits)
    else:
        yield from work_in_processes(parts, ranks, jobs, limits)


def processes(request: Request, parts: Sequence[Sequence[Case]]) -> int:
    """How many processes share the device."""
    return min(len(parts), request.jobs or cores())


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# -- a process group --------------------------------------------------------------------------------------


class Group(NamedTuple):
    """The ranks that torchrun started: the group for data, and one on the host for what they say of it."""

    ranks: Ranks
    host: dist.ProcessGroup

    def gather(self, own: Any) -> list[Any]:
        """Every rank's value, over the host. Raises PeerLost, which names the ranks that did not come."""
        text = pickle.dumps(own)
        sizes = [row[0] for row in comm.exchange([len(text)], self.host, "the result of a case")]
        padded = list(text.ljust(max(sizes), b"\0"))
        rows = comm.exchange(padded, self.host, "the result of a case")
        return [pickle.loads(bytes(row[:size])) for row, size in zip(rows, sizes)]


def device_of_rank() -> torch.device:
    """The GPU of this rank's number on its machine, or the CPU where there is none. Raises ValueError where
    GPUs are fewer than ranks."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    here, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
    if gpus < here:
        raise ValueError(
            f"torchrun started {here} ranks on a machine with {gpus} GPUs; start one rank for each, or run "
            "`tritoncp check` without torchrun, which simulates ranks on one GPU"
        )
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def join(request: Request, device: torch.device, store: dist.Store, rank: int, world_size: int) -> Group:
    """Make the process groups. Messages on a GPU have more time than this process waits for them: NCCL ends a
    process whose messages are late."""
    if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:
        stay_on_this_machine()
    seconds, backend = request.timeout, "gloo"
    if device.type == "cuda":
        seconds, backend = 3 * (request.timeout + GRACE) + 30, "nccl"
    bound = device if backend == "nccl" else None
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=seconds),
        device_id=bound,
    )
    host = dist.new_group(backend="gloo", timeout=timedelta(seconds=request.timeout + GRACE))
    degree = degree_of(world_size, sizes(device, world_size).heads)
    mesh = None
    if degree:
        mesh = dist.init_device_mesh(
            device.type, (world_size // degree, degree), mesh_dim_names=("rows", "heads")
        )
    return Group(Ranks(device, world_size, dist.group.WORLD, mesh), host)


def compile_share(cases: Sequence[Case], device: torch.device, limits: Limits) -> None:
    """Compile this rank's share of the kernels into Triton's cache on disk, by running its cases in a
    simulated world on its own GPU. Results are those of the real run alone."""
    local, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    parts = parts_of(cases)[local::here]
    jobs = limits.request.jobs or max(1, cores() // here)
    try:
        for _ in work_in_processes(parts, Ranks(device, int(os.environ["WORLD_SIZE"])), jobs, limits):
            pass
    except Stopped:
        pass  # the real run ends for the same reason


def await_compilers(store: dist.Store, rank: int, world_size: int, budget: timedelta) -> None:
    """Wait until every rank has compiled its share. Raises RuntimeError, which names the absent ranks."""
    keys = [f"tritoncp/compiled/{other}" for other in range(world_size)]
    store.set(keys[rank], "")
    try:
        store.wait(keys, budget)
    except RuntimeError as error:
        absent = [other for other, key in enumerate(keys) if not store.check([key])]
        raise RuntimeError(
            f"ranks {absent} have not compiled their share of the kernels within {budget.total_seconds():g} s"
        ) from error


def check_group(request: Request, limits: Limits, show: Show) -> Report:
    """Every case on the ranks that torchrun started: the same report on every rank that is there."""
    device = device_of_rank()
    cases = selected(request, int(os.environ["WORLD_SIZE"]), device)
    budget = timedelta(seconds=request.budget)
    store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=budget)))
    machine = facts.local_facts(device)
    if device.type == "cuda":
        compile_share(cases, device, limits)
        await_compilers(store, rank, world_size, budget)
    start(device)
    group = join(request, device, store, rank, world_size)
    machine["world"] = f"{world_size} ranks, {dist.get_backend()}"
    results: list[Result] = []
    try:
        for result in outcomes(cases, group.ranks, group.gather, limits):
            results.append(result)
            show(result)
        machine["all_gather"] = facts.all_gather_speed(group.ranks)
        machine["ranks"] = group.gather(facts.own_device(device))
    except (Stopped, comm.PeerLost) as error:
        results += not_run(cases, results, str(error))
        return Report(machine, results, limits.seconds, str(error), error.absent)
    dist.destroy_process_group()
    return Report(machine, results, limits.seconds)


# -- the command ------------------------------------------------------------------------------------------


def main(request: Request, as_json: bool) -> int:
    """Check, say what came of it, and return the exit code. Does not return where a rank is lost."""
    limits = Limits(request)
    console = Console(stderr=as_json)
    many = (torchrun_world_size() or 1) > 1
    first = not many or os.environ["RANK"] == "0"
    with limits.listening(), Display(console, enabled=first) as display:
        report = (check_group if many else check_alone)(request, limits, display.show)
    if not many or int(os.environ["RANK"]) == report.speaker(int(os.environ["WORLD_SIZE"])):
        show_report(report, console, display.shown)
        if as_json:
            print(json.dumps(report.as_json(), indent=2), flush=True)  # a worker that hangs delays the end
    if report.stopped and (
        many or torch.cuda.is_initialized()
    ):  # as it ends, a process waits for what is lost
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(LINGER if many else 0)
        os._exit(1)
    return 0 if report.right else 1
