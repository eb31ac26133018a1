"""Settings of every test: one thread, fixed seeds, poisoned buffers, another BLAS, and where kernels run.

Kernels are interpreted. ``pytest --compiled sm_90 tests/kernels`` compiles them for an architecture and
executes their PTX (``tritoncp.executor``). ``pytest --device cuda tests/kernels`` runs the same tests on a
GPU, with nothing replaced; ``tests/gpu`` has laws of GPUs only.

``pytest --plain 200`` runs a sample of the tests as a user's process would: nothing in Triton, torch or this
package is replaced. With TRITON_INTERPRET=0 it runs the tests of the CPU engine, else all others.
"""

import argparse
import gc
import importlib.util
import itertools
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._device import _device_constructors

gc.disable()  # until all tests are collected: their objects stay, and each search of them takes a second
if not os.access(os.path.expanduser("~"), os.W_OK):  # Triton and tritoncp keep their caches at home
    os.environ["HOME"] = tempfile.mkdtemp()
ROOT, ANOTHER_BLAS = str(Path(__file__).parents[1]), str(Path(__file__).with_name("another_blas"))
PATHS = [ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]  # for processes that tests start
# Read before pytest does: Triton has to know when it is imported. Processes of pytest-xdist inherit them.
PARSER = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
PARSER.add_argument("--compiled")
PARSER.add_argument("--device")
PARSER.add_argument("--plain")
ARGUMENTS, _ = PARSER.parse_known_args()
if ARGUMENTS.device:
    os.environ["TRITONCP_TESTS_DEVICE"] = ARGUMENTS.device
from tests.device import DEVICE, ON_GPU  # noqa: E402

if PLAIN := ARGUMENTS.plain or os.environ.get("PYTEST_PLAIN"):
    os.environ["PYTEST_PLAIN"] = PLAIN
elif not ON_GPU:
    PATHS.insert(0, ANOTHER_BLAS)
if COMPILED := ARGUMENTS.compiled or os.environ.get("TRITONCP_TESTS_COMPILED"):
    os.environ |= {"TRITONCP_TESTS_COMPILED": COMPILED, "TRITON_INTERPRET": "0"}
elif ON_GPU:
    os.environ["TRITON_INTERPRET"] = "0"
else:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when it is imported
os.environ["PYTHONPATH"] = os.pathsep.join(PATHS)

import pytest  # noqa: E402

from tests.stand_ins import eager_flex as eager_flex  # noqa: E402
from tests.stand_ins import gpus as gpus  # noqa: E402
from tests.stand_ins import no_gpu as no_gpu  # noqa: E402

# Imported now: a test that changes the variable would fix the kind of their functions for the whole process.
from tritoncp.call import engine_factory, mask_source  # noqa: E402
from tritoncp.kernels import engine  # noqa: E402, F401
from tritoncp.kernels.routes import forward_gluon  # noqa: E402, F401
from tritoncp.mods.translate import triton_helpers  # noqa: E402, F401
from tritoncp.planning.costs import traffic  # noqa: E402

if not ON_GPU and not PLAIN:
    from tests import exact_dot, interpreter_patches

    sys.path.insert(0, ANOTHER_BLAS)
    import another_blas as another_blas

    if not COMPILED:
        exact_dot.install()
        interpreter_patches.install()

if ON_GPU:
    torch.set_default_device(DEVICE)
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
if not PLAIN:
    _device_constructors()  # torch lists torch.empty once, here before `poison` replaces it
# A machine with a GPU may have pytest alone: tests that run on it need no more.
if importlib.util.find_spec("hypothesis"):
    from tests import draws

    draws.register()

# Tests of tile rules, compilers and of the executor, which take a device of their own.
OF_NO_GPU = [f"kernels/test_{name}.py" for name in ("compiled", "offline", "tile_rules", "toolchain")]
OF_NO_GPU += [f"compiled/test_{name}.py" for name in ("compilations", "nightly", "selected_work")]
OF_NO_GPU += ["kernels/routes", "executor"]
collect_ignore = OF_NO_GPU if ON_GPU else ["gpu", *([] if COMPILED else ["compiled", "executor/compiled"])]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--compiled", metavar="ARCH", help="execute kernels compiled for sm_80, sm_90 or sm_100")
    parser.addoption("--device", metavar="NAME", help="run tests of kernels on this device, as on cuda")
    parser.addoption("--plain", metavar="COUNT", help="run a sample of the tests that replaces nothing")


