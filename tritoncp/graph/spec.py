"""The constants of a call in a graph, as the text that registered ops get."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from tritoncp.distributed import groups


class CallConstants(NamedTuple):
    """The constants of a call in a graph, which registered ops get as text.

    graph_score: structure of the score_mod, see graph/inputs.py, or None
    wants:       indices of the captures that require grad
    world:       name of the process group; "": all ranks are in this process
    graph_expand: structure of ((fn, *arguments), autocast) of an expansion, or None
    sizes:       (Hkv, D, E) of expanded keys and values; None without ``expand``
    graph_scale: structure of a scale that differs between runs of the graph, or None
    graph_options: (name, structure) of the kernel options that differ between runs; ``options`` has the
        others
    selected:    (block_size, query_block) of the selected keys, whose indices are the last capture, or None
    """

    graph_score: str | None
    wants: tuple[int, ...]
    world: str
    options: tuple[tuple[str, Any], ...]
    returns: tuple[str, ...]
    graph_expand: str | None = None
    sizes: Sequence[int] | None = None
    graph_scale: str | None = None
    graph_options: tuple[tuple[str, str], ...] = ()
    selected: Sequence[int] | None = None

    @property
    def has_inputs(self) -> bool:
        """Whether the graph has other inputs for the call than tensors and the plan."""
        return bool(self.graph_score or self.graph_expand or self.graph_scale or self.graph_options)

    @property
    def group(self) -> Any:
        """The process group of the call. Raises ValueError if it was destroyed."""
        return groups.group_by_name(self.world) if self.world else None


@lru_cache(256)
def encode_spec(*fields: Any) -> str:
    """Encode the fields of a :class:`CallConstants` as text."""
    return json.dumps(fields)


@lru_cache(256)
def decode_spec(text: str) -> CallConstants:
    """Decode the text of :func:`encode_spec`."""
    spec = CallConstants(*json.loads(text))
    options, graph_options = (tuple(map(tuple, pairs)) for pairs in (spec.options, spec.graph_options))
    return spec._replace(
        wants=tuple(spec.wants), returns=tuple(spec.returns), options=options, graph_options=graph_options
    )
