"""Builds the collector of a case."""

from __future__ import annotations

import importlib
import os
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gleanrl
from gleanrl.collectors import weight_update
from tools.hunt.cases import GAMMA, N_STEPS, Case, collector_class, parameters_of
from tools.hunt.checks import checker_of
from tools.hunt.policies import make_policy
from tools.hunt.worlds import make_one, make_vector, start_counting


class Subclass(gleanrl.Collector):
    """A collector class of a user's own."""


def scaled(batch: Any) -> Any:
    """Add an entry that tells that the batch came by here."""
    rewards = [key for key in batch.keys(True, True) if key[-1] == "reward"]
    return batch.set("scaled", batch[rewards[0]] * 2)


def mark() -> None:
    """Run first in every worker."""
    os.environ["GLEANRL_HUNT"] = "1"


def draw_some() -> None:
    """Draw from the generators of the process."""
    torch.rand(3)
    np.random.randn()


def _hook(case: Case, batch: Any) -> None:
    """Check each frame of what a worker made."""
    checker = checker_of(case)
    # Workers have not heard which version is the newest, and `postproc` comes later.
    checker.newest, checker.n_steps = 2**20, 0
    checker.alone(batch)


@cache
def standin() -> Any:
    """Return the module of the test device, which is compiled at its first import."""
    sys.path.append(str(Path(__file__).parents[2] / "tests" / "device"))
    return importlib.import_module("standin")


def _read(case: Case, name: str, value: Any, policy: Any) -> Any:
    """Return the value of an argument from what a case says of it."""
    if name == "postproc":
        return scaled if value == "scaled" else gleanrl.MultiStep(GAMMA, N_STEPS)
    if name == "exploration_type":
        return gleanrl.ExplorationType[value]
    if name == "weight_sync_schemes":
        return {"policy": getattr(gleanrl, value)()}
    if value == "standin":
        return standin() and "standin"
    if name == "collector_class":
        return {"Collector": gleanrl.Collector, "Subclass": Subclass}.get(value, value)
    made: dict[str, Any] = {
        "weight_updater": lambda: weight_update.VanillaWeightUpdater(),
        "track_policy_version": lambda: value and gleanrl.PolicyVersion(),
        "pre_collect_hook": lambda: draw_some,
        "post_collect_hook": lambda: partial(_hook, case),
        "observation_dtype": lambda: torch.float32,
        "init_fn": lambda: mark,
        "interruptor": gleanrl.Interruptor,
        "policy_factory": lambda: partial(_policy_alone, case),
    }
    return made[name]() if name in made else value


def _policy_alone(case: Case) -> Any:
    return make_policy(case.policy, case.env)[0]


def _environments(case: Case, folder: Path | None, first: int) -> Any:
    """Return what the collector makes environments from, for workers from ``first`` on."""
    if case.pool:
        mode, _, kind = case.env.partition(" ")
        vector = partial(make_vector, first, mode, case.envs, case.draws, kind or "fresh")
        return partial(standin().make, vector) if "standin" in case.options.values() else vector()
    shared = None if folder is None else str(folder)
    workers = range(first, first + case.workers)
    makers = [partial(make_one, at, case.env, case.draws, shared) for at in workers]
    if "standin" in case.options.values():
        # What a worker is built from registers the device there.
        makers = [partial(standin().make, maker) for maker in makers]
    return makers[0] if case.backend == "here" or "num_workers" in case.options else makers


def build(case: Case, policy: Any, folder: Path, life: int, **more: Any) -> Any:
    """Build the collector of a case.

    Args:
        case: What to build.
        policy: What acts.
        folder: For files of the collectors of a case.
        life: How many collectors of the case were built before; environments have other numbers.
        more: Arguments beside those of the case.
    """
    options: dict[str, Any] = {
        "frames_per_batch": case.frames,
        "track_policy_version": True,
        "fast": case.fast,
        "total_frames": -1,
    }
    for name, value in case.options.items():
        options[name] = _read(case, name, value, policy)
    options |= more
    if options.pop("num_workers", None):
        options["num_workers"] = case.workers
    if options.get("logger"):
        options["logger"] = gleanrl.CSVLogger(folder / "log.csv")
    numbers = None
    if {"num_workers", "num_workers_per_collector"} & set(case.options):
        numbers = folder / "numbers"
        numbers.mkdir(exist_ok=True)
    if not case.pool:
        options["num_envs"] = case.envs
    start_counting()
    environments = _environments(case, numbers, life * case.workers)
    if options.pop("front_door", None):
        return _front_door(case, environments, policy, options)
    if case.backend == "nodes":
        options["launcher"] = "mp"
    return collector_class(case)(environments, policy, **options)


def _front_door(case: Case, environments: Any, policy: Any, options: dict[str, Any]) -> Any:
    """Build a collector with workers by the arguments of `Collector` that choose one."""
    own = parameters_of(gleanrl.Collector)
    theirs = {name: options.pop(name) for name in list(options) if name not in own}
    backend = options.pop("backend", None)
    if backend is not None:
        theirs["backend"] = backend
    return gleanrl.Collector(
        environments,
        policy,
        num_collectors=case.workers,
        sync=case.backend == "sync",
        backend_options=theirs,
        **options,
    )
