"""Chunked execution without a graph: the reference for tests of the pass."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from tritoncp.api.attention import run_call
from tritoncp.api.selected_keys import choose_on_host
from tritoncp.call import plan_cache
from tritoncp.call.read import Arguments, ShardSizes
from tritoncp.chunking.attention_nodes import prefixes
from tritoncp.chunking.report import NO_ROWS, ChunkingError
from tritoncp.distributed import groups
from tritoncp.planning.parts import chunk_range
from tritoncp.planning.plan import Plan


class Eager(nn.Module):
    """Run a module on one chunk of its inputs after another, and concatenate the results.

    >>> from tritoncp import causal, flex_attention
    >>> class Layer(nn.Module):
    ...     def forward(self, x):
    ...         heads = x.unflatten(-1, (2, 8)).transpose(1, 2)
    ...         return flex_attention(heads, heads, heads, causal()).transpose(1, 2).flatten(2)
    >>> x = torch.randn(1, 64, 16)
    >>> torch.allclose(Eager(Layer(), 2, "seq")(x), Layer()(x), atol=1e-6)
    True

    The first argument of the module is x [B, S, ...]. Other tensor arguments are split like x if they have
    its size: by sequence in dimension 1 if dimension 0 is 1 or the batch, in dimension 2 of [B or 1, 1, S,
    ...], else in dimension 0; by batch in dimension 0.

    :func:`tritoncp.flex_attention` inside the module gets the mask or plan of the whole sequence. When the
    sequence is cut, the queries of chunk c see the keys of chunks 0 to c. Keys computed only from arguments
    that are not split, parameters or buffers (a memory) are seen whole by all chunks.

    Args:
        module: module to run.
        chunks: number of chunks.
        dim: what is cut, "batch" or "seq".

    Raises:
        ChunkingError: a ValueError, for a mask that shows keys of later chunks, and for a checkpoint inside
            the module, which would compute its attention again outside of the chunk: put the checkpoint
            around it, ``checkpoint(Eager(module, ...), x)``.
    """

    def __init__(self, module: nn.Module, chunks: int, dim: str) -> None:
        super().__init__()
        if dim not in ("batch", "seq") or chunks < 1:
            raise ChunkingError(f'dim={dim!r}, chunks={chunks}: pass dim="batch" or "seq", and chunks >= 1')
        self.module, self.chunks, self.dim = module, chunks, dim

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the module on each chunk.

        Args:
            x: tensor [B, S, ...], which is cut.
            args: further arguments of the module.
            kwargs: keyword arguments of the module.

        Returns:
            The module's result, a tensor or a pytree of tensors, concatenated over chunks.
        """

        axis = ("batch", "seq").index(self.dim)
        rows, chunks = x.shape[axis], self.chunks
        if not rows:
            return self.module(x, *args, **kwargs)
        name = f"{rows} rows of dimension {axis}"
        calls, results = Calls(self.dim, [chunk_range(rows, c, chunks, name) for c in range(chunks)]), []
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        uncut = [value for value in tensors if split_axis(value, x, self.dim) is None]
        for index in range(self.chunks):
            own, positional, named = tree_map(
                lambda value, index=index: self._piece(value, x, index), (x, args, kwargs)
            )
            calls.begin(index)
            with ChunkMode(calls, [*uncut, *self.module.parameters(), *self.module.buffers()]):
                results.append(self.module(own, *positional, **named))
        return concatenate(results, axis, list(map(len, calls.rows)))

    def _piece(self, value: Any, x: Tensor, index: int) -> Any:
        """Return a chunk of the value if it is a tensor that is cut along with x, else the value."""
        axis = split_axis(value, x, self.dim) if isinstance(value, Tensor) else None
        return value if axis is None else value.chunk(self.chunks, axis)[index].contiguous()


def split_axis(value: Tensor, x: Tensor, dim: str) -> int | None:
    """Return the dimension of a tensor that is cut along with x [B, S, ...], None if it is not cut.

    >>> x = torch.ones(2, 6, 4)
    >>> shapes = (2, 6, 4), (1, 6), (1, 1, 6, 4), (6, 8), (6,)
    >>> [split_axis(torch.ones(shape), x, "seq") for shape in shapes]
    [1, 1, 2, 0, 0]
    >>> shapes = (5,), (8,), (2, 5), (2, 8), (1, 1, 5), (1, 1, 8)
    >>> {split_axis(torch.ones(shape), x, "seq") for shape in shapes}
    {None}
    """
    batch, rows = x.shape[:2]
    if dim == "batch":
        return 0 if value.ndim and value.shape[0] == batch else None
    if value.ndim > 1 and value.shape[0] in (1, batch) and value.shape[1] == rows:
        return 1
    if value.ndim > 2 and value.shape[0] in (1, batch) and value.shape[1:3] == (1, rows):
        return 2
    return 0 if value.ndim and value.shape[0] == rows else None


def concatenate(results: list[Any], axis: int, rows: list[int]) -> Any:
    """Concatenate the results of chunks: tensors, or pytrees of tensors. Raises ChunkingError for tensors
    that do not have the rows of their chunk."""

    def join(first: Any, *others: Any) -> Any:
        if not isinstance(first, Tensor):
            return first
        parts = [first, *others]
        if first.ndim <= axis or any(part.shape[axis] % n for part, n in zip(parts, rows, strict=True)):
            raise ChunkingError(f"a result of shape {list(first.shape)} {NO_ROWS}")
        return torch.cat(parts, axis)

    return tree_map(join, *results)


