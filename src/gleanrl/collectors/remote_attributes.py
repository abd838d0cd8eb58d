"""Access to attributes and methods by path: of a collector's own objects, or of its workers'."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

from gleanrl.core import messages as m
from gleanrl.core import paths
from gleanrl.core.errors import ConfigError
from gleanrl.engine.engine import Engine


class AttributeAccess:
    """Reads and calls the objects of one collector, which is in this process."""

    def __init__(
        self, root: Any, alone: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        """Begin paths at ``root``, a weak proxy; ``alone`` suspends collection during a block."""
        self._root, self._alone = root, alone
        self.away: Engine | None = None
        """Has environment and policy in its only worker, if they have left this process."""

    def _is_away(self, path: str) -> bool:
        return self.away is not None and re.match(r"(env|policy)\b", path) is not None

    def cascade_execute(self, attr_path: str, *args: Any, **kwargs: Any) -> Any:
        """Resolve a path such as ``"env.transform[0]"`` and call it; return it if not callable.

        With workers, in every worker: one result each, ``None`` for one that was lost (where that
        is tolerated).

        Raises:
            AttributeError: an attribute is missing.
            ValueError: arguments for something that is not callable.
        """
        if self.away is not None and self._is_away(attr_path):
            return self.away.request(0, m.Call(attr_path, args, kwargs))
        with self._alone():
            return paths.call(self._root, attr_path, args, kwargs)

    def get_distant_attr(self, attr: str) -> Any:
        """Return the object at a path such as ``"policy.module"`` or ``"worker_idx"``.

        With workers, the path begins at a worker's collector, and there is one entry per worker,
        ``None`` for one that was lost. Of a replay buffer that the learner writes into, every
        worker has the learner's.
        """
        if self.away is not None and self._is_away(attr):
            return self.away.request(0, m.Get(attr))
        return paths.resolve(self._root, attr)

    def getattr_policy(self, attr: str) -> Any:
        """Return an attribute of the policy that runs; of the first worker's, if there are several.

        Raises:
            AttributeError: it has none of that name.
        """
        return self.get_distant_attr(f"policy.{attr}")

    def getattr_env(self, attr: str) -> Any:
        """Return an attribute of the environment; of the first worker's, if there are several.

        Raises:
            AttributeError: it has none of that name.
        """
        return self.get_distant_attr(f"env.{attr}")

    def getattr_rb(self, attr: str) -> Any:
        """Return an attribute of the replay buffer.

        Raises:
            AttributeError: it has none of that name.
        """
        return paths.resolve(self._root, f"replay_buffer.{attr}")

    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[Sequence[Any]] | None = None,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        """Call a method once per entry of the argument lists and return the results.

        With workers, once in every worker, each with its own arguments; one that was lost (where
        that is tolerated) answers ``None``.

        Args:
            method_name: The method, or a path such as ``"policy.module.train"``; with workers it
                begins at the worker's collector.
            list_of_args: Positional arguments of each call.
            list_of_kwargs: Arguments by name of each call. Without either list there is one call,
                or one per worker.

        Raises:
            ConfigError: the lists differ in length, or from the number of workers.
            AttributeError: the method does not exist or is not callable.
        """
        args = None if list_of_args is None else list(list_of_args)
        kwargs = None if list_of_kwargs is None else list(list_of_kwargs)
        count = len(args if args is not None else kwargs if kwargs is not None else [()])
        args, kwargs = args or [()] * count, kwargs or [{}] * count
        if len(args) != len(kwargs):
            raise ConfigError(
                "list_of_args and list_of_kwargs must have the same length, one entry per call: "
                f"they have {len(args)} and {len(kwargs)}"
            )
        with self._alone():
            if self._is_away(method_name):
                target: Any = partial(self.cascade_execute, method_name)
            else:
                target = self.get_distant_attr(method_name)
            if not callable(target):  # the error callers of a missing method expect
                raise AttributeError(f"{method_name!r} is a {type(target).__name__}, not a method")
            return [target(*a, **k) for a, k in zip(args, kwargs, strict=True)]


class WorkerAttributeAccess(AttributeAccess):
    """Reads and calls the objects of the workers of an engine; one result per worker."""

    def __init__(self, engine: Engine, buffer: Any, shared: bool) -> None:
        """Ask the workers of ``engine``, and for the replay ``buffer`` if it is ``shared``."""
        super().__init__(SimpleNamespace(replay_buffer=buffer), partial(engine.turn, None))
        self._engine, self._owns_buffer = engine, buffer is not None and not shared

    def _is_learners(self, path: str) -> bool:
        """Whether ``path`` leads into a replay buffer that this process alone writes into."""
        return self._owns_buffer and re.match(r"replay_buffer\b", path) is not None

    def cascade_execute(self, attr_path: str, *args: Any, **kwargs: Any) -> Any:
        count = self._engine.workers
        return self.map_fn(attr_path, [args] * count, [kwargs] * count)

    def get_distant_attr(self, attr: str) -> Any:
        if self._is_learners(attr):
            with self._alone():
                return [paths.resolve(self._root, attr)] * self._engine.workers
        return self._engine.request_all(m.Get(attr))

    def getattr_policy(self, attr: str) -> Any:
        return self._engine.ask(m.Get(f"policy.{attr}"))

    def getattr_env(self, attr: str) -> Any:
        return self._engine.ask(m.Get(f"env.{attr}"))

    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[Sequence[Any]] | None = None,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        count = self._engine.workers
        args = [()] * count if list_of_args is None else list(list_of_args)
        kwargs: list[Any] = [{}] * count if list_of_kwargs is None else list(list_of_kwargs)
        for what, entries in (("argument", args), ("keyword-argument", kwargs)):
            if len(entries) != count:
                raise ConfigError(
                    f"Expected {count} {what} entries, one per worker, got {len(entries)}"
                )
        each = list(zip(args, kwargs, strict=True))
        if self._is_learners(method_name):
            with self._alone():
                return [paths.call(self._root, method_name, a, k) for a, k in each]
        values = self._engine.request_each(
            {worker: m.Call(method_name, tuple(a), dict(k)) for worker, (a, k) in enumerate(each)}
        )
        return [values.get(worker) for worker in range(count)]
