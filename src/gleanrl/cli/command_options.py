"""The commands and their options: a dataclass per command is its parser and help."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable, Collection
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from gleanrl.recording.formats import FORMATS

# -- readers ---------------------------------------------------------------------------------------


def _number(text: str) -> float:
    """Return the value of ``text``, NaN if it is not a number."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _integer(least: int, most: float, range_text: str) -> Callable[[str], int]:
    def read(text: str) -> int:
        value = _number(text)
        if value.is_integer() and least <= value <= most:
            return int(value)
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {range_text}")

    return read


count = _integer(1, math.inf, "of 1 or more")
"""Reads a number of things: ``10000``, ``10_000`` or ``1e4``."""
index = _integer(0, math.inf, "of 0 or more")
seed = _integer(0, 2**32 - 1, "from 0 to 2**32 - 1")
port = _integer(1, 2**16 - 1, "from 1 to 65535")


def counts(text: str) -> tuple[int, ...]:
    """Read numbers of things, each once.

    >>> counts("4,1e1,4")
    (4, 10)
    """
    return tuple(sorted({count(part.strip()) for part in text.split(",")}))


def seconds(text: str) -> float:
    """Read a positive number of seconds."""
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return value


def address(text: str) -> tuple[str, int]:
    """Read a host and a port.

    >>> address("10.0.0.5:10003"), address("[::1]:1")
    (('10.0.0.5', 10003), ('::1', 1))
    """
    host, _, number = text.rpartition(":")
    with contextlib.suppress(argparse.ArgumentTypeError):
        if host:
            return host.strip("[]"), port(number)
    raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT, such as 10.0.0.5:10003")


# -- fields ----------------------------------------------------------------------------------------


def option(metavar: str, read: Any, help: str, default: Any = None, flag: str = "") -> Any:
    """Return the field of an option.

    Args:
        metavar: The placeholder of its value in ``--help``.
        read: The reader of the value, or the values to choose from; ``bool`` for a flag alone.
        help: Its meaning.
        default: Its value if it is not given; ``--help`` shows it.
        flag: How it is written, if not as the field is called.
    """
    settings: dict[str, Any] = {"flag": flag, "help": help}
    if default is not None:
        settings["help"] += f" (default: {_shown(default)})"
    if read is bool:
        default, settings["action"] = False, "store_true"
    elif isinstance(read, Collection):
        settings["choices"] = read
    else:
        settings |= {"type": read, "metavar": metavar}
    return field(default=default, metadata=settings)


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return value if isinstance(value, str) else f"{value:,g}"


def argument(metavar: str, read: Any, help: str, default: Any = MISSING) -> Any:
    """Return the field of a positional argument, which is optional if it has a default."""
    settings = {"metavar": metavar, "type": read, "help": help}
    if default is not MISSING:
        settings["nargs"] = "?"
    return field(default=default, metadata=settings)


def add_options(parser: argparse.ArgumentParser, options: type) -> None:
    """Add every `option` and `argument` among the fields of ``options`` to ``parser``."""
    for item in fields(options):
        settings = dict(item.metadata)
        if "flag" in settings:
            flag = settings.pop("flag") or f"--{item.name.replace('_', '-')}"
            parser.add_argument(flag, dest=item.name, default=item.default, **settings)
        elif settings:
            parser.add_argument(item.name, **settings)


