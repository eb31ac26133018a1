"""How a 64-bit address tells its space, and its tensor.

Bits 47 to 58 of a global address number the region of memory, from 1, that the address was derived from: one
that leaves its tensor is seen though it lands in another one. 0 is an address that came out of memory.
"""

REGION_SHIFT = 47
REGION_MASK = 0xFFF
PLACE_MASK = (1 << REGION_SHIFT) - 1  # of the address within the process
SHARED, PARAMETER, LOCAL = 1 << 59, 1 << 60, 1 << 61


def tagged(address: int, region: int) -> int:
    """An address in the region of a number."""
    return address | (region + 1) << REGION_SHIFT
