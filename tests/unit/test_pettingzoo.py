"""PettingZoo environments as TensorDict environments, held against loops written by hand."""

import warnings
from functools import partial

import numpy as np
import pytest
import torch
from gymnasium import spaces
from mpe2 import simple_adversary_v3, simple_spread_v3, simple_world_comm_v3
from pettingzoo import AECEnv, ParallelEnv
from tensordict.nn import TensorDictModule
from torchrl.envs.libs.pettingzoo import PettingZooWrapper as TorchPettingZoo
from torchrl.envs.utils import MarlGroupMapType as TorchGroupMapType

from gleanrl import (
    Collector,
    ConfigError,
    EnvError,
    Evaluator,
    MultiSyncCollector,
    PolicyError,
    Recorder,
)
from gleanrl.cli.main import main
from gleanrl.data import LazyTensorStorage, ListStorage, ReplayBuffer
from gleanrl.envs import MarlGroupMapType, PettingZooEnv, PettingZooWrapper, SerialEnv

SEED = 7


def make_spread():
    return simple_spread_v3.parallel_env(max_cycles=6)


def argmax_policy(n_in=18, group="agent"):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(n_in, 5), ArgMax())
    return TensorDictModule(net, in_keys=[(group, "observation")], out_keys=[(group, "action")])


class ArgMax(torch.nn.Module):
    def forward(self, scores):
        return scores.argmax(-1)


def played_by_hand(seed, steps):
    """Play `make_spread` with `argmax_policy` as PettingZoo's documentation does."""
    env, net = make_spread(), argmax_policy().module
    rows = []
    shown, _ = env.reset(seed=seed)
    for _ in range(steps):
        now = np.stack([shown[agent] for agent in env.possible_agents])
        with torch.no_grad():
            actions = net(torch.from_numpy(now)).tolist()
        moves = dict(zip(env.possible_agents, actions, strict=True))
        shown, rewards, _, late, _ = env.step(moves)
        after = np.stack([shown[agent] for agent in env.possible_agents])
        rows.append((now, actions, [[rewards[a]] for a in rewards], after, all(late.values())))
        if not env.agents:
            shown, _ = env.reset()
    return [torch.from_numpy(np.array(column)) for column in zip(*rows, strict=True)]


def check_spread(batch, seed):
    """Compare one environment's `[T]` steps with those played by hand."""
    now, actions, rewards, after, late = played_by_hand(seed, batch.shape[-1])
    assert torch.equal(batch["agent", "observation"], now)
    assert torch.equal(batch["agent", "action"], actions)
    assert torch.equal(batch["next", "agent", "reward"], rewards.float())
    assert torch.equal(batch["next", "agent", "observation"], after)
    assert torch.equal(batch["next", "truncated"][:, 0], late)
    assert torch.equal(batch["next", "agent", "done"], late[:, None, None].expand(-1, 3, 1))
    assert not batch["next", "terminated"].any()


@pytest.mark.parametrize("num_envs", [None, 2])
def test_collectors_take_the_environment_itself_and_deliver_what_a_hand_written_loop_sees(num_envs):
    collector = Collector(
        make_spread, argmax_policy(), frames_per_batch=40, total_frames=40, num_envs=num_envs
    )
    collector.set_seed(SEED)
    (batch,) = collector
    assert batch["agent"].batch_size == (*batch.shape, 3)
    for index, part in enumerate([batch] if num_envs is None else batch):
        check_spread(part, SEED + index)
    collector.shutdown()


def test_a_seed_that_is_refused_leaves_the_one_that_is_due():
    shown = []
    for refused in (False, True):
        env = PettingZooEnv(make_spread())
        env.set_seed(SEED)
        if refused:
            with pytest.raises(ConfigError, match="call set_seed"):
                env.reset(seed=1)
        shown.append(env.reset()["agent", "observation"])
        env.close()
    assert torch.equal(*shown)


def test_a_built_environment_is_taken_over():
    env = make_spread()
    collector = Collector(env, argmax_policy(), frames_per_batch=8, total_frames=8)
    collector.set_seed(SEED)
    check_spread(next(iter(collector)), SEED)
    assert collector.getattr_env("env") is env
    collector.shutdown()


def test_workers_make_the_environment_and_keep_nested_batch_sizes():
    makes, frames = [make_spread] * 2, {"frames_per_batch": 16, "total_frames": 16}
    collector = MultiSyncCollector(makes, argmax_policy(), cat_results="stack", **frames)
    collector.set_seed(SEED)
    batch = next(iter(collector))
    assert batch["next", "agent"].batch_size == (*batch.shape, 3)
    for worker, part in enumerate(batch):
        check_spread(part, SEED + worker)
    collector.shutdown()


