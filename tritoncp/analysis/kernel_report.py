"""The report of one compiled kernel: resources, matrix instructions, its inner loop and the bound of that."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from tritoncp.analysis.cross_compile import compile_launch
from tritoncp.analysis.disassembly import (
    Code,
    Instruction,
    Product,
    barrier_warps,
    count_serial,
    find_races,
    gcn,
    innermost,
    kind_of,
    mix,
    products,
    ptx,
    sass,
    shortest,
)
from tritoncp.analysis.jobs import Job
from tritoncp.analysis.kernel_digest import hash_launch
from tritoncp.analysis.launches import launch_of
from tritoncp.analysis.throughput_bound import (
    MACHINES,
    SHARED_PER_CYCLE,
    Cycles,
    Machine,
    bound,
    cycles,
    hidden,
    l2_bytes,
)
from tritoncp.kernels.tile_rules import Config, family, pieces


def report_kernel(job: Job) -> dict[str, Any]:
    """Compile a job and report the figures of its kernel, as JSON values.

    digest: of its sources; registers of a thread; spill_bytes of a thread (the kernels have no arrays, so all
        thread-local memory is spilled registers); warps, more than the config's where warps are specialised;
        shared_bytes of a program; tensor_columns: of sm_100's tensor memory; mma: matrix instructions by
        name; tma: bulk tensor copies; async_copies: other copies that need no registers; then the result of
        :func:`inner_loop`
    """
    launch = launch_of(job)
    if job.config and job.config.USE_TMA > launch.config.USE_TMA:
        raise ValueError("these tensors' strides leave nothing to descriptors")
    kernel = compile_launch(launch, job.arch)
    resources = read_amd(kernel.asm["amdgcn"]) if "amdgcn" in kernel.asm else read_nvidia(kernel.asm)
    code = resources.pop("code")
    names = [x.op for x in code]
    row = {
        "config": asdict(launch.config),
        "digest": hash_launch(launch),
        **resources,
        "warps": kernel.metadata.num_warps,
        "shared_bytes": kernel.metadata.shared,
        "tensor_columns": getattr(kernel.metadata, "tmem_size", None) or 0,
        "mma": count_products(names),
        "tma": sum(name.startswith("UTMALDG") for name in names),
        "async_copies": sum(name.startswith("LDGSTS") for name in names),
    }
    if row["mma"] and job.dtype != "float32":  # MACHINES has rates of 16-bit products
        row |= inner_loop(job, launch.config, code, kernel.asm.get("ptx", ""), row)
    return row


def inner_loop(
    job: Job,
    config: Config,
    code: Code,
    ptx_text: str,
    row: dict[str, Any],
    bodies: list[list[Instruction]] | None = None,
) -> dict[str, Any]:
    """Report the loop over full blocks, and bound the use of tensor cores by it.

    bodies: the loops of the job, shortest first, in code that has others too; None = all innermost loops

    loop, masked_loop: instructions; mix: of the former, by kind; loop_spills: loads and stores of spilled
        registers in both
    hidden: the share of exponentials that run beside products
    serial: wgmmas that the former waits for one by one
    touched: instructions that race with a product under way
    cycles, programs, limit: of one turn, on a multiprocessor, and its limit; see throughput_bound.bound
    flops: issued over those of the tile
    bound, overlap: useful FLOPs over the peak, of the tensor cores

    Empty without a loop: a short mask has a constant number of tiles, and its loop is unrolled.
    """
    bodies, machine = innermost(code) if bodies is None else bodies, MACHINES[family(job.arch)]
    if not bodies:
        return {}
    tile_products = products(bodies[0])
    if not tile_products and any(name.startswith("UTC") for name in row["mma"]):
        tile_products = products(innermost(ptx(ptx_text))[0])
    specialised = row["warps"] > config.num_warps
    if specialised and "mufu" not in mix(bodies[0]):
        loops = _loops_of_parts(code, tile_products, machine)
    else:
        loops = _loops_of_groups(bodies, tile_products, 1 + specialised, config.num_warps, machine)
    spent = _add_traffic(Cycles(*map(sum, zip(*loops.cycles))), job, config, code)
    turns = len(loops.groups) if job.kernel == "gluon" else 1  # barriers make the groups take turns
    resources = row["registers"], row["shared_bytes"], machine, row["tensor_columns"]
    limit = bound(spent, row["warps"], *resources, loops.hidden, turns)
    issued = spent.tensor * machine.flops / tile_flops(job, config)
    return {
        "loop": len(loops.groups[-1]),
        "masked_loop": len(loops.masked[0]) if loops.masked else None,
        "mix": mix(loops.groups[-1]),
        "loop_spills": sum(kind_of(x.op) == "spill" for body in loops.bodies for x in body),
        "hidden": round(loops.hidden[1], 3),
        "serial": max(map(count_serial, loops.groups)),
        "touched": sum(len(find_races(body)) for body in loops.bodies),
        "cycles": {name: round(value) for name, value in spent._asdict().items()},
        "programs": limit.programs,
        "flops": round(issued, 4),
        "bound": round(limit.utilisation / issued, 3),
        "overlap": round(limit.overlap / issued, 3),
        "limit": limit.limit,
    }


def _add_traffic(spent: Cycles, job: Job, config: Config, code: Code) -> Cycles:
    """Add what one turn moves by descriptors and to and from the L2 cache, which instructions do not show."""
    sizes = config.BLOCK_M, config.BLOCK_N, *(sum(pieces(x)) for x in (job.problem.dim, job.problem.v_dim))
    return spent._replace(
        shared=spent.shared + descriptor_bytes(job, config, code) / SHARED_PER_CYCLE,
        l2=l2_bytes(job.kernel, *sizes) / MACHINES[family(job.arch)].l2,
    )


class TileLoops(NamedTuple):
    """The inner loops of a kernel.

    bodies: all of them
    groups: over full blocks, one for each group of warps, the longest last
    masked: over masked blocks, if there is such a loop
    cycles: of one turn of each group, and of products that one warp issues for all
    hidden: the shares of instructions and of exponentials that run beside products
    """

    bodies: list[list[Instruction]]
    groups: list[list[Instruction]]
    masked: list[list[Instruction]]
    cycles: list[Cycles]
    hidden: tuple[float, float]


def _loops_of_groups(
    bodies: list[list[Instruction]], tile_products: list[Product], groups: int, warps: int, machine: Machine
) -> TileLoops:
    """Sort loops with products and softmax, shortest first: one for each group of as many warps as the config
    says. The loop over masked blocks, if there is one, is longer: it does the same and masks."""
    full = bodies[:groups]
    group_cycles = [cycles(body, tile_products, warps, machine) for body in full]
    return TileLoops(bodies, full, bodies[groups:], group_cycles, min(map(hidden, full)))


def _loops_of_parts(code: Code, tile_products: list[Product], machine: Machine) -> TileLoops:
    """Sort loops of specialised warps with one loop for each part of the work, where one warp issues the
    products (tcgen05). All softmax is beside them if that warp is ahead, which it is if P V comes first in
    its loop, before scores of another tile."""
    bodies = innermost(code, "tensor", "mufu", "memory")
    *parts, softmax = bodies
    groups = [*parts, shortest(code, softmax)]
    with_mask, without = (mix(body).get("compare", 0) for body in (softmax, groups[-1]))
    group_cycles = [cycles(body, [], barrier_warps(body), machine) for body in groups]
    first = tile_products[0]
    ahead = float(first.shared == 2 * first.k * first.n)  # P is in tensor memory, queries are not
    return TileLoops(
        bodies,
        groups,
        [softmax] if with_mask > without else [],
        [*group_cycles, cycles([], tile_products, 1, machine)],
        (ahead, ahead),
    )


def tile_flops(job: Job, config: Config) -> int:
    """Count the FLOPs of one tile: two products in forward, three in dQ, four in dK/dV, five in the fused
    kernel, over the pieces that the head dims are cut into.

    >>> from tritoncp.analysis.jobs import step_job
    >>> tile_flops(step_job("forward", "sm_90", 96), Config(128, 64)) == 2 * 2 * 128 * 64 * 96
    True
    >>> job = step_job("dq", "sm_90", 192, v_head_dim=128)
    >>> tile_flops(job, Config(64, 64)) == 2 * 64 * 64 * (2 * 192 + 128)
    True
    """
    of_keys, of_values = {"dq": (2, 1), "dkdv": (2, 2), "fused": (3, 2)}.get(job.kernel, (1, 1))
    d, e = (sum(pieces(dim)) for dim in (job.problem.dim, job.problem.v_dim))
    return 2 * config.BLOCK_M * config.BLOCK_N * (of_keys * d + of_values * e)


def descriptor_bytes(job: Job, config: Config, code: Iterable[Instruction]) -> int:
    """Count the bytes that descriptors move for one tile to shared memory, and from there to sums in memory:
    16-bit keys and values; in the backward pass by keys, queries and dO; float32 dQ.  Instructions do not
    show sizes.

    >>> load, add = (Instruction(op, "") for op in ("UTMALDG.4D", "UTMAREDG.4D.ADD"))
    >>> from tritoncp.analysis.jobs import step_job
    >>> descriptor_bytes(step_job("dq", "sm_90", 128), Config(128, 32), [load]) == 32 * 256 * 2
    True
    >>> fused = step_job("fused", "sm_90", 128)
    >>> descriptor_bytes(fused, Config(64, 128), [load, add]) == 64 * (256 * 2 + 128 * 4)
    True
    """
    names = {x.op.split(".")[0] for x in code}
    d, e = (sum(pieces(dim)) for dim in (job.problem.dim, job.problem.v_dim))
    rows = config.BLOCK_M if job.kernel in ("dkdv", "fused") else config.BLOCK_N
    return 2 * rows * (d + e) * ("UTMALDG" in names) + 4 * config.BLOCK_M * d * ("UTMAREDG" in names)


def count_products(names: Iterable[str]) -> dict[str, int]:
    """Count matrix instructions by name, without the dtype of their sums."""
    matrix = (name for name in names if kind_of(name) == "tensor")
    return dict(Counter(re.sub(r"\.F32\.BF16|\.F32\b", "", name) for name in matrix))


def read_nvidia(asm: Any) -> dict[str, Any]:
    """Read registers, spill_bytes and code from a cubin, by Triton's cuobjdump."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(asm["cubin"])
        cubin.flush()
        command = [str(tool), "-sass", "--dump-resource-usage", cubin.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (
        int(_match_number(rf"\b{name}:(\d+)", text)) for name in ("REG", "STACK", "LOCAL")
    )
    return {"registers": registers, "spill_bytes": stack + local, "code": sass(text)}


def read_amd(text: str) -> dict[str, Any]:
    """Read registers, spill_bytes and code from AMD assembly. Scalar registers spill into lanes of vector
    registers, which is no memory."""
    registers, fixed, spilled = (
        int(_match_number(rf"\.{name}:\s*(\d+)", text))
        for name in ("vgpr_count", "private_segment_fixed_size", "vgpr_spill_count")
    )
    return {"registers": registers, "spill_bytes": fixed + spilled, "code": gcn(text)}


def _match_number(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match, f"no match of {pattern!r} in the output of the compiler's tools"
    return match[1]
