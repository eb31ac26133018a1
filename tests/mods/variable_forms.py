"""Forms of state in variables, containers, modules, caches and the contents of tensors."""

from __future__ import annotations

import collections
import functools
import os
import sys
import types
from typing import Any

import numpy
import torch
from torch.nn.attention.flex_attention import or_masks

from tests.mods.form_registry import Form, form, recorded


@form
def closure_number() -> Form:
    slope = 0.5

    def edit() -> None:
        nonlocal slope
        slope = 2.0

    return lambda x: x * slope, edit


@form
def global_number() -> Form:
    scope = {"slope": 0.5}
    exec("def scale(x): return x * slope", scope)
    return scope["scale"], lambda: scope.update(slope=2.0)  # type: ignore[return-value]


@recorded
def module_forward_that_reads_a_global() -> Form:
    scope = {"slope": 0.5, "Module": torch.nn.Module}
    exec("class Layer(Module):\n    def forward(self, x): return x * slope", scope)
    layer = scope["Layer"]()  # type: ignore[operator]
    return lambda x: layer(x), lambda: scope.update(slope=2.0)


@recorded
def forward_hook() -> Form:
    layer, slope = torch.nn.Identity(), [0.5]
    layer.register_forward_hook(lambda module, args, out: out * slope[0])
    return lambda x: layer(x), lambda: slope.__setitem__(0, 2.0)


@form
def module_config() -> Form:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = {"slope": 0.5, "unrelated": iter(())}
            self.linear = torch.nn.Linear(2, 2)

        def scale(self, x: Any) -> Any:
            return x * self.config["slope"]

    layer = Layer()
    return layer.scale, lambda: layer.config.update(slope=2.0)


@form
def default_argument() -> Form:
    def scale(x: Any, slopes: Any = [0.5]) -> Any:  # noqa: B006
        return x * slopes[0]

    return scale, lambda: scale.__defaults__[0].__setitem__(0, 2.0)  # type: ignore[index]


@form
def submodule_of_a_package() -> Form:
    package = types.ModuleType("package")
    package.sub = types.ModuleType("package.sub")  # type: ignore[attr-defined]
    package.sub.slope = 0.5  # type: ignore[attr-defined]
    return lambda x: x * package.sub.slope, lambda: setattr(package.sub, "slope", 2.0)


@recorded
def import_inside() -> Form:
    module = sys.modules["tests_state_import"] = types.ModuleType("tests_state_import")
    module.slope = 0.5  # type: ignore[attr-defined]

    def scale(x: Any) -> Any:
        import tests_state_import as imported  # type: ignore[import-not-found]

        return x * imported.slope

    return scale, lambda: setattr(module, "slope", 2.0)


@recorded
def import_of_a_name_inside() -> Form:
    module = sys.modules["tests_state_name"] = types.ModuleType("tests_state_name")
    module.slope = 0.5  # type: ignore[attr-defined]

    def scale(x: Any) -> Any:
        from tests_state_name import slope  # type: ignore[import-not-found]

        return x * slope

    return scale, lambda: setattr(module, "slope", 2.0)


@recorded
def default_factory() -> Form:
    slopes: Any = collections.defaultdict(lambda: 0.5)

    def edit() -> None:
        slopes.clear()
        slopes.default_factory = lambda: 2.0

    return lambda x: x * slopes["slope"], edit


@recorded
def missing_key() -> Form:
    class Config(dict):
        slope = 0.5

        def __missing__(self, key: str) -> float:
            return self.slope

    config = Config()
    return lambda x: x * config["slope"], lambda: setattr(Config, "slope", 2.0)


@form
def dictionary_get() -> Form:
    config = {"slope": 0.5}
    return lambda x: x * config.get("slope"), lambda: config.update(slope=2.0)  # type: ignore[operator]


@form
def comprehension() -> Form:
    class Layer:
        slopes: tuple[float, ...] = (0.5,)

        def scale(self, x: Any) -> Any:
            return sum([x * slope for slope in self.slopes])

    return Layer().scale, lambda: setattr(Layer, "slopes", (0.5, 1.5))


@recorded
def cached_function() -> Form:
    slopes = [0.5]
    slope_of = functools.cache(lambda: slopes[0])

    def edit() -> None:
        slopes[0] = 2.0
        slope_of.cache_clear()

    return lambda x: x * slope_of(), edit


@recorded
def numpy_array() -> Form:
    slopes = numpy.array([0.5, 1.0])
    return lambda x: x * float(slopes[0]), lambda: slopes.__setitem__(0, 2.0)


@recorded
def contents_of_tensors() -> Form:
    one, other = torch.zeros(2), torch.zeros(2)
    return lambda x: x * (0.5 if torch.equal(one, other) else 2.0), lambda: one.copy_(torch.ones(2))


@recorded
def contents_of_an_argument() -> Form:
    one, other = torch.zeros(2), torch.zeros(2)

    def is_other(tensor: torch.Tensor) -> bool:
        return tensor.equal(other)

    return lambda x: x * (0.5 if is_other(one) else 2.0), lambda: one.copy_(torch.ones(2))


@recorded
def environment_variable() -> Form:
    os.environ["TESTS_STATE_SLOPE"] = "0.5"
    return lambda x: x * float(os.environ["TESTS_STATE_SLOPE"]), lambda: os.environ.update(
        TESTS_STATE_SLOPE="2.0"
    )


@recorded
def state_of_an_iterator() -> Form:
    slopes = iter([0.5] * 1000)
    box = [0.5]
    return lambda x: x * box[0] if slopes else x, lambda: box.__setitem__(0, 2.0)


@recorded
def torch_module() -> Form:
    layer = torch.nn.Sequential(torch.nn.Identity())
    layer[0].register_forward_hook(lambda module, args, out: out * slope[0])
    slope = [0.5]
    return lambda x: layer(x), lambda: slope.__setitem__(0, 2.0)


@form
def submodule_by_number() -> Form:
    layers: Any = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Identity()])
    layers[1].slope = 0.5
    return lambda x: x * layers[1].slope, lambda: setattr(layers[1], "slope", 2.0)


@form
def combined_by_torch() -> Form:
    box = types.SimpleNamespace(slope=0.5)
    index = [torch.zeros(())] * 4
    slope_is_half = or_masks(lambda b, h, q, kv: box.slope == 0.5)
    return lambda x: x * torch.where(slope_is_half(*index), 0.5, 2.0), lambda: setattr(box, "slope", 2.0)


@form
def decorated_by_torch() -> Form:
    box = types.SimpleNamespace(slope=0.5)
    return torch.no_grad()(lambda x: x * box.slope), lambda: setattr(box, "slope", 2.0)
