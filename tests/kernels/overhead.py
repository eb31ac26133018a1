"""Python's share of a call: plan cached, kernels compiled for a GPU that is not here and never launched.

`python -m tests.kernels.overhead [--profile]` prints microseconds a call.  What is left out is what the GPU's
driver takes; Triton's own dispatch is in.
"""

from __future__ import annotations

import cProfile
import json
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from triton.compiler.compiler import CompiledKernel
from triton.runtime.driver import driver

import tritoncp
from tritoncp import engines
from tritoncp.kernels import engine
from tritoncp.offline import Stand, target_of

ARCH = "sm_90"


def pretend() -> None:
    """CPU tensors run the kernels, compiled for ARCH and never launched."""
    driver.set_active(Stand(target_of(ARCH)))
    engines.uses_triton = lambda device: True
    engine.architecture = lambda device: ARCH
    CompiledKernel.run = property(lambda self: lambda *args: None)
    CompiledKernel.launch_metadata = lambda *args: None
    CompiledKernel._init_handles = lambda self: None
    CompiledKernel.function = None
    CompiledKernel.packed_metadata = None


def microseconds(call: Callable[[], Any], rounds: int = 7, repeats: int = 200) -> float:
    """Median over rounds of the mean of a round."""
    for _ in range(20):
        call()
    found = []
    for _ in range(rounds):
        start = time.process_time()
        for _ in range(repeats):
            call()
        found.append((time.process_time() - start) / repeats * 1e6)
    return statistics.median(found)


def calls() -> dict[str, Callable[[], Any]]:
    q = torch.randn(1, 2, 128, 64, dtype=torch.bfloat16)
    k, v = (torch.randn(1, 1, 128, 64, dtype=torch.bfloat16) for _ in range(2))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    mask = tritoncp.create_block_mask(tritoncp.causal(), None, None, 128, 128)
    documents = tritoncp.and_masks(tritoncp.causal(), tritoncp.document(lengths=[50, 40, 38]))
    table = tritoncp.create_block_mask(documents, None, None, 128, 128)

    def alibi(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s - 0.1 * (i - j)

    def both(block_mask: Any) -> Any:
        out = tritoncp.flex_attention(*leaves, block_mask, enable_gqa=True)
        return torch.autograd.grad(out, leaves, out)

    return {
        "forward, causal": lambda: tritoncp.flex_attention(q, k, v, mask, enable_gqa=True),
        "forward, documents": lambda: tritoncp.flex_attention(q, k, v, table, enable_gqa=True),
        "forward, score_mod": lambda: tritoncp.flex_attention(q, k, v, alibi, mask, enable_gqa=True),
        "forward and backward, causal": lambda: both(mask),
    }


def main() -> None:
    pretend()
    for name, call in calls().items():
        print(json.dumps({"call": name, "us": round(microseconds(call), 1)}), flush=True)
        if "--profile" in sys.argv:
            with cProfile.Profile() as profile:
                for _ in range(300):
                    call()
            pstats.Stats(profile).sort_stats("tottime").print_stats(32)


if __name__ == "__main__":
    main()
