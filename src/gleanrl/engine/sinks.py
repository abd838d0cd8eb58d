"""Where a batch goes: to the caller, or into a buffer."""

from __future__ import annotations

from typing import Any, Protocol

from tensordict import TensorDictBase

from gleanrl.core.errors import ConfigError
from gleanrl.core.keys import MASK


class Sink(Protocol):
    """Takes a finished batch."""

    def put(self, batch: TensorDictBase) -> TensorDictBase | None:
        """Store ``batch``, or return it for the caller."""
        ...


class YieldSink:
    """Hands every batch to the caller."""

    def put(self, batch: TensorDictBase) -> TensorDictBase | None:
        """Return ``batch``."""
        return batch


class ExtendSink:
    """Extends a buffer with whole batches; the caller gets ``None``."""

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
    """Adds to a buffer step by step; the caller gets ``None``."""

    def __init__(self, buffer: Any) -> None:
        """Store into ``buffer``."""
        self._add = _method(buffer, "add")

    def put(self, batch: TensorDictBase) -> TensorDictBase | None:
        """Store ``batch`` step by step, every environment's frame of a step in one element."""
        mask = batch.get(MASK, None)
        for step, frames in enumerate(batch.unbind(batch.ndim - 1)):
            if mask is None or mask[..., step].all():
                self._add(frames)
        return None


def make_sink(buffer: Any, extend: bool) -> Sink:
    """Return the sink for ``buffer`` (or for no buffer)."""
    if buffer is None:
        return YieldSink()
    if not extend:
        return AddSink(buffer)
    storage = getattr(buffer, "storage", None)  # TorchRL's buffers have one, too
    return EnvTimeSink(buffer) if getattr(storage, "ndim", 1) == 2 else ExtendSink(buffer)


def _method(buffer: Any, name: str) -> Any:
    method = getattr(buffer, name, None)
    if not callable(method):
        raise ConfigError(
            f"replay_buffer ({type(buffer).__name__}) has no {name}() method; give a replay buffer"
        )
    return method
