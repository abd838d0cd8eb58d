"""Collectors inside the workers of collectors: their data, their weights and their errors."""

import functools
import gc

import pytest
import rig
import torch
from nested_rig import OwnAsync, OwnSingle, OwnSync, Shown, Told
from tensordict.nn import TensorDictModule
from torch import nn

from gleanrl import UnknownModelError, WorkerDied, WorkerError
from gleanrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from gleanrl.data import LazyTensorStorage, ReplayBuffer
from gleanrl.weight_update import NoWeightSyncScheme, SharedMemWeightSyncScheme

IDS = ("collector", "traj_ids")
MASK = ("collector", "mask")
CARTS = [["CartPole-v1"] * 2] * 2


@pytest.fixture(scope="module", autouse=True)
def _warm():
    """Have the zygote up: it stays for the life of the process."""
    MultiSyncCollector([rig.counting()], frames_per_batch=4).shutdown()


def leaves(batch):
    return {key: batch[key] for key in batch.keys(True, True)}


def collected(outer, inner, count=3, backend="process", seed=5, envs=CARTS, **options):
    """Return ``count`` batches, as the user would see them."""
    found = []
    with outer(envs, frames_per_batch=48, collector_class=inner, backend=backend, **options) as got:
        got.set_seed(seed)
        for batch in got:
            found.append(batch.clone())
            if len(found) == count:
                break
    return found


def assert_same(batches, others):
    assert len(batches) == len(others)
    for one, other in zip(batches, others, strict=True):
        assert one.shape == other.shape
        assert one.names == other.names
        assert leaves(one).keys() == leaves(other).keys()
        for key, value in leaves(one).items():
            assert value.dtype == other[key].dtype
            assert torch.equal(value, other[key]), key


# -- data ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "outside", "shape"),
    [
        ({}, {}, (2, 2, 12)),
        ({"cat_results": -1}, {"num_envs": 3}, (2, 3, 8)),
        ({"cat_results": 0}, {"num_envs": 2, "cat_results": 0}, (8, 6)),
        ({"cat_results": -1}, {"cat_results": -1}, (48,)),
    ],
    ids=str,
)
def test_batches_are_the_same_bit_for_bit_on_every_way(options, outside, shape):
    ours, own = (functools.partial(cls, **options) for cls in (MultiSyncCollector, OwnSync))
    direct = collected(MultiSyncCollector, ours, **outside)
    assert direct[0].shape == shape
    assert direct[0].names[-1] == "time"
    assert_same(direct, collected(MultiSyncCollector, own, **outside))
    inline = functools.partial(MultiSyncCollector, **options, backend="inline")
    assert_same(direct, collected(MultiSyncCollector, inline, backend="inline", **outside))


@pytest.mark.parametrize("levels", [2, 3])
def test_batches_are_those_of_a_collector_that_has_all_the_workers_itself(levels):
    if levels == 2:
        nested = collected(MultiSyncCollector, MultiSyncCollector)
    else:
        inner = functools.partial(MultiSyncCollector, backend="inline")
        middle = functools.partial(inner, collector_class=inner)
        nested = collected(MultiSyncCollector, middle, backend="inline", envs=[CARTS])
    with MultiSyncCollector(["CartPole-v1"] * 4, frames_per_batch=48, backend="inline") as flat:
        flat.set_seed(5)
        for batch in nested:
            assert batch.ndim == levels + 1
            direct = flat.next()
            for key, value in leaves(direct).items():
                if key != IDS:
                    own = batch[key].reshape(value.shape)
                    assert torch.equal(own, value), key
            together = torch.stack([batch[IDS].flatten(), direct[IDS].flatten()]).unique(dim=1)
            assert together.shape[1] == batch[IDS].unique().numel() == direct[IDS].unique().numel()


