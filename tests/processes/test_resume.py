"""The law of exact resume: after a load, batches are those of the run that was not interrupted."""

import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from resume_rig import (
    AFTER,
    BEFORE,
    ENVS,
    VECTOR,
    Numbers,
    Odd,
    Walk,
    check_each_frame_once,
    check_law,
    make,
    policy_of,
    same,
    take,
    through_a_file,
    wrapped_cartpole,
)
from tests.covering import ALL

from gleanrl import ReplayBuffer
from gleanrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from gleanrl.data import LazyTensorStorage
from gleanrl.envs import ParallelEnv, SerialEnv

CASES = [
    (kind, where)
    for kind in ENVS
    for where in ("one", "sync", "central")
    if not (kind in VECTOR and where == "central")
    if ALL or where == "one" or (kind, where) in {("next_step", "sync"), ("mujoco", "central")}
]


@pytest.mark.parametrize(("kind", "where"), CASES)
def test_batches_continue_bit_for_bit(kind, where):
    check_law(lambda: make(kind, where))


@pytest.mark.parametrize("where", ["one", "sync", "central"])
def test_recurrent_states_continue(where):
    check_law(lambda: make("walk", where, recurrent=True))


SETTINGS = {
    "whole trajectories": ("sync", {"trajs_per_batch": 5}),
    "equal quotas": ("one", {"trajs_per_batch": 4, "traj_quota": "equal"}),
    "random frames": ("one", {"init_random_frames": 250}),
    "cut episodes": ("one", {"max_frames_per_traj": 11}),
    "TensorDicts": ("one", {"fast": False}),
    "TensorDicts in workers": ("central", {"fast": False}),
    "groups": ("central", {"env_groups": 2}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_continue(name):
    where, kwargs = SETTINGS[name]
    check_law(lambda: make("wrappers", where, **kwargs))


def test_a_pool_continues_with_steps_that_were_left_over():
    check_law(lambda: make("next_step", steps=19, max_frames_per_traj=11, init_random_frames=200))


@pytest.mark.covering
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])
def test_environments_in_environments_continue(kind, fast):
    check_law(lambda: Collector(lambda: kind(2, Walk), frames_per_batch=40, fast=fast))


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_transforms_of_torchrl_continue(fast, inside):
    from torchrl.envs import (
        CatFrames,
        Compose,
        GymEnv,
        RewardSum,
        SerialEnv,
        StepCounter,
        TransformedEnv,
        VecNormV2,
    )

    def member():
        frames = CatFrames(3, -1, in_keys=["observation"])
        norm = [] if inside else [VecNormV2(in_keys=["observation"])]
        chain = Compose(*norm, frames, RewardSum(), StepCounter(13))
        return TransformedEnv(GymEnv("CartPole-v1"), chain)

    def env():
        return SerialEnv(2, member) if inside else member()

    check_law(lambda: Collector(env, frames_per_batch=40, fast=fast))


def test_a_new_process_continues(tmp_path):
    with make("wrappers", "sync") as collector:
        collector.set_seed(7)
        take(collector, BEFORE)
        torch.save(collector.state_dict(), tmp_path / "state.pt")
        torch.save([batch.to_dict() for batch in take(collector, AFTER)], tmp_path / "expected.pt")
    script = (
        "import sys, torch, resume_rig as t\n"
        "from tensordict import TensorDict\n"
        "if __name__ == '__main__':\n"
        "    with t.make('wrappers', 'sync') as collector:\n"
        f"        collector.load_state_dict(torch.load('{tmp_path}/state.pt'))\n"
        f"        found = t.take(collector, {AFTER})\n"
        f"    expected = map(TensorDict, torch.load('{tmp_path}/expected.pt'))\n"
        "    print(all(t.same(a, b.auto_batch_size_()) for a, b in zip(found, expected)))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.stdout.strip() == "True", result.stderr


# -- asynchronously, each frame once ---------------------------------------------------------------


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"inference": "central"}, {"inference": "central", "policy_process": False}],
    ids=["workers", "central", "central_here"],
)
def test_asynchronous_collectors_deliver_each_frame_once(kwargs):
    def counts(tensordict):
        """Count the calls for each environment, which are the numbers that it observes."""
        calls = tensordict.get("_calls", torch.zeros(tensordict.shape))
        assert torch.equal(calls, tensordict["observation"][..., 0])
        return tensordict.set("_calls", calls + 1).set("action", calls.long() * 0)

    def build():
        return MultiAsyncCollector(Numbers, counts, num_workers=2, frames_per_batch=10, **kwargs)

    check_each_frame_once(build)


