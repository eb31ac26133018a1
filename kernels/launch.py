"""Kernel launches, and a cache of the parts of a launch that tensors of equal layouts share.

Triton inspects each argument of each launch to look up the compiled kernel. Here, if an earlier launch had
tensors of the same layouts, only the addresses in its arguments are replaced.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from triton.runtime.errors import OutOfResources

from tritoncp.kernels.compiling import launch_first
from tritoncp.kernels.layouts import layout_of, specialisation_of
from tritoncp.kernels.options import does_not_fit
from tritoncp.kernels.scores import Closure
from tritoncp.kernels.tile_rules import Config
from tritoncp.kernels.tiles import INTERPRETED, descriptor_at, view

CHECKED = bool(INTERPRETED)  # compare the layouts of launches that share a cache entry
# Triton's interpreter replaces its language's functions while a kernel runs: not for two threads at once.
_INTERPRETER_LOCK: AbstractContextManager[Any] = threading.RLock() if INTERPRETED else nullcontext()

Tensors = Mapping[str, Any]  # tensor or State by name of the argument; None if it is absent
Closures = Mapping[str, Closure]  # by name of the argument


class State(NamedTuple):
    """Attention state between steps: acc [B, H, S, E], m and l [B, H, S], float32 (float64 for float64).

    m is the running maximum in log2 units (-inf: no key so far); l and acc are relative to it.
    """

    acc: Tensor
    m: Tensor
    l: Tensor


class Launch(NamedTuple):
    """One kernel launch, prepared but not yet run.

    values:   the kernel's arguments, in its order
    compiled: a list with Triton's compiled kernel, empty before the first launch of these layouts
    options:  compiler options besides the config
    """

    kernel: Any
    grid: tuple[int, ...]
    values: list[Any]
    config: Config
    compiled: list[Any]
    options: Mapping[str, Any] = {}

    @property
    def args(self) -> dict[str, Any]:
        """Arguments and options by name."""
        return dict(zip(self.kernel.arg_names, self.values, strict=True)) | dict(self.options)

    @property
    def parts(self) -> tuple[Launch, ...]:
        """A tuple of only this launch, the counterpart of Launches.parts."""
        return (self,)

    @property
    def compiler_options(self) -> dict[str, Any]:
        """Options of Triton's compiler."""
        return self.config.compiler() | dict(self.options)

    def compile(self) -> None:
        """Compile the kernel without a launch."""
        if all(self.grid) and not self.compiled:
            self.kernel.warmup(*self.values, grid=self.grid, **self.compiler_options)

    def with_args(self, **args: Any) -> Launch:
        """Copy the launch with some arguments replaced."""
        values = [args.get(name, value) for name, value in zip(self.kernel.arg_names, self.values)]
        return self._replace(values=values)

    def __call__(self) -> None:
        if not all(self.grid):
            return
        if self.compiled:
            self.compiled[0][self.grid](*self.values)
            return
        try:
            with _INTERPRETER_LOCK:
                launch = partial(self.kernel[self.grid], *self.values, **self.compiler_options)
                launched = launch_first(self.compile, launch)
        except OutOfResources as error:
            kind = self.kernel.__name__.removesuffix("_kernel")
            message = does_not_fit(kind, self.config, error.name, error.required, error.limit)
            raise ValueError(message) from error
        if launched is not None:  # None: interpreted
            self.compiled.append(launched)


class Launches(NamedTuple):
    """Launches of one step and callables between them, in order."""

    parts: tuple[Launch | Callable[[], object], ...]

    def __call__(self) -> None:
        for part in self.parts:
            part()

    def compile(self) -> None:
        """Compile the kernels of the launches."""
        for part in self.parts:
            if isinstance(part, Launch):
                part.compile()


class Recipe(NamedTuple):
    """Parts of a launch that depend only on the layouts of its tensors.

    args:        arguments by name, except arguments that change from launch to launch
    descriptors: (argument, tensor, fields) of the tiles that are copied by descriptor
    options:     compiler options besides the options of the config
    """

    grid: tuple[int, ...]
    args: Mapping[str, Any]
    config: Config
    descriptors: Sequence[tuple[str, str, dict[str, Any]]] = ()
    options: Mapping[str, Any] = {}


