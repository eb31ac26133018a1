"""TracedMask: a mask made inside a compiled graph, which passes its handle along."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from tritoncp.core.handles import object_of
from tritoncp.core.pytrees import register_handled


class TracedMask:
    """The result of `create_block_mask` inside torch.compile. Pass it as block_mask. Outside of the graph it
    has the attributes and methods of its Mask.

    handle: 0-d int64, see :mod:`tritoncp.core.handles`
    """

    def __init__(self, handle: Tensor) -> None:
        self.handle = handle

    @property
    def mask(self) -> Any:
        """The :class:`tritoncp.Mask`. Raises RuntimeError while it has none: among fake tensors."""
        if isinstance(self.handle, FakeTensor):
            raise RuntimeError(
                "a mask that a traced program gets or makes is only known when the program runs: read its "
                "attributes and make its plan before the call, and pass the results as arguments"
            )
        return object_of(self.handle)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("handle", "mask"):
            raise AttributeError(f"a TracedMask has no attribute {name!r}")
        return getattr(self.mask, name)

    def pinned(self) -> TracedMask:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return plain_mask, (self.mask,)

    def __repr__(self) -> str:
        return repr(self.mask)


register_handled(TracedMask)


def plain_mask(mask: Any) -> Any:
    """Return the Mask of a TracedMask; any other object as it is."""
    return mask.mask if type(mask) is TracedMask else mask
