"""The state of simulators that keep it in memory of their own: MuJoCo and the Atari emulator.

Neither library is imported: an object of theirs was met already.
"""

from __future__ import annotations

import functools
import sys
import weakref
import zlib
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch

from gleanrl.core.errors import GleanError

Simulator: TypeAlias = tuple[Callable[[Any], Any], Callable[[Any, Any], None]]
"""A function that returns the state of an object, and one that restores it."""


class StateError(GleanError):
    """An environment's state cannot be saved, or does not fit the environment that loads it."""


class NeedsPickle(StateError):
    """A part of an environment can only be pickled."""


def simulator_of(kind: type) -> Simulator | None:
    """Return how to save and restore objects of a class, ``None`` for any other class."""
    return _SIMULATORS.get((kind.__module__.partition(".")[0], kind.__name__))


def as_bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor of `as_tensor`."""
    return tensor.numpy().tobytes()


def as_tensor(data: bytes) -> torch.Tensor:
    """Return bytes as a tensor, which files can hold without pickle."""
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


# -- MuJoCo ----------------------------------------------------------------------------------------

_MODEL_BYTES = 1 << 16
"""Arrays of a model that are larger (textures, meshes) are only compared."""


_names: dict[type, tuple[list[str], list[str], list[str]]] = {}
"""By MuJoCo's structures, the names of arrays that stay in place, of others, and of numbers."""
_staying: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
"""The arrays of each structure that stay in place."""


def _names_of(data: Any) -> tuple[list[str], list[str], list[str]]:
    kind = type(data)
    if (names := _names.get(kind)) is None:
        named = [name for name in dir(kind) if not name.startswith("_")]
        values = {n: getattr(data, n) for n in named if isinstance(getattr(kind, n), property)}
        arrays = [name for name, value in values.items() if isinstance(value, np.ndarray)]
        # MuJoCo's bindings keep one array of memory that is never allocated again.
        stays = [name for name in arrays if getattr(data, name) is values[name]]
        names = _names[kind] = (
            stays,
            [name for name in arrays if name not in stays],
            [name for name, value in values.items() if type(value) in (bool, float)],
        )
    return names


def _arrays(data: Any) -> list[Any]:
    stays, moves, _ = _names_of(data)
    if (staying := _staying.get(data)) is None:
        staying = _staying[data] = [getattr(data, name) for name in stays]
    return [*staying, *[getattr(data, name) for name in moves]]


@functools.lru_cache(maxsize=64)
def _sizes(sizes: tuple[int, ...]) -> torch.Tensor:
    """Return sizes as a tensor, the same one for environments that are alike."""
    return torch.tensor(sizes)


def _save_arrays(arrays: list[Any]) -> list[Any]:
    sizes = _sizes(tuple([value.nbytes for value in arrays]))
    return [sizes, as_tensor(b"".join(arrays))]


def _load_arrays(arrays: list[Any], sizes: torch.Tensor, joined: torch.Tensor) -> None:
    """Write arrays that have the same size; those of contacts follow from the next step."""
    if len(sizes) != len(arrays):
        raise StateError("it was saved by another version of MuJoCo")
    data, start = as_bytes(joined), 0
    for value, size in zip(arrays, sizes.tolist(), strict=True):
        if size and value.nbytes == size:
            value[...] = np.frombuffer(data, value.dtype, value.size, start).reshape(value.shape)
        start += size


def _physics(data: Any) -> tuple[Any, Any, Any]:
    mujoco = sys.modules["mujoco"]
    spec = mujoco.mjtState.mjSTATE_INTEGRATION
    return mujoco, spec, np.empty(mujoco.mj_stateSize(data.model, spec))


def _save_data(data: Any) -> list[Any]:
    """Return the state of integration, and all that was computed from earlier ones.

    Environments read positions and velocities from before the next step, which are those of the
    last substep, one substep behind the state.
    """
    mujoco, spec, state = _physics(data)
    mujoco.mj_getState(data.model, data, state, spec)
    numbers = {name: getattr(data, name) for name in _names_of(data)[2]}
    return [torch.from_numpy(state), numbers, *_save_arrays(_arrays(data))]


