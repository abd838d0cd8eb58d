"""Policies that do what nobody expects are called as they are: what they write is what happens."""

import pytest
import torch
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictModuleBase
from tensordict.nn import TensorDictSequential as Seq
from torch import nn
from torchrl.envs import GymEnv as TorchRLGymEnv
from torchrl.envs import Transform, TransformedEnv
from torchrl.modules import OrnsteinUhlenbeckProcessModule
from torchrl.testing.mocking_classes import CountingEnv

from gleanrl import Collector, PolicyError

FAST = pytest.mark.parametrize("fast", [True, False])
ENVS = pytest.mark.parametrize(
    "env", [lambda: "Pendulum-v1", lambda: TorchRLGymEnv("Pendulum-v1")], ids=["id", "torchrl"]
)


def collect(env, policy, frames=12, batches=1, **options):
    collector = Collector(env, policy, frames_per_batch=frames, **options)
    try:
        found = [batch.clone() for _, batch in zip(range(batches), collector, strict=False)]
        return torch.cat(found, -1)
    finally:
        collector.shutdown()


class Undeclared(TensorDictModuleBase):
    """Says neither what it reads nor what it writes."""

    def forward(self, tensordict):
        tensordict["action"] = tensordict["observation"][..., :1] / 2
        tensordict["info", "size"] = tensordict["observation"].norm(dim=-1, keepdim=True)
        return tensordict


@FAST
@ENVS
def test_modules_that_declare_no_keys_are_called(env, fast):
    batch = collect(env(), Undeclared(), fast=fast)
    assert torch.equal(batch["action"], batch["observation"][..., :1] / 2)
    size = batch["observation"].norm(dim=-1, keepdim=True)
    torch.testing.assert_close(batch["info", "size"], size)


# -- what a policy wrote, it reads again -----------------------------------------------------------


@FAST
@ENVS
@pytest.mark.parametrize("key", ["count", "_count"])
def test_root_entries_are_there_at_the_next_step(key, env, fast):
    def policy(td):
        count = td.get(key, torch.zeros(*td.batch_size, 1)) + 1
        td[key] = count
        td["action"] = count / 100
        return td

    batch = collect(env(), policy, 6, 2, fast=fast)
    assert torch.allclose(batch["action"].flatten(), torch.arange(1, 13) / 100)
    assert (key in batch.keys()) == (key[0] != "_")


@pytest.mark.filterwarnings("ignore:.*missing the 'is_init' entry")
@FAST
@ENVS
def test_ornstein_uhlenbeck_noise_is_correlated(env, fast):
    spec = TorchRLGymEnv("Pendulum-v1").action_spec
    torch.manual_seed(0)
    noise = OrnsteinUhlenbeckProcessModule(
        spec=spec, eps_init=1.0, eps_end=1.0, annealing_num_steps=1000, theta=0.15, sigma=0.1
    )
    still = Mod(lambda x: torch.zeros_like(x[..., :1]), ["observation"], ["action"])
    actions = collect(env(), Seq(still, noise), 150, fast=fast)["action"].flatten()
    before, after = actions[:-1] - actions.mean(), actions[1:] - actions.mean()
    lag = (before * after).sum() / (actions - actions.mean()).square().sum()
    assert lag > 0.5, "neighbouring draws belong together"


# -- writes in place that one call does not show ---------------------------------------------------


class Clamping(TensorDictModuleBase):
    in_keys = ["action"]
    out_keys = ["action"]

    def forward(self, tensordict):
        tensordict["action"].clamp_(-0.01, 0.01)
        return tensordict


class Masking(TensorDictModuleBase):
    in_keys = ["action"]
    out_keys = []

    def forward(self, tensordict):
        action = tensordict["action"]
        action[action > 0] = 0
        return tensordict


def linear():
    torch.manual_seed(1)
    return Mod(nn.Linear(3, 1), ["observation"], ["action"])


@FAST
@ENVS
@pytest.mark.parametrize(
    ("last", "holds"),
    [(Clamping, lambda a: a.abs().max() <= 0.011), (Masking, lambda a: a.max() <= 0)],
    ids=["clamped", "masked"],
)
def test_actions_changed_in_place_are_those_that_act(last, holds, env, fast):
    assert holds(collect(env(), Seq(linear(), last()), 40, fast=fast)["action"])


