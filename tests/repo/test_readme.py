"""The README's Python programs run as printed, on two ranks, and give the oracle's answers."""

import os
import re
import runpy
import socket
import subprocess
import warnings
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.multiprocess import ranks
from tritoncp.reference import dense

ROOT = Path(__file__).parents[2]

# Each program runs as printed; then these lines compare the variables that it leaves with the dense oracle.
CHECKS = {
    "drop_in.py": """
expected = reference.dense_attention(*whole.double(), mask).out
torch.testing.assert_close(out, expected.chunk(2, 2)[rank].float(), atol=1e-5, rtol=1e-5)
""",
    "balanced.py": """
whole = [embed, project, unembed]
whole = [type(part)(*shape) for part, shape in zip(whole, ((256, 64), (64, 192), (64, 256)))]
for part, trained in zip(whole, (embed, project, unembed)):
    part.load_state_dict(trained.state_dict())
    part.double()
x = rearrange(whole[1](whole[0](text[:, :-1])), "b s (qkv h d) -> qkv b h s d", qkv=3, h=4)
logits = whole[2](rearrange(reference.dense_attention(*x, mask, alibi).out, "b h s d -> b s (h d)"))
F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).backward()
for part, trained in zip(whole, (embed, project, unembed)):
    for expected, got in zip(part.parameters(), trained.parameters()):
        torch.testing.assert_close(got.grad, expected.grad.float(), atol=1e-6, rtol=1e-3)
""",
    "packed.py": """
documents = tritoncp.document(lengths=cu_seqlens.diff().tolist())
mask = tritoncp.create_block_mask(tritoncp.and_masks(tritoncp.causal(), documents), 1, 1, 2048, 2048)
expected = reference.dense_attention(*whole.double().transpose(1, 2), mask).out[0].transpose(0, 1)
expected = expected.chunk(2)[int(os.environ["RANK"])]
torch.testing.assert_close(out, expected.float(), atol=1e-5, rtol=1e-5)
""",
}


def programs() -> dict[str, str]:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return {re.search(r"(\w+\.py)$", text.splitlines()[0])[1]: text for text in blocks}


def test_every_python_block_is_a_program_that_is_checked():
    assert programs().keys() == CHECKS.keys()
    code = [line for line in programs()["drop_in.py"].splitlines() if line.strip()]
    assert len(code) <= 20, "the drop-in fits a screen"


@pytest.mark.parametrize("name", CHECKS)
def test_a_program_of_the_readme_runs_as_printed(name, tmp_path):
    (tmp_path / name).write_text(programs()[name])
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]

    def run(group):
        """Run the program as torchrun starts a rank, but forked, which takes a tenth of the time."""
        rank = group.rank()
        dist.destroy_process_group()
        variables_of_rank = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": 2,
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": port,
        }
        os.environ.update({key: str(value) for key, value in variables_of_rank.items()}, TRITON_INTERPRET="0")
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*deals blocks.*")
            variables = runpy.run_path(str(tmp_path / name))
        exec(CHECKS[name], variables | {"reference": dense, "os": os})

    ranks.run(2, run)


def test_the_readme_names_only_make_targets_that_exist():
    targets = set(re.findall(r"^([a-z]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in ("README.md", "CONTRIBUTING.md"):
        named = set(re.findall(r"\bmake ([a-z]+)\b", (ROOT / page).read_text()))
        assert named <= targets, f"{page} names {named - targets}"


def test_ci_runs_lint_types_and_docs_before_the_tests():
    commands = [line for line in (ROOT / ".ci/run").read_text().splitlines() if line.startswith("make ")]
    assert commands == ["make lint types docs", "make test"]
    assert "run: .ci/run" in (ROOT / ".github/workflows/tests.yml").read_text()


def test_no_file_names_a_registry():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    files = [ROOT / name for name in listed.stdout.split("\0") if name] or [ROOT / "Makefile"]
    for path in files:
        if path.is_file() and path.suffix in {"", ".txt", ".toml", ".md", ".yaml", ".yml"}:
            text = path.read_text()
            assert not re.search(r"--(extra-)?index-url|pypi\.org|download\.pytorch", text), path