# -- commands: the first line of a docstring is shown in the list of commands ----------------------


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The policy and the environments of a command."""

    env: str = argument("ENV", str, "Gymnasium id, such as CartPole-v1")
    policy: str = option(
        "random|FILE.py:NAME",
        str,
        "the policy: 'random', or NAME in a Python file, which is an nn.Module, a callable, or a "
        "class or function without arguments that makes one",
        "random",
    )


@dataclass(frozen=True, kw_only=True)
class CollectOptions(RunOptions):
    """Run a policy in an environment and show returns and speed; --out keeps the frames.

    ENV is a Gymnasium id; 'module:id' imports the module that registers it first.

    Examples:
      gleanrl collect CartPole-v1
          act at random for 10,000 frames and print returns and speed
      gleanrl collect Pendulum-v1 --num-envs 8 --frames 100_000 --out data/pendulum
          keep the frames as a memory-mapped TensorDict; load them with
          gleanrl.load_dataset("data/pendulum"); --format parquet or minari for others
      gleanrl collect CartPole-v1 --policy my_policy.py:make_policy --seed 0
          call make_policy() for the policy; the same seed gives the same frames
      gleanrl collect CartPole-v1 --workers 4 --num-envs 16
          64 environments in four processes; with --async no worker waits for another
          ('gleanrl bench' finds the fastest numbers on this machine)
      gleanrl collect CartPole-v1 --backend distributed --nodes 8 --launcher submitit --async
          eight Slurm jobs; with --backend ray, eight actors

    Frames of several environments are stored batch by batch, within a batch environment by
    environment, and within an environment step by step. ("collector", "traj_ids") is the number of
    the episode; modulo the number of environments it is the number of the environment.

    Ctrl-C stops after the current step and keeps all frames collected until then.
    """

    num_envs: int = option("N", count, "environments that are stepped together, in each worker", 1)
    workers: int | None = option(
        "N",
        count,
        "worker processes, with --num-envs environments each (default: none, everything in this "
        "process)",
    )
    central: int | None = option(
        "G",
        count,
        "one policy acts for the environments of all --workers, which it has in G groups: one "
        "steps while it acts in another",
    )
    explain: bool = option(
        "", bool, "list the parts of ENV and policy that are called unmodified; collect nothing"
    )
    asynchronous: bool = option(
        "",
        bool,
        "take each rollout of a worker or node on arrival, instead of one of each at a time",
        flag="--async",
    )
    backend: str = option(
        "",
        ("process", "distributed", "ray"),
        "kind of workers: processes of this machine, nodes over torch.distributed, or Ray actors",
        "process",
    )
    nodes: int | None = option(
        "N", count, "nodes of --backend distributed or ray, with --num-envs environments each"
    )
    launcher: str = option(
        "",
        ("mp", "submitit"),
        "kind of distributed nodes: processes of this machine, or Slurm jobs",
        "mp",
    )
    frames: int = option(
        "N", count, "frames over all environments, rounded up to whole batches", 10_000
    )
    frames_per_batch: int | None = option(
        "N", count, "frames between two updates of the display (default: chosen to fit)"
    )
    seed: int | None = option(
        "S", seed, "seed of environments and policy (default: drawn, and printed)"
    )
    out: Path | None = option("DIR", Path, "keep the frames in DIR, a new directory")
    format: str = option(
        "",
        FORMATS,
        "format of the dataset in --out: a memory-mapped TensorDict, a Minari dataset (its "
        "directory ends in NAME-v0), or Parquet files",
        "tensordict",
    )
    command: str = ""
    """The command line that repeats this command."""

    @property
    def processes(self) -> int:
        """Worker processes, nodes or actors; 0 for everything in this process."""
        return self.workers or self.nodes or 0

    @property
    def num_envs_total(self) -> int:
        """Environments that one batch spans."""
        return self.num_envs * (1 if self.asynchronous else max(1, self.processes))


@dataclass(frozen=True, kw_only=True)
class BenchOptions(RunOptions):
    """Try numbers of workers and environments, and print the fastest on this machine.

    Each setting runs for some seconds: environments in this process, in synchronous workers, and
    the fastest of these as asynchronous workers and, if there is a policy, with one policy for all
    workers. No learner runs meanwhile. While a learner is busy, asynchronous workers collect and
    synchronous ones wait. env, policy and wait are shares of the time of a worker, or of this
    process where the policy is here: a worker that waits for a slow policy pays as policy.

    Examples:
      gleanrl bench CartPole-v1
          settings that suit the number of cores, random actions
      gleanrl bench CartPole-v1 --policy my_policy.py:make_policy --seconds 10
      gleanrl bench Pendulum-v1 --workers 1,2,4 --num-envs 1,8,32 --out bench.json
    """

    seconds: float = option("S", seconds, "seconds per setting", 3.0)
    workers: tuple[int, ...] | None = option(
        "LIST", counts, "numbers of worker processes to try (default: half the cores and all)"
    )
    num_envs: tuple[int, ...] = option(
        "LIST", counts, "numbers of environments to try, of each worker", (1, 4, 16)
    )
    out: Path | None = option("FILE.json", Path, "keep the figures in a new file")


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """Describe a dataset of 'collect --out' or a Recorder, and plot its returns.

    Examples:
      gleanrl inspect data/pendulum
      gleanrl inspect data/pendulum --plot pendulum.png
      gleanrl inspect data/pendulum --html pendulum.html
          returns, their distribution and episode lengths, to look at in a browser

    Nothing in the directory is executed or unpickled.
    """

    directory: Path = argument("DIR", Path, "the directory of the dataset")
    plot: Path | None = option(
        "FILE.png", Path, "file of the plot of returns over frames (default: DIR/returns.png)"
    )
    html: Path | None = option(
        "FILE.html", Path, "write a page of plots: one file that needs no network"
    )


@dataclass(frozen=True, kw_only=True)
class TopOptions:
    """Watch a running collection: workers, rates, returns and shares of time.

    Collectors of the same user need no preparation; GLEANRL_TOP=0 in their environment disables
    this. Without PID, the command lists the processes if several collect. q or Ctrl-C ends it.

    env, policy, transfer and wait are shares of a worker's time. lag is the age of the newest
    batch's weights, in policy versions. Returns and lengths are means of the last 100 episodes.

    Examples:
      gleanrl top
      gleanrl top 4711 --every 5
      gleanrl top --once
      gleanrl top --json | jq '.[0].stats.fps'
    """

    pid: int | None = argument(
        "PID", count, "the process to watch (default: the only one that collects)", None
    )
    once: bool = option("", bool, "print the state once, as text, and end")
    json: bool = option("", bool, "print the state once, as JSON, and end")
    every_s: float = option("S", seconds, "seconds between two updates", 1.0, "--every")


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Check whether this machine is fit for collecting, and name the fix of what is wrong.

    Checks limits, threads, CUDA, the compiler, packages, the network, Ray and Slurm, and starts one
    worker. Nothing is changed. 'note' is something to know; only what is 'wrong' makes the exit
    code 1. Every check has a deadline.

    Examples:
      gleanrl doctor
      gleanrl doctor --json | jq '.[] | select(.status == "wrong") | .fix'
    """

    json: bool = option("", bool, "print the results as JSON: a list of name, status, found, fix")


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """Run environments and policy of a DistributedCollector as one of its nodes.

    A collector with launcher="manual" prints these commands. The learner's secret must be in the
    environment variable GLEANRL_SECRET. Without --node, the number of the node comes from
    GLEANRL_NODE, SLURM_PROCID, OMPI_COMM_WORLD_RANK, PMI_RANK or JOB_COMPLETION_INDEX.

    Examples:
      gleanrl node 10.0.0.5:10003 --node 0
      mpirun -n 8 -x GLEANRL_SECRET gleanrl node 10.0.0.5:10003

    The node ends with its learner. On SIGTERM it reports to the learner and ends after the current
    step.
    """

    address: tuple[str, int] = argument("HOST:PORT", address, "address of the learner")
    node: int | None = option(
        "N", index, "number of the node, from 0 (default: from the environment)"
    )
    wait_s: float = option("S", seconds, "seconds to try to reach the learner", 120.0, "--wait")


COMMANDS: dict[str, type[Any]] = {
    "collect": CollectOptions,
    "bench": BenchOptions,
    "inspect": InspectOptions,
    "top": TopOptions,
    "doctor": DoctorOptions,
    "node": NodeOptions,
}
"""The options of each command; its function is ``run`` in ``NAME_command.py``."""
