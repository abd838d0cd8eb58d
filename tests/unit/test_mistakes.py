"""Mistakes of new users get an answer: what is wrong, the value, and what to do."""

import re
import traceback
from functools import partial
from pathlib import Path

import gymnasium as gym
import pytest
import torch
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential
from torch import nn

import gleanrl
from gleanrl import (
    ArgumentTypeError,
    ClosedError,
    Collector,
    ConfigError,
    Evaluator,
    GleanError,
    LazyTensorStorage,
    MultiAsyncCollector,
    MultiSyncCollector,
    PolicyError,
    Recorder,
    ReplayBuffer,
    WeightsError,
)
from gleanrl.envs import ParallelEnv, SerialEnv
from gleanrl.weight_update import MultiProcessWeightSyncScheme

FRAMES = {"frames_per_batch": 8, "total_frames": 80}


def collect(env="CartPole-v1", policy=None, **arguments):
    with Collector(env, policy, **{**FRAMES, **arguments}) as collector:
        return next(iter(collector))


def net(features=4, dtype=torch.float32):
    body = nn.Sequential(nn.Linear(features, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)
    choose = Mod(lambda logits: logits.argmax(-1), ["logits"], ["action"])
    return TensorDictSequential(Mod(body, ["observation"], ["logits"]), choose)


class Wide(gym.ObservationWrapper):
    """CartPole with float64 observations."""

    def __init__(self):
        super().__init__(gym.make("CartPole-v1"))
        inner = self.env.observation_space
        self.observation_space = gym.spaces.Box(inner.low, inner.high, dtype="float64")

    def observation(self, observation):
        return observation.astype("float64")


class Nested(gym.ObservationWrapper):
    """CartPole whose observation lies in a dictionary of dictionaries."""

    def __init__(self):
        super().__init__(gym.make("CartPole-v1"))
        state = gym.spaces.Dict(pos=self.env.observation_space)
        self.observation_space = gym.spaces.Dict(goal=gym.spaces.Discrete(4), state=state)

    def observation(self, observation):
        return {"goal": 0, "state": {"pos": observation}}


def at_the_root():
    policy = Mod(nn.GRUCell(4, 2), ["observation", "h"], ["h"])
    policy.state_shapes = {"h": (2,)}
    return policy


# -- policies that do not fit ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "policy", "says"),
    [
        (
            "CartPole-v1",
            net(5),
            [
                "layer 'module.0.module.0', Linear(in_features=5",
                "got float32 of shape (4,)",
                "'observation': float32 of shape (4,)",
                "in_features=4",
                "mat1",
            ],
        ),
        ("CartPole-v1", nn.Linear(5, 2), ["Linear(in_features=5", "in_features=4"]),
        ("CartPole-v1", nn.Conv2d(3, 2, 3), ["Conv2d(3, 2", "reshape that before it"]),
        (
            "CartPole-v1",
            net(dtype=torch.float64),
            ["float64 weights", "Call policy.float()", "observation_dtype=torch.float64"],
        ),
        ("CartPole-v1", net(dtype=torch.float16), ["float16 weights", "Call policy.float()"]),
        (Wide, net(), ["Pass observation_dtype=torch.float32 to the collector"]),
        ("FrozenLake-v1", nn.Linear(1, 4), ["int64", "observation.to(torch.float32)", "one_hot"]),
        (
            "CartPole-v1",
            Mod(nn.Linear(4, 2), ["obs"], ["action"]),
            ["reads 'obs'", "it gives 'observation'", "did you mean 'observation'"],
        ),
        (
            Nested,
            Mod(nn.Linear(4, 2), ["pos"], ["action"]),
            ["reads 'pos'", "did you mean ('state', 'pos') (in_keys)?"],
        ),
        (
            "CartPole-v1",
            Mod(nn.Linear(1, 2), ["step_count"], ["action"]),
            ["reads 'step_count'", "it has 'step_count' with max_frames_per_traj="],
        ),
        (
            "CartPole-v1",
            Mod(nn.Bilinear(4, 2, 2), ["observation", "h"], ["h"]),
            ["reads 'h'", "write a recurrent state as ('next', 'h') (out_keys)"],
        ),
        ("CartPole-v1", at_the_root(), ["wrote nothing", "state as ('next', 'h') (out_keys)"]),
        (
            "CartPole-v1",
            Mod(nn.Linear(4, 2), ["observation"], ["logits"]),
            ["did not write 'action'", "wrote 'logits'", "out_keys"],
        ),
        ("CartPole-v1", nn.Linear(4, 2), ["shape (2,)", "argmax", "Categorical"]),
        ("Pendulum-v1", nn.Linear(3, 2), ["mean and scale", "NormalParamExtractor"]),
        ("CartPole-v1", net().to("meta"), ["'meta' device", "to_empty"]),
    ],
)
def test_a_policy_that_does_not_fit_is_told_what_to_change(env, policy, says):
    with pytest.raises(PolicyError) as caught:
        collect(env, policy)
    for part in says:
        assert part in str(caught.value)


