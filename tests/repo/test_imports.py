"""The tables of docs/architecture.md, compared with every import statement in the tree; no module
imports itself through others.

Imports inside functions count like imports at the top of a module. The package's root, which gives users
public names from every layer, is imported by nothing inside the package: `import tritoncp` and `from tritoncp
import causal` are forbidden, `from tritoncp import mods` imports the module `tritoncp.mods`.
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from torch.nn.attention import flex_attention

import tritoncp
from tests.command_process import ROOT, run_code


def rows(header: str) -> dict[str, list[str]]:
    """Read a table of docs/architecture.md: the cells of each row, by its first cell, a code span."""
    _, _, table = (ROOT / "docs/architecture.md").read_text().partition(f"| {header} |")
    lines = table.split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first.strip("`"): rest for first, *rest in cells}


# Layers that each may import from, besides itself: a package with everything below it, or the edges above.
LAYERS = {layer: {layer, *re.findall(r"`(\w+)`", cells[-1])} for layer, cells in rows("layer").items()}
EDGES = {"", "__main__", *rows("edge")}
OUTSIDE = {  # packages that a layer may import, besides the standard library
    "core": {"torch"},
    "mods": {"torch", "triton"},
    "kernels": {"torch", "triton"},
    "masks": {"torch", "rich"},
    "planning": {"torch", "matplotlib"},
    "distributed": {"torch"},
    "report": {"torch", "matplotlib"},
    "reference": {"torch"},
    "executor": {"torch", "triton", "numpy", "networkx"},
    "cpu": {"torch"},
    "selection": {"torch", "triton"},
    "measured_tiles": {"torch", "filelock", "platformdirs"},
    "graph": {"torch"},
    "call": {"torch"},
    "api": {"torch", "rich"},
    "chunking": {"torch", "sympy"},
    "command_base": {"click", "rich"},
    "perf": {"torch", "triton", "click", "rich", "bokeh", "jinja2", "numpy", "scipy"},
    "edge": {"torch", "triton", "click", "rich", "platformdirs", "PIL", "filelock", "einops", "transformers",
             "torchtitan", "accelerate", "trl"},
}  # fmt: skip
KNOW_RANKS = {
    "distributed",
    "measured_tiles",
    "graph",
    "call",
    "api",
    "chunking",
    "perf",
    "edge",
}  # these may import torch.distributed


def modules() -> dict[str, Path]:
    """List every module of the package by the name after `tritoncp.`; "" is the package itself. Files of
    perf/benchmarks are pytest's, and no part of it."""
    imports = {}
    for base, folder in ((ROOT / "tritoncp", "tritoncp"), (ROOT, "kernels"), (ROOT, "perf")):
        for path in (ROOT / folder).rglob("*.py"):
            if path.parent.name == "benchmarks":
                continue
            parts = path.relative_to(base).with_suffix("").parts
            imports[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return imports


def layer_of(module: str) -> str:
    package = module.split(".")[0]
    layer = "edge" if package in EDGES else "core" if package == "_version" else package
    assert layer in LAYERS, (
        f"tritoncp.{module} has no row in docs/architecture.md, which says what it may import"
    )
    return layer


@cache
def parse(path: Path) -> ast.Module:
    """Parse a file, whose tree no test changes."""
    return ast.parse(path.read_text())


@cache
def imports(module: str, path: Path, with_types: bool = True) -> set[str]:
    """Collect the full names of all imports; `from a import b` counts as a.b. with_types: also under
    TYPE_CHECKING, which annotations alone need"""
    package = ["tritoncp", *module.split(".")] if module else ["tritoncp"]
    package = package if path.name == "__init__.py" else package[:-1]
    names, body = set(), parse(path).body
    if not with_types:
        tests = [ast.unparse(node.test) if isinstance(node, ast.If) else "" for node in body]
        body = [node for node, test in zip(body, tests) if test != "TYPE_CHECKING"]
    for node in statements(body):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            names |= {f"{origin}.{alias.name}" for alias in node.names}
    return names


def statements(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield statements and the statements in them: expressions, which are most of a tree, have none."""
    for node in body:
        yield node
        if isinstance(node, (ast.stmt, ast.excepthandler, ast.match_case)):
            yield from statements(ast.iter_child_nodes(node))


def reaches(name: str, prefixes: set[str] | frozenset[str]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def forbidden(module: str, names: set[str], modules: set[str]) -> list[str]:
    layer = layer_of(module)
    return sorted(name for name in names if imports_root(name, modules) or not allowed(layer, name, modules))


def imports_root(name: str, modules: set[str]) -> bool:
    """Whether an imported name is the package's root, or a name of the root that is no module."""
    package, _, inner = name.partition(".")
    first = inner.split(".")[0]
    return package == "tritoncp" and not any(module.split(".")[0] == first for module in modules if module)


def inner_module(name: str, modules: set[str]) -> str:
    """Return the module that `from tritoncp.planning.plan import Plan` loads: planning.plan."""
    inner = name.removeprefix("tritoncp").lstrip(".")
    while inner and inner not in modules:
        inner = inner.rpartition(".")[0]
    return inner


def allowed(layer: str, name: str, modules: set[str]) -> bool:
    if name.split(".")[0] == "tritoncp":
        inner = inner_module(name, modules)
        return not inner or layer_of(inner) in LAYERS[layer]
    if name.split(".")[0] in sys.stdlib_module_names:
        return True
    has_ranks = layer in KNOW_RANKS or not reaches(name, {"torch.distributed"})
    return reaches(name, OUTSIDE[layer]) and has_ranks


def test_a_layer_imports_only_what_the_table_allows():
    present = modules()
    packages = {module.split(".")[0] for module in present}
    assert (LAYERS.keys() - {"edge"}) | EDGES == packages - {"_version"}, (
        "a row for each package, and no other"
    )
    for module, path in present.items():
        wrong = forbidden(module, imports(module, path), set(present))
        assert not wrong, (
            f"tritoncp.{module or '__init__'} ({layer_of(module)}) may not import {', '.join(wrong)}"
        )


def import_graph() -> dict[str, set[str]]:
    """Map each module to the modules of the package that it imports.

    Imports inside functions count, those under TYPE_CHECKING do not. A package's `__init__` counts where it
    is named, not where Python runs it before one of its modules.
    """
    present = modules()
    graph = {}
    for module, path in present.items():
        names = {name for name in imports(module, path, False) if name.split(".")[0] == "tritoncp"}
        graph[module] = {inner_module(name, set(present)) for name in names} - {module}
    return graph


def import_circle(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules of one circle, each before one that it imports; the first is also the last."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1][::-1]
    return []


def test_no_module_imports_itself_through_others():
    circle = import_circle(import_graph())
    assert not circle, "circle of imports: " + " -> ".join(circle)


HEAVY = {"scipy", "bokeh"}
BENCHMARK = "tritoncp.perf.run, tritoncp.perf.suite.measure, tritoncp.perf.suite.host_cases"


@pytest.mark.parametrize(
    ("modules", "never"),
    [
        ("tritoncp", {"torch", "triton"}),
        ("tritoncp.cli", {"torch", "triton"}),
        ("tritoncp.perf.cli", {"torch", "triton", "numpy"} | HEAVY),
        pytest.param(BENCHMARK, HEAVY, marks=pytest.mark.long),
        pytest.param("tritoncp.perf.dashboard.page", {"torch", "triton"}, marks=pytest.mark.long),
    ],
)
def test_modules_load_only_the_packages_that_they_need(modules, never):
    assert not never & set(run_code(f"import sys, {modules}; print(*sys.modules)").split())


PLANS = """
import sys, torch, torch.nn.attention.flex_attention  # which loads sympy since torch 2.15
at_import = set(sys.modules)
import tritoncp
ids = torch.arange(1024) // 100
gaps = lambda b, h, q, kv: (q >= kv) & (kv % 7 > 2)
documents = lambda b, h, q, kv: (q >= kv) & (ids[q] == ids[kv])

def plan_and_shard(mask):
    plan = tritoncp.make_plan(mask, world_size=4, rank=1)
    shard = tritoncp.shard(torch.arange(1024)[None], plan, dim=1)
    assert torch.equal(shard, tritoncp.positions(plan)), plan
    plan.explain(), plan.work

for mod in (tritoncp.causal(), gaps, documents):
    plan_and_shard(tritoncp.create_block_mask(mod, 1, 1, 1024, 1024))
names = set(sys.modules) - at_import
print(*names, *(name.partition(".")[0] for name in names))
"""
WITHOUT_TRITON = """
assert "triton" not in sys.modules, "the masks and plans above loaded it"
sys.modules["triton"] = None  # any import of it fails now, as where it is not installed
from torch.nn.attention.flex_attention import create_block_mask
from tritoncp.cli import main
tritoncp.softcap(), tritoncp.alibi(4)
plan_and_shard(tritoncp.create_block_mask(lambda b, h, q, kv: gaps(b, h, q, kv) | (kv < 9), 1, 1, 1024, 1024))
plan_and_shard(create_block_mask(gaps, 1, 1, 1024, 1024, device="cpu"))
for mask in "causal", "mask_of_a_user:near":
    main(["plan", "--seq-len", "64K", "--world-size", "4", "--mask", mask], standalone_mode=False)
"""


@pytest.mark.long
def test_first_masks_and_plans_load_no_heavy_package_and_no_plan_needs_triton(tmp_path):
    (tmp_path / "mask_of_a_user.py").write_text("def near(b, h, q, kv):\n    return abs(q - kv) < 1000\n")
    path = f"import sys; sys.path.insert(0, {str(ROOT)!r})"
    first, *output = run_code(f"{path}\n{PLANS}\n{WITHOUT_TRITON}", tmp_path).splitlines()
    heavy = {"torch._dynamo", "torch._inductor", "triton", "sympy", "matplotlib", "rich", "networkx", "click"}
    assert not heavy & {*first.split()} and "tritoncp" in first.split()
    assert "\n".join(output).count("4 ranks") >= 2, output


BARE = """
import torch, tritoncp, tests.conftest, tests.kernels.test_cases, tests.kernels.test_varlen, tritoncp.perf.run
import tritoncp.self_check.cases, tritoncp.self_check.run
from tritoncp.cli import main
x = torch.randn(1, 1, 32, 16, requires_grad=True)
tritoncp.flex_attention(x, x, x, tritoncp.causal()).sum().backward()
main(["check", "--help"])
"""


@pytest.mark.long
def test_kernels_checks_and_measurements_run_where_einops_is_not_installed():
    run_code(f"import sys; sys.modules['einops'] = None\n{BARE}", TRITON_INTERPRET="1")


def test_public_names_resolve_and_type_checkers_see_the_same():
    body = ast.parse((ROOT / "tritoncp" / "__init__.py").read_text()).body
    blocks = {ast.unparse(block.test): block.body for block in body if isinstance(block, ast.If)}
    typed = {
        (alias.name, node.module.startswith("torch."))
        for node in blocks["TYPE_CHECKING"]
        for alias in node.names
    }
    # A type checker that sees a module's __getattr__ takes every misspelled name.
    assert [node.name for node in blocks["not TYPE_CHECKING"]] == ["__getattr__"]
    assert "__getattr__" not in {node.name for node in body if isinstance(node, ast.FunctionDef)}
    assert {name for name, is_of_torch in typed if not is_of_torch} == set(tritoncp.__all__)
    assert set(tritoncp.__all__) <= set(dir(tritoncp))
    for name, is_of_torch in typed:  # torch's names are for import lines that name tritoncp instead of torch
        value = getattr(tritoncp, name)
        assert value is not None and (not is_of_torch or value is getattr(flex_attention, name))
    assert {name for name, _ in typed} >= set(
        flex_attention.__all__
    )  # a replaced import line takes all of them


def test_an_unknown_name_lists_the_available_ones():
    with pytest.raises(AttributeError, match=r"'tritoncp' has no attribute 'sharding_'.*create_block_mask"):
        tritoncp.sharding_  # noqa: B018


def test_another_library_is_imported_by_its_adapter_alone():
    for module, path in modules().items():
        names = imports(module, path)
        for library in ("accelerate", "torchtitan", "transformers", "trl"):
            adapters = [f"integrations.{library}"]
            if library in ("accelerate", "transformers"):  # whose classes TRL's trainers are made of
                adapters.append("integrations.trl")
            if any(reaches(name, {library}) for name in names):
                assert module.startswith(tuple(adapters)), f"tritoncp.{module} imports {library}"


PATH_OF_A_CALL = (
    "api",
    "call",
    "graph",
    "distributed",
    "planning",
    "masks",
    "core",
    "chunking",
    "integrations",
)
INTERFACES = {"forward", "backward"}  # of each schedule, and of the pass that runs it
PUBLIC = {"create_block_mask", "flex_attention"}  # names that users import from two modules


def test_a_name_stands_for_one_class_or_public_function():
    """Classes of tritoncp with its kernels and perf; functions of packages that a call passes through."""
    homes: dict[str, set[str]] = {}
    for module, path in modules().items():
        kinds = (ast.ClassDef, ast.FunctionDef) if module.split(".")[0] in PATH_OF_A_CALL else (ast.ClassDef,)
        for node in parse(path).body:
            if isinstance(node, ast.ClassDef) or (isinstance(node, kinds) and node.name[0] != "_"):
                homes.setdefault(node.name, set()).add(module)
    repeated = {name: places for name, places in homes.items() if len(places) > 1}
    assert repeated.keys() <= INTERFACES | PUBLIC, repeated
