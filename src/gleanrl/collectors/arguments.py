"""Every argument of every collector's constructor, defined once.

An argument is a key of one of the dictionaries below: its type, its default and what it means. A
constructor takes ``**kwargs: Unpack[...]`` of its dictionary. Signatures, ``help()``, defaults and
the check of names all come from here; which collector takes an argument is said by the dictionary
that holds it. `read` completes what was given and checks types, `check` finds contradictions.
"""

import functools
import inspect
import operator
import re
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    is_typeddict,
)

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from gleanrl.collectors.controls import PostHook, PreHook
from gleanrl.core.errors import ArgumentTypeError, ConfigError, did_you_mean, for_users
from gleanrl.core.options import (
    InfoKeys,
    read_device,
    seconds,
    warn,
)
from gleanrl.engine.interruptor import Interruptor
from gleanrl.memory.replay.buffer import ReplayBuffer
from gleanrl.policies.policy import parse_exploration_mode
from gleanrl.transport.launchers import Launcher
from gleanrl.watch.loggers import LogFunction
from gleanrl.weights.scheme import WeightSyncScheme
from gleanrl.weights.snapshot import PolicyVersion

Device = torch.device | str | int | None
Devices = Device | Sequence[Device]
REQUIRED = inspect.Parameter.empty


class CommonArguments(TypedDict, total=False):
    """The arguments of every collector. A worker is a process, a node or a Ray actor.

    Attributes:
        total_frames: Frames, over all workers, after which iteration ends, rounded up to whole
            batches; -1 or None for endless collection.
        max_frames_per_traj: Truncate and reset an episode after this many steps; zero, negative or
            None for no limit. Adds ``step_count``.
        init_random_frames: Act at random, without calling the policy, for this many frames over all
            workers (rounded up to whole batches). Other outputs of the policy are zero in them.
        reset_at_each_iter: Reset all environments before each batch.
        postproc: Applied to each batch in this process, after ``split_trajs``. Workers that write
            into a buffer apply it to each of their rollouts.
        split_trajs: Deliver one padded row per trajectory with a mask.
        exploration_type: How a probabilistic policy acts; RANDOM by default.
        exploration_mode: Retired spelling of ``exploration_type``.
        set_truncated: Mark the last step of every batch as truncated.
        replay_buffer: An object with ``extend`` (and ``add``). It gets the batches, and iteration
            yields ``None``. Worker processes write into a `ReplayBuffer` of tensors by themselves;
            the collector shares it if necessary. A `Recorder` writes the frames to disk.
        extend_buffer: Store whole batches; ``False`` stores step by step with ``add``, one element
            per step and worker. In a storage of ``[env, time]`` both are the same.
        trust_policy: Call the policy on a TensorDict, without examining it.
        compile_policy: Compile the policy with `torch.compile`; a mapping gives its arguments.
        weight_updater: Retired: a `WeightUpdaterBase`, or a callable that returns one. It sends
            weights instead of the schemes.
        weight_sync_schemes: Per model id; a `NoWeightSyncScheme` keeps that model fixed. By default
            weights travel through shared memory to processes, through torch.distributed to nodes
            and through Ray to actors.
        weight_recv_schemes: Models that the outer collector may update, if this collector runs
            in a worker; see `register_scheme_receiver`.
        track_policy_version: Deliver ``policy_version``: ``True``, or a `PolicyVersion` to count
            with.
        track_traj_ids: Deliver ``("collector", "traj_ids")``.
        trajs_per_batch: Deliver exactly this many whole trajectories per batch.
        trajs_per_write: With a replay buffer: whole trajectories per write, 1 by default.
        traj_format: ``"padded"`` (with a mask) or ``"cat"``, for ``trajs_per_batch``.
        traj_quota: With ``"equal"`` each environment gives equally many trajectories to a batch, in
            the order of collection, so that short ones are not preferred. ``trajs_per_batch`` is
            then rounded up to a multiple of the environments of all workers.
        pre_collect_hook: Called before each batch is collected; in every worker, before each of its
            rollouts.
        post_collect_hook: Called with each batch before it is delivered. A worker calls it with
            each of its rollouts, or with the rows that it stores if workers write into a buffer.
            The memory is reused, so clone data that you keep. The hook may change values in place;
            new entries need ``postproc``.
        compact_obs: Leave out the observations under ``next``. The last observation of an episode
            and of a batch is lost then, because no other row holds it. A buffer with a compact
            storage needs these observations, and stores each once.
        num_envs: Number of environments to make from one id or callable, in each worker. A batch
            is ``[num_envs, T]``.
        categorical_action_encoding: Discrete actions as indices; ``False`` for one-hot vectors.
        observation_dtype: Cast floating observations to this dtype.
        info_keys: Numeric ``info`` entries to deliver; a mapping gives their shapes and dtypes.
        check_finite: Raise on NaN or infinity in observations and rewards.
        fast: Replace parts of environment and policy by faster ones that are proven to give the
            same data; `explain` lists them. With ``False``, policies, and all environments except
            vector ones, are called unmodified, on TensorDicts. Vector environments are always
            stepped by their own ``step``.
        timeout: Seconds that one rollout of a worker may take; a worker that takes longer is
            killed. By default the collector waits as long as the worker shows signs of life, with a
            warning every minute. No effect within one process.
        progress: Show progress on standard error, also during the start of workers and
            environments: one redrawn line on a terminal, a line every two seconds elsewhere. A
            string is its label.
        logger: A callable, or a list of callables, that the collecting thread calls with
            ``stats()`` after each batch. `CSVLogger`, `TensorBoardLogger` and `WandbLogger` are
            closed with the collector. A logger that raises is not called again, and a warning says
            so.
    """

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
    trajs_per_batch: Annotated[int | None, None]
    trajs_per_write: Annotated[int | None, None]
    traj_format: Annotated[str, "padded"]
    traj_quota: Annotated[str | None, None]
    pre_collect_hook: Annotated[PreHook | None, None]
    post_collect_hook: Annotated[PostHook | None, None]
    compact_obs: Annotated[bool, False]
    num_envs: Annotated[int | None, None]
    categorical_action_encoding: Annotated[bool, True]
    observation_dtype: Annotated[torch.dtype | None, None]
    info_keys: Annotated[InfoKeys, ()]
    check_finite: Annotated[bool, False]
    fast: Annotated[bool, True]
    timeout: Annotated[float | None, None]
    progress: Annotated[bool | str, False]
    logger: Annotated[LogFunction | Sequence[LogFunction] | None, None]


