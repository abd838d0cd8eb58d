"""Legacy weight updaters, and what a parent's weights may update."""

import functools
import gc
import warnings
import weakref

import pytest
import torch
import torchrl.collectors
import torchrl.weight_update
from tensordict import TensorDict
from torch import nn

from gleanrl import ConfigError, UnknownModelError, WeightsError
from gleanrl.collectors import (
    Collector,
    MultiAsyncCollector,
    MultiProcessedWeightUpdater,
    MultiSyncCollector,
    NoWeightSyncScheme,
    RemoteModuleWeightUpdater,
    SharedMemWeightSyncScheme,
    VanillaWeightUpdater,
    WeightUpdaterBase,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*retired:DeprecationWarning")


class Constant(nn.Module):
    """Acts with its one weight, which tells the data what it was."""

    def __init__(self, value=0.0):
        super().__init__()
        self.value = nn.Parameter(torch.tensor([float(value)]))

    def forward(self, observation):
        return self.value.expand(*observation.shape[:-1], 1)


def weights(value):
    return TensorDict({"value": torch.tensor([float(value)])})


def in_process(policy=None, **options):
    return Collector("Pendulum-v1", policy, frames_per_batch=6, total_frames=-1, **options)


def multi(kind, backend, policy=None, **options):
    return kind(
        ["Pendulum-v1"] * 2,
        policy,
        frames_per_batch=6,
        backend=backend,
        **options,
    )


KINDS = {
    "in-process": in_process,
    "sync": functools.partial(multi, MultiSyncCollector, "process"),
    "sync-inline": functools.partial(multi, MultiSyncCollector, "inline"),
    "async": functools.partial(multi, MultiAsyncCollector, "process"),
    "async-inline": functools.partial(multi, MultiAsyncCollector, "inline"),
}


@pytest.fixture(params=list(KINDS))
def make(request):
    return KINDS[request.param]


@pytest.fixture(params=["sync", "sync-inline", "async"])
def make_multi(request):
    return KINDS[request.param]


def batches_of_each(collector):
    if isinstance(collector, Collector):
        return [collector.stats()["batches"]]
    stats = collector.stats("per_worker")
    return [stats[name] for name in stats if name.endswith("/batches")]


def until_each_delivered(collector, number):
    """Return the actions in the batches until every worker has delivered ``number`` more."""
    before, actions = batches_of_each(collector), []
    while any(
        now - then < number for now, then in zip(batches_of_each(collector), before, strict=True)
    ):
        actions.append(collector.next()["action"].reshape(-1))
    return torch.cat(actions)


def settled(collector):
    """Return the actions of rollouts that begin now."""
    until_each_delivered(collector, 4)  # what asynchronous workers had begun
    return until_each_delivered(collector, 1)


def acts(collector):
    found = settled(collector).unique()
    assert found.numel() == 1
    return found.item()


with warnings.catch_warnings():  # defining one warns
    warnings.simplefilter("ignore")

    class Asking(WeightUpdaterBase):
        """Writes down what is asked of it, and changes the weights on their way."""

        def __init__(self):
            self.asked = []

        def _get_server_weights(self):
            self.asked.append("get")
            return weights(0.25)

        def _maybe_map_weights(self, policy_or_weights):
            self.asked.append("map")
            return weights(policy_or_weights["value"] + 1)

        def _sync_weights_with_worker(self, *, worker_id=None, server_weights):
            self.asked.append(("sync", worker_id))
            self.collector.receive_weights(server_weights)

    class Recursive(WeightUpdaterBase):
        def _sync_weights_with_worker(self, *, worker_id=None, server_weights):
            self.collector.update_policy_weights_(server_weights)

    class ByAttribute(WeightUpdaterBase):
        """Goes around the engine: calls a method of the module in every worker."""

        def _sync_weights_with_worker(self, *, worker_id=None, server_weights):
            self.collector.cascade_execute("policy.value.data.copy_", server_weights["value"])

    class Default(WeightUpdaterBase):
        pass

    class Some(WeightUpdaterBase):
        def all_worker_ids(self):
            return [0, 1]

        def _skip_update(self, worker_id):
            return worker_id == 0

    class Failing(WeightUpdaterBase):
        delivers = False

        def _sync_weights_with_worker(self, *, worker_id=None, server_weights):
            if self.delivers:
                self.collector.deliver_weights(server_weights)
            raise OverflowError("enough")

    class Initialised(WeightUpdaterBase):
        def init(self, *args, **kwargs):
            self.given = args, kwargs


# -- what update_policy_weights_ does with an updater ----------------------------------------------


def test_every_hook_is_asked_in_turn_and_may_send_through_the_collector(make):
    updater = Asking()
    updater.register_post_hook(lambda: updater.asked.append("post"))
    with make(Constant(), weight_updater=updater) as collector:
        assert collector.weight_updater is updater
        assert updater.collector is collector
        assert acts(collector) == 0
        collector.update_policy_weights_()
        assert updater.asked == ["get", "map", ("sync", None), "post"]
        assert acts(collector) == 1.25
        del updater.asked[:]
        collector.update_policy_weights_(weights(0.5))
        assert updater.asked == ["map", ("sync", None), "post"]
        assert acts(collector) == 1.5
        assert collector.stats()["policy_version"] == 2


def test_an_updater_may_update_its_collector_and_that_is_one_version(make):
    with make(Constant(), weight_updater=Recursive, track_policy_version=True) as collector:
        collector.update_policy_weights_(Constant(1))
        assert acts(collector) == 1
        assert collector.policy_version == 1


def test_an_updater_that_goes_its_own_way_moves_the_version_too(make):
    options = {"weight_updater": ByAttribute(), "track_policy_version": True}
    with make(Constant(), **options) as collector:
        collector.update_policy_weights_(weights(0.75))
        assert acts(collector) == 0.75
        assert collector.next()["policy_version"].unique().tolist() == [1]
        assert collector.policy_version == 1


@pytest.mark.parametrize("updater", [Default, VanillaWeightUpdater])
def test_without_overrides_the_learners_weights_or_the_given_ones_are_published(make, updater):
    policy = Constant(0.5)
    with make(policy, weight_updater=updater) as collector:
        with torch.no_grad():
            policy.value.fill_(1)
        collector.update_policy_weights_()
        assert acts(collector) == 1
        for value, given in [(2, Constant(2)), (1.5, Constant(1.5).state_dict()), (1, weights(1))]:
            collector.update_policy_weights_(given)
            assert acts(collector) == value
        with pytest.raises(WeightsError):
            collector.update_policy_weights_(TensorDict({"other": torch.zeros(1)}))
        assert acts(collector) == 1


def test_an_updater_sends_what_its_getter_returns_else_its_weights(make):
    policy = Constant()
    updater = VanillaWeightUpdater.from_policy(policy)
    with make(Constant(), weight_updater=updater) as collector:
        with torch.no_grad():
            policy.value.fill_(2)
        collector.update_policy_weights_()
        assert acts(collector) == 2
        updater.weight_getter = lambda: weights(1.5)
        collector.update_policy_weights_()
        assert acts(collector) == 1.5
        collector.update_policy_weights_(weights(1))
        assert (policy.value.item(), acts(collector)) == (2, 1)
        assert collector.stats()["policy_version"] == 3


def test_torchrls_other_updaters_are_the_same_class():
    copies = {torch.device("cpu"): weights(0)}
    options = {"get_server_weights": lambda: weights(1), "policy_weights": copies}
    for kind in (MultiProcessedWeightUpdater, RemoteModuleWeightUpdater):
        with in_process(Constant(), weight_updater=kind(**options)) as collector:
            collector.update_policy_weights_()
            assert acts(collector) == 1
        assert isinstance(kind(), VanillaWeightUpdater)


def test_nothing_to_take_weights_from_is_a_type_error(make):
    with (
        make(policy_factory=Constant, weight_updater=Default()) as collector,
        pytest.raises(TypeError, match="none were given, and there is no policy"),
    ):
        collector.update_policy_weights_()


def test_worker_ids_reach_the_updater_and_only_these_workers(make_multi):
    with make_multi(Constant(), weight_updater=Default()) as collector:
        collector.update_policy_weights_(weights(1), worker_ids=1)
        assert settled(collector).unique().tolist() == [0, 1]
        versions = [collector.stats("per_worker")[f"worker_{w}/policy_version"] for w in (0, 1)]
        assert versions == [0, 1]
        collector.update_policy_weights_(weights(2), worker_ids=[0, 1])
        assert acts(collector) == 2
        with pytest.raises(ConfigError, match="worker_ids \\(7\\)"):
            collector.update_policy_weights_(weights(2), worker_ids=7)


def test_workers_an_updater_skips_keep_weights_and_version(make_multi):
    with make_multi(Constant(), weight_updater=Some()) as collector:
        collector.update_policy_weights_(weights(1))
        assert settled(collector).unique().tolist() == [0, 1]
        versions = [collector.stats("per_worker")[f"worker_{w}/policy_version"] for w in (0, 1)]
        assert versions == [0, 1]


def test_an_updater_that_fails_half_way_never_labels_two_weights_alike(make):
    updater = Failing()
    with make(Constant(), weight_updater=updater) as collector:
        for delivers, version in ((False, 0), (True, 1), (True, 2)):
            updater.delivers = delivers
            with pytest.raises(OverflowError):
                collector.update_policy_weights_(weights(version))
            assert collector.stats()["policy_version"] == version
            assert acts(collector) == version


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.two.weight = self.one.weight

    def forward(self, observation):
        return self.two(self.one(observation))[..., :1]


def test_weights_with_two_names_arrive_under_either_or_both(make):
    with make(Tied(), weight_updater=Default()) as collector:
        newer = Tied()
        for given in (newer, newer.state_dict(), TensorDict.from_module(newer).data, None):
            collector.update_policy_weights_(given)
        collector.weight_updater = None
        for given in (newer, newer.state_dict(), TensorDict.from_module(newer).data):
            collector.update_policy_weights_(given)
        until_each_delivered(collector, 4)
        batch = collector.next()
        expected = newer(batch["observation"]).clamp(-2, 2)
        torch.testing.assert_close(batch["action"].clamp(-2, 2), expected)


# -- how an updater gets there ---------------------------------------------------------------------


def test_an_instance_or_a_constructor_is_taken_with_a_warning(make):
    for given in (Default(), Default):
        with pytest.warns(DeprecationWarning, match="weight_updater= is retired") as caught:
            collector = make(Constant(), weight_updater=given)
        assert caught[0].filename == __file__
        assert isinstance(collector.weight_updater, Default)
        collector.shutdown()


def test_defining_an_updater_warns_and_ours_do_not():
    with pytest.warns(DeprecationWarning, match="Mine is a weight updater, which is retired"):
        type("Mine", (WeightUpdaterBase,), {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        VanillaWeightUpdater(weights(0))


@pytest.mark.parametrize("given", [3, "updater", Constant, lambda: 3])
def test_anything_else_is_a_type_error(make, given):
    with pytest.raises(TypeError, match="weight_updater"):
        make(Constant(), weight_updater=given)


def test_an_updater_excludes_what_else_sends_weights(make, make_multi):
    with pytest.raises(TypeError, match="weight_sync_schemes or weight_updater"):
        make(Constant(), weight_updater=Default(), weight_sync_schemes={})
    with pytest.raises(TypeError, match="policy and policy_factory"):
        make_multi(Constant(), policy_factory=Constant, weight_updater=Default())


def test_an_updater_knows_no_models(make):
    with make(Constant(), weight_updater=Default()) as collector:
        for named in ({"weights_dict": {"critic": weights(1)}}, {"model_id": "critic"}):
            with pytest.raises(ConfigError, match="a weight updater knows the policy only"):
                collector.update_policy_weights_(**named)


def test_an_updater_can_be_set_and_taken_away(make):
    updater = Asking()
    with make(Constant()) as collector:
        assert collector.weight_updater is None
        collector.init_updater(1, two=2)
        collector.weight_updater = updater
        collector.update_policy_weights_(weights(0))
        assert acts(collector) == 1
        collector.weight_updater = None
        collector.update_policy_weights_(weights(0))
        assert acts(collector) == 0
        with pytest.raises(TypeError):
            collector.weight_updater = 3


def test_init_updater_passes_its_arguments_on(make):
    with make(Constant(), weight_updater=Initialised) as collector:
        collector.init_updater(1, two=2)
        assert collector.weight_updater.given == ((1,), {"two": 2})


def test_further_arguments_of_an_update_reach_the_updater(make):
    class Scaled(WeightUpdaterBase):
        def __call__(self, policy_or_weights=None, worker_ids=None, scale=1):
            self.push_weights(policy_or_weights * scale, worker_ids)

    with make(Constant(), weight_updater=Scaled) as collector:
        collector.update_policy_weights_(weights(1), scale=2)
        assert acts(collector) == 2


def test_one_updater_may_serve_several_collectors_and_keeps_none_alive():
    updater = Default()
    first = in_process(Constant(), weight_updater=updater)
    second = in_process(Constant(), weight_updater=updater)
    assert updater.collectors == [first, second]
    with pytest.raises(ValueError, match="serves 2 collectors"):
        _ = updater.collector
    updater.push_weights(weights(1))
    assert (acts(first), acts(second)) == (1, 1)
    updater.increment_version()
    assert second.stats()["policy_version"] == 2
    gone = weakref.ref(first)
    first.shutdown()
    del first
    gc.collect()
    assert gone() is None
    assert updater.collector is second
    second.shutdown()


def test_update_at_each_batch_goes_through_the_updater(make_multi):
    updater = Asking()
    with make_multi(Constant(), weight_updater=updater, update_at_each_batch=True) as collector:
        collector.next()
    assert updater.asked.count("map") == 1


# -- what a parent sends ---------------------------------------------------------------------------


def test_weights_are_received_from_a_parent_or_applied_here(make):
    with make(Constant()) as collector:
        collector.receive_weights()
        assert collector.stats()["policy_version"] == 0
        collector.receive_weights(weights(1))
        assert acts(collector) == 1
        collector.register_scheme_receiver({"policy": SharedMemWeightSyncScheme()})
        collector.receive_weights()
        with pytest.raises(ConfigError, match=r"weights of \['policy'\] come from a parent"):
            collector.receive_weights(weights(2))
        collector.update_policy_weights_(weights(2))
        assert acts(collector) == 2


def test_updaters_and_schemes_of_torchrl_are_refused_and_not_called(make):
    """Called as a factory, TorchRL's updater would update weights."""
    sent = []

    class Theirs(torchrl.collectors.VanillaWeightUpdater):
        def _sync_weights_with_worker(self, **arguments):
            sent.append(arguments)

    updater = Theirs(weight_getter=lambda: weights(1), policy_weights=weights(2))
    with pytest.raises(TypeError, match=r"import the class, or its base, from gleanrl.collectors"):
        make(Constant(), weight_updater=updater)
    assert not sent
    scheme = torchrl.weight_update.SharedMemWeightSyncScheme()
    with pytest.raises(ConfigError, match=r"import it from gleanrl.weight_update"):
        make(Constant(), weight_sync_schemes={"policy": scheme})


def test_a_receiver_has_to_be_a_scheme(make):
    with pytest.raises(ConfigError, match="not a WeightSyncScheme"):
        make(Constant(), weight_recv_schemes={"policy": 3})


def nested(inner, backend="process", **options):
    return MultiSyncCollector(
        [["Pendulum-v1"] * 2 if inner is MultiSyncCollector else "Pendulum-v1"],
        Constant(),
        num_workers=1,
        frames_per_batch=4,
        backend=backend,
        collector_class=functools.partial(inner, **options),
    )


@pytest.mark.parametrize("inner", [Collector, MultiSyncCollector])
@pytest.mark.parametrize("updater", [None, Default])
def test_a_parents_weights_reach_the_collectors_inside_its_workers(inner, updater):
    schemes = {"policy": SharedMemWeightSyncScheme()}
    options = {"weight_updater": updater} if updater else {"weight_recv_schemes": schemes}
    with nested(inner, **options) as collector:
        assert acts(collector) == 0
        for value in (1, 2):
            collector.update_policy_weights_(weights(value))
            assert acts(collector) == value


def test_models_a_collector_does_not_receive_are_refused_in_the_call():
    schemes = {"policy": SharedMemWeightSyncScheme()}
    with nested(Collector, weight_recv_schemes=schemes) as collector:
        with pytest.raises(UnknownModelError, match=r"weight_recv_schemes name \['policy'\]"):
            collector.update_policy_weights_(weights(1), model_id="policy.value")
        collector.update_policy_weights_(weights(1))
        assert acts(collector) == 1


def test_a_policy_a_collector_does_not_receive_is_refused_before_it_collects_on():
    schemes = {"env": SharedMemWeightSyncScheme()}
    with nested(Collector, weight_recv_schemes=schemes) as collector:
        collector.next()
        collector.update_policy_weights_(weights(1))
        with pytest.raises(UnknownModelError, match="no model 'policy' is received"):
            collector.next()


def test_a_model_received_under_no_scheme_that_applies_stays_as_it_is():
    with nested(Collector, weight_recv_schemes={"policy": NoWeightSyncScheme()}) as collector:
        collector.update_policy_weights_(weights(1))
        assert acts(collector) == 0
