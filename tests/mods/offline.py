"""Compilation of translated mods for sm_90 without a GPU, in a process without the interpreter."""

from __future__ import annotations

import json
import re
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.mods.harness import grad_kernel, mask_kernel, score_kernel
from tests.mods.translate.test_emit import MASKS, SCORES
from tests.mods.translate.test_functions import FUNCTIONS
from tests.mods.translate.test_gradient import MODS
from tritoncp.mods import Mod, mask_mod, score_mod

POINTER = {
    torch.float16: "*fp16", torch.bool: "*u8", torch.uint8: "*u8", torch.int32: "*i32", torch.int64: "*i64",
    torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64",
}  # fmt: skip
PLACE = {"b": "i32", "h": "i32", "q0": "i32", "k0": "i32"}
CONST = {"MOD": "constexpr", "N": "constexpr"}


def caps(mod: Mod) -> tuple[Any, ...]:
    tensors = [(POINTER[t.dtype], ("i32",) * t.ndim, ("i64",) * t.ndim) for t in mod.tensors]
    return (*tensors, *("fp32" if isinstance(n, float) else "i32" for n in mod.numbers))


def compile_kernel(kernel: Any, signature: dict[str, Any], fn: Any) -> Any:
    names = list(signature)
    constants = {(names.index("MOD"),): fn, (names.index("N"),): 32}
    return triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32))


def compile_mask(mod: Mod) -> Any:
    return compile_kernel(mask_kernel, {"out": "*i8", **PLACE, "caps": caps(mod), **CONST}, mod.fn)


def compile_score(mod: Mod, score: str = "*fp32") -> Any:
    signature = {"out": score, "scores": score, **PLACE, "caps": caps(mod), **CONST}
    return compile_kernel(score_kernel, signature, mod.fn)


def compile_grad(mod: Mod, score: str = "*fp32", sums: str = "*fp32") -> Any:
    ranks = [mod.tensors[i].ndim for i in mod.wants]
    dcaps = tuple((sums, ("i32",) * n, ("i32",) * n) for n in ranks)
    lead = {"out": score, "dscores": score, "scores": score, **PLACE}
    return compile_kernel(
        grad_kernel, {**lead, "caps": caps(mod), "dcaps": dcaps, "keeps": "*i8", **CONST}, mod.grad
    )


def atomics(ptx: str) -> list[str]:
    """Return the types of the atomic additions in PTX."""
    return sorted(set(re.findall(r"(?:atom|red)\.[\w.:]*add[\w.]*?\.([a-z]\d+)", ptx)))


def formulas(dtype: torch.dtype) -> dict[str, Mod]:
    """Functions that Triton lacks, several in one mod, and a product of learned rows."""
    functions = [fn for fn, _, _ in FUNCTIONS.values()][:18]
    table = torch.zeros(40, 16, requires_grad=True)
    mods = {
        f"functions {i}": lambda s, b, h, q, k, i=i: sum(fn(s) for fn in functions[i : i + 6])
        for i in range(0, len(functions), 6)
    }
    mods["rows"] = lambda s, b, h, q, k: s + table[q] @ table[k]
    return {name: score_mod(fn, dtype) for name, fn in mods.items()}


def main() -> None:
    window = 300
    masks = {name: compile_mask(mask_mod(fn)) for name, fn in MASKS.items()}
    sliding = compile_mask(mask_mod(lambda b, h, q, k: (q - k <= window) & (q >= k)))
    scores = {name: compile_score(score_mod(fn)) for name, fn in SCORES.items()}
    grads = {name: compile_grad(score_mod(fn)) for name, fn in MODS.items()}
    for dtype, pointer in ((torch.float32, "*fp32"), (torch.float64, "*fp64")):
        for name, mod in formulas(dtype).items():
            scores[f"{name} {dtype}"] = compile_score(mod, pointer)
            if dtype is torch.float32:
                grads[name] = compile_grad(mod)
    shapes = "0-d scale", "per head", "relative bias"
    exact = {name: compile_grad(score_mod(MODS[name]), sums="*i64") for name in shapes}
    double = compile_score(score_mod(lambda s, b, h, q, k: s * 0.1, torch.float64), "*fp64")
    report = {
        "cubins": sum(len(k.asm["cubin"]) > 0 for ks in (masks, scores, grads, exact) for k in ks.values()),
        "mods": len(masks) + len(scores) + len(grads) + len(exact),
        "window in 64 bits": [line for line in sliding.asm["ttir"].splitlines() if "i64" in line],
        "tenth": "dense<2.500000e-02>" in double.asm["ttir"],  # times the scale, 0.25
        "atomics": grads["relative bias"].asm["ptx"].count("atom.")
        + grads["relative bias"].asm["ptx"].count("red."),
        "exact atomics": [atomics(k.asm["ptx"]) for k in exact.values()],
        "no atomics": grads["no captures"].asm["ptx"].count("atom.")
        + grads["no captures"].asm["ptx"].count("red."),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
