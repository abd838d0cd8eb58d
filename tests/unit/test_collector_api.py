"""Arguments, life, weights and state of the in-process collector."""

import gc
import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import InteractionType, TensorDictModule
from torch import nn

from gleanrl import (
    BaseCollector,
    ClosedError,
    Collector,
    ConfigError,
    DataCollectorBase,
    EnvError,
    LazyTensorStorage,
    MultiAsyncCollector,
    MultiSyncCollector,
    PolicyError,
    PolicyTypeError,
    PolicyVersion,
    RandomPolicy,
    ReplayBuffer,
    SyncDataCollector,
    UnknownEnvError,
    WeightsError,
)
from gleanrl.weight_update import NoWeightSyncScheme


def cartpole(policy=None, **options):
    return Collector("CartPole-v1", policy, **{"frames_per_batch": 8, **options})


def linear(value=0.0):
    net = nn.Linear(3, 1)
    nn.init.constant_(net.weight, value)
    nn.init.constant_(net.bias, value)
    return TensorDictModule(net, in_keys=["observation"], out_keys=["action"])


def pendulum(policy, **options):
    return Collector("Pendulum-v1", policy, **{"frames_per_batch": 4, **options})


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"frames_per_batch": 0}, ConfigError, r"frames_per_batch \(0\) must be at least 1"),
        ({"frames_per_batch": -4}, ConfigError, r"frames_per_batch \(-4\)"),
        ({"frames_per_batch": 2.5}, ConfigError, r"frames_per_batch \(2.5\) must be a whole"),
        ({"total_frames": float("inf")}, ConfigError, "use -1 for endless"),
        ({"num_envs": 0}, ConfigError, r"num_envs \(0\) must be at least 1"),
        ({"reset_when_done": False}, ConfigError, "reset_when_done=False is not supported"),
        ({"split_trajs": True, "track_traj_ids": False}, ConfigError, "need track_traj_ids"),
        ({"trajs_per_batch": 0}, ConfigError, r"trajs_per_batch \(0\)"),
        ({"traj_format": "cat"}, ConfigError, "needs trajs_per_batch"),
        ({"traj_format": "ragged"}, ConfigError, "must be 'padded' or 'cat'"),
        ({"backend": "teleport"}, ConfigError, r"backend \('teleport'\)"),
        ({"backend": "thread"}, NotImplementedError, "'thread' is not available"),
        ({"backend": "inline", "num_collectors": 2}, ConfigError, "at most one"),
        ({"sync": True}, ConfigError, "several workers"),
        ({"backend_options": {"init_fn": int}}, ConfigError, "no meaning in this process"),
        ({"device": "fridge"}, ConfigError, r"device \('fridge'\)"),
        ({"replay_buffer": object()}, ConfigError, r"has no extend\(\)"),
        ({"replay_buffer": [], "use_buffers": True}, TypeError, "exclude each other"),
        ({"interruptor": object()}, TypeError, "must be an Interruptor of gleanrl.collectors"),
        ({"track_policy_version": "yes"}, TypeError, "must be a bool or a PolicyVersion"),
        ({"weight_sync_schemes": {"policy": 3}}, ConfigError, "not a WeightSyncScheme"),
        ({"exploration_mode": "wild"}, ConfigError, "wild"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_bad_arguments_are_named_with_their_value(options, error, message):
    with pytest.raises(error, match=message):
        cartpole(**options)


def test_an_unknown_id_is_one_error_of_two_kinds_with_a_suggestion():
    with pytest.raises(UnknownEnvError, match="did you mean 'CartPole-v1'") as caught:
        Collector("CartPol-v1", frames_per_batch=4)
    assert isinstance(caught.value, KeyError)
    assert isinstance(caught.value, ValueError)
    assert str(caught.value).startswith("no environment")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "neither an environment id"),
        ([], "empty sequence"),
        (lambda: 7, "returned a int"),
        ([gym.make("CartPole-v1")] * 2, "more than once"),
        (["CartPole-v1", "Pendulum-v1"], "environment 1 has observation_space"),
    ],
)
def test_what_is_no_environment_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        Collector(given, frames_per_batch=4)


def test_an_instance_takes_neither_arguments_nor_copies():
    env = gym.make("CartPole-v1")
    with pytest.raises(ConfigError, match="is built already"):
        Collector(env, frames_per_batch=4, create_env_kwargs={"render_mode": None})
    with pytest.raises(ConfigError, match="needs an id or a callable"):
        Collector(env, frames_per_batch=4, num_envs=2)


