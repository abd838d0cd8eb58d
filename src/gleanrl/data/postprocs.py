"""Post-processing of batches. Re-exports only."""

from gleanrl.engine.whole_trajectories import MultiStep

__all__ = ["MultiStep"]
