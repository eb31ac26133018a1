"""Cache of emitted source: storage, permissions, bounds, and lifetime of modules."""

from __future__ import annotations

import gc
import importlib.util
import inspect
import linecache
import multiprocessing
import os
import py_compile
import stat
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tritoncp.mods import mask_mod, score_mod, source_cache


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache directory, and no module loaded from it."""
    monkeypatch.setenv("TRITONCP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(source_cache, "_MODULES", weakref.WeakValueDictionary())
    monkeypatch.setattr(source_cache, "_PRIVATE_DIRECTORIES", [])
    yield tmp_path / "cache"
    for private in source_cache._PRIVATE_DIRECTORIES:
        private.cleanup()


def source(number: int = 1) -> str:
    return f'"""A module."""\n\nVALUE = {number}\n'


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_source_is_written_and_executed_once(directory: Path) -> None:
    module = source_cache.load(source(3))
    path = directory / "mods" / f"{source_cache.digest_of(source(3))}.py"
    assert module.VALUE == 3
    assert path.read_text() == source(3)
    assert source_cache.load(source(3)) is module
    assert [mode(directory), mode(directory / "mods"), mode(path)] == [0o700, 0o700, 0o600]
    assert [p.name for p in path.parent.iterdir() if p.is_file()] == [path.name]


def test_triton_can_read_what_is_loaded(directory: Path) -> None:
    mod = mask_mod(lambda b, h, q, k: q * 7 >= k)
    module = source_cache.load(mod.source)
    assert inspect.getsource(module) == mod.source
    assert "def mask_mod" in inspect.getsource(module.mask_mod.fn)


@pytest.mark.parametrize("bad", ["", "VALUE = 'evil'\n", source(3)[:-4], source(3) + "import os\n", "\0\xff"])
def test_a_corrupt_file_is_replaced(directory: Path, bad: str) -> None:
    path = directory / "mods" / f"{source_cache.digest_of(source(3))}.py"
    path.parent.mkdir(parents=True, mode=0o700)
    path.parent.parent.chmod(0o700)
    path.write_text(bad)
    assert source_cache.load(source(3)).VALUE == 3
    assert path.read_text() == source(3)


def test_a_linked_or_writable_file_is_replaced(directory: Path, tmp_path: Path) -> None:
    path = directory / "mods" / f"{source_cache.digest_of(source(3))}.py"
    path.parent.mkdir(parents=True, mode=0o700)
    path.parent.parent.chmod(0o700)
    target = tmp_path / "target.py"
    target.write_text(source(3))
    path.symlink_to(target)
    source_cache.load(source(3))
    assert not path.is_symlink()
    path.chmod(0o666)
    source_cache._MODULES.clear()
    source_cache.load(source(3))
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
        (tmp_path / "target").mkdir(mode=0o700)
        bad.symlink_to(tmp_path / "target")
    elif trouble == "file":
        bad.rmdir()
        bad.write_text("not a directory")
    elif trouble == "read-only":
        if os.getuid() == 0:  # root can write to read-only directories: make another user the owner
            os.chown(bad, 12345, 12345)
        bad.chmod(0o500)
    else:
        bad.chmod(int(trouble, 8))
    with pytest.warns(UserWarning, match="private temporary directory") as caught:
        module = source_cache.load(source(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # warned once
        assert source_cache.load(source(5)).VALUE == 5
    assert len(caught) == 1
    assert str(bad) in str(caught[0].message)
    assert module.VALUE == 4
    private = Path(module.__file__ or "").parent
    assert mode(private) == 0o700
    assert directory not in private.parents


def test_threads_translate_at_once(directory: Path) -> None:
    """Tracing changes the state of a process, so threads trace one at a time."""
    ready = threading.Barrier(4)

    def translate(number: int) -> bool:
        ready.wait()
        mods = [score_mod(lambda s, b, h, q, kv, n=n: s * (q + n) - kv) for n in range(number, 24, 4)]
        return all(mod.graph is not None for mod in mods)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(translate, range(4)))


HALF = "lambda s, b, h, q, kv: s * 0.5"
TWICE = "lambda s, b, h, q, kv: s * 2.0"
REPORT = f"""
import gc, sys, weakref
from tritoncp.mods import score_mod
for text in ({HALF!r}, {TWICE!r}):
    print(score_mod(eval(text)).fn.fn.__name__)
