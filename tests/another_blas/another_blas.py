"""Replace torch's sums, exponentials and sorts on the CPU by another machine's: many results differ in the
last digit, and equal elements are sorted in another order.

Products, sums and flash attention are computed twice, the second time with their terms in another order, and
each element is one of the two. Which one, and the order, depend on the operation, on shapes, strides and
storage offsets, and on the place of the element: the same call gives the same bits, the same row in another
batch or layout may not. So a comparison of bits that holds by luck on one CPU fails on all of them. What is
exact stays as it is: sums of whole numbers, single terms, zeros, infinities, NaN, exp(0). Sorts that need not
be stable sort equal elements backwards, as instructions of some CPUs do for more than 16 elements.

Importing the module changes the process, and those forked from it; ``sitecustomize`` beside it imports it in
new processes. Not covered: code that torch.compile fuses, and operations that are not listed here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, get_kernel

Place = int | str  # an argument: its position or its name
Sum = tuple[dict[Place, int], dict[int, int]]  # the dimension of its terms, in arguments and in results
Roll = tuple[dict[int, int], int]  # the dimensions of results, and by how many elements

PRODUCTS: dict[str, Sum] = {
    "mm": ({0: 1, 1: 0}, {}),
    "bmm": ({0: 2, 1: 1}, {}),
    "dot": ({0: 0, 1: 0}, {}),
    "addmm": ({1: 1, 2: 0}, {}),
    "addmv": ({1: 1, 2: 0}, {}),
    "baddbmm": ({1: 2, 2: 1}, {}),
}
FLASH = "_scaled_dot_product_flash_attention_for_cpu"
# Sums over channels of q and k, over keys, over queries. In causal attention only the first has a free order.
FORWARD: list[Sum] = [({0: -1, 1: -1}, {}), ({1: -2, 2: -2, "attn_mask": -1}, {})]
BACKWARD: list[Sum] = [
    ({1: -1, 2: -1}, {0: -1, 1: -1}),
    ({2: -2, 3: -2, "attn_mask": -1}, {1: -2, 2: -2}),
    ({0: -2, 1: -2, 4: -2, 5: -1, "attn_mask": -2}, {0: -2}),
]
SUMMING = (
    "mm mm.out bmm bmm.out dot addmm addmm_ addmm.out addmv addmv_ addmv.out baddbmm baddbmm_ baddbmm.out "
    f"sum.dim_IntList sum.IntList_out {FLASH} {FLASH}_backward"
).split()
EXPONENTIALS = ["exp", "exp_", "exp.out"]

COINS = torch.rand(65537, generator=torch.Generator().manual_seed(0)) < 0.5
ONE = torch.tensor(1.0)
HALVES = torch.float16, torch.bfloat16
FACTORS = {t: 1 - COINS.to(t) * (torch.finfo(t).eps / 2) for t in (*HALVES, torch.float32, torch.float64)}
SORT = get_kernel("aten::sort.stable", "CPU")
LIBRARY = Library("aten", "IMPL")  # its kernels stay registered while it is alive


def sums_of(op: str, args: tuple[Any, ...]) -> list[Sum]:
    """Return the sums of a call whose order is free."""
    name = op.split(".")[0].removesuffix("_")
    if name == "sum":
        return [({0: dim}, {}) for dim in args[1] or range(args[0].ndim)]
    if name in PRODUCTS:
        return [PRODUCTS[name]]
    sums, causal = (FORWARD, args[4:5]) if name == FLASH else (BACKWARD, args[7:8])
    return sums[:1] if any(causal) else sums


def roll_terms(inputs: dict[Place, Any], sums: list[Sum], seed: int) -> tuple[dict[Place, Any], list[Roll]]:
    """Return arguments with the terms of sums in another order, and the rolls that results need: none where
    every sum has one term."""
    inputs, rolls = dict(inputs), []
    for terms, result_dims in sums:
        place, dim = next(iter(terms.items()))
        count = inputs[place].shape[dim]
        if count < 2:
            continue
        shift = 1 + seed % (count - 1)
        for place, dim in terms.items():
            if inputs.get(place) is not None:
                inputs[place] = torch.roll(inputs[place], shift, dim)
        rolls.append((result_dims, -shift))
    return inputs, rolls


def compute_in_two_orders(number: int, op: str) -> Callable[..., Any]:
    """Return a kernel that takes each element of a result from one of two orders of its terms."""
    kernel = get_kernel(f"aten::{op}", "CPU")
    target = 0 if op.endswith("_") else "out" if op.endswith("out") else None

    def compute(keys: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        inputs: dict[Place, Any] = dict(enumerate(args)) | kwargs
        rolls: list[Roll] = []
        if args[0].is_floating_point() and args[0].ndim:
            seed = layout_seed(number, inputs)
            inputs, rolls = roll_terms(inputs, sums_of(op, args), seed)
        if not rolls:
            return kernel.call_boxed(keys, *args, **kwargs)
        if target is not None:
            inputs[target] = inputs[target].clone()
        if args[0].dtype in HALVES:  # rounded to nearest, both would be equal
            inputs = {place: widened(x) for place, x in inputs.items()}
        reordered = kernel.call_boxed(
            keys, *map(inputs.get, range(len(args))), **{k: inputs[k] for k in kwargs}
        )
        results = kernel.call_boxed(keys, *args, **kwargs)
        pairs = zip(results, reordered) if isinstance(results, tuple) else [(results, reordered)]
        for i, (result, other) in enumerate(pairs):
            for result_dims, shift in rolls:
                if i in result_dims:
                    other = torch.roll(other, shift, result_dims[i])
            other = round_down(other, result.dtype)
            torch.where(spread(COINS, seed, result.shape), other, result, out=result)
        return results

    return compute


def widened(x: Any) -> Any:
    """Return float32 in place of half precision: of a tensor, or of a dtype."""
    if isinstance(x, Tensor):
        return x.float() if x.dtype in HALVES else x
    return torch.float32 if x in HALVES else x


def round_down(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in another dtype, rounded towards 0."""
    if x.dtype == dtype:
        return x
    rounded = x.to(dtype)
    less = torch.nextafter(rounded, torch.zeros((), dtype=dtype))
    return torch.where(rounded.isfinite() & (rounded.float().abs() > x.abs()), less, rounded)


