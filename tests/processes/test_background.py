"""Collecting in the background: exact counts, pauses that hold, errors that surface, clean ends."""

import functools
import gc
import os
import pickle
import select
import signal
import subprocess
import sys
import textwrap
import threading
from contextlib import contextmanager

import pytest
import rig
import torch
import torchrl.data
import warm
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from gleanrl import (
    Collector,
    CollectorTimeout,
    ConfigError,
    Interruptor,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    MultiAsyncCollector,
    MultiSyncCollector,
    PrioritizedSampler,
    RateLimiter,
    ReplayBuffer,
    ReplayError,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    WorkerDied,
    WorkerError,
)

KINDS = {"inline": Collector, "sync": MultiSyncCollector, "async": MultiAsyncCollector}
MULTI = ["sync", "async"]
every_kind = pytest.mark.parametrize("kind", sorted(KINDS))
several = pytest.mark.parametrize("kind", MULTI)


pytestmark = pytest.mark.usefixtures("tidy_workers")


@pytest.fixture(scope="module", autouse=True)
def _warm(_warm_workers):
    """Have TorchRL's storages up, too: they open files that stay."""
    rb = torchrl.data.ReplayBuffer(storage=torchrl.data.LazyTensorStorage(10))
    rb.extend(TensorDict({"a": torch.zeros(2)}, [2]))


@pytest.fixture
def make():
    """Return a function that makes collectors, each of two environments; all are shut down."""
    made = []

    def build(kind, rb, policy=None, envs=None, **options):
        envs = [rig.counting(n) for n in range(2)] if envs is None else envs
        options.setdefault("frames_per_batch", 8 if kind == "async" else 16)
        made.append(KINDS[kind](envs, policy, replay_buffer=rb, **options))
        return made[-1]

    yield build
    while made:
        made.pop().shutdown(raise_on_error=False)


def buffer(size=100_000, **options):
    return ReplayBuffer(storage=LazyTensorStorage(size), **options)


def check_rows(rb, envs=2):
    """Every row is one step of one environment, and of each none is missing or there twice."""
    rows = rb[:]
    before, after = rows["observation"].long(), rows["next", "observation"].long()
    assert (before[:, 0] == after[:, 0]).all()
    assert (before[:, 1] + 1 == after[:, 1]).all()
    for number in range(envs):
        steps = sorted(after[after[:, 0] == number, 1].tolist())
        assert steps == list(range(1, len(steps) + 1))
    return rows


# -- counts ----------------------------------------------------------------------------------------


@every_kind
def test_counts_are_exact_in_a_pause_and_nothing_is_written_there(make, kind):
    rb = buffer()
    collector = make(kind, rb)
    collector.start()
    before = 0
    for _ in range(5):
        rig.until(lambda before=before: rb.write_count > before)
        with collector.pause():
            before = rb.write_count
            assert collector.stats()["frames"] == before
            assert collector.is_running()
            check_rows(rb)
            select.select([], [], [], 0.01)
            assert rb.write_count == before
    collector.async_shutdown()
    assert rb.write_count == collector.stats()["frames"]
    check_rows(rb)


@every_kind
def test_all_rows_are_stored_when_it_has_completed(make, kind):
    storing = threading.Event()

    class Slow(ReplayBuffer):
        def extend(self, data):
            storing.wait(10)
            return super().extend(data)

    rb = Slow(storage=ListStorage(1000))  # the learner's process stores
    collector = make(kind, rb, total_frames=16)
    collector.start()
    rig.until(lambda: collector.stats()["frames"] == (8 if kind == "async" else 16))
    assert not collector.stats()["completed"]
    storing.set()
    rig.until(lambda: collector.stats()["completed"])
    assert rb.write_count == 16


@every_kind
def test_it_ends_at_total_frames(make, kind):
    rb = buffer()
    collector = make(kind, rb, total_frames=160)
    collector.start()
    rig.until(lambda: not collector.is_running())
    assert rb.write_count == collector.stats()["frames"] == 160
    check_rows(rb)
    with collector.pause():  # it may have ended just before: that is no mistake of the caller's
        assert rb.write_count == 160
    assert list(collector) == []
    collector.start()
    rig.until(lambda: not collector.is_running())
    assert rb.write_count == 160


