"""The dotted paths TorchRL users write, with the package name replaced."""

import importlib

import pytest

PATHS = [
    "gleanrl.collectors.BaseCollector",
    "gleanrl.collectors.Collector",
    "gleanrl.collectors.DataCollectorBase",
    "gleanrl.collectors.Interruptor",
    "gleanrl.collectors.PolicyVersion",
    "gleanrl.collectors.ProfileConfig",
    "gleanrl.collectors.RandomPolicy",
    "gleanrl.collectors.SyncDataCollector",
    "gleanrl.collectors.utils.split_trajectories",
    "gleanrl.data.Binary",
    "gleanrl.data.Bounded",
    "gleanrl.data.Categorical",
    "gleanrl.data.Composite",
    "gleanrl.data.LazyMemmapStorage",
    "gleanrl.data.LazyTensorStorage",
    "gleanrl.data.ListStorage",
    "gleanrl.data.MultiCategorical",
    "gleanrl.data.OneHot",
    "gleanrl.data.PrioritizedReplayBuffer",
    "gleanrl.data.PrioritizedSampler",
    "gleanrl.data.RandomSampler",
    "gleanrl.data.ReplayBuffer",
    "gleanrl.data.RoundRobinWriter",
    "gleanrl.data.SamplerWithoutReplacement",
    "gleanrl.data.SliceSampler",
    "gleanrl.data.SliceSamplerWithoutReplacement",
    "gleanrl.data.TensorDictMaxValueWriter",
    "gleanrl.data.TensorDictPrioritizedReplayBuffer",
    "gleanrl.data.TensorDictReplayBuffer",
    "gleanrl.data.TensorDictRoundRobinWriter",
    "gleanrl.data.TensorSpec",
    "gleanrl.data.Unbounded",
    "gleanrl.data.postprocs.MultiStep",
    "gleanrl.envs.EnvBase",
    "gleanrl.envs.EnvCreator",
    "gleanrl.envs.GymEnv",
    "gleanrl.envs.SerialEnv",
    "gleanrl.envs.libs.gym.GymEnv",
    "gleanrl.envs.libs.gym.set_gym_backend",
    "gleanrl.envs.set_gym_backend",
    "gleanrl.envs.utils.ExplorationType",
    "gleanrl.envs.utils.exploration_type",
    "gleanrl.envs.utils.set_exploration_type",
    "gleanrl.modules.RandomPolicy",
    "gleanrl.weight_update.NoWeightSyncScheme",
    "gleanrl.weight_update.WeightSyncScheme",
]


@pytest.mark.parametrize("path", PATHS)
def test_path_resolves(path):
    module, _, name = path.rpartition(".")
    assert getattr(importlib.import_module(module), name) is not None
