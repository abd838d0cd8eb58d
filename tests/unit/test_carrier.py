"""Rollouts of environments whose data are ragged, lazy or not tensors."""

import warnings
from collections import UserList

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

from gleanrl.core.errors import ConfigError, EnvError, PolicyError, WeightsError
from gleanrl.core.layout import Field
from gleanrl.core.messages import Snapshot
from gleanrl.core.options import EnvOptions, PolicyOptions, RolloutOptions
from gleanrl.rollout.build import SourceBuilder
from gleanrl.rollout.carrier import CarrierRollout


def collect(source, steps, stop=None, random=False):
    report = source.collect(None, steps, stop or bytearray(1), random)
    assert report.payload.handle.shape[-1] == steps
    return report.payload.handle


def carrier(env, policy=None, **options):
    first = options.pop("first", None)
    own = {name: options.pop(name) for name in ("states", "is_init") if name in options}
    return CarrierRollout(env, policy, RolloutOptions(**options), first=first, **own)


def count_up(td):
    """Act with 1 everywhere."""
    return td.set("action", torch.ones(*td.batch_size, 1, dtype=torch.int8))


class Talkative(CountingEnvWithString):
    """Says what it counts."""

    def get_random_string(self):
        return f"count {int(self.count)}" if hasattr(self, "count") else "nothing"


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


@pytest.fixture(params=ENVS, ids=str)
def make(request):
    return ENVS[request.param]


def leaves(batch):
    """Return the leaves of a batch, of every step and element where they do not stack."""
    if isinstance(batch, LazyStackedTensorDict):
        return [leaf for part in batch.tensordicts for leaf in leaves(part)]
    found = []
    for key in sorted(batch.keys()):
        value = batch.get(key)
        found += leaves(value) if isinstance(value, TensorDictBase) else [value]
    return found


