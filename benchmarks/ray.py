"""Ray: ``python -m benchmarks.ray [--only CASE ...] [--rounds N] [--seconds S]``.

Two kinds of cases. ``object-*``: a source that does nothing, so that what remains is the transport;
against a bare actor that returns as many bytes (of one array that never changes, and read-only for
who gets them), and `ray.get`. ``cartpole-*``: frames per second, against TorchRL's RayCollector and
RLlib's EnvRunnerGroup.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.__main__ import THREADS

ENVS, STEPS, ACTORS = 16, 64, 2
SIZES = {"100KB": 100 * 2**10, "1MB": 2**20, "16MB": 2**24, "64MB": 2**26}
KINDS = ("sync", "async", "stack")
OVERHEAD = 1.2
"""What a batch may cost, in units of `ray.get` of as many bytes."""


class Idle:
    """A source of ``size`` bytes per step whose rollouts are whatever lies in memory."""

    def __init__(self, size: int, worker: int) -> None:
        self._size = size

    def layout(self) -> Any:
        import torch

        from gleanrl.core.layout import Field, Layout

        return Layout((1,), (Field(("observation",), (self._size,), torch.uint8),))

    def collect(self, window: Any, steps: int, stop: Any, random: bool) -> Any:
        from gleanrl.core.messages import Report

        return Report(steps, steps, 0)

    def place(self, base: int, stride: int) -> None:
        """Nothing has a number here."""

    def close(self) -> None:
        """Nothing is open."""


class OurObjects:
    """Batches of one rollout of ``size`` bytes."""

    def __init__(self, size: int, kind: str) -> None:
        import functools

        from gleanrl.core.options import FrameBudget
        from gleanrl.engine.batches import BatchOptions
        from gleanrl.engine.engine import Engine
        from gleanrl.transport.ray import RayBackend

        actors = 1 if kind == "sync" else ACTORS
        options = [{"num_cpus": 0}] * actors
        self._engine = Engine(
            lambda windows: RayBackend(windows, options=options),
            [functools.partial(Idle, size)] * actors,
        )
        self._budget = self._engine.plan(
            FrameBudget(frames_per_batch=1 if kind == "async" else actors, total_frames=None),
            [1] * actors,
            BatchOptions(stacked=kind == "stack", single=kind == "async"),
        )
        self._batch: Any = None

    def collect_batch(self) -> int:
        self._batch, _ = self._engine.collect(self._budget, None)
        return int(self._batch.numel())

    def fields(self) -> Mapping[str, Any]:
        return {}

    def close(self) -> None:
        self._batch = None
        self._engine.close(5.0)


class RawStack:
    """Two bare actors whose arrays are copied into one, as who learns from both has to."""

    def __init__(self, size: int) -> None:
        import numpy as np

        self._one = [RawObjects(size, "sync") for _ in range(ACTORS)]
        self._whole = np.empty((ACTORS, size), np.uint8)

    def collect_batch(self) -> int:
        for one in self._one:
            one.ask()
        for row, one in zip(self._whole, self._one, strict=True):
            row[:] = one.take()
        return ACTORS

    def fields(self) -> Mapping[str, Any]:
        return {}

    def close(self) -> None:
        for one in self._one:
            one.close()


class RawObjects:
    """A bare actor that returns the same array again and again; `ray.get`, and nothing else."""

    def __init__(self, size: int, kind: str, copy: bool = False) -> None:
        import numpy as np

        import ray

        class Bare:
            def __init__(self, size: int) -> None:
                self._array = np.ones(size, np.uint8)

            def get(self) -> Any:
                return self._array

        actors = 1 if kind == "sync" else ACTORS
        made: Any = ray.remote(num_cpus=0)(Bare)
        self._ray: Any = ray
        self._actors = [made.remote(size) for _ in range(actors)]
        self._copy = np.empty(size, np.uint8) if copy else None
        self._depth = 1 if kind == "sync" else 2
        self._under_way: dict[Any, Any] = {}
        self._value: Any = None

    def ask(self) -> None:
        """Ask every actor for as many arrays as are to be under way."""
        for actor in self._actors * self._depth:
            self._under_way[actor.get.remote()] = actor

    def take(self) -> Any:
        """Wait for an array, of whichever actor."""
        self.collect_batch()
        return self._value

    def collect_batch(self) -> int:
        if not self._under_way:
            self.ask()
        ready, _ = self._ray.wait(list(self._under_way), num_returns=1)
        self._value = self._ray.get(ready[0])
        if self._copy is not None:
            self._copy[:] = self._value
        actor = self._under_way.pop(ready[0])
        if self._depth > 1:
            self._under_way[actor.get.remote()] = actor
        return 1

    def fields(self) -> Mapping[str, Any]:
        return {}

    def close(self) -> None:
        self._value = None
        for actor in self._actors:
            self._ray.kill(actor)


def objects(kind: str, name: str) -> Any:
    """How much a batch costs beyond the transport of its bytes."""
    from benchmarks.harness import Case, Reference

    size = SIZES[name]
    if kind == "stack":
        return Case(
            f"object-{name}-stack",
            f"batches of {ACTORS} x {name}, one of each actor, stacked; arrays per second",
            lambda: OurObjects(size, kind),
            [Reference("ray.get and stack", lambda: RawStack(size), 1 / OVERHEAD)],
        )
    what = "one actor, one at a time" if kind == "sync" else f"{ACTORS} actors, two ahead of each"
    return Case(
        f"object-{name}-{kind}",
        f"batches of {name}, {what}; batches per second",
        lambda: OurObjects(size, kind),
        [
            Reference("ray.get", lambda: RawObjects(size, kind), 1 / OVERHEAD),
            Reference("ray.get and copy", lambda: RawObjects(size, kind, copy=True)),
        ],
    )


class Rllib:
    """RLlib's environment runners, each with a vector of environments, asked all at once."""

    def __init__(self, steps: int) -> None:
        try:
            from ray.rllib.algorithms.ppo import PPOConfig
            from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
            from ray.rllib.env.env_runner_group import EnvRunnerGroup
        except ImportError as err:
            from benchmarks.harness import Skip

            raise Skip(f"RLlib: {err}") from err
        config: Any = (
            PPOConfig()
            .environment("CartPole-v1")
            .env_runners(
                num_env_runners=ACTORS,
                num_envs_per_env_runner=ENVS,
                num_cpus_per_env_runner=1,
                rollout_fragment_length=steps,
            )
            .rl_module(
                model_config=DefaultModelConfig(fcnet_hiddens=[64, 64], fcnet_activation="tanh")
            )
        )
        self._group: Any = EnvRunnerGroup(config=config, local_env_runner=False)
        self._frames = steps * ENVS

    def collect_batch(self) -> int:
        frames = self._frames
        found = self._group.foreach_env_runner(
            lambda runner: runner.sample(num_timesteps=frames), local_env_runner=False
        )
        return sum(len(episode) for episodes in found for episode in episodes)

    def fields(self) -> Mapping[str, Any]:
        return {}

    def close(self) -> None:
        self._group.stop()


