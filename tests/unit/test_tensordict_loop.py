"""Environments with TensorDict methods: what is delivered, in rows and as ragged payloads."""

import warnings
from collections import UserList
from functools import partial

import gymnasium as gym
import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from tensordict.nn import InteractionType, TensorDictModule, TensorDictSequential
from tensordict.nn.probabilistic import interaction_type
from torch import nn
from torchrl.envs import Compose, GymEnv, RewardSum, SerialEnv, StepCounter, TransformedEnv
from torchrl.modules import GRUModule
from torchrl.testing.mocking_classes import (
    CountingEnv,
    CountingEnvWithString,
    EnvWithDynamicSpec,
    EnvWithMetadata,
    HeterogeneousCountingEnv,
    MultiKeyCountingEnv,
    Str2StrEnv,
)

from gleanrl import (
    Collector,
    ConfigError,
    EnvError,
    Interruptor,
    MultiSyncCollector,
    PolicyError,
    WeightsError,
)


@pytest.fixture
def collector():
    """Open collectors that are shut down after the test."""
    opened = []

    def make(env, policy=None, frames=12, **options):
        opened.append(Collector(env, policy, frames_per_batch=frames, **options))
        return opened[-1]

    yield make
    for one in opened:
        one.shutdown()


def take(source, batches=1):
    """Return copies of batches, one after the other along time."""
    found = [batch.clone() for _, batch in zip(range(batches), source, strict=False)]
    return found[0] if batches == 1 else torch.cat(found, -1)


def flat(value):
    return value.flatten().tolist()


def count_up(td):
    """Act with 1 everywhere."""
    return td.set("action", torch.ones(*td.batch_size, 1, dtype=torch.int8))


class Talkative(CountingEnvWithString):
    """Says what it counts."""

    def get_random_string(self):
        return f"count {int(self.count)}" if hasattr(self, "count") else "nothing"


FIXED = pytest.mark.parametrize(
    "counting", [CountingEnv, CountingEnvWithString], ids=["rows", "payload"]
)
"""An environment whose steps go into rows, and the same with a string beside its numbers."""

ENVS = {
    "growing": EnvWithDynamicSpec,
    "string": CountingEnvWithString,
    "strings only": Str2StrEnv,
    "metadata": EnvWithMetadata,
    "lazy": HeterogeneousCountingEnv,
    "lazy batch": lambda: HeterogeneousCountingEnv(batch_size=[2]),
    "dense": lambda: GymEnv("Pendulum-v1"),
    "dense batch": lambda: SerialEnv(2, lambda: GymEnv("CartPole-v1")),
    "groups": lambda: MultiKeyCountingEnv(batch_size=[2]),
}


def leaves(batch):
    """Return the leaves of a batch, of every step and element where they do not stack."""
    if isinstance(batch, LazyStackedTensorDict):
        return [leaf for part in batch.tensordicts for leaf in leaves(part)]
    found = []
    for key in sorted(batch.keys()):
        value = batch.get(key)
        found += leaves(value) if isinstance(value, TensorDictBase) else [value]
    return found


