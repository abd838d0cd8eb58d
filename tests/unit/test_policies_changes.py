"""A policy that changes between rollouts: weights, hooks, modes, modules, exploration."""

from copy import deepcopy

import gymnasium as gym
import pytest
import torch
from policies_rig import (
    DETERMINISTIC,
    MODE,
    RANDOM,
    STEPS,
    assert_same,
    layout,
    lowered,
    make,
    plain,
)
from tensordict.nn import ProbabilisticTensorDictModule as Prob
from tensordict.nn import ProbabilisticTensorDictSequential as ProbSeq
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential as Seq
from torch import distributions as D
from torch import nn
from torchrl.modules import MultiAgentMLP

from gleanrl import Collector, PolicyError

FLOATS = ((3,), torch.float32)
INT = ((), torch.int64)


class Setting:
    """A policy with its collectors; `check` compares a batch to plain calls."""

    def __init__(self, policy, action=FLOATS):
        self.policy, self.env = policy, layout((5,), action)
        self.collectors = {}

    def collect(self, kind=RANDOM):
        if kind not in self.collectors:
            self.collectors[kind] = make(self.policy, self.env, kind)
        return next(iter(self.collectors[kind])).clone()

    def check(self, kind=RANDOM):
        torch.manual_seed(3)
        batch = self.collect(kind)
        torch.manual_seed(3)
        assert_same(batch, plain(self.policy, self.env, batch, kind), self.env)
        return batch["action"]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


@pytest.fixture
def setting():
    return Setting(Mod(network(), ["observation"], ["action"]))


def test_an_optimizer_step_shows_in_the_next_rollout(setting):
    before = setting.check()
    optimizer = torch.optim.SGD(setting.policy.parameters(), lr=1.0)
    setting.policy.module(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, setting.check())


def test_a_loaded_state_dict_shows_in_the_next_rollout(setting):
    before = setting.check()
    state = {name: value + 1 for name, value in setting.policy.state_dict().items()}
    setting.policy.load_state_dict(state)
    middle = setting.check()
    setting.policy.load_state_dict({k: v + 1 for k, v in state.items()}, assign=True)
    assert not torch.equal(before, middle)
    assert not torch.equal(middle, setting.check())


def test_a_replaced_parameter_shows_in_the_next_rollout(setting):
    before = setting.check()
    first = setting.policy.module[0]
    first.weight = nn.Parameter(first.weight.detach() * 2)
    middle = setting.check()
    assert not torch.equal(before, middle)
    first.weight.data = first.weight.detach() * 2
    assert not torch.equal(middle, setting.check())


def test_a_replaced_module_shows_in_the_next_rollout(setting):
    before = setting.check()
    setting.policy.module[0] = nn.Linear(4, 8)
    middle = setting.check()
    assert not torch.equal(before, middle)
    setting.policy.module = network()
    assert torch.equal(before, setting.check())


def test_a_replaced_unit_of_a_sequence_shows_in_the_next_rollout():
    policy = Seq(
        Mod(nn.Linear(4, 8), ["observation"], ["hidden"]),
        Mod(nn.Linear(8, 3), ["hidden"], ["action"]),
    )
    setting = Setting(policy)
    before = setting.check()
    policy[1] = Mod(nn.Linear(8, 3), ["hidden"], ["action"])
    assert not torch.equal(before, setting.check())


@pytest.mark.parametrize("where", ["outer", "inner", "leaf"])
def test_hooks_are_respected_when_they_come_and_when_they_go(setting, where):
    before = setting.check()
    policy = setting.policy
    target = {"outer": policy, "inner": policy.module, "leaf": policy.module[0]}[where]
    calls = []

    def count(module, args, result):
        calls.append(1)
        if where != "outer":
            return result + 1
        return result.set("action", result["action"] + 1)

    handle = target.register_forward_hook(count)
    changed = setting.check()
    assert len(calls) == 2 * STEPS
    assert not torch.equal(before, changed)
    handle.remove()
    assert torch.equal(before, setting.check())


def test_global_hooks_are_respected(setting):
    setting.check()
    calls = []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *a: calls.append(1))
    try:
        setting.collect()
    finally:
        handle.remove()
    assert calls


def test_a_forward_replaced_on_the_instance_is_respected(setting):
    before = setting.check()
    setting.policy.module[1].forward = lambda x: x * 2
    assert not torch.equal(before, setting.check())


def test_a_changed_attribute_of_an_activation_is_respected():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 3), nn.LeakyReLU(0.1))
    setting = Setting(Mod(layers, ["observation"], ["action"]))
    before = setting.check()
    layers[1].negative_slope = 0.5
    assert not torch.equal(before, setting.check())


def test_dropout_follows_train_and_eval():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    setting = Setting(Mod(layers, ["observation"], ["action"]))
    trained = setting.check()
    setting.policy.eval()
    calm = setting.check()
    assert torch.equal(calm, setting.check())
    assert not torch.equal(trained, calm)
    setting.policy.train()
    assert torch.equal(trained, setting.check())


