"""Properties of a model, found in the code of its classes: custom attention or loss, recurrent layers, ..."""

from __future__ import annotations

import dis
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from types import CodeType
from typing import Any, TypeVar, cast

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, modeling_utils
from transformers.modeling_layers import GradientCheckpointingLayer

INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # the table in which models look up their attention
INDEXED_LAYERS = frozenset(("indexed_attention", "minimax_m3_sparse"))  # their indexer selects keys
# Kinds of layers that attend to keys which each stand for several tokens, beside those of single tokens.
COMPRESSED_LAYERS = frozenset(("compressed_sparse_attention", "heavily_compressed_attention"))
RECURRENT_CACHES = ("cache_params", "state")  # cache arguments of recurrent modules
CACHES = (*RECURRENT_CACHES, "past_key_values", "cache")  # cache arguments of all modules that mix tokens
# Methods by which recurrent modules write their state to a cache: since 5.24 all caches are called `cache`.
STATE_UPDATES = frozenset(("update_conv_state", "update_recurrent_state"))


F = TypeVar("F", bound=Callable[..., Any])


def _cached_by_class(function: F) -> F:
    """Cache a function of a class with functools.cache. (mypy does not know that classes are hashable.)"""
    return cast(F, cache(function))


def modeling_of(config: PreTrainedConfig) -> Any:
    """Return transformers' module with the model classes of a config; None for a config of other code."""
    return _import_modeling(type(config).__module__)


@cache
def _import_modeling(module: str) -> Any:
    package, _, name = module.rpartition(".configuration_")
    if not package.startswith("transformers.models."):
        return None
    try:
        return importlib.import_module(f"{package}.modeling_{name}")
    except ImportError:
        return None


def computes_attention_itself(config: PreTrainedConfig) -> bool:
    """Return whether the models of a config do not use transformers' attention interface."""
    modeling = modeling_of(config)
    return modeling is not None and (
        getattr(modeling, INTERFACE, None) is not modeling_utils.ALL_ATTENTION_FUNCTIONS
    )


def has_indexers(config: PreTrainedConfig) -> bool:
    """Return whether layers of a config select keys by scores of an indexer."""
    return not INDEXED_LAYERS.isdisjoint(getattr(config, "layer_types", None) or ())


def has_compressed_keys(config: PreTrainedConfig) -> bool:
    """Return whether layers of a config add keys that stand for several tokens, and need a dense mask."""
    return not COMPRESSED_LAYERS.isdisjoint(getattr(config, "layer_types", None) or ())


def attention_with_indexers(model: nn.Module) -> list[nn.Module]:
    """Return the attention modules of a model with an indexer, and those that reuse the keys of another."""
    return [
        part
        for part in model.modules()
        if hasattr(part, "indexer") and INTERFACE in _names_of_methods(type(part))
    ]


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the transformers model inside DistributedDataParallel and torch.compile wrappers."""
    while not isinstance(model, PreTrainedModel):
        inner = getattr(model, "_orig_mod", getattr(model, "module", None))
        if not isinstance(inner, nn.Module):
            break
        model = inner
    return model


def takes_positions(config: PreTrainedConfig, model: nn.Module | None) -> bool:
    """Return whether a model (if None, any model of the config) has an argument ``position_ids``."""
    if model is None:
        modeling = modeling_of(config)
        classes = [one for one in vars(modeling or object).values() if inspect.isclass(one)]
    else:
        modeling, classes = model, [type(part) for part in model.modules()]
    return modeling is None or any(
        "position_ids" in _parameters(one) for one in classes if issubclass(one, PreTrainedModel)
    )


def has_custom_loss(config: PreTrainedConfig, model: nn.Module | None) -> bool:
    """Return whether a model (if None, the language model of the config) computes its loss from ``labels`` by
    other code than transformers' loss function, which reads ``shift_labels``."""
    if model is not None:
        base = getattr(model, "get_base_model", lambda: model)()
        if _takes_labels(type(base)):
            return not _calls_loss_function(type(base))
        classes = {type(part) for part in base.modules() if isinstance(part, PreTrainedModel)}
        return any(_takes_labels(cls) and not _calls_loss_function(cls) for cls in classes)
    members = vars(modeling_of(config) or object).items()
    return any(
        name.endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel"))
        and not _calls_loss_function(cls)
        for name, cls in members
        if inspect.isclass(cls)
    )


