"""What a case is, and how one is drawn."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any

import gleanrl

GAMMA = 0.5
N_STEPS = 3
"""What `MultiStep` is built with."""

BACKENDS = ("here", "sync", "async", "nodes")
SHARES = (10, 5, 4, 2)
ENVS: tuple[str, ...] = (
    "fresh",
    "reused",
    "shared",
    "dict",
    "double",
    "native",
    "agents",
    "torchrl",
)
POOLS = ("NextStep", "SameStep", "Disabled", "NextStep shared", "SameStep reused")
POLICIES: tuple[str, ...] = ("linear", "module", "opaque", "recurrent", "initial")
POLICIES += ("drawing", "typed", "carrying", "cached", "numpy", "random", "perturbed")
SINKS = ("batches", "buffer", "rows", "slices", "priorities", "recorder")
EVENTS: tuple[str, ...] = ("update", "some", "each", "seed", "reset", "reload", "state", "hold")
EVENTS += ("globals", "stats", "rollout", "silent", "evaluate")


@dataclass(frozen=True)
class Case:
    """One collector and what happens to it; written as JSON to be repeated."""

    backend: str = "here"
    env: str = "fresh"
    """A kind of environment, or how a pool resets."""
    policy: str = "linear"
    envs: int = 1
    """Of each worker."""
    workers: int = 1
    steps: int = 4
    """Of each environment per batch."""
    draws: bool = False
    fast: bool = True
    seed: int | None = None
    sink: str = "batches"
    """Where frames go: to the learner, or into a kind of buffer."""
    background: bool = False
    """Whether `start` fills the sink."""
    writers: int = 1
    """Collectors that fill the sink: in turns, or in the background one after the other."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the collector, as `tools.hunt.build` reads them."""
    events: tuple[str, ...] = ()
    """What happens after each batch; empty for nothing."""

    @property
    def early(self) -> bool:
        """Whether environments reset in their next step."""
        return self.env.startswith("NextStep")

    @property
    def every_call_shows(self) -> bool:
        """Whether a call of environment or policy changes later frames even if no frame has it."""
        return self.draws or self.policy in ("drawing", "random", "carrying")

    @property
    def preempted(self) -> bool:
        """Whether rollouts are stopped because other workers have ended theirs."""
        return bool(self.options.get("preemptive_threshold", 1.0) < 1.0)

    @property
    def pool(self) -> bool:
        """Whether the environment is a vector environment."""
        return self.env in POOLS

    @property
    def central(self) -> bool:
        """Whether one policy acts for the environments of all workers."""
        return "inference" in self.options

    @property
    def own_policy(self) -> bool:
        """Whether the learner's own module acts, so that its weights need not be sent."""
        made = {"policy_process", "policy_factory"} & set(self.options)
        moved = "standin" in (self.options.get("device"), self.options.get("policy_device"))
        inside = self.backend == "here" or (self.central and not made and not moved)
        return inside and not self.background

    @property
    def together(self) -> bool:
        """Whether a batch holds rollouts of all workers."""
        return self.backend == "sync" or bool(self.options.get("sync"))

    @property
    def frames(self) -> int:
        """Frames of a batch."""
        return self.steps * self.envs * (self.workers if self.together else 1)

    @property
    def deterministic(self) -> bool:
        """Whether the same case gives the same bits again."""
        known = self.backend in ("here", "sync") and self.seed is not None
        free = {"num_workers", "preemptive_threshold"} & set(self.options)
        # Groups share the generators of a worker, from which these environments draw.
        free |= {"draws"} if self.draws and self.options.get("env_groups") == 2 else set()
        return known and not free and self.sink == "batches"

    def json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


Draw = Callable[[random.Random, Case], Any]


def _always(value: Any) -> Draw:
    return lambda chance, case: value


def _one_of(*values: Any) -> Draw:
    return lambda chance, case: chance.choice(values)


