"""The digest of a launch: a hash of all inputs of its compilation, without compiling."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
from dataclasses import asdict
from typing import Any

import torch


def hash_launch(launch: Any) -> str:
    """Hash all inputs of a kernel's compilation: Triton's version, tiles, arguments without tensor contents,
    and the sources of the kernel and its callees without comments, docstrings and line numbers.
    """
    import triton

    sources: dict[str, str] = {}
    named = {name: _describe_value(value, sources) for name, value in sorted(launch.args.items())}
    kernel = _describe_value(launch.kernel, sources)
    parts = triton.__version__, asdict(launch.config), kernel, named, sorted(sources.items())
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:10]


def _describe_value(value: Any, sources: dict[str, str]) -> Any:
    """Describe a kernel's argument, or a global of its module, as far as compiled code depends on it. Sources
    of jit functions, and of functions that they use, are added to ``sources`` by name."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype)
    if hasattr(value, "block_shape"):  # a tensor descriptor
        return str(value.base.dtype), value.block_shape
    if isinstance(value, tuple):
        return [_describe_value(item, sources) for item in value]
    if (function := getattr(value, "fn", None)) is None:
        return getattr(value, "__qualname__", str(value))  # str() of a plain function has its address
    name = f"{function.__module__}.{function.__qualname__}"
    if name not in sources:
        sources[name], names = read_syntax(function)
        values = {x: function.__globals__[x] for x in names if x in function.__globals__}
        uses = [(x, _describe_value(v, sources)) for x, v in values.items() if not inspect.ismodule(v)]
        sources[name] += repr(uses)
    return name


@functools.cache
def read_syntax(code: Any) -> tuple[str, list[str]]:
    """Return (syntax tree as text, without comments, docstrings and positions; names in it)."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [statement for statement in body if not _is_text(statement)]  # type: ignore[attr-defined]
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return ast.dump(tree), sorted(names)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
