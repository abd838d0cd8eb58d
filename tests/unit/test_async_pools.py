"""Pools that answer for some of their environments at a time: nothing is lost, and none waits."""

import importlib
from functools import partial, wraps

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from hypothesis import given
from hypothesis import strategies as st
from tensordict.nn import TensorDictModule
from tests.covering import examples
from torch import nn

from gleanrl import ConfigError, EnvError, PolicyError
from gleanrl.collectors import Collector, Evaluator, MultiAsyncCollector
from gleanrl.envs import GymEnv

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:gymnasium")  # of EnvPool's bounds
IDS = ("collector", "traj_ids")


class AtariVectorEnv(VectorEnv):
    """Stands in for ALE's, with clocks, and answers in an order that is drawn.

    It shows environment, episode and step; an environment with ``lag`` answers that much later.
    """

    single_observation_space = Box(-1, 1e6, (3,), np.float32)
    single_action_space = Discrete(5)
    autoreset_mode = AutoresetMode.NEXT_STEP

    def __init__(self, lengths, batch_size, lags=None, seed=0):
        self.num_envs, self.batch_size = len(lengths), batch_size
        self.metadata = {"autoreset_mode": self.autoreset_mode}
        self.lengths, self.lags = lengths, lags or [1] * len(lengths)
        self.rng, self.now = np.random.default_rng(seed), 0
        self.sends = 0

    def reset(self, *, seed=None, options=None):
        self.clocks = np.array([(env, 0, 0) for env in range(self.num_envs)])
        self.flying = {env: (0, 0.0, False) for env in range(self.num_envs)}
        self.over = np.zeros(self.num_envs, bool)
        observation, *_, infos = self._recv()
        return observation, infos

    def step(self, actions):
        assert actions.shape == (self.batch_size,)
        for env, action in zip(self.hand, actions, strict=True):
            _, episode, step = self.clocks[env]
            if self.over[env]:
                self.clocks[env] = env, episode + 1, 0
                reward, self.over[env] = 0.0, False
            else:
                assert action == (env + episode + step) % 5
                self.clocks[env, 2] = step + 1
                reward = step + 1.0
                self.over[env] = step + 1 == self.lengths[env]
            ready = self.now + self.lags[env] * self.rng.uniform(0.5, 1.5)
            self.flying[env] = ready, reward, self.over[env]
        self.sends += 1
        return self._recv()

    def _recv(self):
        first = sorted(self.flying, key=lambda env: (self.flying[env][0], env))
        self.hand = first[: self.batch_size]
        _, rewards, done = zip(*(self.flying.pop(env) for env in self.hand), strict=True)
        self.now += 1
        flags = np.array(done), np.zeros(self.batch_size, bool)
        infos = {"env_id": np.array(self.hand)}
        return self.clocks[self.hand].astype(np.float32), np.array(rewards), *flags, infos


def clock_policy(observation):
    return observation.sum(-1).long() % 5


def by_env(batches, envs):
    """Return the frames of each environment, in the order in which they were delivered."""
    rows = [row for batch in batches for row in batch]
    return [torch.cat([row for row in rows if int(row[IDS][0]) % envs == i]) for i in range(envs)]


