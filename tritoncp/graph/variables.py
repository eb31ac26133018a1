"""Layouts of Dynamo's variables: of the real object behind a variable, or of a function that the graph makes.

The only module that reads private parts of Dynamo (torch 2.11 to 2.15). Import it only while Dynamo traces,
since it imports Dynamo.
"""

from __future__ import annotations

import types
from typing import Any

from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.functions import NestedUserFunctionVariable, UserMethodVariable
from torch._dynamo.variables.lists import TupleVariable
from torch._dynamo.variables.tensor import SymNodeVariable

from tritoncp.graph.constants import constant_of, make_function, register_function
from tritoncp.graph.layouts import MADE_INSIDE, Layout, Uncapturable, callable_layout, check_gradients
from tritoncp.mods.captures import ABSENT

AROUND = f"{MADE_INSIDE}, or have it capture numbers, tensors and functions only, not objects"


def set_layout(context: Any) -> None:
    """Set local variables of a frame that Dynamo traces: ``layout`` to the layout of its variable ``thing``
    (`callable_layout`), and ``parts`` to the parts of ``thing``, if the graph makes it. context: the
    ComptimeContext of that frame"""
    translator = context._ComptimeContext__tx
    parts: list[Any] = []
    layout = _variable_layout(context, parts)
    translator.symbolic_locals["layout"] = VariableTracker.build(translator, layout)
    translator.symbolic_locals["parts"] = TupleVariable(parts)


def set_is_symbol(context: Any) -> None:
    """Set the local variable ``answer`` of a frame that Dynamo traces: whether its variable ``thing`` is a
    number that differs between runs of the graph."""
    translator = context._ComptimeContext__tx
    answer = isinstance(_variable_of(context), SymNodeVariable)
    translator.symbolic_locals["answer"] = VariableTracker.build(translator, answer)


def _variable_of(context: Any) -> Any:
    """Return Dynamo's variable of the local variable ``thing``."""
    return context.get_local("thing")._i_will_not_complain_if_bc_breaks_VariableTracker().realize()


def _variable_layout(context: Any, parts: list[Any]) -> Layout:
    variable = _variable_of(context)
    try:
        if isinstance(variable, NestedUserFunctionVariable):
            return "inside", _register_inner(variable, parts)
        return callable_layout(_object_of(variable), context.get_local("is_called").as_python_constant())
    except Uncapturable as error:
        return ("refuse", f"this mask_mod or score_mod was {AROUND}: {error}")


def _register_inner(variable: Any, parts: list[Any]) -> str:
    """Register a function that the graph makes, append the variables of its parts (`make_function`), and
    return its name. Raises Uncapturable if it loses a gradient."""
    defaults = variable.defaults.items if variable.defaults else ()
    keywords = variable.kwdefaults.items if variable.kwdefaults else {}
    names = tuple([name.vt.as_python_constant() for name in keywords])
    load = InstructionTranslator.current_tx().output.side_effects.load_cell
    parts += [load(cell) for cell in (variable.closure.items if variable.closure else ())]
    parts += [*defaults, *keywords.values()]
    name = register_function(variable.get_code(), variable.f_globals, names)
    check_gradients(make_function(constant_of(name), [ABSENT] * len(parts)), frozenset())
    return name


def guard_identity(context: Any) -> None:
    """Add an identity guard on the local variable ``thing`` of a frame that Dynamo traces, if it comes from
    outside of the graph, since Dynamo's guards compare functions only by their code. Numbers and strings need
    none."""
    variable = _variable_of(context)
    if variable.source is not None and not isinstance(variable, ConstantVariable | SymNodeVariable):
        install_guard(variable.source.make_guard(GuardBuilder.ID_MATCH))


def _object_of(variable: Any) -> Any:
    """Return the real object of a Dynamo variable. Raises Uncapturable if the graph makes the object."""
    variable = variable.realize()
    if isinstance(variable, SymNodeVariable):
        return variable.evaluate_expr()  # a guard makes it constant
    if isinstance(variable, UserMethodVariable):
        owner = variable.im_self if hasattr(variable, "im_self") else variable.obj  # before torch 2.15
        return types.MethodType(variable.fn, _object_of(owner))
    try:
        if variable.source is not None and hasattr(variable, "value"):
            return variable.value
        return variable.as_python_constant()
    except Exception:
        raise Uncapturable(f"it captures a {_kind_of(variable)}") from None


def _kind_of(variable: Any) -> str:
    """Return the name of the type of a Dynamo variable's object, or of the variable if that is unknown."""
    try:
        return str(variable.python_type().__name__)
    except Exception:
        return type(variable).__name__.removesuffix("Variable")
