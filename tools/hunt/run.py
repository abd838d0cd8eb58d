"""Runs a case: collects, lets the events happen, and checks every frame."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase

import gleanrl
from tools.hunt.cases import Case
from tools.hunt.checks import Checker, frames_of, require
from tools.hunt.worlds import make_one, make_policy, make_vector, start_counting


class Refused(Exception):
    """The library refuses the case by an error of its own when it is built."""


def _build(case: Case, policy: Any, **more: Any) -> Any:
    """Build the collector of a case."""
    options: dict[str, Any] = {
        "frames_per_batch": case.frames,
        "track_policy_version": True,
        "fast": case.fast,
        "total_frames": -1,
        **case.options,
        **more,
    }
    start_counting()
    if case.backend == "pool":
        vector = make_vector(0, case.env, case.envs, case.draws)
        return gleanrl.Collector(vector, policy, **options)
    makers = [partial(make_one, worker, case.env, case.draws) for worker in range(case.workers)]
    options["num_envs"] = case.envs
    if case.backend == "here":
        return gleanrl.Collector(makers[0], policy, **options)
    kind = {"async": gleanrl.MultiAsyncCollector}.get(case.backend, gleanrl.MultiSyncCollector)
    return kind(makers, policy, **options)


def _checker(case: Case) -> Checker:
    options = case.options
    early = case.backend == "pool" and case.env == "NextStep"
    cuts = early or "reset_at_each_iter" in options
    limit = options.get("max_frames_per_traj")
    return Checker(limit, cuts, options.get("init_random_frames", 0))


class _Run:
    """A collector and all that is known of what it delivered."""

    def __init__(self, case: Case, stack: ExitStack, **more: Any) -> None:
        self.case, self.stack, self.more = case, stack, more
        self.policy, self.acting = make_policy(case.policy)
        self.collector = self.open()
        self.checker = _checker(case)
        self.held: list[tuple[TensorDictBase, TensorDictBase]] = []
        self.found: list[TensorDictBase] = []
        self.exactly: int | None = 0

    def open(self) -> Any:
        """Build the collector; it is closed at the end."""
        try:
            collector = _build(self.case, self.policy, **self.more)
        except gleanrl.GleanError as err:
            raise Refused(f"{type(err).__name__}: {str(err)[:90]}") from err
        self.stack.callback(collector.shutdown)
        if self.case.seed is not None:
            collector.set_seed(self.case.seed)
        return collector

    def send(self, **how: Any) -> None:
        """Make new weights, and send them."""
        self.checker.newest += 1
        self.acting.tag(self.checker.newest)
        if how.pop("each", False):
            weights = dict(self.policy.state_dict())
            how["weights"] = dict.fromkeys(how.pop("worker_ids"), weights)
        self.collector.update_policy_weights_(**how)
        require(self.collector.policy_version == self.checker.newest, "the version did not follow")
        everybody = not how
        self.exactly = self.checker.newest if everybody else None

    def happen(self, event: str) -> None:
        """Let an event happen."""
        several = self.case.backend in ("sync", "async")
        if event in ("some", "each") and several:
            self.send(worker_ids=[self.case.workers - 1], each=event == "each")
        elif event in ("update", "some", "each"):
            self.send()
        elif event == "seed":
            self.collector.set_seed(7)
            self.checker.begin_anew()
        elif event == "reset":
            self.collector.reset()
            self.checker.begin_anew()
        elif event == "reload":
            state = self.collector.state_dict()
            self.collector.shutdown()
            self.collector = self.open()
            self.collector.load_state_dict(state)
            self.exactly = None
            self.checker.begin_anew(restarted=True)
        elif event == "state":
            self.collector.state_dict()

    def batch(self) -> None:
        """Collect a batch and check it."""
        batch = self.collector.next()
        require(batch is not None, "there is no batch")
        if "reset_at_each_iter" in self.case.options:
            self.checker.begin_anew()
        # Pools that reset in their next step deliver first what was left over, as it was made.
        sync = self.case.backend in ("here", "sync") or self.case.env in ("SameStep", "Disabled")
        self.checker.batch(batch, self.exactly if sync else None)
        for kept, copy in self.held:
            require(bool((kept == copy).all()), "a batch changed in the learner's hands")
        self.found.append(batch.clone())
        self.last = batch

    def hold(self) -> None:
        """Keep the newest batch, which must not change."""
        if "return_same_td" not in self.case.options:
            self.held = [*self.held[-2:], (self.last, self.last.clone())]


def iterate(case: Case, **more: Any) -> list[TensorDictBase]:
    """Run a case whose collector is iterated over; return the batches."""
    with ExitStack() as stack:
        run = _Run(case, stack, **more)
        for event in case.events:
            run.batch()
            if event == "hold":
                run.hold()
            run.happen(event)
        stats = run.collector.stats()
        if "reload" not in case.events and run.case.backend in ("here", "sync"):
            require(stats["frames"] == run.checker.seen, f"{run.checker.seen} frames, not {stats}")
        return run.found


def fill(case: Case) -> list[TensorDictBase]:
    """Run a case that fills a buffer in the background."""
    size = 20_000
    with ExitStack() as stack:
        buffer = gleanrl.ReplayBuffer(storage=gleanrl.LazyTensorStorage(size), batch_size=8)
        total = case.frames * len(case.events) * 4
        run = _Run(case, stack, replay_buffer=buffer, total_frames=total)
        run.collector.start()
        for event in case.events:
            if event in ("update", "some", "each"):
                run.send()
            elif event == "state":
                with run.collector.pause():
                    for frame in frames_of(buffer[:]) if len(buffer) else ():
                        run.checker._alone(frame, not run.checker.random)
        while run.collector.is_running():
            run.collector._engine.wait(0.01)
        run.collector.shutdown()
        rows = buffer[:].unsqueeze(0)
        rows.names = [None, "time"]
        run.checker.batch(rows)
        require(len(buffer) == total, f"{len(buffer)} rows, not {total}")
        return []


def same(one: list[TensorDictBase], other: list[TensorDictBase], what: str) -> None:
    """Raise `Wrong` unless two runs gave the same bits."""
    for at, (mine, yours) in enumerate(zip(one, other, strict=True)):
        for key in mine.keys(True, True):
            if key in yours.keys(True, True):
                alike = torch.equal(mine[key], yours[key])
                require(alike, f"{what}: batch {at} differs in {key}")


def _compared(case: Case, found: list[TensorDictBase]) -> None:
    """Compare a case with other ways that promise the same bits."""
    if not case.deterministic or case.options.get("preemptive_threshold"):
        return
    if case.backend != "pool":
        same(found, iterate(replace(case, fast=not case.fast)), "fast and plain")
    if case.backend == "sync":
        same(found, iterate(case, backend="inline"), "workers in processes and here")
    quiet = not any(case.events) and case.backend == "here" and case.steps % 2 == 0
    if quiet and not {"init_random_frames", "reset_at_each_iter"} & set(case.options):
        halves = iterate(replace(case, steps=case.steps // 2, events=case.events * 2))
        pairs = zip(halves[::2], halves[1::2], strict=True)
        same(found, [torch.cat(list(pair), -1) for pair in pairs], "whole and half batches")


def run(case: Case) -> None:
    """Run a case.

    Raises:
        Wrong: a frame is not what it has to be.
        Refused: the library refuses the case.
    """
    start_counting()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if case.backend == "background":
            fill(case)
        else:
            _compared(case, iterate(case))
