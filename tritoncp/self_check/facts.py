"""Facts about the machine that a report of the check needs."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from tritoncp import comm
from tritoncp.doctor import examine
from tritoncp.perf import machine
from tritoncp.self_check.cases import dtypes
from tritoncp.self_check.comparison import Ranks

MESSAGE = {"cpu": 1 << 20, "cuda": 1 << 24}  # bytes of a rank: a medium message of each kind of link


def local_facts(device: torch.device) -> dict[str, Any]:
    """What doctor says, and driver, NCCL and the access of local GPUs to each other's memory."""
    environment = machine.environment(device)
    notes = []
    if torch.float16 in dtypes(device):
        notes.append("float16 in bfloat16's place: the interpreter truncates bfloat16")
    if device.type == "cpu":
        notes.append("on a CPU: ms say nothing of a GPU")
    return {
        **examine(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else machine.processor(),
        "host": platform.node(),
        "driver": environment.get("driver"),
        "cuda": environment.get("cuda"),
        "commit": environment.get("commit"),
        "peer_access": peer_access(torch.cuda.device_count() if torch.cuda.is_available() else 0),
        "world": f"simulated on {device}",
        "ranks": None,
        "all_gather": None,
        "notes": notes,
    }


def peer_access(gpus: int) -> str | None:
    """Whether local GPUs reach each other's memory; the pairs that do not, by index."""
    if gpus < 2:
        return None
    pairs = [(a, b) for a in range(gpus) for b in range(gpus) if a != b]
    without = [f"{a}->{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    return f"all but {', '.join(without)}" if without else f"all {gpus} GPUs, each to each"


def own_device(device: torch.device) -> dict[str, Any]:
    """A rank's line of the table of ranks."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {"host": platform.node(), "device": str(device), "name": name, "pid": os.getpid()}


def all_gather_speed(ranks: Ranks) -> dict[str, Any]:
    """Time an all-gather of one message over the group, as the schedules send theirs."""
    assert ranks.group is not None
    x = torch.ones(MESSAGE[ranks.device.type], dtype=torch.uint8, device=ranks.device)

    def schedule() -> comm.Schedule[torch.Tensor]:
        return (yield comm.Wait((yield comm.AllGather(x))))

    def seconds() -> float:
        began = time.perf_counter()
        whole = comm.run(schedule(), ranks.group)  # type: ignore[arg-type]
        int(whole[-1])  # it is there
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


def rows(facts: dict[str, Any]) -> Sequence[tuple[str, str]]:
    """Facts besides those of doctor, by label, for a person."""
    gather, ranks = facts["all_gather"], facts["ranks"]
    table = [
        ("device", facts["device"]),
        ("driver", facts["driver"] or "-"),
        ("world", facts["world"]),
        ("GPU to GPU", facts["peer_access"] or "-"),
    ]
    if ranks:
        lines = [f"rank {i}: {one['host']} {one['device']} {one['name']}" for i, one in enumerate(ranks)]
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
