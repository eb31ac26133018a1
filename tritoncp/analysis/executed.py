"""Counts of executed instructions of a call, for tritoncp's kernels and torch's templates.

Both run instruction by instruction on a CPU (:mod:`tritoncp.executor`), and are compared with float64. Counts
do not show the effects of instruction scheduling by ptxas, of latencies and of clock rates.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from tritoncp.analysis import torch_templates
from tritoncp.analysis.compile_pool import read_nvidia
from tritoncp.analysis.jobs import Chosen, Variant
from tritoncp.analysis.launches import CallTensors
from tritoncp.analysis.resource_table import print_table, tiles
from tritoncp.analysis.torch_templates import TemplateJob, candidates, write_source
from tritoncp.command_base import make_console
from tritoncp.perf.problem import Problem
from tritoncp.perf.suite.baselines import inputs
from tritoncp.reference.dense import dense_attention

# Counts of one pass, summed over its kernels, per query row and head. who: "tritoncp", "tritoncp, gluon" (a
# route), "torch" (default tile) or "torch autotuned" (another candidate); tiles: tiles of each kernel; error:
# max error of a result against float64, relative to its max element; warp instructions without moves; flops
# of tensor cores; special functions, such as exponentials and divisions; wavefronts of shared memory; sectors
# of global memory; registers and spill_bytes of a thread, by ptxas.
Row = dict[str, Any]
COUNTS = ("instructions", "flops", "special", "wavefronts", "sectors")
PASSES = {"forward": ("forward",), "backward": ("dq", "dkdv")}  # kernels whose counts are added
LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class ExecutedCall:
    """Inputs of a call, and its results in float64.

    chosen: the keys that its queries select, or None
    """

    problem: Problem
    chosen: Chosen | None
    tensors: tuple[Tensor, ...]  # q, k, v, dout
    out: Tensor
    lse: Tensor
    grads: tuple[Tensor, ...]  # dq, dk, dv


def draw_call(problem: Problem, chosen: Chosen | None = None) -> ExecutedCall:
    """Draw random inputs, and compute the call's results in float64."""
    x = inputs(problem, torch.device("cpu"))
    tensors = tuple(tensor.detach() for tensor in (x.q, x.k, x.v, x.dout))
    q, k, v = leaves = [tensor.double().requires_grad_() for tensor in tensors[:3]]
    mask: Any = problem.block_mask()
    if chosen is not None:
        mask = mask.to_dense(1, problem.heads) & selected_pairs(problem, chosen).repeat_interleave(
            problem.heads // chosen.shares, 1
        )
    out, lse, _ = dense_attention(q, k, v, mask, problem.score_mod(torch.device("cpu")))
    grads = torch.autograd.grad(out, leaves, tensors[3].double())
    return ExecutedCall(problem, chosen, tensors, out.detach(), lse.detach(), grads)


def selected_pairs(problem: Problem, chosen: Chosen) -> Tensor:
    """Return the pairs that a problem's queries select: bool [1, Hs, queries, keys]."""
    return chosen.draw(problem).to_dense(problem.seq, problem.rows)


def count_tritoncp(call: ExecutedCall, arch: str, which: str, route: str = "") -> Row:
    """Execute tritoncp's kernels of a pass, "forward" or "backward", and return their counts. route: of the
    forward pass other than "loops". Raises ValueError if the call cannot take it."""
    variant = None if call.chosen is None else Variant(call.problem, chosen=call.chosen)
    tensors = CallTensors(call.problem, torch.device("cpu"), call.tensors, variant)
    kernels = (route or "forward",) if which == "forward" else ("delta", "dq", "dkdv")
    if which == "backward":
        tensors.results("forward")["out"].copy_(call.out)
        tensors.results("route")["lse"].copy_(call.lse[..., None])
    launches: list[Any] = [tensors.launch(kernel, None, arch) for kernel in kernels]
    own = [launch for kernel, launch in zip(kernels, launches) if kernel != "delta"]
    named = ", ".join(tiles(asdict(launch.parts[0].config)) for launch in own)
    counts = _execute(lambda: [launch() for launch in launches], arch, call.problem, skip="delta_kernel")
    results = {key: x for kernel in PASSES[which] for key, x in tensors.results(kernel).items()}
    expected = {"out": call.out, **dict(zip(("dq", "dk", "dv"), call.grads))}
    error = max(_error(x, expected[key]) for key, x in results.items())
    return {"who": f"tritoncp, {route}" if route else "tritoncp", "tiles": named, "error": error, **counts}


