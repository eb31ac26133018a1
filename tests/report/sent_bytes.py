"""Bytes of messages, by their collectives."""

from __future__ import annotations

from tritoncp.distributed.collectives import AllGather, AllToAll, Collective, ReduceScatter


def sent_bytes(request: Collective, world_size: int, rank: int) -> int:
    """Return the bytes that a rank sends for a collective."""
    match request:
        case AllToAll(x, sends):
            return (sum(sends) - sends[rank]) * x[:1].nbytes
        case AllGather(x):
            return x.nbytes * (world_size - 1)
        case ReduceScatter(x):
            return x.nbytes * (world_size - 1) // world_size
