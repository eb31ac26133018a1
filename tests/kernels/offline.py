"""Compiles what the engine launches for GPUs that are not here, in a process where nothing is interpreted.

`python -m tests.kernels.offline sm_90 bfloat16 64,128 state` prints one JSON report for each launch.
Triton itself turns the launch's arguments into a signature (`JITFunction.warmup`), told by a stand-in for
its driver which GPU to compile for: what is compiled is what would be launched.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

import tritoncp
from tritoncp.kernels.engine import Launch, Mods, State, TritonEngine
from tritoncp.masks import Mask, full_mask
from tritoncp.mods import mask_mod
from tritoncp.plan import build

S, HEADS, KV_HEADS = 1024, 8, 2
INSTRUCTIONS = ("mma.sync", "wgmma.mma_async", "tcgen05.mma", "v_mfma")


class Variant(NamedTuple):
    """A mask, whether a launch goes on from a state (adds to gradients) and leaves one; kernel options."""

    mask: str
    world_size: int = 1
    load: bool = False
    store: bool = False
    options: tuple[tuple[str, Any], ...] = ()


VARIANTS = {
    "state": Variant("documents", 4, load=True, store=True),  # tables, intervals, gathered keys
    "documents": Variant("documents"),
    "causal": Variant("causal"),
    "window": Variant("window", load=True),
    "full": Variant("full"),
    "mask_mod": Variant("dilated", 4),
    "pointers": Variant("documents", 4, load=True, store=True, options=(("USE_TMA", False),)),
    "single": Variant("single"),  # everything that can be 1 is: Triton makes constants of those
}


class Stand(NamedTuple):
    """As much of Triton's driver as compiling asks for."""

    target: GPUTarget

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> GPUTarget:
        return self.target

    def get_current_stream(self, device: GPUTarget) -> int:
        return 0


def dilated(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q - kv) % 3 == 0


def mask_of(name: str) -> Mask:
    if name == "full":
        return full_mask(S, S)
    documents = tritoncp.document(lengths=[300, 424, 300])
    mod, length = {
        "causal": (tritoncp.causal(), S),
        "window": (tritoncp.sliding_window(200, 10), S),
        "single": (tritoncp.sliding_window(1, 1), 1),
        "documents": (tritoncp.and_masks(tritoncp.causal(), documents), S),
        "dilated": (dilated, S),
    }[name]
    return tritoncp.create_block_mask(mod, 1, 1, length, length)


def launches(arch: str, dtype: torch.dtype, dim: int, variant: Variant) -> Iterator[Launch]:
    """Forward, delta, dQ and dK/dV of one step."""
    mask = mask_of(variant.mask)
    tables = build(mask, variant.world_size).tables(batch=1, heads=HEADS)
    mod = mask_mod(mask.mask_mod) if tables.mask == "mod" else None
    mods = Mods(mask=mod and mod.fn, mask_caps=mod.caps() if mod else ())
    engine = TritonEngine(mods, dim**-0.5, dict(variant.options), arch)
    rows, keys = tables.q_rows, tables.kv_rows
    q, out, dout, dq = (torch.empty(1, rows, HEADS, dim, dtype=dtype).transpose(1, 2) for _ in range(4))
    k, v = torch.empty(keys, 1, KV_HEADS, 2 * dim, dtype=dtype).permute(1, 2, 0, 3).split(dim, dim=3)
    lse, delta, m, l = torch.empty(4, 1, HEADS, rows).unbind()
    acc = torch.empty(1, HEADS, rows, dim)
    dk, dv = torch.empty(keys, 1, KV_HEADS, 2 * dim).permute(1, 2, 0, 3).split(dim, dim=3)
    state = State(acc, m, l) if variant.load or variant.store else None
    yield engine.forward(
        q, k, v, tables, out=out, lse=lse, state=state, load_state=variant.load, store_state=variant.store
    )
    yield engine.delta(out, dout, lse, delta)
    yield engine.dq(q, k, v, dout, lse, delta, tables, dq=acc if variant.load else dq, add=variant.load)
    yield engine.dkdv(q, k, v, dout, lse, delta, tables, dk=dk, dv=dv, add=variant.load)


def compiled(launch: Launch, target: GPUTarget) -> Any:
    driver.set_active(Stand(target))
    config = launch.config
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return launch.kernel.warmup(grid=launch.grid, **launch.args, **options)


def target_of(arch: str) -> GPUTarget:
    if arch.startswith("gfx"):
        return GPUTarget("hip", arch, 64)
    return GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)


def spilled(kernel: Any) -> int:
    """Bytes of thread-local memory: the kernels have no arrays, so all of it is spilled registers.
    (AMD's scalar registers spill into lanes of vector ones, which is no memory.)"""
    if "amdgcn" in kernel.asm:
        fields = ("private_segment_fixed_size", "vgpr_spill_count")
        return sum(int(re.search(rf"\.{name}:\s*(\d+)", kernel.asm["amdgcn"])[1]) for name in fields)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        used = subprocess.check_output([tool, "--dump-resource-usage", cubin.name], text=True)
    stack, local = (int(re.search(rf"{name}:(\d+)", used)[1]) for name in ("STACK", "LOCAL"))
    return stack + local


def report(launch: Launch, kernel: Any) -> dict[str, Any]:
    text = kernel.asm["amdgcn" if "amdgcn" in kernel.asm else "ptx"]
    return {
        "kernel": launch.kernel.__name__.removesuffix("_kernel"),
        "config": [
            launch.config.BLOCK_M,
            launch.config.BLOCK_N,
            launch.config.num_warps,
            launch.config.num_stages,
        ],
        "shared": kernel.metadata.shared,
        "spilled": spilled(kernel),
        "tma": text.count("cp.async.bulk.tensor"),
        "mma": {name: count for name in INSTRUCTIONS if (count := text.count(name))},
    }


def main(arch: str, dtype: str, dims: str, variants: str) -> None:
    for variant in variants.split(","):
        for dim in map(int, dims.split(",")):
            for launch in launches(arch, getattr(torch, dtype), dim, VARIANTS[variant]):
                found = report(launch, compiled(launch, target_of(arch)))
                print(json.dumps({"variant": variant, "dim": dim, **found}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
