"""Nodes as jobs that are submitted together with the learner's, which submits none itself.

Some clusters let no job submit others. There the main job and those of nodes are submitted
beforehand, and find each other in a folder. One file in it, replaced as a whole, says what the
main job is at; only the main job writes it. Whoever has submitted the jobs keeps notes beside it of
nodes that have ended. The folder is readable by the user alone, because the secret lies there.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle

from gleanrl.core.errors import CollectorTimeout, ConfigError, GleanError, WorkerDied
from gleanrl.core.options import check_int
from gleanrl.transport.handshake import Invitation
from gleanrl.transport.launchers.local import LOOPBACK, outward
from gleanrl.transport.launchers.submitit import DEFAULT_SLURM_CONF, Jobs, end_soon, serve_in_job
from gleanrl.transport.process_group import KINDS

_BEAT = 5.0
"""Seconds between two signs of life of the main job."""
_SILENCE = 180.0
"""Seconds without one after which it counts as dead: file systems on a network may show a file as
it was a minute ago."""
_PASSING = {errno.ENOENT, errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EAGAIN}
"""Error numbers of files that may be there the next time somebody looks."""
_LOOK, _LAZY_LOOK = 0.1, 1.0
_SOON = 30.0
"""Seconds of looking often."""


@dataclass(frozen=True, slots=True)
class LearnerInfo:
    """What the main job is at."""

    beat: int = 0
    serial: int = 0
    """Learners so far."""
    over: bool = False
    """Whether there will be no further learner."""
    host: str = ""
    """Where the latest learner waits for nodes; empty if it does not."""
    port: int = 0
    secret: str = ""
    nodes: int = 0
    """How many it waits for."""
    timeout_s: float = 0.0
    """Seconds that it does."""


class Rendezvous:
    """The folder, for everybody."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self) -> LearnerInfo | None:
        """Return what the main job is at, ``None`` if that cannot be read now.

        It has not started, or a file system on a network shows what is not there any more, or only
        a part of what is: the next look will tell.
        """
        # On a network this also drops what this host remembers of the folder.
        with contextlib.suppress(OSError):
            os.listdir(self._folder)
        try:
            return LearnerInfo(**json.loads((self._folder / "learner.json").read_text()))
        except ValueError:
            return None
        except OSError as err:
            if err.errno not in _PASSING:
                raise
            return None

    def write(self, info: LearnerInfo) -> None:
        """Replace what is there."""
        self._put("learner.json", json.dumps(asdict(info)))

    def note_end(self, node: int, reason: str) -> None:
        """Keep that node ``node`` has ended, unless somebody has said so before."""
        if self.end_of(node) is None:
            with contextlib.suppress(OSError):  # the folder is gone: nobody asks any more
                self._put(f"ended-{node}", reason)

    def end_of(self, node: int) -> str | None:
        """Return how node ``node`` ended, ``None`` if nobody has said so."""
        try:
            return (self._folder / f"ended-{node}").read_text()
        except OSError:
            return None

    def clear(self) -> None:
        """Remove what was written; nobody reads it any more."""
        for path in (*self._folder.glob("ended-*"), self._folder / "learner.json"):
            with contextlib.suppress(OSError):
                path.unlink()

    def _put(self, name: str, text: str) -> None:
        path = self._folder / f".{name}-{os.getpid()}-{threading.get_ident()}"
        with open(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "w") as out:
            out.write(text)
        path.replace(self._folder / name)

    def next_learner(self, after: int, timeout: float) -> LearnerInfo | None:
        """Wait for the learner after number ``after``; return ``None`` if there will be none.

        Raises:
            CollectorTimeout: the main job did not start within ``timeout`` seconds.
            GleanError: it is dead.
        """
        start = heard = time.monotonic()
        last: LearnerInfo | None = None
        while True:
            info, now = self.read(), time.monotonic()
            if info is not None:
                if info.over:
                    return None
                if info.serial > after and info.host:
                    return info
            if info not in (None, last):
                last, heard = info, now
            elif last is not None and now - heard > _SILENCE:
                raise GleanError(f"the main job has shown no sign of life for {_SILENCE:.0f} s")
            elif last is None and now - start > timeout:
                raise CollectorTimeout(f"the main job did not start within {timeout:.0f} s")
            # No file system on a network tells of a change.
            time.sleep(_LOOK if now - start < _SOON else _LAZY_LOOK)