class ChunkMode(TorchFunctionMode):
    """Mode that runs the attention of one chunk, and tracks the tensors computed only from tensors that are
    not cut, which have no rows of a chunk. given: the tensors that all chunks read whole"""

    def __init__(self, calls: Calls, given: list[Tensor]) -> None:
        super().__init__()
        self.calls, self.known = calls, dict[int, Tensor]()
        self.add(given)

    def add(self, tensors: list[Tensor]) -> list[Tensor]:
        self.known.update((id(x), x) for x in tensors)
        return tensors

    def holds(self, *tensors: Tensor) -> bool:
        return all(id(x) in self.known for x in tensors)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is run_call:
            return self._attend(*args)
        if func is choose_on_host:
            raise ChunkingError(
                "select_keys inside the module of Eager gets a chunk, and reads the mask and the keys of the "
                "whole call: call it before the module, and pass the indices as an argument"
            )
        results = func(*args, **(kwargs or {}))
        inputs, outputs = (
            [x for x in tree_leaves(values) if isinstance(x, Tensor)] for values in ((args, kwargs), results)
        )
        if inputs and self.holds(*inputs):
            self.add(outputs)
        else:
            for x in outputs:  # includes tensors that an in-place operation returns
                self.known.pop(id(x), None)
        return results

    def _attend(self, call: Arguments) -> list[Tensor]:
        """Run attention of this chunk; attention of a memory is a part of the memory."""
        if self.calls.is_recorded:
            _refuse_checkpoint()
        if self.holds(call.query, call.key):
            return self.add(run_call(call))
        return run_call(self.calls.cut(call, of_memory=self.holds(call.key)))


class Calls:
    """Attention calls of the module in :class:`Eager`: collects keys and values of previous chunks.

    rows:        number of rows of each chunk
    is_recorded: whether a backward pass may follow
    index:       index of the running chunk
    numbers:     counts the calls whose keys are cut
    """

    index: int
    numbers: Iterator[int]

    def __init__(self, dim: str, rows: list[range]) -> None:
        self.dim, self.rows, self.is_recorded = dim, rows, torch.is_grad_enabled()
        self.keys: dict[int, list[tuple[Tensor, Tensor]]] = {}  # by the number of the call in a chunk

    def begin(self, index: int) -> None:
        """Begin a chunk."""
        self.index, self.numbers = index, itertools.count()

    def cut(self, call: Arguments, of_memory: bool) -> Arguments:
        """Return the call with the plan of this chunk, and the keys and values that its queries read.
        of_memory: whether all chunks see the same keys"""
        mask = plan_cache.current_mask(call.block_mask)
        plan, key, value = self._cut(*call[:3], mask, call.mesh, of_memory)
        return call._replace(block_mask=plan, key=key, value=value)

    def _cut(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, mesh: Any, of_memory: bool
    ) -> tuple[Plan, Tensor, Tensor]:
        names = ("batch",) if self.dim == "batch" else ("rows",) if of_memory else ("rows", "kv_rows")
        plan = self._plan(ShardSizes.of(query, key), names, mask, mesh)
        own, total = self.rows[self.index], len(self.rows)
        if self.dim == "batch":
            first = own.start * query.shape[0] // len(own)
            return plan.batch_rows(first, query.shape[0]), key, value
        if of_memory:
            return plan.part(self.index, total), key, value
        return self._add_keys(plan, self.keys.setdefault(next(self.numbers), []), key, value)

    def _add_keys(
        self, plan: Plan, chunks: list[tuple[Tensor, Tensor]], key: Tensor, value: Tensor
    ) -> tuple[Plan, Tensor, Tensor]:
        """Append this chunk's keys and values; return its plan, and the keys and values of all chunks up to
        the last one that its queries need."""
        total = len(self.rows)
        needs = plan.needs(total)
        if bool(needs.triu(1).any()):
            raise ChunkingError(
                "block_mask lets queries of a chunk see keys of a later chunk, which Eager computes "
                "afterwards: with dim='seq' pass a mask without later keys, as a causal one, or compute the "
                "keys of all chunks before the attention (keys of a memory that all chunks see come from an "
                "argument that is not split, a parameter or a buffer)"
            )
        chunks.append((key, value))
        count = prefixes(needs, total)[self.index]
        part = plan.part(self.index, total, keys=None if count == total else count)
        keys, values = zip(*chunks[:count], strict=True)
        return part, torch.cat(keys, 2), None if value is None else torch.cat(values, 2)

    def _plan(self, sizes: ShardSizes, names: Iterable[str], mask: Any, mesh: Any) -> Plan:
        """Return the plan of the whole call. names: names of the sizes that are sizes of a chunk"""
        own, whole = len(self.rows[self.index]), self.rows[-1].stop
        sizes = sizes._replace(**{name: getattr(sizes, name) * whole // own for name in names})
        return plan_cache.plan_for(mask, sizes, groups.group_of(mesh))


def _refuse_checkpoint() -> None:
    """Raise ChunkingError if a checkpoint inside the module runs the attention: it would run it again in the
    backward pass, outside of the chunk."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code is not Eager.forward.__code__:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            raise ChunkingError(
                "a checkpoint inside the module of Eager runs an attention, which the backward pass would "
                "compute again outside of its chunk: put the checkpoint around it, as in "
                "checkpoint(Eager(module, ...), x)"
            )
        frame = frame.f_back
