"""Workers, evaluations, nodes and buffers where learner, policies and data are on devices.

Data are those of the CPU, bit for bit on the stand-in device.
"""

import copy
import io
from functools import cache, partial

import pytest
import rig
import torch
from device_rig import (
    ON,
    SECOND,
    Walk,
    check_same,
    net,
    recurrent,
    sampling,
    seeded,
    skip_unless_comparable,
)

from gleanrl import (
    Collector,
    ConfigError,
    DistributedCollector,
    Evaluator,
    LazyMemmapStorage,
    LazyTensorStorage,
    MultiAsyncCollector,
    MultiSyncCollector,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SliceSampler,
)

POLICIES = {"net": net, "sampling": sampling, "recurrent": recurrent}
PLACES = {
    "workers": ("cpu", {"policy_device": ON}),
    "learner": (ON, {"policy_device": "cpu"}),
    "both": (ON, {}),
    "all": (ON, {"device": ON}),
    "batches": ("cpu", {"storing_device": ON}),
    "a device each": ("cpu", {"policy_device": [f"{ON}:0", SECOND]}),
}
"""Where the learner's policy is, and arguments of the collector."""


def nudge(policy):
    """Change the weights as an optimizer does."""
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(0.05)


def walks(device):
    """Return factories for two workers, in which the device is registered."""
    return [partial(device.make, Walk)] * 2


def train(make, policy, home, batches=4, **options):
    """Return the batches of a learner that changes the weights after each."""
    skip_unless_comparable(policy, options)
    seeded()
    policy = POLICIES[policy]().to(home)
    with make(policy=policy, frames_per_batch=24, **options) as collector:
        collector.set_seed(3)
        iterator, out = iter(collector), []
        for _ in range(batches):
            out.append(next(iterator).clone())
            nudge(policy)
            collector.update_policy_weights_()
        return out


on_the_cpu = cache(train)


@pytest.mark.parametrize("place", ["workers", "learner", "both", "all"])
def test_a_copy_on_another_device_follows_the_learner(place):
    home, options = PLACES[place]
    make = partial(Collector, Walk, num_envs=3)
    check_same(train(make, "recurrent", home, **options), train(make, "recurrent", "cpu"))


@pytest.mark.parametrize(
    ("policy", "place"), [*(("recurrent", place) for place in PLACES), ("sampling", "workers")]
)
def test_worker_processes(device, policy, place):
    home, options = PLACES[place]
    make = _processes(device)
    check_same(train(make, policy, home, **options), on_the_cpu(make, policy, "cpu"))


@cache
def _processes(device):
    return partial(MultiSyncCollector, walks(device))


def test_workers_draw_different_numbers_on_their_devices(device):
    make, options = partial(device.make, sampling), {"policy_device": ON, "frames_per_batch": 80}
    with MultiSyncCollector(walks(device), policy_factory=make, **options) as collector:
        first, second = next(iter(collector))["action"]
    assert not torch.equal(first, second)


@pytest.mark.parametrize("threshold", [0, 0.5])
def test_rollouts_that_are_stopped_for_others_are_the_same(threshold):
    options = {"backend": "inline", "preemptive_threshold": threshold}
    make = partial(MultiSyncCollector, [Walk] * 2, **options)
    there = train(make, "recurrent", "cpu", policy_device=ON, storing_device=ON)
    check_same(there, train(make, "recurrent", "cpu"))
    assert not any(batch["collector", "mask"].all() for batch in there)


@pytest.mark.parametrize(
    ("named", "updated"),
    [(ON, [1, 1]), (f"{ON}:0", [1, 0]), (SECOND, [0, 1]), ([SECOND, 0], [1, 1])],
)
def test_weights_go_to_the_workers_of_a_device(named, updated):
    skip_unless_comparable("recurrent", SECOND)
    with MultiSyncCollector(
        [Walk] * 2,
        recurrent(),
        frames_per_batch=24,
        policy_device=[ON, SECOND],
        track_policy_version=True,
        backend="inline",
    ) as collector:
        collector.update_policy_weights_(worker_ids=named)
        assert collector.next()["policy_version"][:, 0].tolist() == updated


def test_an_asynchronous_rollout_is_whole(device):
    with MultiAsyncCollector(
        walks(device), recurrent().to(ON), frames_per_batch=16, storing_device=ON
    ) as collector:
        batch = next(iter(collector))
    going_on = ~batch["next", "done"][:-1, 0]
    before, after = batch["next", "hidden"][:-1], batch["hidden"][1:]
    assert torch.equal(before[going_on], after[going_on])


@pytest.mark.parametrize("place", ["workers", "learner"])
def test_nodes(device, place):
    home, options = PLACES[place]
    make = partial(DistributedCollector, walks(device), sync=True, tcp_port=0, launcher="mp")
    check_same(
        train(make, "recurrent", home, **options),
        on_the_cpu(_processes(device), "recurrent", "cpu"),
    )


