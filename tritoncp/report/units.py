"""Numbers and lists as text: tokens, bytes, ranks."""

from __future__ import annotations


def format_tokens(count: int) -> str:
    """Format a number of tokens with a binary unit.

    >>> [format_tokens(count) for count in (256, 1000, 1024, 1280, 131072, 1 << 20, 8 << 20)]
    ['256', '1000', '1K', '1.25K', '128K', '1M', '8M']
    """
    for size, unit in ((1 << 20, "M"), (1 << 10, "K")):
        if count >= size and not count % (size // 4):
            return f"{count / size:g}{unit}"
    return str(count)


def format_bytes(count: float) -> str:
    """Format a number of bytes with a binary unit, to three digits.

    >>> [format_bytes(count) for count in (0, 1023, 1024, 1 << 20, 1 << 30, 1 << 40)]
    ['0 bytes', '1023 bytes', '1 KiB', '1 MiB', '1 GiB', '1 TiB']
    >>> format_bytes(1536), format_bytes(999.6 * 2**20), format_bytes(1008 << 20)
    ('1.5 KiB', '1000 MiB', '1010 MiB')
    """
    for size, unit in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= size:
            return f"{float(f'{count / size:.3g}'):g} {unit}"
    return f"{count:g} bytes"


def format_ranks(ranks: list[int]) -> str:
    """Format ascending ranks, consecutive ones as a range.

    >>> format_ranks([0, 1, 2, 5, 6]), format_ranks([3])
    ('0-2,5-6', '3')
    """
    groups: list[list[int]] = []
    for rank in ranks:
        if groups and groups[-1][-1] == rank - 1:
            groups[-1].append(rank)
        else:
            groups.append([rank])
    return ",".join(f"{g[0]}-{g[-1]}" if len(g) > 1 else str(g[0]) for g in groups)


def shorten(text: str, width: int) -> str:
    """Shorten a text, as a list of names, to ``width`` characters.

    >>> shorten("1,3,5", 5), shorten("1,3,5,7,9", 6), shorten("causal", 5)
    ('1,3,5', '1,3,5…', 'caus…')
    """
    return text if len(text) <= width else text[: width - 1].rstrip(",") + "…"
