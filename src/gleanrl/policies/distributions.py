"""Gaussians for continuous actions, with the names and arguments of TorchRL."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import ClassVar, TypeAlias

import torch
from torch import distributions as D
from torch.distributions import constraints
from torch.distributions.utils import _sum_rightmost
from torch.nn import functional as F

from gleanrl.core.errors import ConfigError

Scale: TypeAlias = "torch.Tensor | float | Callable[[torch.Tensor], torch.Tensor]"
Bound: TypeAlias = "torch.Tensor | float"


class IndependentNormal(D.Independent):  # type: ignore[type-arg]
    """A Gaussian per element of the action; one log-probability for all of them.

    Args:
        loc: means ``[..., A]``.
        scale: standard deviations: a tensor, a number, or a callable that makes them of ``loc``.
        upscale: bound of the means with ``tanh_loc``.
        tanh_loc: whether the means are ``upscale * tanh(loc / upscale)`` instead of ``loc``.
        event_dim: how many of the last dimensions `log_prob` sums over.
        validate_args: whether parameters and values are checked; torch's default if ``None``.

    Examples:
        >>> choice = IndependentNormal(torch.zeros(4, 2), 1.0)
        >>> choice.log_prob(choice.sample()).shape
        torch.Size([4])
    """

    def __init__(
        self,
        loc: torch.Tensor,
        scale: Scale,
        upscale: Bound = 5.0,
        tanh_loc: bool = False,
        event_dim: int = 1,
        validate_args: bool | None = None,
    ) -> None:
        if tanh_loc:
            loc = upscale * (loc / upscale).tanh()
        normal = D.Normal(loc, scale(loc) if callable(scale) else scale, validate_args)
        super().__init__(normal, event_dim, validate_args)

    @property
    def deterministic_sample(self) -> torch.Tensor:
        """The means, which ``ExplorationType.DETERMINISTIC`` takes."""
        return self.mean


class TanhNormal(D.TransformedDistribution):
    """The hyperbolic tangent of Gaussians, stretched to ``low`` and ``high``.

    `log_prob` computes the value of an action before tanh. If tanh rounded it to a bound, this is
    the closest number that is not rounded, without gradient; so to sample *and* score, as SAC does,
    call `rsample_and_log_prob`. Actions beyond the bounds are scored like actions at the bounds.

    Args:
        loc: means ``[..., A]`` before tanh.
        scale: standard deviations before tanh: a tensor, a number, or a callable that makes them
            of ``loc``. They must be greater than 1e-6.
        upscale: bound of the means with ``tanh_loc``.
        low: least action, a number or ``[A]``.
        high: greatest action, a number or ``[A]``.
        event_dims: how many of the last dimensions `log_prob` sums over; 1 if ``None``.
        tanh_loc: whether the means are ``upscale * tanh(loc / upscale)`` instead of ``loc``.
        safe_tanh: whether samples keep off the bounds, by the resolution of their dtype (1e-6 of
            the half width for ``float32``), so that their log-probability is finite.

    Raises:
        ConfigError: ``low`` is not below ``high``.

    Examples:
        >>> choice = TanhNormal(torch.zeros(4, 2), 1.0, low=-2.0, high=2.0)
        >>> action, log_prob = choice.rsample_and_log_prob()
        >>> bool((action.abs() < 2).all()), log_prob.shape
        (True, torch.Size([4]))
    """

    arg_constraints: ClassVar = {  # type: ignore[misc]
        "loc": constraints.real,
        "scale": constraints.greater_than(1e-6),  # type: ignore[no-untyped-call]
    }

    def __init__(
        self,
        loc: torch.Tensor,
        scale: Scale,
        upscale: Bound = 5.0,
        low: Bound = -1.0,
        high: Bound = 1.0,
        event_dims: int | None = None,
        tanh_loc: bool = False,
        safe_tanh: bool = True,
    ) -> None:
        low, high = (torch.as_tensor(bound).to(loc) for bound in (low, high))
        self._squash = _Squash(low, high, safe_tanh)
        dims = min(1, loc.ndim) if event_dims is None else event_dims
        base = IndependentNormal(loc, scale, upscale, tanh_loc, dims, validate_args=False)
        self.loc, self.scale = base.base_dist.loc, base.base_dist.scale
        super().__init__(base, self._squash)

    @property
    def deterministic_sample(self) -> torch.Tensor:
        """The action of the means, which ``ExplorationType.DETERMINISTIC`` takes."""
        action: torch.Tensor = self._squash(self.loc)
        return action

    def rsample_and_log_prob(
        self, sample_shape: Sequence[int] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return differentiable actions and their log-probabilities, both from before tanh."""
        return self._squashed(self.base_dist.rsample(torch.Size(sample_shape)))

    def sample_and_log_prob(
        self, sample_shape: Sequence[int] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return actions without gradient and their log-probabilities, both from before tanh."""
        return self._squashed(self.base_dist.sample(torch.Size(sample_shape)))

    def _squashed(self, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        action = self._squash(before)
        slope = self._squash.log_abs_det_jacobian(before, action)
        slope = _sum_rightmost(slope, len(self.event_shape))
        return action, self.base_dist.log_prob(before) - slope


class _Squash(D.Transform):
    """``middle + half * tanh(x)``."""

    domain = codomain = constraints.real
    bijective, sign = True, 1

    def __init__(self, low: torch.Tensor, high: torch.Tensor, safe: bool) -> None:
        super().__init__()
        if not bool((low < high).all()):
            raise ConfigError(f"TanhNormal: low must be below high; low={low}, high={high}")
        self._middle, self._half = (high + low) / 2, (high - low) / 2
        self._limit = 1.0 - torch.finfo(low.dtype).resolution if safe else math.inf

    def _call(self, x: torch.Tensor) -> torch.Tensor:
        return self._middle + self._half * x.tanh().clamp(-self._limit, self._limit)

    def _inverse(self, y: torch.Tensor) -> torch.Tensor:
        tanh = (y - self._middle) / self._half
        return tanh.clamp(-self._limit, self._limit).atanh()

    def log_abs_det_jacobian(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return 2.0 * (math.log(2.0) - x - F.softplus(-2.0 * x)) + self._half.abs().log()
