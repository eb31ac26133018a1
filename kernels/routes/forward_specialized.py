"""Forward route "specialized" for Blackwell: the usual kernel, whose loop Triton splits among warps.

Two warps copy keys and values, one issues the products, four compute the softmax and four rescale acc, which
lies in tensor memory.  Unverified on GPUs.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tritoncp.kernels.routes.obstacles import find_obstacles
from tritoncp.kernels.tile_rules import architecture, widest_route

if TYPE_CHECKING:
    from tritoncp.kernels.engine import TritonEngine
    from tritoncp.kernels.launch import Launch, Launches


def launch(engine: "TritonEngine", step: Any) -> "Launch | Launches":
    """Prepare a step by this route, with the arguments of ``engine.forward``."""
    return engine.loops(step, kind="specialized")


def obstacles(engine: "TritonEngine", step: Any) -> Iterator[str]:
    """Yield reasons why Triton cannot specialize the loop of a step, or spills registers in it."""
    arch = engine.arch or architecture(step.q.device)
    if arch == "interpreter" or not widest_route(arch, "specialized"):
        yield f"Triton specializes the warps of this loop for sm_100, and this is {arch}"
        return
    if step.tables.mask == "mod":
        yield "its softmax has no registers left for a mask_mod"  # 32 bytes spilled
    yield from find_obstacles(engine, "specialized", step, 1)
