"""The public names, commands and options, compared with the text in `public_surface.txt`.

Lines are the same on every machine: no paths, no versions, no facts about a device.
"""

import difflib
import importlib.util
import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch

import tritoncp
from tests.command_process import invoke
from tests.repo.test_imports import modules
from tritoncp import chunking, masks
from tritoncp.call import autograd, traced
from tritoncp.cli import main
from tritoncp.integrations import transformers
from tritoncp.perf import exit_codes

# The public members of these classes; all other members are for the package. Users do not call these classes
# to make objects.
FOR_USERS = {
    "Mask": {
        *("B", "BLOCK_SIZE", "H", "contiguous", "dim", "draw", "kv_len", "nbytes", "ndim"),
        *("numel", "q_len", "row_intervals", "seq_lengths", "shape", "sparsity", "to"),
        *("to_block_mask", "to_dense", "transpose"),
    },
    "Plan": {
        *("BLOCK_SIZE", "balancer", "batch_rows", "bytes_sent", "contiguous", "dim", "explain", "for_rank"),
        *("imbalance", "metrics", "ndim", "needs", "numel", "owners", "part", "plot", "positions", "rank"),
        "reason",
        *("s_local", "schedule", "seq_lengths", "shape", "sparsity", "to", "valid", "work", "world_size"),
    },
}  # fmt: skip
FROZEN = Path(__file__).with_name("public_surface.txt")
REMEDY = (
    "The public surface differs from tests/repo/public_surface.txt. If the change is intended, run "
    "`ACCEPT=1 python -m pytest -n 0 tests/repo/test_public_surface.py` and add a line to CHANGELOG.md:\n"
)


