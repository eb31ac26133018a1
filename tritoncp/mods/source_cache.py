"""Emitted source as modules, and on disk for people and their tools; nothing on disk is trusted.

A module is compiled from the text that was emitted, in memory: no source file is read back and Python's
byte-code cache plays no part. `linecache` holds the same text, which is where Triton and `inspect` read it.
The file that a module is named after is a copy for debuggers and profilers. It is named by the SHA-256 of its
text, lies in a directory only its owner can write, and is put there whole by `os.replace`; where that cannot
be done, a private directory takes it.

Nothing here outlives its use: a module goes when the last function made in it does, and the directory keeps
the MOST_FILES (and MOST_BYTES) used last.
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

MOST_FILES = 4096
MOST_BYTES = 64 << 20
_SWEPT_EVERY = 64  # new files of a process: a sweep looks at all files
_ORPHANED = 3600.0  # seconds after which an unfinished file has no writer any more
_SOURCE_NAME = re.compile(r"[0-9a-f]{64}\.py")
_UNFINISHED_NAME = re.compile(r"\.[0-9a-f]{16}-\w+\.tmp")

_LOCK = threading.RLock()
_MODULES: weakref.WeakValueDictionary[str, ModuleType] = weakref.WeakValueDictionary()  # by digest
_PRIVATE: list[tempfile.TemporaryDirectory[str]] = []
_UNSWEPT: dict[Path, int] = {}  # files written to each directory since its last sweep


def digest_of(source: str) -> str:
    """The name of a source: 64 hexadecimal digits."""
    return hashlib.sha256(source.encode()).hexdigest()


def cache_dir() -> Path:
    """Where emitted source goes: mods/ in $TRITONCP_CACHE_DIR, else in the user's cache directory, which is
    ~/.cache/tritoncp on a machine without platformdirs, where a checkout runs beside its own torch."""
    given = os.environ.get("TRITONCP_CACHE_DIR")
    if not given:
        try:
            import platformdirs
        except ModuleNotFoundError:
            return Path.home() / ".cache/tritoncp/mods"
        given = platformdirs.user_cache_dir("tritoncp", appauthor=False)
    return Path(given) / "mods"


def load(source: str) -> ModuleType:
    """The module that `source` is, one for each source as long as a function of it is alive."""
    digest = digest_of(source)
    with _LOCK:
        module = _MODULES.get(digest)
        if module is None:
            module = _MODULES[digest] = _execute(digest, source, _place(digest, source))
        return module


def _execute(digest: str, source: str, path: str) -> ModuleType:
    """A new module of this source, which Python knows under the name of a file."""
    module = ModuleType(f"tritoncp_mod_{digest[:16]}")
    module.__file__ = path
    vars(module)["__module__"] = module  # it lives as long as its functions, which hold these globals
    # Without a time of change: checkcache() never compares it with a file.
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
    """Take the module's functions out of Triton's process-wide tables, which would keep them for ever: the
    compiler's, for constants of kernels that are loaded ahead of time, and the interpreter's, of functions it
    has rewritten (each of these gets a table of its own)."""
    registry = getattr(sys.modules.get("triton.runtime.jit"), "_triton_jit_function_registry", {})
    for name, value in vars(module).items():
        if getattr(getattr(value, "fn", None), "__module__", None) == module.__name__:
            registry.pop(f"{module.__name__}:{name}", None)
            if hasattr(value, "rewritten_fn"):
                value.rewritten_fn = {}


def _place(digest: str, source: str) -> str:
    """The path of a file that holds `source`, written or repaired if need be; where no directory takes it, a
    name for the text in memory."""
    name = f"{digest}.py"
    try:
        directory = _usable(cache_dir())
        try:
            return str(_write(directory / name, source))
        except OSError as error:  # a directory of that name, a full disk
            return str(_write(_private(str(error)) / name, source))
    except (OSError, RuntimeError):  # not even a temporary directory; RuntimeError: the user has no home
        return f"<tritoncp mod {digest}>"


def _write(path: Path, source: str) -> Path:
    """`path`, which now holds `source`."""
    if _holds(path, source):
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
    _UNSWEPT[path.parent] = _UNSWEPT.get(path.parent, _SWEPT_EVERY) + 1
    if _UNSWEPT[path.parent] > _SWEPT_EVERY:
        _UNSWEPT[path.parent] = 1
        _sweep(path.parent)
    return path


def _sweep(directory: Path) -> None:
    """Remove the sources that were used longest ago, as far as they are past the bounds, and unfinished files
    of writers that died. Other processes may do the same at the same time."""
    sources: list[tuple[float, int, str]] = []
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # it is gone already
                status = entry.stat(follow_symlinks=False)
                if not stat.S_ISREG(status.st_mode):
                    continue
                if _SOURCE_NAME.fullmatch(entry.name):
                    sources.append((status.st_mtime, status.st_size, entry.path))
                elif _UNFINISHED_NAME.fullmatch(entry.name) and status.st_mtime < time.time() - _ORPHANED:
                    os.unlink(entry.path)
    size = 0
    for i, (_, own, path) in enumerate(sorted(sources, reverse=True)):
        size += own
        if i > MOST_FILES - _SWEPT_EVERY or size > MOST_BYTES:
            with contextlib.suppress(OSError):
                os.unlink(path)


def _holds(path: Path, source: str) -> bool:
    """Whether `path` is a plain file of ours with exactly this text."""
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


def _usable(directory: Path) -> Path:
    """`directory`, made 0700 if it is new; a private temporary one where others could change its files."""
    for level in (directory.parent, directory):  # who may write to the parent may replace the directory
        try:
            level.mkdir(mode=0o700, parents=True, exist_ok=True)
            trouble = unsafe(level)
        except OSError as error:
            trouble = str(error)
        if trouble is not None:
            return _private(f"{level}: {trouble}")
    return directory


def unsafe(directory: Path) -> str | None:
    """The reason why the files of a directory cannot be trusted; None if they can."""
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


def _private(why: str) -> Path:
    """A directory of this process alone, gone when it ends."""
    if not _PRIVATE:
        warnings.warn(
            f"tritoncp does not cache translated mods in {why}. Using a private temporary directory; "
            "set TRITONCP_CACHE_DIR to a directory that only you can write.",
            stacklevel=3,
        )
        _PRIVATE.append(tempfile.TemporaryDirectory(prefix="tritoncp-"))
    return Path(_PRIVATE[0].name)