print([name for name in sys.modules if name.startswith("tritoncp_mod")])
"""


def run_python(code: str, **environment: str) -> str:
    """Run code in another Python process; return its output."""
    process = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout + process.stderr


def plant(path: Path, text: str) -> Path:
    """Write byte-code of `text` as the cached byte-code of `path`, with the size and time of `path`."""
    other = path.with_name("planted.py")
    other.write_text(text.ljust(path.stat().st_size - 1) + "\n")
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    target = importlib.util.cache_from_source(path)
    py_compile.compile(str(other), cfile=target, dfile=str(path), doraise=True)
    other.unlink()
    return Path(target)


def test_byte_code_is_neither_read_nor_written(directory: Path) -> None:
    paths = []
    for text in (HALF, TWICE):
        mod = score_mod(eval(text))
        paths.append(directory / "mods" / f"{source_cache.digest_of(mod.source)}.py")
        source_cache.load(mod.source)  # the mod may be one that an earlier test translated
    assert not list(directory.rglob("__pycache__"))
    half, twice = (plant(path, "print('PLANTED')\nfrom os import abort as score_mod") for path in paths)
    twice.write_bytes(twice.read_bytes()[:20])
    before = half.read_bytes(), twice.read_bytes()
    output = run_python(REPORT, TRITONCP_CACHE_DIR=str(directory), TRITON_INTERPRET="0")
    assert output.splitlines() == ["score_mod", "score_mod", "[]"]
    assert (half.read_bytes(), twice.read_bytes()) == before


def test_a_file_replaced_after_it_was_checked_does_not_run(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def replace_then_edit(source: str, target: Path) -> None:
        replace(source, target)
        Path(target).write_text("VALUE = 'planted'\n")

    monkeypatch.setattr(os, "replace", replace_then_edit)
    module = source_cache.load(source(6))
    assert module.VALUE == 6
    assert inspect.getsource(module) == source(6)


@pytest.mark.parametrize("trouble", ["directory", "full disk"])
def test_a_file_that_cannot_be_written_goes_to_a_private_directory(
    directory: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    path = directory / "mods" / f"{source_cache.digest_of(source(7))}.py"
    path.parent.mkdir(parents=True, mode=0o700)
    path.parent.parent.chmod(0o700)
    if trouble == "directory":
        path.mkdir()
    else:
        replace = os.replace

        def full(source: str, target: Path) -> None:
            if directory in Path(target).parents:
                raise OSError(28, "No space left on device")
            replace(source, target)

        monkeypatch.setattr(os, "replace", full)
    with pytest.warns(UserWarning, match="private temporary directory"):
        module = source_cache.load(source(7))
    assert module.VALUE == 7
    assert Path(module.__file__ or "").read_text() == source(7)
    assert not list(path.parent.glob(".*"))


def test_source_is_readable_without_any_file(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: str) -> None:
        raise FileNotFoundError("no usable temporary directory")

    directory.write_text("not a directory")
    monkeypatch.setattr(source_cache.tempfile, "TemporaryDirectory", refuse)
    with pytest.warns(UserWarning, match="private temporary directory"):
        module = source_cache.load("import triton\n\n\n@triton.jit\ndef add(x, y):\n    return x + y\n")
    assert inspect.getsource(module.add.fn).endswith("return x + y\n")


JITTED = "import triton\n\n\n@triton.jit\ndef add(x):\n    return x + {}\n"


def test_a_module_goes_with_its_functions(directory: Path) -> None:
    functions = [source_cache.load(JITTED.format(n)).add for n in range(60)]
    refs = [weakref.ref(function.fn) for function in functions]
    paths = [function.fn.__code__.co_filename for function in functions]
    gc.collect()
    assert source_cache.load(JITTED.format(3)).add is functions[3], "a module lives as long as its functions"
    assert "return x + 7" in inspect.getsource(functions[7].fn)
    del functions
    gc.collect()
    assert not any(function() for function in refs)
    assert not {*paths} & {*linecache.cache}
    assert not [name for name in sys.modules if name.startswith("tritoncp_mod")]


def test_a_module_of_compiled_functions_goes_with_them(directory: Path) -> None:
    code = f"""
