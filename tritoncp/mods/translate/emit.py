"""Emission of readable Triton source from a torch graph: one line per operation.

Names, types and helpers of the emitted source come from fixed tables. Of the user's source it contains only
numbers, and the function's name reduced to letters, digits and dots.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import fx

from tritoncp.mods.errors import Untranslatable
from tritoncp.mods.translate.gradient import as_sparse
from tritoncp.mods.translate.graph_writer import GraphWriter
from tritoncp.mods.translate.index_maps import element_address
from tritoncp.mods.translate.symbolic import (
    TRITON_NAME,
    Block,
    Scalar,
    Value,
    as_rep,
    literal,
)
from tritoncp.mods.translate.trace import ModTrace


def emit_source(trace: ModTrace) -> tuple[str, int]:
    """Return (source of a module with `mask_mod`, or `score_mod` and `score_grad`; its `Mod.loads`)."""
    writer = GraphWriter(trace)
    lines = _emit_forward(trace, writer)
    if not trace.is_score:
        parts = [_emit_function("mask_mod", "b, h, q_idx, kv_idx, caps", lines)]
    else:
        scale = ", scale: tl.constexpr = 1.0" if _fold_scale(lines, writer.block) else ""
        parts = [_emit_function("score_mod", f"score, b, h, q_idx, kv_idx, caps{scale}", lines)]
    if trace.joint is not None:
        arguments = "dscore, score, b, h, q_idx, kv_idx, keep, caps, dcaps"
        parts.append(_emit_function("score_grad", arguments, _emit_backward(trace, trace.joint)))
    body = "\n\n\n".join(parts) + "\n"
    return _emit_header(trace, body) + body, writer.load_axes


def _emit_function(name: str, arguments: str, lines: list[str]) -> str:
    return "\n".join(["@triton.jit", f"def {name}({arguments}):", *("    " + line for line in lines)])


def _emit_header(trace: ModTrace, body: str) -> str:
    from tritoncp.mods.translate import triton_helpers  # late: it imports Triton, which plans do not need

    kind = f"score_mod ({TRITON_NAME[trace.dtype]} scores)" if trace.is_score else "mask_mod"
    lines = [f'"""The {kind} `{trace.name}`, translated from Python by tritoncp.', ""]
    for i, tensor in enumerate(trace.tensors):
        grad = ", wants a gradient" if i in trace.wants else ""
        lines.append(f"caps[{i}]  t{i}: captured {TRITON_NAME[tensor.dtype]} tensor, {tensor.ndim}-d{grad}")
    for i, number in enumerate(trace.numbers, start=len(trace.tensors)):
        lines.append(f"caps[{i}]  n{i - len(trace.tensors)}: captured {type(number).__name__}")
    if not trace.tensors and not trace.numbers:
        lines.append("It captures nothing: caps is empty.")
    helpers = sorted(
        name
        for name, function in vars(triton_helpers).items()
        if getattr(getattr(function, "fn", None), "__module__", None) == triton_helpers.__name__
        and re.search(rf"(?<![\w.]){name}\(", body)
    )
    helpers += ["libdevice"] * ("libdevice." in body)
    imports = [f"from {triton_helpers.__name__} import {', '.join(helpers)}"] if helpers else []
    triton = ["import triton", "import triton.language as tl", *([""] if imports else [])]
    return "\n".join([*lines, '"""', "", *triton, *imports, "", "", ""])


def _emit_forward(trace: ModTrace, writer: GraphWriter) -> list[str]:
    (out,) = writer.run(trace.forward.graph)
    dtype = trace.dtype if trace.is_score else torch.bool
    value = writer.block.convert(_scalar(out), dtype)
    text = as_rep(value, TRITON_NAME[dtype])
    if trace.is_score and not {"q", "kv"} <= value.axes:  # kernels need the score of every pair
        text = f"tl.broadcast_to({text}, score.shape)"
    return [*writer.lines(), f"return {text}"]


def _emit_backward(trace: ModTrace, joint: fx.GraphModule) -> list[str]:
    writer = GraphWriter(trace)
    block = writer.block
    outputs: Any = joint.graph.output_node().args[0]
    for place, output in zip(trace.wants, outputs[1:]):
        if output is not None:
            writer.name_dimensions(output, place)
    dscore, *grads = writer.run(joint.graph)
    for place, grad in enumerate(grads):
        if grad is not None:
            try:
                _emit_accumulate(block, place, grad)
            except NotImplementedError as error:
                operation = f"the gradient of captured tensor {trace.wants[place]}"
                raise Untranslatable(operation, trace.origin, str(error)) from error
    value = block.convert(_scalar(dscore), trace.dtype)
    return [*writer.lines(), f"return {as_rep(value, TRITON_NAME[trace.dtype])}"]


def _fold_scale(lines: list[str], block: Block) -> bool:
    """Fold attention's scale into a factor of the score that all scores of a tile share, which saves kernels
    one multiplication per score. Return whether the score has such a factor and no other use."""
    uses = [i for i, line in enumerate(lines) if re.search(r"\bscore\b", line)]
    factor = r"[A-Za-z_]\w*|-?[\d.]+(?:e[+-]?\d+)?"
    product = re.fullmatch(rf"(\w+ = score \*) ({factor})", lines[uses[0]]) if len(uses) == 1 else None
    if product is None or (product[2].isidentifier() and product[2] not in block.uniform):
        return False
    lines[uses[0]] = f"{product[1]} ({product[2]} * scale)"
    return True


def _scalar(value: Value | None) -> Scalar:
    assert isinstance(value, Scalar), "the function's result has dimensions"
    return value


def _emit_accumulate(block: Block, place: int, grad: Value) -> None:
    entries = as_sparse(grad).entries
    if entries:
        block.lines.append(f"d{place}, d{place}_sizes, d{place}_strides = dcaps[{place}]")
    for entry in entries:
        address, valid = element_address(block, f"d{place}", entry.indices)
        uniform = not any(index.at.axes for index in entry.indices)
        name = "accumulate_sum" if uniform else "accumulate"
        value = as_rep(entry.value, entry.value.rep)
        block.lines.append(f"{name}({address}, {value}, {valid or literal(True, 'int1')}, keep)")