@pytest.mark.parametrize("name", ["growing", "lazy", "lazy batch", "dense", "groups"])
def test_data_equal_those_of_torchrls_collector(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing it warns about itself
        from torchrl.collectors import Collector
    theirs, ours = ENVS[name](), ENVS[name]()
    theirs.set_seed(3)
    policy = theirs.rand_action
    collector = Collector(theirs, policy, frames_per_batch=12, total_frames=12, use_buffers=False)
    torch.manual_seed(5)
    (expected,) = collector
    collector.shutdown()
    ours.set_seed(3)
    source = carrier(ours, ours.rand_action)
    torch.manual_seed(5)
    got = collect(source, expected.shape[-1])
    assert set(got.keys(True, True)) == set(expected.keys(True, True))
    pairs = list(zip(leaves(got), leaves(expected), strict=True))
    assert pairs
    for mine, other in pairs:
        assert torch.equal(mine, other)


def test_there_is_no_fixed_layout(make):
    source = carrier(make())
    assert source.layout() is None


def test_the_last_dimension_is_time(make):
    env = make()
    batch = collect(carrier(env), 5)
    lead = tuple(env.batch_size)
    assert batch.shape == (*lead, 5)
    assert batch.names == [None] * len(lead) + ["time"]
    assert batch["collector", "traj_ids"].shape == (*lead, 5)
    assert batch["collector", "traj_ids"].dtype == torch.int64


def test_data_of_equal_shapes_are_stacked_densely():
    batch = collect(carrier(CountingEnvWithString(), count_up), 3)
    assert type(batch) is TensorDict
    assert batch["observation"].flatten().tolist() == [0, 1, 2]


def test_strings_are_kept():
    batch = collect(carrier(Talkative(), count_up), 3)
    assert list(batch["next", "string"]) == ["count 1", "count 2", "count 3"]
    assert list(batch["string"])[1:] == ["count 1", "count 2"]


def test_growing_data_are_stacked_lazily():
    batch = collect(carrier(EnvWithDynamicSpec(max_count=3)), 5)
    assert isinstance(batch, LazyStackedTensorDict)
    assert [tuple(step["observation"].shape) for step in batch.unbind(0)] == [
        (3, n, 2) for n in (1, 2, 3, 1, 2)
    ]


def test_final_observation_is_the_true_one_and_the_next_root_that_of_the_reset():
    batch = collect(carrier(CountingEnv(max_steps=2), count_up), 8)
    assert batch["observation"].flatten().tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert batch["next", "observation"].flatten().tolist() == [1, 2, 3, 1, 2, 3, 1, 2]
    assert batch["collector", "traj_ids"].tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert not batch["done"].any()


def test_trajectory_ids_span_rollouts_and_are_apart_between_environments():
    source = carrier(CountingEnv(max_steps=2, batch_size=[2]), count_up)
    source.place(4, 10)
    ids = [collect(source, 2)["collector", "traj_ids"].tolist() for _ in range(2)]
    assert ids == [[[4, 4], [5, 5]], [[4, 14], [5, 15]]]


def test_trajectory_ids_can_be_left_out():
    batch = collect(carrier(CountingEnv(), track_traj_ids=False), 2)
    assert "collector" not in batch.keys()


def test_long_episodes_are_truncated_and_counted():
    source = carrier(CountingEnvWithString(max_steps=50), count_up, max_frames_per_traj=3)
    batch = torch.cat([collect(source, 4), collect(source, 4)], 0)
    assert batch["step_count"].flatten().tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert batch["next", "step_count"].flatten().tolist() == [1, 2, 3, 1, 2, 3, 1, 2]
    assert batch["observation"].flatten().tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    cut = [False, False, True, False, False, True, False, False]
    assert batch["next", "truncated"].flatten().tolist() == cut
    assert batch["next", "done"].flatten().tolist() == cut
    assert not batch["next", "terminated"].any()
    assert not batch["truncated"].any()
    assert batch["collector", "traj_ids"].tolist() == [0, 0, 0, 1, 1, 1, 2, 2]


def test_long_episodes_of_lazy_batches_are_truncated():
    env = HeterogeneousCountingEnv(max_steps=50, batch_size=[2])
    batch = collect(carrier(env, max_frames_per_traj=3), 6)
    done = batch["next", "lazy"].get("done").flatten(2).all(-1)
    assert done.tolist() == [[False, False, True] * 2] * 2
    assert batch["collector", "traj_ids"].tolist() == [[0, 0, 0, 2, 2, 2], [1, 1, 1, 3, 3, 3]]


def test_counting_twice_is_an_error():
    env = TransformedEnv(CountingEnv(), StepCounter())
    with pytest.raises(ConfigError, match=r"already delivers 'step_count'"):
        carrier(env, max_frames_per_traj=3)


def test_environments_are_reset_before_each_rollout_if_asked():
    source = carrier(CountingEnv(max_steps=50), count_up, reset_at_each_iter=True)
    batches = [collect(source, 3) for _ in range(2)]
    assert [b["observation"].flatten().tolist() for b in batches] == [[0, 1, 2]] * 2
    assert [b["collector", "traj_ids"].tolist() for b in batches] == [[0, 0, 0], [1, 1, 1]]


def test_the_last_step_can_be_marked_truncated():
    env = GymEnv("Pendulum-v1")
    batch = collect(carrier(env, set_truncated=True), 3)
    assert batch["next", "truncated"].flatten().tolist() == [False, False, True]
    assert batch["next", "done"].flatten().tolist() == [False, False, True]


def test_an_episode_that_ended_last_is_not_marked_truncated():
    env = CountingEnv(max_steps=2).add_truncated_keys()
    batch = collect(carrier(env, count_up, set_truncated=True), 3)
    assert not batch["next", "truncated"].any()
    assert batch["next", "terminated"].flatten().tolist() == [False, False, True]


def test_marking_needs_a_truncated_key():
    with pytest.raises(EnvError, match=r"needs a 'truncated' key.*add_truncated_keys"):
        carrier(CountingEnv(), set_truncated=True)


def stopping(stop):
    def act(td):
        stop[0] = int(td["observation"]) == 1
        return count_up(td)

    return act


def test_a_stopped_rollout_keeps_its_shape():
    stop = bytearray(1)
    source = carrier(
        Talkative(max_steps=50),
        stopping(stop),
        mask=True,
        max_frames_per_traj=20,
        track_policy_version=True,
        set_truncated=True,
    )
    source.policy_version = 3
    report = source.collect(None, 6, stop, False)
    batch = report.payload.handle
    assert (report.steps, report.frames, batch.shape) == (2, 2, (6,))
    assert batch["collector", "mask"].tolist() == [True] * 2 + [False] * 4
    assert batch["collector", "traj_ids"].tolist() == [0, 0, -1, -1, -1, -1]
    assert batch["next", "observation"].flatten().tolist() == [1, 2, 0, 0, 0, 0]
    assert batch["next", "step_count"].flatten().tolist() == [1, 2, 0, 0, 0, 0]
    assert batch["step_count"].flatten().tolist() == [0, 1, 0, 0, 0, 0]
    assert batch["policy_version"].tolist() == [3, 3, 0, 0, 0, 0]
    assert batch["next", "truncated"].flatten().tolist() == [False, True] + [False] * 4
    assert batch["next", "done"].flatten().tolist() == [False, True] + [False] * 4
    assert list(batch["next", "string"]) == ["count 1"] + ["count 2"] * 5
    assert collect(source, 1, stop)["observation"].item() == 2


def test_a_stopped_rollout_of_growing_data_keeps_its_shape():
    source = carrier(EnvWithDynamicSpec(max_count=3), mask=True, track_policy_version=True)
    batch = collect(source, 4, bytearray(b"\1"))
    assert batch["collector", "mask"].tolist() == [True, False, False, False]
    assert batch["collector", "traj_ids"].tolist() == [0, -1, -1, -1]
    assert batch[1]["next", "observation"].abs().sum() == 0


def test_a_stopped_batch_of_environments_keeps_its_shape():
    source = carrier(HeterogeneousCountingEnv(batch_size=[2]), mask=True)
    batch = collect(source, 3, bytearray(b"\1"))
    assert batch.shape == (2, 3)
    assert batch["collector", "mask"].tolist() == [[True, False, False]] * 2


def test_a_rollout_takes_at_least_one_step():
    source = carrier(CountingEnv(), mask=True)
    assert collect(source, 4, bytearray(b"\1"))["collector", "mask"].sum() == 1


def test_frames_count_every_environment():
    report = carrier(CountingEnv(batch_size=[3])).collect(None, 4, bytearray(1), False)
    assert (report.steps, report.frames, report.policy_version) == (4, 12, 0)


class Scorer(nn.Module):
    """A policy that writes more than actions."""

    calls = 0

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, td):
        self.calls += 1
        count_up(td)
        return td.set("score", self.scale * 2).set("_secret", torch.ones(1))


