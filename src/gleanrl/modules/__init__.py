"""Names under which TorchRL users look for policies and their distributions. Re-exports only."""

from tensordict.nn import NormalParamExtractor

from gleanrl.core.errors import refuse
from gleanrl.policies.distributions import IndependentNormal, TanhNormal
from gleanrl.policies.random import RandomPolicy

__all__ = ["IndependentNormal", "NormalParamExtractor", "RandomPolicy", "TanhNormal"]

__getattr__ = refuse(
    __name__,
    dict.fromkeys(
        ("Actor", "MLP", "ProbabilisticActor", "QValueActor", "ValueOperator"),
        "import it from torchrl.modules; its policies act in every collector",
    ),
)
