"""Sampling and scoring as recorded calls: the distributions whose arithmetic we know.

Every recipe does what the distribution's own methods do, operation by operation, so that values and
random stream are the same bit for bit. A recipe is a proposal: `lower` replays it against the
module it stands for before it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from tensordict.nn import InteractionType
from torch import distributions as D

from gleanrl.policies.inspect import Watch, is_genuine, qualified
from gleanrl.policies.normals import IndependentNormal, TanhNormal
from gleanrl.policies.op_recorder import OpRecorder, Unknown, require

Tensor: TypeAlias = torch.Tensor

_RANDOM, _MODE = InteractionType.RANDOM, InteractionType.MODE
_MEAN, _DETERMINISTIC = InteractionType.MEAN, InteractionType.DETERMINISTIC
_LOG_ROOT_TWO_PI = math.log(math.sqrt(2 * math.pi))


@dataclass(frozen=True, slots=True)
class Draw:
    """What is asked of a distribution."""

    ops: OpRecorder
    params: Mapping[str, Tensor]
    options: Mapping[str, Any]
    kind: InteractionType
    log_prob: bool
    """Whether the log-probability is asked for."""
    joint: bool
    """Whether sample and log-probability come from one method where the distribution has one."""
    name: str
    """What the parameters are called in messages."""

    @property
    def validated(self) -> bool:
        """Tell whether the distribution would check its parameters."""
        asked = self.options.get("validate_args")
        return bool(D.Distribution._validate_args if asked is None else asked)


Drawn: TypeAlias = tuple[Tensor, Tensor | None]
"""Sample and log-probability."""
Recipe: TypeAlias = Callable[[Draw], Drawn]
"""Raises `Unknown` where it does not do what the distribution does."""


def recipe_of(kind: Any) -> Recipe:
    """Return how to draw from distributions of exactly the class ``kind``.

    Raises:
        Unknown: that is not known here.
    """
    known = _RECIPES.get(qualified(kind))
    if known is None or not all(map(is_genuine, kind.__mro__[:-1])):
        raise Unknown
    return known


def are_settings(options: Mapping[str, Any]) -> bool:
    """Tell whether ``options`` of a distribution are values that a `Watch` can compare."""
    return all(
        value is None or type(value) in (bool, int, float, torch.Tensor, np.ndarray)
        for value in options.values()
    )


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


_BUILT_OF = (D.Distribution, D.transforms.Transform, D.constraints.Constraint)


# -- categorical ---------------------------------------------------------------------------------


def _discrete(draw: Draw, one_hot: bool = False, ties: bool = False) -> Drawn:
    """Draw an index or a vector; with ``ties``, the mode is wherever the logit is the largest."""
    require(draw.kind in (_RANDOM, _MODE, _DETERMINISTIC))
    require(set(draw.options) <= {"validate_args"})
    probs, logits = _probabilities(draw)
    ops, random = draw.ops, draw.kind is _RANDOM
    if random:
        # torch.multinomial of one draw is this division, without its checks and copies.
        noise = torch.empty_like(probs)
        ops.do(noise.exponential_)
        ops.do(torch.div, probs, noise, out=noise)
        index = ops(torch.argmax, noise, -1)
    else:
        index = ops(torch.argmax, logits if ties else probs, -1)
    value = index
    if one_hot and ties and not random:
        value = largest(ops, logits)
    elif one_hot:
        value = torch.zeros_like(probs, dtype=torch.int64 if ties else None)
        ops.do(value.zero_)
        ops.do(value.scatter_, -1, index.unsqueeze(-1), 1)
    if not draw.log_prob:
        return value, None
    picked = ops(torch.gather, logits, -1, index.unsqueeze(-1))
    return value, picked.squeeze(-1)


def largest(ops: OpRecorder, values: Tensor) -> Tensor:
    """Record a one-hot vector of integers that is 1 wherever ``values`` are the largest."""
    hot = torch.zeros_like(values, dtype=torch.int64)
    ops.do(hot.copy_, ops(torch.eq, values, ops(torch.amax, values, -1, True)))
    return hot


def _probabilities(draw: Draw) -> tuple[Tensor, Tensor]:
    """Return normalised probabilities and logits as ``Categorical`` makes them."""
    ops, params = draw.ops, draw.params
    if set(params) == {"logits"} and params["logits"].shape[-1] > 1:
        raw = params["logits"]
        total = _log_sum_exp(ops, raw)
        logits = ops(torch.sub, raw, total)
        # NaN, +inf and rows of -inf all show in the normaliser; single -inf are legal masks.
        ops.check_finite(total, _not_finite(draw.name))
        return ops(torch.softmax, logits, -1), logits
    if set(params) == {"probs"} and params["probs"].shape[-1] > 1:
        raw = params["probs"]
        total = ops(torch.sum, raw, -1, True)
        probs = ops(torch.div, raw, total)
        ops.check_finite(total, _not_finite(draw.name))
        tiny = torch.finfo(raw.dtype).tiny
        ops.check_above(raw, -tiny, f"the policy gave negative probabilities in {draw.name}")
        eps = torch.finfo(probs.dtype).eps
        logits = ops(torch.clamp, probs, eps, 1 - eps)
        ops.do(logits.log_)
        return probs, logits
    raise Unknown


def _log_sum_exp(ops: OpRecorder, raw: Tensor) -> Tensor:
    """Do what `torch.logsumexp` does, without what it allocates on the way."""
    top = ops(torch.amax, raw, -1, True)
    parts = ops(torch.sub, raw, top)
    ops.do(parts.exp_)
    total = ops(torch.sum, parts, -1, True)
    ops.do(total.log_)
    return ops(torch.add, total, top)


# -- normal ----------------------------------------------------------------------------------------


def _independent_normal(draw: Draw) -> Drawn:
    require(not draw.options.get("tanh_loc", False))
    known = {"scale", "validate_args", "tanh_loc", "upscale", "event_dim"}
    return _gaussian(draw, draw.options.get("event_dim", 1), known)


def _gaussian(draw: Draw, event_dims: int, known: set[str]) -> Drawn:
    loc, scale = _loc_scale(draw)
    require(draw.kind in (_RANDOM, _MEAN, _MODE, _DETERMINISTIC) and set(draw.options) <= known)
    ops = draw.ops
    if draw.validated:
        _check_normal(draw, loc, scale, 0.0)
    value = _shifted(ops, loc, scale) if draw.kind is _RANDOM else loc
    if not draw.log_prob:
        return value, None
    return value, _rightmost(ops, _normal_log_prob(ops, value, loc, scale), event_dims)


def _loc_scale(draw: Draw) -> tuple[Tensor, Tensor]:
    params, given = draw.params, draw.options.get("scale")
    if set(params) == {"loc"} and isinstance(given, (int, float)):
        loc = params["loc"]
        return loc, torch.full_like(loc, given)
    require(set(params) == {"loc", "scale"} and given is None)
    loc, scale = params["loc"], params["scale"]
    require(loc.shape == scale.shape and loc.dtype == scale.dtype)
    return loc, scale


def _check_normal(draw: Draw, loc: Tensor, scale: Tensor, least: float) -> None:
    message = _not_finite(draw.name)
    draw.ops.check_finite(loc, message)
    draw.ops.check_above(scale, least, f"the policy gave a scale of at most {least:g}; {message}")


def _shifted(ops: OpRecorder, loc: Tensor, scale: Tensor) -> Tensor:
    noise = torch.empty(loc.shape, dtype=loc.dtype, device=loc.device)
    ops.do(noise.normal_)
    return ops(torch.add, loc, ops(torch.mul, noise, scale))


def _normal_log_prob(ops: OpRecorder, value: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
    variance = ops(torch.mul, scale, scale)
    doubled = ops(torch.add, variance, variance)
    log_scale = ops(torch.log, scale)
    away = ops(torch.sub, value, loc)
    square = ops(torch.mul, away, away)
    ops.do(square.neg_)
    ops.do(square.div_, doubled)
    ops.do(square.sub_, log_scale)
    ops.do(square.sub_, _LOG_ROOT_TWO_PI)
    return square


def _rightmost(ops: OpRecorder, value: Tensor, dims: int) -> Tensor:
    if dims == 0:
        return value
    flat = value.view(*value.shape[: value.ndim - dims], -1)
    return ops(torch.sum, flat, -1)


# -- squashed normal -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Squash:
    """``loc + scale * tanh(x)``, kept off the bounds of tanh if ``limit`` is given."""

    limit: float | None
    loc: Tensor | None
    scale: Tensor | None

    def forward(self, ops: OpRecorder, value: Tensor) -> Tensor:
        out = ops(torch.tanh, value)
        if self.limit is not None:
            ops.do(out.clamp_, -self.limit, self.limit)
        if self.loc is None or self.scale is None:
            return out
        return ops(torch.add, self.loc, ops(torch.mul, self.scale, out))

    def inverse(self, ops: OpRecorder, value: Tensor) -> Tensor:
        if self.loc is not None and self.scale is not None:
            value = ops(torch.sub, value, self.loc)
            ops.do(value.div_, self.scale)
        if self.limit is None:
            return ops(torch.atanh, value)
        out = ops(torch.clamp, value, -self.limit, self.limit)
        ops.do(out.atanh_)
        return out

    def log_slope(self, ops: OpRecorder, value: Tensor) -> Tensor:
        soft = ops(F.softplus, ops(torch.mul, value, -2.0))
        out = ops(torch.sub, _number(math.log(2.0), value), value)
        ops.do(out.sub_, soft)
        ops.do(out.mul_, 2.0)
        if self.scale is not None:
            ops.do(out.add_, self.scale.abs().log())
        return out


_TANH_OPTIONS = {"scale", "low", "high", "event_dims", "tanh_loc", "safe_tanh", "upscale"}


def _tanh_normal(draw: Draw) -> Drawn:
    options = draw.options
    loc, scale = _loc_scale(draw)
    require(draw.kind in (_RANDOM, _DETERMINISTIC) and not options.get("tanh_loc", False))
    require(set(options) <= _TANH_OPTIONS)
    ops, squash = draw.ops, _squash(options, loc)
    if draw.validated:
        _check_normal(draw, loc, scale, 1e-6)
    before = _shifted(ops, loc, scale) if draw.kind is _RANDOM else loc
    value = squash.forward(ops, before)
    if not draw.log_prob:
        return value, None
    joint = draw.joint and draw.kind is _RANDOM
    point = before if joint else squash.inverse(ops, value)
    dims = options.get("event_dims")
    dims = min(1, loc.ndim) if dims is None else dims
    slope = _rightmost(ops, squash.log_slope(ops, point), dims)
    base = _rightmost(ops, _normal_log_prob(ops, point, loc, scale), dims)
    return value, ops(torch.sub, base, slope)


def _squash(options: Mapping[str, Any], loc: Tensor) -> _Squash:
    low = torch.as_tensor(options.get("low", -1.0), device=loc.device)
    high = torch.as_tensor(options.get("high", 1.0), device=loc.device)
    limit = 1.0 - torch.finfo(loc.dtype).resolution if options.get("safe_tanh", True) else None
    if bool((high == 1.0).all() and (low == -1.0).all()):
        return _Squash(limit, None, None)
    return _Squash(limit, (high + low) / 2, (high - low) / 2)


def _number(value: float, like: Tensor) -> Tensor:
    return torch.tensor(value, dtype=like.dtype, device=like.device)


def _not_finite(name: str) -> str:
    return (
        f"the policy gave NaN or infinite values in {name} during this rollout; look at its "
        "weights and at the observations it was fed"
    )


_one_hot_of_integers = partial(_discrete, one_hot=True, ties=True)
# Full names, because the package of some of them is not imported here.
_RECIPES: dict[str, Recipe] = {
    qualified(D.Categorical): _discrete,
    qualified(D.OneHotCategorical): partial(_discrete, one_hot=True),
    qualified(D.Normal): partial(_gaussian, event_dims=0, known={"scale", "validate_args"}),
    "tensordict.nn.distributions.discrete.OneHotCategorical": _one_hot_of_integers,
    "torchrl.modules.distributions.discrete.OneHotCategorical": _one_hot_of_integers,
    qualified(IndependentNormal): _independent_normal,
    "torchrl.modules.distributions.continuous.IndependentNormal": _independent_normal,
    qualified(TanhNormal): _tanh_normal,
    "torchrl.modules.distributions.continuous.TanhNormal": _tanh_normal,
}