@pytest.mark.parametrize("name", ["growing", "lazy", "lazy batch"])
def test_ragged_data_equal_those_of_torchrls_collector(collector, name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing it warns about itself
        from torchrl.collectors import Collector as TheirCollector
    theirs, ours = ENVS[name](), ENVS[name]()
    theirs.set_seed(3)
    reference = TheirCollector(
        theirs, theirs.rand_action, frames_per_batch=12, total_frames=12, use_buffers=False
    )
    torch.manual_seed(5)
    (expected,) = reference
    reference.shutdown()
    ours.set_seed(3)
    source = collector(ours, ours.rand_action)
    torch.manual_seed(5)
    got = take(source)
    assert set(got.keys(True, True)) == set(expected.keys(True, True))
    pairs = list(zip(leaves(got), leaves(expected), strict=True))
    assert pairs
    for mine, other in pairs:
        assert torch.equal(mine, other)


@pytest.mark.parametrize("name", ENVS)
def test_the_last_dimension_is_time(collector, name):
    env = ENVS[name]()
    lead = tuple(env.batch_size)
    batch = take(collector(env))
    time = 12 // max(1, env.batch_size.numel())
    assert batch.shape == (*lead, time)
    assert batch.names == [None] * len(lead) + ["time"]
    assert batch["collector", "traj_ids"].shape == (*lead, time)
    assert batch["collector", "traj_ids"].dtype == torch.int64


@FIXED
def test_data_of_equal_shapes_are_stacked_densely(collector, counting):
    batch = take(collector(counting(), count_up, 3))
    assert type(batch) is TensorDict
    assert flat(batch["observation"]) == [0, 1, 2]


def test_strings_are_kept(collector):
    batch = take(collector(Talkative(), count_up, 3))
    assert list(batch["next", "string"]) == ["count 1", "count 2", "count 3"]
    assert list(batch["string"])[1:] == ["count 1", "count 2"]


def test_growing_data_are_stacked_lazily(collector):
    batch = take(collector(EnvWithDynamicSpec(max_count=3), frames=5))
    assert isinstance(batch, LazyStackedTensorDict)
    assert [tuple(step["observation"].shape) for step in batch.unbind(0)] == [
        (3, n, 2) for n in (1, 2, 3, 1, 2)
    ]


@FIXED
def test_final_observation_is_the_true_one_and_the_next_root_that_of_the_reset(collector, counting):
    batch = take(collector(counting(max_steps=2), count_up, 4), 2)
    assert flat(batch["observation"]) == [0, 1, 2, 0, 1, 2, 0, 1]
    assert flat(batch["next", "observation"]) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert flat(batch["next", "done"]) == [False, False, True] * 2 + [False] * 2
    assert flat(batch["collector", "traj_ids"]) == [0, 0, 0, 1, 1, 1, 2, 2]
    assert not batch["done"].any()


@FIXED
def test_trajectory_ids_are_apart_between_environments(collector, counting):
    if counting is CountingEnvWithString:
        env = SerialEnv(2, lambda: Talkative(max_steps=2))
    else:
        env = CountingEnv(max_steps=2, batch_size=[2])
    ids = take(collector(env, count_up, 4), 2)["collector", "traj_ids"]
    assert ids.tolist() == [[0, 0, 0, 2], [1, 1, 1, 3]]


@FIXED
def test_trajectory_ids_can_be_left_out(collector, counting):
    batch = take(collector(counting(), frames=2, track_traj_ids=False))
    assert "collector" not in batch.keys()


@FIXED
def test_long_episodes_are_truncated_and_counted(collector, counting):
    batch = take(collector(counting(max_steps=50), count_up, 4, max_frames_per_traj=3), 2)
    assert flat(batch["step_count"]) == [0, 1, 2, 0, 1, 2, 0, 1]
    assert flat(batch["next", "step_count"]) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert flat(batch["observation"]) == [0, 1, 2, 0, 1, 2, 0, 1]
    cut = [False, False, True, False, False, True, False, False]
    assert flat(batch["next", "truncated"]) == cut
    assert flat(batch["next", "done"]) == cut
    assert not batch["next", "terminated"].any()
    assert not batch["truncated"].any()
    assert flat(batch["collector", "traj_ids"]) == [0, 0, 0, 1, 1, 1, 2, 2]


def test_an_environment_that_ends_by_itself_is_not_truncated_as_well(collector):
    env = CountingEnv(max_steps=2, batch_size=[2])

    def act(td):
        return td.set("action", torch.tensor([[1], [0]], dtype=torch.int8))

    batch = take(collector(env, act, 8, max_frames_per_traj=3))
    assert batch["next", "terminated"].squeeze(-1)[:, 2].tolist() == [True, False]
    assert batch["next", "truncated"].squeeze(-1)[:, 2].tolist() == [False, True]
    assert batch["next", "done"].squeeze(-1)[:, 2].tolist() == [True, True]


def test_long_episodes_of_lazy_batches_are_truncated(collector):
    env = HeterogeneousCountingEnv(max_steps=50, batch_size=[2])
    batch = take(collector(env, max_frames_per_traj=3))
    done = batch["next", "lazy"].get("done").flatten(2).all(-1)
    assert done.tolist() == [[False, False, True] * 2] * 2
    assert batch["collector", "traj_ids"].tolist() == [[0, 0, 0, 2, 2, 2], [1, 1, 1, 3, 3, 3]]


def test_every_group_is_truncated(collector):
    env = MultiKeyCountingEnv(max_steps=50, batch_size=[2])
    batch = take(collector(env, frames=8, max_frames_per_traj=2))
    for prefix in ((), ("nested_1",), ("nested_2",)):
        done = batch[("next", *prefix, "done")].flatten(2).all(-1)
        assert done.tolist() == [[False, True] * 2] * 2


def test_an_agents_flag_does_not_end_an_episode_that_the_root_decides_about(collector):
    class Agents(MultiKeyCountingEnv):
        def _step(self, tensordict):
            after = super()._step(tensordict)
            after["nested_1", "done"] = torch.ones_like(after["nested_1", "done"])
            return after

    batch = take(collector(Agents(max_steps=100), frames=4))
    assert not batch["collector", "traj_ids"].any()
    assert batch["next", "nested_1", "done"].all()
    assert not batch["next", "done"].any()
    assert batch["nested_1", "done"][1:].all()  # what the root of the next step shows


def test_a_cut_resets_what_transforms_count(collector):
    class Paid(CountingEnv):
        def _step(self, tensordict):
            after = super()._step(tensordict)
            return after.set("reward", after["observation"].float())

    transforms = Compose(RewardSum(), StepCounter(step_count_key="steps"))
    env = TransformedEnv(Paid(max_steps=50), transforms)
    batch = take(collector(env, count_up, 5, max_frames_per_traj=2))
    assert flat(batch["steps"]) == [0, 1, 0, 1, 0]
    assert flat(batch["next", "steps"]) == [1, 2, 1, 2, 1]
    assert flat(batch["next", "episode_reward"]) == [1, 3, 1, 3, 1]


def test_counting_twice_is_an_error(collector):
    env = TransformedEnv(CountingEnv(), StepCounter())
    with pytest.raises(ConfigError, match=r"already delivers 'step_count'"):
        collector(env, max_frames_per_traj=3)


@FIXED
def test_environments_are_reset_before_each_rollout_if_asked(collector, counting):
    batch = take(collector(counting(max_steps=50), count_up, 3, reset_at_each_iter=True), 2)
    assert flat(batch["observation"]) == [0, 1, 2] * 2
    assert flat(batch["collector", "traj_ids"]) == [0, 0, 0, 1, 1, 1]


def test_the_last_step_can_be_marked_truncated(collector):
    batch = take(collector(GymEnv("Pendulum-v1"), frames=3, set_truncated=True))
    assert flat(batch["next", "truncated"]) == [False, False, True]
    assert flat(batch["next", "done"]) == [False, False, True]


@pytest.mark.parametrize("device", [None, "cpu"])
def test_the_policy_is_shown_the_device_that_was_named_for_it(collector, device):
    seen = set()

    def act(td):
        seen.add(td.device)
        return count_up(td)

    for own in (None, torch.device("cpu")):
        env = CountingEnv(max_steps=50)
        env.device = own
        source = collector(env, act, 3, policy_device=device)
        batch = take(source)
        assert source.env.device == own
    assert seen == {device and torch.device(device)}
    assert flat(batch["next", "observation"]) == [1, 2, 3]


@FIXED
def test_an_episode_that_ended_last_is_not_marked_truncated(collector, counting):
    env = counting(max_steps=2).add_truncated_keys()
    batch = take(collector(env, count_up, 3, set_truncated=True))
    assert not batch["next", "truncated"].any()
    assert flat(batch["next", "terminated"]) == [False, False, True]


@FIXED
def test_marking_needs_a_truncated_key(collector, counting):
    with pytest.raises(EnvError, match=r"needs a 'truncated' key.*add_truncated_keys"):
        collector(counting(), set_truncated=True)


class Talks(CountingEnv):
    """Returns an entry that it does not declare where it has counted to ``at``."""

    def __init__(self, at):
        super().__init__(max_steps=3)
        self.at = at

    def _step(self, tensordict):
        step = super()._step(tensordict)
        return step.set("extra", step["observation"] * 2) if self.count == self.at else step


@pytest.mark.parametrize("kind", [Collector, partial(MultiSyncCollector, backend="inline")])
def test_an_entry_that_some_environments_return_in_some_steps_needs_an_open_layout(kind):
    envs = [partial(Talks, at) for at in (9, 2)]
    with kind(envs, count_up, frames_per_batch=6, fast=False) as collector:
        rows = [[step["next"] for step in env.unbind(0)] for env in collector.rollout().unbind(0)]
    found = [[int(step["extra"]) if "extra" in step else 0 for step in row] for row in rows]
    assert found == [[0, 0, 0], [0, 4, 0]]
    with (
        kind(envs, count_up, frames_per_batch=6) as collector,
        pytest.raises(EnvError, match=r"'extra'\) as .* at step 1 of"),
    ):
        collector.rollout()


class Undeclared(CountingEnv):
    """Says once in an episode that this is truncated, which its specs lack."""

    def _step(self, tensordict):
        step = super()._step(tensordict)
        return step.set("truncated", step["done"].clone()) if self.count == 2 else step


def test_truncation_that_is_not_declared_is_an_error_that_says_how_to_declare_it(collector):
    message = r"Undeclared returned \('next', 'truncated'\).*add_truncated_keys\(\)"
    with pytest.raises(EnvError, match=message):
        take(collector(Undeclared(max_steps=4), count_up, 3))
    declared = collector(Undeclared(max_steps=4).add_truncated_keys(), count_up, 3)
    assert take(declared)["next", "truncated"].shape == (3, 1)


@FIXED
def test_a_stopped_rollout_keeps_its_shape(collector, counting):
    interruptor = Interruptor()

    def act(td):
        if int(td["observation"]) == 1:
            interruptor.stop_collection()
        return count_up(td)

    source = collector(
        (Talkative if counting is CountingEnvWithString else counting)(max_steps=50),
        act,
        6,
        interruptor=interruptor,
        max_frames_per_traj=20,
        track_policy_version=True,
        set_truncated=True,
    )
    batch = take(source)
    assert batch.shape == (6,)
    assert batch["collector", "mask"].tolist() == [True] * 2 + [False] * 4
    assert batch["collector", "traj_ids"].tolist() == [0, 0, -1, -1, -1, -1]
    assert flat(batch["next", "observation"]) == [1, 2, 0, 0, 0, 0]
    assert flat(batch["next", "step_count"]) == [1, 2, 0, 0, 0, 0]
    assert flat(batch["step_count"]) == [0, 1, 0, 0, 0, 0]
    assert flat(batch["next", "truncated"]) == [False, True] + [False] * 4
    assert flat(batch["next", "done"]) == [False, True] + [False] * 4
    if counting is CountingEnvWithString:
        assert list(batch["next", "string"]) == ["count 1"] + ["count 2"] * 5
    assert take(source)["observation"][0].item() == 2, "collection goes on where it stopped"


@pytest.mark.parametrize("name", ["growing", "lazy batch", "dense", "groups"])
def test_a_rollout_takes_at_least_one_step(collector, name):
    interruptor = Interruptor()
    interruptor.stop_collection()
    batch = take(collector(ENVS[name](), frames=8, interruptor=interruptor))
    mask = batch["collector", "mask"]
    assert mask.shape == batch.shape
    assert mask[..., 0].all()
    assert not mask[..., 1:].any()
    assert (batch["collector", "traj_ids"][..., 1:] == -1).all()
    if name == "growing":
        assert batch[1]["next", "observation"].abs().sum() == 0


class Scorer(nn.Module):
    """A policy that writes more than actions."""

    in_keys = ["observation"]
    out_keys = ["action", "score"]

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, td):
        self.calls += 1
        count_up(td)
        return td.set("score", self.scale * 2).set("_secret", torch.ones(1))