def built(env, policy, provide_inputs=True, **options):
    """Build a source as collectors do."""
    return SourceBuilder(
        EnvOptions(create_env_fn=env),
        PolicyOptions(policy=policy, provide_inputs=provide_inputs),
        RolloutOptions(**options),
    )(0)


def test_random_frames_do_not_call_the_policy_and_its_outputs_are_zero():
    policy = Scorer()
    source = built(CountingEnvWithString(max_steps=50), policy)
    first = collect(source, 2, random=True)
    assert policy.calls == 0  # the call at construction is undone
    assert first["score"].flatten().tolist() == [0, 0]
    then = collect(source, 2)
    assert then["score"].flatten().tolist() == [2, 2]
    assert set(first.keys(True, True)) == set(then.keys(True, True))
    assert policy.calls == 2


def test_the_call_at_construction_sees_the_first_reset_and_leaves_no_trace():
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
    source = built(CountingEnvWithString(), policy, exploration=InteractionType.MODE)
    assert seen == [(InteractionType.MODE, False, 0)]
    assert torch.equal(torch.get_rng_state(), before)
    assert policy.count == 0
    batch = collect(source, 1, random=True)
    assert batch["observation"].item() == 0


class Remembering(nn.Module):
    """A recurrent policy that reads where episodes begin."""

    in_keys = ["observation", "hidden", "is_init"]
    out_keys = ["action", ("next", "hidden"), "fresh"]
    state_shapes = {"hidden": (2,)}

    def forward(self, td):
        td.set("fresh", td["is_init"].clone())
        td.set(("next", "hidden"), td["hidden"] + 1)
        return count_up(td)


def test_recurrent_policies_are_carried_on_environments_without_layout():
    source = built(CountingEnvWithString(max_steps=2), Remembering())
    batch = torch.cat([collect(source, 4), collect(source, 3)], 0)
    assert batch["hidden"][:, 0].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert batch["fresh"].flatten().tolist() == [True, False, False] * 2 + [True]
    quiet = collect(source, 2, random=True)
    assert set(quiet.keys(True, True)) == set(batch.keys(True, True))
    assert quiet["next", "hidden"].abs().sum() == 0


