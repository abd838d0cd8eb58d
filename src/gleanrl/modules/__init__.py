"""Names under which TorchRL users look for policies. Re-exports only."""

from gleanrl.policies.random import RandomPolicy

__all__ = ["RandomPolicy"]
