"""Environments in processes of their own: many as one batch, or one to inspect."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import cloudpickle
import torch
from tensordict import TensorDictBase

from gleanrl.core import messages as m
from gleanrl.core.errors import (
    ClosedError,
    CollectorTimeout,
    ConfigError,
    WorkerDied,
    for_users,
)
from gleanrl.core.keys import Key
from gleanrl.core.options import check_int, seconds
from gleanrl.engine.session import Session
from gleanrl.envs.base import EnvBase
from gleanrl.envs.factory import EnvFactory, check_factories, check_ignored, per_env
from gleanrl.envs.parallel_worker import STEP, EnvWorkerBuilder
from gleanrl.envs.row_env import Row, RowEnv, write_inputs
from gleanrl.envs.tensordict import EnvMetaData, EnvSpecs, check_alike, widened
from gleanrl.envs.unmodified import Methods, remembered
from gleanrl.parallel.env_workers import CONTROL_S, EnvWorkers
from gleanrl.parallel.worker_rows import WorkerRows
from gleanrl.transport.interrupts import Deferred
from gleanrl.transport.process import ProcessBackend

_CLOSE_S = 10.0
_made = itertools.count()


@remembered
class ParallelEnv(RowEnv):
    """``num_envs`` environments of one kind in ``num_workers`` processes, one batch.

    Gives the data of a `SerialEnv` of the same environments, under the same seed. Processes are
    started on first use; until then it can be pickled, and be handed to collectors with workers.
    Data pass through shared memory, so environments must have a fixed layout; returned data are
    yours and never change.

    Example:
        >>> env = ParallelEnv(2, "CartPole-v1")
        >>> env.rollout(3)["observation"].shape
        torch.Size([2, 3, 4])
        >>> env.close()
    """

    @for_users
    def __init__(
        self,
        num_workers: int,
        create_env_fn: EnvFactory | Sequence[EnvFactory],
        *,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        num_envs: int | None = None,
        device: torch.device | str | None = None,
        num_sub_threads: int = 1,
        timeout: float | None = None,
        shutdown_timeout: float = _CLOSE_S,
        **torchrl: Any,
    ) -> None:
        """Remember the arguments; make nothing yet.

        Args:
            num_workers: Processes.
            create_env_fn: An id, or a callable that makes one environment per call; or one of
                these for each environment. Called in the worker.
            create_env_kwargs: Arguments of the callable, or of each of them.
            num_envs: Environments; each worker steps several if they are more than workers.
                ``num_workers`` by default.
            device: Device of returned data; the environments' own by default.
            num_sub_threads: torch threads of each worker.
            timeout: Seconds that one step or reset may take; then workers are killed. ``None``
                waits as long as they live.
            shutdown_timeout: Seconds that `close` waits for workers; then they are killed.
            torchrl: TorchRL's other arguments; data are the same whatever they say.

        Raises:
            ConfigError: arguments that are wrong or do not fit together.
        """
        check_ignored(ParallelEnv, torchrl)
        self._close_s = seconds("shutdown_timeout", shutdown_timeout)
        self.num_workers = check_int("num_workers", num_workers, least=1)
        number = self.num_workers if num_envs is None else check_int("num_envs", num_envs, least=1)
        if number < self.num_workers:
            raise ConfigError(
                f"num_envs ({number}) must be at least num_workers ({self.num_workers}): a worker "
                "without an environment has nothing to do"
            )
        counted = "num_workers" if num_envs is None else "num_envs"
        self._factories = per_env("create_env_fn", create_env_fn, number, counted)
        self._kwargs = per_env("create_env_kwargs", create_env_kwargs or {}, number, counted)
        check_factories(self._factories)
        self._threads = check_int("num_sub_threads", num_sub_threads, least=1)
        self._timeout = timeout if timeout is None else seconds("timeout", timeout)
        self.num_envs = number
        EnvBase.__init__(self, device=device)
        self._started: EnvWorkers | None = None
        self._worker_rows: WorkerRows | None = None

    # -- start and end ---------------------------------------------------------------------------

    @property
    def _env_specs(self) -> EnvSpecs:
        self.start()
        return super()._env_specs

    def start(self) -> None:
        """Start the processes and make the environments in them. Idempotent.

        Called by whatever needs them first.

        Raises:
            ClosedError: after `close`.
            ConfigError: environments that do not fit together, or that cannot be sent.
        """
        if self._started is not None:
            return
        self._check_open()
        each, more = divmod(self.num_envs, self.num_workers)
        ends = [each * w + min(w, more) for w in range(self.num_workers + 1)]
        self._parts = [slice(*pair) for pair in itertools.pairwise(ends)]
        stream = _stream()
        factories = [
            (self._factories[part], self._kwargs[part], stream + part.start) for part in self._parts
        ]
        workers = self._started = EnvWorkers(factories, self._threads, self._timeout)
        try:
            self._join(workers)
        except BaseException:
            self._started = None
            workers.close(5.0)
            raise

    def _join(self, workers: EnvWorkers) -> None:
        found = workers.described()
        first = found[0]
        each = zip(self._parts, found, strict=True)
        check_alike({part.start: (info.batch, info.specs) for part, info in each})
        self.info_entries = first.infos
        self._batch = torch.Size((self.num_envs, *first.batch))
        self._device = first.device if self._device is None else self._device
        self._declare(*(widened(tree, (self.num_envs,)) for tree in first.specs))
        inner = self._batch[1:].numel()
        places = workers.share([(part.stop - part.start) * inner for part in self._parts])
        row = self._row = Row(self)
        row.bind(workers.reserve(row.fields, 1))
        self._direct = all(info.direct for info in found)
        self._given = row.views
        if self._direct:
            self._given = {key: row.views[key] for key in row.actions}
        self._present = set(self._given)
        carries: Sequence[m.WindowRef | None] = [None] * len(found)
        if all(info.rows == first.rows for info in found) and first.rows is not None:
            self._worker_rows = WorkerRows(workers, first.rows, self._batch)
            carries = workers.references(self._worker_rows.carry)
        rows = workers.references(row.window)
        shared = zip(places, rows, carries, strict=True)
        commands = {w: m.Call("share", each) for w, each in enumerate(shared)}
        workers.session.request_each(dict(commands), CONTROL_S)

    @property
    def rows(self) -> WorkerRows:  # type: ignore[override]  # made at the start
        """The environments as rows in workers. Internal to the package."""
        assert self._worker_rows is not None
        return self._worker_rows

    def is_face(self) -> bool:
        """Tell whether workers step rows, which a collector can have them do directly."""
        if not super().is_face():
            return False
        self.start()
        return self._worker_rows is not None

    def _check_open(self) -> None:
        if self.is_closed:
            raise ClosedError("the environment was closed; make a new one")

    def _close(self) -> None:
        if self._started is not None:
            self._started.close(self._close_s, raise_on_error=True)

    @contextmanager
    def _workers(self) -> Iterator[EnvWorkers]:
        """Return the workers, after finishing an interrupted step.

        Ctrl-C comes while workers are waited for. A worker that is lost, or that takes too long,
        ends all: no step could be finished any more.
        """
        self._check_open()
        self.start()
        assert self._started is not None
        try:
            with Deferred():
                self._started.settle()
                yield self._started
        except (WorkerDied, CollectorTimeout):
            self.is_closed = True
            self._started.close(1.0)
            raise

    def _ask(self, commands: Mapping[int, m.Command] | m.Command, seconds: float | None) -> Any:
        """Carry out one command for each worker, or the same for all; return their values."""
        with self._workers() as workers:
            if not isinstance(commands, Mapping):
                commands = dict.fromkeys(range(self.num_workers), commands)
            return list(workers.pause().request_each(commands, seconds).values())

    def __getstate__(self) -> dict[str, Any]:
        if self._started is not None:
            raise ConfigError(
                "a ParallelEnv that has been started cannot be sent to another process; send it "
                "before its first use, or a callable that makes one"
            )
        # By value: lambdas and functions of a script must reach processes that cannot import them.
        return {"made_by": cloudpickle.dumps(self.__dict__)}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(cloudpickle.loads(state["made_by"]))

    # -- stepping --------------------------------------------------------------------------------

    def step_and_maybe_reset(
        self, tensordict: TensorDictBase
    ) -> tuple[TensorDictBase, TensorDictBase]:
        """Step; return the finished step and the next root data, reset where an episode ended.

        One order to each worker, where `step` and `maybe_reset` take two; those are called where
        a method was replaced.
        """
        if not _STEPPING.kept_by(self):
            return super().step_and_maybe_reset(tensordict)
        self._advance(tensordict, and_reset=True)
        row, device = self._row, self.device
        finished = self._finish(tensordict, self._complete(row.copy(row.after, device)))
        following = self.step_mdp(finished)
        if self._env_specs.ends.any(following):
            following.update(self._complete(row.copy(row.root, device)))
        return finished, following

    def _advance(self, data: TensorDictBase, and_reset: bool = False) -> None:
        """Have all workers step; results come into the row.

        Rows need all inputs; environments with TensorDicts get those that ``data`` have.
        """
        with self._workers() as workers:
            given = self._given
            if not self._direct:
                names = set(data.keys())
                given = {
                    key: view
                    for key, view in given.items()
                    if key[0] in names and data.get(key, None) is not None
                }
            write_inputs(data, given, casts=self._direct)
            if given.keys() != self._present:
                self._present = set(given)
                self._ask(m.Call("take", (tuple(given),)), CONTROL_S)
            workers.give(STEP, 0, 0, and_reset)
            workers.settle()

    def reset_row(self, masks: Mapping[Key, torch.Tensor], options: Mapping[str, Any]) -> None:
        """Have workers reset within the row: all environments, or those in the masks."""
        calls: dict[int, m.Command] = {}
        for worker, part in enumerate(self._parts):
            own = {key: mask[part] for key, mask in masks.items()}
            if not masks or any(bool(mask.any()) for mask in own.values()):
                calls[worker] = m.Call("restart", (own, options))
        self._ask(calls, self._timeout)

    # -- everything else -------------------------------------------------------------------------

    def get_attr(self, path: str) -> list[Any]:
        """Return the object at ``path`` in every environment: ``"members[0].unwrapped.gravity"``.

        Raises:
            AttributeError: there is nothing of that name.
        """
        return self._all(m.Call("envs.get_attr", (path,)))

    def call(self, path: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call the method at ``path`` in every environment; return one result for each."""
        return self._all(m.Call("envs.call", (path, *args), kwargs))

    def _all(self, command: m.Command) -> list[Any]:
        return [value for values in self._ask(command, CONTROL_S) for value in values]

    def _set_seed(self, seed: Any, static: bool = False) -> None:
        each = self.batch_size[1:].numel()
        firsts = [seed if static else seed + part.start * each for part in self._parts]
        self._ask({w: m.Seed(first, static) for w, first in enumerate(firsts)}, CONTROL_S)

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]  # of environments
        """Return the state of every environment, ``"worker0"`` and so on."""
        found = self._ask(m.GetState(), CONTROL_S)
        states = [state[f"worker{i}"] for state in found for i in range(len(state))]
        return {f"worker{i}": state for i, state in enumerate(states)}

    def load_state_dict(  # type: ignore[override]  # of environments
        self, state_dict: Mapping[str, Any], strict: bool = True
    ) -> None:
        """Restore what `state_dict` returned; not strict, the environments it has a state for.

        Raises:
            ConfigError: the state of another number of environments, and ``strict`` is true.
        """
        if strict and len(state_dict) != self.num_envs:
            raise ConfigError(
                f"the state is that of {len(state_dict)} environments, there are {self.num_envs}"
            )
        states = {}
        for worker, part in enumerate(self._parts):
            envs = enumerate(f"worker{env}" for env in range(part.start, part.stop))
            own = {f"worker{i}": state_dict[env] for i, env in envs if env in state_dict}
            states[worker] = m.SetState(own, strict)
        self._ask(states, CONTROL_S)

    def __repr__(self) -> str:
        return f"ParallelEnv({self.num_envs} environments in {self.num_workers} workers)"


