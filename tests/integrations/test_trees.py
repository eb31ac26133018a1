"""Models of transformers on prefix trees: losses and gradients of each trajectory alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Llama4ForCausalLM, Llama4TextConfig

import tritoncp
from tests.integrations import transformers_models as models
from tests.multiprocess import ranks
from tritoncp.integrations.transformers import shard_batch
from tritoncp.integrations.transformers.tree_rows import pack_rows

pytestmark = pytest.mark.usefixtures("cpu_engine")
TOKENS = torch.randint(1, models.VOCABULARY, (90,), generator=torch.Generator().manual_seed(3))
TRAJECTORIES = [TOKENS[:60], torch.cat([TOKENS[:40], TOKENS[60:]]), torch.cat([TOKENS[:40], TOKENS[:25]])]
PACKED = tritoncp.pack_trajectories(TRAJECTORIES)
LABELS = PACKED.tokens.roll(-1)  # labels of rows: any labels will do
ROW = {"input_ids": PACKED.tokens[None], "shift_labels": LABELS[None]}


def loss_and_gradients(model: Any, logits: Tensor, labels: Tensor) -> Any:
    """Return the sum of the losses of rows, and its gradients."""
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss.backward()
    return loss.detach(), {name: weight.grad for name, weight in model.named_parameters()}


def of_trajectories(name: str) -> Any:
    """Return the same from logits of each trajectory alone, which are put together to logits of the tree."""
    model = models.build_model(name, "eager")
    rows = [model(x[None], use_cache=False).logits[0] for x in TRAJECTORIES]
    paths = torch.cat(PACKED.paths)
    first = torch.stack([(paths == token).nonzero()[0, 0] for token in range(len(PACKED.tokens))])
    return loss_and_gradients(model, torch.cat(rows)[first][None], LABELS[None])


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_tree_has_the_losses_of_its_trajectories(name: str, world_size: int) -> None:
    """This holds also in layers with windows, which count along paths."""
    assert len(PACKED.tokens) < sum(map(len, TRAJECTORIES))

    def work(group: Any) -> Any:
        model = models.build_model(name)
        mesh = group if world_size > 1 else None
        local = shard_batch(ROW, model, mesh, BLOCK_SIZE=16, tree=PACKED)
        logits = model(**{name: x for name, x in local.items() if "labels" not in name}).logits
        loss, gradients = loss_and_gradients(model, logits, local["shift_labels"])
        for x in (loss, *gradients.values()):
            dist.all_reduce(x)
        return loss, gradients

    loss, gradients = of_trajectories(name)
    for result in ranks.run(world_size, work):
        torch.testing.assert_close(result[0], loss, rtol=1e-6, atol=1e-4)
        torch.testing.assert_close(result[1], gradients, rtol=0, atol=3e-4)  # of sums, not means


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "labels": ({"labels": LABELS[None]}, "the batch has labels beside a tree"),
    "positions": ({"position_ids": LABELS[None]}, "the batch has position_ids beside a tree"),
    "padding": ({"attention_mask": LABELS[None]}, "the batch has attention_mask beside a tree"),
    "other tokens": ({"input_ids": LABELS[None, :9]}, r"input_ids is \[1, 9\]; the tokens of the tree"),
}


@pytest.mark.parametrize("name", WRONG)
def test_arguments_without_a_meaning_for_trees_are_refused(name: str) -> None:
    values, reason = WRONG[name]
    with pytest.raises(ValueError, match=reason):
        shard_batch(ROW | values, models.build_model("Llama"), tree=PACKED)


def test_layers_that_see_no_tree_are_refused() -> None:
    chunked = Llama4ForCausalLM(
        Llama4TextConfig(
            **models.COMMON, num_local_experts=2, attention_chunk_size=16, attn_implementation="tritoncp"
        )
    )
    bidirectional = models.build_model("Llama").base_model
    bidirectional.config.is_causal = False
    cases = {
        "read the tokens of a row in their order": models.build_model("Qwen3Next"),
        "attend within chunks": chunked,
        "layers of the kind": bidirectional,
    }
    for reason, model in cases.items():
        with pytest.raises(ValueError, match=reason):
            shard_batch(ROW, model, tree=PACKED)


@pytest.mark.parametrize("seed", range(5))
def test_rows_of_a_tree_have_the_tokens_and_labels_of_the_sequences(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, (7, 12), generator=generator)  # few tokens: long shared prefixes
    ids[:, :4] = ids[0, :4] * (torch.arange(7)[:, None] < 5)
    mask = (torch.arange(12) >= torch.randint(3, (7, 1), generator=generator)).long()
    mask *= torch.arange(12) < torch.randint(9, 13, (7, 1), generator=generator)
    keep = 6
    rows = pack_rows(ids, mask, keep)
    kept = ids[mask.bool()].split(mask.sum(1).tolist())
    assert all(map(torch.equal, rows.tree.unpack(rows.tree.tokens), kept))
    assert len(rows.labels) < mask.sum()
    labels = torch.cat([rows.labels, torch.tensor([-100])])[rows.source]
    assert torch.equal(labels, ids.masked_fill(mask == 0, -100)[:, -keep:])
    needed = torch.zeros(len(rows.labels) + 1, dtype=torch.bool).index_fill(0, rows.source.flatten(), True)[
        :-1
    ]
    assert torch.equal(rows.labels != -100, needed)
