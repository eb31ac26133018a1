"""Where emitted source is kept, and what it is protected from."""

from __future__ import annotations

import importlib
import inspect
import multiprocessing
import os
import stat
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tritoncp.mods import cache, mask_mod, score_mod


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache for a process that has loaded nothing."""
    monkeypatch.setenv("TRITONCP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_MODULES", {})
    monkeypatch.setattr(cache, "_PRIVATE", [])
    yield tmp_path / "cache"
    for private in cache._PRIVATE:
        private.cleanup()


def source(number: int = 1) -> str:
    return f'"""A module."""\n\nVALUE = {number}\n'


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_source_is_kept_and_imported_once(directory: Path) -> None:
    module = cache.load(source(3))
    path = directory / "mods" / f"{cache.digest_of(source(3))}.py"
    assert module.VALUE == 3
    assert path.read_text() == source(3)
    assert cache.load(source(3)) is module
    assert [mode(directory), mode(directory / "mods"), mode(path)] == [0o700, 0o700, 0o600]
    assert [p.name for p in path.parent.iterdir() if p.is_file()] == [path.name]


def test_triton_can_read_what_is_loaded(directory: Path) -> None:
    mod = mask_mod(lambda b, h, q, k: q * 7 >= k)
    module = cache.load(mod.source)
    assert inspect.getsource(module) == mod.source
    assert "def mask_mod" in inspect.getsource(module.mask_mod.fn)


@pytest.mark.parametrize("bad", ["", "VALUE = 'evil'\n", source(3)[:-4], source(3) + "import os\n", "\0\xff"])
def test_a_corrupt_file_is_replaced(directory: Path, bad: str) -> None:
    path = directory / "mods" / f"{cache.digest_of(source(3))}.py"
    path.parent.mkdir(parents=True, mode=0o700)
    path.parent.parent.chmod(0o700)
    path.write_text(bad)
    assert cache.load(source(3)).VALUE == 3
    assert path.read_text() == source(3)


def test_a_linked_or_writable_file_is_replaced(directory: Path, tmp_path: Path) -> None:
    path = directory / "mods" / f"{cache.digest_of(source(3))}.py"
    path.parent.mkdir(parents=True, mode=0o700)
    path.parent.parent.chmod(0o700)
    target = tmp_path / "target.py"
    target.write_text(source(3))
    path.symlink_to(target)
    cache.load(source(3))
    assert not path.is_symlink()
    path.chmod(0o666)
    cache._MODULES.clear()
    cache.load(source(3))
    assert mode(path) == 0o600
    assert target.read_text() == source(3)


@pytest.mark.parametrize("level", ["cache", "mods"])
@pytest.mark.parametrize("trouble", ["symlink", "0777", "0770", "file", "read-only"])
def test_an_unsafe_directory_is_not_used(directory: Path, tmp_path: Path, level: str, trouble: str) -> None:
    bad = directory if level == "cache" else directory / "mods"
    directory.mkdir(mode=0o700)
    bad.mkdir(mode=0o700, exist_ok=True)
    if trouble == "symlink":
        bad.rmdir()
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        bad.symlink_to(tmp_path / "elsewhere")
    elif trouble == "file":
        bad.rmdir()
        bad.write_text("not a directory")
    elif trouble == "read-only":
        if os.getuid() == 0:  # nothing is read-only to root: only others' ownership can be tried
            os.chown(bad, 12345, 12345)
        bad.chmod(0o500)
    else:
        bad.chmod(int(trouble, 8))
    with pytest.warns(UserWarning, match="private temporary directory") as caught:
        module = cache.load(source(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        assert cache.load(source(5)).VALUE == 5
    assert len(caught) == 1
    assert str(bad) in str(caught[0].message)
    assert module.VALUE == 4
    private = Path(module.__file__ or "").parent
    assert mode(private) == 0o700
    assert directory not in private.parents


def test_threads_translate_at_once(directory: Path) -> None:
    """Tracing changes what is global to a process: one at a time."""
    ready = threading.Barrier(4)

    def translate(number: int) -> bool:
        ready.wait()
        made = [score_mod(lambda s, b, h, q, kv, n=n: s * (q + n) - kv) for n in range(number, 24, 4)]
        return all(mod.graph is not None for mod in made)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(translate, range(4)))


def _write_many(directory: str, worker: int) -> None:
    os.environ["TRITONCP_CACHE_DIR"] = directory
    importlib.reload(cache)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(40):
            assert number == cache.load(source(number)).VALUE


def test_many_ranks_write_at_once(directory: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_write_many, args=(str(directory), i)) for i in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert not any(worker.exitcode for worker in workers)
    assert all(worker.exitcode is not None for worker in workers)
    files = sorted((directory / "mods").glob("*"))
    assert {p.name for p in files if p.is_file()} == {f"{cache.digest_of(source(n))}.py" for n in range(40)}
    assert all(cache.digest_of(p.read_text()) == p.stem for p in files if p.is_file())
