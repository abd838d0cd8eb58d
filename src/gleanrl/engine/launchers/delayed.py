"""Nodes as jobs that are submitted together with the learner's, which submits none itself.

Some clusters let no job submit others. There the main job and those of nodes are submitted
beforehand; nodes wait until the learner says where it is.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import cloudpickle

from gleanrl.core.errors import ConfigError, WorkerDied
from gleanrl.core.options import check_int
from gleanrl.engine.launchers.address import LOOPBACK, outward
from gleanrl.engine.launchers.jobs import DEFAULT_SLURM_CONF, Jobs
from gleanrl.engine.launchers.meeting import Keeper, Meeting
from gleanrl.engine.launchers.slurm import end_soon, serve_in_job
from gleanrl.rollout.handshake import Invitation
from gleanrl.rollout.pair import KINDS

R = TypeVar("R")
_FRAMEWORKS = ("distributed", "rpc")
_PAUSE = 0.2
_GRACE = 10.0
"""Seconds nodes get to end once the main job has."""
_here: _MainJob | None = None
"""In a main job: itself."""


class _MainJob:
    """What a learner in this process needs to know of the jobs it is one of."""

    def __init__(self, folder: Path, jobs: int, local: bool) -> None:
        self.keeper = Keeper(folder)
        self.jobs, self.local = jobs, local


class DelayedLauncher:
    """In a main job: calls the nodes that wait for it."""

    def __init__(self) -> None:
        """Find the jobs.

        Raises:
            ConfigError: this process is no main job.
        """
        if _here is None:
            raise ConfigError(
                "launcher='submitit_delayed' is for collectors built in a function that "
                "submitit_delayed_launcher decorates, which submits its nodes as well; from "
                "anywhere else use launcher='submitit'"
            )
        self._main = _here

    def address(self) -> str:
        """Return this machine's address on the network of the nodes."""
        return LOOPBACK if self._main.local else outward()

    def launch(self, invitations: Sequence[Invitation]) -> None:
        """Call nodes.

        Raises:
            ConfigError: more than there are.
        """
        nodes = len(invitations)
        if nodes > self._main.jobs:
            raise ConfigError(
                f"create_env_fn has {nodes} entries, but submitit_delayed_launcher has submitted "
                f"{self._main.jobs} nodes; num_jobs= says how many"
            )
        self._main.keeper.call(invitations)

    def fate(self, node: int, timeout: float) -> str | None:
        """Return how the job of ``node`` ended, as far as somebody has said."""
        deadline = time.monotonic() + timeout
        while (how := self._main.keeper.end_of(node)) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return how

    def stop(self, timeout: float) -> None:
        """Call no further nodes; those that have come end with their connections."""
        self._main.keeper.dismiss()


class submitit_delayed_launcher:  # the name that users know
    """Decorates a function so that calling it submits it as a job, and nodes for its collector.

    Calling it waits for the end of the main job and returns what the function returned. Nodes
    serve one collector after another until the main job ends.
    """

    def __init__(
        self,
        num_jobs: int,
        framework: str = "distributed",
        backend: str = "gloo",
        tcpport: int | str = 10003,
        submitit_main_conf: Mapping[str, Any] | None = None,
        submitit_collection_conf: Mapping[str, Any] | None = None,
        start_timeout: float = 3600.0,
    ) -> None:
        """Read what jobs need; nothing is submitted yet.

        Args:
            num_jobs: Nodes.
            framework: ``"distributed"`` or ``"rpc"``: of the collector. Nodes serve either.
            backend: That of the collector, which tells its nodes; checked here for its name only.
            tcpport: The port that the learner listens on unless its collector is given one.
            submitit_main_conf: Parameters of the main job, over `DEFAULT_SLURM_CONF`.
            submitit_collection_conf: Parameters of the jobs of nodes, likewise.
            start_timeout: Seconds that a node waits at most for the main job to start.

        Raises:
            ConfigError: submitit is not installed, or an argument cannot be.
        """
        if framework not in _FRAMEWORKS:
            raise ConfigError(f"framework ({framework!r}) must be one of {_FRAMEWORKS}")
        if backend not in KINDS:
            raise ConfigError(f"backend ({backend!r}) must be one of {KINDS}")
        self._count = check_int("num_jobs", num_jobs, least=1)
        self._port = str(tcpport)
        self._main = {"name": "gleanrl-main", **(submitit_main_conf or {})}
        self._nodes = dict(submitit_collection_conf or {})
        self._patience = start_timeout
        self._jobs()

    def _jobs(self) -> tuple[Jobs, Jobs]:
        return (
            Jobs(self._main, "submitit_main_conf", inline=True),
            Jobs(self._nodes, "submitit_collection_conf"),
        )

    def __call__(self, main: Callable[[], R]) -> Callable[[], R]:
        """Return what submits ``main`` and its nodes."""

        @functools.wraps(main)
        def submitted() -> R:
            run: _Run[R] = _Run(*self._jobs(), self._count)
            return run.run(main, self._port, self._patience)

        return submitted