OPTIONS: dict[str, Draw] = {
    "max_frames_per_traj": lambda chance, case: chance.randint(1, 6),
    "init_random_frames": lambda chance, case: case.frames * chance.randint(1, 2),
    "reset_at_each_iter": _always(True),
    "postproc": _one_of("scaled", "scaled", "multistep"),
    "split_trajs": _one_of(True, False),
    "exploration_type": _one_of("MODE", "DETERMINISTIC", "RANDOM"),
    "exploration_mode": _always("mode"),
    "set_truncated": _always(True),
    "extend_buffer": _always(False),
    "trust_policy": _one_of(True, False),
    "weight_updater": _always("VanillaWeightUpdater"),
    "weight_sync_schemes": _one_of("SharedMemWeightSyncScheme", "MultiProcessWeightSyncScheme"),
    "track_policy_version": _one_of(False, "counter"),
    "track_traj_ids": _always(False),
    "trajs_per_batch": lambda chance, case: chance.randint(1, 5),
    "trajs_per_write": lambda chance, case: chance.randint(1, 3),
    "traj_format": _one_of("cat", "padded"),
    "traj_quota": _always("equal"),
    "pre_collect_hook": _always("draw"),
    "post_collect_hook": _always("check"),
    "compact_obs": _always(True),
    "categorical_action_encoding": _one_of(True, False),
    "observation_dtype": _always("float32"),
    "info_keys": _always(["label"]),
    "check_finite": _always(True),
    "timeout": _always(50.0),
    "progress": _always("hunting"),
    "logger": _always("csv"),
    "total_frames": lambda chance, case: case.frames * chance.randint(1, 4) + chance.randint(0, 3),
    "reset_when_done": _always(True),
    "use_buffers": _one_of(True, False, None),
    "local_init_rb": _one_of(True, False),
    "auto_register_policy_transforms": _always(True),
    "no_cuda_sync": _one_of(True, False),
    "worker_idx": _always(0),
    "policy_factory": _always("make"),
    "device": _one_of("cpu", "standin"),
    "storing_device": _one_of("cpu", "standin"),
    "policy_device": _one_of("cpu", "standin"),
    "env_device": _always("cpu"),
    "create_env_kwargs": _always({"bonus": 0.5}),
    "return_same_td": _always(True),
    "interruptor": _always("idle"),
    "front_door": _always(True),
    "collector_class": lambda chance, case: chance.choice(
        ["single", "sync", "async"] if case.backend == "nodes" else ["Collector", "Subclass", None]
    ),
    "num_sub_threads": _one_of(1, 2),
    "cat_results": _one_of("stack", 0, -1),
    "init_fn": _always("mark"),
    "start_timeout": _always(50.0),
    "num_workers": _always(True),
    "update_at_each_batch": _always(True),
    "preemptive_threshold": _one_of(0.5, 1.0),
    "num_threads": _one_of(1, 2),
    "collector_kwargs": _always({"check_finite": True}),
    "num_workers_per_collector": _always(2),
    "on_failure": _one_of("raise", "continue", "relaunch"),
    "max_relaunches": _one_of(1, 2),
    "sync": _one_of(True, False),
    "update_after_each_batch": _always(True),
    "max_weight_update_interval": _one_of(1, 2),
    "update_interval": _one_of(1, 2),
    "heartbeat": _always(30.0),
    "inference": _always("central"),
    "env_groups": _one_of(1, 2),
    "policy_process": _always(True),
    "max_batch_size": lambda chance, case: chance.randint(1, 4),
    "min_batch_size": lambda chance, case: chance.randint(1, 2),
    "max_wait_s": _one_of(0.001, 0.005),
    "max_ahead": _one_of(1, 2),
    "transition_chunk_size": lambda chance, case: chance.randint(1, case.frames),
}
"""How each argument is drawn. ``front_door`` covers the four that choose a class."""
ALWAYS = {"create_env_fn", "policy", "frames_per_batch", "fast", "num_envs", "replay_buffer"}
ALWAYS |= {"backend", "launcher", "num_collectors", "backend_options"}
"""Arguments that a case has as fields, or that its backend decides."""
EXCUSED = {
    "compile_policy": "compiling takes seconds; tests/unit/test_policies_equal.py has it",
    "cudagraph_policy": "needs a CUDA device",
    "weight_recv_schemes": "concerns collectors inside workers, tests/processes/test_nested.py",
    "preemption_path": "ends the process, tests/processes/test_preemption.py",
    "grace": "belongs to preemption_path",
    **dict.fromkeys(
        ("on_env_error", "max_env_restarts"),
        "tests/unit/test_env_restarts.py has faults of its own",
    ),
    **dict.fromkeys(
        ("worker_affinity", "driver_affinity"), "changes no frame; tests/processes/test_affinity.py"
    ),
    "max_lag": "discards by chance; tests/processes/test_multi_laws.py",
    "slurm_kwargs": "needs Slurm, tests/distributed/test_launchers.py",
    "tcp_port": "ports of this machine are not the hunt's to choose",
    "replay_buffer_chunk": "another name of extend_buffer",
    "host": "addresses of this machine are not the hunt's to choose",
}
_REGROUPS = ("trajs_per_batch", "trajs_per_write")
ASYNC_CENTRAL: tuple[str, ...] = ("max_batch_size", "min_batch_size", "max_wait_s", "max_ahead")
ASYNC_CENTRAL += ("transition_chunk_size",)
_NEEDS_SINK = ("extend_buffer", "trajs_per_write")
_REGROUPED = "split_trajs init_random_frames preemptive_threshold extend_buffer track_traj_ids"
_REGROUPED += " compact_obs set_truncated"
APART = {
    "trajs_per_batch": f"{_REGROUPED} reset_at_each_iter return_same_td postproc",
    "trajs_per_write": _REGROUPED,
    "postproc": "compact_obs post_collect_hook",
    "split_trajs": "track_traj_ids return_same_td extend_buffer",
    "exploration_type": "exploration_mode",
    "weight_updater": "weight_sync_schemes policy_factory update_at_each_batch",
    "max_weight_update_interval": "update_interval",
    "front_door": "collector_class num_workers",
    "interruptor": "preemptive_threshold collector_class",
}
"""Arguments that contradict each other, or that leave the checks nothing to say."""
_PAIRS = [{one, other} for one, others in APART.items() for other in others.split()]


