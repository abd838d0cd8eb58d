"""Environments, each made to step into preallocated memory."""

from gleanrl.envs.base import EnvBase
from gleanrl.envs.creator import EnvCreator, EnvMetaData
from gleanrl.envs.gym_env import GymEnv, GymWrapper, set_gym_backend
from gleanrl.envs.serial import SerialEnv

__all__ = [
    "EnvBase",
    "EnvCreator",
    "EnvMetaData",
    "GymEnv",
    "GymWrapper",
    "SerialEnv",
    "set_gym_backend",
]
