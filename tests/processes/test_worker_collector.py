"""The collectors inside workers: their hooks, and what can be asked of them by path."""

import json
import os
from collections import Counter

import pytest
import rig
import torch
from tensordict.nn import TensorDictModule

from gleanrl import ConfigError
from gleanrl.collectors import MultiAsyncCollector, MultiSyncCollector
from gleanrl.data import LazyTensorStorage, ListStorage, ReplayBuffer, SliceSampler

several = pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])


def module():
    return TensorDictModule(rig.Encoded(), in_keys=["observation"], out_keys=["action", "seen"])


def make(kind, **options):
    given = {"frames_per_batch": 16, "total_frames": 64, **options}
    return kind([rig.counting(i) for i in range(2)], **given)


class Log:
    """What hooks in several processes have noted, in a file."""

    def __init__(self, path):
        self.path = str(path)
        open(self.path, "w").close()

    def note(self, *entry):
        with open(self.path, "a") as file:
            file.write(json.dumps(entry) + "\n")

    def read(self):
        with open(self.path) as file:
            return [json.loads(line) for line in file]


@several
def test_hooks_run_in_every_worker_around_each_of_its_rollouts(kind, tmp_path):
    log = Log(tmp_path / "log")
    with make(
        kind,
        pre_collect_hook=lambda: log.note(os.getpid(), "before"),
        post_collect_hook=lambda batch: log.note(os.getpid(), batch.numel()),
    ) as collector:
        pids = collector.map_fn("env.pid")
        shapes = [batch.numel() for batch in collector]
        delivered = [collector.stats("per_worker")[f"worker_{w}/batches"] for w in range(2)]
    each = 8 if kind is MultiSyncCollector else 16
    assert shapes == [16] * 4
    for pid, number in zip(pids, delivered, strict=True):
        own = [entry for at, entry in log.read() if at == pid]
        assert own[: 2 * number] == ["before", each] * number
    assert {at for at, _ in log.read()} == set(pids)
    assert os.getpid() not in pids


@several
def test_hooks_that_are_set_later_reach_the_workers(kind, tmp_path):
    log = Log(tmp_path / "log")
    with make(kind, total_frames=-1) as collector:
        collector.next()
        collector.pre_collect_hook = hook = lambda: log.note(os.getpid(), "before")
        collector.set_post_collect_hook(lambda batch: log.note(os.getpid(), "after"))
        assert collector.pre_collect_hook is hook
        pids = collector.map_fn("env.pid")
        for _ in range(8):
            collector.next()
        collector.pre_collect_hook = collector.post_collect_hook = None
        counts = Counter(map(tuple, log.read()))
        for _ in range(8):
            collector.next()
        assert Counter(map(tuple, log.read())) == counts
    assert set(counts) == {(pid, what) for pid in pids for what in ("before", "after")}


def test_a_hook_sees_the_rollout_itself_and_may_change_its_values_only():
    with make(
        MultiSyncCollector, post_collect_hook=lambda b: b["next", "reward"].fill_(7)
    ) as collector:
        assert all(batch["next", "reward"].eq(7).all() for batch in collector)
    with (
        make(MultiSyncCollector, post_collect_hook=lambda b: b.set("more", b["done"])) as collector,
        pytest.raises(RuntimeError, match="locked"),
    ):
        collector.next()


@several
def test_what_a_hook_raises_names_the_worker(kind):
    def fail(batch):
        raise ArithmeticError("in the hook")

    with (
        make(kind, post_collect_hook=fail) as collector,
        pytest.raises(ArithmeticError, match=r"worker \d.*in the hook"),
    ):
        collector.next()


def test_hooks_see_what_is_stored_where_workers_fill_a_buffer(tmp_path):
    log = Log(tmp_path / "log")
    rb = ReplayBuffer(storage=LazyTensorStorage(1000))
    with make(
        MultiSyncCollector,
        replay_buffer=rb,
        postproc=lambda batch: batch.set("more", batch["done"]),
        pre_collect_hook=lambda: log.note("before"),
    ) as collector:
        collector.post_collect_hook = lambda batch: batch["more"].fill_(True)
        assert list(collector) == [None] * 4
    assert rb[:]["more"].all()
    assert len(log.read()) == 8


@several
def test_paths_begin_at_the_collector_of_the_worker(kind):
    with make(kind, policy=module()) as collector:
        assert collector.get_distant_attr("worker_idx") == [0, 1]
        assert collector.get_distant_attr("env.number") == [0, 1]
        assert collector.map_fn("get_distant_attr", [("env.number",), ("worker_idx",)]) == [0, 1]
        assert collector.get_distant_attr("policy.module.training") == [True, True]
        each = 8 if kind is MultiSyncCollector else 16
        assert collector.cascade_execute("frames_per_batch") == [each] * 2
        assert collector.get_distant_attr("replay_buffer") == [None] * 2
        assert collector.get_distant_attr("n_env") == [1, 1]
        assert len(set(collector.map_fn("getattr_env", [("steps",)] * 2))) <= 2
        assert collector.getattr_policy("in_keys") == ["observation"]
        assert collector.explain().startswith("loop: ")
        with pytest.raises(AttributeError):
            collector.get_distant_attr("nothing")
        with pytest.raises(AttributeError):
            collector.getattr_env("nothing")
        with pytest.raises(ConfigError, match="Expected 2 argument entries"):
            collector.map_fn("get_distant_attr", [("worker_idx",)])


