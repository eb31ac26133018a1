"""Methods that embed images, videos or audio: each rank embeds its part, and gets the rows of its tokens.

A model embeds features by `get_image_features` and its kin, and puts their rows into the places of the tokens
that stand for them. On a shard these are other tokens: the wrapper returns their rows, so that the code of
the model holds. The methods run on every rank, as FSDP needs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from tritoncp.distributed import groups
from tritoncp.distributed.consistency import fact, together
from tritoncp.integrations.transformers.images.feature_rows import FeatureRows, RowExchange, send_features
from tritoncp.integrations.transformers.images.parts import ALL_IMAGES, own_part

# Inputs whose embeddings replace embeddings of tokens, and the methods that embed them.
FEATURES = {
    "pixel_values": "image",
    "pixel_values_images": "image",
    "pixel_values_videos": "video",
    "flattened_patches": "image",
    "input_features": "audio",
    "input_values": "audio",
}
PLACED = ("pooler_output", "deepstack_features")  # results with a row for each token
PLACES = "image_embeds_position_mask"  # of models in which no token stands for images, [B, S]


@dataclass
class OwnFeatures:
    """A method that embeds the images of a batch, for a rank that has a shard of its tokens.

    method:  the method of the model
    kind:    "image", "video" or "audio"
    current: the CurrentPlan of the model
    """

    method: Callable[..., Any]
    kind: str
    current: Any

    def __post_init__(self) -> None:
        self.__signature__ = inspect.signature(self.method)  # by which generate() chooses arguments

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("context_parallel", None)
        plan = self.current.of({})
        with self.current.without_plan():  # for the tower, and for methods that call another one of these
            if plan is None or not plan.several or self.kind not in plan.features:
                return self.method(*args, **kwargs)
            return self._embed(plan, *args, **kwargs)

    def _embed(self, plan: Any, *args: Any, **kwargs: Any) -> Any:
        """Embed this rank's part, and return the result with the rows of this rank's tokens."""
        group, rows = groups.group_of(plan.mesh), plan.features[self.kind]
        assert group is not None  # there are several ranks
        names = inspect.signature(self.method).parameters
        call = {**dict(zip(names, args)), **kwargs}
        named = {name: call[name] for name in names if name in call}
        module = getattr(self.method, "__self__", None)
        if isinstance(module, nn.Module) and _mixes_images(module):
            part = ALL_IMAGES
        else:
            part = own_part(named, group.rank(), group.size())
        out = self.method(**call | part.arguments)
        is_output = isinstance(out, ModelOutput)
        names_placed = _placed(out) if is_output else []
        embedded = _count_rows(out[names_placed[0]] if is_output else out)
        owned = embedded * part.is_owner
        purpose = f"features of {self.kind}s"
        _, numbers = together(group, purpose, lambda: (None, {"call": fact(purpose)}, (owned,)))
        counts = [number for (number,) in numbers]
        total = sum(counts) if part.is_split else embedded
        if total != len(rows):
            raise ValueError(
                f"{self.kind}s of the batch have {total} rows of features, and {len(rows)} tokens of "
                f"input_ids stand for them ({self.kind}_token_id): as many are needed"
            )
        if part.is_split:
            place = partial(send_features, exchange=RowExchange(rows, counts, group))
        else:
            place = partial(_select, index=rows.wanted_by(group.rank()))
        if not is_output:
            return _place(out, place)
        for name in names_placed:
            out[name] = _place(out[name], place)
        return out


def _mixes_images(module: nn.Module) -> bool:
    """Return whether features of an image depend on all images of a call, as with batch norm in training
    (Emu3)."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    return any(isinstance(part, kinds) and part.training for part in module.modules())


def _placed(out: ModelOutput) -> list[str]:
    """Return the names of the results with a row for each token."""
    return [name for name in PLACED if out.get(name) is not None] or ["last_hidden_state"]


def _select(x: Tensor, index: Tensor) -> Tensor:
    return x[index.to(x.device)]


def _rows(x: Any) -> list[Tensor]:
    """Return the features of each image, [rows, E], from a method's result: [images, rows, E], [rows, E] or a
    list of these."""
    parts = [x] if isinstance(x, Tensor) else list(x)
    return [part.reshape(-1, part.shape[-1]) for part in parts]