def check_streams(batches, lengths):
    """Check that every environment gives all of its frames, from its first episode on."""
    envs, seen = len(lengths), {}
    for batch in batches:
        for row in batch:
            seen.setdefault(int(row[IDS][0]) % envs, []).append(row)
    for env, rows in seen.items():
        frames = torch.cat(rows)
        episode, step = (torch.arange(len(frames)) // lengths[env], lengths[env])
        at = torch.arange(len(frames)) % step
        shown = torch.stack((torch.full_like(at, env), episode, at), -1).float()
        assert torch.equal(frames["observation"], shown)
        after = shown + torch.tensor([0.0, 0.0, 1.0])
        assert torch.equal(frames["next", "observation"], after)
        assert torch.equal(frames["next", "reward"][:, 0], at + 1.0)
        assert torch.equal(frames["next", "done"][:, 0], at + 1 == step)
        assert torch.equal(frames["next", "terminated"], frames["next", "done"])
        assert torch.equal(frames[IDS] - frames[IDS][0], episode * envs)


@examples(40)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=2, max_size=6),
    steps=st.integers(1, 12),
    size=st.integers(1, 5),
    slow=st.booleans(),
    seed=st.integers(0, 99),
)
def test_whatever_the_order_of_answers_every_environment_gives_its_whole_stream(
    lengths, steps, size, slow, seed
):
    size, envs = min(size, len(lengths) - 1), len(lengths)
    lags = [20 if slow else 1] + [1] * (envs - 1)
    pool = AtariVectorEnv(lengths, size, lags, seed)
    collector = Collector(pool, clock_policy, frames_per_batch=size * steps, total_frames=-1)
    batches = [batch.clone() for _, batch in zip(range(12), collector, strict=False)]
    assert all(batch.shape == (size, steps) for batch in batches)
    check_streams(batches, lengths)
    assert min(int(batch[IDS].min()) for batch in batches) < envs
    stats = collector.stats()
    ends = sum(int(batch["next", "done"].sum()) for batch in batches)
    assert (stats["episodes"], stats["frames_discarded"]) == (ends, 0)
    returns = [n * (n + 1) / 2 for n in lengths]
    assert not ends or min(returns) <= stats["return_mean"] <= max(returns)
    collector.shutdown()


@pytest.mark.filterwarnings("ignore:all environments begin new episodes")
def test_what_a_reset_discards_leaves_no_trace_in_later_frames():
    lengths = [3, 5, 7, 2, 11, 4]
    collector = Collector(
        lambda: AtariVectorEnv(lengths, 2, [1, 1, 3, 1, 2, 8], seed=3),
        clock_policy,
        frames_per_batch=2 * 6,
        total_frames=-1,
    )
    batches = iter(collector)
    state = collector.state_dict()
    for begin_anew in (
        collector.reset,
        lambda: collector.set_seed(1),
        lambda: collector.load_state_dict(state),
    ):
        before = [next(batches).clone() for _ in range(5)]
        begin_anew()
        check_streams([next(batches).clone() for _ in range(5)], lengths)
        check_streams(before, lengths)
        collector.reset()
    collector.shutdown()


def test_an_environment_that_is_slow_holds_up_no_other():
    def sends(slow):
        pool = AtariVectorEnv([5] * 16, 4, [slow] + [1] * 15)
        collector = Collector(pool, clock_policy, frames_per_batch=4 * 8, total_frames=32 * 60)
        frames = sum(batch.numel() for batch in collector)
        collector.shutdown()
        return pool.sends * 4 / frames

    # A step takes as many sends as its environment's lag: what counts is frames per send.
    assert sends(200) <= 1.1 * sends(1)


class Memory(nn.Module):
    """Counts the steps of an episode in a recurrent state."""

    def forward(self, observation, memory, is_init):
        action = clock_policy(observation)
        return action, memory + 1, memory.clone(), is_init.clone()


def test_recurrent_states_are_those_of_the_environment():
    lengths = [1, 4, 7, 30]
    keys = ["observation", "memory", "is_init"]
    written = ["action", ("next", "memory"), "had", "first"]
    policy = TensorDictModule(Memory(), keys, written)
    policy.state_shapes = {"memory": (1,)}
    collector = Collector(
        AtariVectorEnv(lengths, 2, [1, 3, 1, 2], seed=4),
        policy,
        frames_per_batch=2 * 5,
        total_frames=600,
    )
    for batch in collector:
        step = batch["observation"][..., 2:]
        assert torch.equal(batch["had"], step)
        assert torch.equal(batch["next", "memory"], step + 1)
        assert torch.equal(batch["first"], step == 0)
    collector.shutdown()