@several
def test_the_buffer_that_workers_share_answers_by_path(kind):
    rb = ReplayBuffer(storage=LazyTensorStorage(1000))
    with make(kind, replay_buffer=rb) as collector:
        list(collector)
        assert collector.map_fn("replay_buffer.__len__") == [64, 64]
        assert collector.getattr_rb("write_count") == 64
    rb = ReplayBuffer(storage=ListStorage(1000))
    with make(kind, replay_buffer=rb) as collector:
        list(collector)
        assert all((row == rb[0]).all() for row in collector.get_distant_attr("replay_buffer[0]"))
        assert collector.getattr_rb("__len__")() == 64
        assert collector.map_fn("replay_buffer.__len__") == [64, 64]
        assert collector.cascade_execute("replay_buffer.sample", 5)[1].shape == (5,)
        assert collector.get_distant_attr("replay_buffer.write_count") == [64, 64]


def test_weights_of_single_workers_are_updated_by_path():
    with make(MultiSyncCollector, policy=module(), total_frames=-1) as collector:
        weights = [({"module.weight": torch.full((1000,), float(w + 1))},) for w in range(2)]
        assert collector.map_fn("update_policy_weights_", weights) == [None, None]
        assert collector.get_distant_attr("policy_version") == [1, 1]
        assert [w.max().item() for w in collector.get_distant_attr("policy.module.weight")] == [
            1,
            2,
        ]
        assert collector.next()["seen"][:, :, 0].eq(torch.tensor([[1.0], [2.0]])).all()


def test_a_profile_is_taken_in_the_workers_that_are_named(tmp_path):
    with make(MultiSyncCollector) as collector:
        with pytest.raises(ConfigError, match=r"workers to profile \[2\] must be indices below 2"):
            collector.enable_profile(workers=[1, 2])
        assert collector.profile_config is None
        collector.enable_profile(
            workers=[1], num_rollouts=2, save_path=tmp_path / "trace_{worker_idx}.json"
        )
        list(collector)
        collector.disable_profile()
    assert [path.name for path in tmp_path.iterdir()] == ["trace_1.json"]


@several
def test_stats_have_the_documented_keys(kind):
    with make(kind) as collector:
        collector.next()
        stats = collector.stats()
        assert stats["requested_frames_per_batch"] == stats["frames"] == 16
        assert stats["worker_frames"] == 16
        per_worker = collector.stats(workers="per_worker", timeout=30.0)
        assert sum(per_worker[f"worker_{w}/frames"] for w in range(2)) == 16
        assert per_worker["workers"] == per_worker["workers_alive"] == 2
        assert "frames" not in per_worker
        both = {**stats, **per_worker}
        assert collector.stats("both") == pytest.approx(both, nan_ok=True)  # no episode has ended
        with pytest.raises(ConfigError, match="workers must be one of"):
            collector.stats("all")
        asked = collector.map_fn("stats")
        assert [own["requested_frames_per_batch"] for own in asked] == [
            per_worker[f"worker_{w}/requested_frames_per_batch"] for w in range(2)
        ]


def test_states_of_workers_show_the_policy_version():
    with make(MultiSyncCollector, policy=module(), track_policy_version=True) as collector:
        collector.update_policy_weights_()
        collector.update_policy_weights_()
        state = collector.state_dict()
    assert [state[f"worker{w}"]["policy_version"] for w in range(2)] == [2, 2]
    with make(MultiSyncCollector, policy=module(), track_policy_version=True) as collector:
        collector.load_state_dict(state)
        assert collector.policy_version == 2
        assert collector.state_dict()["worker1"]["policy_version"] == 2


@several
def test_steps_are_added_one_by_one_for_each_worker(kind):
    rb = ReplayBuffer(storage=ListStorage(1000))
    with make(kind, replay_buffer=rb, extend_buffer=False) as collector:
        assert list(collector) == [None] * 4
    rows = rb.storage.items
    assert [row.shape for row in rows] == [()] * 64
    for number in range(2):
        own = [row["observation"] for row in rows if row["observation"][0] == number]
        steps = torch.stack(own)[:, 1]
        assert steps[1:].sub(steps[:-1]).remainder(5).eq(1).all()


def test_each_environment_has_its_row_of_time_where_workers_are_stacked_and_steps_are_added():
    rb = ReplayBuffer(storage=LazyTensorStorage(1000, ndim=2))
    options = {"replay_buffer": rb, "extend_buffer": False, "cat_results": "stack"}
    with make(MultiSyncCollector, **options) as collector:
        list(collector)
    assert rb[:]["observation"][..., 0].unique(dim=1).tolist() == [[0], [1]]


def test_frames_of_fast_workers_are_stored_where_slow_ones_are_stopped():
    rb = ReplayBuffer(storage=ListStorage(1000))
    with MultiSyncCollector(
        [rig.counting(0), rig.counting(1, pause=0.02)],
        frames_per_batch=200,
        preemptive_threshold=0.5,
        replay_buffer=rb,
        extend_buffer=False,
    ) as collector:
        collector.next()
        stats = collector.stats()
    numbers = Counter(int(row["observation"][0]) for row in rb.storage.items)
    assert numbers[0] == 100
    assert 0 < numbers[1] < 100
    assert stats["frames"] == len(rb.storage.items)
    assert stats["frames_discarded"] == 0


def test_steps_that_another_worker_did_not_reach_end_a_slice():
    rb = ReplayBuffer(storage=LazyTensorStorage(10_000, ndim=2), sampler=SliceSampler(slice_len=2))
    with MultiSyncCollector(
        [rig.counting(0, length=1000, pause=0.002), rig.counting(1, length=1000, pause=0.005)],
        frames_per_batch=40,
        total_frames=160,
        preemptive_threshold=0.5,
        replay_buffer=rb,
        extend_buffer=False,
    ) as collector:
        list(collector)
        assert collector.stats()["frames_discarded"]
    pairs = rb.sample(400).reshape(-1, 2)
    assert (pairs["next", "observation"][:, 0] == pairs["observation"][:, 1]).all()
