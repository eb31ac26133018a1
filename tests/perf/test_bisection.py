"""`tritoncp perf bisect` over a repository on this disk, whose commits take planted times."""

import json
import shlex
import subprocess
import sys

import pytest

from tests.perf.synthetic_history import perf, point

PROGRAM = "import sys; open(sys.argv[1], 'a').write(open('line.json').read() + '\\n')"
COMMAND = f"{sys.executable} -S -c {shlex.quote(PROGRAM)} {{out}}"


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Make a repository of ten commits; the sixth makes the case slower."""
    monkeypatch.chdir(tmp_path)
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "Ann")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "ann@example.com")
    subprocess.run(["git", "init", "--quiet"], check=True)
    for i in range(10):
        measured = point("c", (1.2 if i >= 6 else 1.0) + i / 1000, run=str(i))
        (tmp_path / "line.json").write_text(json.dumps(measured.as_line()))
        subprocess.run(["git", "add", "line.json"], check=True)
        subprocess.run(["git", "commit", "--quiet", "-m", f"Change {i}"], check=True)
    return tmp_path


def test_the_commit_that_made_a_case_slower_is_found(repository):
    result = perf("bisect", "HEAD~9", "HEAD", "--case", "c", "--runs", "1", "--command", COMMAND)
    assert result.exit_code == 0 and "Ann: Change 6 (1 -> 1.209 ms)" in result.output, result.output
    assert result.output.count(" ms\n") <= 6, "two ends, and at most four between"
    worktrees = subprocess.run(["git", "worktree", "list"], capture_output=True, text=True).stdout
    assert len(worktrees.splitlines()) == 1


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("ends", "case", "code", "message"),
    [
        (("HEAD~3", "HEAD~1"), "c", 3, "c is not slower in HEAD~1"),
        (("HEAD", "HEAD~3"), "c", 2, "pass the older commit first"),
        (("HEAD~3", "nowhere"), "c", 2, "git rev-parse"),
        (("HEAD~3", "HEAD"), "other", 2, "wrote no time of other"),
    ],
)
def test_a_range_that_cannot_be_bisected_is_an_error(ends, case, code, message, repository):
    result = perf("bisect", *ends, "--case", case, "--runs", "1", "--command", COMMAND)
    assert result.exit_code == code and message in result.output, result.output
