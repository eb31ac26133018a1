"""Constants of graphs: objects that a graph names by text.

If possible, an object has the same name in every process: a value itself, the place of a class or function
(:mod:`tritoncp.mods.places`), the digest of a translated mod. So a saved program finds its objects in another
process if the modules are loaded, or raises an error, and caches of compiled code on disk are hit. Any other
object has a number, which names nothing in other processes.
"""

from __future__ import annotations

import json
import sys
import types
from typing import Any

from tritoncp.core import handles
from tritoncp.core.bounded_cache import BoundedCache
from tritoncp.mods import places
from tritoncp.mods.captures import ABSENT
from tritoncp.mods.fingerprint import is_of_library
from tritoncp.mods.mod import structure_of

# Objects by name, each in a tuple. A running graph marks its objects as recently used.
_CONSTANTS: BoundedCache[str, tuple[Any]] = BoundedCache(1 << 15)
_NAMES: BoundedCache[Any, str] = BoundedCache(1 << 15)  # names by the constant's key


def register_constant(key: Any, thing: Any, name: str | None = None) -> str:
    """Return the name of a constant object in graphs; equal keys share a name.

    name: name of this object in every process; None: use :func:`_name_of`

    >>> for thing in (None, ("a", 2), dict, lambda: 0):
    ...     print(register_constant(thing, thing).partition(" ")[0])  # doctest: +ELLIPSIS
    =null
    =["a",
    builtins:dict
    @...
    """
    known = _NAMES.get(key)
    if known is None or _CONSTANTS.get(known) is None:
        known = name or _name_of(thing)
        entry = None if known is None else _CONSTANTS.get(known)
        if known is None or (entry is not None and not _are_same(entry[0], thing)):
            known = f"@{handles.new_number()} {_describe(thing)}"
        _CONSTANTS.put(known, (thing,))
        _NAMES.put(key, known)
    return known


def _are_same(thing: Any, other: Any) -> bool:
    """Return whether two constants of one name are the same. Classes of a reloaded module are not."""
    if isinstance(thing, tuple) and isinstance(other, tuple):
        return len(thing) == len(other) and all(map(_are_same, thing, other))
    if isinstance(thing, types.CodeType):  # the name has its digest
        return True
    return thing is other or (not isinstance(thing, dict) and thing == other)


def register_mod(digest: str) -> str:
    """Return the name of the translated mod of a digest, without captures."""
    return register_constant(digest, structure_of(digest), f"%{digest}")


def register_object(kind: type, parts: tuple[tuple[str, Any], ...]) -> str:
    """Return the name of the class of an object and (place, name) of its parts, see `layouts.stand_in`."""
    place, listed = places.place_of(kind), _literal(parts)
    name = None if place is None or listed is None else f"object {place} {listed}"
    return register_constant((kind, parts), (kind, parts), name)


def register_function(code: types.CodeType, scope: dict[str, Any], keywords: tuple[str, ...]) -> str:
    """Return the name of the constants of a function. keywords: names of keyword defaults"""
    place = places.place_of_code(code, scope)
    name = None if place is None else f"def {place} {','.join(keywords)}"
    return register_constant((code, id(scope), keywords), (code, scope, keywords), name)


def constant_of(name: str) -> Any:
    """Return the object of a name. Raises RuntimeError if this process does not have it."""
    entry = _CONSTANTS.get(name)
    if entry is None:
        entry = _CONSTANTS.put(name, (_find(name),))
    return entry[0]


def make_function(constant: tuple[Any, ...], parts: list[Any]) -> types.FunctionType:
    """Make a function from the constants of `register_function` and its parts: values of closure cells, of
    positional and of keyword defaults."""
    code, scope, keywords = constant
    count, split = len(code.co_freevars), len(parts) - len(keywords)
    cells = [types.CellType() if part is ABSENT else types.CellType(part) for part in parts[:count]]
    fn = types.FunctionType(code, scope, code.co_name, tuple(parts[count:split]) or None, tuple(cells))
    fn.__kwdefaults__ = dict(zip(keywords, parts[split:])) or None
    return fn


def _name_of(thing: Any) -> str | None:
    """Return the name of a value, or of an object that has a place; None for any other object."""
    if thing is ABSENT:
        return "absent"
    literal = _literal(thing)
    return places.place_of(thing) if literal is None else f"={literal}"


def _literal(value: Any) -> str | None:
    """Return None, bools, numbers, strings and tuples of them as text; None for any other object."""
    if isinstance(value, tuple) and type(value) is tuple:
        parts = list(map(_literal, value))
        return None if None in parts else f"[{', '.join(map(str, parts))}]"
    return json.dumps(value) if value is None or type(value) in (bool, int, float, str) else None


def _describe(thing: Any) -> str:
    named = thing[0] if isinstance(thing, tuple) and thing else thing
    return getattr(named, "co_qualname", None) or getattr(named, "__qualname__", None) or repr(type(named))


def _find(name: str) -> Any:
    """Find the object of a name that this process has not registered."""
    if name == "absent":
        return ABSENT
    if name[0] == "=":
        return _tuples(json.loads(name[1:]))
    if name[0] == "%":
        return structure_of(name[1:])
    kind, _, rest = name.partition(" ")
    place, _, more = rest.partition(" ")
    if kind == "def" and (found := places.find_code(place)) is not None:
        return *found, tuple(filter(None, more.split(",")))
    if kind == "object" and (cls := places.find(place)) is not ABSENT:
        return cls, _tuples(json.loads(more))
    if not rest and (thing := places.find(kind)) is not ABSENT and _is_harmless(thing):
        return thing
    raise RuntimeError(_describe_missing(name, place or kind))


def _is_harmless(thing: Any) -> bool:
    """Return whether the text of a program may name an object: a class, or a function of torch or math."""
    if isinstance(thing, type) or not callable(thing) or is_of_library(thing, type(thing)):
        return True
    return isinstance(thing, types.FunctionType) and thing.__module__.startswith("torch.nn.functional")


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _describe_missing(name: str, place: str) -> str:
    if name[0] == "@":
        number, _, what = name[1:].partition(" ")
        if handles.is_own(int(number)):
            return (
                f"a compiled graph refers to an object ({what}) that was evicted from the table of "
                f"constants, since more than {_CONSTANTS.size} others were used after its last run: compile "
                "it again, after torch._dynamo.reset()"
            )
        return (
            f"{_PROGRAM} {what}, which has no name by which another process could find it: define it in a "
            "module, not in a notebook or in the text of eval, or make the program again in this process"
        )
    module, _, path = place.partition("#")[0].partition(":")
    if module not in sys.modules:
        return f"{_PROGRAM} {path} of the module {module}: import this module before the call"
    return (
        f"{_PROGRAM} {path} of the module {module}, which has no such code in this process: make the program "
        "again with the present code, or load it where the module is as it was"
    )


_PROGRAM = "a program that was exported, compiled or traced in another process calls"
