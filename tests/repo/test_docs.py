"""README.md and pages of docs/: programs and Python blocks run as printed, with the answers of the oracle;
commands and links exist; pictures are those of the blocks above them."""

import ast
import importlib.util
import inspect
import logging
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import click
import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from PIL import Image, ImageChops
from torch import Tensor
from torch._inductor import config as inductor_config

import tritoncp
from tests.command_process import invoke
from tests.multiprocess import ranks
from tritoncp import cli
from tritoncp.core.processes import use_loopback_interface
from tritoncp.kernels import options
from tritoncp.reference.dense import dense_attention

pytestmark = pytest.mark.usefixtures("cpu_engine")
ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))
gallery, tables = map(importlib.import_module, ("gallery", "tables"))
ELSEWHERE = {
    "compiled_kernels.md",
    "transformers.md",
    "trl.md",
}  # tests/compiled and tests/integrations run their programs
PAGES = ["../README.md", *sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))]
PICTURES = {
    block.picture: page
    for page in ("masks.md", "schedules.md", "selected_keys.md")
    for block in gallery.read_blocks((DOCS / page).read_text())
    if block.picture is not None
}
MARKED_FRAGMENT = re.compile(r"<!-- fragment: [^>]+-->\n```python\n.*?^```\n", re.M | re.S)
PROGRAM = re.compile(
    r"# (?:torchrun --nproc-per-node (\d)|python) (\w+)\.py\n"
)  # the first line of a program


def read_blocks(page: str) -> list[Any]:
    """List the Python blocks of a page that are not marked as fragments."""
    return gallery.read_blocks(MARKED_FRAGMENT.sub("", (DOCS / page).read_text()))


BLOCKS = {
    page: [block.code for block in blocks]
    for page in PAGES
    if page not in ELSEWHERE and (blocks := read_blocks(page))
}
PROGRAMS = {
    program[2]: (int(program[1] or 1), code)
    for codes in BLOCKS.values()
    for code in codes
    if (program := PROGRAM.match(code))
}
CHECKS = tomllib.loads(Path(__file__).with_name("page_checks.toml").read_text())  # by program


