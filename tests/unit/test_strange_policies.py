"""Policies that do what nobody expects are called as they are: what they write is what happens."""

import re
from functools import partial

import gymnasium as gym
import pytest
import torch
from clocks_rig import Clock, clocks
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictModuleBase
from tensordict.nn import TensorDictSequential as Seq
from torch import nn
from torchrl.envs import GymEnv as TorchRLGymEnv
from torchrl.envs import GymWrapper as TorchRLGymWrapper
from torchrl.envs import Transform, TransformedEnv
from torchrl.modules import OrnsteinUhlenbeckProcessModule
from torchrl.testing.mocking_classes import CountingEnv

from gleanrl import Collector, PolicyError, PolicyTypeError
from gleanrl.envs import GymEnv, SerialEnv

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


class Copying:
    """Returns a copy of what it is given, once with the observation doubled."""

    def __init__(self, doubles=None):
        self.calls, self.doubles = 0, doubles

    def __call__(self, tensordict):
        self.calls += 1
        out = tensordict.clone()
        if self.calls == self.doubles:
            out["observation"] = out["observation"] * 2
        return out.set("action", torch.ones(out.batch_size, dtype=torch.long))


@FAST
def test_pools_that_reset_in_their_next_step_take_policies_that_return_copies(fast):
    def pool():
        return gym.make_vec("CartPole-v1", num_envs=2)

    assert (collect(pool(), Copying(), 40, fast=fast)["action"] == 1).all()
    with pytest.raises(PolicyError, match="changed 'observation'.*num_envs="):
        collect(pool(), Copying(doubles=4), 40, fast=fast)


class Keeping:
    """Shows the observation of the TensorDict that it was called on before."""

    kept = None

    def __call__(self, tensordict):
        before = tensordict if self.kept is None else self.kept
        tensordict["before"] = before["observation"].clone()
        tensordict["action"] = tensordict["observation"][..., :1] / 2
        self.kept = tensordict
        return tensordict


@FAST
@pytest.mark.parametrize(
    "env",
    [
        lambda: "Pendulum-v1",
        lambda: TorchRLGymEnv("Pendulum-v1"),
        lambda: gym.make_vec("Pendulum-v1", num_envs=1, vectorization_mode="sync"),
    ],
    ids=["id", "torchrl", "vector"],
)
def test_a_tensordict_that_a_policy_keeps_stays_that_of_its_step(env, fast):
    batch = collect(env(), Keeping(), 3, batches=3, fast=fast).reshape(-1)
    assert torch.equal(batch["before"][1:], batch["observation"][:-1])


def writing(key):
    def policy(tensordict):
        tensordict["action"] = tensordict["observation"][..., :1] / 2
        tensordict[key] = torch.full((*tensordict.batch_size, 1), 5.0)
        return tensordict

    return policy


@FAST
@ENVS
def test_an_entry_that_has_the_name_of_one_for_recurrent_policies_is_delivered(env, fast):
    assert collect(env(), writing("is_init"), fast=fast)["is_init"].eq(5).all()


@FAST
@ENVS
@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("step_count", {"max_frames_per_traj": 3}),
        ("policy_version", {"track_policy_version": True}),
        (("collector", "traj_ids"), {}),
    ],
)
def test_an_entry_that_the_collector_delivers_is_not_for_the_policy_to_write(
    key, options, env, fast
):
    with pytest.raises(
        PolicyError,
        match="the policy writes .*, which the collector delivers",
    ):
        collect(env(), writing(key), fast=fast, **options)


# -- how many steps the episode has taken ----------------------------------------------------------


class Counted(TensorDictModuleBase):
    """Picks actions by the step count, which is an index of its embedding."""

    in_keys = ["step_count"]
    out_keys = ["action", "output1"]

    def __init__(self):
        super().__init__()
        self.scores = nn.Embedding(4, 5)

    def forward(self, tensordict):
        count = tensordict["step_count"]
        tensordict["action"] = self.scores(count[..., 0]).argmax(-1)
        return tensordict.set("output1", count + 0)


def counted(tensordict):
    tensordict["action"] = tensordict["step_count"][..., 0]
    return tensordict.set("output1", tensordict["step_count"].clone())


def by_count(step_count):
    return step_count[..., 0], step_count + 0


CLOCKS = [partial(Clock, 0, (1, 2)), partial(Clock, 1, (9,)), partial(Clock, 2, (5, 3))]


@pytest.mark.covering
@pytest.mark.parametrize("policy", [Counted(), counted, by_count])
@pytest.mark.parametrize(
    ("env", "fast"),
    [
        (lambda: CLOCKS, True),
        (lambda: CLOCKS, False),
        (lambda: clocks([(1, 2), (9,), (5, 3)]), True),
        (lambda: TorchRLGymWrapper(Clock(2, (5, 3)), categorical_action_encoding=True), True),
    ],
    ids=["rows", "plain", "next-step", "torchrl"],
)
def test_policies_read_how_many_steps_their_episode_has_taken(env, fast, policy):
    options = {"frames_per_batch": 21, "max_frames_per_traj": 4, "fast": fast}
    found = []
    with Collector(env(), policy, **options) as collector:
        for i, batch in zip(range(4), collector, strict=False):
            found += batch["step_count"].flatten().tolist()
            assert torch.equal(batch["output1"], batch["step_count"])
            assert torch.equal(batch["observation"][..., 2:].long(), batch["step_count"])
            if i == 1:
                collector.reset()
    assert set(found) == {0, 1, 2, 3}


