"""Workers of TorchRL's ``ParallelEnv`` that step their environments by parts.

Such a worker runs TorchRL's own loop. Commands to step are carried out before the loop sees them,
where the parts of the environment are known; all other commands are for the loop.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from multiprocessing.reduction import ForkingPickler
from select import poll
from socket import AF_UNIX, SOCK_DGRAM, socket
from types import FrameType
from typing import Any

from gleanrl.core.keys import as_key, next_key
from gleanrl.core.window import Window
from gleanrl.envs.recorded_or_called_transforms import Unproven, unproven_on_error
from gleanrl.envs.rehearsal_proof import transformed_rows
from gleanrl.envs.tensordict_envs import TensorDictHandle
from gleanrl.envs.torchrl_members import BY_PARTS, EXPLAIN, FLAGS, STEP, STEPPING
from gleanrl.envs.torchrl_parts import ordinary_parallel_env
from gleanrl.operations.proofs import has_source

_HOME, _LOOP = "torchrl.envs.batched_envs", "_run_worker_pipe_shared_mem"
_PROVEN = "6067533195cb0bf3"
"""The beginning of the SHA-256 of the loop's source, in torchrl 0.14.1."""
_LONGEST_MS = 2**31 - 1
_STR = ("__module__", "__class__")
"""A command to TorchRL's loop: the path from any environment to ``str``, which is called."""


def prepare_workers(env: Any) -> None:
    """Have the workers of a ``ParallelEnv`` in ``env`` step by parts where they can.

    If it has none, they are started, as its first use would.
    """
    base = ordinary_parallel_env(env)
    if base is None or _proven_loop() is None:
        return
    if base.is_closed:
        base.start()
    pids = [worker.pid for worker in base._workers]
    if vars(base).get(BY_PARTS) == pids:
        return
    ours = find_spec("gleanrl")
    home = _Called(getattr, _Called(find_spec, "gleanrl"), "origin", None)
    with suppress(ConnectionError, EOFError):  # of workers that ended, which is noticed later
        for channel in base.parent_channels:  # what cannot be imported there would end them
            if ours is None or _told(base, channel, home) != ours.origin:
                return
        if all(_told(base, one, _Called(take_over)) == "True" for one in base.parent_channels):
            vars(base)[BY_PARTS] = pids


class _Called:
    """A call that is made where this is unpickled, in place of this."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._call = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


def _told(base: Any, channel: Any, value: _Called) -> str:
    """Return the text of ``value`` in the worker at the other end of ``channel``.

    `TimeoutError` if it does not answer in the time that TorchRL gives it.
    """
    channel.send((_STR, ((value,), {})))
    if not channel.poll(base.BATCHED_PIPE_TIMEOUT):
        raise TimeoutError("a worker of a ParallelEnv does not answer")
    return str(channel.recv()[1])


def take_over() -> bool:
    """Try to carry out steps from now on, in the worker whose loop receives the call of this."""
    frame: FrameType | None = sys._getframe()
    with suppress(Exception):  # the loop goes on as it is
        loop = _proven_loop()
        while frame is not None and frame.f_code is not loop.__code__:
            frame = frame.f_back
        if frame is not None and frame.f_locals["shm_done_flags"] is not None:
            _Steps(frame.f_locals)
            return True
    return False


def _proven_loop() -> Any:
    """Return TorchRL's loop if it treats commands as it did when `_Steps` was compared with it."""
    loop = pkgutil.resolve_name(f"{_HOME}.{_LOOP}")
    return loop if has_source(_PROVEN, loop) else None


class _Steps:
    """Carries out steps for TorchRL's loop, at its end of the channel."""

    _command: tuple[str, Any]
    _why = "it has taken no step yet"

    def __init__(self, held: Any) -> None:
        self._pipe, self._memory, self._env = (
            held[name] for name in ("child_pipe", "shared_tensordict", "env")
        )
        self._done, self._index = held["shm_done_flags"], held["worker_idx"]
        self._rows: Any = None  # `TransformedRows`, where the parts are known
        self._tried = self._begun = False
        self._ready = poll()
        self._ready.register(self._pipe.fileno())
        self._pipe.poll, self._pipe.recv = self.poll, self.recv

    def poll(self, timeout: float) -> bool:
        """Wait until there is a command for TorchRL's loop, and tell whether one came in time."""
        while self._ready.poll(min(timeout * 1000.0, _LONGEST_MS)):
            message = self._pipe.recv_bytes()
            self._command = STEPPING if message == STEP else ForkingPickler.loads(message)
            if not self._carried_out():
                self._begun = False
                return True
        return False

    def recv(self) -> tuple[str, Any]:
        """Return the command for TorchRL's loop."""
        return self._command

    def _carried_out(self) -> bool:
        if self._command[0] == EXPLAIN:
            text = f"called as it is: {self._why}" if self._why else self._rows.explain()
            with suppress(OSError), socket(AF_UNIX, SOCK_DGRAM) as answer:  # it came too late
                answer.sendto(text.encode(), self._command[1])
            return True
        if self._command != STEPPING or not self._can_step():
            return False
        for _, after in self._flags:
            after[...] = False
        if self._rows.step(0, (), False):
            for root, after in self._flags:
                root[...] = after
        self._done[self._index] = 1
        return True

    def _can_step(self) -> bool:
        """Tell whether the present step can be taken by parts."""
        if not self._tried:
            self._tried = True
            try:
                with unproven_on_error():
                    self._open()
            except Unproven as err:
                self._why = str(err)
        if self._rows is None or any(root.item() for root, _ in self._flags):
            return False  # beyond the end of an episode, transforms may do something else
        if not self._begun:
            self._rows.begin(self._window, self._window)
            self._why, self._begun = self._rows.why, not self._rows.why
        else:
            self._rows.read_present()  # the parent may have written another one
        return self._begun

    def _open(self) -> None:
        """Find the rows; `Unproven` if the environment has to be stepped by its own methods."""
        root = self._memory.exclude("next", *self._env.reset_keys, *self._env.action_keys)
        rows = transformed_rows(TensorDictHandle(self._env, root.clone()))
        layout = rows.layout
        held = {as_key(key): value for key, value in self._memory.items(True, True)}
        after = [*layout.observations, *layout.rewards, *FLAGS]
        keys = [f.key for f in (*layout.observations, *layout.actions)]
        keys += [next_key(f.key) for f in after]
        if not set(keys) <= held.keys():
            raise Unproven("its ParallelEnv shares fewer entries than its specs declare")
        self._window = Window({key: held[key][None, None] for key in keys}, 1, 1)
        self._flags = [(held[f.key].numpy(), held[next_key(f.key)].numpy()) for f in FLAGS]
        self._rows, self._why = rows, ""
