"""Nothing is shared by what is collected in the background and the learner that goes on.

Environment and policy report the settings and draws that they see. A learner changes all of them
while they run: the data are those of a learner that leaves them alone, and the learner sees its
own settings and draws only.
"""

import os
import random
import select
import signal
import threading
import warnings
import weakref
from contextlib import ExitStack
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import rig
import torch
import torchrl.envs
from tensordict.nn import InteractionType, TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.modules import LSTMModule

from gleanrl import (
    Collector,
    ConfigError,
    Evaluator,
    LazyTensorStorage,
    ListStorage,
    MultiAsyncCollector,
    MultiSyncCollector,
    ReplayBuffer,
    exploration_type,
    set_exploration_type,
)
from gleanrl.data.postprocs import MultiStep

pytestmark = pytest.mark.usefixtures("tidy_workers")


@pytest.fixture(scope="module", autouse=True)
def _warm(_warm_workers):
    """Have TorchRL make its first environment: the frames that do so are kept."""
    theirs()


KINDS = {"inline": Collector, "sync": MultiSyncCollector, "async": MultiAsyncCollector}
every_kind = pytest.mark.parametrize("kind", sorted(KINDS))


def settings():
    """Return what a process has one of."""
    return [
        exploration_type(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_default_dtype(),
        str(torch.get_default_device()),
        torch.get_num_threads(),
        list(warnings.filters),
        signal.getsignal(signal.SIGUSR1),
        os.getcwd(),
    ]


def draws():
    drawn = torch.rand((), dtype=torch.float64, device="cpu")
    return [drawn.item(), np.random.normal(), random.random()]


def seen():
    """Return settings and draws as numbers."""
    mode = exploration_type()
    found = [
        -1 if mode is None else list(InteractionType).index(mode),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_default_dtype() == torch.float64,
        torch.get_default_device().type == "meta",
        torch.get_num_threads(),
        len(warnings.filters),
        callable(signal.getsignal(signal.SIGUSR1)),
        len(os.getcwd()),
    ]
    return [float(number) for number in (*found, *draws())]


class Reports(gym.Env):
    """Observes its number, its steps and what it sees; the reward tells, too."""

    observation_space = gym.spaces.Box(-1e6, 1e6, (15,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, number=0, length=7):
        self.number, self.length, self.steps = number, length, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.inside = 0
        return np.array([self.number, self.steps, *seen()]), {}

    def step(self, action):
        self.steps, self.inside = self.steps + 1, self.inside + 1
        found = seen()
        observation = np.array([self.number, self.steps, *found])
        return observation, sum(found), self.inside >= self.length, False, {}


class Tells(nn.Module):
    """Reports what it sees; acts by nothing."""

    def forward(self, observation):
        told = torch.tensor(seen(), dtype=torch.float64, device="cpu")
        told = told.expand(*observation.shape[:-1], -1).clone()
        return torch.zeros(observation.shape[:-1], dtype=torch.int64, device="cpu"), told


def policy():
    return TensorDictModule(Tells(), in_keys=["observation"], out_keys=["action", "told"])


class Learner:
    """Changes every setting, and sees whether anybody else does."""

    def __init__(self, folder):
        self.folder = folder

    def turn(self, number):
        """Do something under other settings and return what was drawn meanwhile."""
        outer = settings()
        torch.manual_seed(number)
        np.random.seed(number)
        random.seed(number)
        with ExitStack() as undo:
            modes = (InteractionType.DETERMINISTIC, InteractionType.MEAN)
            undo.enter_context(set_exploration_type(modes[number % 2]))
            undo.enter_context(torch.autocast("cpu"))
            undo.enter_context(torch.no_grad() if number % 3 else torch.inference_mode())
            undo.enter_context(torch.device("meta"))
            undo.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore", ResourceWarning)
            undo.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float64)
            undo.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(torch.get_num_threads() + 1)
            undo.callback(os.chdir, os.getcwd())
            os.chdir(self.folder)
            before = signal.signal(signal.SIGUSR1, lambda *_: None)
            undo.callback(signal.signal, signal.SIGUSR1, before)
            inner, drawn = settings(), []
            for _ in range(20):
                drawn.append(draws())
                assert settings() == inner
        assert settings() == outer
        return drawn


def rows_of(kind, buffer, learn):
    """Return what is collected while ``learn`` is called, by worker."""
    envs = Reports if kind == "inline" else [partial(Reports, number) for number in range(2)]
    collector = KINDS[kind](
        envs,
        policy(),
        frames_per_batch=20,
        total_frames=200,
        replay_buffer=buffer,
        postproc=MultiStep(0.9, 3),
    )
    collector.set_seed(3)
    with collector:
        collector.start()
        while collector.is_running():
            learn()
        assert not collector.stats()["failed"]
    rows = buffer[:]
    assert len(rows) == 200
    number, step = rows["observation"][:, :2].T
    return [rows[number == each][step[number == each].argsort()] for each in range(2)]


BUFFERS = {
    "workers": lambda: ReplayBuffer(storage=LazyTensorStorage(1000)),
    "learner": lambda: ReplayBuffer(storage=ListStorage(1000)),
}
"""By who fills them."""


def disturb(folder):
    """Return a learner's turn, and a function that checks what it drew."""
    learner, drawn = Learner(folder), []

    def check():
        found, drawn[:] = drawn[:], []
        assert found
        for number, numbers in enumerate(found):
            assert learner.turn(number) == numbers

    return lambda: drawn.append(learner.turn(len(drawn))), check


@pytest.mark.covering
@pytest.mark.parametrize("fills", sorted(BUFFERS))
@every_kind
def test_collection_and_learner_see_nothing_of_each_other(kind, fills, tmp_path):
    quiet = rows_of(kind, BUFFERS[fills](), lambda: None)
    learn, check = disturb(tmp_path)
    before = settings()
    noisy = rows_of(kind, BUFFERS[fills](), learn)
    assert settings() == before
    check()
    for rows, others in zip(noisy, quiet, strict=True):
        each = min(len(rows), len(others))  # how many are those of which worker is nobody's promise
        for key in others.keys(True, True):
            assert rows[key].dtype == others[key].dtype
            assert rows[key][:each].equal(others[key][:each]), key


def test_evaluations_and_the_learner_see_nothing_of_each_other(tmp_path):
    learn, check = disturb(tmp_path)
    found = []
    with Evaluator(Reports, policy(), num_trajectories=20, seed=3) as evaluator:
        for noisy in (False, True):
            assert evaluator.trigger_eval()
            before = settings()
            while evaluator.pending:
                if noisy:
                    learn()
            assert settings() == before
            found.append(evaluator.wait().returns)
    check()
    assert found[0].equal(found[1])


def test_an_evaluation_in_this_process_leaves_everything_as_it_was():
    with Evaluator(Reports, policy(), num_trajectories=3, backend="inline") as evaluator:
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        before = settings()
        first = draws()
        evaluator.evaluate()
        assert settings() == before
        second = draws()
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    assert [draws(), draws()] == [first, second]


# -- a collector of this process that moves to a worker --------------------------------------------


def filled(collector, buffer):
    """Start, and return what is there once all frames are."""
    with collector:
        collector.start()
        rig.until(lambda: not collector.is_running())
        assert not collector.stats()["failed"]
    return buffer[:]


@pytest.mark.parametrize("fast", [True, False])
def test_the_data_are_those_of_a_loop_in_this_process(fast):
    def make():
        buffer = ReplayBuffer(storage=LazyTensorStorage(1000))
        options = {"num_envs": 2, "frames_per_batch": 20, "total_frames": 200, "fast": fast}
        collector = Collector("Pendulum-v1", None, replay_buffer=buffer, **options)
        collector.set_seed(5)
        return collector, buffer

    collector, buffer = make()
    with collector:
        list(collector)
    rows, others = buffer[:], filled(*make())
    for key in rows.keys(True, True):
        if key != ("collector", "traj_ids"):  # more episodes were begun there
            assert rows[key].equal(others[key]), key


def test_it_goes_on_where_it_is():
    def collect():
        buffer = ReplayBuffer(storage=LazyTensorStorage(1000))
        policy = rig.Encoded()
        module = TensorDictModule(policy, in_keys=["observation"], out_keys=["action", "seen"])
        collector = Collector(
            "CartPole-v1",
            policy_factory=lambda: module,
            frames_per_batch=20,
            total_frames=200,
            replay_buffer=buffer,
            track_policy_version=True,
        )
        collector.set_seed(5)
        for _ in range(2):
            collector.next()
        policy.set(4)
        collector.update_policy_weights_()
        collector.start()
        assert collector.policy is module
        policy.set(5)  # which is not told to the worker
        rig.until(lambda: not collector.is_running())
        state = collector.state_dict()
        collector.shutdown()
        return buffer[:], state

    rows, state = collect()
    assert (state["frames"], state["iter"], state["policy_version"]) == (200, 10, 1)
    assert (rows["policy_version"].flatten() == torch.arange(200).ge(40)).all()
    assert (rows["seen"][40:] == 4).all()
    ids = rows["collector", "traj_ids"].flatten()
    assert ids[40] > ids[:40].max()
    assert (rows["observation"][40:42] != rows["observation"][:2]).any()
    again, _ = collect()
    assert (again == rows).all()


def test_without_a_seed_two_collectors_differ_and_a_seeded_script_repeats_them():
    def collect():
        buffer = ReplayBuffer(storage=LazyTensorStorage(1000))
        options = {"frames_per_batch": 20, "total_frames": 20, "replay_buffer": buffer}
        return filled(Collector("Pendulum-v1", None, **options), buffer)["action"]

    torch.manual_seed(1)
    first, second = collect(), collect()
    torch.manual_seed(1)
    assert collect().equal(first)
    assert not first.equal(second)


@pytest.mark.parametrize("close_env", [True, False])
def test_the_environment_of_the_learner_stays_as_it_is(close_env):
    env, buffer = Closing(), ReplayBuffer(storage=LazyTensorStorage(1000))
    collector = Collector(env, policy(), frames_per_batch=20, replay_buffer=buffer)
    collector.next()
    collector.start()
    rig.until(lambda: buffer.write_count > 100)
    assert collector.getattr_env("steps") > 20
    assert collector.map_fn("env.count", [(1,), (2,)])[1] > 20
    assert collector.get_distant_attr("env").steps > 20
    assert env.steps == 20
    collector.shutdown(close_env=close_env)
    assert env.closed == close_env
    assert env.steps == 20


class Closing(Reports):
    closed = False

    def close(self):
        self.closed = True

    def count(self, number):
        return self.steps + number


def test_what_cannot_go_to_a_worker_is_refused_and_collection_goes_on_here():
    env, buffer = Reports(), ReplayBuffer(storage=LazyTensorStorage(1000))
    env.connection = threading.Lock()
    collector = Collector(env, policy(), frames_per_batch=20, replay_buffer=buffer)
    with pytest.raises(ConfigError, match="connection .* make it inside create_env_fn") as refused:
        collector.start()
    assert "start() has a worker process collect" in refused.value.__notes__[0]
    collector.enable_profile()
    with pytest.raises(ConfigError, match="enable_profile"):
        collector.start()
    collector.disable_profile()
    assert not collector.is_running()
    assert collector.next() is None
    assert env.steps == buffer.write_count == 20
    collector.shutdown()


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_workers_of_this_process_do_not_collect_in_the_background(kind):
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000))
    options = {"frames_per_batch": 20, "replay_buffer": buffer, "backend": "inline"}
    with (
        KINDS[kind]([Reports], policy(), **options) as collector,
        pytest.raises(ConfigError, match="use backend='process'"),
    ):
        collector.start()


