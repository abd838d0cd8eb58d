"""TorchRL's transforms that compute over the rows of a buffer: TorchRL calls them in ``extend``."""

import pytest
import torch
from torchrl.data import LazyTensorStorage as TheirStorage
from torchrl.data import ReplayBuffer as TheirBuffer
from torchrl.envs import Compose, MultiStepTransform, Reward2GoTransform

from gleanrl import (
    Collector,
    ConfigError,
    LazyTensorStorage,
    MultiAsyncCollector,
    MultiSyncCollector,
    ReplayBuffer,
)
from gleanrl.data import Categorical, Composite, Unbounded
from gleanrl.envs import EnvBase


class Named(EnvBase):
    """Shows its number, and rewards by it; episodes never end."""

    def __init__(self, number):
        super().__init__()
        self.number = float(number)
        self.observation_spec = Composite(observation=Unbounded((1,)))
        self.action_spec, self.reward_spec = Categorical(2), Unbounded((1,))

    def _reset(self, tensordict=None, **kwargs):
        shown = {"observation": torch.tensor([self.number])}
        return self.full_done_spec.zero().update(shown)

    def _step(self, tensordict):
        return self._reset().set("reward", torch.tensor([self.number]))

    def _set_seed(self, seed):
        pass


def environments(number):
    return [lambda i=i: Named(i) for i in range(number)]


def fill(kind, number, ndim=1, transform=None):
    """Return the rows of TorchRL's buffer after four rollouts of ``number`` environments."""
    transform = transform or MultiStepTransform(n_steps=3, gamma=1.0)
    buffer = TheirBuffer(storage=TheirStorage(400, ndim=ndim), transform=transform, batch_size=1)
    options = {"frames_per_batch": 10 * number, "total_frames": 40 * number}
    if kind is not Collector:
        options["backend"] = "inline"
    with kind(environments(number), replay_buffer=buffer, **options) as collector:
        for _ in collector:
            pass
    return buffer[:]


@pytest.mark.parametrize(
    ("kind", "number", "ndim"),
    [(Collector, 1, 1), (Collector, 3, 2), (MultiSyncCollector, 3, 2), (MultiSyncCollector, 1, 1)],
)
def test_n_step_sums_of_a_torchrl_buffer_stay_within_an_environment(kind, number, ndim):
    rows = fill(kind, number, ndim)
    assert rows.numel() == (40 - 3) * number
    assert torch.equal(rows["observation"], rows["next", "observation"])
    assert torch.equal(rows["next", "reward"], 3 * rows["observation"])


@pytest.mark.parametrize(
    ("kind", "ndim"),
    [(Collector, 1), (MultiSyncCollector, 1), (MultiAsyncCollector, 1), (MultiAsyncCollector, 2)],
)
@pytest.mark.parametrize("transform", [MultiStepTransform(3, 0.9), Compose(Reward2GoTransform())])
def test_a_transform_that_would_compute_across_environments_is_refused(kind, ndim, transform):
    with pytest.raises(ConfigError, match=r"rows of 3 environments follow one another.*postproc="):
        fill(kind, 3, ndim, transform)


def test_our_buffer_refuses_a_transform_that_it_would_never_call():
    """It calls transforms with samples, and these two leave samples as they are."""
    with pytest.raises(ConfigError, match="MultiStepTransform changes data before they are stored"):
        ReplayBuffer(storage=LazyTensorStorage(10), transform=MultiStepTransform(3, 0.9))
    buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    with pytest.raises(ConfigError, match="Reward2GoTransform changes data before"):
        buffer.append_transform(Compose(Reward2GoTransform()))
