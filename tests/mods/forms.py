"""Forms of Python state that a mask_mod or score_mod can read: the table in forms.toml, as functions."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import os
import sys
import textwrap
import tomllib
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.nn.attention.flex_attention import or_masks

Form = tuple[Callable[[Any], Any], Callable[[], Any]]
NAMES = (collections, dataclasses, enum, functools, os, sys, types, weakref, numpy, torch)
TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
RECORDED: dict[str, dict[str, str]] = TABLE["recorded"]
FORMS: dict[str, dict[str, str]] = TABLE["fingerprinted"] | RECORDED


def make_form(name: str) -> Form:
    """Return ``scale`` and ``edit`` of a form, with separate state."""
    form = FORMS[name]
    scale = f"def scale(x): return x * {form['value']}" if "value" in form else ""
    lines = [form["statements"], scale, f"def edit(): {form['edit']}", "return scale, edit"]
    scope: dict[str, Any] = {module.__name__: module for module in NAMES} | {"or_masks": or_masks}
    exec("def make():\n" + textwrap.indent("\n".join(lines), "    "), scope)
    made: Form = scope["make"]()
    return made
