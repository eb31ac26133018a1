"""Scheduler of the threads of some CTAs: runs groups of threads block by block until all have returned.

Divergent threads reconverge, since the group in the block of lowest rank runs next (`meeting_order`). With a
seed, random warps, or warpgroups, run ahead of others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tritoncp.executor.ctas import Ctas
from tritoncp.executor.faults import CannotContinue
from tritoncp.executor.ptx.instruction import Instruction
from tritoncp.executor.threads import Threads

Array = np.ndarray[Any, Any]
KEPT = 16  # number of groups of threads whose arrays are cached


class Scheduler:
    """The scheduler's state.

    groups:  block -> lanes that execute it next
    waiting: (barrier, block after it) -> lanes
    needs:   barrier -> number of threads that each CTA's waiting threads named, 0 while none wait
    visits:  register values with which threads entered loops since `Ctas.progress` was last incremented
    stuck:   loops that threads entered again with equal values, so that they only wait for `Ctas.progress`
    """

    def __init__(
        self, ctas: Ctas, functions: list[Callable[..., Any]], parameter: Callable[..., Any]
    ) -> None:
        self.ctas, self.functions, self.parameter = ctas, functions, parameter
        self.launch, self.program = ctas.launch, ctas.launch.program
        self.blocks, self.rank = self.program.kernel.blocks, self.program.rank
        self.ends = [block.end for block in self.blocks]
        self.registers: list[Array | None] = [None] * len(self.program.dtypes)
        self.everyone = Threads(ctas, None)
        self.kept: dict[Any, Threads] = {}
        self.groups: dict[int, list[Array]] = {0: [self.everyone.lanes]}
        self.waiting: dict[tuple[int, int], list[Array]] = {}
        self.barrier = np.full(ctas.count, -1)  # index of the barrier at which a thread waits, or -1
        self.needs: dict[int, Array] = {}
        self.alive = np.ones(ctas.count, bool)
        self.visits: dict[tuple[int, Threads], list[Array]] = {}
        self.stuck: set[int] = set()
        follows = self.program.kernel.successors()
        self.loops = {x for n, after in enumerate(follows) for x in after if self.rank[x] <= self.rank[n]}

    def run(self) -> None:
        while self.groups:
            n, lanes = self.next_group()
            threads, progress = self.threads_of(lanes), self.ctas.progress
            entering = [self.read(r, threads) for r in self.program.borders[n][0]]
            if n in self.loops and self.repeats(n, threads, entering):
                if n not in self.groups:
                    self.stuck.add(n)
                self.groups.setdefault(n, []).append(lanes)
                continue
            self.follow(n, threads, self.execute(n, threads, entering))
            if self.ctas.progress > progress:
                self.visits.clear()
                self.stuck.clear()
        if self.waiting:
            raise CannotContinue(
                "deadlock: threads wait at a barrier that others never reach", None, self.where()
            )

    def where(self) -> str:
        lines = []
        for (number, after), parts in self.waiting.items():
            end, count = self.ends[after - 1], sum(map(len, parts))
            assert end is not None
            lines.append(f"{count} threads at barrier {number}, {end.source} (PTX line {end.line})")
        return "; ".join(lines)

    def format_polling(self) -> str:
        """Format the polling instructions in the blocks at which threads are stuck."""
        looks = [i for b in self.groups for i in self.blocks[b].instructions if may_poll(i)]
        return "; ".join(f"{i}, {i.source} (PTX line {i.line})" for i in looks)

    # groups

    def next_group(self) -> tuple[int, Array]:
        ready = [b for b in self.groups if b not in self.stuck]
        if not ready:
            raise CannotContinue("deadlock: every thread waits", None, self.format_polling())
        ready.sort(key=self.rank.__getitem__)
        if self.launch.random is not None:
            # random warps, and the one of their groups that reconverges first
            random, step = self.launch.random, self.launch.step
            drawn = random.random(-(-self.ctas.count // step)) < random.choice([0.3, 0.7, 1.0])
            chosen = np.repeat(drawn, step)[: self.ctas.count]
            for n in ready:
                lanes = joined(self.groups[n])
                go = chosen[lanes]
                if go.any():
                    self.groups[n] = [lanes[~go]]
                    if go.all():
                        del self.groups[n]
                    return n, lanes[go]
        return ready[0], joined(self.groups.pop(ready[0]))

    def threads_of(self, lanes: Array) -> Threads:
        if len(lanes) == self.ctas.count:
            return self.everyone
        key = len(lanes), int(lanes[0]), int(lanes[-1]), hash(lanes.tobytes())
        if key not in self.kept:
            if len(self.kept) > KEPT:
                self.kept.clear()
            self.kept[key] = Threads(self.ctas, lanes)
        return self.kept[key]

    def put(self, block: int, threads: Threads, mask: Array | None = None) -> None:
        """Add threads to the group of a block."""
        self.stuck.discard(block)
        lanes = threads.lanes if mask is None else threads.lanes[mask]
        self.groups.setdefault(block, []).append(lanes)

    # blocks

    def repeats(self, n: int, threads: Threads, entering: list[Array]) -> bool:
        """Return whether threads enter a loop with the same register values as before, and no event happened
        since."""
        before = self.visits.get((n, threads))
        self.visits[n, threads] = entering
        return before is not None and all(x is y or np.array_equal(x, y) for x, y in zip(before, entering))

    def execute(self, n: int, threads: Threads, entering: list[Array]) -> Array | None:
        """Execute one block; return the condition of its branch."""
        if self.ctas.counts is not None:
            self.ctas.counts.block(n, threads)
        values, condition = self.functions[n](threads, self.ctas, self.parameter, *entering)
        for r, value in zip(self.program.borders[n][1], values):
            self.write(r, threads, value)
        return condition

    def read(self, r: int, threads: Threads) -> Array:
        register = self.registers[r]
        if register is None:
            register = self.registers[r] = np.zeros(self.ctas.count, self.program.dtypes[r])
        return register if threads is self.everyone else register[threads.lanes]

    def write(self, r: int, threads: Threads, value: Array) -> None:
        if threads is not self.everyone:
            old = self.registers[r]
            new = np.zeros(self.ctas.count, self.program.dtypes[r]) if old is None else old.copy()
            new[threads.lanes] = value
            value = new
        self.registers[r] = value

    def follow(self, n: int, threads: Threads, condition: Array | None) -> None:
        """Add threads to the groups of the blocks that follow, by the end of their block."""
        end = self.ends[n]
        match end.parts[0] if end else "":
            case "bra":
                branches = np.ones(threads.count, bool) if condition is None else condition
                for block, mask in ((n + 1, ~branches), (self.blocks[n].targets[0], branches)):
                    if mask.any():
                        self.put(block, threads, None if mask.all() else mask)
            case "brx":
                assert condition is not None
                targets = self.blocks[n].targets
                for x in np.unique(condition):
                    if x >= len(targets):
                        raise CannotContinue(f"brx.idx {int(x)} of {len(targets)} targets")
                    self.put(targets[int(x)], threads, condition == x)
            case "ret" | "exit":
                self.retire(n, threads, condition)
            case "bar" | "barrier":
                assert end is not None
                self.arrive(n, end, threads)
            case _:
                self.put(n + 1, threads)

    def retire(self, n: int, threads: Threads, condition: Array | None) -> None:
        """Retire threads that return; barriers then expect the remaining ones."""
        returned = threads.lanes if condition is None else threads.lanes[condition]
        self.alive[returned] = False
        if condition is not None and not condition.all():
            self.put(n + 1, threads, ~condition)
        for number in {key[0] for key in self.waiting}:
            self.release(number)

    # barriers

    def arrive(self, n: int, barrier: Instruction, threads: Threads) -> None:
        self.check_whole(barrier, threads)
        number, *count = (self.uniform(str(x), threads) for x in barrier.operands)
        need = count[0] if count else self.ctas.threads
        if count and (need % 32 or not 0 < need <= self.ctas.threads):
            raise CannotContinue(f"a barrier of {need} threads")
        if threads is self.everyone and need == self.ctas.threads:
            every = np.ones((self.ctas.n, self.ctas.warps), bool)
            self.ctas.clocks.meet(np.arange(self.ctas.n), every)
            self.put(n + 1, threads)
            return
        needs = self.needs.setdefault(number, np.zeros(self.ctas.n, int))
        ctas = np.unique(self.ctas.cta[threads.lanes])
        if not np.isin(needs[ctas], (0, need)).all():
            raise CannotContinue(f"barrier {number} with two numbers of threads")
        needs[ctas] = need
        self.waiting.setdefault((number, n + 1), []).append(threads.lanes)
        self.barrier[threads.lanes] = number
        self.release(number)

    def uniform(self, operand: str, threads: Threads) -> int:
        if operand not in self.program.kernel.registers:
            return int(operand, 0)
        index = list(self.program.kernel.registers).index(operand)
        register = self.registers[index]
        values = np.unique(register[threads.lanes]) if register is not None else np.zeros(1)
        if len(values) > 1:
            raise CannotContinue("a barrier whose number or count differs between threads")
        return int(values[0])

    def check_whole(self, barrier: Instruction, threads: Threads) -> None:
        """Report a `bar.sync` by a part of a warp."""
        if threads.whole or not self.launch.check:
            return
        present = np.zeros(self.ctas.count, bool)
        present[threads.lanes] = True
        warps = np.unique(threads.lanes // 32)
        absent = ~present.reshape(-1, 32)[warps] & self.alive.reshape(-1, 32)[warps]
        if absent.any():
            lone = np.flatnonzero(np.isin(threads.lanes // 32, warps[absent.any(1)]))
            self.launch.log.add("divergence: a part of a warp at a barrier", barrier, len(lone))

    def release(self, number: int) -> None:
        """Release a barrier in CTAs where all threads, or as many as it needs, wait at it."""
        at = self.barrier == number
        count = np.bincount(self.ctas.cta[at], minlength=self.ctas.n)
        needs = self.needs[number]
        alive = np.bincount(self.ctas.cta[self.alive], minlength=self.ctas.n)
        go = (count == np.where(needs == self.ctas.threads, alive, needs)) & (count > 0)
        if not go.any():
            return
        ctas = np.flatnonzero(go)
        needs[ctas] = 0  # a complete barrier may be used again with another number
        present = np.zeros((self.ctas.n, self.ctas.warps), bool)
        present[self.ctas.cta[at], self.ctas.warp[at]] = True
        self.ctas.clocks.meet(ctas, present[ctas])
        self.ctas.progress += 1
        for key in [k for k in self.waiting if k[0] == number]:
            stay = []
            for lanes in self.waiting.pop(key):
                free = go[self.ctas.cta[lanes]]
                if free.any():
                    self.groups.setdefault(key[1], []).append(lanes[free])
                    self.barrier[lanes[free]] = -1
                if not free.all():
                    stay.append(lanes[~free])
            if stay:
                self.waiting[key] = stay


def joined(parts: list[Array]) -> Array:
    return np.sort(np.concatenate(parts)) if len(parts) > 1 else parts[0]


def may_poll(i: Instruction) -> bool:
    """Return whether an instruction may poll for an event: a load, an atomic, or a test of an mbarrier."""
    looks = i.parts[0] in ("ld", "atom") and bool(
        {"volatile", "relaxed", "acquire", "acq_rel"} & set(i.parts)
    )
    return looks or i.opcode.startswith(("mbarrier.try_wait", "mbarrier.test_wait"))