@every_kind
def test_shutting_down_in_the_middle_stores_whole_rows_and_counts_them(make, kind):
    rb = buffer()
    envs = [rig.counting(n, pause=0.002) for n in range(2)]
    collector = make(kind, rb, envs=envs, frames_per_batch=4000)
    collector.start()
    select.select([], [], [], 0.05)  # be in the middle of a rollout
    with rig.in_time(1.0):
        collector.async_shutdown()
    assert rb.write_count == collector.stats()["frames"] < 4000
    if len(rb):
        check_rows(rb)


@several
def test_a_learner_extended_buffer_gets_no_half_rollouts(make, kind):
    rb = torchrl.data.ReplayBuffer(storage=torchrl.data.LazyTensorStorage(10_000))
    envs = [rig.counting(n, pause=0.002) for n in range(2)]
    collector = make(kind, rb, envs=envs)
    collector.start()
    rig.until(lambda: rb.write_count > 0)
    collector.async_shutdown()
    assert rb.write_count == collector.stats()["frames"]
    rows = rb[:]
    assert (rows["observation"][:, 1] + 1 == rows["next", "observation"][:, 1]).all()


@every_kind
def test_init_random_frames_count_what_this_collector_collected(make, kind):
    policy = rig.Encoded()
    policy.set(7)
    module = TensorDictModule(policy, in_keys=["observation"], out_keys=["action", "seen"])
    rb = buffer()
    make(kind, rb, module, total_frames=64).start()
    rig.until(lambda: rb.write_count == 64)
    collector = make(kind, rb, module, total_frames=160, init_random_frames=64)
    collector.start()
    rig.until(lambda: rb.write_count == 64 + 160)
    rig.until(lambda: not collector.is_running())
    seen = rb[:]["seen"][64:]
    # Policy outputs of random frames are zero.
    assert (seen == 0).all(-1).sum() == 64
    assert (seen == 7).all(-1).sum() == 96


@several
def test_a_reset_while_it_runs_keeps_counts_exact(make, kind):
    rb = buffer()
    collector = make(kind, rb)
    collector.start()
    for _ in range(5):
        count = rb.write_count
        rig.until(lambda count=count: rb.write_count > count)
        collector.reset()
        collector.set_seed(3)
    with collector.pause():
        assert rb.write_count == collector.stats()["frames"]
        check_rows(rb)


# -- what may be called when -----------------------------------------------------------------------


@every_kind
def test_what_may_be_called_when(make, kind):
    with pytest.raises(RuntimeError, match="replay_buffer="):
        make(kind, None).start()
    rb = buffer()
    collector = make(kind, rb)
    with pytest.raises(RuntimeError, match="it is not running"):
        collector.pause()
    collector.start()
    thread = collector.collection.filling.thread
    collector.start()
    assert collector.collection.filling.thread is thread
    for use in (collector.next, collector.rollout, lambda: next(collector.iterator())):
        with pytest.raises(RuntimeError, match="collects in the background"):
            use()


@every_kind
def test_a_mistaken_loop_does_not_end_collection(make, kind):
    rb = buffer()
    collector = make(kind, rb)
    collector.start()
    with pytest.raises(RuntimeError, match="collects in the background"):
        next(iter(collector))
    count = rb.write_count
    rig.until(lambda: rb.write_count > count)
    assert collector.stats()["running"]


@every_kind
def test_it_goes_on_if_the_body_of_a_pause_raises(make, kind):
    rb = buffer()
    collector = make(kind, rb)
    collector.start()
    with pytest.raises(KeyError), collector.pause():
        raise KeyError
    count = rb.write_count
    rig.until(lambda: rb.write_count > count)


@every_kind
def test_pauses_can_be_nested(make, kind):
    rb = buffer()
    collector = make(kind, rb)
    collector.start()
    with collector.pause():
        with collector.pause():
            pass
        count = rb.write_count
        select.select([], [], [], 0.01)
        assert rb.write_count == count
    rig.until(lambda: rb.write_count > count)


def test_a_postproc_that_pauses_is_told_that_it_cannot(make):
    rb = ReplayBuffer(storage=ListStorage(1000))
    collector = make("async", rb, postproc=lambda batch: collector.pause().__enter__())
    collector.start()
    rig.until(lambda: collector.stats()["failed"])
    with pytest.raises(RuntimeError, match="from inside"):
        collector.shutdown()


@every_kind
def test_everything_can_be_asked_while_it_runs(make, kind):
    rb = buffer()
    module = TensorDictModule(rig.Encoded(), in_keys=["observation"], out_keys=["action", "seen"])
    collector = make(kind, rb, module)
    collector.start()
    for _ in range(5):
        assert collector.state_dict()["frames"] <= rb.write_count
        collector.update_policy_weights_()
        collector.get_distant_attr("env")
    state = collector.state_dict()
    collector.load_state_dict(state)
    count = rb.write_count
    rig.until(lambda: rb.write_count > count)


