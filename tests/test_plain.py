"""A sample of the suite in processes that replace nothing: ``pytest --plain``."""

import pytest

from tests.command_process import python

LEFT_OUT = 5  # pytest's exit status where no test was selected


def run_sample(count: int, *rooms: str, marks: str, **environment: str) -> None:
    """Run the sample in one process, without the settings that tests gave to this process."""
    words = ["-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-m", marks, f"--plain={count}", *rooms]
    done = python(*words, PYTHONPATH="", **environment)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr


@pytest.mark.interpreted
def test_tests_of_kernels_and_mods_pass_without_patches() -> None:
    run_sample(16, "tests/kernels", "tests/mods", marks="not long and not nightly", TRITON_INTERPRET="1")


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("interpret", "count"),
    [
        pytest.param("0", 200, marks=pytest.mark.long),
        pytest.param("1", 50, marks=pytest.mark.long),
        pytest.param("1", 200, marks=pytest.mark.nightly),  # without patches the interpreter is slow
    ],
)
def test_tests_of_all_rooms_pass_without_patches(interpret: str, count: int) -> None:
    marks = "not long and not nightly and not browser and not integrations"
    run_sample(count, marks=marks, TRITON_INTERPRET=interpret)