def test_a_tensor_without_the_shape_of_the_batch_is_named():
    with pytest.raises(PolicyError, match=r"'action' with shape \(3,\); .* batch shape \(2,\)"):
        collect(policy=lambda observation: torch.zeros(3), num_envs=2)


def test_a_layer_that_does_not_fit_is_named_by_workers_too():
    with pytest.raises(PolicyError, match=r"'module\.0\.module\.0', Linear\(in_features=5"):
        MultiSyncCollector(["CartPole-v1"] * 2, net(5), **FRAMES)


def test_a_network_that_only_a_function_refers_to_is_not_sent_and_a_warning_says_so():
    network = nn.Linear(4, 2)
    policy = Mod(lambda observation: network(observation).argmax(-1), ["observation"], ["action"])
    collector = MultiSyncCollector(["CartPole-v1"] * 2, policy, backend="inline", **FRAMES)
    evaluator = Evaluator("CartPole-v1", policy, num_trajectories=1, backend="inline")
    with collector, evaluator:
        for send in (collector.update_policy_weights_, partial(evaluator.evaluate, policy)):
            with pytest.warns(UserWarning, match="no weights are sent.* a module that has"):
                send()


def test_a_lazy_layer_that_workers_would_get_without_weights_is_named():
    with pytest.raises(WeightsError, match=r"'0\.weight' of Sequential has no shape yet.*call"):
        MultiSyncCollector(["Pendulum-v1"] * 2, nn.Sequential(nn.LazyLinear(1)), **FRAMES)


# -- arguments -------------------------------------------------------------------------------------


def vector():
    return gym.make_vec("CartPole-v1", num_envs=2)


@pytest.mark.parametrize("env", [vector, vector()], ids=["callable", "built"])
def test_num_envs_of_a_vector_environment_is_to_be_dropped(env):
    with pytest.raises(GleanError, match=re.escape("is 2 of them already: drop num_envs=")):
        collect(env, num_envs=3)


@pytest.mark.parametrize(
    ("envs", "frames", "advice"),
    [
        ([["CartPole-v1"], ["CartPole-v1"] * 2], 24, "give all workers as many environments"),
        (["CartPole-v1"] * 2, [8, 16], "pass cat_results=-1"),
    ],
)
def test_rollouts_that_cannot_be_stacked_are_told_what_helps(envs, frames, advice):
    with pytest.raises(gleanrl.ConfigError, match=advice):
        MultiSyncCollector(envs, frames_per_batch=frames, backend="inline")


def test_batches_that_workers_cannot_share_out_are_rounded_with_a_warning_at_this_line():
    with pytest.warns(UserWarning, match=r"\(41\).*batches hold 42 frames") as caught:
        MultiSyncCollector(["CartPole-v1"] * 2, frames_per_batch=41, backend="inline").shutdown()
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize(
    "arguments", [{}, {"n_envs": 2, **FRAMES}, {"backend": "process", "sync": 2, **FRAMES}]
)
def test_arguments_that_are_missing_unknown_or_of_the_wrong_type_are_errors_of_ours(arguments):
    with pytest.raises(ArgumentTypeError) as caught:
        Collector("CartPole-v1", **arguments)
    assert isinstance(caught.value, GleanError)
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (partial(Collector, num_envs=10**9), "1,000,000,000 environments need 5,000,000,000,000"),
        (partial(MultiSyncCollector, num_workers=10**6), "in each of 1,000,000 workers need 20,0"),
        (partial(Collector, replay_buffer=LazyTensorStorage(8)), r"LazyTensorStorage\) has no ext"),
    ],
)
def test_what_cannot_work_fails_before_anything_is_built(make, says):
    with pytest.raises(ConfigError, match=says):
        make("CartPole-v1", frames_per_batch=10**6)
    with pytest.raises(ConfigError, match="max_size .10,000,000,000,000. must be lower"):
        LazyTensorStorage(10**13)


@pytest.mark.parametrize(
    ("make", "wrong", "meant"),
    [
        (partial(Collector, "CartPole-v1"), "n_envs", "num_envs"),
        (partial(Evaluator, "CartPole-v1"), "num_trajectory", "num_trajectories"),
        (ReplayBuffer, "batchsize", "batch_size"),
        (partial(Recorder, "never"), "formt", "format"),
        (MultiProcessWeightSyncScheme, "strateg", "strategy"),
    ],
)
def test_misspelt_arguments_of_public_classes_get_a_suggestion(make, wrong, meant):
    with pytest.raises(ArgumentTypeError, match=f"takes no {wrong}=; did you mean {meant}="):
        make(**{wrong: 1})