class RendezvousKeeper:
    """In the main job: says in the folder what it is at, and that it is alive."""

    def __init__(self, folder: Path, jobs: int = 0, local: bool = False) -> None:
        self.jobs, self.local = jobs, local
        self._rendezvous = Rendezvous(folder)
        self.end_of = self._rendezvous.end_of
        self._lock = threading.Lock()
        self._info = LearnerInfo()
        self._ended = threading.Event()
        self._change()
        threading.Thread(target=self._beat, name="gleanrl keeper", daemon=True).start()

    def _change(self, **fields: float | str | bool) -> None:
        """Write what has changed; where that fails for the moment, the next sign of life does."""
        with self._lock:
            if self._info.over:
                return
            changed = replace(self._info, **fields)  # type: ignore[arg-type]
            self._info = replace(changed, beat=changed.beat + 1)
            try:
                self._rendezvous.write(self._info)
            except OSError as err:
                if err.errno not in _PASSING:
                    raise

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT):
            with contextlib.suppress(OSError):  # a file system that is away comes back, or not
                self._change()

    def call(self, invitations: Sequence[Invitation]) -> None:
        """Say where a new learner waits for nodes."""
        first = invitations[0]
        self._change(
            serial=self._info.serial + 1,
            host=first.host,
            port=first.port,
            secret=first.secret.decode(),
            nodes=len(invitations),
            timeout_s=first.timeout_s,
        )

    def dismiss(self) -> None:
        """Say that the latest learner waits no longer."""
        self._change(host="", secret="")

    def close(self) -> None:
        """Say that there will be no further learner."""
        self._ended.set()
        self._change(over=True, host="", secret="")


R = TypeVar("R")
_FRAMEWORKS = ("distributed", "rpc")
_PAUSE = 0.2
_END_GRACE = 10.0
"""Seconds nodes get to end once the main job has."""
_here: RendezvousKeeper | None = None
"""In a main job."""


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
        return LOOPBACK if self._main.local else outward()

    def launch(self, invitations: Sequence[Invitation]) -> None:
        nodes = len(invitations)
        if nodes > self._main.jobs:
            raise ConfigError(
                f"create_env_fn has {nodes} entries, but submitit_delayed_launcher has submitted "
                f"{self._main.jobs} nodes; num_jobs= says how many"
            )
        self._main.call(invitations)

    def exit_reason(self, node: int, timeout: float) -> str | None:
        deadline = time.monotonic() + timeout
        while (reason := self._main.end_of(node)) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return reason

    def stop(self, timeout: float) -> None:
        self._main.dismiss()


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
        self._start_timeout = start_timeout
        self._jobs()

    def _jobs(self) -> tuple[Jobs, Jobs]:
        nodes = Jobs(self._nodes, "submitit_collection_conf")
        return Jobs(self._main, "submitit_main_conf", inline=True), nodes

    def __call__(self, main: Callable[[], R]) -> Callable[[], R]:
        """Return what submits ``main`` and its nodes."""

        @functools.wraps(main)
        def submitted() -> R:
            return self._run(main, *self._jobs())

        return submitted

    def _run(self, main: Callable[[], R], job: Jobs, nodes: Jobs) -> R:
        """Submit everything, wait, and leave nothing running."""
        count, local, grace = self._count, job.here and nodes.here, 0.0
        folder = job.open()
        rendezvous = Rendezvous(folder)
        # By itself, because the job has to know first where to import from.
        pickled, path = cloudpickle.dumps(main), tuple(sys.path)
        start = functools.partial(_run_main, pickled, path, folder, count, local, self._port)
        serve = functools.partial(_wait_to_serve, folder, self._start_timeout)
        try:
            job.submit([start])
            nodes.submit([functools.partial(serve, node) for node in range(count)])
            told: set[int] = set()
            while (reason := job.outcome(0, _PAUSE)) is None:
                for node in set(range(count)) - told:  # the main job is told what becomes of nodes
                    end = nodes.outcome(node)
                    if end is not None:
                        rendezvous.note_end(node, end)
                        told.add(node)
            if not job.succeeded(0):
                raise WorkerDied(f"the main job {reason}") from job.error(0)
            grace = _END_GRACE
        finally:
            job.stop(grace)
            nodes.stop(grace)
            rendezvous.clear()
        result: R = job.result(0)
        return result


def _run_main(
    pickled: bytes, path: Sequence[str], folder: Path, jobs: int, local: bool, port: str
) -> Any:
    """Be the main job."""
    global _here
    os.environ.setdefault("TCP_PORT", port)
    sys.path.extend(entry for entry in path if entry not in sys.path)
    _here = RendezvousKeeper(folder, jobs, local)
    try:
        return cloudpickle.loads(pickled)()
    finally:
        _here.close()
        _here = None


def _wait_to_serve(folder: Path, timeout: float, node: int) -> None:
    """Be a node of one learner after another."""
    rendezvous, served = Rendezvous(folder), 0
    environment = importlib.import_module("submitit").JobEnvironment()
    try:
        while (info := rendezvous.next_learner(served, timeout)) is not None:
            served = info.serial
            if node < info.nodes:
                secret = info.secret.encode()
                serve_in_job(Invitation(info.host, info.port, node, secret, info.timeout_s))
    except Exception as err:
        job = f"({environment.name()} job {environment.job_id})"
        rendezvous.note_end(node, f"{job} failed: {type(err).__name__}: {err}")
        raise
    end_soon()


__all__ = ["DEFAULT_SLURM_CONF", "DelayedLauncher", "submitit_delayed_launcher"]
