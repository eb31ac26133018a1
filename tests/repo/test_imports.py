"""The table of layers and their allowed imports, compared with every import statement in the tree.

Imports inside functions count like imports at the top of a module.
"""

import ast
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]


class Layer(NamedTuple):
    """A row of the table: a package of the spine, or the edges above it.

    holds:   packages with everything below them, or single modules, which count first
    imports: layers that it may import from, besides itself
    outside: packages that it may import, besides the standard library
    never:   modules of ``outside`` that it may not import
    """

    holds: set[str]
    imports: set[str]
    outside: set[str]
    never: frozenset[str] = frozenset()  # exceptions from `outside`


NO_RANKS = frozenset({"torch.distributed"})
SPINE = {"core", "mods", "masks", "planning", "kernels", "distributed", "reference", "ops", "frontend", "api"}
LAYERS = {
    "core": Layer({"core", "_version"}, set(), {"torch"}, NO_RANKS),
    "mods": Layer({"mods"}, {"core"}, {"torch", "triton", "platformdirs"}, NO_RANKS),
    "kernels": Layer({"kernels"}, set(), {"torch", "triton"}, NO_RANKS),
    "masks": Layer({"masks"}, {"core", "mods", "kernels"}, {"torch", "rich"}, NO_RANKS),
    "planning": Layer({"planning"}, {"core", "mods", "masks"}, {"torch", "PIL"}, NO_RANKS),
    "distributed": Layer({"distributed"}, {"core", "mods", "masks", "planning", "kernels"}, {"torch"}),
    "reference": Layer({"reference"}, {"core", "masks", "planning"}, {"torch"}, NO_RANKS),
    "ops": Layer({"ops"}, SPINE - {"frontend", "api"}, {"torch", "filelock", "platformdirs", "rich"}),
    "frontend": Layer({"frontend"}, SPINE - {"api"}, {"torch", "rich"}),
    "api": Layer({"api"}, SPINE, {"torch"}),
    "perf": Layer(
        {"perf"},
        SPINE,
        {"torch", "triton", "click", "rich", "bokeh", "matplotlib", "numpy", "pytest", "ruptures", "scipy"},
    ),
    "edge": Layer(
        {"", "__main__", "analysis", "cli", "demo", "doctor", "planning.command", "self_check", "tuning"},
        SPINE | {"perf"},
        {"torch", "triton", "click", "rich", "platformdirs", "PIL", "filelock"},
    ),
}  # fmt: skip


def modules() -> dict[str, Path]:
    """List every module of the package by the name after `tritoncp.`; "" is the package itself."""
    imports = {}
    for base, folder in ((ROOT / "tritoncp", "tritoncp"), (ROOT, "kernels"), (ROOT, "perf")):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(base).with_suffix("").parts
            imports[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return imports


def layer_of(module: str) -> str:
    for name in (module, module.split(".")[0]):
        for layer, row in LAYERS.items():
            if name in row.holds:
                return layer
    raise AssertionError(
        f"tritoncp.{module} is in no layer: say in tests/repo/test_imports.py what it may import"
    )


def imports(module: str, path: Path) -> set[str]:
    """Collect the full names of all imports; `from a import b` counts as a.b."""
    package = ["tritoncp", *module.split(".")] if module else ["tritoncp"]
    package = package if path.name == "__init__.py" else package[:-1]
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            names |= {f"{origin}.{alias.name}" for alias in node.names}
    return names


def reaches(name: str, prefixes: set[str] | frozenset[str]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def forbidden(module: str, names: set[str], modules: set[str]) -> list[str]:
    layer = layer_of(module)
    return sorted(name for name in names if not allowed(layer, name, modules))


def allowed(layer: str, name: str, modules: set[str]) -> bool:
    if name.split(".")[0] == "tritoncp":
        inner = name.removeprefix("tritoncp").lstrip(".")
        while inner and inner not in modules:  # from tritoncp.planning.plan import Plan: the module counts
            inner = inner.rpartition(".")[0]
        return not inner or layer_of(inner) in LAYERS[layer].imports | {layer}
    if name.split(".")[0] in sys.stdlib_module_names:
        return True
    return reaches(name, LAYERS[layer].outside) and not reaches(name, LAYERS[layer].never)


@pytest.mark.parametrize("module", sorted(modules()))
def test_a_layer_imports_only_what_the_table_allows(module):
    present = modules()
    wrong = forbidden(module, imports(module, present[module]), set(present))
    assert not wrong, (
        f"tritoncp.{module or '__init__'} ({layer_of(module)}) may not import {', '.join(wrong)}"
    )


def test_the_table_forbids_some_imports():
    modules_of_package = {
        "planning.plan",
        "mods.translate.trace",
        "distributed.collectives",
        "kernels.forward",
        "api.attention",
        "perf.run",
    }
    plan, wire = "planning.plan", "tritoncp.distributed.collectives.Wait"
    assert forbidden(plan, {"triton.language", "torch.distributed.init_process_group"}, modules_of_package)
    assert forbidden(plan, {wire}, modules_of_package) == [wire]
    assert forbidden("mods.translate.trace", {"tritoncp.planning.plan.Plan"}, modules_of_package)
    assert forbidden(
        "kernels.forward", {"tritoncp.planning.plan.Plan", "kernels.tiles", "tests.x"}, modules_of_package
    )
    assert forbidden("api.attention", {"tritoncp.perf.run"}, modules_of_package)
    assert not forbidden(plan, {"torch.Tensor", "math", "tritoncp.planning.plan.Plan"}, modules_of_package)


def test_relative_imports_are_resolved(tmp_path):
    inside = tmp_path / "emit.py"
    inside.write_text("from . import cache\nfrom .. import comm\nfrom ..plan import Plan\n")
    assert imports("mods.emit", inside) == {
        "tritoncp.mods.cache",
        "tritoncp.comm",
        "tritoncp.plan.Plan",
    }


def loaded_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_importing_the_package_loads_neither_triton_nor_torch():
    assert not {"triton", "torch"} & loaded_after("import tritoncp")


def test_masks_and_plans_are_made_without_triton():
    names = "causal, create_block_mask, sliding_window"
    assert not {"triton", "PIL"} & loaded_after(
        f"from tritoncp import {names}; import tritoncp.planning.plan"
    )


def test_the_command_line_shows_its_help_without_torch():
    assert not {"triton", "torch"} & loaded_after("import tritoncp.cli")


def test_public_names_resolve_and_type_checkers_see_the_same():
    import tritoncp

    typed = {
        alias.name
        for block in ast.parse((ROOT / "tritoncp" / "__init__.py").read_text()).body
        if isinstance(block, ast.If)
        for node in block.body
        for alias in node.names
    }
    assert typed == set(tritoncp.__all__) <= set(dir(tritoncp))
    for name in tritoncp.__all__:
        assert getattr(tritoncp, name) is not None


def test_an_unknown_name_lists_the_available_ones():
    import tritoncp

    with pytest.raises(AttributeError, match=r"'tritoncp' has no attribute 'sharding_'.*create_block_mask"):
        tritoncp.sharding_  # noqa: B018