def _forwards_of(cls: Any) -> Iterator[Any]:
    """Yield the forward method of a class, and the forward methods of bases that it calls by super()."""
    for one in cls.__mro__:
        forward = inspect.unwrap(vars(one).get("forward", None))
        if inspect.isfunction(forward):
            yield forward
            if "super" not in _names_in(forward.__code__):
                return


@_cached_by_class
def _takes_labels(cls: Any) -> bool:
    return any("labels" in inspect.signature(one).parameters for one in _forwards_of(cls))


@_cached_by_class
def _calls_loss_function(cls: Any) -> bool:
    for forward in _forwards_of(cls):
        names = _names_in(forward.__code__)
        if "loss_function" in names:
            return True
        lower = {name.lower() for name in names - {"loss"}}
        if any("loss" in name or "entropy" in name for name in lower):  # it wraps a base's forward
            return False
    return False


def _names_in(code: CodeType) -> set[str]:
    """Return the names of globals and attributes in a code object and those nested in it. (Classes made by
    exec, or by FSDP, have no source.)"""
    inner = [_names_in(one) for one in code.co_consts if isinstance(one, CodeType)]
    return set(code.co_names).union(*inner)


@cache
def _source_of(module: Any) -> str:
    return "" if module is None else inspect.getsource(module)


def position_axes(config: PreTrainedConfig) -> int:
    """Return the number of axes of a model's positions: several for images and video, as in Qwen2-VL; 1 for
    texts."""
    if "mrope_section" not in _source_of(modeling_of(config)):
        return 1
    parameters = getattr(config, "rope_parameters", None) or {}
    return len(parameters.get("mrope_section", range(3)))


def counts_positions_of_images(config: PreTrainedConfig) -> bool:
    """Return whether models of a config compute positions of several axes from token ids and images."""
    return config.get_text_config() is not config and "get_rope_index" in _source_of(modeling_of(config))


def adds_features_to_layers(config: PreTrainedConfig) -> bool:
    """Return whether models of a config add features of images to the hidden states of several layers, as
    Qwen3-VL does; embeddings do not contain these features."""
    return config.get_text_config() is not config and "deepstack" in _source_of(modeling_of(config))


def names_of_arguments(config: PreTrainedConfig, model: nn.Module | None) -> set[str]:
    """Return the names of the arguments of a model (if None, of all models of the config)."""
    members = vars(modeling_of(config) or object).values() if model is None else [type(model)]
    models = [one for one in members if inspect.isclass(one) and issubclass(one, PreTrainedModel)]
    return {name for one in models for name in argument_names(one)}


def own_mask_function(config: PreTrainedConfig, types: Iterable[str]) -> Callable[..., Any] | None:
    """Return the function by which the models of a config make the masks of their layers from types of
    tokens (of these names), or None."""
    for one in vars(modeling_of(config) or object).values():
        function = vars(one).get("create_masks_for_generate") if inspect.isclass(one) else None
        function = getattr(function, "__func__", function)
        if function is not None and not set(types).isdisjoint(inspect.signature(function).parameters):
            return cast(Callable[..., Any], function)
    return None


def counts_from_padding(config: PreTrainedConfig) -> bool:
    """Return whether positions of the models of a config begin after the padding id, as in RoBERTa."""
    return "def create_position_ids_from_input_ids(" in _source_of(modeling_of(config))


