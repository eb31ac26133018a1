"""torchtitan: inner attention for ``--override.imports``, sharding of inputs, and activation checkpointing.

Written for torchtitan 0.3. :func:`flex_attention` and :func:`selective_ac` are overrides, which need no
change of torchtitan; :func:`prepare_context_parallel_input` and :func:`apply_cp_to_forward` replace
torchtitan's functions of the same names, as ``docs/torchtitan.md`` shows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.config.override import derive, override
from torchtitan.distributed import activation_checkpoint
from torchtitan.models.common import attention

from tritoncp.api.inner_attention import Signature, run_inner_attention
from tritoncp.api.parallel import SAVE_OPS, ContextParallel
from tritoncp.api.plans import make_plan
from tritoncp.api.shards import shard
from tritoncp.masks.closed_forms import causal
from tritoncp.masks.mask import create_block_mask
from tritoncp.planning.balance import BalancerName
from tritoncp.planning.plan import Plan

BALANCERS: dict[str | None, BalancerName | None] = {"headtail": "head_tail", "ptrr": "ptrr", None: None}
SEQ_DIM = 1  # sequence dimension of [B, L, N, H], torchtitan's layout
BLOCK = 128  # max block size of the plan of a model without masks


class FlexAttention(attention.FlexAttention):
    """torchtitan's inner attention, computed by :func:`tritoncp.flex_attention`.

    Masks are Plans, from :func:`prepare_context_parallel_input`, or torch's BlockMasks. Under tensor
    parallelism, mods get head indices of the whole layer. Config.kernel_options, which are Inductor's, are
    ignored.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(attention.FlexAttention.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._signature = Signature.of(self)
        self._cp_mesh: DeviceMesh | None = None
        self._tp_rank: int | None = None

    def set_context_mesh(self, mesh: DeviceMesh | None) -> None:
        """Set the context-parallel mesh, for calls with a Plan."""
        self._cp_mesh = mesh

    def parallelize(self, parallel_dims: Any) -> None:
        """Store the context- and tensor-parallel meshes, then call torchtitan's ``parallelize``."""
        self.set_context_mesh(parallel_dims.get_optional_mesh("cp"))
        tp_mesh = parallel_dims.get_optional_mesh("tp")
        self._tp_rank = None if tp_mesh is None else tp_mesh.get_local_rank()
        super().parallelize(parallel_dims)

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: BlockMask | Plan,
        **options: Any,
    ) -> Tensor:
        options["attention_masks"] = attention_masks
        inputs = q_BLNH, k_BLNH, v_BLNH
        mesh = self._cp_mesh if isinstance(attention_masks, Plan) else None
        first_head = None if self._tp_rank is None else self._tp_rank * q_BLNH.shape[2]
        return run_inner_attention(self._signature, inputs, options, mesh, SEQ_DIM, first_head=first_head)


@override(
    target=attention.FlexAttention.Config,
    description="tritoncp's flex attention; keys and values stay sharded along the sequence",
)
def flex_attention(config: Any) -> FlexAttention.Config:
    """Override torchtitan's FlexAttention: ``--override.imports
    tritoncp.integrations.torchtitan.flex_attention``. The module gets this rank's shards of keys and values,
    without the all-gather of torchtitan's sharding config."""
    sharding = config.sharding_config
    if sharding is not None:
        q, *_ = layouts = tuple(sharding.in_src_shardings.values())
        local_map = sharding.local_map
        if local_map is not None:
            local_map = dataclasses.replace(local_map, in_grad_placements=(q,) * len(layouts))
        sharding = dataclasses.replace(
            sharding, in_dst_shardings=dict(sharding.in_src_shardings), local_map=local_map
        )
    return derive(config, FlexAttention.Config, sharding_config=sharding)


