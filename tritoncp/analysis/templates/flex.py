"""torch's templates of flex attention, compiled for GPUs that are not here, and read as tritoncp's kernels.

The templates are those of the installed torch, without a score_mod.  torch launches dQ and dK/dV as one
kernel: registers and shared memory are of that kernel, each loop is known by the products in it.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from tritoncp.analysis.cross_compile import DriverStub, target_of
from tritoncp.analysis.disassembly import Instruction, innermost, products
from tritoncp.analysis.jobs import HEADS, KV_HEADS, S, step_job
from tritoncp.analysis.kernel_report import count_products, inner_loop, read_nvidia
from tritoncp.kernels.tile_rules import Config

CAPABILITIES = {"sm_80": (8, 0), "sm_90": (9, 0)}
TEMPLATES = {
    "forward": ("flex_attention", "utilities", "common"),
    "backward": ("flex_backwards", "utilities"),
}
TENSORS = {
    "forward": "Q K V LSE MAX KV_NUM_BLKS KV_IDX FULL_KV_NUM_BLKS FULL_KV_IDX",
    "backward": "Q K V LSE DELTA DO DQ DV KV_NUM_BLKS KV_IDX Q_NUM_BLKS Q_IDX FULL_KV_NUM_BLKS FULL_KV_IDX "
    "FULL_Q_NUM_BLKS FULL_Q_IDX",
}
# Attributes of torch's configs, which are constants of the templates in upper case.
BLOCKS = {
    "forward": ("block_m", "block_n"),
    "backward": ("block_m1", "block_n1", "block_m2", "block_n2"),
}
ENDS = {"forward": "", "dkdv": "1", "dq": "2"}  # of the constants that hold a loop's tile
PRODUCTS = {"forward": 2, "dkdv": 4, "dq": 3}  # in one turn of a loop


class TemplateMask(NamedTuple):
    """A mask as torch compiles it.

    code:   of its mask_mod, for a pair of query m and key n
    block:  size of a block of its BlockMask
    blocks: the BlockMask lists full blocks apart from others
    """

    code: str
    block: int = 128
    blocks: bool = True


MASKS = {
    "full": TemplateMask("tl.full([1], True, tl.int1)", 1 << 30, False),  # what block_mask=None becomes
    "causal": TemplateMask("{m} >= {n}"),
    "documents": TemplateMask("({m} >= {n}) & (tl.load(arg_DOCUMENT + {m}) == tl.load(arg_DOCUMENT + {n}))"),
}


@dataclass(frozen=True)
class TemplateJob:
    """One of torch's kernels to compile, for bfloat16.

    template: "forward" or "backward"
    mask:     a key of MASKS
    tma:      with the kernel option USE_TMA, which torch does not choose by itself
    default:  torch takes these tiles without autotuning
    blocks:   values of BLOCKS
    """

    template: str
    arch: str
    head_dim: int
    mask: str
    tma: bool
    default: bool
    blocks: tuple[int, ...]
    warps: int
    stages: int

    @property
    def constants(self) -> dict[str, int]:
        return {name.upper(): size for name, size in zip(BLOCKS[self.template], self.blocks)}

    def tile(self, kernel: str) -> tuple[int, int]:
        """The rows and columns of the tile of a kernel: "forward", "dq" or "dkdv"."""
        return self.constants["BLOCK_M" + ENDS[kernel]], self.constants["BLOCK_N" + ENDS[kernel]]

    @classmethod
    def of(cls, raw: dict[str, Any]) -> TemplateJob:
        """The job of a dict from ``asdict``."""
        return cls(**raw | {"blocks": tuple(raw["blocks"])})


def candidates(
    template: str, arch: str, head_dim: int, mask: str, tma: bool, autotune: bool = True
) -> Iterator[TemplateJob]:
    """Yield the jobs that torch chooses from with mode="max-autotune" (its default search space), the default
    first; without ``autotune`` only that."""
    from torch._inductor import config
    from torch._inductor.template_heuristics.triton import CUDAConfigHeuristic

    heuristic = CUDAConfigHeuristic()
    listing = (
        heuristic.get_flex_attn_fwd_configs if template == "forward" else heuristic.get_flex_attn_bwd_configs
    )
    with mock.patch("torch.cuda.get_device_capability", return_value=CAPABILITIES[arch]):
        with config.patch(max_autotune=False):
            (default,) = listing(head_dim, torch.bfloat16)
        with config.patch(max_autotune=autotune, max_autotune_flex_search_space="DEFAULT"):
            tuned = listing(head_dim, torch.bfloat16)
    for choice in [default, *(choice for choice in tuned if choice != default)]:
        blocks = tuple(getattr(choice, field) for field in BLOCKS[template])
        sizes = blocks, choice.num_warps, choice.num_stages
        yield TemplateJob(template, arch, head_dim, mask, tma, choice == default, *sizes)


def write_source(job: TemplateJob) -> str:
    """Write the Python source of a job's kernel, ``flex``, as torch would generate it."""
    from torch._inductor.codegen.common import KernelTemplate
    from torch._inductor.kernel.flex.common import load_flex_template

    names, mask, shapes = _tensors(job), MASKS[job.mask], _shapes(job)
    defines = "\n".join(f"{name}: tl.constexpr = {value}" for name, value in _constants(job).items())
    outputs = {"post_mod_scores": "{score}", "grad_scores": "{grad_score_mod}", "mask_mod_output": mask.code}

    def strides(name: str, dim: int | None = None) -> str:
        sizes = shapes[name.removeprefix("FULL_")]
        steps = [1]
        for size in reversed(sizes[1:]):
            steps.insert(0, steps[0] * size)
        return str(steps[dim]) if dim is not None else ", ".join(map(str, steps))

    def modification(output_name: str | None = None, **fields: Any) -> str:
        return f"{output_name} = {outputs[output_name].format(**fields)}" if output_name else "pass"

    def def_kernel(*_: str) -> str:
        arguments = ", ".join(f"arg_{name}" for name in (*names, "OUT"))
        copies = "\n".join(f"{name} = arg_{name}" for name in names)
        body = f"{defines}\n{copies}".replace("\n", "\n    ")
        return f"@triton.jit\ndef flex({arguments}):\n    {body}"

    def store_output(indices: tuple[str, ...], value: str, mask: str | None = None, **_: Any) -> str:
        offset = " + ".join(f"({i}) * {step}" for i, step in zip(indices, strides("Q").split(", ")))
        return f"tl.store(arg_OUT + {offset}, {value}, mask={mask})"

    text = "\n\n".join(map(load_flex_template, TEMPLATES[job.template]))
    text = KernelTemplate._template_from_string(text).render(
        **{"def_kernel": def_kernel, "stride": strides, "size": lambda name, dim: shapes[name][dim]},
        **{"gen_argdefs": lambda: ", ".join(f"arg_{name}" for name in names), "modification": modification},
        **{"gen_defines": lambda: defines, "store_output": store_output},
        **{"USE_TMA": job.tma, "HAS_FULL_BLOCKS": mask.blocks},
    )
    return f"import triton\nimport triton.language as tl\n\n{text}"


