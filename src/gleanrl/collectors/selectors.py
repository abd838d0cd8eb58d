"""The classes that `Collector` makes for its selectors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any, TypeVar, cast

from gleanrl.collectors.arguments import (
    CollectorArguments,
    defaults,
    definitions,
    instead,
    typed,
)
from gleanrl.core.errors import ArgumentTypeError, ConfigError, for_users
from gleanrl.core.options import check_int

_HERE = (None, "inline", "direct")
_PROCESSES = ("process", "multiprocessing")
_NODES: Mapping[Any, tuple[str, Mapping[str, Any]]] = {
    "distributed": ("DistributedCollector", {"launcher": "mp"}),
    "submitit": ("DistributedCollector", {"launcher": "submitit"}),
    "rpc": ("RPCCollector", {"launcher": "mp"}),
    "ray": ("RayCollector", {}),
}
"""Per backend over a network: the collector, and what it gets unless ``backend_options`` say
otherwise."""
_SELECTORS = ("backend", "num_collectors", "sync", "backend_options")
_RESERVED = (*_SELECTORS, "num_workers")
Function = TypeVar("Function", bound=Callable[..., Any])


def with_signature_of(described: Callable[..., Any]) -> Callable[[Function], Function]:
    """Return a decorator: what it decorates has the signature of ``described`` for `inspect`."""

    def decorate(function: Function) -> Function:
        function.__signature__ = inspect.signature(described)  # type: ignore[attr-defined]
        return cast("Function", for_users(function))

    return decorate


def elsewhere(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the collector with workers for arguments of `Collector`, ``None`` for none.

    Args:
        args: The positional arguments of `Collector`.
        kwargs: Its other arguments.
    """
    selectors = {name: kwargs[name] for name in _SELECTORS if name in kwargs}
    typed(CollectorArguments, selectors)  # refuses others
    backend, count = kwargs.get("backend"), kwargs.get("num_collectors")
    if backend not in (*_PROCESSES, *_HERE, *_NODES):
        raise unknown_backend(
            backend,
            "'inline' (alias 'direct'), 'process' (alias 'multiprocessing'), 'distributed', "
            "'submitit', 'rpc' or 'ray'",
        )
    if backend in _HERE and (backend is not None or count is None):
        _check_here(_count(count), kwargs)
        return None
    return _several(args, kwargs)


def unknown_backend(name: Any, known: str) -> Exception:
    """Return the error for a ``backend=`` that is not in ``known``."""
    if name == "thread":
        return NotImplementedError(f"backend='thread' is not available; it must be {known}")
    return ConfigError(f"backend ({name!r}) must be {known}")


def _check_here(count: int | None, kwargs: Mapping[str, Any]) -> None:
    """Refuse selectors that have no meaning in this process."""
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
    if others or kwargs.get("backend") not in _HERE:
        raise ArgumentTypeError(
            f"{', '.join(others or ['backend'])} chooses among the kinds of Collector itself; "
            f"{kind.__name__} collects in this process: give it to a MultiSyncCollector as "
            "collector_class="
        )


def _several(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    # Imported here: these classes are built from parts of `Collector` themselves.
    from gleanrl.collectors import distributed
    from gleanrl.collectors.launch import env_functions_of
    from gleanrl.collectors.multi import MultiAsyncCollector, MultiSyncCollector

    sync = kwargs.get("sync")
    kind: Any = MultiSyncCollector if sync else MultiAsyncCollector
    nodes = kwargs.get("backend") in _NODES
    preset: dict[str, Any] = {}
    if nodes:
        name, more = _NODES[kwargs["backend"]]
        kind, preset = getattr(distributed, name), {**more, "sync": bool(sync)}
    given = {name: value for name, value in kwargs.items() if name not in _SELECTORS}
    if len(args) > 2:
        raise ArgumentTypeError(
            f"{len(args)} positional arguments were given; create_env_fn and policy are those"
        )
    given.update(zip(("create_env_fn", "policy"), args, strict=False))
    options = _options(kwargs.get("backend_options"), given)
    given = _wanted(given, kind.ARGUMENTS)
    functions = env_functions_of(given.get("create_env_fn"), _count(kwargs.get("num_collectors")))
    if not nodes:
        return kind(**{**given, "num_workers": len(functions)}, **options)
    if "process_group_backend" in options:
        options["backend"] = options.pop("process_group_backend")
    return kind(**{**preset, **given, "create_env_fn": functions, **options})


def _count(value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Integral):  # NumPy's are, too
        raise ArgumentTypeError(f"num_collectors ({value!r}) must be a whole number")
    return check_int("num_collectors", value, least=1)


def _options(options: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    for names, what in ((_RESERVED, "reserved"), (given, "duplicate")):
        found = sorted(set(options or ()) & set(names))
        if found:
            raise ConfigError(
                f"backend_options holds {what} names {found}; give these to the collector itself, "
                "once"
            )
    return dict(options or {})


def _wanted(given: Mapping[str, Any], target: Any) -> dict[str, Any]:
    """Drop values equal to `Collector`'s defaults if the target has another default or none."""
    if "num_workers" in given:
        raise ArgumentTypeError("num_workers= is num_collectors= here: say that")
    usual, known = {"policy": None, **defaults(CollectorArguments)}, definitions(target)
    there = {"policy": None, **defaults(target)}
    flags = typed(CollectorArguments, {n: v for n, v in given.items() if n not in known})
    wanted = {}
    for name, value in {**given, **flags}.items():
        default = name in usual and value is usual[name]
        if name not in (*known, "create_env_fn", "policy") and not default:
            raise ArgumentTypeError(
                f"{name}= has no meaning for a collector over processes" + instead(name, known)
            )
        if not default or (name in there and there[name] is value):
            wanted[name] = value
    return wanted
