"""The state that a function's bytecode reads: chains of attributes and subscripts that begin at a variable.

``Config.limits["cap"]`` compiles to loads of a global, an attribute and a constant subscript. `code_reads`
collects such chains once per code object; `fingerprint` evaluates them at each call. Attributes of other
values (local variables, results of calls) are collected by name only.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

GLOBAL, CELL, ARGUMENT, IMPORT = "global", "closure variable", "argument", "module"
ATTRIBUTE, ITEM = "attribute", "item"

Step = tuple[str, Any]  # (ATTRIBUTE, name) or (ITEM, constant key)


class Chain(NamedTuple):
    """A variable and the attributes and constant subscripts that are read from it, in order."""

    kind: str
    name: str
    steps: tuple[Step, ...]

    @property
    def path(self) -> str:
        """The chain as text, for error messages: "global Config.limits['cap']"."""
        texts = [f"[{key!r}]" if step == ITEM else f".{key}" for step, key in self.steps]
        return f"{self.kind} {self.name}{''.join(texts)}"


class Reads(NamedTuple):
    """The state that one code object, and the functions defined inside it, may read.

    chains: with their paths, from globals, closure variables, imported modules and the function's first
        argument (``self``)
    attributes: names of attributes that are read from other values than chains
    obstacle: an operation whose reads cannot be known, as text; "" if there is none
    """

    chains: tuple[tuple[Chain, str], ...]
    attributes: frozenset[str]
    obstacle: str


_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD"}
_GLOBALS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
_CELLS = {"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"}
_CONSTANTS = {"LOAD_CONST", "LOAD_SMALL_INT"}
_EDITS = {"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR", "STORE_SUBSCR", "DELETE_SUBSCR"}
_CELL_EDITS = {"STORE_DEREF", "DELETE_DEREF"}
_GAPS = {"CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "PUSH_NULL", "RESUME"}


MAX_CODES = 4096
_READS: dict[types.CodeType, Reads] = {}  # up to MAX_CODES; Dynamo warns about an lru_cache


def code_reads(code: types.CodeType) -> Reads:
    """Collect the state that `code` reads, in the order of its instructions.

    >>> code = (lambda self, x: x * self.config["cap"] + math.pi).__code__
    >>> [path for chain, path in code_reads(code).chains]
    ["argument self.config['cap']", 'global math.pi']
    """
    reads = _READS.get(code)
    if reads is None:
        first = code.co_varnames[:1] if code.co_argcount else ()
        arguments = {name: ARGUMENT for name in first if not _is_assigned(name, code)}
        events = list(_find_reads(code, dict.fromkeys(code.co_freevars, CELL) | arguments))
        all_chains = dict.fromkeys(event for event in events if isinstance(event, Chain))
        chains = [chain for chain in all_chains if chain.kind != ATTRIBUTE]
        attributes = frozenset(chain.name for chain in all_chains if chain.kind == ATTRIBUTE)
        obstacle = next((event for event in reversed(events) if isinstance(event, str)), "")
        reads = Reads(tuple((chain, chain.path) for chain in chains), attributes, obstacle)
        if len(_READS) >= MAX_CODES:
            _READS.clear()
        _READS[code] = reads
    return reads


def _is_assigned(name: str, code: types.CodeType) -> bool:
    stores = (i for i in dis.get_instructions(code) if i.opname.startswith(("STORE_", "DELETE_")))
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return any(name in _names(i) for i in stores) or any(_is_assigned(name, c) for c in inner)


def _names(instruction: dis.Instruction) -> tuple[Any, ...]:
    """Return the variables that an instruction loads: newer Python versions load two with one instruction."""
    value = instruction.argval
    return value if isinstance(value, tuple) else (value,)


def _find_reads(code: types.CodeType, scope: dict[str, str]) -> Iterator[Chain | str]:
    """Yield the reads of a code object and of code nested in it: chains; attributes of other values, as
    chains of the kind ATTRIBUTE; obstacles (:class:`Reads`) as text.

    scope: variables of enclosing functions and the first argument, at which chains may begin
    """
    instructions = [i for i in dis.get_instructions(code) if i.opname not in _GAPS or i.is_jump_target]
    end = 0  # index of the instruction after the last chain
    for index, instruction in enumerate(instructions):
        operation, argument = instruction.opname, instruction.argval
        if index < end:
            continue
        roots: list[tuple[str, str]] = []
        if operation in _GLOBALS:
            roots = [(GLOBAL, argument)]
        elif operation in _CELLS or operation.startswith("LOAD_FAST"):
            roots = [(scope[name], name) for name in _names(instruction) if name in scope]
        elif operation == "IMPORT_NAME":  # with a dot for each level of a relative import
            roots = [(IMPORT, "." * instructions[index - 2].argval + argument)]
        for i, root in enumerate(roots, start=1):  # the last root is on top of the stack
            steps, end = _steps(instructions, index + 1) if i == len(roots) else ((), end)
            yield Chain(*root, steps)
        if operation in _ATTRIBUTES or operation in ("IMPORT_FROM", "LOAD_SUPER_ATTR"):
            yield Chain(ATTRIBUTE, argument, ())
        elif operation == "MATCH_CLASS":
            yield "matches a class pattern, which reads attributes by position"
        elif operation in _EDITS or (operation in _CELL_EDITS and scope.get(argument) == CELL):
            yield "edits state"
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            hidden = {*constant.co_varnames, *constant.co_cellvars}
            yield from _find_reads(constant, {name: k for name, k in scope.items() if name not in hidden})


def _steps(instructions: list[dis.Instruction], index: int) -> tuple[tuple[Step, ...], int]:
    """Return (attributes and constant subscripts that instructions from `index` on read from the value loaded
    last, index of the instruction after them)."""
    steps: list[Step] = []
    while not instructions[index].is_jump_target:
        instruction = instructions[index]
        if instruction.opname in _ATTRIBUTES:
            steps.append((ATTRIBUTE, instruction.argval))
            index += 1
        elif instruction.opname in _CONSTANTS and _is_subscript(instructions[index + 1]):
            steps.append((ITEM, instruction.argval))
            index += 2
        else:
            break
    return tuple(steps), index


def _is_subscript(instruction: dis.Instruction) -> bool:
    binary = instruction.opname == "BINARY_OP" and instruction.argrepr == "[]"
    return (instruction.opname == "BINARY_SUBSCR" or binary) and not instruction.is_jump_target
