"""TorchRL's names, attributes and parameters: those that are there, and what is said of others."""

import importlib

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from gleanrl import ConfigError, collectors
from gleanrl.collectors import Collector, MultiSyncCollector, distributed
from gleanrl.weight_update import (
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightSyncScheme,
)

PATHS = [
    "gleanrl.collectors.RayWeightUpdater",
    "gleanrl.collectors.collectors.DEFAULT_EXPLORATION_TYPE",
    "gleanrl.collectors.collectors.MultiaSyncDataCollector",
    "gleanrl.collectors.collectors.SyncDataCollector",
    "gleanrl.collectors.distributed.DEFAULT_SLURM_CONF",
    "gleanrl.collectors.distributed.DistributedWeightUpdater",
    "gleanrl.collectors.distributed.RPCWeightUpdater",
    "gleanrl.collectors.distributed.default_configs.DEFAULT_SLURM_CONF_MAIN",
    "gleanrl.collectors.distributed.default_configs.DEFAULT_TENSORPIPE_OPTIONS",
    "gleanrl.collectors.distributed.default_configs.TCP_PORT",
    "gleanrl.collectors.distributed.generic.DistributedDataCollector",
    "gleanrl.collectors.distributed.ray.RayCollector",
    "gleanrl.collectors.distributed.rpc.RPCDataCollector",
    "gleanrl.collectors.distributed.sync.DistributedSyncDataCollector",
    "gleanrl.collectors.weight_update.RayWeightUpdater",
]


@pytest.mark.parametrize("path", PATHS)
def test_paths_resolve(path):
    module, _, name = path.rpartition(".")
    assert getattr(importlib.import_module(module), name)


@pytest.mark.parametrize(
    ("module", "name", "instead"),
    [
        ("gleanrl.collectors", "LLMCollector", "TorchRL's collectors"),
        ("gleanrl.collectors.distributed", "RayEvalWorker", "RayCollector"),
        ("gleanrl.weight_update", "MPTransport", "a collector moves the weights"),
        ("gleanrl.data", "LazyStackStorage", "import it from torchrl.data, with the buffer"),
        ("gleanrl.envs", "TransformedEnv", "import it from torchrl.envs"),
        ("gleanrl.modules", "ProbabilisticActor", "import it from torchrl.modules"),
    ],
)
def test_names_that_do_not_exist_say_what_to_use(module, name, instead):
    with pytest.raises(ImportError, match=f"no {name}: .*{instead}"):
        getattr(importlib.import_module(module), name)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = collectors.nonsense
    with pytest.raises(ImportError):
        from gleanrl.collectors import LLMCollector  # noqa: F401


def policy():
    return TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])


SHOWN = {
    "compact_obs": False,
    "compiled_policy": False,
    "device": torch.device("cpu"),
    "extend_buffer": True,
    "max_frames_per_traj": 0,
    "postproc": None,
    "reset_at_each_iter": True,
    "reset_when_done": True,
    "set_truncated": False,
    "split_trajs": False,
    "track_traj_ids": True,
    "traj_format": "padded",
    "trajs_per_batch": None,
    "trust_policy": False,
    "verbose": False,
}


@pytest.mark.parametrize(
    ("kind", "options", "more"),
    [
        (Collector, {}, {"return_same_td": False}),
        (
            MultiSyncCollector,
            {"num_workers": 2, "backend": "inline"},
            {
                "cat_results": None,
                "num_sub_threads": 1,
                "preemptive_threshold": 1.0,
                "update_at_each_batch": False,
                "create_env_fn": "Pendulum-v1",
            },
        ),
    ],
)
def test_collectors_show_their_arguments(kind, options, more):
    module = policy()
    with kind(
        "Pendulum-v1",
        module,
        frames_per_batch=8,
        reset_at_each_iter=True,
        device="cpu",
        track_policy_version=True,
        **options,
    ) as collector:
        assert {name: getattr(collector, name) for name in {**SHOWN, **more}} == {**SHOWN, **more}
        assert collector.policy_version_tracker.version == 0
        assert (collector.policy_weights == TensorDict.from_module(module)).all()
        with pytest.raises(AttributeError, match="set_truncated= to the constructor"):
            collector.set_truncated = True


