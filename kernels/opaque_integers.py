"""Integers inside tuples as kernel arguments, see :mod:`tritoncp.core.opaque_integers`."""

from typing import Any

import triton
import triton.language as tl

from tritoncp.core.opaque_integers import SHIFT, opaque

_SHIFT: tl.constexpr = tl.constexpr(SHIFT)


def opaque_fields(record: Any, *names: str) -> Any:
    """Return a named tuple with the fields ``names`` opaque, by default all integers."""
    names = names or tuple(name for name, x in record._asdict().items() if type(x) is int)
    return record._replace(**{name: opaque(getattr(record, name)) for name in names})


@triton.jit
def integer(argument):
    """The integer for which an opaque argument stands; None for None."""
    if argument is None:
        return None
    else:
        return argument >> _SHIFT