def compute_less(number: int, op: str) -> Callable[..., Any]:
    """Return a kernel whose results are the next smaller number for half of the elements."""
    kernel = get_kernel(f"aten::{op}", "CPU")

    def compute(keys: torch.DispatchKeySet, x: Tensor, **kwargs: Any) -> Tensor:
        if x.dtype not in FACTORS:
            return kernel.call_boxed(keys, x, **kwargs)
        factors = spread(FACTORS[x.dtype], layout_seed(number, {0: x}), x.shape)
        factors = torch.where(x == 0, ONE, factors)
        return kernel.call_boxed(keys, x, **kwargs).mul_(factors)

    return compute


def sort_ties_backwards(
    keys: torch.DispatchKeySet, x: Tensor, *, stable: bool | None, dim: int = -1, descending: bool = False
) -> tuple[Tensor, Tensor]:
    """Sort, with equal elements in reverse order unless the sort has to be stable."""
    if stable or not x.ndim:
        return SORT.call_boxed(keys, x, stable=stable, dim=dim, descending=descending)
    values, places = SORT.call_boxed(keys, x.flip(dim), stable=True, dim=dim, descending=descending)
    return values, x.shape[dim] - 1 - places


def layout_seed(number: int, inputs: dict[Place, Any]) -> int:
    tensors = (x for x in inputs.values() if isinstance(x, Tensor))
    return hash((number, *((x.shape, x.stride(), x.storage_offset()) for x in tensors)))


@lru_cache(500)
def spread(table: Tensor, seed: int, shape: torch.Size) -> Tensor:
    """Return an entry of a table for each element of a shape."""
    first, count = seed % len(table), shape.numel()
    if first + count > len(table):
        table = table.repeat((first + count) // len(table) + 1)
    return table[first : first + count].view(shape)


with warnings.catch_warnings(action="ignore"):  # torch warns that a kernel is replaced
    for number, op in enumerate(SUMMING):
        LIBRARY.impl(op, compute_in_two_orders(number, op), "CPU", with_keyset=True)
    for number, op in enumerate(EXPONENTIALS, len(SUMMING)):
        LIBRARY.impl(op, compute_less(number, op), "CPU", with_keyset=True)
    LIBRARY.impl("sort.stable", sort_ties_backwards, "CPU", with_keyset=True)
