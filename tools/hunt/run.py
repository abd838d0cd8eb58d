"""Runs a case: collects, lets the events happen, and checks every frame."""

from __future__ import annotations

import csv
import json
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

import gleanrl
from tools.hunt.build import build
from tools.hunt.cases import Case
from tools.hunt.checks import check_slices, checker_of, frames_of, require
from tools.hunt.policies import around_beginning, make_policy
from tools.hunt.worlds import _counters, length, make_one, reward, start_counting, wage

SLICE = 2
RECENT = 100
"""Episodes whose returns ``stats()`` knows."""
RETURNS = ("episodes", "return_min", "return_max")
ROWS = 20_000
WAGE = 32.0


class Refused(Exception):
    """The library refuses the case by an error of its own when it is built."""


def _sink(case: Case, folder: Path) -> dict[str, Any]:
    """Return the argument that says where frames go, if not to the learner."""
    if case.sink == "batches":
        return {}
    if case.sink == "recorder":
        recorder = gleanrl.Recorder(folder / "data", num_envs=case.envs)
        return {"replay_buffer": recorder}
    ndim = 2 if case.sink == "rows" else 1
    storage = gleanrl.LazyTensorStorage(ROWS, ndim=ndim)
    samplers: dict[str, Callable[[], Any]] = {
        "slices": lambda: gleanrl.SliceSampler(slice_len=SLICE, truncated_key=None),
        "priorities": lambda: gleanrl.PrioritizedSampler(ROWS, 0.7, 0.5),
    }
    sampler = samplers.get(case.sink, gleanrl.RandomSampler)()
    buffer = gleanrl.ReplayBuffer(
        storage=storage, sampler=sampler, batch_size=8, generator=torch.Generator()
    )
    return {"replay_buffer": buffer}


def _streams() -> tuple[bytes, str]:
    """Return the states of the learner's generators."""
    return torch.get_rng_state().numpy().tobytes(), repr(np.random.get_state(legacy=False))


class _Globals:
    """What the learner sets process-wide while something collects, put back by `restore`."""

    def __init__(self) -> None:
        self._before = torch.get_default_dtype(), torch.is_grad_enabled()
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        self._mode: Any = gleanrl.set_exploration_type(gleanrl.ExplorationType.DETERMINISTIC)
        self._mode.__enter__()
        torch.manual_seed(5)
        np.random.seed(5)
        self.drawn = _streams()

    def restore(self) -> None:
        """Put everything back; raise if a collector changed it."""
        now = torch.get_default_dtype(), torch.is_grad_enabled(), gleanrl.exploration_type()
        self._mode.__exit__(None, None, None)
        torch.set_default_dtype(self._before[0])
        torch.set_grad_enabled(self._before[1])
        kept = torch.float64, False, gleanrl.ExplorationType.DETERMINISTIC
        require(now == kept, f"collecting changed the learner's settings: {now}")
        for name, then, state in zip(("torch", "numpy"), self.drawn, _streams(), strict=True):
            require(then == state, f"collecting drew from the learner's {name} generator")