_STEPPING = Methods(ParallelEnv, ("step", "_step", "reset", "_reset", "step_mdp", "maybe_reset"))


def _stream() -> int:
    """Return the seed of workers' random streams, without drawing from the learner's."""
    generator = torch.Generator()
    generator.set_state(torch.get_rng_state())
    return int(torch.randint(1 << 40, (), generator=generator)) + (next(_made) << 20)


class EnvCreator:
    """Makes environments by a callable, which travels to other processes by value.

    Example:
        >>> from gleanrl.envs import GymEnv
        >>> make = EnvCreator(lambda: GymEnv("Pendulum-v1"))
        >>> make().action_spec.shape, make.meta_data.batch_size
        (torch.Size([1]), torch.Size([]))
    """

    def __init__(
        self,
        create_env_fn: Callable[..., Any],
        create_env_kwargs: Mapping[str, Any] | None = None,
        share_memory: bool = True,
    ) -> None:
        """Remember the callable; make nothing yet.

        Args:
            create_env_fn: Returns a new environment at every call.
            create_env_kwargs: Its arguments.
            share_memory: Accepted for compatibility: environments share no state here.

        Raises:
            ConfigError: ``create_env_fn`` cannot be called.
        """
        if not callable(create_env_fn):
            raise ConfigError(f"create_env_fn ({create_env_fn!r:.100}) must be callable")
        self._make = create_env_fn
        self._kwargs = dict(create_env_kwargs or {})
        self._meta_data: EnvMetaData | None = None

    def __call__(self, **kwargs: Any) -> Any:
        """Make an environment; ``kwargs`` add to those given at construction."""
        return self._make(**{**self._kwargs, **kwargs})

    def make_variant(self, **kwargs: Any) -> EnvCreator:
        """Return a creator with other arguments."""
        return EnvCreator(self._make, {**self._kwargs, **kwargs})

    @property
    def meta_data(self) -> EnvMetaData:
        """The description of the environments.

        One is made for that at the first access, in a process of its own, and closed.
        """
        if self._meta_data is None:
            # In a process of its own: making one may take over a display, a GPU or much memory.
            factory = EnvWorkerBuilder((self._make,), (self._kwargs,), torch.initial_seed())
            engine = Session(lambda _: ProcessBackend(), [factory])
            try:
                self._meta_data = engine.request(0, m.Call("meta_data"))
            finally:
                engine.close(5.0)
        return self._meta_data

    def __getstate__(self) -> dict[str, Any]:
        # By value: lambdas and functions of a script must reach processes that cannot import them.
        return {"made_by": cloudpickle.dumps((self._make, self._kwargs))}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self._make, self._kwargs = cloudpickle.loads(state["made_by"])
        self._meta_data = None
