"""Tests of the adapter for torchtitan: its Trainer, on CPU ranks, with the Llama-3 debug model."""

import functools
import os
import shutil
import subprocess
import sys
from importlib import import_module, util
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention.flex_attention import create_block_mask

import tritoncp
from tests.command_process import ROOT
from tests.multiprocess import ranks
from tritoncp import Plan, positions
from tritoncp.distributed import collectives
from tritoncp.reference.dense import dense_attention

pytestmark = [pytest.mark.integrations, pytest.mark.usefixtures("cpu_engine")]


@functools.cache
def trainer():
    """Import torchtitan before ranks are forked, and only if a test needs it."""
    return import_module("tests.integrations.titan_training")


def train(group, folder, settings):
    """Train on one rank; return losses, gradients and the number of messages of attention."""
    with mock.patch.object(collectives, "_start", wraps=collectives._start) as start:
        losses, grads = trainer().train(group, str(folder), **settings)
    return losses, grads, start.call_count


def run(world_size, folder, **settings):
    """Train on ranks; check that they agree, and return the results of the first."""
    trainer()
    results = ranks.run(world_size, train, folder, settings, timeout=300)
    assert all(losses == results[0][0] for losses, _, _ in results)
    return results[0]


@functools.cache
def reference(folder, world_size=1, **settings):
    """Train with torchtitan's attention and context parallelism."""
    return run(world_size, folder, adapter=False, **settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("titan")


def assert_same_training(results, want, factor=1):
    losses, grads, _ = results
    assert losses == pytest.approx([factor * loss for loss in want[0]], rel=1e-6)
    for step, step_wanted in zip(grads, want[1], strict=True):
        assert step.keys() == step_wanted.keys()
        for name, grad in step.items():
            torch.testing.assert_close(grad, step_wanted[name], rtol=0, atol=3e-6, msg=name)


@pytest.mark.parametrize("balancer", ["ptrr", "headtail", None])
@pytest.mark.parametrize("backend", ["partial_dtensor", "full_dtensor"])
def test_two_ranks_train_like_torchtitans_ranks_and_like_one_rank(folder, backend, balancer):
    adapted = run(2, folder, adapter=True, cp=2, backend=backend, balancer=balancer)
    assert_same_training(adapted, reference(folder, 2, cp=2, backend=backend))
    # full_dtensor of torchtitan 0.3 reports the sum of the ranks' losses once for each rank
    assert_same_training(adapted, reference(folder), factor=2 if backend == "full_dtensor" else 1)


def test_checkpointing_repeats_messages_unless_it_is_selective(folder):
    runs = {
        kind: run(2, folder, adapter=True, cp=2, backend="partial_dtensor", checkpointing=kind)
        for kind in ("none", "selective", "full")
    }
    for results in runs.values():
        assert_same_training(results, reference(folder))
    assert runs["none"][2] == runs["selective"][2] < runs["full"][2]


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_blocks_compiled_one_by_one(folder, checkpointing):
    settings = {"cp": 2, "backend": "partial_dtensor", "checkpointing": checkpointing, "compiled": True}
    assert_same_training(run(2, folder, adapter=True, **settings), reference(folder))


def test_fully_sharded_data_and_context(folder):
    settings = {"dp": 2, "cp": 2, "backend": "partial_dtensor", "checkpointing": "selective"}
    assert_same_training(run(4, folder, adapter=True, **settings), reference(folder, batch=4))


def test_heads_and_sequence_on_two_dimensions(folder):
    settings = {"tp": 2, "cp": 2, "backend": "partial_dtensor"}
    assert_same_training(run(4, folder, adapter=True, **settings), reference(folder))


def test_stages_of_a_pipeline_and_context(folder):
    trainer()
    settings = {"adapter": True, "pp": 2, "cp": 2, "backend": "partial_dtensor"}
    results = ranks.run(4, train, folder, settings, timeout=300)
    first, last = results[0], results[-1]  # torchtitan has no loss on ranks without the last stage
    grads = [one | other for one, other in zip(first[1], last[1], strict=True)]
    assert_same_training((last[0], grads, 0), reference(folder))


def test_one_rank_with_the_default_backend(folder):
    assert_same_training(run(1, folder, adapter=True, checkpointing="selective"), reference(folder))


@pytest.mark.parametrize("balancer", ["headtail", None])
def test_a_model_that_calls_scaled_dot_product_attention(folder, balancer):
    settings = {"cp": 2, "backend": "partial_dtensor", "attn": "sdpa", "balancer": balancer}
    assert_same_training(run(2, folder, adapter=True, **settings), reference(folder, attn="sdpa"))


def test_a_model_with_sinks_and_windows(folder):
    settings = {"cp": 2, "backend": "partial_dtensor", "model": "gpt_oss", "checkpointing": "selective"}
    assert_same_training(run(2, folder, adapter=True, **settings), reference(folder, model="gpt_oss"))


# -- inputs ----------------------------------------------------------------------------------------------


def prepared_inputs(group):
    from torchtitan.distributed import context_parallel

    from tritoncp.integrations import torchtitan as adapter

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    tokens = torch.arange(2 * 256).view(2, 256)
    batch = tokens, tokens + 1
    index = torch.arange(256).expand(2, -1)

    def prepare(module, masks, balancer, *key):
        kwargs = {"positions": index} | ({} if masks is None else {"attention_masks": masks})
        return module.prepare_context_parallel_input(*batch, kwargs, mesh, "cpu", balancer, *key)

    def assert_same(masks, balancer):
        local, expected = (prepare(module, masks, balancer) for module in (adapter, context_parallel))
        same = [(local[i], expected[i]) for i in (0, 1)] + [(local[2]["positions"], expected[2]["positions"])]
        assert all(torch.equal(a, b) for a, b in same)
        return local[2]["attention_masks"]

    for balancer in ("headtail", None):
        plan = assert_same(None, balancer)
        assert isinstance(plan, Plan) and plan.mask.window == (-1, 0)
    documents = create_block_mask(lambda b, h, q, kv: (q // 50 == kv // 50) & (q >= kv), 2, None, 256, 256,
                                  device="cpu", BLOCK_SIZE=64)  # fmt: skip
    window = create_block_mask(lambda b, h, q, kv: (q - kv < 30) & (q >= kv), None, None, 256, 256,
                               device="cpu", BLOCK_SIZE=64)  # fmt: skip
    assert isinstance(assert_same(documents, "headtail"), Plan)
    masks = {"documents": documents, "window": window}
    _, labels, kwargs = prepare(adapter, masks, "ptrr", "window")
    plans = kwargs["attention_masks"]
    assert plans.keys() == masks.keys() and torch.equal(
        plans["window"].positions, plans["documents"].positions
    )
    assert torch.equal(labels[1], positions(plans["window"])[0] + 257)
    wrong = {
        "pass one of 'headtail', 'ptrr', None": (None, "ring"),
        "is not in attention_masks": (masks, "ptrr", "sliding"),
        "a BlockMask of the whole sequence is needed": ({"documents": torch.ones(2)}, "ptrr"),
    }
    for message, arguments in wrong.items():
        with pytest.raises(ValueError, match=message):
            prepare(adapter, *arguments)


def test_inputs_are_sharded_like_torchtitan_shards_them():
    trainer()
    ranks.run(2, prepared_inputs)


# -- overrides and the example ---------------------------------------------------------------------------


def test_overrides_keep_the_settings_of_what_they_replace():
    titan = trainer()
    from torchtitan.config.override import apply_overrides

    from tritoncp.integrations import torchtitan as adapter

    settings = titan.config("", adapter=True, backend="full_dtensor", cp=2, checkpointing="selective")
    settings.activation_checkpoint.preserve_rng_state = False
    settings.model_spec.model.update_from_config(config=settings)
    apply_overrides(settings.override, settings)
    assert type(settings.activation_checkpoint) is adapter.SelectiveAC.Config
    assert not settings.activation_checkpoint.preserve_rng_state
    for layer in settings.model_spec.model.layers:
        inner = layer.attention.inner_attention
        assert type(inner) is adapter.FlexAttention.Config and inner.block_size == 128
        assert inner.sharding_config.in_dst_shardings == inner.sharding_config.in_src_shardings


def some_heads(group):
    from tritoncp.integrations import torchtitan as adapter

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    module = adapter.FlexAttention.Config().build()
    module.parallelize(SimpleNamespace(get_optional_mesh=lambda name: mesh if name == "tp" else None))
    heads = slice(2 * group.rank(), 2 * group.rank() + 2)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    score_mod = lambda score, b, h, q, kv: score - slopes[h] * (q - kv)  # noqa: E731
    q = torch.randn(1, 64, 4, 8, generator=torch.Generator().manual_seed(1))
    mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 64, 64, device="cpu")
    out = module(*[q[:, :, heads]] * 3, attention_masks=mask, score_mod=score_mod)
    want = dense_attention(*[q.transpose(1, 2)] * 3, causal_mask(), score_mod).out.transpose(1, 2)
    torch.testing.assert_close(out, want[:, :, heads].float(), rtol=0, atol=1e-5)


def causal_mask():
    return tritoncp.create_block_mask(tritoncp.causal(), None, None, 64, 64)


def test_a_score_mod_sees_the_heads_of_the_whole_layer():
    trainer()
    ranks.run(2, some_heads)


PATCHED = """
import sys
from tests.integrations import titan_training
from tests.multiprocess import ranks
import torchtitan
assert torchtitan.__path__[0].startswith(sys.argv[1]), torchtitan.__path__
settings = dict(adapter=True, patched=True, cp=2, backend="partial_dtensor", checkpointing="selective")
results = ranks.run(2, lambda group: titan_training.train(group, sys.argv[1], **settings)[0], timeout=240)
print(*results[0])
"""


def test_the_patch_of_the_example_trains_the_debug_model(folder, tmp_path):
    (source,) = util.find_spec("torchtitan").submodule_search_locations
    shutil.copytree(source, tmp_path / "torchtitan", ignore=shutil.ignore_patterns("__pycache__"))
    page = (ROOT / "examples/torchtitan_llama3.md").read_text()
    assert "patch -p1" in page and "torchtitan_llama3.patch" in page
    with (ROOT / "examples/torchtitan_llama3.patch").open() as patch:
        subprocess.run(["patch", "-p1", "--fuzz=0"], cwd=tmp_path, stdin=patch, check=True, timeout=60)
    command = [sys.executable, "-c", PATCHED, str(tmp_path)]
    env = {
        "PYTHONPATH": f"{tmp_path}:{os.environ['PYTHONPATH']}",
        "OMP_NUM_THREADS": "1",
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
    }
    result = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr[-3000:]
    losses = [float(word) for word in result.stdout.split()[-2:]]
    assert losses == pytest.approx(reference(folder)[0], rel=1e-6)
