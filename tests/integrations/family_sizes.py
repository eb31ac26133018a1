"""Sizes of the small models of tests.integrations.families, by family_sizes.toml; and inputs of theirs."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LENGTH, VOCABULARY = 64, 97
TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
SIZES: dict[str, Any] = {name: value for value, *names in TABLE["sizes"] for name in names}
VARIANTS: list[dict[str, Any]] = [
    {name: None if value == "none" else value for name, value in sizes.items()} for sizes in TABLE["variants"]
]
CLASSES: dict[str, str] = TABLE["classes"]


def options_of(family: str) -> dict[str, Any]:
    """Return the values of a config that a family needs besides."""
    options = TABLE["options"].get(family, {})
    return TABLE["options"][options] if isinstance(options, str) else options


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def _tokens(*shape: int) -> Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(2))


# Inputs of two rows besides tokens and labels, or in place of them.
IMAGE = {"pixel_values": _normal(2, 3, 16, 16)}
CODES = {"input_ids": _tokens(8, LENGTH), "labels": _tokens(2, LENGTH, 4)}
INPUTS: dict[str, dict[str, Any]] = {
    "blip": IMAGE,
    "git": IMAGE,
    "idefics": {"pixel_values": _normal(2, 1, 3, 16, 16), "image_attention_mask": torch.ones(2, LENGTH, 1)},
    "kyutai_speech_to_text": {"input_ids": _tokens(2, LENGTH, 3)},
    "kosmos-2": {**IMAGE, "image_embeds_position_mask": (torch.arange(LENGTH) < 4).expand(2, -1)},
    "molmo2": {"mm_token_type_ids": torch.zeros(2, LENGTH, dtype=torch.int64)},
    "musicgen": CODES,
    "musicgen_melody": CODES,
    "udop": {"bbox": torch.zeros(2, LENGTH, 4)},
    "voxtral_realtime": {"input_features": _normal(2, 128, 8 * LENGTH)},
}
