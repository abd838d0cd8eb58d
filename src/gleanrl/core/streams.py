"""Random streams: the user's, which must not change, and those of a worker."""

from __future__ import annotations

import ctypes
import os
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_life = 0
_legacy: Any = np.random
"""The swap functions are public but missing from numpy's type stubs."""


_turns = [threading.RLock()]
"""The lock of the thread that may change random states for a while."""
_TURN_S = 60.0
"""Seconds after which a thread no longer waits for this lock."""


def _new_turn() -> None:
    """Replace the lock in a forked child, which has no other thread to release it."""
    _turns[:] = [threading.RLock()]


os.register_at_fork(after_in_child=_new_turn)


@contextmanager
def preserved() -> Iterator[None]:
    """Restore the random states of torch, numpy and Python after the body.

    Accelerators are included if they were in use before. Bodies in several threads run one after
    the other: one that compares what is drawn would see the numbers that another one draws.
    """
    (turn,) = _turns
    taken: list[bool] = []
    try:
        # One call takes the lock and notes that: no interrupt comes between the two.
        taken.extend(map(turn.acquire, (True,), (_TURN_S,)))
        with _restored():
            yield
    finally:
        if any(taken):
            turn.release()


@contextmanager
def _restored() -> Iterator[None]:
    torch_state, device_states = torch.get_rng_state(), _device_states()
    python_state, numpy_state = random.getstate(), _legacy.get_state(legacy=False)
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        _install_on_devices(device_states)
        random.setstate(python_state)
        _legacy.set_state(numpy_state)


def _accelerator() -> Any:
    """Return torch's module of the accelerator that this process uses, ``None`` if it uses none."""
    kind = torch.accelerator.current_accelerator()
    module: Any = None if kind is None else torch.get_device_module(kind)
    return module if module is not None and module.is_initialized() else None


def _device_states() -> list[torch.Tensor]:
    """Return the random state of each device of the accelerator in use."""
    module = _accelerator()
    return [] if module is None else [*map(module.get_rng_state, range(module.device_count()))]


def _install_on_devices(states: Sequence[torch.Tensor]) -> None:
    module = _accelerator()
    for device, state in enumerate(states if module is not None else ()):
        module.set_rng_state(state, device)


# -- a worker's own, so that collecting leaves the learner's alone ---------------------------------


def renewed(seed: int, life: int) -> int:
    """Return the seed of the streams of a worker that was lost ``life`` times."""
    if life == 0:
        return seed
    return int(np.random.SeedSequence([seed, life]).generate_state(1, np.uint64)[0] >> 2)


def of_this_life(seed: int) -> int:
    """Return the seed of the streams of this process, if it is a worker that may have been lost."""
    return renewed(seed, _life)


def enter_life(life: int) -> None:
    """Say how often the worker that this process is was lost before."""
    global _life
    _life = life


_MT19937_BYTES = 4 * (624 + 1)
"""Of the state of numpy's default legacy generator: its words and the position among them."""


def _take_normal() -> float | None:
    """Return the normal number that numpy keeps for its next draw; numpy may lose it.

    numpy's legacy generator draws normal numbers in pairs. The second number is kept beside the bit
    generator, and `set_bit_generator` drops it. Only ``get_state`` tells of it, for 70 us; a draw
    that leaves the bit generator unchanged also does so, in 2 us.
    """
    bits = _legacy.get_bit_generator()
    if not isinstance(bits, np.random.MT19937):
        state = _legacy.get_state(legacy=False)
        return float(state["gauss"]) if state["has_gauss"] else None
    address = bits.ctypes.state_address
    before = ctypes.string_at(address, _MT19937_BYTES)
    drawn = float(_legacy.standard_normal())
    if ctypes.string_at(address, _MT19937_BYTES) == before:
        return drawn
    ctypes.memmove(address, before, _MT19937_BYTES)
    return None


def _current() -> list[Any]:
    """Return the global states of torch, numpy, Python and accelerators; `_install` replaces them.

    numpy's is the generator itself: reading its state costs 30 times as much.
    """
    normal = _take_normal()
    own = torch.get_rng_state(), _legacy.get_bit_generator(), random.getstate()
    return [*own, normal, _device_states()]


