"""Loads, stores and atomics for all memories, and generic addresses, which determine the memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from tritoncp.executor.ctas import Ctas
from tritoncp.executor.memory.atomics import update
from tritoncp.executor.memory.regions import LOCAL, SHARED, UNSIGNED
from tritoncp.executor.threads import Access

Array = np.ndarray[Any, Any]
u8 = np.uint64


class Memory:
    """Base class of memories, which locate and check accesses by these methods:

    places:       (access, addresses, bytes, kind) -> (access of threads with valid addresses, their place
                  with `views` and `label`, indices in units of bytes)
    check_read:   (access, place, indices, bytes); check_write also gets data and a kind
    check_atomic: like check_write, for updates, which several warps may do at once
    note_write:   like check_write, called after data were written
    count:        count an access, if the launch counts
    """

    name: str
    check: bool
    places: Callable[..., Iterable[tuple[Access, Any, Array]]]
    check_read: Callable[..., None]
    check_write: Callable[..., None]
    check_atomic: Callable[..., None]
    note_write: Callable[..., None]
    count: Callable[..., None]

    def address(self, idx: Array, nbytes: int) -> Array | None:
        """Return the addresses of units, if the indices determine them."""
        return None

    def load(self, access: Access, address: Array, t: str, n: int) -> list[Array]:
        nbytes = int(t[1]) * n
        self.count(access, address, nbytes, "read")
        out = np.zeros(access.threads.count, UNSIGNED[nbytes])
        for part, place, idx in self.places(access, address, nbytes, "load"):
            self.check_read(part, place, idx, nbytes)
            out[part.where] = place.views[nbytes].take(idx)
        return [out.view(t)] if n == 1 else list(np.ascontiguousarray(out.view(t).reshape(-1, n).T))

    def store(self, access: Access, address: Array, values: tuple[Array, ...]) -> None:
        nbytes = values[0].itemsize * len(values)
        self.count(access, address, nbytes, "write")
        data = values[0] if len(values) == 1 else np.stack(values, 1).reshape(-1).view(UNSIGNED[nbytes])
        for part, place, idx in self.places(access, address, nbytes, "store"):
            self.write(part, place, idx, nbytes, part.pick(data), "write")

    def write(self, access: Access, place: Any, idx: Array, nbytes: int, data: Array, kind: str) -> None:
        self.check_write(access, place, idx, nbytes, data, kind)
        access.ctas.progress += not holds(place.views, idx, nbytes, data).all()
        place.views[nbytes][idx] = data
        if self.check:
            lost = ~holds(place.views, idx, nbytes, data)
            kind = f"race on {self.name} memory: several threads write different values to one address"
            access.fault(kind, lost, self.address(idx, nbytes), place.label)
        self.note_write(access, place, idx, nbytes)

    def atomic(
        self, access: Access, address: Array, t: str, kind: str, operation: str, values: tuple[Array, ...]
    ) -> Array:
        """Update memory by threads one after another, in the launch's order; return the old values."""
        nbytes = int(t[1])
        self.count(access, address, nbytes, "write")
        access = access.select(access.ctas.launch.order(len(access)))
        out = np.zeros(access.threads.count, t)
        for part, place, idx in self.places(access, address, nbytes, "atomic"):
            self.check_atomic(part, place, idx, nbytes)
            cells, operands = place.views[nbytes].view(t), tuple(part.pick(v) for v in values)
            out[part.where] = old = update(cells, idx, kind, operation, operands)
            access.ctas.progress += not np.array_equal(old, cells[idx])
        return out


def holds(views: dict[int, Array], idx: Array, nbytes: int, data: Array) -> Array:
    """Return whether memory has these data at each index, in units of nbytes."""
    if nbytes <= 8:
        return views[nbytes][idx] == data
    words = nbytes // 8
    return (views[8].reshape(-1, words)[idx] == data.view(np.uint64).reshape(-1, words)).all(1)


class GenericMemory:
    """Generic memory: dispatches the access of each thread to the memory of its address."""

    def __init__(self, ctas: Ctas) -> None:
        self.ctas = ctas

    def parts(self, access: Access, address: Array) -> list[tuple[Any, Access, Array]]:
        """Return (memory, access of its threads, addresses in it) for each space in use."""
        shared, local = (address & u8(SHARED)) != 0, (address & u8(LOCAL)) != 0
        spaces = (
            (self.ctas.globals, ~shared & ~local, 0),
            (self.ctas.shared, shared, SHARED),
            (self.ctas.local, local, LOCAL),
        )
        parts = [(m, access.select(np.flatnonzero(access.pick(inside))), bit) for m, inside, bit in spaces]
        return [(m, part, address & ~u8(bit)) for m, part, bit in parts if len(part)]

    def load(self, access: Access, address: Array, t: str, n: int) -> list[Array]:
        out = [np.zeros(access.threads.count, t) for _ in range(n)]
        for memory, part, a in self.parts(access, address):
            for old, new in zip(out, memory.load(part, a, t, n)):
                old[part.at] = new[part.at]
        return out

    def store(self, access: Access, address: Array, values: tuple[Array, ...]) -> None:
        for memory, part, a in self.parts(access, address):
            memory.store(part, a, values)

    def atomic(
        self, access: Access, address: Array, t: str, kind: str, operation: str, values: tuple[Array, ...]
    ) -> Array:
        out = np.zeros(access.threads.count, t)
        for memory, part, a in self.parts(access, address):
            out[part.at] = memory.atomic(part, a, t, kind, operation, values)[part.at]
        return out