def test_a_factory_that_raises_comes_through_unchanged():
    def make():
        raise ZeroDivisionError("in the factory")

    with pytest.raises(ZeroDivisionError, match="in the factory"):
        Collector(make, frames_per_batch=4)


class Odd(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, observation=None, result=None, fails=False):
        self.observation, self.result, self.fails = observation, result, fails
        self.closed = False

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        if self.fails:
            raise ArithmeticError("in step")
        if self.result is not None:
            return self.result
        return self.observation, 0.0, False, False, {}

    def close(self):
        self.closed = True


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (Odd(np.zeros(3, np.float32)), r"shape \(3,\).*declares shape \(2,\)"),
        (Odd(np.zeros(2, np.float64)), "float64.*float32.*observation_dtype=torch.float32"),
        (Odd([0, 1]), "int64.*float32"),
        (Odd(result=(np.zeros(2, np.float32), 0.0, False, {})), "returned 4 instead"),
        (Odd(result=(np.zeros(2, np.float32), None, False, False, {})), "reward None at step 0"),
    ],
)
def test_an_environment_that_breaks_its_declaration_is_named(env, message):
    collector = Collector(env, frames_per_batch=4)
    with pytest.raises(EnvError, match=message):
        next(iter(collector))
    assert env.closed
    assert collector.closed


def test_what_an_environment_raises_comes_through_and_closes_the_collector():
    env = Odd(fails=True)
    collector = Collector(env, frames_per_batch=4)
    with pytest.raises(ArithmeticError, match="in step"):
        next(iter(collector))
    assert env.closed


def test_a_policy_that_writes_no_action_is_refused_before_the_first_step():
    policy = TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["value"])
    with pytest.raises(PolicyError, match="action"):
        cartpole(policy)


def test_a_policy_that_does_not_fit_the_action_space_is_refused():
    policy = TensorDictModule(nn.Linear(3, 2), in_keys=["observation"], out_keys=["action"])
    with pytest.raises(PolicyError, match="action"):
        pendulum(policy)


def test_a_float32_policy_on_float64_observations_is_told_what_to_do():
    policy = TensorDictModule(nn.Linear(17, 6), in_keys=["observation"], out_keys=["action"])
    with pytest.raises(PolicyError, match="observation_dtype=torch.float32"):
        Collector("HalfCheetah-v5", policy, frames_per_batch=4)
    with Collector(
        "HalfCheetah-v5", policy, frames_per_batch=4, observation_dtype=torch.float32
    ) as collector:
        assert next(iter(collector))["action"].shape == (4, 6)


def test_policy_and_factory_exclude_each_other():
    with pytest.raises(PolicyTypeError, match="not both"):
        cartpole(RandomPolicy(), policy_factory=RandomPolicy)


def test_something_that_cannot_be_called_is_no_policy():
    with pytest.raises(TypeError):
        cartpole(3)


# -- life ------------------------------------------------------------------------------------------


def test_names_of_earlier_versions_are_the_same_classes():
    assert SyncDataCollector is Collector
    assert DataCollectorBase is BaseCollector
    assert issubclass(Collector, BaseCollector)


def test_iteration_ends_after_total_frames_and_closes_nothing():
    with cartpole(total_frames=24) as collector:
        assert len(collector) == 3
        assert len(list(collector)) == 3
        assert list(collector) == []
        assert collector.next() is None
        assert collector.stats()["completed"]
        assert collector.getattr_env("spec").id == "CartPole-v1"
        assert collector.state_dict()["frames"] == 24


def test_a_second_loop_continues_the_first():
    with cartpole(total_frames=24) as collector:
        for _ in collector:
            break
        assert len(list(collector)) == 2


def test_next_returns_batches_then_none():
    with cartpole(total_frames=16) as collector:
        assert collector.next().shape == (8,)
        assert collector.next().shape == (8,)
        assert collector.next() is None


@pytest.mark.parametrize("total", [-1, None])
def test_an_endless_collector_has_no_length(total):
    with cartpole(total_frames=total) as collector:
        with pytest.raises(TypeError, match="endless"):
            len(collector)
        assert collector.total_frames == float("inf")


