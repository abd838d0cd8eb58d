"""The common part of sources of rollouts: environments, counters, weights, remote access."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from tensordict.nn import set_interaction_type
from torch import nn

from gleanrl.core import paths
from gleanrl.core.env_users import GivenEnvs
from gleanrl.core.errors import UnknownModelError, WeightsError
from gleanrl.core.messages import Mishap, Report, Snapshot
from gleanrl.core.options import SourceOptions, warn
from gleanrl.core.protocols import JointAct, SharedMemory, Stop
from gleanrl.core.streams import Streams, preserved
from gleanrl.core.window import Window
from gleanrl.envs.factory import is_built
from gleanrl.envs.row_env import EnvRows
from gleanrl.envs.simulator_state import NeedsPickle, StateError
from gleanrl.envs.tensordict_envs import TensorDictHandle
from gleanrl.rollout.episode_tracker import Tracker
from gleanrl.rollout.step_timing import StepClock
from gleanrl.weights.module_weights import Shapes, check_weights, cloned, load_weights, shapes_of

NO_EPISODES = "the state has no running episodes"


class BaseSource:
    """A `Source` without its rollouts."""

    tracker: Tracker
    num_envs: int
    """Read by name, because without a layout no other attribute tells."""

    def __init__(
        self, envs: EnvRows | TensorDictHandle, inner: Any, user_policy: Any, options: SourceOptions
    ) -> None:
        """Serve ``envs``, which are seeded, saved and closed.

        Remote access sees the user's environment, ``inner``, and the user's policy.
        """
        self._envs = envs
        self.options = options
        self.env = inner
        self.policy = user_policy
        self.streams = Streams()
        self.streams.begin(options.stream)
        self._clock = StepClock(envs)
        self.failures: list[str] = []
        """The errors of environments that were built anew since the last rollout."""
        self.policy_version = 0
        self.inconsistent = False
        """Whether a failure left environments and counters in disagreement."""
        given = options.create_env_fn
        several = isinstance(given, Sequence) and not isinstance(given, str)
        built = list(filter(is_built, given if several else [given]))
        self._given_envs = GivenEnvs(built) if built else None
        self._fresh = True
        self._keeps = False
        """Whether the policy's entries of earlier steps survive the current reset."""

    @property
    def memory(self) -> SharedMemory | None:
        return self._envs.memory

    # -- weights and remote access -----------------------------------------------------------------

    def load(self, snapshot: Snapshot) -> None:
        models = {name: self._module(name) for name in snapshot.models}
        for name, weights in snapshot.models.items():
            check_weights(models[name], weights)
        for name, weights in snapshot.models.items():
            load_weights(models[name], weights)
        self.policy_version = snapshot.version

    def describe_weights(self, model_id: str) -> Shapes:
        """Return the shapes of the weights of a model, by dotted name."""
        return shapes_of(self._module(model_id))

    def policy_state(self) -> dict[str, Any]:
        """Return the policy's state dict, cloned; empty if it has none."""
        return cloned(self.policy.state_dict()) if isinstance(self.policy, nn.Module) else {}

    def _module(self, model_id: str) -> nn.Module:
        try:
            module = paths.resolve(self, model_id)
        except (AttributeError, LookupError, TypeError, ValueError) as err:
            raise UnknownModelError(f"no model {model_id!r} in this collector: {err}") from err
        if isinstance(module, nn.Module):
            return module
        raise WeightsError(
            f"{model_id!r} is a {type(module).__name__}, not an nn.Module: it has no weights"
        )

    def call(self, path: str, *args: Any, **kwargs: Any) -> Any:
        return paths.call(self, path, args, kwargs)

    def get(self, path: str) -> Any:
        return paths.resolve(self, path)

    # -- what environments and counters have in common ---------------------------------------------

    def place(self, base: int, stride: int) -> None:
        self.tracker.place(base, stride)

    @contextmanager
    def rolling(self) -> Iterator[None]:
        """Run a rollout without gradients, on the source's own streams, after due resets."""
        # As in `acting`, whose call would show in batches of one frame.
        with self.streams.active(), torch.no_grad(), self._exploration():
            self.make_consistent()
            yield
        self.inconsistent = False

    @contextmanager
    def acting(self) -> Iterator[None]:
        """Run a part of a rollout without gradients, on the source's own streams."""
        with self.streams.active(), torch.no_grad(), self._exploration():
            yield

    def make_consistent(self) -> None:
        """Do resets that are due before a rollout; until that has ended, the source is not."""
        failed, self.inconsistent = self.inconsistent, True
        if not failed and self._given_envs is not None and self._given_envs.used_elsewhere:
            failed = True
            warn(
                "an environment of this collector was reset by other code since the last batch "
                "(its rollout() or reset(), or another collector), so new trajectories begin; "
                "give each collector an environment of its own"
            )
        if failed or (self.options.reset_at_each_iter and not self._fresh):
            self._keeps = not failed
            self._reset(None, {})
            self._keeps = False
        self._fresh = False

    def _mark_consistent(self) -> None:
        self.inconsistent = False
        if self._given_envs is not None:
            self._given_envs.note_use()

    @property
    def under_way(self) -> bool:
        """Whether environments step in another process: not between calls of these."""
        return False

    def wait(self, seconds: float | None = None) -> None:
        """Do nothing, because no step is under way."""

    def settle(self) -> None:
        """Do nothing: no reset goes on."""

    def collecting(
        self, window: Window, steps: int, stop: Stop, random: bool
    ) -> Generator[JointAct | None, None, Report]:
        """Collect at once: these environments wait for nothing in which others could act."""
        return self.collect(window, steps, stop, random)
        yield

    def collect(self, window: Window, steps: int, stop: Stop, random: bool) -> Report:
        raise NotImplementedError

    def _report(self, steps: int, version: int, discarded: int = 0, payload: Any = None) -> Report:
        if self._given_envs is not None:
            self._given_envs.note_use()
        mishaps: tuple[Mishap, ...] = ()
        if self.failures:
            mishaps = tuple(("env_restarts", failure) for failure in self.failures)
            self.failures.clear()
        return Report(
            steps,
            steps * self.num_envs - self.tracker.lacking,
            version,
            discarded,
            payload,
            self.tracker.ended,
            measured=self._clock.seconds and self._clock.measured(),
            mishaps=mishaps,
        )

    def reset(self, envs: Sequence[int] | None, options: Mapping[str, Any]) -> None:
        chosen = None if self.inconsistent else envs
        self.inconsistent = True
        with self.streams.active():
            self._reset(chosen, options)
        self._mark_consistent()
        self._fresh = chosen is None

    def _reset(self, envs: Sequence[int] | None, options: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def seed(self, seed: int, static: bool, stream: int | None = None) -> int:
        with preserved():  # some environments seed torch's global generator as well
            self._envs.seed(seed, static)
        self.streams.seed(seed if stream is None else stream)
        self.reset(None, {})
        return seed if static else seed + self.num_envs - 1  # a batch counts as its size

    def state(self, allow_pickle: bool = False) -> dict[str, Any]:
        """Return counters, streams, version, the environment's state and the running episodes."""
        return {
            "env": self._envs.state(),
            "tracker": self.tracker.state(),
            "streams": self.streams.state(),
            "policy_version": self.policy_version,
            "episodes": self._episodes(allow_pickle),
        }

    def _episodes(self, allow_pickle: bool) -> dict[str, Any]:
        """Return the state of the running episodes, or why they cannot continue."""
        if self.inconsistent:
            return {"why": "the last rollout failed", "pickle": False}
        try:
            envs = self._envs.snapshot(allow_pickle)
        except StateError as err:
            return {"why": str(err), "pickle": isinstance(err, NeedsPickle)}
        return {"envs": envs, "fresh": self._fresh, **self._running()}

    def load_state(
        self, state: Mapping[str, Any], strict: bool = True, allow_pickle: bool = False
    ) -> str | None:
        self.tracker.check_state(state["tracker"])
        self._envs.load_state(state["env"], strict)
        self.policy_version = int(state["policy_version"])
        self.streams.load_state(state["streams"])
        why = self._resume(state.get("episodes") or {"why": NO_EPISODES}, allow_pickle)
        self.tracker.load_state(state["tracker"], running=why is None)
        if why is not None:
            self.reset(None, {})
        return why

    def _resume(self, episodes: Mapping[str, Any], allow_pickle: bool) -> str | None:
        """Continue the episodes of `_episodes`; return why that cannot be."""
        if "envs" not in episodes:
            return str(episodes["why"])
        try:
            self._envs.resume(episodes["envs"], allow_pickle)
            self._run_on(episodes)
        except StateError as err:
            return str(err)
        self._mark_consistent()
        self._fresh = bool(episodes["fresh"])
        return None

    def _running(self) -> dict[str, Any]:
        """Return the loop's part of running episodes; here nothing."""
        return {}

    def _run_on(self, episodes: Mapping[str, Any]) -> None:
        """Continue the loop's part of running episodes."""

    def close(self) -> None:
        if self._given_envs is not None:
            self._given_envs.end()
        self._envs.close()

    def _exploration(self) -> Any:
        return set_interaction_type(self.options.exploration_type)


def explanation(loop: str, env: str, policy: Sequence[str]) -> str:
    """Return the text of `explain`."""
    return "\n".join(
        [f"loop: {loop}", f"environment: {env}", "policy:", *(f"  {p}" for p in policy)]
    )
