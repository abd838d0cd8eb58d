"""Laws: workers in processes give the data of workers here, nothing is lost, weights never mix."""

import copy
import gc
import itertools
import pickle
import threading
from collections import defaultdict
from pathlib import Path

import gymnasium as gym
import pytest
import rig
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn

from gleanrl import (
    ConfigError,
    Interruptor,
    MultiAsyncCollector,
    MultiSyncCollector,
)
from gleanrl.weight_update import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme

KINDS = {"sync": MultiSyncCollector, "async": MultiAsyncCollector}


@pytest.fixture(params=sorted(KINDS))
def kind(request):
    return request.param


def open_two(kind, policy=None, frames=8, envs=None, **options):
    """Return a collector of two workers that make rollouts of 8 frames."""
    envs = [rig.counting(0), rig.counting(1)] if envs is None else envs
    total = frames * (len(envs) if kind == "sync" else 1)
    return KINDS[kind](envs, policy, frames_per_batch=total, **options)


class Ledger:
    """Follows the steps of every environment from batch to batch."""

    def __init__(self):
        self.last = defaultdict(int)
        self.frames = 0
        self.ids = defaultdict(set)
        self.open = {}
        self.versions = defaultdict(int)

    def take(self, batch):
        """Check that ``batch`` goes on where each environment's last one ended."""
        observed = batch["next", "observation"]
        for rollout in observed.reshape(-1, observed.shape[-2], 2):
            number, steps = int(rollout[0, 0]), rollout[:, 1].long().tolist()
            begin = self.last[number] + 1
            assert steps == list(range(begin, begin + len(steps)))
            self.last[number] = steps[-1]
            self.frames += len(steps)

    def take_ids(self, batch):
        """Check that ids change where a trajectory ends, and are never used again."""
        flat = batch.reshape(-1, batch.shape[-1])
        for rollout in flat.unbind(0):
            number = int(rollout["observation"][0, 0])
            for identity, done in zip(
                rollout["collector", "traj_ids"].tolist(),
                rollout["next", "done"].flatten().tolist(),
                strict=True,
            ):
                if number in self.open:
                    assert identity == self.open[number]
                else:
                    assert all(identity not in ids for ids in self.ids.values())
                self.ids[number].add(identity)
                self.open[number] = identity
                if done:
                    del self.open[number]

    def take_versions(self, batch):
        """Check that each rollout has one version, that of its weights, and none older."""
        for rollout in batch.reshape(-1, batch.shape[-1]).unbind(0):
            number = int(rollout["next", "observation"][0, 0])
            (version,) = rollout["policy_version"].unique().tolist()
            assert rollout["seen"].eq(version).all()
            assert version >= self.versions[number]
            self.versions[number] = version


# -- one seed, one set of data ---------------------------------------------------------------------


def categorical():
    net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    return ProbabilisticTensorDictSequential(
        TensorDictModule(net, ["observation"], ["logits"]),
        ProbabilisticTensorDictModule(
            ["logits"],
            ["action"],
            distribution_class=torch.distributions.Categorical,
            default_interaction_type=InteractionType.RANDOM,
            return_log_prob=True,
        ),
    )


class Gaussian(nn.Module):
    def __init__(self, observed, acted):
        super().__init__()
        self.net = nn.Linear(observed, acted)

    def forward(self, observation):
        mean = self.net(observation.float())
        return torch.normal(mean, 0.1).clamp(-1, 1)