class _Run:
    """A collector and all that is known of what it delivered."""

    def __init__(self, case: Case, stack: ExitStack, **more: Any) -> None:
        self.case, self.stack = case, stack
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self.more = more | _sink(case, self.folder)
        self.buffer: Any = self.more.get("replay_buffer")
        self.checker = checker_of(case)
        self.held: list[tuple[TensorDictBase, TensorDictBase]] = []
        self.found: list[TensorDictBase] = []
        self.unsent: int | None = None
        """The collector's batches when weights were changed that were not sent; else ``None``."""
        self.warned = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        self.exactly: int | None = 0
        self.reloaded = False
        self.life = 0
        self.globals: _Globals | None = None
        self.begin()

    def begin(self) -> None:
        """Build a policy, and a collector for it."""
        self.policy, self.acting = make_policy(self.case.policy, self.case.env)
        self.version = 0
        self.beginning = self.stack.enter_context(ExitStack())
        self.beginning.enter_context(around_beginning(self.case.policy, self.policy))
        self.collector = self.open()

    def open(self) -> Any:
        """Build the collector; it is closed at the end."""
        self.unsent = None
        self.warned.clear()
        try:
            collector = build(self.case, self.policy, self.folder, self.life, **self.more)
        except gleanrl.GleanError as err:
            raise Refused(f"{type(err).__name__}: {str(err)[:90]}") from err
        self.life += 1
        self.stack.callback(collector.shutdown)
        if self.case.seed is not None:
            collector.set_seed(self.case.seed)
        return collector

    def second(self) -> Any:
        """Build another collector, with a policy of its own, that fills the same sink."""
        kept, self.policy = self.policy, make_policy(self.case.policy, self.case.env)[0]
        collector = self.open()
        self.policy = kept
        return collector

    def send(self, **how: Any) -> None:
        """Make new weights, and send them."""
        if self.policy is None:
            return
        self.version += 1
        self.unsent = None
        self.checker.newest = max(self.checker.newest, self.version)
        self.acting.tag(self.version)
        if how.pop("each", False):
            weights = dict(self.policy.state_dict())
            how["weights"] = dict.fromkeys(how.pop("worker_ids"), weights)
        self.collector.update_policy_weights_(**how)
        tracked = self.case.options.get("track_policy_version", True) is not False
        if tracked and self.checker.labelled:
            now = self.collector.policy_version
            require(now == self.version, f"version {now}, not {self.version}")
        self.exactly = self.version if not how else None

    def happen(self, event: str) -> None:
        """Let an event happen."""
        simple: dict[str, Callable[[], Any]] = {
            "update": self.send,
            "some": self._send_some,
            "each": lambda: self._send_some(each=True),
            "seed": lambda: self._anew(lambda: self.collector.set_seed(7)),
            "reset": lambda: self._anew(self.collector.reset),
            "reload": self._reload,
            "state": lambda: self.collector.state_dict(),
            "stats": lambda: self.collector.stats(),
            "hold": self._hold,
            "globals": self._toggle,
            "rollout": self._rollout,
            "silent": self._silent,
            "evaluate": self._evaluate,
        }
        if event:
            simple[event]()

    def _send_some(self, **how: Any) -> None:
        own = {"weight_updater", "num_workers_per_collector"} & set(self.case.options)
        several = self.case.backend != "here" and not own and not self.case.central
        self.send(**({"worker_ids": [self.case.workers - 1], **how} if several else {}))

    def _anew(self, command: Callable[[], Any]) -> None:
        command()
        self.checker.begin_anew()

    def _reload(self) -> None:
        state, trains = self.collector.state_dict(), self.unsent is not None
        self.collector.shutdown()
        self.collector = self.open()
        self.collector.load_state_dict(state)
        self.exactly, self.reloaded = None, True
        if trains:  # a learner that goes on is warned anew: a load sends what workers had
            self._silent()

    def _hold(self) -> None:
        """Keep the newest batch, which must not change."""
        if self.found and "return_same_td" not in self.case.options:
            self.held = [*self.held[-2:], (self.newest, self.newest.clone())]

    def _toggle(self) -> None:
        if self.globals is None and self.case.background:
            self.globals = _Globals()

    def _rollout(self) -> None:
        """Collect a batch past the sink and what regroups."""
        odd = {"trajs_per_batch", "trajs_per_write", "split_trajs", "total_frames", "postproc"}
        odd |= {"num_workers_per_collector", "reset_at_each_iter", "init_random_frames"}
        if odd & set(self.case.options) or self.case.sink != "batches":
            return
        batch = self.collector.rollout()
        self.checker.batch(batch)

    def _silent(self) -> None:
        """Train without sending: workers go on with what they have."""
        unfit = self.policy is None or not self.checker.labelled or self.version
        unfit = unfit or "weight_sync_schemes" in self.case.options  # these say nothing, by promise
        if not self.case.own_policy and not unfit:
            self.acting.tag(2**21)
            # Whole trajectories: a delivery may need several batches of the workers, or none.
            self.unsent = self.collector.stats()["batches"] if self.unsent is None else self.unsent

    def check_warned(self) -> None:
        """Raise if weights that were changed and not sent are still news to nobody."""
        if self.unsent is None:
            return
        told = sum("weights were never sent" in str(each.message) for each in self.warned)
        require(told < 2, f"{told} warnings about weights that were never sent")
        late = self.collector.stats()["batches"] - self.unsent
        # In the background, a batch was perhaps begun before the change and ended after it.
        due = late >= (3 if self.case.background else 2)
        require(told or not due, "no warning about weights that were never sent")

    def _evaluate(self) -> None:
        """Play episodes with the newest weights."""
        case, count = self.case, 3
        fit = case.policy not in ("random", "perturbed", "numpy", "cached") and not case.pool
        if not fit or case.env in ("agents", "double") or case.background:
            return
        number = 16 * 100
        makes = partial(make_one, 100, case.env, case.draws)
        _counters.pop(100, None)
        tag = float(self.version)
        self.acting.tag(self.version)
        with gleanrl.Evaluator(
            makes, self.policy, num_trajectories=count, backend="inline", seed=case.seed
        ) as evaluator:
            models = {"env.wage": wage(WAGE)} if case.env == "native" else None
            found = evaluator.evaluate(weights_dict=models)
        bonus = WAGE if models else 0.0
        found_lengths, returns = found.lengths.tolist(), found.returns.tolist()
        # The environment has been reset once or twice before its first episode that counts.
        played = [[length(number, first + at) for at in range(count)] for first in range(3)]
        require(found_lengths in played, f"evaluated episodes of {found_lengths} steps")
        paid = [
            sum(reward(number, step, tag, bonus) for step in range(steps))
            for steps in found_lengths
        ]
        require(returns == paid, f"evaluated {returns}, not {paid}")

    def batch(self) -> bool:
        """Collect a batch and check it; return whether there was one."""
        batch = self.collector.next()
        self.beginning.close()
        if batch is None and self.buffer is None:
            ended = self.collector.stats()["frames"] >= self.collector.total_frames > 0
            require(ended, "there is no batch")
            return False
        if "reset_at_each_iter" in self.case.options:
            self.checker.begin_anew()
        if batch is not None:
            self._check(batch)
        return True

    def _check(self, batch: TensorDictBase) -> None:
        regrouped = {"trajs_per_batch", "num_workers_per_collector"} & set(self.case.options)
        require(batch.names[-1] == "time", f"the last dimension is called {batch.names[-1]!r}")
        # Pools that reset in their next step deliver first what was left over, as it was made.
        sync = self.case.together or self.case.backend == "here"
        sync = sync and not self.case.early and not regrouped
        self.checker.batch(batch, self.exactly if sync and self.checker.labelled else None)
        for kept, copy in self.held:
            require(bool((kept == copy).all()), "a batch changed in the learner's hands")
        self.found.append(batch.clone())
        self.newest = batch

    def in_time(self, rows: TensorDictBase) -> TensorDictBase:
        """Return all rows of the sink, flat; those of one environment in the order of time."""
        return rows.reshape(-1)

    def check_stored(self) -> None:
        """Check every row of the sink, and samples of it."""
        if self.case.sink == "recorder":
            with self.buffer:
                pass
            self.checker.batch(gleanrl.load_dataset(self.folder / "data"))
            card = json.loads((self.folder / "data" / "card.json").read_text())
            if self.checker.returns and self.counts_all and "episodes" in card:
                theirs = [card["episodes"], *(card["returns"][name] for name in ("min", "max"))]
                self.compare_returns(theirs)
            return
        if len(self.buffer):
            self.checker.batch(self.in_time(self.buffer[:]))
            for _ in range(3):
                self.check_sample()

    def check_sample(self) -> None:
        """Check the frames of a sample."""
        if self.buffer is None or self.case.sink == "recorder" or not len(self.buffer):
            return
        try:
            sample = self.buffer.sample()
        except gleanrl.ReplayError as err:
            require("long" in str(err) or "slice" in str(err), f"no sample: {err}")
            return
        self.checker.alone(sample)
        if self.case.sink == "slices":
            check_slices(sample, SLICE)
        if self.case.sink == "priorities":
            self.buffer.update_priority(sample["index"], 1.0 + torch.arange(len(sample)))

    def check_stats(self) -> None:
        """Compare what was counted with what was seen."""
        stats = self.collector.stats()
        whole = {"trajs_per_batch", "trajs_per_write", "split_trajs"} & set(self.case.options)
        lost = stats.get("frames_discarded", 0) or self.reloaded or self.case.backend == "async"
        if not (whole or lost or self.case.backend == "nodes" or self.case.writers > 1):
            counted = stats["frames"]
            require(counted == self.checker.seen, f"{self.checker.seen} frames, not {counted}")
        if self.checker.returns and self.counts_all and self.case.sink == "batches":
            count, *extremes = (stats[name] for name in RETURNS)
            everything = count <= RECENT
            self.compare_returns([count, *extremes] if everything else [count])
        if "logger" in self.case.options:
            self.collector.shutdown()
            with (self.folder / "log.csv").open() as file:
                frames = [float(row["frames"]) for row in csv.DictReader(file)]
            require(frames == sorted(frames), f"the log's frames are {frames}")

    @property
    def counts_all(self) -> bool:
        """Whether every episode that was counted is in the frames that were seen."""
        case, odd = self.case, {"reset_at_each_iter", "set_truncated", "postproc", "compact_obs"}
        odd |= {"trajs_per_batch", "split_trajs", "preemptive_threshold", "total_frames"}
        cut = {"seed", "reset", "reload", "rollout"} & set(case.events) or odd & set(case.options)
        return not cut and not case.early and case.backend in ("here", "sync")

    def compare_returns(self, theirs: Sequence[float]) -> None:
        """Compare a number of episodes, the least and the largest return with the frames'."""
        ours = self.checker.returns
        known = (len(ours), min(ours), max(ours))[: len(theirs)]
        close = np.allclose(theirs, known, rtol=1e-5)
        require(close, f"{theirs} episodes, least and largest return; the frames say {ours}")