def test_hooks_run_in_the_worker_once_it_is_started():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10_000))

    def mark(batch):
        batch["pid"] = torch.full(batch.shape, os.getpid())

    collector = Collector(
        "CartPole-v1", None, frames_per_batch=20, replay_buffer=buffer, post_collect_hook=mark
    )
    with collector:
        collector.next()
        collector.start()
        rig.until(lambda: buffer.write_count > 40)
        collector.post_collect_hook = lambda batch: batch.set("pid", torch.zeros(len(batch)).long())
        collector.reset()
        count = buffer.write_count
        rig.until(lambda: buffer.write_count > count + 20)
    pids = buffer[:]["pid"].tolist()
    assert pids[0] == os.getpid()
    assert pids[20] not in (0, os.getpid())
    assert pids[-1] == 0


def recurrent():
    torch.manual_seed(0)
    cell = LSTMModule(input_size=4, hidden_size=8, in_key="observation", out_key="deep")
    head = nn.Sequential(nn.Linear(8, 2), ArgMax())
    return TensorDictSequential(cell, TensorDictModule(head, ["deep"], ["action"]))


class ArgMax(nn.Module):
    def forward(self, values):
        return values.argmax(-1)


def theirs():
    return torchrl.envs.GymEnv("CartPole-v1", categorical_action_encoding=True)


