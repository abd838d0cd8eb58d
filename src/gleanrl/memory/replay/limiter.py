"""Limits of samples per inserted frame: the side that is ahead waits for the other."""

from __future__ import annotations

import time

from gleanrl.core.errors import CollectorTimeout, ConfigError
from gleanrl.core.options import check_int, warn
from gleanrl.memory.replay.storages import Storage

_COUNTING, _ORIGIN, _SAMPLES = range(3)
"""Indices of words in the ring index, which all processes see."""
_SHORTEST_S, _LONGEST_S = 0.002, 0.05


def poll_interval(waited: float) -> float:
    """Return the seconds until the next check, after a wait of ``waited`` seconds.

    So a wait takes a quarter longer than it needs to, and a long one costs next to nothing.
    """
    return min(max(waited / 4, _SHORTEST_S), _LONGEST_S)


class RateLimiter:
    """Bounds the rows sampled per inserted frame while a collector runs.

    Counting begins with the first sample; before it, a collector fills the buffer freely. From then
    on, ``samples`` is the number of rows sampled and ``inserts`` the number of frames stored, both
    in all processes.

    * A started collector begins no rollout while ``samples / inserts`` would fall below
      ``min_samples_per_insert``. Rollouts under way still arrive.
    * `ReplayBuffer.sample` waits while fewer than ``min_size_to_sample`` frames are stored or
      ``samples / inserts`` exceeds ``max_samples_per_insert``. It waits only while a started
      collector runs and is not paused.

    If a learner samples nothing for ``timeout`` seconds while the collector waits, the collector
    warns and continues, and counting begins anew with the next sample. A sample that waits that
    long raises `CollectorTimeout`.

    Example:
        >>> from gleanrl import LazyTensorStorage, RateLimiter, ReplayBuffer
        >>> rb = ReplayBuffer(
        ...     storage=LazyTensorStorage(1000),
        ...     limiter=RateLimiter(min_samples_per_insert=1, max_samples_per_insert=8),
        ... )
    """

    def __init__(
        self,
        min_samples_per_insert: float | None = None,
        max_samples_per_insert: float | None = None,
        timeout: float = 60.0,
        min_size_to_sample: int = 1,
    ) -> None:
        """Set the bounds.

        Args:
            min_samples_per_insert: Ratio below which the collector waits; ``None`` for no bound.
            max_samples_per_insert: Ratio above which the learner waits; ``None`` for no bound.
            timeout: Seconds that each side waits for the other.
            min_size_to_sample: Number of stored frames up to which the learner waits.

        Raises:
            ConfigError: a number is not positive, or bounds contradict each other.
        """
        for name, value in (
            ("min_samples_per_insert", min_samples_per_insert),
            ("max_samples_per_insert", max_samples_per_insert),
            ("timeout", timeout),
        ):
            if value is not None and not value > 0:
                raise ConfigError(f"{name} ({value!r}) must be positive")
        low, high = min_samples_per_insert, max_samples_per_insert
        if low is not None and high is not None and low > high:
            raise ConfigError(
                f"min_samples_per_insert ({low}) exceeds max_samples_per_insert ({high}): learner "
                "and collector would wait for each other"
            )
        self.min_samples_per_insert = low
        self.max_samples_per_insert = high
        self.min_size_to_sample = check_int("min_size_to_sample", min_size_to_sample, least=1)
        self.timeout = timeout
        self._waiting: tuple[int, float] | None = None

    def admit(self, storage: Storage, rows: int) -> None:
        """Wait until ``rows`` more rows may be sampled, and count them.

        Raises:
            CollectorTimeout: too few frames came within the timeout.
        """
        begun = time.monotonic()
        while not self._admitted(storage, rows):
            waited = time.monotonic() - begun
            if waited > self.timeout:
                raise CollectorTimeout(
                    f"sample() has waited {self.timeout} s for frames: {_stored(storage)} were "
                    f"stored (min_size_to_sample is {self.min_size_to_sample}) and there were "
                    f"{self.ratio(storage):.3g} samples per insert (max_samples_per_insert is "
                    f"{self.max_samples_per_insert})"
                )
            time.sleep(poll_interval(waited))

    def _admitted(self, storage: Storage, rows: int) -> bool:
        ring = storage.ring
        with ring.section():
            words, most = ring.flow, self.max_samples_per_insert
            if _stored(storage) < self.min_size_to_sample:
                return not ring.lock.collecting
            if not words[_COUNTING]:
                words[_ORIGIN], words[_SAMPLES] = ring.count, 0
                words[_COUNTING] = 1
            ahead = most is not None and words[_SAMPLES] > most * _inserts(storage)
            if ahead and ring.lock.collecting:
                return False
            words[_SAMPLES] += rows
            return True

    def begin(self, storage: Storage) -> None:
        """Note the start of a collector; counting begins anew with the next sample."""
        with storage.ring.section():
            if not storage.ring.lock.collecting:
                storage.ring.flow[_COUNTING] = 0

    def running(self, storage: Storage, now: bool) -> None:
        """Note that a collector runs from now on, or no longer."""
        with storage.ring.section():
            storage.ring.lock.collect(1 if now else -1)

    def holds(self, storage: Storage, under_way: int) -> bool:
        """Tell whether a collector must wait; ``under_way`` frames are requested but not stored."""
        least, words = self.min_samples_per_insert, storage.ring.flow
        if least is None or not words[_COUNTING]:
            return False
        samples = int(words[_SAMPLES])
        if (_inserts(storage) + under_way) * least <= samples:
            self._waiting = None
            return False
        return not self._given_up(storage, samples)

    def _given_up(self, storage: Storage, samples: int) -> bool:
        now = time.monotonic()
        if self._waiting is None or self._waiting[0] != samples:
            self._waiting = samples, now
        if now - self._waiting[1] < self.timeout:
            return False
        self._waiting = None
        with storage.ring.section():
            self.restart(storage)
        warn(
            f"nothing was sampled for {self.timeout} s while the collector waited for the learner "
            f"(min_samples_per_insert={self.min_samples_per_insert}): it continues until the next "
            "sample"
        )
        return True

    def ratio(self, storage: Storage) -> float:
        """Return rows sampled per frame inserted since counting began; 0.0 before."""
        words, inserts = storage.ring.flow, _inserts(storage)
        return float(words[_SAMPLES] / inserts) if words[_COUNTING] and inserts > 0 else 0.0

    def restart(self, storage: Storage) -> None:
        """Begin to count anew with the next sample; inside the section of the ring or alone."""
        storage.ring.flow[_COUNTING] = 0


def _stored(storage: Storage) -> int:
    return storage.ring.count * storage.envs


def _inserts(storage: Storage) -> int:
    """Return the frames stored since counting began."""
    return int(storage.ring.count - storage.ring.flow[_ORIGIN]) * storage.envs