def iterate(case: Case, **more: Any) -> list[TensorDictBase]:
    """Run a case whose collector is iterated over; return the batches."""
    with ExitStack() as stack:
        run = _Run(case, stack, **more)
        other = run.second() if case.writers > 1 else None
        for event in case.events:
            if not run.batch():
                break
            if other is not None:
                other.next()
            run.check_warned()
            run.check_sample()
            run.happen(event)
        if run.buffer is not None:
            run.collector.stats()
            run.check_stored()
        run.check_stats()
        return run.found


def _started(run: _Run) -> None:
    """Fill the sink in the background while events happen."""
    case, collector = run.case, run.collector
    collector.start()
    for event in case.events:
        _wait_for(run, case.frames)
        if event in ("update", "some", "each", "stats", "globals", "silent"):
            run.happen(event)
        elif event == "state" and case.sink != "recorder":
            with collector.pause():
                run.checker.alone(run.buffer[:] if len(run.buffer) else torch.empty(0))
        run.check_sample()
    while collector.is_running():
        time.sleep(0.005)
    run.check_warned()
    if run.globals is not None:
        run.globals.restore()
        run.globals = None


def _wait_for(run: _Run, frames: int) -> None:
    """Wait until some more frames were collected, or collection ended."""
    goal = run.collector.stats()["frames"] + frames
    while run.collector.is_running() and run.collector.stats()["frames"] < goal:
        time.sleep(0.002)


