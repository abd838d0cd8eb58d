"""Sampling and scoring as recorded calls: the distributions whose arithmetic we know.

Every recipe does what the distribution's own methods do, operation by operation, so that values and
random stream are the same bit for bit. A recipe is a proposal: `lower` replays it against the
module it stands for before it is used.
"""

from __future__ import annotations

import dis
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import distributions as D

from gleanrl.policies.exploration import ExplorationType
from gleanrl.policies.structure import qualified
from gleanrl.policies.tape import Tape
from gleanrl.policies.watch import Watch, is_genuine

Tensor: TypeAlias = torch.Tensor

_RANDOM = ExplorationType.RANDOM
_MODE = ExplorationType.MODE
_MEAN = ExplorationType.MEAN
_DETERMINISTIC = ExplorationType.DETERMINISTIC
_LOG_ROOT_TWO_PI = math.log(math.sqrt(2 * math.pi))


@dataclass(frozen=True, slots=True)
class Draw:
    """What is asked of a distribution."""

    tape: Tape
    params: Mapping[str, Tensor]
    options: Mapping[str, Any]
    kind: ExplorationType
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
Recipe: TypeAlias = Callable[[Draw], Drawn | None]


def recipe_of(kind: Any) -> Recipe | None:
    """Return how to draw from distributions of class ``kind``, ``None`` if unknown.

    Known are exact classes, and classes of the user's that only build an `Independent` normal.
    """
    if not isinstance(kind, type):
        return None
    known = _RECIPES.get(qualified(kind))
    if known is not None:
        return known if all(map(is_genuine, kind.__mro__[:-1])) else None
    return partial(_independent, kind) if _only_builds(kind, D.Independent) else None


def are_settings(options: Mapping[str, Any]) -> bool:
    """Tell whether ``options`` of a distribution are values that a `Watch` can compare."""
    return all(
        value is None or type(value) in (bool, int, float, torch.Tensor, np.ndarray)
        for value in options.values()
    )


def watches_distribution(watch: Watch, distribution: Any) -> bool:
    """Add the classes of all that ``distribution`` is built of; ``False`` if one was patched."""
    seen: set[int] = set()
    todo: list[Any] = [distribution]
    while todo:
        item = todo.pop()
        if isinstance(item, (list, tuple)):
            todo.extend(item)
        elif isinstance(item, _BUILT_OF) and id(item) not in seen:
            # The outermost may be a class of the user's: `recipe_of` looked at it.
            if seen and not all(map(is_genuine, type(item).__mro__[:-1])):
                return False
            seen.add(id(item))
            watch.add_class(type(item))
            todo.extend(vars(item).values())
    return True


_BUILT_OF = (D.Distribution, D.transforms.Transform, D.constraints.Constraint)


# -- categorical ---------------------------------------------------------------------------------


def _categorical(draw: Draw) -> Drawn | None:
    return _discrete(draw, _index)


def _one_hot_float(draw: Draw) -> Drawn | None:
    return _discrete(draw, _one_hot_like_probs)


def _one_hot_long(draw: Draw) -> Drawn | None:
    # The most likely action is wherever the logit is the largest: more than one place if there is a
    # tie.
    return _discrete(draw, _one_hot_of_integers if draw.kind is _RANDOM else _largest)


def _discrete(draw: Draw, encode: Callable[[Tape, Tensor, Tensor], Tensor]) -> Drawn | None:
    if draw.kind not in (_RANDOM, _MODE, _DETERMINISTIC) or set(draw.options) - {"validate_args"}:
        return None
    found = _probabilities(draw)
    if found is None:
        return None
    probs, logits = found
    tape = draw.tape
    if encode is _largest:
        index = tape(torch.argmax, logits, -1)
        probs = logits
    elif draw.kind is _RANDOM:
        # torch.multinomial of one draw is this division, without its checks and copies.
        noise = torch.empty_like(probs)
        tape.do(noise.exponential_)
        tape.into(noise, torch.div, probs, noise)
        index = tape(torch.argmax, noise, -1)
    else:
        index = tape(torch.argmax, probs, -1)
    value = encode(tape, index, probs)
    if not draw.log_prob:
        return value, None
    picked = tape(torch.gather, logits, -1, index.unsqueeze(-1))
    return value, picked.squeeze(-1)


def _probabilities(draw: Draw) -> tuple[Tensor, Tensor] | None:
    """Return normalised probabilities and logits as ``Categorical`` makes them."""
    tape, params = draw.tape, draw.params
    if set(params) == {"logits"} and params["logits"].shape[-1] > 1:
        raw = params["logits"]
        total = _log_sum_exp(tape, raw)
        logits = tape(torch.sub, raw, total)
        # NaN, +inf and rows of -inf all show in the normaliser; single -inf are legal masks.
        tape.check_finite(total, _not_finite(draw.name))
        return tape(torch.softmax, logits, -1), logits
    if set(params) == {"probs"} and params["probs"].shape[-1] > 1:
        raw = params["probs"]
        total = tape(torch.sum, raw, -1, True)
        probs = tape(torch.div, raw, total)
        tape.check_finite(total, _not_finite(draw.name))
        tiny = torch.finfo(raw.dtype).tiny
        tape.check_above(raw, -tiny, f"the policy gave negative probabilities in {draw.name}")
        eps = torch.finfo(probs.dtype).eps
        logits = tape(torch.clamp, probs, eps, 1 - eps)
        tape.do(logits.log_)
        return probs, logits
    return None


