"""The environments of the zoo, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import ale_py
import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium import wrappers as gw
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDictBase
from tests.zoo import gym_toys, toys
from tests.zoo.cases import SEED, Action, Environment
from tests.zoo.reference import GymTwin, ReusingTwin, TensorDictTwin
from torchrl.data import Unbounded
from torchrl.envs import (
    ActionDiscretizer,
    ActionMask,
    ActionScaling,
    BinarizeReward,
    CatFrames,
    CatTensors,
    ClipTransform,
    Compose,
    DoubleToFloat,
    DTypeCastTransform,
    ExcludeTransform,
    FlattenObservation,
    FrameSkipTransform,
    InitTracker,
    LineariseRewards,
    NextObservationDelta,
    NoopResetEnv,
    ObservationNorm,
    PendulumEnv,
    RandomTruncationTransform,
    RenameTransform,
    RewardClipping,
    RewardScaling,
    RewardSum,
    SelectTransform,
    SignTransform,
    SqueezeTransform,
    StepCounter,
    TargetReturn,
    TensorDictPrimer,
    TerminateTransform,
    TimeMaxPool,
    ToTensorImage,
    TrajCounter,
    Transform,
    TransformedEnv,
    UnsqueezeTransform,
    VecNorm,
    VecNormV2,
)
from torchrl.envs import GymEnv as TorchGymEnv
from torchrl.envs import SerialEnv as TorchSerialEnv

import gleanrl

ENVIRONMENTS: dict[str, Environment] = {}

PUSH = Action("continuous", (2,))
PICK = Action("index", n=3, dtype=torch.int64)
OTHER = Action("other")


def add(name: str, make: Callable, twin: Any, action: Action, tags: str = "", **more: Any) -> None:
    """Add an environment; ``tags`` are words."""
    assert name not in ENVIRONMENTS, name
    tagged = frozenset(tags.split())
    ENVIRONMENTS[name] = Environment(name, make, twin, action, tags=tagged, **more)


# -- TensorDict environments ----------------------------------------------------------------------


def seeded(build: Callable[[], Any]) -> Any:
    """Return what ``build`` makes, seeded."""
    env = build()
    env.set_seed(SEED)
    return env


def tensordict_env(name: str, build: Callable, action: Action, tags: str = "", **more: Any) -> None:
    make = partial(seeded, build)
    twin = ReusingTwin if "reuses" in tags else TensorDictTwin
    add(name, make, lambda: twin(make()), action, f"td {tags}", **more)


def toy(name: str, build: Callable, action: Action = PUSH, tags: str = "", **more: Any) -> None:
    """Add a toy, single and in a batch of four."""
    tensordict_env(name, build, action, tags, **more)
    if "single" not in tags:
        four = partial(build, (4,))
        tensordict_env(f"{name}[4]", four, action, tags, batch=(4,), **more)


INDEX = Action("index", n=4, dtype=torch.int64)
KINDS: dict[str, tuple[Any, Action]] = {
    "continuous": (toys.continuous(2), PUSH),
    "bounded": (toys.bounded(-1, 1, 2), PUSH),
    "number": (toys.number(), Action("continuous")),
    "matrix": (toys.continuous(2, 2), Action("continuous", (2, 2))),
    "float64": (
        toys.bounded(-1, 1, 2, dtype=torch.float64),
        Action("continuous", (2,), dtype=torch.float64),
    ),
    "int8": (
        toys.bounded(-5, 5, 2, dtype=torch.int8),
        Action("continuous", (2,), dtype=torch.int8, scale=5),
    ),
    "index": (toys.index(4), INDEX),
    "index1": (toys.index(4, 1), Action("index", (1,), n=4, dtype=torch.int64)),
    "onehot": (toys.onehot(4), Action("onehot", (4,), n=4, dtype=torch.bool)),
    "onehot-int": (toys.onehot(4, torch.int64), Action("onehot", (4,), n=4, dtype=torch.int64)),
    "multi": (toys.multi(2, 3), Action("multi", (2,), nvec=(2, 3), dtype=torch.int64)),
    "multi-onehot": (
        toys.multi_onehot(2, 3),
        dataclasses.replace(OTHER, shape=(5,), dtype=torch.bool),
    ),
    "binary": (toys.binary(3), Action("binary", (3,), dtype=torch.int8)),
    "flag": (toys.binary(1, torch.bool), Action("binary", (1,), dtype=torch.bool)),
}
for kind, (spec, wanted) in KINDS.items():
    toy(f"toy-{kind}", partial(toys.Toy, action=spec), wanted)
tensordict_env("toy[2,3]", partial(toys.Toy, (2, 3)), PUSH, batch=(2, 3))
tensordict_env("toy[1]", partial(toys.Toy, (1,)), PUSH, batch=(1,))
toy("no-truncated", partial(toys.Toy, truncates=False))
F64 = {"dtype": torch.float64}
toy("double", toys.Double, PUSH, **F64)
toy("half", toys.Half, PUSH, dtype=torch.float16)
toy("pixels", partial(toys.Pixels, action=toys.index(4)), INDEX, shape=(3, 8, 8), dtype=torch.uint8)
toy("scalar", toys.Scalar, shape=())
toy("several", toys.Several)
toy("nested", toys.Nested, obs=("data", "observation"))
toy("masked", partial(toys.Masked, action=toys.index(4)), INDEX, "mask")
toy("masked-onehot", partial(toys.Masked, action=toys.onehot(4)), KINDS["onehot"][1], "mask")
toy("words", toys.Words, tags="single")
toy("ragged", toys.Ragged, tags="single")
toy("reusing", toys.Reusing, tags="reuses")
toy("views", toys.Views, tags="reuses")
toy("extra", toys.Extra, tags="undeclared")
toy("extra-always", toys.ExtraAlways, tags="undeclared")
toy("listening", toys.Listening)
toy("listening-index", partial(toys.Listening, action=toys.index(4)), INDEX)
toy("meddling", toys.Meddling, tags="writes-action")
toy("replacing", toys.Replacing, tags="writes-action")
toy("stateless", toys.Stateless)
toy("two-rewards", toys.Pays)
toy("whole-reward", toys.PaysWhole)
toy("step-overridden", toys.Scaled)
toy("reset-overridden", toys.ResetsLouder)
toy("both-overridden", toys.BothAtOnce)
toy("fails", toys.Fails)
toy("patched", lambda *args: toys.patched(toys.Toy(*args)))
toy("parts", toys.Parts, OTHER, "parts")
toy("agents", toys.Agents, OTHER, "agents", obs="state")
toy(
    "different", toys.Different, OTHER, "agents different", obs="done", shape=(1,), dtype=torch.bool
)
toy("group-ends", toys.GroupEnds, OTHER, "agents", obs="state")
tensordict_env("pendulum-rl", PendulumEnv, Action("continuous", (1,), scale=2), obs="th", shape=())
tensordict_env("serial-rl", lambda: TorchSerialEnv(3, toys.Toy), PUSH, batch=(3,))


# -- TorchRL's transforms -------------------------------------------------------------------------


class Listener(Transform):
    """Adds to the reward what the policy wrote beside the action."""

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        for key in ("loc", "logits", "action_value"):
            value = tensordict.get(key, None)
            if value is not None:
                heard = value.detach().float().sum() + next_tensordict.get("reward")
                next_tensordict.set("reward", heard)
        return next_tensordict

    def _reset(self, tensordict: TensorDictBase, reset: TensorDictBase) -> TensorDictBase:
        return reset


def transformed(*transforms: Callable[[], Any], base: Callable = toys.Toy) -> Callable[[], Any]:
    return lambda: TransformedEnv(base(), Compose(*[make() for make in transforms]))


def with_stats(*args: Any, **kwargs: Any) -> Callable[[], Any]:
    return partial(ObservationNorm, *args, in_keys=["observation"], **kwargs)


SEEN = ["observation"]
PRIMED = {"hidden": Unbounded((8,)), "cell": Unbounded((8,))}
TRANSFORMS: dict[str, tuple[list[Callable[[], Any]], dict[str, Any]]] = {
    "reward-sum": ([RewardSum], {}),
    "step-counter": ([partial(StepCounter, 4)], {}),
    "init-tracker": ([InitTracker], {}),
    "observation-norm": ([with_stats(0.5, 2.0)], {}),
    "vec-norm": ([partial(VecNormV2, in_keys=SEEN)], {}),
    "cat-frames": ([partial(CatFrames, 3, -1, in_keys=SEEN)], {"shape": (9,)}),
    "double-to-float": ([partial(DoubleToFloat, in_keys=SEEN)], {"base": toys.Double}),
    "dtype-cast": (
        [partial(DTypeCastTransform, torch.float32, torch.float64, in_keys=SEEN)],
        F64,
    ),
    "reward-scaling": ([partial(RewardScaling, 1.0, 0.5)], {}),
    "reward-clipping": ([partial(RewardClipping, -0.5, 0.5)], {}),
    "binarize-reward": ([BinarizeReward], {}),
    "sign-reward": ([partial(SignTransform, in_keys=["reward"])], {}),
    "noop-reset": ([partial(NoopResetEnv, 2)], {"tags": "draws"}),
    "frame-skip": ([partial(FrameSkipTransform, 2)], {}),
    "target-return": ([partial(TargetReturn, 10.0)], {}),
    "time-max-pool": ([partial(TimeMaxPool, in_keys=SEEN, T=2)], {}),
    "unsqueeze": ([partial(UnsqueezeTransform, -1, in_keys=SEEN)], {"shape": (3, 1)}),
    "squeeze": (
        [
            partial(UnsqueezeTransform, -1, in_keys=SEEN),
            partial(SqueezeTransform, -1, in_keys=SEEN),
        ],
        {},
    ),
    "cat-tensors": (
        [
            StepCounter,
            partial(DTypeCastTransform, torch.int64, torch.float32, in_keys=["step_count"]),
            partial(CatTensors, ["observation", "step_count"], "both", del_keys=False),
        ],
        {"obs": "both", "shape": (4,)},
    ),
    "rename": ([partial(RenameTransform, SEEN, ["seen"])], {"obs": "seen"}),
    "rename-copy": ([partial(RenameTransform, SEEN, ["seen"], create_copy=True)], {"obs": "seen"}),
    "exclude": ([partial(ExcludeTransform, "count", "flag")], {"base": toys.Several}),
    "select": ([partial(SelectTransform, "observation")], {"base": toys.Several}),
    "primer": (
        [InitTracker, partial(TensorDictPrimer, PRIMED, default_value=0.0)],
        {"tags": "primed"},
    ),
    "clip": ([partial(ClipTransform, in_keys=SEEN, low=-0.3, high=0.3)], {}),
    "terminate": ([partial(TerminateTransform, lambda td: td["observation"][..., :1] > 0.8)], {}),
    "traj-counter": ([TrajCounter], {}),
    "flatten": (
        [
            partial(UnsqueezeTransform, -1, in_keys=SEEN),
            partial(FlattenObservation, -2, -1, in_keys=SEEN),
        ],
        {},
    ),
    "delta": ([partial(NextObservationDelta, SEEN)], {"tags": "undeclared"}),
    "linearise": ([partial(LineariseRewards, ["reward"], weights=[1.0, 2.0])], {"base": toys.Pays}),
    "random-truncation": (
        [StepCounter, partial(RandomTruncationTransform, 2, 4, prob=0.5)],
        {"tags": "draws"},
    ),
    "action-scaling": ([partial(ActionScaling, loc=0.5, scale=2.0)], {}),
    "listener": ([Listener], {}),
    "to-image": (
        [partial(ToTensorImage, from_int=True, in_keys=SEEN, shape_tolerant=True)],
        {"base": partial(toys.Pixels, action=toys.index(4)), "shape": (3, 8, 8), "action": INDEX},
    ),
}
for name, (made, more) in TRANSFORMS.items():
    more = dict(more)
    build = transformed(*made, base=more.pop("base", toys.Toy))
    tensordict_env(f"t-{name}", build, more.pop("action", PUSH), more.pop("tags", ""), **more)


def masking() -> Any:
    return TransformedEnv(toys.Masked((4,), action=toys.index(4)), ActionMask())


def discretizing() -> Any:
    env = toys.Toy(action=toys.bounded(-1, 1, 2))
    return TransformedEnv(env, ActionDiscretizer(4, out_action_key="action"))


tensordict_env("t-action-mask[4]", masking, INDEX, "mask", batch=(4,))
tensordict_env("t-discretizer", discretizing, Action("multi", (2,), nvec=(4, 4), dtype=torch.int64))


# -- TorchRL's GymEnv -----------------------------------------------------------------------------


def gym_rl(name: str, id: str, action: Action, *transforms: Callable, **more: Any) -> None:
    def build() -> Any:
        env = TorchGymEnv(id, **more.get("gym", {}))
        return TransformedEnv(env, Compose(*[t() for t in transforms])) if transforms else env

    rest = {key: value for key, value in more.items() if key != "gym"}
    tensordict_env(name, build, action, **rest)


TWO_HOT = Action("onehot", (2,), n=2, dtype=torch.int64)
TORQUE = Action("continuous", (1,), scale=2)
gym_rl("rl-cartpole", "CartPole-v1", TWO_HOT, shape=(4,))
gym_rl(
    "rl-cartpole-index",
    "CartPole-v1",
    Action("index", n=2, dtype=torch.int64),
    shape=(4,),
    gym={"categorical_action_encoding": True},
)
gym_rl("rl-pendulum", "Pendulum-v1", TORQUE, RewardSum, partial(StepCounter, 5), InitTracker)
gym_rl(
    "rl-pendulum-norm",
    "Pendulum-v1",
    TORQUE,
    DoubleToFloat,
    with_stats(0.1, 3.0),
    partial(RewardScaling, 0.0, 0.1),
)
gym_rl("rl-pendulum-vecnorm", "Pendulum-v1", TORQUE, partial(VecNorm, in_keys=SEEN, new_api=True))
gym_rl(
    "rl-halfcheetah",
    "HalfCheetah-v5",
    Action("continuous", (6,)),
    DoubleToFloat,
    shape=(17,),
    tags="slow",
)


# -- Gymnasium ------------------------------------------------------------------------------------


def started(build: Callable[[], gym.Env], seed: int = SEED) -> gym.Env:
    """Return what ``build`` makes, its streams seeded."""
    env = build()
    env.reset(seed=seed)
    return env


def gymnasium(name: str, build: Callable, action: Action, tags: str = "", **more: Any) -> None:
    """Add an environment made by ``build``, alone and three of it."""
    one, many = partial(started, build), [partial(started, build, SEED + i) for i in range(3)]
    add(name, one, lambda: GymTwin([one()], ()), action, f"gym {tags}", **more)
    if "single" not in tags:
        twin = lambda: GymTwin([make() for make in many], (3,))  # noqa: E731
        add(f"{name}[3]", many, twin, action, f"gym {tags}", batch=(3,), **more)


def act(space: Any = None, cls: Callable = gym_toys.Small) -> Callable[[], gym.Env]:
    return lambda: cls(action=space)


MOVES = {"observation_space": gym_toys.BOX}
GYM_KINDS: dict[str, tuple[Any, Action]] = {
    "discrete": (spaces.Discrete(3), PICK),
    "box": (gym_toys.MOVES, PUSH),
    "box64": (spaces.Box(-1, 1, (2,), np.float64), Action("continuous", (2,), dtype=torch.float64)),
    "box-scalar": (spaces.Box(-1, 1, (), np.float32), Action("continuous")),
    "box-int8": (
        spaces.Box(-5, 5, (2,), np.int8),
        Action("continuous", (2,), dtype=torch.int8, scale=5),
    ),
    "start": (spaces.Discrete(3, start=1), PICK),
    "multi": (spaces.MultiDiscrete([2, 3]), Action("multi", (2,), nvec=(2, 3), dtype=torch.int64)),
    "binary": (spaces.MultiBinary(3), Action("binary", (3,), dtype=torch.int8)),
    "dict": (spaces.Dict(move=gym_toys.MOVES, turn=spaces.Discrete(3)), OTHER),
    "tuple": (spaces.Tuple([gym_toys.MOVES, spaces.Discrete(3)]), OTHER),
}
for kind, (space, wanted) in GYM_KINDS.items():
    tags = {"dict": "parts", "tuple": "pair"}.get(kind, "")
    gymnasium(f"small-{kind}", act(space), wanted, tags)
BOX_TOYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "reused-reward": (gym_toys.ReusedReward, {}),
    "reused-observation": (gym_toys.ReusedObservation, {}),
    "pays-int": (partial(gym_toys.PaysWith, int), {}),
    "pays-bool": (partial(gym_toys.PaysWith, lambda paid: np.bool_(paid > 0)), {}),
    "pays-float64": (partial(gym_toys.PaysWith, np.float64), {}),
    "pays-array": (partial(gym_toys.PaysWith, lambda paid: np.array(paid)), {}),
    "numpy-ends": (gym_toys.EndsWithNumpy, {}),
    "doubles": (gym_toys.Doubles, F64),
    "mapped": (gym_toys.Mapped, {}),
    "paired": (gym_toys.Paired, {"obs": ("observation", "0")}),
    "quits": (gym_toys.Quits, {}),
    "louder": (lambda action: gym_toys.Louder(gym_toys.Small(action)), {}),
    "patched": (lambda action: gym_toys.patched(gym_toys.Small(action)), {}),
}
for name, (cls, more) in BOX_TOYS.items():
    gymnasium(f"small-{name}", act(gym_toys.MOVES, cls), PUSH, **more)
gymnasium("small-shared", act(gym_toys.MOVES, gym_toys.SharedObservation), PUSH, "reuses")
gymnasium("small-draws", act(gym_toys.MOVES, gym_toys.Draws), PUSH, "draws")
gymnasium("small-meddles", act(gym_toys.MOVES, gym_toys.Meddles), PUSH, "writes-action")
gymnasium(
    "small-pictures",
    act(spaces.Discrete(3), gym_toys.Pictures),
    PICK,
    shape=(3, 8, 8),
    dtype=torch.uint8,
)

IDS: dict[str, tuple[Action, dict[str, Any]]] = {
    "CartPole-v1": (Action("index", n=2, dtype=torch.int64), {"shape": (4,)}),
    "Pendulum-v1": (TORQUE, {}),
    "Acrobot-v1": (PICK, {"shape": (6,)}),
    "MountainCar-v0": (PICK, {"shape": (2,)}),
    "MountainCarContinuous-v0": (Action("continuous", (1,)), {"shape": (2,)}),
    "FrozenLake-v1": (INDEX, {"shape": (), "dtype": torch.int64}),
    "Taxi-v4": (Action("index", n=6, dtype=torch.int64), {"shape": (), "dtype": torch.int64}),
    "CliffWalking-v1": (INDEX, {"shape": (), "dtype": torch.int64}),
    "Blackjack-v1": (
        Action("index", n=2, dtype=torch.int64),
        {"shape": (), "dtype": torch.int64, "obs": ("observation", "0")},
    ),
    "HalfCheetah-v5": (
        Action("continuous", (6,)),
        {"shape": (17,), "dtype": torch.float64, "tags": "slow"},
    ),
    "InvertedPendulum-v5": (
        Action("continuous", (1,), scale=3),
        {"shape": (4,), "dtype": torch.float64, "tags": "slow"},
    ),
}
for name, (wanted, more) in IDS.items():
    gymnasium(name, partial(gym.make, name), wanted, **more)


def atari() -> gym.Env:
    gym.register_envs(ale_py)
    env = gym.make("ALE/Pong-v5", frameskip=1)
    return gw.FrameStackObservation(gw.AtariPreprocessing(env, noop_max=0, screen_size=16), 2)


gymnasium(
    "pong",
    atari,
    Action("index", n=6, dtype=torch.int64),
    "slow single",
    shape=(2, 16, 16),
    dtype=torch.uint8,
)

SMALL = partial(gym_toys.Small, gym_toys.MOVES)
LOW = spaces.Box(-1, 1, (3,), np.float32)
WRAPPERS: dict[str, tuple[Callable[[], gym.Env], Any]] = {
    "TimeLimit": (lambda: gw.TimeLimit(SMALL(), 3), {}),
    "NormalizeObservation": (lambda: gw.NormalizeObservation(SMALL()), {}),
    "NormalizeReward": (lambda: gw.NormalizeReward(SMALL()), {}),
    "RecordEpisodeStatistics": (lambda: gw.RecordEpisodeStatistics(SMALL()), {}),
    "FrameStackObservation": (lambda: gw.FrameStackObservation(SMALL(), 2), {"shape": (2, 3)}),
    "FlattenObservation": (
        lambda: gw.FlattenObservation(gym_toys.Paired(gym_toys.MOVES)),
        {"shape": (12,), "dtype": torch.float64},
    ),
    "RescaleAction": (lambda: gw.RescaleAction(SMALL(), np.float32(-2), np.float32(2)), {}),
    "ClipAction": (lambda: gw.ClipAction(SMALL()), {}),
    "ClipReward": (lambda: gw.ClipReward(SMALL(), -1, 1), {}),
    "TransformReward": (lambda: gw.TransformReward(SMALL(), lambda r: r * 2), {}),
    "TransformObservation": (
        lambda: gw.TransformObservation(SMALL(), lambda o: np.clip(o, -1, 1), LOW),
        {},
    ),
    "TransformAction": (
        lambda: gw.TransformAction(SMALL(), lambda a: a * 0.5, gym_toys.MOVES),
        {},
    ),
    "DelayObservation": (lambda: gw.DelayObservation(SMALL(), 2), {}),
    "StickyAction": (lambda: gw.StickyAction(SMALL(), 0.5), {}),
    "TimeAwareObservation": (
        lambda: gw.TimeAwareObservation(gw.TimeLimit(SMALL(), 9), flatten=True),
        {"shape": (4,), "dtype": torch.float64},
    ),
    "DtypeObservation": (lambda: gw.DtypeObservation(SMALL(), np.float64), F64),
    "FilterObservation": (
        lambda: gw.FilterObservation(gym_toys.Mapped(gym_toys.MOVES), ["observation", "count"]),
        {},
    ),
    "ReshapeObservation": (lambda: gw.ReshapeObservation(SMALL(), (3, 1)), {"shape": (3, 1)}),
    "RescaleObservation": (
        lambda: gw.RescaleObservation(
            gw.TransformObservation(SMALL(), lambda o: np.clip(o, -1, 1), LOW),
            np.float32(0),
            np.float32(1),
        ),
        {},
    ),
    "MaxAndSkipObservation": (lambda: gw.MaxAndSkipObservation(SMALL(), 2), {}),
    "RepeatAction": (lambda: gw.RepeatAction(SMALL(), 2), {}),
    "ObstructView": (
        lambda: gw.ObstructView(gym_toys.Pictures(gym_toys.MOVES), 0.3, 2),
        {"shape": (3, 8, 8), "dtype": torch.uint8},
    ),
    "AddWhiteNoise": (
        lambda: gw.AddWhiteNoise(gym_toys.Pictures(gym_toys.MOVES), 0.5),
        {"shape": (3, 8, 8), "dtype": torch.uint8},
    ),
    "OrderEnforcing": (lambda: gw.OrderEnforcing(SMALL()), {}),
    "PassiveEnvChecker": (lambda: gw.PassiveEnvChecker(SMALL()), {}),
    "Autoreset-off-TimeLimit": (lambda: gw.TimeLimit(gw.TimeLimit(SMALL(), 4), 3), {}),
}
for name, (build, more) in WRAPPERS.items():
    gymnasium(f"w-{name}", build, PUSH, "single", **more)
gymnasium(
    "w-DiscretizeAction",
    lambda: gw.DiscretizeAction(SMALL(), 3),
    Action("index", n=9, dtype=torch.int64),
    "single",
)
gymnasium(
    "w-DiscretizeObservation",
    lambda: gw.DiscretizeObservation(
        gw.TransformObservation(SMALL(), lambda o: np.clip(o, -1, 1), LOW), 3
    ),
    PUSH,
    "single",
    shape=(),
    dtype=torch.int64,
)


# -- batches of other makers ----------------------------------------------------------------------


def vector(build: Callable, mode: AutoresetMode, wrap: Callable | None = None) -> Any:
    envs = SyncVectorEnv([build] * 3, autoreset_mode=mode)
    envs = envs if wrap is None else wrap(envs)
    envs.reset(seed=SEED)
    return envs


def many(build: Callable, first: int = SEED, count: int = 3) -> GymTwin:
    return GymTwin([started(build, first + i) for i in range(count)], (count,))


CARTS = {"shape": (4,), "batch": (3,)}
for mode in AutoresetMode:
    tags = "gym vector " + ("unaligned" if mode is AutoresetMode.NEXT_STEP else "")
    for title, build, wanted, more in (
        ("small", SMALL, PUSH, {"batch": (3,)}),
        ("mapped", partial(gym_toys.Mapped, gym_toys.MOVES), PUSH, {"batch": (3,)}),
        ("reused", partial(gym_toys.ReusedObservation, gym_toys.MOVES), PUSH, {"batch": (3,)}),
        (
            "cartpole",
            partial(gym.make, "CartPole-v1"),
            Action("index", n=2, dtype=torch.int64),
            CARTS,
        ),
    ):
        add(
            f"vector-{title}-{mode.value}",
            partial(vector, build, mode),
            partial(many, build),
            wanted,
            tags,
            **more,
        )


def own(build: Callable[[], Any]) -> Any:
    return seeded(build)


def ours(
    name: str, build: Callable, twin: Callable, action: Action, tags: str = "", **more: Any
) -> None:
    add(name, partial(own, build), twin, action, f"gym own {tags}", **more)


def unstarted(build: Callable, count: int) -> GymTwin:
    """Return a twin that is seeded by its first reset."""
    return GymTwin([build() for _ in range(count)], (count,), SEED)


PENDULUM = partial(gym.make, "Pendulum-v1")
ours(
    "own-GymEnv",
    partial(gleanrl.envs.GymEnv, "Pendulum-v1"),
    lambda: GymTwin([PENDULUM()], (), SEED),
    TORQUE,
)
ours(
    "own-GymEnv[3]",
    partial(gleanrl.envs.GymEnv, "Pendulum-v1", num_envs=3),
    partial(unstarted, PENDULUM, 3),
    TORQUE,
    batch=(3,),
)
ours(
    "own-SerialEnv",
    lambda: gleanrl.envs.SerialEnv(3, lambda: gleanrl.envs.GymEnv("Pendulum-v1")),
    partial(unstarted, PENDULUM, 3),
    TORQUE,
    batch=(3,),
)
ours(
    "own-ParallelEnv",
    lambda: gleanrl.envs.ParallelEnv(2, "Pendulum-v1", num_envs=4),
    partial(unstarted, PENDULUM, 4),
    TORQUE,
    "slow processes",
    batch=(4,),
)


class LouderGymEnv(gleanrl.envs.GymEnv):
    """Multiplies rewards."""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        out = super()._step(tensordict)
        return out.set("reward", out.get("reward") * 8)


def loud() -> gym.Env:
    return gym_toys.Louder(gym.make("MountainCarContinuous-v0"))


def later_patched() -> Any:
    env = gleanrl.envs.GymEnv("MountainCarContinuous-v0")
    step = env.step

    def louder(tensordict: TensorDictBase) -> TensorDictBase:
        out = step(tensordict)
        out["next", "reward"] = out["next", "reward"] * 8
        return out

    env.step = louder
    return env


CAR = Action("continuous", (1,))
ours(
    "own-GymEnv-subclass",
    partial(LouderGymEnv, "MountainCarContinuous-v0"),
    lambda: GymTwin([loud()], (), SEED),
    CAR,
    shape=(2,),
)
ours(
    "own-GymEnv-subclass[3]",
    partial(LouderGymEnv, "MountainCarContinuous-v0", num_envs=3),
    partial(unstarted, loud, 3),
    CAR,
    shape=(2,),
    batch=(3,),
)
ours("own-GymEnv-patched", later_patched, lambda: GymTwin([loud()], (), SEED), CAR, shape=(2,))
