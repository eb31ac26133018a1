"""The types of public functions: a type checker infers the types that the results of a script have."""

import inspect
import types
import typing
from pathlib import Path

import pytest

import tritoncp
from tritoncp.distributed.schedules import SCHEDULES as IMPLEMENTED
from tritoncp.planning import SCHEDULES, ScheduleName
from tritoncp.planning.balance import BalancerName

SCRIPT = Path(__file__).with_name("typed_script.py")
OVERLOADED = tritoncp.flex_attention, tritoncp.make_plan


def has_type(value: object, expected: object) -> bool:
    """Return whether a value is of a type, as `tuple[Tensor, Tensor]`, down to its items."""
    if isinstance(expected, types.UnionType):
        return any(has_type(value, part) for part in typing.get_args(expected))
    kind, parts = typing.get_origin(expected) or expected, typing.get_args(expected)
    if not isinstance(value, kind):
        return False
    if kind is tuple:
        return len(value) == len(parts) and all(map(has_type, value, parts))
    if kind is dict:
        return all(has_type(item, parts[i]) for pair in value.items() for i, item in enumerate(pair))
    return all(has_type(item, parts[0]) for item in value) if kind is list else True


def test_the_values_of_a_script_have_the_types_that_it_asserts(monkeypatch):
    asserted = []

    def assert_type(value: object, expected: object) -> object:
        assert has_type(value, expected), f"{type(value)} is not {expected}"
        asserted.append(expected)
        return value

    monkeypatch.setenv("TRITON_INTERPRET", "0")  # the CPU engine
    monkeypatch.setattr(typing, "assert_type", assert_type)
    exec(compile(SCRIPT.read_text(), str(SCRIPT), "exec"), {"__name__": "typed_script"})
    assert len(asserted) == SCRIPT.read_text().count("assert_type(")


def test_names_of_schedules_and_balancers_are_those_that_exist():
    assert typing.get_args(ScheduleName) == ("auto", *SCHEDULES) and set(SCHEDULES) == {*IMPLEMENTED}
    assert set(typing.get_args(BalancerName)) == {"auto", *tritoncp.balancers}


def test_the_package_lists_public_names_and_no_helper():
    listed = [name for name in dir(tritoncp) if not name.startswith("_")]
    modules = [name for name in listed if isinstance(getattr(tritoncp, name), types.ModuleType)]
    torchs = {"AuxOutput", "AuxRequest", "BlockMask", "FlexKernelOptions", "create_mask", "noop_mask"}
    assert set(listed) - set(modules) == {*tritoncp.__all__, *torchs}
    assert all(getattr(tritoncp, name).__name__ == f"tritoncp.{name}" for name in modules)


@pytest.mark.parametrize("function", OVERLOADED, ids=lambda function: function.__qualname__)
def test_overloads_take_the_parameters_of_the_function(function):
    """Overloads have the defaults of the function, except for the parameters that select the overload; their
    results together are the function's results."""
    parameters = inspect.signature(function).parameters
    overloads = typing.get_overloads(function)
    assert len(overloads) >= 2
    for overload in overloads:
        signature = inspect.signature(overload)
        assert signature.parameters.keys() == parameters.keys()
        positional = [
            name for name, one in signature.parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD
        ]
        assert positional == list(parameters)[: len(positional)]
        required = {name for name, one in signature.parameters.items() if one.default is one.empty}
        extra = required - {name for name, one in parameters.items() if one.default is one.empty}
        assert extra <= {"return_lse", "return_aux", "selected"}
        assert signature.return_annotation != "Any"
    results = {
        part
        for overload in overloads
        for part in str(inspect.signature(overload).return_annotation).split(" | ")
    }
    assert results == set(str(inspect.signature(function).return_annotation).split(" | "))
