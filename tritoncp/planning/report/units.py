"""Numbers and lists as text: tokens, bytes, ranks."""

from __future__ import annotations


def format_tokens(count: int) -> str:
    """Format a number of tokens with a binary unit.

    >>> format_tokens(131072), format_tokens(8 << 20), format_tokens(1000)
    ('128K', '8M', '1000')
    """
    for size, unit in ((1 << 20, "M"), (1 << 10, "K")):
        if count >= size and count % (size // 4) == 0:
            return f"{count / size:g}{unit}"
    return str(count)


def format_bytes(count: float) -> str:
    """Format a number of bytes with a binary unit, to three digits.

    >>> format_bytes(1536), format_bytes(5 << 30), format_bytes(1008 << 20), format_bytes(0)
    ('1.5 KiB', '5 GiB', '1008 MiB', '0 bytes')
    """
    for size, unit in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= size:
            return f"{count / size:.0f} {unit}" if count >= 1000 * size else f"{count / size:.3g} {unit}"
    return f"{count:g} bytes"


def format_ranks(ranks: list[int]) -> str:
    """Format ascending ranks, consecutive ones as a range.

    >>> format_ranks([0, 1, 2, 5]), format_ranks([3])
    ('0-2,5', '3')
    """
    groups: list[list[int]] = []
    for rank in ranks:
        if groups and groups[-1][-1] == rank - 1:
            groups[-1].append(rank)
        else:
            groups.append([rank])
    return ",".join(f"{g[0]}-{g[-1]}" if len(g) > 1 else str(g[0]) for g in groups)


def shorten(text: str, width: int = 24) -> str:
    """Shorten a text, as a list of names, to ``width`` characters.

    >>> shorten("1,3,5", 5), shorten("1,3,5,7,9", 6)
    ('1,3,5', '1,3,5…')
    """
    return text if len(text) <= width else text[: width - 1].rstrip(",") + "…"
