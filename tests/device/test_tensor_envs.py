"""Vector environments that take and return tensors: rows are where the tensors are."""

from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
from device_rig import DEVICES, ON, SECOND, Best, Drift, Walk, check_same, seeded
from device_rig import recurrent as walking
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from tensordict.nn import TensorDictModule, TensorDictSequential
from test_copies import Copies, Many, acts
from torch import nn

from gleanrl import (
    Collector,
    ConfigError,
    EnvError,
    Evaluator,
    Interruptor,
    LazyTensorStorage,
    MultiSyncCollector,
    PolicyError,
    ReplayBuffer,
)

ENVS = 5
T0 = f"{ON}:0"


class Carts(gym.vector.VectorEnv):
    """CartPole in torch, which resets itself in the step that ends an episode."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(self, device="cpu", **faults):
        self.num_envs, self.device, self.faults = ENVS, torch.device(device), faults
        self.single_observation_space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.single_action_space = gym.spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, ENVS)
        self.action_space = batch_space(self.single_action_space, ENVS)

    def reset(self, *, seed=None, options=None):
        starts = np.random.default_rng(seed or 0).uniform(-0.1, 0.1, (64, 4))
        self.starts = torch.tensor(starts, dtype=torch.float32, device=self.device)
        self.next = torch.arange(ENVS, device=self.device)
        self.x, self.age = self.starts[self.next].clone(), torch.zeros_like(self.next)
        return self.x, {}

    def step(self, actions):
        assert actions.device == self.device
        assert actions.dtype is torch.int64
        _, v, angle, turn = self.x.unbind(1)
        force = (actions * 2.0 - 1.0) * 10
        pull = (force + 0.05 * turn**2 * angle.sin()) / 1.1
        fall = (9.8 * angle.sin() - angle.cos() * pull) / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2))
        slide = pull - 0.05 * fall * angle.cos()
        rates = torch.stack((v, slide, turn, fall), 1)
        self.x += 0.05 * rates  # the memory that was returned before
        self.age += 1
        dead = (self.x[:, 0].abs() > 2.4) | (self.x[:, 2].abs() > 0.21)
        late = (self.age >= 11) & ~dead
        done, final = dead | late, self.x.clone()
        self.next = torch.where(done, (self.next + ENVS) % 64, self.next)
        self.x.copy_(torch.where(done[:, None], self.starts[self.next], self.x))
        self.age *= ~done
        result = [self.x, final[:, 2].cos(), dead, late, {"final_obs": final}]
        for place, change in self.faults.items():
            result[int(place[1:])] = change(result[int(place[1:])])
        return tuple(result)


class InNumpy(gym.vector.VectorWrapper):
    """Shows tensors on the CPU as arrays."""

    def reset(self, *, seed=None, options=None):
        observation, infos = self.env.reset(seed=seed, options=options)
        return observation.numpy(), infos

    def step(self, actions):
        *data, infos = self.env.step(torch.from_numpy(actions))
        return *(value.numpy() for value in data), {"final_obs": infos["final_obs"].numpy()}


class Simulated(gym.Env):
    """The same as a `gymnasium.Env`, as Isaac Lab's are; observations have a name."""

    metadata = Carts.metadata

    def __init__(self, device="cpu"):
        self.carts, self.num_envs = Carts(device), ENVS
        self.single_observation_space = gym.spaces.Dict(observation=gym.spaces.Box(-9, 9, (4,)))
        self.single_action_space = self.carts.single_action_space
        self.observation_space = batch_space(self.single_observation_space, ENVS)
        self.action_space = self.carts.action_space

    def reset(self, seed=None, options=None):
        observation, infos = self.carts.reset(seed=seed)
        return {"observation": observation}, infos

    def step(self, actions):
        observation, *data, infos = self.carts.step(actions)
        final = {"observation": infos["final_obs"]}
        return {"observation": observation}, *data, {"final_obs": final}


def recurrent():
    """Return a policy with a state and with buffers that each call changes."""
    torch.manual_seed(1)
    cell = TensorDictModule(nn.GRUCell(4, 8), ["observation", "hidden"], [("next", "hidden")])
    values = nn.Sequential(Drift(), nn.Linear(8, 2))
    values = TensorDictModule(values, [("next", "hidden")], ["values"])
    return TensorDictSequential(cell, values, TensorDictModule(Best(), ["values"], ["action"]))


class Marks(nn.Module):
    """Shows when it is told that an episode begins."""

    def forward(self, observation, is_init):
        return (observation[..., 2] > 0).long(), is_init[..., 0].float()


