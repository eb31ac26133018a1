"""Runs the Gluon kernel's own source in Python: partitions as threads that take turns at random, shared
memory, barriers and asynchronous copies and products as the PTX ISA has them, in the weakest order it allows.

No layouts, registers or rounding of P: the model checks indices, masks and phases, and that no memory is read
before it is written, written while it is read, or waited for in vain.
"""

from __future__ import annotations

import random
import threading
import types
from collections.abc import Callable
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritoncp.kernels import forward_gluon, program_order, scores, tile_runs, tiles
from tritoncp.kernels.launch import Launch


class Deadlock(Exception):
    """Raised where every partition waits."""


class Stopped(BaseException):
    """Raised in partitions after another one has failed."""


class Issue(NamedTuple):
    """The issue of a product: its program and group, and the number of products not waited for then."""

    program: tuple[int, ...]
    group: int
    outstanding: int


def run(launch: Launch, seed: int = 0) -> list[Issue]:
    """Run all programs of a launch, one after the other; each seed gives another interleaving."""
    issues: list[Issue] = []
    args = {name: as_kernel_argument(value) for name, value in launch.args.items() if name != "maxnreg"}
    rng = random.Random(seed)
    for ids in product(*map(range, launch.grid)):
        program = Program(ids, launch.grid, rng)
        program.call("gluon_forward_kernel", args)
        issues += program.issues
    return issues


def as_kernel_argument(value: Any) -> Any:
    """Convert an argument of a launch to the kernel's view of it."""
    if isinstance(value, Tensor):
        return Pointer(value, 0)
    if isinstance(value, tuple):
        return (
            type(value)(*map(as_kernel_argument, value))
            if hasattr(value, "_fields")
            else tuple(map(as_kernel_argument, value))
        )
    return Box(value) if hasattr(value, "block_shape") else value


# -- values -----------------------------------------------------------------------------------------------


class Block(Tensor):
    """A block of registers; torch's own ``type`` is a method, the kernel's holds a layout."""

    type = SimpleNamespace(layout=None)


def block(x: Tensor) -> Block:
    return x.as_subclass(Block)


class Pointer:
    """Addresses inside one tensor; loads and stores outside of it are errors."""

    def __init__(self, tensor: Tensor, offset: Any) -> None:
        self.tensor, self.offset = tensor, offset
        self.dtype = SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.tensor, self.offset + more)

    def memory(self) -> Tensor:
        start = self.tensor.storage_offset()
        size = self.tensor.untyped_storage().size() // self.tensor.element_size()
        return self.tensor.as_strided((size - start,), (1,), start)

    def where(self, mask: Any) -> tuple[Tensor, Tensor]:
        at = torch.as_tensor(self.offset).as_subclass(Tensor)
        keep = torch.ones_like(at, dtype=torch.bool) if mask is None else mask.as_subclass(Tensor)
        at, keep = torch.broadcast_tensors(at, keep)
        inside = (at >= 0) & (at < self.memory().numel())
        assert bool((inside | ~keep).all()), "an address outside of its tensor"
        return at, keep


def load(p: Pointer, mask: Any = None, other: Any = 0, volatile: bool = False) -> Block:
    at, keep = p.where(mask)
    values = torch.full(at.shape, other, dtype=p.tensor.dtype)
    values[keep] = p.memory()[at[keep]]
    return block(values)


def store(p: Pointer, value: Tensor, mask: Any = None) -> None:
    at, keep = p.where(mask)
    p.memory()[at[keep]] = value.as_subclass(Tensor).expand(at.shape)[keep]


class Box:
    """A tensor descriptor: zeros behind the tensor's end."""

    dtype, layout = torch.float32, None

    def __init__(self, desc: Any) -> None:
        self.base, self.shape = desc.base.float(), desc.block_shape
        self.block_type = SimpleNamespace(nbytes=4 * self.shape[2] * self.shape[3])

    def read(self, at: list[Any]) -> Tensor:
        b, h, row, first = map(int, at)
        assert first == 0 and self.shape[:2] == [1, 1] and row >= 0
        values = torch.zeros(self.shape[2:])
        rows = self.base[b, h, row : row + self.shape[2]]
        values[: len(rows)] = rows
        return values.reshape(self.shape)


