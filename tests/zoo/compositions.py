"""TorchRL environments of transforms drawn at random, for the law of the zoo.

The 3,000 from seed 100000 on, up to seed 106748, were checked on 2026-11-27, before the transforms
in `LEADING`, counters, lives, masks, projections and primers were drawn. Two broke the law:
they have a policy that keeps what it was shown, and an environment that uses its memory again, and
are tagged since.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from tests.zoo import gym_toys
from tests.zoo.cases import SEED, Action, Environment, Policy
from tests.zoo.laws import fits
from tests.zoo.policies import POLICIES
from tests.zoo.reference import ReusingTwin, TensorDictTwin
from torchrl.data import Unbounded
from torchrl.envs import (
    ActionMask,
    BinarizeReward,
    CatFrames,
    CatTensors,
    CenterCrop,
    ClipTransform,
    Compose,
    DiscreteActionProjection,
    DoubleToFloat,
    DTypeCastTransform,
    EndOfLifeTransform,
    ExcludeTransform,
    FlattenObservation,
    FrameSkipTransform,
    GrayScale,
    GymWrapper,
    InitTracker,
    NoopResetEnv,
    ObservationNorm,
    PermuteTransform,
    RenameTransform,
    Resize,
    RewardClipping,
    RewardScaling,
    RewardSum,
    SerialEnv,
    SignTransform,
    StepCounter,
    TargetReturn,
    TensorDictPrimer,
    TimeMaxPool,
    ToTensorImage,
    TrajCounter,
    TransformedEnv,
    UnsqueezeTransform,
    VecNorm,
    VecNormV2,
)

import gleanrl

SEEN = ["observation"]
FEW = spaces.Discrete(3)
INDEX = Action("index", n=3, dtype=torch.int64)
HOT = Action("onehot", (3,), n=3, dtype=torch.int64)
WIDE = Action("onehot", (5,), n=5, dtype=torch.int64)
PUSH = Action("continuous", (2,))


REFUSED = {"sequential-tensors", "BatchNorm"}
"""Policies that refuse some environments: of several observations, or of one member."""


class Louder(RewardScaling):
    """A stranger's transform."""

    def _apply_transform(self, reward: torch.Tensor) -> torch.Tensor:
        return super()._apply_transform(reward) + 1


class Photos(gym_toys.Pictures):
    """Shows height, width and colours, which TorchRL calls "pixels"."""

    def __init__(self, action: gym.Space | None = None):
        super().__init__(action)
        self.observation_space = spaces.Box(0, 255, (8, 8, 3), np.uint8)

    def show(self) -> Any:
        return np.ascontiguousarray(super().show().transpose(1, 2, 0))


def of_toy(cls: Any, space: Any, **kwargs: Any) -> Callable[[], gym.Env]:
    return lambda: cls(space, **kwargs)


BASES: list[tuple[Callable[[], gym.Env], Action]] = [
    (of_toy(gym_toys.Small, FEW), INDEX),
    (of_toy(gym_toys.Small, FEW), HOT),
    (of_toy(gym_toys.Small, gym_toys.MOVES), PUSH),
    (of_toy(gym_toys.Doubles, gym_toys.MOVES), PUSH),
    (of_toy(gym_toys.Doubles, FEW), INDEX),
    (of_toy(gym_toys.Pictures, FEW), INDEX),
    (of_toy(Photos, FEW), INDEX),
    (of_toy(gym_toys.Mapped, FEW), INDEX),
    (of_toy(gym_toys.ReusedObservation, gym_toys.MOVES), PUSH),
    (lambda: gym_toys.PaysWith(np.float64, action=FEW), INDEX),
    (lambda: gym_toys.PaysWith(int, action=FEW), HOT),
    (lambda: gym_toys.Louder(gym_toys.Small(FEW)), INDEX),
    (of_toy(gym_toys.Draws, FEW), INDEX),
    (of_toy(gym_toys.Lives, FEW), HOT),
    (of_toy(gym_toys.Masked, FEW), INDEX),
    (of_toy(gym_toys.Masked, FEW), HOT),
    (partial(gym.make, "CartPole-v1"), Action("index", n=2, dtype=torch.int64)),
    (partial(gym.make, "Pendulum-v1"), Action("continuous", (1,), scale=2)),
]

