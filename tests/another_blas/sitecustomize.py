"""Import ``another_blas`` right after torch, in processes that tests start: Python runs this file first where
PYTHONPATH names its folder."""

import atexit
import importlib.machinery
import importlib.util
import os
import sys
import time
from pathlib import Path
from types import ModuleType


class AfterTorch:
    """Find torch by the other finders, and extend its import."""

    @classmethod
    def find_spec(cls, name: str, *rest: object) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(cls)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                sys.path.insert(0, str(Path(__file__).parent))  # again: workers of pytest-xdist replace it
                importlib.import_module("another_blas")

            spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, AfterTorch)

if "RANK" in os.environ:  # of torchrun
    # A thread of gloo that still frees tensors aborts the process while Python exits (torch 2.13).
    atexit.register(time.sleep, 0.3)
