"""`wgmma`: asynchronous matrix products of warpgroups, with operands in shared memory.

A product is computed when it is issued. Uses of its registers before the wait are found statically
(`in_flight`), writes to its operands by the clocks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tritoncp.executor.arithmetic import warps
from tritoncp.executor.commit_groups import CommitGroups
from tritoncp.executor.ctas import Ctas
from tritoncp.executor.faults import CannotContinue
from tritoncp.executor.threads import Access, Threads
from tritoncp.executor.units.operands import read_operand

Array = np.ndarray[Any, Any]
u8 = np.uint64
SWIZZLES = {0: 0, 1: 3, 2: 2, 3: 1}  # mode of a descriptor -> swizzle


class Wgmma:
    """The wgmma unit.

    products:  commit groups by the first lane of a warpgroup, with clocks
    registers: for each warpgroup, the counts of setmaxnreg in order
    settings:  for each warp, how many of these counts it has set
    """

    def __init__(self, ctas: Ctas) -> None:
        self.ctas = ctas
        self.products = CommitGroups(ctas.count)
        self.registers: dict[tuple[int, int], list[int]] = {}
        self.settings = np.zeros((ctas.n, ctas.warps), np.int64)

    def set_registers(self, access: Access, count: int) -> None:
        """`setmaxnreg`: report warps of a warpgroup that do not set the same counts in the same order. (They
        may use different instructions: Triton emits one for each partition that shares a warpgroup.)"""
        access.threads.need_warps("setmaxnreg")
        for j in range(0, len(access), 32):
            cta, warp = int(access.cta[j]), int(access.warp[j])
            counts = self.registers.setdefault((cta, warp // 4), [])
            position = self.settings[cta, warp]
            self.settings[cta, warp] += 1
            if position == len(counts):
                counts.append(count)
            elif counts[position] != count:
                text = f"{count} registers, another warp of the warpgroup set {counts[position]}"
                access.select(np.full(1, j)).fault("setmaxnreg that differs inside of a warpgroup", text=text)

    def finish_program(self) -> None:
        """Report warpgroups in which some warps have not executed all setmaxnreg."""
        for (cta, group), counts in self.registers.items():
            if (self.settings[cta, 4 * group : 4 * group + 4] != len(counts)).any():
                self.ctas.launch.log.add("setmaxnreg by a part of a warpgroup", None)

    def multiply(
        self,
        access: Access,
        n: int,
        k: int,
        to: str,
        ta: str,
        tb: str,
        a: Array | tuple[Array, ...],
        b: Array,
        flip_a: int,
        flip_b: int,
        keep: Any,
        accumulator: tuple[Array, ...],
    ) -> list[Array]:
        """Issue a product of 64 × k by k × n for each warpgroup. a: descriptor or registers; b: descriptor

        keep: whether to add the accumulator: True, False or an array
        """
        access.threads.need_groups("wgmma")
        lane, cta, number = access.lanes[::128], access.cta[::128], access.warp[::128] // 4
        clock = self.ctas.clocks.start(cta, self.ctas.clocks.group + number)
        if isinstance(a, tuple):
            left = warps.fragment_a(a, ta).reshape(len(cta), 64, k)
        else:
            left = self.operand(access, a, 64, k, ta, bool(flip_a), clock)
        right = self.operand(access, b, n, k, tb, bool(flip_b), clock)
        product = np.matmul(left, right.transpose(0, 2, 1)).reshape(-1, 16, n)
        self.products.add(lane, clock)
        if keep is False or (keep is not True and not keep.any()):
            return warps.add_to_result(product, to, None)
        total = warps.add_to_result(product, to, accumulator)
        if keep is True or keep.all():
            return total
        alone = warps.add_to_result(product, to, None)
        return [np.where(keep, x, y) for x, y in zip(total, alone)]

    def operand(
        self,
        access: Access,
        descriptor: Array,
        rows: int,
        k: int,
        t: str,
        transposed: bool,
        clock: Array,
    ) -> Array:
        """Read an operand [warpgroups, rows, k] from shared memory."""
        d = descriptor.reshape(-1, 128)
        if (d != d[:, :1]).any():
            raise CannotContinue("a wgmma descriptor that differs inside of a warpgroup", access.site)
        d = d[:, 0]
        modes = np.unique(d >> u8(62))
        if ((d >> u8(49)) & u8(7)).any() or len(modes) > 1:
            raise CannotContinue("a wgmma descriptor with a base offset, or of several swizzles", access.site)
        readers = [access.select(np.arange(32 * warp, len(access), 128)) for warp in range(4)]
        agent = self.ctas.clocks.group + readers[0].warp // 4
        swizzle = SWIZZLES[int(modes[0])]
        return read_operand(readers, d, swizzle, rows, k, t, transposed, "wgmma", clock, agent)

    def commit(self, threads: Threads) -> None:
        threads.need_groups("wgmma.commit_group")
        self.products.commit(threads.lanes)

    def wait(self, threads: Threads, left: int) -> None:
        """Wait until at most the `left` newest groups of each warp's part of the products are in progress.
        (Other warps of the warpgroup may still read operands.)"""
        threads.need_groups("wgmma.wait_group")
        clocks = self.ctas.clocks
        complete = self.products.wait(threads.lanes, left)
        for lane, clock in complete:
            warps = self.ctas.warp[lane][:, None] + np.arange(4)
            where = self.ctas.cta[lane][:, None], warps, clocks.part + warps
            clocks.knows[where] = np.maximum(clocks.knows[where], clock[:, None])
        if complete:
            clocks.lower_floor()
