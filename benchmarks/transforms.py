"""Says for every transform of TorchRL how GleanRL steps an environment with it.

``python -m benchmarks.transforms`` tries each and writes the table of the page.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from benchmarks.envs import Still

PAGE = Path("docs/migration/torchrl_environments.md")
BEGIN, END = "<!-- transforms -->\n", "<!-- end of transforms -->"
SEEN = ["observation"]
PENDULUM, CARTPOLE = "Pendulum-v1", "CartPole-v1"


class Pair(gym.ObservationWrapper[Any, Any, Any]):
    """Shows two arrays."""

    def __init__(self) -> None:
        super().__init__(Still())
        space = self.env.observation_space
        self.observation_space = gym.spaces.Dict(one=space, two=space)

    def observation(self, observation: Any) -> dict[str, Any]:
        return {"one": observation, "two": observation}


class Masked(gym.ObservationWrapper[Any, Any, Any]):
    """Allows every action, and says so."""

    def __init__(self) -> None:
        super().__init__(Still())
        mask, seen = gym.spaces.MultiBinary(2), self.env.observation_space
        self.observation_space = gym.spaces.Dict(observation=seen, action_mask=mask)

    def observation(self, observation: Any) -> dict[str, Any]:
        return {"observation": observation, "action_mask": np.ones(2, np.int8)}


class Mortal(Still):
    """Has lives, as Atari's environments do."""

    @property
    def ale(self) -> Mortal:
        return self

    def lives(self) -> int:
        return 3


def on(make: Any, *arguments: Any, **options: Any) -> tuple[Any, Any, Any]:
    """Return where a transform is tried, an id or a function, and its arguments."""
    return make, arguments, options


PLAIN = """
ActionScaling BinarizeReward Compose DoubleToFloat FiniteTensorDictCheck InitTracker
NoopResetEnv RemoveEmptySpecs RewardSum StepCounter TensorDictPrimer TrajCounter
"""
"""Transforms without arguments."""
photos = partial(Still, (16, 16, 3), np.uint8)
"""Makes an environment that shows images in colour, with discrete actions."""
EXAMPLES = {
    **dict.fromkeys(PLAIN.split(), on(PENDULUM)),
    "ActionDiscretizer": on(PENDULUM, num_intervals=3),
    "ActionMask": on(Masked),
    "CatFrames": on(photos, N=4, dim=-3, in_keys=["pixels"]),
    "CatTensors": on(PENDULUM, in_keys=SEEN, out_key="vector", del_keys=False),
    "CenterCrop": on(photos, w=4, in_keys=["pixels"]),
    "ClipTransform": on(PENDULUM, in_keys=SEEN, low=-1, high=1),
    "Crop": on(photos, w=4, in_keys=["pixels"]),
    "DTypeCastTransform": on(
        PENDULUM, dtype_in=torch.float32, dtype_out=torch.float64, in_keys=SEEN
    ),
    "DiscreteActionProjection": on(CARTPOLE, num_actions_effective=2, max_actions=3),
    "EndOfLifeTransform": on(Mortal),
    "ExcludeTransform": on(Pair, "two"),
    "ExpandAs": on(PENDULUM, in_key="reward", ref_key="observation", out_key="wide"),
    "FlattenObservation": on(photos, first_dim=-3, last_dim=-1, in_keys=["pixels"]),
    "FrameSkipTransform": on(PENDULUM, frame_skip=2),
    "GrayScale": on(lambda: Still((3, 16, 16), np.float32), in_keys=SEEN),
    "LineariseRewards": on(PENDULUM, in_keys=["reward"]),
    "ObservationNorm": on(PENDULUM, loc=0.0, scale=1.0, in_keys=SEEN),
    "PermuteTransform": on(photos, dims=(-1, -3, -2), in_keys=["pixels"]),
    "RenameTransform": on(PENDULUM, in_keys=SEEN, out_keys=["seen"]),
    "Resize": on(photos, w=4, in_keys=["pixels"]),
    "RewardClipping": on(PENDULUM, clamp_min=-1, clamp_max=1),
    "RewardScaling": on(PENDULUM, loc=0.0, scale=1.0),
    "SelectTransform": on(Pair, "one"),
    "SignTransform": on(PENDULUM, in_keys=["reward"]),
    "SqueezeTransform": on(photos, dim=-1, in_keys=["pixels"]),
    "TargetReturn": on(PENDULUM, target_return=1.0),
    "TimeMaxPool": on(PENDULUM, in_keys=SEEN),
    "ToTensorImage": on(photos),
    "UnaryTransform": on(PENDULUM, in_keys=SEEN, out_keys=["twice"], fn=torch.neg),
    "UnsqueezeTransform": on(PENDULUM, dim=-1, in_keys=SEEN),
    "VecNorm": on(PENDULUM, in_keys=SEEN),
    "VecNormV2": on(PENDULUM, in_keys=SEEN),
}
"""Where a transform is tried, and its arguments."""


def transforms() -> Iterator[tuple[str, Any]]:
    """Yield every transform class of TorchRL, by name."""
    from torchrl.envs import transforms as found

    for name, kind in sorted(vars(found).items()):
        if inspect.isclass(kind) and issubclass(kind, found.Transform) and kind.__name__ == name:
            yield name, kind


def example(name: str, kind: Any) -> Any:
    """Return an environment with a transform of class ``kind`` around it."""
    from torchrl.data import Unbounded
    from torchrl.envs import GymWrapper, TransformedEnv

    make, arguments, options = EXAMPLES[name]
    base: Callable[[], Any] = partial(gym.make, make) if isinstance(make, str) else make
    if name == "TensorDictPrimer":
        options = {"hidden": Unbounded((4,)), "expand_specs": True}
    return TransformedEnv(GymWrapper(base()), kind(*arguments, **options))


def outcome(name: str, kind: Any) -> tuple[str, str]:
    """Return how an environment with such a transform is stepped, and why."""
    from gleanrl import Collector

    try:
        with Collector(example(name, kind), frames_per_batch=2) as collector:
            text = collector.explain()
    except ImportError as err:
        return "recorded?", f"not tried without {err.name or 'torchvision'}"
    if "stepped without TensorDicts" not in text:
        why = text.split("(", 1)[1].split(")")[0].partition("; ")[2]
        return "own methods", why.removeprefix(f"{name} is ")
    line = next((line for line in text.splitlines() if line.strip().startswith(name)), "")
    called = line.partition("called as it is, on rows, ")[2]
    return "recorded", f"called as it is {called}" if called else ""


def table() -> list[str]:
    """Return the lines of the table."""
    import torchrl

    head = f"Transforms of TorchRL {torchrl.__version__}, each tried around one environment:"
    lines, others = [head, "", "| transform | how | remarks |", "|---|---|---|"], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, kind in transforms():
            if name in EXAMPLES:
                lines.append("| `{}` | {} | {} |".format(name, *outcome(name, kind)))
            else:
                others.append(f"`{name}`")
    return [
        *lines,
        "",
        f"Not known, so the environment's own methods are called: {', '.join(others)}.",
    ]


def main() -> None:
    """Write the table into the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + "\n" + "\n".join(table()) + "\n\n" + END + after)


if __name__ == "__main__":
    main()
