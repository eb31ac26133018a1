"""Offline compilation: compiles the engine's launches for absent GPUs, in processes that interpret no kernel.

Triton itself turns a launch's arguments into a signature (`JITFunction.warmup`), with a stub for its driver
that names the GPU to compile for: the compiled kernel is the one that a launch would use.

``python -m tritoncp.analysis.compile_worker`` is such a process: it reads a job a line and answers in a line,
both JSON.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tritoncp.analysis import disassembly
from tritoncp.analysis.jobs import HEADS, KV_HEADS, VARIANTS, Job, mask_of, options_of
from tritoncp.kernels.tile_rules import Config, family, pieces
from tritoncp.ops import tile_tables
from tritoncp.ops.engine_factory import name_functions
from tritoncp.planning.build import build

# -- many jobs, in processes -------------------------------------------------------------------------------


def compile_all(
    jobs: Iterable[Job], processes: int | None = None, timeout: float = 300.0, question: str = "report"
) -> Generator[tuple[Job, dict[str, Any]]]:
    """Compile jobs in processes. Yields each job and its report, in the order of completion.

    processes: how many compile at a time; default: one for each core
    timeout:   seconds for one job
    question:  "report", or "digest" for the digest alone, which compiles no kernel

    A report is the result of :func:`report`, or ``{"failed": why}``: a compiler that raises, dies or takes
    too long does not affect other jobs.  The processes end with the iteration.
    """
    compilers = Compilers(processes, timeout)
    try:
        yield from compilers.compiled(jobs, question)
    finally:
        compilers.end()


class Compilers:
    """Compiler processes, reused from one list of jobs to the next, since they take seconds to start."""

    def __init__(self, processes: int | None = None, timeout: float = 300.0) -> None:
        self._most, self._timeout = processes or os.cpu_count() or 1, timeout
        self._workers: list[Worker] = []

    def compiled(
        self, jobs: Iterable[Job], question: str = "report"
    ) -> Generator[tuple[Job, dict[str, Any]]]:
        """Compile jobs as :func:`compile_all` does. Closing the generator ends the jobs in work."""
        todo = list(jobs)
        if not todo:
            return
        self._workers += [Worker() for _ in range(len(self._workers), min(self._most, len(todo)))]
        idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._workers:
            idle.put(worker)

        def compiled(job: Job) -> dict[str, Any]:
            worker = idle.get()
            try:
                return worker.ask(question, job, self._timeout)
            finally:
                idle.put(worker)

        pool = ThreadPoolExecutor(len(self._workers))
        try:
            waiting: dict[Future[dict[str, Any]], Job] = {pool.submit(compiled, job): job for job in todo}
            while waiting:
                for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                    yield waiting.pop(future), future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            busy, self._workers = self._workers, []
            while not idle.empty():
                self._workers.append(idle.get())
            for worker in set(busy) - set(self._workers):
                worker.end()
            pool.shutdown()

    def end(self) -> None:
        for worker in self._workers:
            worker.end()


class Worker:
    """A process that compiles; replaced by a new one where it dies or has to be killed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._ended = False

    def ask(self, question: str, job: Job, timeout: float) -> dict[str, Any]:
        process = self._process = self._process or self._start_process()
        late = threading.Event()

        def kill() -> None:
            late.set()
            self._kill(process)

        timer = threading.Timer(timeout, kill)
        timer.start()
        try:
            assert process.stdin and process.stdout
            process.stdin.write(json.dumps([question, asdict(job)]) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if line.endswith("\n"):
            return json.loads(line)
        self._process = None
        self._kill(process)
        died = f"the compiler's process ended with status {process.wait()}"
        return {"failed": f"not compiled in {timeout:g} s" if late.is_set() else died}

    def end(self) -> None:
        self._ended = True
        if self._process is not None:
            self._kill(self._process)

    def _start_process(self) -> subprocess.Popen[str]:
        if self._ended:
            raise RuntimeError("nothing is compiled any more")
        env = tile_tables.environment(without="TRITON_INTERPRET")
        command = [sys.executable, "-m", "tritoncp.analysis.compile_worker"]
        pipe = subprocess.PIPE
        # A group of its own: the assembler that it starts ends with it.
        return subprocess.Popen(
            command, env=env, stdin=pipe, stdout=pipe, text=True, start_new_session=True, stderr=_log()
        )

    @staticmethod
    def _kill(process: subprocess.Popen[str]) -> None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        process.wait()


def _log() -> Any:
    """The stderr of compiler processes: discarded unless TRITONCP_OFFLINE_LOG=1, as the report has the
    error."""
    return None if os.environ.get("TRITONCP_OFFLINE_LOG") == "1" else subprocess.DEVNULL


# -- one job, in a process where Triton compiles -----------------------------------------------------------


def launch_of(job: Job) -> Any:
    """The engine's launch of one job, on uninitialised memory."""
    from tritoncp.analysis.launches import Problem, mods_of
    from tritoncp.kernels.engine import TritonEngine, route_of
    from tritoncp.kernels.launch import Launch, Launches, State
    from tritoncp.mods import mask_mod

    if job.call is not None:
        launch: Any = Problem(job, torch.device("cpu")).launch(job.kernel, job.config, job.arch)
        return launch.parts[-1 if job.kernel == "specialised" else 0]
    variant, (d, e), dtype = VARIANTS[job.variant], job.dims, getattr(torch, job.dtype)
    mask = mask_of(variant.mask, variant.queries)
    tables = build(mask, variant.world_size).tables(batch=1, heads=HEADS)
    mod = mask_mod(mask.mask_mod) if tables.mask == "mod" and mask.mask_mod else None
    options = options_of(job.kernel, job.config) | dict(variant.options)
    options["FUSED_BACKWARD"] = job.kernel == "fused"
    rows, keys = tables.q_rows, tables.kv_rows
    q, dq = (torch.empty(1, rows, HEADS, d, dtype=dtype).transpose(1, 2) for _ in range(2))
    out, dout = (torch.empty(1, rows, HEADS, e, dtype=dtype).transpose(1, 2) for _ in range(2))
    k, v = torch.empty(keys, 1, KV_HEADS, d + e, dtype=dtype).permute(1, 2, 0, 3).split([d, e], dim=3)
    lse, delta, m, l = torch.empty(4, 1, HEADS, rows).unbind()
    acc, dq_sum = torch.empty(1, HEADS, rows, e), torch.empty(1, HEADS, rows, d)
    dk, dv = torch.empty(keys, 1, KV_HEADS, d + e).permute(1, 2, 0, 3).split([d, e], dim=3)
    engine = TritonEngine(mods_of(job.score, q, mod), d**-0.5, options, arch=job.arch)
    if job.kernel in ("forward", "few", "combine", "masked", "specialised", "gluon"):
        state = State(acc, m, l) if variant.load or variant.store else None
        steps: dict[str, Any] = {"state": state, "load_state": variant.load, "store_state": variant.store}
        step: Callable[..., Launch | Launches] = engine.loops
        if job.kernel in ("masked", "specialised", "gluon"):
            route = route_of("specialised" if job.kernel == "masked" else job.kernel)
            step = functools.partial(route.launch, engine)
        parts = step(q, k, v, tables, out=out, lse=lse, **steps).parts
        return parts[-1 if job.kernel in ("combine", "specialised") else 0]
    if job.kernel == "delta":
        return engine.delta(out, dout, lse, delta)
    step_inputs = (q, k, v, dout, lse, delta, tables)
    if job.kernel == "dq":
        return engine.dq(*step_inputs, dq=dq_sum if variant.load else dq, add=variant.load)
    into = torch.empty(1, rows, HEADS, d).transpose(1, 2) if job.kernel == "fused" else None
    return engine.dkdv(*step_inputs, dk=dk, dv=dv, dq=into, add=variant.load)


class DriverStub(NamedTuple):
    """The part of Triton's driver that compiling needs."""

    target: Any

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> Any:
        return self.target

    def get_current_stream(self, device: Any) -> int:
        return 0


# What the rule has tiles for and Triton compiles them for.
TARGETS = (
    *("sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121"),
    *("gfx90a", "gfx942", "gfx950"),
)


def check_target(arch: str) -> None:
    """Check that kernels are compiled for an architecture. Raises ValueError."""
    if arch not in TARGETS:
        raise ValueError(f"architecture {arch!r} is not among those that are known: {', '.join(TARGETS)}")


def target_of(arch: str) -> Any:
    from triton.backends.compiler import GPUTarget

    if arch.startswith("gfx"):
        return GPUTarget("hip", arch, 64)
    return GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)