class LaunchTemplate(NamedTuple):
    """A cached launch, and the places in the kernel's list of arguments that change at every launch.

    tensors:     (place, name, type of the argument, its fields besides the tensor)
    states:      (place, name, type and fields of each of its tensors)
    descriptors: (place, name of the tensor, fields)
    closures:    (place, name) of closures with captures
    layouts:     layouts of all arguments if kernels run interpreted; else empty
    """

    launch: Launch
    tensors: list[tuple[int, str, Any, tuple[Any, ...]]]
    states: list[tuple[int, str, list[tuple[Any, tuple[Any, ...]]]]]
    descriptors: list[tuple[int, str, dict[str, Any]]]
    closures: list[tuple[int, str]]
    layouts: tuple[Any, ...]

    @classmethod
    def build(cls, kernel: Any, tensors: Tensors, closures: Closures, recipe: Recipe) -> LaunchTemplate:
        place = {name: at for at, name in enumerate(kernel.arg_names)}
        args: dict[str, Any] = {name: None for name in place if "_desc" in name}
        args |= dict.fromkeys(tensors, view(None)) | dict(closures) | dict(recipe.args)
        tensor_places, state_places = [], []
        for name, x in tensors.items():
            if isinstance(x, State):
                state_places.append((place[name], name, [(type(s), s[1:]) for s in map(view, x)]))
            elif x is not None and name in place:
                tensor_places.append((place[name], name, type(view(x)), view(x)[1:]))
        descriptor_places = [(place[argument], name, fields) for argument, name, fields in recipe.descriptors]
        closure_places = [(place[name], name) for name, x in closures.items() if x.captured and name in place]
        values = [args[name] for name in kernel.arg_names]
        for at, _ in closure_places:
            values[at] = None  # set at every launch
        launch = Launch(kernel, recipe.grid, values, recipe.config, [], recipe.options)
        layouts = layouts_of(tensors, closures) if CHECKED else ()
        return cls(launch, tensor_places, state_places, descriptor_places, closure_places, layouts)


def prepare_launch(
    cache: Any, key: Any, kernel: Any, tensors: Tensors, closures: Closures, recipe: Callable[[], Recipe]
) -> Launch:
    """Prepare a launch of ``kernel`` on tensors, and on functions whose captures may also change.

    cache: earlier launches by ``key``, which determines the layouts; interpreted kernels verify this
    """
    entry: LaunchTemplate | None = cache.get(key)
    if entry is None:
        entry = cache[key] = LaunchTemplate.build(kernel, tensors, closures, recipe())
    elif CHECKED and entry.layouts != layouts_of(tensors, closures):
        raise AssertionError(f"launches of {kernel.__name__} with one cache key differ in their layouts")
    new, launch = tuple.__new__, entry.launch  # new(T, fields): as T(*fields), in half the time
    values = launch.values.copy()
    for at, name, kind, fields in entry.tensors:
        values[at] = new(kind, (tensors[name],) + fields)  # noqa: RUF005 - faster than a starred tuple
    for at, name, parts in entry.states:
        values[at] = new(State, [new(kind, (x, *rest)) for x, (kind, rest) in zip(tensors[name], parts)])
    for at, name, descriptor_fields in entry.descriptors:
        values[at] = descriptor_at(descriptor_fields, tensors[name])
    for at, name in entry.closures:
        values[at] = closures[name]
    return new(Launch, (kernel, launch.grid, values, launch.config, launch.compiled, launch.options))


def layouts_of(tensors: Tensors, closures: Closures) -> tuple[Any, ...]:
    """The layouts of all tensors, and the specialisation of all captures."""
    parts = [(x,) if isinstance(x, Tensor) else x or () for x in tensors.values()]
    return *[tuple(map(layout_of, part)) for part in parts], *map(specialisation_of, closures.values())
