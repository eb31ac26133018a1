"""Mutants of the package: small changes by cosmic-ray's operators, and a sample that a seed draws."""

from __future__ import annotations

import ast
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator

ROOT = Path(__file__).parents[2]
MODULES = {
    "planning": "tritoncp/planning",
    "masks": "tritoncp/masks",
    "distributed": "tritoncp/distributed",
    "prepare": "tritoncp/call/prepare.py",
    "plan_cache": "tritoncp/call/plan_cache.py",
    "chunking": "tritoncp/chunking",
    "kernels": "kernels",
}
# Left out: operators of cosmic-ray that remove decorators or replace variables at random, and replacements
# that only raise or mostly change nothing, as `==` by `is`, or by `<=`, beside the bound of what is compared:
# `==` is negated. Numbers outside of functions are chosen values: limits and figures of hardware.
ARITHMETIC = """Add_Sub Sub_Add Mul_Add Mul_FloorDiv Div_Mul FloorDiv_Mul FloorDiv_Add Mod_Mul Mod_FloorDiv
    Pow_Mul LShift_RShift RShift_LShift BitOr_BitAnd BitAnd_BitOr BitXor_BitOr"""
COMPARISONS = """Lt_LtE Lt_GtE LtE_Lt LtE_Gt Gt_GtE Gt_LtE GtE_Gt GtE_Lt Eq_NotEq
    NotEq_Eq Is_IsNot IsNot_Is"""
OTHERS = """AddNot NumberReplacer ReplaceTrueWithFalse ReplaceFalseWithTrue ReplaceAndWithOr ReplaceOrWithAnd
    ReplaceBreakWithContinue ReplaceContinueWithBreak ExceptionReplacer ZeroIterationForLoop"""
MATPLOTLIB = ("axes.", "axis.", "figure.")  # calls that place and colour what a picture shows: left out
OPERATORS = [
    *(f"ReplaceBinaryOperator_{pair}" for pair in ARITHMETIC.split()),
    *(f"ReplaceComparisonOperator_{pair}" for pair in COMPARISONS.split()),
    *(f"ReplaceUnaryOperator_Delete_{name}" for name in ("USub", "Invert", "Not")),
    *OTHERS.split(),
]


class Mutant(NamedTuple):
    """A change of one place of a file: the operator's occurrence in it, counted as cosmic-ray does."""

    path: str
    line: int
    column: int
    operator: str
    occurrence: int
    text: str  # the line before the change, without its indentation

    def change(self, source: str) -> tuple[str, str]:
        """Return the changed source of the file, and its changed line without indentation."""
        changed = mutate_code(source, make_operator(self.operator), self.occurrence)
        return changed, changed.splitlines()[self.line - 1].strip()


def make_operator(name: str):  # type: ignore[no-untyped-def]
    return get_operator(f"core/{name}")()


def list_mutants(path: str) -> Iterator[Mutant]:
    """Every mutant of a file, without mutants of annotations, decorators and functions that Triton
    compiles."""
    source = (ROOT / path).read_text()
    left_out, lines = list(spans_left_out(ast.parse(source))), source.splitlines()
    nodes = list(ast_nodes(get_ast(source)))
    for name in OPERATORS:
        operator = make_operator(name)
        positions = (position for node in nodes for position in operator.mutation_positions(node))
        for occurrence, ((line, column), _) in enumerate(positions):
            if not any(start <= (line, column) < end for start, end in left_out):
                yield Mutant(path, line, column, name, occurrence, lines[line - 1].strip())


def spans_left_out(tree: ast.Module) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    chosen = [node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)]
    yield from (((node.lineno, 0), (node.end_lineno or 0, 1 << 20)) for node in chosen)
    for node in ast.walk(tree):
        decorators = getattr(node, "decorator_list", [])
        parts = [getattr(node, "annotation", None), getattr(node, "returns", None), *decorators]
        if any("jit" in ast.unparse(decorator) for decorator in decorators):
            parts.append(node)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            parts.append(node)
        if isinstance(node, ast.keyword) and node.arg == "strict":  # of zip: raises where lengths differ
            parts.append(node.value)
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(MATPLOTLIB):
            parts += [*node.args, *node.keywords]
        for part in filter(None, parts):
            yield (part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset)


def draw_mutants(module: str, count: int, seed: int) -> list[Mutant]:
    """Draw places of a module, and a mutant of each. Places are in the order of a digest of their line: edits
    of other lines leave the draw as it is."""
    root = ROOT / MODULES[module]
    files = [root] if root.is_file() else root.rglob("*.py")
    places: dict[tuple[str, int, int], Mutant] = {}
    for path in sorted(str(file.relative_to(ROOT)) for file in files):
        for mutant in list_mutants(path):
            place = mutant.path, mutant.line, mutant.column
            if place not in places or digest(mutant, seed) < digest(places[place], seed):
                places[place] = mutant
    return sorted(places.values(), key=lambda mutant: digest(mutant, seed))[:count]


def copy_checkout(folder: Path) -> Path:
    """Copy the checkout, with the times of its files, by which Python knows compiled ones."""
    listed = subprocess.check_output(["git", "ls-files", "-zco", "--exclude-standard"], cwd=ROOT)
    for name in map(os.fsdecode, filter(None, listed.split(b"\0"))):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def digest(mutant: Mutant, seed: int) -> str:
    fields = (seed, mutant.path, mutant.text, mutant.column, mutant.operator)
    return hashlib.sha256(repr(fields).encode()).hexdigest()