def compiled(launch: Any, arch: str) -> Any:
    """Compile a launch to Triton's kernel object: text of every stage, and metadata."""
    from triton.runtime.driver import driver

    driver.set_active(DriverStub(target_of(arch)))
    return launch.kernel.warmup(grid=launch.grid, **launch.args, **launch.config.compiler())


def report(job: Job) -> dict[str, Any]:
    """Report the figures of one compiled kernel, as JSON values.

    digest: of its sources; registers of a thread; spill_bytes of a thread (the kernels have no arrays, so all
        thread-local memory is spilled registers); warps, more than the config's where warps are specialised;
        shared_bytes of a program; tensor_columns: of sm_100's tensor memory; mma: matrix instructions by
        name; tma: bulk tensor copies; async_copies: other copies that need no registers; then the result of
        :func:`inner_loop`
    """
    launch = launch_of(job)
    if job.config and job.config.USE_TMA > launch.config.USE_TMA:
        raise ValueError("these tensors' strides leave nothing to descriptors")
    kernel = compiled(launch, job.arch)
    resources = amd(kernel.asm["amdgcn"]) if "amdgcn" in kernel.asm else nvidia(kernel.asm)
    code = resources.pop("code")
    names = [x.op for x in code]
    row = {
        "kernel": job.kernel,
        "arch": job.arch,
        "head_dim": job.head_dim,
        "dtype": job.dtype,
        "variant": job.variant,
        "config": asdict(launch.config),
        "digest": digest(launch),
        **resources,
        "warps": kernel.metadata.num_warps,
        "shared_bytes": kernel.metadata.shared,
        "tensor_columns": getattr(kernel.metadata, "tmem_size", None) or 0,
        "mma": _matrix(names),
        "tma": sum(name.startswith("UTMALDG") for name in names),
        "async_copies": sum(name.startswith("LDGSTS") for name in names),
    }
    if row["mma"] and job.dtype != "float32":  # the rates of disassembly.MACHINES are for 16-bit products
        row |= inner_loop(job, launch.config, code, kernel.asm.get("ptx", ""), row)
    return row


