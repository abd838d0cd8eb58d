"""Hand-written loops to compare GleanRL with: bare modules, no TensorDict, no checks.

`hand_loop` steps single Gymnasium environments, `pool_loop` a vectorised one whose automatic reset
costs a step. Actors choose actions. Scores are computed once per batch from the stored rows,
because a log-softmax and a gather per row would cost five times as much.
"""

from __future__ import annotations

import itertools
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
    """Chooses the actions of ``P`` environments and keeps the outputs of a policy."""

    _observations: Sequence[torch.Tensor] = ()
    _seen: list[Any]
    """The network's outputs, row by row."""

    def __init__(self, **outputs: torch.Tensor) -> None:
        """Keep memory for ``outputs``, ``[T, P, ...]``, valid after `finish`."""
        self.outputs = outputs

    def begin(self, observations: Sequence[torch.Tensor]) -> None:
        """Start a batch on these ``T`` rows ``[P, ...]``."""
        self._observations, self._seen = observations, []

    def __call__(self, t: int) -> Any:
        """Act on row ``t``; returns one action per environment."""
        raise NotImplementedError

    def finish(self) -> None:
        """Compute the outputs that no environment waits for, in bulk."""


class RandomActor(Actor):
    """Uniform actions, drawn for the whole batch at once."""

    def __init__(self, steps: int, envs: int, actions: int, arrays: Any = None) -> None:
        """Draw from ``range(actions)``; hand out lists, or numpy rows of dtype ``arrays``."""
        self._high, self._arrays = actions, arrays
        self._action = torch.zeros(steps, envs, dtype=torch.int64)
        super().__init__(action=self._action)
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
        super().__init__(
            action=torch.zeros(steps, envs, dtype=torch.int64),
            action_log_prob=torch.zeros(steps, envs),
            logits=torch.zeros(steps, envs, actions),
        )
        self._action, self._log_prob, self._logits = self.outputs.values()
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
    """``net`` gives location and scale of continuous actions, squashed by tanh with ``squash``."""

    def __init__(
        self, net: nn.Module, steps: int, envs: int, size: int, squash: bool = False
    ) -> None:
        """``net`` returns ``(loc, scale)``, each ``[P, size]``."""
        self._net, self._squash = net, squash
        names = "action", "loc", "scale"
        super().__init__(
            action_log_prob=torch.zeros(steps, envs),
            **{name: torch.zeros(steps, envs, size) for name in names},
        )
        self._log_prob, self._action, self._loc, self._scale = self.outputs.values()
        self._raw = torch.zeros(steps, envs, size) if squash else self._action
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


def raw_steps(factories: Sequence[EnvFactory], steps: int) -> System:
    """Return ``env.step`` and ``env.reset`` alone: actions were drawn before, nothing is stored."""
    envs: list[Any] = [factory() for factory in factories]
    for env in envs:
        env.reset()
    shape = (8, steps, len(envs))
    drawn = np.random.default_rng(0).integers(envs[0].action_space.n, size=shape)
    plans = itertools.cycle(drawn.tolist())
    pairs = [(env, env.step) for env in envs]

    def collect() -> int:
        for actions in next(plans):
            for (env, step), action in zip(pairs, actions, strict=True):
                _, _, terminated, truncated, _ = step(action)
                if terminated or truncated:
                    env.reset()
        return steps * len(envs)

    return System(collect)


class _Memory:
    """Memory of a loop, ``[T, P, ...]``, which is used again for every batch.

    Observations are written once per step into ``T + 1`` rows; ``next.observation`` is those rows
    shifted by one, copied in bulk.
    """

    def __init__(self, first: Any, steps: int, actor: Actor) -> None:
        """Begin with the observations ``first``, ``[P, ...]``."""
        self._actor, shape = actor, (steps, len(first))
        self.rows = np.zeros((steps + 1, *first.shape), first.dtype)
        self.rows[steps] = first
        self.tensors = torch.from_numpy(self.rows).unbind()
        self.next = np.zeros_like(self.rows[1:])
        self.reward = np.zeros(shape, np.float32)
        self.flags = np.zeros((3, *shape), bool)
        self.traj = np.zeros(shape, np.int64)
        self.mask: Any = None
        """Which rows are transitions, ``[T + 1, P]``, if not all are."""

    def fields(self) -> Fields:
        flat = {
            **{name: value.numpy() for name, value in self._actor.outputs.items()},
            "observation": self.rows[:-1],
            "next.observation": self.next,
            "next.reward": self.reward,
            **{f"next.{name}": flag for name, flag in zip(_FLAGS, self.flags, strict=True)},
            **dict.fromkeys(_FLAGS, np.zeros(self.reward.shape, bool)),
            "collector.traj_ids": self.traj,
            **({} if self.mask is None else {"mask": self.mask[:-1]}),
        }
        return {name: value.swapaxes(0, 1) for name, value in flat.items()}


