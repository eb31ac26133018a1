"""`python -m tritoncp` in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def tritoncp(*words, **environment) -> subprocess.CompletedProcess:
    """Run a command with more environment variables."""
    return subprocess.run(
        [sys.executable, "-m", "tritoncp", *words],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
