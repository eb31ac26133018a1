"""Who may import whom: the table of rooms, held by reading every import statement in the tree.

An import inside a function counts as much as one at the top: what a room never sees, it never sees late.
"""

import ast
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]


class Room(NamedTuple):
    holds: set[str]  # modules, or packages with everything below them
    doors: set[str]  # rooms it may import from, besides itself
    outside: set[str]  # what else, besides the standard library
    never: frozenset[str] = frozenset()  # taken out of `outside`


ALL_BUT_EDGE = {"paper", "mods", "wire", "engine", "oracle", "conductor", "front"}
ROOMS = {
    "paper": Room(
        {
            "inputs",
            "bounds",
            "builder",
            "masks",
            "closed_forms",
            "bitmask",
            "pointwise",
            "runs",
            "varlen",
            "balance",
            "locality",
            "sharding",
            "steps",
            "tables",
            "upload",
            "cost",
            "plan",
            "handles",
            "host",
            "paths",
            "draw",
            "plot",
        },
        {"mods"},
        {"torch", "PIL"},
        frozenset({"torch.distributed"}),
    ),
    "mods": Room({"mods"}, set(), {"torch", "triton", "platformdirs"}, frozenset({"torch.distributed"})),
    "wire": Room({"comm"}, set(), {"torch"}),
    "engine": Room({"kernels"}, set(), {"torch", "triton"}, frozenset({"torch.distributed"})),
    "oracle": Room({"reference", "eager"}, {"paper"}, {"torch"}, frozenset({"torch.distributed"})),
    "conductor": Room(
        {"schedules"}, {"paper", "wire", "engine"}, {"torch"}, frozenset({"torch.distributed"})
    ),
    "front": Room(
        {
            "agreement",
            "autograd",
            "building",
            "captured",
            "carried",
            "checked_json",
            "compiled",
            "packed",
            "parallel",
            "api",
            "engines",
            "sinks",
            "plan_cache",
            "signatures",
            "sources",
            "integrations",
            "tuned",
            "tuning",
            "world",
        },
        ALL_BUT_EDGE,
        {"torch", "filelock", "platformdirs", "rich"},
    ),
    "edge": Room(
        {
            "",
            "__main__",
            "cli",
            "demo",
            "doctor",
            "expressions",
            "inspect",
            "machine_code",
            "jobs",
            "offline",
            "planned",
            "self_check",
            "tune",
        },
        ALL_BUT_EDGE | {"perf"},
        {"torch", "triton", "click", "rich", "platformdirs", "PIL"},
    ),
    "perf": Room(
        {"perf"},
        ALL_BUT_EDGE,
        {"torch", "triton", "click", "rich", "bokeh", "matplotlib", "numpy", "pytest", "ruptures", "scipy"},
    ),
}


def modules() -> dict[str, Path]:
    """Every module of the package by the name after `tritoncp.`; "" is the package itself."""
    imports = {}
    for base, folder in ((ROOT / "tritoncp", "tritoncp"), (ROOT, "kernels"), (ROOT, "perf")):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(base).with_suffix("").parts
            imports[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return imports


def room_of(module: str) -> str:
    rooms = [name for name, room in ROOMS.items() if {module, module.split(".")[0]} & room.holds]
    assert rooms, f"tritoncp.{module} is in no room: say in tests/test_imports.py what it may import"
    return rooms[0]


def imports(module: str, path: Path) -> set[str]:
    """Full names of everything that is imported; `from a import b` counts as a.b."""
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
    room = room_of(module)
    return sorted(name for name in names if not allowed(room, name, modules))


def allowed(room: str, name: str, modules: set[str]) -> bool:
    if name.split(".")[0] == "tritoncp":
        inner = name.removeprefix("tritoncp").lstrip(".")
        while inner and inner not in modules:  # from tritoncp.plan import Plan: the module is what counts
            inner = inner.rpartition(".")[0]
        return not inner or room_of(inner) in ROOMS[room].doors | {room}
    if name.split(".")[0] in sys.stdlib_module_names:
        return True
    return reaches(name, ROOMS[room].outside) and not reaches(name, ROOMS[room].never)


@pytest.mark.parametrize("module", sorted(modules()))
def test_a_room_imports_only_through_its_doors(module):
    present = modules()
    wrong = forbidden(module, imports(module, present[module]), set(present))
    assert not wrong, f"tritoncp.{module or '__init__'} ({room_of(module)}) may not import {', '.join(wrong)}"


def test_the_table_can_say_no():
    present = {"plan", "mods.trace", "comm", "kernels.forward", "api", "perf.run"}
    assert forbidden("plan", {"triton.language", "torch.distributed.init_process_group"}, present)
    assert forbidden("plan", {"tritoncp.comm.Group"}, present) == ["tritoncp.comm.Group"]
    assert forbidden("mods.trace", {"tritoncp.plan.Plan"}, present)
    assert forbidden("kernels.forward", {"tritoncp.plan.Plan", "kernels.tiles", "tests.x"}, present)
    assert forbidden("api", {"tritoncp.perf.run"}, present)
    assert not forbidden("plan", {"torch.Tensor", "math", "tritoncp.plan.Plan"}, present)


def test_relative_imports_are_resolved(tmp_path):
    inside = tmp_path / "emit.py"
    inside.write_text("from . import cache\nfrom .. import comm\nfrom ..plan import Plan\n")
    assert imports("mods.emit", inside) == {"tritoncp.mods.cache", "tritoncp.comm", "tritoncp.plan.Plan"}


def loaded_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_importing_the_package_loads_neither_triton_nor_torch():
    assert not {"triton", "torch"} & loaded_after("import tritoncp")


def test_masks_and_plans_are_made_without_triton():
    names = "causal, create_block_mask, sliding_window"
    assert not {"triton", "PIL"} & loaded_after(f"from tritoncp import {names}; import tritoncp.plan")


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


def test_an_unknown_name_lists_the_known_ones():
    import tritoncp

    with pytest.raises(AttributeError, match=r"'tritoncp' has no attribute 'sharding_'.*create_block_mask"):
        tritoncp.sharding_  # noqa: B018
