"""torch's own FlexAttention kernels, compiled for GPUs that are not here and read as ours are.

``python -m tests.kernels.support.flex`` prints ``tritoncp.analysis.resource_table.FLEX``.  The templates are
those of the installed torch, without a score_mod, with a causal mask and torch's default tiles for each GPU,
with and without USE_TMA.  torch launches dQ and dK/dV as one kernel: registers and shared memory are of the
whole kernel, the loop is read from a copy that holds only that half.
"""

import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jinja2
import torch

S, HEADS, KV_HEADS = 1024, 8, 2
CAPABILITIES = {"sm_80": (8, 0), "sm_90": (9, 0), "sm_100": (10, 0)}
TEMPLATES = Path(torch.__file__).parent / "_inductor/kernel/flex/templates"
TENSORS = {
    "forward": "Q K V LSE MAX KV_NUM_BLKS KV_IDX FULL_KV_NUM_BLKS FULL_KV_IDX",
    "backward": "Q K V LSE DELTA DO DQ DV KV_NUM_BLKS KV_IDX Q_NUM_BLKS Q_IDX FULL_KV_NUM_BLKS FULL_KV_IDX "
    "FULL_Q_NUM_BLKS FULL_Q_IDX",
}
WRITTEN = {"post_mod_scores": "{score}", "grad_scores": "{grad_score_mod}", "mask_mod_output": "{n} <= {m}"}


def default_tiles(kernel: str, arch: str, dim: int) -> list[tuple[dict[str, int], int, int]]:
    """The (constants, warps, stages) that torch takes by default."""
    from torch._inductor.template_heuristics.triton import CUDAConfigHeuristic, ROCmConfigHeuristic

    if arch.startswith("gfx"):
        tables: Any = ROCmConfigHeuristic()
        device = SimpleNamespace(gcnArchName=arch)
        patches = [mock.patch("torch.cuda.get_device_properties", return_value=device)]
    else:
        tables = CUDAConfigHeuristic()
        patches = [mock.patch("torch.cuda.get_device_capability", return_value=CAPABILITIES[arch])]
    with patches[0]:
        which = tables.get_flex_attn_fwd_configs if kernel == "forward" else tables.get_flex_attn_bwd_configs
        (best,) = which(dim, torch.bfloat16)
    names = {"BLOCK_M": "block_m", "BLOCK_N": "block_n"}
    if kernel != "forward":
        names = {f"BLOCK_{x}{i}": f"block_{x.lower()}{i}" for x in "MN" for i in (1, 2)}
    return {name: getattr(best, field) for name, field in names.items()}, best.num_warps, best.num_stages