@pytest.mark.parametrize("name", ["step_count", "is_init"])
def test_an_argument_named_after_what_is_not_there_gets_no_observation(name):
    policy = {"step_count": lambda step_count: step_count, "is_init": lambda is_init: is_init}[name]
    with pytest.raises(PolicyTypeError, match=rf"\({name}\) cannot be called"):
        collect("Pendulum-v1", policy)


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
@pytest.mark.parametrize(
    "make",
    [
        lambda one: GymEnv("Pendulum-v1", num_envs=2),
        lambda one: SerialEnv(2, one),
        lambda one: SerialEnv(1, lambda: SerialEnv(2, one)),
    ],
)
def test_a_reset_of_some_before_the_first_batch_leaves_what_the_others_show(make, fast):
    def policy(td):
        td["action"] = td["observation"].add_(0)[..., :1]
        return td

    env = make(lambda: GymEnv("Pendulum-v1"))
    with Collector(env, policy, frames_per_batch=6, fast=fast) as collector:
        collector.reset([0])
        collector.reset([0])
        batch = collector.next().reshape(2, 3)
    assert batch["observation"][:, 0, :2].norm(dim=-1).allclose(torch.ones(2))


@ENVS
def test_entries_that_are_written_later_only_arrive_without_the_fast_path(env):
    def late(td):
        td["action"] = td["observation"][..., :1] * 0 + 0.5
        late.calls += 1
        if late.calls > 3:
            td["late"] = td["action"] * 2
        return td

    late.calls = 0
    with pytest.raises(PolicyError, match="'late'"):
        collect(env(), late, 6)
    late.calls = 0
    batch = collect(env(), late, 6, fast=False)
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


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("num_envs", [None, 3])
def test_indices_for_a_one_hot_environment_are_converted_with_one_warning(fast, num_envs):
    policy = Mod(lambda seen: (seen[..., 0] > 0).long(), ["observation"], ["action"])
    options = {"frames_per_batch": 12, "total_frames": 24, "num_envs": num_envs, "fast": fast}
    with pytest.warns(UserWarning, match="indices as 'action'.*converted") as told:
        collector = Collector("CartPole-v1", policy, categorical_action_encoding=False, **options)
    for batch in collector:  # a second warning would be an error
        hot = batch["action"]
        assert (hot.shape[-1], hot.dtype) == (2, torch.int64)
        assert torch.equal(hot.argmax(-1), (batch["observation"][..., 0] > 0).long())
        assert torch.equal(hot.sum(-1), torch.ones_like(hot[..., 0]))
    assert len(told) == 1


# -- what a policy writes later, and did not write in its first call -------------------------------


class Later(TensorDictModuleBase):
    """Names what it writes, and does something else too from its ninth call on."""

    in_keys, out_keys = ("observation",), ("action",)

    def __init__(self, surprise):
        super().__init__()
        self.surprise, self.calls = surprise, 0

    def forward(self, tensordict):
        self.calls += 1
        tensordict["action"] = tensordict["observation"][..., :1] / 2
        if self.calls > 8:
            self.surprise(tensordict)
        return tensordict


SURPRISES = {
    "an entry": (lambda td: td.set("late", td["action"].clone()), "wrote 'late'"),
    "a nested entry": (lambda td: td.set(("late", "one"), td["action"].clone()), "wrote 'late'"),
    "an entry under next": (
        lambda td: td.set(("next", "late"), td["action"].clone()),
        r"wrote ('next'|\('next', 'late'\))",
    ),
    "an object": (lambda td: td.set_non_tensor("late", "text"), "wrote 'late' as"),
    "another dtype": (
        lambda td: td.set("action", td["action"].double()),
        "wrote 'action' as torch.float64",
    ),
    "the observation": (
        lambda td: td.set("observation", td["observation"] * 2),
        "changed 'observation'",
    ),
    "the observation left out": (lambda td: td.pop("observation"), "changed 'observation'"),
    "the observation in place": (lambda td: td["observation"].mul_(2), "changed 'observation'"),
}


class FromNestedToLeaf(Later):
    """Writes a tensor where its first calls wrote a TensorDict."""

    def forward(self, tensordict):
        self.calls += 1
        tensordict["action"] = tensordict["observation"][..., :1] / 2
        part = tensordict.select("action") if self.calls < 6 else tensordict["action"].clone()
        return tensordict.set("part", part)


