"""What a collector takes out of an environment of ours, and which are taken as they are."""

import pickle

import pytest
import rig
from torchrl.testing.mocking_classes import CountingEnv, NestedCountingEnv

from gleanrl.envs import EnvCreator, GymEnv, ParallelEnv, SerialEnv
from gleanrl.envs.serial import rows_of
from gleanrl.envs.tensordict_envs import is_tensordict_env, needs_carrier


def test_the_collector_can_take_out_what_is_inside():
    inner = rig.Count()
    rows = rows_of(GymEnv(inner, info_keys=["count"], categorical_action_encoding=False))
    assert rows.envs == [inner]
    assert (rows.layout.batch_shape, rows.layout.infos) == ((), [("count",)])
    assert rows.layout.actions[0].shape == (2,)
    assert rows_of(GymEnv(rig.Count, num_envs=2)).layout.batch_shape == (2,)
    assert rows_of(GymEnv(rig.Count, device="meta")) is None


def test_our_environments_are_recognised():
    assert is_tensordict_env(GymEnv(rig.Count()))
    assert is_tensordict_env(SerialEnv(2, lambda: GymEnv(rig.Count())))
    assert not is_tensordict_env(EnvCreator(rig.Count))


def test_looking_at_a_parallel_environment_does_not_start_it():
    with ParallelEnv(2, "Pendulum-v1", num_envs=3) as started:
        started.reset()
        assert is_tensordict_env(started)
    env = pickle.loads(pickle.dumps(ParallelEnv(2, rig.Count)))
    assert is_tensordict_env(env)
    pickle.loads(pickle.dumps(env)).close()  # one that has been started cannot be sent


def test_batches_of_batches_are_taken_apart_and_torchrls_environments_are_not():
    env = SerialEnv(2, lambda: GymEnv(rig.Count, num_envs=3))
    assert rows_of(env).layout.batch_shape == (2, 3)
    assert len(rows_of(env).envs) == 6
    assert rows_of(SerialEnv(2, CountingEnv)) is None


@pytest.mark.parametrize(
    "make", [lambda: CountingEnv(max_steps=2), lambda: NestedCountingEnv(max_steps=2)]
)
def test_batches_of_torchrls_environments_carry_nothing(make):
    env = SerialEnv(2, make)
    assert not needs_carrier(env, env.reset())