def _log_sum_exp(tape: Tape, raw: Tensor) -> Tensor:
    """Do what `torch.logsumexp` does, without what it allocates on the way."""
    top = tape(torch.amax, raw, -1, True)
    parts = tape(torch.sub, raw, top)
    tape.do(parts.exp_)
    total = tape(torch.sum, parts, -1, True)
    tape.do(total.log_)
    return tape(torch.add, total, top)


def _index(tape: Tape, index: Tensor, probs: Tensor) -> Tensor:
    return index


def _one_hot_like_probs(tape: Tape, index: Tensor, probs: Tensor) -> Tensor:
    return _one_hot(tape, index, torch.zeros_like(probs))


def _one_hot_of_integers(tape: Tape, index: Tensor, probs: Tensor) -> Tensor:
    return _one_hot(tape, index, torch.zeros_like(probs, dtype=torch.int64))


def _largest(tape: Tape, index: Tensor, logits: Tensor) -> Tensor:
    hot = torch.zeros_like(logits, dtype=torch.int64)
    tape.do(hot.copy_, tape(torch.eq, logits, tape(torch.amax, logits, -1, True)))
    return hot


def _one_hot(tape: Tape, index: Tensor, hot: Tensor) -> Tensor:
    tape.do(hot.zero_)
    tape.do(hot.scatter_, -1, index.unsqueeze(-1), 1)
    return hot


# -- normal ----------------------------------------------------------------------------------------


def _normal(draw: Draw) -> Drawn | None:
    return _gaussian(draw, 0, {"scale", "validate_args"})


def _independent_normal(draw: Draw) -> Drawn | None:
    if draw.options.get("tanh_loc", False):
        return None
    known = {"scale", "validate_args", "tanh_loc", "upscale", "event_dim"}
    return _gaussian(draw, draw.options.get("event_dim", 1), known)


def _independent(kind: Callable[..., Any], draw: Draw) -> Drawn | None:
    """Draw from an `Independent` of the user's that is a plain normal of its parameters inside."""
    if draw.options or set(draw.params) != {"loc", "scale"}:
        return None
    built = kind(**draw.params)
    inner = built.base_dist
    if type(inner) is not D.Normal:
        return None
    # The same memory: the class passed them on untouched, now and for other values.
    for name, param in draw.params.items():
        used = getattr(inner, name)
        if used.data_ptr() != param.data_ptr() or used.shape != param.shape:
            return None
    return _gaussian(draw, built.reinterpreted_batch_ndims, set())


_PLAIN_BODY = {"__init__", "__module__", "__doc__", "__qualname__", "__annotations__"}
_PLAIN_BODY |= {"__firstlineno__", "__static_attributes__", "__parameters__", "__orig_bases__"}
_PLAIN_BODY |= {"__abstractmethods__", "_abc_impl"}
_STRAIGHT = (
    *("LOAD_", "CALL", "PRECALL", "KW_NAMES", "PUSH_NULL", "POP_TOP", "RETURN_", "RESUME"),
    *("COPY_FREE_VARS", "CACHE", "NOP", "EXTENDED_ARG"),
)
_NAMED = {"__init__", "Normal", "distributions", "normal"}


def _only_builds(kind: type, base: type) -> bool:
    """Tell whether ``kind`` is ``base``, or a subclass that does nothing but call its ``__init__``.

    Its own ``__init__`` must run straight through and call nothing but classes of
    ``torch.distributions``: then what it does with one pair of parameters it does with all.
    """
    if not issubclass(kind, base) or type(kind) is not type(base):
        return False
    own = kind.__mro__[: kind.__mro__.index(base)]
    return all(is_genuine(cls) for cls in base.__mro__[:-1]) and all(
        set(vars(cls)) <= _PLAIN_BODY and _runs_straight(vars(cls).get("__init__")) for cls in own
    )


def _runs_straight(function: Any) -> bool:
    if function is None:
        return True
    if type(function) is not FunctionType:
        return False
    given = {"super": super, **function.__globals__}
    known = (super, D.Normal, D.Independent, D.normal, D, torch)
    for name in function.__code__.co_names:
        # A name is an attribute or a global; a global must be what it is named after.
        if name in given and not any(given[name] is one for one in known):
            return False
        if name not in given and name not in _NAMED:
            return False
    return all(
        step.opname.startswith(_STRAIGHT) for step in dis.get_instructions(function.__code__)
    )


def _gaussian(draw: Draw, event_dims: int, known: set[str]) -> Drawn | None:
    modes = (_RANDOM, _MEAN, _MODE, _DETERMINISTIC)
    found = _loc_scale(draw)
    if found is None or draw.kind not in modes or set(draw.options) - known:
        return None
    loc, scale = found
    tape = draw.tape
    if draw.validated:
        _check_normal(draw, loc, scale, 0.0)
    value = _shifted(tape, loc, scale) if draw.kind is _RANDOM else loc
    if not draw.log_prob:
        return value, None
    return value, _rightmost(tape, _normal_log_prob(tape, value, loc, scale), event_dims)


