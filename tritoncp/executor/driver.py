"""A Triton driver without a GPU: uses Triton's JIT, compiler and launch code, and executes the PTX on the
CPU."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.driver import driver as drivers

from tritoncp.executor.counters import LaunchCounts
from tritoncp.executor.faults import CannotContinue, ExecutionFault, Fault
from tritoncp.executor.launch import GridExecution, Settings
from tritoncp.executor.memory.global_memory import GlobalMemory
from tritoncp.executor.memory.regions import Extent, extent_of
from tritoncp.executor.program import PtxProgram, load_program
from tritoncp.executor.units.tma import ELEMENTS, TensorMap

SHARED_BYTES = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448}
MULTIPROCESSORS = {80: 108, 86: 84, 89: 128, 90: 132, 100: 148}


@dataclass
class LaunchRecord:
    """The record of an executed launch.

    grid:   numbers of CTAs in x, y and z
    warps:  warps per CTA
    counts: counts of executed instructions, if requested
    """

    kernel: str
    grid: tuple[int, int, int]
    warps: int
    counts: LaunchCounts | None = None


@dataclass
class LoadedKernel:
    """A loaded kernel; `program` is generated at the first launch."""

    name: str
    ptx: str
    shared: int
    program: PtxProgram | None = None


LOADED: WeakValueDictionary[str, LoadedKernel] = WeakValueDictionary()  # by the path of the PTX


def find_file(files: Mapping[str, str], end: str) -> str:
    """Return the path of a compiled kernel's file of the kind ``end``, which it has once."""
    return next(path for name, path in files.items() if name.endswith(end))


class Utilities:
    """The functions of Triton's `cuda_utils` that its runtime calls."""

    def __init__(self, driver: ExecutorDriver) -> None:
        self.driver = driver

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": SHARED_BYTES[self.driver.capability],
            "multiprocessor_count": MULTIPROCESSORS[self.driver.capability],
            "max_num_regs": 65536,
            "warpSize": 32,
            "sm_clock_rate": 1,
            "mem_clock_rate": 1,
            "mem_bus_width": 1,
        }

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        """Return module, function, registers, spills and threads of a kernel.

        The module is None. From version 3.8 on, Triton unloads any other module when it drops the kernel, by
        the driver that is active then, which may be a GPU's driver or none. For some launches it loads a
        kernel without a module again.
        """
        path = self.driver.ptx
        kernel = LOADED.get(path)
        if kernel is None:
            kernel = LOADED[path] = LoadedKernel(name, Path(path).read_text(), shared)
        return None, kernel, 0, 0, 1024

    def unload_module(self, module: Any) -> None:
        """Unload a module of the GPU's driver, if Triton drops its kernel while the executor is active."""
        drivers.default.utils.unload_module(module)


class Launcher:
    """Kernel launcher: flattens arguments as Triton's generated launcher does, then executes the kernel."""

    def __init__(self, src: Any, metadata: Any) -> None:
        self.signature = list(src.signature.items())
        self.metadata = metadata
        self.tensor_maps = getattr(metadata, "tensordesc_meta", None)

    def __call__(
        self,
        x: int,
        y: int,
        z: int,
        stream: int,
        function: LoadedKernel,
        packed: Any,
        launch_metadata: Any,
        enter: Any,
        leave: Any,
        *arguments: Any,
    ) -> None:
        extents: list[Extent] = []
        values: list[tuple[str, Any]] = []
        described = iter(self.tensor_maps or ())
        for (name, kind), argument in zip(self.signature, arguments, strict=True):
            values += self.flatten(name, kind, argument, extents, described)
        m = self.metadata
        scratch_memory = []
        for size in (m.global_scratch_size, m.profile_scratch_size):
            scratch = torch.empty(x * y * z * size, dtype=torch.int8)
            scratch_memory.append(scratch)
            if size:
                extents.append(extent_of(scratch, "scratch memory"))
            values.append(("*i8", scratch.data_ptr() if size else 0))
        drivers.active.execute(function, (x, y, z), m.num_warps, values, extents)

    def flatten(
        self, name: str, kind: Any, argument: Any, extents: list[Extent], described: Iterator[Any]
    ) -> list[tuple[str, Any]]:
        """Return the kernel parameters of an argument: pairs (type, value)."""
        if isinstance(kind, tuple):
            names = getattr(argument, "_fields", range(len(kind)))
            parts = zip(names, kind, argument, strict=True)
            return [v for n, k, a in parts for v in self.flatten(f"{name}.{n}", k, a, extents, described)]
        if kind == "constexpr":
            return []
        if kind.startswith("tensordesc"):
            return self.descriptor(name, kind, argument, extents, next(described, None))
        if kind[0] == "*" and isinstance(argument, torch.Tensor):
            extents.append(extent_of(argument, name))
            return [(kind, argument.data_ptr())]
        return [(kind, 0 if argument is None else argument)]

    def descriptor(
        self, name: str, kind: str, argument: Any, extents: list[Extent], described: Any
    ) -> list[tuple[str, Any]]:
        """Return the kernel parameters of a descriptor: a tensor map with TMA, else pointer, sizes and
        strides; then sizes and strides."""
        extents.append(extent_of(argument.base, name))
        if described is not None:
            values: list[tuple[str, Any]] = [("map", (argument, described))]
        else:
            dtype = re.match(r"tensordesc<([^[>]*)\[", kind)
            assert dtype, kind
            values = [("*" + dtype[1], argument.base.data_ptr())]
            values += [("i64", int(n)) for n in (*argument.shape, *argument.strides)]
            values.append(("i1", int(argument.padding == "nan")))
            if (tf32 := rounds_to_tf32(argument)) is not None:
                values.append(("i1", int(tf32)))
        values += [("i32", int(n)) for n in argument.shape]
        return values + [("i64", int(n)) for n in argument.strides]


