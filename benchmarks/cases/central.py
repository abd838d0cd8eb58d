"""Central inference on a stand-in for an accelerator.

A call of the policy takes 3 ms and 20 us per row, in one place: calls wait for each other, from
whichever processes they come. A step of an environment takes 1.1 ms. Neither needs the processor,
so that the cores of this machine do not decide the result.
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from benchmarks.cases import pixels
from benchmarks.harness import Case, Reference, System
from benchmarks.systems import ours

WORKERS = 8
STEPS = 16
"""Steps per environment and rollout."""
CALL_S, ROW_S, STEP_S = 3e-3, 20e-6, 1.1e-3
_made = itertools.count()
_SLACK = 29
"""The number of ``PR_SET_TIMERSLACK``: by default, Linux ends each sleep 50 us late."""


def all_cases() -> list[Case]:
    """Return a case per number of environments."""
    cases = [accelerator(64, groups=2), accelerator(16, groups=1), any_of_many()]
    return [*cases, *pixels.all_cases()]


def accelerator(envs: int, groups: int) -> Case:
    """Return the case of ``envs`` environments, which GleanRL deals out to ``groups``."""
    return Case(
        f"accelerator-{envs}",
        f"{envs} environments of 1.1 ms in {WORKERS} workers, stand-in accelerator, "
        f"env_groups={groups}",
        partial(central, envs, groups),
        [
            Reference("the best schedule", partial(best_schedule, envs), 0.9),
            Reference("GleanRL, asynchronous", partial(asynchronous, envs, groups)),
            Reference("GleanRL, inference='workers'", partial(with_copies, envs)),
            Reference("TorchRL AsyncBatchedCollector", partial(torchrl, envs), 2.4),
        ],
        stopped=True,
    )


def any_of_many() -> Case:
    """Return the case of 16 environments of which one is 20 times slower than the others."""
    return Case(
        "any-of-many",
        "16 environments of 1.1 ms in 16 workers, one of them 20 times slower, asynchronous",
        partial(uneven, 1),
        [
            Reference("15 environments without the slow one", partial(uneven, 0), 0.9),
            Reference("GleanRL, synchronous", synchronous_uneven),
        ],
        stopped=True,
    )


class Simulator(gym.Env[Any, Any]):
    """Takes its time."""

    observation_space = gym.spaces.Box(-1, 1, (8,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, step_s: float = STEP_S) -> None:
        self._step_s = step_s

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        sleep_exactly()
        return np.zeros(8, np.float32), {}

    def step(self, action: Any) -> Any:
        time.sleep(self._step_s)
        return np.full(8, 0.5, np.float32), 1.0, False, False, {}


class Accelerator(nn.Module):
    """Acts as a device would: a call after the other."""

    def __init__(self) -> None:
        super().__init__()
        # One for each system: a process that is stopped in a call keeps its lock.
        self._path = Path(tempfile.gettempdir()) / f"stand-in-{os.getpid()}-{next(_made)}"
        self._lock: Any = None

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        if self._lock is None:
            sleep_exactly()
            self._lock = self._path.open("w")
        rows = observation.shape[:-1]
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        time.sleep(CALL_S + ROW_S * rows.numel())
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        return torch.zeros(rows, dtype=torch.int64)


def policy() -> TensorDictModule:
    """Return the policy."""
    return TensorDictModule(Accelerator(), ["observation"], ["action"])


def sleep_exactly() -> None:
    """Have sleeps of this thread end in time."""
    ctypes.CDLL(None).prctl(_SLACK, 1, 0, 0, 0)


def best_schedule(envs: int) -> System:
    """Return the rate of the best schedule for workers that step their environments in turn.

    Either one call acts in all environments and then all step; or one half steps while the policy
    acts in the other.
    """
    step = STEP_S * envs / WORKERS
    at_once = CALL_S + ROW_S * envs + step
    halves = 2 * max(CALL_S + ROW_S * envs / 2, step / 2)
    seconds = min(at_once, halves)

    def collect() -> int:
        end = time.perf_counter() + STEPS * seconds
        time.sleep(STEPS * seconds - 1e-3)
        while time.perf_counter() < end:
            pass
        return STEPS * envs

    return System(collect)


def central(envs: int, groups: int) -> ours.Batches:
    """Return our collector with central inference."""
    return _multi(envs, inference="central", env_groups=groups)


def asynchronous(envs: int, groups: int) -> ours.Batches:
    """Return our collector whose workers go on at their own pace."""
    return _central_async([Simulator] * WORKERS, envs // WORKERS, env_groups=groups)


def uneven(slow: int) -> ours.Batches:
    """Return our asynchronous collector over 15 environments and ``slow`` slow ones."""
    return _central_async([Simulator] * 15 + [partial(Simulator, 20 * STEP_S)] * slow, 1)


def synchronous_uneven() -> ours.Batches:
    """Return our synchronous collector over 15 environments and a slow one."""
    return _multi(16, [Simulator] * 15 + [partial(Simulator, 20 * STEP_S)], inference="central")


def _central_async(workers: list[Any], each: int, **options: Any) -> ours.Batches:
    from gleanrl import MultiAsyncCollector

    return ours.Batches(
        MultiAsyncCollector(
            workers,
            policy(),
            num_envs=each,
            frames_per_batch=STEPS * each * len(workers),
            transition_chunk_size=STEPS,
            total_frames=-1,
            inference="central",
            **options,
        )
    )


def with_copies(envs: int) -> ours.Batches:
    """Return our collector whose workers have copies of the policy."""
    return _multi(envs)


def _multi(envs: int, workers: list[Any] | None = None, **options: Any) -> ours.Batches:
    from gleanrl import MultiSyncCollector

    workers = workers or [Simulator] * WORKERS
    return ours.Batches(
        MultiSyncCollector(
            workers,
            policy(),
            num_envs=envs // len(workers),
            frames_per_batch=STEPS * envs,
            total_frames=-1,
            **options,
        )
    )


def torchrl(envs: int) -> System:
    """Return TorchRL's with a process for each environment, which its process slots ask for."""
    from torchrl.collectors import AsyncBatchedCollector
    from torchrl.envs import GymWrapper

    collector = AsyncBatchedCollector(
        [lambda: GymWrapper(Simulator(), categorical_action_encoding=True)] * envs,
        policy_factory=policy,
        frames_per_batch=STEPS * envs,
        total_frames=-1,
        env_backend="multiprocessing",
        transport="auto",
        transition_chunk_size=64,
        max_batch_size=envs,
    )
    return ours.Batches(collector)
