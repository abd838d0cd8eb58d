"""Helpers for collected data. Re-exports only."""

from gleanrl.engine.whole_trajectories import split_trajectories

__all__ = ["split_trajectories"]
