"""The path under which TorchRL users import `EnvBase`. Re-exports only."""

from gleanrl.envs.base import EnvBase

__all__ = ["EnvBase"]