@pytest.mark.covering
@pytest.mark.parametrize("outer", [MultiSyncCollector, MultiAsyncCollector])
@pytest.mark.parametrize("inner", [MultiSyncCollector, MultiAsyncCollector, OwnAsync])
def test_trajectory_ids_are_those_of_one_environment_each(outer, inner):
    envs = [[rig.counting(2 * i + j, length=5 + 2 * i + j) for j in range(2)] for i in range(2)]
    owners = {}
    with outer(envs, frames_per_batch=24, collector_class=inner) as collector:
        assert collector.n_env == 4
        for number, batch in enumerate(collector, start=1):
            assert batch.names[-1] == "time"
            assert batch.numel() == 24
            for identity, env in zip(
                batch[IDS].flatten().tolist(),
                batch["observation"][..., 0].flatten().tolist(),
                strict=True,
            ):
                assert owners.setdefault(identity, env) == env
            if number == 12:
                break
        assert collector.stats()["frames"] == 12 * 24
    if outer is inner is MultiSyncCollector:  # else it depends on who is fast
        assert set(owners.values()) == {0, 1, 2, 3}
    assert len(owners) >= 12 * 24 / 8 / 2


@pytest.mark.parametrize("inner", [OwnSingle, functools.partial(OwnSync, backend="inline")])
def test_every_environment_of_a_worker_gives_its_share_of_whole_trajectories(inner):
    envs = [[rig.counting(2 * i + j, length=5 + 2 * i + j) for j in range(2)] for i in range(2)]
    quota = {"trajs_per_batch": 4, "traj_quota": "equal", "backend": "inline"}
    with MultiSyncCollector(envs, frames_per_batch=24, collector_class=inner, **quota) as collector:
        for _, batch in zip(range(3), collector, strict=False):
            assert batch["observation"][:, 0, 0].tolist() == [0, 1, 2, 3]
            assert batch["collector", "mask"].sum(1).tolist() == [5, 6, 7, 8]
        assert collector.stats()["frames_discarded"] == 0


def test_environments_are_counted_whatever_shape_batches_have():
    for options in ({}, {"cat_results": -1}):
        inner = functools.partial(MultiSyncCollector, backend="inline", **options)
        with MultiSyncCollector(
            CARTS, frames_per_batch=40, total_frames=80, collector_class=inner, backend="inline"
        ) as collector:
            assert collector.n_env == 4
            assert collector.set_seed(10) == 13
            assert collector.frames_per_batch == 40
            assert collector.frames_per_batch_worker(1) == 20
            fake = collector.fake_tensordict()
            assert [(batch.shape, leaves(batch).keys()) for batch in collector] == [
                (fake.shape, leaves(fake).keys())
            ] * 2


def test_a_collector_decides_for_itself_how_long_its_batches_are():
    def longer(envs, policy, **given):
        given["frames_per_batch"] = 100
        return MultiSyncCollector(envs, policy, backend="inline", **given)

    with pytest.warns(UserWarning, match="batches hold 200 frames"):
        collector = MultiSyncCollector(
            CARTS, frames_per_batch=8, total_frames=400, collector_class=longer, backend="inline"
        )
    with collector:
        assert [batch.shape for batch in collector] == [(2, 2, 50)] * 2
        assert collector.stats()["frames"] == 400


def test_what_stopped_workers_did_not_reach_is_masked_and_not_counted():
    inner = functools.partial(MultiSyncCollector, preemptive_threshold=0.5)
    envs = [[rig.counting(0), rig.counting(1, pause=0.01)]]
    valid = 0
    with MultiSyncCollector(envs, frames_per_batch=200, collector_class=inner) as collector:
        for _ in range(2):
            batch = collector.next()
            assert batch.shape == (1, 2, 100)
            mask = batch[MASK]
            assert mask[0, 0].all()
            assert not mask[0, 1].all()
            assert (batch[IDS] == -1).equal(~mask)
            assert batch["observation"][~mask].eq(0).all()
            valid += int(mask.sum())
        assert collector.stats()["frames"] == valid


