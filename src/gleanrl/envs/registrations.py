"""Registered Gymnasium environments on their way to other processes."""

from __future__ import annotations

import os
import sys
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import cloudpickle
import gymnasium as gym

from gleanrl.core.errors import ConfigError

_IMPORT = uuid.uuid4()


def _this_process() -> tuple[uuid.UUID, int]:
    return _IMPORT, os.getpid()  # a fork has the same module, a node may have the same number


@dataclass(frozen=True, slots=True)
class _NotSent:
    """Stands for an environment whose registration could not be sent to this process."""

    name: str
    reason: str

    def __call__(self, **kwargs: Any) -> Any:
        """Raise the error that names the environment and the reason."""
        raise ConfigError(
            f"environment {self.name!r} is registered in the learner's process, but its "
            f"registration could not be sent to this one ({self.reason}); register it in a module "
            "that can be imported here and import that in create_env_fn, or register it there"
        )


@dataclass(frozen=True, slots=True)
class Registrations:
    """The registered environments of a process, for registration in another one."""

    process: tuple[uuid.UUID, int]
    specs: tuple[tuple[tuple[str, ...], bytes], ...]
    """Ids, and their specs as bytes."""
    script: tuple[tuple[str, bytes], ...] = ()
    """Objects that specs name as ``"__main__:..."``, by name, as bytes."""

    def restore(self) -> None:
        """Register environments that are missing or different in this process."""
        if self.process == _this_process():
            return
        # A package that registers its environments when one of them is made finds them here.
        warnings.filterwarnings("ignore", ".*Overriding environment .* already in registry")
        script = sys.modules["__main__"]
        for name, blob in self.script:
            # What a script of the user's defines here stays; workers' own script has names, too.
            owner = getattr(vars(script).get(name), "__module__", "")
            if name not in vars(script) or str(owner).startswith("gleanrl."):
                setattr(script, name, cloudpickle.loads(blob))
        for ids, blob in self.specs:
            try:
                specs = cloudpickle.loads(blob)
            except Exception as err:  # a module that does not exist here, for example
                specs = [_not_sent(name, err) for name in ids if name not in gym.registry]
            gym.registry.update({s.id: s for s in specs if gym.registry.get(s.id) != s})


def _not_sent(name: str, err: Exception) -> gym.envs.registration.EnvSpec:
    reason = f"{type(err).__name__}: {err}"
    return gym.envs.registration.EnvSpec(name, entry_point=_NotSent(name, reason))


def registrations(dump: Callable[[Any], bytes]) -> Registrations:
    """Return the registrations here; ``dump`` pickles by value what others cannot import."""
    specs = list(gym.registry.values())
    groups = [[spec for spec in specs if isinstance(spec.entry_point, str)]]
    groups += [[spec] for spec in specs if not isinstance(spec.entry_point, str)]
    sent: list[tuple[tuple[str, ...], bytes]] = []
    for group in groups:
        ids = tuple(spec.id for spec in group)
        try:
            sent.append((ids, dump(group)))
        except Exception as err:  # whatever the user's objects do when pickled
            if len(group) > 1:  # once more, one by one
                groups += [[spec] for spec in group]
            else:
                sent.append((ids, dump([_not_sent(ids[0], err)])))
    return Registrations(_this_process(), tuple(sent), tuple(_named_in_script(specs, dump)))


def _named_in_script(
    specs: Iterable[gym.envs.registration.EnvSpec], dump: Callable[[Any], bytes]
) -> Iterator[tuple[str, bytes]]:
    """Yield the objects of ``"__main__:..."`` in ``specs``, which other processes lack."""
    paths: set[Any] = {p for spec in specs for p in (spec.entry_point, spec.vector_entry_point)}
    paths |= {each.entry_point for spec in specs for each in spec.additional_wrappers}
    for path in paths:
        module, _, name = path.partition(":") if isinstance(path, str) else ("", "", "")
        if module == "__main__" and name in vars(sys.modules[module]):
            try:
                yield name, dump(vars(sys.modules[module])[name])
            except Exception as err:  # whatever the user's objects do when pickled
                yield name, dump(_NotSent(path, f"{type(err).__name__}: {err}"))
