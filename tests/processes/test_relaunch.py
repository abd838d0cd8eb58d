"""Collectors over processes and nodes that continue, or replace a worker, when one is lost."""

import functools
import itertools
import os
import random
import re
import signal
import threading
import time
import warnings

import pytest
import rig
import torch
from tensordict import TensorDict
from tools import soak

from gleanrl import (
    CollectorTimeout,
    ConfigError,
    DistributedCollector,
    LazyTensorStorage,
    MultiAsyncCollector,
    MultiSyncCollector,
    ReplayBuffer,
    WorkerDied,
)

pytestmark = [
    pytest.mark.usefixtures("_warm_nodes", "tidy_workers"),
    pytest.mark.filterwarnings("ignore:collection (continues|waits)|.*takes part again"),
]
KINDS = {
    "sync": MultiSyncCollector,
    "async": MultiAsyncCollector,
    "nodes": functools.partial(DistributedCollector, sync=True, launcher="mp", tcp_port=0),
}
SYNC = ["sync", "nodes"]
IDS = ("collector", "traj_ids")
MASK = ("collector", "mask")


def collecting(kind, *envs, per_worker=8, policy=None, how="relaunch", **options):
    frames = per_worker * len(envs) if kind in SYNC else per_worker
    options = {"total_frames": -1, "on_failure": how, **options}
    return KINDS[kind](list(envs), policy, frames_per_batch=frames, **options)


def pid_of(collector, worker):
    return int(collector.stats("per_worker")[f"worker_{worker}/pid"])


def kill(collector, worker):
    pid = pid_of(collector, worker)
    os.kill(pid, signal.SIGKILL)
    rig.await_end([pid])


def until_back(collector, worker=1, before=0):
    """Collect until the replacement of ``worker`` has made a rollout; return the batches."""
    seen = []
    with rig.in_time(4 * rig.LIMIT):
        while True:
            seen.append(collector.next())
            whole = collector.stats()["relaunches"] > before
            if whole and worker in seen[-1]["next", "observation"][..., 0].unique().tolist():
                return seen


def parent_of(pid):
    with open(f"/proc/{pid}/stat") as stat:
        return int(stat.read().rpartition(")")[2].split()[1])


def kill_soon(collector, worker, chance):
    """Kill a worker at some moment of one of its next rollouts."""
    pid = pid_of(collector, worker)
    threading.Timer(chance.uniform(0, 0.02), os.kill, (pid, signal.SIGKILL)).start()


@pytest.mark.parametrize(
    ("kind", "env", "per_worker"),
    [*((kind, rig.Count, 8) for kind in KINDS), ("nodes", rig.Wide, 40)],
)
def test_the_others_make_the_same_rollouts_and_the_replacement_new_ones(kind, env, per_worker):
    chance = random.Random(1)

    def streams(kills):
        found = {0: [], 1: [], 2: []}
        makers = [functools.partial(env, number) for number in range(3)]
        with collecting(kind, *makers, per_worker=per_worker) as collector:
            collector.set_seed(5)
            killed = 0
            while True:
                batch = collector.next()
                for row in batch if kind in SYNC else batch[None]:
                    seen = row["next", "observation"].reshape(per_worker, 2, -1)
                    assert seen.eq(seen[..., :1]).all()
                    worker, steps = int(seen[0, 0, 0]), seen[:, 1, 0].tolist()
                    found[worker].append((steps, row[IDS].tolist(), row["action"].tolist()))
                back = collector.stats()["relaunches"]
                if back == killed < kills and len(found[1]) > 4 * back:
                    kill_soon(collector, 1, chance)
                    killed += 1
                if back == kills and all(len(rollouts) > 15 for rollouts in found.values()):
                    break
            assert collector.stats()["workers_lost"] == kills
            assert collector.stats()["workers_alive"] == 3
        return found

    undisturbed, disturbed = streams(0), streams(2)
    for worker in (0, 2):
        assert disturbed[worker][:15] == undisturbed[worker][:15]
    steps, ids, _ = zip(*disturbed[1], strict=True)
    begins = [number for number, rollout in enumerate(steps) if rollout[0] == 1]
    assert len(begins) == 3
    for begin, end in itertools.pairwise([*begins, len(steps)]):
        whole = list(itertools.chain(*steps[begin:end]))
        assert whole == list(range(1, len(whole) + 1))
    lives = [set(itertools.chain(*ids[b:e])) for b, e in itertools.pairwise([*begins, len(ids)])]
    assert sum(map(len, lives)) == len(set.union(*lives))
    assert disturbed[1][begins[1]][2] != disturbed[1][begins[0]][2]  # another random stream


