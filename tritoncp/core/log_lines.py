"""Loggers of the package, one for each area, and log lines about decisions.

    tritoncp.plan      plans: order of the tokens, schedule, reason, balance of work
    tritoncp.engine    engines: which one, and the route of the forward pass
    tritoncp.cache     look-ups in caches: hit or miss
    tritoncp.tiles     tile shapes: their files, and the tiles of each kernel
    tritoncp.ranks     calls that failed and closed their group
    tritoncp.chunking  regions of a training graph that were cut
    tritoncp.messages  bytes that reshard, roll and unshard send

A decision is logged at INFO when it is new in this process, later at DEBUG. A message begins with the rank of
the process if there are several.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable

from tritoncp.core.bounded_cache import BoundedCache

MAX_DECISIONS = 4096
_LOGGED: BoundedCache[Hashable, bool] = BoundedCache(MAX_DECISIONS)  # decisions already logged at INFO
_rank_name: Callable[[], str] = str  # names the rank of this process; "" if it has none


def name_rank_by(function: Callable[[], str]) -> None:
    """Set the function that returns the name of this process's rank, with which messages begin."""
    global _rank_name
    _rank_name = function


def is_first_rank() -> bool:
    """Return whether this process is rank 0, or the only one. Before torch.distributed is initialized the
    rank is that of the launcher, as torchrun sets it."""
    return (_rank_name() or f"rank {os.environ.get('RANK', '0')} ").startswith("rank 0 ")


def _add_rank(record: logging.LogRecord) -> bool:
    """Prepend the rank to a record's message."""
    if rank := _rank_name():
        record.msg = f"{rank}: {record.msg}"
    return True


def area_logger(area: str) -> logging.Logger:
    """Return the logger ``tritoncp.<area>``."""
    log = logging.getLogger(f"tritoncp.{area}")
    if _add_rank not in log.filters:
        log.addFilter(_add_rank)
    return log


def log_decision(log: logging.Logger, message: str, *values: object) -> None:
    """Log a line at INFO if it is new in this process, else at DEBUG."""
    if not log.isEnabledFor(logging.INFO):
        return
    line = log.name, message, values
    if _LOGGED.get(line) is None:
        _LOGGED.put(line, True)
        log.info(message, *values, stacklevel=2)
    else:
        log.debug(message, *values, stacklevel=2)
