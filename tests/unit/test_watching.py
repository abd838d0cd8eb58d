"""What `stats()` says of collection: episodes, rates, and where the time of workers went."""

import csv
import gc
import math
import os
import signal
import sys
import threading
import time
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
from rich.console import Console
from rich.file_proxy import FileProxy
from tensordict import TensorDict

from gleanrl import ConfigError, CSVLogger, TensorBoardLogger, WandbLogger
from gleanrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from gleanrl.data import Categorical, Composite, LazyTensorStorage, ReplayBuffer, Unbounded
from gleanrl.envs import EnvBase

SHARES = ("time_env", "time_policy", "time_transfer", "time_wait")


class Counting(gym.Env):
    """Ends after ``length`` steps, each of which is worth its number."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length=5, truncates=False):
        self.length, self.truncates, self.taken = length, truncates, 0

    def reset(self, *, seed=None, options=None):
        self.taken = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.taken += 1
        over = self.taken == self.length
        ended = (over and not self.truncates, over and self.truncates)
        return np.zeros(1, np.float32), float(self.taken), *ended, {}


def check_against(collector, batches):
    running, ended = {}, []
    for batch in batches:
        rows = batch.reshape(-1, batch.shape[-1])
        for step in rows.unbind(1):
            after = step["next"]
            ids, rewards, done = step["collector", "traj_ids"], after["reward"], after["done"]
            for i, reward, over in zip(ids.tolist(), rewards.tolist(), done.tolist(), strict=True):
                running.setdefault(i, []).append(reward[0])
                if over[0]:
                    ended.append(running.pop(i))
    stats = collector.stats()
    assert stats["episodes"] == len(ended) > 0
    last = ended[-100:]
    assert stats["return_mean"] == pytest.approx(np.mean([sum(rewards) for rewards in last]))
    assert stats["length_max"] == max(map(len, last))
    assert sum(stats[name] for name in SHARES) == pytest.approx(1)
    assert stats["fps"] > 0
    return stats


class Timed(Counting):
    """Notes when its first and its last step began."""

    def step(self, action):
        self.last = time.monotonic()
        self.first = getattr(self, "first", self.last)
        return super().step(action)


def test_in_the_background_the_first_batch_has_the_rate_at_which_it_was_collected():
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000))
    options = {"frames_per_batch": 500, "total_frames": 500, "replay_buffer": buffer}
    with Collector(Timed(), None, **options) as collector:
        collector.start()
        while not (stats := collector.stats())["fps"]:
            pass
        seconds = collector.getattr_env("last") - collector.getattr_env("first")
    assert 0 < stats["fps"] == stats["fps_mean"] < 500 / seconds


@pytest.mark.covering
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("envs", [1, 3])
def test_returns_and_lengths_are_those_of_the_batches(envs, fast):
    with Collector(
        "CartPole-v1", num_envs=envs, frames_per_batch=6 * envs, total_frames=720, fast=fast
    ) as collector:
        assert math.isnan(collector.stats()["return_mean"])
        check_against(collector, collector)


def test_pools_are_counted_without_their_resets():
    env = gym.make_vec("CartPole-v1", num_envs=3)
    with Collector(env, frames_per_batch=12, total_frames=720) as collector:
        check_against(collector, collector)


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_workers_are_added_up_and_told_apart(kind):
    with kind(["CartPole-v1"] * 2, frames_per_batch=100, total_frames=600) as collector:
        stats = check_against(collector, [batch.clone() for batch in collector])
        workers = collector.stats("per_worker")
    assert stats["episodes"] == sum(workers[f"worker_{i}/episodes"] for i in (0, 1))
    assert stats["lag"] == 0


def test_episodes_that_run_over_batches_keep_their_rewards():
    with Collector(Counting, frames_per_batch=2, total_frames=12) as collector:
        for _ in collector:
            pass
        stats = collector.stats()
    assert (stats["episodes"], stats["return_min"], stats["return_max"]) == (2, 15, 15)
    assert (stats["length_min"], stats["length_max"]) == (5, 5)


def test_large_rollouts_are_added_up_like_others():
    with MultiSyncCollector(
        [partial(gym.make_vec, "CartPole-v1", num_envs=200)],
        frames_per_batch=16_400,
        total_frames=32_800,
    ) as collector:
        check_against(collector, [batch.clone() for batch in collector])


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_a_reset_drops_what_running_episodes_have(kind):
    with kind([Counting], frames_per_batch=8, total_frames=24) as collector:
        for _ in collector:
            collector.reset()
        stats = collector.stats()
    assert (stats["episodes"], stats["return_max"], stats["length_max"]) == (3, 15, 5)
    with Collector(
        Counting, frames_per_batch=7, total_frames=21, reset_at_each_iter=True
    ) as collector:
        for _ in collector:
            pass
        stats = collector.stats()
    assert (stats["episodes"], stats["return_mean"]) == (3, 15)


class SlowReset(Counting):
    """Takes hundreds of times longer to reset than to step."""

    def reset(self, **options):
        sum(range(500_000))
        return super().reset(**options)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Collector, {}),
        (Collector, {"fast": False}),
        (MultiSyncCollector, {}),
        (MultiSyncCollector, {"collector_class": Collector}),
    ],
)
def test_resets_are_told_apart_from_steps(kind, options):
    def shares(make):
        with kind([make], frames_per_batch=20, total_frames=40, **options) as collector:
            for _ in collector:
                pass
            stats = collector.stats("both")
        prefix = "" if kind is Collector else "worker_0/"
        assert stats["time_reset"] == stats[f"{prefix}time_reset"]
        return stats["time_reset"], stats["time_env"]

    resets, environment = shares(partial(SlowReset, 2))
    assert environment / 2 < resets < environment <= 1
    assert shares(partial(Counting, 1_000))[0] == 0


@pytest.mark.parametrize("interrupts", [False, True])
def test_signals_may_come_while_episodes_are_added_up(interrupts):
    left = 0

    def come(*_):  # after so many calls
        nonlocal left
        left -= 1
        if left == 0 and interrupts:
            signal.raise_signal(signal.SIGINT)
        elif left == 0:
            collector.stats()

    with Collector(Counting, frames_per_batch=3, total_frames=300) as collector:
        for number, _ in enumerate(collector):
            left = number + 1
            sys.setprofile(come)
            try:
                collector.stats()
            except KeyboardInterrupt:
                pass
            finally:
                sys.setprofile(None)
        stats = collector.stats()
    assert (stats["episodes"], stats["return_min"], stats["return_max"]) == (60, 15, 15)


def test_a_forked_process_may_ask_while_a_thread_of_its_parent_does():
    over = threading.Event()

    def ask():
        while not over.is_set():
            collector.stats()

    with Collector(Counting, frames_per_batch=5) as collector:
        collector.rollout()
        thread = threading.Thread(target=ask)
        thread.start()
        codes = set()
        for _ in range(5):  # some of which come while it is inside
            if (child := os.fork()) == 0:
                signal.alarm(10)
                os._exit(collector.stats()["episodes"])
            codes.add(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        over.set()
        thread.join()
    assert codes == {1}


def test_a_state_that_is_loaded_brings_no_rewards_of_the_episodes_it_ends():
    with Collector(Counting, frames_per_batch=3, total_frames=15) as collector:
        fresh = collector.state_dict()
        next(iter(collector))
        collector.load_state_dict(fresh)
        for _ in collector:
            pass
        stats = collector.stats()
    assert (stats["episodes"], stats["return_min"], stats["return_max"]) == (3, 15, 15)


STATISTICS = ("episodes", "return_mean", "return_max", "length_mean", "length_min")


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_statistics_continue_from_a_state_that_is_loaded(kind, tmp_path):
    def shown(collector):
        stats = collector.stats("both")
        prefixes = ("",) if kind is Collector else ("", "worker_0/", "worker_1/")
        return [stats[prefix + name] for prefix in prefixes for name in STATISTICS]

    with kind([Counting] * 2, frames_per_batch=10, total_frames=60) as collector:
        for _ in range(3):
            next(iter(collector))
        torch.save(collector.state_dict(), tmp_path / "state.pt")
        expected = shown(collector)
    state = torch.load(tmp_path / "state.pt")
    with kind([Counting] * 2, frames_per_batch=10, total_frames=60) as collector:
        next(iter(collector))  # the load replaces its episodes
        collector.load_state_dict(state)
        assert shown(collector) == expected
        for _ in collector:
            pass
        assert collector.stats()["episodes"] == 12
        del state["statistics"]  # as in states of earlier versions
        collector.load_state_dict(state)
        assert collector.stats()["episodes"] == 0
        assert math.isnan(collector.stats()["return_mean"])


def test_a_log_repeats_no_row_after_a_load_and_keeps_earlier_runs(tmp_path):
    def run(until, state=None, at=None):
        with Collector(
            Counting, frames_per_batch=10, total_frames=60, logger=CSVLogger(tmp_path / "log.csv")
        ) as collector:
            if state:
                collector.load_state_dict(state)
            while (frames := collector.stats()["frames"]) < until:
                state = collector.state_dict() if frames == at else state
                collector.next()
        with (tmp_path / "log.csv").open() as file:
            return state, [int(row["frames"]) for row in csv.DictReader(file)]

    _, first = run(60)
    state, interrupted = run(50, at=30)
    assert interrupted == [*first, 10, 20, 30, 40, 50]
    assert run(60, state)[1] == [*first, *first]
    assert run(0, {**state, "frames": 0})[1] == first


class Unrewarded(EnvBase):
    """Has no rewards; ends after four steps, and shows as many numbers as it took, if it grows."""

    def __init__(self, grows):
        super().__init__()
        self.observation_spec = Composite(at=Unbounded((1,)))
        self.action_spec = Unbounded((1,))
        self.reward_spec = Composite()
        self.done_spec = Categorical(2, shape=(1,), dtype=torch.bool)
        self.grows, self.taken = grows, 0

    def _reset(self, tensordict=None, **options):
        self.taken = 0
        return TensorDict({"at": torch.zeros(1)}, [])

    def _step(self, tensordict):
        self.taken += 1
        more = {"more": torch.zeros(self.taken)} if self.grows else {}
        return TensorDict({"at": torch.zeros(1), "done": torch.tensor([self.taken == 4]), **more})

    def _set_seed(self, seed):
        pass


@pytest.mark.parametrize("grows", [False, True])
def test_episodes_without_rewards_return_nothing(grows):
    with Collector(Unrewarded(grows), frames_per_batch=6, total_frames=24) as collector:
        for _ in collector:
            pass
        stats = collector.stats()
    assert (stats["episodes"], stats["return_mean"], stats["length_mean"]) == (6, 0, 4)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("steps", [1, 5])
def test_infinite_rewards_of_both_signs_are_worth_nan_without_a_warning(steps):
    class Extreme(Counting):
        sign = 1

        def step(self, action):
            state, _, *rest = super().step(action)
            self.sign = -self.sign
            return state, math.inf * self.sign, *rest

    with Collector(lambda: Extreme(steps), frames_per_batch=10, total_frames=20) as collector:
        for _ in collector:
            pass
        assert math.isnan(collector.stats()["return_mean"])


def test_episodes_that_were_cut_count():
    with Collector(
        Counting, frames_per_batch=10, total_frames=20, max_frames_per_traj=2
    ) as collector:
        for _ in collector:
            pass
        stats = collector.stats()
    assert (stats["episodes"], stats["return_mean"], stats["length_mean"]) == (10, 3, 2)


@pytest.mark.parametrize("workers", [None, 2])
def test_frames_that_go_into_a_buffer_are_counted(workers):
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    with Collector(
        Counting,
        frames_per_batch=10,
        total_frames=60,
        replay_buffer=buffer,
        num_collectors=workers,
        sync=None if workers is None else False,
    ) as collector:
        for _ in collector:
            pass
        stats = collector.stats()
    assert (stats["episodes"], stats["return_mean"]) == (12, 15)


def test_collectors_in_workers_report_what_theirs_do():
    with MultiSyncCollector(
        [Counting] * 2, collector_class=Collector, frames_per_batch=20, total_frames=60
    ) as collector:
        for _ in collector:
            pass
        stats = collector.stats()
    assert (stats["episodes"], stats["return_mean"]) == (12, 15)
    assert stats["time_env"] > 0


# -- progress, loggers, repr -----------------------------------------------------------------------


def progress_threads():
    return [t for t in threading.enumerate() if t.name == "gleanrl-progress"]


def test_progress_is_lines_without_a_terminal_and_the_last_says_all(capsys):
    with Collector(Counting, frames_per_batch=10, total_frames=20, progress="count") as collector:
        for _ in collector:
            pass
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("count: 20/20 frames (100%), ")
    assert "return 15.0" in last
    assert not progress_threads()


def test_a_forked_child_does_not_print_through_the_display_of_its_parent(monkeypatch):
    monkeypatch.setattr(sys, "stdout", FileProxy(Console(), sys.stdout))
    child = os.fork()
    if child == 0:
        os._exit(isinstance(sys.stdout, FileProxy))
    assert os.waitpid(child, 0)[1] == 0


def test_progress_ends_with_construction_that_fails_and_with_the_collector():
    def broken():
        raise OSError("no such simulator")

    with pytest.raises(OSError, match="simulator"):
        Collector(broken, frames_per_batch=10, progress=True)
    assert not progress_threads()
    collector = Collector(Counting, frames_per_batch=10, progress=True)
    next(iter(collector))
    del collector
    gc.collect()
    assert not progress_threads()


def test_stats_are_logged_after_every_batch(tmp_path):
    seen, path = [], tmp_path / "logs" / "stats.csv"
    for _ in range(2):  # the second run continues the file
        with Collector(
            Counting,
            frames_per_batch=10,
            total_frames=20,
            logger=[seen.append, CSVLogger(path), CSVLogger(tmp_path / "few.csv", every_s=1e6)],
        ) as collector:
            for _ in collector:
                pass
    assert [stats["frames"] for stats in seen] == [10, 20, 10, 20]
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["frames"] for row in rows] == ["10", "20", "10", "20"]
    assert rows[1]["return_mean"] == "15.0"
    with (tmp_path / "few.csv").open() as file:  # the last one is written at the end
        assert [row["frames"] for row in csv.DictReader(file)] == ["10", "20", "10", "20"]


def test_a_log_with_other_columns_is_refused_and_left_as_it_is(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("frames,loss\n10,0.5\n")
    logger = CSVLogger(path)
    with pytest.raises(ConfigError, match=r"log\.csv lacks the columns fps, episodes: log into an"):
        logger({"fps": 1.0, "episodes": 0})
    with pytest.warns(UserWarning, match="lacks the columns fps: log into another file, or move"):
        logger({"frames": 20, "fps": 1.0})
    logger({"frames": 30, "later": 1})  # the first row tells
    logger.close()
    assert path.read_text().split() == ["frames,loss", "10,0.5", "20,", "30,"]


def test_a_row_that_a_killed_process_wrote_in_part_is_dropped(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("frames,loss\n10,0.5\n20,0.")
    logger = CSVLogger(path)
    logger({"frames": 30, "loss": 1})
    logger.close()
    assert path.read_text().split() == ["frames,loss", "10,0.5", "30,1"]
    path.write_text("frames,loss")
    logger = CSVLogger(path)
    logger({"frames": 30, "loss": 1})
    logger.close()
    assert path.read_text().split() == ["frames,loss", "30,1"]


def test_curves_go_to_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Collector(
        Counting, frames_per_batch=10, total_frames=20, logger=TensorBoardLogger(tmp_path)
    ) as collector:
        for _ in collector:
            pass
    events = EventAccumulator(str(tmp_path)).Reload()
    points = events.Scalars("collector/return_mean")
    assert [(point.step, point.value) for point in points] == [(10, 15.0), (20, 15.0)]


class Run:
    """A run of Weights & Biases."""

    def __init__(self):
        self.summary, self.frames = {}, []

    def log(self, row):
        self.summary |= row
        self.frames.append(row["collector/frames"])


def test_curves_repeat_no_point_after_a_load(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run, state = Run(), None
    for until in (40, 60):  # the first run is interrupted
        loggers = [TensorBoardLogger(tmp_path), WandbLogger(run)]
        with Collector(Counting, frames_per_batch=10, total_frames=60, logger=loggers) as collector:
            if state:
                collector.load_state_dict(state)
            while (frames := collector.stats()["frames"]) < until:
                state = collector.state_dict() if frames == 20 else state
                collector.next()
    assert run.frames == [10, 20, 30, 40, 50, 60]
    points = EventAccumulator(str(tmp_path)).Reload().Scalars("collector/frames")
    assert [point.step for point in points] == [10, 20, 30, 40, 50, 60]


def test_a_logger_that_raises_is_left_out_and_no_batch_is_lost():
    def full(stats):
        raise OSError("disk full")

    with Collector(Counting, frames_per_batch=10, total_frames=20, logger=full) as collector:
        with pytest.warns(UserWarning, match="not called any more, it raised OSError"):
            batches = [batch.clone() for batch in collector]
        assert len(batches) == 2
    for logger in (3, [3]):
        with pytest.raises(ValueError, match=r"logger \(\[?3\]?\) must be"):
            Collector(Counting, frames_per_batch=10, logger=logger)


def test_a_collector_says_what_it_is_and_what_it_does():
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    with MultiAsyncCollector(
        [Counting] * 2, frames_per_batch=10, total_frames=40, replay_buffer=buffer
    ) as collector:
        assert repr(collector) == "MultiAsyncCollector(workers=2, envs=2, frames=0/40, collecting)"
        for _ in collector:
            pass
        assert "frames=40/40, completed" in repr(collector)
    assert "closed" in repr(collector)
    with Collector(Counting, frames_per_batch=10, replay_buffer=buffer) as collector:
        collector.start()
        assert "collecting in the background" in repr(collector)
        with collector.pause():
            assert "paused" in repr(collector)