def test_parameters_have_the_documented_names():
    with Collector("Pendulum-v1", policy(), frames_per_batch=8) as collector:
        collector.register_scheme_receiver(weight_recv_schemes={}, synchronize_weights=False)
        other = policy()
        collector.receive_weights(policy=other)
        assert collector.policy.module.weight.equal(other.module.weight)
        collector.receive_weights(weights=TensorDict.from_module(policy()).data)
        with pytest.raises(ConfigError, match="once"):
            collector.receive_weights(other, policy=other)
        assert collector.map_fn(method_name="getattr_env", list_of_args=[("spec",)])
        assert collector.getattr_rb is not None


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("none", NoWeightSyncScheme),
        ("direct", NoWeightSyncScheme),
        ("thread", SharedMemWeightSyncScheme),
        ("multiprocessing", MultiProcessWeightSyncScheme),
    ],
)
def test_schemes_are_made_by_the_name_of_a_backend(name, kind):
    scheme = WeightSyncScheme.from_backend(name, strategy="state_dict", sync=False)
    assert type(scheme) is kind
    assert (scheme.strategy, scheme.sync) == ("state_dict", False)
    with pytest.raises(ConfigError, match="Unsupported weight-sync backend 'unknown'"):
        WeightSyncScheme.from_backend("unknown")


@pytest.mark.parametrize("kind", [NoWeightSyncScheme, SharedMemWeightSyncScheme])
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("init_on_sender", {"model": nn.Linear(1, 1), "num_workers": 1}),
        ("init_on_receiver", {"model_id": "policy", "worker_idx": 0}),
        ("connect", {}),
        ("send", {"weights": {}}),
        ("receive", {"timeout": 1.0}),
    ],
)
def test_a_scheme_without_a_collector_names_the_collectors_way(kind, method, options):
    way = rf"{kind.__name__} .*weight_sync_schemes=.*update_policy_weights_\(\)"
    with pytest.raises(NotImplementedError, match=way):
        getattr(kind(), method)(**options)


def test_retired_updaters_of_nodes_send_weights():
    module = policy()
    weights = TensorDict.from_module(policy()).data
    for updater in (
        collectors.RayWeightUpdater(weights, [], 1),
        distributed.DistributedWeightUpdater(store={}, policy_weights=weights, sync=True),
        distributed.RPCWeightUpdater(collector_infos=[], policy_weights=weights),
    ):
        with pytest.warns(DeprecationWarning, match="weight_updater"):
            made = Collector("Pendulum-v1", module, frames_per_batch=8, weight_updater=updater)
        with torch.no_grad():
            module.module.weight.zero_()
        made.update_policy_weights_()
        made.shutdown()
        assert module.module.weight.equal(weights["module", "weight"])


def test_update_interval_is_another_name():
    for options in (
        {"update_interval": 2, "max_weight_update_interval": 3},
        {"update_interval": 0},
    ):
        with pytest.raises(ConfigError, match="update_interval"):
            distributed.DistributedCollector(
                "Pendulum-v1", policy(), frames_per_batch=8, launcher="mp", **options
            )


def test_cached_weights_are_those_of_the_learners_policy():
    policy = nn.Linear(3, 1)
    options = {"frames_per_batch": 8, "backend": "inline", "num_workers": 1}
    with MultiSyncCollector("Pendulum-v1", policy, **options) as collector:
        weights = collector.get_cached_weights("policy")
        assert torch.equal(weights["weight"], policy.weight)
        assert collector.get_cached_weights("env.transform[0]") is None
    with MultiSyncCollector("CartPole-v1", **options) as collector:
        assert collector.get_cached_weights("policy") is None


def test_the_collector_of_one_asynchronous_worker_counts_as_asynchronous():
    assert issubclass(collectors.AsyncCollector, collectors.MultiAsyncCollector)
    assert not issubclass(collectors.AsyncCollector, collectors.MultiSyncCollector)


@pytest.mark.parametrize("name", collectors.__all__)
def test_collectors_are_at_most_three_classes_below_those_of_torch(name):
    kind = getattr(collectors, name)
    if isinstance(kind, type) and issubclass(kind, collectors.BaseCollector):
        assert sum(issubclass(base, collectors.BaseCollector) for base in kind.__mro__) <= 3
