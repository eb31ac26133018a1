"""Runs of programs and of `python -m tritoncp` in separate processes."""

import os
import subprocess
import sys
from pathlib import Path

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