class _OnThisMachine(TypedDict, total=False):
    """The arguments of collectors in this process and over processes.

    Attributes:
        reset_when_done: ``True`` only: ended environments are reset.
        use_buffers: Accepted; memory is always preallocated.
        replay_buffer_chunk: Retired spelling of ``extend_buffer``.
        local_init_rb: Retired, changes nothing.
        auto_register_policy_transforms: By default, policies get the entries that they read of
            ``is_init`` and zeroed recurrent states; with ``False`` the environment must deliver
            them.
    """

    reset_when_done: Annotated[bool, True]
    use_buffers: Annotated[bool | None, None]
    replay_buffer_chunk: Annotated[bool | None, None]
    local_init_rb: Annotated[bool | None, None]
    auto_register_policy_transforms: Annotated[bool | None, None]


class _NotOfNodes(TypedDict, total=False):
    """The arguments of all collectors except those over torch.distributed.

    Attributes:
        cudagraph_policy: Run the policy as a CUDA graph; a mapping gives its arguments.
        no_cuda_sync: Accepted; the collector waits only for its own copies.
        worker_idx: This collector's index among its parent's workers.
    """

    cudagraph_policy: Annotated[bool | Mapping[str, Any] | None, None]
    no_cuda_sync: Annotated[bool, False]
    worker_idx: Annotated[int | None, None]