class Memory:
    """Shared memory, or a view of it."""

    def __init__(self, data: Tensor) -> None:
        self.data, self.dtype = data, data.dtype

    def index(self, i: Any) -> Memory:
        return Memory(self.data[int(i)])

    def reshape(self, shape: list[Any]) -> Memory:
        return Memory(self.data.view(shape))

    def permute(self, order: tuple[int, ...]) -> Memory:
        return Memory(self.data.permute(order))


class Barrier:
    """An mbarrier: a phase ends when ``count`` have arrived and all bytes that were announced have come."""

    def __init__(self) -> None:
        self.count, self.left, self.bytes, self.phase = 0, 0, 0, 0

    def init(self, count: int) -> None:
        self.count = self.left = count

    def arrive(self, arrivals: int = 1, coming: int = 0) -> None:
        self.left -= arrivals
        self.bytes += coming
        assert self.left >= 0, "more arrivals than a phase has"
        if self.left == 0 and self.bytes == 0:
            self.phase, self.left = self.phase + 1, self.count

    def passed(self, parity: Any) -> bool:
        return self.phase % 2 != int(parity)


class Pending:
    """A product under way: its operands may be read at any time until it is waited for."""

    def __init__(self, a: Any, b: Memory, acc: Any, use_acc: bool) -> None:
        assert not isinstance(acc, Pending), "an accumulator that nobody has waited for"
        self.a, self.b = a, b
        self.base = acc if use_acc else torch.zeros_like(acc)
        self.first, self.result = self._now(), None

    def _now(self) -> Tensor:
        a = self.a.data if isinstance(self.a, Memory) else self.a
        return self.base + a @ self.b.data

    def retire(self) -> None:
        self.result = self._now()
        assert torch.equal(self.result.nan_to_num(7e7), self.first.nan_to_num(7e7)), (
            "written while it was read"
        )


# -- programs -----------------------------------------------------------------------------------------------