def allowed(case: Case, name: str) -> bool:
    """Tell whether an argument goes with the rest of a case; the collector's class is asked too."""
    drawn = case.options
    apart = any(name in pair and (pair - {name}) & set(drawn) for pair in _PAIRS)
    native = case.env in ("native", "agents", "torchrl")
    rules = {
        "traj_format": "trajs_per_batch" in drawn,
        "traj_quota": "trajs_per_batch" in drawn and case.sink == "batches",
        "num_workers_per_collector": drawn.get("collector_class") in ("sync", "async"),
        "max_relaunches": drawn.get("on_failure") == "relaunch",
        "create_env_kwargs": not case.pool and "num_workers" not in drawn,
        "info_keys": not native and case.policy not in ("module", "numpy"),
        "observation_dtype": not native,
        "categorical_action_encoding": not native,
        "policy_factory": case.policy != "random" and case.backend != "here",
        "trust_policy": case.policy not in ("module", "numpy", "random"),
        "init_random_frames": case.policy not in ("recurrent", "initial") and case.writers == 1,
        "logger": case.writers == 1,
        "weight_updater": case.backend in ("sync", "async") and case.policy != "random",
        "weight_sync_schemes": case.backend in ("sync", "async"),
        "update_at_each_batch": case.policy != "random",
        "cat_results": case.together,
        # Rows of an [env, time] storage have equally many steps.
        "preemptive_threshold": case.together and case.sink != "rows",
        "compact_obs": case.sink == "batches",
        "max_frames_per_traj": case.env != "torchrl",
        "total_frames": not case.background,
        "postproc": case.sink == "batches" and case.policy != "random",
        "set_truncated": not case.pool,
        "front_door": case.backend in ("sync", "async"),
        "reset_at_each_iter": not case.background,
        "return_same_td": case.sink == "batches",
        "num_workers": case.backend in ("sync", "async") and not case.pool,
        "trajs_per_batch": case.policy != "random",
        "trajs_per_write": "trajs_per_batch" in drawn,
        "split_trajs": case.sink != "rows",
        "use_buffers": case.sink == "batches",
        "extend_buffer": case.sink not in ("slices", "priorities"),
        "track_traj_ids": case.sink != "slices",
        # The environment perturbs the learner's policy, of which another device has a copy.
        "device": case.policy != "perturbed",
        "policy_device": case.policy != "perturbed",
        "inference": case.backend in ("sync", "async"),
        "env_groups": case.central and case.envs % 2 == 0,
        "policy_process": case.central,
        **dict.fromkeys(("worker_idx", "init_fn"), not case.central),
        **dict.fromkeys(ASYNC_CENTRAL, case.central and case.backend == "async"),
    }
    sink = case.sink not in ("batches", "recorder") or name not in _NEEDS_SINK
    return not apart and rules.get(name, True) and sink


