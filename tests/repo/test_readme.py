"""The README is short, its links and picture are right, and its program runs as printed. So do programs of
pages of `docs/`, on two ranks or in one process, with the answers of the oracle."""

import os
import re
import runpy
import subprocess
import warnings
from pathlib import Path

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from click.testing import CliRunner
from PIL import Image, ImageChops

from tests.multiprocess import ranks
from tritoncp.cli import main
from tritoncp.reference import dense

ROOT = Path(__file__).parents[2]

# Programs run as printed; the lines after them compare the variables that they leave with the oracle.
CHECKS = {
    "docs/recipes.md drop_in.py": """
expected = attend(*whole.double(), mask.to_dense())
torch.testing.assert_close(out, expected.chunk(2, 2)[rank].float(), atol=1e-5, rtol=1e-5)
""",
    "README.md five_lines.py": """
whole = []
for shard in (q, k, v):
    parts = [torch.empty_like(shard) for _ in range(2)]
    torch.distributed.all_gather(parts, shard)
    whole.append(torch.cat(parts, 2).double())
expected = attend(*whole, is_causal=True).chunk(2, 2)[mesh.get_local_rank()]
torch.testing.assert_close(out, expected.float(), atol=1e-5, rtol=1e-5)
""",
    "docs/own_loop.md balanced.py": """
whole = [embed, project, unembed]
whole = [type(part)(*shape) for part, shape in zip(whole, ((256, 64), (64, 192), (64, 256)))]
for part, trained in zip(whole, (embed, project, unembed)):
    part.load_state_dict(trained.state_dict())
    part.double()
x = rearrange(whole[1](whole[0](text[:, :-1])), "b s (qkv h d) -> qkv b h s d", qkv=3, h=4)
at, head = torch.arange(S), torch.arange(heads)[:, None, None]
bias = alibi(torch.zeros(1, dtype=torch.float64), 0, head, at[:, None], at)
out = attend(*x, torch.where(at[:, None] >= at, bias, -torch.inf))
logits = whole[2](rearrange(out, "b h s d -> b s (h d)"))
F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).backward()
for part, trained in zip(whole, (embed, project, unembed)):
    for expected, got in zip(part.parameters(), trained.parameters()):
        torch.testing.assert_close(got.grad, expected.grad.float(), atol=1e-6, rtol=1e-3)
""",
    "docs/recipes.md packed.py": """
documents = [x.transpose(1, 2).double() for x in whole.split(cu_seqlens.diff().tolist(), 1)]
expected = torch.cat([attend(*x, is_causal=True) for x in documents], 1).transpose(0, 1)
expected = expected.chunk(2)[int(os.environ["RANK"])]
torch.testing.assert_close(out, expected.float(), atol=1e-5, rtol=1e-5)
""",
    "docs/recipes.md two_orders.py": """
exact = whole.double().requires_grad_()
q = exact.unflatten(2, (4, 16)).transpose(1, 2)
expected = attend(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
expected.square().sum().backward()
for result, want in ((y, expected), (x.grad, exact.grad)):
    want = want.float().chunk(2, 1)[int(os.environ["RANK"])]
    torch.testing.assert_close(result, want, atol=1e-5, rtol=1e-5)
""",
    "docs/recipes.md latents.py": """
torch.manual_seed(0)
q, latent = torch.randn(1, H, S, 48).double(), torch.randn(1, 1, S, 64).double()
weight = torch.randn(latent_channels, H * 64).double()
expected = attend(q, *expand(latent, weight), is_causal=True)
torch.testing.assert_close(out, tritoncp.shard(expected, plan, dim=2).float(), atol=1e-4, rtol=1e-4)
""",
    "docs/recipes.md largest_scores.py": """
scores = (whole[0] @ whole[1].mT * 0.25).masked_fill(torch.ones(512, 512).triu(1).bool(), -torch.inf)
torch.testing.assert_close(largest, scores.amax((0, 2, 3)))
""",
    "docs/state.md state.py": """
def expected(slope):
    rule = lambda score, b, h, q_idx, kv_idx: score - slope * (q_idx - kv_idx)
    return reference.dense_attention(q.double(), k.double(), v.double(), before, rule).out.float()

documents = torch.arange(256) // 100
before = tritoncp.create_block_mask(tritoncp.causal() & tritoncp.document(ids=documents), 1, 1, 256, 256)
torch.testing.assert_close(first, expected(0.5), atol=1e-5, rtol=1e-5)
torch.testing.assert_close(second, expected(1.0), atol=1e-5, rtol=1e-5)
assert "captured tensor" in printed and "old state of documents" in printed, printed
""",
    "docs/torch_compile.md compiled.py": """
mask = tritoncp.create_block_mask(documents, 1, 1, 256, 256)
expected = reference.dense_attention(*[x.double()] * 3, mask, alibi).out
torch.testing.assert_close(out, expected.float(), atol=1e-5, rtol=1e-5)
assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
""",
}
TWO_RANKS = ("README.md", "docs/own_loop.md", "docs/recipes.md")
PAGES = sorted({place.split()[0] for place in CHECKS})
MAX_LINES = 100  # of the README