CASES = {
    "random, stacked": ("CartPole-v1", lambda: None, {}),
    "random, several each": ("CartPole-v1", lambda: None, {"num_envs": 3, "frames": 24}),
    "probabilistic, cat 0": ("CartPole-v1", categorical, {"num_envs": 2, "cat_results": 0}),
    "probabilistic, unequal": (
        "CartPole-v1",
        categorical,
        {"frames_per_batch": [10, 22], "cat_results": -1, "max_frames_per_traj": 7},
    ),
    "continuous": ("Pendulum-v1", lambda: Gaussian(3, 1), {"cat_results": -1}),
    "mujoco": ("InvertedPendulum-v5", lambda: Gaussian(4, 1), {"num_envs": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_processes_give_what_inline_workers_give(case):
    env, make_policy, options = CASES[case]
    options = {"frames_per_batch": 2 * options.pop("frames", 16), **options}
    torch.manual_seed(0)
    policy = make_policy()
    found = []
    for backend in ("process", "inline"):
        with MultiSyncCollector(
            [env] * 2, policy, backend=backend, num_threads=1, track_policy_version=True, **options
        ) as collector:
            last = collector.set_seed(11)
            found.append([last, *(collector.next().clone() for _ in range(4))])
    assert found[0][0] == found[1][0] == 11 + 2 * options.get("num_envs", 1) - 1
    for one, other in zip(found[0][1:], found[1][1:], strict=True):
        assert one.shape == other.shape
        assert one.names == other.names
        assert set(one.keys(True, True)) == set(other.keys(True, True))
        assert (one == other).all()
    assert not (found[0][1] == found[0][2]).all()


def test_unseeded_workers_follow_torchs_seed():
    def actions(backend):
        torch.manual_seed(5)
        with open_two("sync", backend=backend) as collector:
            return collector.next()["action"].clone()

    one = actions("process")
    assert one.equal(actions("inline"))
    assert not one[0].equal(one[1])


@settings(max_examples=5, deadline=None)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3))
def test_batch_boundaries_do_not_change_the_stream(sizes):
    total = 24

    def stream(steps):
        torch.manual_seed(1)
        with MultiSyncCollector(
            ["CartPole-v1"] * 2,
            categorical(),
            frames_per_batch=4 * steps,
            num_envs=2,
            backend="inline",
        ) as collector:
            collector.set_seed(3)
            parts = [collector.next() for _ in range(-(-total // steps))]
            return torch.cat(parts, -1)[..., :total]

    whole = stream(total)
    for steps in sizes:
        assert (stream(steps) == whole).all()


def test_batch_boundaries_do_not_change_the_stream_of_processes():
    found = []
    for steps in (6, 24):
        with MultiSyncCollector(["CartPole-v1"] * 2, frames_per_batch=2 * steps) as collector:
            collector.set_seed(3)
            found.append(torch.cat([collector.next() for _ in range(24 // steps)], -1))
    assert (found[0] == found[1]).all()


# -- weights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme])
def test_every_rollout_is_made_with_the_weights_of_its_version(kind, scheme):
    policy, ledger = rig.encoded(30_000), Ledger()
    with open_two(
        kind, policy, track_policy_version=True, weight_sync_schemes={"policy": scheme()}
    ) as collector:
        for number, batch in enumerate(collector):
            ledger.take(batch)
            ledger.take_versions(batch)
            if kind == "sync":
                assert batch["policy_version"].eq(number).all()
            policy.module.set(number + 1)
            collector.update_policy_weights_()
            assert collector.policy_version == number + 1
            policy.module.set(-1)  # the learner goes on; workers never see this
            if number == 60:
                break
        assert max(ledger.versions.values()) > 10


def test_a_worker_sees_no_half_update_of_several_models():
    """Two models of one call travel together, whatever else is published around them."""
    policy, ledger = rig.encoded(2000), Ledger()
    with open_two("async", policy, track_policy_version=True) as collector:
        for number, batch in enumerate(collector, start=1):
            ledger.take_versions(batch)
            policy.module.set(number)
            ways = [
                lambda: collector.update_policy_weights_(),
                lambda: collector.update_policy_weights_(policy.state_dict()),
                lambda: collector.update_policy_weights_(weights_dict={"policy": policy}),
                lambda: collector.update_policy_weights_(weights=policy, worker_ids=[0, 1]),
            ]
            ways[number % 4]()
            if number == 40:
                break


def test_chosen_workers_get_weights_the_others_keep_theirs():
    policy = rig.encoded(4)
    with open_two("sync", policy, track_policy_version=True) as collector:
        policy.module.set(1)
        collector.update_policy_weights_(worker_ids=1)
        batch = collector.next()
        assert batch["seen"].flatten(1).unique(dim=1).flatten().tolist() == [0, 1]
        assert batch["policy_version"].flatten(1).unique(dim=1).flatten().tolist() == [0, 1]
        policy.module.set(2)
        collector.update_policy_weights_(worker_ids=[torch.device("cpu")])
        assert collector.next()["seen"].eq(2).all()
        own = {worker: dict(policy.state_dict()) for worker in (0, 1)}
        own[0] = {k: torch.full_like(v, 7.0) for k, v in own[0].items()}
        collector.update_policy_weights_(weights=own)
        assert collector.next()["seen"][:, :, 0].unique(dim=1).flatten().tolist() == [7, 2]
        collector.update_policy_weights_()
        assert collector.next()["seen"].eq(2).all()
        for wrong in (2, [], [0, 5], "cuda"):
            with pytest.raises(ConfigError, match="worker_ids"):
                collector.update_policy_weights_(worker_ids=wrong)


def test_weights_by_worker_update_the_workers_that_they_name():
    policy = rig.encoded(4)
    nines = {k: torch.full_like(v, 9.0) for k, v in policy.state_dict().items()}
    with open_two("sync", policy, track_policy_version=True) as collector:
        collector.update_policy_weights_(weights={0: nines})
        batch = collector.next()
        assert batch["seen"][:, 0, 0].tolist() == [9, 0]
        assert batch["policy_version"][:, 0].tolist() == [1, 0]
        for wrong, ids in (({0: nines, 5: nines}, None), ({0: nines}, [0, 1]), ({0: nines}, 1)):
            with pytest.raises(ConfigError, match="worker"):
                collector.update_policy_weights_(weights=wrong, worker_ids=ids)
        assert collector.policy_version == 1


def train(policy):
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 1


def test_training_without_sending_weights_warns_once(kind):
    policy = rig.encoded(4)
    with open_two(kind, policy) as collector:
        collector.next()
        train(policy)
        collector.next()
        with pytest.warns(UserWarning, match="update_policy_weights_") as warned:
            collector.next()
        assert len(warned) == 1
        train(policy)
        for _ in range(3):
            collector.next()


def test_a_resumed_training_that_never_sends_weights_is_warned_of(kind):
    """Loading a state gives the workers its weights, and says nothing about later ones."""
    policy = rig.encoded(4)
    with open_two(kind, policy, backend="inline") as collector:
        collector.load_state_dict(collector.state_dict())
        collector.next()
        train(policy)
        collector.next()
        with pytest.warns(UserWarning, match="update_policy_weights_"):
            collector.next()


def test_a_loaded_state_begins_the_count_of_batches_without_new_weights_anew(kind):
    policy = rig.encoded(4)
    with open_two(kind, policy, backend="inline") as collector:
        collector.next()
        train(policy)
        collector.next()
        collector.load_state_dict(collector.state_dict())
        train(policy)
        collector.next()
        with pytest.warns(UserWarning, match="update_policy_weights_"):
            collector.next()


@pytest.mark.parametrize("way", ["sent", "each batch", "own scheme", "restored", "not trained"])
def test_weights_that_are_sent_are_not_warned_of(kind, way):
    policy, options = rig.encoded(4), {}
    if way == "each batch":
        options["update_at_each_batch"] = True
    elif way == "own scheme":
        options["weight_sync_schemes"] = {"policy": SharedMemWeightSyncScheme()}
    with open_two(kind, policy, backend="inline", **options) as collector:
        for _ in range(4):
            collector.next()
            if way != "not trained":
                train(policy)
            if way == "sent":
                collector.update_policy_weights_()
            elif way == "restored":
                collector.load_state_dict(collector.state_dict())


def test_policies_made_in_workers():
    def make():
        return rig.encoded(4)

    def seven():
        policy = rig.encoded(4)
        policy.module.set(7)
        return policy

    with open_two("sync", policy_factory=[make, seven]) as collector:
        assert collector.next()["seen"][:, :, 0].unique(dim=1).flatten().tolist() == [0, 7]
        with pytest.raises(TypeError, match="policy_factory"):
            collector.update_policy_weights_()
        collector.update_policy_weights_(seven())
        assert collector.next()["seen"].eq(7).all()
    with open_two("sync", seven(), policy_factory=make, policy_device=["cpu"] * 2) as collector:
        assert collector.next()["seen"].eq(7).all()  # those of the policy beside the factory
        collector.policy.module.set(3)
        collector.update_policy_weights_()
        assert collector.next()["seen"].eq(3).all()


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_a_schedule_of_updates_needs_a_policy_to_take_weights_from(kind):
    with pytest.raises(ConfigError, match="give policy= beside policy_factory="):
        kind(
            [rig.counting()] * 2,
            policy_factory=rig.encoded,
            frames_per_batch=8,
            update_at_each_batch=True,
        )


def test_devices_are_dealt_out():
    cpu = torch.device("cpu")
    with open_two("sync", device=["cpu", cpu]) as collector:
        assert collector.device == [cpu, cpu]
        assert collector.next().device == cpu
    with pytest.raises(ConfigError, match="1 entries for 2 workers"):
        open_two("sync", device=["cpu"])


# -- nothing is lost -------------------------------------------------------------------------------


def test_what_a_learner_keeps_never_changes_and_nothing_is_lost(kind):
    learner, ledger = rig.KeepingLearner(), Ledger()
    with open_two(kind, rig.Encoded(4)) as collector:
        for number, batch in enumerate(collector):
            ledger.take(batch)
            ledger.take_ids(batch)
            learner.take(batch)
            if number == 40:
                break
        learner.check_unchanged()
        assert collector.stats()["batches_copied"] > 0
        assert collector.stats()["frames"] == ledger.frames
    learner.check_unchanged()
    assert sorted(ledger.last) == [0, 1]


READING = {
    "state_dict": lambda c: c.state_dict()["frames"] >= 0,
    "stats": lambda c: c.stats(workers="both")["workers_alive"] == 2,
    "getattr_env": lambda c: c.getattr_env("length") == 5,
    "getattr_policy": lambda c: c.getattr_policy("training") is True,
    "map_fn": lambda c: len(set(c.map_fn("env.pid"))) == 2,
    "cascade_execute": lambda c: len(c.cascade_execute("env.pid")) == 2,
    "get_distant_attr": lambda c: c.get_distant_attr("env.number") == [0, 1],
    "weights": lambda c: c.update_policy_weights_() is None,
}


@pytest.fixture(scope="module", params=sorted(KINDS))
def running(request):
    with open_two(request.param, rig.Encoded(4)) as collector:
        yield collector, Ledger()


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
)
@given(commands=st.lists(st.sampled_from([*sorted(READING), "batch"]), min_size=1, max_size=8))
def test_commands_lose_and_repeat_no_frame(running, commands):
    collector, ledger = running
    for command in commands:
        if command == "batch":
            ledger.take(collector.next())
        else:
            assert READING[command](collector), command
    ledger.take(collector.next())
    assert collector.stats()["frames"] == ledger.frames
    assert collector.stats()["frames_discarded"] == 0


def test_commands_in_every_state_of_life_and_a_second_loop(kind):
    frames = 96
    ledger = Ledger()
    with open_two(kind, rig.Encoded(4), total_frames=frames) as collector:
        assert all(command(collector) for command in READING.values())
        for batch in collector:
            ledger.take(batch)
            break
        assert all(command(collector) for command in READING.values())
        for batch in collector:
            ledger.take(batch)
            assert all(command(collector) for command in READING.values())
        assert ledger.frames == frames == collector.stats()["frames"]
        # Exactly what was asked for was stepped, in the workers as well.
        assert sum(collector.get_distant_attr("env.steps")) == frames
        assert all(command(collector) for command in READING.values())
        assert list(collector) == []
        assert collector.next() is None


@pytest.mark.parametrize("how", ["reset", "set_seed", "some"])
def test_what_reset_and_set_seed_discard_is_counted(kind, how):
    envs = [rig.counting(number, pause=0.005) for number in (0, 1)]  # surely under way
    with open_two(kind, envs=envs) as collector:
        before, after, old, new = Ledger(), {}, set(), set()
        for _ in range(3):
            batch = collector.next()
            before.take(batch)
            old |= set(batch["collector", "traj_ids"].flatten().tolist())
        if how == "set_seed":
            assert collector.set_seed(4) == 5
        elif how == "reset":
            collector.reset()
        else:
            collector.reset([True, False])
            with rig.in_time():  # one reset may come between two rollouts of its worker
                while kind == "async" and not collector.stats()["frames_discarded"]:
                    collector.reset([True, False])
        delivered = collector.stats()["frames"]
        batches = 0
        while batches < 6 or len(after) < 2:  # a worker that gets no processor is late
            batch, batches = collector.next(), batches + 1
            for rollout in batch.reshape(-1, 8).unbind(0):
                number = int(rollout["next", "observation"][0, 0])
                if number not in after:
                    after[number] = int(rollout["next", "observation"][0, 1])
                    if how != "some" or number == 0:
                        new |= set(rollout["collector", "traj_ids"].tolist())
                        assert rollout["next", "done"][:, 0].tolist().index(True) == 4
        gap = sum(first - before.last[number] - 1 for number, first in after.items())
        assert collector.stats()["frames_discarded"] == gap
        assert (gap > 0) == (kind == "async")
        assert collector.stats()["frames"] == delivered + batches * batch.numel()
        assert not old & new


LEDGER = ("frames", "frames_under_way", "frames_discarded_reset", "frames_discarded_loss")
LEDGER += ("frames_discarded_stop", "frames_discarded_ahead", "frames_discarded_lag")


@pytest.mark.parametrize("options", [{}, {"trajs_per_batch": 2}])
def test_batches_of_older_weights_than_allowed_are_discarded_and_counted(options):
    policy = rig.encoded(4)
    seen = []
    with open_two(
        "async", policy, total_frames=400, track_policy_version=True, max_lag=1, **options
    ) as collector:
        for number, batch in enumerate(collector, 1):
            seen.append(number - 1 - int(batch["policy_version"].min()))
            policy.module.set(float(number))
            collector.update_policy_weights_()
            for row in batch.reshape(-1, batch.shape[-1]):
                steps = row["next", "observation"][:, 1]
                inside = row["collector", "traj_ids"].diff() == 0
                assert (steps.diff()[inside & (steps[1:] > 0)] == 1).all()
        stats = collector.stats()
        if not options:
            assert max(seen) == stats["lag_max"] <= 1
            assert stats["lag_mean"] <= 1
        assert stats["frames"] == 400
        assert stats["frames_discarded_lag"] > 0
        assert stats["frames_stepped"] == sum(stats[key] for key in LEDGER)
        assert sum(collector.get_distant_attr("env.steps")) == stats["frames_stepped"]


@settings(
    max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(commands=st.lists(st.sampled_from(["reset", "seed", "load", "next"]), max_size=8))
def test_the_ledger_is_that_of_the_environments(kind, commands):
    with open_two(kind, total_frames=320) as collector:
        do = {
            "reset": collector.reset,
            "seed": lambda: collector.set_seed(3),
            "load": lambda: collector.load_state_dict(collector.state_dict()),
            "next": collector.next,
        }
        for command in ("next", *commands):
            do[command]()
            stats = collector.stats()
            assert stats["frames_stepped"] == sum(stats[key] for key in LEDGER)
        for _ in collector:
            pass
        stats = collector.stats()
        assert sum(collector.get_distant_attr("env.steps")) == stats["frames_stepped"]
        assert stats["frames_under_way"] == 0
        assert stats["frames_discarded"] == stats["frames_discarded_reset"]
    assert collector.stats()["frames_stepped"] == stats["frames_stepped"]


def test_random_frames_are_counted_over_all_workers(kind):
    policy = rig.encoded(4)
    policy.module.set(1)
    with open_two(kind, policy, init_random_frames=32, total_frames=96) as collector:
        acted = [batch["seen"].ne(0).all(-1).flatten() for batch in collector]
    assert sum(int((~by_policy).sum()) for by_policy in acted) == 32
    if kind == "sync":
        assert not torch.cat(acted[:2]).any()


def test_save_and_load_continue(tmp_path):
    def policy():
        return rig.encoded(4)

    def run(collector):
        batch = collector.next()
        return batch.select("action", "seen", "policy_version", ("collector", "traj_ids")).clone()

    options = {"track_policy_version": True, "total_frames": 160, "init_random_frames": 48}
    with open_two("sync", policy(), **options) as one:
        one.set_seed(2)
        run(one), run(one)
        one.policy.module.set(1)
        one.update_policy_weights_()
        torch.save(one.state_dict(), tmp_path / "state.pt")
        uninterrupted = run(one)
        saved = torch.load(tmp_path / "state.pt", weights_only=False)
        one.load_state_dict(saved)
        again = [run(one) for _ in range(3)]
        with pytest.raises(ConfigError, match="workers"):
            one.load_state_dict({k: v for k, v in saved.items() if k != "worker1"})
    with open_two("sync", policy(), **options) as two:
        two.load_state_dict(saved)
        assert two.stats()["frames"] == 32
        assert two.stats()["policy_version"] == 1
        other = [run(two) for _ in range(3)]
        assert sum(1 for _ in two) == 10 - 2 - 3
    for one, two in zip(again, other, strict=True):
        assert (one == two).all()
    assert not again[0]["seen"].any()  # the last of the random frames
    assert again[1]["seen"].eq(1).all()
    assert again[1]["policy_version"].eq(1).all()
    assert (again[0] == uninterrupted).all()


# -- rollouts that end early -----------------------------------------------------------------------


@pytest.mark.parametrize("cat", [None, -1, 0])
def test_preempted_rollouts_keep_what_is_valid(cat):
    envs = [rig.counting(0), rig.counting(1, pause=0.01)]
    with MultiSyncCollector(
        envs,
        frames_per_batch=400,
        preemptive_threshold=0.5,
        cat_results=cat,
        set_truncated=True,
        num_envs=2,
    ) as collector:
        last, frames = 0, 0
        for _ in range(2):
            batch = collector.next()
            mask = batch["collector", "mask"]
            frames += int(mask.sum())
            ids = batch["collector", "traj_ids"]
            assert ids[~mask].eq(-1).all()
            assert ids[mask].ge(0).all()
            if cat == -1:
                assert mask.all()
            elif cat is None:
                assert batch.shape == (2, 2, 100)
                assert not batch["next", "reward"][~mask].any()
                assert not batch["next", "observation"][~mask].any()
            valid = batch[mask]
            slow = valid[valid["next", "observation"][:, 0] == 1]
            steps = slow["next", "observation"][:, 1].view(2, -1)
            assert 1 <= steps.shape[-1] < 100
            assert steps[0].tolist() == list(range(last + 1, last + 1 + steps.shape[-1]))
            last = int(steps[0, -1])
            ends = (
                slow.view(2, -1)["next", "truncated"][..., 0]
                | (slow.view(2, -1)["next", "terminated"][..., 0])
            )
            assert ends[:, -1].all()
            assert not slow.view(2, -1)["next", "truncated"][:, :-1].any()
        assert collector.stats()["frames"] == frames


def test_preempted_collection_goes_on_to_the_rounded_total():
    with pytest.warns(UserWarning, match="24 in all"):
        collector = open_two("sync", frames=4, total_frames=18, preemptive_threshold=0)
    with collector:
        assert [int(batch["collector", "mask"].sum()) for batch in collector] == [2] * 12
        assert collector.stats()["frames"] == collector.total_frames == 24


@pytest.mark.parametrize("backend", ["process", "inline"])
def test_an_interruptor_ends_rollouts(backend):
    interruptor = Interruptor()
    with open_two("sync", interruptor=interruptor, frames=50, backend=backend) as collector:
        assert collector.next()["collector", "mask"].all()
        interruptor.stop_collection()
        batch = collector.next()
        assert batch.shape == (2, 50)
        assert batch["collector", "mask"].sum(-1).eq(1).all()
        interruptor.start_collection()
        batch = collector.next()
        assert batch["collector", "mask"].all()
        assert batch["next", "observation"][:, 0, 1].eq(52).all()
        assert collector.stats()["frames"] == 202
    with pytest.raises(ConfigError, match="preemptive_threshold"):
        open_two("sync", preemptive_threshold=1.5)
    with pytest.warns(UserWarning, match="preemptive_threshold"):
        open_two("async", preemptive_threshold=0.5).shutdown()


def test_a_stop_inside_a_round_holds_for_the_next():
    """The end of a preempted round lowers the byte that the stop raises."""
    interruptor = Interruptor()
    options = {"interruptor": interruptor, "frames": 50, "preemptive_threshold": 0.5}
    with open_two("sync", **options) as collector:
        for _ in range(30):
            stopping = threading.Thread(target=interruptor.stop_collection)
            stopping.start()
            collector.next()
            stopping.join()
            assert collector.next()["collector", "mask"].sum(-1).eq(1).all()
            interruptor.start_collection()


def test_an_interruptor_cannot_be_sent_away():
    with pytest.raises(TypeError, match="in the process of its collector"):
        pickle.dumps(Interruptor())


def test_a_batch_that_was_cut_short_is_not_overwritten_while_it_is_held():
    collector = MultiSyncCollector(
        ["CartPole-v1"],
        frames_per_batch=16,
        cat_results=-1,
        preemptive_threshold=0,
        backend="inline",
        num_threads=1,
    )
    with collector:
        held = [next(iter(collector)) for _ in range(2)]
        held += [collector.next()["observation"].numpy() for _ in range(6)]
        copies = [copy.deepcopy(batch) for batch in held]
        for _ in range(8):
            collector.next()
    assert [len(batch) for batch in held] == [1] * 8
    for batch, before in zip(held, copies, strict=True):
        assert (batch == before).all()


def test_threads_are_given_back():
    before = torch.get_num_threads()
    with open_two("sync", num_threads=before + 1, num_sub_threads=2) as collector:
        assert torch.get_num_threads() == before + 1
        assert collector.map_fn("env.threads") == [2, 2]
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_threads_are_given_back_in_whatever_order_collectors_end(order):
    before = torch.get_num_threads()
    made = [
        MultiSyncCollector(["CartPole-v1"], frames_per_batch=8, backend="inline", num_threads=n)
        for n in (before + 3, before + 2, before + 1)
    ]
    for collector in order:
        made[collector].shutdown()
    assert torch.get_num_threads() == before


def test_threads_that_the_learner_has_set_meanwhile_are_kept():
    before = torch.get_num_threads()
    options = {"frames_per_batch": 8, "backend": "inline"}
    try:
        first = MultiSyncCollector(["CartPole-v1"], num_threads=before + 1, **options)
        torch.set_num_threads(before + 2)
        second = MultiSyncCollector(["CartPole-v1"], num_threads=before + 3, **options)
        first.shutdown()
        second.shutdown()
        assert torch.get_num_threads() == before + 2
    finally:
        torch.set_num_threads(before)


def test_frames_that_do_not_divide_are_rounded_up_with_a_warning(monkeypatch):
    with pytest.warns(UserWarning, match="total_frames"):
        collector = open_two("sync", total_frames=30, envs=[lambda: gym.make("CartPole-v1")] * 2)
    assert sum(batch.numel() for batch in collector) == 32
    collector.shutdown()
    monkeypatch.setenv("RL_WARNINGS", "0")
    with open_two("sync", total_frames=30) as collector:
        assert sum(batch.numel() for batch in collector) == 32


def memory_mapped():
    """Return how many mappings of shared memory this process has."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("/memfd:")


def test_an_interruptor_keeps_nothing_of_old_collectors_alive():
    interruptor = Interruptor()
    before = memory_mapped()
    for _ in range(2):
        collector = MultiSyncCollector(
            [rig.counting(0)], frames_per_batch=4, interruptor=interruptor
        )
        collector.next()
        collector.shutdown()
        del collector
        assert memory_mapped() <= before
    interruptor.stop_collection()
    with MultiSyncCollector(
        [rig.counting(0)], frames_per_batch=4, interruptor=interruptor
    ) as collector:
        assert collector.next()["collector", "mask"].sum() == 1