@pytest.fixture(autouse=True)
def programs_of_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Run programs in an empty folder, without wandb and tensorboard; restore the level of our logger."""
    monkeypatch.chdir(tmp_path)
    for name in ("wandb", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, mock.MagicMock())
    log = logging.getLogger("tritoncp")
    level = log.level
    yield
    log.setLevel(level)


def test_the_api_reference_has_every_public_name() -> None:
    text = (DOCS / "api.md").read_text()
    directives = set(re.findall(r"^\.\. (?:auto)?(?:function|class|data):: (?:[\w.]+\.)?(\w+)$", text, re.M))
    assert set(tritoncp.__all__) <= directives
    assert ".. automodule:: tritoncp.chunking\n" in text


def test_the_page_of_kernel_options_has_each_option_and_its_values() -> None:
    table, left_out = (DOCS / "kernel_options.md").read_text().split("These options of torch's kernels")
    rows = re.findall(r"^\| \**(`[^|]*`)\** \| ([^|]*) \|", table, re.M)
    values, listed = "", {}
    for names, cell in rows:
        values = values if cell == "the same" else cell
        listed |= dict.fromkeys(re.findall(r"`(\w+)`", names), values)
    assert set(listed) == {*options._FIELDS, *options.OWN}
    assert set(re.findall(r"`(\w+)`", left_out.split("```")[0])) == options.LEFT_OUT.keys()
    for option, name in options._FIELDS.items():
        allowed = options._ALLOWED.get("BLOCK" if name.startswith("BLOCK") else name, options._SWITCH)
        if len(allowed) < 8:
            assert listed[option] == ", ".join(map(str, allowed))
        else:
            numbers = [value for value in allowed if value is not None]
            assert f"{numbers[0]} to {numbers[-1]}" in listed[option]
    assert listed["ROUTE"] == ", ".join(f'`"{route}"`' for route in options.ROUTES)
    assert listed["PRECISION"] == ", ".join(f'`"{precision}"`' for precision in options.PRECISIONS)


def test_flex_attention_describes_each_argument_result_and_error() -> None:
    """In sections that editors and the site show, after an example."""
    text = inspect.getdoc(tritoncp.flex_attention) or ""
    places = [text.index(f"\n{part}") for part in (">>> ", "Args:\n", "Returns:\n", "Raises:\n")]
    assert places == sorted(places)
    arguments = text.split("\nArgs:\n")[1].split("\nReturns:\n")[0]
    described = re.findall(r"^    (\w+): ", arguments, re.M)
    assert described == list(inspect.signature(tritoncp.flex_attention).parameters)


@pytest.mark.parametrize("page", BLOCKS)
def test_blocks_of_a_page_run_as_printed(page: str, tmp_path: Path) -> None:
    """Blocks that are no programs run in order, in one namespace, as in a notebook."""
    (tmp_path / "page.py").write_text("\n".join(code for code in BLOCKS[page] if not PROGRAM.match(code)))
    runpy.run_path(str(tmp_path / "page.py"))


def run_program(name: str, path: Path, result: Any, world_size: int | None = None) -> list[Any]:
    """Run a program of a page, on as many ranks as its first line says; see :func:`ranks.run_program`."""
    count, code = PROGRAMS[name]
    path.write_text(code)
    return ranks.run_program(world_size or count, path, result)


OTHERS = [name for name in PROGRAMS if name not in ("own_loop", "train", "skip_bad_batches")]  # tests below
# Other tests make the calls of these: `make test-all` runs them.
RARE = {
    "balanced",
    "compiled",
    "drafts",
    "generate_beside_training",
    "largest_scores",
    "latents",
    "packed",
    "two_orders",
}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in RARE)) for name in OTHERS]
)
@pytest.mark.filterwarnings("error:.*places blocks", "error:block_mask without a plan")
def test_a_program_of_a_page_runs_as_printed(name: str, tmp_path: Path) -> None:
    assert CHECKS.keys() | RARE <= PROGRAMS.keys()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    scope = {"attend": F.scaled_dot_product_attention, "dense_attention": dense_attention, "os": os}
    scope |= {"torch": torch, "counters": torch._dynamo.utils.counters}

    def compare(variables: dict[str, Any], output: str) -> None:
        exec(CHECKS.get(name, ""), variables | scope | {"output": output})

    with inductor_config.patch(compile_threads=1):  # a fork has no threads of its parent's pool
        run_program(name, tmp_path / "program.py", compare)


def bodies_with_a_group(code: str) -> Iterator[list[str]]:
    """Yield the statements of each body (of a module, function, ...) that makes or destroys the default
    process group itself."""
    for node in ast.walk(ast.parse(code)):
        body = getattr(node, "body", None)
        lines = [ast.unparse(statement) for statement in body] if isinstance(body, list) else []
        calls = "(init|destroy)_process_group" + "|init_device_mesh" * isinstance(node, ast.Module)
        if any(re.match(rf"(\w+ = )?[\w.]*({calls})\(", line) for line in lines):
            yield lines


def test_every_program_with_a_process_group_leaves_it_together() -> None:
    """A program that ends without these lines fails at random: docs/troubleshooting.md says why."""
    codes = {page: [block.code for block in gallery.read_blocks((DOCS / page).read_text())] for page in PAGES}
    codes |= {path.name: [path.read_text()] for path in (ROOT / "examples").glob("*.py")}
    ends = [
        (place, [line.rpartition("distributed.")[2].removeprefix("dist.") for line in lines[-2:]])
        for place, texts in codes.items()
        for text in texts
        for lines in bodies_with_a_group(text)
    ]
    assert [end for end in ends if end[1] != ["barrier()", "destroy_process_group()"]] == []
    programs = [text for texts in codes.values() for text in texts if re.match(r"# torchrun .* [2-9] ", text)]
    assert len(ends) >= len(programs) > 10


def test_programs_of_one_name_are_one_program() -> None:
    codes: dict[str, set[str]] = {}
    for blocks in BLOCKS.values():
        for code in blocks:
            if program := PROGRAM.match(code):
                codes.setdefault(program[2], set()).add(code)
    assert {name for name, texts in codes.items() if len(texts) > 1} == set()


def training(variables: dict[str, Any], output: str) -> tuple[list[float], list[Tensor], str]:
    """Return the losses, the gradients of the last step, and the output of a program that trains a model."""
    return variables["losses"], [weight.grad for weight in variables["model"].parameters()], output


@pytest.mark.long
@pytest.mark.parametrize("name", ["own_loop", "train"])
def test_a_program_trains_on_two_ranks_as_on_one(name: str, tmp_path: Path) -> None:
    ((losses, gradients, _),) = run_program(name, tmp_path / "program.py", training, 1)
    assert len(set(losses)) == len(losses) > 1
    for rank, (losses_of_rank, gradients_of_rank, output) in enumerate(
        run_program(name, tmp_path / "program.py", training)
    ):
        torch.testing.assert_close(losses_of_rank, losses, rtol=1e-6, atol=0)
        for actual, expected in zip(gradients_of_rank, gradients, strict=True):
            limit = 3e-6 * expected.abs().max().item()
            torch.testing.assert_close(actual, expected, rtol=0, atol=limit)
        assert len(output.splitlines()) == (len(losses) if rank == 0 else 0)


@pytest.mark.long
def test_a_batch_that_one_rank_refuses_is_skipped_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The losses equal one rank that trains without that batch."""
    name, path, losses = (
        "skip_bad_batches",
        tmp_path / "program.py",
        lambda variables, output: variables["losses"],
    )
    of_ranks = run_program(name, path, losses)
    text = PROGRAMS[name][1].replace("for step in range(5):", "for step in (0, 1, 3, 4):")
    monkeypatch.setitem(PROGRAMS, name, (1, text))
    (alone,) = run_program(name, path, losses)
    assert len(set(alone)) == 4
    for of_rank in of_ranks:
        torch.testing.assert_close(of_rank, alone, rtol=1e-5, atol=0)