def count_torch(call: ExecutedCall, job: TemplateJob, listed: bool = False) -> Row | None:
    """Execute torch's template for the pass of a job, and return its counts; None if its tiles do not fit
    into shared memory. listed: whether the BlockMask leaves out blocks without a selected pair, and not only
    blocks that the mask hides"""
    from torch._inductor.codecache import PyCodeCache
    from triton.runtime.errors import OutOfResources

    tensors = template_tensors(call, job.template, listed)
    kernel: Any = PyCodeCache.load(write_source(job, tensors)).flex
    options = {"num_warps": job.warps, "num_stages": job.stages}
    try:
        counts = _execute(lambda: kernel[job.grid](*tensors.values(), **options), job.arch, call.problem)
    except OutOfResources:
        return None
    backward = job.template == "backward"
    results = [tensors[name] for name in (("DQ", "OUT", "DV") if backward else ("OUT",))]
    expected = call.grads if backward else [call.out]
    error = max(map(_error, results, expected))
    who = "torch" if job.default else "torch autotuned"
    who += ", BlockMask" * listed
    return {"who": who, "tiles": job.name, "error": error, **counts}


def count_calls(
    problems: Sequence[Problem], archs: Sequence[str], which: str, against: str, as_json: bool,
    chosen: Chosen | None = None, routes: Sequence[str] = (),
) -> None:  # fmt: skip
    """Print the counts of a pass of calls: of tritoncp, of its ``routes`` besides "loops", then of torch with
    its default tiles (against "torch"), or with every candidate of autotuning that fits and does not spill
    ("autotuned"). If the default tiles do not fit, as for heads of 512, the first such candidate is counted.
    With keys that queries select, torch's mask_mod reads a table of pairs; further rows have it as a
    BlockMask too."""
    console, printed = make_console(), []
    for problem in problems:
        if against:
            torch_templates.mask_of(problem)  # raises for a mask that the templates do not have
        call = draw_call(problem, chosen)
        for arch in archs:
            own = [count_tritoncp(call, arch, which, route) for route in ("", *routes)]
            rows = [*own]
            for job in candidates(which, arch, problem) if against else ():
                if len(rows) > len(own) and against != "autotuned":
                    break
                job = replace(job, selected=chosen.shares if chosen else 0)
                for listed in (False,) if chosen is None else (False, True):
                    row = count_torch(call, job, listed)
                    rows += [row] if row and (job.default or not row["spill_bytes"]) else []
            words = problem.mask, problem.score, problem.shape, chosen.name if chosen else ""
            title = f"{arch}, {which}, {' '.join(filter(None, words))}"
            printed += [{"call": title, **row} for row in rows]
            if not as_json:
                show(rows, title, console)
                if against and len(rows) == len(own):
                    console.print("torch: none of its tiles fits into shared memory without spills")
    if as_json:
        print(json.dumps(printed, indent=1))
    else:
        console.print(
            "counts: for each query row and head, in brackets tritoncp's over this row's; regs, spill: of a "
            "thread",
            style="dim",
        )


def _execute(run: Callable[[], Any], arch: str, problem: Problem, skip: str = "") -> dict[str, Any]:
    """Run launches on the executor. Return the counted fields of a row, summed over the launches, and the
    resources of the largest kernel."""
    from triton import knobs

    from tritoncp.executor import compiled_kernels
    from tritoncp.executor.driver import find_file

    cubins: dict[str, Path] = {}

    def remember(module: Any, function: Any, name: str, group: dict[str, str], key: str) -> None:
        cubins[name] = Path(find_file(group, ".cubin"))

    with compiled_kernels(arch, count=True, check=False) as device:
        knobs.runtime.kernel_load_start_hook.add(remember)
        try:
            run()
        finally:
            knobs.runtime.kernel_load_start_hook.remove(remember)
    totals: Counter[str] = Counter()
    for record in device.launches:
        if record.kernel != skip and record.counts is not None:
            totals.update(record.counts.totals())
    resources = [read_nvidia(path.read_bytes()) for name, path in cubins.items() if name != skip]
    rows = problem.heads * problem.rows
    return {
        "instructions": totals["instructions"] / rows,
        "flops": totals["flops"] / rows,
        "special": totals["mufu"] / rows,
        "wavefronts": (totals["shared units"] + totals["operand bytes"] / 128) / rows,
        "sectors": totals["global units"] / rows,
        **{name: max(x[name] for x in resources) for name in ("registers", "spill_bytes")},
    }


def _error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).abs().max() / expected.abs().max().clamp(min=1))


