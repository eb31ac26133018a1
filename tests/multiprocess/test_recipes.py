"""The recipe of generating beside training, run as printed; tests/repo/test_readme.py runs the others."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tritoncp.core.process_environment import use_loopback_interface

ROOT = Path(__file__).parents[2]


def test_rank_0_generates_beside_training(tmp_path: Path) -> None:
    page = (ROOT / "docs/recipes.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (program,) = [text for text in blocks if text.splitlines()[0].endswith(" generate_beside_training.py")]
    (tmp_path / "recipe.py").write_text(program)
    use_loopback_interface()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0"}
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "recipe.py",
    ]
    done = subprocess.run(
        launch, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    said = [line.split() for line in done.stdout.splitlines() if line.startswith("step")]
    assert [line[1] for line in said] == ["0", "1", "2", "3"]