@pytest.mark.parametrize(
    "options",
    [
        {"split_trajs": True},
        {"trajs_per_batch": 2},
        {"postproc": lambda batch: batch.set("twice", 2 * batch["next", "reward"])},
        {"cat_results": -1, "preemptive_threshold": 0.5},
    ],
    ids=lambda options: "-".join(options),
)
def test_batches_of_changing_shape_travel_as_before(options):
    inner = functools.partial(MultiSyncCollector, backend="inline", **options)
    with MultiAsyncCollector(
        [[rig.counting(i) for i in range(2)]],
        frames_per_batch=20,
        collector_class=inner,
        backend="inline",
    ) as collector:
        with pytest.raises(NotImplementedError, match="no fixed layout"):
            collector.fake_tensordict()
        valid = 0
        for _ in range(3):
            batch = collector.next()
            mask = batch.get(MASK, None)
            valid += batch.numel() if mask is None else int(mask.sum())
            if "postproc" in options:
                assert batch["twice"].eq(2).all()
        assert collector.stats()["frames"] == valid


def spoil(batch):
    batch.set("more", batch["next", "reward"])


def test_what_a_hook_that_comes_late_adds_arrives():
    with MultiSyncCollector(
        ["CartPole-v1"] * 2,
        frames_per_batch=8,
        collector_class=functools.partial(Collector),
        backend="inline",
    ) as collector:
        collector.next()
        collector.post_collect_hook = spoil
        for _ in range(2):
            batch = collector.next()
            assert torch.equal(batch["more"], batch["next", "reward"])
        ids = batch["collector", "traj_ids"]
        assert ids.shape == (2, 4)
        assert set(ids[0].tolist()).isdisjoint(ids[1].tolist())


def test_hooks_reach_the_workers_of_workers():
    inner = functools.partial(MultiSyncCollector, backend="inline")
    with MultiSyncCollector(
        CARTS,
        frames_per_batch=8,
        collector_class=inner,
        backend="inline",
        post_collect_hook=lambda batch: batch["next", "reward"].fill_(len(batch)),
    ) as collector:
        assert collector.next()["next", "reward"].eq(2).all()
        collector.post_collect_hook = None
        assert collector.next()["next", "reward"].eq(1).all()
        collector.post_collect_hook = spoil
        with pytest.raises(RuntimeError, match="locked"):
            collector.next()


def test_arguments_of_a_collector_in_a_worker_hold_where_the_outer_one_has_the_default():
    own = {"reset_at_each_iter": True, "set_truncated": True, "max_frames_per_traj": 5}
    inner, options = functools.partial(Collector, **own), {"frames_per_batch": 8}
    with MultiSyncCollector(
        CARTS, collector_class=inner, backend="inline", max_frames_per_traj=3, **options
    ) as collector:
        assert collector.get_distant_attr("set_truncated") == [True] * 2
        assert collector.get_distant_attr("reset_at_each_iter") == [True] * 2
        assert collector.get_distant_attr("max_frames_per_traj") == [3] * 2


def test_loading_a_state_is_as_strict_in_workers_of_workers():
    inner = functools.partial(MultiSyncCollector, backend="inline")
    with MultiSyncCollector(
        CARTS, frames_per_batch=8, collector_class=inner, backend="inline"
    ) as collector:
        state = collector.state_dict()
        del state["worker0"]["worker"]["collector"]["iter"]
        with pytest.raises(KeyError, match="iter"):
            collector.load_state_dict(state)
        collector.load_state_dict(state, strict=False)
        assert collector.next().shape == (2, 2, 2)


def test_a_buffer_is_filled_by_workers_that_serve_collectors():
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=8)
    envs = [[rig.counting(2 * i + j) for j in range(2)] for i in range(2)]
    inner = functools.partial(MultiSyncCollector, cat_results=-1)
    with MultiSyncCollector(
        envs, frames_per_batch=48, total_frames=96, collector_class=inner, replay_buffer=buffer
    ) as collector:
        assert list(collector) == [None, None]
        assert collector.stats()["frames"] == len(buffer) == 96
    rows = buffer[:]["next", "observation"]
    assert sorted(rows[:, 1].tolist()) == sorted([*range(1, 25)] * 4)
    assert rows[:, 0].unique().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("inner", [OwnSingle, functools.partial(OwnSync, num_workers=2)])
def test_workers_that_serve_collectors_draw_apart_and_as_the_script_is_seeded(inner):
    def actions(seed):
        torch.manual_seed(seed)
        with MultiSyncCollector(
            ["CartPole-v1"] * 2, frames_per_batch=160, collector_class=inner
        ) as collector:
            batch = collector.next()
        return batch["action"].reshape(2, -1)

    first, again, other = actions(1), actions(1), actions(2)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first[0], first[1])


