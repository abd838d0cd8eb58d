"""`Collector` as the one name for every kind: which class its selectors mean."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from gleanrl.collectors import per_worker
from gleanrl.collectors.arguments import CollectorArguments, defaults, definitions, instead
from gleanrl.core.errors import ArgumentTypeError, ConfigError, for_users

_PROCESSES = ("process", "multiprocessing")
_HERE = ("inline", "direct")
_NODES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "distributed": ("DistributedCollector", {"launcher": "mp"}),
    "submitit": ("DistributedCollector", {"launcher": "submitit"}),
    "rpc": ("RPCCollector", {"launcher": "mp"}),
    "ray": ("RayCollector", {}),
}
"""Per backend over a network: the collector, and what it gets unless ``backend_options`` say
otherwise."""
_LATER = ("thread",)
_SELECTORS = ("backend", "num_collectors", "sync", "backend_options")
_RESERVED = ("backend", "backend_options", "num_collectors", "num_workers", "sync")
Function = TypeVar("Function", bound=Callable[..., Any])


def like(shown: Callable[..., Any]) -> Callable[[Function], Function]:
    """Return a decorator: what it decorates has the signature of ``shown`` for `inspect`."""

    def decorate(function: Function) -> Function:
        function.__signature__ = inspect.signature(shown)  # type: ignore[attr-defined]
        return cast("Function", for_users(function))

    return decorate


def elsewhere(kwargs: Mapping[str, Any]) -> bool:
    """Return whether the selectors among ``kwargs`` ask for worker processes.

    Raises:
        ConfigError: an unknown backend.
        NotImplementedError: one that this version does not have.
    """
    backend = kwargs.get("backend")
    if backend is None:
        return kwargs.get("num_collectors") is not None
    if backend in _LATER:
        raise NotImplementedError(
            f"backend={backend!r} is not available in this version; 'inline', 'process', "
            "'distributed', 'submitit', 'rpc' and 'ray' are"
        )
    if backend not in (*_PROCESSES, *_HERE, *_NODES):
        raise ConfigError(
            f"backend ({backend!r}) must be 'inline' (alias 'direct'), 'process' (alias "
            "'multiprocessing'), 'distributed', 'submitit', 'rpc' or 'ray'"
        )
    return backend not in _HERE


def check_here(kwargs: Mapping[str, Any]) -> None:
    """Check selectors that mean "in this process".

    Raises:
        TypeError: ``num_collectors`` is no whole number.
        ConfigError: a selector that has no meaning here.
    """
    count = _count(kwargs.get("num_collectors"))
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
    """Refuse selectors on a class of the user's, which runs where it is made.

    Raises:
        TypeError: they ask for something else.
    """
    backend = kwargs.get("backend")
    others = [name for name in _SELECTORS[1:] if kwargs.get(name) is not None]
    if others or backend not in (None, *_HERE):
        raise ArgumentTypeError(
            f"{', '.join(others or ['backend'])} chooses among the kinds of Collector itself; "
            f"{kind.__name__} collects in this process: give it to a MultiSyncCollector as "
            "collector_class="
        )


def several(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the collector over processes that arguments of `Collector` mean.

    Args:
        args: The positional arguments of `Collector`.
        kwargs: Its other arguments.

    Raises:
        TypeError: a selector of the wrong type, or an argument that has no meaning over processes.
        ConfigError: options that contradict other arguments, or counts that do not fit.
    """
    # Imported here: these classes are built from parts of `Collector` themselves.
    from gleanrl.collectors import distributed
    from gleanrl.collectors.multi import MultiAsyncCollector, MultiSyncCollector

    sync = kwargs.get("sync")
    if sync is not None and not isinstance(sync, bool):
        raise ArgumentTypeError(f"sync ({sync!r}) must be True, False or None (which means False)")
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
    count = _count(kwargs.get("num_collectors"))
    functions = per_worker.env_functions_of(given.get("create_env_fn"), count)
    if not nodes:
        return kind(**{**given, "num_workers": len(functions)}, **options)
    if "process_group_backend" in options:
        options["backend"] = options.pop("process_group_backend")
    return kind(**{**preset, **given, "create_env_fn": functions, **options})


def _count(value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"num_collectors ({value!r}) must be a whole number")
    if value < 1:
        raise ConfigError(f"num_collectors ({value}) must be at least 1")
    return value


def _options(options: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise ArgumentTypeError(f"backend_options ({options!r:.100}) must map names to values")
    for names, what in ((_RESERVED, "reserved"), (given, "duplicate")):
        found = sorted(set(options) & set(names))
        if found:
            raise ConfigError(
                f"backend_options holds {what} names {found}; give these to the collector itself, "
                "once"
            )
    return dict(options)


def _wanted(given: Mapping[str, Any], target: Any) -> dict[str, Any]:
    """Drop what merely repeats a default of `Collector`, where the target has another or none.

    Raises:
        TypeError: an argument that the target does not take.
    """
    if "num_workers" in given:
        raise ArgumentTypeError("num_workers= is num_collectors= here: say that")
    usual, known = {"policy": None, **defaults(CollectorArguments)}, definitions(target)
    there = {"policy": None, **defaults(target)}
    wanted = {}
    for name, value in given.items():
        default = name in usual and value is usual[name]
        if name not in (*known, "create_env_fn", "policy") and not default:
            raise ArgumentTypeError(
                f"{name}= has no meaning for a collector over processes" + instead(name, known)
            )
        if not default or (name in there and there[name] is value):
            wanted[name] = value
    return wanted