def grey_stacks(factory: EnvFactory, steps: int) -> System:
    """Return a loop with random actions whose images become stacks of four grey ones.

    The arithmetic is that of TorchRL's ``ToTensorImage``, ``GrayScale`` and ``CatFrames``.
    """
    env = factory()
    image = torch.as_tensor(env.reset()[0])
    high, wide, _ = image.shape
    stacks = torch.zeros(steps + 1, 4, high, wide)
    following = torch.zeros(steps, 4, high, wide)
    weights = torch.tensor([0.2989, 0.587, 0.114])
    rewards, flags = torch.zeros(steps), torch.zeros(3, steps, dtype=torch.bool)
    actions = torch.zeros(steps, dtype=torch.int64)
    choices = int(env.action_space.n)  # type: ignore[attr-defined]  # discrete

    def grey(image: Any) -> torch.Tensor:
        red, green, blue = torch.as_tensor(image).permute(2, 0, 1).div(255).unbind(0)
        return red * weights[0] + green * weights[1] + blue * weights[2]

    stacks[steps] = grey(image)

    def collect() -> int:
        stacks[0] = stacks[steps]
        torch.randint(choices, (steps,), out=actions)
        for t, action in enumerate(actions.tolist()):
            seen, rewards[t], dead, late, _ = env.step(action)
            following[t, :3], following[t, 3] = stacks[t, 1:], grey(seen)
            stacks[t + 1] = following[t]
            flags[:, t] = torch.tensor((dead or late, dead, late))
            if dead or late:
                stacks[t + 1] = grey(env.reset()[0])
        return steps

    return System(collect, end=env.close)


def prepared_atari(factories: Sequence[EnvFactory], net: nn.Module, steps: int) -> System:
    """Return a loop of DQN whose images are prepared as in TorchRL's ``dqn_atari.py``.

    The arithmetic is that of ``ToTensorImage``, ``GrayScale``, ``Resize``, ``CatFrames`` and
    ``VecNorm``, into the same memory at every step. Action values are kept.
    """
    envs = [factory() for factory in factories]
    count, lives = len(envs), [env.unwrapped.ale.lives for env in envs]  # type: ignore[attr-defined]
    images = torch.stack([torch.as_tensor(env.reset()[0]) for env in envs])
    scaled = images.permute(0, 3, 1, 2).div(255)
    red, green, blue = scaled.numpy().swapaxes(0, 1)
    shades = [np.zeros_like(red, order="C") for _ in range(2)]
    small, stacks = torch.zeros(count, 1, 84, 84), torch.zeros(count, 4, 84, 84)
    sums, squares, seen = torch.zeros_like(stacks), torch.zeros_like(stacks), 0.0
    rows, following = torch.zeros(steps + 1, *stacks.shape), torch.zeros(steps, *stacks.shape)
    rewards, flags = torch.zeros(steps, count), torch.zeros(steps, 4, count, dtype=torch.bool)
    values, actions = torch.zeros(steps, count, 6), torch.zeros(steps, count, dtype=torch.int64)

    def prepare() -> torch.Tensor:
        nonlocal seen
        torch.div(images.permute(0, 3, 1, 2), 255, out=scaled)
        np.multiply(red, 0.2989, shades[0])
        for colour, weight in ((green, 0.587), (blue, 0.114)):
            np.multiply(colour, weight, shades[1])
            np.add(shades[0], shades[1], shades[0])
        grey = torch.from_numpy(shades[0])[:, None]
        torch.ops.aten._upsample_bilinear2d_aa.out(grey, [84, 84], False, out=small)
        stacks[:, :3] = stacks[:, 1:].clone()
        stacks[:, 3:] = small
        seen = seen * 0.9999 + 1
        sums.mul_(0.9999).add_(stacks)
        squares.mul_(0.9999).addcmul_(stacks, stacks)
        mean = sums / seen
        return (stacks - mean).div_((squares / seen - mean * mean).clamp_min_(1e-4).sqrt_())

    def collect() -> int:
        rows[0] = rows[steps]
        for t in range(steps):
            with torch.no_grad():
                values[t] = net(rows[t])
            actions[t] = values[t].argmax(-1)
            left = [one() for one in lives]
            for index, (env, action) in enumerate(zip(envs, actions[t].tolist(), strict=True)):
                image, reward, dead, late, _ = env.step(action)
                images[index], rewards[t, index] = torch.from_numpy(image), np.sign(reward)
                fewer = lives[index]() < left[index]
                flags[t, :, index] = torch.tensor((dead or late, dead, late, fewer))
            following[t] = rows[t + 1] = prepare()
            for index in flags[t, 0].nonzero().flatten().tolist():
                images[index] = torch.as_tensor(envs[index].reset()[0])
        return steps * count

    def end() -> None:
        for env in envs:
            env.close()

    return System(collect, end=end)