class _WithWorkers(TypedDict, total=False):
    """The arguments of every collector with workers.

    Attributes:
        frames_per_batch: Frames of one batch. Synchronous workers divide them among themselves; an
            asynchronous worker makes whole batches. A list has one number per worker.
        policy_factory: A callable that makes the policy in each worker, or a list with one per
            worker. A ``policy`` given as well is only the source of weights.
        device: The value of each of the three below that is not given. Each of the four is one
            device, or a list with one per worker.
        storing_device: The device of batches; the CPU if workers differ.
        env_device: The device of environments.
        policy_device: The device of policies.
        create_env_kwargs: Arguments of environments, or a list with one mapping per worker.
        collector_class: The class of the collector in each worker; one other than `Collector` runs
            unmodified. Nodes and Ray actors also take the names ``"single"`` (default), ``"sync"``
            and ``"async"``.
        num_sub_threads: torch threads of each worker.
        cat_results: ``"stack"`` (default) stacks the rollouts of the workers along a new first
            dimension. A number concatenates them along that dimension (-1: time). Synchronous
            collectors only.
        init_fn: A function that every worker calls first.
        start_timeout: Seconds in which each worker's process must start (all nodes and actors,
            time in a queue included). All workers have the same time again to build environments.
    """

    frames_per_batch: Required[int | Sequence[int]]
    policy_factory: Annotated[Callable[[], Any] | Sequence[Callable[[], Any]] | None, None]
    device: Annotated[Devices, None]
    storing_device: Annotated[Devices, None]
    env_device: Annotated[Devices, None]
    policy_device: Annotated[Devices, None]
    create_env_kwargs: Annotated[Mapping[str, Any] | Sequence[Mapping[str, Any]] | None, None]
    collector_class: Annotated[Any, None]
    num_sub_threads: Annotated[int, 1]
    cat_results: Annotated[str | int | None, None]
    init_fn: Annotated[Callable[[], Any] | None, None]
    start_timeout: Annotated[float, 120.0]


class _Remote(TypedDict, total=False):
    """The arguments of collectors over nodes and Ray actors.

    Attributes:
        collector_kwargs: Further arguments of the workers' collectors, or a list with one mapping
            per worker.
        num_workers_per_collector: Workers of a worker's ``"sync"`` or ``"async"`` collector.
        on_failure: The reaction to a lost worker. ``"raise"`` raises `WorkerDied`. ``"continue"``
            warns, and the other workers collect the missing frames. ``"relaunch"`` also starts a
            replacement, which collects as soon as it is up. The last two need ``sync=False``; the
            launchers ``"torchrun"`` and ``"submitit_delayed"`` cannot replace nodes.
        max_relaunches: Replacements of each worker, failed ones included. After that, collection
            continues without the worker.
    """

    collector_kwargs: Annotated[Mapping[str, Any] | Sequence[Mapping[str, Any]] | None, None]
    num_workers_per_collector: Annotated[int, 1]
    on_failure: Annotated[str, "raise"]
    max_relaunches: Annotated[int, 3]


class _WeightIntervals(TypedDict, total=False):
    """When a collector sends weights to nodes and actors without a call.

    Attributes:
        sync: Whether a batch holds rollouts of all workers.
        update_after_each_batch: Send the policy's weights at the request for the next batch: to all
            workers, or with ``sync=False`` to the worker of the last batch.
        max_weight_update_interval: The largest number of batches for which a worker waits for new
            weights; -1 for no limit.
    """

    sync: Annotated[bool, False]
    update_after_each_batch: Annotated[bool, False]
    max_weight_update_interval: Annotated[int | None, -1]


class _OverNetwork(TypedDict, total=False):
    """The arguments of collectors over nodes that join over the network.

    Attributes:
        slurm_kwargs: Parameters of `submitit.AutoExecutor` for the jobs of
            ``launcher="submitit"``, and GleanRL's own ``cluster`` (``"local"`` for processes of
            this machine) and ``folder`` (of logs; by default ``gleanrl_jobs`` in the working
            directory).
        backend: ``"gloo"``, ``"nccl"``, ``"mpi"`` or ``"ucc"``, of torch.distributed.
        launcher: ``"mp"``: processes of this machine. ``"submitit"``: Slurm jobs.
            ``"submitit_delayed"``: jobs that `submitit_delayed_launcher` has started.
            ``"torchrun"``: the other ranks of the learner's job. ``"manual"``: the processes
            in which you run the printed commands.
        tcp_port: The port to which nodes connect. The default is the environment variable
            ``TCP_PORT``, else 10003, or the next free port.
        heartbeat: Seconds without a sign of life after which a node, or for a node its learner,
            counts as dead.
        host: Address of this machine on which the learner listens, and which nodes can reach. By
            default the launcher chooses it (the loopback interface for ``"mp"``).
    """

    slurm_kwargs: Annotated[Mapping[str, Any] | None, None]
    backend: Annotated[str, "gloo"]
    launcher: Annotated[str | Launcher, "submitit"]
    tcp_port: Annotated[int | str | None, None]
    heartbeat: Annotated[float, 60.0]
    host: Annotated[str | None, None]


