"""Cache of modules made from emitted source, in memory.

A module is compiled from the emitted text, not from a file. The text is in `linecache`, from which
tracebacks, debuggers, `inspect` and Triton read it. A module is freed with its last function.
"""

from __future__ import annotations

import hashlib
import linecache
import sys
import weakref
from types import ModuleType

_MODULES: weakref.WeakValueDictionary[str, ModuleType] = weakref.WeakValueDictionary()  # by digest


def digest_of(source: str) -> str:
    """Return the SHA-256 of a source, as 64 hexadecimal digits."""
    return hashlib.sha256(source.encode()).hexdigest()


def load(source: str) -> ModuleType:
    """Return the module of a source. It stays in the cache while one of its functions is alive."""
    digest = digest_of(source)
    module = _MODULES.get(digest)
    if module is None:
        module = _MODULES[digest] = _execute(digest, source, f"<tritoncp mod {digest}>")
    return module


def _execute(digest: str, source: str, path: str) -> ModuleType:
    """Execute a source in a new module with the file name ``path``."""
    module = ModuleType(f"tritoncp_mod_{digest[:16]}")
    module.__file__ = path
    vars(module)["__module__"] = module  # its functions' globals keep it alive
    # Without a modification time, so that checkcache() does not compare it with a file.
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    weakref.finalize(module, linecache.cache.pop, path, None).atexit = False
    exec(compile(source, path, "exec", dont_inherit=True), vars(module))
    _release(module)
    return module


def _release(module: ModuleType) -> None:
    """Remove the module's functions from Triton's process-wide tables, which would never free them.

    The tables are the compiler's constants of kernels loaded ahead of time, and the interpreter's rewritten
    functions; each function gets a table of the latter kind for itself. The interpreter enters a function
    into the compiler's table when it rewrites it, so functions are rewritten here first.
    """
    registry = getattr(sys.modules.get("triton.runtime.jit"), "_triton_jit_function_registry", {})
    for name, value in list(vars(module).items()):
        if getattr(getattr(value, "fn", None), "__module__", None) == module.__name__:
            if hasattr(value, "rewritten_fn"):
                value.rewritten_fn = {}
                value.rewrite()
            registry.pop(f"{module.__name__}:{name}", None)