@FIXED
def test_random_frames_do_not_call_the_policy_and_its_outputs_are_zero(collector, counting):
    policy = Scorer()
    source = collector(counting(max_steps=50), policy, 2, init_random_frames=2)
    at_first = policy.calls
    first = take(source)
    assert policy.calls == at_first == 1
    assert flat(first["score"]) == [0, 0]
    then = take(source)
    assert flat(then["score"]) == [2, 2]
    assert set(first.keys(True, True)) == set(then.keys(True, True))
    assert policy.calls == 3


@FIXED
def test_the_call_at_construction_sees_the_first_reset_and_leaves_no_trace(collector, counting):
    seen = UserList()  # a list that construction does not put back

    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, td):
            self.count += 1
            torch.rand(1)
            seen.append((interaction_type(), torch.is_grad_enabled(), td["observation"].item()))
            td["observation"].fill_(7)
            return count_up(td)

    policy, before = Noisy(), torch.get_rng_state()
    source = collector(
        counting(), policy, 1, exploration_type=InteractionType.MODE, init_random_frames=1
    )
    assert seen == [(InteractionType.MODE, False, 0)]
    assert torch.equal(torch.get_rng_state(), before)
    assert policy.count == 0
    assert take(source)["observation"].item() == 0
    assert len(seen) == 1, "the first frame was random"