class CollectorArguments(CommonArguments, _OnThisMachine, _NotOfNodes, total=False):
    """The arguments of `Collector`.

    Attributes:
        frames_per_batch: Frames of one batch, over all environments; rounded up to whole steps.
        policy_factory: A callable that returns the policy, instead of ``policy``.
        device: The value of each of the three below that is not given.
        storing_device: The device of batches.
        policy_device: The device of the policy; a copy runs if the policy is on another device.
        env_device: The device of the environment.
        create_env_kwargs: Arguments for ``create_env_fn`` or for `gymnasium.make`.
        return_same_td: Deliver the same `TensorDict` each time, filled with the next batch.
        interruptor: An `Interruptor` that can end rollouts early.
        backend: ``"inline"`` (alias ``"direct"``): in this process. ``"process"`` (alias
            ``"multiprocessing"``) makes a `MultiSyncCollector` or `MultiAsyncCollector`,
            ``"distributed"`` and ``"submitit"`` a `DistributedCollector`, ``"rpc"`` an
            `RPCCollector`, ``"ray"`` a `RayCollector`.
        num_collectors: Number of worker processes; implies ``backend="process"``.
        sync: Whether the batches of several workers hold rollouts of all; ``False`` by default.
        backend_options: Arguments that only the collectors with workers have.
    """

    frames_per_batch: Required[int]
    policy_factory: Annotated[Callable[[], Any] | None, None]
    device: Annotated[Device, None]
    storing_device: Annotated[Device, None]
    policy_device: Annotated[Device, None]
    env_device: Annotated[Device, None]
    create_env_kwargs: Annotated[Mapping[str, Any] | None, None]
    return_same_td: Annotated[bool, False]
    interruptor: Annotated[Any, None]
    backend: Annotated[str | None, None]
    num_collectors: Annotated[int | None, None]
    sync: Annotated[bool | None, None]
    backend_options: Annotated[Mapping[str, Any] | None, None]


class MultiArguments(CommonArguments, _WithWorkers, _OnThisMachine, _NotOfNodes, total=False):
    """The arguments of `MultiCollector` and its subclasses.

    Attributes:
        num_workers: Number of workers; not needed for a list of environments.
        update_at_each_batch: Send the policy's weights before (synchronous) or after (asynchronous)
            each batch.
        preemptive_threshold: Share of the workers that finish their rollouts. The collector then
            stops the others, and a mask marks the steps that they did not reach. If the share is
            less than one worker, every worker makes one step. Synchronous collectors only.
        interruptor: An `Interruptor` that can end rollouts early.
        num_threads: torch threads of this process while workers run; by default their present
            number less one per worker.
        backend: ``"process"``, or ``"inline"``: the same workers in this process.
        sync: Chooses the subclass of `MultiCollector`.
    """

    num_workers: Annotated[int | None, None]
    update_at_each_batch: Annotated[bool, False]
    preemptive_threshold: Annotated[float | None, None]
    interruptor: Annotated[Interruptor | None, None]
    num_threads: Annotated[int | None, None]
    backend: Annotated[str | None, None]
    sync: Annotated[bool | None, None]


class DistributedArguments(
    CommonArguments, _WithWorkers, _Remote, _WeightIntervals, _OverNetwork, total=False
):
    """The arguments of `DistributedCollector`.

    Attributes:
        update_interval: Another name of ``max_weight_update_interval``.
    """

    update_interval: Annotated[int | None, None]


class DistributedSyncArguments(CommonArguments, _WithWorkers, _Remote, _OverNetwork, total=False):
    """The arguments of `DistributedSyncCollector`.

    Attributes:
        update_interval: Number of batches between two updates of all nodes. An update is sent at
            the request for the next batch.
    """

    update_interval: Annotated[int, 1]