@pytest.mark.parametrize("kind", KINDS)
def test_workers_are_replaced_if_the_process_that_starts_them_is_killed(kind):
    with collecting(kind, *map(rig.counting, range(2))) as collector:
        collector.next()
        pids = [pid_of(collector, worker) for worker in range(2)]
        (parent,) = set(map(parent_of, pids))
        os.kill(parent, signal.SIGKILL)  # which takes its children along
        rig.await_end(pids)
        for worker in range(2):
            until_back(collector, worker, before=1)
        stats = collector.stats()
        assert (stats["workers_lost"], stats["relaunches"], stats["workers_alive"]) == (2, 2, 2)
        assert parent not in {parent_of(pid_of(collector, worker)) for worker in range(2)}


@pytest.mark.parametrize("kind", SYNC)
def test_a_batch_waits_for_a_replacement_with_the_newest_weights(kind):
    policy = rig.encoded(10)
    with collecting(kind, *map(rig.counting, range(2)), policy=policy) as collector:
        for value in (1.0, 2.0):
            collector.next()
            policy.module.set(value)
            collector.update_policy_weights_()
        kill(collector, 1)
        with pytest.warns(
            UserWarning, match=r"waits until replacement 1 of 3 .*killed by signal 9"
        ):
            batch = collector.next()
        assert batch.shape == (2, 8)
        assert batch["seen"].unique().tolist() == [2.0]
        assert batch["next", "observation"][1, :, 1].tolist() == list(range(1, 9))
        kill(collector, 0)
        policy.module.set(3.0)
        collector.update_policy_weights_()
        assert collector.next()["seen"].unique().tolist() == [3.0]


@pytest.mark.covering
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", [rig.hold_the_lock, rig.segfault, rig.quit_python])
def test_whatever_ends_a_worker_it_is_replaced(kind, fault):
    """The first life's third rollout is never made; then the file is there."""
    options = {"timeout": 1.0} if fault is rig.hold_the_lock else {}
    with collecting(
        kind, rig.counting(0), rig.counting(1, fault=fault, at=20), max_relaunches=1, **options
    ) as collector:
        seen = []
        ends = pytest.raises((WorkerDied, CollectorTimeout), match="max_relaunches=1")
        with ends if kind in SYNC else rig.in_time(30), rig.in_time(30):
            while collector.stats()["relaunches"] < 1 or collector.stats()["workers_alive"] == 2:
                batch = collector.next()
                rows = batch if kind in SYNC else batch[None]
                seen += [r["next", "observation"][:, 1].tolist() for r in rows if r_is(r, 1)]
        assert seen == [list(range(1, 9)), list(range(9, 17))] * 2
        assert collector.stats()["relaunches"] == 1


def r_is(row, worker):
    return int(row["next", "observation"][0, 0]) == worker


def once(path, fault):
    """Return a function that builds an environment once, and then does something bad."""

    def make():
        if path.exists():
            fault()
        path.touch()
        return rig.Count(1)

    return make


@pytest.mark.covering
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("most", [2, (2, 60.0)])
def test_a_crash_loop_ends_with_its_cause(kind, most, tmp_path):
    made = once(tmp_path / "made", rig.fail)
    with collecting(kind, rig.counting(0), made, max_relaunches=most) as collector:
        collector.next()
        kill(collector, 1)
        if kind == "async":
            with warnings.catch_warnings(record=True) as told, rig.in_time(4 * rig.LIMIT):
                warnings.simplefilter("always")
                while len(told) < 3:
                    collector.next()
            assert re.search("(?s)for good .*max_relaunches=.?2.*in the simulator", str(told[-1]))
            assert collector.next()["next", "observation"][0, 0] == 0
        else:
            with pytest.raises(WorkerDied, match=r"(?s)in the simulator.*max_relaunches=.?2"):
                collector.next()


