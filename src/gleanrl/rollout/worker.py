"""One worker: carries out commands on its source and answers each with one reply."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from gleanrl.core import messages as m
from gleanrl.core.protocols import Source, SourceFactory, Stop
from gleanrl.memory.window import RolloutWindow

OpenWindow = Callable[[m.WindowRef], RolloutWindow]


class Mailbox(Protocol):
    """Where weights lie that nobody sent a message about."""

    def bind(self, model_id: str, board: m.BoardRef) -> None:
        """Look at ``board`` for the weights of ``model_id`` from now on."""
        ...

    def newest(self) -> m.Snapshot | None:
        """Return the newest snapshot if it was not returned before."""
        ...


class Worker:
    """A source and its number. Knows nothing of how messages travel."""

    def __init__(
        self,
        index: int,
        factory: SourceFactory,
        open_window: OpenWindow,
        stop: Stop,
        mailbox: Mailbox | None = None,
    ) -> None:
        """Build the source here."""
        self._index = index
        self._open_window = open_window
        self._stop = stop
        self._mailbox = mailbox
        self._serials: dict[str, int] = {}
        self._newest, self._version = 0, 0
        self.source: Source = factory(index)

    def ready(self) -> m.Ready:
        """Say what one step looks like."""
        return m.Ready(self._index, self.source.layout())

    def handle(self, ticket: int, command: m.Command) -> m.Reply:
        """Carry out ``command``; what the user's code raises becomes a `Failed` reply."""
        try:
            if not isinstance(command, m.Bind | m.Load | m.Close):
                self._refresh()  # whoever asks for the state gets what was published before
            if isinstance(command, m.Collect):
                return m.Rolled(self._index, ticket, self._collect(command))
            return m.Done(self._index, ticket, self._other(command))
        except Exception as err:
            return m.Failed(self._index, ticket, err)

    def _refresh(self) -> None:
        if self._mailbox is not None:
            snapshot = self._mailbox.newest()
            if snapshot is not None:
                self._load(snapshot)

    def _collect(self, command: m.Collect) -> m.Report:
        window = self._open_window(command.window)
        return self.source.collect(window, command.window.steps, self._stop, command.random)

    def _load(self, snapshot: m.Snapshot) -> None:
        """Load what is newer than what was loaded: messages and memory may overtake each other."""
        serial, models = snapshot.serial, snapshot.models
        version = snapshot.version if serial >= self._newest else self._version
        newer = {name: w for name, w in models.items() if serial >= self._serials.get(name, 0)}
        self.source.load(m.Snapshot(version, newer, serial))
        self._newest, self._version = max(serial, self._newest), version
        self._serials.update(dict.fromkeys(newer, serial))

    def _other(self, command: m.Command) -> Any:
        source = self.source
        match command:
            case m.Load(snapshot):
                return self._load(snapshot)
            case m.Bind(model_id, board) if self._mailbox is not None:
                return self._mailbox.bind(model_id, board)
            case m.Place(base, stride):
                return source.place(base, stride)
            case m.Seed(seed, static, stream):
                return source.seed(seed, static, stream)
            case m.Reset(envs, options):
                return source.reset(envs, options or {})
            case m.GetState():
                return source.state()
            case m.SetState(state, strict):
                return source.load_state(state, strict)
            case m.Call(path, args, kwargs):
                return source.call(path, *args, **(kwargs or {}))
            case m.Get(path):
                return source.get(path)
            case _:
                return source.close()
