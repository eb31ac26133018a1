"""Obstacles that forward routes with roles for groups of four warps share."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tritoncp.kernels.tiles import copyable

if TYPE_CHECKING:
    from tritoncp.kernels.engine import TritonEngine


def find_obstacles(engine: "TritonEngine", kind: str, step: Any, least_stages: int) -> Iterator[str]:
    """Yield reasons why a step's dtype, head dims, tiles or strides rule out a route, whose tiles have 128
    query rows and come by descriptor.

    kind: of the route's tiles
    """
    q, k, v, tables = step[:4]
    dims = {q.shape[3], v.shape[3]}
    if q.dtype.itemsize != 2:
        yield f"it multiplies numbers of 16 bits, and q is {q.dtype}"
    elif not dims <= {64, 128}:
        yield f"it takes head dims of 64 and 128, and has {', '.join(map(str, sorted(dims)))}"
    else:
        config = engine.config(kind, q, v, tables)
        if (config.BLOCK_M, config.num_warps) != (128, 4) or config.num_stages < least_stages:
            stages = f", num_stages of {least_stages} or more" * (least_stages > 1)
            yield f"it takes BLOCK_M=128, num_warps=4{stages}; these are {config}"
        if tables.kv_block % config.BLOCK_N or not 64 <= config.BLOCK_N <= 128:
            yield f"it takes tiles of 64 or 128 keys that divide blocks of {tables.kv_block}"
        if not config.USE_TMA:
            yield "it copies tiles by descriptor, which USE_TMA=False forbids"
    if not (copyable(q) and engine.streams(k, v, tables)):
        yield "q, k or v has strides, an address or ends of slots that rule out tensor descriptors"
