"""Names under which TorchRL users look for data helpers. Re-exports only."""

from gleanrl.core.lazy import lazy_exports
from gleanrl.envs.specs import (
    Binary,
    Bounded,
    BoundedContinuous,
    BoundedDiscrete,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    NonTensor,
    OneHot,
    TensorSpec,
    Unbounded,
    UnboundedContinuous,
    UnboundedDiscrete,
)
from gleanrl.memory.replay.buffer import (
    PrioritizedReplayBuffer,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from gleanrl.memory.replay.limiter import RateLimiter
from gleanrl.memory.replay.samplers import (
    PrioritizedSampler,
    RandomSampler,
    Sampler,
    SamplerWithoutReplacement,
)
from gleanrl.memory.replay.slices import SliceSampler, SliceSamplerWithoutReplacement
from gleanrl.memory.replay.storages import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    RoundRobinWriter,
    Storage,
    TensorDictMaxValueWriter,
    TensorDictRoundRobinWriter,
    Writer,
)

__all__ = [
    "Binary",
    "Bounded",
    "BoundedContinuous",
    "BoundedDiscrete",
    "Categorical",
    "Composite",
    "LazyMemmapStorage",
    "LazyTensorStorage",
    "ListStorage",
    "MultiCategorical",
    "MultiOneHot",
    "NonTensor",
    "OneHot",
    "PrioritizedReplayBuffer",
    "PrioritizedSampler",
    "RandomSampler",
    "RateLimiter",
    "ReplayBuffer",
    "RoundRobinWriter",
    "Sampler",
    "SamplerWithoutReplacement",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "Storage",
    "TensorDictMaxValueWriter",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorDictRoundRobinWriter",
    "TensorSpec",
    "Unbounded",
    "UnboundedContinuous",
    "UnboundedDiscrete",
    "Writer",
]

__getattr__ = lazy_exports(__name__, (), ())  # modules of this package, as `gleanrl.data.postprocs`