def find_programs() -> dict[str, str]:
    """Return the Python blocks of the pages by page and file name, the end of a block's first line."""
    programs = {}
    for page in PAGES:
        for text in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
            name = re.search(r"^# .*?(\w+\.py)$", text.splitlines()[0])
            assert name, f"{page}: the first line of a program is its command, as # python name.py"
            programs[f"{page} {name[1]}"] = text
    return programs


def test_every_python_block_is_a_program_that_is_checked():
    recipes = {f"docs/recipes.md {name}.py" for name in ("generate_beside_training", "skip_bad_batches")}
    elsewhere = recipes | {"docs/own_loop.md own_loop.py"}  # tests/multiprocess/test_pages.py
    programs = find_programs()
    assert programs.keys() == CHECKS.keys() | elsewhere
    lines = programs["README.md five_lines.py"].splitlines()
    assert len(lines) == 7 and lines[-2] == "out = tritoncp.flex_attention(q, k, v, block_mask, mesh)"
    code = [line for line in programs["docs/recipes.md drop_in.py"].splitlines() if line.strip()]
    assert len(code) <= 20, "the drop-in fits a screen"


@pytest.mark.parametrize("place", [place for place in CHECKS if place.startswith(TWO_RANKS)])
def test_a_program_of_a_page_runs_as_printed_on_two_ranks(place, tmp_path, monkeypatch):
    (tmp_path / "program.py").write_text(find_programs()[place])
    monkeypatch.setenv("TRITON_INTERPRET", "0")

    def compare(variables, output):
        exec(CHECKS[place], variables | {"attend": F.scaled_dot_product_attention, "os": os})

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*places blocks.*")
        ranks.run_program(2, tmp_path / "program.py", compare)


@pytest.mark.parametrize(
    "place",
    [
        "docs/state.md state.py",
        pytest.param("docs/torch_compile.md compiled.py", marks=pytest.mark.long),  # needs a C++ compiler
    ],
)
def test_a_program_of_a_page_runs_as_printed_in_one_process(place, tmp_path, capsys):
    (tmp_path / "program.py").write_text(find_programs()[place])
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    variables = runpy.run_path(str(tmp_path / "program.py"))
    extra = {"printed": capsys.readouterr().out, "counters": torch._dynamo.utils.counters}
    exec(CHECKS[place], variables | extra | {"reference": dense, "torch": torch})


def test_the_readme_is_short_and_its_pages_exist():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < MAX_LINES
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert (ROOT / link).exists(), f"README.md links {link}"


def test_the_command_of_the_pages_draws_the_picture_of_the_readme(tmp_path):
    page = (ROOT / "docs/commands.md").read_text()
    (command,) = re.findall(r"tritoncp (plan .*) --png docs/images/plan.png", page)
    assert f"tritoncp {command} --png" in (ROOT / "README.md").read_text().replace("\n", " ")
    result = CliRunner().invoke(main, [*command.split(), "--png", str(tmp_path / "plan.png")])
    assert result.exit_code == 0, result.output
    drawn, kept = (Image.open(path) for path in (tmp_path / "plan.png", ROOT / "docs/images/plan.png"))
    assert drawn.size == kept.size and (ROOT / "docs/images/plan.png").stat().st_size < 250_000
    # Texts differ between versions of Matplotlib; the coloured blocks of the mask do not.
    area = (0.07, 0.1, 0.54, 0.68)
    width, height = kept.size
    box = tuple(int(part * side) for part, side in zip(area, (width, height, width, height)))
    difference = ImageChops.difference(*(image.convert("RGB").crop(box) for image in (drawn, kept)))
    assert difference.getbbox() is None, "the picture is of another plan: run the command of docs/commands.md"


def test_no_file_names_a_registry():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    files = [ROOT / name for name in listed.stdout.split("\0") if name] or [ROOT / "Makefile"]
    for path in files:
        if path.is_file() and path.suffix in {"", ".txt", ".toml", ".md", ".yaml", ".yml"}:
            text = path.read_text()
            assert not re.search(r"--(extra-)?index-url|pypi\.org|download\.pytorch", text), path