@pytest.mark.parametrize("make", [gym.make, gym.make_vec])
def test_one_built_environment_for_several_workers_warns_of_copies(make):
    with pytest.warns(UserWarning, match="one .*CartPole.* for several workers.*pass an id"):
        MultiSyncCollector([make("CartPole-v1")] * 2, backend="inline", **FRAMES).shutdown()


@pytest.mark.parametrize("env", ["CartPole-v1", partial(gym.make, "CartPole-v1")])
def test_a_policy_in_the_place_of_the_environment_is_named(env):
    with pytest.raises(
        GleanError, match="a TensorDictSequential, .* comes first, the policy after it"
    ):
        collect(net(), env)


def test_an_id_without_its_namespace_is_suggested_with_it():
    with pytest.raises(GleanError, match="did you mean 'ALE/Breakout-v5'"):
        collect("Breakout-v5")


# -- actions out of range --------------------------------------------------------------------------


class Quiet(gym.Env):
    """Takes any action, numpy's negative indices included."""

    observation_space = gym.spaces.Box(-1, 1, (2,))

    def __init__(self, action_space):
        self.action_space = action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.low, {}

    def step(self, action):
        return self.observation_space.low, 0.0, False, False, {}


def late(bad, good):
    """Return a policy whose third action in a rollout is ``bad``; construction calls it once."""
    calls = []

    def policy(observation):
        calls.append(1)
        action = torch.tensor(bad if len(calls) == 4 else good)
        return action.expand((*observation.shape[:-1], *action.shape))

    return policy


@pytest.mark.parametrize(
    ("space", "bad", "good", "says"),
    [
        (gym.spaces.Discrete(3), 3, 0, "'action' 3 at step 2 of the rollout; it takes 0 to 2"),
        (gym.spaces.Discrete(3), -1, 0, "'action' -1 at step 2"),
        (gym.spaces.MultiDiscrete([2, 5]), [1, 5], [1, 4], r"\[1, 5\] at step 2.*0 to \[1, 4\]"),
    ],
)
@pytest.mark.parametrize("arguments", [{}, {"num_envs": 2}, {"fast": False}])
def test_an_action_out_of_range_that_no_environment_minds_is_found(
    space, bad, good, says, arguments
):
    with pytest.raises(PolicyError, match=says if "fast" not in arguments else "environment 0 was"):
        collect(lambda: Quiet(space), late(bad, good), **arguments)


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_an_action_out_of_range_that_the_environment_minds_is_named(kind):
    env = "CartPole-v1" if kind is Collector else ["CartPole-v1"]
    with (
        kind(env, late(7, 0), **FRAMES) as collector,
        pytest.raises(PolicyError, match="environment 0 was given 'action' 7 at step 2"),
    ):
        next(iter(collector))


# -- user code that raises -------------------------------------------------------------------------


class Failing(gym.Wrapper):
    """Raises at its third step, or in its second reset."""

    def __init__(self, where):
        super().__init__(gym.make("CartPole-v1", max_episode_steps=2))
        self.where, self.calls = where, 0

    def step(self, action):
        self.calls += 1
        if self.where == "step" and self.calls == 3:
            raise ValueError("mine")
        return super().step(action)

    def reset(self, **arguments):
        if self.where == "reset" and self.calls:
            raise ValueError("mine")
        return super().reset(**arguments)


def policy_that_fails(observation):
    raise ValueError("mine")


@pytest.mark.parametrize(
    ("make", "note"),
    [
        (
            lambda: Collector(lambda: Failing("step"), num_envs=2, **FRAMES),
            "environment 0 raised this at step 2 of the rollout; its action was [01]",
        ),
        (
            lambda: Collector(lambda: Failing("reset"), num_envs=2, **FRAMES),
            "environment 0 raised this in its reset",
        ),
        (
            lambda: Collector(lambda: Failing("step"), fast=False, **FRAMES),
            "environment 0 raised this in its step; its action was [01]",
        ),
        (
            lambda: MultiSyncCollector([lambda: Failing("step")], **FRAMES),
            "^worker 0: environment 0 raised this at step 2",
        ),
        (
            lambda: MultiSyncCollector([lambda: Failing("step")], backend="inline", **FRAMES),
            "^worker 0: environment 0 raised this at step 2",
        ),
        (
            lambda: MultiSyncCollector([lambda: Failing("reset")], backend="inline", **FRAMES),
            "^worker 0: environment 0 raised this in its reset",
        ),
        (
            lambda: Collector("CartPole-v1", late("no number", 0), **FRAMES),
            "the policy raised this at step 2 of the rollout",
        ),
        (lambda: Collector("CartPole-v1", policy_that_fails, **FRAMES), "in its first call"),
        (lambda: Collector("CartPole-v1", nn.Flatten(), **FRAMES), "with num_envs=1 it has"),
    ],
)
def test_what_user_code_raises_keeps_its_class_and_says_where(make, note):
    with pytest.raises((ValueError, TypeError, IndexError)) as caught:
        list(make())
    assert any(re.search(note, text) for text in caught.value.__notes__)


