"""Recurrent layers have the plan of the current call, also when a checkpoint recomputes them, and not
later."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import MambaConfig, MambaForCausalLM
from transformers.models.mamba.modeling_mamba import MambaBlock

from tests.integrations import transformers_models as models
from tests.multiprocess import ranks
from tritoncp.integrations.transformers import register, shard_batch
from tritoncp.integrations.transformers.packed_rows import PackedRows

pytestmark = pytest.mark.usefixtures("cpu_engine")
TOKENS = torch.randint(3, 61, (2, 32), generator=torch.Generator().manual_seed(0))


def build() -> Any:
    register()
    torch.manual_seed(0)
    return MambaForCausalLM(
        MambaConfig(
            vocab_size=61, hidden_size=16, state_size=4, num_hidden_layers=2, attn_implementation="tritoncp"
        )
    ).train()


def batch(row: int) -> dict[str, torch.Tensor]:
    """Return a batch with padding on the left of one row."""
    mask = torch.ones_like(TOKENS)
    mask[row, : 9 + row] = 0
    return {"input_ids": TOKENS, "labels": TOKENS, "attention_mask": mask}


def loss(model: Any, row: int) -> torch.Tensor:
    return model(**shard_batch(batch(row), model, BLOCK_SIZE=8)).loss


def gradients(model: Any, total: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(total, list(model.parameters())))


def wrap(model: Any, kind: str) -> None:
    if kind == "wrapper":
        apply_activation_checkpointing(model, check_fn=lambda part: isinstance(part, MambaBlock))
    else:
        model.activation_checkpointing_enable({"use_reentrant": kind == "reentrant"})


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["own", "reentrant", "wrapper"])
def test_recomputation_has_the_plan_of_its_forward_call(kind: str) -> None:
    model = build()
    if kind != "wrapper":
        wrap(model, kind)
        shard_batch(batch(0), model)
    else:
        shard_batch(batch(0), model)
        wrap(model, kind)  # after the hooks
    model.zero_grad()
    total = loss(model, 0) + loss(model, 1)
    with torch.no_grad():
        model(TOKENS)
    total.backward()
    result = [x.grad for x in model.parameters()]
    plain = build()
    expected = gradients(plain, loss(plain, 0) + loss(plain, 1))
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("kind", models.BATCHES)
def test_layers_of_fsdp_have_the_gradients_of_one_process(kind: str) -> None:
    def work(group: Any) -> Any:
        model = models.build_model("Qwen3Next")
        mesh = init_device_mesh("cpu", (2,))
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh)
            part.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
            part.set_gradient_divide_factor(1.0)
        local = shard_batch(models.BATCHES[kind](), model, group, BLOCK_SIZE=16)
        loss, gradients = models.loss_and_gradients(model, local)
        dist.all_reduce(total := torch.tensor(loss, dtype=torch.float64))
        return total.item(), {name: grad.full_tensor() for name, grad in gradients.items()}

    model = models.build_model("Qwen3Next")
    expected = models.loss_and_gradients(model, shard_batch(models.BATCHES[kind](), model))
    models.assert_equal(ranks.run(2, work)[0], expected)


@pytest.mark.long
def test_recomputation_that_ends_early_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    def work(group: Any) -> list[str]:
        model = build()
        wrap(model, "own")
        caplog.clear()
        model(**shard_batch(batch(0), model, group, BLOCK_SIZE=8)).loss.backward()
        return [record.getMessage() for record in caplog.records]

    assert ranks.run(2, work) == [[], []]


def test_recomputation_by_another_checkpoint_is_refused() -> None:
    model = build()
    for block in model.backbone.layers:
        forward = block.forward
        block.forward = lambda *args, _call=forward, **kw: checkpoint(_call, *args, **kw, use_reentrant=False)
    with pytest.raises(RuntimeError, match=r"use model.activation_checkpointing_enable\(\)"):
        loss(model, 0).backward()


def test_a_plan_ends_with_its_call() -> None:
    model = build().eval()
    with torch.no_grad():
        expected = model.backbone(TOKENS)[0]
        loss(model, 0)
        torch.testing.assert_close(model.backbone(TOKENS)[0], expected, rtol=0, atol=0)
        with pytest.raises(ValueError, match="exactly one of input_ids"):
            model.backbone(**shard_batch(batch(0), model), inputs_embeds=torch.ones(2, 7, 16))
        torch.testing.assert_close(model.backbone(TOKENS)[0], expected, rtol=0, atol=0)


def test_a_model_with_hooks_is_copied_and_saved_without_its_plan() -> None:
    model = build().eval()
    with torch.no_grad():
        expected, padded = model(TOKENS).logits, loss(model, 0)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            hooks = [len(part._forward_pre_hooks) for part in other.modules()]
            torch.testing.assert_close(other(TOKENS).logits, expected, rtol=0, atol=0)
            torch.testing.assert_close(loss(other, 0), padded, rtol=0, atol=0)
            assert hooks == [len(part._forward_pre_hooks) for part in other.modules()]


@pytest.mark.parametrize("is_causal", [True, False])
def test_packed_rows_call_a_function_for_each_document_alone(is_causal: bool) -> None:
    generator = torch.Generator().manual_seed(0)

    def mix(x: torch.Tensor, scale: float = 1.0) -> dict[str, Any]:
        after = 0 if is_causal else x.flip(1).cumsum(1).flip(1)
        return {"out": (x.cumsum(1) + after) * scale, "state": None}

    for rows, length in ((1, 1), (1, 40), (3, 17)):
        documents = (torch.rand(rows, length, generator=generator) < 0.2).cumsum(1)
        x = torch.randn(rows, length, 2, generator=generator, dtype=torch.float64, requires_grad=True)
        packed = PackedRows(documents, is_causal=is_causal)
        out = packed.run(mix, x, scale=2.0)["out"]
        sizes = [ids.unique_consecutive(return_counts=True)[1].tolist() for ids in documents]
        alone = [
            torch.cat([mix(part[None], 2.0)["out"][0] for part in row.split(n)]) for row, n in zip(x, sizes)
        ]
        weight = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        results = [(y, *torch.autograd.grad((y * weight).sum(), x)) for y in (out, torch.stack(alone))]
        torch.testing.assert_close(*results)
        assert not is_causal or len(packed._batches) <= 1 + length.bit_length()