def digest(launch: Any) -> str:
    """Hash the inputs of a report: Triton, tiles, arguments without the contents of memory, the source of the
    kernel and of the functions it calls, and of the module that reads its machine code. Comments, docstrings
    and line numbers are left out."""
    import triton

    sources = {"": _source(disassembly)[0]}
    named = {name: _describe_value(value, sources) for name, value in sorted(launch.args.items())}
    kernel = _describe_value(launch.kernel, sources)
    parts = triton.__version__, asdict(launch.config), kernel, named, sorted(sources.items())
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _describe_value(value: Any, sources: dict[str, str]) -> Any:
    """Describe a kernel's argument, or a global of its module, as far as code depends on it: jit functions by
    name, with their source and that of the functions they use in ``sources``."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype)
    if hasattr(value, "block_shape"):  # a tensor descriptor
        return str(value.base.dtype), value.block_shape
    if isinstance(value, tuple):
        return [_describe_value(one, sources) for one in value]
    if (function := getattr(value, "fn", None)) is None:
        return getattr(value, "__qualname__", str(value))  # the text of a plain function holds its address
    name = f"{function.__module__}.{function.__qualname__}"
    if name not in sources:
        sources[name], used = _source(function)
        globals_used = (
            (other, function.__globals__[other]) for other in used if other in function.__globals__
        )
        uses = [
            (other, _describe_value(it, sources)) for other, it in globals_used if not inspect.ismodule(it)
        ]
        sources[name] += repr(uses)
    return name


@functools.cache
def _source(what: Any) -> tuple[str, list[str]]:
    """The syntax of a function or module, without comments, docstrings and positions, and the names in it."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(what)))
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [one for one in body if not _is_text(one)]  # type: ignore[attr-defined]
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return ast.dump(tree), sorted(names)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def inner_loop(
    job: Job, config: Config, code: disassembly.Code, ptx: str, row: dict[str, Any]
) -> dict[str, Any]:
    """The loop over full blocks: the shortest of the innermost ones with matrix products.  The loop over
    masked blocks, if there is one, does the same and masks.  Specialised warps have one loop for each of two
    groups of as many warps as the config says, or one for each part of the work, where one warp issues the
    products (tcgen05): all softmax is beside them if that warp is ahead, which it is if P V comes first in
    its loop, before scores of another tile.  Counts of instructions are those of the longest.

    loop, masked_loop: instructions; mix: of the former, by kind; loop_spills: loads and stores of spilled
    registers in both; hidden: the share of exponentials that run beside products; touched: instructions that
    get in the way of a product under way; cycles of one turn, programs on a multiprocessor and limit: see
    disassembly.bound; flops: issued over those of the tile; bound, overlap: of the tensor cores, useful
    FLOPs over the peak
    """
    loops, machine = disassembly.innermost(code), disassembly.MACHINES[family(job.arch)]
    if not loops:  # unrolled: a short mask has a constant number of tiles
        return {}
    specialised = row["warps"] > config.num_warps
    done = disassembly.products(loops[0])
    if any(name.startswith("UTC") for name in row["mma"]) and done == []:
        done = disassembly.products(disassembly.innermost(disassembly.ptx(ptx))[0])
    if specialised and "mufu" not in disassembly.mix(loops[0]):
        loops = disassembly.innermost(code, "tensor", "mufu", "memory")
        *products_loops, softmax = loops
        groups = [*products_loops, disassembly.shortest(code, softmax)]
        with_mask, without = (disassembly.mix(one).get("compare", 0) for one in (softmax, groups[-1]))
        masked = [softmax] if with_mask > without else []
        group_cycles = [disassembly.cycles(one, [], disassembly.meeting(one), machine) for one in groups]
        group_cycles.append(disassembly.cycles([], done, 1, machine))
        ahead = float(done[0].shared == 2 * done[0].k * done[0].n)  # P is in tensor memory, queries are not
        hidden = ahead, ahead
    else:
        groups, masked = loops[: 1 + specialised], loops[1 + specialised :]
        group_cycles = [disassembly.cycles(group, done, config.num_warps, machine) for group in groups]
        hidden = min(map(disassembly.hidden, groups))
    body = groups[-1]
    spent = disassembly.Cycles(*map(sum, zip(*group_cycles)))
    spent = spent._replace(shared=spent.shared + copied(job, config, code) / disassembly.SHARED_PER_CYCLE)
    used = row["registers"], row["shared_bytes"], machine, row["tensor_columns"]
    turns = len(groups) if job.kernel == "gluon" else 1  # barriers make them take turns
    limit = disassembly.bound(spent, row["warps"], *used, hidden, turns)
    issued = spent.tensor * machine.flops / useful(job, config)
    return {
        "loop": len(body),
        "masked_loop": len(masked[0]) if masked else None,
        "mix": disassembly.mix(body),
        "loop_spills": sum(disassembly.kind_of(x.op) == "spill" for loop in loops for x in loop),
        "hidden": round(hidden[1], 3),
        "touched": sum(len(disassembly.touched(loop)) for loop in loops),
        "cycles": {name: round(value) for name, value in spent._asdict().items()},
        "programs": limit.programs,
        "flops": round(issued, 4),
        "bound": round(limit.utilisation / issued, 3),
        "overlap": round(limit.overlap / issued, 3),
        "limit": limit.limit,
    }


