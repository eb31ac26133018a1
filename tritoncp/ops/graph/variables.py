"""Layouts of Dynamo's variables: the objects behind what a graph is traced with, and functions that it makes.

This reads private parts of Dynamo (torch 2.11 to 2.13), and nothing else of the package does.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from tritoncp.ops.graph.layouts import (
    MADE_INSIDE,
    Layout,
    Uncapturable,
    check_gradients,
    is_fixed,
    layout_of,
    register_constant,
)

AROUND = f"{MADE_INSIDE}, or have it capture numbers and functions only, not tensors and objects"


def layout_of_variable(context: Any) -> Layout:
    """Return the layout of the local variable ``thing`` of a frame that Dynamo traces, see `layout_of`.
    context: the ComptimeContext of that frame, whose local variable ``symbols`` becomes the tuple of the
    symbolic integers that ``thing`` captures, if the graph makes it."""
    from torch._dynamo.variables.functions import NestedUserFunctionVariable
    from torch._dynamo.variables.lists import TupleVariable

    variable = context.get_local("thing")._i_will_not_complain_if_bc_breaks_VariableTracker().realize()
    try:
        if isinstance(variable, NestedUserFunctionVariable):
            places, symbols = _symbols_of(variable)
            fn, key = _constant_of(variable, places)
            check_gradients(fn, frozenset())
            context._ComptimeContext__tx.symbolic_locals["symbols"] = TupleVariable(symbols)
            return ("inside", register_constant((key, places), (fn, places)))
        return layout_of(_object_of(variable), context.get_local("is_called").as_python_constant())
    except Uncapturable as error:
        return ("refuse", f"this mask_mod or score_mod was {AROUND}: {error}")
    except RecursionError:
        return ("refuse", f"this mask_mod or score_mod was {AROUND}: it is nested too deep")


def _symbols_of(variable: Any) -> tuple[tuple[int, ...], list[Any]]:
    """Return the places of cells with symbolic integers in a function that the graph makes, and the integers'
    variables."""
    from torch._dynamo.variables.tensor import SymNodeVariable

    contents = [cell.realize() for cell in _cells_of(variable)]
    places = [i for i, x in enumerate(contents) if isinstance(x, SymNodeVariable) and x.python_type() is int]
    return tuple(places), [contents[i] for i in places]


def _cells_of(variable: Any) -> list[Any]:
    """Return the variables of the cells of a function that the graph makes."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    load: Callable[[Any], Any] = InstructionTranslator.current_tx().output.side_effects.load_cell
    closure: Any = variable.closure
    return [load(cell) for cell in (closure.items if closure else ())]


def guard_identity(context: Any) -> None:
    """Guard that the local variable ``thing`` of a frame that Dynamo traces stays the same object."""
    _guard(context.get_local("thing")._i_will_not_complain_if_bc_breaks_VariableTracker().realize())


def _guard(variable: Any) -> None:
    """Guard that a Dynamo variable from outside of the graph stays the same object. Dynamo's own guards tell
    numbers and texts apart, and functions by their code only."""
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.tensor import SymNodeVariable

    if variable.source is not None and not isinstance(variable, ConstantVariable | SymNodeVariable):
        install_guard(variable.source.make_guard(GuardBuilder.ID_MATCH))


def _object_of(variable: Any) -> Any:
    """Return the object of a Dynamo variable. Raises Uncapturable if the graph makes the object."""
    from torch._dynamo.variables.functions import UserMethodVariable
    from torch._dynamo.variables.tensor import SymNodeVariable

    variable = variable.realize()
    if isinstance(variable, SymNodeVariable):
        return variable.evaluate_expr()  # a guard makes it constant
    if isinstance(variable, UserMethodVariable):
        return types.MethodType(variable.fn, _object_of(variable.obj))
    if variable.source is not None and hasattr(variable, "value"):
        return variable.value
    try:
        constant = variable.as_python_constant()
    except Exception:
        raise Uncapturable(f"it captures a {_kind_of(variable)}") from None
    return constant


def _kind_of(variable: Any) -> str:
    try:
        return str(variable.python_type().__name__)
    except Exception:
        return type(variable).__name__.removesuffix("Variable")


def _constant_of(variable: Any, empty: tuple[int, ...] = ()) -> tuple[Any, Any]:
    """Return the constant of a Dynamo variable and a hashable key of it: a number, a function without
    captures, or a function that the graph makes, around constants. Raises Uncapturable for others.

    empty: places of cells to leave out of a function that the graph makes
    """
    from torch._dynamo.variables.functions import NestedUserFunctionVariable

    variable = variable.realize()
    if not isinstance(variable, NestedUserFunctionVariable):
        constant = _object_of(variable)
        key = _key_of(constant)
        _guard(variable)
        return constant, key
    contents = enumerate(_cells_of(variable))
    pairs = [(None, None) if place in empty else _constant_of(cell) for place, cell in contents]
    defaults, keywords = (
        None if x is None else _object_of(x) for x in (variable.defaults, variable.kwdefaults)
    )
    code, cells = variable.get_code(), tuple([types.CellType(contents) for contents, _ in pairs])
    name = variable.fn_name.as_python_constant()
    fn = types.FunctionType(code, variable.f_globals, name, defaults, cells)
    fn.__kwdefaults__ = keywords
    cell_keys = tuple([key for _, key in pairs])
    rest = _key_of((defaults or (), *(keywords or {}).items()))
    return fn, (code, id(variable.f_globals), rest, cell_keys)


def _key_of(constant: Any) -> Any:
    """Return a hashable key of a constant. Raises Uncapturable for objects with state, whose edits no guard
    sees."""
    if isinstance(constant, tuple | list):
        return type(constant), tuple([_key_of(item) for item in constant])
    if isinstance(constant, float | complex):
        return type(constant), repr(constant)
    if isinstance(constant, types.FunctionType) and not is_fixed(constant):
        if constant.__closure__ or constant.__defaults__ or constant.__kwdefaults__:
            raise Uncapturable(f"it captures {constant.__qualname__}, a function with captures of its own")
        return constant.__code__, id(constant.__globals__)
    if not is_fixed(constant) or isinstance(constant, slice):
        raise Uncapturable(f"it captures a {type(constant).__name__}")
    return type(constant), constant