# -- weights and their versions --------------------------------------------------------------------


def shown(kind=Shown):
    return TensorDictModule(kind(), ["observation"], ["action", "seen"])


def cascade(policy, leaf=OwnSingle, middle=None, outer=MultiSyncCollector, **options):
    """Make a collector of two collectors of two each."""
    inner = functools.partial(
        MultiSyncCollector, num_workers=2, collector_class=leaf, **(middle or {})
    )
    return outer(
        [rig.counting(0), rig.counting(1)],
        policy,
        frames_per_batch=16,
        collector_class=inner,
        track_policy_version=True,
        **options,
    )


def versions(batch):
    """Return the version of each leaf's frames, which is the same all through."""
    own = batch["policy_version"].flatten(0, -2)
    assert own.eq(own[:, :1]).all()
    assert batch["next", "policy_version"].flatten(0, -2).equal(own)
    return own[:, 0].tolist()


@pytest.mark.parametrize(
    ("kind", "leaf"), [(Shown, None), (Told, OwnSingle)], ids=["workers", "collectors"]
)
def test_every_update_is_applied_at_every_leaf_at_its_version(kind, leaf):
    def run():
        policy = shown(kind)
        with cascade(policy, leaf) as collector:
            for number in range(4):
                batch = collector.next()
                assert batch.shape == (2, 2, 4)
                assert versions(batch) == [number] * 4
                assert batch["seen"][..., :2].eq(number).all()
                if kind is Told:
                    assert batch["seen"][..., 2].eq(number).all()
                policy.module.set(number + 1)
                collector.update_policy_weights_()

    with rig.nothing_left_behind():
        run()


def test_versions_pass_on_whatever_moved_them():
    policy = shown()
    with cascade(policy) as collector:
        collector.increment_version()
        assert versions(collector.next()) == [1] * 4
        policy.module.set(7)
        collector.update_policy_weights_(worker_ids=1)
        batch = collector.next()
        assert versions(batch) == [1, 1, 2, 2]
        assert batch["seen"][:, 0, 0, 0].tolist() == [0, 7]
        for _ in range(3):
            collector.update_policy_weights_()  # the last one counts, and says so
        assert versions(collector.next()) == [5] * 4
        assert collector.policy_version == 5
        stats = collector.stats("per_worker")
        assert [stats[f"worker_{worker}/policy_version"] for worker in range(2)] == [5, 5]
        saved = collector.state_dict()
    with cascade(shown()) as collector:
        collector.load_state_dict(saved)
        batch = collector.next()
        assert versions(batch) == [5] * 4
        assert batch["seen"][..., 0].eq(7).all()
        collector.update_policy_weights_(policy)
        assert versions(collector.next()) == [6] * 4


def test_several_models_at_once_reach_every_leaf_as_one_version():
    policy, head = shown(), nn.Linear(1, 1)
    schemes = {
        "policy": SharedMemWeightSyncScheme(),
        "policy.module.head": SharedMemWeightSyncScheme(),
    }
    with cascade(policy, middle={"weight_recv_schemes": schemes}) as collector:
        for number in range(1, 4):
            policy.module.set(number)
            nn.init.constant_(head.bias, -number)
            collector.update_policy_weights_(
                weights_dict={"policy": policy, "policy.module.head": head}
            )
            batch = collector.next()
            assert versions(batch) == [number] * 4
            assert batch["seen"][..., 0].eq(number).all()
            assert batch["seen"][..., 1].eq(-number).all()
        with pytest.raises(UnknownModelError, match="policy.module.nothing"):
            collector.update_policy_weights_(head, model_id="policy.module.nothing")
        assert versions(collector.next()) == [3] * 4


def test_models_that_are_not_received_stay_as_they_are():
    policy = shown()
    fixed = {"weight_recv_schemes": {"policy": NoWeightSyncScheme()}, "backend": "inline"}
    with cascade(policy, middle=fixed, backend="inline") as collector:
        policy.module.set(3)
        collector.update_policy_weights_()
        assert collector.next()["seen"].eq(0).all()


