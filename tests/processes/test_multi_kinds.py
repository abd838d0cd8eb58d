"""All kinds of environments, policies and collectors, in workers of their own."""

import functools
import multiprocessing
import os
import sys
import types
import warnings

import gymnasium as gym
import pytest
import rig
import torch
from tensordict import LazyStackedTensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from gleanrl import (
    Collector,
    EnvCreator,
    GymEnv,
    MultiAsyncCollector,
    MultiSyncCollector,
    SerialEnv,
)


def both_backends(envs, policy=None, batches=2, **options):
    """Return what processes and inline workers give under one seed."""
    found = []
    for backend in ("process", "inline"):
        with MultiSyncCollector(
            envs, policy, backend=backend, num_threads=1, **options
        ) as collector:
            collector.set_seed(3)
            found.append([collector.next().clone() for _ in range(batches)])
    for one, other in zip(*found, strict=True):
        assert one.shape == other.shape
        assert bool((one == other).all())
    return found[0]


# -- environments ----------------------------------------------------------------------------------


def shifted():
    from torchrl.envs import Compose, DoubleToFloat, ObservationNorm, TransformedEnv
    from torchrl.envs import GymEnv as TheirGymEnv

    env = TheirGymEnv("Pendulum-v1")
    norm = ObservationNorm(0.0, 1.0, in_keys=["observation"])
    return TransformedEnv(env, Compose(norm, DoubleToFloat()))


def vectorised():
    return gym.make_vec("CartPole-v1", 3, vectorization_mode="sync")


