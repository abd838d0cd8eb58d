"""One worker: carries out commands on its source and answers each with one reply."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gleanrl.core import messages as m
from gleanrl.core.protocols import Source, SourceFactory, Stop
from gleanrl.memory.window import RolloutWindow

OpenWindow = Callable[[m.WindowRef], RolloutWindow]


class Worker:
    """A source and its number. Knows nothing of how messages travel."""

    def __init__(
        self, index: int, factory: SourceFactory, open_window: OpenWindow, stop: Stop
    ) -> None:
        """Build the source here."""
        self._index = index
        self._open_window = open_window
        self._stop = stop
        self.source: Source = factory(index)

    def ready(self) -> m.Ready:
        """Say what one step looks like."""
        return m.Ready(self._index, self.source.layout())

    def handle(self, command: m.Command) -> m.Reply:
        """Carry out ``command``; what the user's code raises becomes a `Failed` reply."""
        try:
            if isinstance(command, m.Collect):
                return self._collect(command)
            return m.Done(self._index, self._other(command))
        except Exception as err:
            return m.Failed(self._index, err)

    def _collect(self, command: m.Collect) -> m.Reply:
        window = self._open_window(command.window)
        report = self.source.collect(window, command.window.steps, self._stop, command.random)
        return m.Rolled(self._index, command.sequence, report)

    def _other(self, command: m.Command) -> Any:
        source = self.source
        match command:
            case m.Load(snapshot):
                return source.load(snapshot)
            case m.Seed(seed, static):
                return source.seed(seed, static)
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
