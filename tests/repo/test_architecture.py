"""The architecture page names files, modules and functions that exist, and the layers of the import table."""

import pkgutil
import re
from pathlib import Path

from tests.repo.test_imports import LAYERS, modules

ROOT = Path(__file__).parents[2]
ARCHITECTURE = "docs/architecture.md"
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
    """Whether a dotted name is a module of the package, or an attribute of one."""
    try:
        pkgutil.resolve_name("tritoncp." + name.removeprefix("tritoncp."))
    except (ImportError, AttributeError):
        return False
    return True


def rows(text: str, header: str) -> dict[str, list[str]]:
    """Read a table of a page: the cells of each row, by its first cell, which is a code span."""
    _, _, table = text.partition(f"| {header} |")
    lines = table.split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first.strip("`"): rest for first, *rest in cells}


def test_the_page_names_what_exists():
    assert not missing_names((ROOT / ARCHITECTURE).read_text())


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


def test_main_modules_belong_to_their_layer():
    for layer, (_, main, _) in rows((ROOT / ARCHITECTURE).read_text(), "layer").items():
        for module in re.findall(r"`([\w.]+)`", main):
            names = {module, module.split(".")[0]}
            assert names & LAYERS[layer].holds, f"{module} is not in layer {layer}"
