"""What each command can be asked for: one dataclass per command, which is also its parser."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

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


# -- commands --------------------------------------------------------------------------------------


def option(*flags: str, default: Any = None, **settings: Any) -> Any:
    """Return a field that `add_argument` of argparse reads with ``settings``."""
    return field(default=default, metadata={"flags": flags, **settings})


def argument(**settings: Any) -> Any:
    """Return a field for a positional argument."""
    return field(metadata={"flags": (), **settings})


def add_options(parser: argparse.ArgumentParser, options: type) -> None:
    """Have ``parser`` read every field of ``options`` that is an `option` or `argument`."""
    for item in fields(options):
        if item.metadata:
            flags, settings = item.metadata["flags"], dict(item.metadata)
            del settings["flags"]
            if flags:
                settings |= {"dest": item.name, "default": item.default}
            parser.add_argument(*(flags or [item.name]), **settings)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What acts where."""

    env: str = argument(metavar="ENV", help="Gymnasium id, such as CartPole-v1")
    policy: str = option(
        "--policy",
        default="random",
        metavar="random|FILE.py:NAME",
        help="what acts: 'random' (default), or NAME in a Python file: an nn.Module, a callable, "
        "or a class or function that makes one when called without arguments",
    )


@dataclass(frozen=True, kw_only=True)
class CollectOptions(RunOptions):
    """``gleanrl collect``."""

    num_envs: int = option(
        "--num-envs",
        default=1,
        metavar="N",
        type=count,
        help="environments at once, of each worker if there are any (default: 1)",
    )
    workers: int | None = option(
        "--workers",
        metavar="N",
        type=count,
        help="worker processes, with --num-envs environments each (default: none, everything in "
        "this process)",
    )
    explain: bool = option(
        "--explain",
        default=False,
        action="store_true",
        help="say which parts of environment and policy are called as they are, and why; collect "
        "nothing",
    )
    asynchronous: bool = option(
        "--async",
        default=False,
        action="store_true",
        help="take the rollouts of workers or nodes as they come, instead of one of each at a time",
    )
    backend: str = option(
        "--backend",
        default="process",
        choices=("process", "distributed", "ray"),
        help="where workers are: processes here, nodes over torch.distributed, or actors of Ray "
        "(default: process)",
    )
    nodes: int | None = option(
        "--nodes",
        metavar="N",
        type=count,
        help="nodes of --backend distributed or ray, with --num-envs environments each",
    )
    launcher: str = option(
        "--launcher",
        default="mp",
        choices=("mp", "submitit"),
        help="what starts distributed nodes: processes of this machine, or Slurm jobs (default: "
        "mp)",
    )
    frames: int = option(
        "--frames",
        default=10_000,
        metavar="N",
        type=count,
        help="frames to collect over all environments, rounded up to whole batches "
        "(default: 10,000)",
    )
    frames_per_batch: int | None = option(
        "--frames-per-batch",
        metavar="N",
        type=count,
        help="frames between two updates of the display (default: chosen to fit)",
    )
    seed: int | None = option(
        "--seed",
        metavar="S",
        type=seed,
        help="seed of environments and policy (default: drawn, and printed)",
    )
    out: Path | None = option(
        "--out", metavar="DIR", type=Path, help="keep the frames in DIR, a new directory"
    )
    command: str = ""
    """The command as it can be typed again."""


@dataclass(frozen=True, kw_only=True)
class BenchOptions(RunOptions):
    """``gleanrl bench``."""

    seconds: float = option(
        "--seconds",
        default=3.0,
        metavar="S",
        type=seconds,
        help="how long each setting runs (default: 3)",
    )
    workers: tuple[int, ...] | None = option(
        "--workers",
        metavar="LIST",
        type=counts,
        help="numbers of worker processes to try, such as 2,4 (default: half the cores and all)",
    )
    num_envs: tuple[int, ...] = option(
        "--num-envs",
        default=(1, 4, 16),
        metavar="LIST",
        type=counts,
        help="numbers of environments to try, of each worker (default: 1,4,16)",
    )
    out: Path | None = option(
        "--out", metavar="FILE.json", type=Path, help="keep the figures in a new file"
    )


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """``gleanrl inspect``."""

    directory: Path = argument(metavar="DIR", type=Path, help="written by collect --out")
    plot: Path | None = option(
        "--plot",
        metavar="FILE.png",
        type=Path,
        help="where to plot returns over frames (default: DIR/returns.png)",
    )


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """``gleanrl node``."""

    address: tuple[str, int] = argument(
        metavar="HOST:PORT", type=address, help="where the learner waits"
    )
    node: int | None = option(
        "--node",
        metavar="N",
        type=index,
        help="which of its nodes, from 0 (default: what the environment says)",
    )
    wait_s: float = option(
        "--wait",
        default=120.0,
        metavar="S",
        type=seconds,
        help="seconds to look for the learner (default: 120)",
    )
