"""Facts about the machine for the report of `tritoncp check`."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from tritoncp.distributed import collectives
from tritoncp.doctor import examine
from tritoncp.perf.suite import machine
from tritoncp.self_check.cases import choose_dtypes
from tritoncp.self_check.comparison import Ranks

MESSAGE = {"cpu": 1 << 20, "cuda": 1 << 24}  # bytes that each rank sends, by device type


def collect_facts(device: torch.device) -> dict[str, Any]:
    """Collect the facts of `tritoncp doctor`, and driver, NCCL and peer access between local GPUs."""
    environment = machine.environment(device)
    notes = []
    if torch.float16 in choose_dtypes(device):
        notes.append("float16 replaces bfloat16, to which the interpreter truncates instead of rounding")
    if device.type == "cpu":
        notes.append("the times are those of a CPU and say nothing about a GPU")
    return {
        **examine(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else machine.processor(),
        "host": platform.node(),
        "driver": environment.get("driver"),
        "cuda": environment.get("cuda"),
        "commit": environment.get("commit"),
        "peer_access": describe_peer_access(torch.cuda.device_count() if torch.cuda.is_available() else 0),
        "world": f"simulated on {device}",
        "ranks": None,
        "all_gather": None,
        "notes": notes,
    }


def describe_peer_access(gpus: int) -> str | None:
    """Describe which local GPUs can access each other's memory, by index; None for fewer than two GPUs."""
    if gpus < 2:
        return None
    pairs = [(a, b) for a in range(gpus) for b in range(gpus) if a != b]
    without = [f"{a}->{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    return f"all but {', '.join(without)}" if without else f"all {gpus} GPUs, each to each"


def describe_device(device: torch.device) -> dict[str, Any]:
    """Describe this rank's host, device and process, for the table of ranks."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {"host": platform.node(), "device": str(device), "name": name, "pid": os.getpid()}


def time_all_gather(ranks: Ranks) -> dict[str, Any]:
    """Time an all-gather of one message over the group's data communicator, which the schedules use."""
    assert ranks.group is not None
    x = torch.ones(MESSAGE[ranks.device.type], dtype=torch.uint8, device=ranks.device)

    def schedule() -> collectives.Schedule[torch.Tensor]:
        return (yield collectives.Wait((yield collectives.AllGather(x))))

    def seconds() -> float:
        began = time.perf_counter()
        gathered = collectives.run(schedule(), ranks.group)  # type: ignore[arg-type]
        int(gathered[-1])  # waits until the message has arrived
        return time.perf_counter() - began

    seconds()
    took = median(seconds() for _ in range(5))
    received = x.nbytes * (ranks.world_size - 1)
    return {
        "backend": dist.get_backend(ranks.group),
        "bytes": x.nbytes,
        "ms": took * 1e3,
        "gb_per_s": received / took / 1e9,
    }


def list_rows(facts: dict[str, Any]) -> Sequence[tuple[str, str]]:
    """List the facts that `tritoncp doctor` does not have: (label, text)."""
    gather, ranks = facts["all_gather"], facts["ranks"]
    table = [
        ("device", facts["device"]),
        ("driver", facts["driver"] or "-"),
        ("world", facts["world"]),
        ("GPU to GPU", facts["peer_access"] or "-"),
    ]
    if ranks:
        lines = [f"rank {i}: {rank['host']} {rank['device']} {rank['name']}" for i, rank in enumerate(ranks)]
        table.append(("ranks", "\n".join(lines)))
    if gather:
        table.append(
            (
                "all-gather",
                f"{gather['bytes'] / 2**20:g} MiB a rank by {gather['backend']}: {gather['ms']:.2f} ms, "
                f"{gather['gb_per_s']:.2f} GB/s into each rank",
            )
        )
    return [*table, *[("note", note) for note in facts["notes"]]]
