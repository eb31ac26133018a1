"""Decorator of calls that other ranks wait for: an exception closes their process group."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tritoncp.core.dynamo_boundary import constant_result, traced_copy
from tritoncp.core.suggestions import unexpected_keyword
from tritoncp.distributed import failures, groups

Function = TypeVar("Function", bound=Callable[..., Any])


def group_call(fn: Function) -> Function:
    """Wrap a function that all ranks of a group call together, so that an exception on one rank closes the
    group, before this rank can make other calls. The group is the group of the mesh argument: without a mesh
    no other rank takes part in the call, and an exception closes nothing.

    Dynamo traces the copy ``call.__wrapped__``, never ``call``, whose code may be marked as untraced.
    """

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except BaseException as error:
            arguments = (*args, *kwargs.values())
            if torch.compiler.is_dynamo_compiling():
                for x in arguments:
                    if isinstance(x, torch.Tensor):
                        continue  # since torch 2.14 Dynamo does not trace checks of tensors for these classes
                    # Under Dynamo isinstance(group, A | B) is False for a group.
                    if isinstance(x, dist.ProcessGroup) or isinstance(x, dist.DeviceMesh):  # noqa: SIM101
                        stop_traced_call(groups.place_in_group(x)[0], type(error).__name__)
                raise
            wrong = unexpected_keyword(fn, kwargs) if isinstance(error, TypeError) else None
            for group in _groups_of(arguments):
                failures.stop(group, wrong or error)
            if wrong is not None:
                raise wrong from None
            raise

    copy: Any = traced_copy(call)
    copy.__wrapped__, call.__wrapped__ = fn, copy
    return call  # type: ignore[return-value]


@constant_result
def stop_traced_call(name: str, error: str) -> None:
    """Close the group of a call whose tracing failed, unless the call runs eagerly instead (it does not under
    ``fullgraph=True``). error: the exception's type, without its text, which may have symbols."""
    from torch._dynamo.symbolic_convert import InstructionTranslator  # imported already: Dynamo is running

    tx = InstructionTranslator.current_tx()
    if name and (tx.one_graph or tx.error_on_graph_break):
        failures.stop(groups.group_by_name(name), RuntimeError(f"{error} while torch.compile traced it"))


def _groups_of(arguments: Iterable[Any]) -> Iterator[Any]:
    for x in arguments:
        if isinstance(x, dist.ProcessGroup | dist.DeviceMesh):
            try:
                yield groups.group_of(x)
            except (TypeError, ValueError):  # this process is not in the group
                continue
