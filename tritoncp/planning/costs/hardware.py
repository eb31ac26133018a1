"""Attained rates of GPUs and their interconnects, of which times are predicted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """Attained rates of a GPU and its interconnect.

    flops: of attention in 16 bits, per second; bandwidth: bytes that a rank sends per second; latency:
    seconds per message; scattered: share of the bandwidth that an all-to-all of many pieces attains; memory:
    bytes of the device's memory read and written per second."""

    name: str
    flops: float
    bandwidth: float
    latency: float
    scattered: float
    source: str
    memory: float = 2.4e12  # of an H100 or H200, by datasheets 3.35e12 and 4.8e12


NVLINK = Hardware("H100/H200, NVLink", 5.0e14, 4.0e11, 1.0e-5, 0.7, "datasheets, half of the peak FLOPs")
NETWORK = Hardware("H100/H200, 400 Gb/s", 5.0e14, 4.5e10, 2.0e-5, 0.7, "datasheets, half of the peak FLOPs")


def hardware_of(world_size: int) -> Hardware:
    """Return the assumed hardware: NVLink for up to eight ranks, the network beyond.

    >>> hardware_of(8) is NVLINK, hardware_of(9) is NETWORK
    (True, True)
    """
    return NVLINK if world_size <= 8 else NETWORK
