"""Names under which TorchRL users look for data helpers. Re-exports only."""

from gleanrl.core.errors import refuse
from gleanrl.core.lazy import lazy_exports
from gleanrl.envs import specs
from gleanrl.envs.specs import *
from gleanrl.memory.replay.buffer import (
    PrioritizedReplayBuffer,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from gleanrl.memory.replay.limiter import RateLimiter
from gleanrl.memory.replay.row_writers import (
    RoundRobinWriter,
    TensorDictMaxValueWriter,
    TensorDictRoundRobinWriter,
    Writer,
)
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
    Storage,
)

__all__ = [
    "LazyMemmapStorage",
    "LazyTensorStorage",
    "ListStorage",
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
    "Writer",
]
__all__.extend(specs.__all__)

_OF_TORCHRL = "LazyStackStorage PrioritizedSliceSampler ReplayBufferEnsemble TensorStorage"
__getattr__ = refuse(
    __name__,
    dict.fromkeys(
        _OF_TORCHRL.split(),
        "import it from torchrl.data, with the buffer; collectors fill TorchRL's buffers as well",
    ),
    lazy_exports(__name__, (), ()),  # modules of this package, as `gleanrl.data.postprocs`
)