def _loc_scale(draw: Draw) -> tuple[Tensor, Tensor] | None:
    params, given = draw.params, draw.options.get("scale")
    if set(params) == {"loc"} and isinstance(given, (int, float)):
        loc = params["loc"]
        return loc, torch.full_like(loc, given)
    if set(params) != {"loc", "scale"} or given is not None:
        return None
    loc, scale = params["loc"], params["scale"]
    return (loc, scale) if loc.shape == scale.shape and loc.dtype == scale.dtype else None


def _check_normal(draw: Draw, loc: Tensor, scale: Tensor, least: float) -> None:
    message = _not_finite(draw.name)
    draw.tape.check_finite(loc, message)
    draw.tape.check_above(scale, least, f"the policy gave a scale of at most {least:g}; {message}")


def _shifted(tape: Tape, loc: Tensor, scale: Tensor) -> Tensor:
    noise = torch.empty(loc.shape, dtype=loc.dtype, device=loc.device)
    tape.do(noise.normal_)
    return tape(torch.add, loc, tape(torch.mul, noise, scale))


def _normal_log_prob(tape: Tape, value: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
    variance = tape(torch.mul, scale, scale)
    doubled = tape(torch.add, variance, variance)
    log_scale = tape(torch.log, scale)
    away = tape(torch.sub, value, loc)
    square = tape(torch.mul, away, away)
    tape.do(square.neg_)
    tape.do(square.div_, doubled)
    tape.do(square.sub_, log_scale)
    tape.do(square.sub_, _LOG_ROOT_TWO_PI)
    return square


def _rightmost(tape: Tape, value: Tensor, dims: int) -> Tensor:
    if dims == 0:
        return value
    flat = value.view(*value.shape[: value.ndim - dims], -1)
    return tape(torch.sum, flat, -1)


# -- squashed normal -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Squash:
    """``loc + scale * tanh(x)``, kept off the bounds of tanh if ``limit`` is given."""

    limit: float | None
    loc: Tensor | None
    scale: Tensor | None

    def forward(self, tape: Tape, value: Tensor) -> Tensor:
        out = tape(torch.tanh, value)
        if self.limit is not None:
            tape.do(out.clamp_, -self.limit, self.limit)
        if self.loc is None or self.scale is None:
            return out
        return tape(torch.add, self.loc, tape(torch.mul, self.scale, out))

    def inverse(self, tape: Tape, value: Tensor) -> Tensor:
        if self.loc is not None and self.scale is not None:
            value = tape(torch.sub, value, self.loc)
            tape.do(value.div_, self.scale)
        if self.limit is None:
            return tape(torch.atanh, value)
        out = tape(torch.clamp, value, -self.limit, self.limit)
        tape.do(out.atanh_)
        return out

    def log_slope(self, tape: Tape, value: Tensor) -> Tensor:
        soft = tape(F.softplus, tape(torch.mul, value, -2.0))
        out = tape(torch.sub, _number(math.log(2.0), value), value)
        tape.do(out.sub_, soft)
        tape.do(out.mul_, 2.0)
        if self.scale is not None:
            tape.do(out.add_, self.scale.abs().log())
        return out


def _tanh_normal(draw: Draw) -> Drawn | None:
    options = draw.options
    known = {"scale", "low", "high", "event_dims", "tanh_loc", "safe_tanh", "upscale"}
    found = _loc_scale(draw)
    if found is None or draw.kind not in (_RANDOM, _DETERMINISTIC):
        return None
    if set(options) - known or options.get("tanh_loc", False):
        return None
    loc, scale = found
    tape, squash = draw.tape, _squash(options, loc)
    if draw.validated:
        _check_normal(draw, loc, scale, 1e-6)
    before = _shifted(tape, loc, scale) if draw.kind is _RANDOM else loc
    value = squash.forward(tape, before)
    if not draw.log_prob:
        return value, None
    joint = draw.joint and draw.kind is _RANDOM
    point = before if joint else squash.inverse(tape, value)
    dims = options.get("event_dims")
    dims = min(1, loc.ndim) if dims is None else dims
    slope = _rightmost(tape, squash.log_slope(tape, point), dims)
    base = _rightmost(tape, _normal_log_prob(tape, point, loc, scale), dims)
    return value, tape(torch.sub, base, slope)


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


# Full names, because the package of some of them is not imported here.
_RECIPES: dict[str, Recipe] = {
    qualified(D.Categorical): _categorical,
    qualified(D.OneHotCategorical): _one_hot_float,
    qualified(D.Normal): _normal,
    "tensordict.nn.distributions.discrete.OneHotCategorical": _one_hot_long,
    "torchrl.modules.distributions.discrete.OneHotCategorical": _one_hot_long,
    "torchrl.modules.distributions.continuous.IndependentNormal": _independent_normal,
    "torchrl.modules.distributions.continuous.TanhNormal": _tanh_normal,
}
