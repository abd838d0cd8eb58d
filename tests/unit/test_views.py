"""The page and the trace of a collection."""

from __future__ import annotations

import json
import os
import re
from collections import Counter

import gymnasium
import pytest
import torch
from tensordict.nn import TensorDictModule

from gleanrl import WorkerDied
from gleanrl.collectors import Collector, MultiSyncCollector


def titles(path):
    return re.findall(r"<figcaption>([^<]+)", path.read_text())


def figures(path):
    return dict(re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)</dd>", path.read_text()))


def test_a_report_says_what_stats_say_at_any_time(tmp_path):
    path = tmp_path / "report.html"
    collector = Collector("CartPole-v1", num_envs=4, frames_per_batch=40, total_frames=4000)
    collector.report(path)
    assert titles(path) == []
    list(collector)
    collector.shutdown()
    collector.report(str(path))
    shown, stats = figures(path), collector.stats()
    assert shown["frames"] == "4,000"
    assert shown["episodes"] == str(stats["episodes"])
    assert shown["return, last 100"] == f"{stats['return_mean']:.1f}"
    assert titles(path) == [
        "Returns",
        "Distribution of returns",
        "Lengths of episodes",
        "Speed",
        "Policy lag of batches",
        "Workers&#x27; time",
    ]
    assert not re.search(r"<script|<link|<img|https?:|url\(|@import", path.read_text())


def test_what_is_taken_down_for_a_report_is_bounded(tmp_path):
    path = tmp_path / "report.html"
    with Collector(
        "CartPole-v1", num_envs=4, frames_per_batch=4, total_frames=4800, max_frames_per_traj=4
    ) as collector:
        list(collector)
        collector.report(path)
        assert collector.stats()["batches"] == 1200
        assert collector.stats()["episodes"] >= 1200
    dots = re.findall(r'class="dots" d="([^"]*)"', path.read_text())
    assert [0 < one.count("M") <= 1000 for one in dots] == [True] * 3
    assert "one of 2 episodes" in path.read_text()


class Fragile(gymnasium.Wrapper):
    """Ends its process at the given step."""

    def __init__(self, env, steps):
        super().__init__(env)
        self._left = steps

    def step(self, action):
        self._left -= 1
        if not self._left:
            os._exit(3)
        return super().step(action)


def test_a_report_names_workers_that_were_lost(tmp_path):
    def make(steps):
        return lambda: Fragile(gymnasium.make("CartPole-v1"), steps)

    collector = MultiSyncCollector([make(10**9), make(50)], frames_per_batch=40, total_frames=-1)
    with pytest.raises(WorkerDied, match="worker 1"):
        list(collector)
    collector.shutdown(raise_on_error=False)
    collector.report(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert titles(tmp_path / "report.html")[-1] == "Losses"
    assert re.search(r"<td>worker 1</td><td>worker 1[^<]*</td>", text)


def slices(path):
    """Return the slices of each row by its name, checked to nest."""
    events = json.loads(path.read_text())
    assert all({"ph", "name", "pid", "tid", "ts"} <= set(event) for event in events)
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = {name: [] for name in rows.values()}
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: (e["ts"], -e["dur"])):
        assert event["dur"] >= 0
        row = found[rows[event["tid"]]]
        for other in row:
            begin, end = other["ts"], other["ts"] + other["dur"]
            inside = event["ts"] + event["dur"] <= end + 0.01
            assert inside or event["ts"] >= end - 0.01, (begin, end, event)
        row.append(event)
    return found


def test_a_timeline_shows_workers_weights_and_batches(tmp_path):
    policy = TensorDictModule(torch.nn.Linear(3, 1), ["observation"], ["action"])
    path = tmp_path / "trace.json"
    collector = MultiSyncCollector(
        ["Pendulum-v1"] * 2, policy, frames_per_batch=40, total_frames=400, backend="inline"
    )
    batches = iter(collector)
    next(batches)
    with collector.timeline(path):
        for _ in range(4):
            next(batches)
            collector.update_policy_weights_()
        with pytest.raises(RuntimeError, match="timeline"), collector.timeline(path):
            pass
    next(batches)
    collector.shutdown()
    rows = slices(path)
    assert set(rows) == {"learner", "worker 0", "worker 1"}
    assert Counter(e["name"] for e in rows["learner"]) == {
        "learner": 5,
        "batch": 4,
        "publish weights": 4,
    }
    for worker in ("worker 0", "worker 1"):
        assert Counter(e["name"] for e in rows[worker]) == {
            **dict.fromkeys(("waiting", "rollout", "environment", "policy"), 4),
            "weights": 3,
        }
        loaded = [e["args"]["policy version"] for e in rows[worker] if e["name"] == "weights"]
        assert loaded == sorted(set(loaded))
    frames = [e["args"]["frames"] for e in rows["learner"] if e["name"] == "batch"]
    assert frames == [40] * 4


def test_a_timeline_is_there_while_it_is_written(tmp_path):
    path = tmp_path / "trace.json"
    with Collector("CartPole-v1", frames_per_batch=10) as collector, collector.timeline(path):
        collector.next()
        events = json.loads(path.read_text().removesuffix(",\n") + "]")  # as after kill -9
    assert "rollout" in {event["name"] for event in events}


def test_a_timeline_that_cannot_be_written_disturbs_nothing(tmp_path):
    with Collector("CartPole-v1", frames_per_batch=10, total_frames=20) as collector:
        with (
            pytest.raises(OSError, match="nowhere"),
            collector.timeline(tmp_path / "nowhere" / "t"),
        ):
            pass
        assert sum(batch.numel() for batch in collector) == 20


def test_a_full_disk_ends_the_timeline_and_not_the_collection():
    collector = Collector("CartPole-v1", frames_per_batch=1, total_frames=200)
    with pytest.warns(UserWarning, match="timeline ends here"), collector.timeline("/dev/full"):
        assert sum(batch.numel() for batch in collector) == 200
    collector.shutdown()