def test_gated_recurrent_units_are_carried_on_growing_data():
    unit = GRUModule(2, 4, in_keys=["mean", "hx"], out_keys=["feat", ("next", "hx")])
    policy = TensorDictSequential(
        TensorDictModule(lambda seen: seen.mean((-3, -2)), ["observation"], ["mean"]),
        unit,
        TensorDictModule(lambda feat: feat[..., :2], ["feat"], ["action"]),
    )
    source = built(EnvWithDynamicSpec(max_count=3), policy)
    batch = collect(source, 4)
    hidden, after = batch.get("hx"), batch.get(("next", "hx"))
    assert hidden.shape == (4, 1, 4)
    assert not hidden[[0, 3]].any()
    assert torch.equal(hidden[1:3], after[:2])


def test_inputs_of_the_policy_can_be_left_to_the_environment():
    with pytest.raises(PolicyError, match=r"reads 'hidden', 'is_init'"):
        built(CountingEnvWithString(), Remembering(), provide_inputs=False)


def test_policies_that_read_what_is_not_there_are_named():
    policy = TensorDictModule(lambda x: x, ["speed"], ["action"])
    with pytest.raises(PolicyError, match=r"reads 'speed', which.*'observation'"):
        built(CountingEnvWithString(), policy)


def test_without_a_policy_actions_are_random():
    torch.manual_seed(0)
    actions = collect(carrier(CountingEnv(max_steps=99)), 20)["action"]
    assert 0 < actions.sum() < 20


def test_private_entries_are_dropped():
    batch = collect(carrier(CountingEnvWithString(), Scorer()), 2)
    assert "_secret" not in batch.keys()


def test_a_policy_may_return_another_tensordict():
    def act(td):
        return TensorDict(action=torch.ones(1, dtype=torch.int8), note=torch.zeros(2))

    batch = collect(carrier(CountingEnv(), act), 3)
    assert batch["observation"].flatten().tolist() == [0, 1, 2]
    assert batch["note"].shape == (3, 2)


def test_observations_under_next_can_be_left_out():
    batch = collect(carrier(CountingEnvWithString(), compact=True), 3)
    assert set(batch["next"].keys()) == {"done", "terminated", "reward"}
    assert "string" in batch.keys()


def test_policy_versions_are_written():
    source = carrier(CountingEnv(), Scorer(), track_policy_version=True)
    source.load(Snapshot(4, {"policy": {"scale": torch.tensor([3.0])}}))
    batch = collect(source, 2)
    assert batch["policy_version"].tolist() == [4, 4]
    assert batch["next", "policy_version"].tolist() == [4, 4]
    assert batch["score"].flatten().tolist() == [6, 6]


def test_weights_for_a_policy_without_any_are_an_error():
    with pytest.raises(WeightsError, match=r"not an nn\.Module"):
        carrier(CountingEnv(), count_up).load(Snapshot(1, {"policy": {}}))


def test_the_policy_runs_with_the_chosen_exploration_and_without_gradient():
    seen = []

    def act(td):
        seen.append((interaction_type(), torch.is_grad_enabled()))
        return count_up(td)

    collect(carrier(CountingEnv(), act, exploration=InteractionType.MODE), 1)
    assert seen == [(InteractionType.MODE, False)]


def test_recurrent_state_is_fed_back_and_forgotten_where_an_episode_begins():
    def act(td):
        td.set(("next", "hidden"), td["hidden"] + 1)
        return count_up(td)

    hidden = Field(("hidden",), (2,), torch.float32)
    source = carrier(CountingEnv(max_steps=2), act, states=(hidden,), is_init=True)
    batch = torch.cat([collect(source, 4), collect(source, 3)], 0)
    assert batch["hidden"][:, 0].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert batch["next", "hidden"][:, 1].tolist() == [1, 2, 3, 1, 2, 3, 1]
    assert batch["is_init"].flatten().tolist() == [True, False, False] * 2 + [True]
    assert collect(source, 2, random=True)["next", "hidden"].abs().sum() == 0


