"""Reads of a function's bytecode: chains of attributes and subscripts that begin at its variables.

``Config.limits["cap"]`` compiles to the load of a global, an attribute and a constant subscript, one after
the other. `code_reads` collects such chains once for each code object; `fingerprint` follows them at each
call. Of attributes of other values (local variables, results of calls) only the names are collected.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from tritoncp.core.bounded_cache import BoundedCache

GLOBAL, CELL, ARGUMENT, IMPORT = "global", "closure variable", "argument", "module"
ATTRIBUTE, ITEM = "attribute", "item"

Step = tuple[str, Any]  # (ATTRIBUTE, name) or (ITEM, constant key)


class Chain(NamedTuple):
    """A variable and the attributes and constant subscripts read from it, in order.

    path: the same as text, for messages: "global Config.limits['cap']"
    """

    kind: str
    name: str
    steps: tuple[Step, ...]
    path: str


class Reads(NamedTuple):
    """The state that one code object, and the functions defined inside it, may read.

    chains: from globals, closure variables, imported modules and the function's first argument (``self``)
    attributes: names read from values that no chain leads to
    obstacle: an operation that hides which state the code reads; empty if there is none
    """

    chains: tuple[Chain, ...]
    attributes: frozenset[str]
    obstacle: str


_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD"}
_GLOBALS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
_CELLS = {"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"}
_CONSTANTS = {"LOAD_CONST", "LOAD_SMALL_INT"}
_EDITS = {"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR", "STORE_SUBSCR", "DELETE_SUBSCR"}
_CELL_EDITS = {"STORE_DEREF", "DELETE_DEREF"}
_GAPS = {"CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "PUSH_NULL", "RESUME"}


# By code; not an lru_cache, of which Dynamo warns.
_READS: BoundedCache[types.CodeType, Reads] = BoundedCache(4096)


def code_reads(code: types.CodeType) -> Reads:
    """Collect the state that `code` reads, in the order of its instructions.

    >>> code = (lambda self, x: x * self.config["cap"] + math.pi).__code__
    >>> [chain.path for chain in code_reads(code).chains]
    ["argument self.config['cap']", 'global math.pi']
    """
    reads: Reads | None = _READS.get(code)
    if reads is None:
        reader = _Reader()
        reader.read(code, dict.fromkeys(code.co_freevars, CELL) | _first_argument(code))
        reads = Reads(tuple(reader.chains), frozenset(reader.attributes), reader.obstacle)
        _READS.put(code, reads)
    return reads


def _first_argument(code: types.CodeType) -> dict[str, str]:
    """The function's first argument, unless the function assigns to it."""
    if not code.co_argcount:
        return {}
    name = code.co_varnames[0]
    return {} if _is_assigned(name, code) else {name: ARGUMENT}


def _is_assigned(name: str, code: types.CodeType) -> bool:
    stores = (i for i in dis.get_instructions(code) if i.opname.startswith(("STORE_", "DELETE_")))
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return any(name in _names(i) for i in stores) or any(_is_assigned(name, c) for c in inner)


def _names(instruction: dis.Instruction) -> tuple[Any, ...]:
    """The variables of an instruction: later releases of Python join two loads into one."""
    value = instruction.argval
    return value if isinstance(value, tuple) else (value,)


class _Reader:
    """Collects the reads of a code object and of the code objects inside it."""

    def __init__(self) -> None:
        self.chains: dict[Chain, None] = {}
        self.attributes: set[str] = set()
        self.obstacle = ""
        self._open: tuple[str, str, list[Step]] | None = None  # the chain that the last instruction continued

    def read(self, code: types.CodeType, scope: dict[str, str]) -> None:
        """Collect the reads of a code object.

        scope: variables of enclosing functions, and the first argument, that chains may begin at
        """
        instructions = [i for i in dis.get_instructions(code) if i.opname not in _GAPS or i.is_jump_target]
        self._instructions(instructions, scope)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                hidden = {*constant.co_varnames, *constant.co_cellvars}
                self.read(constant, {name: kind for name, kind in scope.items() if name not in hidden})

    def _instructions(self, instructions: list[dis.Instruction], scope: dict[str, str]) -> None:
        skip = False
        for index, instruction in enumerate(instructions):
            operation, argument = instruction.opname, instruction.argval
            if instruction.is_jump_target:
                self._close()
            if skip:
                skip = False
            elif operation in _ATTRIBUTES:
                self._attribute(argument)
            elif operation in _CONSTANTS and self._open and _is_subscript(instructions[index + 1]):
                self._open[2].append((ITEM, argument))
                skip = True
            else:
                self._close()
                for root in _roots(instruction, scope):
                    self._close()
                    self._open = root
                if operation == "IMPORT_NAME":
                    self._open = IMPORT, argument, []
                    self._close()
                elif operation in ("IMPORT_FROM", "LOAD_SUPER_ATTR"):
                    self.attributes.add(argument)
                elif operation == "MATCH_CLASS":
                    self.obstacle = "matches a class pattern, which reads attributes by position"
                elif operation in _EDITS or (operation in _CELL_EDITS and scope.get(argument) == CELL):
                    self.obstacle = "edits state"
        self._close()

    def _attribute(self, name: str) -> None:
        if self._open is None:
            self.attributes.add(name)
        else:
            self._open[2].append((ATTRIBUTE, name))

    def _close(self) -> None:
        if self._open is not None:
            kind, name, steps = self._open
            self.chains[Chain(kind, name, tuple(steps), _path(kind, name, steps))] = None
            self._open = None


def _roots(instruction: dis.Instruction, scope: dict[str, str]) -> Iterator[tuple[str, str, list[Step]]]:
    """The chains that an instruction begins."""
    operation = instruction.opname
    if operation in _GLOBALS:
        yield GLOBAL, instruction.argval, []
    elif operation in _CELLS or operation.startswith("LOAD_FAST"):
        for name in _names(instruction):
            if name in scope:
                yield scope[name], name, []


def _is_subscript(instruction: dis.Instruction) -> bool:
    binary = instruction.opname == "BINARY_OP" and instruction.argrepr == "[]"
    return (instruction.opname == "BINARY_SUBSCR" or binary) and not instruction.is_jump_target


def _path(kind: str, name: str, steps: list[Step]) -> str:
    texts = [f"[{key!r}]" if step == ITEM else f".{key}" for step, key in steps]
    return f"{kind} {name}{''.join(texts)}"
