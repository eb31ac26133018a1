"""Programs that are saved by one process and loaded by another one with other masks and score_mods.

A loaded program gives the bits of a plain call, or it raises an error that says what is missing; it never
runs with another mask or score_mod.
"""

import importlib
import json
import pickle
import re
import sys
from functools import partial

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import tritoncp
from tests.command_process import run_code
from tests.containers.samples import IDS, MASKS, SAMPLES, attend, x_of
from tritoncp import alibi, causal, document

pytestmark = pytest.mark.usefixtures("cpu_engine", "fresh_dynamo")
USERS = "def falls(s, b, h, q, kv):\n    return s - 0.25 * (q - kv)\n"
AS_ATTRIBUTES = ("and", "prefixes", "not", "tree", "mask", "plan")
AS_ARGUMENTS = ("documents", "mask of a function", "dict of plans")


class Layer(torch.nn.Module):
    """Attention with a mask or a score_mod of the module."""

    def __init__(self, mask=None, score_mod=None):
        super().__init__()
        self.mask, self.score_mod = mask, score_mod

    def forward(self, x):
        return tritoncp.flex_attention(x, x, x, self.score_mod, self.mask)


class Masked(torch.nn.Module):
    """Attention with a mask among the arguments."""

    def forward(self, x, mask):
        return attend(x, mask)


def rises(s, b, h, q, kv):
    return s + 0.125 * (q - kv)


def capped(cap, bias):
    return lambda s, b, h, q, kv: cap * torch.tanh(s / cap) + bias[h]


SCORES = {
    "a function": lambda: rises,
    "a function of a function": lambda: capped(3.0, torch.tensor([0.5, -0.5])),
    "alibi": lambda: alibi(2),
    "a function of another module": lambda: importlib.import_module("mods_of_a_user").falls,
    "a function of eval": lambda: eval("lambda s, b, h, q, kv: s * 2 - kv"),
}


def save(folder):
    """Save programs of all kinds in a folder."""
    x, export = x_of(), torch.export.export
    layers = {f"attribute, {name}": Layer(SAMPLES[name]()) for name in AS_ATTRIBUTES}
    layers |= {f"score_mod, {name}": Layer(None, make()) for name, make in SCORES.items()}
    for index, (name, layer) in enumerate(layers.items()):
        torch.export.save(export(layer, (x,), strict=index % 2 > 0), folder / f"{name}.pt2")
    for name in AS_ARGUMENTS:
        program = export(Masked(), (x, SAMPLES[name]()))
        torch.export.save(program, folder / f"argument, {name}.pt2")
    for name in ("mask", "and"):
        graph = make_fx(Layer(SAMPLES[name]()))(x)
        (folder / f"graph, {name}.pickle").write_bytes(pickle.dumps(graph))
    for fn, arguments in ((scored, (x,)), (masked, (x, MASKS["mask"]()))):
        program = torch.compile(fn, fullgraph=True, backend="aot_eager").aot_compile((arguments, {}))
        program.save_compiled_function(str(folder / f"{fn.__name__}.aot"))


def scored(x):
    return tritoncp.flex_attention(x, x, x, rises, causal())


def masked(x, mask):
    return tritoncp.flex_attention(x, x, x, mask)


def run_pickled(text, *arguments):
    return pickle.loads(text)(*arguments)  # it traces the graph again, and runs operators of constants


def load(folder):
    """Run the programs of a folder; print, by name, an error, or whether the bits equal a plain call."""
    kept = [make() for make in MASKS.values() for _ in range(8)]  # where the other process stopped
    for mod in (capped(2.0, torch.ones(2)), alibi(2), lambda s, b, h, q, kv: s * q):
        torch.compile(tritoncp.flex_attention, backend="aot_eager")(*[x_of()] * 3, mod, kept[0])
    x, answers = x_of(1), {}

    def note(name, program, plain, *arguments):
        try:
            answers[name] = "same" if torch.equal(program(*arguments), plain(*arguments)) else "other bits"
        except Exception as error:
            answers[name] = f"{type(error).__name__}: {error}"

    for path in sorted(folder.glob("*.pt2")):
        kind, name = path.stem.split(", ")
        program = torch.export.load(path).module()
        if kind == "argument":
            mask = SAMPLES[name]() if name != "documents" else document(ids=IDS // 2)
            note(path.stem, program, attend, x, mask)
        elif kind == "attribute":
            note(path.stem, program, Layer(SAMPLES[name]()), x)
        elif name != "a function of another module":
            note(path.stem, program, Layer(None, SCORES[name]()), x)
        else:
            note(path.stem, program, None, x)
    for name in ("mask", "and"):
        text = (folder / f"graph, {name}.pickle").read_bytes()
        note(f"graph, {name}", partial(run_pickled, text), Layer(SAMPLES[name]()), x)
    for fn, arguments in ((scored, (x,)), (masked, (x, MASKS["mask of a function"]()))):
        with open(folder / f"{fn.__name__}.aot", "rb") as file:
            note(f"{fn.__name__}.aot", torch.compiler.load_compiled_function(file), fn, *arguments)
    sys.path.insert(0, str(folder))
    program = torch.export.load(folder / "score_mod, a function of another module.pt2").module()
    for name, text in {"edited": USERS.replace("0.25", "0.5"), "as it was": USERS}.items():
        (folder / "mods_of_a_user.py").write_text(text)
        sys.modules.pop("mods_of_a_user", None)
        importlib.invalidate_caches()
        note(name, program, Layer(None, SCORES["a function of another module"]()), x)
    print(json.dumps(answers))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("programs")


LOAD = """
import pathlib, sys, torch, tritoncp
sys.dont_write_bytecode = True
from tests.containers.test_saved_programs import load
load(pathlib.Path({!r}))
"""
MISSING = {  # prefix of a name -> text of the error
    "attribute, mask": r"a mask or plan of that process.*pass the mask as an argument",
    "attribute, plan": r"a mask or plan of that process.*pass the mask as an argument",
    "graph, mask": r"a mask or plan of that process.*pass the mask as an argument",
    "score_mod, a function of another module": r"falls of the module mods_of_a_user: import this module",
    "score_mod, a function of eval": r"no name by which another process could find it",
    "edited": r"falls of the module mods_of_a_user, which has no such code.*make the program again",
}


@pytest.mark.long
def test_a_loaded_program_runs_with_its_mask_and_score_mod_or_raises(folder, monkeypatch):
    (folder / "mods_of_a_user.py").write_text(USERS)
    monkeypatch.syspath_prepend(folder)
    save(folder)
    answers = json.loads(run_code(LOAD.format(str(folder)), TRITON_INTERPRET="0").splitlines()[-1])
    assert len(answers) == len(AS_ATTRIBUTES) + len(SCORES) + len(AS_ARGUMENTS) + 6
    for name, answer in answers.items():
        reason = next((text for start, text in MISSING.items() if name.startswith(start)), None)
        assert answer == "same" if reason is None else re.search(reason, answer), (name, answer)
