"""Nodes that are started by hand, with mpirun, kubectl, or any scheduler."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import distributed

from gleanrl.core.deadline import Deadline
from gleanrl.core.errors import CollectorTimeout, ConfigError
from gleanrl.transport.addresses import LOOPBACK, outward
from gleanrl.transport.handshake import SECRET, Invitation, secret_from
from gleanrl.transport.launchers.submitit import private_folder
from gleanrl.transport.node_endpoint import run_node

_FOLDER = "~/.cache/gleanrl"


class ManualLauncher:
    """Prints the commands that start the nodes.

    The commands never show the secret. If the learner has a secret of the user's in its
    environment, nodes need the same one in theirs; else the commands read it from a file that only
    the user can read.
    """

    def __init__(self, tell: Callable[[str], object] | None = None) -> None:
        """Print nothing yet; ``tell`` gets the text with the commands, else the standard error."""
        self._tell = tell or (lambda text: print(text, end="", file=sys.stderr))  # noqa: T201
        self._file: Path | None = None

    def address(self) -> str:
        return outward()

    def launch(self, invitations: Sequence[Invitation]) -> None:
        first = invitations[0]
        if SECRET in os.environ:
            before, where = "", f"with the {SECRET} of this process in its environment"
        else:
            if self._file is None:  # else: some take the place of others
                self._file = private_folder(Path(_FOLDER).expanduser()) / "secret"
                with open(
                    os.open(self._file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb"
                ) as out:
                    out.write(first.secret)
            before = f"{SECRET}=$(cat {self._file}) "
            where = "where this file can be read"
        place = f"{first.host}:{first.port}"
        commands = "".join(
            f"  {before}python -m gleanrl node {place} --node {each.node}\n" for each in invitations
        )
        count = len(invitations)
        self._tell(
            f"gleanrl: waiting at {place} for {count} {'node' if count == 1 else 'nodes'}; start "
            f"each {where}:\n{commands}"
        )

    def exit_reason(self, node: int, timeout: float) -> str | None:
        return None

    def stop(self, timeout: float) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.unlink()
                file.parent.rmdir()


_STORE_TIMEOUT_S = 60.0
"""Seconds the store may take to answer."""
_STORE_LOOK_S = 0.05
"""Seconds between two looks into it."""


class _Job:
    """The environment variables that torchrun gives its processes."""

    def __init__(self) -> None:
        env, needed = os.environ, ("RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR")
        if missing := [name for name in needed if name not in env]:
            raise ConfigError(
                f"launcher='torchrun' is for scripts started by torchrun: {', '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} not in the environment; run: torchrun "
                "--nproc-per-node N script.py, with a rank more than there are nodes"
            )
        self.rank, self.size, self.port = (int(env[name]) for name in needed[:3])
        self.host = env["MASTER_ADDR"]
        self.local = env.get("LOCAL_WORLD_SIZE") == env["WORLD_SIZE"]
        """Whether all ranks are on this machine."""
        self.kept = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        """Whether torchrun keeps the store; else rank 0 does."""
        self.attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")

    def key(self, name: str) -> str:
        """Return a key of the store: of the learner's address, or of why a node ended."""
        return f"gleanrl/{self.attempt}/{name}"

    def store(self, timeout_s: float) -> Any:
        """Connect to the store; rank 0 also keeps it if torchrun does not."""
        keeping: dict[str, Any] = {}
        if not self.kept and self.rank == 0:
            listener = socket.create_server((self.host, self.port))
            keeping = {"is_master": True, "master_listen_fd": listener.detach()}
        c10d: Any = distributed  # the stubs leave it out
        timeout = timedelta(seconds=timeout_s)
        return c10d.TCPStore(
            self.host, self.port, timeout=timeout, wait_for_workers=False, **keeping
        )


class TorchrunLauncher:
    """Tells the other ranks where the learner is."""

    def __init__(self) -> None:
        self._job = _Job()

    @functools.cached_property
    def _store(self) -> Any:
        return self._job.store(_STORE_TIMEOUT_S)

    def address(self) -> str:
        return LOOPBACK if self._job.local else outward(self._job.host)

    def launch(self, invitations: Sequence[Invitation]) -> None:
        nodes = len(invitations)
        if nodes != self._job.size - 1:
            raise ConfigError(
                f"torchrun has started {self._job.size} ranks, which is a learner and "
                f"{self._job.size - 1} nodes, but create_env_fn has {nodes}; start {nodes + 1} "
                "ranks, or give as many environments as there are nodes"
            )
        first = invitations[0]
        notice = {"host": first.host, "port": first.port}
        if SECRET not in os.environ:
            notice["secret"] = first.secret.decode()
        self._store.set(self._job.key("learner"), json.dumps(notice))

    def exit_reason(self, node: int, timeout: float) -> str | None:
        key, deadline, store = self._job.key(f"ended/{node}"), Deadline(timeout), self._store
        try:
            # Not `wait`, which prints a warning when its time is up.
            while not store.check([key]):
                if deadline.expired:
                    return None
                time.sleep(_STORE_LOOK_S)
        except RuntimeError:  # the store is gone
            return None
        return f"(rank {node + 1}) {store.get(key).decode()}"

    def stop(self, timeout: float) -> None:
        """Do nothing: ranks are torchrun's, and nodes end with their connections."""


def serve_as_rank(timeout_s: float) -> None:
    """In any rank but 0, be a node until the learner ends; in rank 0 do nothing.

    The node waits ``timeout_s`` seconds for the address of rank 0.

    Raises:
        ConfigError: this process was not started by torchrun.
    """
    job = _Job()
    if job.rank == 0:
        return
    node = job.rank - 1
    store = job.store(timeout_s)
    try:
        notice = json.loads(store.get(job.key("learner")))
    except distributed.DistStoreError as err:
        raise CollectorTimeout(
            f"rank 0 has built no collector with launcher='torchrun' within {timeout_s:.0f} s "
            f"after rank {job.rank} did; raise start_timeout if it needs longer"
        ) from err
    secret = secret_from(os.environ.get(SECRET) or notice["secret"])
    invitation = Invitation(notice["host"], notice["port"], node, secret, timeout_s)
    main = threading.current_thread() is threading.main_thread()
    try:
        run_node(
            invitation,
            (signal.SIGTERM, signal.SIGINT) if main else (),
            f"rank {job.rank}: torchrun, or whoever runs it, ends the job",
        )
    except Exception as err:
        store.set(job.key(f"ended/{node}"), f"failed: {type(err).__name__}: {err}")
        raise
    raise SystemExit(0)