def hand_loop(factories: Sequence[EnvFactory], steps: int, actor: Actor) -> System:
    """Return the tightest loop we can write that delivers the fields of a dense batch."""
    envs = [factory() for factory in factories]
    moves = [env.step for env in envs]
    first = np.stack([env.reset()[0] for env in envs])
    first = first.astype(np.float32) if first.dtype == np.float64 else first
    memory = _Memory(first, steps, actor)
    rows, traj, single = memory.rows, memory.traj, list(memory.rows)
    # Rows with environment and first observation dimension merged, as `concatenate` wants them.
    flat, concatenate = list(rows.reshape(steps + 1, -1, *first.shape[2:])), np.concatenate
    ids = np.arange(len(envs))
    finals: list[tuple[int, int, Any]] = []

    def end(t: int, terminated: Sequence[bool], truncated: Sequence[bool]) -> None:
        row = single[t + 1]
        for env, (dead, late) in enumerate(zip(terminated, truncated, strict=True)):
            if not (dead or late):
                continue
            memory.flags[:, t, env] = True, dead, late
            finals.append((t, env, row[env].copy()))
            row[env] = envs[env].reset()[0]
            ids[env] += len(envs)
            traj[t + 1 :, env] = ids[env]

    @torch.no_grad()
    def collect() -> int:
        rewards: list[Any] = []
        finals.clear()
        rows[0] = rows[steps]
        memory.flags[...] = False
        traj[...] = ids
        actor.begin(memory.tensors)
        for t in range(steps):
            results = [move(action) for move, action in zip(moves, actor(t), strict=False)]
            observed, reward, terminated, truncated, _ = zip(*results, strict=False)
            concatenate(observed, out=flat[t + 1], casting="same_kind")
            rewards.append(reward)
            if True in terminated or True in truncated:
                end(t, terminated, truncated)
        actor.finish()
        memory.reward[...] = rewards
        memory.next[...] = rows[1:]
        for t, env, final in finals:
            memory.next[t, env] = final
        return memory.reward.size

    return System(collect, memory.fields)


def async_pool_loop(pool: Any, steps: int, actor: Actor, stores: bool) -> System:
    """Return a loop over a pool that answers for some environments at a time.

    Args:
        pool: The pool.
        steps: Answers per batch.
        actor: What acts, for the environments of an answer.
        stores: Whether rows of all answers are stored, as they come; else nothing is.
    """
    observation, infos = pool.reset()
    ids = infos["env_id"]
    memory = _Memory(observation, steps, actor)
    rows, rewards = list(memory.rows), memory.reward
    _, terminated, truncated = memory.flags
    envs = np.zeros((steps, len(ids)), np.int64)
    by_id = "ale" not in type(pool).__module__  # ALE's knows for whom actions are
    seen = rows[0]

    @torch.no_grad()
    def collect() -> int:
        nonlocal ids
        seen[...] = rows[steps]
        actor.begin(memory.tensors)
        for t in range(steps):
            answer = pool.step(actor(t), ids) if by_id else pool.step(actor(t))
            ids = answer[-1]["env_id"]
            if stores:
                rows[t + 1][...], rewards[t], terminated[t], truncated[t], _ = answer
                envs[t] = ids
        actor.finish()
        return steps * len(ids)

    return System(collect, end=pool.close)


def pool_loop(pool: Any, steps: int, actor: Actor) -> System:
    """Return a loop that steps the pool ``T`` times per batch and stores every row.

    The step after an end is no transition, only the reset: such rows are marked in ``mask`` and not
    counted. GleanRL delivers none of them; the bare loop leaves the choice to its user.
    """
    memory = _Memory(pool.reset()[0], steps, actor)
    rows, rewards, traj, step = list(memory.rows), memory.reward, memory.traj, pool.step
    memory.mask = mask = np.ones((steps + 1, len(rows[0])), bool)
    done, terminated, truncated = memory.flags
    episodes, ids = np.zeros_like(traj[0]), np.arange(len(rows[0]))

    @torch.no_grad()
    def collect() -> int:
        rows[0][...] = rows[steps]
        actor.begin(memory.tensors)
        for t in range(steps):
            rows[t + 1][...], rewards[t], terminated[t], truncated[t], _ = step(actor(t))
        actor.finish()
        memory.next[...] = memory.rows[1:]
        np.logical_or(terminated, truncated, out=done)
        mask[0] = mask[steps]
        np.logical_not(done, out=mask[1:])
        np.add(np.cumsum(~mask[:-1], 0), episodes, out=traj)
        episodes[...] = traj[-1]
        traj[...] = traj * len(ids) + ids
        return int(np.count_nonzero(mask[:-1]))

    return System(collect, memory.fields, pool.close)