class RPCArguments(DistributedArguments, total=False):
    """The arguments of `RPCCollector`.

    Attributes:
        visible_devices: Retired, changes nothing.
        tensorpipe_options: Retired, changes nothing.
    """

    visible_devices: Annotated[Sequence[Any] | None, None]
    tensorpipe_options: Annotated[Mapping[str, Any] | None, None]


class RayArguments(
    CommonArguments, _WithWorkers, _Remote, _WeightIntervals, _NotOfNodes, total=False
):
    """The arguments of `RayCollector`.

    Attributes:
        ray_init_config: Arguments of `ray.init`, if this process is not yet connected to Ray;
            ``{"address": "auto"}`` connects to the cluster of this machine.
        remote_configs: Options of the actors: ``num_cpus`` (1 by default), ``num_gpus``,
            ``resources``, ``scheduling_strategy``, ``runtime_env``, …, or a list with one mapping
            per actor.
        num_collectors: Number of actors; not needed for a list of environments.
        use_env_creator: Accepted; factories of environments always travel by value.
    """

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
_DICTIONARIES = [
    found
    for found in tuple(globals().values())
    if is_typeddict(found) and "Attributes:" in (found.__doc__ or "")
]


@functools.cache
def definitions(kind: Any) -> dict[str, tuple[Any, Any]]:
    """Return type and default (`REQUIRED` if there is none) of the arguments of ``kind``.

    Args:
        kind: One of the dictionaries above.
    """
    found: dict[str, tuple[Any, Any]] = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if hint.__origin__ is Required:
            found = {name: (get_args(hint)[0], REQUIRED), **found}
        else:
            found[name] = hint.__origin__, hint.__metadata__[0]
    return found


def defaults(kind: Any) -> dict[str, Any]:
    """Return the defaults of the arguments that have one."""
    found = {name: default for name, (_, default) in definitions(kind).items()}
    return {name: default for name, default in found.items() if default is not REQUIRED}


def meanings(kind: Any) -> dict[str, str]:
    """Return the meanings of the arguments of ``kind``; nothing under ``python -OO``."""
    defined, found = definitions(kind), _described(kind)
    for other in _DICTIONARIES:
        there = definitions(other)
        for name, meaning in _described(other).items():
            if defined.get(name) == there[name]:
                found.setdefault(name, meaning)
    return found


def _described(kind: Any) -> dict[str, str]:
    attributes = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")[2]
    entries = re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", attributes, re.M)
    return {name: " ".join(meaning.split()) for name, meaning in entries}


TOPICS = {
    "Batches": "frames_per_batch total_frames init_random_frames cat_results split_trajs "
    "trajs_per_batch traj_format traj_quota track_traj_ids set_truncated compact_obs postproc "
    "return_same_td",
    "Environments": "num_envs create_env_kwargs max_frames_per_traj reset_at_each_iter "
    "categorical_action_encoding observation_dtype info_keys check_finite",
    "Policy": "policy_factory exploration_type trust_policy auto_register_policy_transforms fast "
    "compile_policy cudagraph_policy",
    "Weights": "weight_sync_schemes weight_recv_schemes track_policy_version update_at_each_batch "
    "update_after_each_batch max_weight_update_interval update_interval",
    "Replay buffer": "replay_buffer extend_buffer trajs_per_write",
    "Devices": "device storing_device policy_device env_device",
    "Workers": "backend num_collectors num_workers sync backend_options collector_class "
    "collector_kwargs num_workers_per_collector worker_idx init_fn num_threads num_sub_threads "
    "preemptive_threshold interruptor start_timeout timeout on_failure max_relaunches",
    "Nodes and actors": "launcher slurm_kwargs host tcp_port heartbeat ray_init_config "
    "remote_configs",
    "Hooks, progress, logs": "pre_collect_hook post_collect_hook progress logger",
    "Retired or without effect": "exploration_mode weight_updater replay_buffer_chunk "
    "local_init_rb reset_when_done use_buffers no_cuda_sync use_env_creator visible_devices "
    "tensorpipe_options",
}
"""What each argument is about, in the order in which `help` lists them."""
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
    defined, found = definitions(kind), meanings(kind)
    text = ""
    for topic, names in TOPICS.items():
        own = [name for name in names.split() if name in defined]
        text += f"\n    -- {topic} --\n" if own else ""
        for name in own:
            default = defined[name][1]
            equals = "" if default is REQUIRED else f"={default!r}"
            entry = f"{name}{equals}: {found[name]}"
            text += textwrap.indent(textwrap.fill(entry, 88, subsequent_indent="    "), "    ")
            text += "\n"
    return text