@every_kind
def test_a_state_counts_all_rows_of_the_buffer(make, kind):
    """So ids of trajectories that a collector with that state begins are in no row yet."""
    rb = buffer()
    with make(kind, rb) as collector:
        for _ in range(3):
            collector.next()
            state = collector.state_dict()
            assert state["frames"] == rb.write_count
    assert state["frames"] == rb.write_count


# -- weights ---------------------------------------------------------------------------------------


@every_kind
def test_weights_change_while_it_runs_and_are_never_mixed(make, kind):
    rb, policy = buffer(), rig.Encoded()
    module = TensorDictModule(policy, in_keys=["observation"], out_keys=["action", "seen"])
    collector = make(kind, rb, module, track_policy_version=True)
    collector.start()
    for value in range(1, 15):
        policy.set(value)
        collector.update_policy_weights_()
        count = rb.write_count
        rig.until(lambda count=count: rb.write_count > count)
    rig.until(lambda: rb[-1:]["seen"][0, 0] == 14)
    collector.async_shutdown()
    rows = rb[:]
    assert (rows["seen"] == rows["seen"][:, :1]).all()
    assert rows["seen"][:, 0].equal(rows["policy_version"].flatten().to(rows["seen"].dtype))
    assert len(rows["seen"].unique()) > 3


@every_kind
@pytest.mark.filterwarnings("ignore:the policy.s parameters have changed")
def test_training_the_module_does_not_touch_what_acts(make, kind):
    rb, policy = buffer(), rig.Encoded()
    policy.set(1)
    module = TensorDictModule(policy, in_keys=["observation"], out_keys=["action", "seen"])
    collector = make(kind, rb, module)
    collector.start()
    policy.set(2)
    rig.until(lambda: rb.write_count > 100)
    with collector.pause():
        assert (rb[:]["seen"] == 1).all()
        count = rb.write_count
        collector.update_policy_weights_()
    rig.until(lambda: rb.write_count > count + 50)
    with collector.pause():
        assert (rb[:]["seen"][count:] == 2).all()


# -- errors ----------------------------------------------------------------------------------------

ASK = {
    "update": lambda c: c.update_policy_weights_(),
    "pause": lambda c: c.pause(),
    "start": lambda c: c.start(),
    "next": lambda c: c.next(),
    "state": lambda c: c.state_dict(),
    "question": lambda c: c.get_distant_attr("env"),
    "shutdown": lambda c: c.shutdown(),
    "async_shutdown": lambda c: c.async_shutdown(),
}


@pytest.mark.covering
@pytest.mark.parametrize("ask", sorted(ASK))
@every_kind
def test_an_error_surfaces_at_the_next_call(make, kind, ask):
    rb = buffer()
    envs = [rig.counting(0), rig.counting(1, fault=rig.fail, at=30)]
    collector = make(kind, rb, envs=envs)
    collector.start()
    rig.until(lambda: collector.stats()["failed"])
    assert not collector.stats()["running"]
    with collector:
        with pytest.raises(ArithmeticError, match="in the simulator") as raised:
            ASK[ask](collector)
        assert isinstance(raised.value, WorkerError)
    collector.shutdown()  # it was raised: once is enough
    if len(rb):
        rows = rb[:]
        assert (rows["observation"][:, 1] + 1 == rows["next", "observation"][:, 1]).all()
    rb.empty()
    with pytest.raises(ReplayError, match="the collector that fills it failed") as starved:
        rb.sample(4)
    assert starved.value.__cause__ is raised.value


@pytest.mark.covering
@pytest.mark.parametrize("ask", ["update", "pause", "state", "shutdown"])
@several
def test_a_killed_worker_is_named(make, kind, ask):
    rb = buffer()
    collector = make(kind, rb)
    pid = collector.cascade_execute("env.pid")[1]
    collector.start()
    rig.until(lambda: rb.write_count > 0)
    os.kill(pid, signal.SIGKILL)
    rig.until(lambda: collector.stats()["failed"])
    with pytest.raises(WorkerDied, match="worker 1 .* killed by signal 9"):
        ASK[ask](collector)
    rows = rb[:]
    assert (rows["observation"][:, 1] + 1 == rows["next", "observation"][:, 1]).all()
    rb.extend(rows[:1])  # the buffer is as good as before
    rb.sample(8)