class Remembering(nn.Module):
    """A recurrent policy that reads where episodes begin."""

    in_keys = ["observation", "hidden", "is_init"]
    out_keys = ["action", ("next", "hidden"), "fresh"]
    state_shapes = {"hidden": (2,)}

    def forward(self, td):
        td.set("fresh", td["is_init"].clone())
        td.set(("next", "hidden"), td["hidden"] + 1)
        return count_up(td)


@FIXED
@pytest.mark.parametrize("random", [0, 4])
def test_states_are_zero_where_an_episode_begins_and_fed_back_after(collector, counting, random):
    source = collector(counting(max_steps=2), Remembering(), 4, init_random_frames=random)
    first, then = take(source), take(source)
    assert set(first.keys(True, True)) == set(then.keys(True, True))
    if random:
        assert not first["next", "hidden"].any()
        return
    batch = torch.cat([first, then])
    assert batch["hidden"][:, 0].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert batch["next", "hidden"][:, 1].tolist() == [1, 2, 3, 1, 2, 3, 1, 2]
    assert flat(batch["fresh"]) == [True, False, False] * 2 + [True, False]
    assert torch.equal(batch["is_init"], batch["fresh"])


def test_gated_recurrent_units_are_carried_on_growing_data(collector):
    unit = GRUModule(2, 4, in_keys=["mean", "hx"], out_keys=["feat", ("next", "hx")])
    policy = TensorDictSequential(
        TensorDictModule(lambda seen: seen.mean((-3, -2)), ["observation"], ["mean"]),
        unit,
        TensorDictModule(lambda feat: feat[..., :2], ["feat"], ["action"]),
    )
    batch = take(collector(EnvWithDynamicSpec(max_count=3), policy, 4))
    hidden, after = batch.get("hx"), batch.get(("next", "hx"))
    assert hidden.shape == (4, 1, 4)
    assert not hidden[[0, 3]].any()
    assert torch.equal(hidden[1:3], after[:2])