def useful(job: Job, config: Config) -> int:
    """FLOPs of one tile: two products in forward, three in dQ, four in dK/dV, five in both at once, over the
    pieces that the head dims are cut into.

    >>> useful(Job("forward", "sm_90", 96), Config(128, 64)) == 2 * 2 * 128 * 64 * 96
    True
    >>> useful(Job("dq", "sm_90", 192, v_head_dim=128), Config(64, 64)) == 2 * 64 * 64 * (2 * 192 + 128)
    True
    """
    of_keys, of_values = {"dq": (2, 1), "dkdv": (2, 2), "fused": (3, 2)}.get(job.kernel, (1, 1))
    d, e = (sum(pieces(dim)) for dim in job.dims)
    return 2 * config.BLOCK_M * config.BLOCK_N * (of_keys * d + of_values * e)


def copied(job: Job, config: Config, code: Iterable[disassembly.Instruction]) -> int:
    """Bytes that descriptors move to shared memory, and from there to be added up, for one tile: 16-bit keys
    and values, backward by keys queries and dO; float32 dQ.  Their instructions do not show it.

    >>> load, add = (disassembly.Instruction(op, "") for op in ("UTMALDG.4D", "UTMAREDG.4D.ADD"))
    >>> copied(Job("dq", "sm_90", 128), Config(128, 32), [load]) == 32 * 256 * 2
    True
    >>> copied(Job("fused", "sm_90", 128), Config(64, 128), [load, add]) == 64 * 256 * 2 + 64 * 128 * 4
    True
    """
    names = {x.op.split(".")[0] for x in code}
    d, e = (sum(pieces(dim)) for dim in job.dims)
    rows = config.BLOCK_M if job.kernel in ("dkdv", "fused") else config.BLOCK_N
    return 2 * rows * (d + e) * ("UTMALDG" in names) + 4 * config.BLOCK_M * d * ("UTMAREDG" in names)