@several
def test_a_worker_killed_inside_a_pause_is_told_afterwards(make, kind):
    rb = buffer()
    collector = make(kind, rb)
    pid = collector.cascade_execute("env.pid")[0]
    collector.start()
    with collector.pause():
        os.kill(pid, signal.SIGKILL)
        rig.await_end([pid])
    rig.until(lambda: collector.stats()["failed"])
    with pytest.raises(WorkerDied):
        collector.shutdown()


@several
def test_a_worker_that_hangs_is_given_up_after_its_timeout(make, kind):
    envs = [rig.counting(0), rig.counting(1, fault=rig.hang, at=30)]
    collector = make(kind, buffer(), envs=envs, timeout=0.5)
    collector.start()
    rig.until(lambda: collector.stats()["failed"])
    with rig.in_time(), pytest.raises(TimeoutError, match=r"workers \[1\]"):
        collector.shutdown()


@several
def test_a_shutdown_does_not_wait_for_a_worker_that_hangs(make, kind):
    envs = [rig.counting(0), rig.counting(1, fault=rig.hang, at=3)]
    collector = make(kind, buffer(), envs=envs)
    collector.start()
    select.select([], [], [], 0.1)
    with rig.in_time(3.0):
        collector.shutdown(timeout=1.0, raise_on_error=False)


# -- the end ---------------------------------------------------------------------------------------


@every_kind
def test_a_collector_that_is_forgotten_ends(kind):
    rb, others = buffer(), rig.workers()
    collector = KINDS[kind](
        [rig.counting(n) for n in range(2)], frames_per_batch=16, replay_buffer=rb
    )
    collector.start()
    thread = collector.collection.filling.thread
    rig.until(lambda: rb.write_count > 0)
    del collector
    gc.collect()
    rig.until(lambda: not thread.is_alive())
    rig.await_end(rig.workers() - others)
    count = rb.write_count
    select.select([], [], [], 0.02)
    assert rb.write_count == count


@every_kind
def test_shutdown_is_prompt(make, kind):
    rb = buffer()
    collector = make(kind, rb)
    collector.start()
    rig.until(lambda: rb.write_count > 100)
    with rig.in_time(1.0):
        collector.shutdown()
    collector.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        collector.start()
    with pytest.raises(RuntimeError):
        collector.pause()


SCRIPT = """
    import select, sys, weakref
    import gleanrl as g
    rb = g.ReplayBuffer(storage=g.LazyTensorStorage(100_000), shared=True)
    options = {} if sys.argv[1] == "Collector" else {"num_workers": 2}
    c = getattr(g, sys.argv[1])("CartPole-v1", frames_per_batch=64, replay_buffer=rb, **options)
    c.start()
    while rb.write_count < 200:
        pass
    print("ready", flush=True)
    # A signal that arrives as the call begins is seen when the call returns (so it is in CPython).
    while sys.argv[2] == "wait":
        select.select([], [], [], 0.1)
    # At exit, Python looks through all finalizers, which takes long here; threads make some.
    sys.setswitchinterval(1e-6)
    things = [set() for _ in range(100_000)]
    for thing in things:
        weakref.finalize(thing, id).atexit = False
"""


