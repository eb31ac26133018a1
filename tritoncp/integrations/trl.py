"""TRL's trainers with context parallelism: SFT, GRPO, RLOO and distillation (tested with TRL 1.16).

The ranks of a mesh train on the same sequences, each on its shard of their tokens. Sampled completions are
the same on all of them: each rank generates a part, all get all, and losses are TRL's own, of values that are
gathered from the shards.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from transformers import TrainingArguments
from trl import DistillationTrainer, GRPOTrainer, RLOOTrainer, SFTTrainer

from tritoncp.api.reshard import unshard
from tritoncp.distributed import groups
from tritoncp.integrations.transformers.batch_checks import why_no_trees
from tritoncp.integrations.transformers.batches import shard_batch
from tritoncp.integrations.transformers.model_classes import unwrap_model
from tritoncp.integrations.transformers.plans import IGNORED
from tritoncp.integrations.transformers.trainer import ContextParallelTrainer, SharedBatchesTrainer
from tritoncp.integrations.transformers.tree_rows import TreeRows, pack_rows

__all__ = [
    "ContextParallelDistillationTrainer",
    "ContextParallelGRPOTrainer",
    "ContextParallelRLOOTrainer",
    "ContextParallelSFTTrainer",
]


class ContextParallelSFTTrainer(ContextParallelTrainer, SFTTrainer):
    """TRL's SFTTrainer, whose ranks of a mesh train on the same documents, with packing too.

    Arguments are SFTTrainer's, and mesh and sharding, as of
    :class:`tritoncp.integrations.transformers.ContextParallelTrainer`, which has the rules of losses and
    batch sizes. The metric ``num_tokens`` counts each token once, without padding.
    """

    _total_train_tokens: int

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        before = self._total_train_tokens
        if num_items_in_batch is None:  # in evaluation, where TRL counts those of a rank
            num_items_in_batch = self._get_num_items_in_batch([inputs], self.args.device)
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self.model.training:
            mask = inputs.get("attention_mask")
            count = torch.tensor(inputs["input_ids"].numel()) if mask is None else mask.sum()
            counts = self.accelerator.gather(count.to(self.accelerator.device))
            self._total_train_tokens = before + int(counts.sum()) // self.get_cp_size()
            self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
        return loss


class ReplicaAccelerator(Accelerator):
    """accelerate's Accelerator as the replicas of a model see it: the ranks of a mesh are one process.

    Of what it gathers, each replica's values come once, from its first rank.
    """

    replicas: list[list[int]]

    @property
    def num_processes(self) -> int:
        return len(self.replicas)

    @property
    def process_index(self) -> int:
        return next(i for i, ranks in enumerate(self.replicas) if self.state.process_index in ranks)

    def select(self, gathered: Tensor) -> Tensor:
        """Return the rows of the first rank of each replica, of rows [ranks * n, ...] of all ranks."""
        parts = gathered.unflatten(0, (self.state.num_processes, -1))
        return parts[[ranks[0] for ranks in self.replicas]].flatten(0, 1)

    def gather(self, tensor: Any) -> Any:
        gathered = super().gather(tensor)
        return gathered if self.state.num_processes == 1 else recursively_apply(self.select, gathered)

    def gather_lists(self, values: list[Any]) -> list[Any]:
        """Return the values of the lists of all replicas."""
        parts: list[Any] = [values] * self.state.num_processes
        if self.state.num_processes > 1:
            dist.all_gather_object(parts, values)
        return list(chain.from_iterable(parts[ranks[0]] for ranks in self.replicas))

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        def one(x: Tensor) -> Tensor:
            every = self.gather(x[None])
            return every.mean(0) if reduction == "mean" else every.sum(0)

        return recursively_apply(one, tensor)


class SharedCompletionsTrainer(SharedBatchesTrainer):
    """What the trainers on sampled completions have in common.

    tree: whether the sequences of a batch are packed into a prefix tree, so that their common beginnings are
    computed once; None: where the layers of the model allow it
    """

    def __init__(
        self,
        *args: Any,
        mesh: Any = None,
        sharding: dict[str, Any] | None = None,
        tree: bool | None = None,
        **kwargs: Any,
    ) -> None:
        self.tree = tree
        self._shuffling: Tensor | None = None  # state of the random numbers outside of a shuffle
        ranks = groups.group_of(mesh)
        size = dist.get_world_size() if mesh is None and dist.is_initialized() else None
        size = (1 if ranks is None else ranks.size()) if size is None else size
        positional = [_arguments_of_replicas(x, size) for x in args]
        named = {name: _arguments_of_replicas(x, size) for name, x in kwargs.items()}
        super().__init__(*positional, mesh=mesh, sharding=sharding, **named)
        if len(self.replicas) > 1 and getattr(self.args, "use_vllm", False):
            raise ValueError(
                f"use_vllm=True with {len(self.replicas)} replicas: TRL would take the ranks of a mesh for "
                "processes with different prompts: set it to False, or share sequences over all ranks"
            )

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = ReplicaAccelerator
        self.accelerator.replicas = self.replicas

    def _generate_single_turn(self, prompt_ids: list[Any], images: Any, *rest: Any, **options: Any) -> Any:
        """Generate completions: of each rank's part of the prompts, where they can be divided."""
        group, size = groups.group_of(self.context_mesh), self.get_cp_size()
        divides = len(prompt_ids) % size == 0 and images is None and not getattr(self, "use_vllm", False)
        if size == 1 or not divides:
            return super()._generate_single_turn(prompt_ids, images, *rest, **options)
        count = len(prompt_ids) // size
        start = dist.get_rank(group) * count
        own = super()._generate_single_turn(prompt_ids[start : start + count], images, *rest, **options)
        parts: list[Any] = [None] * size
        dist.all_gather_object(parts, own, group)
        if not isinstance(own, tuple):  # RLOO and distillation have completions alone
            return list(chain.from_iterable(parts))
        fields = zip(*parts, strict=True)
        return tuple(None if x[0] is None else list(chain.from_iterable(x)) for x in fields)

    def _generate(self, prompts: list[Any]) -> Any:
        """Generate completions of prompts, the same on all ranks of the mesh, with a seed to shuffle them."""
        seed = int(torch.randint(2**62, (), device="cpu"))
        shared = [super()._generate(prompts), seed]
        group = groups.group_of(self.context_mesh)
        if self.get_cp_size() > 1:
            dist.broadcast_object_list(shared, dist.get_process_group_ranks(group)[0], group)
            self._shuffling = torch.get_rng_state()
            torch.default_generator.manual_seed(shared[1])
        return shared[0]

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """Return the batch of a step. The ranks of a mesh shuffle completions alike."""
        inputs = super()._prepare_inputs(generation_batch)
        if self._shuffling is not None:
            torch.set_rng_state(self._shuffling)
            self._shuffling = None
        return inputs

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        """Score completions, of which each replica's come once. TRL also gathers by functions of its modules,
        which know no accelerator: they are replaced meanwhile."""
        score = super()._generate_and_score_completions
        module = sys.modules[score.__func__.__module__]
        functions = {"gather": self.accelerator.gather, "gather_object": self.accelerator.gather_lists}
        with contextlib.ExitStack() as stack:
            for name in functions.keys() & vars(module).keys():
                stack.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, functions[name])
            return score(inputs)

    def _shard(
        self, model: nn.Module, ids: Tensor, mask: Tensor, keep: int
    ) -> tuple[dict[str, Any], TreeRows | None]:
        """Return (this rank's shard of sequences for a model, the rows of their tree or None).

        ids, mask: [B, T], tokens and which of them are no padding; keep: the last tokens, which are predicted
        """
        inner = unwrap_model(model)
        reason = why_no_trees(inner.config, inner)
        if self.tree and reason:
            raise ValueError(f"tree=True: {reason}: pass tree=None or False")
        options = self.sharding
        if self.tree is False or reason:
            labels = ids.masked_fill(mask == 0, IGNORED)
            labels[:, :-keep] = IGNORED
            batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
            return shard_batch(batch, model, self.context_mesh, **options), None
        rows = pack_rows(ids, mask, keep)
        batch = {
            "input_ids": rows.tree.tokens[None].to(ids.device),
            "shift_labels": rows.labels[None].to(ids.device),
        }
        mode = "train" if self.model.training else "eval"
        self._metrics[mode]["tree/tokens_computed"].append(len(rows.labels) / int(mask.sum()))
        return shard_batch(batch, model, self.context_mesh, tree=rows.tree, **options), rows

    def _whole(self, x: Tensor, local: dict[str, Any], rows: TreeRows | None, keep: int) -> Tensor:
        """Return values of all sequences, [B, keep, ...], from those of this rank's tokens, [1 or B, S_local,
        ...]: of the tokens before the last ``keep``, which predict these.

        All ranks compute the same loss of them. The gradients of a rank are those of the sum of these losses,
        so that the mean over all ranks, as of DDP and FSDP, is the mean over replicas.
        """
        plan = local["context_parallel"].plan
        whole = unshard(x, plan, self.context_mesh, dim=1, grad="sum" if x.requires_grad else None)
        if rows is None:
            return whole[:, :-1][:, -keep:]
        beside = torch.cat([whole[0], whole.new_zeros(1, *whole.shape[2:])])
        return beside[rows.source.to(x.device)]


