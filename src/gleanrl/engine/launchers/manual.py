"""Nodes that somebody else starts: by hand, with mpirun, kubectl, or any scheduler."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from gleanrl.engine.launchers.address import outward
from gleanrl.engine.launchers.jobs import private_folder
from gleanrl.rollout.handshake import SECRET, Invitation

_FOLDER = "~/.cache/gleanrl"


class ManualLauncher:
    """Says which commands start the nodes, and starts nothing itself.

    The commands never show the secret. If the learner has one of the user's in its environment,
    nodes need the same one in theirs; else it lies in a file that only the user can read, where
    the commands take it from.
    """

    def __init__(self, tell: Callable[[str], object] = sys.stderr.write) -> None:
        """Say nothing yet.

        Args:
            tell: Given the text that has the commands; by default standard error is.
        """
        self._tell = tell
        self._file: Path | None = None

    def address(self) -> str:
        """Return an address of this machine that others reach it by."""
        return outward()

    def launch(self, invitations: Sequence[Invitation]) -> None:
        """Say how the nodes are started."""
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

    def fate(self, node: int, timeout: float) -> str | None:
        """Return ``None``: who started it knows."""
        return None

    def stop(self, timeout: float) -> None:
        """Remove the secret; nodes end with their connections."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.unlink()
                file.parent.rmdir()
