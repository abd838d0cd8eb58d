"""Steps that differ from the first: errors that name them, or delivered if the layout is open."""

from functools import partial

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.testing.mocking_classes import CountingEnv

from gleanrl import Collector, EnvError, MultiSyncCollector
from gleanrl.data import LazyTensorStorage, ReplayBuffer


class Surprising(CountingEnv):
    """Returns an entry that it does not declare, in all steps."""

    taken = 0

    def _step(self, tensordict):
        found = super()._step(tensordict)
        self.taken += 1
        return found.set("surprise", torch.full((*self.batch_size, 1), float(self.taken)))


class Changing(CountingEnv):
    """Returns other steps from its third one on."""

    def __init__(self, change, **options):
        super().__init__(max_steps=100, **options)
        self.change, self.taken = change, 0

    def _step(self, tensordict):
        found, self.taken = super()._step(tensordict), self.taken + 1
        return self.change(found) if self.taken > 2 else found


def uneven(td):
    """Return ``td`` with an entry that only the first environment has."""
    first, *others = (part.clone() for part in td.unbind(0))
    return lazy_stack([first.set("odd", torch.zeros(1)), *others])


CHANGES = {
    "an entry of one environment": (uneven, "'odd'.*only some environments.*in all or in none"),
    "another entry": (lambda td: td.set("more", td["reward"]), "'more'.*float32.*was not there"),
    "another dtype": (lambda td: td.set("reward", td["reward"].double()), "'reward'.*float64.*32"),
    "another shape": (
        lambda td: td.set("observation", td["observation"].repeat(1, 2)),
        r"'observation'.*\(2, 2\) at .*\(2, 1\)",
    ),
    "an entry less": (
        lambda td: td.exclude("observation"),
        "'observation'.*nothing.*was torch.int32",
    ),
    "text": (lambda td: td.set_non_tensor("more", "text"), "'more'.*text.*was not there"),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("kind", [Collector, partial(MultiSyncCollector, backend="inline")])
def test_a_step_that_differs_from_the_first_is_an_error_that_names_it(kind, name):
    change, message = CHANGES[name]
    make = partial(Changing, change, batch_size=[2])
    message = rf"Changing returned \('next', {message}.*fast=False"
    with (
        kind(make if kind is Collector else [make], ones, frames_per_batch=8) as collector,
        pytest.raises(EnvError, match=f"(?s){message}") as error,
    ):
        collector.rollout()
    assert "at step 2 of the rollout" in str(error.value)


@pytest.mark.parametrize("name", CHANGES)
def test_without_a_fixed_layout_steps_may_differ(name):
    change, _ = CHANGES[name]
    env = Changing(change, batch_size=[2])
    with Collector(env, ones, frames_per_batch=8, fast=False) as collector:
        steps = collector.rollout().unbind(-1)
    assert [set(step["next"].keys()) ^ set(steps[0]["next"].keys()) for step in steps] == (
        [set()] * 2 + [set(steps[2]["next"].keys()) ^ set(steps[0]["next"].keys())] * 2
    )
    assert (steps[3]["next"].get("more", None) is not None) == (name in ("another entry", "text"))


class Paying(Surprising):
    """Pays 1 for every step."""

    def _step(self, tensordict):
        found = super()._step(tensordict)
        return found.set("reward", torch.ones_like(found["reward"]))


def ones(td):
    """Act with 1 everywhere."""
    return td.set("action", torch.ones(*td.batch_size, 1, dtype=torch.int8))


@pytest.mark.parametrize("cat", ["stack", -1, 0])
@pytest.mark.parametrize("first", [CountingEnv, Surprising])
def test_workers_of_fixed_and_open_layouts_share_a_batch(first, cat):
    makers = [lambda: first(max_steps=100, batch_size=[3]), lambda: Surprising(batch_size=[3])]
    collector = MultiSyncCollector(
        makers, ones, frames_per_batch=24, total_frames=24, cat_results=cat, backend="inline"
    )
    with collector:
        (batch,) = collector
    assert batch.names[-1] == "time"
    assert batch.device is None
    for worker, kind in enumerate((first, Surprising)):
        for t in range(4):
            at = {"stack": (worker, 2, t), -1: (2, 4 * worker + t), 0: (3 * worker + 2, t)}[cat]
            surprise = batch[at]["next"].get("surprise", torch.zeros(1)).item()
            assert surprise == (t + 1 if kind is Surprising else 0)


def test_returns_count_rollouts_of_an_open_layout():
    env = Paying(max_steps=3, batch_size=[2])
    with Collector(env, ones, frames_per_batch=4, total_frames=32) as collector:
        for _ in collector:
            pass
        stats = collector.stats()
    assert (stats["episodes"], stats["return_min"], stats["return_max"]) == (8, 4, 4)


@pytest.mark.parametrize("late", [False, True])
def test_zeros_keep_their_sign(late):
    def policy(td):
        policy.calls += 1
        td["minus"] = torch.full((*td.batch_size, 1), -0.0)
        if late and policy.calls > 1:
            td["late"] = torch.ones(*td.batch_size)
        return ones(td)

    policy.calls = 0
    collector = Collector(CountingEnv(batch_size=[2], device="cpu"), policy, frames_per_batch=8)
    batch = next(iter(collector))
    collector.shutdown()
    assert batch["minus"].signbit().all()
    assert ("late" in batch[0, 3].keys()) == late


def test_steps_of_which_some_are_lazy_lose_nothing():
    env = CountingEnv(batch_size=[2])

    def policy(td):
        policy.calls += 1
        td["part"] = TensorDict({"a": torch.zeros(2, 1)}, batch_size=[2])
        if policy.calls > 2:
            one = TensorDict({"a": torch.zeros(1)})
            td["part"] = lazy_stack([one, one.clone().set("b", torch.ones(1))], 0)
        return ones(td)

    policy.calls = 0
    collector = Collector(env, policy, frames_per_batch=8, fast=False)
    batch = next(iter(collector))
    collector.shutdown()
    assert "b" in batch[1, 3]["part"].keys()
    assert "b" not in batch[0, 3]["part"].keys()


def test_random_frames_have_the_states_that_a_policy_makes_itself():
    def policy(td):
        hidden = td.get("hidden", None)
        hidden = torch.ones(*td.batch_size, 2) if hidden is None else hidden
        td["next", "hidden"] = hidden + 1
        return ones(td)

    buffer = ReplayBuffer(storage=LazyTensorStorage(100))
    collector = Collector(
        CountingEnv(max_steps=100),
        policy,
        frames_per_batch=4,
        total_frames=8,
        init_random_frames=4,
        replay_buffer=buffer,
    )
    with collector:
        assert all(batch is None for batch in collector)
    found = buffer[:]["next", "hidden"][:, 0]
    assert found.tolist() == [0, 0, 0, 0, 2, 3, 4, 5]