def template_tensors(call: ExecutedCall, template: str, listed: bool = False) -> dict[str, Tensor]:
    """Return the tensors of a template by name; the backward pass gets out and lse of float64. listed: as of
    :func:`count_torch`"""
    (q, k, v, dout), problem = call.tensors, call.problem
    tensors = {"Q": q, "K": k, "V": v, "DO": dout, "MAX": torch.zeros(1)} | _block_lists(call, listed)
    if template == "backward":
        delta = (call.out * dout.double()).sum(-1).float()
        tensors |= {"OUT": torch.zeros_like(k), "DQ": torch.zeros_like(q), "DV": torch.zeros_like(v)}
        tensors |= {"LSE": (call.lse * LOG2E).float(), "DELTA": delta}
    else:
        tensors |= {"OUT": torch.zeros_like(dout), "LSE": torch.empty(q.shape[:3])}
    if torch_templates.has_documents(problem):  # a document's number is the index of its first key
        mod: Any = problem.closed_form()
        at = torch.arange(problem.seq)
        tensors["DOCUMENT"] = mod(0, 0, at[:, None], at[None]).int().argmax(1).int()
    if call.chosen is not None:
        tensors["SHOWN"] = selected_pairs(problem, call.chosen)[0].byte()
    if problem.score == "alibi":
        score: Any = problem.score_mod(torch.device("cpu"))  # the value at distance 1 is the slope
        tensors["SLOPES"] = score(torch.tensor(0.0), 0, torch.arange(problem.heads), 0, 1).float()
    return tensors


def _block_lists(call: ExecutedCall, listed: bool) -> dict[str, Tensor]:
    """Return the block lists of torch's BlockMask; for block_mask=None one block that shows all pairs.
    listed: as of :func:`count_torch`"""
    problem, mod = call.problem, call.problem.closed_form()
    if call.chosen is not None:
        blocks = _selected_blocks(call, mod if mod is not None else _everything, listed)
    elif mod is None:
        blocks = flex_attention._create_empty_block_mask(*call.tensors[:2])
    else:
        sizes = problem.rows, problem.seq
        blocks = flex_attention.create_block_mask(mod, None, None, *sizes, device="cpu", BLOCK_SIZE=128)
    fields = {"KV_NUM_BLKS": "kv_num_blocks", "KV_IDX": "kv_indices"}
    fields |= {"Q_NUM_BLKS": "q_num_blocks", "Q_IDX": "q_indices"}
    lists = {}
    for name, field in fields.items():
        masked, full = getattr(blocks, field), getattr(blocks, f"full_{field}")
        lists[name] = masked.contiguous().int()
        lists[f"FULL_{name}"] = torch.zeros_like(lists[name]) if full is None else full.contiguous().int()
    return lists


def _everything(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return kv >= 0


def _selected_blocks(call: ExecutedCall, mod: Any, listed: bool) -> Any:
    """Return torch's BlockMask of a call with selected keys: its blocks are all masked, unless ``listed``."""
    problem, chosen = call.problem, call.chosen
    assert chosen is not None
    shown = selected_pairs(problem, chosen)[0]

    def both(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return mod(b, h, q, kv) & shown[h, q, kv]

    sizes = problem.rows, problem.seq
    if listed:
        return flex_attention.create_block_mask(
            both, None, chosen.shares, *sizes, device="cpu", BLOCK_SIZE=128
        )
    blocks = flex_attention.create_block_mask(mod, None, None, *sizes, device="cpu", BLOCK_SIZE=128)
    seen = (blocks.to_dense() > 0).to(torch.int32)
    order = seen.argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return flex_attention.BlockMask.from_kv_blocks(
        seen.sum(-1, dtype=torch.int32), order, BLOCK_SIZE=128, mask_mod=both, seq_lengths=sizes
    )


def show(rows: Sequence[Row], title: str, console: Any) -> None:
    """Print rows as a table: counts per query row and head, and in brackets tritoncp's count divided by the
    row's."""
    own, lines = rows[0], []
    for row in rows:
        ratios = {name: f" ({own[name] / row[name]:.2f})" for name in COUNTS if row is not own and row[name]}
        counts = [f"{row[name]:.4g}{ratios.get(name, '')}" for name in COUNTS]
        resources = row["registers"], row["spill_bytes"], f"{row['error']:.1e}"
        lines.append((row["who"], row["tiles"], *counts, *resources))
    columns = ("kernels", "tiles", "instructions", "FLOPs", *COUNTS[2:], "regs", "spill", "error")
    print_table(console, title, columns, lines)