@contextmanager
def scripts(kinds, how):
    """Start one for each kind, side by side: most of their time is that of imports."""
    started = {
        kind: subprocess.Popen(
            [str(warm.START), "-c", textwrap.dedent(SCRIPT), KINDS[kind].__name__, how],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for kind in kinds
    }
    try:
        yield started.items()
    finally:
        for process in started.values():
            process.kill()
            process.communicate()


@pytest.mark.slow
def test_a_script_that_just_ends():
    with scripts(KINDS, "end") as started:
        for kind, process in started:
            out, err = process.communicate(timeout=60)
            assert (process.returncode, out, err) == (0, "ready\n", ""), kind


@pytest.mark.slow
def test_ctrl_c_ends_everything():
    with scripts(KINDS, "wait") as started:
        for kind, process in started:
            assert process.stdout.readline() == "ready\n"
            inside = rig.workers(process.pid)
            assert len(inside) == (1 if kind == "inline" else 2)
            os.killpg(process.pid, signal.SIGINT)
            with rig.in_time():
                _, err = process.communicate(timeout=60)
            assert err.strip().endswith("KeyboardInterrupt"), (kind, err[-1500:])
            assert err.count("Traceback") == 1, kind
            rig.await_end(inside)


@pytest.mark.slow
def test_a_killed_learner_takes_its_workers_along():
    with scripts(MULTI, "wait") as started:
        for _, process in started:
            assert process.stdout.readline() == "ready\n"
            inside = rig.workers(process.pid)
            assert len(inside) == 2
            process.kill()
            process.communicate(timeout=60)
            rig.await_end(inside)


PONG = """
    from gleanrl.modules import RandomPolicy

    import time
    from functools import partial

    import tqdm

    from gleanrl.collectors import MultiAsyncCollector
    from gleanrl.data import LazyTensorStorage, ReplayBuffer
    from gleanrl.envs import GymEnv, set_gym_backend
    import ale_py

    # Set the gym backend to gymnasium
    set_gym_backend("gymnasium").set()

    if __name__ == "__main__":
        # Create a random policy for the Pong environment
        env_fn = partial(GymEnv, "ALE/Pong-v5")
        policy = RandomPolicy(env_fn().action_spec)

        # Initialize a shared replay buffer
        rb = ReplayBuffer(storage=LazyTensorStorage(10000), shared=True)

        # Create a multi-async data collector with 16 environments
        num_envs = 16
        collector = MultiAsyncCollector(
            [env_fn] * num_envs,
            policy=policy,
            replay_buffer=rb,
            frames_per_batch=num_envs * 16,
            total_frames=-1,
        )

        # Progress bar to track the number of collected frames
        pbar = tqdm.tqdm(total=100_000)

        # Start the collector asynchronously
        collector.start()

        # Track the write count of the replay buffer
        prec_wc = 0
        while True:
            wc = rb.write_count
            c = wc - prec_wc
            prec_wc = wc

            # Update the progress bar
            pbar.update(c)
            pbar.set_description(f"Write Count: {rb.write_count}")

            # Check the write count every 0.5 seconds
            time.sleep(0.5)

            # Stop when the desired number of frames is reached
            if rb.write_count > 100_000:
                break

        # Shut down the collector
        collector.async_shutdown()
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_example_of_start_on_pong():
    """As it stands in the document, with fewer workers, rows and frames for the sake of time."""
    text = textwrap.dedent(PONG)
    for large, small in (("= 16\n", "= 3\n"), ("100_000", "2_000"), ("(10000)", "(3000)")):
        assert large in text
        text = text.replace(large, small)
    text += '    print("frames", rb.write_count, len(rb), collector.stats()["frames"])\n'
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "Write Count: " in done.stderr
    written, live, frames = map(int, done.stdout.split()[1:])
    assert written == frames > 2000
    assert live == min(written, 3000)


# -- what workers do before they write -------------------------------------------------------------


@every_kind
def test_a_postproc_may_keep_no_frame(make, kind):
    rb = buffer()
    collector = make(kind, rb, postproc=lambda batch: batch[..., :0], total_frames=64)
    assert list(collector) == [None] * (8 if kind == "async" else 4)
    assert (len(rb), collector.stats()["frames"]) == (0, 64)


@several
def test_postproc_and_hook_run_in_the_workers(make, kind):
    rb = buffer()

    def postproc(batch):
        pid = torch.full(batch.shape, os.getpid())
        return batch.set("pid", pid).exclude(("next", "reward"))

    def hook(batch):
        batch["hooked"] = batch["pid"] + 1

    collector = make(kind, rb, postproc=postproc, post_collect_hook=hook, total_frames=64)
    pids = set(collector.cascade_execute("env.pid"))
    collector.start()
    rig.until(lambda: not collector.is_running())
    rows = check_rows(rb)
    assert set(rows["pid"].tolist()) == pids
    assert rows["hooked"].equal(rows["pid"] + 1)
    assert ("next", "reward") not in rows.keys(True)


@every_kind
def test_split_trajectories_are_stored_without_padding(make, kind):
    rb = buffer()
    collector = make(kind, rb, split_trajs=True, total_frames=160)
    collector.start()
    rig.until(lambda: not collector.is_running())
    assert rb.write_count == collector.stats()["frames"] == 160
    check_rows(rb)


@pytest.mark.covering
@pytest.mark.parametrize("per_write", [None, 3])
@every_kind
def test_whole_trajectories_are_written_in_one_piece(make, kind, per_write):
    rb = buffer()
    options = {"trajs_per_batch": 4, "trajs_per_write": per_write}
    collector = make(kind, rb, total_frames=320, **options)
    collector.start()
    rig.until(lambda: not collector.is_running())
    stats = collector.stats()
    assert stats["frames"] == 320
    rows = check_rows(rb)
    assert 320 - len(rows) < 2 * 5  # episodes have five steps
    pieces = rows["collector", "traj_ids"].view(-1, 5)
    assert (pieces == pieces[:, :1]).all()
    assert (
        rows["next", "done"]
        .view(-1, 5)
        .equal(torch.tensor([[False] * 4 + [True]]).expand(len(rows) // 5, 5))
    )


# -- buffers of all kinds --------------------------------------------------------------------------

BUFFERS = {
    "shared": lambda: buffer(shared=True),
    "private": buffer,
    "memmap": lambda: ReplayBuffer(storage=LazyMemmapStorage(10_000)),
    "list": lambda: ReplayBuffer(storage=ListStorage(10_000)),
    "tensordict": lambda: TensorDictReplayBuffer(storage=LazyTensorStorage(10_000)),
    "prioritized": lambda: TensorDictReplayBuffer(
        storage=LazyTensorStorage(10_000), sampler=PrioritizedSampler(10_000, 0.7, 0.5)
    ),
    "slices": lambda: buffer(sampler=SliceSampler(slice_len=4)),
    "best": lambda: ReplayBuffer(
        storage=LazyTensorStorage(10_000), writer=TensorDictMaxValueWriter(("next", "reward"))
    ),
    "torchrl": lambda: torchrl.data.ReplayBuffer(
        storage=torchrl.data.LazyTensorStorage(10_000), batch_size=32
    ),
    "torchrl list": lambda: torchrl.data.ReplayBuffer(
        storage=torchrl.data.ListStorage(10_000), batch_size=32, collate_fn=torch.stack
    ),
}


@pytest.mark.covering
@pytest.mark.parametrize("name", BUFFERS)
@every_kind
def test_buffers_of_all_kinds(make, kind, name):
    rb = BUFFERS[name]()
    collector = make(kind, rb, total_frames=320)
    collector.start()
    rig.until(lambda: not collector.is_running())
    collector.shutdown()
    assert len(rb) == collector.stats()["frames"] == 320
    assert rb.write_count == 320
    sample = rb.sample(32)
    assert (sample["observation"][:, 1] + 1 == sample["next", "observation"][:, 1]).all()
    if name == "slices":
        parts = sample["next", "observation"].view(8, 4, 2)
        assert (parts[:, 1:, 1] == parts[:, :-1, 1] + 1).all()
        assert (parts[:, :, 0] == parts[:, :1, 0]).all()
    if name == "prioritized":
        rb.update_priority(sample["index"], torch.zeros(32))
        count = rb.write_count
        assert rb.sample(16)["index"].max() < count


@pytest.mark.covering
@pytest.mark.parametrize("storage", ["ours", "torchrl"])
@every_kind
def test_env_time_storages(make, kind, storage):
    kinds = {"ours": (ReplayBuffer, LazyTensorStorage)}
    kinds["torchrl"] = (torchrl.data.ReplayBuffer, torchrl.data.LazyTensorStorage)
    whole, part = kinds[storage]
    rb = whole(storage=part(4000, ndim=2))
    if kind == "inline":
        collector = make(kind, rb, frames_per_batch=16, total_frames=160)
    else:
        envs = [rig.counting(0)] * 2
        collector = make(kind, rb, envs=envs, num_envs=2, frames_per_batch=16, total_frames=160)
    collector.start()
    rig.until(lambda: not collector.is_running())
    collector.shutdown()
    assert len(rb) == collector.stats()["frames"] == 160
    sample = rb.sample(32)
    assert (sample["observation"][..., 1] + 1 == sample["next", "observation"][..., 1]).all()


@every_kind
def test_extend_buffer_false_adds_step_by_step(make, kind):
    rb = ReplayBuffer(storage=ListStorage(1000))
    collector = make(kind, rb, extend_buffer=False, total_frames=32)
    collector.start()
    rig.until(lambda: not collector.is_running())
    assert collector.stats()["frames"] == 32
    assert sum(item.numel() for item in rb.storage.items) == 32


@several
def test_retired_spellings(make, kind):
    rb = buffer()
    with (
        pytest.warns(DeprecationWarning, match="local_init_rb"),
        pytest.warns(DeprecationWarning, match="replay_buffer_chunk"),
    ):
        collector = make(kind, rb, local_init_rb=True, replay_buffer_chunk=True, total_frames=32)
    collector.start()
    rig.until(lambda: not collector.is_running())
    assert rb.write_count == 32
    with (
        pytest.raises(ConfigError, match="contradicts"),
        pytest.warns(DeprecationWarning, match="replay_buffer_chunk"),
    ):
        make(kind, rb, replay_buffer_chunk=False, extend_buffer=True)


@every_kind
def test_without_start_iteration_fills_the_buffer_and_yields_none(make, kind):
    rb = buffer()
    collector = make(kind, rb, total_frames=160)
    seen = [(batch, rb.write_count >= 8 * (n + 1)) for n, batch in enumerate(collector)]
    assert seen == [(None, True)] * len(collector)
    assert rb.write_count == collector.stats()["frames"] == 160
    check_rows(rb)


@pytest.mark.covering
@pytest.mark.parametrize("start", [False, True])
@several
def test_many_workers_meet_in_a_new_storage(make, kind, start):
    rb = buffer(shared=True)
    envs = [rig.counting(n) for n in range(6)]
    collector = make(kind, rb, envs=envs, frames_per_batch=6, total_frames=36 * 6)
    if start:
        collector.start()
        rig.until(lambda: not collector.is_running())
    else:
        list(collector)
    assert rb.write_count == collector.stats()["frames"] == 36 * 6
    check_rows(rb, envs=6)


def test_masked_frames_are_not_stored(make):
    rb = buffer()
    envs = [rig.counting(0), rig.counting(1, pause=0.01)]
    options = {"frames_per_batch": 40, "preemptive_threshold": 0.5, "total_frames": 200}
    collector = make("sync", rb, envs=envs, **options)
    collector.start()
    rig.until(lambda: not collector.is_running())
    assert rb.write_count == collector.stats()["frames"]
    rows = check_rows(rb)
    assert rows["collector", "mask"].all()
    slow = (rows["observation"][:, 0] == 1).sum()
    assert 0 < slow < len(rows) / 2


@every_kind
def test_interrupted_frames_are_not_stored(make, kind):
    rb, interruptor = buffer(), Interruptor()
    collector = make(kind, rb, interruptor=interruptor, frames_per_batch=64)
    interruptor.stop_collection()
    collector.start()
    rig.until(lambda: rb.write_count > 3)
    with collector.pause():
        assert rb.write_count == collector.stats()["frames"] < 64
        check_rows(rb)
    interruptor.start_collection()
    collector.async_shutdown()
    assert not interruptor.collection_stopped()


def test_a_partial_that_travels(make):
    """Environments given as partials of classes of this module need nothing importable."""
    rb = buffer()
    collector = make("async", rb, envs=[functools.partial(rig.Count, n) for n in range(2)])
    collector.start()
    rig.until(lambda: rb.write_count > 0)


# -- flow control ----------------------------------------------------------------------------------


def limited(size=100_000, least=None, most=None, timeout=60.0, first=1, **options):
    limiter = RateLimiter(least, most, timeout, first)
    return ReplayBuffer(storage=LazyTensorStorage(size), batch_size=16, limiter=limiter, **options)


def held(collector):
    stats = collector.stats()
    return stats["waiting_for_learner"] and stats["running"] and collector._engine.gather.idle


@every_kind
def test_a_collector_waits_for_a_learner_that_has_begun(make, kind):
    rb = limited(least=2.0)
    collector = make(kind, rb)
    collector.start()
    rig.until(lambda: rb.write_count > 500)  # nobody samples yet: the buffer is filled freely
    rb.sample()
    rig.until(lambda: held(collector))
    for _ in range(3):
        count = rb.write_count
        select.select([], [], [], 0.01)
        assert rb.write_count == count
        while rb.write_count == count:
            rb.sample()
        rig.until(lambda: held(collector))
    assert collector.update_policy_weights_() is None
    with collector.pause():
        assert rb.write_count == collector.stats()["frames"]
    with rig.in_time(1.0):
        collector.shutdown()


@every_kind
def test_a_learner_waits_for_a_running_collector(make, kind):
    rb = limited(most=4.0)
    collector = make(kind, rb)
    collector.start()
    rig.until(lambda: rb.write_count > 0)
    first = rb.write_count
    for number in range(200):
        rb.sample()
        # What was sampled before this call was not too much; all of it is counted.
        assert 16 * number <= 4.0 * (rb.write_count - first)
    assert collector.stats()["samples_per_insert"] <= 4.1
    with collector.pause():
        for _ in range(200):  # nobody would bring frames: it does not wait
            rb.sample()
    collector.shutdown()
    for _ in range(200):
        rb.sample()


def test_samples_per_insert_settle_between_the_bounds(make):
    rb = limited(least=3.0, most=5.0, first=100)
    collector = make("async", rb)
    with pytest.raises(ReplayError):  # nobody would bring frames
        rb.sample()
    collector.start()
    rb.sample()
    assert rb.write_count >= 100
    for _ in range(2000):
        rb.sample()
    assert 2.7 < collector.stats()["samples_per_insert"] < 5.3


@pytest.mark.parametrize("ending", ["error", "total", "shutdown"])
def test_a_waiting_learner_is_let_go_when_collection_ends(make, ending):
    envs = [rig.counting(n, pause=0.001) for n in range(2)]
    if ending == "error":
        envs[1] = rig.counting(1, fault=rig.fail, at=40, pause=0.001)
    rb = limited(most=0.5)
    total = 80 if ending == "total" else -1
    collector = make("async", rb, envs=envs, total_frames=total)
    collector.start()
    rig.until(lambda: rb.write_count > 0)
    ends = threading.Timer(0.1, collector.shutdown)
    if ending == "shutdown":
        ends.start()
    with rig.in_time(10.0):
        for _ in range(300):
            rb.sample()
    rig.until(lambda: not collector.is_running())
    assert collector.stats()["failed"] == (ending == "error")
    if ending == "shutdown":
        ends.join(rig.LIMIT)
        assert collector.closed


def test_a_learner_does_not_wait_for_ever(make):
    def hang():
        select.select([], [], [], 1000)

    rb = limited(most=0.01, timeout=0.2)
    envs = [rig.counting(n, fault=hang, at=20) for n in range(2)]
    collector = make("async", rb, envs=envs)
    collector.start()
    rig.until(lambda: rb.write_count > 0)
    rb.sample()  # the first is free
    with rig.in_time(), pytest.raises(CollectorTimeout, match="max_samples_per_insert is 0.01"):
        [rb.sample() for _ in range(50)]
    with rig.in_time(3.0):
        collector.shutdown(timeout=1.0, raise_on_error=False)


@pytest.mark.filterwarnings("default:nothing was sampled")
@every_kind
def test_a_learner_that_stopped_is_not_waited_for_ever(make, kind):
    rb = limited(least=1.0, timeout=0.2)
    collector = make(kind, rb)
    collector.start()
    rig.until(lambda: rb.write_count > 0)
    rb.sample()
    rig.until(lambda: held(collector))
    count = rb.write_count
    rig.until(lambda: rb.write_count > count + 200)
    assert collector.stats()["samples_per_insert"] == 0.0
    rb.sample()  # it is back: counting begins anew
    rig.until(lambda: held(collector))


def test_a_buffer_smaller_than_a_batch(make):
    rb = limited(size=5, least=1.0, most=2.0)
    collector = make("sync", rb)
    collector.start()
    rig.until(lambda: rb.write_count > 0)
    with rig.in_time(20.0):
        for _ in range(300):
            rb.sample()


def test_emptying_begins_anew(make):
    rb = limited(least=1.0, most=2.0)
    collector = make("async", rb)
    collector.start()
    rig.until(lambda: rb.write_count > 0)
    for _ in range(100):
        rb.sample()
    with collector.pause():
        rb.empty()
    rig.until(lambda: rb.write_count > 300)
    for _ in range(100):
        rb.sample()


def test_samples_of_another_process_count(make):
    rb = limited(least=1.0)
    collector = make("async", rb)
    collector.start()
    rig.until(lambda: rb.write_count > 100)
    rb.sample()
    rig.until(lambda: held(collector))
    before = rb.write_count

    def learn(batch):
        other = pickle.loads(blob)
        for _ in range(50):
            other.sample()

    blob = pickle.dumps(rb)
    helper = make("sync", buffer(), post_collect_hook=learn, total_frames=16)
    list(helper)
    rig.until(lambda: rb.write_count > before + 300)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"min_samples_per_insert": 0}, "must be positive"),
        ({"max_samples_per_insert": -1.0}, "must be positive"),
        ({"timeout": 0}, "must be positive"),
        ({"min_samples_per_insert": 2, "max_samples_per_insert": 1}, "wait for each other"),
    ],
)
def test_bounds_that_make_no_sense(arguments, message):
    with pytest.raises(ConfigError, match=message):
        RateLimiter(**arguments)
