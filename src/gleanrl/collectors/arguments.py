"""Every argument of every collector's constructor, defined once.

An argument is a key of one of the dictionaries below, with its type, its default and, for numbers
and words, its reader; its meaning is in `argument_texts`. A constructor takes ``**kwargs:
Unpack[...]`` of its dictionary. Signatures, ``help()``, defaults and the check of names all come
from here; a dictionary says which collector takes an argument. `read` completes what was given and
checks types, `check` finds contradictions.
"""

import functools
import inspect
import operator
import os
import textwrap
import types
from collections.abc import Callable, Mapping, Sequence
from typing import (
    Annotated,
    Any,
    Required,
    TypeAlias,
    TypedDict,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from gleanrl.collectors.argument_texts import by_topic, text_of
from gleanrl.collectors.hooks import PostHook, PreHook
from gleanrl.collectors.save_on_sigterm import check_preemption
from gleanrl.core.errors import ArgumentTypeError, ConfigError, did_you_mean, for_users
from gleanrl.core.options import (
    InfoKeys,
    check_callables,
    check_int,
    check_word,
    read_device,
    seconds,
    warn,
)
from gleanrl.core.retry_limits import read_retry_limit
from gleanrl.engine.early_stop import Interruptor
from gleanrl.memory.replay.buffer import ReplayBuffer
from gleanrl.policies.policy import parse_exploration_mode
from gleanrl.transport.launchers import Launcher
from gleanrl.watch.loggers import LogFunction
from gleanrl.weights.module_weights import PolicyVersion
from gleanrl.weights.sync_schemes import WeightSyncScheme

Device = torch.device | str | int | None
Devices = Device | Sequence[Device]
Affinity = Sequence[Sequence[int]] | Callable[[int], Sequence[int]] | str | None
REQUIRED = inspect.Parameter.empty
Reader = Callable[[str, Any], Any]
"""Returns the value of the argument of that name, or raises a `ConfigError`."""
_POSITIVE: Reader = functools.partial(check_int, least=1)


def among(*words: str | None) -> Reader:
    """Return a reader of an argument that is one of ``words``."""
    return functools.partial(check_word, words=words)


class CommonArguments(TypedDict, total=False):
    """The arguments of every collector. A worker is a process, a node or a Ray actor."""

    total_frames: Annotated[int | None, -1]
    max_frames_per_traj: Annotated[int | None, None]
    init_random_frames: Annotated[int | None, None]
    reset_at_each_iter: Annotated[bool, False]
    postproc: Annotated[Callable[[TensorDictBase], TensorDictBase] | None, None]
    split_trajs: Annotated[bool | None, None]
    exploration_type: Annotated[InteractionType | None, None]
    exploration_mode: Annotated[str | None, None]
    set_truncated: Annotated[bool, False]
    replay_buffer: Annotated[Any, None]
    extend_buffer: Annotated[bool, True]
    trust_policy: Annotated[bool | None, None]
    compile_policy: Annotated[bool | Mapping[str, Any] | None, None]
    weight_updater: Annotated[Any, None]
    weight_sync_schemes: Annotated[Mapping[str, WeightSyncScheme] | None, None]
    weight_recv_schemes: Annotated[Mapping[str, WeightSyncScheme] | None, None]
    track_policy_version: Annotated[bool | PolicyVersion, False]
    track_traj_ids: Annotated[bool, True]
    trajs_per_batch: Annotated[int | None, None, _POSITIVE]
    trajs_per_write: Annotated[int | None, None, _POSITIVE]
    traj_format: Annotated[str, "padded", among("padded", "cat")]
    traj_quota: Annotated[str | None, None, among("equal", None)]
    pre_collect_hook: Annotated[PreHook | None, None]
    post_collect_hook: Annotated[PostHook | None, None]
    compact_obs: Annotated[bool, False]
    on_env_error: Annotated[str, "raise", among("raise", "restart")]
    max_env_restarts: Annotated[int | tuple[int, float], 10]
    num_envs: Annotated[int | None, None, _POSITIVE]
    categorical_action_encoding: Annotated[bool, True]
    observation_dtype: Annotated[torch.dtype | None, None]
    info_keys: Annotated[InfoKeys, ()]
    check_finite: Annotated[bool, False]
    fast: Annotated[bool, True]
    timeout: Annotated[float | None, None, seconds]
    progress: Annotated[bool | str, False]
    logger: Annotated[LogFunction | Sequence[LogFunction] | None, None]
    preemption_path: Annotated[str | os.PathLike[str] | None, None]
    grace: Annotated[float, 30.0, seconds]


class _OnThisMachine(TypedDict, total=False):
    """The arguments of collectors in this process and over processes."""

    reset_when_done: Annotated[bool, True]
    interruptor: Annotated[Interruptor | None, None]
    inference: Annotated[str, "workers", among("workers", "central")]
    env_groups: Annotated[int, 1, _POSITIVE]
    policy_process: Annotated[bool | None, None]
    max_batch_size: Annotated[int | None, None, _POSITIVE]
    min_batch_size: Annotated[int, 1, _POSITIVE]
    max_wait_s: Annotated[float, 0.01, seconds]
    max_ahead: Annotated[int | None, None, _POSITIVE]
    transition_chunk_size: Annotated[int | None, None, _POSITIVE]
    use_buffers: Annotated[bool | None, None]
    replay_buffer_chunk: Annotated[bool | None, None]
    local_init_rb: Annotated[bool | None, None]
    auto_register_policy_transforms: Annotated[bool | None, None]


class _NotOfNodes(TypedDict, total=False):
    """The arguments of all collectors except those over torch.distributed."""

    cudagraph_policy: Annotated[bool | Mapping[str, Any] | None, None]
    no_cuda_sync: Annotated[bool, False]
    worker_idx: Annotated[int | None, None]


class _WithWorkers(TypedDict, total=False):
    """The arguments of every collector with workers."""

    frames_per_batch: Required[int | Sequence[int]]
    policy_factory: Annotated[Callable[[], Any] | Sequence[Callable[[], Any]] | None, None]
    device: Annotated[Devices, None]
    storing_device: Annotated[Devices, None]
    env_device: Annotated[Devices, None]
    policy_device: Annotated[Devices, None]
    create_env_kwargs: Annotated[Mapping[str, Any] | Sequence[Mapping[str, Any]] | None, None]
    collector_class: Annotated[Any, None]
    num_sub_threads: Annotated[int, 1, _POSITIVE]
    cat_results: Annotated[str | int | None, None]
    init_fn: Annotated[Callable[[], Any] | None, None]
    start_timeout: Annotated[float, 120.0, seconds]
    on_failure: Annotated[str, "raise", among("raise", "continue", "relaunch")]
    max_relaunches: Annotated[int | tuple[int, float], 3]
    max_lag: Annotated[int | None, None, functools.partial(check_int, least=0)]


class _Remote(TypedDict, total=False):
    """The arguments of collectors over nodes and Ray actors."""

    collector_kwargs: Annotated[Mapping[str, Any] | Sequence[Mapping[str, Any]] | None, None]
    num_workers_per_collector: Annotated[int, 1, _POSITIVE]


class _WeightIntervals(TypedDict, total=False):
    """When a collector sends weights to nodes and actors without a call."""

    sync: Annotated[bool, False]
    update_after_each_batch: Annotated[bool, False]
    max_weight_update_interval: Annotated[int | None, -1]


class _OverNetwork(TypedDict, total=False):
    """The arguments of collectors over nodes that join over the network."""

    slurm_kwargs: Annotated[Mapping[str, Any] | None, None]
    backend: Annotated[str, "gloo"]
    launcher: Annotated[str | Launcher, "submitit"]
    tcp_port: Annotated[int | str | None, None]
    heartbeat: Annotated[float, 60.0, seconds]
    host: Annotated[str | None, None]


class CollectorArguments(CommonArguments, _OnThisMachine, _NotOfNodes, total=False):
    """The arguments of `Collector`."""

    frames_per_batch: Required[int]
    policy_factory: Annotated[Callable[[], Any] | None, None]
    device: Annotated[Device, None]
    storing_device: Annotated[Device, None]
    policy_device: Annotated[Device, None]
    env_device: Annotated[Device, None]
    create_env_kwargs: Annotated[Mapping[str, Any] | None, None]
    return_same_td: Annotated[bool, False]
    backend: Annotated[str | None, None]
    num_collectors: Annotated[int | None, None]
    sync: Annotated[bool | None, None]
    backend_options: Annotated[Mapping[str, Any] | None, None]


class MultiArguments(CommonArguments, _WithWorkers, _OnThisMachine, _NotOfNodes, total=False):
    """The arguments of `MultiCollector` and its subclasses."""

    num_workers: Annotated[int | None, None]
    worker_affinity: Annotated[Affinity, None]
    driver_affinity: Annotated[Sequence[int] | None, None]
    update_at_each_batch: Annotated[bool, False]
    preemptive_threshold: Annotated[float | None, None]
    num_threads: Annotated[int | None, None, _POSITIVE]
    backend: Annotated[str | None, None]
    sync: Annotated[bool | None, None]


class DistributedArguments(
    CommonArguments, _WithWorkers, _Remote, _WeightIntervals, _OverNetwork, total=False
):
    """The arguments of `DistributedCollector`."""

    update_interval: Annotated[int | None, None, _POSITIVE]


class DistributedSyncArguments(CommonArguments, _WithWorkers, _Remote, _OverNetwork, total=False):
    """The arguments of `DistributedSyncCollector`."""

    update_interval: Annotated[int, 1, _POSITIVE]


class RPCArguments(DistributedArguments, total=False):
    """The arguments of `RPCCollector`."""

    visible_devices: Annotated[Sequence[Any] | None, None]
    tensorpipe_options: Annotated[Mapping[str, Any] | None, None]


class RayArguments(
    CommonArguments, _WithWorkers, _Remote, _WeightIntervals, _NotOfNodes, total=False
):
    """The arguments of `RayCollector`."""

    ray_init_config: Annotated[Mapping[str, Any] | None, None]
    remote_configs: Annotated[Mapping[str, Any] | Sequence[Mapping[str, Any]] | None, None]
    num_collectors: Annotated[int | None, None]
    use_env_creator: Annotated[bool, False]


Arguments: TypeAlias = dict[str, Any]
"""The arguments of all collectors, completed with defaults: the result of `read`."""


# -- names, defaults, signatures -------------------------------------------------------------------


_COLLECTORS = {
    "Collector": CollectorArguments,
    "MultiSyncCollector": MultiArguments,
    "DistributedCollector": DistributedArguments,
    "DistributedSyncCollector": DistributedSyncArguments,
    "RPCCollector": RPCArguments,
    "RayCollector": RayArguments,
}
_RETIRED = {
    "exploration_mode": "exploration_type=ExplorationType....",
    "local_init_rb": "nothing: buffers are initialised by the first real data",
    "replay_buffer_chunk": "extend_buffer",
    "tensorpipe_options": "heartbeat=, for the deadline of silent nodes",
    "visible_devices": "policy_device= and env_device=, which may be lists with one per node",
    "weight_updater": "weight_sync_schemes=, or pass weights to update_policy_weights_",
}
"""Arguments that are accepted with a warning, and their replacements."""


@functools.cache
def definitions(kind: Any) -> dict[str, tuple[Any, Any]]:
    """Return type and default (`REQUIRED` if there is none) of the arguments of ``kind``."""
    found: dict[str, tuple[Any, Any]] = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if hint.__origin__ is Required:
            found = {name: (get_args(hint)[0], REQUIRED), **found}
        else:
            found[name] = hint.__origin__, hint.__metadata__[0]
    return found


@functools.cache
def _readers(kind: Any) -> dict[str, tuple[Reader, bool]]:
    """Return the readers of arguments of ``kind`` that have one, and whether they get ``None``."""
    hints = get_type_hints(kind, include_extras=True).items()
    return {
        name: (hint.__metadata__[1], type(None) not in get_args(hint.__origin__))
        for name, hint in hints
        if len(getattr(hint, "__metadata__", ())) > 1
    }


def defaults(kind: Any) -> dict[str, Any]:
    """Return the defaults of the arguments that have one."""
    found = {name: default for name, (_, default) in definitions(kind).items()}
    return {name: default for name, default in found.items() if default is not REQUIRED}


Function = TypeVar("Function", bound=Callable[..., Any])


class _Signature(inspect.Signature):
    """Has all parameters, but its text is short: the docstring lists them with their defaults."""

    def format(self, **_: Any) -> str:
        first = [
            p.replace(annotation=p.empty)
            for p in self.parameters.values()
            if p.kind is not p.KEYWORD_ONLY or p.default is REQUIRED
        ]
        rest = inspect.Parameter("arguments", inspect.Parameter.VAR_KEYWORD)
        return str(inspect.Signature([*first, rest]))

    __str__ = format


def _listed(kind: Any) -> str:
    """Return the list of the arguments of ``kind`` by topic, for a docstring."""
    defined = definitions(kind)
    owner = next((name for name, other in _COLLECTORS.items() if other is kind), "")
    text = ""
    for topic, names in by_topic(defined):
        text += f"\n    -- {topic} --\n"
        for name in names:
            default = defined[name][1]
            equals = "" if default is REQUIRED else f"={default!r}"
            entry = f"{name}{equals}: {text_of(name, owner)}"
            text += textwrap.indent(textwrap.fill(entry, 88, subsequent_indent="    "), "    ")
            text += "\n"
    return text


def documents_arguments(kind: Any, like: Any = None) -> Callable[[Function], Function]:
    """Return a decorator: a constructor has each argument of ``kind``, as if written out.

    All else in its docstring may be ``like`` that of another collector's.
    """
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
        for name, (hint, default) in definitions(kind).items()
    ]

    def decorate(function: Function) -> Function:
        own = inspect.signature(function)
        fixed = [p for p in own.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        signature = _Signature([*fixed, *parameters], return_annotation=own.return_annotation)
        function.__signature__ = signature  # type: ignore[attr-defined]
        own_doc = inspect.cleandoc(function.__doc__ or "")  # as of Python 3.13 it is clean already
        before, marked, after = own_doc.partition("    **kwargs:")
        if marked:  # not under -OO
            function.__doc__ = before + _listed(kind) + after.partition("\n")[2]
        elif like is not None and (text := like.__init__.__doc__):
            function.__doc__ = text.replace(_listed(like.ARGUMENTS), _listed(kind))
        return cast("Function", for_users(function))

    return decorate


def read(kind: Any, owner: str, arguments: Mapping[str, Any]) -> Arguments:
    """Return the arguments of a collector, completed by the defaults of all collectors'.

    ``kind`` is the dictionary of its arguments, ``owner`` the name of its class, for errors.
    """
    known = definitions(kind)
    for name in arguments:
        if name not in known:
            raise ArgumentTypeError(f"{owner} takes no {name}=" + instead(name, known))
    missing = [n for n, (_, default) in known.items() if default is REQUIRED and n not in arguments]
    if missing:
        raise ArgumentTypeError(f"{owner} needs {missing[0]}=")
    arguments = typed(kind, arguments)
    for name, newer in _RETIRED.items():
        if arguments.get(name) is not None:
            warn(f"{name}= is retired; use {newer}", DeprecationWarning)
    everywhere = {n: d for other in _COLLECTORS.values() for n, d in defaults(other).items()}
    return {**everywhere, **defaults(kind), **arguments}


def instead(name: str, known: Mapping[str, Any]) -> str:
    """Return a hint about an argument that is not ``known``."""
    having = [other for other, kind in _COLLECTORS.items() if name in definitions(kind)]
    if having:
        return f": it is an argument of {', '.join(having)}"
    if name == "seed":
        return "; call set_seed(...) of the collector"
    return did_you_mean(name, known)


# -- checks ----------------------------------------------------------------------------------------

_WORDS: Mapping[Any, str] = {
    bool: "a bool",
    str: "a string",
    Callable: "callable",
    Mapping: "a mapping",
    Sequence: "a list",
    os.PathLike: "a path",
    InteractionType: "an ExplorationType, such as ExplorationType.MODE",
    Interruptor: "an Interruptor of gleanrl.collectors",
    PolicyVersion: "a PolicyVersion",
}
"""Types that an argument is checked for by its definition. Devices and objects of many kinds are
read where they are used."""


def typed(kind: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``arguments`` with flags as bools and numbers read; NumPy's bools, 0 and 1 are flags.

    Arguments that are not what ``kind`` defines are refused; it may know others not.
    """
    known, read = definitions(kind), dict(arguments)
    for name, value in arguments.items():
        hint = known[name][0] if name in known else Any
        union = isinstance(hint, types.UnionType) or get_origin(hint) is Union
        allowed = [get_origin(one) or one for one in (get_args(hint) if union else [hint])]
        words = [_WORDS.get(one, "") for one in allowed if one is not type(None)]
        unset = value is None and bool not in allowed
        if bool in allowed and isinstance(value, np.bool_ | np.integer | int) and value in (0, 1):
            read[name] = bool(value)
        elif not (unset or "" in words or isinstance(value, tuple(allowed))):
            raise ArgumentTypeError(f"{name} ({value!r:.100}) must be {' or '.join(words)}")
    for name, (read_value, reads_none) in _readers(kind).items():
        if name in read and (reads_none or read[name] is not None):
            read[name] = read_value(name, read[name])
    return read


def check(arguments: Arguments) -> None:
    """Find contradictions between arguments, before anything is built."""
    for message, wrong in _contradictions(arguments).items():
        if wrong:
            raise ArgumentTypeError(message)
    read_retry_limit("max_env_restarts", arguments["max_env_restarts"])
    if arguments["preemption_path"] is not None:
        check_preemption(arguments["preemption_path"], arguments["replay_buffer"])
    if isinstance(makers := arguments["policy_factory"], Sequence):
        check_callables(**{f"policy_factory[{i}]": maker for i, maker in enumerate(makers)})
    for name in ("weight_sync_schemes", "weight_recv_schemes"):
        check_schemes(arguments[name])


def _contradictions(arguments: Arguments) -> dict[str, object]:
    """Return the message of each possible contradiction, and whether there is that one."""
    whole, ids = arguments["trajs_per_batch"] is not None, arguments["track_traj_ids"]
    apart = arguments["split_trajs"] or whole
    cat, updater = arguments["cat_results"], arguments["weight_updater"] is not None
    chunk, extend = arguments["replay_buffer_chunk"], arguments["extend_buffer"]
    factory, quota = arguments["policy_factory"] is not None, arguments["traj_quota"] is not None
    buffer = arguments["replay_buffer"]
    stores = buffer is not None  # in place of delivered batches
    compact = isinstance(buffer, ReplayBuffer) and buffer.storage.compact
    return {
        "split_trajs and trajs_per_batch need track_traj_ids=True": apart and not ids,
        f"cat_results={cat!r} puts rollouts of workers one after another, and only "
        "track_traj_ids=True tells where one ends; keep the ids, or leave cat_results out": (
            cat not in (None, "stack") and not ids
        ),
        f"replay_buffer_chunk ({chunk}) contradicts extend_buffer ({extend})": (
            chunk not in (None, extend)  # its retired spelling
        ),
        "give weight_sync_schemes or weight_updater, not both": (
            updater and arguments["weight_sync_schemes"] is not None
        ),
        "policy and policy_factory exclude each other with a weight_updater; drop it, and weights "
        "are taken from policy": updater and arguments["policy"] is not None and factory,
        "set_truncated=True would cut trajectories where batches end; it excludes trajs_per_batch, "
        "which delivers whole ones": arguments["set_truncated"] and whole,
        "traj_quota shares out whole trajectories: it needs trajs_per_batch": quota and not whole,
        "traj_format='cat' needs trajs_per_batch": arguments["traj_format"] == "cat" and not whole,
        "trajs_per_batch already delivers whole trajectories; drop split_trajs": (
            whole and arguments["split_trajs"]
        ),
        "traj_quota is for batches that are handed over; into a replay_buffer trajectories go as "
        "they are completed": quota and stores,
        "trajs_per_write says how many whole trajectories are written at once: it needs "
        "replay_buffer and trajs_per_batch": (
            arguments["trajs_per_write"] is not None and not (whole and stores)
        ),
        "reset_at_each_iter=True drops trajectories that outlast a batch, so that short ones are "
        "preferred; it excludes traj_quota": quota and arguments["reset_at_each_iter"],
        "return_same_td=True needs batches of one shape; it excludes split_trajs and "
        "trajs_per_batch": arguments["return_same_td"] and apart,
        "reset_when_done=False is not supported: environments that end are always reset; use "
        "split_trajs=True or trajs_per_batch= to get whole trajectories, or the rollout("
        "break_when_any_done=True) of an environment": not arguments["reset_when_done"],
        "compact_obs=True leaves out what the compact replay_buffer needs where an episode or a "
        "rollout ends: drop it, the buffer stores each observation once by itself": (
            arguments["compact_obs"] and compact
        ),
        "use_buffers=True and replay_buffer exclude each other": (
            stores and arguments["use_buffers"]
        ),
        "return_same_td=True and replay_buffer exclude each other: nothing is returned": (
            stores and arguments["return_same_td"]
        ),
        "extend_buffer=False stores steps as they were made; it excludes split_trajs, "
        "trajs_per_batch and postproc, which work on whole batches": (
            stores and not extend and (apart or arguments["postproc"] is not None)
        ),
    }


OF_CENTRAL = ("env_groups", "policy_process", "driver_affinity")
OF_ASYNC = ("max_batch_size", "min_batch_size", "max_wait_s", "max_ahead", "transition_chunk_size")
"""The arguments of central inference, and of asynchronous central inference."""


def check_inference(arguments: Arguments, taken: Sequence[str]) -> None:
    """Refuse arguments of central inference other than those that are ``taken``."""
    usual = defaults(MultiArguments)
    for name in (*OF_CENTRAL, *OF_ASYNC):
        if name not in taken and arguments[name] != usual[name]:
            needed = "asynchronous central inference" if name in OF_ASYNC else "inference='central'"
            raise ConfigError(f"{name} ({arguments[name]!r:.80}) needs {needed}")


def check_in_process(arguments: Arguments) -> None:
    """Refuse central inference, and its arguments, of a collector without workers."""
    if arguments["inference"] != "workers":
        raise ConfigError(
            f"inference ({arguments['inference']!r}) is for environments in several workers: "
            "num_collectors=, or MultiSyncCollector"
        )
    check_inference(arguments, taken=())


def check_schemes(schemes: Mapping[str, Any] | None) -> None:
    """Raise an error unless ``schemes`` maps model ids to weight sync schemes."""
    if schemes is not None and not isinstance(schemes, Mapping):
        raise ConfigError(
            f"weight sync schemes ({schemes!r:.100}) must be a mapping from model id to scheme"
        )
    for name, scheme in (schemes or {}).items():
        if not isinstance(scheme, WeightSyncScheme):
            raise ConfigError(
                f"the weight sync scheme of {name!r} ({scheme!r:.100}) is not a WeightSyncScheme; "
                "import it from gleanrl.weight_update"
            )


def read_exploration(kind: InteractionType | None, mode: str | None) -> InteractionType:
    """Return the interaction type; ``None`` is RANDOM."""
    if mode is None:
        return InteractionType.RANDOM if kind is None else kind
    parsed = parse_exploration_mode(mode)
    if kind is not None and kind != parsed:
        raise ConfigError(
            f"exploration_mode ({mode!r}) contradicts exploration_type ({kind}); drop "
            "exploration_mode"
        )
    return parsed


# -- what collectors show of their arguments -------------------------------------------------------

_TYPES = {
    name: hint for kind in _COLLECTORS.values() for name, (hint, _) in definitions(kind).items()
}


def argument_property(name: str, read: Callable[[Any], Any] | None = None, doc: str = "") -> Any:
    """Return a read-only property of collectors: an argument, or what ``read`` returns of it."""

    def get(collector: Any) -> Any:
        value = collector._arguments[name]
        return value if read is None else read(value)

    def refuse(collector: Any, value: Any) -> None:
        raise AttributeError(
            f"this attribute of a {type(collector).__name__} is read-only: give {name}= to the "
            "constructor"
        )

    get.__annotations__["return"] = bool if read is bool else _TYPES.get(name)
    return property(get, refuse, doc=doc or text_of(name))


# -- arguments of methods --------------------------------------------------------------------------


def read_seed(seed: Any) -> int:
    """Return a seed as a whole number that is not negative."""
    try:
        number = operator.index(seed)
    except TypeError as err:
        raise ConfigError(f"seed ({seed!r}) must be a whole number") from err
    if number < 0:
        raise ConfigError(f"seed ({number}) must not be negative")
    return number


def read_devices(device: Any) -> Any:
    """Return the default device, and the workers' devices as a list if the argument is a list."""
    if isinstance(device, list | tuple):
        return [read_devices(one) for one in device]
    return read_device("device", device)


def read_flags(name: str, value: Any, count: int) -> list[bool]:
    """Return a list or a tensor of ``count`` bools as a list; all are true by default."""
    if value is None:
        return [True] * count
    try:
        flags = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        flags = None
    if flags is None or flags.dtype != torch.bool or flags.ndim != 1:
        raise ConfigError(
            f"{name} ({value!r:.100}) must hold one bool per worker, no indices: [True, False, ...]"
        )
    if len(flags) != count:
        raise ConfigError(f"{name} has {len(flags)} entries for {count} workers")
    return [bool(flag) for flag in flags]


def read_index(index: Sequence[int] | torch.Tensor, num_envs: int) -> tuple[int, ...]:
    """Return environment positions from indices or a boolean mask."""
    chosen = torch.as_tensor(index)
    if chosen.is_floating_point() or chosen.is_complex():
        raise ConfigError(f"index ({index!r:.100}) must hold whole numbers or be a boolean mask")
    if chosen.dtype == torch.bool:
        if chosen.numel() != num_envs:
            raise ConfigError(f"index has {chosen.numel()} entries for {num_envs} environments")
        chosen = chosen.reshape(-1).nonzero()
    positions = tuple(sorted({int(i) for i in chosen.reshape(-1)}))
    outside = [i for i in positions if not 0 <= i < num_envs]
    if outside:
        raise ConfigError(f"index {outside} is outside the {num_envs} environments")
    return positions
