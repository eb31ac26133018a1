"""Suggestions for misspelled names in error messages."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from tritoncp.core.dynamo_boundary import constant_result


@constant_result
def suggest(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean ...?)" with the known name that is most like ``name``, "" if none is like it.

    >>> suggest("block_masks", ["block_mask", "scale"]), suggest("layer_id", ["block_mask", "scale"])
    (" (did you mean 'block_mask'?)", '')
    """
    close = get_close_matches(name, sorted(known), 1, 0.75)
    return f" (did you mean {close[0]!r}?)" if close else ""
