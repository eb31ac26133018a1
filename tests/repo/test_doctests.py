"""Runs the examples in docstrings."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
COMPILED = "tritoncp.executor.device"  # its example runs in tests/compiled/test_device.py


def modules_with_examples() -> list[str]:
    files = sorted(p for folder in ("tritoncp", "kernels", "perf") for p in walk(ROOT / folder))
    names = [module_name(path) for path in files if ">>> " in path.read_text()]
    return [name for name in names if name != COMPILED]


def walk(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*.py") if p.name != "__main__.py"]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "tritoncp" else ("tritoncp", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples(name):
    failed, tried = doctest.testmod(importlib.import_module(name), optionflags=FLAGS)
    assert tried > 0, f"{name} has a '>>> ' that is in no docstring"
    assert failed == 0