class SharedLogProbsTrainer(SharedCompletionsTrainer):
    """What GRPO and RLOO have in common: log-probabilities of completions."""

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **images: Any,
    ) -> tuple[Tensor, Tensor | None, None]:
        """Return log-probabilities and entropies [B, logits_to_keep], the same on all ranks of the mesh."""
        _refuse_images(images)
        if compute_aux_loss:
            raise ValueError(
                "the auxiliary loss of the experts' load would be that of a shard: set router_aux_loss_coef=0"
            )
        results = []
        size = batch_size or len(input_ids)
        for ids, mask in zip(input_ids.split(size), attention_mask.split(size), strict=True):
            local, rows = self._shard(model, ids, mask, logits_to_keep)
            with self.accelerator.autocast():
                out = model(**local, fused_lm_head=True)
            values = [out.log_probs, out.entropy] if compute_entropy else [out.log_probs]
            results.append([self._whole(x, local, rows, logits_to_keep) for x in values])
        whole = [torch.cat(parts) for parts in zip(*results, strict=True)]
        return whole[0], whole[1] if compute_entropy else None, None


class ContextParallelGRPOTrainer(SharedLogProbsTrainer, GRPOTrainer):
    """TRL's GRPOTrainer, whose ranks of a mesh share sequences; common beginnings are computed once.

    Arguments are GRPOTrainer's, and:

    mesh, sharding: as of :class:`tritoncp.integrations.transformers.ContextParallelTrainer`. Batch sizes are
          per data-parallel replica; a ``generation_batch_size`` is divided by the ranks of the mesh
    tree: whether a batch is a prefix tree, in which prompts and other common beginnings are computed once;
          None: if the layers of the model allow it. The metric ``tree/tokens_computed`` is the part of the
          tokens that is left

    Losses, metrics and gradients are those of GRPOTrainer on the replicas alone. Positions count the tokens
    of a sequence, from 0, without padding. Raises ValueError for images, an auxiliary loss of experts, and
    vLLM with several replicas.
    """


