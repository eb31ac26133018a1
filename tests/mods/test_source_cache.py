"""Emitted source as modules in memory: readers of the text, copies for profilers, lifetime of modules."""

from __future__ import annotations

import contextvars
import gc
import inspect
import linecache
import os
import sys
import traceback
import weakref

import pytest
import torch
import triton

import tritoncp
from tests.command_process import run_code
from tritoncp.core.bounded_cache import BoundedCache
from tritoncp.mods import mask_mod, mod, source_cache

JITTED = "import triton\n\n\n@triton.jit\ndef add(x):\n    return x + {}\n"


def source(number: int) -> str:
    return f'"""A module."""\n\nVALUE = {number}\n\n\ndef fail():\n    return 1 // 0\n'


def test_the_source_of_a_module_is_readable_without_a_file() -> None:
    module = source_cache.load(source(3))
    assert module.VALUE == 3 and source_cache.load(source(3)) is module
    assert inspect.getsource(module) == source(3) and not os.path.exists(module.__file__ or "")
    with pytest.raises(ZeroDivisionError) as error:
        module.fail()
    assert "return 1 // 0" in "".join(traceback.format_exception(error.value))
    made = mask_mod(lambda b, h, q, k: q * 7 >= k)
    assert "def mask_mod" in inspect.getsource(source_cache.load(made.source).mask_mod.fn)


def test_a_module_is_freed_with_its_functions() -> None:
    functions = [source_cache.load(JITTED.format(n)).add for n in range(60)]
    refs = [weakref.ref(function.fn) for function in functions]
    paths = [function.fn.__code__.co_filename for function in functions]
    gc.collect()
    assert source_cache.load(JITTED.format(3)).add is functions[3], "a module lives as long as its functions"
    assert "return x + 7" in inspect.getsource(functions[7].fn)
    del functions
    gc.collect()
    assert not any(function() for function in refs)
    assert not {*paths} & {*linecache.cache}
    assert not [name for name in sys.modules if name.startswith("tritoncp_mod")]


def count_kept() -> dict[str, int]:
    """Count what translations leave in tables that grow for as long as the process runs."""
    gc.collect()
    return {
        "graphs": sum(issubclass(type(x), torch.fx.GraphModule) for x in gc.get_objects()),
        "modules": len(source_cache._MODULES),
        "Triton's functions": len(triton.runtime.jit._triton_jit_function_registry),
        "texts": len(linecache.cache) + len(torch.fx.graph_module._loader.eval_cache),
        "context variables": len(contextvars.copy_context()),
    }


@pytest.mark.long
@pytest.mark.parametrize("change", ["captured number", "code"])
@pytest.mark.parametrize("engine", ["cpu", "kernels"], indirect=True)
@pytest.mark.bar(17)
def test_calls_with_new_closures_keep_nothing_alive(
    change: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = {"captured number": 256, "code": 2}[change]  # a translation is shared where the code is the same
    monkeypatch.setattr(mod, "_TRANSLATIONS", BoundedCache(size))

    def attend(number: int) -> None:
        code = f"lambda s, b, h, q, k: s * (number + {0 if change == 'captured number' else number})"
        score_mod = eval(code, {"number": number + 0.5})
        mask = tritoncp.create_block_mask(tritoncp.causal(), 1, 1, 16, 16)
        q = torch.randn(1, 1, 16, 16, requires_grad=True)
        tritoncp.flex_attention(q, q, q, score_mod, mask).sum().backward()

    for number in range(4):
        attend(number)
    before = count_kept()
    for number in range(4, 10):
        attend(number)
    after = count_kept()  # fewer where caches drop what earlier tests left
    assert [name for name in before if after[name] > before[name]] == []


@pytest.mark.long
def test_a_module_of_compiled_functions_is_freed_with_them() -> None:
    code = f"""
import gc, weakref
from tritoncp.mods import source_cache
function = source_cache.load({JITTED.format(1)!r}).add
ref = weakref.ref(function)
key = function.cache_key
del function
gc.collect()
print(ref() is None, source_cache.load({JITTED.format(1)!r}).add.cache_key == key)
"""
    assert run_code(code, TRITON_INTERPRET="0").split() == ["True", "True"]