def _load_data(data: Any, saved: Any) -> None:
    state, numbers, *arrays = saved
    mujoco, spec, own = _physics(data)
    if own.shape != tuple(state.shape):
        raise StateError("its MuJoCo model has other joints, actuators or plugins")
    mujoco.mj_setState(data.model, data, state.numpy(), spec)
    mujoco.mj_forward(data.model, data)  # finds contacts, and changes the state
    mujoco.mj_setState(data.model, data, state.numpy(), spec)
    _load_arrays(_arrays(data), *arrays)
    for name, value in numbers.items():
        setattr(data, name, value)


_newest_model: tuple[bytearray, list[Any]] = bytearray(), []
"""The bytes of the model that was looked at last, and its state: models of a batch are alike."""
_scratch = bytearray()


def _save_model(model: Any) -> list[Any]:
    global _newest_model, _scratch
    mujoco = sys.modules["mujoco"]
    size = mujoco.mj_sizeModel(model)
    if len(_scratch) != size:
        _scratch = bytearray(size)
    mujoco.mj_saveModel(model, None, np.frombuffer(_scratch, np.uint8))
    before, saved = _newest_model
    if before != _scratch:
        saved = [zlib.crc32(_scratch), *_save_arrays(_settings(model))]
        _newest_model, _scratch = (_scratch, saved), bytearray()
    return saved


def _settings(model: Any) -> list[Any]:
    return [value for value in _arrays(model) if value.nbytes <= _MODEL_BYTES]


def _load_model(model: Any, saved: Any) -> None:
    """Restore settings that were changed after the model was built."""
    checksum, *arrays = saved
    if _save_model(model)[0] != checksum:
        _load_arrays(_settings(model), *arrays)
        if _save_model(model)[0] != checksum:
            raise StateError("its MuJoCo model differs from the saved one")


# -- the Atari emulator ----------------------------------------------------------------------------

_SETTLING = 12
"""Actions until the emulator has taken one of them over, which each does with 3 chances of 4."""
_PROBED = 12
"""Frames by which two emulators are compared."""


def _save_ale(ale: Any) -> list[Any]:
    """Return the state of the emulator with its generator, and what tells its last action.

    With sticky actions, the emulator may repeat the last action, which it does not reveal.
    """
    state = ale.cloneState(include_rng=True)
    saved: list[Any] = [as_tensor(state.serialize()), None]
    if ale.getFloat("repeat_action_probability") > 0:
        first, *_, last = ale.getMinimalActionSet()
        if _frames(ale, state, first, 1) == _frames(ale, state, last, 1):
            saved[1] = zlib.crc32(_frames(ale, state, first, _PROBED))
        _restore(ale, state, saved[1])
    return saved


def _load_ale(ale: Any, saved: Any) -> None:
    data, expected = saved
    state = sys.modules["ale_py"].ALEState(as_bytes(data))
    _restore(ale, state, expected)


def _frames(ale: Any, state: Any, action: Any, count: int) -> bytes:
    """Return the state after ``count`` frames with ``action``."""
    ale.restoreState(state)
    for _ in range(count):
        ale.act(action)
    found: bytes = ale.cloneState(include_rng=True).serialize()
    return found


def _restore(ale: Any, state: Any, expected: int | None) -> None:
    """Restore ``state``, and the last action if the next one will repeat it.

    That action is found by trying them all: it is the one that leads to what was ``expected``.
    """
    actions = ale.getMinimalActionSet()
    for action in actions if expected is not None else ():
        _settle(ale, state, action)
        if zlib.crc32(_frames(ale, state, actions[0], _PROBED)) == expected:
            _settle(ale, state, action)
            break
    ale.restoreState(state)


def _settle(ale: Any, state: Any, action: Any) -> None:
    ale.restoreState(state)
    for _ in range(_SETTLING):
        ale.act(action)


_SIMULATORS: dict[tuple[str, str], Simulator] = {
    ("mujoco", "MjData"): (_save_data, _load_data),
    ("mujoco", "MjModel"): (_save_model, _load_model),
    ("ale_py", "ALEInterface"): (_save_ale, _load_ale),
}