def marks():
    return TensorDictModule(Marks(), ["observation", "is_init"], ["action", "began"])


def collect(env, policy=recurrent, batches=4, kind=Collector, **options):
    """Return copies of some batches."""
    seeded()
    policy = policy()
    device = options.get("policy_device", getattr(env, "device", "cpu"))
    policy = policy.to(device) if policy is not None else None
    options = {"frames_per_batch": 12 * ENVS, **options}
    with kind(env, policy, **options) as collector:
        collector.set_seed(3)
        iterator = iter(collector)
        return [next(iterator).clone() for _ in range(batches)]


@pytest.mark.parametrize("policy", [recurrent, marks, lambda: None])
def test_data_are_those_of_arrays(policy):
    arrays = collect(InNumpy(Carts()), policy)
    check_same(collect(Carts(), policy), arrays)
    assert any(batch["next", "terminated"].any() for batch in arrays)
    if policy is not recurrent:  # which always pushes to one side
        assert any(batch["next", "truncated"].any() for batch in arrays)
    for batch in arrays:
        ended = batch["next", "done"][:, :-1, 0]
        after, root = batch["next", "observation"][:, :-1], batch["observation"][:, 1:]
        assert torch.equal((after == root).all(-1), ~ended)


def test_results_with_gradients_are_stored_without_them():
    def grown(value):
        return value * torch.ones((), requires_grad=True)

    def finals(infos):
        return {"final_obs": grown(infos["final_obs"])}

    faults = {"_0": grown, "_1": grown, "_4": finals}
    found = collect(Carts(**faults), marks)
    check_same(found, collect(Carts(), marks))
    assert not any(value.requires_grad for batch in found for value in batch.values(True, True))


@pytest.mark.parametrize(
    "places",
    [
        {},
        {"storing_device": ON},
        {"storing_device": "cpu"},
        {"policy_device": "cpu"},
        {"policy_device": SECOND, "storing_device": SECOND},
    ],
    ids=str,
)
@pytest.mark.parametrize("policy", [recurrent, marks])
def test_rows_on_the_device_hold_the_same_data(device, policy, places):
    if DEVICES == 1 and SECOND in str(places):
        pytest.skip("there is one device only")
    batches = collect(Carts(T0), policy, **places)
    check_same(batches, collect(InNumpy(Carts()), policy))
    devices = {value.device for batch in batches for value in batch.values(True, True)}
    assert devices == {torch.empty(0, device=places.get("storing_device", T0)).device}


