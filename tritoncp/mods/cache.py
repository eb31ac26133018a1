"""Emitted source on disk, imported from there so that Triton can read it, and never trusted.

A file is named by the SHA-256 of the source it must hold, lies in a directory only its owner can write, is
put there whole by `os.replace`, and is compared with the expected source before every import. Nothing is
unpickled or evaluated; a corrupt or foreign file is replaced, a directory others may write is not used.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import stat
import sys
import tempfile
import threading
import warnings
from pathlib import Path
from types import ModuleType

_LOCK = threading.RLock()
_MODULES: dict[str, ModuleType] = {}
_PRIVATE: list[tempfile.TemporaryDirectory[str]] = []


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
    """The module that `source` is, imported once per process."""
    digest = digest_of(source)
    with _LOCK:
        if digest not in _MODULES:
            _MODULES[digest] = _import(digest, _write(digest, source))
        return _MODULES[digest]


def _import(digest: str, path: Path) -> ModuleType:
    name = f"tritoncp_mod_{digest[:16]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _write(digest: str, source: str) -> Path:
    """The path of a file that holds exactly `source`, made or repaired if need be."""
    directory = _usable(cache_dir())
    path = directory / f"{digest}.py"
    if _holds(path, source):
        return path
    handle, temporary = tempfile.mkstemp(prefix=f".{digest[:16]}-", suffix=".tmp", dir=directory)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(source)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    if not _holds(path, source):  # someone else writes here after all
        return _write_private(digest, source, f"{path} changed while it was written")
    return path


def _holds(path: Path, source: str) -> bool:
    """Whether `path` is a plain file of ours with exactly this text."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            status = os.fstat(file.fileno())
            safe = (
                stat.S_ISREG(status.st_mode) and not status.st_mode & 0o022 and status.st_uid == os.getuid()
            )
            return safe and file.read(len(source.encode()) + 1) == source.encode()
    except OSError:
        return False


def _usable(directory: Path) -> Path:
    """`directory`, made 0700 if it is new; a private temporary one where it is not safe to import from."""
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
    """Why nothing should be imported from a directory; None if it is safe."""
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


def _write_private(digest: str, source: str, why: str) -> Path:
    path = _private(why) / f"{digest}.py"
    path.write_text(source, encoding="utf-8")
    return path