@pytest.mark.long
def test_two_agents_of_torchrun_meet_as_on_two_hosts(tmp_path: Path) -> None:
    """The last commands of the page, as printed but for the port, which another process may use."""
    (tmp_path / "train.py").write_text(PROGRAMS["train"][1])
    commands = re.findall(r"```bash\n(.*?)```", (DOCS / "several_hosts.md").read_text(), re.DOTALL)[-1]
    use_loopback_interface()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        ["bash", "-e", "-c", commands.replace("29500", str(ranks.unused_port())) + "wait $!\n"],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    steps = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("step")]
    assert steps == ["0", "1"], "rank 0 alone prints"


def shell_commands(text: str) -> list[list[str]]:
    """List the commands in the shell blocks of a page as words, without comments and pipes."""
    blocks = "".join(re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S)).replace("\\\n", " ")
    words = [shlex.split(line, comments=True) for line in blocks.splitlines()]
    return [line[: line.index("|")] if "|" in line else line for line in words if line]


def wrong_options(words: list[str]) -> list[str]:
    """List the words of a call of tritoncp that are no command or no option of it."""
    command: click.Command = cli.main
    words = [word.partition("=")[0] for word in words]
    while isinstance(command, click.Group) and words:
        if words[0] not in command.commands:
            return [] if words[0].startswith("-") else words[:1]
        command = command.commands[words.pop(0)]
    options = {name for parameter in command.params for name in parameter.opts} | {"--help", "-h"}
    return [word for word in words if re.match(r"-+[a-z]", word) and word not in options]


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_exist(page: str) -> None:
    targets = set(re.findall(r"^([a-z]+):.*## ", (ROOT / "Makefile").read_text(), re.M))
    for words in shell_commands((DOCS / page).read_text()):
        if words[0] == "make":
            assert {word for word in words[1:] if re.fullmatch("[a-z]+", word)} <= targets, words
        if "tritoncp" in words and "install" not in words:
            assert not wrong_options(words[words.index("tritoncp") + 1 :]), words
        for module in [after for word, after in pairwise(words) if word == "-m" and "." in after]:
            assert importlib.util.find_spec(module) is not None, words