def test_counts_are_rounded_up_with_one_warning(monkeypatch):
    with pytest.warns(UserWarning, match="not a multiple of the 3 environments") as caught:
        collector = cartpole(num_envs=3, frames_per_batch=10, total_frames=20)
    assert len(caught) == 1
    assert collector.frames_per_batch == 12
    assert "4 additional frames will be collected, 24 in all" in str(caught[0].message)
    assert collector.total_frames == collector.stats()["total_frames"] == 24
    assert [batch.shape for batch in collector] == [(3, 4)] * 2
    monkeypatch.setenv("RL_WARNINGS", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cartpole(num_envs=3, frames_per_batch=10)


def test_rounding_of_an_asynchronous_batch_names_the_environments_of_one_worker():
    with pytest.warns(UserWarning, match="multiple of the 8 environments: batches hold 104"):
        collector = MultiAsyncCollector(
            "CartPole-v1", num_workers=2, num_envs=8, frames_per_batch=100, backend="inline"
        )
    collector.shutdown()


def test_shutdown_twice_is_fine_and_later_use_is_named():
    env = Odd(np.zeros(2, np.float32))
    collector = Collector(env, frames_per_batch=4)
    batch = next(iter(collector))
    collector.shutdown()
    collector.async_shutdown()
    assert env.closed
    assert batch["observation"].shape == (4, 2)
    with pytest.raises(ClosedError, match="shut down"):
        next(iter(collector))


def test_an_error_while_closing_is_raised_or_kept_quiet():
    class Stuck(Odd):
        def close(self):
            raise OSError("stuck")

    with pytest.raises(OSError, match="stuck"):
        Collector(Stuck(), frames_per_batch=4).shutdown()
    Collector(Stuck(), frames_per_batch=4).shutdown(raise_on_error=False)


def test_shutdown_can_leave_the_environment_open():
    env = Odd()
    Collector(env, frames_per_batch=4).shutdown(close_env=False)
    assert not env.closed


def test_deleting_a_collector_closes_its_environments():
    env = Odd(np.zeros(2, np.float32))
    collector = Collector(env, frames_per_batch=4)
    next(iter(collector))
    del collector
    gc.collect()
    assert env.closed


def test_background_collection_needs_a_buffer_and_pausing_needs_it_running():
    with cartpole() as collector:
        with pytest.raises(RuntimeError, match="replay_buffer="):
            collector.start()
        with pytest.raises(RuntimeError, match="not running"):
            collector.pause()


def test_hooks_run_once_for_each_batch_in_their_order():
    calls = []
    rb = ReplayBuffer(storage=LazyTensorStorage(1000))
    collector = Collector(
        "CartPole-v1",
        frames_per_batch=16,
        total_frames=64,
        replay_buffer=rb,
        pre_collect_hook=lambda: calls.append(rb.write_count),
    )
    assert list(collector) == [None] * 4
    assert calls == [0, 16, 32, 48]
    assert rb.write_count == 64
    collector.shutdown()


def test_stats_are_flat_scalars():
    with cartpole(num_envs=2, total_frames=16) as collector:
        list(collector)
        stats = collector.stats()
    assert stats["frames"] == 16
    assert stats["batches"] == 2
    assert stats["total_frames"] == 16
    assert all(isinstance(value, (int, float)) for value in stats.values())


def test_every_retired_spelling_warns_and_works():
    with pytest.warns(DeprecationWarning, match="exploration_mode= is retired"):
        collector = cartpole(exploration_mode="mean")
    assert collector.exploration_type == InteractionType.MEAN
    with (
        pytest.warns(DeprecationWarning, match="exploration_mode"),
        pytest.raises(ConfigError, match="contradicts"),
    ):
        cartpole(exploration_mode="mean", exploration_type=InteractionType.MODE)
    with pytest.warns(DeprecationWarning, match="local_init_rb"):
        cartpole(local_init_rb=True)
    with pytest.warns(DeprecationWarning, match="replay_buffer_chunk"):
        cartpole(replay_buffer_chunk=True)


# -- buffers ---------------------------------------------------------------------------------------


class ListBuffer:
    def __init__(self):
        self.rows = []

    def extend(self, rows):
        self.rows += [row.clone() for row in rows]

    def add(self, row):
        self.rows.append(row.clone())


def test_batches_go_to_a_replay_buffer_as_rows():
    buffer = ListBuffer()
    with cartpole(num_envs=2, total_frames=16, replay_buffer=buffer) as collector:
        assert list(collector) == [None, None]
        assert collector.getattr_rb("rows") is buffer.rows
    assert len(buffer.rows) == 16
    assert buffer.rows[0].shape == ()


def test_steps_can_be_added_one_by_one():
    buffer = ListBuffer()
    options = {"replay_buffer": buffer, "extend_buffer": False}
    with cartpole(num_envs=2, total_frames=16, **options) as collector:
        list(collector)
    assert [row.shape for row in buffer.rows] == [(2,)] * 8


@pytest.mark.parametrize("num_envs", [None, 2])
def test_steps_added_one_by_one_to_environments_and_time_are_those_of_whole_batches(num_envs):
    found = []
    for extend in (True, False):
        buffer = ReplayBuffer(storage=LazyTensorStorage(100, ndim=2))
        options = {"replay_buffer": buffer, "extend_buffer": extend, "num_envs": num_envs}
        with cartpole(total_frames=16, **options) as collector:
            collector.set_seed(0)
            list(collector)
        found.append(buffer[:])
    assert found[0].shape == found[1].shape == (num_envs or 1, 16 // (num_envs or 1))
    assert (found[0] == found[1]).all()


def test_a_torchrl_replay_buffer_is_filled():
    from torchrl.data import LazyTensorStorage, ReplayBuffer

    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    with cartpole(num_envs=2, total_frames=64, replay_buffer=buffer) as collector:
        list(collector)
    assert len(buffer) == 64
    assert buffer.sample()["observation"].shape == (4, 4)


# -- weights ---------------------------------------------------------------------------------------


def test_optimizer_steps_show_in_the_next_batch_without_an_update():
    policy = linear(0.0)
    with pendulum(policy) as collector:
        assert not next(iter(collector))["action"].any()
        nn.init.constant_(policy.module.bias, 1.0)
        assert next(iter(collector))["action"].eq(1).all()


@pytest.mark.parametrize(
    "form",
    [
        lambda m: m,
        lambda m: m.state_dict(),
        lambda m: TensorDict.from_module(m),
        lambda m: TensorDict.from_module(m).data,
        lambda m: dict(TensorDict.from_module(m).data.to_dict()),
    ],
    ids=["module", "state_dict", "tensordict", "data", "nested dict"],
)
@pytest.mark.parametrize("name", ["positional", "weights", "policy"])
def test_weights_are_taken_in_every_form(form, name):
    with pendulum(linear(0.0)) as collector:
        given = form(linear(2.0))
        if name == "positional":
            collector.update_policy_weights_(given)
        else:
            collector.update_policy_weights_(**{name: given})
        assert collector.policy.module.weight.eq(2).all()
        assert collector.stats()["policy_version"] == 1


def test_weights_that_do_not_fit_change_nothing():
    with pendulum(linear(0.0)) as collector:
        before = collector.policy.module.weight.clone()
        with pytest.raises(WeightsError, match="missing.*unexpected"):
            collector.update_policy_weights_({"other": torch.zeros(1)})
        with pytest.raises(WeightsError, match=r"shape \(1, 4\), the model's is \(1, 3\)"):
            collector.update_policy_weights_(
                {"module.bias": torch.ones(1), "module.weight": torch.ones(1, 4)}
            )
        huge = torch.full((1, 3), 1e300, dtype=torch.float64)
        with pytest.raises(WeightsError, match="values that torch.float32 cannot hold"):
            collector.update_policy_weights_({"module.bias": torch.ones(1), "module.weight": huge})
        assert collector.policy.module.weight.equal(before)
        assert collector.stats()["policy_version"] == 0


def test_floats_are_not_cut_to_whole_numbers():
    policy = linear(0.0)
    policy.module.register_buffer("seen", torch.zeros((), dtype=torch.int64))
    weights = linear(1.0).state_dict()
    with pendulum(policy) as collector:
        for wrong in (torch.tensor(0.5), torch.tensor(float("nan")), torch.tensor(1e30)):
            with pytest.raises(WeightsError, match=r"'module.seen' has values that torch.int64 ca"):
                collector.update_policy_weights_({**weights, "module.seen": wrong})
        assert not policy.module.weight.any()
        collector.update_policy_weights_({**weights, "module.seen": torch.tensor(5.0)})
        assert policy.module.seen == 5


def test_contradicting_updates_are_refused():
    with pendulum(linear()) as collector:
        with pytest.raises(ConfigError, match="give weights once"):
            collector.update_policy_weights_(linear(), weights={})
        with pytest.raises(ConfigError, match="weights_dict excludes"):
            collector.update_policy_weights_(weights_dict={"policy": linear()}, model_id="policy")
        with pytest.raises(TypeError, match="worker_ids"):
            collector.update_policy_weights_(linear(), worker_ids=[0])
        with pytest.raises(KeyError, match="no model 'critic'"):
            collector.update_policy_weights_(linear(), model_id="critic")
        with pytest.raises(KeyError, match=r"no model 'env\[0\]'"):  # it has no index
            collector.update_policy_weights_(linear(), model_id="env[0]")
        with pytest.warns(DeprecationWarning, match="policy_weights="):
            collector.update_policy_weights_(policy_weights=linear(3.0))
        assert collector.policy.module.weight.eq(3).all()


def test_a_scheme_of_a_model_that_does_not_exist_is_refused():
    with pytest.raises(KeyError, match="no model 'polcy'"):
        pendulum(linear(), weight_sync_schemes={"polcy": NoWeightSyncScheme()})


def test_a_policy_with_a_sparse_buffer_is_refused():
    policy = linear()
    policy.module.register_buffer("graph", torch.eye(2).to_sparse())
    with pytest.raises(PolicyError, match="'graph' is a parameter or buffer of layout"):
        pendulum(policy)
    del policy.module.graph
    policy.module.graph = torch.eye(2).to_sparse()
    pendulum(policy).shutdown()


def test_several_models_are_updated_at_once_or_not_at_all():
    policy = linear()
    with pendulum(policy) as collector:
        collector.update_policy_weights_(weights_dict={"policy.module": linear(1.0).module})
        assert policy.module.weight.eq(1).all()
        with pytest.raises(WeightsError):
            collector.update_policy_weights_(
                weights_dict={"policy": linear(5.0), "policy.module": {"x": torch.zeros(1)}}
            )
        assert policy.module.weight.eq(1).all()


def test_a_fixed_policy_is_not_updated():
    schemes = {"policy": NoWeightSyncScheme()}
    with pendulum(linear(0.0), weight_sync_schemes=schemes) as collector:
        collector.update_policy_weights_(linear(1.0))
        assert collector.policy.module.weight.eq(0).all()


def test_policies_of_a_factory_begin_as_a_fixed_policy():
    with MultiSyncCollector(
        ["Pendulum-v1"],
        linear(1.0),
        policy_factory=lambda: linear(0.0),
        frames_per_batch=2,
        backend="inline",
        weight_sync_schemes={"policy": NoWeightSyncScheme()},
    ) as collector:
        assert collector.next()["action"].ne(0).all()


def test_updating_a_random_policy_with_nothing_is_harmless():
    with cartpole(RandomPolicy()) as collector:
        collector.update_policy_weights_()
        with pytest.raises(WeightsError, match="has no weights"):
            collector.update_policy_weights_({"w": torch.zeros(1)})


def test_versions_are_delivered_when_tracked():
    with pendulum(linear(), track_policy_version=True) as collector:
        assert collector.policy_version == 0
        first = next(iter(collector))
        collector.update_policy_weights_()
        second = next(iter(collector))
        assert collector.get_policy_version() == 1
    assert first["policy_version"].eq(0).all()
    assert second["next", "policy_version"].eq(1).all()
    with pendulum(linear()) as collector:
        assert collector.policy_version is None
        assert "policy_version" not in next(iter(collector)).keys()


def test_a_version_object_is_followed():
    version = PolicyVersion("uuid")
    label = version.version
    with pendulum(linear(), track_policy_version=version) as collector:
        collector.increment_version()
        assert version.number == 1
        assert collector.policy_version == version.version != label


def test_a_policy_factory_makes_the_policy_that_runs():
    with pendulum(None, policy_factory=lambda: linear(1.0)) as collector:
        assert collector.policy.module.weight.eq(1).all()
        collector.update_policy_weights_(linear(2.0))
        batch = next(iter(collector))
        expected = 2 * batch["observation"].sum(-1, keepdim=True) + 2
        assert torch.allclose(batch["action"], expected, atol=1e-5)


# -- state and access ------------------------------------------------------------------------------


def test_state_continues_counters_weights_versions_and_streams():
    def make():
        return Collector(
            "CartPole-v1", RandomPolicy(), num_envs=2, frames_per_batch=40, total_frames=400
        )

    with make() as first, make() as second:
        first.set_seed(4)
        for _, _batch in zip(range(3), first, strict=False):
            pass
        first.increment_version()
        state = first.state_dict()
        second.load_state_dict(state)
        assert second.stats()["frames"] == 120
        assert second.stats()["policy_version"] == 1
        one, two = next(iter(first)), next(iter(second))
        assert one["action"].equal(two["action"])
        assert two["collector", "traj_ids"].min() > state["worker"]["tracker"]["episode"].min()


def test_policy_and_environment_have_a_state():
    with pendulum(linear(1.0)) as collector:
        state = collector.state_dict()
    assert state["policy_state_dict"]["module.weight"].eq(1).all()
    assert state["env_state_dict"] == {}
    with pendulum(linear(0.0)) as collector:
        collector.load_state_dict(state)
        assert collector.policy.module.weight.eq(1).all()
        with pytest.raises(KeyError, match="lacks"):
            collector.load_state_dict({"frames": 3})
        collector.load_state_dict({"frames": 3}, strict=False)
        assert collector.stats()["frames"] == 3


def test_seeds_count_up_over_environments():
    with cartpole(num_envs=6, frames_per_batch=12) as collector:
        assert collector.set_seed(1) == 6
        assert collector.set_seed(1, static_seed=True) == 1
        first = next(iter(collector))["observation"][:, 0]
        assert (first == first[0]).all()


def test_reset_starts_new_trajectories_where_asked():
    with cartpole(num_envs=3, frames_per_batch=12) as collector:
        before = next(iter(collector))
        collector.reset([1])
        after = next(iter(collector))
        assert after["collector", "traj_ids"][:, 0].tolist() == [0, 4, 2]
        assert after["observation"][0, 0].equal(before["next", "observation"][0, -1])
        collector.reset(torch.tensor([True, False, True]))
        with pytest.raises(ConfigError, match="outside"):
            collector.reset([3])


def test_models_and_attributes_are_reachable():
    policy = linear(1.0)
    with pendulum(policy) as collector:
        assert collector.get_model("policy") is policy
        assert collector.getattr_policy("in_keys") == ["observation"]
        assert collector.cascade_execute("policy.module.weight.sum").item() == 3
        assert collector.get_distant_attr("policy.module.in_features") == 3
        assert collector.map_fn("policy.module.weight.sum", [()] * 2) == [3, 3]
        assert collector.env.spec.id == "Pendulum-v1"
        with pytest.raises(AttributeError):
            collector.getattr_policy("nothing")
        with pytest.raises(AttributeError, match="not a method"):
            collector.map_fn("policy.in_keys", [()])
        with pytest.raises(ConfigError, match="one entry per call"):
            collector.map_fn("policy.module.weight.sum", [()], [{}, {}])
        with pytest.raises(KeyError, match="no model"):
            collector.get_model("critic")
        with pytest.raises(ValueError, match="not callable"):
            collector.cascade_execute("policy.in_keys", 1)


def test_worker_idx_must_have_been_given():
    with cartpole(worker_idx=3) as collector:
        assert collector.worker_idx == 3
    with cartpole() as collector, pytest.raises(RuntimeError, match="worker_idx"):
        _ = collector.worker_idx


def test_devices_are_filled_in_and_shown_on_batches():
    with cartpole(device="cpu") as collector:
        assert next(iter(collector)).device == torch.device("cpu")
    with cartpole() as collector:
        assert next(iter(collector)).device is None


# -- profiling -------------------------------------------------------------------------------------


def test_the_first_rollouts_can_be_profiled(tmp_path):
    seen = []
    with cartpole(total_frames=40, post_collect_hook=seen.append) as collector:
        collector.enable_profile(save_path=tmp_path / "trace_{worker_idx}.json", with_stack=False)
        assert collector.profile_config.num_rollouts == 3
        list(collector)
        collector.disable_profile()
        assert collector.post_collect_hook == seen.append
        with pytest.raises(RuntimeError, match="before the collector is iterated"):
            collector.enable_profile()
    assert (tmp_path / "trace_0.json").stat().st_size > 0
    assert len(seen) == 5


def test_a_profile_that_records_nothing_is_refused():
    refused = pytest.raises(ConfigError, match="must be greater than warmup_rollouts")
    with cartpole() as collector, refused:
        collector.enable_profile(num_rollouts=1)
