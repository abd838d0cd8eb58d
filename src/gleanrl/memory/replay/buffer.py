"""The replay buffer: a storage, a writer that fills it and a sampler that draws from it."""

from __future__ import annotations

import copy
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import TensorDictBase, lazy_stack

from gleanrl.core.errors import ConfigError, ReplayError, for_users
from gleanrl.core.forks import guarded
from gleanrl.core.keys import NestedKey, as_key, format_key
from gleanrl.core.options import check_callables, check_int, seconds
from gleanrl.memory.replay import saving
from gleanrl.memory.replay.limiter import RateLimiter
from gleanrl.memory.replay.row_writers import RoundRobinWriter, Writer, over_rows
from gleanrl.memory.replay.rows import flatten
from gleanrl.memory.replay.samplers import (
    Draw,
    PrioritizedSampler,
    RandomSampler,
    Sampler,
    empty_error,
)
from gleanrl.memory.replay.slices import SliceSampler
from gleanrl.memory.replay.storages import LazyTensorStorage, ListStorage, Storage
from gleanrl.memory.shared import fence

Transform: TypeAlias = Callable[[Any], Any]
_ATTEMPTS = 4
_LOCAL = ("_lock", "_prefetcher", "fill_error")
"""Attributes that every process and every copy makes anew."""
_NOTHING: Mapping[str, torch.Tensor] = {}


