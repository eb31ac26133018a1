"""Emitted source as modules in memory.

A module is compiled from the text that was emitted; no file is read. `linecache` holds the text, which is
where tracebacks, debuggers, `inspect` and Triton read it. Profilers read files: with TRITONCP_CACHE_DIR a
copy of each source is written there, which is never executed. A module is freed with the last function
defined in it.
"""

from __future__ import annotations

import hashlib
import linecache
import os
import sys
import threading
import warnings
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

from tritoncp.core.environment import CACHE_DIR

_LOCK = threading.RLock()
_MODULES: weakref.WeakValueDictionary[str, ModuleType] = weakref.WeakValueDictionary()  # by digest


def digest_of(source: str) -> str:
    """Return the SHA-256 of a source, as 64 hexadecimal digits."""
    return hashlib.sha256(source.encode()).hexdigest()


def load(source: str) -> ModuleType:
    """Return the module of a source: the same one as long as a function of it is alive."""
    digest = digest_of(source)
    with _LOCK:
        module = _MODULES.get(digest)
        if module is None:
            module = _MODULES[digest] = _execute(digest, source, _file_name(digest, source))
        return module


def _execute(digest: str, source: str, path: str) -> ModuleType:
    """Execute a source in a new module with this file name."""
    module = ModuleType(f"tritoncp_mod_{digest[:16]}")
    module.__file__ = path
    vars(module)["__module__"] = module  # kept alive by its functions, which hold these globals
    # Without a modification time, so that checkcache() does not compare it with a file.
    lines: tuple[Any, ...] = (len(source), None, source.splitlines(keepends=True), path)
    linecache.cache[path] = lines
    weakref.finalize(module, _drop_lines, path, lines).atexit = False
    exec(compile(source, path, "exec", dont_inherit=True), vars(module))
    _release(module)
    return module


def _drop_lines(path: str, lines: tuple[Any, ...]) -> None:
    if linecache.cache.get(path) is lines:
        del linecache.cache[path]


def _release(module: ModuleType) -> None:
    """Remove the module's functions from Triton's process-wide tables, which would keep them for ever.

    These are the compiler's, for constants of kernels that are loaded ahead of time, and the interpreter's
    table of rewritten functions, in whose place each function gets a table of its own. The interpreter enters
    a function into the compiler's table as it rewrites it, and so has to do that here.
    """
    registry = getattr(sys.modules.get("triton.runtime.jit"), "_triton_jit_function_registry", {})
    for name, value in list(vars(module).items()):
        if getattr(getattr(value, "fn", None), "__module__", None) == module.__name__:
            if hasattr(value, "rewritten_fn"):
                value.rewritten_fn = {}
                value.rewrite()
            registry.pop(f"{module.__name__}:{name}", None)


def _file_name(digest: str, source: str) -> str:
    """Return a name for a source: the path of its copy in $TRITONCP_CACHE_DIR, if that is set."""
    if folder := CACHE_DIR.read():
        path = Path(folder) / "mods" / f"{digest}.py"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(f".{os.getpid()}")  # another rank may write or read the same file
            unfinished.write_text(source, encoding="utf-8", newline="")
            unfinished.replace(path)
            return str(path)
        except OSError as error:
            message = f"no copy of a translated mod in TRITONCP_CACHE_DIR={folder}: {error}"
            warnings.warn(message, stacklevel=2)
    return f"<tritoncp mod {digest}>"
