"""The programs in examples/, on forked ranks with gloo: losses and gradients equal one process."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # AdamW imports it: once here, not in each forked rank
from einops import rearrange
from torch import Tensor
from torch._inductor import config as inductor_config

from tests.multiprocess import ranks

ROOT = Path(__file__).parents[2]
INTEGRATIONS = ("transformers", "torchtitan")  # prefixes of examples that tests/integrations runs
EXAMPLES = [p for p in sorted((ROOT / "examples").glob("*.py")) if not p.stem.startswith(INTEGRATIONS)]
RANKS = {  # 2 for other examples
    "fsdp2_cp_tp": 8,
    "hybrid_layers": 3,
    "pack_and_train": 4,
    "sparse_attention": 4,
    "block_selection": 4,
}


@pytest.fixture(autouse=True)
def cpu_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the programs as a user does: on the CPU engine, and with their folder on the path."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.syspath_prepend(ROOT / "examples")


def check_close(actual: list[Tensor], expected: list[Tensor], limit: float = 3e-6) -> None:
    """Compare tensors, relative to the largest number of each."""
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=limit * b.abs().max().item())


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        "train_loop",
        "packed_documents",
        "hybrid_window_full",
        "hybrid_layers",
        "latent_attention",
        "sparse_attention",
        "block_selection",
        "custom_balancer",
        "varlen_thd",
        "fsdp2_cp_tp",
    ],
)
def test_an_example_has_the_losses_and_gradients_of_one_process(name: str) -> None:
    train = import_module(name).train
    losses, gradients = train()
    assert len(set(losses)) == 2
    assert all(gradient.abs().max() > 0 for gradient in gradients)
    for losses_of_rank, gradients_of_rank in ranks.run(RANKS.get(name, 2), train):
        torch.testing.assert_close(losses_of_rank, losses, rtol=1e-6, atol=0)
        check_close(gradients_of_rank, gradients)


def test_the_latent_of_deepseek_v2_lite_has_a_ninth_of_the_bytes() -> None:
    example = import_module("latent_attention")
    latent, keys = example.bytes_sent(4096, 8, **example.layer_sizes(16, 128, 64, 128, 512))
    assert latent * 5120 == keys * 576


@pytest.mark.long
@pytest.mark.parametrize(("name", "every"), [("sparse_attention", 512), ("block_selection", 16)])
def test_a_comparison_is_printed_and_the_choice_of_keys_matters(
    name: str, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = import_module(name)
    first, second = ranks.run_program(
        2, ROOT / f"examples/{name}.py", lambda variables, output: output.splitlines()
    )
    losses, difference, own = first
    alone = float(losses.partition("one process: [")[2].partition(",")[0])
    assert losses.startswith("2 ranks: losses [") and own.startswith("rank 0: losses [")
    assert float(difference.removeprefix("gradients differ by ").split()[0]) < 3e-6
    assert len(second) == 1
    kept = example.train(steps=1)[0][0]
    monkeypatch.setattr(example, "KEPT", every)
    assert alone == pytest.approx(kept) != pytest.approx(example.train(steps=1)[0][0])


def test_operations_of_absorbed_and_expanded_heads() -> None:
    """Two heads of 3 + 5 channels, values of 7, a latent of 11."""
    count = import_module("latent_attention").operations(2, 3, 5, 7, 11)
    pairs = {"expanded pair": 2 * 2 * (3 + 5 + 7), "absorbed pair": 2 * 2 * (11 + 5 + 11)}
    assert count == pairs | {"expansion": 2 * 2 * 11 * (3 + 7)}


def test_a_custom_balancer_gives_a_fast_rank_more_work() -> None:
    plan = import_module("custom_balancer").plan_by_speed(world_size=3, rank=0)
    fast, slow, other = plan.work
    assert fast == pytest.approx(2 * slow, rel=0.1) and fast == pytest.approx(other, rel=0.1)


def test_each_layer_of_a_hybrid_model_sees_its_mask() -> None:
    """The window of one layer matters: with full attention in both, the first loss differs."""
    example = import_module("hybrid_window_full")
    assert example.train()[0][0] != import_module("train_loop").train()[0][0]


def read_checkpoint_table() -> dict[str, list[int]]:
    """Read the table of docs/torch_compile.md: figures by the name of a way."""
    _, _, table = (ROOT / "docs/torch_compile.md").read_text().partition("| checkpoint of each layer |")
    rows = [line.strip("|").split("|") for line in table.split("\n\n")[0].splitlines()[2:]]
    return {name.strip(): list(map(int, figures)) for name, *figures in rows}


def measure_checkpoints(group: Any, compiled: bool) -> dict[str, Any]:
    example = import_module("selective_checkpoint")
    with inductor_config.patch(compile_threads=1):  # a fork has no threads of its parent's pool
        return {
            name: tuple(example.measure(wrap, group, compiled=compiled))
            for name, wrap in example.WAYS.items()
        }


@pytest.mark.long
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("ignore:.*saves torch's flex_attention")
def test_checkpoints_keep_and_repeat_what_the_page_says(compiled: bool) -> None:
    """The compiled way needs a C++ compiler."""
    page, model = read_checkpoint_table(), import_module("train_loop")
    tables = ranks.run(2, measure_checkpoints, compiled)
    *_, loss, gradients = tables[0]["no checkpoint"]
    for table in tables:
        for name, (kept, gathers, repeated, loss_of_way, gradients_of_way) in table.items():
            kept_eagerly, kept_compiled, *counts = page[name]
            assert round(kept / 1024) == (kept_compiled if compiled else kept_eagerly), name
            assert [gathers, repeated] == counts, name
            assert loss_of_way == pytest.approx(loss, rel=1e-6)
            check_close(gradients_of_way, gradients)
        saved = table["checkpoint_policy()"][0] - table["nothing saved"][0]
        results = model.LAYERS * model.SIZE // 2 * 4 * (model.WIDTH + model.HEADS)  # out and lse
        assert 0 <= saved - results <= 8 * compiled  # the handle of the plan
    assert page.keys() == tables[0].keys()


@pytest.mark.long
def test_the_program_prints_its_table_once_and_the_losses_of_each_rank() -> None:
    """It runs as under torchrun, by `launch` of train_loop.py, which starts nearly all examples."""
    path = ROOT / "examples/selective_checkpoint.py"
    first, second = ranks.run_program(2, path, lambda variables, output: output.splitlines())
    *table, losses = first
    printed = {line[:34].strip(): list(map(int, line[34:].split())) for line in table[1:]}
    of_page = {name: [kept, *counts] for name, (kept, _, *counts) in read_checkpoint_table().items()}
    assert printed == of_page and list(printed) == list(import_module("selective_checkpoint").WAYS)
    assert second == [losses.replace("rank 0", "rank 1")]


@pytest.mark.long
def test_training_resumes_on_more_ranks_with_the_losses_of_one_run(tmp_path: Path) -> None:
    train = import_module("resume_on_more_ranks").train
    import_module("padded_batches").train_step()  # imports what the forked ranks would import each
    (through, *rest) = ranks.run(4, train, tmp_path / "through.pt", 4)
    assert all(losses == through for losses in rest)
    before = ranks.run(4, train, tmp_path / "resumed.pt", 2)[0]
    saved = torch.load(tmp_path / "resumed.pt", weights_only=True)
    assert saved.keys() == {"model", "optimizer", "step"}
    after = ranks.run(8, train, tmp_path / "resumed.pt", 2)[7]
    torch.testing.assert_close(before + after, through, rtol=1e-5, atol=1e-5)
    assert len(set(through)) == 4


@pytest.mark.long
def test_replicas_on_packed_sequences_resume_with_the_losses_of_one_process(tmp_path: Path) -> None:
    """One process trains on the micro-batches of both replicas."""
    example = import_module("pack_and_train")
    through = example.train(None, tmp_path / "through.pt", 4)
    assert len(set(through)) == 4
    for steps in (range(0, 2), range(2, 4)):
        for losses in ranks.run(4, example.train, tmp_path / "resumed.pt", 2):
            torch.testing.assert_close(losses, through[steps.start : steps.stop], rtol=1e-5, atol=1e-5)
    epoch = example.Epoch(range(2), 2, 0)
    assert sorted(i for batch in epoch.batches for i in batch.sequences) == list(range(len(example.LENGTHS)))
    works = [batch.pairs + 6 * example.WIDTH * batch.tokens for batch in epoch.batches]
    assert all(max(step) <= 1.06 * sum(step) / 2 for step in zip(works[::2], works[1::2]))


@pytest.mark.long
def test_a_padded_batch_has_the_loss_and_gradients_of_its_texts() -> None:
    example = import_module("padded_batches")
    (loss,), grads = example.train_step()  # one process
    for (rank_loss,), rank_grads in ranks.run(3, example.train_step):
        assert rank_loss == pytest.approx(loss, rel=1e-5)
        torch.testing.assert_close(rank_grads, grads, rtol=1e-4, atol=1e-5)

    torch.manual_seed(0)  # the weights of train_step; every text alone, without padding or a mask
    embed = torch.nn.Embedding(example.VOCABULARY, example.HEADS * example.DIM)
    head = torch.nn.Linear(example.HEADS * example.DIM, example.VOCABULARY)
    tokens, _ = example.padded_batch(example.LENGTHS)
    total, count = torch.zeros(()), 0
    for row, length in zip(tokens, example.LENGTHS):
        x = rearrange(embed(row[None, :length]), "b s (h d) -> b h s d", h=example.HEADS)
        out = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        scores = head(rearrange(out, "b h s d -> b s (h d)"))[0, :-1]
        total = total + torch.nn.functional.cross_entropy(scores, row[1:length], reduction="sum")
        count += length - 1
    assert loss == pytest.approx(float(total.detach() / count), rel=1e-5)


def numbers_of_ranks(output: str) -> list[int]:
    """Return the numbers in the lines that each rank prints."""
    lines = [line for line in output.splitlines() if line.startswith("rank ")]
    return sorted(int(line.split()[1].rstrip(":")) for line in lines)


@pytest.mark.long
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_each_rank_of_an_example_prints_its_line(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks have torchrun's environment, but are forked, which takes a tenth of the time."""
    monkeypatch.chdir(tmp_path)
    count = RANKS.get(example.stem, 2)
    outputs = ranks.run_program(count, example, lambda variables, output: output)
    assert numbers_of_ranks("".join(outputs)) == [*range(count)], outputs


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(path, marks=pytest.mark.long if path.stem == "train_loop" else pytest.mark.nightly)
        for path in EXAMPLES
    ],
    ids=lambda path: path.stem,
)
def test_torchrun_starts_an_example_as_its_docstring_says(example: Path, tmp_path: Path) -> None:
    count = RANKS.get(example.stem, 2)
    output = ranks.run_torchrun(count, example, tmp_path)
    assert numbers_of_ranks(output) == [*range(count)], output