def test_environments_in_processes_are_those_of_one_process():
    from gleanrl.envs import ParallelEnv as Processes

    found = []
    for kind in (Processes, SerialEnv):
        with kind(2, make_spread) as env:
            env.set_seed(SEED)
            found.append(env.rollout(9, argmax_policy(), break_when_any_done=False))
    assert (found[0] == found[1]).all()
    assert found[0]["agent"].batch_size == (2, 9, 3)


def torchrl_spread():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says which version of PettingZoo it was made for
        return TorchPettingZoo(make_spread(), use_mask=True)


@pytest.mark.parametrize(
    "make", [torchrl_spread, partial(PettingZooEnv, make_spread, use_mask=True)]
)
def test_nested_batch_sizes_pass_through_splitting_and_replay(make):
    collector = Collector(make, frames_per_batch=16, total_frames=16, split_trajs=True)
    (split,) = collector
    collector.shutdown()
    assert split.shape == (3, 6)
    assert split["next", "agent"].batch_size == (3, 6, 3)
    for storage in (LazyTensorStorage, ListStorage):
        buffer = ReplayBuffer(storage=storage(20), batch_size=4)
        buffer.extend(split.flatten(0, 1))
        assert buffer.sample()["next", "agent"].batch_size == (4, 3)


def stay(td):
    return td.set(("agent", "action"), torch.zeros(*td["agent"].shape, dtype=torch.int64))


def test_an_episodes_return_is_the_mean_over_its_agents_everywhere(tmp_path, capsys):
    recorder = Recorder(tmp_path / "data", format="tensordict")
    with Collector(make_spread, stay, frames_per_batch=12, total_frames=12) as collector:
        collector.set_seed(1)
        (batch,) = collector
        stats = collector.stats()
    expected = batch["next", "agent", "reward"].mean((1, 2)).view(2, 6).double().sum(1)
    assert (stats["episodes"], stats["return_mean"]) == (2, pytest.approx(expected.mean().item()))
    with recorder:
        recorder.write(batch)
    assert main(["inspect", str(tmp_path / "data")]) == 0
    assert f"{expected.mean():,.1f}" in capsys.readouterr().out
    reward = ("next", "agent", "reward")
    with Evaluator(
        make_spread, stay, num_trajectories=2, reward_keys=reward, seed=1, backend="inline"
    ) as evaluator:
        assert evaluator.evaluate().returns.tolist() == pytest.approx(expected.tolist())


def test_specs_describe_what_steps_return():
    env = PettingZooEnv("mpe/simple_spread_v3", return_state=True, use_mask=True, max_cycles=4)
    data = env.rollout(4)
    fake = env.fake_tensordict()
    assert set(data.keys(True, True)) == set(fake.keys(True, True))
    for key, value in fake.items(True, True):
        assert value.shape == data[key].shape[1:], key
        assert value.dtype == data[key].dtype, key
    assert fake["next", "agent"].batch_size == (3,)
    assert env.full_observation_spec.is_in(data[0].select(*env.observation_keys))
    assert env.full_action_spec.is_in(data[0].select(*env.action_keys))
    assert data["state"].shape == (4, 54)
    assert data["next", "truncated"].flatten().tolist() == [False] * 3 + [True]


def test_agents_that_differ_are_groups_of_their_own():
    env = PettingZooWrapper(simple_world_comm_v3.parallel_env())
    assert list(env.group_map) == ["leadadversary", "adversary", "agent"]
    step = env.rand_step(env.reset())
    assert step["next", "adversary", "observation"].shape == (3, 34)
    assert step["leadadversary", "action"].shape == (1,)
    with pytest.raises(ConfigError, match="different groups with group_map="):
        PettingZooEnv("simple_world_comm_v3", group_map=MarlGroupMapType.ALL_IN_ONE_GROUP)


@pytest.mark.parametrize(
    ("group_map", "groups"),
    [
        (MarlGroupMapType.ALL_IN_ONE_GROUP, {"agents": 3}),
        (TorchGroupMapType.ONE_GROUP_PER_AGENT, {"agent_0": 1, "agent_1": 1, "agent_2": 1}),
        ({"odd": ["agent_1"], "even": ["agent_2", "agent_0"]}, {"odd": 1, "even": 2}),
    ],
)
def test_groups_can_be_chosen(group_map, groups):
    step = PettingZooEnv("simple_spread_v3", group_map=group_map, categorical_actions=False)
    step = step.rand_step(step.reset())
    assert {name: len(step[name]) for name in groups} == groups
    assert all(step[name, "action"].sum(-1).eq(1).all() for name in groups)


