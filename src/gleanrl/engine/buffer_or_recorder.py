"""The target of batches in place of the user: a replay buffer or a recorder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

from tensordict import TensorDictBase

from gleanrl.core.errors import ConfigError
from gleanrl.core.keys import MASK, TRAJ_IDS, format_key
from gleanrl.core.options import warn
from gleanrl.core.protocols import Source
from gleanrl.memory.replay.buffer import ReplayBuffer
from gleanrl.memory.replay.row_visibility import Author, written_by
from gleanrl.memory.replay.row_writers import RoundRobinWriter, over_rows
from gleanrl.memory.replay.slices import SliceSampler
from gleanrl.memory.replay.storages import LazyTensorStorage, Storage

_Add: TypeAlias = Callable[[Any], object]


class Sink:
    """The interface of a target of frames, for collectors. A copy of it goes to workers."""

    def store(self, batch: TensorDictBase) -> int:
        """Store a finished batch; return how many of its valid frames could not be stored."""
        raise NotImplementedError

    def cut(self) -> None:
        """Treat later frames as other trajectories than those stored before."""

    def by_workers(self, remote: bool) -> bool:
        """Tell whether workers, if ``remote`` on other machines, store frames themselves."""
        return False

    def serve(self, worker: int, source: Source) -> None:
        """Prepare to store, in this process, the frames of ``worker`` from ``source``."""

    def attach(self, collector: Any, env: Callable[[], Any], num_envs: int) -> None:
        """Note that ``collector``, of ``num_envs`` environments in all, has started to store here.

        ``env`` returns its environment, ``None`` if that is in another process.
        """

    def seeded(self, seed: int, static: bool) -> None:
        """Note that the collector's environments were seeded."""


def make_sink(arguments: Mapping[str, Any], stacked: bool, sync: bool) -> Sink | None:
    """Return the sink for batches that a collector's ``arguments`` name, ``None`` without one.

    A ``stacked`` batch begins with workers; if ``sync``, it has frames of all environments.
    """
    buffer, extend = arguments["replay_buffer"], arguments["extend_buffer"]
    if buffer is None or (extend and isinstance(buffer, Sink)):
        return buffer
    storage = getattr(buffer, "storage", None)  # TorchRL's buffers have one, too
    two_dims = getattr(storage, "ndim", 1) == 2
    name = "extend" if extend or two_dims else "add"
    method = getattr(buffer, name, None)
    if isinstance(buffer, Storage) or not callable(method):
        raise ConfigError(
            f"replay_buffer ({type(buffer).__name__}) has no {name}() method for batches; give a "
            "replay buffer, such as ReplayBuffer(storage=...)"
        )
    if two_dims:
        return _BufferSink(buffer, partial(_extend_env_time, method, not extend), apart=sync)
    if extend:
        ends = arguments["set_truncated"] or arguments["trajs_per_batch"] is not None
        return _BufferSink(buffer, partial(_extend_rows, method), apart=ends)
    return _BufferSink(buffer, partial(_add_steps, method, stacked), by_batch=False)


