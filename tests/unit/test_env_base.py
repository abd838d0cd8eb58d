"""Environments written for TorchRL's `EnvBase` are ours by their imports: the data are the same."""

import sys
import traceback
import types
import warnings
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
import torchrl.data as their_data
from gymnasium import spaces
from tensordict import TensorDict
from torchrl.envs import EnvBase as TheirEnvBase

import gleanrl.data as our_data
from gleanrl import ConfigError, EnvError, ParallelEnv, SerialEnv
from gleanrl.collectors import Collector
from gleanrl.envs import EnvBase, GymEnv

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # TorchRL's own, while it is imported
    from torchrl.collectors import Collector as TheirCollector

OURS = types.SimpleNamespace(EnvBase=EnvBase, data=our_data)
THEIRS = types.SimpleNamespace(EnvBase=TheirEnvBase, data=their_data)


def pendulum(lib):
    """Return a stateless pendulum: its physics travel with the data, its batch size is free."""
    data = lib.data

    def make_physics(batch_size=()):
        params = {"gravity": 10.0, "torque": 2.0, "speed": 8.0, "dt": 0.05}
        found = TensorDict({"params": TensorDict(params, [])}, [])
        return found.expand(batch_size).contiguous() if batch_size else found

    def swing(tensordict):
        angle, velocity, params = (tensordict[key] for key in ("angle", "velocity", "params"))
        push = tensordict["action"].squeeze(-1).clamp(-params["torque"], params["torque"])
        cost = angle**2 + 0.1 * velocity**2 + 0.001 * push**2
        velocity = velocity + (1.5 * params["gravity"] * angle.sin() + 3 * push) * params["dt"]
        velocity = velocity.clamp(-params["speed"], params["speed"])
        reward = -cost.view(*tensordict.shape, 1)
        return TensorDict(
            {
                "angle": angle + velocity * params["dt"],
                "velocity": velocity,
                "params": params,
                "reward": reward,
                "done": torch.zeros_like(reward, dtype=torch.bool),
            },
            tensordict.shape,
        )

    class Pendulum(lib.EnvBase):
        metadata = {"render_fps": 30}
        batch_locked = False

        def __init__(self, seed=0, device="cpu"):
            super().__init__(device=device, batch_size=[])
            self._describe(self.physics())
            self.set_seed(seed)

        def _describe(self, given):
            params = given["params"]
            self.observation_spec = data.Composite(
                angle=data.Unbounded(shape=(), dtype=torch.float32),
                velocity=data.Bounded(
                    low=-params["speed"], high=params["speed"], shape=(), dtype=torch.float32
                ),
                params=data.Composite(
                    {k: data.Unbounded(shape=v.shape, dtype=v.dtype) for k, v in params.items()},
                    shape=(),
                ),
                shape=(),
            )
            self.state_spec = self.observation_spec.clone()
            self.action_spec = data.Bounded(
                low=-params["torque"], high=params["torque"], shape=(1,), dtype=torch.float32
            )
            self.reward_spec = data.Unbounded(shape=(*given.shape, 1))

        def _reset(self, tensordict):
            if tensordict is None or tensordict.is_empty():
                tensordict = self.physics(batch_size=self.batch_size)
            draws = torch.rand((2, *tensordict.shape), generator=self.rng, device=self.device)
            start = {
                "angle": draws[0] * 2 - 1,
                "velocity": draws[1],
                "params": tensordict["params"],
            }
            return TensorDict(start, tensordict.shape)

        def _set_seed(self, seed):
            self.rng = torch.Generator()
            self.rng.manual_seed(seed)

        physics = staticmethod(make_physics)
        _step = staticmethod(swing)

    return Pendulum


