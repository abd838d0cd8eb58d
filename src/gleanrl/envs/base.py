"""The base of our own environments with TensorDict methods."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from gleanrl.core.errors import ConfigError
from gleanrl.core.keys import NEXT, TIME, NestedKey, next_key
from gleanrl.core.options import whole
from gleanrl.envs.declared import Declared, EnvSpecs
from gleanrl.envs.specs import Composite, TensorSpec

Self = TypeVar("Self", bound="EnvBase")
TensorDictPolicy = Callable[[TensorDictBase], Any]


class EnvBase(abc.ABC):
    """An environment, or a batch of them, that is reset and stepped with TensorDicts.

    The interface is the one TorchRL users know; what a subclass adds is four methods: `_reset`,
    `_step`, `_set_seed` and `_close`. Data are a root part (observations, end flags, actions) and
    what a step leads to under ``"next"`` (observations, rewards, end flags).
    """

    def __init__(
        self,
        specs: EnvSpecs,
        batch_size: Sequence[int] = (),
        device: torch.device | str | None = None,
    ) -> None:
        """Declare the data.

        Args:
            specs: With the batch dimensions in front.
            batch_size: ``()`` for a single environment.
            device: Where data are returned; ``None`` for host memory, unmarked.
        """
        self.is_closed = False
        self._declared = Declared(specs, tuple(batch_size), device)

    @property
    def _known(self) -> Declared:
        """What is declared; a subclass that has to find out first overrides this."""
        return self._declared

    # -- for subclasses --------------------------------------------------------------------------

    @abc.abstractmethod
    def _reset(self, tensordict: TensorDictBase | None, **options: Any) -> TensorDictBase:
        """Start episodes and return the whole root part.

        Args:
            tensordict: With ``"_reset"`` masks if only some environments are to be reset.
            options: What the user gave to `reset`.
        """

    @abc.abstractmethod
    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Carry out the actions in ``tensordict`` and return what belongs under ``"next"``."""

    @abc.abstractmethod
    def _set_seed(self, seed: int, static: bool) -> None:
        """Seed environment ``i`` with ``seed + i`` (``seed`` if static) from its next reset on."""

    @abc.abstractmethod
    def _close(self) -> None:
        """Release what the environment holds. Called once."""

    # -- data ------------------------------------------------------------------------------------

    @property
    def batch_size(self) -> torch.Size:
        """``()`` for a single environment."""
        return self._known.batch_size

    @property
    def device(self) -> torch.device | None:
        """Where data are returned; ``None`` if nothing was said."""
        return self._known.device

    @property
    def full_observation_spec(self) -> Composite:
        """Specs of everything shown, at the root and under ``"next"``."""
        return self._known.specs.observation

    @property
    def full_action_spec(self) -> Composite:
        """Specs of all actions."""
        return self._known.specs.action

    @property
    def full_reward_spec(self) -> Composite:
        """Specs of all rewards."""
        return self._known.specs.reward

    @property
    def full_done_spec(self) -> Composite:
        """Specs of all end flags."""
        return self._known.specs.done

    @property
    def observation_spec(self) -> Composite:
        """Specs of everything shown."""
        return self._known.specs.observation

    @property
    def action_spec(self) -> TensorSpec | Composite:
        """The spec of the action if there is exactly one, else that of all of them."""
        return _single(self._known.specs.action)

    @property
    def reward_spec(self) -> TensorSpec | Composite:
        """The spec of the reward if there is exactly one, else that of all of them."""
        return _single(self._known.specs.reward)

    @property
    def done_spec(self) -> TensorSpec | Composite:
        """The spec of the end flag if there is exactly one, else that of all of them."""
        return _single(self._known.specs.done)

    @property
    def action_keys(self) -> list[NestedKey]:
        """Keys of all actions."""
        return _spelled(self._known.specs.action)

    @property
    def action_key(self) -> NestedKey:
        """The key of the only action.

        Raises:
            ConfigError: there is not exactly one.
        """
        if len(self.action_keys) != 1:
            raise ConfigError(f"this environment has the action keys {self.action_keys}, not one")
        return self.action_keys[0]

    @property
    def reward_keys(self) -> list[NestedKey]:
        """Keys of all rewards, without ``"next"``."""
        return _spelled(self._known.specs.reward)

    @property
    def done_keys(self) -> list[NestedKey]:
        """Keys of all end flags, without ``"next"``."""
        return _spelled(self._known.specs.done)

    def fake_tensordict(self) -> TensorDictBase:
        """Return one step filled with zeros: right keys, shapes and dtypes, nothing stepped."""
        fake = TensorDict({}, batch_size=self.batch_size, device=self.device)
        specs = self._known.specs
        for tree in (specs.observation, specs.action, specs.done):
            for key, spec in tree.items():
                fake.set(key, spec.zero())
        for tree in (specs.observation, specs.reward, specs.done):
            for key, spec in tree.items():
                fake.set(next_key(key), spec.zero())
        return fake

    def to(self: Self, device: torch.device | str) -> Self:
        """Return data on ``device`` from now on. Changes and returns this environment."""
        self._known.to(device)
        return self

    def add_truncated_keys(self: Self) -> Self:
        """Declare ``"truncated"`` beside every ``"done"`` that lacks it; it is never set by a step.

        Changes and returns this environment.
        """
        self._known.add_truncated()
        return self

    # -- stepping --------------------------------------------------------------------------------

    def reset(self, tensordict: TensorDictBase | None = None, **options: Any) -> TensorDictBase:
        """Start episodes.

        Args:
            tensordict: Root data, updated in place. If it has ``"_reset"`` masks, only environments
                that they name are reset, and the others keep their data.
            options: Passed on to what is wrapped.

        Returns:
            ``tensordict``, or the new root data.
        """
        root = self._complete(self._reset(tensordict, **options))
        if tensordict is None:
            return root
        for group in self._known.ends.groups:
            tensordict.pop((*group.prefix, "_reset"), None)
        return tensordict.update(root)

    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Carry out the actions in ``tensordict`` and set ``"next"`` in it.

        Entries that ``"next"`` has already stay unless the environment makes them itself.
        """
        return self._finish(tensordict, self._complete(self._step(tensordict)))

    def _finish(self, tensordict: TensorDictBase, after: TensorDictBase) -> TensorDictBase:
        given = tensordict.get(NEXT, None)
        if given is not None:
            merged = given.copy()
            after = merged.update(after)
        return tensordict.set(NEXT, after)

    def step_mdp(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the root data that follow a finished step."""
        # `copy`, because `exclude` alone would share the branches of nested data with the step.
        root, after = tensordict.exclude(NEXT).copy(), tensordict.get(NEXT)
        for tree in (self._known.specs.observation, self._known.specs.done):
            for key in tree.keys():
                root.set(key, after.get(key))
        return root

    def maybe_reset(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Reset where the root end flags are set; return the root data."""
        if not self._known.ends.any(tensordict):
            return tensordict
        for group in self._known.ends.groups:
            flags = [tensordict.get(key) for key in group.keys()]
            tensordict.set((*group.prefix, "_reset"), torch.stack(flags).any(0))
        return self.reset(tensordict)

    def step_and_maybe_reset(
        self, tensordict: TensorDictBase
    ) -> tuple[TensorDictBase, TensorDictBase]:
        """Step; return the finished step and the next root data, reset where an episode ended."""
        finished = self.step(tensordict)
        return finished, self.maybe_reset(self.step_mdp(finished))

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Draw actions; set them in ``tensordict`` if one is given."""
        drawn = self._known.specs.action.rand()
        return drawn if tensordict is None else tensordict.update(drawn)

    def rand_step(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Step with random actions."""
        return self.step(self.rand_action(tensordict))

    def rollout(
        self,
        max_steps: int,
        policy: TensorDictPolicy | None = None,
        callback: Callable[[EnvBase, TensorDictBase], Any] | None = None,
        *,
        auto_reset: bool = True,
        break_when_any_done: bool = True,
        tensordict: TensorDictBase | None = None,
        set_truncated: bool = False,
    ) -> TensorDictBase:
        """Take up to ``max_steps`` steps.

        Args:
            max_steps: Steps at most.
            policy: Sets actions in the TensorDict it is given, or returns one with them; ``None``
                acts at random.
            callback: Called with this environment and each finished step.
            auto_reset: Start with `reset`; otherwise with ``tensordict``.
            break_when_any_done: Stop where an episode ends; otherwise it is reset and goes on.
            tensordict: Root data to start with if ``auto_reset`` is false.
            set_truncated: Mark the last step as truncated where the episode did not end by itself.

        Returns:
            ``[*batch_size, T]`` data, last dimension named ``"time"``.

        Raises:
            ConfigError: ``auto_reset=False`` without ``tensordict``.
        """
        if not auto_reset and tensordict is None:
            raise ConfigError("auto_reset=False needs tensordict=, the root data to start with")
        root = self.reset() if auto_reset or tensordict is None else tensordict
        steps = []
        for _ in range(max_steps):
            root = self._act(policy, root)
            if callback is None and not break_when_any_done:
                finished, root = self.step_and_maybe_reset(root)
                steps.append(finished)
                continue
            finished = self.step(root)
            if callback is not None:
                callback(self, finished)
            steps.append(finished)
            root = self.step_mdp(finished)
            if break_when_any_done and self._known.ends.any(root):
                break
            root = self.maybe_reset(root)
        if set_truncated:
            self._truncate(steps[-1])
        stacked = LazyStackedTensorDict.maybe_dense_stack(steps, len(self.batch_size))
        stacked.names = [None] * len(self.batch_size) + [TIME]
        return stacked

    def _act(self, policy: TensorDictPolicy | None, root: TensorDictBase) -> TensorDictBase:
        if policy is None:
            return self.rand_action(root)
        out = policy(root)
        return root if out is None or out is root else root.update(out)

    def _truncate(self, finished: TensorDictBase) -> None:
        after = finished.get(NEXT)
        for group in self._known.ends.groups:
            done, late = (*group.prefix, "done"), (*group.prefix, "truncated")
            if group.truncated:
                after.set(late, after.get(late) | ~after.get(done))
                after.set(done, torch.ones_like(after.get(done)))

    def _complete(self, data: TensorDictBase) -> TensorDictBase:
        for key in self._known.silent:
            data.set(key, self._known.specs.done[key].zero())
        return data

    # -- life ------------------------------------------------------------------------------------

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed every environment, from its next reset on.

        Args:
            seed: Given to the first environment; each further one gets the next number.
            static_seed: Give all of them ``seed``.

        Returns:
            The seed of the last environment.

        Raises:
            ConfigError: ``seed`` is no whole number of 0 or more.
        """
        seed = whole("seed", seed, least=0)
        self._set_seed(seed, static_seed)
        return seed if static_seed else seed + self.batch_size.numel() - 1

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a restart; empty unless a subclass keeps something."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ConfigError: there is something to restore, and ``strict`` is true.
        """
        if state_dict and strict:
            raise ConfigError(f"{type(self).__name__} keeps no state, got {sorted(state_dict)}")

    def close(self) -> None:
        """Release the environment. Idempotent."""
        if not self.is_closed:
            self.is_closed = True
            self._close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _single(tree: Composite) -> TensorSpec | Composite:
    return next(iter(tree.items()))[1] if len(tree) == 1 else tree


def _spelled(tree: Composite) -> list[NestedKey]:
    return [key[0] if len(key) == 1 else key for key in tree.keys()]
