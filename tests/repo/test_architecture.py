"""The architecture page names files, modules and functions that exist, and the layers of the import table; in
the packages that a call passes through, one public name is one function or class."""

import ast
import re
from collections import defaultdict
from pathlib import Path

from tests.repo.test_imports import LAYERS, modules

ROOT = Path(__file__).parents[2]
ARCHITECTURE = "docs/architecture.md"


def rows(text: str, header: str) -> dict[str, list[str]]:
    """Read a table of a page: the cells of each row, by its first cell, which is a code span."""
    _, _, table = text.partition(f"| {header} |")
    lines = table.split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first.strip("`"): rest for first, *rest in cells}


def test_the_page_has_the_layers_of_the_import_table():
    layers = rows((ROOT / ARCHITECTURE).read_text(), "layer")
    assert {layer: set(re.findall(r"`(\w+)`", cells[-1])) for layer, cells in layers.items()} == {
        layer: row.imports - {layer} for layer, row in LAYERS.items()
    }


def test_every_package_has_a_row():
    text = (ROOT / ARCHITECTURE).read_text()
    named = rows(text, "layer").keys() | rows(text, "edge").keys()
    present = {name.split(".")[0] for name in modules() if "." in name}
    assert present <= named
    private = {"", "__main__"}  # the package itself
    assert rows(text, "edge").keys() == LAYERS["edge"].holds - private


PATH_OF_A_CALL = ("api", "ops", "distributed", "planning", "masks", "core", "chunking", "integrations")
INTERFACES = {"forward", "backward"}  # of each schedule, and of the pass that runs it
PUBLIC = {"create_block_mask", "flex_attention"}  # names that users import from two modules


def test_one_public_name_is_one_function_or_class():
    homes = defaultdict(set)
    for package in PATH_OF_A_CALL:
        for path in (ROOT / "tritoncp" / package).rglob("*.py"):
            for item in ast.parse(path.read_text()).body:
                if isinstance(item, ast.FunctionDef | ast.ClassDef) and not item.name.startswith("_"):
                    homes[item.name].add(str(path.relative_to(ROOT)))
    repeated = {name: sorted(files) for name, files in homes.items() if len(files) > 1}
    assert repeated.keys() <= INTERFACES | PUBLIC, repeated
    assert len(homes) > 500
