"""A learner that never lets go."""

from __future__ import annotations

from tensordict import TensorDictBase


class KeepingLearner:
    """Keeps every batch and a copy of it, to tell whether one ever changed in its hands."""

    def __init__(self) -> None:
        """Start with nothing."""
        self.batches: list[TensorDictBase] = []
        self._copies: list[TensorDictBase] = []

    def take(self, batch: TensorDictBase) -> None:
        """Keep ``batch`` for good."""
        self.batches.append(batch)
        self._copies.append(batch.clone())

    def check_unchanged(self) -> None:
        """Raise `AssertionError` if any batch changed since it was taken."""
        for number, (batch, copy) in enumerate(zip(self.batches, self._copies, strict=True)):
            assert bool((batch == copy).all()), f"batch {number} changed after it was handed over"
