"""transformers' Trainer with context parallelism."""

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

from tritoncp.call.check_arguments import check_mesh
from tritoncp.distributed import groups
from tritoncp.integrations.transformers.batches import shard_batch


class SharedBatchesTrainer(Trainer):
    """transformers' Trainer, whose ranks of a mesh get the same batches; all other ranks get different ones.

    Arguments are Trainer's, and mesh and sharding, as of :class:`ContextParallelTrainer`. ``context_mesh`` is
    the mesh, ``replicas`` has the ranks of each data-parallel replica.
    """

    replicas: list[list[int]]

    def __init__(
        self, *args: Any, mesh: Any = None, sharding: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        self.context_mesh, self.sharding = mesh, sharding or {}
        check_mesh(mesh, schedule=self.sharding.get("schedule", "auto"))
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, after which the world is known."""
        super().create_accelerator_and_postprocess()
        if self.context_mesh is None and self.args.world_size > 1:
            self.context_mesh = dist.group.WORLD
        self.replicas = _list_replicas(self.context_mesh)
        parallel = self.accelerator.parallelism_config
        if parallel is not None and (parallel.cp_enabled or parallel.sp_enabled):
            raise ValueError(
                "cp_size or sp_size of ParallelismConfig is accelerate's own context parallelism, which "
                "drops masks: omit it, and pass mesh= to this trainer"
            )

    def get_cp_size(self) -> int:
        """Return the number of ranks that share documents; Trainer divides batch sizes and label counts by
        it."""
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
                "dispatch_batches=True sends different documents from rank 0 to each rank: set "
                'accelerator_config={"dispatch_batches": False} in TrainingArguments'
            )
        own = [self.args.process_index in ranks for ranks in self.replicas]
        count, index = len(own), own.index(True)
        for part in (loader.batch_sampler, loader.sampler, loader.dataset):
            if hasattr(part, "num_processes") and hasattr(part, "process_index"):
                part.num_processes, part.process_index = count, index
                if count == 1 and hasattr(part, "even_batches"):
                    part.even_batches = False  # with one replica, no batches have to be padded
        return loader


class ContextParallelTrainer(SharedBatchesTrainer):
    """Train with transformers' Trainer and context parallelism.

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

    The ranks of a mesh train on the same documents, each on its shard of the tokens. Documents are
    distributed over data-parallel ranks, and batch sizes are per data-parallel rank. Batches are [B, S] on
    the ranks' devices, as the collator returns them: padded with an attention_mask, or packed with
    position_ids.

    The loss of a step is the mean over the labels of all ranks, and gradients are gradients of this mean: the
    loss of a rank is scaled to cancel the averaging of gradients by DDP and FSDP.

    Args:
        args: arguments of Trainer.
        mesh: 1-D DeviceMesh or ProcessGroup of the ranks that share documents, such as ``mesh["cp"]``, or a
            2-D mesh for Ulysses; all other dimensions of the world are data parallel. None: all ranks.
        sharding: keyword arguments of :func:`shard_batch`: balancer, schedule, BLOCK_SIZE.
        kwargs: keyword arguments of Trainer.

    Raises:
        ValueError: for a model with another attention, accelerate's context parallelism, label smoothing,
            loss functions and metrics that need whole logits, and batches dispatched from rank 0.
    """

    def __init__(
        self, *args: Any, mesh: Any = None, sharding: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, mesh=mesh, sharding=sharding, **kwargs)
        self._check_arguments()

    def _check_arguments(self) -> None:
        if self.label_smoother is not None or self.compute_loss_func is not None:
            raise ValueError(
                "label_smoothing_factor and compute_loss_func shift labels within a shard: omit them, or "
                "compute your loss from shift_labels in a custom loop"
            )
        if self.compute_metrics is not None or self.preprocess_logits_for_metrics is not None:
            raise ValueError(
                "compute_metrics would get the logits of shards instead of whole sequences: omit it, and "
                "evaluate the loss alone"
            )
        if not self.model_accepts_loss_kwargs:
            raise ValueError(
                f"model: {type(self.model).__name__}.forward has no **kwargs, by which plans are passed to "
                "its layers: add **kwargs and pass them on"
            )

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor | Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Shard the batch; return this rank's part of the loss, times the number of ranks over which
        gradients are averaged."""
        local = shard_batch(inputs, self.model, self.context_mesh, **self.sharding)
        if num_items_in_batch is None:
            raise ValueError(f"the batch has no labels, only {', '.join(inputs)}: add labels [B, S]")
        return super().compute_loss(model, local, return_outputs, num_items_in_batch)

    @property
    def gather_function(self) -> Callable[[Tensor], Tensor]:
        """The function by which Trainer gathers losses in evaluation: one value per replica."""
        return self._gather_losses

    @gather_function.setter
    def gather_function(self, function: Any) -> None:
        """Ignore assignments: Trainer sets accelerate's function before and after each evaluation."""

    def _gather_losses(self, losses: Tensor) -> Tensor:
        """Gather losses [n] of all ranks and average over the ranks of each replica: [replicas * n]."""
        gathered = self.accelerator.gather(losses)
        every = rearrange(gathered, "(rank n) -> rank n", rank=self.args.world_size)
        means = torch.cat([every[ranks].mean(0) for ranks in self.replicas])
        state = self.accelerator.gradient_state
        if state.end_of_dataloader and state.remainder > 0:  # drop documents that only fill the last batch
            return means[: state.remainder]
        return means

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        """Evaluate the loss of a batch. Raises ValueError if predictions are requested: they would be logits
        of a shard."""
        if not prediction_loss_only:
            raise ValueError("predict() would return logits of shards: call evaluate(), for the loss alone")
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)


def _list_replicas(mesh: Any) -> list[list[int]]:
    """Return the ranks of each data-parallel replica (collective over the world)."""
    if mesh is None:
        return [[0]]
    if isinstance(mesh, DeviceMesh):
        ranks = mesh.mesh.flatten().tolist()
    else:
        ranks = dist.get_process_group_ranks(mesh)
    replicas: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(replicas, sorted(ranks))
    return sorted({tuple(replica): replica for replica in replicas}.values())
