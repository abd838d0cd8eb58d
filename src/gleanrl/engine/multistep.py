"""n-step returns, computed on a batch as it was collected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from gleanrl.core.errors import ConfigError
from gleanrl.core.keys import MASK, NEXT, TRAJ_IDS, Key, NestedKey, as_key, as_keys, format_key
from gleanrl.engine.padding import end_flags


class MultiStep(nn.Module):
    """Turns one-step transitions into ``n_steps``-step ones; made to be a collector's ``postproc``.

    Every frame's reward becomes the discounted sum of the next ``n_steps`` rewards, and everything
    else under ``"next"`` is taken from the last of these steps: the observation, and the end flags
    that say whether its value may be bootstrapped from. Sums stop at the end of a trajectory, at
    the end of the batch and at frames that were never collected, so the last frames of a batch look
    ahead less far; ``"steps_to_next_obs"`` says how far.
    """

    def __init__(
        self,
        gamma: float,
        n_steps: int,
        *,
        reward_keys: Sequence[NestedKey] | None = None,
        mask_key: NestedKey = MASK,
        ids_key: NestedKey = TRAJ_IDS,
    ) -> None:
        """Look ahead up to ``n_steps`` steps.

        Args:
            gamma: Discount per step, in (0, 1].
            n_steps: Rewards summed at most; 1 leaves transitions as they are.
            reward_keys: Rewards under ``"next"`` to sum; by default all leaves named ``"reward"``.
            mask_key: Where the batch marks frames that were collected, if it does.
            ids_key: Where trajectory ids are, if there are any; end flags are always used.

        Raises:
            ConfigError: a number is out of range.
        """
        super().__init__()
        if n_steps < 1:
            raise ConfigError(f"n_steps ({n_steps}) must be at least 1")
        if not 0 < gamma <= 1:
            raise ConfigError(f"gamma ({gamma}) must be above 0 and at most 1")
        self.gamma = gamma
        self.n_steps = n_steps
        self.reward_keys = None if reward_keys is None else as_keys(reward_keys)
        self.mask_key, self.ids_key = as_key(mask_key), as_key(ids_key)

    def extra_repr(self) -> str:
        """Return the arguments for ``repr``."""
        return f"gamma={self.gamma}, n_steps={self.n_steps}"

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the batch with n-step transitions.

        Args:
            tensordict: ``[..., T]`` with observations, rewards and end flags under ``"next"``; not
                changed. Rewards start with the batch's shape.

        Returns:
            The same entries in a new container, those under ``"next"`` replaced, and in addition
            ``("next", "original_reward")`` (beside each reward: what it was), and in the batch's
            shape ``"steps_to_next_obs"`` (int64, ``1 .. n_steps``), ``"gamma"`` (float32, the
            discount of the next observation's value) and ``"nonterminal"`` (bool, False on the last
            frame of every trajectory of the batch and on frames never collected).

        Raises:
            ConfigError: there are no end flags or no rewards.
        """
        rewards = self._rewards(tensordict)
        last = self._last_frames(tensordict)
        ahead = _look_ahead(last, self.n_steps - 1)
        out = tensordict.copy()
        after = out.get(NEXT)
        originals: dict[Key, torch.Tensor] = {key: after.get(key) for key in rewards}
        moved = after.exclude(*rewards)
        if self.n_steps > 1:
            moved = _take_ahead(moved, ahead)
        for key, reward in originals.items():
            moved.set((*key[:-1], "original_" + key[-1]), reward)
            moved.set(key, _discounted_sum(reward, ahead, self.gamma, self.n_steps))
        out.set(NEXT, moved)
        nonterminal = ~last
        mask = tensordict.get(self.mask_key, None)
        if mask is not None:
            nonterminal &= mask
        out.set("steps_to_next_obs", ahead + 1)
        out.set("gamma", self.gamma ** (ahead + 1))
        out.set("nonterminal", nonterminal)
        return out

    def _rewards(self, batch: TensorDictBase) -> tuple[Key, ...]:
        after: Any = batch.get(NEXT, None)
        found = () if after is None else as_keys(after.keys(include_nested=True, leaves_only=True))
        if self.reward_keys is None:
            chosen = tuple(key for key in found if key[-1] == "reward")
            if not chosen:
                raise ConfigError(
                    "no entry under 'next' is called 'reward'; name it with reward_keys"
                )
            return chosen
        missing = [format_key((NEXT, *key)) for key in self.reward_keys if key not in found]
        if missing:
            raise ConfigError(f"the batch has no {', '.join(missing)}, named in reward_keys")
        return self.reward_keys

    def _last_frames(self, batch: TensorDictBase) -> torch.Tensor:
        """Return where no later frame belongs to the same trajectory, in the batch's shape."""
        last = end_flags(batch)
        last[..., -1:] = True
        for key in (self.ids_key, self.mask_key):
            marks = batch.get(key, None)
            if marks is not None:
                last[..., :-1] |= marks[..., 1:] != marks[..., :-1]
        return last


def _look_ahead(last: torch.Tensor, most: int) -> torch.Tensor:
    """Return how many further steps, at most ``most``, each frame ``[..., T]`` can look ahead."""
    steps = last.shape[-1]
    time = torch.arange(steps, device=last.device)
    end = torch.where(last, time, steps).flip(-1).cummin(-1).values.flip(-1)
    return (end - time).clamp_max_(most)


def _discounted_sum(
    reward: torch.Tensor, ahead: torch.Tensor, gamma: float, n_steps: int
) -> torch.Tensor:
    """Sum ``reward`` ``[..., T, *]`` over each frame and the ``ahead`` ``[..., T]`` after it."""
    dim = ahead.ndim - 1
    steps = ahead.shape[-1]
    total = reward.clone() if reward.is_floating_point() else reward.to(torch.get_default_dtype())
    within = ahead.reshape(*ahead.shape, *[1] * (reward.ndim - ahead.ndim))
    for k in range(1, min(n_steps, steps)):
        reached = within.narrow(dim, 0, steps - k) >= k
        # Selecting rather than multiplying keeps a NaN or infinity in its own trajectory.
        term = torch.where(reached, reward.narrow(dim, k, steps - k) * gamma**k, 0)
        total.narrow(dim, 0, steps - k).add_(term)
    return total


def _take_ahead(after: TensorDictBase, ahead: torch.Tensor) -> TensorDictBase:
    """Replace every frame of ``after`` ``[..., T]`` by the one ``ahead`` steps later."""
    frames = ahead.numel()
    index = torch.arange(frames, device=ahead.device) + ahead.reshape(-1)
    return after.reshape(-1)[index].reshape(ahead.shape)
