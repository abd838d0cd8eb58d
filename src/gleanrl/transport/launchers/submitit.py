"""Nodes as jobs of a scheduler, through submitit: submitted by the learner, or together with it.

Some clusters let no job submit others. There the main job and the jobs of nodes are submitted
beforehand (`submitit_delayed_launcher`) and meet in a folder: the main job writes the invitations
of its collector into one file, once, and each node reads its own. The folder is readable by the
user alone, because it contains the secret.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import secrets
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle

from gleanrl.core.deadline import Deadline
from gleanrl.core.errors import CollectorTimeout, ConfigError, WorkerDied
from gleanrl.core.options import check_int, check_word
from gleanrl.core.platforms import imported
from gleanrl.transport.addresses import LOOPBACK, outward
from gleanrl.transport.handshake import Invitation
from gleanrl.transport.node_endpoint import run_node
from gleanrl.transport.process_group import KINDS

FOLDER = "gleanrl_jobs"
"""Folder of logs under the working directory, which all hosts of a cluster see."""
JOB_DEFAULTS: Mapping[str, Any] = {
    "name": "gleanrl",
    "timeout_min": 10,
    "slurm_signal_delay_s": 30,
    "slurm_additional_parameters": {"no-requeue": True},
}
"""Parameters of jobs by default. A node that Slurm starts anew would find no learner, hence
no-requeue; partition, processors and memory are the cluster's own defaults."""
_CLUSTER_LOOK_S, _LOCAL_LOOK_S = 3.0, 0.2
"""Seconds between two looks at jobs: of a scheduler, and of this machine."""
_JOBS_END_S = 7.0
"""Seconds within which a cancelled job of this machine has ended."""
_LARGEST_ARRAY = 1000
_SUBMITTING = "submitting jobs (launcher='mp' runs nodes on this machine without)"
_LONGEST_TAIL = 300
_MEANINGS = {
    "TIMEOUT": "it reached its time limit; slurm_kwargs={'timeout_min': ...} sets that",
    "CANCELLED": "somebody cancelled it",
    "OUT_OF_MEMORY": "it needs more; slurm_kwargs={'mem_gb': ...} says how much",
    "NODE_FAIL": "its host failed",
    "PREEMPTED": "another job took its place",
}