KINDS = {
    "id": ("CartPole-v1", 1),
    "GymEnv": (lambda: GymEnv("CartPole-v1"), 1),
    "SerialEnv": (lambda: SerialEnv(2, lambda: GymEnv("CartPole-v1")), 2),
    "EnvCreator": (EnvCreator(lambda: GymEnv("Pendulum-v1")), 1),
    "VectorEnv": (vectorised, 3),
    "partial": (functools.partial(gym.make, "CartPole-v1", max_episode_steps=5), 1),
    "TransformedEnv": (shifted, 1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_environments_of_all_kinds_in_workers(kind):
    env, count = KINDS[kind]
    batches = both_backends([env] * 2, frames_per_batch=16 * count)
    assert batches[0].numel() == 16 * count
    assert batches[0]["next", "reward"].shape == (*batches[0].shape, 1)
    assert batches[0].names[-1] == "time"


def wordy():
    from torchrl.testing.mocking_classes import CountingEnvWithString

    class Wordy(CountingEnvWithString):
        def get_random_string(self):
            return f"count {int(self.count)}" if hasattr(self, "count") else "nothing"

    return Wordy(max_steps=4)


@pytest.mark.parametrize("cat", [None, -1])
def test_data_without_a_layout_travel_with_the_reply(cat):
    def act(td):
        return td.set("action", torch.ones(1, dtype=torch.int32))

    with MultiSyncCollector(
        [wordy] * 2, act, frames_per_batch=12, total_frames=36, cat_results=cat
    ) as collector:
        for batch in collector:
            assert batch.shape == ((2, 6) if cat is None else (12,))
            flat = batch.reshape(-1)["next"]
            counts = flat["observation"].flatten().tolist()
            assert list(flat["string"]) == [f"count {int(count)}" for count in counts]
        assert collector.stats()["frames"] == 36


def test_ragged_data_of_workers_have_a_dimension_named_time():
    with MultiSyncCollector([rig.growing] * 2, frames_per_batch=8) as collector:
        batch = collector.next()
    assert isinstance(batch, LazyStackedTensorDict)
    assert batch.shape == (2, 4)
    assert batch.names == batch["next"].names == [None, "time"]


def test_ragged_data_asynchronously_beside_data_with_a_layout():
    envs = [rig.growing, lambda: GymEnv("CartPole-v1")]
    with MultiAsyncCollector(envs, frames_per_batch=6, total_frames=120) as collector:
        ragged = [isinstance(batch, LazyStackedTensorDict) for batch in collector]
    assert 0 < sum(ragged) < len(ragged) == 20


def test_models_in_environments_get_weights_of_their_own():
    policy = nn.Linear(3, 1)
    module = TensorDictModule(policy, in_keys=["observation"], out_keys=["action"])
    with MultiSyncCollector(
        [shifted] * 2, module, frames_per_batch=8, track_policy_version=True
    ) as collector:
        collector.next()
        loc, scale = torch.full((3,), 100.0), torch.ones(3)
        with torch.no_grad():
            policy.weight.fill_(0.0)
            policy.bias.fill_(0.25)
        found = collector.cascade_execute("env.transform[0].loc")
        assert [float(x.flatten()[0]) for x in found] == [0.0, 0.0]
        weights = {"loc": loc, "scale": scale}
        shapes = [tuple(x.shape) for x in found]
        weights = {k: v.expand(shapes[0]) if shapes[0] else v[0] for k, v in weights.items()}
        collector.update_policy_weights_(
            weights_dict={"policy": module, "env.transform[0]": weights}
        )
        batch = collector.next()
        assert batch["next", "observation"].min() > 80
        assert batch["action"].eq(0.25).all()
        assert batch["policy_version"].eq(1).all()
        collector.update_policy_weights_(
            {"loc": torch.zeros(shapes[0])}, model_id="env.transform[0]"
        )
        assert collector.next()["next", "observation"].min() < 80
        assert collector.stats()["policy_version"] == 2


# -- collectors in workers -------------------------------------------------------------------------


class Marked(Collector):
    """A collector of the user's."""

    def iterator(self):
        for batch in super().iterator():
            batch.set("mark", torch.full(batch.shape, 1 + self.worker_idx))
            yield batch


@pytest.mark.parametrize("how", ["subclass", "partial"])
def test_a_collector_of_the_users_runs_in_each_worker(how):
    policy = TensorDictModule(rig.Encoded(4), ["observation"], ["action", "seen"])
    cls = Marked if how == "subclass" else functools.partial(Marked, max_frames_per_traj=3)
    with MultiSyncCollector(
        [rig.counting(0), rig.counting(1)],
        policy,
        frames_per_batch=16,
        total_frames=64,
        collector_class=cls,
    ) as collector:
        ids = set()
        for number, batch in enumerate(collector):
            assert batch["mark"][:, 0].tolist() == [1, 2]
            assert batch["seen"].eq(number).all()
            steps = batch["next", "observation"][..., 1]
            assert steps[0].tolist() == list(range(8 * number + 1, 8 * number + 9))
            own = [set(row.flatten().tolist()) for row in batch["collector", "traj_ids"]]
            assert not own[0] & own[1]
            ids |= own[0] | own[1]
            policy.module.set(number + 1)
            collector.update_policy_weights_()
        assert number == 3
        assert len(ids) == 2 * (11 if how == "partial" else 7)
        assert collector.state_dict()["frames"] == 64


def test_weights_reach_workers_of_workers():
    policy = TensorDictModule(rig.Encoded(4), ["observation"], ["action", "seen"])
    inner = functools.partial(MultiSyncCollector, num_workers=2)
    before = rig.workers()
    with MultiAsyncCollector(
        [rig.counting(0), rig.counting(1)],
        policy,
        frames_per_batch=8,
        collector_class=inner,
    ) as collector:
        pids = rig.workers() - before
        seen = {0: [], 1: []}
        for number, batch in enumerate(collector, start=1):
            assert batch.shape == (2, 4)
            (value,) = batch["seen"].unique().tolist()
            seen[int(batch["observation"][0, 0, 0])].append(value)
            policy.module.set(number)
            collector.update_policy_weights_()
            if number == 30:
                break
        for values in seen.values():
            assert values == sorted(values)
        assert max(seen[0] + seen[1]) > 5
    rig.await_end(pids)


def test_everything_may_be_a_closure():
    scale = 3.0

    class Scaled(gym.RewardWrapper):
        def reward(self, reward):
            return scale * reward

    def act(observation):
        return torch.full(observation.shape[:-1], int(scale) % 2)

    started = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collector = MultiSyncCollector(
            [lambda: Scaled(gym.make("CartPole-v1"))] * 2,
            act,
            frames_per_batch=8,
            init_fn=lambda: started.append(1),
            postproc=lambda batch: batch.set("extra", batch["next", "reward"] * 2),
        )
    with collector:
        batch = collector.next()
    assert batch["extra"].eq(6.0).all()
    assert batch["action"].eq(1).all()
    assert started == []  # it ran in the workers


def test_what_the_script_of_a_spawned_process_defines_travels(monkeypatch):
    script = types.ModuleType("__mp_main__")  # as multiprocessing calls the script there
    exec("import gymnasium\ndef make():\n    return gymnasium.make('CartPole-v1')", vars(script))
    for name in ("__main__", "__mp_main__"):
        monkeypatch.setitem(sys.modules, name, script)
    with MultiSyncCollector([script.make] * 2, frames_per_batch=4) as collector:
        assert collector.next().shape == (2, 2)


def test_what_a_users_manager_shares_is_shared_with_workers():
    with multiprocessing.get_context("spawn").Manager() as manager:
        started = manager.list()

        def make():
            started.append(os.getpid())
            return gym.make("CartPole-v1")

        with MultiSyncCollector([make] * 2, frames_per_batch=4) as collector:
            collector.next()
        pids = set(started)
    assert len(pids) == 2
    assert os.getpid() not in pids
