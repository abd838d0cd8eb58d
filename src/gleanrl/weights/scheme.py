"""Which weights travel, and whether at all."""

from __future__ import annotations


class WeightSyncScheme:
    """How one model's weights reach the workers that use it.

    An in-process collector has nothing to send: its scheme only says whether
    ``update_policy_weights_`` applies to the model.
    """

    applies = True
    """Whether updates reach the model."""


class NoWeightSyncScheme(WeightSyncScheme):
    """Never update the model: a fixed policy."""

    applies = False