def test_a_tensor_in_place_of_a_nested_part_needs_an_open_layout():
    options = {"num_envs": 2, "frames_per_batch": 8}
    with Collector("Pendulum-v1", FromNestedToLeaf(None), fast=False, **options) as collector:
        first, second = (collector.rollout() for _ in range(2))
    assert torch.equal(first["part", "action"], first["action"])
    assert torch.equal(second["part"], second["action"])
    with (
        Collector("Pendulum-v1", FromNestedToLeaf(None), **options) as collector,
        pytest.raises(PolicyError, match="wrote 'part' as torch.float32"),
    ):
        _ = [collector.rollout() for _ in range(2)]


def steps_of(batch):
    return [{k: step.get(k) for k in step.keys(True, True)} for step in batch.unbind(-1)]


def until_it_fails(vectorised, policy, fast):
    """Return the steps of three batches, and what ended them early."""
    env, options = "Pendulum-v1", {"num_envs": 2}
    if vectorised:
        mode = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
        env, options = partial(gym.make_vec, env, 2, vectorization_mode="sync"), {}
        env.keywords["vector_kwargs"] = mode
    steps = []
    with Collector(env, policy, frames_per_batch=12, fast=fast, **options) as collector:
        collector.set_seed(0)
        try:
            for _, batch in zip(range(3), collector, strict=False):
                steps += steps_of(batch)
        except Exception as error:
            return steps, (type(error), str(error))
    return steps, None


def agree(plain, fast, message):
    """Check that the fast path gave the same steps, until it refused one."""
    assert fast[1][0] is PolicyError
    assert re.search(rf"the policy {message}.* in its first call.*fast=False", fast[1][1])
    assert len(fast[0]) < len(plain[0])
    for one, other in zip(plain[0], fast[0], strict=False):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert value.dtype == other[key].dtype
            torch.testing.assert_close(other[key], value, rtol=0, atol=0)


@pytest.mark.covering
@pytest.mark.parametrize("vectorised", [False, True])
@pytest.mark.parametrize("name", SURPRISES)
def test_what_a_policy_writes_later_is_an_error_or_delivered_without_the_fast_path(
    name, vectorised
):
    surprise, message = SURPRISES[name]
    plain = until_it_fails(False, Later(surprise), False)
    assert plain[1] is None
    agree(plain, until_it_fails(vectorised, Later(surprise), True), message)


def later(surprise, count):
    """Return a function on tensors that does something else after ``count`` calls."""
    calls = 0

    def act(observation):
        nonlocal calls
        calls += 1
        action = observation[..., :1] / 2
        return surprise(observation, action) if calls > count else (action, action * 2)

    return act


def in_place(observation, action):
    observation.mul_(2)
    return action, action


FUNCTIONS = {
    "another dtype": (lambda _, action: (action, action.double()), "wrote 'output1' as .*float64"),
    "another shape": (lambda _, action: (action, action.expand(-1, 3)), "wrote 'output1' as"),
    "another dtype of the action": (
        lambda _, action: (action.half(), action),
        "wrote 'action' as .*float16",
    ),
    "an output less": (lambda _, action: action, "returned 1 values"),
    "an output more": (lambda _, action: (action, action, action), "returned 3 values"),
    "its argument in place": (in_place, "changed 'observation'"),
    "a tensor without the batch's shape": (
        lambda _, action: (action, torch.zeros(7, 1)),
        "wrote 'output1' as",
    ),
    "an object": (lambda _, action: (action, "text"), "wrote 'output1' as 'text'"),
}


def followed(act):
    """Return ``act`` between two that draw: nothing may be called twice."""
    draw = Mod(lambda seen: torch.rand_like(seen[..., :1]), ["observation"], ["drawn"])
    acting = Mod(act, ["observation"], ["action", "output1"])
    noisy = Mod(lambda size: size.float() + torch.rand(2, 1), ["output1"], ["noisy"])
    return Seq(draw, acting, noisy)


@pytest.mark.covering
@pytest.mark.parametrize(
    ("count", "within"), [(6, lambda act: act), (6, followed), (8, followed)]
)  # from the first step of a batch on, and from another
@pytest.mark.parametrize("vectorised", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_on_tensors_that_returns_something_else_later_is_an_error(
    name, vectorised, count, within
):
    function, message = FUNCTIONS[name]
    plain = until_it_fails(False, within(later(lambda _, action: (action, action * 2), 0)), False)
    agree(plain, until_it_fails(vectorised, within(later(function, count)), True), message)


@pytest.mark.parametrize(
    ("policy", "names"),
    [
        (Later(SURPRISES["an entry"][0]), "wrote 'late' as .*num_envs="),
        (
            lambda td: td.set("action", td.get("observation").mul_(0.5)[..., :1]),
            "changes 'obs.*num_envs=",
        ),
        (
            lambda td: td.set_non_tensor("text", "a").set("action", torch.zeros(2, 1)),
            "'text'.*num_envs=",
        ),
    ],
)
@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_vector_environments_name_what_does_not_fit(policy, names, mode):
    options = {"autoreset_mode": mode}
    env = gym.make_vec("Pendulum-v1", 2, vectorization_mode="sync", vector_kwargs=options)
    if isinstance(policy, Later):
        policy.calls = 0
    with (
        pytest.raises(PolicyError, match=names),
        Collector(env, policy, frames_per_batch=24) as collector,
    ):
        next(iter(collector))
