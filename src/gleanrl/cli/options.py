"""What each command can be asked for: one dataclass per command, which is also its parser."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from gleanrl.recording.formats import FORMATS

# -- readers ---------------------------------------------------------------------------------------


def _integer(least: int, most: float, range_text: str) -> Callable[[str], int]:
    def read(text: str) -> int:
        digits = text.replace(",", "_")
        try:
            value: float = int(digits)
        except ValueError:
            try:
                value = float(digits)
            except ValueError:
                value = math.nan
        if not (value % 1 == 0 and least <= value <= most):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {range_text}")
        return int(value)

    return read


count = _integer(1, math.inf, "of 1 or more")
"""Reads a number of things: ``10000``, ``10_000``, ``10,000`` or ``1e4``."""
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
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return value


def address(text: str) -> tuple[str, int]:
    """Read a host and a port.

    >>> address("10.0.0.5:10003"), address("[::1]:1")
    (('10.0.0.5', 10003), ('::1', 1))
    """
    host, _, number = text.rpartition(":")
    try:
        if host:
            return host.strip("[]"), port(number)
    except argparse.ArgumentTypeError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT, such as 10.0.0.5:10003")


_FORMATS = tuple(FORMATS)
_FORMATS_HELP = (
    "a memory-mapped TensorDict (default), a Minari dataset (its directory ends in NAME-v0), or "
    "Parquet files"
)

# -- commands --------------------------------------------------------------------------------------


def option(text: str, read: Any, default: Any, help: str) -> Any:
    """Return the field of an option.

    Args:
        text: The flag, and what stands for its value in ``--help``.
        read: The reader of the value, or the values to choose from; ``bool`` for a flag alone.
        default: Its value if it is not given.
        help: What it means.
    """
    flag, *metavar = text.split(maxsplit=1)
    settings: dict[str, Any] = {"help": help}
    if read is bool:
        settings["action"] = "store_true"
    elif isinstance(read, tuple):
        settings["choices"] = read
    else:
        settings |= {"type": read, "metavar": metavar[0]}
    return field(default=default, metadata={"flag": flag, **settings})


def argument(metavar: str, read: Any, help: str) -> Any:
    """Return the field of a positional argument."""
    return field(metadata={"flag": "", "metavar": metavar, "type": read, "help": help})


def optional_argument(metavar: str, read: Any, help: str) -> Any:
    """Return the field of a positional argument that may be left out."""
    settings = {"flag": "", "metavar": metavar, "type": read, "help": help, "nargs": "?"}
    return field(default=None, metadata=settings)


def add_options(parser: argparse.ArgumentParser, options: type) -> None:
    """Have ``parser`` read every field of ``options`` that is an `option` or `argument`."""
    for item in fields(options):
        settings = dict(item.metadata)
        if flag := settings.pop("flag", None):
            parser.add_argument(flag, dest=item.name, default=item.default, **settings)
        elif flag is not None:
            parser.add_argument(item.name, **settings)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What acts where."""

    env: str = argument("ENV", str, "Gymnasium id, such as CartPole-v1")
    policy: str = option(
        "--policy random|FILE.py:NAME",
        str,
        "random",
        "what acts: 'random' (default), or NAME in a Python file: an nn.Module, a callable, "
        "or a class or function that makes one when called without arguments",
    )


