"""Public calls that involve a process group: where one raises, the group is closed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch.distributed as dist

from tritoncp.distributed import failures, groups
from tritoncp.ops import signatures
from tritoncp.planning.plan import Plan

Function = TypeVar("Function", bound=Callable[..., Any])


def group_call(fn: Function) -> Function:
    """Have a function close its group where it raises, before other calls of this rank can follow: that of
    the mesh among its arguments, else the groups for which the plan among them was made or compared."""

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except BaseException as error:
            stop_groups(error, (*args, *kwargs.values()))
            raise

    return call  # type: ignore[return-value]


def stop_groups(error: BaseException, arguments: Iterable[Any]) -> None:
    """Close the groups of a call with these arguments, which raised ``error``."""
    for group in _groups_of(arguments):
        failures.stop(group, error)


def _groups_of(arguments: Iterable[Any]) -> Iterator[Any]:
    arguments = list(arguments)
    meshes = [x for x in arguments if isinstance(x, dist.ProcessGroup | dist.DeviceMesh)]
    for mesh in meshes:
        try:
            yield groups.group_of(mesh)
        except (TypeError, ValueError):  # no group of this process
            continue
    if not meshes:
        for plan in arguments:
            if isinstance(plan, Plan):
                yield from signatures.groups_of(plan)