LEADING: list[Callable[[], Any]] = [
    partial(FrameSkipTransform, 2),
    partial(FrameSkipTransform, 3),
    partial(NoopResetEnv, 2),
    partial(NoopResetEnv, 1, random=False),
]
"""These come first, around one environment."""


def primer(first: float) -> Any:
    """Return a transform that gives the states of the zoo's recurrent policies."""
    states = {"hidden": Unbounded((8,)), "cell": Unbounded((8,))}
    return TensorDictPrimer(states, default_value=first, expand_specs=True)


ANY: list[Callable[[], Any]] = [
    TrajCounter,
    EndOfLifeTransform,
    partial(primer, 0.0),
    partial(primer, 0.5),
    DoubleToFloat,
    StepCounter,
    partial(StepCounter, 4),
    partial(StepCounter, 3, step_count_key="own_count"),
    RewardSum,
    InitTracker,
    partial(RewardScaling, 0.5, 2.0),
    partial(RewardScaling, 0.5, 2.0, standard_normal=True),
    partial(RewardClipping, -0.5, 0.5),
    partial(SignTransform, in_keys=["reward"], out_keys=["sign"]),
    BinarizeReward,
    partial(DTypeCastTransform, torch.float32, torch.float64, in_keys=["reward"]),
]
VECTORS: list[Callable[[], Any]] = [
    *ANY,
    *ANY,
    partial(DoubleToFloat, in_keys=SEEN),
    partial(ObservationNorm, 0.1, 3.0, in_keys=SEEN),
    partial(ObservationNorm, 0.1, 3.0, in_keys=SEEN, standard_normal=True),
    partial(ObservationNorm, 0.1, 3.0, in_keys=SEEN, out_keys=["normal"]),
    partial(ClipTransform, in_keys=SEEN, low=-0.5, high=0.5),
    partial(CatTensors, SEEN, "vector", del_keys=False),
    partial(CatTensors, ["observation", "normal"], "both", del_keys=False),
    partial(UnsqueezeTransform, -1, in_keys=SEEN, out_keys=["column"]),
    partial(UnsqueezeTransform, -2, in_keys=SEEN, out_keys=["row"]),
    partial(FlattenObservation, -2, -1, in_keys=["row"]),
    partial(DTypeCastTransform, torch.float32, torch.float64, in_keys=SEEN),
    partial(RenameTransform, SEEN, ["seen"], create_copy=True),
    partial(ExcludeTransform, "normal"),
    partial(TargetReturn, 3.0),
    partial(VecNorm, in_keys=SEEN, new_api=True),
    partial(VecNorm, in_keys=SEEN, decay=0.9),
    partial(VecNormV2, in_keys=["observation", "reward"], decay=0.9),
    partial(CatFrames, 3, -1, in_keys=["column"]),
    partial(CatFrames, 2, -1, in_keys=SEEN, out_keys=["two"], padding="constant"),
    partial(TimeMaxPool, in_keys=SEEN, T=3),
    # With these the environment is stepped by its own methods: one is not known, one not first.
    partial(FrameSkipTransform, 2),
    partial(Louder, 0.5, 2.0),
]
PICTURES: list[Callable[[], Any]] = [
    *ANY,
    *[partial(ToTensorImage, in_keys=SEEN, out_keys=["pixels"])] * 3,
    *[ToTensorImage] * 3,
    partial(ToTensorImage, from_int=False),
    partial(GrayScale, in_keys=["pixels"]),
    partial(PermuteTransform, (-1, -2, -3), in_keys=["pixels"]),
    partial(FlattenObservation, -3, -1, in_keys=["pixels"], out_keys=["flat"]),
    partial(CatFrames, 4, -3, in_keys=["pixels"]),
]
if find_spec("torchvision"):
    PICTURES += [partial(Resize, 5, 4, in_keys=["pixels"]), partial(CenterCrop, 3)]