import gc, weakref
from tritoncp.mods import source_cache
function = source_cache.load({JITTED.format(1)!r}).add
ref = weakref.ref(function)
key = function.cache_key
del function
gc.collect()
print(ref() is None, source_cache.load({JITTED.format(1)!r}).add.cache_key == key)
"""
    output = run_python(code, TRITONCP_CACHE_DIR=str(directory), TRITON_INTERPRET="0")
    assert output.split() == ["True", "True"]


def test_the_directory_keeps_the_files_used_last(directory: Path) -> None:
    mods = directory / "mods"
    mods.mkdir(parents=True, mode=0o700)
    directory.chmod(0o700)
    old = time.time() - 7200
    names = [f"{n:064x}.py" for n in range(source_cache.MAX_CACHED_FILES + 100)]
    for n, name in enumerate(names):
        (mods / name).touch()
        os.utime(mods / name, (old + n, old + n))
    (mods / names[0]).unlink()
    (mods / names[0]).mkdir()  # a directory with the name of a file
    other_names = ["notes.py", f"{7:063x}.py", f"{7:064x}.txt", ".0123456789abcdef-young.tmp"]
    for name in [*other_names, ".0123456789abcdef-_orphan.tmp"]:
        (mods / name).touch()
    for name in (*other_names[:3], ".0123456789abcdef-_orphan.tmp"):
        os.utime(mods / name, (old, old))
    source_cache.load(source(8))
    remaining = {path.name for path in mods.iterdir()}
    assert len([name for name in remaining if len(name) == 67]) <= source_cache.MAX_CACHED_FILES
    assert {*other_names, names[0], names[-1], f"{source_cache.digest_of(source(8))}.py"} <= remaining
    assert not {names[1], ".0123456789abcdef-_orphan.tmp"} & remaining


def test_the_directory_is_bounded_in_bytes(directory: Path) -> None:
    mods = directory / "mods"
    mods.mkdir(parents=True, mode=0o700)
    directory.chmod(0o700)
    for n in range(5):
        with (mods / f"{n:064x}.py").open("w") as file:
            file.truncate(source_cache.MAX_CACHED_BYTES // 4)  # sparse: no disk space
        os.utime(mods / f"{n:064x}.py", (n, n))
    source_cache.load(source(9))
    assert sum(path.stat().st_size for path in mods.iterdir()) <= source_cache.MAX_CACHED_BYTES
    assert {path.name[:64].lstrip("0") for path in mods.iterdir()} >= {"4", "3", "2"}


def test_use_keeps_a_file_from_being_the_oldest(directory: Path) -> None:
    source_cache.load(source(10))
    path = directory / "mods" / f"{source_cache.digest_of(source(10))}.py"
    os.utime(path, (1, 1))
    gc.collect()
    source_cache.load(source(10))
    assert path.stat().st_mtime > 1


def _write_many(directory: str, worker: int) -> None:
    os.environ["TRITONCP_CACHE_DIR"] = directory
    importlib.reload(source_cache)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(40):
            assert number == source_cache.load(source(number)).VALUE


def test_many_ranks_write_at_the_same_time(directory: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_write_many, args=(str(directory), i)) for i in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert not any(worker.exitcode for worker in workers)
    assert all(worker.exitcode is not None for worker in workers)
    files = sorted((directory / "mods").glob("*"))
    assert {p.name for p in files if p.is_file()} == {
        f"{source_cache.digest_of(source(n))}.py" for n in range(40)
    }
    assert all(source_cache.digest_of(p.read_text()) == p.stem for p in files if p.is_file())