@pytest.mark.covering
@pytest.mark.parametrize("random_frames", [0, 60])
@pytest.mark.parametrize("env", ["id", "tensordict"])
def test_a_recurrent_policy_begins_each_episode_afresh(env, random_frames):
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000))
    collector = Collector(
        "CartPole-v1" if env == "id" else theirs(),
        recurrent(),
        frames_per_batch=60,
        total_frames=240,
        replay_buffer=buffer,
        init_random_frames=random_frames,
    )
    rows = filled(collector, buffer)
    starts = torch.cat([torch.ones(1, 1).bool(), rows["next", "done"][:-1]])
    assert 10 < starts.sum() < 100
    if "is_init" in rows.keys():
        assert rows["is_init"].equal(starts)
    hidden = rows["recurrent_state_h"].flatten(1)
    assert (hidden[starts[:, 0]] == 0).all()
    assert (hidden[random_frames + 1 :][~starts[random_frames + 1 :, 0]] != 0).any(-1).all()


@every_kind
def test_a_collector_is_finalised_by_whoever_drops_it(kind):
    for _ in range(2):
        buffer = ReplayBuffer(storage=LazyTensorStorage(10_000))
        collector = KINDS[kind]([Reports], policy(), frames_per_batch=20, replay_buffer=buffer)
        collector.start()
        rig.until(lambda buffer=buffer: buffer.write_count > 0)
        ended = []
        weakref.finalize(collector, lambda ended=ended: ended.append(threading.get_ident()))
        del collector
        assert ended == [threading.get_ident()]
        count = buffer.write_count
        select.select([], [], [], 0.01)
        assert buffer.write_count == count
