"""Runs of programs and of `python -m tritoncp` in separate processes, and of `tritoncp` in this one."""

import os
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner, Result

ROOT = Path(__file__).parents[1]


def python(*words, cwd=ROOT, **environment) -> subprocess.CompletedProcess:
    """Run Python with more environment variables."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def tritoncp(*words, **environment) -> subprocess.CompletedProcess:
    """Run a command with more environment variables."""
    return python("-m", "tritoncp", *words, **environment)


def run_code(code: str, cwd=ROOT, **environment) -> str:
    """Run the text of a program, which has to succeed; return its output."""
    done = python("-c", code, cwd=cwd, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def invoke(*words, charset: str = "utf-8", **settings) -> Result:
    """Run ``tritoncp WORDS`` in this process; settings: of click's CliRunner.invoke."""
    from tritoncp.cli import main

    return CliRunner(charset=charset).invoke(main, [*map(str, words)], **settings)