@pytest.mark.parametrize("counted", [False, True])
def test_running_statistics_move_as_in_plain_calls(counted):
    layers = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    if not counted:
        layers[0].num_batches_tracked = None
    own = deepcopy(layers[0])
    setting = Setting(Mod(layers, ["observation"], ["action"]))
    for row in setting.collect()["observation"].unbind(1):
        own(row.contiguous())
    for one, other in zip(layers[0].buffers(), own.buffers(), strict=True):
        assert torch.equal(one, other)
    setting.policy.eval()
    setting.check()


def test_agents_that_are_no_tensor_calls_keep_their_weights_where_they_were():
    agents = MultiAgentMLP(2, 1, 3, centralized=False, share_params=True, activation_class=nn.RReLU)
    layers = nn.Sequential(nn.Linear(4, 6), nn.Unflatten(-1, (3, 2)), agents, nn.Flatten(-2))
    names = list(layers.state_dict())
    setting = Setting(Mod(layers, ["observation"], ["action"]))
    setting.check()
    assert list(layers.state_dict()) == names


def actor(**options):
    torch.manual_seed(0)
    return ProbSeq(
        Mod(network(), ["observation"], ["logits"]),
        Prob(["logits"], ["action"], distribution_class=D.Categorical, **options),
    )


def test_the_exploration_type_of_each_rollout_counts():
    setting = Setting(actor(return_log_prob=True), INT)
    drawn = setting.check(RANDOM)
    likely = setting.check(MODE)
    assert torch.equal(likely, setting.check(DETERMINISTIC))
    assert not torch.equal(drawn, likely)
    assert torch.equal(drawn, setting.check(RANDOM))


def test_a_generator_of_the_policys_own_is_used():
    policy = actor(generator=5)
    env = layout((5,), INT)
    generator = vars(policy[1])["_generator"]
    with make(policy, env) as collector:
        state = generator.get_state()
        batch = next(iter(collector)).clone()
    generator.set_state(state)
    assert torch.equal(batch["action"], plain(policy, env, batch)["action"])


@pytest.mark.parametrize("mode", [RANDOM, MODE])
def test_nan_weights_end_the_rollout_with_an_error(mode):
    setting = Setting(actor(return_log_prob=True), INT)
    setting.check(mode)
    with torch.no_grad():
        setting.policy[0].module[0].weight.fill_(float("nan"))
    with pytest.raises(PolicyError, match="NaN or infinite values in 'logits'"):
        setting.collect(mode)


def test_a_scale_of_zero_ends_the_rollout_with_an_error():
    zero = nn.Parameter(torch.zeros(()))
    policy = ProbSeq(
        Mod(
            lambda x: (x[..., :3], x[..., 1:].exp() * (1 - zero)), ["observation"], ["loc", "scale"]
        ),
        Prob(
            ["loc", "scale"],
            ["action"],
            distribution_class=D.Normal,
            distribution_kwargs={"validate_args": True},
        ),
    )
    setting = Setting(policy)
    setting.check()
    assert lowered(setting.collectors[RANDOM]) == 2
    with torch.no_grad():
        zero.fill_(1.0)
    with pytest.raises(PolicyError, match="a scale of at most 0"):
        setting.collect()


def test_autocast_is_respected(setting):
    setting.check()
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(PolicyError, match="wrote 'action' as torch.bfloat16"),
    ):
        setting.collect()


PARAMETRIZATIONS = {
    "weight_norm": nn.utils.parametrizations.weight_norm,
    "spectral_norm": nn.utils.parametrizations.spectral_norm,
    "orthogonal": nn.utils.parametrizations.orthogonal,
}


@pytest.mark.parametrize("kind", PARAMETRIZATIONS)
@pytest.mark.parametrize("evaluated", [True, False])
def test_a_weight_that_parametrize_caches_is_used_no_longer_than_it_is_cached(kind, evaluated):
    torch.manual_seed(0)
    layer = PARAMETRIZATIONS[kind](nn.Linear(4, 3)).eval()
    setting = Setting(Mod(nn.Sequential(layer, nn.Tanh()), ["observation"], ["action"]))
    with nn.utils.parametrize.cached():
        if evaluated:
            setting.policy.module(torch.ones(4))
        inside = setting.check()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(1.5).add_(0.1)
    assert not torch.equal(setting.check(), inside)
    with nn.utils.parametrize.cached():
        setting.check()
        with torch.no_grad():
            layer.bias.add_(1.0)
        setting.check()


class Remembered(nn.Module):
    """A parametrization that computes the weight once, in memory that nothing else knows."""

    memory = {}

    def forward(self, weight):
        key = id(self)
        if key not in self.memory:
            self.memory[key] = (weight * 0.5).detach()
        return self.memory[key]


