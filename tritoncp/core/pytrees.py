"""Masks and plans in torch's pytrees, by which `torch.export`, `make_fx`, FSDP2 and users' tree_map see the
arguments of a module.

A mask or plan has one leaf, its handle, which is an input of an exported program, so that the program serves
all masks. A copy of the handle, on any device, gives the same mask again. A closed form has its tensors as
leaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import GetAttrKey, SequenceKey, register_pytree_node
from torch.utils.data._utils.collate import default_collate_fn_map

from tritoncp.core.handles import object_of
from tritoncp.core.host_copy import host
from tritoncp.core.records import fields_of

T = TypeVar("T", bound=type)
_CHILD = "child"  # in place of a child in the context of a tree; no field of a closed form is a string
_CLOSED_FORMS: set[type] = set()


def register_handled(cls: type) -> None:
    """Register a class whose objects have a handle, their only leaf. While a program is traced, the objects
    are known by their handles alone."""

    def flatten(thing: Any) -> tuple[list[Any], None]:
        return [thing.pinned().handle], None

    def with_key(thing: Any) -> tuple[list[Any], None]:
        return [(GetAttrKey("handle"), thing.pinned().handle)], None

    def unflatten(leaves: Any, context: None) -> Any:
        (leaf,) = leaves
        if type(leaf) is Tensor and not torch.compiler.is_dynamo_compiling():
            with host():
                thing = _find(cls, leaf)
            if thing.handle is leaf or not torch._C._len_torch_dispatch_stack():
                return thing
        shell: Any = object.__new__(cls)
        object.__setattr__(shell, "handle", leaf)
        return shell

    register_pytree_node(
        cls, flatten, unflatten, serialized_type_name=f"tritoncp.{cls.__name__}",
        flatten_with_keys_fn=with_key,
    )  # fmt: skip
    refuse_collation(cls)


def _find(cls: type, leaf: Tensor) -> Any:
    """Return the object of a leaf. Raises TypeError if the leaf cannot be a handle any more."""
    if leaf.dtype is not torch.int64 or leaf.ndim:
        raise TypeError(
            f"the leaf of a {cls.__name__} in a tree, its number, became {leaf.dtype} {list(leaf.shape)}: "
            "cast floating-point tensors only; to stack masks, make one mask of the whole batch"
        )
    return object_of(leaf).pinned()


def refuse_collation(cls: type) -> None:
    """Make torch's default_collate raise an error with the remedy for objects of a class."""

    def refuse(batch: list[Any], **_: Any) -> None:
        raise TypeError(
            f"a batch of samples that each have a {cls.__name__}, which default_collate cannot stack: pass a "
            "collate_fn= that makes one mask of the whole batch, as document(ids=torch.stack(...)); or "
            "batch_size=None where the data set yields whole batches"
        )

    default_collate_fn_map[cls] = refuse


def as_tree(cls: T) -> T:
    """Decorate a record whose leaves are the tensors in its fields, and in closed forms in its fields."""

    def flatten(thing: Any) -> tuple[list[Any], tuple[Any, ...]]:
        """Return the children, and the fields with a mark in place of each child."""
        children: list[Any] = []
        return children, tuple([_take_out(getattr(thing, name), children) for name in fields_of(thing)])

    def with_keys(thing: Any) -> tuple[list[Any], tuple[Any, ...]]:
        children, context = flatten(thing)
        return [(SequenceKey(i), child) for i, child in enumerate(children)], context

    def unflatten(children: Any, context: Any) -> Any:
        rest = iter(children)
        return cls(*[_put_back(field, rest) for field in context])

    register_pytree_node(
        cls, flatten, unflatten, serialized_type_name=f"tritoncp.{cls.__name__}",
        flatten_with_keys_fn=with_keys, to_dumpable_context=list, from_dumpable_context=_tuples,
    )  # fmt: skip
    _CLOSED_FORMS.add(cls)
    return cls


def _take_out(value: Any, children: list[Any]) -> Any:
    """Return a field with a mark in place of each child, which is appended to ``children``."""
    if isinstance(value, tuple):
        return tuple([_take_out(part, children) for part in value])
    if not _is_child(value):
        return value
    children.append(value.child if type(value) is _Other else value)
    return _CHILD


def _is_child(value: Any) -> bool:
    return isinstance(value, Tensor) or type(value) in _CLOSED_FORMS or type(value) is _Other


def _put_back(value: Any, children: Iterator[Any]) -> Any:
    """Return a field with the next children in place of marks."""
    if isinstance(value, tuple):
        return tuple([_put_back(part, children) for part in value])
    if value != _CHILD:
        return value
    child = next(children)
    if isinstance(child, Tensor) and child.is_floating_point():
        raise TypeError(
            f"a closed form has integer tensors; one in a tree became {child.dtype}: cast floating-point "
            "tensors only"
        )
    return child if _is_child(child) else _Other(child)


class _Other:
    """Holds an object that replaces a tensor in a tree, such as a proxy of torch.fx or a result of
    tree_map."""

    def __init__(self, child: Any) -> None:
        self.child = child


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
