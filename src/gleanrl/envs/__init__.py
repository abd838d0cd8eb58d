"""Environments, adapted to step into preallocated memory.

A namespace over this package and the classes that need worker processes, which live further out;
modules import each other, never this.
"""

from typing import TYPE_CHECKING

from gleanrl.core.errors import refuse
from gleanrl.core.lazy import lazy_exports
from gleanrl.envs.base import EnvBase
from gleanrl.envs.libs.gym import GymEnv, GymWrapper, set_gym_backend
from gleanrl.envs.libs.pettingzoo import MarlGroupMapType, PettingZooEnv, PettingZooWrapper
from gleanrl.envs.serial import SerialEnv
from gleanrl.envs.tensordict_envs import EnvMetaData

if TYPE_CHECKING:
    from gleanrl.parallel.parallel_env import EnvCreator, ParallelEnv

__all__ = [
    "EnvBase",
    "EnvCreator",
    "EnvMetaData",
    "GymEnv",
    "GymWrapper",
    "MarlGroupMapType",
    "ParallelEnv",
    "PettingZooEnv",
    "PettingZooWrapper",
    "SerialEnv",
    "set_gym_backend",
]

# Inner rings import modules of this package; what needs worker processes is imported at first use.
_find = lazy_exports(__name__, ("EnvCreator", "ParallelEnv"), ("gleanrl.parallel.parallel_env",))
_OF_TORCHRL = "Compose InitTracker ObservationNorm RewardSum StepCounter TransformedEnv"
__getattr__ = refuse(
    __name__,
    dict.fromkeys(
        [*_OF_TORCHRL.split(), "check_env_specs", "step_mdp"],
        "import it from torchrl.envs, with the environment; every collector steps TorchRL's "
        "environments with their transforms",
    ),
    _find,
)