def _ours(kind: str, policy: Any) -> Any:
    from benchmarks.multi.cases import Seeds
    from benchmarks.multi.collectors import Batches, quiet_worker
    from gleanrl import RayCollector

    return Batches(
        RayCollector(
            [Seeds(ENVS * worker) for worker in range(ACTORS)],
            policy,
            frames_per_batch=ENVS * STEPS * (ACTORS if kind == "sync" else 1),
            total_frames=-1,
            sync=kind == "sync",
            num_envs=ENVS,
            init_fn=quiet_worker,
        )
    )


def _torchrl(kind: str, policy: Any) -> Any:
    from torchrl.collectors.distributed import RayCollector

    from benchmarks import envs
    from benchmarks.multi.collectors import Batches, quiet_serial
    from benchmarks.peers import TORCHRL_SHORTCUTS

    factories = envs.seeded(envs.cartpole, ACTORS * ENVS)

    return Batches(
        RayCollector(
            [quiet_serial(factories[ENVS * n : ENVS * (n + 1)]) for n in range(ACTORS)],
            policy,
            frames_per_batch=ENVS * STEPS * (ACTORS if kind == "sync" else 1),
            total_frames=1 << 40,
            sync=kind == "sync",
            remote_configs={"num_cpus": 1, "num_gpus": 0},
            collector_kwargs=dict(TORCHRL_SHORTCUTS),
        )
    )


def cartpole(kind: str) -> Any:
    """Frames per second of two actors with sixteen environments each."""
    from benchmarks import policies
    from benchmarks.harness import Case, Reference, in_process
    from benchmarks.multi.check import RealBatches

    net = policies.mlp(4, 2)
    policy = policies.categorical_policy(net)
    references = [Reference("TorchRL RayCollector", lambda: _torchrl(kind, policy), 5.0)]
    if kind == "sync":
        references.append(Reference("RLlib EnvRunnerGroup", lambda: Rllib(STEPS), 1.0))
    return Case(
        f"cartpole-{kind}",
        f"CartPole-v1 x16 in each of {ACTORS} actors, 64-64 MLP, {kind}; frames per second",
        lambda: _ours(kind, policy),
        references,
        check=RealBatches(net, ACTORS * ENVS, STEPS, ACTORS, in_process),
    )


def main() -> int:
    """Run the cases; one thread per process for everybody."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ray", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="CASE", help="parts of names")
    parser.add_argument("--rounds", type=int, default=7, help="windows per system (7)")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a window (1.0)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/ray"), metavar="DIR")
    options = parser.parse_args()
    for name in THREADS:
        os.environ[name] = "1"
    # Actors import what they run from here.
    here = str(Path(__file__).parent.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    warnings.simplefilter("ignore")
    import torch
    from rich.console import Console

    import ray
    from benchmarks import report
    from benchmarks.harness import run_case

    torch.set_num_threads(1)
    everything = [
        *((f"object-{n}-{k}", lambda k=k, n=n: objects(k, n)) for n in SIZES for k in KINDS),
        *((f"cartpole-{k}", lambda k=k: cartpole(k)) for k in ("sync", "async")),
    ]
    chosen = [
        make
        for name, make in everything
        if not options.only or any(o in name for o in options.only)
    ]
    store = 2 * 10**9
    ray.init(
        num_cpus=8,
        object_store_memory=store,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    console = Console(width=130)
    settings = {"rounds": options.rounds, "seconds": options.seconds}
    results: list[Any] = []
    for make in chosen:
        results.append(run_case(make(), options.rounds, options.seconds))
        report.show(report.document(results[-1:], settings, None), console)
    doc: dict[str, Any] = report.document(results, settings, None)
    for path in report.save(doc, options.out):
        console.print(f"wrote {path}")
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
