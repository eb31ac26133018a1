"""Layouts of Dynamo's variables: of the real object behind a variable, or of a function that the graph makes.

The only module that reads private parts of Dynamo (torch 2.11 to 2.13). Import it only while Dynamo traces,
since it imports Dynamo.
"""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any

import torch
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.functions import NestedUserFunctionVariable, UserMethodVariable
from torch._dynamo.variables.lists import TupleVariable
from torch._dynamo.variables.tensor import SymNodeVariable

from tritoncp.mods.captures import MAKERS
from tritoncp.ops.graph.layouts import (
    MADE_INSIDE,
    Layout,
    Uncapturable,
    check_gradients,
    constant_of,
    is_fixed,
    layout_of,
    make_function,
    register_constant,
    register_function,
)

AROUND = f"{MADE_INSIDE}, or have it capture numbers and functions only, not tensors and objects"


def set_layout(context: Any) -> None:
    """Set local variables of a frame that Dynamo traces: ``layout`` to the layout of its variable ``thing``
    (`layout_of`), and ``symbols`` to the symbolic numbers that ``thing`` captures, if the graph makes it.
    context: the ComptimeContext of that frame"""
    translator = context._ComptimeContext__tx
    symbols: list[Any] = []
    layout = _layout_of_variable(context, symbols)
    translator.symbolic_locals["layout"] = VariableTracker.build(translator, layout)
    translator.symbolic_locals["symbols"] = TupleVariable(symbols)


def _layout_of_variable(context: Any, symbols: list[Any]) -> Layout:
    variable = context.get_local("thing")._i_will_not_complain_if_bc_breaks_VariableTracker().realize()
    try:
        if isinstance(variable, NestedUserFunctionVariable):
            structure, fn = _structure_of(variable, symbols)
            check_gradients(fn, frozenset())
            return ("inside", structure)
        return layout_of(_object_of(variable), context.get_local("is_called").as_python_constant())
    except Uncapturable as error:
        return ("refuse", f"this mask_mod or score_mod was {AROUND}: {error}")
    except RecursionError:
        return ("refuse", f"this mask_mod or score_mod was {AROUND}: it is nested too deep")


def _structure_of(variable: Any, symbols: list[Any]) -> tuple[str, Any]:
    """Return (structure for `inputs.rebuild`, value) of a Dynamo variable: a number, a function without
    captures, a sequence of these, or a function made in the graph that captures these. Raises Uncapturable
    for other variables.

    symbols: variables of symbolic numbers are appended; their value is None
    """
    variable = variable.realize()
    if isinstance(variable, NestedUserFunctionVariable):
        return _structure_of_function(variable, symbols)
    if isinstance(variable, SymNodeVariable) and variable.python_type() in (int, float):
        symbols.append(variable)
        return ('"i"' if variable.python_type() is int else '"f"'), None
    sequence = _type_of(variable)
    is_named = sequence is not None and issubclass(sequence, tuple) and hasattr(sequence, "_fields")
    if sequence in (tuple, list, torch.Size) or is_named:
        items = variable.unpack_var_sequence(InstructionTranslator.current_tx())
        text, values = _structure_of_all(items, symbols)
        kind, number = "call" if is_named else "sequence", register_constant(sequence, sequence)
        # A torch.Size holds no None, which stands for a symbol.
        value = values if sequence is torch.Size else MAKERS[kind](sequence, values)
        return f'["{kind}",{number},{text}]', value
    constant = _object_of(variable)
    number = register_constant(_key_of(constant), constant)
    _guard(variable)
    return f'["is",{number}]', constant


def _structure_of_all(variables: Iterable[Any], symbols: list[Any]) -> tuple[str, list[Any]]:
    pairs = [_structure_of(variable, symbols) for variable in variables]
    return "[" + ",".join([text for text, _ in pairs]) + "]", [value for _, value in pairs]


def _structure_of_function(variable: Any, symbols: list[Any]) -> tuple[str, types.FunctionType]:
    """Return (structure, value) of a function that the graph makes."""
    defaults = variable.defaults.items if variable.defaults else ()
    keywords = variable.kwdefaults.items if variable.kwdefaults else {}
    names = tuple([name.vt.as_python_constant() for name in keywords])
    load = InstructionTranslator.current_tx().output.side_effects.load_cell
    cells = [load(cell) for cell in (variable.closure.items if variable.closure else ())]
    text, parts = _structure_of_all([*cells, *defaults, *keywords.values()], symbols)
    name = variable.fn_name.as_python_constant()
    number = register_function(variable.get_code(), variable.f_globals, name, names)
    return f'["function",{number},{text}]', make_function(constant_of(number), parts)


def guard_identity(context: Any) -> None:
    """Add an identity guard on the local variable ``thing`` of a frame that Dynamo traces."""
    _guard(context.get_local("thing")._i_will_not_complain_if_bc_breaks_VariableTracker().realize())


def _guard(variable: Any) -> None:
    """Add an identity guard on a Dynamo variable from outside of the graph; Dynamo's own guards compare
    functions by their code only. Numbers and strings need none."""
    if variable.source is not None and not isinstance(variable, ConstantVariable | SymNodeVariable):
        install_guard(variable.source.make_guard(GuardBuilder.ID_MATCH))


def _object_of(variable: Any) -> Any:
    """Return the real object of a Dynamo variable. Raises Uncapturable if the graph makes the object."""
    variable = variable.realize()
    if isinstance(variable, SymNodeVariable):
        return variable.evaluate_expr()  # a guard makes it constant
    if isinstance(variable, UserMethodVariable):
        return types.MethodType(variable.fn, _object_of(variable.obj))
    try:
        if variable.source is not None and hasattr(variable, "value"):
            return variable.value
        return variable.as_python_constant()
    except Exception:
        raise Uncapturable(f"it captures a {_kind_of(variable)}") from None


def _kind_of(variable: Any) -> str:
    kind = _type_of(variable)
    return type(variable).__name__.removesuffix("Variable") if kind is None else kind.__name__


def _type_of(variable: Any) -> type | None:
    """Return the type of a Dynamo variable's object, None if unknown."""
    try:
        kind: type = variable.python_type()
    except Exception:
        return None
    return kind


def _key_of(constant: Any) -> Any:
    """Return a hashable key of a constant. Raises Uncapturable for objects with state, which guards do not
    compare."""
    if isinstance(constant, float | complex):
        return type(constant), repr(constant)
    if isinstance(constant, types.FunctionType) and not is_fixed(constant):
        if constant.__closure__ or constant.__defaults__ or constant.__kwdefaults__:
            raise Uncapturable(f"it captures {constant.__qualname__}, a function with captures of its own")
        return constant.__code__, id(constant.__globals__)
    if not is_fixed(constant) or isinstance(constant, slice):
        raise Uncapturable(f"it captures a {type(constant).__name__}")
    return type(constant), constant
