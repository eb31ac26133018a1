"""Stand-ins: a device whose times are a formula, a compiler with scripted reports, a counter as a clock."""

from dataclasses import replace

import torch
from click.testing import Result

from tests import command_process
from tritoncp.kernels.tile_rules import default
from tritoncp.perf.problem import Problem
from tritoncp.tuning.journal import TuningJournal
from tritoncp.tuning.search import Tuner
from tritoncp.tuning.targets import Target

TARGET = Target("forward", Problem("causal", 4096, 32, 8))
RULE = default("forward", "sm_90", 128, torch.bfloat16)
BEST = replace(RULE, num_stages=3)
CONDITIONS = {"device": "formula"}


def invoke(*words) -> Result:
    """Run `tritoncp autotune`."""
    return command_process.invoke("autotune", *words)


def cost(config):
    """BEST takes 0.8, the rule 1.0, all others more."""
    return 0.8 if config == BEST else 1.0 if config == RULE else 1.1 + 0.001 * config.BLOCK_N


class Formula:
    """Milliseconds of a config: its cost, times a drift common to all configs; wrong answers by request, and
    Ctrl-C at the ``interrupt``-th sample."""

    def __init__(self, cost, wrong=(), drift=0.001) -> None:
        self.cost, self.bad, self.drift, self.interrupt = cost, set(wrong), drift, None
        self.samples, self.checks = [], []

    def wrong(self, target, config):
        self.checks.append(config)
        return "out is off" if config in self.bad else None

    def milliseconds(self, target, config):
        self.samples.append(config)
        if len(self.samples) == self.interrupt:
            raise KeyboardInterrupt
        return self.cost(config) * (1 + self.drift * len(self.samples))  # the device warms up


class Compiler:
    """Reports by formula; counts the jobs."""

    def __init__(self, **by_stages) -> None:
        self.asked, self.steps, self.by_stages = [], [], by_stages

    def __call__(self, jobs):
        for job in jobs:
            (self.steps if job.variant else self.asked).append(job.config)
            row = {"registers": 128, "spill_bytes": 0, "shared_bytes": 1000, "tma": 0}
            yield job, row | self.by_stages.get(f"s{job.config.num_stages}", {})


class Ticks:
    """A clock that advances by a fixed number of seconds at every reading."""

    def __init__(self, step=0.0) -> None:
        self.time, self.step = 0.0, step

    def __call__(self):
        self.time += self.step
        return self.time


def tuner(path, compiler=None, resume=False, deadline=1e9, now=None, choices=None):
    """A tuner with a journal in ``path``; ``choices``: a dict that gets each target's choice."""
    keep = choices.__setitem__ if choices is not None else lambda target, choice: None
    journal = TuningJournal(path / "journal.jsonl", CONDITIONS, resume)
    return Tuner("sm_90", journal, compiler or Compiler(), deadline, keep, now or Ticks())
