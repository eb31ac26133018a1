"""torchtitan's Trainer on CPU ranks, for tests: its debug models on random packed documents."""

import importlib
import os
import types
import zlib
from dataclasses import dataclass
from functools import partial
from itertools import chain, count

import torch
import torch._utils

# torchtitan looks for an accelerator as it is imported, and asks its module for its memory.
CPU_DEVICE = types.SimpleNamespace(
    __name__="torch.cpu",
    current_device=lambda: 0,
    device_count=lambda: 64,
    empty_cache=lambda: None,
    get_device_name=lambda device=None: "CPU",
    get_device_properties=lambda device=None: types.SimpleNamespace(total_memory=1 << 40, name="CPU"),
    is_available=lambda: True,
    memory_stats=lambda device=None: {},
    reset_peak_memory_stats=lambda: None,
    set_device=lambda device: None,
    synchronize=lambda: None,
)
accelerator = torch._utils._get_available_device_type, torch._utils._get_device_module
torch._utils._get_available_device_type = lambda: "cpu"
torch._utils._get_device_module = lambda device_type: CPU_DEVICE
from torchtitan.tools.utils import device_type  # noqa: E402

assert device_type == "cpu"

torch._utils._get_available_device_type, torch._utils._get_device_module = accelerator

from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torch.distributed.tensor import DTensor, distribute_tensor  # noqa: E402
from torch.nn.attention import flex_attention as flex  # noqa: E402
from torch.nn.attention.flex_attention import AuxOutput  # noqa: E402
from torchtitan import trainer  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.config.override import OverrideConfig  # noqa: E402
from torchtitan.distributed import activation_checkpoint as ac  # noqa: E402
from torchtitan.models.common import attention  # noqa: E402

SEQ_LEN, BATCH, VOCAB = 256, 2, 2048
CHECKPOINTING = {"none": None, "selective": ac.SelectiveAC.Config, "full": ac.FullAC.Config}
OURS = "tritoncp.integrations.torchtitan."


class Bytes(BaseTokenizer):
    """A tokenizer that the data loader does not call."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **kwargs):
        super().__init__()

    def encode(self, text):
        return list(text.encode())

    def decode(self, tokens):
        return bytes(tokens).decode()

    def get_vocab_size(self):
        return VOCAB


class RandomDocuments(BaseDataLoader):
    """Random tokens, packed as documents of random lengths; data-parallel ranks have rows of one batch."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config, *, dp_world_size, dp_rank, local_batch_size, seq_len, **kwargs):
        self.rows = slice(dp_rank * local_batch_size, (dp_rank + 1) * local_batch_size)
        self.shape = dp_world_size * local_batch_size, seq_len

    def __iter__(self):
        index = torch.arange(self.shape[1]).expand(self.shape)
        for first in count(0, self.shape[0]):  # rows are the same in batches of any size
            rows = [torch.Generator().manual_seed(7 + first + i) for i in range(self.shape[0])]
            tokens = torch.stack([torch.randint(VOCAB, (self.shape[1] + 1,), generator=row) for row in rows])
            starts = torch.stack([torch.rand(self.shape[1], generator=row) < 0.02 for row in rows])
            starts[:, 0] = True
            positions = index - torch.where(starts, index, 0).cummax(1).values
            tokens, positions = tokens[self.rows], positions[self.rows]
            yield {"input": tokens[:, :-1].contiguous(), "positions": positions}, tokens[:, 1:].contiguous()

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def config(
    folder, *, adapter, backend="spmd_types", cp=1, dp=1, checkpointing="none", balancer="ptrr",
    compiled=False, batch=BATCH, attn="flex", tp=1, model="llama3", pp=1,
):  # fmt: skip
    """Return the configuration of a debug model in float32, two steps."""
    by_patch = attn == "sdpa" or (backend == "partial_dtensor" and tp == 1)  # apply_cp_to_forward is enough
    overrides = [] if by_patch else [OURS + "flex_attention"]
    overrides += [OURS + "selective_ac"] if checkpointing == "selective" else []
    policy = CHECKPOINTING[checkpointing]
    options = {} if attn == "sdpa" else {"attn_backend": attn}
    model_spec = importlib.import_module(f"torchtitan.models.{model}").model_registry("debugmodel", **options)
    if attn == "sdpa":
        for layer in model_spec.model.layers:
            layer.attention.inner_attention = attention.ScaledDotProductAttention.Config()
    return trainer.Trainer.Config(
        model_spec=model_spec,
        loss=CrossEntropyLoss.Config(),
        tokenizer=Bytes.Config(),
        dataloader=RandomDocuments.Config(),
        dump_folder=folder,
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=batch, seq_len=SEQ_LEN, steps=2, mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(
            spmd_backend=backend, context_parallel_degree=cp, data_parallel_shard_degree=dp,
            tensor_parallel_degree=tp, context_parallel_load_balancer=balancer,
            pipeline_parallel_degree=pp,
        ),
        activation_checkpoint=policy() if policy else None,
        compile=CompileConfig(enable=compiled, backend="aot_eager", components=["model"]),
        override=OverrideConfig(imports=overrides if adapter else []),
    )  # fmt: skip


