"""Names under which TorchRL users look for policies and their distributions. Re-exports only."""

from tensordict.nn import NormalParamExtractor

from gleanrl.policies.normals import IndependentNormal, TanhNormal
from gleanrl.policies.random import RandomPolicy

__all__ = ["IndependentNormal", "NormalParamExtractor", "RandomPolicy", "TanhNormal"]
