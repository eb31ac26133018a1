"""The architecture page names files, modules and functions that exist, and the layers of the import table."""

import re
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