@FIXED
def test_inputs_of_the_policy_can_be_left_to_the_environment(collector, counting):
    with pytest.raises(PolicyError, match=r"reads 'hidden', 'is_init'"):
        collector(counting(), Remembering(), auto_register_policy_transforms=False)


@FIXED
def test_policies_that_read_what_is_not_there_are_named(collector, counting):
    policy = TensorDictModule(lambda x: x, ["speed"], ["action"])
    with pytest.raises(PolicyError, match=r"reads 'speed', which.*'observation'"):
        collector(counting(), policy)


@FIXED
def test_without_a_policy_actions_are_random(collector, counting):
    torch.manual_seed(0)
    actions = take(collector(counting(max_steps=99), frames=20))["action"]
    assert 0 < actions.sum() < 20


@FIXED
def test_private_entries_are_not_delivered(collector, counting):
    assert "_secret" not in take(collector(counting(), Scorer(), 2)).keys()


@FIXED
def test_a_policy_may_return_another_tensordict(collector, counting):
    def act(td):
        return TensorDict(action=torch.ones(1, dtype=torch.int8), note=torch.zeros(2))

    batch = take(collector(counting(), act, 3))
    assert flat(batch["observation"]) == [0, 1, 2]
    assert batch["note"].shape == (3, 2)


