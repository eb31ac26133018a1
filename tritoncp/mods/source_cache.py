"""Emitted source as modules in memory, with copies on disk for debuggers; nothing on disk is executed.

A module is compiled from the text that was emitted, in memory: no source file is read back and Python's
byte-code cache plays no part. `linecache` holds the same text, which is where Triton and `inspect` read it.
The file in a module's `__file__` is a copy for debuggers and profilers. Its name is the SHA-256 of its text.
It lies in a directory that only its owner can write, else in a private temporary one; `os.replace`
makes the write atomic.

A module is freed with the last function defined in it. The directory keeps the files used last, at most
MAX_CACHED_FILES and MAX_CACHED_BYTES.
"""

from __future__ import annotations

import contextlib
import hashlib
import linecache
import os
import re
import stat
import sys
import tempfile
import threading
import time
import warnings
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

from tritoncp.core.environment import CACHE_DIR

MAX_CACHED_FILES = 4096
MAX_CACHED_BYTES = 64 << 20
_SWEEP_INTERVAL = 64  # new files of a process between two sweeps, which list the whole directory
_ORPHAN_AGE = 3600.0  # seconds after which an unfinished file has no writer
_SOURCE_NAME = re.compile(r"[0-9a-f]{64}\.py")
_UNFINISHED_NAME = re.compile(r"\.[0-9a-f]{16}-\w+\.tmp")

_LOCK = threading.RLock()
_MODULES: weakref.WeakValueDictionary[str, ModuleType] = weakref.WeakValueDictionary()  # by digest
_PRIVATE_DIRECTORIES: list[tempfile.TemporaryDirectory[str]] = []
_WRITES: dict[Path, int] = {}  # to each directory, of new files since its last sweep


def digest_of(source: str) -> str:
    """Return the SHA-256 of a source, as 64 hexadecimal digits."""
    return hashlib.sha256(source.encode()).hexdigest()


def cache_dir() -> Path:
    """Return the directory of emitted source: mods/ in $TRITONCP_CACHE_DIR or the user's cache directory.

    The latter is ~/.cache/tritoncp without platformdirs, which a checkout with the machine's torch may lack.
    """
    root = CACHE_DIR.read()
    if not root:
        try:
            import platformdirs
        except ModuleNotFoundError:
            return Path.home() / ".cache/tritoncp/mods"
        root = platformdirs.user_cache_dir("tritoncp", appauthor=False)
    return Path(root) / "mods"


def load(source: str) -> ModuleType:
    """Return the module of a source: the same one as long as a function of it is alive."""
    digest = digest_of(source)
    with _LOCK:
        module = _MODULES.get(digest)
        if module is None:
            module = _MODULES[digest] = _execute(digest, source, _store(digest, source))
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
    table of rewritten functions, in whose place each function gets a table of its own.
    """
    registry = getattr(sys.modules.get("triton.runtime.jit"), "_triton_jit_function_registry", {})
    for name, value in vars(module).items():
        if getattr(getattr(value, "fn", None), "__module__", None) == module.__name__:
            registry.pop(f"{module.__name__}:{name}", None)
            if hasattr(value, "rewritten_fn"):
                value.rewritten_fn = {}


def _store(digest: str, source: str) -> str:
    """Write the file of a source, unless it is there; return its path.

    Where no directory can be written, return a name for the text in memory.
    """
    name = f"{digest}.py"
    try:
        directory = cache_dir()
        try:
            _make_safe(directory)
            return str(_write(directory / name, source))
        except OSError as error:  # an unsafe directory, a directory of that name, a full disk
            return str(_write(_private_directory(str(error)) / name, source))
    except (OSError, RuntimeError):  # not even a temporary directory; RuntimeError: the user has no home
        return f"<tritoncp mod {digest}>"


def _write(path: Path, source: str) -> Path:
    """Write a source to a file, unless it is there; return the path."""
    if _has_text(path, source):
        with contextlib.suppress(OSError):
            os.utime(path)  # sweeps keep what was used last
        return path
    handle, temporary = tempfile.mkstemp(prefix=f".{path.stem[:16]}-", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(source)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _WRITES[path.parent] = _WRITES.get(path.parent, _SWEEP_INTERVAL) + 1
    if _WRITES[path.parent] > _SWEEP_INTERVAL:
        _WRITES[path.parent] = 1
        _sweep(path.parent)
    return path


def _sweep(directory: Path) -> None:
    """Remove the sources that were used longest ago, beyond the bounds, and unfinished files of dead writers.

    Other processes may do the same at the same time.
    """
    sources: list[tuple[float, int, str]] = []
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # another process removed it
                status = entry.stat(follow_symlinks=False)
                if not stat.S_ISREG(status.st_mode):
                    continue
                if _SOURCE_NAME.fullmatch(entry.name):
                    sources.append((status.st_mtime, status.st_size, entry.path))
                elif _UNFINISHED_NAME.fullmatch(entry.name) and status.st_mtime < time.time() - _ORPHAN_AGE:
                    os.unlink(entry.path)
    size = 0
    for i, (_, file_size, path) in enumerate(sorted(sources, reverse=True)):
        size += file_size
        if i > MAX_CACHED_FILES - _SWEEP_INTERVAL or size > MAX_CACHED_BYTES:
            with contextlib.suppress(OSError):
                os.unlink(path)


def _has_text(path: Path, source: str) -> bool:
    """Whether a path is a regular file of this user with exactly this text, which others cannot write."""
    try:
        flags = os.O_NOFOLLOW | os.O_NONBLOCK
        with open(path, "rb", opener=lambda name, mode: os.open(name, mode | flags)) as file:
            status = os.fstat(file.fileno())
            safe = (
                stat.S_ISREG(status.st_mode) and not status.st_mode & 0o022 and status.st_uid == os.getuid()
            )
            return safe and file.read(len(source.encode()) + 1) == source.encode()
    except OSError:
        return False


def _make_safe(directory: Path) -> None:
    """Make a directory with mode 0700. Raises OSError if others than its owner may write to it."""
    for level in (directory.parent, directory):  # who may write to the parent may replace the directory
        level.mkdir(mode=0o700, parents=True, exist_ok=True)
        if reason := unsafe_reason(level):
            raise OSError(f"{level}: {reason}")


def unsafe_reason(directory: Path) -> str | None:
    """Return why a directory is not writable by its owner alone; None if it is."""
    status = directory.lstat()
    if stat.S_ISLNK(status.st_mode):
        return "it is a symbolic link"
    if not stat.S_ISDIR(status.st_mode):
        return "it is not a directory"
    if status.st_uid != os.getuid():
        return f"it belongs to user {status.st_uid}"
    if status.st_mode & 0o022:
        return f"others may write to it (mode {stat.S_IMODE(status.st_mode):04o}; chmod 700 it)"
    if not os.access(directory, os.W_OK | os.X_OK):
        return "it cannot be written"
    return None


def _private_directory(place: str) -> Path:
    """A temporary directory of this process, removed when it ends; warns once."""
    if not _PRIVATE_DIRECTORIES:
        warnings.warn(
            f"tritoncp does not cache translated mods in {place}. Using a private temporary directory; "
            "set TRITONCP_CACHE_DIR to a directory that only you can write.",
            stacklevel=3,
        )
        _PRIVATE_DIRECTORIES.append(tempfile.TemporaryDirectory(prefix="tritoncp-"))
    return Path(_PRIVATE_DIRECTORIES[0].name)