def counter(lib):
    """Return an environment that keeps its state in a buffer and declares specs by group."""
    data = lib.data

    class Counter(lib.EnvBase):
        def __init__(self, limit=3, **options):
            super().__init__(**options)
            self.limit = limit
            size = self.batch_size
            self.observation_spec = data.Composite(
                count=data.Unbounded((*size, 1), dtype=torch.int32), shape=size
            )
            self.full_action_spec = data.Composite(
                action=data.Binary(1, shape=(*size, 1)), shape=size
            )
            self.reward_spec = data.Unbounded((*size, 1))
            self.done_spec = data.Composite(
                done=data.Categorical(2, shape=(*size, 1), dtype=torch.bool), shape=size
            )
            self.register_buffer("count", torch.zeros((*size, 1), dtype=torch.int32))

        def _set_seed(self, seed):
            torch.manual_seed(seed)

        def _reset(self, tensordict=None, **options):
            # All of them, whatever the mask says: data of the others must survive nevertheless.
            mask = None if tensordict is None else tensordict.get("_reset", None)
            if mask is None:
                self.count.zero_()
            else:
                self.count[mask] = 0
            shown = self.count.clone()
            if mask is not None:
                shown[~mask] = 77
            return TensorDict({"count": shown}, self.batch_size)

        def _step(self, tensordict):
            self.count += tensordict["action"].to(torch.int32)
            return TensorDict(
                {
                    "count": self.count.clone(),
                    "reward": self.count.float(),
                    "terminated": self.count >= self.limit,
                },
                self.batch_size,
            )

    return Counter


def stateless(lib):
    """Return an environment that assigns its specs before it is initialised."""
    data = lib.data

    class Stateless(lib.EnvBase):
        def __init__(self):
            self.observation_spec = data.Composite(at=data.Unbounded((1,), dtype=torch.int32))
            self.state_spec = data.Composite(at=data.Unbounded((1,), dtype=torch.int32))
            self.full_action_spec = data.Composite(move=data.Bounded(0, 3, (1,), dtype=torch.int32))
            self.full_done_spec = data.Composite(
                done=data.Unbounded((1,), dtype=torch.bool),
                truncated=data.Unbounded((1,), dtype=torch.bool),
            )
            self.reward_spec = data.Composite(reward=data.Unbounded((1,)))
            super().__init__()

        def _reset(self, tensordict, **options):
            return TensorDict({"at": torch.zeros(1, dtype=torch.int32)}, ())

        def _step(self, tensordict):
            at = tensordict["at"] + tensordict["move"]
            return TensorDict({"at": at, "reward": at.float(), "done": at > 9}, ())

        def _set_seed(self, seed):
            pass

    return Stateless


def agents(lib):
    """Return an environment of three agents whose group has a batch size of its own."""
    data = lib.data

    class Agents(lib.EnvBase):
        def __init__(self):
            super().__init__()
            group = {"seen": data.Unbounded((3, 2)), "at": data.Unbounded((3, 1))}
            self.observation_spec = data.Composite(agents=data.Composite(group, shape=(3,)))
            self.action_spec = data.Composite(
                agents=data.Composite(action=data.OneHot(4, shape=(3, 4)), shape=(3,))
            )
            self.reward_spec = data.Composite(
                agents=data.Composite(reward=data.Unbounded((3, 1)), shape=(3,))
            )
            self.done_spec = data.Categorical(2, shape=(1,), dtype=torch.bool)
            self.taken = 0

        def show(self, **more):
            at = torch.full((3, 1), float(self.taken))
            return TensorDict({"seen": at.expand(3, 2).clone(), "at": at, **more}, [3])

        def _reset(self, tensordict=None, **options):
            self.taken = 0
            return TensorDict({"agents": self.show()}, [])

        def _step(self, tensordict):
            assert tensordict["agents", "action"].sum() == 3
            self.taken += 1
            group = self.show(reward=torch.full((3, 1), float(self.taken)))
            done = torch.tensor(self.taken >= 4)  # gets its declared shape
            return TensorDict({"agents": group, "done": done}, [])

        def _set_seed(self, seed):
            pass

    return Agents


KINDS = [pendulum, counter, stateless, agents]


