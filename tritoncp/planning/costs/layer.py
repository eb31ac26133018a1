"""The shape of one attention layer."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tritoncp.planning.plan import Plan


@dataclass(frozen=True)
class Shape:
    """The shape of one attention layer. The ranking of schedules depends mainly on heads / kv_heads.

    latent: channels of a token that are sent in place of its keys and values, which each step expands
        (``flex_attention(..., expand=)``), of all heads of the latent; 0: keys and values are sent
    selected: keys that a query selects at run time (``flex_attention(..., selected=)``), of those that the
        mask shows; 0: all of these
    """

    batch: int = 1
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    v_head_dim: int = 128
    itemsize: int = 2
    latent: int = 0
    selected: int = 0

    @classmethod
    def of_layer(cls, plan: Plan, **sizes: int) -> Shape:
        """Return the shape of a layer that attends by ``plan``; its batch is the plan's if none is passed.

        sizes: fields of this class. Raises TypeError for other names and for sizes that are no ints, and
        ValueError for sizes that a call under this plan would refuse.
        """
        names = [item.name for item in fields(cls)]
        for name, size in sizes.items():
            if name not in names:
                raise TypeError(f"a layer's shape has no {name!r}; pass {', '.join(names)}")
            if isinstance(size, bool) or not isinstance(size, int):
                raise TypeError(f"{name} of a layer is a {type(size).__name__}; pass an int")
            if size < (name not in ("latent", "selected")):
                raise ValueError(f"{name}={size}: the sizes of a layer are at least 1")
        shape = cls(**{"batch": plan.batch, "selected": plan.selected, **sizes})
        if shape.itemsize not in (1, 2, 4, 8):
            raise ValueError(f"itemsize={shape.itemsize}: numbers of a layer have 1, 2, 4 or 8 bytes")
        if plan.batch not in (1, shape.batch):
            raise ValueError(
                f"batch={shape.batch}, but the plan is for {plan.batch} batch rows: leave batch out, or pass "
                "its plan of these rows, plan.batch_rows(first, count)"
            )
        if shape.heads % shape.kv_heads:
            raise ValueError(
                f"{shape.heads} query heads and {shape.kv_heads} key heads: query heads must be a multiple "
                "of key heads; give heads= and kv_heads="
            )
        return shape

    @property
    def row(self) -> int:
        """Elements that are sent of one token's K and V, over the batch."""
        return self.batch * self.latent if self.latent else self.expanded_row

    @property
    def expanded_row(self) -> int:
        """Elements of one token's K and V, over the batch."""
        return self.batch * self.kv_heads * (self.head_dim + self.v_head_dim)

    @property
    def sent_heads(self) -> int:
        """Heads of K and V that may be sent one after the other."""
        return 1 if self.latent else self.kv_heads


def check_latent(plan: Plan, argument: str) -> None:
    """Raise ValueError for a plan whose ranks exchange heads, of which a latent has none. argument: the
    caller's, for the error"""
    if plan.world_size > 1 and plan.schedule.startswith("ulysses"):
        raise ValueError(
            f"{argument} with a plan of schedule {plan.schedule!r}, which shards heads, while a latent is "
            "for all heads: make the plan with schedule='allgather', 'ring' or 'fetch'"
        )
