"""The collector and the policy of some options, for ``collect`` and ``bench``."""

from __future__ import annotations

import importlib.util
import inspect
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from gleanrl.cli.command_options import CollectOptions
from gleanrl.cli.display import plural
from gleanrl.collectors import BaseCollector, Collector, Interruptor
from gleanrl.collectors.worker_plan import check_counts
from gleanrl.core.errors import ConfigError, note

RANDOM = "random"
"""The name for no policy."""
_BATCH_FRAMES = 500
_WORKER_FRAMES = 1000
"""A larger number, because a batch of several processes costs a transfer and a wait."""
_MIN_STEPS = 8


def described(options: CollectOptions) -> str:
    """Return a short description of the places of the environments."""
    envs, count = plural(options.num_envs, "environment"), options.processes
    if not count:
        return f"{envs} in this process"
    kind = "worker" if options.backend == "process" else f"{options.backend} node"
    kind = f"asynchronous {kind}" if options.asynchronous else kind
    place = f"{plural(count, kind)} with {envs}{' each' * (count > 1)}"
    return f"{place}, one policy, {plural(options.central, 'group')}" if options.central else place


def check(options: CollectOptions) -> None:
    """Refuse contradictions, and sizes beyond this machine's memory, before building anything."""
    if options.format != "tensordict" and options.out is None:
        raise ConfigError(f"--format {options.format} needs --out DIR: without it nothing is kept")
    over_nodes, count = options.backend != "process", options.processes
    if over_nodes and options.nodes is None:
        raise ConfigError(f"--backend {options.backend} needs --nodes N")
    if over_nodes and options.workers is not None:
        raise ConfigError(
            "--workers counts processes of this machine: use --nodes for nodes, and --num-envs for "
            "the environments of each"
        )
    if options.nodes is not None and not over_nodes:
        raise ConfigError("--nodes needs --backend distributed or --backend ray")
    if options.launcher != "mp" and options.backend != "distributed":
        raise ConfigError(f"--launcher {options.launcher} needs --backend distributed")
    if options.asynchronous and not count:
        raise ConfigError("--async is about worker processes: say how many with --workers N")
    if options.central and (over_nodes or not count):
        raise ConfigError("--central G needs --workers N, and no nodes")
    if options.central and options.num_envs % options.central:
        raise ConfigError(f"--central {options.central} must divide --num-envs {options.num_envs}")
    if not over_nodes:  # nodes may be on other machines
        advice = "ask for fewer (--num-envs, --workers)"
        check_counts(options.num_envs, count, described(options), advice)


def batch_steps(options: CollectOptions, most: int) -> int:
    """Return the steps of a batch that shows progress often, at most ``most``."""
    frames = _WORKER_FRAMES if options.processes else _BATCH_FRAMES
    return min(most, max(_MIN_STEPS, frames // options.num_envs))


def make(
    options: CollectOptions,
    policy: Any,
    frames_per_batch: int,
    total_frames: int = -1,
    interruptor: Interruptor | None = None,
) -> BaseCollector:
    """Start a collector."""
    more: dict[str, Any] = {}
    if options.processes:
        more |= {"backend": options.backend, "num_collectors": options.processes}
        more["sync"] = not options.asynchronous
    if options.backend == "distributed":
        more["backend_options"] = {"launcher": options.launcher}
    if options.central:
        inside = {"env_groups": options.central, "policy_process": False}  # for the interruptor
        more |= {"inference": "central", "backend_options": inside}
    if options.backend == "process":
        more["interruptor"] = interruptor
    return Collector(
        options.env,
        policy,
        frames_per_batch=frames_per_batch,
        total_frames=total_frames,
        num_envs=options.num_envs if options.num_envs > 1 else None,
        **more,
    )


def command(options: CollectOptions) -> str:
    """Return the ``gleanrl collect`` command that collects like this."""
    parts = ["gleanrl", "collect", options.env]
    parts += [] if options.policy == RANDOM else ["--policy", options.policy]
    parts += ["--workers", str(options.workers)] if options.workers else []
    parts += ["--num-envs", str(options.num_envs)] if options.num_envs > 1 else []
    parts += ["--central", str(options.central)] if options.central else []
    return shlex.join([*parts, *(["--async"] if options.asynchronous else [])])


def call(options: CollectOptions, frames_per_batch: int) -> str:
    """Return the Python call that collects like this; ``policy`` stands for the user's."""
    parts = [repr(options.env)] + ["policy"] * (options.policy != RANDOM)
    parts += [f"num_workers={options.workers}"] if options.workers else []
    parts += [f"num_envs={options.num_envs}"] if options.num_envs > 1 else []
    if options.central:
        parts += ["inference='central'", f"env_groups={options.central}"]
    kind = f"Multi{'Async' if options.asynchronous else 'Sync'}" if options.workers else ""
    return f"{kind}Collector({', '.join(parts)}, frames_per_batch={frames_per_batch})"


def default_workers(cores: int) -> tuple[int, ...]:
    """Return the numbers of workers worth trying.

    >>> default_workers(1), default_workers(2), default_workers(16)
    ((1,), (2,), (8, 16))
    """
    return tuple(sorted({max(cores // 2, min(cores, 2)), cores}))


def load_policy(text: str) -> Any:
    """Return the policy that ``text`` names; ``None`` acts at random.

    The file is run. A class, or a function without parameters to fill, is called to make the
    policy; anything else that can be called is the policy itself.
    """
    if text == RANDOM:
        return None
    file, found, name = text.rpartition(":")
    path = Path(file)
    if not found or not name.isidentifier() or path.suffix != ".py":
        raise ConfigError(f"--policy {text!r} is neither 'random' nor FILE.py:NAME")
    if not path.is_file():
        raise ConfigError(f"--policy {text!r}: there is no file {file!r}")
    try:
        defined = vars(_run(path))
        made: Any = defined.get(name)
        if _makes_policy(made):
            made = made()
    except Exception as err:
        note(err, f"--policy {text!r} raised this when it was made")
        raise
    if name not in defined:
        raise ConfigError(f"--policy {text!r}: {file} does not define {name!r}")
    if not callable(made):
        raise ConfigError(f"--policy {text!r}: a {type(made).__name__} cannot be called")
    return made


def _run(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up in `sys.modules`, and modules next to the file should be
    # importable, as if the file had been run as a script.
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    return module


def _makes_policy(made: Any) -> bool:
    if isinstance(made, nn.Module) or not callable(made):
        return False
    if inspect.isclass(made):
        return True
    try:
        parameters = inspect.signature(made).parameters.values()
    except ValueError:
        return False
    # ``*args`` is a parameter to fill: a policy may be written that way.
    return all(p.kind is p.VAR_KEYWORD or p.default is not p.empty for p in parameters)
