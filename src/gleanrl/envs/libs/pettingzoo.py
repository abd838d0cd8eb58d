"""PettingZoo environments. Re-exports only."""

from gleanrl.envs.pettingzoo import PettingZooEnv, PettingZooWrapper

__all__ = ["PettingZooEnv", "PettingZooWrapper"]
