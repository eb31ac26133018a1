"""Torch's modes and hooks around a call, or around one of its passes, do not change its answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import graph
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils._debug_mode import DebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import tritoncp
from tests import cases
from tests.cases import Case
from tritoncp.api.attention import run_call
from tritoncp.call import engine_factory
from tritoncp.core.bounded_cache import BoundedCache
from tritoncp.mods import mod


def check_values(func: Any, out: Any) -> Any:
    """Read the results of an operation, as modes for debugging do."""
    values = [x for x in tree_leaves(out) if type(x) is Tensor and x.is_floating_point()]
    assert not any(bool(x.isnan().any()) for x in values), f"{func} gives a NaN"
    return out


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return check_values(func, func(*args, **(kwargs or {})))


class Function(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return check_values(func, func(*args, **(kwargs or {})))


@contextmanager
def module_hooks() -> Iterator[None]:
    def fail(module: torch.nn.Module, *_: Any) -> None:
        raise AssertionError(f"the program has no module, and a {type(module).__name__} was called")

    handle = register_module_forward_hook(fail)
    yield
    handle.remove()


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def hooks(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Callable[[], Any]:
    return lambda: graph.saved_tensors_hooks(pack, unpack)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "detect_anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "detect_anomaly, no values": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "hooks that keep": hooks(lambda x: x, lambda x: x),
    "hooks that copy": hooks(lambda x: x.detach().clone(), lambda x: x),
    "hooks that pack": hooks(lambda x: (x.device, x.detach()), lambda x: x[1].to(x[0])),
    "save_on_cpu": graph.save_on_cpu,
    "no hooks allowed": lambda: graph.disable_saved_tensors_hooks("hooks are not allowed here"),
    "FlopCounterMode": lambda: FlopCounterMode(display=False),
    "DebugMode": DebugMode,
    "CommDebugMode": CommDebugMode,
    "dispatch mode": Dispatch,
    "function mode": Function,
    "default device": lambda: torch.device("cpu"),
    "another default device": lambda: torch.device("meta"),
    "profiler": torch.autograd.profiler.profile,
    "record_function": lambda: torch.profiler.record_function("step"),
    "autocast off": lambda: torch.autocast("cpu", enabled=False),
    "deterministic": deterministic,
    "gradients": torch.enable_grad,
    "no threads": lambda: torch.autograd.set_multithreading_enabled(False),
    "module hooks": module_hooks,
}
FACTORS: dict[str, Any] = {
    "mode": tuple(MODES),
    "score": ("none", "softcap", "distances", "of documents"),
    "place": ("forward", "both", "backward"),
    "engine": ("cpu", "kernels"),
    "mask": ("causal", "causal documents of rows", "everything"),
    "sinks": (False, True),
    "dtype": (torch.float32, torch.bfloat16, torch.float64),
    "world": (1, 2),
}
ROWS = list(cases.pairs(FACTORS))


def answers(row: dict[str, Any], mode: Callable[[], AbstractContextManager[Any]]) -> list[Tensor | None]:
    """Return the results and gradients of a call with a mode around one pass, or both; only calls are in
    it."""
    names = "score", "sinks", "dtype", "world"
    case = Case((row["mask"], 9), length=16, kv_length=16, block=8, **{name: row[name] for name in names})
    leaves = cases.tensors(case)
    q, k, v = (leaves[x] for x in "qkv")
    score, mask = case.score_mod(leaves.get("learned")), case.block_mask()
    world = tritoncp.simulate(case.world)
    options: Any = {"sinks": leaves.get("sinks"), "return_lse": True}
    plan = world.make_plan(mask)
    shards = [world.shard(x, plan, dim=2) for x in (q, k, v)]
    is_whole, place = case.world == 1, row["place"]
    g = torch.Generator().manual_seed(0)
    with ExitStack() as stack:
        if place != "backward":
            stack.enter_context(mode())
        if is_whole:
            outs: Any = tritoncp.flex_attention(q, k, v, score, mask, **options)
        else:
            outs = world.flex_attention(*shards, score, plan, **options)
        if place == "forward":
            stack.close()
        outs = [x for x in tree_leaves(outs) if x.requires_grad]
        upstream = [torch.randn(x.shape, generator=g, device="cpu").to(x.dtype) for x in outs]
        if place == "backward":
            stack.enter_context(mode())
        grads = torch.autograd.grad(outs, [*leaves.values()], upstream, allow_unused=True) if outs else ()
    return [*(x.detach() for x in outs), *grads]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "rows", [slice(2), pytest.param(slice(2, None), marks=pytest.mark.long)], ids=["two rows", "other rows"]
)
@pytest.mark.parametrize("mode", MODES)
def test_a_mode_around_a_call_changes_no_bit(mode: str, rows: slice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its rows translates its score_mod anew."""
    for row in [row for row in ROWS if row["mode"] == mode][rows]:
        monkeypatch.setattr(engine_factory, "uses_triton", lambda device, row=row: row["engine"] == "kernels")
        results = []
        for context in (nullcontext, MODES[mode]):
            monkeypatch.setattr(mod, "_TRANSLATIONS", BoundedCache(256))
            results.append(answers(row, context))
        for got, want in zip(*results, strict=True):
            assert (got is None and want is None) or torch.equal(got, want), row


class Noting(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("cpu_engine")
def test_to_each_mode_of_torch_functions_a_call_is_one_function() -> None:
    x, outer, inner = torch.randn(1, 2, 32, 16), Noting(), Noting()
    want = tritoncp.flex_attention(x, x, x, tritoncp.causal())
    with outer, inner:
        got = tritoncp.flex_attention(x, x, x, tritoncp.causal())
    assert torch.equal(got, want)
    for mode in (outer, inner):
        assert [fn for fn in mode.seen if fn.__name__ != "__get__"] == [run_call]  # and attributes of tensors
