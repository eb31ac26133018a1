"""Forms of state in attributes: of classes, objects, functions and tensors."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import types
import weakref
from typing import Any

import torch

from tests.mods.form_registry import Form, form, recorded


@form
def class_attribute() -> Form:
    class Config:
        slope = 0.5

    return lambda x: x * Config.slope, lambda: setattr(Config, "slope", 2.0)


@form
def class_attribute_through_self() -> Form:
    class Layer:
        slope = 0.5

        def scale(self, x: Any) -> Any:
            return x * self.slope

    return Layer().scale, lambda: setattr(Layer, "slope", 2.0)


@form
def nested_class() -> Form:
    class Outer:
        class Inner:
            slope = 0.5

    return lambda x: x * Outer.Inner.slope, lambda: setattr(Outer.Inner, "slope", 2.0)


@form
def base_class() -> Form:
    class Base:
        slope = 0.5

    class Derived(Base):
        pass

    return lambda x: x * Derived.slope, lambda: setattr(Base, "slope", 2.0)


@form
def metaclass_attribute() -> Form:
    class Meta(type):
        slope = 0.5

    class Config(metaclass=Meta):
        pass

    return lambda x: x * Config.slope, lambda: setattr(Meta, "slope", 2.0)


@form
def enum_member_attribute() -> Form:
    class Kind(enum.Enum):
        SOFT = 1

        def __init__(self, number: int) -> None:
            self.slope = 0.5

    return lambda x: x * Kind.SOFT.slope, lambda: setattr(Kind.SOFT, "slope", 2.0)


@form
def other_enum_member() -> Form:
    class Kind(enum.Enum):
        SOFT = 0.5
        HARD = 2.0

    chosen = [Kind.SOFT]
    return lambda x: x * chosen[0].value, lambda: chosen.__setitem__(0, Kind.HARD)


@form
def function_attribute() -> Form:
    def scale(x: Any) -> Any:
        return x * scale.slope  # type: ignore[attr-defined]

    scale.slope = 0.5  # type: ignore[attr-defined]
    return scale, lambda: setattr(scale, "slope", 2.0)


@form
def tensor_attribute() -> Form:
    tensor: Any = torch.zeros(2)
    tensor.slope = 0.5
    return lambda x: x * tensor.slope, lambda: setattr(tensor, "slope", 2.0)


@form
def attribute_of_a_dictionary() -> Form:
    class Config(dict):
        pass

    config: Any = Config()
    config.slope = 0.5
    return lambda x: x * config.slope, lambda: setattr(config, "slope", 2.0)


@form
def attribute_of_a_list() -> Form:
    class Config(list):
        pass

    config: Any = Config()
    config.slope = 0.5
    return lambda x: x * config.slope, lambda: setattr(config, "slope", 2.0)


@form
def getattr_with_a_constant() -> Form:
    class Config:
        slope = 0.5

    return lambda x: x * getattr(Config, "slope", 1.0), lambda: setattr(Config, "slope", 2.0)


@recorded
def local_variable() -> Form:
    class Config:
        slope = 0.5

    def scale(x: Any) -> Any:
        config = Config
        return x * config.slope

    return scale, lambda: setattr(Config, "slope", 2.0)


@recorded
def conditional_expression() -> Form:
    class Config:
        slope = 0.5

    class Other:
        slope = 0.25

    return lambda x: x * (Config if Config else Other).slope, lambda: setattr(Config, "slope", 2.0)


@recorded
def argument_of_a_helper() -> Form:
    class Config:
        slope = 0.5

    def slope_of(config: Any) -> float:
        return config.slope

    config = Config()
    return lambda x: x * slope_of(config), lambda: setattr(Config, "slope", 2.0)


@form
def slots() -> Form:
    @dataclasses.dataclass(slots=True)
    class Config:
        slope: float = 0.5

    config = Config()
    return lambda x: x * config.slope, lambda: setattr(config, "slope", 2.0)


@form
def named_tuple() -> Form:
    Config = collections.namedtuple("Config", "slope")
    box = [Config(0.5)]
    return lambda x: x * box[0].slope, lambda: box.__setitem__(0, Config(2.0))


@form
def namespace() -> Form:
    outer = types.SimpleNamespace(inner=types.SimpleNamespace(slope=0.5))
    return lambda x: x * outer.inner.slope, lambda: setattr(outer.inner, "slope", 2.0)


@recorded
def getattr_with_a_computed_name() -> Form:
    class Config:
        slope = 0.5

    names = ["slope"]
    return lambda x: x * getattr(Config, names[0]), lambda: setattr(Config, "slope", 2.0)


@recorded
def dictionary_of_a_class() -> Form:
    class Config:
        slope = 0.5

    return lambda x: x * vars(Config)["slope"], lambda: setattr(Config, "slope", 2.0)


@recorded
def attribute_dictionary() -> Form:
    class Config(dict):
        __getattr__ = dict.__getitem__

    config: Any = Config(slope=0.5)
    return lambda x: x * config.slope, lambda: config.update(slope=2.0)


@form
def function_with_the_name_of_another() -> Form:
    class Config:
        slope = 0.5

    @functools.wraps(torch.nn.functional.relu)
    def scale(x: Any) -> Any:
        return x * Config.slope

    return scale, lambda: setattr(Config, "slope", 2.0)


@recorded
def proxy() -> Form:
    class Config:
        slope = 0.5

    config = Config()
    weak = weakref.proxy(config)
    return lambda x: x * weak.slope if config else x, lambda: setattr(Config, "slope", 2.0)