@pytest.mark.parametrize("backend", ["inline", "process"])
def test_evaluations(device, backend):
    def returns(home, **options):
        seeded()
        policy = recurrent().to(home)
        options = {"num_trajectories": 3, "backend": backend, "seed": 3, **options}
        evaluator = Evaluator(walks(device)[0], policy, **options)
        try:
            first = evaluator.evaluate()
            nudge(policy)
            return [result.returns.tolist() for result in (first, evaluator.evaluate(policy))]
        finally:
            evaluator.shutdown()

    assert returns(ON, device="cpu") == returns("cpu", device=ON) == returns("cpu")


def test_a_saved_collector_goes_on_with_the_numbers_of_its_devices():
    policy = sampling()

    skip_unless_comparable("sampling", {})

    def resumed(device):
        def new():
            mine = copy.deepcopy(policy)
            return Collector(Walk, mine, num_envs=3, frames_per_batch=24, policy_device=device)

        with new() as collector:
            collector.set_seed(1)
            next(iter(collector))
            saved = io.BytesIO()
            torch.save(collector.state_dict(), saved)
        saved.seek(0)
        with new() as collector:
            collector.set_seed(2)
            collector.load_state_dict(torch.load(saved, weights_only=False))
            return [next(iter(collector)).clone()]

    check_same(resumed(ON), resumed(None))


# -- buffers ---------------------------------------------------------------------------------------

STORAGES = {
    "there": lambda device, folder: LazyTensorStorage(60, device=device),
    "there, by environment": lambda device, folder: LazyTensorStorage(60, device=device, ndim=2),
    "memmap": lambda device, folder: LazyMemmapStorage(60, scratch_dir=folder),
    "compact": lambda device, folder: LazyTensorStorage(60, compact=["observation"]),
}
SAMPLERS = {
    "random": RandomSampler,
    "prioritized": lambda: PrioritizedSampler(60, alpha=0.7, beta=0.5),
    "slices": lambda: SliceSampler(slice_len=2, traj_key=("collector", "traj_ids")),
}


@pytest.mark.covering
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("storage", STORAGES)
def test_samples(storage, sampler, tmp_path):
    def samples(device):
        seeded()
        folder = str(tmp_path / str(device))
        buffer = ReplayBuffer(
            storage=STORAGES[storage](device, folder), sampler=SAMPLERS[sampler](), batch_size=8
        )
        with Collector(
            Walk, recurrent(), num_envs=3, frames_per_batch=60, storing_device=device
        ) as collector:
            collector.set_seed(2)
            batch = next(iter(collector))
        buffer.extend(batch if "environment" in storage else batch.reshape(-1))
        out = []
        for _ in range(3):
            sample = buffer.sample()
            sample = sample[0] if isinstance(sample, tuple) else sample
            if sampler == "prioritized":
                buffer.update_priority(sample["index"], torch.arange(1.0, 9.0, device=device))
            out.append(sample)
        again = ReplayBuffer(
            storage=STORAGES[storage](device, folder + "2"), sampler=SAMPLERS[sampler]()
        )
        again.load_state_dict(buffer.state_dict())
        return [*out, again[:]]

    check_same(samples(ON), samples(None))


@pytest.mark.parametrize("where", [None, ON])
def test_a_buffer_is_filled_in_the_background(device, where):
    buffer = ReplayBuffer(storage=LazyTensorStorage(64, device=where), batch_size=8)
    make = walks(device)[0]
    with Collector(
        make, recurrent().to(ON), frames_per_batch=16, total_frames=64, replay_buffer=buffer
    ) as collector:
        collector.start()
        collector.update_policy_weights_()
        rig.until(lambda: not collector.is_running())
    rows = buffer[:].cpu()
    going_on = ~rows["next", "done"][:-1, 0]
    assert len(rows) == 64
    assert torch.equal(rows["next", "hidden"][:-1][going_on], rows["hidden"][1:][going_on])


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"pin_memory": True}, "pin_memory=True is for storages on the CPU"),
        ({"shared": True}, "cannot be shared between processes"),
    ],
)
def test_options_of_buffers_on_the_cpu_are_refused(wrong, named):
    with pytest.raises(ConfigError, match=named):
        ReplayBuffer(storage=LazyTensorStorage(8, device=ON), **wrong)


def test_samples_on_the_cpu_are_pinned_if_told_to(device):
    buffer = ReplayBuffer(storage=LazyTensorStorage(8), batch_size=2, pin_memory=True)
    buffer.extend(torch.arange(8))
    assert buffer.sample().is_pinned()


def test_a_generator_of_a_device_is_refused(device):
    with pytest.raises(ConfigError, match="of the CPU"):
        ReplayBuffer(storage=LazyTensorStorage(8), generator=torch.Generator(ON))
