"""Environments in processes of their own: many as one batch, or one to inspect."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDictBase

from gleanrl.core import messages as m
from gleanrl.core.by_value import ByValue
from gleanrl.core.errors import ClosedError, CollectorTimeout, ConfigError, WorkerDied, for_users
from gleanrl.core.keys import Key
from gleanrl.core.options import GymOptions, check_int, seconds
from gleanrl.core.retry_limits import read_retry_limit
from gleanrl.engine.session import Session
from gleanrl.envs.base import EnvBase
from gleanrl.envs.factory import EnvFactory, check_factories, check_ignored, per_env
from gleanrl.envs.row_env import Row, RowEnv, write_inputs
from gleanrl.envs.state_kinds import Node
from gleanrl.envs.tensordict_envs import EnvMetaData, EnvSpecs, check_alike, widened
from gleanrl.operations.proofs import Methods, remembered
from gleanrl.parallel.env_workers import EnvWorkersPlan, WorkerGroup
from gleanrl.parallel.inside_env_worker import STEP, EnvWorkerBuilder
from gleanrl.parallel.inside_env_worker_group import EnvGroupInfo
from gleanrl.parallel.worker_rows import WorkerRows
from gleanrl.transport.interrupts import Deferred
from gleanrl.transport.process import ProcessBackend
from gleanrl.transport.verifying import Verifiable

_CLOSE_S = 10.0


@remembered
class ParallelEnv(RowEnv, Verifiable):
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
        on_failure: str = "raise",
        max_relaunches: int | tuple[int, float] = 3,
        shutdown_timeout: float = _CLOSE_S,
        sharing: EnvWorkersPlan | None = None,
        first_worker: int = 0,
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
            on_failure: The reaction to a worker that dies or is late. ``"raise"`` raises and closes
                all. ``"relaunch"`` replaces it, with a warning. The step that it did not make
                returns its environments as truncated, with reward 0 and the observations that the
                step was given (zeros if it was given none); then they are to be reset, as after any
                end. A collector masks that frame instead.
            max_relaunches: As for `MultiSyncCollector`; after that, the error is raised.
            shutdown_timeout: Seconds that `close` waits for workers; then they are killed.
            sharing: The plan of workers that this is one group of environments in.
            first_worker: With ``sharing``, the first of the ``num_workers`` workers.
            torchrl: TorchRL's other arguments; data are the same whatever they say.

        Raises:
            ConfigError: arguments that are wrong or do not fit together.
        """
        check_ignored(ParallelEnv, torchrl)
        self.shutdown_timeout = seconds("shutdown_timeout", shutdown_timeout)
        self.num_workers = check_int("num_workers", num_workers, least=1)
        number = self.num_workers if num_envs is None else check_int("num_envs", num_envs, least=1)
        if number < self.num_workers:
            raise ConfigError(
                f"num_envs ({number}) must be at least num_workers ({self.num_workers}): a worker "
                "without an environment has nothing to do"
            )
        counted = "num_workers" if num_envs is None else "num_envs"
        factories = per_env("create_env_fn", create_env_fn, number, counted)
        kwargs = per_env("create_env_kwargs", create_env_kwargs or {}, number, counted)
        check_factories(factories)
        each, more = divmod(number, self.num_workers)
        ends = [each * w + min(w, more) for w in range(self.num_workers + 1)]
        self._parts = [slice(*pair) for pair in itertools.pairwise(ends)]
        makers = list(zip(factories, kwargs, strict=True))
        if on_failure not in ("raise", "relaunch"):
            raise ConfigError(
                f"on_failure ({on_failure!r}) of a ParallelEnv must be 'raise' or 'relaunch': its "
                "batch cannot have fewer environments"
            )
        allowed = read_retry_limit("max_relaunches", max_relaunches)
        self._plan = sharing or EnvWorkersPlan(
            storing=GymOptions(),
            threads=check_int("num_sub_threads", num_sub_threads, least=1),
            timeout=timeout if timeout is None else seconds("timeout", timeout),
            on_failure=on_failure,
            relaunches=allowed if on_failure == "relaunch" else None,
        )
        self._shares = sharing is not None
        self._number = len(self._plan.groups)
        self._first = sum(len(made) for group in self._plan.groups for made in group.values())
        self._plan.groups.append(
            {first_worker + index: makers[part] for index, part in enumerate(self._parts)}
        )
        self.num_envs = number
        EnvBase.__init__(self, device=device)
        self._group: WorkerGroup | None = None
        self._worker_rows: WorkerRows | None = None
        self._asked_for_rows = False

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
        if self._group is not None:
            return
        self._check_open()
        workers = self._plan.start()
        self._group = workers.groups[self._number]
        try:
            self._join(self._group)
        except BaseException:
            self._group = self._plan.started = None
            workers.close(5.0)
            raise

    def _join(self, group: WorkerGroup) -> None:
        group.stand("described", [()] * self.num_workers, "rows")
        found: list[EnvGroupInfo] = group.ask("described", (), self._plan.start_timeout)
        first = found[0]
        each = zip(self._parts, found, strict=True)
        for part, info in each:
            self._plan.declared[self._first + part.start] = info.batch, info.specs
        check_alike(self._plan.declared)
        self.info_entries = first.infos
        self._batch = torch.Size((self.num_envs, *first.batch))
        self._device = first.device if self._device is None else self._device
        self._declare(*(widened(tree, (self.num_envs,)) for tree in first.specs))
        inner = self._batch[1:].numel()
        places = group.share([(part.stop - part.start) * inner for part in self._parts])
        row = self._row = Row(self)
        row.bind(group.reserve(row.fields, 1))
        self._direct = all(info.direct for info in found)
        self._given = row.views
        if self._direct:
            self._given = {key: row.views[key] for key in row.actions}
        self._present = set(self._given)
        truncates = all(one.truncated for one in self._env_specs.ends.groups)
        if self._plan.relaunches is not None and not (truncates or self._shares):
            raise ConfigError(
                "on_failure='relaunch' truncates environments whose worker is lost, which needs a "
                "'truncated' entry of the environment; add one with env.add_truncated_keys()"
            )
        group.ask_for_good("share", list(zip(places, group.references(row.window), strict=True)))

    @property
    def rows(self) -> WorkerRows:  # type: ignore[override]  # made at the start
        """The environments as rows in workers. Internal to the package."""
        assert self._worker_rows is not None
        return self._worker_rows

    def is_face(self) -> bool:
        """Tell whether workers step rows, which a collector can have them do directly."""
        if not super().is_face():
            return False
        if not self._asked_for_rows:
            self._worker_rows, self._asked_for_rows = self._open_rows(), True
        return self._worker_rows is not None

    def _open_rows(self) -> WorkerRows | None:
        with self._settled() as group:
            opened = self._plan.apart, self._plan.on_failure != "raise"
            found = group.ask("open_rows", opened, self._plan.start_timeout)
            if found[0] is None or any(info != found[0] for info in found):
                if setting := self._plan.only_rows:
                    raise ConfigError(
                        f"{setting}, of a ParallelEnv in a collector or with inference='central', "
                        "needs environments that step in rows and are alike"
                    )
                return None
            group.stand("take_place", [(info, *opened) for info in found], "rows")
            rows = WorkerRows(group, found[0], self._batch)
            # A `ParallelEnv` takes the actions that its specs declare, whatever its members take.
            rows.checks_actions &= self._shares
            group.ask_for_good("open_carry", [(part,) for part in group.references(rows.carry)])
            return rows

    def _check_open(self) -> None:
        if self.is_closed:
            raise ClosedError("the environment was closed; make a new one")

    def _close(self) -> None:
        if self._plan.started is not None:
            self._plan.started.close(self.shutdown_timeout, raise_on_error=True)

    @contextmanager
    def _settled(self) -> Iterator[WorkerGroup]:
        """Return the workers, after finishing an interrupted step.

        Ctrl-C comes while workers are waited for. A worker that is lost, or that takes too long,
        ends all: no step could be finished any more.
        """
        self._check_open()
        self.start()
        group = self._group
        assert group is not None
        try:
            with Deferred():
                group.settle()
                yield group
        except (WorkerDied, CollectorTimeout):
            if not group.workers.session.can_continue:
                self.is_closed = True
                group.workers.close(1.0)
            raise

    def _ask(self, method: str, *arguments: Any, **kwargs: Any) -> list[Any]:
        with self._settled() as group:
            return group.ask(method, *arguments, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        if self._plan.started is not None:
            raise ConfigError(
                "a ParallelEnv that has been started cannot be sent to another process; send it "
                "before its first use, or a callable that makes one"
            )
        return {"made_by": ByValue(self.__dict__)}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state["made_by"].value)

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
        with self._settled() as group:
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
                group.ask_for_good("take", [(tuple(given),)] * self.num_workers)
            group.give(STEP, 0, 0, and_reset)
            group.settle()
            if self._plan.relaunches is not None:
                self._end_lost(group.began_anew(), data)

    def _end_lost(self, lost: Sequence[int], data: TensorDictBase) -> None:
        """End the episodes of the rows ``lost``, whose step with ``data`` was not made."""
        envs = sorted({one // self._batch[1:].numel() for one in lost})
        for key, view in self._row.after.items() if envs else ():
            flag = key in self._row.flags
            given = None if flag or key not in self._row.root else data.get(key, None)
            if given is None:
                view[envs] = flag and key[-1] != "terminated"
            else:
                view[envs] = given[envs].to(view)

    def reset_row(self, masks: Mapping[Key, torch.Tensor], options: Mapping[str, Any]) -> None:
        """Have workers reset within the row: all environments, or those in the masks."""
        given = {}
        for worker, part in enumerate(self._parts):
            own = {key: mask[part] for key, mask in masks.items()}
            if not masks or any(bool(mask.any()) for mask in own.values()):
                given[worker] = own, options
        self._ask("restart", given, self._plan.timeout, begins=not masks)

    # -- everything else -------------------------------------------------------------------------

    def get_attr(self, path: str) -> list[Any]:
        """Return the object at ``path`` in every environment: ``"members[0].unwrapped.gravity"``.

        Raises:
            AttributeError: there is nothing of that name.
        """
        return self._flat(self._ask("envs.get_attr", (path,)))

    def call(self, path: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call the method at ``path`` in every environment; return one result for each."""
        return self._flat(self._ask("envs.call", (path, *args), kwargs=kwargs))

    def _flat(self, found: Iterable[Any]) -> list[Any]:
        """Return one value for each environment: ``None`` if it is lost for good."""
        each = zip(self._parts, found, strict=True)
        return [value for part, own in each for value in own or [None] * (part.stop - part.start)]

    def _set_seed(self, seed: Any, static: bool = False) -> None:
        each = self.batch_size[1:].numel()
        firsts = [seed if static else seed + part.start * each for part in self._parts]
        with self._settled() as group:
            group.ask_for_good("seed", [(first, static) for first in firsts])

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]  # of environments
        """Return the state of every environment, ``"worker0"`` and so on."""
        found = self._ask("state")
        there = next(filter(None, found))  # which stands in for those that are lost
        each = zip(self._parts, found, strict=True)
        states = [
            (own or there)[f"worker{i if own else 0}"]
            for part, own in each
            for i in range(part.stop - part.start)
        ]
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
            states[worker] = own, strict
        with self._settled() as group:
            group.forget_standing(lambda what: what != "seed")
            group.ask("load_state", states)

    def snapshot(self, allow_pickle: bool = False) -> Node:
        with self._settled() as group:
            return group.snapshot(allow_pickle)

    def resume(self, snapshot: Node, allow_pickle: bool = False) -> None:
        with self._settled() as group:
            group.resume(snapshot, allow_pickle)

    def verify(self, command: m.Verify) -> str | None:
        """Have workers check their environments: new ones against their own, by random actions."""
        with self._settled() as group:
            return group.verify(command)

    def __repr__(self) -> str:
        return f"ParallelEnv({self.num_envs} environments in {self.num_workers} workers)"


_STEPPING = Methods(ParallelEnv, ("step", "_step", "reset", "_reset", "step_mdp", "maybe_reset"))


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
            factory = EnvWorkerBuilder(
                (self._make,), (self._kwargs,), (1,), GymOptions(), torch.initial_seed()
            )
            engine = Session(lambda _: ProcessBackend(), [factory])
            try:
                self._meta_data = engine.request(0, m.Call("groups[0].meta_data"))
            finally:
                engine.close(5.0)
        return self._meta_data

    def __getstate__(self) -> dict[str, Any]:
        return {"made_by": ByValue((self._make, self._kwargs))}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self._make, self._kwargs = state["made_by"].value
        self._meta_data = None
