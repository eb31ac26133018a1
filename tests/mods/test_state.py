"""Edits of state that mods read: the next call of a score_mod uses them, masks and plans refuse to run."""

from __future__ import annotations

import importlib
import threading
import types
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

import tritoncp
from tests.draws import few
from tests.mods.forms import FORMS, RECORDED, Form, make_form
from tritoncp import causal, create_block_mask, make_plan
from tritoncp.mods import score_mod as translate_score_mod
from tritoncp.mods.fingerprint import Fingerprint
from tritoncp.mods.recording import read_state
from tritoncp.reference import dense

S = 16

pytestmark = pytest.mark.usefixtures("cpu_engine")


def score_of(scale: Any) -> Any:
    return lambda score, b, h, q_idx, kv_idx: scale(score)


def mask_of(scale: Any) -> Any:
    return lambda b, h, q_idx, kv_idx: (q_idx - kv_idx < scale(4.0)) & (q_idx >= kv_idx)


def attend(score_mod: Any = None, mask: Any = None) -> torch.Tensor:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, S, 8)
    return tritoncp.flex_attention(q, k, v, score_mod, mask or causal())


def expected(score_mod: Any) -> torch.Tensor:
    """Compute the reference result by calling the score_mod itself."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, S, 8)
    mask = create_block_mask(causal(), 1, 1, S, S)
    return dense.dense_attention(q.double(), k.double(), v.double(), mask, score_mod).out.float()


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Form:
    return make_form(request.param)


@pytest.mark.sample(8)
@pytest.mark.bar(16)
def test_a_score_mod_follows_its_state(form: Form) -> None:
    scale, edit = form
    score_mod = score_of(scale)
    before = attend(score_mod)
    close(before, expected(score_mod))
    edit()
    after = attend(score_mod)
    close(after, expected(score_mod))
    assert not torch.allclose(before, after, atol=1e-3)


@pytest.mark.sample(5)
def test_a_mask_or_plan_whose_state_changed_is_refused(form: Form) -> None:
    scale, edit = form
    mask = create_block_mask(mask_of(scale), 1, 1, S, S, BLOCK_SIZE=4)
    plan = make_plan(mask)
    for target in (mask, plan, mask, plan):
        attend(mask=target)  # nothing has changed
    edit()
    for use in (
        lambda: attend(mask=mask), lambda: attend(mask=plan), lambda: make_plan(mask), lambda: mask[0],
        mask.to_block_mask, mask.to_dense,
    ):  # fmt: skip
        with pytest.raises(
            RuntimeError, match=r"after the (mask|plan) was made; make the mask and the plan again"
        ):
            use()
    rebuilt = create_block_mask(mask_of(scale), 1, 1, S, S, BLOCK_SIZE=4)
    distance = torch.arange(S)[:, None] - torch.arange(S)
    assert torch.equal(rebuilt.to_dense()[0, 0], (distance >= 0) & (distance < 8))


@pytest.mark.sample(11)
@pytest.mark.parametrize("name", FORMS)
def test_a_warning_names_incomparable_state_once(name: str) -> None:
    scale, _ = make_form(name)
    own_name = f"incomparable_{name.replace(' ', '_')}"
    score_mod = types.FunctionType(
        score_of(scale).__code__, globals(), name, None, score_of(scale).__closure__
    )
    score_mod.__qualname__ = own_name
    score_mod.__code__ = score_mod.__code__.replace(co_name=own_name)  # another function
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attend(score_mod)
        attend(score_mod)
    caught = [w for w in caught if "cannot be compared" in str(w.message)]
    texts = [str(w.message) for w in caught]
    assert len(texts) == (name in RECORDED)
    assert all(w.filename == __file__ for w in caught)
    assert all("capture it instead" in text and own_name in text for text in texts)


def test_a_mask_s_tensors_are_state_too() -> None:
    table = torch.arange(S)
    mask = create_block_mask(lambda b, h, q_idx, kv_idx: table[q_idx] >= table[kv_idx], 1, 1, S, S)
    attend(mask=mask)
    table.add_(1)
    with pytest.raises(RuntimeError, match=r"tensor of shape \(16,\) was edited in place"):
        attend(mask=mask)
    mask = create_block_mask(lambda b, h, q_idx, kv_idx: table[q_idx] >= table[kv_idx], 1, 1, S, S)
    table = torch.arange(S).flip(0)
    with pytest.raises(RuntimeError, match=r"tensor of shape \(16,\) was replaced by another"):
        attend(mask=mask)


def test_numbers_in_any_state_are_arguments_of_the_kernel() -> None:
    """A new value of a number uses the same kernel."""
    for name in ("class attribute", "module config", "property of a global", "enum member attribute"):
        scale, edit = make_form(name)
        function = score_of(scale)
        before = translate_score_mod(function)
        edit()
        after = translate_score_mod(function)
        assert before.digest == after.digest
        assert (before.numbers, after.numbers) == ((0.5,), (2.0,))


# -- any state ------------------------------------------------------------------------------------------

LINKS = (
    "attribute", "class attribute", "dictionary", "list", "tuple", "namespace", "property", "module", "slot",
)  # fmt: skip


def wrap(link: str, value: Any) -> tuple[Any, str]:
    """Return an object that holds value, and the source of the attribute or subscript that reads it."""
    if link == "dictionary":
        return {"key": value}, "['key']"
    if link in ("list", "tuple"):
        return ([0.0, value], "[1]") if link == "list" else ((0.0, [value]), "[1][0]")
    if link == "class attribute":
        return type("Config", (type("Base", (), {"field": value}),), {}), ".field"
    if link == "property":
        holder = type("Layer", (), {"field": property(lambda self: self.__dict__["inner"])})()
        holder.__dict__["inner"] = value
        return holder, ".field"
    holders: dict[str, Any] = {
        "attribute": type("Plain", (), {})(),
        "module": types.ModuleType("generated"),
        "namespace": types.SimpleNamespace(),
        "slot": type("Slotted", (), {"__slots__": ("field",)})(),
    }
    holder = holders[link]
    holder.field = value
    return holder, ".field"


READERS = {  # functions that make a score_mod, which reads a path of an object
    "closure": "def make(root):\n    return lambda s, b, h, q, kv: s * root{path}",
    "default": "def make(root):\n    return lambda s, b, h, q, kv, x=root: s * x{path}",
    "local variable": (
        "def make(root):\n    def mod(s, b, h, q, kv):\n        x = root\n        return s * x{path}\n"
        "    return mod"
    ),
    "helper": (
        "def make(root):\n    read = lambda x: x{path}\n    return lambda s, b, h, q, kv: s * read(root)"
    ),
    "method": (
        "class Layer:\n    def mod(self, s, b, h, q, kv): return s * self.x{path}\n"
        "def make(root):\n    layer = Layer()\n    layer.x = root\n    return layer.mod"
    ),
    "loop": (
        "def make(root):\n    def mod(s, b, h, q, kv):\n        for x in [root]: s = s * x{path}\n"
        "        return s\n    return mod"
    ),
    "global": (
        "def make(x):\n    global root\n    root = x\n    return lambda s, b, h, q, kv: s * root{path}"
    ),
}


def check_edits(links: list[str], reader: str, values: list[float]) -> None:
    """Write each value to the end of the chain of links; check that the next call computes with it."""
    cell = [0.125]
    root, path = cell, "[0]"
    for link in links:
        root, step = wrap(link, root)
        path = step + path
    scope: dict[str, Any] = {}
    exec(READERS[reader].replace("{path}", path), scope)
    score_mod = scope["make"](root)
    for value in values:
        cell[0] = value
        close(attend(score_mod), expected(score_mod))


EDITS = hypothesis.given(
    links=st.lists(st.sampled_from(LINKS), max_size=4),
    reader=st.sampled_from(sorted(READERS)),
    values=st.lists(st.sampled_from([0.25, 0.5, 3.0, -1.0]), min_size=2, max_size=3),
)

test_an_edit_of_any_reachable_state_is_seen = few()(EDITS(check_edits))
test_edits_of_reachable_state_are_seen_in_many_examples = pytest.mark.long(
    hypothesis.settings(max_examples=1000)(EDITS(check_edits))
)


# -- compiled, and in several threads ----------------------------------------------------------------------


SLOPE = 0.5


class Compiled:
    slope = 0.5


def global_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score * SLOPE


def compiled_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score * Compiled.slope


def compiled_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx - kv_idx < Compiled.slope * 8


@pytest.mark.long
def test_compiled_calls_follow_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph identifies a function by its code, without a guard."""
    call = torch.compile(attend, backend="eager")
    mask = create_block_mask(compiled_mask, 1, 1, S, S)
    for mod in (compiled_score, global_score):
        close(call(mod), expected(mod))
    call(None, mask)
    monkeypatch.setattr(Compiled, "slope", 2.0)
    monkeypatch.setitem(globals(), "SLOPE", 2.0)
    for mod in (compiled_score, global_score):
        close(call(mod), expected(mod))
    with pytest.raises(RuntimeError, match=r"global Compiled\.slope was 0\.5 and is 2\.0"):
        call(None, mask)