def collector_class(case: Case) -> type:
    """Return the class of a case's collector."""
    if case.backend == "nodes":
        return gleanrl.DistributedCollector
    kinds: dict[str, type] = {
        "here": gleanrl.Collector,
        "sync": gleanrl.MultiSyncCollector,
        "async": gleanrl.MultiAsyncCollector,
    }
    return kinds[case.backend]


@cache
def parameters_of(kind: type) -> frozenset[str]:
    """Return the names of the arguments of a class."""
    return frozenset(inspect.signature(kind).parameters)


def accepts(case: Case, name: str) -> bool:
    """Tell whether the collector of a case takes an argument; ``sync`` is drawn for nodes only."""
    if name == "sync":
        return case.backend == "nodes"
    return name == "front_door" or name in parameters_of(collector_class(case))


def draw(number: int) -> Case:
    """Draw the case of a number."""
    chance = random.Random(number)
    backend = chance.choices(BACKENDS, SHARES)[0]
    pools = backend == "here" and chance.random() < 0.3
    kinds = ENVS if backend == "here" or chance.random() < 0.1 else ENVS[:-1]
    env = chance.choice(POOLS if pools else kinds)
    unfit = {"module", "recurrent", "initial", "carrying", "numpy"} if env == "agents" else set()
    sink = chance.choice(SINKS) if chance.random() < 0.35 else "batches"
    background = sink != "batches" and chance.random() < 0.6
    # A parametrized module cannot be sent to a process.
    unfit |= {"cached"} if background or backend != "here" else set()
    unfit |= (
        {"perturbed"} if background or backend != "here" or sink != "batches" or pools else set()
    )
    policy = chance.choice([kind for kind in POLICIES if kind not in unfit])
    envs = chance.randint(2, 4) if pools else chance.randint(1, 4)
    case = Case(
        backend=backend,
        env=env,
        policy=policy,
        envs=1 if policy == "perturbed" else envs,
        workers=1 if backend == "here" else chance.randint(1, 3),
        steps=chance.choice([1, 2, 3, 5, 8, 20]),
        draws=chance.random() < 0.4,
        fast=chance.random() < 0.8,
        seed=chance.choice([None, chance.randint(0, 99)]),
        sink=sink,
        background=background,
        writers=2 if sink in ("slices", "buffer") and chance.random() < 0.5 else 1,
    )
    share = chance.choice([0.0, 0.03, 0.08, 0.15])
    names = [name for name in OPTIONS if accepts(case, name)]
    first = [name for name in names if name in ("sync", "inference", *_REGROUPS, "on_failure")]
    for name in first + [name for name in names if name not in first]:
        if chance.random() < share and allowed(case, name):
            value = OPTIONS[name](chance, case)
            case = replace(case, options=case.options | {name: value})
    if env == "double":
        case = replace(case, options=case.options | {"observation_dtype": "float32"})
    batches = chance.randint(2, 8)
    # A recorder has one collector; what a perturbed policy weighs is up to its environment.
    barred = {"reload"} if sink == "recorder" else set()
    barred |= {"update", "some", "each", "reload", "evaluate"} if policy == "perturbed" else set()
    may = tuple(event for event in EVENTS if event not in barred)
    share = chance.choice([0.0, 0.5, 0.5])
    events = tuple(chance.choice(may) if chance.random() < share else "" for _ in range(batches))
    return replace(case, events=events)


def simpler(case: Case) -> Iterator[Case]:
    """Yield cases that are a little simpler than ``case``."""
    for name in case.options:
        yield replace(case, options={k: v for k, v in case.options.items() if k != name})
    for at in range(len(case.events)):
        yield replace(case, events=case.events[:at] + case.events[at + 1 :])
        if case.events[at]:
            yield replace(case, events=(*case.events[:at], "", *case.events[at + 1 :]))
    plain = Case()
    for name in ("env", "policy", "draws", "fast", "seed", "background", "sink"):
        kept = name in ("env", "sink") and (case.pool or case.background)
        if getattr(case, name) != getattr(plain, name) and not kept:
            yield replace(case, **{name: getattr(plain, name)})
    for name in ("envs", "workers", "steps", "writers"):
        if (value := getattr(case, name)) > 1:
            yield replace(case, **{name: value - 1})
