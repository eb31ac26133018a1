"""Every cache of the process on the path of a call is listed, with its key and bound, in one docstring."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tritoncp.ops import executable

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "api",
    "core",
    "distributed",
    "frontend",
    "kernels",
    "masks",
    "mods",
    "ops",
    "planning",
    "reference",
)
CONTAINERS = {
    *("BoundedCache", "TensorCache", "OwnedState", "OrderedDict", "defaultdict", "dict", "list", "set"),
    *("WeakKeyDictionary", "WeakValueDictionary", "WeakSet"),
}
DECORATORS = {"cache", "lru_cache"}
# Named so: what was said once, attempts to tune, and counts are no caches.
NO_CACHES = re.compile(r"_?(WARNED\w*|ATTEMPTS|COUNTS)")


def name_of(node: ast.expr) -> str:
    """Return the last name of a function that is called, as `lru_cache` of `functools.lru_cache(256)`."""
    while isinstance(node, ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def is_empty_container(node: ast.expr | None) -> bool:
    """Return whether a value of a module is a container that is filled later."""
    if isinstance(node, ast.Call):
        return name_of(node) in CONTAINERS and (
            name_of(node)[0].isupper() or not (node.args or node.keywords)
        )
    return (isinstance(node, ast.Dict) and not node.keys) or (isinstance(node, ast.List) and not node.elts)


def caches(tree: ast.Module) -> Iterator[str]:
    """Yield the names of the caches that a module holds: containers that are empty when it is loaded, and
    functions that remember their results."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if is_empty_container(getattr(node, "value", None)):
            yield from (target.id for target in targets if isinstance(target, ast.Name))
    for inner in ast.walk(tree):
        if isinstance(inner, ast.FunctionDef) and DECORATORS & set(map(name_of, inner.decorator_list)):
            yield inner.name


def present_caches() -> set[str]:
    qualified = set()
    for package in PACKAGES:
        base = ROOT if package == "kernels" else ROOT / "tritoncp"
        for path in (base / package).rglob("*.py"):
            module = ".".join(path.relative_to(base).with_suffix("").parts)
            names = caches(ast.parse(path.read_text()))
            qualified |= {f"{module}.{name}" for name in names if not NO_CACHES.fullmatch(name)}
    return qualified


def test_every_cache_is_listed_with_its_key_and_bound():
    lines = re.findall(r"^    (\w+\.[\w., ]+):", executable.__doc__ or "", re.MULTILINE)
    listed = {name for line in lines for name in line.split(", ")} - {"planning.derived"}  # in the plan
    present = present_caches()
    assert present == listed, (
        f"say in the docstring of tritoncp/ops/executable.py what bounds {sorted(present - listed)}, and "
        f"remove {sorted(listed - present)}"
    )


def test_caches_of_all_forms_are_seen():
    code = """
A = {}
B: dict[str, int] = dict()
C = OwnedState(list)
D = weakref.WeakSet()
E = [1]
F = dict(a=1)
@functools.lru_cache(4)
def f(): ...
@cache
def g(): ...
"""
    assert set(caches(ast.parse(code))) == {"A", "B", "C", "D", "f", "g"}
