"""Forms of state that methods, properties and other descriptors read."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tests.mods.form_registry import Form, form, recorded


@form
def property_of_a_field() -> Form:
    class Layer:
        def __init__(self) -> None:
            self.half = 0.25

        @property
        def slope(self) -> float:
            return self.half * 2

    layer = Layer()
    return lambda x: x * layer.slope, lambda: setattr(layer, "half", 1.0)


@form
def property_of_a_global() -> Form:
    scope = {"slope": 0.5, "property": property}
    exec("class Layer:\n    @property\n    def scaled(self): return slope\nlayer = Layer()", scope)
    layer: Any = scope["layer"]
    return lambda x: x * layer.scaled, lambda: scope.update(slope=2.0)


@recorded
def user_descriptor() -> Form:
    class Descriptor:
        value = 0.5

        def __get__(self, owner: Any, kind: Any) -> float:
            return self.value

    class Layer:
        slope = Descriptor()

    layer = Layer()
    return lambda x: x * layer.slope, lambda: setattr(Descriptor, "value", 2.0)


@form
def method_that_reads_a_global() -> Form:
    scope = {"slope": 0.5}
    exec(
        "class Layer:\n    def help(self): return slope\n    def scale(self, x): return x * self.help()",
        scope,
    )
    return scope["Layer"]().scale, lambda: scope.update(slope=2.0)  # type: ignore[operator, return-value]


@recorded
def attribute_fallback() -> Form:
    class Config:
        def __init__(self) -> None:
            self.__dict__["values"] = {"slope": 0.5}

        def __getattr__(self, name: str) -> float:
            return self.__dict__["values"][name]

    config = Config()
    return lambda x: x * config.slope, lambda: config.__dict__["values"].update(slope=2.0)


@recorded
def special_method() -> Form:
    class Factor:
        slope = 0.5

        def __rmul__(self, x: Any) -> Any:
            return x * self.slope

    factor = Factor()
    return lambda x: x * factor, lambda: setattr(Factor, "slope", 2.0)


@recorded
def constructor() -> Form:
    class Scaled:
        slope = 0.5

        def __init__(self, x: Any) -> None:
            self.x = x * self.slope

    return lambda x: Scaled(x).x, lambda: setattr(Scaled, "slope", 2.0)


@recorded
def super_method() -> Form:
    class Base:
        def slope(self) -> float:
            return 0.5

    class Layer(Base):
        def slope(self) -> float:
            return super().slope()

        def scale(self, x: Any) -> Any:
            return x * self.slope()

    return Layer().scale, lambda: setattr(Base, "slope", lambda self: 2.0)


@form
def class_method() -> Form:
    class Config:
        slope = 0.5

        @classmethod
        def get(cls) -> float:
            return cls.slope

    return lambda x: x * Config.get(), lambda: setattr(Config, "slope", 2.0)


@recorded
def partial_method() -> Form:
    class Layer:
        slope = 0.5

        def scaled(self, factor: float, x: Any) -> Any:
            return x * factor * self.slope

        scale = functools.partialmethod(scaled, 1.0)

    return Layer().scale, lambda: setattr(Layer, "slope", 2.0)


@recorded
def callable_object() -> Form:
    class Scale:
        slope = 0.5

        def __call__(self, x: Any) -> Any:
            return x * self.slope

    return Scale(), lambda: setattr(Scale, "slope", 2.0)


@recorded
def cached_property() -> Form:
    class Layer:
        @functools.cached_property
        def slope(self) -> float:
            return 0.5

    layer = Layer()
    return lambda x: x * layer.slope, lambda: layer.__dict__.update(slope=2.0)


@recorded
def contents_through_a_property() -> Form:
    class Layer:
        one = torch.zeros(2)
        table = property(lambda self: self.one)

    layer, other = Layer(), torch.zeros(2)
    return lambda x: x * (0.5 if layer.table.equal(other) else 2.0), lambda: layer.one.copy_(torch.ones(2))


@recorded
def lookup_of_a_user_class() -> Form:
    """Like the configuration classes of transformers."""

    class Config:
        def __getattribute__(self, name: str) -> Any:
            return super().__getattribute__(name)

    config: Any = Config()
    config.slope = 0.5
    return lambda x: x * config.slope, lambda: setattr(config, "slope", 2.0)


@form
def validating_descriptor() -> Form:
    class Positive:
        def __set_name__(self, owner: Any, name: str) -> None:
            self.name = name

        def __set__(self, owner: Any, value: float) -> None:
            owner.__dict__[self.name] = abs(value)

    class Config:
        slope = Positive()

    config: Any = Config()
    config.slope = 0.5
    return lambda x: x * config.slope, lambda: setattr(config, "slope", 2.0)


@recorded
def class_property() -> Form:
    class OfClass(property):
        def __get__(self, owner: Any, kind: Any = None) -> Any:
            return self.fget(kind)  # type: ignore[misc]

    class Config:
        half = 0.25
        slope = OfClass(lambda cls: cls.half * 2)

    return lambda x: x * Config.slope, lambda: setattr(Config, "half", 1.0)
