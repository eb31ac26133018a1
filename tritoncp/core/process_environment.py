"""Environment of a process: interpreted kernels, torchrun's ranks, gloo's interface."""

import os
import socket

import torch


def interpret_without_gpu() -> None:
    """Set TRITON_INTERPRET=1 if there is no GPU. Call it before Triton is imported."""
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


def torchrun_world_size() -> int | None:
    """Return the number of ranks that torchrun started, None if it did not start this process."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else None


def use_loopback_interface() -> None:
    """Set gloo's interface to the loopback, for ranks on one machine. By default gloo resolves the host name,
    which fails in many containers."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
