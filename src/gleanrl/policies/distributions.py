"""The distributions whose draws are recorded, and what is checked of their parameters."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import distributions as D

from gleanrl.policies.inspect import Watch, is_genuine, qualified
from gleanrl.policies.normals import IndependentNormal, TanhNormal
from gleanrl.policies.op_recorder import OpRecorder, require

# What these do depends on their parameters' values only by the arithmetic. Full names, because the
# package of some of them is not imported here.
_KNOWN = {
    qualified(D.Categorical),
    qualified(D.OneHotCategorical),
    qualified(D.Normal),
    qualified(IndependentNormal),
    qualified(TanhNormal),
    "tensordict.nn.distributions.discrete.OneHotCategorical",
    "torchrl.modules.distributions.discrete.OneHotCategorical",
    "torchrl.modules.distributions.continuous.IndependentNormal",
    "torchrl.modules.distributions.continuous.TanhNormal",
}
_BUILT_OF = (D.Distribution, D.transforms.Transform, D.constraints.Constraint)


def require_known(kind: Any, options: Any) -> None:
    """Require that ``kind`` is exactly a known class, and ``options`` what a `Watch` can compare.

    Raises:
        Unknown: they are not.
    """
    require(qualified(kind) in _KNOWN and all(map(is_genuine, kind.__mro__[:-1])))
    settings = (bool, int, float, torch.Tensor, np.ndarray, type(None))
    require(type(options) is dict and all(type(value) in settings for value in options.values()))


def watch_distribution(watch: Watch, distribution: Any) -> None:
    """Add the classes of all that ``distribution`` is built of; raise if one was patched."""
    seen: set[int] = set()
    todo: list[Any] = [distribution]
    while todo:
        item = todo.pop()
        if isinstance(item, (list, tuple)):
            todo.extend(item)
        elif isinstance(item, _BUILT_OF) and id(item) not in seen:
            require(all(map(is_genuine, type(item).__mro__[:-1])))
            seen.add(id(item))
            watch.add_class(type(item))
            todo.extend(vars(item).values())


@contextmanager
def unchecked(module: Any) -> Iterator[Any]:
    """Give ``module``, which draws, as one whose distribution does not check its parameters."""
    twin, options = copy.copy(module), module.distribution_kwargs
    if "validate_args" in options:
        twin.distribution_kwargs = {**options, "validate_args": False}
    validates = D.Distribution._validate_args
    D.Distribution.set_default_validate_args(False)
    try:
        yield twin
    finally:
        D.Distribution.set_default_validate_args(validates)


def check_parameters(
    ops: OpRecorder, module: Any, params: Mapping[str, torch.Tensor], name: str
) -> None:
    """Have rollouts end with an error if ``params`` are none for the distribution of ``module``.

    Args:
        ops: Records the checks.
        module: Draws.
        params: What it reads, by the name that the distribution has for it.
        name: What messages call the parameters.
    """
    asked = module.distribution_kwargs.get("validate_args")
    validated = D.Distribution._validate_args if asked is None else asked
    not_finite = (
        f"the policy gave NaN or infinite values in {name} during this rollout; look at its "
        "weights and at the observations it was fed"
    )
    least = 1e-6 if module.distribution_class.__name__ == "TanhNormal" else 0.0
    for what, value in params.items():
        if what == "logits":
            # NaN, +inf and rows of -inf all show in the normaliser; single -inf are legal masks.
            ops.check_finite(ops.latest["logsumexp"], not_finite)
        elif what == "probs":
            ops.check_finite(ops.latest["sum"], not_finite)
            tiny = torch.finfo(value.dtype).tiny
            ops.check_above(value, -tiny, f"the policy gave negative probabilities in {name}")
        elif what == "loc" and validated:
            ops.check_finite(value, not_finite)
        elif what == "scale" and validated:
            message = f"the policy gave a scale of at most {least:g}; {not_finite}"
            ops.check_above(value, least, message)
