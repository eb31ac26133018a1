"""A Trainer whose ranks share the tokens of each batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer

from tritoncp.distributed import groups
from tritoncp.integrations.transformers.attention import is_registered
from tritoncp.integrations.transformers.batches import shard_batch


class ContextParallelTrainer(Trainer):
    """transformers' Trainer with context parallelism: the ranks of a mesh train on the same documents, and
    each holds its shard of their tokens.

    Trainer's arguments, and:

    mesh:     1-D DeviceMesh or ProcessGroup of the ranks that share documents, as ``mesh["cp"]``, or a 2-D
              mesh for Ulysses; all other dimensions of the world are data parallel. None: all ranks.
    sharding: keyword arguments of :func:`shard_batch`: balancer, schedule, BLOCK_SIZE

    The loss of a step is the mean over the labels of all ranks, and gradients are those of the sum over ranks
    of each rank's part: the scale that undoes the average of DDP and FSDP is in the loss. The sampler assigns
    documents to data-parallel ranks only, and batch sizes count those. Batches are [B, S] on the ranks'
    devices, as the collator returns them: padded with an attention_mask, or packed with position_ids.

    Raises ValueError for a model without this attention, accelerate's own context parallelism, label
    smoothing, loss functions and metrics that read whole logits, and data that rank 0 dispatches.

    >>> import tempfile, torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
    >>> from tritoncp.integrations.transformers import register
    >>> register()
    >>> config = LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
    ...                      num_attention_heads=2, attn_implementation="tritoncp")
    >>> documents = [{"input_ids": torch.arange(16), "labels": torch.arange(16)}] * 4
    >>> folder = tempfile.TemporaryDirectory()
    >>> arguments = TrainingArguments(folder.name, max_steps=1, use_cpu=True, report_to="none",
    ...                               save_strategy="no", disable_tqdm=True)
    >>> trainer = ContextParallelTrainer(LlamaForCausalLM(config), arguments, train_dataset=documents)
    >>> trainer.train().global_step  # doctest: +ELLIPSIS
    {...}
    1
    """

    def __init__(
        self, *args: Any, mesh: Any = None, sharding: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        self.context_mesh, self.sharding = mesh, sharding or {}
        super().__init__(*args, **kwargs)
        if mesh is None and self.args.world_size > 1:
            self.context_mesh = dist.group.WORLD
        self._replicas = _list_replicas(self.context_mesh)
        self._check_arguments()

    def _check_arguments(self) -> None:
        config = self.model.config.get_text_config()
        if not is_registered(config._attn_implementation):
            raise ValueError(
                f"the model's attention is {config._attn_implementation!r}: call register() and "
                'model.set_attn_implementation("tritoncp")'
            )
        parallel = self.accelerator.parallelism_config
        if parallel is not None and (parallel.cp_enabled or parallel.sp_enabled):
            raise ValueError(
                "accelerate's cp_size and sp_size are its own context parallelism, which drops masks: leave "
                "them out of ParallelismConfig and pass mesh= to this trainer"
            )
        if self.label_smoother is not None or self.compute_loss_func is not None:
            raise ValueError(
                "label smoothing and compute_loss_func shift labels within a shard: leave them out, or "
                "compute your loss from shift_labels in a loop of your own"
            )
        if self.compute_metrics is not None or self.preprocess_logits_for_metrics is not None:
            raise ValueError(
                "metrics would read logits of shards as whole texts: evaluate the loss alone, without "
                "compute_metrics"
            )
        if not self.model_accepts_loss_kwargs:
            raise ValueError(
                f"{type(self.model).__name__}.forward has no **kwargs, through which plans are passed"
            )

    def get_cp_size(self) -> int:
        """Return the number of ranks that share documents, by which batch sizes and label counts divide."""
        group = groups.group_of(self.context_mesh)
        return 1 if group is None else group.size()

    def _get_dataloader(self, dataset: Any, *args: Any, **kwargs: Any) -> DataLoader:
        """Return a loader with the same batches on all ranks of the mesh."""
        loader = super()._get_dataloader(dataset, *args, **kwargs)
        if self.args.world_size == 1:
            return loader
        dispatch = self.accelerator.dispatch_batches
        if dispatch or (dispatch is None and isinstance(dataset, IterableDataset)):
            raise ValueError(
                "rank 0 would read the data and send other documents to each rank: set "
                'accelerator_config={"dispatch_batches": False} in TrainingArguments'
            )
        own = [self.args.process_index in ranks for ranks in self._replicas]
        count, index = len(own), own.index(True)
        for part in (loader.batch_sampler, loader.sampler, loader.dataset):
            if hasattr(part, "num_processes") and hasattr(part, "process_index"):
                part.num_processes, part.process_index = count, index
                if count == 1 and hasattr(part, "even_batches"):
                    part.even_batches = False  # one replica has nothing to be even with
        return loader

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor | Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Shard the batch and return this rank's part of the loss, times the ranks that average it."""
        local = shard_batch(inputs, self.model, self.context_mesh, **self.sharding)
        if num_items_in_batch is None:
            raise ValueError(f"the batch has no labels to train or evaluate on; it has {', '.join(inputs)}")
        return super().compute_loss(model, local, return_outputs, num_items_in_batch)

    @property
    def gather_function(self) -> Callable[[Tensor], Tensor]:
        """The function that collects the losses of an evaluation: those of a replica's ranks count once."""
        return self._gather_losses

    @gather_function.setter
    def gather_function(self, function: Any) -> None:
        """Ignore the accelerator's function, which Trainer sets before and after each evaluation."""

    def _gather_losses(self, losses: Tensor) -> Tensor:
        """Return the mean over the ranks of each replica, one replica after the other: [replicas * n]."""
        gathered = self.accelerator.gather(losses)
        every = rearrange(gathered, "(rank n) -> rank n", rank=self.args.world_size)
        means = torch.cat([every[ranks].mean(0) for ranks in self._replicas])
        state = self.accelerator.gradient_state
        if state.end_of_dataloader and state.remainder > 0:  # documents that fill the last batch
            return means[: state.remainder]
        return means

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        """Evaluate the loss of a batch. Raises ValueError for predictions, which are logits of a shard."""
        if not prediction_loss_only:
            raise ValueError("predictions are logits of shards: evaluate the loss alone, with evaluate()")
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)


def _list_replicas(mesh: Any) -> list[list[int]]:
    """Return the ranks of each data-parallel replica. All ranks of the world call it."""
    if mesh is None:
        return [[0]]
    if isinstance(mesh, DeviceMesh):
        ranks = mesh.mesh.flatten().tolist()
    else:
        ranks = dist.get_process_group_ranks(mesh)
    replicas: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(replicas, sorted(ranks))
    return sorted({tuple(replica): replica for replica in replicas}.values())