def signature(function: Callable[..., Any]) -> str:
    """Format parameter names and defaults, without annotations and private parameters."""
    whole = inspect.signature(function)
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty, default=plain(parameter.default))
        for parameter in whole.parameters.values()
        if not parameter.name.startswith("_") or parameter.default is inspect.Parameter.empty
    ]
    text = str(whole.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
    return text.replace("Ellipsis", "...")


def plain(default: Any) -> Any:
    """Return a default whose repr is the same everywhere: `...` in place of other objects."""
    values = default if isinstance(default, tuple) else (default,)
    is_plain = all(value is None or type(value) in (bool, int, float, str, bytes) for value in values)
    return default if is_plain or default is inspect.Parameter.empty else ...


def members(cls: type) -> Iterator[str]:
    """List public fields, properties and methods that classes of the package define."""
    own = [base for base in cls.__mro__ if base.__module__.startswith("tritoncp.")]
    names = {name for base in own for name in [*vars(base), *inspect.get_annotations(base)]}
    for name in sorted(name for name in names if not name.startswith("_")):
        if name in FOR_USERS.get(cls.__name__, names):
            value = inspect.getattr_static(cls, name, None)
            yield f"{cls.__name__}.{name}" + (signature(value) if inspect.isfunction(value) else "")


def describe(name: str, value: Any) -> Iterator[str]:
    """List a public name: with its signature, its keys, or the names of its ops."""
    if isinstance(value, type):
        yield name if name in FOR_USERS or issubclass(value, tuple) else name + signature(value)
        yield from members(value)
    elif callable(value):
        yield name + signature(value)
    elif isinstance(value, dict):
        yield f"{name}: {', '.join(sorted(value))}"
    elif isinstance(value, tuple):
        yield f"{name}: {', '.join(str(item) for item in value)}"
    else:
        yield name


def names_of(module: Any, prefix: str = "") -> Iterator[str]:
    for name in module.__all__:
        yield from describe(prefix + name, getattr(module, name))


def python_names() -> Iterator[str]:
    yield from names_of(tritoncp)
    for result in (tritoncp.simulate(1), tritoncp.plan_cache_info()):
        yield from describe(type(result).__name__, type(result))


def transformers_names() -> Iterator[str]:
    """List the names for models of transformers. Of a class only the constructor is listed, since its methods
    are Trainer's."""
    for name in transformers.__all__:
        yield f"{name}{signature(getattr(transformers, name))}"


def mask_names() -> Iterator[str]:
    for name in masks.__all__:
        value = getattr(masks, name)
        is_listed = value is getattr(tritoncp, name, None) or isinstance(value, type)
        yield from [name] if is_listed else describe(name, value)


def commands(command: click.Command, path: str) -> Iterator[str]:
    """List a command and its subcommands, a line for each option or argument."""
    yield path
    for parameter in command.params:
        names = "|".join([*parameter.opts, *parameter.secondary_opts])
        facts = [names if isinstance(parameter, click.Option) else parameter.name.upper()]
        if isinstance(parameter.type, click.Choice):
            facts.append("{" + ",".join(map(str, parameter.type.choices)) + "}")
        facts += [word for word in ("required", "multiple", "is_flag") if getattr(parameter, word, False)]
        default = parameter.default
        if isinstance(default, str | Path):
            facts.append(f"default {str(default)!r}")
        elif type(default) in (int, float):
            facts.append(f"default {default}")
        yield f"  {' '.join(facts)}"
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            subcommand = command.get_command(context, name)
            assert subcommand is not None
            yield from commands(subcommand, f"{path} {name}")


def programs() -> Iterator[str]:
    for module in ("tritoncp.__main__", "tritoncp.perf.run"):
        if importlib.util.find_spec(module) is not None:
            yield f"python -m {module.removesuffix('.__main__')}"
    yield from commands(main, "tritoncp")


def kernel_options() -> Iterable[str]:
    x = torch.zeros(1, 1, 16, 16)
    with pytest.raises(ValueError, match="unknown kernel option") as error:
        tritoncp.flex_attention(x, x, x, kernel_options={"no such option": 1})
    return sorted(str(error.value).rpartition(": ")[2].split(", "))


def op_schemas() -> Iterator[str]:
    assert autograd.forward_op and traced.plan_op  # these modules register all ops
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        if name.startswith("tritoncp::"):
            yield str(getattr(torch.ops.tritoncp, name.removeprefix("tritoncp::")).default._schema)


def command_exit_codes() -> Iterator[str]:
    for arguments in (
        ["plan", "--help"],
        ["plan", "--seq-len=0"],
        ["plan", "--mask=no such mask"],
        ["check", "--only=no such case"],
        ["check", "--budget=0.001"],
    ):
        yield f"tritoncp {' '.join(arguments)}: {invoke(*arguments).exit_code}"
    codes = {name: code for name, code in vars(exit_codes).items() if name.isupper() and type(code) is int}
    yield from (f"tritoncp perf, {name}: {code}" for name, code in sorted(codes.items()))


def environment_variables() -> list[str]:
    """Find the package's variables in its sources."""
    texts = [path.read_text() for path in modules().values()]
    return sorted({name for text in texts for name in re.findall(r"TRITONCP_[A-Z0-9_]+", text)})


def surface() -> str:
    """Return the public surface as text, section by section."""
    sections: dict[str, Iterable[str]] = {
        "tritoncp": python_names(),
        "tritoncp.masks": mask_names(),
        "tritoncp.chunking": names_of(chunking, "chunking."),
        "tritoncp.integrations.transformers": transformers_names(),
        "commands and their options": programs(),
        "exit codes": command_exit_codes(),
        "kernel_options": kernel_options(),
        "ops": op_schemas(),
        "environment variables": environment_variables(),
    }
    return "\n".join("\n".join([f"# {title}", *lines, ""]) for title, lines in sections.items())


def test_the_public_surface_is_unchanged():
    current = surface()
    if os.environ.get("ACCEPT") == "1":
        FROZEN.write_text(current)
    frozen = FROZEN.read_text()
    lines = difflib.unified_diff(frozen.splitlines(), current.splitlines(), n=0, lineterm="")
    assert frozen == current, REMEDY + "\n".join(lines)