def _shapes(job: TemplateJob) -> dict[str, tuple[int, ...]]:
    blocks = max(1, S // MASKS[job.mask].block)
    queries, keys = (1, HEADS, S, job.head_dim), (1, KV_HEADS, S, job.head_dim)
    counts, indices = (1, 1, blocks), (1, 1, blocks, blocks)
    tensors = {"Q": queries, "DO": queries, "DQ": queries, "K": keys, "V": keys, "DV": keys}
    lists = {"KV_NUM_BLKS": counts, "Q_NUM_BLKS": counts, "KV_IDX": indices, "Q_IDX": indices}
    return tensors | lists


def _constants(job: TemplateJob) -> dict[str, Any]:
    dim, mask = job.head_dim, MASKS[job.mask]
    constants: dict[str, Any] = {
        **{"PRESCALE_QK": False, "ROWS_GUARANTEED_SAFE": False, "BLOCKS_ARE_CONTIGUOUS": False},
        **{"OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": False, "WRITE_DQ": True, "HAS_FULL_BLOCKS": mask.blocks},
        **{"IS_DIVISIBLE": True, "SAFE_HEAD_DIM": True, "FLOAT32_PRECISION": "'ieee'", "USE_TMA": job.tma},
        **{"INDEX_DTYPE": "tl.int32", "SM_SCALE": dim**-0.5, "GQA_SHARED_HEADS": HEADS // KV_HEADS},
        **dict.fromkeys(("QK_HEAD_DIM", "QK_HEAD_DIM_ROUNDED", "V_HEAD_DIM", "V_HEAD_DIM_ROUNDED"), dim),
        **dict.fromkeys(("SPARSE_Q_BLOCK_SIZE", "SPARSE_KV_BLOCK_SIZE"), mask.block),
    }
    return constants | job.constants


def _tensors(job: TemplateJob) -> list[str]:
    return TENSORS[job.template].split() + ["DOCUMENT"] * (job.mask == "documents")


def _dtype_of(name: str) -> torch.dtype:
    if name.endswith(("_IDX", "_BLKS", "DOCUMENT")):
        return torch.int32
    return torch.float32 if name in ("LSE", "MAX", "DELTA") else torch.bfloat16


def compile_template(job: TemplateJob) -> Any:
    """Compile a job to Triton's kernel object."""
    from triton.runtime.driver import driver

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "flex_rendered.py"
        path.write_text(write_source(job))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec and spec.loader
        spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
        args = [torch.empty(16, dtype=_dtype_of(name)) for name in (*_tensors(job), "OUT")]
        driver.set_active(DriverStub(target_of(job.arch)))
        return module.flex.warmup(*args, grid=(1,), num_warps=job.warps, num_stages=job.stages)


def report_template(job: TemplateJob) -> dict[str, Any]:
    """Compile a job and report its figures: the result of :func:`tritoncp.analysis.kernel_report.inner_loop`
    for each of its loops under ``loops``, by kernel, and those of the whole kernel."""
    compiled = compile_template(job)
    resources = read_nvidia(compiled.asm)
    code = resources.pop("code")
    resources |= {"shared_bytes": compiled.metadata.shared, "tensor_columns": 0}
    resources |= {"warps": job.warps, "mma": count_products(x.op for x in code)}
    kernels = ("forward",) if job.template == "forward" else ("dq", "dkdv")
    bodies = {kernel: _loops_of(kernel, job, innermost(code)) for kernel in kernels}
    reports = {}
    for kernel, loops in bodies.items():
        tile = Config(*job.tile(kernel), job.warps, job.stages)
        own = step_job(kernel, job.arch, job.head_dim)
        reports[kernel] = inner_loop(own, tile, code, "", resources, loops)
    return resources | {"loops": reports}


def _loops_of(kernel: str, job: TemplateJob, bodies: list[list[Instruction]]) -> list[list[Instruction]]:
    """Select the loops that hold a kernel's products: over full blocks, then over masked ones. Raises
    ValueError where they are not one of each."""
    rows, columns = job.tile(kernel)
    flops = 2 * rows * columns * job.head_dim * PRODUCTS[kernel]
    own = [body for body in bodies if _count_flops(body, job.warps) == flops]
    if len(own) != 1 + MASKS[job.mask].blocks:
        counts = [_count_flops(body, job.warps) for body in bodies]
        raise ValueError(f"{kernel} should have loops of {flops} FLOPs; the loops have {counts}")
    return own


def _count_flops(body: list[Instruction], warps: int) -> int:
    return sum(product.flops * (warps // product.warps) for product in products(body))
