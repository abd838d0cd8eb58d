"""Whole episodes for evaluations, played and summed up in a worker."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from gleanrl.collectors.inside_worker import FillingSource, serve_worker
from gleanrl.core.episode_returns import mean_rewards
from gleanrl.core.errors import ClosedError, ConfigError
from gleanrl.core.keys import END_FLAGS, MASK, NEXT, TRAJ_IDS, Key, as_key, format_key
from gleanrl.core.messages import Mishap, Report, Snapshot
from gleanrl.core.options import SourceOptions
from gleanrl.core.protocols import Source, SourceFactory, Stop
from gleanrl.core.window import Window
from gleanrl.engine.whole_trajectories import WholeTrajectories

_STEPS = 64
"""Steps between two checks of the number of ended episodes."""
Metrics = Callable[[TensorDictBase], Mapping[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodesPlan:
    """The episodes of one evaluation, and the results to report."""

    count: int
    reward_key: Key
    frames: int | None
    """Frames, over all environments, between two checks of the number of ended episodes."""
    metrics: Metrics | None

    def factory(self, options: SourceOptions) -> SourceFactory:
        """Return the factory of a worker whose rollouts are evaluations."""
        make = partial(_in_evaluation_mode, options.policy, options.policy_factory)
        # The environment may count steps itself.
        options = replace(options, policy=None, policy_factory=make, count_steps=False)
        return partial(_serve_episodes, options, self)


def _in_evaluation_mode(policy: Any, factory: Callable[[], Any] | None) -> Any:
    """Return the policy that acts in the worker, which is a copy there."""
    acting = policy if factory is None else factory()
    return acting.eval() if isinstance(acting, nn.Module) else acting


class Episodes:
    """Takes rollouts in until there are enough whole episodes.

    Every environment contributes equally many, in the order in which it played them, so that short
    episodes are not preferred. If ``count`` is no multiple of the environments, the last ones
    contribute one less.
    """

    discarded = 0

    def __init__(self, plan: EpisodesPlan, num_envs: int) -> None:
        """Wait for ``plan.count`` episodes of ``num_envs`` environments."""
        self._plan = plan
        self._whole = WholeTrajectories(plan.count)
        self._whole.belong_to(num_envs, equally=True)
        share = self._whole.num_trajectories // num_envs
        short = self._whole.num_trajectories - plan.count  # fewer than there are environments
        last = [env * share + share - 1 for env in range(num_envs - short, num_envs)]
        self._rows = [row for row in range(self._whole.num_trajectories) if row not in last]

    def __call__(self, batch: TensorDictBase, hook: Callable[[Any], None] | None) -> None:
        """Add a rollout: all entries for the user's metrics, else only rewards and end flags."""
        if hook is not None:
            hook(batch)
        keys = {as_key(key) for key in batch.keys(True, True)}
        if self._plan.reward_key not in keys:
            there = {key for key in keys if key[-1] == "reward"} or keys
            raise ConfigError(
                f"there is no {format_key(self._plan.reward_key)} to add up; say reward_keys=, one "
                f"of {', '.join(sorted(map(format_key, there)))}"
            )
        if self._plan.metrics is None:
            ends = {key for key in keys if key[0] == NEXT and key[-1] in END_FLAGS}
            batch = batch.select(*(keys & {self._plan.reward_key, TRAJ_IDS, MASK} | ends))
        if MASK in keys:
            _keep_open(batch, [key for key in keys if key[-1] == "truncated" and key[0] == NEXT])
        self._whole.push(batch)

    def forget(self) -> None:
        self._whole.reset()

    def summary(self) -> TensorDict | None:
        """Return the results of the episodes, ``None`` if some have not ended."""
        whole = self._whole.pop()
        if whole is None:
            return None
        episodes = whole[self._rows]
        rewards = mean_rewards([episodes.get(self._plan.reward_key)], episodes.shape)
        found = {} if self._plan.metrics is None else self._plan.metrics(episodes)
        return TensorDict(
            {
                "returns": torch.from_numpy(rewards).sum(1),  # zero beyond the end
                "lengths": episodes.get(MASK).sum(1),
                "metrics": _numbers(found),
            }
        )


def _keep_open(batch: TensorDictBase, truncated: Iterable[Key]) -> None:
    """Leave episodes open that an error has cut, so that they do not count; another one follows."""
    cut = ~batch.get(MASK)[..., 1:]
    for key in truncated if bool(cut.any()) else ():
        done, dead = (batch.get((*key[:-1], name))[..., :-1, :] for name in ("done", "terminated"))
        done[cut] = dead[cut]
        batch.get(key)[..., :-1, :][cut] = False


def _numbers(found: Any) -> dict[str, torch.Tensor]:
    try:
        return {str(name): torch.as_tensor(value).reshape(()) for name, value in found.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError) as err:
        raise ConfigError(
            f"metrics_fn returned {found!r:.200}; it must return a mapping of names to numbers"
        ) from err


def _serve_episodes(options: SourceOptions, plan: EpisodesPlan, worker: int) -> EpisodesSource:
    source = serve_worker(options, worker)
    envs = int(source.get("num_envs"))
    source.place(0, envs)
    steps = _STEPS if plan.frames is None else -(-plan.frames // envs)
    return EpisodesSource(source, Episodes(plan, envs), steps)


class EpisodesSource(FillingSource):
    """A source whose rollouts are evaluations, and whose report is a summary.

    To the learner it is one environment, whatever number of them plays.
    """

    def __init__(self, source: Source, episodes: Episodes, steps: int) -> None:
        """Serve ``source``, whose environments have just been reset and are numbered."""
        super().__init__(source, episodes)
        self._episodes, self._steps = episodes, steps
        self._fresh = True
        """Whether the environments' first observation is up to date."""
        self.load, self.state, self.load_state = self._load, source.state, source.load_state

    def _load(self, snapshot: Snapshot) -> None:
        """Load weights; weights of an environment change the observation of its reset."""
        self._source.load(snapshot)
        self._fresh &= not snapshot.of_environments

    def place(self, base: int, stride: int) -> None:
        """Keep the numbers of environments, because there are no other workers."""

    def get(self, path: str) -> Any:
        return 1 if path == "num_envs" else self._source.get(path)

    def collect(self, window: Window, steps: int, stop: Stop, random: bool) -> Report:
        """Reset all environments and play until there are enough episodes."""
        began = time.perf_counter()
        if not self._fresh:
            self.reset(None, {})
        self._fresh, frames, mishaps = False, 0, tuple[Mishap, ...]()
        while True:
            report = super().collect(window, self._steps, stop, random)
            frames, mishaps = frames + report.frames, mishaps + report.mishaps
            summary = self._episodes.summary()
            if summary is not None:
                summary.set("seconds", torch.tensor(time.perf_counter() - began))
                version = report.policy_version
                return Report(steps, frames, version, payload=summary, mishaps=mishaps)
            if stop[0]:
                raise ClosedError("the evaluator was shut down while it evaluated")

    def seed(self, seed: int, static: bool, stream: int | None = None) -> int:
        """Seed everything, which resets all environments."""
        self._fresh = True
        return super().seed(seed, static, stream)