class _BufferSink(Sink):
    """Stores in any object with the methods of a replay buffer."""

    def __init__(
        self,
        buffer: Any,
        store: Callable[[TensorDictBase], int],
        by_batch: bool = True,
        apart: bool = False,
    ) -> None:
        """Store in ``buffer`` with ``store``, batch by batch or step by step.

        Environments are ``apart`` if their rows have a dimension, or end flags where others follow.
        """
        self._buffer, self._store, self._by_batch = buffer, store, by_batch
        self._apart = apart
        sampler = buffer.sampler if isinstance(buffer, ReplayBuffer) else None
        self._needs_ids = isinstance(sampler, SliceSampler) and sampler.traj_key is None
        self._author = Author()

    def attach(self, collector: Any, env: Callable[[], Any], num_envs: int) -> None:
        """Name parts of TorchRL's buffers that would take rows of environments for one sequence."""
        if num_envs == 1 or self._apart:
            return
        follow = f"rows of {num_envs} environments follow one another there"
        # TorchRL shows neither the transform nor the sampler in public.
        name = over_rows(getattr(self._buffer, "_transform", None))
        sampler = getattr(self._buffer, "_sampler", None)
        if name is not None:
            raise ConfigError(
                f"{name} of the replay buffer computes over successive rows, and {follow}; give it "
                "to the collector as postproc= (MultiStep in place of MultiStepTransform), or "
                "store batches of a synchronous collector in a storage with ndim=2"
            )
        if getattr(sampler, "_fetch_traj", True) is False:
            warn(
                f"the replay buffer's {type(sampler).__name__} finds trajectories by end flags, "
                f"and {follow}, so slices can cross from one to another: drop its end flags (it "
                "finds trajectory ids), or pass set_truncated or trajs_per_batch to the collector"
            )

    def store(self, batch: TensorDictBase) -> int:
        """Store ``batch``; it has to have trajectory ids if the buffer samples slices.

        End flags do not replace them: a reset ends a trajectory as well, and so does the next
        worker.
        """
        if self._needs_ids and batch.get(TRAJ_IDS, None) is None:
            raise ConfigError(
                f"a SliceSampler needs {format_key(TRAJ_IDS)} in every batch of a collector: leave "
                "track_traj_ids on and keep the entry in postproc, or name another with traj_key="
            )
        with written_by(self._author):
            left_out = self._store(batch)
        if left_out:
            self.cut()
        return left_out

    def cut(self) -> None:
        self._author = Author()

    def by_workers(self, remote: bool) -> bool:
        """Tell whether workers extend the buffer themselves; it is shared then.

        Rows of several workers go where there is room, so it has to be a buffer of rows, not one of
        ``[env, time]`` or one that keeps the best, on the CPU, and one of ours: others are extended
        by the learner.
        """
        if remote or not self._by_batch or not isinstance(self._buffer, ReplayBuffer):
            return False
        storage = self._buffer.storage
        if not isinstance(storage, LazyTensorStorage) or storage.ndim != 1:
            return False
        if not isinstance(self._buffer.writer, RoundRobinWriter) or storage.device.type != "cpu":
            return False
        self._buffer.share()
        return True


def _extend_rows(extend: _Add, batch: TensorDictBase) -> int:
    """Store the valid frames of ``batch``, its leading dimensions flattened into rows."""
    rows = batch.reshape(batch.shape.numel())  # not -1: the batch may be empty
    mask = batch.get(MASK, None)
    # Padding and what a stopped rollout never reached are no data.
    extend(rows if mask is None else rows[mask.reshape(-1)])
    return 0


def _extend_env_time(extend: _Add, stepwise: bool, batch: TensorDictBase) -> int:
    """Store ``batch`` as ``[env, time]``, up to where rollouts were stopped.

    Steps that some environments did not reach are left out if it is stored ``stepwise``; else they
    are an error.
    """
    rows = batch.reshape(batch.shape[:-1].numel(), batch.shape[-1])
    mask = rows.get(MASK, None)
    left_out = 0
    if mask is not None:
        reached = mask.all(0)
        left_out = int((mask & ~reached).sum())
        if (reached[1:] & ~reached[:-1]).any() or not mask.any(1).all():
            raise ConfigError(
                "an environment of this batch began anew after a failure, or is lost, which a "
                "storage of [env, time] cannot hold; give a storage with ndim=1"
            )
        if left_out and not stepwise:
            raise ConfigError(
                "the environments of this batch have different numbers of valid steps, which a "
                "storage of [env, time] cannot hold; give a storage with ndim=1"
            )
        rows = rows[:, reached]
    extend(rows)
    return left_out


def _add_steps(add: _Add, stacked: bool, batch: TensorDictBase) -> int:
    """Add the steps of ``batch``, each with the frames of all environments of a worker.

    An element has one frame of every environment. Frames of steps that some environments of the
    worker did not reach have no element.
    """
    parts = batch.unbind(0) if stacked else (batch,)
    mask = batch.get(MASK, None)
    if mask is None:
        for step in range(batch.shape[-1]):
            for part in parts:
                add(part[..., step])
        return 0
    valid = mask.reshape(len(parts), -1, mask.shape[-1])
    complete = valid.all(1)
    for step, worker in complete.T.nonzero().tolist():
        add(parts[worker][..., step])
    return int((valid & ~complete.unsqueeze(1)).sum())
