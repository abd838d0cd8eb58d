"""Jobs of a scheduler through submitit: submitted, watched, cancelled."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import secrets
import signal
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gleanrl.core.errors import ConfigError
from gleanrl.transport.handshake import Invitation
from gleanrl.transport.launchers.local import LOOPBACK, outward
from gleanrl.transport.node import run_node

FOLDER = "gleanrl_jobs"
"""Where logs are by default, under the working directory: on clusters all hosts see that one."""
DEFAULT_SLURM_CONF: Mapping[str, Any] = {
    "name": "gleanrl",
    "timeout_min": 10,
    "slurm_signal_delay_s": 30,
    "slurm_additional_parameters": {"no-requeue": True},
}
"""What jobs get unless told otherwise. A node that Slurm starts anew finds no learner, so it is not
asked to; partition, processors and memory are the cluster's own defaults."""
_FEW, _OFTEN = 3.0, 0.2
"""Seconds between two looks at jobs: of a scheduler, which has better to do; of this machine."""
_LAST_JOBS = 7.0
"""Seconds after which what was told to end on this machine has: it ends itself before."""
_LARGEST_ARRAY = 1000
_LONGEST_TAIL = 300
_MEANINGS = {
    "TIMEOUT": "it reached its time limit; slurm_kwargs={'timeout_min': ...} sets that",
    "CANCELLED": "somebody cancelled it",
    "OUT_OF_MEMORY": "it needs more; slurm_kwargs={'mem_gb': ...} says how much",
    "NODE_FAIL": "its host failed",
    "PREEMPTED": "another job took its place",
}


