"""The pages of docs/: Python blocks run as printed, pictures are those of the blocks
above them, and masks of the gallery give the dense answers."""

import importlib.util
import logging
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import click
import pytest
import torch
from torch import Tensor

import tritoncp
from tests.multiprocess import ranks
from tritoncp import cli
from tritoncp.reference.dense import dense_attention

pytestmark = pytest.mark.usefixtures("cpu_engine")
ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))
gallery = importlib.import_module("gallery")
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
PICTURES = {
    block.picture: page
    for page in ("masks.md", "schedules.md")
    for block in gallery.read_blocks((DOCS / page).read_text())
    if block.picture is not None
}
MARKED_FRAGMENT = re.compile(r"<!-- fragment: [^>]+-->\n```python\n.*?^```\n", re.M | re.S)
PROGRAM = re.compile(r"# torchrun --nproc-per-node 2 (\w+\.py)\n")


@pytest.fixture(autouse=True)
def programs_of_others(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stand in for wandb and tensorboard, and restore the level of the package's logger."""
    for name in ("wandb", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, mock.MagicMock())
    log = logging.getLogger("tritoncp")
    level = log.level
    yield
    log.setLevel(level)


def read_blocks(page: str) -> list[Any]:
    """List the Python blocks of a page that are not marked as fragments."""
    return gallery.read_blocks(MARKED_FRAGMENT.sub("", (DOCS / page).read_text()))


def pages_to_run() -> list[str]:
    """List the pages with Python blocks that no other test names: other tests run those that they name."""
    tests = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    named = set(re.findall(r"\bdocs/([\w/]+\.md)\b", "".join(path.read_text() for path in tests)))
    return [page for page in PAGES if page not in named and read_blocks(page)]


def programs_to_run() -> list[tuple[str, str]]:
    """List (page, file name) of the blocks that are programs for two ranks."""
    return [
        (page, program[1])
        for page in pages_to_run()
        for block in read_blocks(page)
        if (program := PROGRAM.match(block.code))
    ]


def test_the_api_reference_has_every_public_name() -> None:
    text = (DOCS / "api.md").read_text()
    directives = set(re.findall(r"^\.\. (?:auto)?(?:function|class|data):: (?:[\w.]+\.)?(\w+)$", text, re.M))
    assert set(tritoncp.__all__) <= directives
    assert ".. automodule:: tritoncp.chunking\n" in text


@pytest.mark.parametrize("page", pages_to_run())
def test_blocks_of_a_page_run_as_printed(page: str, tmp_path: Path) -> None:
    """Blocks that are no programs run in order, in one namespace, as in a notebook."""
    blocks = [block.code for block in read_blocks(page) if not re.match(r"# .*\w\.py\n", block.code)]
    (tmp_path / "page.py").write_text("\n".join(blocks))
    runpy.run_path(str(tmp_path / "page.py"))


@pytest.mark.parametrize(("page", "name"), programs_to_run())
def test_a_program_of_a_page_runs_as_printed_on_two_ranks(page: str, name: str, tmp_path: Path) -> None:
    (text,) = [block.code for block in read_blocks(page) if block.code.split("\n")[0].endswith(f" {name}")]
    (tmp_path / name).write_text(text)

    def compare(names: dict[str, Any], output: str) -> None:
        if name == "two_ranks.py":
            assert names["error"] < 5e-5  # float32 gradients: sums of up to 1000 terms, in another order
        if name == "tree_step.py":
            assert names["error"] < 5e-5
        if name == "moved.py":
            exact = (x.double() for x in names["whole"])
            expected = dense_attention(*exact, names["mask"], tritoncp.alibi(names["H"])).out
            torch.testing.assert_close(names["result"], expected.float(), atol=1e-5, rtol=1e-5)

    ranks.run_program(2, tmp_path / name, compare)


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


@pytest.mark.parametrize("page", ["../README.md", *PAGES])
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
    """Run the blocks of the pages with pictures."""
    return {
        entry.picture: entry for page in set(PICTURES.values()) for entry in gallery.run_blocks(DOCS / page)
    }


@pytest.mark.parametrize("picture", PICTURES)
def test_a_picture_is_that_of_the_block_above_it(picture: str, entries: dict[str, Any]) -> None:
    digest = gallery.digest_of(gallery.list_panels(entries[picture]))
    assert digest in (DOCS / picture).read_text(), "run python docs/gallery.py"


def test_pictures_are_small_and_each_is_shown() -> None:
    files = [path for folder in ("masks", "schedules") for path in (DOCS / folder).iterdir()]
    assert {path.relative_to(DOCS).as_posix() for path in files} == PICTURES.keys()
    assert sum(path.stat().st_size for path in files) < 300_000


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
    expected = dense_attention(*inputs, visible, score_mod)
    if options:  # a sink is one more logit, without a value
        sinks = options["sinks"][:, None]
        out = expected.out * torch.sigmoid(expected.lse - sinks)[..., None]
    else:
        out = expected.out
    cotangent = torch.randn_like(out)
    wants = torch.autograd.grad(out, inputs, cotangent)

    alone = tritoncp.flex_attention(*(x.detach() for x in inputs), score_mod, mask, **options)
    torch.testing.assert_close(alone, out, atol=1e-6, rtol=1e-6)
    world = tritoncp.simulate(2)
    plan = world.make_plan(mask)
    shards = [world.shard(x, plan, dim=2) for x in inputs]
    two = world.unshard(world.flex_attention(*shards, score_mod, plan, **options), plan, dim=2)
    torch.testing.assert_close(two, out, atol=1e-6, rtol=1e-6)
    for got, want in zip(torch.autograd.grad(two, inputs, cotangent), wants, strict=True):
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)


def gallery_visible(entry: gallery.Entry, mask_mod: Any) -> Tensor:
    """Evaluate a mask_mod at every pair: bool [B, H, S, S]."""
    indices = torch.meshgrid(*(torch.arange(n) for n in (*entry.size, entry.size[2])), indexing="ij")
    return mask_mod(*indices).expand(indices[0].shape)