OPTIONS = {
    "random first": {"init_random_frames": 90},
    "same": {"return_same_td": True},
    "compact": {"compact_obs": True},
    "split": {"split_trajs": True},
    "whole": {"trajs_per_batch": 3},
    "truncated": {"set_truncated": True},
    "versions": {"track_policy_version": True},
    "fresh": {"reset_at_each_iter": True},
    "finite": {"check_finite": True},
    "no ids": {"track_traj_ids": False},
    "plain": {"fast": False},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_does_the_same_on_the_device(device, option):
    check_same(collect(Carts(T0), **OPTIONS[option]), collect(InNumpy(Carts()), **OPTIONS[option]))


def test_a_simulator_that_is_a_gymnasium_environment(device):
    expected = collect(InNumpy(Carts()))
    check_same(collect(Simulated(T0), policy_device=T0), expected)
    # Registered ones have wrappers around them, which do not pass attributes on.
    gym.register("SimulatedCarts-v0", lambda: Simulated(T0), disable_env_checker=True)
    check_same(collect("SimulatedCarts-v0", policy_device=T0), expected)


def test_nothing_is_copied_per_step(device):
    for steps in (12, 24):
        seeded()
        with Collector(
            Carts(T0), recurrent().to(T0), frames_per_batch=steps * ENVS, storing_device=T0
        ) as collector:
            iterator = iter(collector)
            next(iterator)
            with Copies() as copies:
                next(iterator)
        # Ends, rewards and actions, once per batch; ids and root flags on the way out.
        assert copies.shapes == [(ENVS, steps)] * 3
        assert (copies.there, copies.waits) == (4, 3)


def test_batches_that_are_kept_do_not_change(device):
    with Collector(Carts(T0), recurrent().to(T0), frames_per_batch=12 * ENVS) as collector:
        iterator = iter(collector)
        kept = [next(iterator) for _ in range(6)]
        copies = [batch.clone() for batch in kept]
        for _ in range(4):
            next(iterator)
    check_same(kept, copies)


def test_memory_of_the_device_does_not_grow(device):
    with Collector(Carts(T0), recurrent().to(T0), frames_per_batch=12 * ENVS) as collector:
        iterator = iter(collector)
        sizes = []
        for _ in range(12):
            next(iterator)
            sizes.append(getattr(torch, ON).memory_allocated())
    assert max(sizes[4:]) == sizes[4]


def test_a_stopped_rollout_leaves_the_state_to_the_next(device):
    class Stopping(Carts):
        def step(self, actions):
            self.steps = getattr(self, "steps", 0) + 1
            if self.steps % 5 == 0:
                self.interruptor.stop_collection()
            return super().step(actions)

    def stopping(device, wrap=lambda env: env):
        env, interruptor = Stopping(device), Interruptor()
        env.interruptor = interruptor
        return collect(wrap(env), interruptor=interruptor, policy_device=device)

    check_same(stopping(T0), stopping("cpu", InNumpy))


def test_workers_have_rows_in_memory_of_the_host(device):
    def batches(env, policy):
        seeded()
        options = {"frames_per_batch": 24 * ENVS, "storing_device": "cpu"}
        with MultiSyncCollector([env] * 2, policy, **options) as collector:
            collector.set_seed(3)
            return [batch.clone() for _, batch in zip(range(3), collector, strict=False)]

    there = batches(partial(device.make, Carts, T0), recurrent().to(T0))
    check_same(there, batches(lambda: InNumpy(Carts()), recurrent()))


def test_resets_of_all_environments(device):
    def run(env):
        seeded()
        with Collector(env, marks(), frames_per_batch=6 * ENVS) as collector:
            first = next(iter(collector)).clone()
            collector.reset()
            return [first, next(iter(collector)).clone()]

    check_same(run(Carts(T0)), run(InNumpy(Carts())))
    collector = Collector(Carts(T0), None, frames_per_batch=6 * ENVS)
    with collector, pytest.raises(ConfigError, match="cannot be reset alone"):
        collector.reset([1])


def test_a_replay_buffer_on_the_device(device):
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000, device=T0), batch_size=8)
    options = {"frames_per_batch": 12 * ENVS, "total_frames": 36 * ENVS}
    seeded()
    with Collector(Carts(T0), recurrent().to(T0), replay_buffer=buffer, **options) as collector:
        collector.set_seed(3)
        for _ in collector:
            pass
    rows = [batch.reshape(-1) for batch in collect(InNumpy(Carts()), batches=3)]
    assert buffer[:]["observation"].device == torch.empty(0, device=T0).device
    check_same([buffer[:].exclude("index")], [torch.cat(rows)])


class Bounded(Carts):
    """Takes actions of several kinds, of which some are counted from 1."""

    def __init__(self, device="cpu"):
        super().__init__(device)
        self.single_action_space = gym.spaces.Dict(
            push=gym.spaces.Discrete(2, start=1),
            more=gym.spaces.MultiDiscrete([2, 3], start=[0, 5]),
            fine=gym.spaces.Box(-1, 1, (2,)),
        )
        self.action_space = batch_space(self.single_action_space, ENVS)

    def step(self, actions):
        assert (actions["push"] > 0).all()
        assert (actions["more"][:, 1] > 4).all()
        force = actions["push"] - 1 + actions["more"].sum(-1) + actions["fine"].sum(-1)
        return super().step((force > 6).long())


class NestedInNumpy(InNumpy):
    def step(self, actions):
        tensors = {name: torch.from_numpy(value) for name, value in actions.items()}
        *data, infos = self.env.step(tensors)
        return *(value.numpy() for value in data), {"final_obs": infos["final_obs"].numpy()}


def test_actions_of_several_kinds(device):
    expected = collect(NestedInNumpy(Bounded()), lambda: None)
    check_same(collect(Bounded(T0), lambda: None), expected)
    assert all(not batch["next", "done"].all() for batch in expected)


def test_a_saved_state_continues_on_the_device(device):
    def collector():
        return Collector(Carts(T0), recurrent().to(T0), frames_per_batch=12 * ENVS)

    with collector() as one:
        iterator = iter(one)
        next(iterator)
        state, then = one.state_dict(), next(iterator).clone()
    with collector() as other:
        other.load_state_dict(state)
        check_same([next(iter(other))], [then])