@pytest.mark.long
def test_threads_that_make_masks_mods_and_plans_do_not_disturb_each_other() -> None:
    ready = threading.Barrier(8)

    def work(thread: int) -> None:
        ready.wait()
        for step in range(6):
            width = 1 + thread * 6 + step
            torch_mask = create_block_mask(lambda b, h, q, kv, w=width: (q >= kv) & (q - kv < w), 1, 1, S, S)
            q = torch.full((1, 1, S, 8), 1.0, requires_grad=True)
            out = tritoncp.flex_attention(q, q, q, lambda s, b, h, x, y, w=width: s / w, torch_mask)
            out.sum().backward()
            close(out, torch.ones_like(out))
            assert q.grad is not None and bool(q.grad.isfinite().all())

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(work, thread) for thread in range(8)]:
            future.result()


# -- edits that masks and plans allow ------------------------------------------------------------------------


class Model(torch.nn.Module):
    """A model with a number, its window, that masks read."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(12)])
        self.window, self.steps = 4, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return self.layers[0](x)

    def near(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx - kv_idx < self.window


def window_of(model: Model) -> int:
    return model.window


@pytest.mark.parametrize("reader", ["method", "closure", "helper"])
def test_training_a_model_does_not_disturb_a_mask_that_reads_its_window(reader: str) -> None:
    model = Model()
    mods = {
        "method": model.near,
        "closure": lambda b, h, q_idx, kv_idx: q_idx - kv_idx < model.window,
        "helper": lambda b, h, q_idx, kv_idx: q_idx - kv_idx < window_of(model),
    }
    mask = create_block_mask(mods[reader], 1, 1, S, S)
    plan = make_plan(mask)
    model(torch.ones(2, 4)).sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    model.eval().register_forward_hook(lambda *_: None)
    for target in (mask, plan):
        attend(mask=target)
    model.window = 5
    with pytest.raises(RuntimeError, match="make the mask and the plan again"):
        attend(mask=mask)


def test_a_mask_mod_that_counts_its_calls_is_not_refused() -> None:
    calls = [0]

    def counted(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        calls[0] += 1
        return q_idx >= kv_idx

    mask = create_block_mask(counted, 1, 1, S, S)
    for _ in range(3):
        attend(mask=mask)
    assert calls[0]


def test_a_users_module_with_the_name_of_pythons_is_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`from .math import SCALE` inside of a mod reads state; `import math` does not."""
    (tmp_path / "pairs").mkdir()
    (tmp_path / "pairs/__init__.py").write_text("")
    (tmp_path / "pairs/math.py").write_text("SCALE = 1.0")
    (tmp_path / "pairs/mods.py").write_text(
        "def near(s, b, h, q, k):\n    from .math import SCALE\n    return s * SCALE\n"
        "def far(s, b, h, q, k):\n    import math\n    return s * math.pi\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("pairs.mods")
    assert Fingerprint(module.near).key is None
    assert Fingerprint(module.far).key is not None


def test_the_value_before_an_edit_in_place_is_state() -> None:
    def scaled(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        made = config  # as a whole, so that a recording is compared
        factor = torch.tensor(made.c)
        factor *= q
        return score + factor

    config, keys = types.SimpleNamespace(), []
    for c in (1.0, 3.0):
        config.c = c
        keys.append(read_state(scaled, True).key)
    assert keys[0] != keys[1]