def test_every_agent_is_in_exactly_one_group():
    with pytest.raises(ConfigError, match="exactly one group"):
        PettingZooEnv("simple_spread_v3", group_map={"some": ["agent_0"]})


# -- agents that come and go -----------------------------------------------------------------------


class Leaving(ParallelEnv):
    """Agent `a_i` ends after `i + 1` steps; info says that only action `t % 3` is allowed."""

    metadata = {"name": "leaving"}
    possible_agents = ["a_0", "a_1", "a_2"]

    def observation_space(self, agent):
        return spaces.Box(-9, 9, (2,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(3)

    def reset(self, seed=None, options=None):
        self.agents, self.t = list(self.possible_agents), 0
        return self.told()

    def told(self):
        shown = {a: np.array([int(a[-1]), self.t], np.float32) for a in self.agents}
        return shown, {a: {"action_mask": np.arange(3) == self.t % 3} for a in self.agents}

    def step(self, actions):
        assert list(actions) == self.agents
        assert set(actions.values()) == {self.t % 3}
        self.t += 1
        shown, infos = self.told()
        rewards = {a: 10.0 * int(a[-1]) + self.t for a in self.agents}
        dead = {a: int(a[-1]) < self.t for a in self.agents}
        self.agents = [a for a in self.agents if not dead[a]]
        return shown, rewards, dead, dict.fromkeys(dead, False), infos


def test_agents_that_end_early_are_masked_until_the_last_has_ended():
    make = partial(PettingZooEnv, Leaving, done_on_any=False)
    (batch,) = Collector(make, frames_per_batch=6, total_frames=6)
    after = batch["next", "a"]
    mask = [[1, 1, 1], [0, 1, 1], [0, 0, 1]]
    assert batch["a", "mask"].tolist() == [[bool(m) for m in row] for row in mask * 2]
    assert after["reward"][:3, :, 0].tolist() == [[1, 11, 21], [0, 12, 22], [0, 0, 23]]
    assert after["done"][:3, :, 0].int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert torch.equal(after["done"], after["terminated"])
    assert after["observation"][:3, 0].tolist() == [[0, 1], [0, 0], [0, 0]]
    assert batch["next", "done"].flatten().tolist() == [False, False, True] * 2
    assert batch["a", "action_mask"][1].tolist() == [[True] * 3] + [[False, True, False]] * 2
    assert batch["collector", "traj_ids"].tolist() == [0, 0, 0, 1, 1, 1]


def test_an_episode_that_ends_with_its_first_agent_truncates_the_others():
    (batch,) = Collector(Leaving, frames_per_batch=2, total_frames=2, num_envs=2)
    after = batch["next", "a"][:, 0]
    assert after["done"].all()
    assert after["terminated"][0, :, 0].tolist() == [True, False, False]
    assert after["truncated"][0, :, 0].tolist() == [False, True, True]
    assert batch["next", "terminated"].all()


class Unlike(Leaving):
    """Two kinds of agents, with numbers of actions of their own; infos stay empty after resets."""

    possible_agents = ["a_0", "b_0"]

    def action_space(self, agent):
        return spaces.Discrete(3 if agent == "a_0" else 5)

    def told(self):
        shown = {a: np.zeros(2, np.float32) for a in self.agents}
        masks = {a: {"action_mask": np.arange(self.action_space(a).n) == 1} for a in self.agents}
        return shown, {} if self.t else masks

    def step(self, actions):
        assert self.t or set(actions.values()) == {1}
        self.t += 1
        everyone, over = dict.fromkeys(self.agents, 0.0), self.t == 3
        self.agents = [] if over else self.agents
        flags = dict.fromkeys(everyone, over)
        return self.told()[0], everyone, flags, flags, {}


def test_groups_have_masks_of_their_own_sizes_and_where_infos_say_nothing_all_is_allowed():
    (batch,) = Collector(Unlike, frames_per_batch=4, total_frames=4)
    assert batch["a", "action_mask"].sum(-1).flatten().tolist() == [1, 3, 3, 1]
    assert batch["b", "action_mask"].sum(-1).flatten().tolist() == [1, 5, 5, 1]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ((np.array([0, 0.5]), 1.0), None),  # floats are narrowed, as the space declares
        ((np.array([0, 1e39]), 1.0), "holds 1e[+]39, which does not fit float32"),
        ((np.array([0, 1]), 1.0), "agent 'a_1' returned 'observation' .* dtype int64"),
        ((np.array([0.0]), 1.0), r"agent 'a_1' returned 'observation' with shape \(1,\)"),
        ((np.zeros(2), None), "the rewards .*None.*; each must be a number"),
        ((np.zeros(2), "1"), "the rewards .*'1'.*; each must be a number"),
        ((np.zeros(2), 1e39), "the rewards .*1e[+]39.*; each must be a number that float32"),
    ],
)
def test_what_agents_are_shown_and_paid_is_never_changed_silently(returned, message):
    class Odd(Leaving):
        def told(self):
            shown, infos = super().told()
            return (shown | {"a_1": returned[0]} if self.t and "a_1" in shown else shown), infos

        def step(self, actions):
            shown, rewards, *rest = super().step(actions)
            return shown, rewards | {"a_1": returned[1]}, *rest

    collector = Collector(Odd, frames_per_batch=2, total_frames=2)
    if message is None:
        after = next(iter(collector))["next", "a"]
        assert after["observation"][0, 1].tolist() == [0, 0.5]
        assert after["reward"][0].flatten().tolist() == [1, 1, 21]
        return
    with pytest.raises(EnvError, match=message) as caught:
        next(iter(collector))
    if returned[1] == 1e39:
        assert isinstance(caught.value.__cause__, FloatingPointError)