@dataclass(frozen=True, kw_only=True)
class CollectOptions(RunOptions):
    """``gleanrl collect``."""

    num_envs: int = option(
        "--num-envs N",
        count,
        1,
        "environments at once, of each worker if there are any (default: 1)",
    )
    workers: int | None = option(
        "--workers N",
        count,
        None,
        "worker processes, with --num-envs environments each (default: none, everything in "
        "this process)",
    )
    explain: bool = option(
        "--explain",
        bool,
        False,
        "say which parts of environment and policy are called as they are, and why; collect "
        "nothing",
    )
    asynchronous: bool = option(
        "--async",
        bool,
        False,
        "take the rollouts of workers or nodes as they come, instead of one of each at a time",
    )
    backend: str = option(
        "--backend",
        ("process", "distributed", "ray"),
        "process",
        "where workers are: processes here, nodes over torch.distributed, or actors of Ray "
        "(default: process)",
    )
    nodes: int | None = option(
        "--nodes N",
        count,
        None,
        "nodes of --backend distributed or ray, with --num-envs environments each",
    )
    launcher: str = option(
        "--launcher",
        ("mp", "submitit"),
        "mp",
        "what starts distributed nodes: processes of this machine, or Slurm jobs (default: mp)",
    )
    frames: int = option(
        "--frames N",
        count,
        10_000,
        "frames to collect over all environments, rounded up to whole batches (default: 10,000)",
    )
    frames_per_batch: int | None = option(
        "--frames-per-batch N",
        count,
        None,
        "frames between two updates of the display (default: chosen to fit)",
    )
    seed: int | None = option(
        "--seed S", seed, None, "seed of environments and policy (default: drawn, and printed)"
    )
    out: Path | None = option("--out DIR", Path, None, "keep the frames in DIR, a new directory")
    format: str = option("--format", _FORMATS, "tensordict", f"what --out writes: {_FORMATS_HELP}")
    command: str = ""
    """The command as it can be typed again."""


@dataclass(frozen=True, kw_only=True)
class BenchOptions(RunOptions):
    """``gleanrl bench``."""

    seconds: float = option("--seconds S", seconds, 3.0, "how long each setting runs (default: 3)")
    workers: tuple[int, ...] | None = option(
        "--workers LIST",
        counts,
        None,
        "numbers of worker processes to try, such as 2,4 (default: half the cores and all)",
    )
    num_envs: tuple[int, ...] = option(
        "--num-envs LIST",
        counts,
        (1, 4, 16),
        "numbers of environments to try, of each worker (default: 1,4,16)",
    )
    out: Path | None = option("--out FILE.json", Path, None, "keep the figures in a new file")


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """``gleanrl inspect``."""

    directory: Path = argument("DIR", Path, "written by collect --out")
    plot: Path | None = option(
        "--plot FILE.png",
        Path,
        None,
        "where to plot returns over frames (default: DIR/returns.png)",
    )
    html: Path | None = option(
        "--html FILE.html",
        Path,
        None,
        "write a page of plots: one file that needs no network",
    )
    play: int | None = option(
        "--play EPISODE",
        index,
        None,
        "write a video of this episode (from 0): make the registered environment that the card "
        "names again, with the recorded seed and actions, and compare observations",
    )
    video: Path | None = option(
        "--video FILE.mp4",
        Path,
        None,
        "where to write the video, .mp4 or .gif (default: DIR/episode-EPISODE.mp4)",
    )


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """``gleanrl convert``."""

    source: Path = argument("SOURCE", Path, "a dataset in any format, finished or not")
    target: Path = argument("TARGET", Path, "a new directory")
    format: str = option("--format", _FORMATS, "tensordict", f"what TARGET holds: {_FORMATS_HELP}")


@dataclass(frozen=True, kw_only=True)
class TopOptions:
    """``gleanrl top``."""

    pid: int | None = optional_argument(
        "PID", count, "the process to watch (default: the only one that collects)"
    )
    once: bool = option("--once", bool, False, "print the state once, as text, and end")
    json: bool = option("--json", bool, False, "print the state once, as JSON, and end")
    every_s: float = option("--every S", seconds, 1.0, "seconds between two looks (default: 1)")


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """``gleanrl node``."""

    address: tuple[str, int] = argument("HOST:PORT", address, "where the learner waits")
    node: int | None = option(
        "--node N", index, None, "which of its nodes, from 0 (default: what the environment says)"
    )
    wait_s: float = option(
        "--wait S", seconds, 120.0, "seconds to look for the learner (default: 120)"
    )
