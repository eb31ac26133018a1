"""Public calls that involve a process group: where one raises, the group is closed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tritoncp.core.dynamo_boundary import constant_result, traced_copy
from tritoncp.distributed import failures, groups
from tritoncp.ops import signatures
from tritoncp.planning.plan import Plan

Function = TypeVar("Function", bound=Callable[..., Any])


def group_call(fn: Function) -> Function:
    """Have a function close its group where it raises, before other calls of this rank can follow: that of
    the mesh among its arguments, else the groups for which the plan among them was made or compared.

    Dynamo traces the copy ``call.__wrapped__``, and never ``call``, whose code may be marked as untraced.
    """

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except BaseException as error:
            arguments = (*args, *kwargs.values())
            if torch.compiler.is_dynamo_compiling():
                for x in arguments:
                    # Dynamo takes no group for an instance of a union.
                    if isinstance(x, dist.ProcessGroup) or isinstance(x, dist.DeviceMesh):  # noqa: SIM101
                        stop_traced_call(group_name(x), type(error).__name__)
            else:
                for group in _groups_of(arguments):
                    failures.stop(group, error)
            raise

    copy: Any = traced_copy(call)
    copy.__wrapped__, call.__wrapped__ = fn, copy
    return call  # type: ignore[return-value]


@constant_result
def group_name(mesh: Any) -> str:
    """Return the name of a mesh's group; "" for None. In a graph that Dynamo traces it is a constant."""
    group = groups.group_of(mesh)
    return "" if group is None else group.group_name


@constant_result
def stop_traced_call(name: str, error: str) -> None:
    """Close a group, by name, if tracing of a call on it failed and no frame will run the call, as under
    ``fullgraph=True``. error: the type of the exception; its text may have symbols."""
    from torch._dynamo.symbolic_convert import InstructionTranslator  # loaded, as Dynamo traces

    tx = InstructionTranslator.current_tx()
    if name and (tx.one_graph or tx.error_on_graph_break):
        failures.stop(groups.group_by_name(name), RuntimeError(f"{error} while torch.compile traced it"))


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