def pytest_configure(config: pytest.Config) -> None:
    if ON_GPU and COMPILED:
        raise pytest.UsageError("--compiled executes kernels on the CPU; leave out --device")
    if DEVICE.type == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError(f"--device {DEVICE}: torch finds no GPU here")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Mark as long what `sample` leaves out. After -k and -m, leave out laws of Triton's interpreter where
    kernels are compiled, on a GPU laws of the CPU engine too, and draw the sample of ``--plain``."""
    mark_beyond_samples(items)
    yield
    kept = items
    if COMPILED or ON_GPU:
        kept = [item for item in kept if not item.get_closest_marker("interpreted")]
    if ON_GPU:
        kept = [item for item in kept if engine_of(item) == "kernels" and not replaces_copies(item)]
    if PLAIN:
        kept = draw(int(PLAIN), [item for item in kept if is_plain(item)])
    chosen = {*kept}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = kept


def mark_beyond_samples(items: list[pytest.Item]) -> None:
    """Mark all cases but a sample as long, where a test has the marker `sample`. The same cases are drawn in
    every run."""
    cases: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample") and not any(map(item.get_closest_marker, ("long", "nightly"))):
            cases.setdefault((str(item.path), item.originalname), []).append(item)  # type: ignore[attr-defined]
    for group in cases.values():
        count = group[0].get_closest_marker("sample").args[0]  # type: ignore[union-attr]
        for item in sorted(group, key=lambda item: random.Random(item.name).random())[count:]:
            item.add_marker(pytest.mark.long)


def is_plain(item: pytest.Item) -> bool:
    """Return whether a test runs on the engine of this process with nothing replaced, and compares no bits of
    matrix products."""
    marked = item.get_closest_marker("bits") or item.get_closest_marker("interpreted")
    runs = "cpu" if os.environ.get("TRITON_INTERPRET") == "0" else "kernels"
    return not marked and not replaces_copies(item) and engine_of(item) == runs


def engine_of(item: pytest.Item) -> str:
    """Return the engine that a test runs: "cpu" or "kernels"."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return parameters.get("engine", "cpu" if "cpu_engine" in item.fixturenames else "kernels")  # type: ignore[attr-defined]


def replaces_copies(item: pytest.Item) -> bool:
    return "host_copies" in item.fixturenames  # type: ignore[attr-defined]


def draw(count: int, items: list[pytest.Item]) -> list[pytest.Item]:
    """Return a sample with equally many tests of each room, as far as it has them, in the order of the
    suite."""
    rooms: dict[str, list[pytest.Item]] = {}
    for item in sorted(items, key=lambda item: random.Random(item.nodeid).random()):
        rooms.setdefault(item.nodeid.split("/")[1], []).append(item)
    turns = [item for turn in itertools.zip_longest(*rooms.values()) for item in turn if item is not None]
    drawn = {*turns[:count]}
    return [item for item in items if item in drawn]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Hide the objects that all tests share from the garbage collector: collections neither search them nor
    write to their memory, which a forked process would copy. Fewer collections spare compilers, which make
    many objects, a twentieth of their time."""
    result = yield
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()
    return result


@pytest.fixture(autouse=True)
def seed() -> None:
    """Seed random numbers, so that a test does not depend on the order of tests or on its worker."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def keep_interpreting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the variable by which Triton interprets, which ``tritoncp demo`` sets for its process."""
    if value := os.environ.get("TRITON_INTERPRET"):
        monkeypatch.setenv("TRITON_INTERPRET", value)


@pytest.fixture(autouse=True)
def compiled_kernels() -> Iterator[Any]:
    """Execute compiled kernels where ``--compiled`` names an architecture: yields the executor's device. A
    fault fails the test, also where the test catches the error."""
    if not COMPILED:
        yield None
        return
    from tritoncp.executor import compiled_kernels

    with compiled_kernels(COMPILED) as device:
        yield device
    assert device.faults == []


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split every all-gather into pieces, also for small tensors."""
    if not PLAIN:
        monkeypatch.setattr(traffic, "SMALL", 0)


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new memory with NaN or a huge integer, so that reading it before a write changes results. The
    executor of compiled kernels does so itself, and reports what reads it."""
    if COMPILED or PLAIN or ON_GPU:
        return
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch, "empty_permuted"),
        (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_empty_strided"),
    ):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


@pytest.fixture(name="engine", params=["cpu", "kernels"])
def select_engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test on the CPU engine and on interpreted kernels."""
    if not PLAIN and not ON_GPU:
        monkeypatch.setattr(engine_factory, "uses_triton", lambda device: request.param == "kernels")
    return request.param


@pytest.fixture
def cpu_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test on the CPU engine, unless it asks for the fixture ``engine``: for laws that do not depend
    on the kernels. (TRITON_INTERPRET=0 would also change how Triton functions are made.)"""
    if not PLAIN:
        monkeypatch.setattr(engine_factory, "uses_triton", lambda device: False)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Run the test without compiled code of other tests, and leave none."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def host_copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Treat CPU tensors like GPU tensors when masks are made; list the number of tensors of each copy to the
    host."""
    copies: list[int] = []
    to_host = mask_source.to_host

    def counted(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if tensors:
            copies.append(len(tensors))
        return [t.clone() for t in to_host(tensors)]

    monkeypatch.setattr(mask_source, "to_host", counted)
    monkeypatch.setattr(mask_source, "is_remote", lambda tensor: True)
    return copies


def poisoned(allocate):
    def allocate_poisoned(*args, **kwargs):
        if torch._C._len_torch_dispatch_stack():  # a mode that traces, mostly of tensors without memory
            return allocate(*args, **kwargs)
        with torch.no_grad():
            return fill(allocate(*args, **kwargs))

    allocate_poisoned.__name__ = allocate.__name__
    return allocate_poisoned


def fill(x: torch.Tensor) -> torch.Tensor:
    if x.is_floating_point() or x.is_complex():
        return x.fill_(float("nan"))
    if x.dtype == torch.bool:
        return x.fill_(True)
    return x.fill_(torch.iinfo(x.dtype).max - 0x5A)