@FIXED
def test_observations_under_next_can_be_left_out(collector, counting):
    batch = take(collector(counting(), frames=3, compact_obs=True))
    assert set(batch["next"].keys()) == {"done", "terminated", "reward"}
    assert ("string" in batch.keys()) == (counting is CountingEnvWithString)


@FIXED
def test_policy_versions_are_written(collector, counting):
    source = collector(counting(), Scorer(), 2, track_policy_version=True)
    take(source)
    source.update_policy_weights_({"scale": torch.tensor([3.0])})
    batch = take(source)
    assert batch["policy_version"].tolist() == [1, 1]
    assert batch["next", "policy_version"].tolist() == [1, 1]
    assert flat(batch["score"]) == [6, 6]


@FIXED
def test_weights_for_a_policy_without_any_are_an_error(collector, counting):
    with pytest.raises(WeightsError, match=r"not an nn\.Module"):
        collector(counting(), count_up).update_policy_weights_({"scale": torch.ones(1)})


@FIXED
def test_not_finite_data_are_an_error_if_asked(collector, counting):
    class Broken(counting):
        def _step(self, tensordict):
            after = super()._step(tensordict)
            return after.set("reward", after["reward"] / (2 - self.count))

    source = collector(Broken(), count_up, 4, check_finite=True)
    with pytest.raises(EnvError, match=r"\('next', 'reward'\).* at step 1 of the rollout"):
        take(source)


def test_not_finite_data_are_found_in_lazy_stacks(collector):
    class Broken(EnvWithDynamicSpec):
        def _step(self, tensordict):
            after = super()._step(tensordict)
            return after.set("observation", after["observation"] * float("nan"))

    with pytest.raises(EnvError, match=r"'observation'\) holds NaN or infinity at step 0"):
        take(collector(Broken(), frames=2, check_finite=True))


def test_seeds_make_rollouts_repeatable_and_leave_the_learners_stream_alone(collector):
    source = collector(GymEnv("Pendulum-v1"), frames=4)
    before = torch.get_rng_state()
    source.set_seed(5)
    one = take(source)
    source.set_seed(5)
    two = take(source)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one["observation"], two["observation"])
    assert torch.equal(one["action"], two["action"])
    assert one["collector", "traj_ids"].tolist() != two["collector", "traj_ids"].tolist()


def test_seeds_go_to_the_environment_and_count_its_elements(collector):
    env = SerialEnv(3, lambda: GymEnv("CartPole-v1"))
    source = collector(SerialEnv(3, lambda: GymEnv("CartPole-v1")), frames=6)
    assert source.set_seed(7) == 9
    env.set_seed(7)
    assert torch.equal(take(source)["observation"][:, 0], env.reset()["observation"])
    env.close()


def test_a_static_seed_is_the_same_for_all(collector):
    source = collector(SerialEnv(3, lambda: GymEnv("CartPole-v1")), frames=6)
    assert source.set_seed(7, static_seed=True) == 7
    first = take(source)["observation"][:, 0]
    assert torch.equal(first[0], first[2])


@FIXED
def test_a_reset_starts_new_trajectories_where_asked(collector, counting):
    if counting is CountingEnvWithString:
        env = SerialEnv(2, lambda: Talkative(max_steps=50))
    else:
        env = CountingEnv(max_steps=50, batch_size=[2])
    source = collector(env, count_up, 4)
    take(source)
    source.reset([1])
    batch = take(source)
    assert batch["observation"].squeeze(-1).tolist() == [[2, 3], [0, 1]]
    assert batch["collector", "traj_ids"].tolist() == [[0, 0], [3, 3]]