def _filled(run: _Run, total: int) -> int:
    """Return how many frames a collector has counted, which was to collect ``total``."""
    stats, rounded = run.collector.stats(), run.collector.total_frames
    frames, batch = int(stats["frames"]), int(stats["frames_per_batch"])
    require(total <= rounded < total + batch, f"total_frames is {rounded}, not {total}")
    # Where rollouts are stopped, batches are smaller, and the last may begin just below the end.
    most = rounded + (batch - 1 if run.case.preempted else 0)
    require(rounded <= frames <= most, f"{frames} frames, not {rounded} to {most}")
    return frames


def fill(case: Case) -> None:
    """Run a case that fills a sink in the background."""
    total, frames = case.frames * len(case.events) * 4, 0
    with ExitStack() as stack:
        run = _Run(case, stack, total_frames=total)
        for writer in range(case.writers):
            if writer:
                run.begin()
            _started(run)
            run.collector.shutdown()
            frames += _filled(run, total)
        run.check_stored()
        whole = {"trajs_per_batch"} & set(case.options)
        if not whole and case.sink != "recorder":
            rows = sum(1 for _ in frames_of(run.buffer[:])) // run.checker.agents
            require(rows == frames, f"{rows} rows of {frames} frames")


def same(one: list[TensorDictBase], other: list[TensorDictBase], what: str) -> None:
    """Raise `Wrong` unless two runs gave the same bits."""
    for at, (mine, yours) in enumerate(zip(one, other, strict=True)):
        for key in mine.keys(True, True):
            if key in yours.keys(True, True):
                alike = torch.equal(mine[key].cpu(), yours[key].cpu())
                require(alike, f"{what}: batch {at} differs in {key}")


def _compared(case: Case, found: list[TensorDictBase]) -> None:
    """Compare a case with other ways that promise the same bits."""
    if not case.deterministic:
        return
    if not case.pool:
        same(found, iterate(replace(case, fast=not case.fast)), "fast and plain")
    if case.backend == "sync" and not ({"front_door", "inference"} & set(case.options)):
        same(found, iterate(case, backend="inline"), "workers in processes and here")
    free = {"total_frames", "max_frames_per_traj", "storing_device", "info_keys", "check_finite"}
    quiet = not any(case.events) and case.backend == "here" and case.steps % 2 == 0
    # Where a batch ends decides how many steps of a pool only reset.
    quiet = quiet and not (case.early and case.every_call_shows)
    if quiet and set(case.options) <= free:
        halves = iterate(replace(case, steps=case.steps // 2, events=case.events * 2))
        pairs = list(zip(halves[::2], halves[1::2], strict=False))
        wholes = [torch.cat(list(pair), -1) for pair in pairs]
        same(found[: len(wholes)], wholes[: len(found)], "whole and half batches")


def run(case: Case) -> None:
    """Run a case.

    Raises:
        Wrong: a frame is not what it has to be.
        Refused: the library refuses the case.
    """
    start_counting()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if case.background:
                fill(case)
            else:
                _compared(case, iterate(case))
        except gleanrl.PolicyError as err:
            # A setting that changes inside a rollout is an error where it was not looked at.
            if case.policy != "perturbed" or "fast=False" not in str(err):
                raise