def same(ours, theirs):
    """Compare keys, values and dtypes; TorchRL's collectors add what only they need."""
    mine = {k: v for k, v in ours.items(True, True) if "collector" not in k}
    other = {k: v for k, v in theirs.items(True, True) if "collector" not in k}
    assert mine.keys() == other.keys()
    for key, value in mine.items():
        assert value.dtype == other[key].dtype, key
        assert torch.equal(value, other[key]), key
    return True


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ends", [True, False])
def test_a_rollout_is_that_of_torchrl(kind, ends):
    rolled = []
    for lib in (OURS, THEIRS):
        env = kind(lib)()
        env.set_seed(3)
        torch.manual_seed(5)
        rolled.append(env.rollout(12, break_when_any_done=ends))
    assert same(*rolled)
    assert rolled[0].names == rolled[1].names


def acting(tensordict):
    """Act the same in every environment of a kind."""
    batch = tensordict.batch_size
    if "agents" in tensordict.keys():
        action = torch.eye(4, dtype=torch.bool)[:3].expand(*batch, 3, 4)
        return tensordict.set(("agents", "action"), action.clone())
    if "at" in tensordict.keys():
        return tensordict.set("move", torch.full((*batch, 1), 2, dtype=torch.int32))
    dtype = torch.int8 if "count" in tensordict.keys() else torch.float32
    return tensordict.set("action", torch.ones(*batch, 1, dtype=dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_its_environments_side_by_side(kind):
    single = kind(OURS)().rollout(12, acting, break_when_any_done=False)
    assert same(
        SerialEnv(2, kind(OURS)).rollout(12, acting, break_when_any_done=False),
        torch.stack([single, single]),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_collected_data_are_those_of_torchrl(kind):
    collected = []
    for lib, collector in ((OURS, Collector), (THEIRS, TheirCollector)):
        made = collector(kind(lib)(), acting, frames_per_batch=20, total_frames=40)
        collected.append([data.clone() for data in made])
        made.shutdown()
    for ours, theirs in zip(*collected, strict=True):
        assert same(ours, theirs)


@pytest.mark.parametrize("batch", [(2,), (2, 3)])
def test_partial_resets_keep_the_others_data(batch):
    rolled = []
    for lib in (OURS, THEIRS):
        env = counter(lib)(batch_size=batch)
        torch.manual_seed(5)
        rolled.append(env.rollout(12, break_when_any_done=False))
        assert (rolled[-1]["count"] != 77).all()
    assert same(*rolled)


class Pair(EnvBase):
    """Two environments of three agents each, which last two and three steps."""

    def __init__(self):
        super().__init__(batch_size=(2,))
        for name, spec in (
            ("observation", our_data.Unbounded((2, 3, 1))),
            ("action", our_data.Categorical(2, (2, 3))),
        ):
            group = our_data.Composite({name: spec}, shape=(2, 3))
            setattr(self, f"{name}_spec", our_data.Composite(agents=group, shape=(2,)))
        self.taken = torch.zeros(2, 1)

    def shown(self):
        seen = self.taken[..., None].expand(2, 3, 1).clone()
        return TensorDict({"agents": TensorDict({"observation": seen}, (2, 3))}, (2,))

    def _reset(self, tensordict=None, **options):
        mask = True if tensordict is None else tensordict.get("_reset", True)
        self.taken = torch.where(torch.as_tensor(mask), 0, self.taken)
        return self.shown()

    def _step(self, tensordict):
        self.taken = self.taken + 1
        done = self.taken >= torch.tensor([[2], [3]])
        return self.shown().update({"reward": self.taken, "done": done})

    def _set_seed(self, seed):
        pass


@pytest.mark.parametrize("fast", [None, True, False])
def test_partial_resets_keep_the_data_of_groups_that_have_actions(fast):
    if fast is None:
        data = Pair().rollout(6, break_when_any_done=False)
    else:
        (data,) = Collector(Pair, frames_per_batch=12, total_frames=12, fast=fast)
    seen = data["agents", "observation"][..., 0, 0]
    assert seen.tolist() == [[0, 1, 0, 1, 0, 1], [0, 1, 2, 0, 1, 2]]


def test_groups_keep_their_batch_size_everywhere():
    env = agents(OURS)()
    assert env.fake_tensordict()["agents"].batch_size == (3,)
    assert env.rollout(2)["next", "agents"].batch_size == (2, 3)
    with ParallelEnv(2, agents(OURS)) as parallel:
        for batch in (SerialEnv(2, agents(OURS)), parallel):
            assert batch.full_action_spec["agents"].shape == (2, 3)
            assert batch.fake_tensordict()["next", "agents"].batch_size == (2, 3)
            assert batch.rollout(3)["agents"].batch_size == (2, 3, 3)


def test_names_of_groups_are_kept_by_a_serial_env_and_refused_by_a_parallel_one():
    class Named(agents(OURS)):
        def show(self, **more):
            return super().show(**more).refine_names("agent")

    batch = SerialEnv(2, Named)
    assert batch.reset()["agents"].names == [None, "agent"]
    assert batch.rollout(3)["next", "agents"].names[-1] == "agent"
    refused = pytest.raises(EnvError, match=r"'agents' as TensorDict .*, named \['agent'\]")
    with ParallelEnv(2, Named) as parallel, refused:
        parallel.reset()


def test_a_pendulum_can_be_run_in_any_batch_size():
    env = pendulum(OURS)()
    data = env.rollout(5, auto_reset=False, tensordict=env.reset(env.physics(batch_size=[4])))
    assert data.batch_size == (4, 5)
    assert data["next", "reward"].shape == (4, 5, 1)


@pytest.mark.parametrize("arguments", [{"break_when_all_done": True}, {}])
def test_a_rollout_can_go_on_until_all_have_ended(arguments):
    class Uneven(counter(OURS)):
        def _step(self, tensordict):
            after = super()._step(tensordict.set("action", torch.ones(2, 1)))
            return after.set("terminated", self.count >= torch.tensor([[2], [4]]))

    data = Uneven(batch_size=(2,)).rollout(9, **arguments)
    if not arguments:
        assert data.shape == (2, 2)
        return
    assert data["next", "count"][..., 0].tolist() == [[1, 2, 2, 2], [1, 2, 3, 4]]
    assert data["next", "done"][..., 0].tolist() == [
        [False, True, True, True],
        [False] * 3 + [True],
    ]


def test_until_all_have_ended_no_environment_is_stepped_after_its_end():
    class Ends(gym.Env):
        observation_space = spaces.Box(0, 9, (), np.float32)
        action_space = spaces.Discrete(2)

        def __init__(self, length):
            self.length, self.count = length, None

        def reset(self, *, seed=None, options=None):
            self.count = 0
            return np.float32(0), {}

        def step(self, action):
            assert self.count < self.length
            self.count += 1
            return np.float32(self.count), 1.0, self.count == self.length, False, {}

    makers = [partial(GymEnv, Ends(length)) for length in (2, 1, 5)]
    shown = []
    data = SerialEnv(3, makers).rollout(
        9, callback=lambda _, step: shown.append(step.clone()), break_when_all_done=True
    )
    after = data["next", "observation"].tolist()
    assert after == [[1, 2, 2, 2, 2], [1, 1, 1, 1, 1], [1, 2, 3, 4, 5]]
    assert data["next", "done"].sum(1).flatten().tolist() == [4, 5, 1]
    assert bool((torch.stack(shown, 1) == data).all())


@pytest.mark.parametrize("steps", [0, -1, 1.5])
def test_a_rollout_has_a_step(steps):
    with pytest.raises(ConfigError, match=rf"max_steps \({steps}\) must be "):
        GymEnv("CartPole-v1").rollout(steps)


def test_errors_of_a_rollout_show_no_frames_of_the_library():
    def interrupted(data):
        raise KeyboardInterrupt

    for policy, error in ((interrupted, KeyboardInterrupt), (lambda data: 1 / 0, ArithmeticError)):
        with pytest.raises(error) as caught:
            SerialEnv(2, "CartPole-v1").rollout(3, policy)
        frames = [frame.name for frame in traceback.extract_tb(caught.tb)]
        assert frames == [sys._getframe().f_code.co_name, policy.__name__]


def test_arguments_of_torchrls_batches_are_taken():
    accepted = {
        "serial_for_single": True,
        "mp_start_method": "spawn",
        "shared_memory": True,
        "share_individual_td": True,
        "num_threads": 1,
        "num_sub_threads": 1,
        "use_buffers": False,
        "daemon": True,
        "non_blocking": False,
        "allow_step_when_done": True,
    }
    assert SerialEnv(1, "CartPole-v1", **accepted).reset()["observation"].shape == (1, 4)
    ParallelEnv(1, "CartPole-v1", **accepted, shutdown_timeout=3.0).close()
    for batch in (SerialEnv, ParallelEnv):
        with pytest.raises(TypeError, match="takes no serial_for_singel=; .* serial_for_single="):
            batch(1, "CartPole-v1", serial_for_singel=True)


def paid(reward, **entries):
    return TensorDict({"x": torch.ones(1), "reward": reward, **entries})


def returning(reset=None, step=None, reward=None, **options):
    class Odd(EnvBase):
        def __init__(self):
            super().__init__(**options)
            if reward is not None:
                self.reward_spec = reward
            self.observation_spec = our_data.Composite(x=our_data.Unbounded((1,)))
            self.action_spec = our_data.Categorical(2)

        def _reset(self, tensordict=None):
            return TensorDict({"x": torch.zeros(1)}) if reset is None else reset

        def _step(self, tensordict):
            return step

        def _set_seed(self, seed):
            pass

    return Odd()


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (lambda: returning(reset=(1, 2)), r"Odd._reset returned \(1, 2\), not a TensorDict"),
        (lambda: returning(step=5), r"Odd._step returned 5, not a TensorDict"),
        (lambda: returning(step=TensorDict({"x": torch.ones(1)})), "returned no 'reward'"),
        (lambda: returning(step=paid(None)), "Odd returned 'reward' = None; it must be a number"),
        (lambda: returning(step=paid("1")), "'reward' = '1'; it must be a number"),
        (
            lambda: returning(step=paid(np.float64(1e39))),
            "'reward' = .* torch.float32 does not hold",
        ),
        (lambda: returning(step=paid(1.0, done=0.5)), "'done' = .* torch.bool does not hold"),
        (
            lambda: returning(step=paid(0.7), reward=our_data.Unbounded((1,), dtype=torch.int64)),
            "'reward' = .* torch.int64 does not hold",
        ),
        (
            lambda: returning(step=paid(torch.zeros(3, 2)), reward=our_data.Unbounded((2, 3))),
            r"'reward' of shape \(3, 2\); its spec declares \(2, 3\)",
        ),
        (lambda: returning(step=paid(1.0, done="no")), "'done' = 'no'; it must be a number"),
        (lambda: returning(step=paid(torch.ones(2))), r"'reward' of shape \(2,\); .* \(1,\)"),
        (lambda: returning(step=paid(1.0, done=torch.zeros(2))), r"'done' of shape \(2,\)"),
        (lambda: returning(shared := paid(1.0), shared), "_step returned the TensorDict that it"),
        (
            lambda: returning(TensorDict({"x": torch.ones(1), "done": torch.ones(1).bool()})),
            "returned episodes that are over.*allow_done_after_reset",
        ),
    ],
)
def test_what_an_environment_returns_wrongly_is_told(env, message):
    with pytest.raises(EnvError, match=message):
        env().rollout(2)


def test_rewards_and_end_flags_get_their_declared_dtype():
    class Paying(type(returning())):
        def _step(self, tensordict):
            self.taken = getattr(self, "taken", 0) + 1
            given = [-0.1, 1, True, np.float64(0.5), torch.tensor(3)][self.taken - 1]
            return paid(given, done=int(self.taken == 5))

    with Collector(Paying(), None, frames_per_batch=5) as collector:
        after = collector.rollout()["next"]
    assert after["reward"].flatten().tolist() == pytest.approx([-0.1, 1, 1, 0.5, 3])
    assert after["reward"].dtype == torch.float32
    assert after["done"].dtype == after["terminated"].dtype == torch.bool
    assert after["done"].flatten().tolist() == [False] * 4 + [True]


def test_specs_that_do_not_fit_the_batch_are_told():
    env = counter(OURS)(batch_size=(2,))
    with pytest.raises(ConfigError, match=r"does not begin with \(2,\)"):
        env.reward_spec = our_data.Unbounded((1,))
    with pytest.raises(ConfigError, match="auto_reset=True"):
        counter(OURS)(auto_reset=True)


# -- specs -----------------------------------------------------------------------------------------

SPECS = [
    lambda lib: lib.Unbounded((3,)),
    lambda lib: lib.Unbounded(3),
    lambda lib: lib.Unbounded(shape=(2, 3), dtype=torch.int64),
    lambda lib: lib.UnboundedContinuous((3,)),
    lambda lib: lib.Bounded(-1, 1, (3,), "cpu", torch.float32),
    lambda lib: lib.Bounded(low=torch.zeros(2), high=torch.ones(2)),
    lambda lib: lib.Bounded(0, 5, (2, 3), dtype=torch.int64),
    lambda lib: lib.Binary(n=3),
    lambda lib: lib.Binary(3, (2, 3), dtype=torch.bool),
    lambda lib: lib.OneHot(4),
    lambda lib: lib.OneHot(4, (2, 4), dtype=torch.int64),
    lambda lib: lib.Categorical(4),
    lambda lib: lib.Categorical(2, (1,), dtype=torch.bool),
    lambda lib: lib.MultiCategorical([2, 3]),
    lambda lib: lib.MultiOneHot([2, 3]),
    lambda lib: lib.Composite(x=lib.Unbounded((3,)), g=lib.Composite(y=lib.OneHot(4))),
]


@pytest.mark.parametrize("make", SPECS)
def test_specs_are_made_and_behave_as_torchrls(make):
    ours, theirs = make(our_data), make(their_data)
    assert ours.shape == theirs.shape
    for arguments in ((), ((2,),)):
        mine, other = ours.zero(*arguments), theirs.zero(*arguments)
        assert (mine == other).all()
        assert mine.shape == other.shape
    drawn = theirs.rand((5,))
    assert ours.is_in(drawn)
    assert theirs.is_in(ours.rand((5,)))
    assert (ours.project(drawn.clone()) == drawn).all()
    assert ours == ours.clone() == make(our_data)
    assert ours.to("cpu").to("cpu") == ours.to("cpu")
    assert ours.expand(2, *ours.shape).shape == theirs.expand(2, *theirs.shape).shape
    assert theirs.rand().shape == ours.rand().shape


def test_helpers_that_specs_lack_name_what_does_the_same():
    for spec in (our_data.OneHot(4), our_data.Composite(x=our_data.Binary(2))):
        with pytest.raises(AttributeError, match=r"has no 'ones': use torch\.ones"):
            spec.ones()
        with pytest.raises(AttributeError, match=r"has no 'sample': use rand\(\)"):
            spec.sample()
        with pytest.raises(AttributeError, match="has no 'smaple'$"):
            spec.smaple()


WHOLE = [torch.int8, torch.uint16, torch.int32]


@pytest.mark.parametrize("dtype", [*WHOLE, torch.float16, torch.float32, torch.float64])
def test_values_are_drawn_from_the_whole_of_the_widest_range(dtype):
    own = (torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype)
    torch.manual_seed(0)
    spec = our_data.Bounded(own.min, own.max, (4000,), dtype=dtype)
    drawn = spec.rand()
    assert drawn.dtype == dtype
    assert spec.is_in(drawn)
    share = drawn.double() / own.max if own.min else drawn.double() / own.max * 2 - 1
    assert abs(share.mean()) < 0.05
    assert max(share.min() + 1, 1 - share.max()) < 0.1


def test_ranges_without_a_uniform_draw_are_refused():
    for spec in (
        our_data.Bounded(0, 2**60, (3,), dtype=torch.int64),
        our_data.Bounded(-torch.inf, 1.0, (3,)),
        our_data.Bounded(torch.tensor([0.0, 1.0]), torch.tensor([torch.inf, 2.0])),
    ):
        assert spec.is_in(torch.ones(spec.shape, dtype=spec.dtype))
        with pytest.raises(ConfigError, match="has no uniform values: draw from finite bounds"):
            spec.rand()
    assert our_data.Bounded(0.1, 0.2, dtype=torch.float64).low.item() == 0.1
    assert len(our_data.Unbounded((9999,), dtype=torch.int8).rand().unique()) == 256


def test_values_are_projected_into_the_set():
    assert our_data.Bounded(-1, 1, (2,)).project(torch.tensor([-3.0, 0.5])).tolist() == [-1, 0.5]
    assert our_data.Categorical(3).project(torch.tensor(7)).item() == 2
    inside = torch.tensor([0.5, 0.5])
    assert our_data.Bounded(-1, 1, (2,)).project(inside) is inside


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.bool])
def test_unsigned_numbers_are_drawn(dtype):
    top = 1 if dtype is torch.bool else torch.iinfo(dtype).max
    for spec in (our_data.Unbounded(200, dtype=dtype), our_data.Bounded(0, top, 200, dtype=dtype)):
        drawn = spec.rand()
        assert spec.is_in(drawn)
        assert 0.3 < (drawn.double() / top).mean() < 0.7