def test_a_tensor_that_a_policy_hides_is_read_at_every_step():
    layer = nn.Linear(4, 3)
    nn.utils.parametrize.register_parametrization(layer, "weight", Remembered())
    setting = Setting(Mod(nn.Sequential(layer, nn.Tanh()), ["observation"], ["action"]))
    before = setting.check()
    for key in Remembered.memory:
        Remembered.memory[key] = torch.ones(3, 4)
    assert not torch.equal(setting.check(), before)


# -- changes inside a rollout ----------------------------------------------------------------------


class Changing(nn.Module):
    """Passes observations on, and changes another layer at its fourth call after construction."""

    def __init__(self, change):
        super().__init__()
        self.change, self.calls = change, 0

    def forward(self, observation):
        self.calls += 1
        if self.calls == 4:
            self.change()
        return observation


def slope(net):
    net[1].negative_slope = 0.9


def replaced_weight(net):
    net[0].weight.data = net[0].weight.data * 2


def perturbed(net):
    vector = nn.utils.parameters_to_vector(net.parameters())
    nn.utils.vector_to_parameters(vector * 2, net.parameters())


def hooked(net):
    net[1].register_forward_hook(lambda module, args, out: out * 2)


CHANGES = [slope, replaced_weight, perturbed, hooked]


def leaky():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.LeakyReLU(0.1), nn.Linear(3, 3))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("fast", [True, False])
def test_a_change_that_a_policy_makes_inside_a_rollout_is_never_overlooked(change, fast):
    net = leaky()
    changing = Mod(Changing(lambda: change(net)), ["observation"], ["seen"])
    setting = Setting(Seq(changing, Mod(net, ["seen"], ["action"])))
    setting.collectors[RANDOM] = make(setting.policy, setting.env, RANDOM, fast=fast)
    if fast:
        with pytest.raises(PolicyError, match="fast=False"):
            setting.collect()
    else:
        setting.collect()


class Sets(nn.Module):
    """Passes observations on, and sets a layer's slope: ``slopes`` in turns."""

    def __init__(self, layer, *slopes):
        super().__init__()
        self.layer, self.slopes, self.calls = [layer], slopes, 0

    def forward(self, observation):
        self.layer[0].negative_slope = self.slopes[self.calls % len(self.slopes)]
        self.calls += 1
        return observation.clone()


class Hyper(nn.Module):
    """Makes another layer's weight of the observation."""

    def __init__(self, layer):
        super().__init__()
        self.layer = [layer]

    def forward(self, observation):
        self.layer[0].weight.data = observation.mean() * torch.ones_like(self.layer[0].weight)
        return observation.clone()


LOW, HIGH = 0.1, 0.9


def sets_and_restores(net):
    after = Mod(Sets(net[1], LOW), ["action"], ["last"])
    return Seq(
        Mod(Sets(net[1], HIGH), ["observation"], ["seen"]), Mod(net, ["seen"], ["action"]), after
    )


def alternates(net):
    return Seq(
        Mod(Sets(net[1], HIGH, LOW), ["observation"], ["seen"]), Mod(net, ["seen"], ["action"])
    )


def hypernetwork(net):
    return Seq(Mod(Hyper(net[0]), ["observation"], ["seen"]), Mod(net, ["seen"], ["action"]))


@pytest.mark.parametrize("build", [sets_and_restores, alternates, hypernetwork])
def test_a_policy_whose_units_set_what_others_read_is_called_as_it_is(build):
    found = []
    for fast in (True, False):
        net = leaky()
        net[1].negative_slope = LOW
        with make(build(net), layout((5,), FLOATS), RANDOM, fast=fast) as collector:
            found += [collector.next().clone() for _ in range(2)]
            assert lowered(collector) == 0
    for mine, theirs in zip(found[:2], found[2:], strict=True):
        assert torch.equal(mine["observation"], theirs["observation"])
        assert torch.equal(mine["action"], theirs["action"])


class Disturbed(gym.Env):
    """Changes the policy at its third step, as an environment that perturbs weights does."""

    observation_space = gym.spaces.Box(-1, 1, (4,))
    action_space = gym.spaces.Box(-100, 100, (3,))

    def __init__(self, change):
        self.change, self.steps = change, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        self.steps += 1
        if self.steps == 3:
            self.change()
        return self.observation_space.sample(), 0.0, False, False, {}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_that_an_environment_makes_inside_a_rollout_is_never_overlooked(change):
    net = leaky()
    policy = Mod(net, ["observation"], ["action"])
    with (
        Collector(lambda: Disturbed(lambda: change(net)), policy, frames_per_batch=6) as collector,
        pytest.raises(PolicyError, match="fast=False"),
    ):
        collector.next()
    net = leaky()
    policy = Mod(net, ["observation"], ["action"])
    with Collector(
        lambda: Disturbed(lambda: change(net)), policy, frames_per_batch=6, fast=False
    ) as collector:
        collector.next()
        batch = collector.next()
    with torch.no_grad():
        torch.testing.assert_close(batch["action"], net(batch["observation"]))
