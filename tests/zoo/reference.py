"""What a rollout means, written out plainly: one TensorDict, carried from step to step.

An environment is a `Twin` here: TorchRL's own methods, or `GymTwin`, which holds single Gymnasium
environments. The loop calls the policy on the TensorDict, steps, keeps a copy, and goes on with
what `step_mdp` keeps: all entries of the root, replaced by those of ``"next"``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType, set_interaction_type
from torch import nn
from torch.nn.parameter import is_lazy

ENDS = ("done", "terminated", "truncated")


class Twin(Protocol):
    """The environment of a reference loop."""

    def reset(self) -> TensorDictBase:
        """Reset everything and return the first root TensorDict."""

    def advance(self, root: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """Step; return ``root`` with its ``"next"``, and the root of the following step."""

    def close(self) -> None:
        """Close the environment."""


class TensorDictTwin:
    """An environment with TorchRL's methods, as it is."""

    def __init__(self, env: Any) -> None:
        self.reset, self.advance, self.close = env.reset, env.step_and_maybe_reset, env.close


class ReusingTwin:
    """An environment that uses its memory again: what it returns is copied at once."""

    def __init__(self, env: Any) -> None:
        self.env, self.close = env, env.close

    def reset(self) -> TensorDictBase:
        return copied(self.env.reset())

    def advance(self, root: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        finished = copied(self.env.step(root))
        return finished, copied(self.env.maybe_reset(self.env.step_mdp(finished)))


class GymTwin:
    """Single Gymnasium environments, stepped one after the other."""

    def __init__(self, envs: Sequence[gym.Env], batch: tuple[int, ...], seed: int | None = None):
        self.envs, self.batch = list(envs), batch
        self.seeds = [None if seed is None else seed + i for i in range(len(envs))]

    def reset(self) -> TensorDictBase:
        seeded = zip(self.envs, self.seeds, strict=True)
        root = self._pack([self._seen(env.reset(seed=seed)[0]) for env, seed in seeded])
        for name in ENDS:
            root[name] = torch.zeros(*self.batch, 1, dtype=torch.bool)
        return root

    def advance(self, root: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        action = root["action"]
        steps = [self._step(env, self._part(action, i)) for i, env in enumerate(self.envs)]
        after = self._pack(steps)
        after["done"] = after["terminated"] | after["truncated"]
        shown = set(after.keys())
        if "next" in root.keys():  # what the policy wrote there stays, and replaces root entries
            after = root["next"].copy().update(after)
        root["next"] = after
        gone = {key for key in after.keys() if key not in shown and key not in root.keys()}
        following = root.copy().exclude("next").update(after.copy().exclude("reward", *gone))
        ended = after["done"].reshape(-1).nonzero().flatten().tolist()
        fresh = {i: self._seen(self.envs[i].reset()[0]) for i in ended}
        for i, entries in fresh.items():
            following = self._place(following, i, {**entries, **dict.fromkeys(ENDS, False)})
        return root, following

    def close(self) -> None:
        for env in self.envs:
            env.close()

    def _step(self, env: gym.Env, action: Any) -> dict[Any, Any]:
        seen, reward, terminated, truncated, _ = env.step(decode(env.action_space, action))
        values = {"reward": np.array(reward, np.float32).reshape(1)}
        values["terminated"] = np.array(terminated, bool).reshape(1)
        values["truncated"] = np.array(truncated, bool).reshape(1)
        return {**self._seen(seen), **values}

    def _seen(self, value: Any) -> dict[Any, np.ndarray]:
        space = self.envs[0].observation_space
        prefix = () if isinstance(space, spaces.Dict) else ("observation",)
        return dict(flat(space, value, prefix))

    def _part(self, action: Any, index: int) -> Any:
        return action if not self.batch else action[index]

    def _pack(self, rows: list[dict[Any, np.ndarray]]) -> TensorDict:
        tensors = {key: torch.from_numpy(np.stack([row[key] for row in rows])) for key in rows[0]}
        out = TensorDict({}, batch_size=self.batch)
        for key, value in tensors.items():
            out[key] = value if self.batch else value[0]
        return out

    def _place(self, td: TensorDictBase, index: int, values: dict[Any, Any]) -> TensorDictBase:
        for key, value in values.items():
            whole = td[key].clone()
            whole.view(len(self.envs), -1)[index] = torch.as_tensor(value).reshape(-1)
            td[key] = whole
        return td


def modules_in(policy: Any, depth: int = 4) -> list[nn.Module]:
    """Return the modules that a policy is, holds or refers to."""
    if isinstance(policy, nn.Module) or not depth or isinstance(policy, type):
        return [policy] if isinstance(policy, nn.Module) else []
    held = [*getattr(policy, "__dict__", {}).values(), getattr(policy, "__self__", None)]
    held += [getattr(policy, "func", None), *(getattr(policy, "__closure__", None) or ())]
    held = [getattr(one, "cell_contents", one) for one in held]
    return [module for one in held if callable(one) for module in modules_in(one, depth - 1)]


def flat(space: gym.Space, value: Any, key: tuple[str, ...]) -> Iterable[tuple[Any, np.ndarray]]:
    """Yield key and array of every leaf of a ``value`` of ``space``."""
    if isinstance(space, spaces.Dict):
        for name, inner in space.items():
            yield from flat(inner, value[name], (*key, name))
    elif isinstance(space, spaces.Tuple):
        for index, inner in enumerate(space):
            yield from flat(inner, value[index], (*key, str(index)))
    else:
        yield key, np.array(value, dtype=space.dtype)


def decode(space: gym.Space, action: Any) -> Any:
    """Return the element of ``space`` that a policy meant."""
    if isinstance(space, spaces.Dict):
        return {name: decode(inner, action[name]) for name, inner in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(decode(inner, action[str(i)]) for i, inner in enumerate(space))
    if isinstance(space, spaces.Discrete):
        index = action if action.dim() == 0 else action.int().argmax()
        return space.dtype.type(int(index) + space.start)
    return action.numpy().astype(space.dtype, casting="same_kind").reshape(space.shape)


class Call:
    """A policy on a TensorDict, or one on tensors whose keys are given."""

    def __init__(self, policy: Callable, ins: Sequence[Any] = (), outs: Sequence[Any] = ()):
        self.policy, self.ins, self.outs = policy, tuple(ins), tuple(outs)

    def __call__(self, root: TensorDictBase) -> None:
        if not self.outs:
            result = self.policy(root)
            if result is not None and result is not root:
                root.update(result)
            return
        result = self.policy(*(root[key] for key in self.ins))
        results = result if isinstance(result, tuple) else (result,)
        for key, value in zip(self.outs, results, strict=True):
            root[key] = value


class Loop:
    """The reference loop: `rollout` makes one batch after the other."""

    def __init__(
        self,
        twin: Twin,
        policy: Callable[[TensorDictBase], None],
        states: dict[Any, torch.Tensor] | None = None,
        is_init: bool = False,
    ) -> None:
        """Reset ``twin``.

        Args:
            twin: The environment.
            policy: Writes into the root that it is given.
            states: Zeros that are provided where an episode begins: what the policy's
                ``("next", key)`` feeds.
            is_init: Whether ``"is_init"`` is provided.
        """
        self.twin, self.policy, self.states, self.is_init = twin, policy, states or {}, is_init
        self.root = twin.reset()
        self._begin(torch.ones(self.root.batch_size, dtype=torch.bool))
        self._tried = False

    def _try(self) -> None:
        """Call the policy once, as building a collector does; restore modules and streams."""
        self._tried = True
        held = [t for m in modules_in(self.policy) for t in (*m.parameters(), *m.buffers())]
        values = [(tensor, tensor.clone()) for tensor in held if not is_lazy(tensor)]
        streams = random.getstate(), np.random.get_state(), torch.get_rng_state()
        self.policy(copied(self.root))
        for tensor, value in values:
            tensor.copy_(value)
        random.setstate(streams[0])
        np.random.set_state(streams[1])
        torch.set_rng_state(streams[2])

    def rollout(self, steps: int, kind: InteractionType = InteractionType.RANDOM) -> TensorDictBase:
        """Return a batch ``[..., steps]``."""
        taken = []
        with torch.no_grad(), set_interaction_type(kind):
            if not self._tried:
                self._try()
            for _ in range(steps):
                self._act()
                finished, self.root = self.twin.advance(self.root)
                taken.append(copied(finished))
                if self.states or self.is_init:
                    self.root.update({key: finished["next", key].clone() for key in self.states})
                    self._begin(finished["next", "done"].squeeze(-1))
        batch = TensorDict.maybe_dense_stack(taken, dim=len(self.root.batch_size))
        return without_private(batch)

    def _act(self) -> None:
        flags = {name: self.root[name] for name in ENDS if name in self.root.keys()}
        self.policy(self.root)
        for name, value in flags.items():  # batches have them, also if the policy removes them
            self.root[name] = self.root.get(name, value)

    def _begin(self, where: torch.Tensor) -> None:
        if self.is_init:
            self.root["is_init"] = where.unsqueeze(-1).clone()
        for key, zero in self.states.items():
            value = self.root.get(key, None)
            value = zero.expand(*where.shape, *zero.shape) if value is None else value
            self.root[key] = torch.where(
                where.reshape(*where.shape, *[1] * zero.dim()), zero, value
            )


def copied(td: TensorDictBase) -> TensorDictBase:
    """Return a copy, bit for bit: `TensorDict.clone` loses the sign of zeros if it has a device."""
    return td.apply(torch.clone)


def without_private(batch: TensorDictBase) -> TensorDictBase:
    """Return ``batch`` without entries whose names begin with an underscore."""
    drop = [key for key in batch.keys(True) if (key if isinstance(key, str) else key[-1])[0] == "_"]
    return batch.exclude(*drop) if drop else batch


def seed_all(number: int) -> None:
    """Seed the streams of torch, numpy and Python."""
    # `torch.manual_seed` also notes, for devices that nobody uses, where it was called.
    torch.default_generator.manual_seed(number)
    np.random.seed(number)
    random.seed(number)