@pytest.mark.parametrize("options", [{}, {"seed": 3}], ids=["plain", "with options"])
def test_a_partial_reset_leaves_the_other_environments_alone(collector, options):
    source = collector(SerialEnv(3, lambda: GymEnv("Pendulum-v1")), frames=12)
    last = take(source)["next", "observation"][:, -1]
    source.reset([1], **options)
    first = take(source)["observation"][:, 0]
    assert (first == last).all(-1).tolist() == [True, False, True]


def test_a_partial_reset_of_groups_reaches_all_of_them(collector):
    env = MultiKeyCountingEnv(max_steps=100, batch_size=[2])
    source = collector(env)
    take(source)
    source.reset([0])
    batch = take(source)
    shown = [key for key, _ in env.observation_spec.items(True, True)]
    for key in shown:
        counts = batch[key][:, 0].flatten(1).any(1)
        assert counts.tolist() == [False, True], key


@FIXED
def test_transforms_are_reset_with_their_environment(collector, counting):
    env = TransformedEnv(counting(max_steps=2), Compose(RewardSum(), StepCounter()))
    assert flat(take(collector(env, count_up, 5))["step_count"]) == [0, 1, 2, 0, 1]


@FIXED
def test_state_restores_counters(collector, counting):
    source = collector(counting(max_steps=2), count_up, 5)
    take(source)
    other = collector(counting(max_steps=2), count_up, 2)
    other.load_state_dict(source.state_dict())
    batch = take(other)
    assert batch["collector", "traj_ids"].tolist() == [1, 2]
    assert flat(batch["observation"]) == [2, 0]


def test_state_of_an_environment_is_a_copy(collector):
    env = CountingEnv(max_steps=50)
    source = collector(env, count_up, 3)
    state = source.state_dict()["env_state_dict"]
    take(source)
    assert state["count"].item() == 0
    assert env.count.item() == 3


@FIXED
def test_attributes_are_reached_from_outside(collector, counting):
    source = collector(counting(max_steps=7), Scorer())
    assert source.getattr_env("max_steps") == 7
    assert source.getattr_policy("calls") == 1, "the call at construction"


@FIXED
def test_construction_resets_once_and_never_steps(collector, counting):
    class Strict(counting):
        resets = 0

        def _reset(self, tensordict=None, **kwargs):
            self.resets += 1
            return super()._reset(tensordict, **kwargs)

        def _step(self, tensordict):
            raise AssertionError("stepped")

    env = Strict()
    collector(env, count_up)
    assert env.resets == 1


@FIXED
def test_the_reset_at_construction_is_the_first(collector, counting):
    class Resets(counting):
        made = 0

        def _reset(self, tensordict=None, **kwargs):
            self.made += 1
            return super()._reset(tensordict, **kwargs)

    env = Resets()
    take(collector(env, count_up, 2))
    assert env.made == 1


@pytest.mark.parametrize("which", [[], [[0]]])
def test_a_reset_before_the_first_batch_resets_as_it_does_without_tensordicts(which):
    def make():
        env = gym.make("Pendulum-v1")
        env.reset(seed=3)
        return env

    shown = []
    for fast in (True, False):
        with Collector([make, make], frames_per_batch=2, fast=fast) as collector:
            collector.reset(*which)
            shown.append(collector.next()["observation"])
    assert shown[0].equal(shown[1])


def test_shutting_down_twice_closes_the_environment_once(collector):
    env = GymEnv("CartPole-v1")
    source = collector(env)
    source.shutdown()
    source.shutdown()
    assert env.is_closed


def test_an_environment_closed_by_its_owner_stays_closed(collector):
    env = GymEnv("CartPole-v1")
    source = collector(env)
    env.close()
    source.shutdown()
    assert env.is_closed


def test_ragged_policy_outputs_are_delivered(collector):
    def act(td):
        td.set("logits", torch.zeros(int(td["observation"].shape[1])))
        return td.set("action", torch.zeros(2))

    batch = take(collector(EnvWithDynamicSpec(max_count=3), act, 3))
    assert [tuple(step["logits"].shape) for step in batch.unbind(0)] == [(1,), (2,), (3,)]