def test_a_replacement_that_does_not_come_up_is_ended(tmp_path):
    made = once(tmp_path / "made", rig.hang_quietly)
    with collecting("sync", rig.counting(0), made, max_relaunches=1) as collector:
        collector.next()
        collector._engine.backend._start_timeout = 1.0
        kill(collector, 1)
        with pytest.raises(WorkerDied, match="did not build its environments within 1.0 s"):
            collector.next()


def test_replacements_within_some_seconds_are_counted_apart():
    with collecting("sync", rig.counting(0), max_relaunches=(1, 0.01)) as collector:
        for number in range(1, 4):
            kill(collector, 0)
            collector.next()
            assert collector.stats()["relaunches"] == number


@pytest.mark.parametrize("kind", KINDS)
def test_memory_of_lost_workers_is_used_again(kind):
    with collecting(kind, rig.counting(0), max_relaunches=(1, 0.001)) as collector:
        memory = collector.stats()["memory_bytes"]
        kept = []
        for number in range(4):
            kill(collector, 0)
            kept += until_back(collector, 0, number)
        seen = [batch["next", "observation"].reshape(-1, 2) for batch in kept]
        steps = torch.cat(seen)[:, 1].tolist()
        assert steps.count(1) == 4
        assert all(later in (1, step + 1) for step, later in itertools.pairwise(steps))
        assert collector.stats()["memory_bytes"] == memory


@pytest.mark.parametrize("kind", SYNC)
def test_without_a_lost_worker_its_part_of_a_batch_is_masked(kind):
    with collecting(kind, *map(rig.counting, range(3)), how="continue") as collector:
        assert collector.next()[MASK].all()
        kill(collector, 1)
        for _ in range(5):
            batch = collector.next()
            assert batch[MASK].all(-1).tolist() == [True, False, True]
            assert (batch[IDS] == -1).all(-1).tolist() == [False, True, False]
            assert not batch["next", "observation"][1].any()
            batch["next", "observation"].fill_(7.0)  # the batch is the caller's
        assert collector.stats()["frames"] == 24 + 5 * 16
        kill(collector, 0)
        kill(collector, 2)
        with pytest.raises(WorkerDied):
            collector.next()


@pytest.mark.parametrize("cat", [0, -1])
def test_parts_put_together_leave_out_or_mask_a_lost_worker(cat):
    with collecting(
        "sync", *map(rig.counting, range(2)), how="continue", num_envs=2, cat_results=cat
    ) as collector:
        whole = collector.next()
        kill(collector, 0)
        batch = collector.next()
    assert whole.shape == ((4, 4) if cat == 0 else (2, 8))
    assert batch.shape == ((4, 4) if cat == 0 else (2, 4))
    assert int(batch[MASK].sum()) == 8
    assert set(batch[batch[MASK]]["next", "observation"][:, 0].tolist()) == {1.0}


@pytest.mark.covering
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["continue", "relaunch"])
@pytest.mark.parametrize("shared", [False, True])
def test_a_buffer_gets_whole_rows_and_no_others(kind, how, shared):
    buffer = ReplayBuffer(storage=LazyTensorStorage(4000), batch_size=8, shared=shared)
    with collecting(kind, *map(rig.counting, range(2)), how=how, replay_buffer=buffer) as collector:
        for number, _ in enumerate(itertools.islice(collector, 12)):
            if number == 4:
                kill(collector, 1)
        frames = collector.stats()["frames"]
        # Asynchronous workers store rollouts before these are delivered.
        assert frames == len(buffer) if kind in SYNC else frames <= len(buffer)
    rows = buffer[:]
    steps = [tuple(map(int, row)) for row in rows["next", "observation"].tolist()]
    assert all(step > 0 for _, step in steps)
    ids = torch.cat([rows[IDS]]).reshape(-1)
    assert (torch.unique(ids, return_counts=True)[1] <= 5).all()


@pytest.mark.parametrize("kind", SYNC)
def test_whole_trajectories_of_a_life_never_join_those_of_another(kind):
    with collecting(
        kind, *map(rig.counting, range(2)), per_worker=7, trajs_per_batch=4, traj_format="cat"
    ) as collector:
        for number in range(8):
            batch = collector.next()
            done = batch["next", "done"].reshape(-1).nonzero().reshape(-1).tolist()
            assert [b - a for a, b in itertools.pairwise([-1, *done])] == [5] * len(done)
            if number in (2, 5):
                kill(collector, number % 2)