def test_not_finite_data_are_an_error_if_asked():
    class Broken(CountingEnvWithString):
        def _step(self, tensordict):
            after = super()._step(tensordict)
            return after.set("reward", after["reward"] / (2 - self.count))

    source = carrier(Broken(), count_up, check_finite=True)
    with pytest.raises(EnvError, match=r"\('next', 'reward'\) holds NaN or infinity at step 1"):
        collect(source, 4)


def test_not_finite_data_are_found_in_lazy_stacks():
    class Broken(EnvWithDynamicSpec):
        def _step(self, tensordict):
            after = super()._step(tensordict)
            return after.set("observation", after["observation"] * float("nan"))

    with pytest.raises(EnvError, match=r"'observation'\) holds NaN or infinity at step 0"):
        collect(carrier(Broken(), check_finite=True), 2)


def test_an_environment_may_use_its_buffers_again():
    class Reusing(CountingEnvWithString):
        shown = torch.zeros(1, dtype=torch.int32)

        def _step(self, tensordict):
            after = super()._step(tensordict)
            return after.set("observation", self.shown.copy_(after["observation"]))

    batch = collect(carrier(Reusing(max_steps=50), count_up), 4)
    assert batch["next", "observation"].flatten().tolist() == [1, 2, 3, 4]


def test_seeds_make_rollouts_repeatable_and_leave_the_learners_stream_alone():
    source = carrier(GymEnv("Pendulum-v1"))
    before = torch.get_rng_state()
    assert source.seed(5, False) == 5
    one = collect(source, 4)
    source.seed(5, False)
    two = collect(source, 4)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one["observation"], two["observation"])
    assert torch.equal(one["action"], two["action"])
    assert one["collector", "traj_ids"].tolist() != two["collector", "traj_ids"].tolist()


def test_a_batch_counts_as_its_size_when_seeded():
    source = carrier(SerialEnv(3, lambda: GymEnv("Pendulum-v1")))
    assert source.seed(5, False) == 7
    assert source.seed(5, True) == 5


def test_a_reset_starts_new_trajectories_where_asked():
    source = carrier(CountingEnv(max_steps=50, batch_size=[2]), count_up)
    collect(source, 3)
    source.reset([1], {})
    batch = collect(source, 2)
    assert batch["observation"].squeeze(-1).tolist() == [[3, 4], [0, 1]]
    assert batch["collector", "traj_ids"].tolist() == [[0, 0], [3, 3]]


def test_transforms_are_reset_with_their_environment():
    env = TransformedEnv(CountingEnvWithString(max_steps=2), Compose(RewardSum(), StepCounter()))
    batch = collect(carrier(env, count_up), 5)
    assert batch["step_count"].flatten().tolist() == [0, 1, 2, 0, 1]


def test_state_restores_counters_and_version():
    source = carrier(CountingEnv(max_steps=2), count_up)
    collect(source, 5)
    source.policy_version = 3
    other = carrier(CountingEnv(max_steps=2), count_up)
    other.load_state(source.state())
    batch = collect(other, 2)
    assert other.policy_version == 3
    assert batch["collector", "traj_ids"].tolist() == [2, 2]
    assert batch["observation"].flatten().tolist() == [0, 1]


def test_attributes_are_reached_from_outside():
    source = carrier(CountingEnv(max_steps=7), Scorer())
    assert source.call("env.max_steps") == 7
    assert source.call("policy.calls") == 0


def test_construction_resets_once_or_takes_over_a_reset():
    class Resets(CountingEnvWithString):
        made = 0

        def _reset(self, tensordict=None, **kwargs):
            self.made += 1
            return super()._reset(tensordict, **kwargs)

    env = Resets()
    collect(carrier(env, count_up), 2)
    assert env.made == 1
    env = Resets()
    collect(carrier(env, count_up, first=env.reset()), 2)
    assert env.made == 1


def test_closing_twice_is_allowed():
    env = GymEnv("CartPole-v1")
    source = carrier(env)
    source.close()
    source.close()
    assert env.is_closed


def test_ragged_policy_outputs_are_delivered():
    def act(td):
        td.set("logits", torch.zeros(int(td["observation"].shape[1])))
        return td.set("action", torch.zeros(2))

    source = carrier(EnvWithDynamicSpec(max_count=3), act)
    batch = collect(source, 3)
    assert [tuple(step["logits"].shape) for step in batch.unbind(0)] == [(1,), (2,), (3,)]
