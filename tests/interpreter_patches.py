"""Spare Triton's interpreter work that changes no result: two thirds of the time of small kernels.

- It replaces the functions of ``triton.language`` when a launch begins, and again for each
  call of one jit function by another. Here they are listed once, and set once a launch.
- For every sum and product of integers it computes an overflow check, which counts only in debug mode.
- It makes a table of types for each constant, a dictionary of keywords for each call, and types and shapes
  for each tensor, and checks the size of each array.
- It computes the type of a sum or product even if both sides have it, and the shape even if it computed it
  for the same two shapes before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from triton import language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

numpy_dtype: Callable[[tl.dtype], Any] = interpreter._get_np_dtype
replace_language: Callable[..., Any] = interpreter._patch_lang
numpy_dtypes = cache(numpy_dtype)
broadcast: Callable[..., tuple[Any, Any]] = TritonSemantic.broadcast_impl_value
convert: Callable[..., tuple[Any, Any]] = TritonSemantic.binary_op_type_checking_impl
initialise: Callable[..., None] = tl.tensor.__init__
unwrap: Callable[[Any], Any] = tl.core._unwrap_if_constexpr
Change = tuple[object, str, object]


def install() -> None:
    """Let every kernel that is interpreted from now on run faster."""
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._get_np_dtype = get_numpy_dtype
    interpreter._patch_attr = replace_builtin
    interpreter._patch_lang = replace_once
    interpreter.InterpreterBuilder.get_block_ty = get_block_type
    tl.block_type.with_element_ty = get_block_type_of
    tl.tensor.__init__ = initialise_tensor
    interpreter.TensorHandle.__init__ = initialise_handle
    TritonSemantic.broadcast_impl_value = broadcast_unequal
    TritonSemantic.binary_op_type_checking_impl = convert_unequal
    tl.core._unwrap_if_constexpr = unwrap_once


PLAIN = {int, bool, float, str, type(None), tl.dtype, tl.block_type, tl.pointer_type, tl.tensor}


def unwrap_once(value: Any) -> Any:
    """The value of a constant; nearly all arguments are neither constants nor lists."""
    return value if type(value) in PLAIN else unwrap(value)


BLOCK_TYPES: dict[tuple[str, tuple[int, ...]], tl.block_type] = {}  # by the names of scalars and shapes


def get_block_type(self: object, dtype: tl.dtype, shape: Any) -> tl.block_type:
    """One type for all blocks of a scalar and a shape."""
    key = dtype.name, tuple(shape)
    if key not in BLOCK_TYPES:
        BLOCK_TYPES[key] = tl.block_type(dtype, shape)
    return BLOCK_TYPES[key]


def get_block_type_of(self: tl.block_type, scalar: tl.dtype) -> tl.block_type:
    return get_block_type(self, scalar, self.shape)


SHAPES: dict[tuple[int, ...], tuple[Any, Any]] = {}  # (shape, numel) of tensors, by the shape of their type


def initialise_tensor(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
    key = tuple(type.shape) if type.is_block() else ()
    if key in SHAPES:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = SHAPES[key]
    else:
        initialise(self, handle, type)
        SHAPES[key] = self.shape, self.numel


def get_numpy_dtype(dtype: tl.dtype) -> Any:
    """The interpreter's numpy type, looked up by the scalar type: pointer and block types have no hash."""
    scalar = dtype.scalar
    return numpy_dtype(scalar) if scalar.is_ptr() else numpy_dtypes(scalar)


def initialise_handle(
    self: interpreter.TensorHandle, data: Any, dtype: tl.dtype, attr: dict[str, Any] | None = None
) -> None:
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr


COMMON: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}  # shape of the sum, by two shapes


def broadcast_unequal(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    """Broadcast two tensors to one shape, which nearly all have already."""
    one, other = lhs.type, rhs.type
    if not (one.is_block() and other.is_block()):
        return broadcast(self, lhs, rhs)
    if one.shape.values == other.shape.values:
        return lhs, rhs
    key = tuple(one.shape.values), tuple(other.shape.values)
    if key not in COMMON:
        result = broadcast(self, lhs, rhs)
        COMMON[key] = list(result[0].type.shape.values)
        return result
    return expand(lhs, COMMON[key]), expand(rhs, COMMON[key])


def expand(x: Any, shape: list[int]) -> Any:
    if x.type.shape.values == shape:
        return x
    handle = interpreter.TensorHandle(np.broadcast_to(x.handle.data, shape), x.handle.dtype.scalar)
    return tl.tensor(handle, get_block_type(x, x.dtype, shape))


ALIKE = {"int1", "int32", "int64", "fp32", "fp64"}  # a result of two such operands has their type


def convert_unequal(self: Any, lhs: Any, rhs: Any, *options: Any, **named: Any) -> tuple[Any, Any]:
    """Convert two tensors to the type and shape in which a binary operation computes; nearly all have the
    type already."""
    are_tensors = type(lhs) is tl.tensor and type(rhs) is tl.tensor
    if are_tensors and lhs.dtype is rhs.dtype and lhs.dtype.name in ALIKE:
        return broadcast_unequal(self, lhs, rhs)
    return convert(self, lhs, rhs, *options, **named)


def replace_builtin(
    owner: object, name: str, member: Callable[..., Any], builder: object, scope: Any
) -> None:
    """Give a function of the language the interpreter's semantic."""

    function = getattr(member, "__wrapped__", member)  # without the check that there is a semantic

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return function(*args, **kwargs)

    scope.set_attr(owner, name, call)


def replace_once(fn: Any) -> Any:
    """Replace the language for a launch; calls within it leave the language as it is."""
    languages = languages_of(fn)
    scope = interpreter._LangPatchScope()
    replaced = [is_replaced(language) for language in languages]
    if all(replaced):
        return scope
    if any(replaced):
        return replace_language(fn)
    for change in changes_of(fn, tuple(language.__name__ for language in languages)):
        scope.set_attr(*change)
    return scope


CHANGES: dict[tuple[str, ...], list[Change]] = {}  # by the names of the languages of a function


def changes_of(fn: Any, languages: tuple[str, ...]) -> list[Change]:
    """The attributes that the interpreter sets for a function, as (owner, name, value)."""
    if languages not in CHANGES:
        scope = replace_language(fn)
        owners = {(id(owner), name): owner for owner, name, _ in scope._changes}
        CHANGES[languages] = [(owner, name, getattr(owner, name)) for (_, name), owner in owners.items()]
        scope.restore()
    return CHANGES[languages]


LANGUAGES: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()  # by the function


def languages_of(fn: Any) -> list[Any]:
    """The modules that the interpreter patches for a function: those in the globals of its module."""
    languages = LANGUAGES.get(fn)
    if languages is None:
        modules = [value for value in fn.__globals__.values() if inspect.ismodule(value)]
        LANGUAGES[fn] = languages = [module for module in modules if module is tl or module is tl.core]
        assert languages, "triton.language must be visible from within jit'd function"  # as in Triton
    return languages


def is_replaced(language: Any) -> bool:
    """Whether a module has the interpreter's functions now."""
    return language.range.__module__ == interpreter.__name__