class Jobs:
    """Jobs with the same resources, and a folder of logs that only the user can read."""

    def __init__(self, conf: Mapping[str, Any] | None, what: str) -> None:
        """Read ``conf``; nothing is submitted yet.

        Args:
            conf: Parameters of `submitit.AutoExecutor`, over `JOB_DEFAULTS`; besides
                ``cluster`` (``"slurm"``, ``"local"``, by default what is there) and ``folder``.
            what: The name of that argument, for messages.
        """
        self._submitit = imported("submitit", "submitit", _SUBMITTING)
        self._what = what
        self._conf = {**JOB_DEFAULTS, **(conf or {})}
        self._parent = Path(self._conf.pop("folder", None) or FOLDER).expanduser().absolute()
        given = self._conf.pop("cluster", None)
        self.cluster: str = given or self._submitit.AutoExecutor.which()
        if self.cluster == "debug":
            raise ConfigError(
                f"{what}['cluster'] is 'debug', which runs jobs in this very process, one after "
                "another, but a node and its learner run together: use 'local' for processes of "
                "this machine, or MultiSyncCollector(backend='inline') to debug the code of nodes"
            )
        for name in ("nodes", "tasks_per_node"):
            if self._conf.get(name, 1) != 1:
                raise ConfigError(
                    f"{what}[{name!r}] ({self._conf[name]!r}) must be 1: every node is a job of "
                    "its own"
                )
        if "%" in str(self._parent):
            raise ConfigError(f"{what}['folder'] ({self._parent}) must have no % in it")
        self.local = self.cluster == "local"
        """Whether they run on this machine."""
        self._jobs: list[Any] = []
        self._ended: dict[int, str] = {}
        self._next_look = Deadline(0.0)

    @functools.cached_property
    def folder(self) -> Path:
        """The folder of the jobs, made when it is first needed; see `private_folder`."""
        return private_folder(self._parent)

    def submit(self, functions: Sequence[Callable[[], Any]]) -> int:
        """Have every function called in a job of its own; return the index of the first."""
        folder, first = self.folder, len(self._jobs)
        try:
            executor = self._submitit.AutoExecutor(folder=folder, cluster=self.cluster)
            executor.update_parameters(**self._conf)
            if self.cluster == "slurm":  # else 256 at most would run at the same time
                executor.update_parameters(slurm_array_parallelism=len(functions))
            for start in range(0, len(functions), _LARGEST_ARRAY):
                self._jobs += executor.submit_array(functions[start : start + _LARGEST_ARRAY])
        except Exception as err:  # of sbatch, or of submitit about a parameter
            raise ConfigError(f"the jobs of {self._what} were not taken: {err}") from err
        for job in self._jobs:
            with contextlib.suppress(OSError):  # the folder keeps others out already
                job.paths.submitted_pickle.chmod(0o600)
        return first

    # -- their ends ------------------------------------------------------------------------------

    def outcome(self, index: int, timeout: float = 0.0) -> str | None:
        """Return how job ``index`` ended; ``None`` if that is not known in ``timeout`` seconds."""
        deadline = Deadline(timeout)
        self._look()
        while index not in self._ended and not deadline.expired:
            time.sleep(0.05)  # there is no event to wait for
            self._look()
        return self._ended.get(index)

    def _look(self) -> None:
        """Note which jobs have ended, at most every few seconds."""
        if not self._next_look.expired:
            return
        self._next_look = Deadline(_LOCAL_LOOK_S if self.local else _CLUSTER_LOOK_S)
        asked = False
        for index, job in enumerate(self._jobs):
            if index in self._ended:
                continue
            # One answer of the scheduler is about all jobs.
            if job.done(force_check=not asked) or job.state.startswith("PREEMPTED"):
                self._ended[index] = self._how(job)
            else:
                asked = True

    def _how(self, job: Any) -> str:
        name = f"({self.cluster} job {job.job_id}, log {job.paths.stderr})"
        if _has_result(job):
            error = job.exception()
            return f"{name} came to its end" if error is None else f"{name} failed: {_gist(error)}"
        state = job.state.split()[0] if job.state else "UNKNOWN"
        meaning = _MEANINGS.get(state)
        told = f"ended, state {job.state}" + (f" ({meaning})" if meaning else "")
        tail = _last_line(job.paths.stderr)
        return f"{name} {told}" + (f"; the last line of its log is {tail!r}" if tail else "")

    def result(self, index: int, what: str) -> Any:
        """Wait for the end of job ``index``, named ``what``; return the result of its function."""
        while (reason := self.outcome(index, _PAUSE_S)) is None:
            pass
        job = self._jobs[index]
        error = job.exception() if _has_result(job) else None
        if error is not None or not _has_result(job):
            raise WorkerDied(f"{what} {reason}") from error
        return job.result()

    # -- the end ---------------------------------------------------------------------------------

    def stop(self, timeout: float) -> None:
        """Cancel jobs that run after ``timeout`` seconds; remove the files with secrets.

        Waits a few seconds more for processes of this machine.
        """
        self._wait_for_end(timeout)
        for job in self._jobs:
            if not self._is_over(job) and not _has_result(job):
                with contextlib.suppress(Exception):  # not found, or ended meanwhile
                    job.cancel(check=False)
        if self.local:
            self._wait_for_end(_JOBS_END_S)
        for job in self._jobs:
            with contextlib.suppress(OSError):
                job.paths.submitted_pickle.unlink(missing_ok=True)

    def _wait_for_end(self, timeout: float) -> None:
        deadline = Deadline(timeout)
        while not (deadline.expired or all(map(self._is_over, self._jobs))):
            time.sleep(0.02)

    def _is_over(self, job: Any) -> bool:
        """Whether a job is known to have ended, without asking the scheduler."""
        if self.local:
            return bool(job.done())
        return _has_result(job) or bool(job.watcher.is_done(job.job_id, mode="cache"))


def _has_result(job: Any) -> bool:
    """Tell whether submitit need not wait for the result of ``job``."""
    try:
        return bool(job.paths.result_pickle.exists())
    except OSError:  # a stale handle of a network's file system
        return False


def private_folder(parent: Path) -> Path:
    """Make a new folder that only the user can read."""
    folder = parent / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
        folder.chmod(0o700)  # with any umask
        found = folder.stat()
    except OSError as err:
        raise ConfigError(f"no folder can be made in {parent} ({err}); pass another one") from err
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(
            f"the file system of {parent} does not keep {folder.name} private (mode "
            f"{stat.S_IMODE(found.st_mode):o}), and a secret has to lie there; choose another "
            "folder"
        )
    return folder