class Partition(threading.Thread):
    def __init__(self, program: Program, place: int, work: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self.program, self.place, self.work = program, place, work
        self.turn, self.blocked = threading.Semaphore(0), None
        self.products: list[Pending] = []
        self.done, self.error = False, None

    def run(self) -> None:
        self.turn.acquire()
        try:
            if not self.program.stopped:
                self.work()
        except Stopped:
            pass
        except BaseException as error:  # raised again where the program was started
            self.error = error
        self.done = True
        self.program.turn.release()

    def runnable(self) -> bool:
        return not self.done and (self.blocked is None or self.blocked())


class Program:
    """One program: the meaning of the names in the kernel's source."""

    def __init__(self, ids: tuple[int, ...], grid: tuple[int, ...], rng: random.Random) -> None:
        self.ids, self.rng, self.turn, self.stopped = ids, rng, threading.Semaphore(0), False
        self.issues: list[Issue] = []
        self.copies: list[tuple[Memory, Tensor, Barrier]] = []
        language = SimpleNamespace(
            NVMMADistributedLayout=lambda *a: None,
            SliceLayout=lambda *a: None,
            DotOperandLayout=lambda *a: None,
            convert_layout=lambda x, layout: x,
            float32=torch.float32,
            int64=torch.int64,
            static_range=range,
            static_assert=_assert,
            arange=lambda a, b, layout=None: block(torch.arange(a, b)),
            full=lambda shape, value, dtype, layout=None: block(torch.full(shape, value, dtype=dtype)),
            program_id=lambda axis: torch.tensor(ids[axis]),
            num_programs=lambda axis: grid[axis],
            load=load,
            store=store,
            where=lambda m, a, b: torch.where(torch.as_tensor(m), a, b),
            minimum=lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
            maximum=lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)),
            max=lambda x, axis: x.amax(axis),
            sum=lambda x, axis: x.sum(axis),
            exp2=torch.exp2,
            log2=torch.log2,
            cdiv=lambda a, b: (a + b - 1) // b,
            allocate_shared_memory=allocate,
            warp_specialize=self.specialise,
        )
        mbarrier = SimpleNamespace(
            MBarrierLayout=lambda: None,
            init=lambda barrier, count: barrier.init(count),
            expect=lambda barrier, nbytes: self.then(lambda: barrier.arrive(1, nbytes)),
            arrive=lambda barrier: self.then(barrier.arrive),
            wait=lambda barrier, parity: self.wait(lambda: barrier.passed(parity)),
        )
        names = {"gl": language, "tl": language, "mbarrier": mbarrier}
        names |= {"copy_tile": self.copy}
        names |= {"warpgroup_mma": self.multiply, "warpgroup_mma_wait": self.retire}
        self.names = source(names)

    def call(self, name: str, args: dict[str, Any]) -> None:
        self.names[name](**args)
        assert not self.copies, "a copy is under way when the program ends"

    # operations of partitions; after each one another partition may run

    def current_partition(self) -> Partition:
        thread = threading.current_thread()
        assert isinstance(thread, Partition)
        return thread

    def pause(self) -> None:
        me = self.current_partition()
        self.turn.release()
        me.turn.acquire()
        if self.stopped:
            raise Stopped

    def then(self, act: Callable[[], None]) -> None:
        act()
        self.pause()

    def wait(self, ready: Callable[[], bool]) -> None:
        self.current_partition().blocked = ready
        self.pause()
        self.current_partition().blocked = None

    def copy(self, desc: Box, at: list[Any], barrier: Barrier, into: Memory) -> None:
        into.data.fill_(torch.nan)  # undefined until the copy is complete
        self.copies.append((into, desc.read(at), barrier))
        self.pause()

    def multiply(self, a: Any, b: Memory, acc: Any, *, use_acc: bool = True, is_async: bool) -> Pending:
        product = Pending(a, b, acc, use_acc)
        me = self.current_partition()
        me.products.append(product)
        self.issues.append(Issue(self.ids, me.place, len(me.products)))
        self.pause()
        return product

    def retire(self, left: int, deps: tuple[Any, ...]) -> Any:
        self.pause()
        products = self.current_partition().products
        while len(products) > left:
            products.pop(0).retire()
        results = tuple(x.result if isinstance(x, Pending) else x for x in deps)
        assert all(x is not None for x in results), "a product that this does not wait for"
        return results[0] if len(results) == 1 else results

    # who goes next

    def specialise(self, work: list[tuple[Any, tuple[Any, ...]]], *hardware: Any) -> None:
        parts = [Partition(self, i, partial(f, *a)) for i, (f, a) in enumerate(work)]
        weights = [self.rng.choice([1, 1, 30]) for _ in (*parts, "copies")]
        for part in parts:
            part.start()
        while not all(part.done for part in parts):
            able = [(part, weight) for part, weight in zip(parts, weights) if part.runnable()]
            able += [(None, weights[-1])] if self.copies else []
            if not able or self.failed(parts):
                break
            (chosen,) = self.rng.choices([who for who, _ in able], [weight for _, weight in able])
            if chosen is None:
                self.complete()
            else:
                chosen.turn.release()
                self.turn.acquire()
        stuck = not all(part.done for part in parts)
        self.stopped = True
        for part in parts:
            part.turn.release()
            part.join()
        for error in self.failed(parts):
            raise error
        if stuck:
            raise Deadlock

    @staticmethod
    def failed(parts: list[Partition]) -> list[BaseException]:
        return [part.error for part in parts if part.error]

    def complete(self) -> None:
        """Complete one pending copy, chosen at random."""
        into, data, barrier = self.copies.pop(self.rng.randrange(len(self.copies)))
        into.data.copy_(data)
        barrier.arrive(0, -4 * data.numel())


class Barriers(list[Barrier]):
    def index(self, i: Any) -> Barrier:  # type: ignore[override]
        return self[int(i)]


def allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Memory | Barriers:
    if dtype == torch.int64:
        return Barriers(Barrier() for _ in range(shape[0]))
    return Memory(torch.full(shape, torch.nan))


def _assert(true: bool) -> None:
    assert true


def source(names: dict[str, Any]) -> dict[str, Any]:
    """The functions of the kernel and its imports as plain Python, with the names of this model."""
    space: dict[str, Any] = {"__builtins__": __builtins__}
    modules = tiles, tile_runs, program_order, scores, forward_gluon
    for name, value in {name: x for module in modules for name, x in vars(module).items()}.items():
        if hasattr(value, "fn"):
            code = value.fn
            space[name] = types.FunctionType(code.__code__, space, name, code.__defaults__)
        elif type(value).__name__ == "constexpr":
            space[name] = value.value
        else:
            space[name] = value
    space |= names
    return space