def test_an_episode_without_agents_is_refused():
    class Empty(Leaving):
        def reset(self, seed=None, options=None):
            self.agents = []
            return {}, {}

    with pytest.raises(EnvError, match="left `agents` empty"):
        PettingZooEnv(Empty(), use_mask=True)


# -- turn-based environments -----------------------------------------------------------------------


class Paying(AECEnv):
    """Whose turn it is pays one to every other player; `p_1` leaves after its second turn."""

    metadata = {"name": "paying"}
    possible_agents = ["p_0", "p_1", "p_2"]

    def observation_space(self, agent):
        box = spaces.Box(0, 99, (1,), np.float32)
        return spaces.Dict({"observation": box, "action_mask": spaces.MultiBinary(4)})

    def action_space(self, agent):
        return spaces.Discrete(4)

    def reset(self, seed=None, options=None):
        self.agents, self.turns = list(self.possible_agents), 0
        zeros = dict.fromkeys(self.agents, 0.0)
        self.rewards, self._cumulative_rewards = dict(zeros), dict(zeros)
        self.terminations, self.truncations = (dict.fromkeys(self.agents, False) for _ in "ab")
        self.infos = {agent: {} for agent in self.agents}
        self.agent_selection = "p_0"

    def observe(self, agent):
        allowed = np.full(4, agent == self.agent_selection) & (np.arange(4) > 1)
        seen = np.array([self.turns], np.float32)
        return {"observation": seen, "action_mask": allowed.astype(np.int8)}

    def step(self, action):
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        assert action > 1
        self._cumulative_rewards[agent] = 0.0
        self.turns += 1
        self._clear_rewards()
        for other in self.agents:
            self.rewards[other] = 1.0 if other != agent else -2.0
        if agent == "p_1" and self.turns > 3:
            self.terminations[agent] = True
        if self.turns == 9:
            self.truncations = dict.fromkeys(self.agents, True)
        order = self.agents
        self.agent_selection = order[(order.index(agent) + 1) % len(order)]
        self._accumulate_rewards()
        self._deads_step_first()


def turn_by_turn(env, action_at):
    """Play one episode as PettingZoo's documentation does: who acted, and what each received."""
    env.reset(seed=SEED)
    returns, order = dict.fromkeys(env.possible_agents, 0.0), []
    for agent in env.agent_iter():
        _, reward, dead, late, _ = env.last()
        returns[agent] += reward
        over = dead or late
        env.step(None if over else action_at(len(order)))
        order += [] if over else [agent]
    return order, returns


@pytest.mark.parametrize(
    ("make", "action_at"),
    [
        (partial(simple_adversary_v3.env, max_cycles=4), lambda t: t % 5),
        (Paying, lambda t: 2 + t % 2),
    ],
)
def test_turns_and_returns_are_those_of_a_loop_turn_by_turn(make, action_at):
    order, returns = turn_by_turn(make(), action_at)
    steps = iter(range(100))

    def policy(td):
        t = next(steps)
        for agent in returns:
            td[agent, "action"] = torch.tensor([action_at(t)])
        return td

    env = PettingZooEnv(make, seed=SEED)
    data = env.rollout(100, policy)
    acting = torch.cat([data[agent, "mask"] for agent in returns], -1)
    assert [list(returns)[turn] for turn in acting.int().argmax(-1)] == order
    assert acting.sum(-1).eq(1).all()
    for agent, expected in returns.items():
        found = data["next", agent, "reward"].sum().item()
        assert found == pytest.approx(expected, rel=1e-5), agent
        assert data["next", agent, "done"][-1].all()
        assert not data["next", agent, "mask"][-1].any()
    assert data["next", "done"].flatten().tolist() == [False] * (len(order) - 1) + [True]