@FAST
@ENVS
def test_an_observation_clamped_in_place_is_what_later_members_read(env, fast):
    def clamp(x):
        return x.clamp_(-0.1, 0.1).sum(-1, keepdim=True)

    policy = Seq(Mod(clamp, ["observation"], ["sum"]), linear())
    batch = collect(env(), policy, 20, fast=fast)
    assert batch["observation"].abs().max() <= 0.11
    with torch.no_grad():
        expected = policy[1].module(batch["observation"])
    torch.testing.assert_close(batch["action"], expected)


@FAST
@ENVS
def test_entries_that_are_written_later_only_arrive(env, fast):
    def late(td):
        td["action"] = td["observation"][..., :1] * 0 + 0.5
        late.calls += 1
        if late.calls > 3:
            td["late"] = td["action"] * 2
        return td

    late.calls = 0
    batch = collect(env(), late, 6, fast=fast)
    found = ["late" in step.keys() for step in batch.unbind(0)]
    assert found[-1]
    assert not found[0]


# -- what the policy wrote is in the environment's TensorDict --------------------------------------


class Spying(Transform):
    """Shows as reward what the policy wrote beside the action."""

    def _step(self, tensordict, next_tensordict):
        loc = tensordict.get("loc", None)
        assert loc is not None, "what the policy wrote is not here"
        return next_tensordict.set("reward", loc.clone())


@FAST
def test_environments_and_transforms_get_all_that_the_policy_wrote(fast):
    policy = Seq(
        Mod(nn.Linear(3, 1), ["observation"], ["loc"]),
        Mod(torch.tanh, ["loc"], ["action"]),
    )
    env = TransformedEnv(TorchRLGymEnv("Pendulum-v1"), Spying())
    batch = collect(env, policy, fast=fast)
    assert torch.equal(batch["next", "reward"], batch["loc"])


# -- actions ---------------------------------------------------------------------------------------


@FAST
@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int8, torch.float32, torch.float64, torch.bool]
)
def test_tensordict_environments_get_actions_as_they_were_written(dtype, fast):
    seen = []

    class Env(CountingEnv):
        def _step(self, tensordict):
            action = tensordict["action"]
            seen.append((action.dtype, action.shape))
            return super()._step(tensordict.copy().set("action", action.to(torch.int8)))

    def policy(td):
        return td.set("action", torch.ones(1, dtype=dtype))

    batch = collect(Env(max_steps=50), policy, 4, fast=fast)
    assert set(seen) == {(dtype, (1,))}
    assert batch["action"].dtype == dtype
    assert batch["next", "observation"].flatten().tolist() == [1, 2, 3, 4]


@FAST
def test_no_action_is_wrapped(fast):
    class Env(CountingEnv):
        def _step(self, tensordict):
            assert int(tensordict["action"]) == 300
            one = torch.ones(1, dtype=torch.int8)
            return super()._step(tensordict.copy().set("action", one))

    def policy(td):
        return td.set("action", torch.full((1,), 300, dtype=torch.int32))

    assert (collect(Env(max_steps=50), policy, 3, fast=fast)["action"] == 300).all()


@FAST
@pytest.mark.parametrize("num_envs", [None, 2])
def test_actions_for_gymnasium_are_cast_without_loss_or_refused(num_envs, fast):
    def narrow(td):
        return td.set("action", torch.ones(td.batch_size, dtype=torch.int32))

    options = {"num_envs": num_envs, "fast": fast}
    assert (collect("CartPole-v1", narrow, 4, **options)["action"] == 1).all()

    def wide(td):
        return td.set("action", td["observation"][..., :1].double())

    with pytest.raises(PolicyError, match="float64; the environment wants torch.float32"):
        collect("Pendulum-v1", wide, 4, **options)


# -- lowering that fails ---------------------------------------------------------------------------


class Packed(torch.Tensor):
    """A kind of weights that knows ``linear`` and little else, as quantised ones do."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if (kwargs or {}).get("out") is not None or func in (torch.addmm, torch.Tensor.t, torch.mm):
            raise NotImplementedError(f"{func} is not known")
        plain = [arg.as_subclass(torch.Tensor) if type(arg) is cls else arg for arg in args]
        if func is nn.functional.linear:
            return func(*plain, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})


@FAST
@ENVS
def test_a_unit_whose_lowering_raises_is_called_as_it_is(env, fast):
    policy = linear()
    policy.module.weight = nn.Parameter(policy.module.weight.detach().as_subclass(Packed))
    batch = collect(env(), policy, fast=fast)
    with torch.no_grad():
        torch.testing.assert_close(batch["action"], policy.module(batch["observation"]))
