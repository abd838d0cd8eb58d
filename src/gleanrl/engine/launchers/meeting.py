"""A folder where a learner and nodes find each other that were started before it was there.

One file, replaced as a whole, says what the main job is at; only the main job writes it. Whoever
has submitted the jobs keeps notes beside it of nodes that have ended. The folder is readable by the
user alone, because the secret lies there.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from gleanrl.core.errors import CollectorTimeout, GleanError
from gleanrl.rollout.handshake import Invitation

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
class Notice:
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
    patience: float = 0.0
    """Seconds that it does."""


class Meeting:
    """The folder, for everybody."""

    def __init__(self, folder: Path) -> None:
        """Use ``folder``."""
        self._folder = folder

    def read(self) -> Notice | None:
        """Return what the main job is at, ``None`` if that cannot be read now.

        It has not started, or a file system on a network shows what is not there any more, or only
        a part of what is: the next look will tell.
        """
        # On a network this also drops what this host remembers of the folder.
        with contextlib.suppress(OSError):
            os.listdir(self._folder)
        try:
            return Notice(**json.loads((self._folder / "learner.json").read_text()))
        except ValueError:
            return None
        except OSError as err:
            if err.errno not in _PASSING:
                raise
            return None

    def write(self, notice: Notice) -> None:
        """Replace the notice."""
        self._put("learner.json", json.dumps(asdict(notice)))

    def note_end(self, node: int, how: str) -> None:
        """Keep that node ``node`` has ended, unless somebody has said so before."""
        if self.end_of(node) is None:
            with contextlib.suppress(OSError):  # the folder is gone: nobody asks any more
                self._put(f"ended-{node}", how)

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

    def next_learner(self, after: int, timeout: float) -> Notice | None:
        """Wait for the learner after number ``after``; return ``None`` if there will be none.

        Raises:
            CollectorTimeout: the main job did not start within ``timeout`` seconds.
            GleanError: it is dead.
        """
        start = heard = time.monotonic()
        last: Notice | None = None
        while True:
            notice, now = self.read(), time.monotonic()
            if notice is not None:
                if notice.over:
                    return None
                if notice.serial > after and notice.host:
                    return notice
            if notice not in (None, last):
                last, heard = notice, now
            elif last is not None and now - heard > _SILENCE:
                raise GleanError(f"the main job has shown no sign of life for {_SILENCE:.0f} s")
            elif last is None and now - start > timeout:
                raise CollectorTimeout(f"the main job did not start within {timeout:.0f} s")
            # No file system on a network tells of a change.
            time.sleep(_LOOK if now - start < _SOON else _LAZY_LOOK)


class Keeper:
    """The main job's pen: keeps the notice, and shows that the job is alive."""

    def __init__(self, folder: Path) -> None:
        """Say that the main job has started."""
        self._meeting = Meeting(folder)
        self._lock = threading.Lock()
        self._notice = Notice()
        self._ended = threading.Event()
        self._change()
        threading.Thread(target=self._beat, name="gleanrl keeper", daemon=True).start()

    def _change(self, **fields: float | str | bool) -> None:
        """Write a changed notice; where that fails for the moment, the next sign of life does."""
        with self._lock:
            if self._notice.over:
                return
            changed = replace(self._notice, **fields)  # type: ignore[arg-type]
            self._notice = replace(changed, beat=changed.beat + 1)
            try:
                self._meeting.write(self._notice)
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
            serial=self._notice.serial + 1,
            host=first.host,
            port=first.port,
            secret=first.secret.decode(),
            nodes=len(invitations),
            patience=first.patience,
        )

    def dismiss(self) -> None:
        """Say that the latest learner waits no longer."""
        self._change(host="", secret="")

    def close(self) -> None:
        """Say that there will be no further learner."""
        self._ended.set()
        self._change(over=True, host="", secret="")

    def end_of(self, node: int) -> str | None:
        """Return how node ``node`` ended, ``None`` if nobody has said so."""
        return self._meeting.end_of(node)
