"""Greedy actions from action values, as recorded calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gleanrl.policies.structure import is_plain, qualified
from gleanrl.policies.tape import Tape

# Its package is not imported here.
_Q_VALUES = "torchrl.modules.tensordict_module.actors.QValueModule"


def picks_actions(module: Any) -> bool:
    """Tell whether ``module`` does nothing but pick the action of the largest value."""
    return (
        qualified(type(module)) == _Q_VALUES
        and isinstance(module, nn.Module)
        and is_plain(module)
        and vars(module).get("action_mask_key") is None
    )


def lower_q_values(
    tape: Tape, action_space: str, values: torch.Tensor
) -> tuple[torch.Tensor, ...] | None:
    """Record the choice among ``values``, ``[..., n]``.

    Returns:
        Action, values and chosen value ``[..., 1]``; ``None`` for spaces that are not known here.
    """
    if action_space == "categorical":
        index = tape(torch.argmax, values, -1)
        return index, values, tape(torch.gather, values, -1, index.unsqueeze(-1))
    if action_space == "one_hot":
        hot = torch.zeros_like(values, dtype=torch.int64)
        tape.do(hot.copy_, tape(torch.eq, values, tape(torch.amax, values, -1, True)))
        return hot, values, tape(torch.sum, tape(torch.mul, hot, values), -1, True)
    return None