def test_spaces_say_what_there_is_to_choose_from():
    assert our_data.OneHot(4).space.n == our_data.Categorical(4).space.n == 4
    bounds = our_data.Bounded(-1, 2, (3,)).space
    assert (bounds.low.tolist(), bounds.high.tolist()) == ([-1] * 3, [2] * 3)


@pytest.mark.parametrize("make", [our_data.Categorical, our_data.OneHot])
def test_masks_limit_what_is_drawn(make):
    spec = make(4, mask=torch.tensor([True, False, False, True]))
    drawn = spec.rand((50,))
    index = drawn if make is our_data.Categorical else drawn.long().argmax(-1)
    assert set(index.tolist()) == {0, 3}
    assert spec.is_in(drawn)
    other = torch.tensor(1) if drawn.ndim == 1 else torch.tensor([False, True, False, False])
    assert make(4).is_in(other)
    assert not spec.is_in(other)


def test_composites_are_read_and_changed_as_torchrls():
    made = []
    for lib in (our_data, their_data):
        spec = lib.Composite({"x": lib.Unbounded((3,))}, g=lib.Composite(y=lib.OneHot(4)))
        spec["g", "z"] = lib.Categorical(2)
        spec.set("w", lib.Binary(2))
        spec.update({"x": lib.Unbounded((5,))})
        del spec["w"]
        made.append(
            (
                "x" in spec.keys(),
                ("g", "y") in spec.keys(True),
                set(spec.keys(True, True)),
                set(spec.keys()),
                [name for name, _ in spec.items()],
                spec["x"].shape,
                spec["g", "z"].n,
                spec.get("nothing", None),
                spec.is_empty(),
                set(spec.rand().keys(True, True)),
                len(list(spec.values())),
            )
        )
    assert made[0] == made[1]
    ours = our_data.Composite({("a", "b"): our_data.Unbounded((3,))})
    assert ours["a"].shape == ()
    with pytest.raises(KeyError, match="'c' is not in this spec"):
        ours["c"]
    with pytest.raises(ConfigError, match="does not begin with"):
        our_data.Composite(x=our_data.Unbounded((3,)), shape=(2,))


def test_what_is_no_tensor_has_a_spec():
    spec = our_data.Composite(text=our_data.NonTensor((), example_data="a"))
    assert spec.zero()["text"] == "a"
    assert spec.is_in(TensorDict({"text": "b"}))