def test_a_policy_that_returns_a_clone_is_told_to_return_what_it_gets():
    def act(td):
        return td.clone().set("action", torch.zeros(td.shape, dtype=torch.int64))

    with pytest.raises(PolicyError, match="'step_count'.*return the TensorDict that it gets"):
        Collector("CartPole-v1", act, num_envs=2, max_frames_per_traj=3, **FRAMES)


# -- iterating -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        Collector,
        partial(MultiSyncCollector, num_workers=2),
        partial(MultiSyncCollector, num_workers=2, inference="central"),
        partial(MultiAsyncCollector, num_workers=2),
    ],
)
def test_a_closed_collector_cannot_be_iterated_in_any_way(kind):
    collector = kind("CartPole-v1", **FRAMES)
    half_used = iter(collector)
    next(half_used)
    collector.shutdown()
    for ask in (
        lambda: next(half_used),
        lambda: next(iter(collector)),
        lambda: list(collector),
        collector.next,
    ):
        with pytest.raises(ClosedError, match="make a new one"):
            ask()
    if kind is not Collector:  # without workers it still has its state
        with pytest.raises(ClosedError, match="keep the state_dict.. from after each batch"):
            collector.state_dict()


def test_iterators_share_the_stream_and_taking_turns_warns_once():
    with Collector("CartPole-v1", **FRAMES) as collector:
        with pytest.warns(UserWarning, match="each batch goes to only one") as caught:
            pairs = list(zip(collector, collector, strict=True))
        assert [warning.filename for warning in caught] == [__file__]
        assert len(pairs) == 5


def test_a_loop_that_asks_for_one_more_batch_is_not_warned():
    with Collector("CartPole-v1", **FRAMES) as collector:
        assert sum(collector.next() is not None for _ in collector) == 5


# -- tracebacks ------------------------------------------------------------------------------------


def ours(error):
    """Return whether frames of the library are in the traceback of ``error``."""
    files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    return any(file.is_relative_to(Path(gleanrl.__file__).parent) for file in files)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Collector("CartPole-v1", net(5), **FRAMES),
        lambda: Collector("CartPole-v1", **{**FRAMES, "frames_per_batch": "8"}),
        lambda: Collector("CartPole-v1", net(5), num_collectors=1, **FRAMES),
        lambda: ReplayBuffer(batchsize=1),
        lambda: SerialEnv(1, lambda: Failing("step"), serial_for_singel=True),
        lambda: ParallelEnv(1, lambda: Failing("step"), serial_for_singel=True),
        lambda: Collector(lambda: Failing("step"), **FRAMES),
        lambda: MultiSyncCollector([lambda: Failing("step")], **FRAMES),
    ],
)
def test_errors_of_users_show_the_frames_of_users(make, monkeypatch):
    with pytest.raises(Exception) as caught:  # noqa: PT011  # any
        list(make())
    assert not ours(caught.value)
    assert "gleanrl/engine" not in str(caught.value)
    assert "gleanrl/rollout" not in str(caught.value)
    monkeypatch.setenv("GLEANRL_TRACEBACK", "full")
    with pytest.raises(Exception) as caught:  # noqa: PT011  # any
        list(make())
    assert ours(caught.value)


def test_an_error_that_code_of_the_library_raises_unintended_keeps_all_frames():
    code = {"__name__": "gleanrl.broken"}
    exec("def policy(observation): raise KeyError('ours')", code)
    with pytest.raises(KeyError, match="ours") as caught:
        Collector("CartPole-v1", code["policy"], **FRAMES)
    assert ours(caught.value)


def test_a_state_without_the_state_of_a_worker_is_loaded_only_if_not_strict():
    with MultiSyncCollector(["CartPole-v1"], backend="inline", **FRAMES) as collector:
        state = collector.state_dict()
        del state["worker0"]["worker"]
        with pytest.raises(KeyError, match=r"lacks .*worker0.worker.*strict=False"):
            collector.load_state_dict(state)
        collector.load_state_dict(state, strict=False)
        assert collector.rollout().numel() == FRAMES["frames_per_batch"]
