"""Runs the cases: in this process, in worker processes that share the device, or on the ranks of torchrun."""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console

from tritoncp.core.process_environment import torchrun_world_size, use_loopback_interface
from tritoncp.distributed import collectives, failures
from tritoncp.self_check import facts
from tritoncp.self_check.attempts import Limits, Request, Stopped, run_cases
from tritoncp.self_check.cases import Case, Result, choose_degree, choose_sizes, list_cases
from tritoncp.self_check.comparison import Ranks
from tritoncp.self_check.report import Display, Report, show_report
from tritoncp.self_check.workers import run_in_processes, set_up_process, split_into_parts

GRACE = 5.0  # extra seconds, after a message has timed out, for ranks to exchange their results
LINGER = 2.0  # seconds that a rank waits after a loss before it exits: slower ranks may still need it
Show = Callable[[Result], None]


def mark_not_run(cases: Sequence[Case], results: Sequence[Result], why: str) -> list[Result]:
    """Make results for the cases without one."""
    finished = {result.case for result in results}
    return [Result(case, why=f"not run: {why}") for case in cases if case not in finished]


# -- one process ------------------------------------------------------------------------------------------


def check_alone(request: Request, limits: Limits, show: Show) -> Report:
    """Run every case in a simulated world on one device; worker processes compile its kernels."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    cases = select_cases(request, request.world_size, device)
    machine = facts.collect_facts(device)
    machine["world"] = f"{request.world_size} simulated ranks on {device}"
    ranks, parts = Ranks(device, request.world_size), split_into_parts(cases)
    jobs = min(len(parts), request.jobs or count_cores())
    if gpu and jobs > 1:
        machine["notes"].append("processes share the GPU: ms are longer than in a process of its own")
    if jobs == 1:
        set_up_process(device)
        outcomes = run_cases(cases, ranks, lambda own: [own], limits)
    else:
        outcomes = run_in_processes(parts, ranks, jobs, limits)
    results: list[Result] = []
    stopped = None
    try:
        for result in outcomes:
            results.append(result)
            show(result)
    except Stopped as stop:
        stopped = str(stop)
        results += mark_not_run(cases, results, stopped)
    results.sort(key=lambda result: cases.index(result.case))  # processes end in any order
    return Report(machine, results, limits.seconds, stopped)


def select_cases(request: Request, world_size: int, device: torch.device) -> list[Case]:
    """List the cases that the command asks for. Raises ValueError where there are none."""
    cases = list_cases(world_size, device, request.only)
    if not cases:
        example = list_cases(world_size, device)[-1].name
        raise ValueError(
            f"--only {request.only!r} matches no case of {world_size} ranks; a case's name is, say, {example}"
        )
    return cases


def count_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# -- a process group --------------------------------------------------------------------------------------


class Group(NamedTuple):
    """The process groups of torchrun's ranks: one for tensors, and one on the host for results."""

    ranks: Ranks
    host: dist.ProcessGroup

    def gather(self, own: Any) -> list[Any]:
        """Gather every rank's value over the host group. Raises GroupClosed, which names the absent ranks."""
        text = pickle.dumps(own)
        sizes = [row[0] for row in collectives.exchange([len(text)], self.host, "the result of a case")]
        texts = collectives.exchange_bytes(text, max(sizes), self.host, "the result of a case")
        return [pickle.loads(padded[:size]) for padded, size in zip(texts, sizes)]


def select_device() -> torch.device:
    """Select the GPU with this rank's local number, or the CPU on a machine without GPUs. Raises ValueError
    where a machine has fewer GPUs than ranks."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    ranks, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
    if gpus < ranks:
        raise ValueError(
            f"torchrun started {ranks} ranks on a machine with {gpus} GPUs; start one rank for each, or run "
            "`tritoncp check` without torchrun, which simulates ranks on one GPU"
        )
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def join_groups(
    request: Request, device: torch.device, store: dist.Store, rank: int, world_size: int
) -> Group:
    """Make the process groups. NCCL's timeout is longer than this process waits for the GPU, because NCCL
    kills a process whose messages time out."""
    if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:
        use_loopback_interface()
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
    degree = choose_degree(world_size, choose_sizes(device, world_size).heads)
    mesh = None
    if degree:
        mesh = dist.init_device_mesh(
            device.type, (world_size // degree, degree), mesh_dim_names=("rows", "heads")
        )
    return Group(Ranks(device, world_size, dist.group.WORLD, mesh), host)


def compile_share(cases: Sequence[Case], device: torch.device, limits: Limits) -> None:
    """Compile this rank's share of the kernels into Triton's cache on disk, by running its share of the cases
    in a simulated world on its GPU. Their results are dropped: only the run on real ranks counts."""
    local, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    parts = split_into_parts(cases)[local::ranks]
    jobs = limits.request.jobs or max(1, count_cores() // ranks)
    try:
        for _ in run_in_processes(parts, Ranks(device, int(os.environ["WORLD_SIZE"])), jobs, limits):
            pass
    except Stopped:
        pass  # the real run ends for the same reason


def await_compilers(store: dist.Store, rank: int, world_size: int, budget: timedelta) -> None:
    """Wait until every rank has compiled its share. Raises RuntimeError, which names the missing ranks."""
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
    """Run every case on the ranks that torchrun started. Ranks that are not lost return the same report."""
    device = select_device()
    cases = select_cases(request, int(os.environ["WORLD_SIZE"]), device)
    budget = timedelta(seconds=request.budget)
    store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=budget)))
    machine = facts.collect_facts(device)
    if device.type == "cuda":
        compile_share(cases, device, limits)
        await_compilers(store, rank, world_size, budget)
    set_up_process(device)
    group = join_groups(request, device, store, rank, world_size)
    machine["world"] = f"{world_size} ranks, {dist.get_backend()}"
    results: list[Result] = []
    try:
        for result in run_cases(cases, group.ranks, group.gather, limits):
            results.append(result)
            show(result)
        machine["all_gather"] = facts.time_all_gather(group.ranks)
        machine["ranks"] = group.gather(facts.describe_device(device))
    except (Stopped, failures.GroupClosed) as error:
        results += mark_not_run(cases, results, str(error))
        return Report(machine, results, limits.seconds, str(error), error.absent)
    dist.destroy_process_group()
    return Report(machine, results, limits.seconds)


# -- the command ------------------------------------------------------------------------------------------


def main(request: Request, as_json: bool) -> int:
    """Run the check, print its report, and return the exit code. Exits the process where a rank is lost."""
    limits = Limits(request)
    console = Console(stderr=as_json)
    world_size = torchrun_world_size() or 1
    many = world_size > 1
    rank = int(os.environ["RANK"]) if many else 0
    with limits.listening(), Display(console, enabled=rank == 0) as display:
        report = (check_group if many else check_alone)(request, limits, display.show)
    if rank == min(set(range(world_size)) - set(report.absent)):  # the first one that is not lost
        show_report(report, console, display.shown)
        if as_json:
            print(json.dumps(report.as_json(), indent=2), flush=True)  # a worker that hangs delays the end
    if report.stopped and (many or torch.cuda.is_initialized()):
        # A normal exit would wait for the lost rank's messages or the hanging kernel.
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(LINGER if many else 0)
        os._exit(1)
    return 0 if report.right else 1