def _gist(error: Exception) -> str:
    """Return the last line of the traceback in submitit's error about a failed job."""
    lines = [line for line in str(error).split("\n") if line.strip()]
    rules = [i for i, line in enumerate(lines) if not line.strip("-")]
    inside = lines[rules[0] + 1 : rules[-1]] if len(rules) > 1 else lines
    return inside[-1] if inside else type(error).__name__


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[-_LONGEST_TAIL:]


_LAST_WORD_S = 5.0
"""Seconds until a job ends in the middle of the interpreter's own end."""


class SubmititLauncher:
    """Submits one job per node: to Slurm where there is one, else as processes of this machine."""

    def __init__(self, slurm_kwargs: Mapping[str, Any] | None = None) -> None:
        """Read parameters of the jobs; see `Jobs`."""
        self._jobs = Jobs(slurm_kwargs, "slurm_kwargs")
        self._latest: dict[int, int] = {}
        """The latest job of each node; earlier jobs were of lost nodes."""

    def address(self) -> str:
        return LOOPBACK if self._jobs.local else outward()

    def launch(self, invitations: Sequence[Invitation]) -> None:
        first = self._jobs.submit([functools.partial(_serve_in_job, each) for each in invitations])
        self._latest.update({each.node: first + n for n, each in enumerate(invitations)})

    def exit_reason(self, node: int, timeout: float) -> str | None:
        job = self._latest.get(node)
        return None if job is None else self._jobs.outcome(job, timeout)

    def stop(self, timeout: float) -> None:
        self._jobs.stop(timeout)


def _serve_in_job(invitation: Invitation) -> None:
    """Be a node; runs in a job, which ends by `SystemExit` if the scheduler says so."""
    environment = importlib.import_module("submitit").JobEnvironment()
    # submitit's signal announces the time limit, SIGTERM comes later or for other reasons.
    announced = getattr(signal, f"SIG{environment.USR_SIG}")
    signals = (announced, signal.SIGTERM, signal.SIGINT)
    for number in signals:  # submitit's own handlers ignore one and requeue on the other
        signal.signal(number, signal.SIG_DFL)
    label = f"{environment.name()} job {environment.job_id}: a time limit, a preemption or scancel"
    run_node(invitation, signals, label)
    # Threads of the user's would keep this process, and with it the job.
    end = threading.Timer(_LAST_WORD_S, os._exit, [0])
    end.daemon = True
    end.start()


_INVITATIONS = "invitations.json"
_INVITATION_LOOK_S = 0.5
"""Seconds between two looks into the folder."""


def write_invitations(folder: Path, invitations: Sequence[Invitation]) -> None:
    """Tell the waiting nodes where their learner is; nodes beyond ``invitations`` end."""
    told = [{**asdict(each), "secret": each.secret.decode()} for each in invitations]
    path = folder / f".{_INVITATIONS}"
    with open(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "w") as out:
        json.dump(told, out)
    path.replace(folder / _INVITATIONS)


def await_invitation(folder: Path, node: int, timeout: float) -> Invitation | None:
    """Wait for the invitation of ``node``; return ``None`` if the learner needs no such node."""
    deadline = Deadline(timeout)
    while True:
        # A file system on a network may show an old folder until it is listed, or half a file.
        with contextlib.suppress(OSError, ValueError):
            os.listdir(folder)
            invitations = json.loads((folder / _INVITATIONS).read_text())
            if node >= len(invitations):
                return None
            own = invitations[node]
            return Invitation(**{**own, "secret": own["secret"].encode()})
        if deadline.expired:
            raise CollectorTimeout(
                f"node {node} found no learner in {folder} within {timeout:g} s: the main job has "
                "built no collector with launcher='submitit_delayed'; its log tells more, and "
                "start_timeout= of submitit_delayed_launcher gives it longer"
            )
        time.sleep(_INVITATION_LOOK_S)


@dataclass(slots=True)
class _MainJob:
    """The nodes that were submitted together with this process."""

    folder: Path
    nodes: int
    local: bool
    """Whether all jobs are processes of this machine."""
    invited: bool = False
    """Whether a collector has these nodes."""


R = TypeVar("R")
_PAUSE_S = 0.2
_END_GRACE_S = 10.0
"""Seconds nodes get to end once the main job has."""
_main_job: _MainJob | None = None


