"""The class that ``backend=``, ``num_collectors=`` and ``sync=`` of `Collector` choose."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any, TypeVar, cast

from gleanrl.collectors.arguments import CollectorArguments, defaults, definitions, typed
from gleanrl.collectors.worker_plan import env_functions_of
from gleanrl.core.errors import ArgumentTypeError, ConfigError, for_users
from gleanrl.core.options import check_int

_IN_PROCESS = (None, "inline", "direct")
_SELECTORS = ("backend", "num_collectors", "sync", "backend_options")
_RESERVED = (*_SELECTORS, "num_workers")
_KINDS: dict[Any, tuple[Any, Mapping[str, Any]]] = {}
"""Per backend with workers: the collector, and its arguments unless ``backend_options`` say
otherwise."""
Function = TypeVar("Function", bound=Callable[..., Any])


def selects(kind: Any, *backends: str, **preset: Any) -> None:
    """Have ``backend=`` of `Collector` mean ``kind``, which takes ``sync=`` and the ``preset``."""
    _KINDS.update(dict.fromkeys(backends, (kind, preset)))


def with_signature_of(described: Callable[..., Any]) -> Callable[[Function], Function]:
    """Return a decorator: what it decorates has the signature of ``described`` for `inspect`."""

    def decorate(function: Function) -> Function:
        function.__signature__ = inspect.signature(described)  # type: ignore[attr-defined]
        return cast("Function", for_users(function))

    return decorate


def with_workers(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the collector with workers for arguments of `Collector`, ``None`` for none."""
    typed(CollectorArguments, {name: kwargs[name] for name in _SELECTORS if name in kwargs})
    backend, count = kwargs.get("backend"), _count(kwargs.get("num_collectors"))
    if backend not in (*_IN_PROCESS, *_KINDS):
        raise unknown_backend(
            backend,
            "'inline' (alias 'direct'), 'process' (alias 'multiprocessing'), 'distributed', "
            "'submitit', 'rpc' or 'ray'",
        )
    if backend in _IN_PROCESS and (backend is not None or count is None):
        _check_in_process(count, kwargs)
        return None
    if len(args) > 2:
        raise ArgumentTypeError(
            f"{len(args)} positional arguments were given; create_env_fn and policy are those"
        )
    if "num_workers" in kwargs:
        raise ArgumentTypeError("num_workers= is num_collectors= here: say that")
    kind, preset = _KINDS[backend or "process"]
    given = {**dict(zip(("create_env_fn", "policy"), args, strict=False)), **kwargs}
    options = _options(kwargs.get("backend_options"), given)
    functions = env_functions_of(given.get("create_env_fn"), count)
    own = {"create_env_fn": functions, "sync": bool(kwargs.get("sync"))}
    return kind(**{**preset, **_known(given, kind.ARGUMENTS), **own, **options})


def unknown_backend(name: Any, known: str) -> Exception:
    """Return the error for a ``backend=`` that is not in ``known``."""
    if name == "thread":
        return NotImplementedError(f"backend='thread' is not available; it must be {known}")
    return ConfigError(f"backend ({name!r}) must be {known}")


def _check_in_process(count: int | None, kwargs: Mapping[str, Any]) -> None:
    if count not in (None, 1):
        raise ConfigError(
            f"num_collectors ({count}) must be at most one in this process; use num_envs= for "
            "several environments, backend='process' for several workers"
        )
    if kwargs.get("sync") is not None:
        raise ConfigError("sync= is for collectors with several workers: backend='process'")
    if kwargs.get("backend_options"):
        options = sorted(kwargs["backend_options"])
        raise ConfigError(f"backend_options ({options}) have no meaning in this process")


def check_subclass(kind: type, kwargs: Mapping[str, Any]) -> None:
    """Refuse selectors on a user's class, which runs in the process that makes it."""
    others = [name for name in _SELECTORS[1:] if kwargs.get(name) is not None]
    if others or kwargs.get("backend") not in _IN_PROCESS:
        raise ArgumentTypeError(
            f"{', '.join(others or ['backend'])} chooses among the kinds of Collector itself; "
            f"{kind.__name__} collects in this process: give it to a MultiSyncCollector as "
            "collector_class="
        )


def _count(value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Integral):  # NumPy's are, too
        raise ArgumentTypeError(f"num_collectors ({value!r}) must be a whole number")
    return check_int("num_collectors", value, least=1)


def _options(options: Mapping[str, Any] | None, given: Mapping[str, Any]) -> dict[str, Any]:
    for names, what in ((_RESERVED, "reserved"), (given, "duplicate")):
        found = sorted(set(options or ()) & set(names))
        if found:
            raise ConfigError(
                f"backend_options holds {what} names {found}; give these to the collector itself, "
                "once"
            )
    own = dict(options or {})
    if "process_group_backend" in own:
        own["backend"] = own.pop("process_group_backend")
    return own


def _known(given: Mapping[str, Any], target: Any) -> dict[str, Any]:
    """Return the arguments of ``given`` without selectors, and without defaults unknown there."""
    usual, known = defaults(CollectorArguments), definitions(target)
    return {
        name: value
        for name, value in given.items()
        if name not in _SELECTORS and (name in known or name not in usual or value != usual[name])
    }
