"""Journals of `tritoncp autotune` with times from a formula, changes of their lines, and shipped entries."""

import json
from dataclasses import replace

import torch

from tests.tuning.stand_ins import Compiler, Formula
from tritoncp.kernels.tile_rules import default
from tritoncp.ops import tile_tables
from tritoncp.planning.problem import Problem
from tritoncp.tuning.journal import Journal
from tritoncp.tuning.search import Tuner
from tritoncp.tuning.targets import Target

H200 = tile_tables.Device("sm_90", "NVIDIA H200")
TARGET = Target("forward", Problem("causal", 4096, 32, 8))
SCORED = Target("dq", Problem("causal", 4096, 128, 128, 192, score="softcap"))
RULES = {t: default(t.kernel, "sm_90", t.problem.dim, torch.bfloat16) for t in (TARGET, SCORED)}
ABOUT = {"device": H200.name, "arch": H200.arch, "triton": "3.6.0", "code": "abc"}


def best_of(target):
    return replace(RULES[target], num_stages=4)


def cost(config):
    if config in map(best_of, RULES):
        return 0.8
    return 1.0 if config in RULES.values() else 1.5 + config.BLOCK_N / 1e3


def journal_of(gpu):
    return tile_tables.path_in(gpu / "configs", H200, "3.6.0").with_suffix(".jsonl")


def tune(gpu, bench=None, targets=(TARGET, SCORED), **facts):
    journal = Journal(journal_of(gpu), ABOUT | facts, resume=False)
    tuner = Tuner("sm_90", journal, Compiler(), 1e9, now=lambda: 0.0)
    chosen = tuner.run(targets, bench or Formula(cost))
    journal.close()
    return chosen


def shipped(configs, device=H200):
    tile_tables.forget()
    path = tile_tables.path_in(configs, device, "3.6.0")
    return (
        {tile_tables.entry_key(entry): entry for entry in tile_tables.entries_of(path)}
        if path.exists()
        else {}
    )


def edited(path, change):
    """Rewrite a file by ``change``, which maps the JSON of a line to another line, or None to drop it."""
    lines = [change(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text(
        "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines if line)
    )


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def change_lines(stage, change):
    """Return a change of the lines of a stage: new values of fields, or None to drop the lines."""
    return lambda line: line if line["stage"] != stage else None if change is None else line | change


def change_best(stage, result):
    """Return a change of the results of the winning config."""

    def change(line):
        is_best = line["stage"] == stage and line["config"] == vars(best_of(TARGET))
        return line | {"found": result} if is_best else line

    return change
