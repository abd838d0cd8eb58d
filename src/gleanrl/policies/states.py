"""The first state of a recurrent policy, where nobody says what shape it has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from gleanrl.core.keys import Key, as_key
from gleanrl.policies.structure import modules_of


def first_states(
    policy: Any, states: Sequence[Key], batch: tuple[int, ...], device: torch.device
) -> Iterator[dict[Key, torch.Tensor]]:
    """Yield what the first state may be, the likeliest first; left out means: the policy makes it.

    Zeros of the declared shapes if ``policy.state_shapes`` declares them (per key, without batch
    dimensions). Else what cells and layered networks inside the policy take, and what its modules
    say of themselves.
    """
    if not states:
        yield {}
        return
    declared = getattr(policy, "state_shapes", None)
    if declared:
        shapes = {as_key(key): _shape(value) for key, value in declared.items()}
        yield {key: torch.zeros((*batch, *shapes[key]), device=device) for key in states}
        return
    for shape in _guesses(policy):
        if shape is None:
            yield {}
        else:
            yield {key: torch.zeros((*batch, *shape), device=device) for key in states}
    yield from _primed(policy, states, batch, device)


def _guesses(policy: Any) -> list[tuple[int, ...] | None]:
    cells, layered = _recurrent_shapes(policy)
    flat = [(hidden,) for _, hidden in layered]
    # Modules around a single cell take its state as it is; layered networks mostly make their own.
    return [None, *layered, *flat, *cells] if layered else [*cells, None]


def _shape(value: Any) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,)
    return tuple(getattr(value, "shape", value))


def _recurrent_shapes(policy: Any) -> tuple[list[tuple[int, ...]], list[tuple[int, int]]]:
    """Return the state shapes of the cells and of the layered networks inside ``policy``."""
    cells: list[tuple[int, ...]] = []
    layered: list[tuple[int, int]] = []
    for module in modules_of(policy):
        if isinstance(module, nn.RNNCellBase):
            cells.append((module.hidden_size,))
        elif isinstance(module, nn.RNNBase):
            layered.append((module.num_layers * (1 + module.bidirectional), module.hidden_size))
    return list(dict.fromkeys(cells)), list(dict.fromkeys(layered))


def _primed(
    policy: Any, states: Sequence[Key], batch: tuple[int, ...], device: torch.device | None
) -> Iterator[dict[Key, torch.Tensor]]:
    """Yield the states of modules that can describe them the way TorchRL's do."""
    found = {}
    for module in modules_of(policy):
        describe = getattr(type(module), "make_tensordict_primer", None)
        if describe is None:
            continue
        primers = describe(module).primers
        for key in states:
            spec = primers.get(key if len(key) > 1 else key[0], None)
            if spec is not None:
                found[key] = torch.zeros((*batch, *spec.shape), dtype=spec.dtype, device=device)
    if len(found) == len(states):
        yield found