def _install(states: Sequence[Any]) -> None:
    torch_state, bits, python_state, normal, devices = states
    torch.set_rng_state(torch_state)
    _legacy.set_bit_generator(bits)
    random.setstate(python_state)
    if normal is not None:
        kept = {"has_gauss": 1, "gauss": normal}
        _legacy.set_state({**_legacy.get_state(legacy=False), **kept})
    _install_on_devices(devices)


class Streams:
    """torch, numpy and Python random state, swapped in around everything a worker does.

    That of torch includes the accelerators', from their first use on. Before the first `seed`,
    nothing is swapped: an in-process collector then draws from the global generators like any other
    code of the user. Random actions have a stream of their own in either case: actions of many
    steps are drawn at once, whatever environments draw between these steps.
    """

    def __init__(self) -> None:
        """Use the global streams until seeded."""
        self._own: list[Any] | None = None
        self._device_seed = 0
        """The seed of accelerators at their first use."""
        self.actions: torch.Tensor | None = None
        """State of torch's generator for random actions, ``None`` before the first was drawn."""

    def take(self) -> None:
        """Take over the state of the global streams."""
        self._own = _current()

    def give(self) -> None:
        """Set the global streams to these."""
        if self._own is not None:
            _install(self._own)

    def begin(self, seed: int | None) -> None:
        """Make the streams a source begins with: no life of a worker repeats an earlier one.

        Without a ``seed``, use the global ones.
        """
        if seed is not None:
            self.seed(of_this_life(seed))

    def seed(self, seed: int) -> None:
        """Make streams of our own, a function of ``seed`` only."""
        words = np.random.SeedSequence(seed).generate_state(4, np.uint64)
        self._device_seed = int(words[0] >> 1)
        torch_state = torch.Generator().manual_seed(self._device_seed).get_state()
        python_state = random.Random(int(words[2])).getstate()
        self._own = [torch_state, np.random.MT19937(int(words[1])), python_state, None, []]
        self.actions = torch.Generator().manual_seed(int(words[3] >> 1)).get_state()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Run the body on these streams; the global ones are as before afterwards."""
        own = self._own
        if own is None:
            yield
            return
        outer = _current()
        _install(own)
        if outer[4] and not own[4]:
            _accelerator().manual_seed_all(self._device_seed)
        try:
            yield
        finally:
            *others, devices = _current()
            own[:] = [*others, devices or own[4]]
            _install(outer)

    @contextmanager
    def acting(self) -> Iterator[None]:
        """Run the body, which draws random actions, on torch's stream for these.

        Without a seed, that stream is made from a number of the stream around it, when it is first
        used.
        """
        if self.actions is None:
            number = int(torch.randint(2**62, ()))
            self.actions = torch.Generator().manual_seed(number).get_state()
        outer = torch.get_rng_state()
        torch.set_rng_state(self.actions)
        try:
            yield
        finally:
            self.actions = torch.get_rng_state()
            torch.set_rng_state(outer)

    def state(self) -> dict[str, Any]:
        """Return the streams' state: nothing but that of actions while the global ones are used."""
        state: dict[str, Any] = {"actions": self.actions}
        if self._own is None:
            return state
        torch_state, bits, python_state, normal, device_states = self._own
        words = bits.state["state"]
        return {
            **state,
            "torch": torch_state.clone(),
            "numpy": [words["pos"], torch.from_numpy(words["key"].astype(np.int64)), normal],
            "python": python_state,
            "devices": [self._device_seed, *(one.clone() for one in device_states)],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.actions = state["actions"]
        if "torch" not in state:
            self._own = None
            return
        pos, key, normal = state["numpy"]
        bits: Any = np.random.MT19937()
        words = {"key": key.numpy().astype(np.uint32), "pos": pos}
        bits.state = {"bit_generator": "MT19937", "state": words}
        self._device_seed, *devices = state["devices"]
        self._own = [state["torch"].clone(), bits, state["python"], normal, devices]