@pytest.fixture(scope="module")
def entries() -> dict[str, Any]:
    """Run the blocks of the pages with pictures, on the CPU engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "0")
        return {
            entry.picture: entry
            for page in set(PICTURES.values())
            for entry in gallery.run_blocks(DOCS / page)
        }


@pytest.mark.sample(4)
@pytest.mark.parametrize("picture", PICTURES)
def test_a_picture_is_that_of_the_block_above_it(picture: str, entries: dict[str, Any]) -> None:
    digest = gallery.digest_of(gallery.list_panels(entries[picture]))
    assert digest in (DOCS / picture).read_text(), "run python docs/gallery.py"


def test_pictures_are_small_and_each_is_shown() -> None:
    files = [path for folder in ("masks", "schedules", "selected") for path in (DOCS / folder).iterdir()]
    assert {path.relative_to(DOCS).as_posix() for path in files} == PICTURES.keys()
    assert sum(path.stat().st_size for path in files) < 320_000


@pytest.mark.long
@pytest.mark.parametrize("picture", [picture for picture, page in PICTURES.items() if page == "masks.md"])
def test_a_mask_or_mod_of_the_gallery_gives_the_dense_answer(picture: str, entries: dict[str, Any]) -> None:
    entry = entries[picture]
    batch, heads, tokens = entry.size
    score_mod, options = entry.names.get("score_mod"), entry.names.get("options", {})
    mask_mod = entry.names.get("mask_mod", tritoncp.causal())
    mask = tritoncp.create_block_mask(mask_mod, batch, heads, tokens, tokens, BLOCK_SIZE=16)
    visible = gallery_visible(entry, mask_mod)
    inputs = [
        torch.randn(batch, heads, tokens, 16, dtype=torch.float64, requires_grad=True) for _ in range(3)
    ]
    expected = dense_attention(*inputs, visible, score_mod, **options).out
    world = tritoncp.simulate(2)
    plan = world.make_plan(mask)
    shards = [world.shard(x, plan, dim=2) for x in inputs]
    out = world.unshard(world.flex_attention(*shards, score_mod, plan, **options), plan, dim=2)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)
    cotangent = torch.randn_like(out)
    grads = (torch.autograd.grad(x, inputs, cotangent) for x in (out, expected))
    torch.testing.assert_close(*grads, atol=1e-6, rtol=1e-6)


def gallery_visible(entry: gallery.Entry, mask_mod: Any) -> Tensor:
    """Evaluate a mask_mod at every pair: bool [B, H, S, S]."""
    indices = torch.meshgrid(*(torch.arange(n) for n in (*entry.size, entry.size[2])), indexing="ij")
    return mask_mod(*indices).expand(indices[0].shape)


@pytest.mark.parametrize("name", tables.PACKERS)
def test_a_packer_of_the_table_holds_each_sequence_once_and_fits_its_ranks(name: str) -> None:
    for drawn in tables.DRAWN.values():
        lengths = drawn.lengths(64)
        for ranks_of_replica, replicas in ((8, 1), (8, 4), (16, 4)):
            packing = tables.PACKERS[name](lengths, ranks_of_replica, replicas)
            rows = [row for step in packing for row in step]
            assert sorted(i for row in rows for i in row.sequences) == list(range(64))
            for row in rows:
                assert sum(lengths[i] for i in row.sequences) <= row.ranks * tables.TOKENS_PER_RANK
            for step in packing:
                assert sum(row.ranks for row in step) <= ranks_of_replica * replicas


def test_the_readme_is_short_and_its_pages_exist() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 100
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert (ROOT / link).exists(), f"README.md links {link}"


@pytest.mark.long
def test_the_command_of_the_pages_draws_the_picture_of_the_readme(tmp_path: Path) -> None:
    page = (ROOT / "docs/commands.md").read_text()
    (command,) = re.findall(r"tritoncp (plan .*) --png docs/images/plan.png", page)
    assert f"tritoncp {command} --png" in (ROOT / "README.md").read_text().replace("\n", " ")
    result = invoke(*command.split(), "--png", str(tmp_path / "plan.png"))
    assert result.exit_code == 0, result.output
    drawn, kept = (Image.open(path) for path in (tmp_path / "plan.png", ROOT / "docs/images/plan.png"))
    assert drawn.size == kept.size and (ROOT / "docs/images/plan.png").stat().st_size < 250_000
    # Texts differ between versions of Matplotlib; the coloured blocks of the mask do not.
    area = (0.07, 0.1, 0.54, 0.68)
    width, height = kept.size
    box = tuple(int(part * side) for part, side in zip(area, (width, height, width, height)))
    difference = ImageChops.difference(*(image.convert("RGB").crop(box) for image in (drawn, kept)))
    assert difference.getbbox() is None, "the picture is of another plan: run the command of docs/commands.md"


def test_no_file_names_a_registry() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    files = [ROOT / name for name in listed.stdout.split("\0") if name] or [ROOT / "Makefile"]
    for path in files:
        if path.is_file() and path.suffix in {"", ".txt", ".toml", ".md", ".yaml", ".yml"}:
            text = path.read_text()
            assert not re.search(r"--(extra-)?index-url|pypi\.org|download\.pytorch", text), path