class _Run(Generic[R]):
    """One call of a decorated function."""

    def __init__(self, main: Jobs, nodes: Jobs, count: int) -> None:
        self._main, self._nodes, self._count = main, nodes, count

    def run(self, main: Callable[[], R], port: str, patience: float) -> R:
        """Submit everything, wait, and leave nothing running.

        Raises:
            WorkerDied: the main job failed.
        """
        local = self._main.here and self._nodes.here
        folder = self._main.open()
        grace = 0.0
        # By itself, because the job has to know first where to import from.
        pickled, path = cloudpickle.dumps(main), tuple(sys.path)
        try:
            self._main.submit(
                [functools.partial(_run_main, pickled, path, folder, self._count, local, port)]
            )
            self._nodes.submit(
                [functools.partial(_wait_to_serve, folder, n, patience) for n in range(self._count)]
            )
            result = self._result(self._wait(Meeting(folder)))
            grace = _GRACE
        finally:
            self._main.stop(grace)
            self._nodes.stop(grace)
            Meeting(folder).clear()
        return result

    def _wait(self, meeting: Meeting) -> str:
        """Wait for the end of the main job; tell it what becomes of nodes meanwhile."""
        told: set[int] = set()
        while (how := self._main.outcome(0, _PAUSE)) is None:
            for node in set(range(self._count)) - told:
                end = self._nodes.outcome(node)
                if end is not None:
                    meeting.note_end(node, end)
                    told.add(node)
        return how

    def _result(self, how: str) -> R:
        if not self._main.succeeded(0):
            raise WorkerDied(f"the main job {how}") from self._main.error(0)
        result: R = self._main.result(0)
        return result


def _run_main(
    pickled: bytes, path: Sequence[str], folder: Path, jobs: int, local: bool, port: str
) -> Any:
    """Be the main job."""
    global _here
    os.environ.setdefault("TCP_PORT", port)
    sys.path.extend(entry for entry in path if entry not in sys.path)
    _here = _MainJob(folder, jobs, local)
    try:
        return cloudpickle.loads(pickled)()
    finally:
        _here.keeper.close()
        _here = None


def _wait_to_serve(folder: Path, node: int, patience: float) -> None:
    """Be a node of one learner after another."""
    meeting, served = Meeting(folder), 0
    environment = importlib.import_module("submitit").JobEnvironment()
    try:
        while (notice := meeting.next_learner(served, patience)) is not None:
            served = notice.serial
            if node < notice.nodes:
                secret = notice.secret.encode()
                serve_in_job(Invitation(notice.host, notice.port, node, secret, notice.patience))
    except Exception as err:
        how = f"({environment.name()} job {environment.job_id})"
        meeting.note_end(node, f"{how} failed: {type(err).__name__}: {err}")
        raise
    end_soon()


__all__ = ["DEFAULT_SLURM_CONF", "DelayedLauncher", "submitit_delayed_launcher"]