def test_evaluations_on_the_device(device):
    def played(make, home):
        policy = recurrent().to(home)
        with Evaluator(make, policy, num_trajectories=2 * ENVS) as evaluator:
            result = evaluator.evaluate()
        return {key: value for key, value in result.items() if not key.endswith(("fps", "seconds"))}

    there = played(partial(device.make, Carts, T0), T0)
    assert there == played(lambda: InNumpy(Carts()), "cpu")


# -- what the policy wrote stays on its device -----------------------------------------------------


def test_outputs_other_than_actions_stay_with_the_policy(device):
    def run(make_policy, env, device):
        seeded()
        options = {"num_envs": 3, "frames_per_batch": 24, "storing_device": device}
        with Collector(env, make_policy().to(device), **options) as collector:
            collector.set_seed(3)
            iterator = iter(collector)
            first = next(iterator).clone()
            with Copies() as copies:
                second = next(iterator)
            return [first, second.clone(), next(iterator).clone()], copies, collector.explain()

    for policy, env in ((acts, Many), (walking, Walk)):
        batches, copies, text = run(policy, env, T0)
        check_same(batches, run(policy, env, "cpu")[0])
        assert f"outputs stay on {T0}" in text
        assert copies.back == 8  # actions, once per call
        delivered = len([*batches[0].keys(True, True)]) - 3
        assert copies.there == 8 + delivered  # what it is shown, once per call


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("faults", "error", "message"),
    [
        ({"_4": lambda infos: {}}, EnvError, "no 'final_obs' at step"),
        ({"_1": lambda r: r[:, None]}, EnvError, r"returned rewards as .* shape \(5, 1\)"),
        ({"_1": lambda r: r.double() * 1e300}, EnvError, "overflows float32"),
        ({"_2": lambda dead: dead[:1]}, EnvError, "returned terminated as"),
        ({"_0": lambda x: x.double()}, EnvError, "returned 'observation' as .*float64"),
        ({"_0": lambda x: x.tolist()}, EnvError, "returned 'observation' as"),
        ({"_4": lambda infos: {"final_obs": {}}}, EnvError, "final_obs returned"),
    ],
)
def test_steps_that_do_not_fit(device, faults, error, message):
    with pytest.raises(error, match=message):
        collect(Carts(T0, **faults))


class Wild(nn.Module):
    """Takes an action that there is not."""

    def forward(self, observation):
        return torch.full(observation.shape[:1], 7, device=observation.device)


def test_actions_out_of_range_are_named(device):
    with pytest.raises(PolicyError, match="was given 'action' 7 at step 0"):
        collect(Carts(T0), Wild, policy_device=T0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_frames_per_traj": 4}, "max_episode_steps"),
        ({"observation_dtype": torch.float64}, "observation_dtype"),
        ({"info_keys": ["x"]}, "info_keys"),
        ({"categorical_action_encoding": False}, "categorical_action_encoding"),
    ],
)
def test_arguments_that_do_not_fit(device, options, message):
    with pytest.raises(ConfigError, match=message):
        collect(Carts(T0), lambda: None, **options)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
def test_other_modes_are_refused_on_a_device(device, mode):
    env = Carts(T0)
    env.metadata = {"autoreset_mode": mode}
    with pytest.raises(ConfigError, match="need AutoresetMode.SAME_STEP"):
        Collector(env, None, frames_per_batch=10)


# -- Gymnasium's own wrappers ----------------------------------------------------------------------


class Stacked(gym.vector.VectorWrapper):
    """Returns final observations as one array, because Gymnasium's object arrays have no DLPack."""

    def step(self, actions):
        *data, infos = self.env.step(actions)
        if (finals := infos.get("final_obs")) is None:
            return *data, {}
        none = np.zeros_like(data[0][0])
        return *data, {"final_obs": np.stack([none if one is None else one for one in finals])}


def test_gymnasiums_conversion_of_arrays(device):
    wrappers = pytest.importorskip("gymnasium.wrappers.vector")
    pytest.importorskip("array_api_compat")

    def several():
        mode = AutoresetMode.SAME_STEP
        return gym.make_vec("CartPole-v1", ENVS, "sync", vector_kwargs={"autoreset_mode": mode})

    arrays = collect(several(), frames_per_batch=40 * ENVS)
    tensors = collect(wrappers.NumpyToTorch(Stacked(several())), frames_per_batch=40 * ENVS)
    check_same(tensors, arrays)
    env = wrappers.ArrayConversion(Stacked(several()), env_xp=np, target_xp=torch, target_device=T0)
    there = collect(env, frames_per_batch=40 * ENVS, policy_device=T0)
    check_same(there, arrays)
    assert {value.device.type for value in there[0].values(True, True)} == {ON}