def counts_by_padding_mask(config: PreTrainedConfig) -> bool:
    """Return whether positions of the models of a config count the tokens of the attention_mask, as in
    OPT."""
    code = _source_of(modeling_of(config))
    return (
        "position_ids = torch.cumsum(attention_mask" in code or "torch.cumsum(position_attention_mask" in code
    )


def may_be_recurrent(config: PreTrainedConfig) -> bool:
    """Return whether models of a config may have state-space layers: their module has classes for these."""
    classes = vars(modeling_of(config) or object).values()
    return any(
        inspect.isclass(one)
        and issubclass(one, nn.Module)
        and not (
            _parameters(one).isdisjoint(RECURRENT_CACHES) and STATE_UPDATES.isdisjoint(_names_of_methods(one))
        )
        for one in classes
    )


def may_convolve(config: PreTrainedConfig) -> bool:
    """Return whether models of a config may convolve tokens, or concatenate neighbouring ones, as
    MobileBERT's
    embeddings: their module has such code."""
    return "nn.Conv1d(" in _source_of(modeling_of(config)) or getattr(config, "trigram_input", False)


def attention_without_arguments(model: nn.Module) -> list[nn.Module]:
    """Return the attention modules that do not get the model's keyword arguments, because the enclosing
    module does not pass them on (as in StableLM and Nemotron)."""
    config = getattr(model, "config", None)
    if config is None or config.sub_configs:
        return []
    attention = {part for part in model.modules() if INTERFACE in _names_of_methods(type(part))}
    return list(
        {
            part
            for parent in model.modules()
            if parent not in attention
            and not isinstance(parent, nn.ModuleList)
            and not _passes_on(type(parent))
            for part in parent.modules()
            if part in attention
        }
    )


@_cached_by_class
def _passes_on(cls: Any) -> bool:
    """Return whether the forward method of a class passes on keyword arguments by ``**``."""
    codes = (inspect.unwrap(one).__code__ for one in _forwards_of(cls))
    return any(step.opname == "CALL_FUNCTION_EX" for code in codes for step in dis.get_instructions(code))


def is_recurrent(module: nn.Module) -> bool:
    """Return whether a module itself, and no module inside it, mixes tokens by other means than attention: it
    has a cache argument, convolves, or reads neighbours of a token."""
    if not _mixes_tokens(module) or isinstance(module, PreTrainedModel | GradientCheckpointingLayer):
        return False
    parts = list(module.modules())[1:]
    return not any(_mixes_tokens(part) for part in parts) and not _computes_attention(type(module))


def _mixes_tokens(module: nn.Module) -> bool:
    convolves = any(isinstance(part, nn.Conv1d) for part in module.children())
    return has_cache(module) or convolves or getattr(module, "trigram_input", False) is True


def has_cache(module: nn.Module) -> bool:
    """Return whether a module has a cache argument, and thus reads only earlier tokens."""
    return not _parameters(type(module)).isdisjoint(CACHES)


@_cached_by_class
def argument_names(cls: Any) -> tuple[str, ...]:
    """Return the names of the arguments of a class's forward method, in their order."""
    return tuple(inspect.signature(cls.forward).parameters)[1:]


def _parameters(cls: Any) -> frozenset[str]:
    return frozenset(argument_names(cls))


def _computes_attention(cls: Any) -> bool:
    """Return whether a method of a class, or of a base below nn.Module, calls an attention function or
    softmax, or selects keys by topk."""
    names = _names_of_methods(cls)
    return INTERFACE in names or "topk" in names or any("softmax" in name for name in names)


@_cached_by_class
def _names_of_methods(cls: Any) -> set[str]:
    """Return the names of globals and attributes in the methods of a class, and of its bases below
    nn.Module."""
    bases = cls.__mro__[: cls.__mro__.index(nn.Module)]
    methods = [inspect.unwrap(x) for one in bases for x in vars(one).values() if inspect.isfunction(x)]
    return set().union(*(_names_in(x.__code__) for x in methods))
