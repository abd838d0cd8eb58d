"""Post-processing of batches. Re-exports only."""

from gleanrl.engine.trajectories import MultiStep

__all__ = ["MultiStep"]
