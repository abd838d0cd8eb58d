"""Post-processing of batches. Re-exports only."""

from gleanrl.engine.multistep import MultiStep

__all__ = ["MultiStep"]