def test_a_policy_that_keeps_private_entries_for_its_next_call_is_refused():
    def remembering(tensordict):
        last = tensordict.get("_last", torch.zeros(tensordict.shape, dtype=torch.int64))
        return tensordict.set("_last", last + 1).set("action", last % 5)

    def on_tensors(observation, last):
        last = observation[..., 0].long() * 0 if last is None else last
        return last % 5, last + 1

    for policy, name in (
        (remembering, "_last"),
        (TensorDictModule(on_tensors, ["observation", "_last"], ["action", "_last"]), "_last"),
        (TensorDictModule(on_tensors, ["observation", "action"], ["action", "x"]), "action"),
    ):
        with pytest.raises(PolicyError, match=rf"'{name}' .*next call.*leave out batch_size"):
            Collector(AtariVectorEnv([5] * 4, 2), policy, frames_per_batch=8)


def test_each_frame_has_the_version_of_the_policy_that_made_it():
    policy = nn.Linear(3, 5)

    class Clocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = policy

        def forward(self, observation):
            return clock_policy(observation)

    collector = Collector(
        AtariVectorEnv([50] * 6, 2, [1, 1, 1, 1, 6, 6]),
        Clocks(),
        frames_per_batch=2 * 4,
        total_frames=200,
        track_policy_version=True,
    )
    newest = {}
    several = False
    for version, batch in enumerate(collector):
        assert collector.stats()["lag"] == version - batch["policy_version"].min()
        for row in batch:
            made, env = row["policy_version"], int(row[IDS][0]) % 6
            assert (made.diff() >= 0).all()
            assert newest.get(env, 0) <= int(made[0])
            assert int(made[-1]) <= version
            newest[env] = int(made[-1])
            several |= int(made[0]) < int(made[-1])
        collector.update_policy_weights_()
    assert several  # chunks of slow environments began under earlier versions
    collector.shutdown()


def cartpoles(**kwargs):
    envpool = importlib.import_module("envpool")
    return envpool.make_gymnasium("CartPole-v1", num_threads=1, **kwargs)


def pendulums(**kwargs):
    return importlib.import_module("envpool").make_gymnasium("Pendulum-v1", num_threads=1, **kwargs)


def balance(observation):
    return (observation[..., 2] + 0.3 * observation[..., 3] > 0).long()


def test_envpool_gives_the_streams_of_one_that_answers_for_all():
    streams = []
    for kwargs in ({"batch_size": 2}, {}):
        collector = Collector(
            cartpoles(num_envs=6, seed=5, **kwargs),
            balance,
            frames_per_batch=kwargs.get("batch_size", 6) * 50,
            total_frames=6000,
        )
        streams.append(by_env([batch.clone() for batch in collector], 6))
        collector.shutdown()
    for mine, theirs in zip(*streams, strict=True):
        count = min(len(mine), len(theirs))
        assert count > 500
        assert (mine[:count] == theirs[:count]).all()


@pytest.mark.parametrize(
    ("make", "policy"),
    [
        (cartpoles, balance),
        (pendulums, lambda observation: observation[..., :1] * 0.5),
    ],
)
@pytest.mark.parametrize("kwargs", [{"batch_size": 2}, {}])
def test_steps_by_the_methods_in_c_are_those_of_envpools_own(make, policy, kwargs):
    found, said = [], []
    for own in (False, True):
        pool = make(num_envs=6, seed=5, max_episode_steps=30, **kwargs)
        if own:  # as if a user had replaced it
            pool.step = partial(type(pool).step, pool)
        frames = kwargs.get("batch_size", 6) * 40
        with Collector(pool, policy, frames_per_batch=frames, total_frames=10 * frames) as one:
            found.append(by_env([batch.clone() for batch in one], 6))
            said.append("C++" in one.explain())
    assert said == [True, False]
    for mine, theirs in zip(*found, strict=True):
        count = min(len(mine), len(theirs))
        assert count > 100
        for key in mine.keys(True, leaves_only=True):
            assert torch.equal(mine[key][:count], theirs[key][:count]), key
        assert bool(mine["next", "truncated"].any())