class ContextParallelRLOOTrainer(SharedLogProbsTrainer, RLOOTrainer):
    """TRL's RLOOTrainer, whose ranks of a mesh share sequences, as :class:`ContextParallelGRPOTrainer`."""


class ContextParallelDistillationTrainer(SharedCompletionsTrainer, DistillationTrainer):
    """TRL's DistillationTrainer, whose ranks of a mesh share sequences, as
    :class:`ContextParallelGRPOTrainer`. The teacher is context parallel, too."""

    def _get_last_hidden_state(
        self,
        unwrapped_model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        **images: Any,
    ) -> Tensor:
        """Return the hidden states [B, logits_to_keep, H] that predict the last tokens, of all ranks."""
        _refuse_images(images)
        local, rows = self._shard(unwrapped_model, input_ids, attention_mask, logits_to_keep)
        inputs = {
            name: x for name, x in local.items() if name in ("input_ids", "position_ids", "context_parallel")
        }
        hidden = unwrapped_model.base_model(**inputs, use_cache=False).last_hidden_state
        return self._whole(hidden, local, rows, logits_to_keep)


def _arguments_of_replicas(value: Any, ranks: int) -> Any:
    """Return TRL's arguments with a batch of generations for replicas alone; any other value unchanged."""
    if not isinstance(value, TrainingArguments) or getattr(value, "generation_batch_size", None) is None:
        return value
    value = copy.copy(value)
    size, generations = value.generation_batch_size // ranks, value.num_generations
    if size % generations:
        raise ValueError(
            f"per_device_train_batch_size={value.per_device_train_batch_size} makes batches of {size} "
            f"generations on meshes of {ranks} ranks, not divisible by num_generations={generations}: sizes "
            "are per mesh, not per rank"
        )
    value.generation_batch_size = size
    return value


def _refuse_images(inputs: dict[str, Any]) -> None:
    given = sorted(name for name, x in inputs.items() if x is not None)
    if given:
        raise ValueError(
            f"the sequences have {', '.join(given)}: train on images with TRL's trainer, one rank each"
        )