def parameter_bits(kind: str, value: Any, memory: GlobalMemory) -> int | TensorMap:
    """Return the bits of a kernel parameter; a pointer includes the index of its region."""
    if kind == "map":
        argument, meta = value
        return tensor_map(argument, meta, memory)
    if kind[0] == "*":
        return memory.tag(int(value))
    codes = {"fp16": "<e", "fp32": "<f", "f32": "<f", "fp64": "<d"}
    if kind in codes:
        return int.from_bytes(struct.pack(codes[kind], value), "little")
    if kind == "bf16":
        return int(torch.tensor(value, dtype=torch.bfloat16).view(torch.int16).item()) & 0xFFFF
    bits = int(kind[1:])
    return int(value) & ((1 << max(8, bits)) - 1)


def rounds_to_tf32(descriptor: Any) -> bool | None:
    """Return whether loads by a descriptor round float32 to tf32; None before Triton 3.7, without this
    flag."""
    return getattr(descriptor, "round_f32_to_tf32", None)


def tensor_map(argument: Any, meta: dict[str, Any], memory: GlobalMemory) -> TensorMap:
    """Return the tensor map that Triton's launcher encodes for a descriptor.

    Raises:
        ValueError: base or strides are not multiples of 16 bytes, which CUDA requires.
    """
    size = meta["elem_size"]
    base, strides = argument.base.data_ptr(), [int(s) * size for s in argument.strides]
    if base % 16 or any(s % 16 for s in strides[:-1]):
        raise ValueError(
            f"a tensor map of base {base:#x} and strides {strides} bytes: both must be multiples of 16"
        )
    if meta["elem_type"] not in ELEMENTS or rounds_to_tf32(argument):
        raise NotImplementedError(
            f"a tensor map of element type {meta['elem_type']}, rounded to tf32 or below 8 bits"
        )
    shape, box = [int(n) for n in argument.shape], [int(n) for n in meta["block_size"]]
    nan = argument.padding == "nan"
    return TensorMap(memory.tag(base), shape, strides, box, meta["elem_type"], meta["swizzle"], nan)


class ExecutorDriver(DriverBase):
    """A driver for Triton's runtime, for one architecture and CPU tensors."""

    def __init__(self, capability: int, settings: Settings) -> None:
        self.capability, self.settings = capability, settings
        self.utils, self.launcher_cls = Utilities(self), Launcher
        self.ptx = ""  # path of the text of the kernel that is loaded next
        self.launches: list[LaunchRecord] = []
        self.faults: list[Fault] = []

    def remember_ptx(self, module: Any, function: Any, name: str, files: Any, hash: str) -> None:
        """Find the text of a kernel. Files are named for its Python function; ``name`` may come from the
        argument ``repr`` of `triton.jit`."""
        self.ptx = find_file(files, ".ptx")

    def start(self) -> None:
        knobs.runtime.kernel_load_start_hook.add(self.remember_ptx)

    def stop(self) -> None:
        knobs.runtime.kernel_load_start_hook.remove(self.remember_ptx)

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("the executor launches without generated C++")

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        """Return a device index, by which Triton caches kernels: one per architecture, and not the index of a
        GPU."""
        return 1000 + self.capability

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return self.capability // 10, self.capability % 10

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def refuse_timing(self, *_: Any) -> Any:
        raise NotImplementedError("the executor has no clock of a GPU: nothing can be timed on it")

    get_device_interface = get_benchmarker = refuse_timing
    get_empty_cache_for_benchmark = clear_cache = refuse_timing

    def execute(
        self,
        function: LoadedKernel,
        grid: tuple[int, int, int],
        warps: int,
        values: Sequence[tuple[str, Any]],
        extents: list[Extent],
    ) -> None:
        """Execute a launch; raise its faults if `raise_faults` is set."""
        if function.program is None:
            function.program = load_program(function.ptx)
        launch = GridExecution(function.program, grid, warps * 32, function.shared, extents, self.settings)
        stopped = None
        try:
            launch.run([parameter_bits(kind, value, launch.memory) for kind, value in values])
        except CannotContinue as e:
            stopped = e
        self.launches.append(LaunchRecord(function.name, grid, launch.threads // 32, launch.counts))
        self.faults += launch.log.faults
        if stopped is not None or (self.settings.raise_faults and launch.log.faults):
            raise ExecutionFault(launch.log.faults) from stopped