def mixin(pool):
    return next(kind for kind in type(pool).__mro__ if kind.__name__ == "EnvPoolMixin")


def flips_what_is_sent(pool, patch):
    def step(self, action, env_id=None):
        self.send(1 - action, env_id)
        return self.recv(reset=False, return_info=True)

    patch.setattr(mixin(pool), "step", step)


def doubles_rewards_around_step(pool, patch):
    own = mixin(pool).step

    def step(self, action, env_id=None):
        observation, reward, *rest = own(self, action, env_id)
        return observation, reward * 2, *rest

    patch.setattr(mixin(pool), "step", step)


def flips_in(name):
    def change(pool, patch):
        own = getattr(mixin(pool), name)

        def flipping(self, actions, *ids):
            if name == "_check_action":
                actions[2][...] = 1 - actions[2]
                return own(self, actions)
            return own(self, 1 - actions, *ids)

        patch.setattr(mixin(pool), name, flipping)

    return change


def doubles_rewards_under_wraps(pool, patch):
    own = type(pool)._to

    @wraps(own)
    def doubled(self, state, reset, return_info):
        result = own(self, state, reset, return_info)
        return result if reset else (result[0], result[1] * 2, *result[2:])

    patch.setattr(type(pool), "_to", doubled)


def doubles_what_is_received(pool, patch):
    own, place = pool._recv, pool._state_keys.index("reward")
    pool._recv = lambda: [one * 2 if i == place else one for i, one in enumerate(own())]


def flips_what_cpp_gets(pool, patch):
    own = pool._send
    pool._send = lambda given: own([*given[:2], (1 - given[2]).astype(given[2].dtype)])


def turns_ids_round(pool, patch):
    pool._all_env_ids = np.arange(4, dtype=np.int32)[::-1].copy()


@pytest.mark.parametrize(
    "change",
    [
        flips_what_is_sent,
        doubles_rewards_around_step,
        flips_in("_from"),
        flips_in("_check_action"),
        doubles_rewards_under_wraps,
        doubles_what_is_received,
        flips_what_cpp_gets,
        turns_ids_round,
    ],
)
@pytest.mark.parametrize("when", [0, 2])
def test_what_replaces_a_part_of_envpools_step_is_called(change, when):
    found = []
    for fast in (True, False):
        pool = cartpoles(num_envs=4, seed=5, max_episode_steps=30)
        with (
            pytest.MonkeyPatch.context() as patch,
            Collector(pool, balance, frames_per_batch=40, total_frames=-1, fast=fast) as one,
        ):
            batches, mine = iter(one), []
            for index in range(4):
                if index == when:
                    assert ("C++" in one.explain()) is (fast and when > 0)
                    change(pool, patch)
                mine.append(next(batches).clone())
            found.append(mine)
            if change is not turns_ids_round:
                assert "called as it is by its own step" in one.explain()
    for mine, plain in zip(*found, strict=True):
        for key in plain.keys(True, leaves_only=True):
            assert torch.equal(mine[key], plain[key]), key


def test_seeds_repeat_streams_and_resets_count_what_they_discard():
    collector = Collector(
        lambda: cartpoles(num_envs=6, batch_size=3), balance, frames_per_batch=60, total_frames=-1
    )
    batches = iter(collector)
    found = []
    for _ in range(2):
        assert collector.set_seed(7) == 12
        found.append(by_env([next(batches).clone() for _ in range(8)], 6))
    for one, two in zip(*found, strict=True):
        count = min(len(one), len(two))
        assert torch.equal(one["observation"][:count], two["observation"][:count])
        assert not torch.equal(one[IDS][:count], two[IDS][:count])
    before = collector.stats()["frames_discarded"]
    collector.reset()
    first = next(batches)
    assert collector.stats()["frames_discarded"] > before
    assert not torch.isin(first[IDS], found[-1][0][IDS]).any()
    collector.shutdown()