def probing(td):
    """Act by what the agents see and by which of them have ended; write something in the group."""
    for group in ("a", "agent", "p_0", "p_1", "p_2"):
        part = td.get(group, None)
        if part is None:
            continue
        allowed = part.get("action_mask", torch.ones(*part.shape, 5)).float()
        part.set("action", (allowed * torch.arange(1, allowed.shape[-1] + 1)).argmax(-1))
        part.set("seen", part["observation"].double().sum(-1) + part["done"][..., 0])
    return td


ROWS = [
    (make_spread, None, {}),
    (make_spread, argmax_policy, {"set_truncated": True, "max_frames_per_traj": 4}),
    (make_spread, lambda: probing, {"num_envs": 2, "max_frames_per_traj": 4}),
    (partial(PettingZooEnv, make_spread, return_state=True), argmax_policy, {"num_envs": 2}),
    (partial(PettingZooEnv, Leaving, done_on_any=False), None, {"num_envs": 2}),
    (partial(PettingZooEnv, Leaving, done_on_any=False), None, {"max_frames_per_traj": 2}),
    (partial(PettingZooEnv, Leaving, done_on_any=False), lambda: probing, {"num_envs": 2}),
    (Unlike, None, {"num_envs": 3}),
    (lambda: SerialEnv(2, lambda: SerialEnv(1, Unlike)), None, {}),
    (Paying, None, {"num_envs": 2, "max_frames_per_traj": 7, "set_truncated": True}),
    (Paying, lambda: probing, {"compact_obs": True}),
]


@pytest.mark.parametrize(("make", "policy", "options"), ROWS)
def test_rows_hold_what_the_methods_on_tensordicts_give(make, policy, options):
    found = []
    for fast in (True, False):
        torch.manual_seed(3)
        acts = None if policy is None else policy()
        collector = Collector(
            make, acts, frames_per_batch=30, total_frames=120, fast=fast, **options
        )
        assert ("loop: rows" in collector.explain()) is fast
        collector.set_seed(SEED)
        found.append(list(collector))
    assert len(found[0]) == 4
    for rows, plain in zip(*found, strict=True):
        assert {*rows.keys(True, True)} == {*plain.keys(True, True)}
        for key, value in rows.items(True):
            other = plain[key]
            same = value.batch_size == other.batch_size if hasattr(value, "batch_size") else True
            assert same, key
            if isinstance(value, torch.Tensor):
                assert value.dtype == other.dtype, key
                assert torch.equal(value, other), key


def test_turn_based_environments_are_collected_with_allowed_random_actions():
    collector = Collector(Paying, frames_per_batch=36, total_frames=36, num_envs=2)
    (batch,) = collector
    assert batch["p_1", "mask"][:, :9, 0].sum(-1).tolist() == [2, 2]
    acting = batch["p_0", "mask"]
    assert batch["p_0", "action_mask"][acting].tolist()[0] == [False, False, True, True]
    assert batch["p_0", "action_mask"][~acting].all()
    assert batch["next", "p_1", "terminated"][:, 8].all()
    assert batch["next", "truncated"][:, 8].all()
    collector.shutdown()


def test_a_turn_based_environment_needs_its_mask():
    with pytest.raises(ConfigError, match="whose turn"):
        PettingZooEnv("simple_adversary_v3", parallel=False, use_mask=False)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_id_without_the_form_that_is_asked_for_is_refused():
    with pytest.raises(ConfigError, match=r"'tictactoe_v3' has no parallel form: pass parallel=F"):
        PettingZooEnv("tictactoe_v3")


@pytest.mark.parametrize("task", ["simple_sprad_v3", "nothing/simple_spread_v3"])
def test_unknown_ids_are_named(task):
    with pytest.raises(KeyError, match=task):
        PettingZooEnv(task)
    with pytest.raises(KeyError, match="PettingZooEnv" if "/" in task else task):
        Collector(task, frames_per_batch=4)


def test_actions_of_another_shape_are_named():
    policy = argmax_policy().module[0]  # one number per action
    with pytest.raises(PolicyError, match=r"shape \(3, 5\); the environment wants \(3,\)"):
        Collector(make_spread, policy, frames_per_batch=4).rollout()
