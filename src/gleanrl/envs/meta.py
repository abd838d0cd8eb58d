"""What is known of an environment without having one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase


@dataclass(frozen=True, slots=True)
class EnvMetaData:
    """What is known of an environment without having one."""

    tensordict: TensorDictBase
    """One step filled with zeros."""
    batch_size: torch.Size
    device: torch.device | None
    observation_spec: Any
    action_spec: Any
    reward_spec: Any
    done_spec: Any


def describe(env: Any) -> EnvMetaData:
    """Return what ``env``, which has TensorDict methods, is like."""
    return EnvMetaData(
        tensordict=env.fake_tensordict(),
        batch_size=env.batch_size,
        device=env.device,
        observation_spec=env.full_observation_spec,
        action_spec=env.full_action_spec,
        reward_spec=env.full_reward_spec,
        done_spec=env.full_done_spec,
    )
