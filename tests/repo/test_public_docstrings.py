"""Docstrings of public functions: what each parameter is, and what is returned."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tritoncp
from tests.repo.test_public_surface import FOR_USERS, members
from tritoncp import chunking, masks
from tritoncp.integrations import transformers

SECTIONS = ("Args", "Returns", "Raises")


def public_objects() -> Iterator[tuple[str, Any]]:
    """List public functions, classes that users make objects of, and public methods."""
    for module in (tritoncp, chunking, transformers):
        for name in module.__all__:
            yield from callables_of(name, getattr(module, name))
    for name in masks.__all__:  # the classes of masks serve the package, but for Mask
        if not isinstance(getattr(masks, name), type):
            yield from callables_of(name, getattr(masks, name))
    yield from callables_of("World", tritoncp.simulate.__globals__["World"])


def callables_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, type):
        if not (name in FOR_USERS or issubclass(value, tuple | int) or dataclasses.is_dataclass(value)):
            yield name, value
        if name != "ContextParallelTrainer":  # its methods are Trainer's
            listed = [line.partition("(")[0].partition(".")[2] for line in members(value) if "(" in line]
            yield from ((f"{name}.{member}", getattr(value, member)) for member in listed)
    elif callable(value):
        yield name, value


def parameters_of(value: Callable[..., Any]) -> list[str]:
    names = inspect.signature(value).parameters
    return [name for name in names if name != "self" and not name.startswith("_")]


def sections_of(text: str) -> dict[str, str]:
    """Split a docstring at the lines "Args:", "Returns:" and "Raises:"."""
    parts = re.split(rf"^({'|'.join(SECTIONS)}):\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


OBJECTS = {name: value for name, value in public_objects() if parameters_of(value)}


@pytest.mark.parametrize("name", sorted(OBJECTS))
def test_a_public_docstring_explains_each_parameter_and_the_result(name):
    sections = sections_of(inspect.getdoc(OBJECTS[name]) or "")
    explained = re.findall(r"^    (\w+): ", sections.get("Args", ""), re.MULTILINE)
    assert explained == parameters_of(OBJECTS[name])
    assert ("Returns" in sections) == (not isinstance(OBJECTS[name], type))


def test_sections_begin_at_their_headings():
    text = "Add.\n\nArgs:\n    x: a number.\n    y: a number,\n        not 0.\n\nReturns:\n    Their sum.\n"
    assert sections_of(text) == {
        "Args": "    x: a number.\n    y: a number,\n        not 0.\n\n",
        "Returns": "    Their sum.\n",
    }
