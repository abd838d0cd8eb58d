"""A program that SIGTERM ends: ``python preempted.py KIND FOLDER [N]``, the signal in loop N."""

import os
import signal
import sys
import time
from pathlib import Path

import rig
import torch

from gleanrl import Collector, MultiAsyncCollector, MultiSyncCollector, Preempted, ReplayBuffer
from gleanrl.data import LazyTensorStorage


def make(kind, folder):
    options = {"preemption_path": f"{folder}/state", "frames_per_batch": 40, "grace": 60.0}
    if kind in ("buffer", "background"):
        generator = torch.Generator().manual_seed(5)
        storage = LazyTensorStorage(10_000)
        options["replay_buffer"] = ReplayBuffer(storage=storage, batch_size=8, generator=generator)
    if kind == "background":
        return MultiAsyncCollector("CartPole-v1", num_workers=2, **options)
    if kind == "sync":
        return MultiSyncCollector("CartPole-v1", num_workers=2, total_frames=240, **options)
    options["grace"] = 2.0 if kind == "hanging" else 60.0
    return Collector("CartPole-v1", num_envs=2, total_frames=240, **options)


def step(collector):
    """Return what is learnt from next."""
    buffer = collector.replay_buffer
    if not collector.is_running():
        batch = next(iter(collector))
        if buffer is None:
            return batch["observation"].clone()
    rows = buffer.sample()
    return rows["collector", "traj_ids"], rows["observation"]


def learn(collector, learnt, kind, end):
    """Learn until SIGTERM or `StopIteration`."""
    while True:
        learnt.append(step(collector))
        if len(learnt) == end:
            for pid in (*rig.workers(), os.getpid()):  # as a cluster does
                os.kill(pid, signal.SIGTERM)
            while kind in ("hanging", "background"):
                time.sleep(0.1)


def main(kind, folder, end=-1):
    signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"told\n"))
    learnt, saved = [], Path(folder, "learner")
    try:
        with make(kind, folder) as collector:
            collector.set_seed(1)
            if saved.exists():
                collector.load(f"{folder}/state")
                learnt = torch.load(saved)
            if kind == "background":
                collector.start()
                rig.until(lambda: len(collector.replay_buffer) > 200 + 200 * len(learnt), 60)
            learn(collector, learnt, kind, end)
    except (Preempted, StopIteration) as err:
        torch.save(learnt, saved)
        while kind == "hanging":
            time.sleep(0.1)
        if isinstance(err, Preempted):
            raise


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
