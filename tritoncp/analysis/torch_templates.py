"""Kernels from the installed torch's flex attention templates: the source that torch would generate, and its
candidate tiles."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tritoncp.perf.problem import Problem, window_of

CAPABILITIES = {"sm_80": (8, 0), "sm_90": (9, 0), "sm_100": (10, 0)}
TEMPLATES = {
    "forward": ("flex_attention", "utilities", "common"),
    "backward": ("flex_backwards", "utilities"),
}
# Attributes of torch's configs; in upper case they are constants of the templates.
BLOCKS = {
    "forward": ("block_m", "block_n"),
    "backward": ("block_m1", "block_n1", "block_m2", "block_n2"),
}
# Tensors of mods: DOCUMENT is the document index of each token, SLOPES are ALiBi's slopes of the heads, SHOWN
# are the selected pairs [Hs, queries, keys].
SCORES = {
    "": "{score}",
    "alibi": "({score} - tl.load(arg_SLOPES + {h}) * ({m} - {n}).to(tl.float32))",
    "softcap": "(libdevice.tanh({score} * 0.02) * 50.0)",
}


@dataclass(frozen=True)
class TemplateJob:
    """One of torch's kernels, for bfloat16, with its tiles.

    template: "forward" or "backward"
    default:  whether torch uses these tiles without autotuning
    blocks:   values of BLOCKS
    selected: heads of SHOWN, the selected pairs, which the mask_mod reads too; 0: none
    """

    template: str
    arch: str
    problem: Problem
    default: bool
    blocks: tuple[int, ...]
    warps: int
    stages: int
    selected: int = 0

    @property
    def name(self) -> str:
        """The tiles as text."""
        return f"{'×'.join(map(str, self.blocks))} {self.warps}/{self.stages}"

    @property
    def constants(self) -> dict[str, int]:
        return {name.upper(): size for name, size in zip(BLOCKS[self.template], self.blocks)}

    @property
    def grid(self) -> tuple[int, int, int]:
        problem, sizes = self.problem, self.constants
        if self.template == "forward":
            return -(-problem.rows // sizes["BLOCK_M"]), 1, problem.heads
        group = problem.heads // problem.kv_heads
        tiles = -(-problem.rows // sizes["BLOCK_M2"]) * group + -(-problem.seq // sizes["BLOCK_N1"])
        return tiles, 1, problem.kv_heads


def mask_of(problem: Problem) -> str:
    """Return the source of a problem's mask_mod for query m and key n. Raises ValueError for a mask that is
    not implemented here.

    >>> mask_of(Problem("causal", 1024))
    '{m} >= {n}'
    """
    causal, name = "{m} >= {n}", problem.mask
    if name == "full":
        return "tl.full([1], True, tl.int1)"
    if name == "causal":
        return causal
    if name == "window":
        return f"({causal}) & ({{m}} - {{n}} <= {window_of(problem.seq)})"
    if has_documents(problem):
        return f"({causal}) & (tl.load(arg_DOCUMENT + {{m}}) == tl.load(arg_DOCUMENT + {{n}}))"
    raise ValueError(f"mask {name!r} is not implemented for torch; pass full, causal, window or document")


def has_documents(problem: Problem) -> bool:
    """Return whether the mask is a named mask of causal documents."""
    return problem.mask.endswith(("document", "documents"))


def candidates(template: str, arch: str, problem: Problem) -> Iterator[TemplateJob]:
    """Yield the candidates of torch's mode="max-autotune" (default search space), the default tiles first.
    Raises ValueError for an architecture, a score_mod or a pass that is not implemented here."""
    from torch._inductor import config
    from torch._inductor.template_heuristics.triton import CUDAConfigHeuristic

    if arch not in CAPABILITIES:
        raise ValueError(
            f"architecture {arch} has no list of torch's tiles; pass one of {', '.join(CAPABILITIES)}"
        )
    if problem.score not in SCORES or (problem.score == "softcap" and template == "backward"):
        raise ValueError(
            f"score_mod {problem.score!r} is not implemented for torch; pass alibi, or softcap in the "
            "forward pass"
        )
    heuristic = CUDAConfigHeuristic()
    listing = (
        heuristic.get_flex_attn_fwd_configs if template == "forward" else heuristic.get_flex_attn_bwd_configs
    )
    call: dict[str, Any] = {"head_dim": problem.dim, "dtype": torch.bfloat16}
    if "seq_len" in inspect.signature(listing).parameters:  # since torch 2.14, forward
        call["seq_len"] = problem.rows
    with mock.patch("torch.cuda.get_device_capability", return_value=CAPABILITIES[arch]):
        with config.patch(max_autotune=False):
            (default,) = listing(**call)
        with config.patch(max_autotune=True, max_autotune_flex_search_space="DEFAULT"):
            tuned = listing(**call)
    for choice in [default, *(choice for choice in tuned if choice != default)]:
        blocks = tuple(getattr(choice, field) for field in BLOCKS[template])
        sizes = blocks, choice.num_warps, choice.num_stages
        yield TemplateJob(template, arch, problem, choice == default, *sizes)


def write_source(job: TemplateJob, tensors: Mapping[str, Tensor]) -> str:
    """Return the Python source of a job's kernel, ``flex``, as torch would generate it. Its arguments are the
    tensors in their order; OUT is the output of the template."""
    from torch._inductor.codegen.common import KernelTemplate
    from torch._inductor.kernel.flex.common import load_flex_template

    arguments = ", ".join(f"arg_{name}" for name in tensors)
    defines = "\n".join(f"{name}: tl.constexpr = {value}" for name, value in _constants(job).items())
    outputs = {
        "post_mod_scores": SCORES[job.problem.score],
        "grad_scores": "{grad_score_mod}",
        "mask_mod_output": _mask_source(job),
    }

    def stride(name: str, dim: int | None = None) -> str:
        steps = tensors[name].stride()
        return str(steps[dim]) if dim is not None else ", ".join(map(str, steps))

    def modification(output_name: str | None = None, **fields: Any) -> str:
        return f"{output_name} = {outputs[output_name].format(**fields)}" if output_name else "pass"

    def def_kernel(*_: str) -> str:
        copies = "\n".join(f"{name} = arg_{name}" for name in tensors)
        body = f"{defines}\n{copies}".replace("\n", "\n    ")
        return f"@triton.jit\ndef flex({arguments}):\n    {body}"

    def store_output(indices: tuple[str, ...], value: str, mask: str | None = None, **_: Any) -> str:
        offset = " + ".join(f"({i}) * {step}" for i, step in zip(indices, tensors["OUT"].stride()))
        return f"tl.store(arg_OUT + {offset}, {value}, mask={mask})"

    text = "\n\n".join(map(load_flex_template, TEMPLATES[job.template]))
    text = KernelTemplate._template_from_string(text).render(
        **{"def_kernel": def_kernel, "stride": stride, "size": lambda name, dim: tensors[name].shape[dim]},
        **{"gen_argdefs": lambda: arguments, "modification": modification},
        **{"gen_defines": lambda: defines, "store_output": store_output},
        **{"USE_TMA": False, "HAS_FULL_BLOCKS": _has_blocks(job)},
    )
    head = "import triton\nimport triton.language as tl\nfrom triton.language.extra.cuda import libdevice\n\n"
    return head + text


def _has_blocks(job: TemplateJob) -> bool:
    """Return whether there are lists of full blocks beside those of masked ones."""
    return job.selected > 0 or job.problem.mask != "full"


def _mask_source(job: TemplateJob) -> str:
    """Return the source of the mask_mod."""
    if not job.selected:
        return mask_of(job.problem)
    problem = job.problem
    row = f"({{h}} // {problem.heads // job.selected} * {problem.rows} + {{m}}) * {problem.seq}"
    return f"({mask_of(problem)}) & (tl.load(arg_SHOWN + {row} + {{n}}) != 0)"


def _constants(job: TemplateJob) -> dict[str, Any]:
    problem, dim, blocks = job.problem, job.problem.dim, _has_blocks(job)
    group = problem.heads // problem.kv_heads
    dims = {"QK_HEAD_DIM": dim, "V_HEAD_DIM": problem.v_dim}
    rounded = {f"{name}_ROUNDED": 1 << (size - 1).bit_length() for name, size in dims.items()}
    is_safe = [*dims.values()] == [*rounded.values()]
    constants: dict[str, Any] = {
        **{"PRESCALE_QK": False, "ROWS_GUARANTEED_SAFE": False, "BLOCKS_ARE_CONTIGUOUS": False},
        **{"OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": False, "WRITE_DQ": True, "HAS_FULL_BLOCKS": blocks},
        **{"IS_DIVISIBLE": True, "SAFE_HEAD_DIM": is_safe, "FLOAT32_PRECISION": "'ieee'", "USE_TMA": False},
        **{"INDEX_DTYPE": "tl.int32", "SM_SCALE": dim**-0.5, "GQA_SHARED_HEADS": group},
        **dims,
        **rounded,
        **dict.fromkeys(("SPARSE_Q_BLOCK_SIZE", "SPARSE_KV_BLOCK_SIZE"), 128 if blocks else 1 << 30),
    }
    return constants | job.constants