def source(kernel: str, dim: int, tiles: dict[str, int], tma: bool) -> str:
    """Make the Python source of one kernel, ``flex``: "forward", "backward", or "dq" or "dkdv" for half of
    that."""
    names = TENSORS["forward" if kernel == "forward" else "backward"].split()
    shapes = {"Q": (1, HEADS, S, dim), "K": (1, KV_HEADS, S, dim), "KV_NUM_BLKS": (1, 1, S // 128)}
    shapes |= {"DO": shapes["Q"], "DQ": shapes["Q"], "V": shapes["K"], "DV": shapes["K"]}
    shapes |= {"Q_NUM_BLKS": shapes["KV_NUM_BLKS"], "KV_IDX": (1, 1, S // 128, S // 128)}
    shapes |= {"Q_IDX": shapes["KV_IDX"]}
    constants: dict[str, Any] = {
        **{"PRESCALE_QK": False, "ROWS_GUARANTEED_SAFE": False, "BLOCKS_ARE_CONTIGUOUS": False},
        **{"OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": False, "WRITE_DQ": True, "HAS_FULL_BLOCKS": True},
        **{"IS_DIVISIBLE": True, "SAFE_HEAD_DIM": True, "FLOAT32_PRECISION": "'ieee'", "USE_TMA": tma},
        **{"INDEX_DTYPE": "tl.int32", "SM_SCALE": dim**-0.5, "GQA_SHARED_HEADS": HEADS // KV_HEADS},
        **dict.fromkeys(("QK_HEAD_DIM", "QK_HEAD_DIM_ROUNDED", "V_HEAD_DIM", "V_HEAD_DIM_ROUNDED"), dim),
        **{"SPARSE_Q_BLOCK_SIZE": 128, "SPARSE_KV_BLOCK_SIZE": 128},
    }
    constants |= tiles
    defines = "\n".join(f"{name}: tl.constexpr = {value}" for name, value in constants.items())

    def strides(name: str, dim: int | None = None) -> str:
        sizes = shapes[name.removeprefix("FULL_")]
        steps = [1]
        for size in reversed(sizes[1:]):
            steps.insert(0, steps[0] * size)
        return str(steps[dim]) if dim is not None else ", ".join(map(str, steps))

    def modification(output_name: str | None = None, **fields: Any) -> str:
        return f"{output_name} = {WRITTEN[output_name].format(**fields)}" if output_name else "pass"

    def def_kernel(*_: str) -> str:
        arguments = ", ".join(f"arg_{name}" for name in (*names, "arg_out"))
        copies = "\n".join(f"{name} = arg_{name}" for name in names)
        return f"@triton.jit\ndef flex({arguments}):\n" + _indent(f"{defines}\n{copies}", first=True)

    def store_output(indices: tuple[str, ...], value: str, mask: str | None = None, **_: Any) -> str:
        offset = " + ".join(f"({i}) * {step}" for i, step in zip(indices, strides("Q").split(", ")))
        return f"tl.store(arg_arg_out + {offset}, {value}, mask={mask})"

    jinja = jinja2.Environment(undefined=jinja2.StrictUndefined)
    jinja.filters["indent_except_first"] = lambda text, depth: text.replace("\n", "\n" + "    " * depth)
    files = ["flex_attention", "utilities", "common"]
    if kernel != "forward":
        files = ["flex_backwards", "utilities"]
    text = "\n\n".join((TEMPLATES / f"{name}.py.jinja").read_text() for name in files)
    text = jinja.from_string(text).render(
        **{"def_kernel": def_kernel, "stride": strides, "size": lambda name, dim: shapes[name][dim]},
        **{"gen_argdefs": lambda: ", ".join(f"arg_{name}" for name in names), "modification": modification},
        **{"gen_defines": lambda: defines, "store_output": store_output},
        **{"USE_TMA": tma, "HAS_FULL_BLOCKS": True},
    )
    if kernel in ("dq", "dkdv"):
        text = text.replace("if pid >= NUM_KV_BLOCKS:", f"if {kernel == 'dq'}:")
    return f"import triton\nimport triton.language as tl\n\n{text}"


def _indent(text: str, first: bool) -> str:
    return ("    " if first else "") + text.replace("\n", "\n    ")


def compiled(kernel: str, arch: str, dim: int, tma: bool) -> Any:
    """Compile to Triton's kernel object."""
    from triton.runtime.driver import driver

    from tritoncp.analysis.cross_compile import DriverStub, target_of

    tiles, warps, stages = default_tiles(kernel, arch, dim)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "flex_rendered.py"
        path.write_text(source(kernel, dim, tiles, tma))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec and spec.loader
        spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
        names = TENSORS["forward" if kernel == "forward" else "backward"].split()
        args = [torch.empty(16, dtype=dtype_of(name)) for name in (*names, "out")]
        driver.set_active(DriverStub(target_of(arch)))
        return module.flex.warmup(*args, grid=(1,), num_warps=warps, num_stages=stages)


def dtype_of(name: str) -> torch.dtype:
    if name.endswith(("_IDX", "_BLKS")):
        return torch.int32
    return torch.float32 if name in ("LSE", "MAX", "DELTA") else torch.bfloat16


def row(kernel: str, arch: str, dim: int, tma: bool) -> dict[str, Any]:
    """Figures of one torch kernel, in the format of a row of `tritoncp inspect`."""
    from tritoncp.analysis.jobs import step_job
    from tritoncp.analysis.kernel_report import inner_loop, read_amd, read_nvidia
    from tritoncp.kernels.tile_rules import Config

    def read(compiled_kernel: Any) -> dict[str, Any]:
        resources = (
            read_amd(compiled_kernel.asm["amdgcn"])
            if "amdgcn" in compiled_kernel.asm
            else read_nvidia(compiled_kernel.asm)
        )
        resources |= {
            "shared_bytes": compiled_kernel.metadata.shared,
            "ptx": compiled_kernel.asm.get("ptx", ""),
        }
        resources["warps"] = compiled_kernel.metadata.num_warps
        return resources | {"tensor_columns": getattr(compiled_kernel.metadata, "tmem_size", None) or 0}

    own = read(compiled(kernel, arch, dim, tma))
    code, ptx = own.pop("code"), own.pop("ptx")
    if kernel != "forward":
        own = read(compiled("backward", arch, dim, tma))
    tiles, warps, stages = default_tiles(kernel, arch, dim)
    end = {"forward": "", "dq": "2", "dkdv": "1"}[kernel]
    config = Config(tiles["BLOCK_M" + end], tiles["BLOCK_N" + end], warps, stages)
    own["mma"] = {x.op: 1 for x in code if "MMA" in x.op}
    row = {"kernel": kernel, "arch": arch, "head_dim": dim, "tma": tma}
    row["tiles"] = f"{config.BLOCK_M}x{config.BLOCK_N} {warps}/{stages}"
    row |= {name: own[name] for name in ("registers", "spill_bytes", "shared_bytes")}
    return row | inner_loop(step_job(kernel, arch, dim), config, code, ptx, own)


def main() -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    for arch in sys.argv[1:] or ["sm_90"]:
        for dim in (64, 128, 256):
            for kernel in ("forward", "dq", "dkdv"):
                for tma in (False, True)[: 1 + (arch in ("sm_90", "sm_100"))]:
                    try:
                        print(json.dumps(row(kernel, arch, dim, tma)), flush=True)
                    except Exception as error:
                        print(kernel, arch, dim, tma, repr(error)[:1500], flush=True)


if __name__ == "__main__":
    main()