class Composition:
    """An environment drawn with a seed, and a policy that fits it."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        draw = random.Random(seed)
        self.base, self.action = draw.choice(BASES)
        space = self.base().observation_space
        pool = PICTURES if len(space.shape or ()) == 3 else VECTORS
        self.leading = draw.sample(LEADING, draw.choice((0, 0, 0, 1, 2)))
        self.inside = [*self.leading, *self.draw(draw, pool)]
        self.around = self.draw(draw, pool)
        self.nested = draw.random() < 0.3
        self.count = draw.choice((0, 0, 1, 2, 3))
        self.ours = draw.random() < 0.3
        self.cut = draw.choice((None, None, 3, 7))
        self.policy = draw.random()
        self.projects = self.action is HOT and draw.random() < 0.4
        if isinstance(self.base(), gym_toys.Masked) and draw.random() < 0.8:
            draw.choice((self.inside, self.around)).append(ActionMask)
        if self.projects:
            self.action = WIDE
            self.around.append(partial(DiscreteActionProjection, 3, 5))

    @staticmethod
    def draw(draw: random.Random, pool: Sequence[Callable[[], Any]]) -> list[Callable[[], Any]]:
        """Return up to four parts of ``pool``, or none."""
        return draw.sample(pool, draw.choice((0, 1, 2, 3, 4)))

    def member(self) -> Any:
        """Return one environment, with its own transforms."""
        env = GymWrapper(self.base(), categorical_action_encoding=self.action.kind == "index")
        return self.transformed(env, self.inside)

    def transformed(self, env: Any, makers: Sequence[Callable[[], Any]]) -> Any:
        """Return ``env`` with transforms around it, half of them in a ``Compose`` of their own."""
        made = [make() for make in makers]
        if not made:
            return env
        if self.nested and len(made) > 2:
            made = [made[0], Compose(*made[1:])]
        return TransformedEnv(env, Compose(*made))

    def make(self) -> Any:
        """Return the environment, seeded."""
        env = self.member()
        if self.count:
            serial = gleanrl.envs.SerialEnv if self.ours and not self.around else SerialEnv
            env = serial(self.count, self.member)
        env = self.transformed(env, self.around)
        env.set_seed(SEED)
        return env

    def case(self) -> Environment | None:
        """Return the environment, ``None`` if TorchRL cannot step it."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                env = self.make()
                env.rollout(3, break_when_any_done=False)
                keys = set(env.observation_spec.keys())
                obs = "observation" if "observation" in keys else "pixels"
                spec = env.observation_spec[obs]
                batch = tuple(env.batch_size)
                env.close()
        except Exception:
            return None
        own = {"max_frames_per_traj": self.cut} if self.cut and "step_count" not in keys else {}
        name = f"composed-{self.seed}"
        base = self.base()
        reuses = isinstance(base, gym_toys.ReusedObservation)
        twin = ReusingTwin if reuses else TensorDictTwin  # entries may be views of each other
        tags = {
            "init": "is_init" in keys,
            "cut": bool(own),
            "draws": isinstance(base, gym_toys.Draws) or bool(self.leading) or self.projects,
            "primed": "hidden" in keys,
            "reuses": reuses,
        }
        return Environment(
            name,
            self.make,
            lambda: twin(self.make()),
            self.action,
            obs=obs,
            shape=tuple(spec.shape[len(batch) :]),
            dtype=spec.dtype,
            batch=batch,
            tags=frozenset(["td", *(tag for tag, has in tags.items() if has)]),
            kwargs=own,
        )

    def policy_of(self, env: Environment) -> Policy:
        """Return a policy that fits ``env``, which `case` made."""
        fitting = [p for p in POLICIES.values() if fits(p, env) and p.name not in REFUSED]
        first = int(self.policy * len(fitting))
        for policy in [*fitting[first:], *fitting[:first]]:
            with contextlib.suppress(Exception):  # of layers that images like these do not fit
                policy.make(env)
                return policy
        raise AssertionError("no policy fits")


def compositions(first: int, count: int) -> list[Composition]:
    """Return ``count`` compositions that TorchRL can step, from seed ``first`` on."""
    found: list[Composition] = []
    while len(found) < count:
        one = Composition(first)
        first += 1
        if one.case() is not None:
            found.append(one)
    return found
