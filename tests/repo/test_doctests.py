"""Runs the examples in docstrings."""

import doctest
import importlib

import pytest

from tests.repo.test_imports import modules

pytestmark = pytest.mark.usefixtures("cpu_engine")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
COMPILED = "tritoncp.executor.device"  # its example runs in tests/executor/compiled/test_device.py

NAMES = {f"tritoncp.{name}".strip(".") for name, path in modules().items() if ">>> " in path.read_text()}


@pytest.mark.parametrize("name", sorted(NAMES - {COMPILED}))
def test_docstring_examples_run(name):
    failed, tried = doctest.testmod(importlib.import_module(name), optionflags=FLAGS)
    assert tried > 0, f"{name} has a '>>> ' that is in no docstring"
    assert failed == 0
