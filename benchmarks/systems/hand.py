"""Hand-written loops: what ours is measured against. Bare modules, no TensorDict, no checks.

`HandLoop` steps single Gymnasium environments, `PoolLoop` a vectorised one whose automatic reset
costs a step. Actors choose actions. Scores are computed once per batch from what was stored: a
log-softmax and a gather per row would cost five times as much, and whoever writes the tightest loop
moves them out of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributions import Normal
from torch.distributions.transforms import TanhTransform

from benchmarks.envs import EnvFactory
from benchmarks.harness import Fields, System

_FLAGS = ("done", "terminated", "truncated")


class Actor:
    """Chooses the actions of ``P`` environments and keeps what a policy delivers."""

    outputs: dict[str, torch.Tensor]
    """``[T, P, ...]`` by dotted name, valid after `finish`."""
    _observations: Sequence[torch.Tensor] = ()
    _seen: list[Any]
    """What the network returned, row by row."""

    def begin(self, observations: Sequence[torch.Tensor]) -> None:
        """Start a batch on these ``T`` rows ``[P, ...]``."""
        self._observations, self._seen = observations, []

    def __call__(self, t: int) -> Any:
        """Act on row ``t``; returns one action per environment."""
        raise NotImplementedError

    def finish(self) -> None:
        """Compute in bulk what no environment waits for."""


class RandomActor(Actor):
    """Uniform actions, drawn for the whole batch at once."""

    def __init__(self, steps: int, envs: int, actions: int, arrays: Any = None) -> None:
        """Draw from ``range(actions)``; hand out lists, or numpy rows of dtype ``arrays``."""
        self._high, self._arrays = actions, arrays
        self._action = torch.zeros(steps, envs, dtype=torch.int64)
        self.outputs = {"action": self._action}
        self._rows: Any = []

    def begin(self, observations: Sequence[torch.Tensor]) -> None:
        torch.randint(self._high, self._action.shape, out=self._action)
        if self._arrays is None:
            self._rows = self._action.tolist()
        else:
            self._rows = self._action.numpy().astype(self._arrays)

    def __call__(self, t: int) -> Any:
        return self._rows[t]


class CategoricalActor(Actor):
    """``net`` gives the logits of discrete actions."""

    def __init__(
        self, net: nn.Module, steps: int, envs: int, actions: int, arrays: Any = None
    ) -> None:
        """Hand out lists, or numpy rows of dtype ``arrays``."""
        self._net, self._arrays = net, arrays
        self._action = torch.zeros(steps, envs, dtype=torch.int64)
        self._log_prob = torch.zeros(steps, envs)
        self._logits = torch.zeros(steps, envs, actions)
        self.outputs = {
            "action": self._action,
            "action_log_prob": self._log_prob,
            "logits": self._logits,
        }
        self._columns = self._action.unsqueeze(-1).unbind()
        self._flat = self._action.unbind()
        self._numpy = list(self._action.numpy())

    def __call__(self, t: int) -> Any:
        logits = self._logits_of(t)
        torch.multinomial(logits.softmax(-1), 1, True, out=self._columns[t])
        if self._arrays is None:
            return self._flat[t].tolist()
        return self._numpy[t].astype(self._arrays, copy=False)

    def _logits_of(self, t: int) -> torch.Tensor:
        logits: torch.Tensor = self._net(self._observations[t])
        self._seen.append(logits)
        return logits

    def finish(self) -> None:
        if self._seen:
            torch.stack(self._seen, out=self._logits)
        scores = self._logits.log_softmax(-1)
        torch.gather(scores, -1, self._action.unsqueeze(-1), out=self._log_prob.unsqueeze(-1))


class AddmmActor(CategoricalActor):
    """The same for a `nn.Sequential` of linear and tanh layers, without modules.

    Every result has its memory already; the last layer writes into the batch.
    """

    def __init__(self, net: nn.Sequential, steps: int, envs: int, actions: int) -> None:
        super().__init__(net, steps, envs, actions)
        *hidden, last = (layer for layer in net if isinstance(layer, nn.Linear))
        assert len(net) == 2 * len(hidden) + 1
        self._hidden = [
            (layer.bias, layer.weight.t(), torch.zeros(envs, layer.out_features))
            for layer in hidden
        ]
        self._last = last.bias, last.weight.t()
        self._logit_rows = self._logits.unbind()

    def _logits_of(self, t: int) -> torch.Tensor:
        given = self._observations[t]
        for bias, weight, out in self._hidden:
            torch.addmm(bias, given, weight, out=out)
            given = torch.tanh(out, out=out)
        return torch.addmm(self._last[0], given, self._last[1], out=self._logit_rows[t])


class NormalActor(Actor):
    """``net`` gives location and scale of continuous actions, squashed by tanh if asked."""

    def __init__(
        self, net: nn.Module, steps: int, envs: int, size: int, squash: bool = False
    ) -> None:
        """``net`` returns ``(loc, scale)``, each ``[P, size]``."""
        self._net, self._squash = net, squash
        self._action = torch.zeros(steps, envs, size)
        self._raw = torch.zeros(steps, envs, size) if squash else self._action
        self._log_prob = torch.zeros(steps, envs)
        self._loc, self._scale = torch.zeros(steps, envs, size), torch.zeros(steps, envs, size)
        self.outputs = {
            "action": self._action,
            "action_log_prob": self._log_prob,
            "loc": self._loc,
            "scale": self._scale,
        }
        self._raw_rows, self._rows = self._raw.unbind(), self._action.unbind()
        self._numpy = [list(row) for row in self._action.numpy()]

    def __call__(self, t: int) -> Any:
        parameters = self._net(self._observations[t])
        self._seen.append(parameters)
        torch.normal(*parameters, out=self._raw_rows[t])
        if self._squash:
            torch.tanh(self._raw_rows[t], out=self._rows[t])
        return self._numpy[t]

    def finish(self) -> None:
        locs, scales = zip(*self._seen, strict=True)
        torch.stack(locs, out=self._loc)
        torch.stack(scales, out=self._scale)
        scores = Normal(self._loc, self._scale).log_prob(self._raw)
        if self._squash:
            scores -= TanhTransform().log_abs_det_jacobian(self._raw, self._action)
        torch.sum(scores, -1, out=self._log_prob)


class RawSteps(System):
    """``env.step`` and ``env.reset`` alone: actions were drawn before, nothing is stored."""

    def __init__(self, factories: Sequence[EnvFactory], steps: int) -> None:
        self._envs = [factory() for factory in factories]
        for env in self._envs:
            env.reset()
        self._frames = steps * len(self._envs)
        shape = (8, steps, len(self._envs))
        high = self._envs[0].action_space.n  # type: ignore[attr-defined]
        self._plans = np.random.default_rng(0).integers(high, size=shape).tolist()
        self._batch = 0

    def collect_batch(self) -> int:
        plan = self._plans[self._batch % len(self._plans)]
        self._batch += 1
        pairs = [(env, env.step) for env in self._envs]
        for actions in plan:
            for (env, step), action in zip(pairs, actions, strict=True):
                _, _, terminated, truncated, _ = step(action)
                if terminated or truncated:
                    env.reset()
        return self._frames

    def close(self) -> None:
        for env in self._envs:
            env.close()


class _Loop(System):
    """Memory of a loop, ``[T, P, ...]``, which is used again for every batch.

    Observations are written once per step into ``T + 1`` rows; ``next.observation`` is those rows
    shifted by one, copied in bulk.
    """

    def __init__(self, first: Any, steps: int, actor: Actor) -> None:
        """Begin with the observations ``first``, ``[P, ...]``."""
        self._steps, self._actor, count = steps, actor, len(first)
        self._rows = np.zeros((steps + 1, *first.shape), first.dtype)
        self._rows[steps] = first
        self._single = list(self._rows)
        self._tensor_rows = torch.from_numpy(self._rows).unbind()
        self._next = np.zeros_like(self._rows[1:])
        self._reward = np.zeros((steps, count), np.float32)
        self._flags = np.zeros((3, steps, count), bool)
        self._traj = np.zeros((steps, count), np.int64)

    def fields(self) -> Fields:
        flat = {
            **{name: value.numpy() for name, value in self._actor.outputs.items()},
            "observation": self._rows[:-1],
            "next.observation": self._next,
            "next.reward": self._reward,
            **{f"next.{name}": flag for name, flag in zip(_FLAGS, self._flags, strict=True)},
            **dict.fromkeys(_FLAGS, np.zeros(self._reward.shape, bool)),
            "collector.traj_ids": self._traj,
        }
        return {name: value.swapaxes(0, 1).copy() for name, value in flat.items()}


class HandLoop(_Loop):
    """The tightest loop we can write that delivers the fields of a dense batch."""

    def __init__(self, factories: Sequence[EnvFactory], steps: int, actor: Actor) -> None:
        self._envs = [factory() for factory in factories]
        self._moves = [env.step for env in self._envs]
        first = np.stack([env.reset()[0] for env in self._envs])
        first = first.astype(np.float32) if first.dtype == np.float64 else first
        super().__init__(first, steps, actor)
        # Rows with environment and first observation dimension merged, as `concatenate` wants them.
        self._flat = list(self._rows.reshape(steps + 1, -1, *first.shape[2:]))
        self._ids = np.arange(len(first))
        self._finals: list[tuple[int, int, Any]] = []

    def collect_batch(self) -> int:
        act, moves, flat, concatenate = self._actor, self._moves, self._flat, np.concatenate
        rewards: list[Any] = []
        self._finals = []
        self._rows[0] = self._rows[self._steps]
        self._flags[...] = False
        self._traj[...] = self._ids
        with torch.no_grad():
            act.begin(self._tensor_rows)
            for t in range(self._steps):
                results = [move(action) for move, action in zip(moves, act(t), strict=False)]
                observed, reward, terminated, truncated, _ = zip(*results, strict=False)
                concatenate(observed, out=flat[t + 1], casting="same_kind")
                rewards.append(reward)
                if True in terminated or True in truncated:
                    self._end(t, terminated, truncated)
            act.finish()
        self._reward[...] = rewards
        self._next[...] = self._rows[1:]
        for t, env, final in self._finals:
            self._next[t, env] = final
        return self._reward.size

    def _end(self, t: int, terminated: Sequence[bool], truncated: Sequence[bool]) -> None:
        row = self._single[t + 1]
        for env, (dead, late) in enumerate(zip(terminated, truncated, strict=True)):
            if not (dead or late):
                continue
            self._flags[:, t, env] = True, dead, late
            self._finals.append((t, env, row[env].copy()))
            row[env] = self._envs[env].reset()[0]
            self._ids[env] += len(self._envs)
            self._traj[t + 1 :, env] = self._ids[env]

    def close(self) -> None:
        for env in self._envs:
            env.close()


class PoolLoop(_Loop):
    """Steps the pool ``T`` times per batch and stores every row it returns.

    The step after an end is no transition, only the reset: such rows are marked in ``mask`` and not
    counted. Ours delivers none of them; the bare loop leaves sorting them out to its user.
    """

    def __init__(self, pool: Any, steps: int, actor: Actor) -> None:
        self._pool = pool
        super().__init__(pool.reset()[0], steps, actor)
        count = self._reward.shape[1]
        self._mask = np.ones((steps + 1, count), bool)
        self._episodes = np.zeros(count, np.int64)

    def collect_batch(self) -> int:
        act, step = self._actor, self._pool.step
        rows, rewards = self._single, self._reward
        _, terminated, truncated = self._flags
        self._rows[0] = self._rows[self._steps]
        with torch.no_grad():
            act.begin(self._tensor_rows)
            for t in range(self._steps):
                observed, reward, dead, late, _ = step(act(t))
                rows[t + 1][...] = observed
                rewards[t] = reward
                terminated[t] = dead
                truncated[t] = late
            act.finish()
        return self._finish()

    def _finish(self) -> int:
        self._next[...] = self._rows[1:]
        done, terminated, truncated = self._flags
        np.logical_or(terminated, truncated, out=done)
        self._mask[0] = self._mask[self._steps]
        np.logical_not(done, out=self._mask[1:])
        resets = np.cumsum(~self._mask[:-1], 0)
        np.add(resets, self._episodes, out=self._traj)
        self._episodes = self._traj[-1].copy()
        self._traj *= len(self._episodes)
        self._traj += np.arange(len(self._episodes))
        return int(np.count_nonzero(self._mask[:-1]))

    def fields(self) -> Fields:
        return {**super().fields(), "mask": self._mask[:-1].swapaxes(0, 1).copy()}

    def close(self) -> None:
        self._pool.close()