class ReplayBuffer:
    """Holds rows of experience and returns samples of them.

    A row is one element along the first dimension of the data passed to `extend`. Samples are
    copies. With ``shared=True``, pickling sends the buffer to other processes of the same user,
    where it is the same buffer. Any number of processes may write and sample.
    """

    fill_error: BaseException | None = None
    """The error that ended the collector which fills this buffer in the background."""
    _rank = 0
    _lock: threading.RLock

    @for_users
    def __init__(
        self,
        *,
        storage: Storage | Callable[[], Storage] | None = None,
        sampler: Sampler | Callable[[], Sampler] | None = None,
        writer: Writer | Callable[[], Writer] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        transform: Transform | None = None,
        batch_size: int | None = None,
        prefetch: int | None = None,
        pin_memory: bool = False,
        shared: bool = False,
        generator: torch.Generator | None = None,
        dim_extend: int | None = None,
        limiter: RateLimiter | None = None,
        lock_timeout: float | None = None,
    ) -> None:
        """Put the parts together; nothing is allocated before the first data.

        Args:
            storage: The storage of rows, or a callable that makes it; by default a `ListStorage` of
                1000 items.
            sampler: Chooses the rows of a sample; `RandomSampler` by default.
            writer: Chooses the places of new rows; `RoundRobinWriter` by default.
            collate_fn: Makes a batch of the gathered rows: a list of items (`ListStorage`) or the
                batch itself (tensor storages).
            transform: Called with every sample; its result replaces the sample, unless ``None``.
            batch_size: Rows per sample if `sample` is called without a number.
            prefetch: Number of samples made ahead in a thread. They miss later rows and priorities.
            pin_memory: Copy samples to page-locked memory, for transfers to an accelerator.
            shared: Store in memory that other processes map.
            generator: Source of randomness; by default torch's global one, with ``prefetch`` one
                that is seeded from it at the first sample. A buffer that is sent to another process
                leaves it behind.
            dim_extend: Which dimension of the data for `extend` is time (or rows); for
                ``[env, time]`` storages 1 by default, else 0.
            limiter: Bounds the samples per inserted frame while a collector runs, and lets the
                first sample wait for frames.
            lock_timeout: Seconds that any process waits for another one that holds the lock of a
                shared buffer and makes no progress (it was stopped); 60 by default.

        Raises:
            ConfigError: arguments that contradict each other.
        """
        self._storage: Storage = _made(Storage, storage, _default_storage)
        self._sampler: Sampler = _made(Sampler, sampler, RandomSampler)
        self._writer: Writer = _made(Writer, writer, RoundRobinWriter)
        check_callables(collate_fn=collate_fn, transform=transform)
        self._collate = collate_fn
        self._transforms = [] if transform is None else [_of_samples(transform)]
        self.batch_size = (
            None if batch_size is None else check_int("batch_size", batch_size, least=1)
        )
        self._prefetch = check_int("prefetch", prefetch or 0, least=0)
        self._pin = pin_memory
        self._generator = generator
        self.limiter = limiter
        last = self._storage.ndim - 1
        self._dim = last if dim_extend is None else check_int("dim_extend", dim_extend)
        self._with_index = isinstance(self._sampler, PrioritizedSampler)
        self._reset_local()
        self._check()
        if lock_timeout is not None:
            self._storage.lock_timeout = seconds("lock_timeout", lock_timeout)
        if shared:
            self.share()

    def _check(self) -> None:
        if not 0 <= self._dim < self._storage.ndim:
            raise ConfigError(f"dim_extend ({self._dim}) in a {self._storage.ndim}-D storage")
        given, storage = self._generator, self._storage
        known = isinstance(given, torch.Generator | None)
        if not known or (given is not None and given.device.type != "cpu"):
            raise ConfigError(f"generator ({given!r:.80}) must be a torch.Generator of the CPU")
        if not isinstance(self.limiter, RateLimiter | None):
            raise ConfigError(f"limiter ({self.limiter!r:.80}) must be a RateLimiter")
        if self._pin and isinstance(storage, LazyTensorStorage) and storage.device.type != "cpu":
            raise ConfigError(
                f"pin_memory=True is for storages on the CPU, not on {storage.device}"
            )
        if self._pin and not torch.accelerator.is_available():
            raise ConfigError("pin_memory=True needs an accelerator, and there is none")

    def _reset_local(self) -> None:
        guarded(self)
        self._prefetcher = Prefetcher(self, self._prefetch) if self._prefetch else None

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplayBuffer:
        """Return a buffer with copies of all rows and of the sampler; it is shared if this one is.

        A ``generator`` is copied with its state.
        """
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        with self._lock:
            if self._generator is not None:
                memo[id(self._generator)] = self._generator.clone_state()
            for name, value in vars(self).items():
                if name not in _LOCAL:
                    vars(twin)[name] = copy.deepcopy(value, memo)
        twin._reset_local()
        return twin

    def _after_fork(self, consistent: bool) -> None:
        """Make samples anew in a forked child, and epochs if an epoch was under way."""
        if not consistent:
            self._sampler.restart()
        self._reset_local()

    @property
    def storage(self) -> Storage:
        """The storage of rows."""
        return self._storage

    @property
    def sampler(self) -> Sampler:
        """The sampler, which chooses the rows of a sample."""
        return self._sampler

    @property
    def writer(self) -> Writer:
        """The writer, which chooses the places of new rows."""
        return self._writer

    @property
    def shared(self) -> bool:
        """Whether other processes can write and sample it."""
        return self._storage.shared

    @property
    def write_count(self) -> int:
        """Frames that all writers have stored since `empty`; incomplete rows do not count."""
        return self._storage.ring.count * self._storage.envs

    def __len__(self) -> int:
        """Return the number of frames that can be sampled."""
        return len(self._storage)

    def __repr__(self) -> str:
        parts = ", ".join(type(part).__name__ for part in (self._storage, self._sampler))
        return (
            f"{type(self).__name__}({len(self):,} of {self._storage.max_size:,} frames, {parts}, "
            f"batch_size={self.batch_size})"
        )

    def extend(self, data: Any) -> torch.Tensor:
        """Store many rows.

        Args:
            data: A TensorDict, mapping or tensor ``[rows, ...]`` (``[env, time, ...]`` for 2-D
                storages), which is copied; or a sequence for `ListStorage`, which keeps the items
                themselves. The first data decide keys, shapes and dtypes.

        Returns:
            The places of the rows, int64 ``[rows]``; (step, env) pairs for 2-D storages.

        Raises:
            ConfigError: the data differ in layout from the first.
        """
        return to_user_index(self._storage, self._writer.extend(self._storage, data, self._dim))

    def add(self, data: Any) -> Any:
        """Store one row (one step of all environments for 2-D storages) and return its place."""
        place = self._writer.extend(self._storage, *_as_one_row(self._storage, data))
        return int(place[0]) if len(place) else None

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """Draw rows and return copies of them.

        Args:
            batch_size: Number of rows; the buffer's own by default.
            return_info: Return ``(sample, info)``, with the places of the rows in
                ``info["index"]``.

        Raises:
            ReplayError: there is nothing to sample. Its cause is the error of the collector that
                fills this buffer in the background, if that failed.
            CollectorTimeout: the limiter's timeout passed, or a stopped process holds the lock of
                this shared buffer.
        """
        size = self.batch_size if batch_size is None else batch_size
        if size is None:
            raise ConfigError("sample() needs a batch_size, here or at construction")
        if size.__class__ is not int or size < 1:
            size = check_int("batch_size", size, least=1)
        draw, data = self._next(size)
        if not return_info:
            return data
        return data, {"index": to_user_index(self._storage, draw.index, flat=True), **draw.info}

    def __iter__(self) -> Iterator[Any]:
        """Yield samples: one epoch of a sampler without replacement, else endlessly."""
        if self.batch_size is None:
            raise ConfigError("iterating over a buffer needs a batch_size at construction")
        self._restart()
        last = begun = False
        while not last:
            draw, data = self._next(self.batch_size)
            if begun and draw.first:  # all that was left of the epoch has been overwritten
                self._restart()
                return
            begun, last = True, draw.last
            yield data

    def _restart(self) -> None:
        with self._lock:
            self._forget()
            self._sampler.restart()

    def _next(self, size: int) -> tuple[Draw, Any]:
        try:
            if self.limiter is not None:
                self.limiter.admit(self._storage, size)
            return self._make(size) if self._prefetcher is None else self._prefetcher.next(size)
        except ReplayError as err:
            if self.fill_error is None:
                raise
            raise ReplayError(f"{err}; the collector that fills it failed") from self.fill_error

    def __getitem__(self, index: Any) -> Any:
        """Return copies of the rows at ``index``: an int, slice, tensor or list of places.

        ``rb[:]`` is every complete row, ``[env, time]`` for 2-D storages.
        """
        storage, single = self._storage, isinstance(index, int)
        everything = isinstance(index, slice) and index == slice(None)
        _, data = self._read(lambda: Draw(*_select(storage, index)))
        if everything and storage.ndim == 2:
            return data.reshape(-1, storage.envs).transpose(0, 1)
        if isinstance(storage, ListStorage):
            return data[0] if single else _stack(data)
        return data[0] if single else data

    def empty(self, empty_write_count: bool = True) -> None:
        """Forget all rows, including rows that other processes are writing at this moment."""
        with self._lock:
            self._forget()
            self._storage.ring.empty(empty_write_count)
            if self.limiter is not None:
                self.limiter.restart(self._storage)
            self._sampler.restart()

    def update_priority(self, index: Any, priority: Any) -> None:
        """Set priorities of rows; without effect unless the sampler has priorities.

        Args:
            index: Places as in a sample's ``"index"``; places without a row are left out.
            priority: One number per place, or one for all. Of several per place, the largest one.

        Raises:
            ConfigError: a number is negative or not finite, or the count differs.
        """
        places = to_storage_index(self._storage, index)
        values = torch.as_tensor(priority).detach().cpu()
        if values.numel() == len(places):
            values = values.reshape(-1)
        elif values.ndim > 1:
            values = values.reshape(len(values), -1).amax(1)
        if values.numel() not in (1, len(places)):
            raise ConfigError(f"{len(values)} priorities for {len(places)} rows")
        with self._lock:
            self._sampler.update_priority(self._storage, places, values.expand(len(places)))

    def append_transform(self, transform: Transform) -> ReplayBuffer:
        """Call ``transform`` with every sample, after the existing transforms."""
        check_callables(transform=transform)
        with self._lock:
            self._transforms.append(_of_samples(transform))
            self._forget()
        return self

    def share(self) -> ReplayBuffer:
        """Move to memory that other processes map; handles already sent stay valid."""
        with self._lock, self._storage.ring.lock:
            self._storage.share()
        return self

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all rows and counters, and the states of sampler and generator."""
        with self._lock:
            rows = self._storage.state_dict()
            return {"storage": rows, **self._sampling_state(), "batch_size": self.batch_size}

    def _sampling_state(self) -> dict[str, Any]:
        generator = None if self._generator is None else self._generator.get_state()
        return {"sampler": self._sampler.state_dict(self._storage), "generator": generator}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state, which replaces all rows.

        Raises:
            ConfigError: the state has rows of another layout.
        """
        if lack := {"storage", "sampler", "batch_size"} - set(state):
            raise ConfigError(f"this is no state of a replay buffer: it has no {sorted(lack)}")
        self._load(state["storage"], state["sampler"], state.get("generator"))
        self.batch_size = state["batch_size"]

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Write everything to the directory ``path``: raw tensors and JSON, no pickle."""
        with self._lock:
            saving.write(path, self._storage, self._sampling_state)

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Replace all rows by the rows that `dumps` wrote.

        Raises:
            ConfigError: ``path`` holds no buffer, or rows of another layout.
        """
        state = saving.read(path)
        self._load(state["storage"], state["sampler"], state["generator"])

    def _load(
        self, storage: dict[str, Any], sampler: dict[str, Any], random: torch.Tensor | None
    ) -> None:
        """Replace rows and the states of sampler and generator."""
        if ("items" in storage) != isinstance(self._storage, ListStorage):
            kind = "a list" if "items" in storage else "tensors"
            raise ConfigError(f"a state of {kind} does not fit {type(self._storage).__name__}")
        if sampler:
            self._sampler.check_state_dict(sampler)
        with self._lock:
            self._storage.load_state_dict(storage)
            self._forget()
            if self._generator is not None and random is not None:
                self._generator.set_state(random)
            if self.limiter is not None:
                self.limiter.restart(self._storage)
            if sampler and "slots" in storage:
                self._sampler.load_state_dict(sampler, self._storage)
            else:
                self._sampler.restart()

    def _forget(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.forget()

    def _make(self, size: int) -> tuple[Draw, Any]:
        with self._lock:
            draw, data = self._draw(size)
        return draw, self._finish(draw, data)

    def _draw(self, size: int) -> tuple[Draw, Any]:
        """Draw rows and copy them; undo a draw without a consistent copy."""
        sampler, storage = self._sampler, self._storage
        position = sampler.position()

        def choose() -> Draw:
            sampler.seek(position)
            return sampler.draw(storage, size, self._generator)

        try:
            return self._read(choose)
        except BaseException:
            sampler.seek(position)
            raise

    def _read(self, choose: Callable[[], Draw]) -> tuple[Draw, Any]:
        """Choose rows and copy them; if a writer changes one meanwhile, choose again."""
        storage = self._storage
        for _ in range(_ATTEMPTS if storage.shared else 0):
            try:
                draw = choose()
            except ReplayError:
                # Rows may have been overwritten during the search: only the search inside decides.
                break
            assert draw.seen is not None
            fence()
            data = storage.gather(draw.index, self._extra(draw))
            fence()
            if torch.equal(storage.sequence_of(draw.index), draw.seen):
                return draw, data
        # Rows are written only inside the section.
        with storage.ring.section():
            draw = choose()
            return draw, storage.gather(draw.index, self._extra(draw))

    def _extra(self, draw: Draw) -> Mapping[str, torch.Tensor]:
        if not self._with_index:
            return draw.info or _NOTHING
        return {"index": to_user_index(self._storage, draw.index, flat=True), **draw.info}

    def _finish(self, draw: Draw, data: Any) -> Any:
        if isinstance(self._storage, ListStorage):
            data = _stack(data) if self._collate is None else self._collate(data)
            if isinstance(data, TensorDictBase) and data.shape == draw.index.shape:
                data.update(dict(self._extra(draw)))
        elif self._collate is not None:
            data = self._collate(data)
        if draw.ends is not None and isinstance(data, TensorDictBase):
            self._mark(data, draw.ends)
        for transform in self._transforms:
            made = transform(data)
            data = data if made is None else made
        return data.pin_memory() if self._pin else data

    def _mark(self, data: TensorDictBase, ends: torch.Tensor) -> None:
        sampler = self._sampler
        if not isinstance(sampler, SliceSampler) or sampler.truncated_key is None:
            return
        key = sampler.truncated_key
        for name in (key, (*key[:-1], "done")):
            flag = data.get(name, None)
            marks = ends.to(data.device).view(-1, *[1] * (1 if flag is None else flag.ndim - 1))
            data.set(name, marks if flag is None else flag | marks)

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name not in _LOCAL}
        state["_generator"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset_local()


def _default_storage() -> Storage:
    return ListStorage(1000)


def _made(kind: type, part: Any, default: Callable[[], Any]) -> Any:
    made = default() if part is None else part
    if not isinstance(made, kind) and callable(made):
        made = made()
    if not isinstance(made, kind):
        raise ConfigError(
            f"{kind.__name__.lower()} ({part!r:.80}) must be a gleanrl {kind.__name__}, or make one"
        )
    return made


def to_user_index(storage: Storage, places: torch.Tensor, flat: bool = False) -> torch.Tensor:
    """Return slots (or flat places) as users see them: ``[n]``, or ``[n, 2]`` (step, env)."""
    if storage.ndim == 1:
        return places
    places = places if flat else storage.frames_of(places)
    return torch.stack([storage.slots_of(places), places % storage.envs], 1)


def to_storage_index(storage: Storage, index: Any) -> torch.Tensor:
    """Return flat places for an index as users see it."""
    places = torch.as_tensor(index).detach().cpu()
    if places.dtype.is_floating_point or places.dtype == torch.bool:
        raise ConfigError(f"places are integers, not {places.dtype}")
    places = places.long()
    if storage.ndim == 2:
        if places.shape[-1:] != (2,):
            raise ConfigError(
                f"places in [env, time] storages are [n, 2], not {list(places.shape)}"
            )
        places = places[..., 0] * storage.envs + places[..., 1]
    places = places.reshape(-1)
    frames = storage.ring.slots * storage.envs
    if len(places) and (int(places.min()) < 0 or int(places.max()) >= frames):
        raise ConfigError(f"places go from 0 to {frames - 1}, not {places}")
    return places


def _of_samples(transform: Transform) -> Transform:
    """Return ``transform``, unless TorchRL would call a part of it on what is stored."""
    if (name := over_rows(transform)) is not None:
        raise ConfigError(
            f"{name} changes data before they are stored, but transforms of this buffer get "
            "samples; give it to the collector as postproc= (MultiStep in place of "
            "MultiStepTransform)"
        )
    return transform


def _select(storage: Storage, index: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the flat places that ``index`` selects and their sequence numbers."""
    if not storage.ring.ready:
        raise empty_error(storage)
    if isinstance(index, slice):
        # Read once: a writer may begin to overwrite a row that was complete.
        numbers = np.positive(storage.ring.sequence[: storage.ring.top])
        places = storage.frames_of(torch.from_numpy(np.flatnonzero(numbers > 0)))
        places = places[torch.arange(len(places))[index]]
        return places, torch.from_numpy(numbers)[storage.slots_of(places)]
    if isinstance(index, int) and index < 0:
        index += len(storage)
    places = to_storage_index(storage, index)
    seen = storage.sequence_of(places)
    if not bool((seen > 0).all()):
        raise IndexError(f"no row is stored at {places[seen <= 0].tolist()}")
    return places, seen


def _as_one_row(storage: Storage, data: Any) -> tuple[Any, int]:
    """Return one row as data of one row, and the dimension of rows in it."""
    if isinstance(storage, ListStorage):
        return [data], 0
    if isinstance(data, (TensorDictBase, torch.Tensor)):
        return data.unsqueeze(0), 0
    return {key: value.unsqueeze(0) for key, value in flatten(data).items()}, 0


def _stack(items: Sequence[Any]) -> Any:
    """Stack items of a list into a batch; return the list if they cannot be stacked."""
    if items and all(isinstance(item, torch.Tensor) for item in items):
        return torch.stack(list(items))
    if items and all(isinstance(item, TensorDictBase) for item in items):
        return lazy_stack(list(items), 0).contiguous()
    return list(items)


class TensorDictReplayBuffer(ReplayBuffer):
    """A replay buffer whose samples contain the places of their rows, under ``"index"``.

    Arguments as in `ReplayBuffer`, and:

    Args:
        priority_key: Entry that `update_tensordict_priority` takes priorities from, and `extend`
            if the data has it.
    """

    def __init__(self, *, priority_key: NestedKey = "td_error", **arguments: Any) -> None:
        super().__init__(**arguments)
        self._priority_key = as_key(priority_key)
        self._with_index = True

    def extend(self, data: Any) -> torch.Tensor:
        """Store many rows; their priorities are those in the data, if there are any."""
        priority = self._priorities_in(data)
        places = super().extend(data)
        if priority is not None and len(places):
            stored = places >= 0
            self.update_priority(places[stored], priority[-len(places) :][stored])
        return places

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Give the rows of a sample the priorities it holds under ``priority_key``."""
        priority = data.get(self._priority_key, None)
        if priority is None:
            raise ConfigError(
                f"no {format_key(self._priority_key)} in the data: set it, or priority_key"
            )
        index = data.get("index", None)
        if index is None:
            raise ConfigError("no 'index' in the data: give a sample of this buffer")
        if element := self._storage.element:  # a row is a batch, and each frame of it has its place
            index = index.flatten(1, len(element))[:, 0]
        self.update_priority(index, priority.reshape(data.shape[0], -1))

    def _priorities_in(self, data: Any) -> torch.Tensor | None:
        """Return the checked priorities of new rows, ``[rows]``."""
        if not isinstance(self._sampler, PrioritizedSampler) or self._storage.ndim != 1:
            return None
        priority = data.get(self._priority_key, None) if isinstance(data, TensorDictBase) else None
        if priority is None or not priority.numel():
            return None
        priorities: torch.Tensor = priority.detach().cpu().reshape(len(priority), -1).amax(1)
        self._sampler.raised(priorities)
        return priorities


class PrioritizedReplayBuffer(ReplayBuffer):
    """A replay buffer with a `PrioritizedSampler`, which takes ``alpha``, ``beta``, ``eps``."""

    def __init__(
        self, *, alpha: float, beta: float, eps: float = 1e-8, storage: Any = None, **arguments: Any
    ) -> None:
        storage = _made(Storage, storage, _default_storage)
        sampler = PrioritizedSampler(storage.max_size, alpha, beta, eps)
        super().__init__(storage=storage, sampler=sampler, **arguments)


class TensorDictPrioritizedReplayBuffer(PrioritizedReplayBuffer, TensorDictReplayBuffer):
    """A `TensorDictReplayBuffer` with a `PrioritizedSampler`."""


Sample: TypeAlias = tuple[Draw, Any]


class Prefetcher:
    """Makes some samples ahead; returns them in the order of their start."""

    def __init__(self, buffer: ReplayBuffer, number: int) -> None:
        """Keep ``number`` samples of ``buffer`` ahead."""
        self._buffer = buffer
        self._lock = buffer._lock
        self._number = number
        self._queue: deque[Future[Sample]] = deque()
        self._size = self._forgotten = 0
        self._pool = ThreadPoolExecutor(1, "gleanrl-prefetch")

    def next(self, size: int) -> Sample:
        """Return the next sample of ``size`` and begin others; raise the present state's errors."""
        ahead, future = self._take(size)
        try:
            return future.result()
        except ReplayError:
            with self._lock:
                self.forget()
            if not ahead:
                raise
        except BaseException:
            with self._lock:
                self.forget()
            raise
        # It could not be made then; perhaps it can be made now.
        return self.next(size)

    def _take(self, size: int) -> tuple[bool, Future[Sample]]:
        """Return the next sample to come, and whether an earlier call began it."""
        with self._lock:
            if self._buffer._generator is None:  # the learner draws from torch's own meanwhile
                seed = int(torch.randint(1 << 62, ()))
                self._buffer._generator = torch.Generator().manual_seed(seed)
            if size != self._size:
                self.forget()
                self._size = size
            ahead = bool(self._queue)
            while len(self._queue) <= self._number:
                self._queue.append(self._pool.submit(self._make, size, self._forgotten))
            return ahead, self._queue.popleft()

    def _make(self, size: int, forgotten: int) -> Sample:
        with self._lock:
            if forgotten != self._forgotten:
                raise CancelledError
            draw, data = self._buffer._draw(size)
        return draw, self._buffer._finish(draw, data)

    def forget(self) -> None:
        """Drop prefetched samples; under the lock."""
        self._forgotten += 1
        self._queue.clear()