def atari(**kwargs):
    options = {"num_envs": 3, "batch_size": 2, "num_threads": 1, "max_num_frames_per_episode": 60}
    return importlib.import_module("ale_py.vector_env").AtariVectorEnv("pong", **options | kwargs)


def test_ales_frames_follow_each_other():
    collector = Collector(
        atari,
        lambda observation: torch.zeros(len(observation), dtype=torch.long),
        frames_per_batch=2 * 20,
        total_frames=40 * 6,
        info_keys={"episode_frame_number": ((), torch.int32), "env_id": ((), torch.int32)},
    )
    frames = by_env([batch.clone() for batch in collector], 3)
    assert collector.stats()["episodes"] > 0
    for env, mine in enumerate(frames):
        assert (mine["env_id"] == env).all()
        # Frames go on by four, or begin again where an episode does.
        number, after = mine["episode_frame_number"], mine["next", "episode_frame_number"]
        going = ~mine["next", "done"][:-1, 0]
        assert torch.equal(number[1:][going], after[:-1][going])
        assert torch.equal(mine["next", "observation"][:-1][going], mine["observation"][1:][going])
        assert (number[1:][~going] < after[:-1][~going]).all()
    collector.set_seed(3)
    collector.shutdown()


def test_whole_trajectories_come_out_of_pools_in_workers():
    collector = MultiAsyncCollector(
        [lambda: cartpoles(num_envs=6, batch_size=2)],
        balance,
        frames_per_batch=2 * 16,
        total_frames=3008,
        trajs_per_batch=4,
    )
    for batch in collector:
        ends = batch["next", "done"][..., 0] & batch["collector", "mask"]
        assert (ends.sum(1) == 1).all()
    collector.shutdown()


def test_evaluations_take_equally_many_episodes_of_each_environment():
    lengths = [1, 2, 3, 14]
    evaluator = Evaluator(
        lambda: AtariVectorEnv(lengths, 2), clock_policy, num_trajectories=8, backend="inline"
    )
    assert sorted(evaluator.evaluate().lengths) == sorted(2 * lengths)
    evaluator.shutdown()


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (cartpoles, {"max_frames_per_traj": 10}, "max_episode_steps"),
        (cartpoles, {"reset_at_each_iter": True}, "leave out batch_size"),
        (lambda **kw: RecordEpisodeStatistics(atari(**kw)), {}, "leave out the wrapper"),
        (lambda **kw: atari(autoreset_mode="SameStep", **kw), {}, "autoreset_mode='NextStep'"),
    ],
)
def test_options_that_need_one_environment_at_a_time_are_refused(make, options, message):
    with pytest.raises(ConfigError, match=message):
        Collector(
            lambda: make(num_envs=4, batch_size=2),
            balance,
            frames_per_batch=20,
            total_frames=20,
            **options,
        )


@pytest.mark.parametrize("kwargs", [{}, {"batch_size": 2}])
def test_a_pool_is_no_single_environment(kwargs):
    with pytest.raises(ConfigError, match="single gymnasium.Env"):
        GymEnv(lambda: cartpoles(num_envs=4, **kwargs))


def test_an_ale_pool_that_was_handed_over_is_not_reset_again():
    pool = AtariVectorEnv([5] * 4, 2)
    collector = Collector(pool, clock_policy, frames_per_batch=20, total_frames=-1)
    with pytest.raises(ConfigError, match="give a callable"):
        collector.set_seed(1)
    collector.shutdown()


def test_an_answer_that_nobody_waits_for_is_an_error():
    class Twice(AtariVectorEnv):
        def step(self, actions):
            *result, infos = super().step(actions)
            infos["env_id"][:] = 0
            return *result, infos

    Twice.__name__ = "AtariVectorEnv"
    collector = Collector(
        Twice([50] * 4, 2), lambda o: o.sum(-1).long() % 5, frames_per_batch=20, total_frames=20
    )
    with pytest.raises(EnvError, match="environment 0, which had no action"):
        next(iter(collector))
