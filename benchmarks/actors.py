"""How the hand-written loops choose actions: bare modules, no TensorDict, no distribution objects.

Scores are computed once per batch from what was stored: a log-softmax and a gather per row would
cost five times as much, and whoever writes the tightest loop moves them out of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

_HALF_LOG_TAU = 0.5 * math.log(2 * math.pi)
_LOG_2 = math.log(2)


class Actor(Protocol):
    """Chooses the actions of ``P`` environments and keeps what a policy delivers."""

    outputs: dict[str, torch.Tensor]
    """``[T, P, ...]`` by dotted name, valid after `finish`."""

    def begin(self, observations: Sequence[torch.Tensor]) -> None:
        """Start a batch on these ``T`` rows ``[P, ...]``."""
        ...

    def __call__(self, t: int) -> Any:
        """Act on row ``t``; returns one action per environment."""
        ...

    def finish(self) -> None:
        """Compute in bulk what no environment waits for."""
        ...


class RandomActor:
    """Uniform actions, drawn for the whole batch at once."""

    def __init__(self, steps: int, envs: int, actions: int, arrays: Any = None) -> None:
        """Draw from ``range(actions)``; hand out lists, or numpy rows of dtype ``arrays``."""
        self._high, self._arrays = actions, arrays
        self._action = torch.zeros(steps, envs, dtype=torch.int64)
        self.outputs = {"action": self._action}
        self._rows: Any = []

    def begin(self, observations: Sequence[torch.Tensor]) -> None:
        torch.randint(self._high, self._action.shape, out=self._action)
        if self._arrays is None:
            self._rows = self._action.tolist()
        else:
            self._rows = self._action.numpy().astype(self._arrays)

    def __call__(self, t: int) -> Any:
        return self._rows[t]

    def finish(self) -> None:
        """Nothing is left to do."""


class CategoricalActor:
    """``net`` gives the logits of discrete actions."""

    def __init__(
        self, net: nn.Module, steps: int, envs: int, actions: int, arrays: Any = None
    ) -> None:
        """Hand out lists, or numpy rows of dtype ``arrays``."""
        self._net, self._arrays = net, arrays
        self._action = torch.zeros(steps, envs, dtype=torch.int64)
        self._log_prob = torch.zeros(steps, envs)
        self._logits = torch.zeros(steps, envs, actions)
        self.outputs = {
            "action": self._action,
            "action_log_prob": self._log_prob,
            "logits": self._logits,
        }
        self._columns = self._action.unsqueeze(-1).unbind()
        self._flat = self._action.unbind()
        self._numpy = list(self._action.numpy())
        self._observations: Sequence[torch.Tensor] = ()
        self._seen: list[torch.Tensor] = []

    def begin(self, observations: Sequence[torch.Tensor]) -> None:
        self._observations, self._seen = observations, []

    def __call__(self, t: int) -> Any:
        logits = self._logits_of(t)
        torch.multinomial(logits.softmax(-1), 1, True, out=self._columns[t])
        if self._arrays is None:
            return self._flat[t].tolist()
        return self._numpy[t].astype(self._arrays, copy=False)

    def _logits_of(self, t: int) -> torch.Tensor:
        logits: torch.Tensor = self._net(self._observations[t])
        self._seen.append(logits)
        return logits

    def finish(self) -> None:
        if self._seen:
            torch.stack(self._seen, out=self._logits)
        scores = self._logits.log_softmax(-1)
        torch.gather(scores, -1, self._action.unsqueeze(-1), out=self._log_prob.unsqueeze(-1))


class AddmmActor(CategoricalActor):
    """The same for a `nn.Sequential` of linear and tanh layers, without modules.

    Every result has its memory already; the last layer writes into the batch.
    """

    def __init__(self, net: nn.Sequential, steps: int, envs: int, actions: int) -> None:
        super().__init__(net, steps, envs, actions)
        *hidden, last = (layer for layer in net if isinstance(layer, nn.Linear))
        assert len(net) == 2 * len(hidden) + 1
        self._hidden = [
            (layer.bias, layer.weight.t(), torch.zeros(envs, layer.out_features))
            for layer in hidden
        ]
        self._last = last.bias, last.weight.t()
        self._logit_rows = self._logits.unbind()

    def _logits_of(self, t: int) -> torch.Tensor:
        given = self._observations[t]
        for bias, weight, out in self._hidden:
            torch.addmm(bias, given, weight, out=out)
            given = torch.tanh(out, out=out)
        return torch.addmm(self._last[0], given, self._last[1], out=self._logit_rows[t])


class NormalActor:
    """``net`` gives location and scale of continuous actions, squashed by tanh if asked."""

    def __init__(
        self, net: nn.Module, steps: int, envs: int, size: int, squash: bool = False
    ) -> None:
        """``net`` returns ``(loc, scale)``, each ``[P, size]``."""
        self._net, self._squash = net, squash
        self._action = torch.zeros(steps, envs, size)
        self._raw = torch.zeros(steps, envs, size) if squash else self._action
        self._log_prob = torch.zeros(steps, envs)
        self._loc, self._scale = torch.zeros(steps, envs, size), torch.zeros(steps, envs, size)
        self.outputs = {
            "action": self._action,
            "action_log_prob": self._log_prob,
            "loc": self._loc,
            "scale": self._scale,
        }
        self._raw_rows, self._rows = self._raw.unbind(), self._action.unbind()
        self._numpy = [list(row) for row in self._action.numpy()]
        self._observations: Sequence[torch.Tensor] = ()
        self._seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def begin(self, observations: Sequence[torch.Tensor]) -> None:
        self._observations, self._seen = observations, []

    def __call__(self, t: int) -> Any:
        parameters = self._net(self._observations[t])
        self._seen.append(parameters)
        torch.normal(*parameters, out=self._raw_rows[t])
        if self._squash:
            torch.tanh(self._raw_rows[t], out=self._rows[t])
        return self._numpy[t]

    def finish(self) -> None:
        locs, scales = zip(*self._seen, strict=True)
        torch.stack(locs, out=self._loc)
        torch.stack(scales, out=self._scale)
        standard = (self._raw - self._loc) / self._scale
        scores = standard.square().mul_(-0.5).sub_(self._scale.log()).sub_(_HALF_LOG_TAU)
        if self._squash:
            # log(1 - tanh(x)^2) in the form that does not lose small values.
            raw = self._raw
            scores -= 2 * (_LOG_2 - raw - nn.functional.softplus(-2 * raw))
        torch.sum(scores, -1, out=self._log_prob)
