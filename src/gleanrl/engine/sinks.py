"""Where a batch goes: to the caller, or into a buffer."""

from __future__ import annotations

from typing import Any, Protocol

from tensordict import TensorDictBase

from gleanrl.core.errors import ConfigError
from gleanrl.core.keys import MASK


class Sink(Protocol):
    """Takes a finished batch."""

    discarded: int
    """Frames that were not stored, nor returned."""

    def put(self, batch: TensorDictBase) -> TensorDictBase | None:
        """Store ``batch``, or return it for the caller."""
        ...


class YieldSink:
    """Hands every batch to the caller."""

    discarded = 0

    def put(self, batch: TensorDictBase) -> TensorDictBase | None:
        """Return ``batch``."""
        return batch


class ExtendSink:
    """Extends a buffer with whole batches; the caller gets ``None``."""

    discarded = 0

    def __init__(self, buffer: Any) -> None:
        """Store into ``buffer``."""
        self._extend = _method(buffer, "extend")

    def put(self, batch: TensorDictBase) -> TensorDictBase | None:
        """Store the valid frames of ``batch``, its leading dimensions flattened into rows."""
        rows = batch.reshape(-1)
        mask = batch.get(MASK, None)
        # Padding and what a stopped rollout never reached are no data.
        self._extend(rows if mask is None else rows[mask.reshape(-1)])
        return None


class EnvTimeSink:
    """Extends a buffer of ``[env, time]`` with whole batches; the caller gets ``None``."""

    discarded = 0

    def __init__(self, buffer: Any) -> None:
        """Store into ``buffer``."""
        self._extend = _method(buffer, "extend")

    def put(self, batch: TensorDictBase) -> TensorDictBase | None:
        """Store ``batch`` as ``[env, time]``, up to where rollouts were stopped.

        Raises:
            ConfigError: environments that were stopped at different steps.
        """
        whole = batch.reshape(-1, batch.shape[-1])
        mask = whole.get(MASK, None)
        if mask is not None:
            if not bool((mask == mask[:1]).all()):
                raise ConfigError(
                    "the environments of this batch have different numbers of valid steps, which "
                    "a storage of [env, time] cannot hold; give a storage with ndim=1"
                )
            whole = whole[:, mask[0]]
        self._extend(whole)
        return None


class AddSink:
    """Adds to a buffer step by step, one element per step and worker; the caller gets ``None``."""

    def __init__(self, buffer: Any, stacked: bool) -> None:
        """Store into ``buffer``; the first dimension of ``stacked`` batches is that of workers."""
        self._add = _method(buffer, "add")
        self._stacked = stacked
        self.discarded = 0

    def put(self, batch: TensorDictBase) -> TensorDictBase | None:
        """Store the steps of ``batch``, each with the frames of all environments of a worker.

        An element has one frame of every environment. Frames of steps that some environments of
        the worker did not reach have no element: they count as discarded.
        """
        parts = batch.unbind(0) if self._stacked else (batch,)
        mask = batch.get(MASK, None)
        if mask is None:
            for step in range(batch.shape[-1]):
                for part in parts:
                    self._add(part[..., step])
            return None
        valid = mask.reshape(len(parts), -1, mask.shape[-1])
        whole = valid.all(1)
        self.discarded += int((valid & ~whole.unsqueeze(1)).sum())
        for step, worker in whole.T.nonzero().tolist():
            self._add(parts[worker][..., step])
        return None


def make_sink(buffer: Any, extend: bool, stacked: bool = False) -> Sink:
    """Return the sink for ``buffer`` (or for no buffer).

    Args:
        buffer: Where batches go.
        extend: Whole batches at once; else step by step.
        stacked: Whether the first dimension of batches is that of workers.
    """
    if buffer is None:
        return YieldSink()
    if not extend:
        return AddSink(buffer, stacked)
    storage = getattr(buffer, "storage", None)  # TorchRL's buffers have one, too
    return EnvTimeSink(buffer) if getattr(storage, "ndim", 1) == 2 else ExtendSink(buffer)


def _method(buffer: Any, name: str) -> Any:
    method = getattr(buffer, name, None)
    if not callable(method):
        raise ConfigError(
            f"replay_buffer ({type(buffer).__name__}) has no {name}() method; give a replay buffer"
        )
    return method