@pytest.mark.parametrize("kind", SYNC)
def test_a_loss_in_the_background_is_made_good(kind):
    buffer = ReplayBuffer(storage=LazyTensorStorage(4000), batch_size=8)
    with collecting(
        kind, *map(rig.counting, range(2)), replay_buffer=buffer, total_frames=1600
    ) as collector:
        collector.start()
        rig.until(lambda: len(buffer) > 50)
        kill(collector, 1)
        rig.until(lambda: len(buffer) == 1600)
        assert collector.stats()["relaunches"] == 1


@pytest.mark.parametrize("kind", KINDS)
def test_commands_reach_replacements(kind):
    with collecting(kind, *map(rig.counting, range(2))) as collector:
        collector.next()
        kill(collector, 1)
        assert collector.set_seed(3) == 4
        until_back(collector)
        assert collector.getattr_env("number") == 0
        assert collector.get_distant_attr("env.number") == [0, 1]
        state = collector.state_dict()
        kill(collector, 1)
        collector.load_state_dict(state)
        until_back(collector, 1, 1)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"on_failure": "restart"}, "'raise', 'continue' or 'relaunch'"),
        ({"on_failure": "relaunch", "traj_quota": "equal", "trajs_per_batch": 2}, "traj_quota"),
        ({"on_failure": "relaunch", "max_relaunches": -1}, "max_relaunches"),
        ({"on_failure": "relaunch", "max_relaunches": (3, 0)}, "max_relaunches"),
    ],
)
def test_a_reaction_that_cannot_be_is_refused_before_a_start(options, says):
    with pytest.raises(ConfigError, match=says):
        MultiSyncCollector(["CartPole-v1"] * 2, frames_per_batch=8, **options)


@pytest.mark.covering
@pytest.mark.parametrize("where", ["", "nodes-"])
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_soak_finds_no_wrong_frame(where, kind):
    figures = soak.run(where + kind, 3.0, seed=1)
    assert figures["relaunches"]
    assert figures["frames"]


def test_a_seed_does_not_wait_for_the_rollouts_of_a_lost_worker():
    """Workers write into this buffer, so that rollouts under way are collected first."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(4000), batch_size=8, shared=True)
    makers = [rig.counting(0), rig.counting(1, pause=0.05)]
    with collecting("async", *makers, how="continue", replay_buffer=buffer) as collector:
        collector.next()
        pid = pid_of(collector, 1)
        threading.Timer(0.1, os.kill, (pid, signal.SIGKILL)).start()
        with rig.in_time(2 * rig.LIMIT):
            collector.set_seed(1)
            collector.next()
        assert collector.stats()["workers_lost"] == 1


def test_a_replacement_is_up_within_a_second():
    with collecting("sync", "CartPole-v1", "CartPole-v1") as collector:
        collector.next()
        took = []
        for _ in range(3):
            kill(collector, 1)
            began = time.monotonic()
            assert isinstance(collector.next(), TensorDict)
            took.append(time.monotonic() - began)
        assert min(took) < 1.0 * rig.load()


def test_batches_that_are_kept_leave_room_for_a_replacement():
    """The lost worker's last two rollouts are handed over before its replacement asks for room."""
    with collecting("async", rig.counting(0), rig.counting(1, pause=0.002)) as collector:
        kept = [collector.next() for _ in range(12)]
        for number in range(3):
            rig.until(
                lambda: collector._engine.check() or len(collector._engine.gather.waiting()) == 4
            )
            kill(collector, 0)
            rig.until(lambda: collector._engine.check() or 0 in collector._engine.lost)
            kept += until_back(collector, 0, number)
            then = [rig.rows(batch) for batch in kept]
            kept += [collector.next() for _ in range(6)]
        assert [rig.rows(batch) for batch in kept[: len(then)]] == then


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_of_workers_that_were_all_lost_is_that_of_a_replacement(kind):
    with collecting(kind, rig.counting(0), rig.counting(1)) as collector:
        collector.next()
        for worker in range(2):
            kill(collector, worker)
        state = collector.state_dict()
        assert not all(state[f"worker{worker}"].get("lost") for worker in range(2))
        assert collector.next().numel() > 0