class Jobs:
    """Some jobs that get the same resources; logs lie in a folder that only the user reads."""

    def __init__(self, conf: Mapping[str, Any] | None, what: str, *, inline: bool = False) -> None:
        """Read ``conf``; nothing is submitted yet.

        Args:
            conf: Parameters of `submitit.AutoExecutor`, over `DEFAULT_SLURM_CONF`; besides
                ``cluster`` (``"slurm"``, ``"local"``, by default what is there) and ``folder``.
            what: The argument that they come from, for messages.
            inline: Whether ``cluster="debug"`` can be meant.

        Raises:
            ConfigError: submitit is not installed, or something in ``conf`` cannot be.
        """
        self._submitit = _submitit()
        self._what = what
        self._conf = {**DEFAULT_SLURM_CONF, **(conf or {})}
        self._parent = Path(self._conf.pop("folder", None) or FOLDER).expanduser().absolute()
        given = self._conf.pop("cluster", None)
        self.cluster: str = given or self._submitit.AutoExecutor.which()
        if self.cluster == "debug" and not inline:
            raise ConfigError(
                f"{what}['cluster'] is 'debug', which runs jobs in this very process, one after "
                "another; a node runs beside its learner: use 'local' for processes of this "
                "machine, or MultiSyncCollector(backend='inline') to debug what runs on nodes"
            )
        for name in ("nodes", "tasks_per_node"):
            if self._conf.get(name, 1) != 1:
                raise ConfigError(
                    f"{what}[{name!r}] ({self._conf[name]!r}) must be 1: every node is a job of "
                    "its own"
                )
        if "%" in str(self._parent):
            raise ConfigError(f"{what}['folder'] ({self._parent}) must have no % in it")
        self._folder: Path | None = None
        self._jobs: list[Any] = []
        self._ended: dict[int, str] = {}
        self._next_look = 0.0

    @property
    def here(self) -> bool:
        """Whether they run on this machine."""
        return self.cluster in ("local", "debug")

    def open(self) -> Path:
        """Make and return their folder, which only the user can look into.

        Raises:
            ConfigError: it cannot be made, or would not be private.
        """
        if self._folder is None:
            self._folder = private_folder(self._parent)
        return self._folder

    def submit(self, functions: Sequence[Callable[[], Any]]) -> int:
        """Have every function called in a job of its own; return the index of the first.

        Raises:
            ConfigError: the scheduler does not take them.
        """
        folder, first = self.open(), len(self._jobs)
        try:
            executor = self._submitit.AutoExecutor(folder=folder, cluster=self.cluster)
            executor.update_parameters(**self._conf)
            if self.cluster == "slurm":  # else 256 at most would run at the same time
                executor.update_parameters(slurm_array_parallelism=len(functions))
            for start in range(0, len(functions), _LARGEST_ARRAY):
                self._jobs += executor.submit_array(functions[start : start + _LARGEST_ARRAY])
        except Exception as err:  # whatever sbatch says, or submitit of a parameter
            raise ConfigError(f"the jobs of {self._what} were not taken: {err}") from err
        for job in self._jobs:
            with contextlib.suppress(OSError):  # the folder keeps others out already
                job.paths.submitted_pickle.chmod(0o600)
        return first

    # -- what became of them ---------------------------------------------------------------------

    def outcome(self, index: int, timeout: float = 0.0) -> str | None:
        """Return how job ``index`` ended, ``None`` if it has not, for all that is known here.

        Args:
            index: Of the job.
            timeout: Seconds to wait for the news of an end that is certain.
        """
        deadline = time.monotonic() + timeout
        self._look()
        while index not in self._ended and time.monotonic() < deadline:
            time.sleep(0.05)  # jobs have nothing that one could wait for
            self._look()
        return self._ended.get(index)

    def _look(self) -> None:
        """Look what has ended, at most every few seconds."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + (_OFTEN if self.here else _FEW)
        asked = False
        for index, job in enumerate(self._jobs):
            if index in self._ended:
                continue
            # The scheduler says in one answer what became of all of them.
            if job.done(force_check=not asked) or job.state.startswith("PREEMPTED"):
                self._ended[index] = self._how(job)
            else:
                asked = True

    def _how(self, job: Any) -> str:
        name = f"({self.cluster} job {job.job_id}, log {job.paths.stderr})"
        if self._has_result(job):
            error = job.exception()
            return f"{name} came to its end" if error is None else f"{name} failed: {_gist(error)}"
        state = job.state.split()[0] if job.state else "UNKNOWN"
        meaning = _MEANINGS.get(state)
        told = f"ended, state {job.state}" + (f" ({meaning})" if meaning else "")
        tail = _last_line(job.paths.stderr)
        return f"{name} {told}" + (f"; the last line of its log is {tail!r}" if tail else "")

    def succeeded(self, index: int) -> bool:
        """Whether the function of a job that has ended returned."""
        return self._has_result(self._jobs[index]) and self.error(index) is None

    def error(self, index: int) -> Exception | None:
        """Return what the function of a job that has ended raised, with its traceback there."""
        job = self._jobs[index]
        error: Exception | None = job.exception() if self._has_result(job) else None
        return error

    def result(self, index: int) -> Any:
        """Return what the function of a job returned."""
        return self._jobs[index].result()

    def _has_result(self, job: Any) -> bool:
        # Otherwise submitit would wait for it.
        found: bool = self.cluster == "debug" or _is_there(job.paths.result_pickle)
        return found

    # -- the end ---------------------------------------------------------------------------------

    def stop(self, timeout: float) -> None:
        """Cancel what still runs after ``timeout`` seconds; remove what holds secrets.

        Processes of this machine are waited for, a few seconds more if they take that to end.
        """
        self._wait_for_end(timeout)
        for job in self._jobs:
            if not self._is_over(job) and not _is_there(job.paths.result_pickle):
                with contextlib.suppress(Exception):  # not found, or ended meanwhile
                    job.cancel(check=False)
        if self.here:
            self._wait_for_end(_LAST_JOBS)
        for job in self._jobs:
            with contextlib.suppress(OSError):
                job.paths.submitted_pickle.unlink(missing_ok=True)

    def _wait_for_end(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and not all(map(self._is_over, self._jobs)):
            time.sleep(0.02)  # jobs have nothing that one could wait for

    def _is_over(self, job: Any) -> bool:
        """Whether a job is known to have ended; asks no scheduler."""
        if self.here:
            return bool(job.done())
        finished = _is_there(job.paths.result_pickle)
        return finished or bool(job.watcher.is_done(job.job_id, mode="cache"))


def _submitit() -> Any:
    try:
        return importlib.import_module("submitit")
    except ImportError as err:
        raise ConfigError(
            "launcher='submitit' and 'submitit_delayed' need submitit: pip install "
            "'gleanrl[submitit]'; launcher='mp' runs nodes on this machine without it"
        ) from err


def _is_there(path: Path) -> bool:
    """Tell whether ``path`` exists; a stale handle of a network's file system says it does not."""
    try:
        return path.exists()
    except OSError:
        return False


def private_folder(parent: Path) -> Path:
    """Make a new folder that nobody but the user can look into.

    Raises:
        ConfigError: it cannot be made there, or would not be private.
    """
    folder = parent / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
        folder.chmod(0o700)  # whatever the umask
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
    """Return the last line of the traceback in what submitit says of a failed job."""
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
        return LOOPBACK if self._jobs.here else outward()

    def launch(self, invitations: Sequence[Invitation]) -> None:
        first = self._jobs.submit([functools.partial(_serve, each) for each in invitations])
        self._latest.update({each.node: first + n for n, each in enumerate(invitations)})

    def exit_reason(self, node: int, timeout: float) -> str | None:
        job = self._latest.get(node)
        return None if job is None else self._jobs.outcome(job, timeout)

    def stop(self, timeout: float) -> None:
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
