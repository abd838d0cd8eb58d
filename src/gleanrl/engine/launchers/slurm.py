"""Nodes as jobs that the learner submits."""

from __future__ import annotations

import functools
import importlib
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from gleanrl.engine.launchers.address import LOOPBACK, outward
from gleanrl.engine.launchers.jobs import Jobs
from gleanrl.rollout.handshake import Invitation
from gleanrl.rollout.node import run_node

_LAST = 5.0
"""Seconds the interpreter gets to take itself apart."""


class SubmititLauncher:
    """Submits one job per node: to Slurm where there is one, else as processes of this machine."""

    def __init__(self, slurm_kwargs: Mapping[str, Any] | None = None) -> None:
        """Read parameters of the jobs.

        Args:
            slurm_kwargs: See `Jobs`.

        Raises:
            ConfigError: submitit is not installed, or a parameter cannot be.
        """
        self._jobs = Jobs(slurm_kwargs, "slurm_kwargs")
        self._latest: dict[int, int] = {}
        """The job of each node; those before it were of nodes that are lost."""

    def address(self) -> str:
        """Return this machine's address on the network of the nodes."""
        return LOOPBACK if self._jobs.here else outward()

    def launch(self, invitations: Sequence[Invitation]) -> None:
        """Submit one job per invitation."""
        first = self._jobs.submit([functools.partial(_serve, each) for each in invitations])
        self._latest.update({each.node: first + n for n, each in enumerate(invitations)})

    def fate(self, node: int, timeout: float) -> str | None:
        """Return what became of the job of ``node``: its id, its state, where its log is."""
        job = self._latest.get(node)
        return None if job is None else self._jobs.outcome(job, timeout)

    def stop(self, timeout: float) -> None:
        """Let jobs end that were asked to, cancel the rest."""
        self._jobs.stop(timeout)


def _serve(invitation: Invitation) -> None:
    serve_in_job(invitation)
    end_soon()


def serve_in_job(invitation: Invitation) -> None:
    """Be a node; runs in a job.

    Raises:
        SystemExit: the scheduler said that the job has to end, and the learner was told.
    """
    environment = importlib.import_module("submitit").JobEnvironment()
    # What submitit announces the time limit with comes first, SIGTERM later or for other reasons.
    announced = getattr(signal, f"SIG{environment.USR_SIG}")
    signals = (announced, signal.SIGTERM, signal.SIGINT)
    for number in signals:  # submitit's own handlers ignore one and requeue on the other
        signal.signal(number, signal.SIG_DFL)
    label = f"{environment.name()} job {environment.job_id}: a time limit, a preemption or scancel"
    run_node(invitation, signals, label)


def end_soon() -> None:
    """Have this process end though threads of the user's would keep it: its job would go on."""
    end = threading.Timer(_LAST, os._exit, [0])
    end.daemon = True
    end.start()