def train(group, folder, *, adapter, patched=False, model="llama3", pp=1, **settings):
    """Train two steps on this rank; return the losses, and the gradients of each step by name.

    adapter: whether attention, checkpointing and inputs come from tritoncp.integrations.torchtitan
    patched: torchtitan is patched as in the example; settings: see :func:`config`
    """
    os.environ.update(RANK=str(group.rank()), LOCAL_RANK=str(group.rank()), WORLD_SIZE=str(group.size()))
    if adapter and not patched:
        parallelize = importlib.import_module(f"torchtitan.models.{model}.parallelize")
        from tritoncp.integrations import torchtitan as patches

        trainer.prepare_context_parallel_input = patches.prepare_context_parallel_input
        parallelize.apply_cp_to_forward = patches.apply_cp_to_forward
    # torchtitan's attention, to compare with: Inductor has no backward pass of it on CPUs.
    attention.FlexAttention._compiled_flex_attn = staticmethod(dense_flex_attention)
    attention._compiled_create_block_mask = flex.create_block_mask
    torch.Tensor.bfloat16 = torch.Tensor.float  # experts of gpt_oss: rounding would hide small errors
    run = config(folder, adapter=adapter, model=model, pp=pp, **settings).build()
    for module in chain.from_iterable(part.modules() for part in run.model_parts):
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    for part in run.model_parts:
        set_weights(part)
    if pp > 1:
        run.pp_schedule.step = partial(step_by_microbatches, run.pp_schedule)
    losses, grads = [], []
    step = run.optimizers.step
    run.optimizers.step = lambda: (grads.append(gradients(run.model_parts)), step())
    run.metrics_processor.log = lambda number, loss, *rest, **more: losses.append(float(loss))
    run.metrics_processor.should_log = lambda number: True
    batches = run.batch_generator(run.dataloader)
    for run.step in (1, 2):
        run.train_step(batches)
    return losses, grads


def step_by_microbatches(schedule, **arguments):
    """Do what torchtitan 0.3 asks of a schedule: step() of torch 2.13 cuts a whole batch itself."""
    schedule._stage.has_backward = True
    schedule._stage.clear_runtime_states()
    schedule._step_microbatches(**arguments)


def dense_flex_attention(
    q, k, v, *, score_mod, block_mask, scale, enable_gqa, return_aux, kernel_options
):  # fmt: skip
    """flex_attention in dense, differentiable torch: the part of it that the debug models call."""
    assert score_mod is None
    visible = flex.create_mask(block_mask.mask_mod, q.shape[0], None, q.shape[2], k.shape[2], device=q.device)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.mT * (q.shape[3] ** -0.5 if scale is None else scale)).masked_fill(~visible, -torch.inf)
    return scores.softmax(-1) @ v, AuxOutput(lse=scores.logsumexp(-1))


def set_weights(model):
    """Set the parameters to values that depend on their names and not on their sharding."""
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(plain_name(name).encode()))
        values = torch.randn(parameter.shape, generator=generator) / 32 + ("norm" in name)
        with torch.no_grad():
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                values = distribute_tensor(values, mesh, placements, src_data_rank=None).to_local()
                parameter = parameter.to_local()
            parameter.copy_(values)


def plain_name(name):
    """Return the name of a parameter without what checkpointing and compilation add to it."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def gradients(parts):
    """Gather the gradients of the parameters of this rank's pipeline stages."""
    return {
        plain_name(name): (x.grad.full_tensor() if isinstance(x.grad, DTensor) else x.grad).clone()
        for part in parts
        for name, x in part.named_parameters()
    }