def documents_arguments(kind: Any) -> Callable[[Function], Function]:
    """Return a decorator: a constructor has each argument of ``kind``, as if written out."""
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
        return cast("Function", for_users(function))

    return decorate


def read(kind: Any, owner: str, arguments: Mapping[str, Any]) -> Arguments:
    """Complete the arguments passed to a collector.

    Args:
        kind: The dictionary of its arguments.
        owner: The name of its class, for errors.
        arguments: The arguments.

    Returns:
        Those of ``kind``, and the defaults of all that other collectors take.
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
            warn(
                f"{name}= is retired; use {newer}",
                DeprecationWarning,
            )
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
    InteractionType: "an ExplorationType, such as ExplorationType.MODE",
    Interruptor: "an Interruptor of gleanrl.collectors, whose flag workers share",
    PolicyVersion: "a PolicyVersion",
}
"""Types that an argument is checked for by its definition. Numbers, devices and objects of many
kinds are read where they are used."""


def typed(kind: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``arguments`` with flags as bools; NumPy's bools, 0 and 1 count as bools.

    Arguments that are not of the type that ``kind`` defines are refused; it may know others not.
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
    return read


def check(arguments: Arguments) -> None:
    """Find contradictions between arguments, before anything is built."""
    for wrong, message in _contradictions(arguments):
        if wrong:
            raise ArgumentTypeError(message)
    if arguments["traj_format"] not in ("padded", "cat"):
        raise ConfigError(f"traj_format ({arguments['traj_format']!r}) must be 'padded' or 'cat'")
    if arguments["traj_quota"] not in (None, "equal"):
        raise ConfigError(f"traj_quota ({arguments['traj_quota']!r}) must be 'equal' or None")
    if arguments["timeout"] is not None:
        seconds("timeout", arguments["timeout"])
    seconds("start_timeout", arguments["start_timeout"])
    if isinstance(makers := arguments["policy_factory"], Sequence):
        check_callables(**{f"policy_factory[{i}]": maker for i, maker in enumerate(makers)})
    check_schemes(arguments["weight_sync_schemes"])


def _contradictions(arguments: Arguments) -> Iterator[tuple[object, str]]:
    """Yield each possible contradiction and its message."""
    whole = arguments["trajs_per_batch"] is not None
    apart = arguments["split_trajs"] or whole
    yield (
        apart and not arguments["track_traj_ids"],
        "split_trajs and trajs_per_batch need track_traj_ids=True",
    )
    yield (
        arguments["cat_results"] not in (None, "stack") and not arguments["track_traj_ids"],
        f"cat_results={arguments['cat_results']!r} puts rollouts of workers one after another, and "
        "only track_traj_ids=True tells where one ends; keep the ids, or leave cat_results out",
    )
    chunk, extend = arguments["replay_buffer_chunk"], arguments["extend_buffer"]
    yield (
        chunk not in (None, extend),  # its retired spelling
        f"replay_buffer_chunk ({chunk}) contradicts extend_buffer ({extend})",
    )
    yield (
        arguments["weight_updater"] is not None and arguments["weight_sync_schemes"] is not None,
        "give weight_sync_schemes or weight_updater, not both",
    )
    factory, quota = arguments["policy_factory"] is not None, arguments["traj_quota"] is not None
    yield (
        arguments["weight_updater"] is not None and arguments["policy"] is not None and factory,
        "policy and policy_factory exclude each other with a weight_updater; drop it, and weights "
        "are taken from policy",
    )
    yield (
        arguments["set_truncated"] and whole,
        "set_truncated=True would cut trajectories where batches end; it excludes trajs_per_batch, "
        "which delivers whole ones",
    )
    yield (
        quota and not whole,
        "traj_quota shares out whole trajectories: it needs trajs_per_batch",
    )
    yield (
        arguments["traj_format"] == "cat" and not whole,
        "traj_format='cat' needs trajs_per_batch",
    )
    yield (
        whole and arguments["split_trajs"],
        "trajs_per_batch already delivers whole trajectories; drop split_trajs",
    )
    yield (
        quota and arguments["replay_buffer"] is not None,
        "traj_quota is for batches that are handed over; into a replay_buffer trajectories go as "
        "they are completed",
    )
    yield (
        arguments["trajs_per_write"] is not None
        and not (whole and arguments["replay_buffer"] is not None),
        "trajs_per_write says how many whole trajectories are written at once: it needs "
        "replay_buffer and trajs_per_batch",
    )
    yield (
        quota and arguments["reset_at_each_iter"],
        "reset_at_each_iter=True drops trajectories that outlast a batch, so that short ones are "
        "preferred; it excludes traj_quota",
    )
    yield (
        arguments["return_same_td"] and apart,
        "return_same_td=True needs batches of one shape; it excludes split_trajs and "
        "trajs_per_batch",
    )
    yield (
        not arguments["reset_when_done"],
        "reset_when_done=False is not supported: environments that end are always reset; use "
        "split_trajs=True or trajs_per_batch= to get whole trajectories, or the rollout("
        "break_when_any_done=True) of an environment",
    )
    buffer = arguments["replay_buffer"]
    stores = buffer is not None  # in place of delivered batches
    yield (
        arguments["compact_obs"] and isinstance(buffer, ReplayBuffer) and buffer.storage.compact,
        "compact_obs=True leaves out what the compact replay_buffer needs where an episode or a "
        "rollout ends: drop it, the buffer stores each observation once by itself",
    )
    yield (
        stores and arguments["use_buffers"],
        "use_buffers=True and replay_buffer exclude each other",
    )
    yield (
        stores and arguments["return_same_td"],
        "return_same_td=True and replay_buffer exclude each other: nothing is returned",
    )
    yield (
        stores and not extend and (apart or arguments["postproc"] is not None),
        "extend_buffer=False stores steps as they were made; it excludes split_trajs, "
        "trajs_per_batch and postproc, which work on whole batches",
    )


def check_callables(**arguments: Any) -> None:
    """Raise an error unless hooks and factories are callable."""
    for name, value in arguments.items():
        if value is not None and not callable(value):
            raise ConfigError(f"{name} ({value!r:.100}) must be callable")


def check_schemes(schemes: Mapping[str, Any] | None) -> None:
    """Raise an error unless ``schemes`` maps model ids to weight sync schemes."""
    if schemes is not None and not isinstance(schemes, Mapping):
        raise ConfigError(
            f"weight sync schemes ({schemes!r:.100}) must be a mapping from model id to scheme"
        )
    for name, scheme in (schemes or {}).items():
        if not isinstance(scheme, WeightSyncScheme):
            raise ConfigError(
                f"the weight sync scheme of {name!r} is a {type(scheme).__name__}, not a "
                "WeightSyncScheme"
            )


def read_version(track: bool | PolicyVersion) -> PolicyVersion | None:
    """Return the version counter to show, or ``None``."""
    if isinstance(track, PolicyVersion):
        return track
    return PolicyVersion() if track else None


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

_MEANINGS = {name: doc for kind in _COLLECTORS.values() for name, doc in meanings(kind).items()}
_TYPES = {
    name: hint for kind in _COLLECTORS.values() for name, (hint, _) in definitions(kind).items()
}


def argument_property(name: str, read: Callable[[Any], Any] | None = None, doc: str = "") -> Any:
    """Return a read-only property of collectors: an argument of the constructor.

    Args:
        name: Of the argument.
        read: What is shown of it; by default it is shown as it was given.
        doc: By default what the argument means.
    """

    def get(collector: Any) -> Any:
        value = collector._arguments[name]
        return value if read is None else read(value)

    def refuse(collector: Any, value: Any) -> None:
        raise AttributeError(
            f"this attribute of a {type(collector).__name__} is read-only: give {name}= to the "
            "constructor"
        )

    get.__annotations__["return"] = bool if read is bool else _TYPES.get(name)
    return property(get, refuse, doc=doc or _MEANINGS.get(name))


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