class DelayedLauncher:
    """In a main job: invites the nodes that wait for it, once."""

    def __init__(self) -> None:
        if _main_job is None:
            raise ConfigError(
                "launcher='submitit_delayed' is for collectors built in a function that "
                "submitit_delayed_launcher decorates, which submits its nodes as well; from "
                "anywhere else use launcher='submitit'"
            )
        if _main_job.invited:
            raise ConfigError(
                "launcher='submitit_delayed' is for one collector of a main job, and the nodes of "
                "this one have served another: keep that collector, or call the decorated "
                "function once per collector"
            )
        self._main = _main_job

    def address(self) -> str:
        return LOOPBACK if self._main.local else outward()

    def launch(self, invitations: Sequence[Invitation]) -> None:
        nodes = len(invitations)
        if nodes > self._main.nodes:
            raise ConfigError(
                f"create_env_fn has {nodes} entries, but submitit_delayed_launcher has submitted "
                f"{self._main.nodes} nodes; num_jobs= says how many"
            )
        self._main.invited = True
        write_invitations(self._main.folder, invitations)

    def exit_reason(self, node: int, timeout: float) -> str | None:
        return None  # nodes tell on their connections why they leave

    def stop(self, timeout: float) -> None:
        """Do nothing: nodes end with their connections."""


class submitit_delayed_launcher:  # the name that users know
    """Decorates a function so that calling it submits it as a job, and nodes for its collector.

    A call waits for the end of the main job and returns the result of the function. The nodes
    serve one collector.
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
        """Read the parameters of jobs; nothing is submitted yet.

        Args:
            num_jobs: Nodes.
            framework: ``"distributed"`` or ``"rpc"``: of the collector. Nodes serve either.
            backend: The backend of the collector; only its name is checked here.
            tcpport: The port that the learner listens on unless its collector is given one.
            submitit_main_conf: Parameters of the main job, over `JOB_DEFAULTS`.
            submitit_collection_conf: Parameters of the jobs of nodes, likewise.
            start_timeout: Seconds that a node waits at most for the main job's collector.

        Raises:
            ConfigError: submitit is not installed, or an argument cannot be.
        """
        check_word("framework", framework, ("distributed", "rpc"))
        check_word("backend", backend, KINDS)
        self._count = check_int("num_jobs", num_jobs, least=1)
        self._port = str(tcpport)
        self._main = {"name": "gleanrl-main", **(submitit_main_conf or {})}
        self._nodes = dict(submitit_collection_conf or {})
        self._start_timeout = start_timeout
        self._jobs()

    def _jobs(self) -> tuple[Jobs, Jobs]:
        nodes = Jobs(self._nodes, "submitit_collection_conf")
        return Jobs(self._main, "submitit_main_conf"), nodes

    def __call__(self, main: Callable[[], R]) -> Callable[[], R]:
        """Return the function that submits ``main`` and its nodes."""

        @functools.wraps(main)
        def submitted() -> R:
            return self._run(main, *self._jobs())

        return submitted

    def _run(self, main: Callable[[], R], job: Jobs, nodes: Jobs) -> R:
        """Submit everything, wait, and leave nothing running."""
        count, local, grace = self._count, job.local and nodes.local, 0.0
        folder = job.folder
        # Pickled separately, because the job first needs to know where to import from.
        pickled, path = cloudpickle.dumps(main), tuple(sys.path)
        start = functools.partial(_run_main, pickled, path, folder, count, local, self._port)
        serve = functools.partial(_wait_to_serve, folder, self._start_timeout)
        try:
            job.submit([start])
            nodes.submit([functools.partial(serve, node) for node in range(count)])
            result: R = job.result(0, "the main job")
            grace = _END_GRACE_S
        finally:
            job.stop(grace)
            nodes.stop(grace)
            (folder / _INVITATIONS).unlink(missing_ok=True)
        return result


def _run_main(
    pickled: bytes, path: Sequence[str], folder: Path, jobs: int, local: bool, port: str
) -> Any:
    """Be the main job."""
    global _main_job
    os.environ.setdefault("TCP_PORT", port)
    sys.path.extend(entry for entry in path if entry not in sys.path)
    _main_job = _MainJob(folder, jobs, local)
    try:
        return cloudpickle.loads(pickled)()
    finally:
        _main_job = None
        with contextlib.suppress(OSError):  # the folder is gone, so no node waits any more
            write_invitations(folder, ())  # nodes that have not begun yet end at once


def _wait_to_serve(folder: Path, timeout: float, node: int) -> None:
    """Be a node of the collector that the main job builds."""
    invitation = await_invitation(folder, node, timeout)
    if invitation is not None:
        _serve_in_job(invitation)
