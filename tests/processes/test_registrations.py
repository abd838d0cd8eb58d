"""Environments that a user registered reach other processes, or the error says why not."""

import importlib
import subprocess
import sys
import textwrap
import threading

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from gleanrl import (
    Collector,
    ConfigError,
    EnvCreator,
    MultiSyncCollector,
    ParallelEnv,
    UnknownEnvError,
)
from gleanrl.envs import GymEnv

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Paying(gym.Env):
    """Pays what it was made with."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, pay=1.0):
        self.pay = pay

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), self.pay, False, False, {}


@pytest.fixture
def register(monkeypatch):
    """Register environments for one test."""
    monkeypatch.setattr(gym.envs.registration, "registry", {**gym.registry})
    monkeypatch.setattr(gym, "registry", gym.envs.registration.registry)
    monkeypatch.setattr(gym.envs, "registry", gym.envs.registration.registry, raising=False)
    return gym.register


def first_reward(collector):
    try:
        return float(next(iter(collector))["next", "reward"].flatten()[0])
    finally:
        collector.shutdown()


FRAMES = {"frames_per_batch": 4, "total_frames": 4}


def test_registered_callables_reach_workers(register):
    register("Paying-v0", entry_point=Paying, kwargs={"pay": 7.0}, max_episode_steps=3)
    assert first_reward(MultiSyncCollector(["Paying-v0"], None, **FRAMES)) == 7
    makes = [lambda: gym.make("Paying-v0", pay=8.0)]
    assert first_reward(MultiSyncCollector(makes, None, **FRAMES)) == 8
    with ParallelEnv(1, "Paying-v0") as env:
        assert env.rollout(2)["next", "reward"].flatten().tolist() == [7, 7]
    assert EnvCreator(lambda: GymEnv("Paying-v0")).meta_data.batch_size == ()


def test_registered_strings_and_changed_registrations_reach_workers(register):
    register("Mine-v0", entry_point="gymnasium.envs.classic_control:CartPoleEnv")
    assert first_reward(MultiSyncCollector(["Mine-v0"], None, **FRAMES)) == 1
    gym.registry.pop("CartPole-v1")
    register("CartPole-v1", entry_point=Paying, kwargs={"pay": 9.0})
    assert first_reward(MultiSyncCollector(["CartPole-v1"], None, **FRAMES)) == 9


def test_a_script_registers_what_its_workers_make(tmp_path, python):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import gymnasium as gym
            import numpy as np

            class Mine(gym.Env):
                observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
                action_space = gym.spaces.Discrete(2)
                def reset(self, *, seed=None, options=None):
                    return np.zeros(1, np.float32), {}
                def step(self, action):
                    return np.zeros(1, np.float32), 3.0, False, False, {}

            class Doubling(gym.RewardWrapper):
                def reward(self, reward):
                    return 2 * reward

            def vector(num_envs, **kwargs):
                return gym.vector.SyncVectorEnv([Mine] * num_envs)

            def main(**kwargs):  # workers' processes have a function of this name, too
                return Mine(**kwargs)

            gym.register("Mine-v0", entry_point=Mine)
            gym.register("mine/Text-v0", entry_point="__main__:main")
            gym.register("Doubled-v0", entry_point=Mine,
                         additional_wrappers=[Doubling.wrapper_spec()])
            gym.register("Vector-v0", vector_entry_point="__main__:vector")
            from gleanrl import MultiSyncCollector
            makes = ["Mine-v0", "mine/Text-v0", "Doubled-v0",
                     lambda: gym.make_vec("Vector-v0", num_envs=1).envs[0]]
            collector = MultiSyncCollector(
                makes, None, frames_per_batch=8, total_frames=8, cat_results="stack"
            )
            print([data["next", "reward"].flatten(1).sum(1).tolist() for data in collector])
            collector.shutdown()
            """
        )
    )
    done = subprocess.run(
        [python, str(script)], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.stdout.strip() == "[[6.0, 6.0, 12.0, 6.0]]", done.stderr


def test_workers_compile_a_policy_of_the_script(tmp_path, python):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys
            import gymnasium
            import torch

            class Ones(torch.nn.Module):
                def forward(self, observation):
                    return torch.ones(observation.shape[:-1], dtype=torch.int64)

            def make():  # processes that a worker spawns would run the script again
                assert not hasattr(sys.modules["__main__"], "__file__")
                return gymnasium.make("CartPole-v1")

            from gleanrl import MultiSyncCollector
            collector = MultiSyncCollector(
                [make], Ones(), frames_per_batch=8, total_frames=8,
                compile_policy={"backend": "eager"},
            )
            print([data["action"].tolist() for data in collector])
            collector.shutdown()
            """
        )
    )
    done = subprocess.run(
        [python, str(script)], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.stdout.strip() == "[[[1, 1, 1, 1, 1, 1, 1, 1]]]", done.stderr


@pytest.mark.parametrize("make", ["Locked-v0", lambda: gym.make("Locked-v0")])
def test_what_cannot_be_sent_says_what_to_do(register, make):
    lock = threading.Lock()

    def locked():
        return Paying(float(lock.locked()))

    register("Locked-v0", entry_point=locked)
    assert first_reward(Collector(make, None, **FRAMES)) == 0
    # A worker that needs it says so; one that does not is not disturbed.
    with pytest.raises(ConfigError, match=r"could not be sent .*lock.* import that in create_env"):
        MultiSyncCollector([make], None, **FRAMES)
    assert first_reward(MultiSyncCollector(["CartPole-v1"], None, **FRAMES)) == 1


@pytest.mark.parametrize("make", [GymEnv, lambda given: Collector(given, None, **FRAMES)])
def test_a_registered_environment_that_lacks_a_module_names_it(register, make):
    register("Lacking-v0", entry_point="surely_not_there.envs:Env")
    with pytest.raises(ConfigError, match="'Lacking-v0' is registered.*'surely_not_there'") as info:
        make("Lacking-v0")
    assert not isinstance(info.value, UnknownEnvError)
    assert isinstance(info.value.__cause__, ModuleNotFoundError)


def test_a_module_missing_inside_the_environment_is_named(register):
    def lacking():
        import surely_not_there  # noqa: F401

    register("Lazy-v0", entry_point=lacking)
    with pytest.raises(ConfigError, match="install what provides 'surely_not_there'"):
        GymEnv("Lazy-v0")


def test_a_module_named_with_the_id_is_named():
    with pytest.raises(ConfigError, match="needs the module 'surely_not_there'"):
        GymEnv("surely_not_there:Any-v0")


def test_a_version_that_does_not_exist_is_no_missing_module():
    with pytest.raises(UnknownEnvError, match="CartPole-v9"):
        GymEnv("CartPole-v9")


def test_an_environment_that_cannot_be_made_for_a_reason_of_its_own_says_so(register):
    def failing():
        raise gym.error.InvalidAction("out of order")

    register("Failing-v0", entry_point=failing)
    with pytest.raises(ConfigError, match="'Failing-v0' cannot be made: out of order") as info:
        GymEnv("Failing-v0")
    assert not isinstance(info.value, UnknownEnvError)


def test_an_import_that_starts_workers_is_named_by_them(tmp_path, monkeypatch):
    """Their imports of the same module would start workers without end."""
    module = """
import gymnasium as gym
from gleanrl import MultiSyncCollector

class Mine(gym.Wrapper):
    pass

MultiSyncCollector([lambda: Mine(gym.make("CartPole-v1"))], None, frames_per_batch=4)
"""
    (tmp_path / "starts_workers.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="the import of 'starts_workers' starts workers, each"):
        importlib.import_module("starts_workers")
