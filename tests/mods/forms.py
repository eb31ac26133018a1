"""Forms of Python state that a mask_mod or score_mod can read, as text.

A form is (statements, value, edit): ``scale(x)`` is x times the value, 0.5, and the edit makes it 2.0.
Statements that define ``scale`` themselves have no value. ``RECORDED`` forms have no fingerprint:
recordings compare them.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import os
import sys
import textwrap
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch.nn.attention.flex_attention import or_masks

Form = tuple[Callable[[Any], Any], Callable[[], Any]]
NAMES = (collections, dataclasses, enum, functools, os, sys, types, weakref, numpy, torch)
CONFIG = "class Config:\n    slope = 0.5\n"
BOX = "box = types.SimpleNamespace(slope=0.5)\n"

FINGERPRINTED: dict[str, tuple[str, str, str]] = {
    # attributes
    "class attribute": (CONFIG, "Config.slope", "Config.slope = 2.0"),
    "class attribute through self": (
        "class Layer:\n    slope = 0.5\n    def scale(self, x): return x * self.slope\nscale = Layer().scale",
        "",
        "Layer.slope = 2.0",
    ),
    "base class": (CONFIG + "class Derived(Config): pass", "Derived.slope", "Config.slope = 2.0"),
    "metaclass attribute": (
        "class Meta(type): slope = 0.5\nclass Config(metaclass=Meta): pass",
        "Config.slope",
        "Meta.slope = 2.0",
    ),
    "enum member attribute": (
        "class Kind(enum.Enum):\n    SOFT = 1\n    def __init__(self, number): self.slope = 0.5",
        "Kind.SOFT.slope",
        "Kind.SOFT.slope = 2.0",
    ),
    "other enum member": (
        "class Kind(enum.Enum): SOFT, HARD = 0.5, 2.0\nchosen = [Kind.SOFT]",
        "chosen[0].value",
        "chosen[0] = Kind.HARD",
    ),
    "function attribute": (
        "def scale(x): return x * scale.slope\nscale.slope = 0.5", "", "scale.slope = 2.0"
    ),
    "tensor attribute": ("t = torch.zeros(2)\nt.slope = 0.5", "t.slope", "t.slope = 2.0"),
    "attribute of a dictionary": (
        "class Keys(dict): pass\nconfig = Keys()\nconfig.slope = 0.5", "config.slope", "config.slope = 2.0"
    ),
    "named tuple": (
        "Config = collections.namedtuple('Config', 'slope')\nbox = [Config(0.5)]",
        "box[0].slope",
        "box[0] = Config(2.0)",
    ),
    "function with the name of another": (
        CONFIG + "@functools.wraps(torch.nn.functional.relu)\ndef scale(x): return x * Config.slope",
        "",
        "Config.slope = 2.0",
    ),
    # methods and descriptors
    "property of a field": (
        "class Layer:\n    half = 0.25\n    slope = property(lambda self: self.half * 2)\nlayer = Layer()",
        "layer.slope",
        "layer.half = 1.0",
    ),
    "property of a global": (
        "global slope\nslope = 0.5\nclass Layer:\n    @property\n    def scaled(self): return slope\n"
        "layer = Layer()",
        "layer.scaled",
        "global slope; slope = 2.0",
    ),
    "method that reads a global": (
        "global slope\nslope = 0.5\nclass Layer:\n    def help(self): return slope\n"
        "    def scale(self, x): return x * self.help()\nscale = Layer().scale",
        "",
        "global slope; slope = 2.0",
    ),
    "class method": (
        "class Config:\n    slope = 0.5\n    @classmethod\n    def get(cls): return cls.slope",
        "Config.get()",
        "Config.slope = 2.0",
    ),
    "validating descriptor": (
        "class Positive:\n    def __set_name__(self, owner, name): self.name = name\n"
        "    def __set__(self, owner, value): owner.__dict__[self.name] = abs(value)\n"
        "class Config: slope = Positive()\nconfig = Config()\nconfig.slope = 0.5",
        "config.slope",
        "config.slope = 2.0",
    ),
    # variables, containers and modules
    "closure number": ("slope = 0.5", "slope", "nonlocal slope; slope = 2.0"),
    "global number": ("global slope\nslope = 0.5", "slope", "global slope; slope = 2.0"),
    "module config": (
        "class Layer(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.config = {'slope': 0.5, 'unrelated': iter(())}\n"
        "        self.linear = torch.nn.Linear(2, 2)\n"
        "    def scale(self, x): return x * self.config['slope']\nlayer = Layer()\nscale = layer.scale",
        "",
        "layer.config['slope'] = 2.0",
    ),
    "default argument": (
        "def scale(x, slopes=[0.5]): return x * slopes[0]", "", "scale.__defaults__[0][0] = 2.0"
    ),
    "dictionary get": ("config = {'slope': 0.5}", "config.get('slope')", "config['slope'] = 2.0"),
    "comprehension": (
        "class Layer:\n    slopes = (0.5,)\n"
        "    def scale(self, x): return sum([x * slope for slope in self.slopes])\nscale = Layer().scale",
        "",
        "Layer.slopes = (0.5, 1.5)",
    ),
    "submodule by number": (
        "layers = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Identity()])\nlayers[1].slope = 0.5",
        "layers[1].slope",
        "layers[1].slope = 2.0",
    ),
    "combined by torch": (
        BOX + "index = [torch.zeros(())] * 4\nis_half = or_masks(lambda b, h, q, kv: box.slope == 0.5)",
        "torch.where(is_half(*index), 0.5, 2.0)",
        "box.slope = 2.0",
    ),
    "decorated by torch": (
        BOX + "scale = torch.no_grad()(lambda x: x * box.slope)", "", "box.slope = 2.0"
    ),
}  # fmt: skip

RECORDED: dict[str, tuple[str, str, str]] = {
    # attributes
    "local variable": (
        CONFIG + "def scale(x):\n    config = Config\n    return x * config.slope", "", "Config.slope = 2.0"
    ),
    "argument of a helper": (
        CONFIG + "def slope_of(config): return config.slope\nconfig = Config()",
        "slope_of(config)",
        "Config.slope = 2.0",
    ),
    "getattr with a constant": (CONFIG, "getattr(Config, 'slope', 1.0)", "Config.slope = 2.0"),
    "dictionary of a class": (CONFIG, "vars(Config)['slope']", "Config.slope = 2.0"),
    "proxy": (
        CONFIG + "config = Config()\nweak = weakref.proxy(config)\n"
        "def scale(x): return x * weak.slope if config else x",
        "",
        "Config.slope = 2.0",
    ),
    # methods and descriptors
    "user descriptor": (
        "class Descriptor:\n    value = 0.5\n    def __get__(self, owner, kind): return self.value\n"
        "class Layer: slope = Descriptor()\nlayer = Layer()",
        "layer.slope",
        "Descriptor.value = 2.0",
    ),
    "attribute fallback": (
        "class Config:\n    def __init__(self): self.__dict__['values'] = {'slope': 0.5}\n"
        "    def __getattr__(self, name): return self.__dict__['values'][name]\nconfig = Config()",
        "config.slope",
        "config.__dict__['values']['slope'] = 2.0",
    ),
    "constructor": (
        "class Scaled:\n    slope = 0.5\n    def __init__(self, x): self.x = x * self.slope\n"
        "def scale(x): return Scaled(x).x",
        "",
        "Scaled.slope = 2.0",
    ),
    "super method": (
        "class Base:\n    def slope(self): return 0.5\n"
        "class Layer(Base):\n    def slope(self): return super().slope()\n"
        "    def scale(self, x): return x * self.slope()\nscale = Layer().scale",
        "",
        "Base.slope = lambda self: 2.0",
    ),
    "partial method": (
        "class Layer:\n    slope = 0.5\n    def scaled(self, factor, x): return x * factor * self.slope\n"
        "    scale = functools.partialmethod(scaled, 1.0)\nscale = Layer().scale",
        "",
        "Layer.slope = 2.0",
    ),
    "callable object": (
        "class Scale:\n    slope = 0.5\n    def __call__(self, x): return x * self.slope\nscale = Scale()",
        "",
        "Scale.slope = 2.0",
    ),
    "cached property": (
        "class Layer:\n    @functools.cached_property\n    def slope(self): return 0.5\nlayer = Layer()",
        "layer.slope",
        "layer.__dict__.update(slope=2.0)",
    ),
    "contents through a property": (
        "class Layer:\n    one = torch.zeros(2)\n    table = property(lambda self: self.one)\n"
        "layer, other = Layer(), torch.zeros(2)",
        "(0.5 if layer.table.equal(other) else 2.0)",
        "layer.one.copy_(torch.ones(2))",
    ),
    "lookup of a user class": (  # as of configurations in transformers
        "class Config:\n    def __getattribute__(self, name): return super().__getattribute__(name)\n"
        "config = Config()\nconfig.slope = 0.5",
        "config.slope",
        "config.slope = 2.0",
    ),
    # variables, containers and modules
    "forward hook": (
        "layer, slope = torch.nn.Identity(), [0.5]\n"
        "layer.register_forward_hook(lambda module, args, out: out * slope[0])\n"
        "def scale(x): return layer(x)",
        "",
        "slope[0] = 2.0",
    ),
    "import inside": (
        "module = sys.modules['tests_state_import'] = types.ModuleType('tests_state_import')\n"
        "module.slope = 0.5\ndef scale(x):\n    import tests_state_import as imported\n"
        "    return x * imported.slope",
        "",
        "module.slope = 2.0",
    ),
    "default factory": (
        "slopes = collections.defaultdict(lambda: 0.5)",
        "slopes['slope']",
        "slopes.clear(); slopes.default_factory = lambda: 2.0",
    ),
    "cached function": (
        "slopes = [0.5]\nslope_of = functools.cache(lambda: slopes[0])",
        "slope_of()",
        "slopes[0] = 2.0; slope_of.cache_clear()",
    ),
    "numpy array": ("slopes = numpy.array([0.5, 1.0])", "float(slopes[0])", "slopes[0] = 2.0"),
    "contents of tensors": (
        "one, other = torch.zeros(2), torch.zeros(2)",
        "(0.5 if torch.equal(one, other) else 2.0)",
        "one.copy_(torch.ones(2))",
    ),
    "environment variable": (
        "os.environ['TESTS_STATE_SLOPE'] = '0.5'",
        "float(os.environ['TESTS_STATE_SLOPE'])",
        "os.environ['TESTS_STATE_SLOPE'] = '2.0'",
    ),
    "state of an iterator": (
        "slopes, box = iter([0.5] * 1000), [0.5]\ndef scale(x): return x * box[0] if slopes else x",
        "",
        "box[0] = 2.0",
    ),
}  # fmt: skip
FORMS = FINGERPRINTED | RECORDED


def make_form(name: str) -> Form:
    """Return ``scale`` and ``edit`` of a form, with state of their own."""
    statements, value, edit = FORMS[name]
    lines = [statements, f"def scale(x): return x * {value}" if value else "", f"def edit(): {edit}"]
    body = textwrap.indent("\n".join([*lines, "return scale, edit"]), "    ")
    scope: dict[str, Any] = {module.__name__: module for module in NAMES} | {"or_masks": or_masks}
    exec(f"def make():\n{body}", scope)
    made: Form = scope["make"]()
    return made