def _count_rows(x: Any) -> int:
    """Return the number of rows of a method's result; of features for several layers, of one of them."""
    if isinstance(x, Tensor) or (isinstance(x, list | tuple) and all(isinstance(part, Tensor) for part in x)):
        return sum(len(part) for part in _rows(x))
    return max(map(_count_rows, x), default=0) if isinstance(x, list | tuple) else 0


def _place(x: Any, place: Callable[[Tensor], Tensor]) -> Any:
    """Return the local rows of features, in the form of the method's result: as images of one row each."""
    if isinstance(x, Tensor):
        rows = place(_rows(x)[0])
        return rows.reshape(len(rows), *[1] * (x.ndim - 2), rows.shape[1])
    if isinstance(x, list | tuple) and x and all(isinstance(part, Tensor) for part in x):
        rows = place(torch.cat(_rows(x)))
        return type(x)([rows.reshape(len(rows), *[1] * (x[0].ndim - 2), rows.shape[1])])
    return type(x)([_place(part, place) for part in x]) if isinstance(x, list | tuple) else x


def methods_of(model: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    """Yield (module, name of the method, kind) of all methods of a model that embed features."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            for kind in dict.fromkeys(FEATURES.values()):
                if callable(getattr(module, f"get_{kind}_features", None)):
                    yield module, f"get_{kind}_features", kind


def hook_features(model: nn.Module, current: Any) -> bool:
    """Let the methods of a model that embed features serve shards; return whether it has any. current: the
    CurrentPlan of the model"""
    methods = list(methods_of(model))
    for module, name, kind in methods:
        method = getattr(module, name)
        if not isinstance(method, OwnFeatures):  # of a part of the model that was prepared before
            setattr(module, name, OwnFeatures(method, kind, current))
    return bool(methods)


def feature_tokens(batch: Mapping[str, Any], model: nn.Module | None) -> dict[str, int | None]:
    """Return the token that stands for each kind of features in a batch; None: its mask PLACES has their
    places.

    Raises ValueError for features that the ranks of a model cannot share.
    """
    found: dict[str, int | None] = {}
    for name, kind in FEATURES.items():
        if batch.get(name) is None:
            continue
        if name == "pixel_values" and batch.get(PLACES) is not None and _embeds(model, kind):
            found[kind] = None
            continue
        ids = batch.get("input_ids")
        tokens = [] if model is None else _token_ids(model, kind)
        if not tokens or ids is None:
            reason = (
                "which the model embeds: pass the model to shard_batch, in place of its config; or"
                if model is None
                else f"and no input_ids [B, S] in which tokens stand for {kind}s:"
                if tokens
                else f"but the model has no method get_{kind}_features, or no {kind}_token_id:"
            )
            raise ValueError(
                f"the batch has {name}, {reason} pass inputs_embeds [B, S, E] of the whole batch with these "
                "features, in place of input_ids and them; or run the model on whole sequences, without "
                "shard_batch"
            )
        found[kind] = next((token for token in tokens if bool((ids == token).any())), tokens[0])
    return found


def _embeds(model: nn.Module | None, kind: str) -> bool:
    """Return whether a model has a method that embeds features of a kind."""
    return model is not None and any(kind == one for _, _, one in methods_of(model))


def _token_ids(model: nn.Module, kind: str) -> list[int]:
    """Return the tokens that may stand for features of a kind. GLM-4.1V has images' tokens in videos."""
    configs = [module.config for module, _, one in methods_of(model) if one == kind]
    kinds = (kind, "image") if kind == "video" else (kind,)
    names = [f"{one}_token_{end}" for one in kinds for end in ("id", "index")]
    found = [getattr(config, name, None) for config in configs for name in names]
    return [token for token in found if isinstance(token, int)]


def names_of_features(model: nn.Module | None) -> set[str]:
    """Return the names of arguments that describe features, which are passed on whole."""
    methods = [] if model is None else [getattr(module, name) for module, name, _ in methods_of(model)]
    names = {one for method in methods for one in inspect.signature(method).parameters}
    return {*FEATURES, *names} - {"input_ids"}  # in which MusicFlamingo counts the tokens of audio


def place_features(
    batch: Mapping[str, Any], tokens: Mapping[str, int | None], placement: Any
) -> dict[str, FeatureRows]:
    """Return where the rows of each kind of features belong."""
    return {
        kind: FeatureRows.of(
            batch[PLACES].bool() if token is None else batch["input_ids"] == token, placement
        )
        for kind, token in tokens.items()
    }
