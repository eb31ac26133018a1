"""Pages of `docs/` and the performance notes name files, modules and functions that exist, and the layers of
the import table."""

import ast
import re
from pathlib import Path

import pytest

from tests.repo.test_imports import LAYERS, modules
from tritoncp import __all__ as public_names

ROOT = Path(__file__).parents[2]
ARCHITECTURE = "docs/architecture.md"
DECISIONS = sorted(f"docs/decisions/{path.name}" for path in (ROOT / "docs/decisions").glob("*.md"))
PAGES = [ARCHITECTURE, "docs/glossary.md", "perf/NOTES.md", *DECISIONS]
FOREIGN = {"torch", "triton", "ProcessGroupNCCL"}  # first words of dotted names that are not the package's


def spans(text: str) -> list[str]:
    """Find the code spans of a page, outside its fenced blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def missing_names(text: str) -> list[str]:
    """Find paths and dotted names in code spans that the checkout does not have. A dotted name is relative to
    `tritoncp`, or begins with it; names in calls and file names count, file suffixes do not."""
    missing = []
    for span in spans(text):
        path = re.fullmatch(r"[\w.-]+/[\w./-]*|[\w-]+\.(?:py|md|toml|json)", span)
        name = re.match(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+(?=$|\()", span)
        if path:
            missing += [] if (ROOT / span).exists() else [span]
        elif name and name[0].split(".")[0] not in FOREIGN and not is_name(name[0]):
            missing.append(name[0])
    return missing


def is_name(name: str) -> bool:
    """Return whether a dotted name is a module of the package, or is defined in a module or class of it."""
    present, parts = modules(), name.removeprefix("tritoncp.").split(".")
    if name.startswith("tritoncp.") and parts[0] in public_names:
        return len(parts) == 1
    for count in range(len(parts), 0, -1):
        if (path := present.get(".".join(parts[:count]))) is not None:
            return is_defined(ast.parse(path.read_text()).body, parts[count:])
    return ".".join(parts) in packages(present)


def packages(present: dict[str, Path]) -> set[str]:
    """List the packages of the table of modules, those without an `__init__.py` too."""
    return {name.rpartition(".")[0] for name in present}


def is_defined(body: list[ast.stmt], parts: list[str]) -> bool:
    """Return whether statements define the nested name that parts are."""
    if not parts:
        return True
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == parts[0]:
            return is_defined(node.body if isinstance(node, ast.ClassDef) else [], parts[1:])
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == parts[0] for target in targets):
            return len(parts) == 1
    return False


def rows(text: str, header: str) -> dict[str, list[str]]:
    """Read a table of a page: the cells of each row, by its first cell, which is a code span."""
    _, _, table = text.partition(f"| {header} |")
    lines = table.split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first.strip("`"): rest for first, *rest in cells}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_what_exists(page):
    assert not missing_names((ROOT / page).read_text())


def test_a_wrong_name_is_reported():
    page = (
        "`tritoncp/planning/plans.py` `planning.plan.Plans` `planning.plan.Plan.tables.x` `plan.build` "
        "`ops.autograd.forward(q)` `planning.build.build(mask)` `tritoncp.flex_attentions` "
        "`tritoncp.planning` `tritoncp.make_plan(mask, mesh)` `kernels.forward.forward_kernel` "
        "`planning` `pyproject.toml`"
    )
    assert missing_names(page) == [
        "tritoncp/planning/plans.py",
        "planning.plan.Plans",
        "planning.plan.Plan.tables.x",
        "plan.build",
        "tritoncp.flex_attentions",
    ]


def test_the_page_has_the_layers_of_the_import_table():
    layers = rows((ROOT / ARCHITECTURE).read_text(), "layer")
    assert {layer: set(re.findall(r"`(\w+)`", cells[-1])) for layer, cells in layers.items()} == {
        layer: row.imports - {layer} for layer, row in LAYERS.items()
    }


def test_every_package_has_a_row():
    text = (ROOT / ARCHITECTURE).read_text()
    named = rows(text, "layer").keys() | rows(text, "edge").keys()
    present = {name.split(".")[0] for name in packages(modules())} - {""}
    assert present <= named
    private = {"", "__main__"}  # the package itself
    assert rows(text, "edge").keys() == LAYERS["edge"].holds - private


def test_main_modules_belong_to_their_layer():
    for layer, (_, main, _) in rows((ROOT / ARCHITECTURE).read_text(), "layer").items():
        for module in re.findall(r"`([\w.]+)`", main):
            names = {module, module.split(".")[0]}
            assert names & LAYERS[layer].holds, f"{module} is not in layer {layer}"


def test_moved_modules_of_the_changelog_exist():
    moved = rows((ROOT / "CHANGELOG.md").read_text(), "old")
    present = modules()
    news = {cells[0].strip("`").removeprefix("tritoncp.").removesuffix(".*") for cells in moved.values()}
    assert len(moved) > 50
    assert news <= present.keys(), f"not modules: {news - present.keys()}"