@pytest.mark.parametrize("inner", [MultiSyncCollector, MultiAsyncCollector])
def test_asynchronous_batches_are_reported_with_the_version_they_were_made_with(inner):
    policy = shown()
    with MultiAsyncCollector(
        [[rig.counting(2 * i + j) for j in range(2)] for i in range(2)],
        policy,
        frames_per_batch=16,
        collector_class=inner,
        track_policy_version=True,
    ) as collector:
        found = []
        for number, batch in enumerate(collector, start=1):
            worker = int(batch["observation"][..., 0].min()) // 2
            (version,) = batch["policy_version"].unique().tolist()
            assert batch["seen"][..., 0].eq(version).all()
            assert collector.stats("per_worker")[f"worker_{worker}/policy_version"] == version
            found.append(version)
            policy.module.set(number)
            collector.update_policy_weights_()
            if number == 25:
                break
    assert max(found) > 10


def test_a_collector_that_receives_in_its_own_way_is_asked_as_before():
    class Mine(Collector):
        received = 0

        def receive_models(self, models):
            super().receive_models(models)
            Mine.received += len(models)

    policy = shown()
    with MultiSyncCollector(
        [rig.counting()], policy, frames_per_batch=4, collector_class=Mine, backend="inline"
    ) as collector:
        policy.module.set(2)
        collector.update_policy_weights_()
        assert collector.next()["seen"][..., 0].eq(2).all()
        assert collector.get_distant_attr("received") == [1]
        assert collector.stats("per_worker")["worker_0/policy_version"] == 1


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["step", "build"])
def test_errors_deep_inside_name_the_way(where):
    inner = functools.partial(MultiSyncCollector, num_workers=1, collector_class=MultiSyncCollector)
    envs = [[[rig.counting(0), rig.counting(1)]]] * 2
    envs[1] = [[rig.counting(2), rig.counting(3, fault=rig.fail, where=where, at=6)]]

    def run():
        # The middle level has one worker, whose environments are those of its own two.
        with MultiSyncCollector(envs, frames_per_batch=64, collector_class=inner) as collector:
            list(zip(range(2), collector, strict=False))

    way = "^worker 1: worker 0: worker 1 raised ArithmeticError: in the simulator\n"
    with rig.nothing_left_behind():
        with pytest.raises(ArithmeticError, match=way) as caught:
            run()
        assert isinstance(caught.value, WorkerError)
        assert str(caught.value).count("in the simulator") <= 6  # told once per level
        del caught
        gc.collect()


def test_a_worker_of_a_worker_that_dies_is_told_from_ones_own():
    envs = [[rig.counting(0), rig.counting(1)], [rig.counting(2), rig.counting(3, fault=rig.kill)]]

    def run():
        with MultiSyncCollector(
            envs, frames_per_batch=400, collector_class=MultiSyncCollector
        ) as collector:
            with pytest.raises(WorkerDied) as caught:
                collector.next()
            assert str(caught.value).startswith("worker 1 raised WorkerDied: worker 1 (process ")
            assert caught.value.worker is None  # none of this collector's own

    with rig.nothing_left_behind():
        run()


def test_a_collector_that_ends_by_itself_is_an_error_that_says_so():
    inner = functools.partial(
        lambda *args, **given: Collector(*args, **{**given, "total_frames": 8}),
    )
    with MultiSyncCollector(
        ["CartPole-v1"], frames_per_batch=8, collector_class=inner, backend="inline"
    ) as collector:
        collector.next()
        with pytest.raises(RuntimeError, match="the Collector in this worker has delivered"):
            collector.next()


def test_an_error_inside_an_inner_collector_closes_the_outer_one():
    inner = functools.partial(MultiSyncCollector, num_workers=1, backend="inline")
    with MultiSyncCollector(
        [rig.counting(0, fault=rig.fail, at=2)],
        frames_per_batch=8,
        collector_class=inner,
        backend="inline",
    ) as collector:
        with pytest.raises(ArithmeticError, match="in the simulator"):
            collector.rollout()
        assert collector.closed