class SelectiveAC(activation_checkpoint.SelectiveAC):
    """torchtitan's selective activation checkpointing, which also saves the results of
    :data:`tritoncp.SAVE_OPS`, since their recomputation would communicate."""

    @dataclass(kw_only=True, slots=True)
    class Config(activation_checkpoint.SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set[Any]:
        return super().get_save_ops() | set(SAVE_OPS)


@override(
    target=activation_checkpoint.SelectiveAC.Config,
    exact=True,
    description="selective checkpointing that saves tritoncp's attention",
)
def selective_ac(config: Any) -> SelectiveAC.Config:
    """Override torchtitan's SelectiveAC: ``--override.imports
    tritoncp.integrations.torchtitan.selective_ac``."""
    return derive(config, SelectiveAC.Config)


def apply_cp_to_forward(attention_modules: Sequence[nn.Module], cp_mesh: DeviceMesh) -> None:
    """Make inner attention modules context parallel: replaces torchtitan's function of this name.

    For the backend "partial_dtensor". A model may have both FlexAttention and ScaledDotProductAttention
    modules. :func:`prepare_context_parallel_input` refuses the masks of VarlenAttention.
    """
    style = ContextParallel(seq_dim=SEQ_DIM)
    for module in attention_modules:
        if isinstance(module, FlexAttention):
            module.set_context_mesh(cp_mesh)
        else:
            style._apply(module, cp_mesh)


def prepare_context_parallel_input(
    inputs: Tensor,
    labels: Tensor,
    extra_kwargs: dict[str, Any],
    cp_mesh: DeviceMesh,
    device: torch.device,
    load_balancer_type: str | None = "headtail",
    ptrr_mask_key: str | None = None,
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Shard inputs, labels and positions [B, L] and make Plans of the masks: replaces torchtitan's function
    of this name. Returns (inputs, labels, updated extra_kwargs).

    extra_kwargs: "positions", and "attention_masks", a BlockMask or a dict of them; None or absent for a
        model that calls scaled_dot_product_attention, which then gets the plan of a causal mask
    load_balancer_type: "headtail", "ptrr" (by the summed work of all masks), or None for natural order
    ptrr_mask_key: has to be a key of the masks, and has no effect

    Raises ValueError for another balancer, key or type of mask.
    """
    if load_balancer_type not in BALANCERS:
        names = ", ".join(map(repr, BALANCERS))
        raise ValueError(f"load_balancer_type={load_balancer_type!r}; pass one of {names}")
    masks = extra_kwargs.get("attention_masks")
    _check_masks(masks, ptrr_mask_key)
    if masks is None:
        masks = _causal_mask(inputs.shape[1], cp_mesh.size())
    plans = make_plan(masks, cp_mesh, balancer=BALANCERS[load_balancer_type])
    plan = next(iter(plans.values())) if isinstance(plans, dict) else plans
    extra_kwargs["attention_masks"] = plans
    extra_kwargs["positions"] = shard(extra_kwargs["positions"], plan, dim=1)
    return shard(inputs, plan, dim=1), shard(labels, plan, dim=1, pad=IGNORE_INDEX), extra_kwargs


def _check_masks(masks: Any, key: str | None) -> None:
    by_name = isinstance(masks, Mapping)
    for name, mask in masks.items() if by_name else (("", masks),):
        if mask is not None and not isinstance(mask, BlockMask):
            raise ValueError(
                f"attention_masks {name!r} is a {type(mask).__name__}; a BlockMask of the whole sequence is "
                'needed: use FlexAttention, attn_backend="flex" of the model'
            )
    if by_name and key is not None and key not in masks:
        raise ValueError(
            f"context_parallel_ptrr_mask_key {key!r} is not in attention_masks: pass one of {sorted(masks)}"
        )


def _causal_mask(length: int, world_size: int) -> Any:
    """Return the causal mask of a model without masks, with at least two blocks per rank."""
    block = max(16, math.gcd(BLOCK, length // (2 * world_size)))
    return create_block_mask(causal(), None, None, length, length, BLOCK_SIZE=block)
