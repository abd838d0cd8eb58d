"""Workers of TorchRL's ``ParallelEnv`` that step their environments by parts.

Such a worker runs TorchRL's own loop. Commands to step are carried out before the loop sees them,
where the parts of the environment are known; all other commands are for the loop.
"""

from __future__ import annotations

import pkgutil
import sys
from contextlib import suppress
from socket import AF_UNIX, SOCK_DGRAM, socket
from typing import Any

from gleanrl.core.keys import as_key, next_key
from gleanrl.core.window import Window
from gleanrl.envs.recorded_or_called_transforms import Unproven, unproven_on_error
from gleanrl.envs.rehearsal_proof import transformed_rows
from gleanrl.envs.tensordict_envs import TensorDictHandle, is_tensordict_env
from gleanrl.envs.torchrl_members import BY_PARTS, EXPLAIN, FLAGS
from gleanrl.envs.torchrl_parts import waits_for_workers
from gleanrl.operations.proofs import has_source

_HOME, _LOOP = "torchrl.envs.batched_envs", "_run_worker_pipe_shared_mem"
_PROVEN = "6067533195cb0bf3"
"""The beginning of the SHA-256 of the loop's source, in torchrl 0.14.1: so it treats commands as it
did when `_Steps` was compared with it."""
_theirs: list[Any] = []
"""TorchRL's loop, in processes that started workers, and in processes forked from these."""


def start_workers(env: Any) -> None:
    """Start the workers of a ``ParallelEnv`` in ``env`` if it has none, as its first use would."""
    base = waits_for_workers(env)
    if base is None:
        return
    module = sys.modules[_HOME]
    loop = vars(module).get(_LOOP)
    # Another thread may be starting workers.
    if loop in (None, serve) or not has_source(_PROVEN, loop):
        return
    _theirs[:] = [loop]
    setattr(module, _LOOP, serve)
    try:
        base.start()
    finally:
        setattr(module, _LOOP, loop)
    vars(base)[BY_PARTS] = [worker.pid for worker in base._workers]


def serve(**options: Any) -> None:
    """Be a worker: TorchRL's loop with its ``options``."""
    loop = _theirs[0] if _theirs else pkgutil.resolve_name(f"{_HOME}.{_LOOP}")
    steps, make = _Steps(options), options["env_fun"]

    def made(**kwargs: Any) -> Any:
        steps.env = make(**kwargs)
        return steps.env

    if is_tensordict_env(make):
        steps.env = make
    else:
        options["env_fun"] = made
    loop(**{**options, "child_pipe": steps})


class _Steps:
    """The worker's end of its channel, which carries out steps by itself."""

    env: Any
    _command: tuple[str, Any]
    _why = "it has taken no step yet"

    def __init__(self, options: dict[str, Any]) -> None:
        self._pipe, self._memory = options["child_pipe"], options["shared_tensordict"]
        self._done, self._index = options["shm_done_flags"], options["worker_idx"]
        self.send, self.close = self._pipe.send, self._pipe.close
        self._rows: Any = None  # `TransformedRows`, where the parts are known
        self._tried = self._begun = False

    def poll(self, timeout: float) -> bool:
        """Wait until there is a command for TorchRL's loop, and tell whether one came in time."""
        while self._pipe.poll(timeout):
            self._command = self._pipe.recv()
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
        if self._command != ("step", {}) or not self._can_step():
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
        root = self._memory.exclude("next", *self.env.reset_keys, *self.env.action_keys)
        rows = transformed_rows(TensorDictHandle(self.env, root.clone()))
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
