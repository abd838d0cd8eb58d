"""The base of our own environments with TensorDict methods."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from gleanrl.core.errors import ConfigError
from gleanrl.core.keys import NEXT, TIME, Key, NestedKey, next_key
from gleanrl.core.options import whole
from gleanrl.envs.specs import Binary, Composite, TensorSpec
from gleanrl.envs.tensordict_layout import EndFlags

Self = TypeVar("Self", bound="EnvBase")
TensorDictPolicy = Callable[[TensorDictBase], Any]


@dataclass(frozen=True, slots=True)
class EnvSpecs:
    """What an environment shows, is told and returns; all with the batch dimensions in front."""

    observation: Composite
    action: Composite
    reward: Composite
    done: Composite

    def to(self, device: torch.device) -> EnvSpecs:
        """Return the same specs on another device."""
        return EnvSpecs(*(_moved(tree, device) for tree in self.trees()))

    def trees(self) -> tuple[Composite, Composite, Composite, Composite]:
        """Return the four groups in the order of the fields."""
        return self.observation, self.action, self.reward, self.done


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
        self.batch_size = torch.Size(batch_size)
        self.is_closed = False
        self._device = None if device is None else torch.device(device)
        self._specs = specs if self._device is None else specs.to(self._device)
        self._ends = EndFlags(specs.done, tuple(self.batch_size))
        self._silent: tuple[Key, ...] = ()
        """Flags that were declared by `add_truncated_keys` and are never set."""

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
    def device(self) -> torch.device | None:
        """Where data are returned; ``None`` if nothing was said."""
        return self._device

    @property
    def full_observation_spec(self) -> Composite:
        """Specs of everything shown, at the root and under ``"next"``."""
        return self._specs.observation

    @property
    def full_action_spec(self) -> Composite:
        """Specs of all actions."""
        return self._specs.action

    @property
    def full_reward_spec(self) -> Composite:
        """Specs of all rewards."""
        return self._specs.reward

    @property
    def full_done_spec(self) -> Composite:
        """Specs of all end flags."""
        return self._specs.done

    @property
    def observation_spec(self) -> Composite:
        """Specs of everything shown."""
        return self._specs.observation

    @property
    def action_spec(self) -> TensorSpec | Composite:
        """The spec of the action if there is exactly one, else that of all of them."""
        return _single(self._specs.action)

    @property
    def reward_spec(self) -> TensorSpec | Composite:
        """The spec of the reward if there is exactly one, else that of all of them."""
        return _single(self._specs.reward)

    @property
    def done_spec(self) -> TensorSpec | Composite:
        """The spec of the end flag if there is exactly one, else that of all of them."""
        return _single(self._specs.done)

    @property
    def action_keys(self) -> list[NestedKey]:
        """Keys of all actions."""
        return _spelled(self._specs.action)

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
        return _spelled(self._specs.reward)

    @property
    def done_keys(self) -> list[NestedKey]:
        """Keys of all end flags, without ``"next"``."""
        return _spelled(self._specs.done)

    def fake_tensordict(self) -> TensorDictBase:
        """Return one step filled with zeros: right keys, shapes and dtypes, nothing stepped."""
        fake = TensorDict({}, batch_size=self.batch_size, device=self.device)
        specs = self._specs
        for tree in (specs.observation, specs.action, specs.done):
            for key, spec in tree.items():
                fake.set(key, spec.zero())
        for tree in (specs.observation, specs.reward, specs.done):
            for key, spec in tree.items():
                fake.set(next_key(key), spec.zero())
        return fake

    def to(self: Self, device: torch.device | str) -> Self:
        """Return data on ``device`` from now on. Changes and returns this environment."""
        self._device = torch.device(device)
        self._specs = self._specs.to(self._device)
        return self

    def add_truncated_keys(self: Self) -> Self:
        """Declare ``"truncated"`` beside every ``"done"`` that lacks it; it is never set by a step.

        Changes and returns this environment.
        """
        done: dict[NestedKey, TensorSpec] = {k: spec for k, spec in self._specs.done.items()}
        added = [(*group.prefix, "truncated") for group in self._ends.groups if not group.truncated]
        for key in added:
            shape = done[(*key[:-1], "done")].shape
            done[key] = Binary(shape, torch.bool, self.device)
        self._specs = replace(self._specs, done=Composite(done, self.batch_size, self.device))
        self._ends = EndFlags(self._specs.done, tuple(self.batch_size))
        self._silent += tuple(added)
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
        for group in self._ends.groups:
            tensordict.pop((*group.prefix, "_reset"), None)
        return tensordict.update(root)

    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Carry out the actions in ``tensordict`` and set ``"next"`` in it.

        Entries that ``"next"`` has already stay unless the environment makes them itself.
        """
        given = tensordict.get(NEXT, None)
        after = self._complete(self._step(tensordict))
        if given is not None:
            merged = given.copy()
            after = merged.update(after)
        return tensordict.set(NEXT, after)

    def step_mdp(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the root data that follow a finished step."""
        # `copy`, because `exclude` alone would share the branches of nested data with the step.
        root, after = tensordict.exclude(NEXT).copy(), tensordict.get(NEXT)
        for tree in (self._specs.observation, self._specs.done):
            for key in tree.keys():
                root.set(key, after.get(key))
        return root

    def maybe_reset(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Reset where the root end flags are set; return the root data."""
        if not self._ends.any(tensordict):
            return tensordict
        for group in self._ends.groups:
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
        drawn = self._specs.action.rand()
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
            finished = self.step(root)
            if callback is not None:
                callback(self, finished)
            steps.append(finished)
            root = self.step_mdp(finished)
            if break_when_any_done and self._ends.any(root):
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
        for group in self._ends.groups:
            done, late = (*group.prefix, "done"), (*group.prefix, "truncated")
            if group.truncated:
                after.set(late, after.get(late) | ~after.get(done))
                after.set(done, torch.ones_like(after.get(done)))

    def _complete(self, data: TensorDictBase) -> TensorDictBase:
        for key in self._silent:
            data.set(key, self._specs.done[key].zero())
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


def batched(specs: Mapping[Key, Any], extra: Sequence[int], own: Sequence[int] = ()) -> Composite:
    """Return ``specs``, which begin with the batch ``own``, with dimensions ``extra`` in front."""
    wide: dict[NestedKey, TensorSpec] = {
        key: spec.expand(*extra, *spec.shape) if extra else spec for key, spec in specs.items()
    }
    return Composite(wide, (*extra, *own))


def _moved(tree: Composite, device: torch.device) -> Composite:
    specs: dict[NestedKey, TensorSpec] = {key: spec.to(device) for key, spec in tree.items()}
    return Composite(specs, tree.shape, device)


def _single(tree: Composite) -> TensorSpec | Composite:
    return next(iter(tree.items()))[1] if len(tree) == 1 else tree


def _spelled(tree: Composite) -> list[NestedKey]:
    return [key[0] if len(key) == 1 else key for key in tree.keys()]