def test_an_example_is_short_names_its_command_and_is_listed() -> None:
    listed = re.findall(r"^\| `examples/(\w+\.py)` \|", (ROOT / "docs/own_loop.md").read_text(), re.MULTILINE)
    assert sorted(listed) == [example.name for example in EXAMPLES]
    for example in EXAMPLES:
        text = example.read_text()
        assert len(text.splitlines()) <= 150, example
        count = RANKS.get(example.stem, 2)
        assert f"    torchrun --nproc-per-node {count} examples/{example.name}\n" in text, example


@pytest.mark.long
def test_cells_of_the_tour_run_in_order_and_are_kept_without_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = json.loads((ROOT / "examples/tour.ipynb").read_text())["cells"]
    codes = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["outputs"] for cell in codes] == [[]] * len(codes)
    variables: dict[str, Any] = {}
    for cell in codes:
        exec(compile("".join(cell["source"]), cell["id"], "exec"), variables)
    assert {owner for owner in variables["plan"].owners.flatten().tolist() if owner >= 0} == {0, 1, 2, 3}


def test_absorbed_latent_attention_is_the_same_function() -> None:
    example = import_module("latent_attention")
    losses, gradients = example.train()
    absorbed, absorbed_gradients = example.train(layer=example.AbsorbedLayer)
    torch.testing.assert_close(absorbed, losses, rtol=1e-5, atol=0)
    check_close(absorbed_gradients, gradients, 1e-4)
