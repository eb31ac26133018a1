"""The README's Python runs as printed, on two ranks, and gives the oracle's answer."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

# What the README takes for granted: this rank's piece of q, k, v, and a model's tokens, labels and logits.
BEFORE = """
import os, torch
import torch.nn.functional as F
from tritoncp import reference
torch.manual_seed(0)
size, rank, world = 512, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
whole = [torch.randn(1, heads, size, 16) for heads in (4, 2, 2)]
q, k, v = (x.chunk(world, 2)[rank] for x in whole)
k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
"""
BETWEEN = """
expected = reference.dense_attention(*(x.double() for x in whole), mask).out
torch.testing.assert_close(out, expected.chunk(world, 2)[rank].float(), atol=1e-5, rtol=1e-5)
tokens = torch.randint(256, (1, size))
labels = labels_global = torch.randint(256, (1, size))
every_logit = torch.randn(1, size, 256)
score_mod = lambda score, b, h, q_idx, kv_idx: score * 0.5 - (q_idx - kv_idx) * 0.125
shards = tritoncp.make_plan(mask, group)
q, k, v = (tritoncp.shard(x, shards, dim=2) for x in whole)
"""
AFTER = """
expected = reference.dense_attention(*(x.double() for x in whole), mask, score_mod).out
every_out = tritoncp.unshard(out, plan, mesh=group, dim=2)
torch.testing.assert_close(every_out, expected.float(), atol=1e-5, rtol=1e-5)
logits = tritoncp.shard(every_logit, plan, dim=1).requires_grad_()
"""
PACKED = """
cu_seqlens = torch.tensor([0, 100, 101, size])
piece = slice(group.rank() * size // 2, (group.rank() + 1) * size // 2)
q, k, v = (x[0].transpose(0, 1)[piece] for x in whole)
"""
PACKED_AFTER = """
lengths = cu_seqlens.diff().tolist()
packed = tritoncp.create_block_mask(
    tritoncp.and_masks(tritoncp.causal(), tritoncp.document(lengths=lengths)), 1, 1, size, size
)
expected = reference.dense_attention(*(x.double() for x in whole), packed).out[0].transpose(0, 1)
torch.testing.assert_close(out, expected[piece].float(), atol=1e-5, rtol=1e-5)
"""
AT_LAST = """
torch.distributed.all_reduce(loss.detach_())
torch.testing.assert_close(loss, F.cross_entropy(every_logit.flatten(0, 1), labels_global.flatten()))
dist.destroy_process_group()
print("as printed")
"""


def blocks() -> list[str]:
    found = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    small = [text.replace("8192", "512").replace("// 1000", "// 100") for text in found]
    return [re.sub(r"^\.\.\.$", "", text, flags=re.MULTILINE) for text in small]


def test_the_python_of_the_readme_runs_as_printed(tmp_path):
    drop_in, plan, packed, loss = blocks()
    assert len(drop_in.strip().splitlines()) <= 12, "the drop-in is about ten lines"
    script = tmp_path / "readme.py"
    script.write_text(
        "".join([BEFORE, drop_in, BETWEEN, plan, AFTER, PACKED, packed, PACKED_AFTER, loss, AT_LAST])
    )
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(script),
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        launch, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("as printed") == 2


def test_the_readme_names_only_make_targets_that_exist():
    targets = set(re.findall(r"^([a-z]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in ("README.md", "CONTRIBUTING.md"):
        named = set(re.findall(r"\bmake ([a-z]+)\b", (ROOT / page).read_text()))
        assert named <= targets, f"{page} names {named - targets}"


def test_no_file_names_a_registry():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    files = [ROOT / name for name in listed.stdout.split("\0") if name] or [ROOT / "Makefile"]
    for path in files:
        if path.is_file() and path.suffix in {"", ".txt", ".toml", ".md", ".yaml"}:
            text = path.read_text()
            assert not re.search(r"--(extra-)?index-url|pypi\.org|download\.pytorch", text), path
