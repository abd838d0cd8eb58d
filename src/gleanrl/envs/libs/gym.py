"""Gymnasium environments. Re-exports only."""

from gleanrl.envs.gym_env import GymEnv, set_gym_backend

__all__ = ["GymEnv", "set_gym_backend"]