def _matrix(names: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in names:
        if disassembly.kind_of(name) == "tensor":
            short = re.sub(r"\.F32\.BF16|\.F32\b", "", name)
            counts[short] = counts.get(short, 0) + 1
    return counts


def nvidia(asm: Any) -> dict[str, Any]:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(asm["cubin"])
        cubin.flush()
        command = [str(tool), "-sass", "--dump-resource-usage", cubin.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (
        int(_match_number(rf"\b{name}:(\d+)", text)) for name in ("REG", "STACK", "LOCAL")
    )
    return {"registers": registers, "spill_bytes": stack + local, "code": disassembly.sass(text)}


def amd(text: str) -> dict[str, Any]:
    """(AMD's scalar registers spill into lanes of vector ones, which is no memory.)"""
    registers, fixed, spilled = (
        int(_match_number(rf"\.{name}:\s*(\d+)", text))
        for name in ("vgpr_count", "private_segment_fixed_size", "vgpr_spill_count")
    )
    return {"registers": registers, "spill_bytes": fixed + spilled, "code": disassembly.gcn(text)}


def _match_number(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match, f"the compiler's tools say nothing like {pattern!r}"
    return match[1]


QUESTIONS: dict[str, Callable[[Job], dict[str, Any]]] = {
    "report": report,
    "digest": lambda job: {"digest": digest(launch_of(job))},
}


def main() -> None:
    """Answer jobs until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of compilers goes to stderr
    name_functions()
    for line in sys.stdin:
        try:
            question, job = json.loads(line)
            answer = QUESTIONS[question](Job.of(job))
        except Exception as error:  # any error of a compiler: other jobs go on
            answer = {"failed": f"{type(error).__name__}: {str(error).strip()[:500]}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
