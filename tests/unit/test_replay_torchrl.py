"""TorchRL's transforms that compute over the rows of a buffer: TorchRL calls them in ``extend``."""

import warnings

import pytest
import torch
from torchrl.data import LazyTensorStorage as TheirStorage
from torchrl.data import ReplayBuffer as TheirBuffer
from torchrl.data import SliceSampler
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
    return [lambda i=i: Named(i + 1).add_truncated_keys() for i in range(number)]


def fill(kind, number, ndim=1, transform=None, sampler=None, **options):
    """Return TorchRL's buffer after four rollouts of ``number`` environments."""
    storage = TheirStorage(400, ndim=ndim)
    buffer = TheirBuffer(storage=storage, transform=transform, sampler=sampler, batch_size=80)
    options |= {"frames_per_batch": 10 * number, "total_frames": 40 * number}
    if kind is not Collector:
        options["backend"] = "inline"
    with kind(environments(number), replay_buffer=buffer, **options) as collector:
        for _ in collector:
            pass
    return buffer


APART = [
    (Collector, 1, 1, {}),
    (Collector, 3, 2, {}),
    (Collector, 3, 1, {"set_truncated": True}),
    (Collector, 3, 1, {"max_frames_per_traj": 7, "trajs_per_batch": 2}),
    (MultiSyncCollector, 1, 1, {}),
    (MultiSyncCollector, 3, 2, {}),
    (MultiAsyncCollector, 3, 1, {"set_truncated": True}),
]


@pytest.mark.parametrize(("kind", "number", "ndim", "options"), APART)
def test_n_step_sums_of_a_torchrl_buffer_stay_within_an_environment(kind, number, ndim, options):
    rows = fill(kind, number, ndim, MultiStepTransform(n_steps=3, gamma=1.0), **options)[:]
    if not options:
        assert rows.numel() == (40 - 3) * number
    assert torch.equal(rows["observation"], rows["next", "observation"])
    sums = rows["next", "reward"] / rows["observation"]
    assert set(sums.flatten().tolist()) <= ({1.0, 2.0, 3.0} if options else {3.0})


@pytest.mark.parametrize(
    ("kind", "ndim"),
    [(Collector, 1), (MultiSyncCollector, 1), (MultiAsyncCollector, 1), (MultiAsyncCollector, 2)],
)
@pytest.mark.parametrize("transform", [MultiStepTransform(3, 0.9), Compose(Reward2GoTransform())])
def test_a_transform_that_would_compute_across_environments_is_refused(kind, ndim, transform):
    with pytest.raises(ConfigError, match=r"rows of 3 environments follow one another.*postproc="):
        fill(kind, 3, ndim, transform)


@pytest.mark.parametrize(("kind", "number", "ndim", "options"), APART)
def test_slices_by_end_flags_stay_within_an_environment(kind, number, ndim, options):
    sampler = SliceSampler(slice_len=4, end_key=("next", "done"))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*SliceSampler")
        rows = fill(kind, number, ndim, sampler=sampler, **options).sample().reshape(-1, 4)
    assert torch.equal(rows["observation"], rows["observation"][:, :1].expand(-1, 4, 1))


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector, MultiAsyncCollector])
def test_slices_by_end_flags_that_could_cross_environments_are_warned_of(kind):
    with pytest.warns(UserWarning, match=r"SliceSampler finds .* rows of 3 environments follow"):
        fill(kind, 3, sampler=SliceSampler(slice_len=4, end_key=("next", "done")))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*SliceSampler")
        rows = fill(kind, 3, sampler=SliceSampler(slice_len=4)).sample().reshape(-1, 4)
    assert torch.equal(rows["observation"], rows["observation"][:, :1].expand(-1, 4, 1))


def test_our_buffer_refuses_a_transform_that_it_would_never_call():
    """It calls transforms with samples, and these two leave samples as they are."""
    with pytest.raises(ConfigError, match="MultiStepTransform changes data before they are stored"):
        ReplayBuffer(storage=LazyTensorStorage(10), transform=MultiStepTransform(3, 0.9))
    buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    with pytest.raises(ConfigError, match="Reward2GoTransform changes data before"):
        buffer.append_transform(Compose(Reward2GoTransform()))
