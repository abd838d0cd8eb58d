"""Environments that raise are built anew, each alone, with on_env_error="restart"."""

import functools
import itertools
import time

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict.nn import TensorDictModule
from tests.covering import examples

from gleanrl import (
    Collector,
    ConfigError,
    GleanError,
    LazyTensorStorage,
    MultiAsyncCollector,
    MultiSyncCollector,
    ReplayBuffer,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*was built anew")
IDS, MASK = ("collector", "traj_ids"), ("collector", "mask")
LENGTH = 4


class Fragile(gym.Env):
    """Observes (number, life, steps in the life); raises at the calls of ``faults``.

    Args:
        number: Told apart by it.
        faults: Per life, the place of its first fault: ``("step", n)`` for the n-th step over all
            episodes, ``("reset", n)`` for the n-th reset.
        lives: Has the number of lives so far.
    """

    observation_space = gym.spaces.Box(0, 1e6, (3,), np.float32)
    action_space = gym.spaces.Discrete(5)

    def __init__(self, number, faults, lives):
        self.number, self.life = number, len(lives)
        lives.append(self)
        self.fault = dict([faults[self.life]]) if self.life < len(faults) else {}
        if self.fault.get("build"):
            raise LookupError("in the simulator")
        self.calls = {"step": 0, "reset": 0}
        self.closed = False

    def _maybe(self, what):
        self.calls[what] += 1
        if self.fault.get(what) == self.calls[what]:
            raise LookupError("in the simulator")

    def _seen(self):
        return np.array([self.number, self.life, self.calls["step"]], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.inside = 0
        self._maybe("reset")
        return self._seen(), {}

    def step(self, action):
        self._maybe("step")
        self.inside += 1
        return self._seen(), float(self.number + 1), self.inside == LENGTH, False, {}

    def close(self):
        self.closed = True


def fragile(*faults, number=0):
    return functools.partial(Fragile, number, faults, [])


def collecting(*makers, steps=5, **options):
    options = {"total_frames": -1, "on_env_error": "restart", **options}
    return Collector(list(makers), frames_per_batch=steps * len(makers), **options)


def streams(batches):
    """Return per environment (valid, id, root, action, next, terminated, truncated) per frame."""
    whole = torch.cat(list(batches), -1)
    keys = [MASK, IDS, "observation", "action", ("next", "observation"), ("next", "reward")]
    keys += [("next", "terminated"), ("next", "truncated"), ("next", "done"), "is_init"]
    keys = [key for key in keys if key in whole.keys(True)]
    return [
        [{k: row[k][t].tolist() for k in keys} for t in range(whole.shape[-1])] for row in whole
    ]


def check(frames, number):
    """Check that the valid frames are transitions, in order, and their trajectories whole."""
    valid = [(t, frame) for t, frame in enumerate(frames) if frame[MASK]]
    for _, frame in valid:
        (own, life, before), (_, life_after, after) = (
            frame["observation"],
            frame["next", "observation"],
        )
        assert (own, life, before + 1) == (number, life_after, after)
        assert frame["next", "reward"] == [number + 1.0]
    for (t, one), (later, other) in itertools.pairwise(valid):
        same_life = one["observation"][1] == other["observation"][1]
        # A step that raised leaves a frame that is none; a reset that raised does not.
        assert later == t + 1 or (not same_life and later > t + 1)
        if one["next", "done"][0] or not same_life:
            assert one[IDS] != other[IDS]
        else:
            assert one[IDS] == other[IDS]
            assert one["next", "observation"] == other["observation"]
    for frame in frames:
        assert (frame[IDS] == -1) == (not frame[MASK])


PLACES = st.tuples(st.sampled_from(["step", "reset"]), st.integers(1, 9)).filter(
    lambda place: place != ("reset", 1)
)


@examples(60)
@given(
    st.lists(PLACES | st.just(("build", True)), min_size=1, max_size=3),
    st.integers(1, 7),
)
def test_only_the_environment_that_raises_is_disturbed(faults, steps):
    faults = [faults[0] if faults[0][0] != "build" else ("step", 1), *faults[1:]]

    def collect(*faults):
        torch.manual_seed(0)
        makers = [fragile(*faults), fragile(number=1), fragile(number=2)]
        with collecting(*makers, steps=steps) as collector:
            collector.set_seed(1)
            found = streams(itertools.islice(collector, -(-40 // steps)))
            return found, collector.stats()

    (broken, *others), stats = collect(*faults)
    (_, *undisturbed), _ = collect()
    assert others == undisturbed
    check(broken, 0)
    assert stats["env_restarts"] >= 1
    assert stats["frames"] == sum(frame[MASK] for row in (broken, *others) for frame in row)
    whole = [sum(1 for _ in own) for _, own in itertools.groupby(f[IDS] for f in broken if f[MASK])]
    assert max(whole) <= LENGTH


@pytest.mark.parametrize("at", [1, 2, 5, 6, 7, 9])
def test_episodes_that_are_cut_count_with_their_steps(at):
    """Rollouts have 5 steps. An episode that a rollout cannot end any more is not counted."""
    with collecting(fragile(("step", at)), steps=5) as collector:
        frames = streams(itertools.islice(collector, 4))[0]
        stats = collector.stats()
    ends = [t for t, frame in enumerate(frames) if frame["next", "done"][0] and frame[MASK]]
    assert stats["episodes"] == len(ends)
    void = next(t for t, frame in enumerate(frames) if not frame[MASK])
    assert void == at - 1
    before = frames[void - 1] if void % 5 else None
    if before is not None:
        assert before["next", "done"] == [True]
        assert before["next", "truncated"] == [void % LENGTH != 0]
    lengths = [len(list(own)) for key, own in itertools.groupby(f[IDS] for f in frames) if key >= 0]
    counted = lengths[:-1] if not frames[-1]["next", "done"][0] else lengths
    if void and not void % 5 and void % LENGTH:
        counted.remove(void % LENGTH)
    assert stats["length_mean"] == pytest.approx(np.mean(counted))
    assert stats["return_mean"] == pytest.approx(np.mean(counted))


class Linear(torch.nn.Module):
    """Has weights, and does not use them."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))

    def forward(self, observation):
        return torch.zeros(observation.shape[:-1], dtype=torch.int64)


class Remembers(torch.nn.Module):
    """Counts its steps in a recurrent state."""

    def forward(self, observation, hidden, is_init):
        return observation[..., 0].long() * 0, hidden + 1 + 0 * is_init


def test_recurrent_states_and_counters_begin_again():
    policy = TensorDictModule(
        Remembers(), ["observation", "hidden", "is_init"], ["action", ("next", "hidden")]
    )
    policy.state_shapes = {"hidden": (1,)}
    with collecting(
        fragile(("step", 7)),
        fragile(number=1),
        policy=policy,
        steps=10,
        max_frames_per_traj=3,
    ) as collector:
        batch = next(iter(collector))
    row = batch[0]
    assert row[MASK].tolist() == [True] * 6 + [False] + [True] * 3
    assert row["hidden"][row[MASK]].flatten().tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2]
    assert row["is_init"].flatten().tolist()[7:] == [True, False, False]
    assert row["step_count"].flatten().tolist()[7:] == [0, 1, 2]


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_workers_build_theirs_anew_and_say_so(kind):
    frames = 20 if kind is MultiSyncCollector else 10
    with kind(
        [fragile(("step", 7)), fragile(number=1)],
        frames_per_batch=frames,
        total_frames=-1,
        on_env_error="restart",
    ) as collector:
        with pytest.warns(
            UserWarning, match=r"(?s)in worker 0, environment 0 .*LookupError: in the"
        ):
            for _ in itertools.takewhile(
                lambda _: not collector.stats()["env_restarts"], collector
            ):
                pass
        assert collector.stats()["env_restarts"] == 1


def test_errors_in_batches_that_are_discarded_are_told_and_stale_weights_are_no_hang():
    policy = TensorDictModule(Linear(), ["observation"], ["action"])
    with MultiSyncCollector(
        [fragile(("step", 30)), fragile(number=1)],
        policy,
        frames_per_batch=20,
        total_frames=-1,
        on_env_error="restart",
        max_lag=0,
    ) as collector:
        collector.next()
        collector.update_policy_weights_(worker_ids=[0])
        with (
            pytest.warns(UserWarning, match="in worker 0, environment 0 was built anew"),
            pytest.raises(
                GleanError, match=r"discarded: .*max_lag=0 versions old; send weights to"
            ),
        ):
            collector.next()


@pytest.mark.parametrize("compact", [False, ["observation"]])
@pytest.mark.parametrize("at", [3, 6, 8])
def test_buffers_hold_the_transitions_alone(compact, at):
    buffer = ReplayBuffer(storage=LazyTensorStorage(200, compact=compact), batch_size=4)
    with collecting(fragile(("step", at)), fragile(number=1), replay_buffer=buffer) as collector:
        for _ in itertools.islice(collector, 6):
            pass
        assert len(buffer) == collector.stats()["frames"] == 59
    rows = buffer[:]
    after, before = rows["next", "observation"], rows["observation"]
    assert torch.equal(after[:, :2], before[:, :2])
    assert torch.equal(after[:, 2], before[:, 2] + 1)
    assert MASK not in rows.keys(True) or rows[MASK].all()


def test_storages_of_env_and_time_refuse_a_hole():
    buffer = ReplayBuffer(storage=LazyTensorStorage(200, ndim=2), batch_size=4)
    with (
        collecting(fragile(("step", 3)), fragile(number=1), replay_buffer=buffer) as collector,
        pytest.raises(ConfigError, match=r"began anew .*ndim=1"),
    ):
        next(iter(collector))


def test_whole_trajectories_end_where_they_were_cut():
    with collecting(
        fragile(("step", 7)), fragile(number=1), steps=10, trajs_per_batch=4
    ) as collector:
        batch = next(iter(collector))
    lengths = batch[MASK].sum(-1).tolist()
    assert sorted(lengths) == [2, 4, 4, 4]
    assert batch["next", "truncated"][lengths.index(2), 1].item()


@pytest.mark.parametrize("most", [2, (2, 60.0)])
def test_an_environment_that_always_raises_ends_collection(most):
    lives = []
    make = functools.partial(Fragile, 0, [("step", 3)] * 9, lives)
    with collecting(make, max_env_restarts=most) as collector:
        with pytest.raises(LookupError, match="in the simulator") as caught:
            list(collector)
        assert any(f"max_env_restarts={most}" in text for text in caught.value.__notes__)
    assert len(lives) == 3
    assert all(env.closed for env in lives)


def test_a_seed_for_all_is_no_error_of_an_environment():
    with collecting(fragile()) as collector:
        with pytest.raises(ConfigError, match="call set_seed"):
            collector.reset(seed=3)
        collector.rollout()
        assert collector.stats()["env_restarts"] == 0


@pytest.mark.parametrize("where", ["build", "reset"])
@pytest.mark.parametrize("inference", [None, "workers", "central"])
def test_an_environment_that_raises_at_first_is_built_again(where, inference, tmp_path):
    def make(fails):
        fault = [(where, 1)] if len(list(tmp_path.iterdir())) < fails else []
        (tmp_path / f"{time.monotonic_ns()}").touch()
        return Fragile(1, fault, [])

    def collect(fails):
        makers = [fragile(), functools.partial(make, fails)]
        options = {"frames_per_batch": 10, "total_frames": 20, "on_env_error": "restart"}
        if inference is None:
            collector = Collector(makers, max_env_restarts=2, **options)
        else:
            options |= {"inference": inference, "max_env_restarts": 2}
            collector = MultiSyncCollector(makers, **options)
        with collector:
            batches = [batch.clone() for batch in collector]
            assert all(batch[MASK].all() for batch in batches)
            return collector.stats()["env_restarts"]

    assert collect(2) == 2
    for path in tmp_path.iterdir():
        path.unlink()
    with pytest.raises(LookupError, match="in the simulator") as caught:
        collect(9)
    assert any("max_env_restarts=2" in text for text in caught.value.__notes__)
    assert len(list(tmp_path.iterdir())) == 3


def test_an_environment_that_does_not_exist_is_not_tried_again():
    with pytest.raises(ConfigError, match="no environment is registered") as caught:
        collecting("NoSuchEnv-v0")
    assert not getattr(caught.value, "__notes__", [])


@pytest.mark.parametrize(
    ("env", "options", "says"),
    [
        (gym.make("CartPole-v1"), {}, "ids or callables"),
        (lambda: gym.make_vec("CartPole-v1", 2), {}, "ids or callables"),
        ("CartPole-v1", {"fast": False}, "fast=False"),
        ("CartPole-v1", {"on_env_error": "relaunch"}, "'raise' or 'restart'"),
        ("CartPole-v1", {"max_env_restarts": (1, -1)}, "max_env_restarts"),
    ],
)
def test_what_cannot_be_built_anew_is_refused(env, options, says):
    options = {"on_env_error": "restart", **options}
    with pytest.raises(ConfigError, match=says):
        Collector(env, frames_per_batch=8, total_frames=8, **options)
