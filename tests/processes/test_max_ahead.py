"""``max_ahead``: no environment is acted for that is too far ahead of the slowest one."""

import itertools
import sys
from collections import Counter
from functools import partial

import cloudpickle
import pytest
import rig
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from test_central_async import streams
from test_central_losses import once

from gleanrl import MultiAsyncCollector
from gleanrl.collectors import AsyncBatchedCollector

# Workers that need not import this file start in milliseconds.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Acts:
    """Counts how often it acts for each environment, and by how many these differ after a call."""

    def __init__(self, envs):
        self.envs = envs
        self.forget()

    def forget(self):
        """Forget the call at construction."""
        self.acts, self.most = Counter(dict.fromkeys(range(self.envs), 0)), 0

    def __call__(self, observation):
        self.acts.update(observation[:, 0].int().tolist())
        self.most = max(self.most, max(self.acts.values()) - min(self.acts.values()))
        return torch.zeros(observation.shape[:-1], dtype=torch.int64)


def paces(makers, policy, ahead, **options):
    return MultiAsyncCollector(
        makers,
        policy,
        inference="central",
        max_ahead=ahead,
        **{"policy_process": False, "frames_per_batch": 3, "total_frames": -1, **options},
    )


@settings(max_examples=4, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
@given(
    workers=st.integers(2, 3),
    groups=st.integers(1, 2),
    ahead=st.integers(1, 5),
    steps=st.integers(1, 7),
    random=st.sampled_from([0, 20]),
    options=st.fixed_dictionaries(
        {},
        optional={
            "max_batch_size": st.integers(6, 9),
            # More than may step: the policy acts once nothing else can come.
            "min_batch_size": st.integers(2, 6),
            "transition_chunk_size": st.integers(1, 4),
        },
    ),
)
def test_none_is_too_far_ahead_and_all_have_whole_trajectories(
    workers, groups, ahead, steps, random, options
):
    envs = workers * groups
    makes = [rig.counting(number, pause=0.005 * (number == 0)) for number in range(envs)]
    acts = Acts(envs)
    frames = steps * options.get("transition_chunk_size", 1)
    options |= {"frames_per_batch": frames, "init_random_frames": random, "max_wait_s": 60.0}
    makers = [makes[first : first + groups] for first in range(0, envs, groups)]
    with paces(makers, acts, ahead, env_groups=groups, **options) as collector:
        acts.forget()
        batches = [batch.clone() for batch in itertools.islice(collector, 10 * envs)]
        drift = collector.stats()["drift_max"]
    assert drift <= ahead
    assert acts.most <= ahead or random  # random actions are not counted
    for stream in streams(batches, envs).values():
        assert stream["observation"][:, 1].tolist() == list(range(len(stream)))


def await_file(path):
    rig.until(path.exists, 60.0)


def waiting_for(path):
    """Return what makes three environments; the first waits for a file in its third step."""
    slow = rig.counting(0, fault=partial(await_file, path), at=3)
    return [slow, rig.counting(1), rig.counting(2)]


def test_others_stop_where_they_are_too_far_ahead_and_continue_with_the_slowest(tmp_path):
    acts, ahead = Acts(3), 4
    with paces(waiting_for(tmp_path / "mark"), acts, ahead, frames_per_batch=1) as collector:
        acts.forget()
        batches = [batch.clone() for batch in itertools.islice(collector, 2 + 2 * (2 + ahead))]
        found = {env: len(stream) for env, stream in streams(batches, 3).items()}
        assert found == {0: 2, 1: 2 + ahead, 2: 2 + ahead}
        assert collector.stats()["drift_max"] == acts.most == ahead
        (tmp_path / "mark").touch()
        more = {int(batch["observation"][0, 0]) for batch in itertools.islice(collector, 30)}
        assert more == {0, 1, 2}
        assert acts.most == ahead


def test_without_a_bound_statistics_tell_how_far_they_drift_apart(tmp_path):
    makers = waiting_for(tmp_path / "mark")
    with paces(makers, Acts(3), None, frames_per_batch=2) as collector:
        batches = [batch.clone() for batch in itertools.islice(collector, 30)]
        most = max(map(len, streams(batches, 3).values()))
        assert most - 2 <= collector.stats()["drift_max"] <= most
        (tmp_path / "mark").touch()


@pytest.mark.filterwarnings("ignore:.*(collection (waits|continues)|takes part again|built anew)")
@pytest.mark.parametrize(
    ("fault", "options"),
    [
        (rig.kill, {"on_failure": "relaunch"}),
        (rig.kill, {"on_failure": "continue"}),
        (rig.fail, {"on_env_error": "restart"}),
    ],
)
def test_a_loss_leaves_the_bound_and_holds_up_no_other(fault, options, tmp_path):
    acts, slow = Acts(3), rig.counting(0, pause=0.005)
    makers = [once(slow, fault, 9, tmp_path / "mark"), rig.counting(1), rig.counting(2)]
    with rig.in_time(30.0), paces(makers, acts, 2, **options) as collector:
        acts.forget()
        batches = [batch.clone() for batch in itertools.islice(collector, 60)]
        acted, drift = acts.acts, collector.stats()["drift_max"]
    assert (tmp_path / "mark").exists()
    assert len(batches) == 60
    assert drift <= 2
    assert abs(acted[1] - acted[2]) <= 2
    assert acts.most <= 2 or (acted[0] == 9 and options == {"on_failure": "continue"})


def test_the_process_of_the_policy_bounds_and_tells_it():
    makers = [rig.counting(number, pause=0.005 * (number == 0)) for number in range(3)]
    with AsyncBatchedCollector(
        makers,
        policy_factory=lambda: lambda observation: observation[..., 0].long() * 0,
        frames_per_batch=12,
        transition_chunk_size=2,
        total_frames=120,
        max_ahead=3,
    ) as collector:
        assert sum(batch.numel() for batch in collector) == 120
        assert 1 <= collector.stats()["drift_max"] <= 3