def test_workers_that_fill_a_buffer_keep_their_trajectories():
    def build(buffer):
        return MultiSyncCollector(
            wrapped_cartpole,
            policy_of("wrappers"),
            num_workers=2,
            num_envs=2,
            frames_per_batch=40,
            replay_buffer=buffer,
            extend_buffer=True,
            trajs_per_batch=1,
        )

    def fill(collector, count):
        for _ in range(count):
            collector.next()

    def by_trajectory(rows):
        return rows[rows["collector", "traj_ids"].argsort(stable=True)]

    whole, rest = (ReplayBuffer(storage=LazyTensorStorage(10_000)) for _ in range(2))
    with build(whole) as collector:
        collector.set_seed(7)
        fill(collector, 4)
        state, before = through_a_file(collector.state_dict()), len(whole)
        fill(collector, 4)
    with build(rest) as collector:
        collector.load_state_dict(state)
        fill(collector, 4)
    assert same(by_trajectory(rest[:]), by_trajectory(whole[before:]))


class Ticks(gym.Env):
    """Draws nothing, so it has no generator before it is seeded."""

    observation_space = gym.spaces.Box(0, 99, (1,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = np.zeros(1, np.float32)
        return self.steps, {}

    def step(self, action):
        self.steps = self.steps + 1
        return self.steps, 0.0, False, False, {}


def test_a_load_leaves_an_environment_its_spec():
    with Collector("CartPole-v1", frames_per_batch=4) as collector:
        collector.next()
        collector.load_state_dict(collector.state_dict())
        assert collector.env.unwrapped.spec.id == "CartPole-v1"


def test_a_state_from_before_the_seed_continues_episodes():
    with Collector(Ticks, frames_per_batch=4) as collector:
        collector.next()
        state = collector.state_dict()
        collector.set_seed(0)
        collector.next()
        collector.load_state_dict(state)
        assert collector.next()["observation"].flatten().tolist() == [4, 5, 6, 7]


# -- what cannot continue --------------------------------------------------------------------------


def test_environments_that_cannot_continue_are_named_once():
    def build():
        env = gym.vector.AsyncVectorEnv([lambda: gym.make("CartPole-v1")] * 2)
        return Collector(env, frames_per_batch=20)

    with build() as collector:
        take(collector, 1)
        state = through_a_file(collector.state_dict())
    with build() as other:
        with pytest.warns(UserWarning, match="all environments begin new episodes: env") as caught:
            other.load_state_dict(state)
        assert len(caught) == 1
        assert (other.next()["collector", "traj_ids"][:, 0] >= 2).all()


def test_a_part_that_needs_pickle_is_named():
    with Collector(Odd, frames_per_batch=20) as collector, Collector(Odd, frames_per_batch=20) as o:
        take(collector, 1)
        state, pickled = collector.state_dict(), collector.state_dict(allow_pickle=True)
        expected = collector.next().clone()
        with pytest.warns(UserWarning, match=r"env\[0\].when .*complex.*allow_pickle=True"):
            o.load_state_dict(state)
        with pytest.warns(UserWarning, match=r"env\[0\].when was pickled"):
            o.load_state_dict(pickled)
        o.load_state_dict(pickled, allow_pickle=True)
        assert torch.equal(o.next()["observation"][0], expected["observation"][0])
