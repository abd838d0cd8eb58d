"""The ``gleanrl`` command."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from gleanrl import __version__
from gleanrl.cli.arguments import address, count, counts, index, seconds, seed
from gleanrl.cli.codes import FAILURE, INTERRUPTED, USAGE_ERROR
from gleanrl.core.errors import ConfigError, WorkerError

_DESCRIPTION = (
    "Gather experience for reinforcement learning: environments and a policy in, data out."
)
_EXAMPLES = """\
examples:
  gleanrl collect CartPole-v1
  gleanrl collect Pendulum-v1 --num-envs 8 --frames 100_000 --out data/pendulum
  gleanrl collect CartPole-v1 --policy my_policy.py:make_policy --seed 0
  gleanrl collect CartPole-v1 --workers 4 --num-envs 16 --frames 1_000_000
  gleanrl bench CartPole-v1
  gleanrl inspect data/pendulum
"""
_COLLECT_EXAMPLES = """\
ENV is a Gymnasium id; 'module:id' imports the module that registers it first.

examples:
  gleanrl collect CartPole-v1
      act at random for 10,000 frames and print returns and speed
  gleanrl collect Pendulum-v1 --num-envs 8 --frames 100_000 --out data/pendulum
      keep the frames as a memory-mapped TensorDict; load them with
      TensorDict.load_memmap("data/pendulum")
  gleanrl collect CartPole-v1 --policy my_policy.py:make_policy --seed 0
      call make_policy() for the policy; the same seed gives the same frames
  gleanrl collect CartPole-v1 --workers 4 --num-envs 16
      64 environments in four processes; --async takes what is there first, so that
      no worker waits for another ('gleanrl bench' says what is fastest here)
  gleanrl collect CartPole-v1 --backend distributed --nodes 8 --launcher submitit --async
      eight Slurm jobs; with --backend ray, eight actors

Ctrl-C stops after the current step; what was collected until then is kept.
"""
_BENCH_EXAMPLES = """\
Each setting runs for some seconds: environments in this process, in synchronous workers, and
the fastest of these as asynchronous workers. Nothing is learned meanwhile; a learner that is
busy leaves asynchronous workers collecting and synchronous ones waiting.

examples:
  gleanrl bench CartPole-v1
      settings that suit the number of cores, random actions
  gleanrl bench CartPole-v1 --policy my_policy.py:make_policy --seconds 10
  gleanrl bench Pendulum-v1 --workers 1,2,4 --num-envs 1,8,32 --out bench.json
"""
_INSPECT_EXAMPLES = """\
examples:
  gleanrl inspect data/pendulum
  gleanrl inspect data/pendulum --plot pendulum.png

Nothing in the directory is executed or unpickled.
"""

_NODE_EXAMPLES = """\
For collectors with launcher="manual", which print these commands. The secret of the learner has
to be in the environment variable GLEANRL_SECRET. Without --node the number is that in
GLEANRL_NODE, SLURM_PROCID, OMPI_COMM_WORLD_RANK, PMI_RANK or JOB_COMPLETION_INDEX.

examples:
  gleanrl node 10.0.0.5:10003 --node 0
  mpirun -n 8 -x GLEANRL_SECRET gleanrl node 10.0.0.5:10003

The node ends with its learner. SIGTERM ends it after the current step, and the learner is told.
"""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with code 2."""
        self.exit(USAGE_ERROR, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    0: done, 1: it failed, 2: an option or id is wrong, 130: interrupted. Errors are one line on
    standard error; ``--traceback`` adds where they come from.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        options = _parser().parse_args(arguments)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    command: Callable[[argparse.Namespace, list[str]], int] = options.run
    try:
        return command(options, arguments)
    except KeyboardInterrupt:
        return _fail(INTERRUPTED, "interrupted", False)
    except BrokenPipeError:
        # The reader (a pager, head) left; leave quietly too, also when Python flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILURE
    except ConfigError as err:
        # What a worker says of an option is what this process would have said.
        message = err.args[0] if isinstance(err, WorkerError) else err
        return _fail(USAGE_ERROR, str(message), options.traceback)
    except WorkerError as err:
        return _fail(FAILURE, err.headline, options.traceback)
    except Exception as err:
        name = "" if type(err).__module__.startswith("gleanrl.") else f"{type(err).__name__}: "
        return _fail(FAILURE, name + str(err), options.traceback)


def _fail(code: int, message: str, with_traceback: bool) -> int:
    if with_traceback:
        traceback.print_exc()
    sys.stderr.write(f"gleanrl: error: {' '.join(message.split())}\n")
    return code


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser(
        prog="gleanrl", description=_DESCRIPTION, epilog=_EXAMPLES, formatter_class=raw
    )
    parser.add_argument("--version", action="version", version=f"gleanrl {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_collect(
        commands.add_parser(
            "collect",
            help="run a policy in an environment; show or keep what happens",
            description="Run a policy in an environment; show, and with --out keep, what happens.",
            epilog=_COLLECT_EXAMPLES,
            formatter_class=raw,
        )
    )
    _add_bench(
        commands.add_parser(
            "bench",
            help="try numbers of workers and environments, and say what is fastest here",
            description="Measure a few numbers of workers and environments; say what to use here.",
            epilog=_BENCH_EXAMPLES,
            formatter_class=raw,
        )
    )
    _add_inspect(
        commands.add_parser(
            "inspect",
            help="say what a directory written by collect holds, and plot its returns",
            description="Say what a directory written by 'collect --out' holds; plot its returns.",
            epilog=_INSPECT_EXAMPLES,
            formatter_class=raw,
        )
    )
    _add_node(
        commands.add_parser(
            "node",
            help="be a node of a DistributedCollector on another machine",
            description="Be a node of a DistributedCollector: run its environments and policy "
            "here.",
            epilog=_NODE_EXAMPLES,
            formatter_class=raw,
        )
    )
    return parser


def _add_collect(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _add_env_and_policy(parser)
    add(
        "--num-envs",
        metavar="N",
        type=count,
        default=1,
        help="environments at once, of each worker if there are any (default: 1)",
    )
    add(
        "--workers",
        metavar="N",
        type=count,
        default=None,
        help="worker processes, with --num-envs environments each (default: none, everything in "
        "this process)",
    )
    add(
        "--explain",
        action="store_true",
        help="say which parts of environment and policy are called as they are, and why; collect "
        "nothing",
    )
    add(
        "--async",
        dest="asynchronous",
        action="store_true",
        help="take the rollouts of workers or nodes as they come, instead of one of each at a time",
    )
    add(
        "--backend",
        choices=("process", "distributed", "ray"),
        default="process",
        help="where workers are: processes here, nodes over torch.distributed, or actors of Ray "
        "(default: process)",
    )
    add(
        "--nodes",
        metavar="N",
        type=count,
        default=None,
        help="nodes of --backend distributed or ray, with --num-envs environments each",
    )
    add(
        "--launcher",
        choices=("mp", "submitit"),
        default="mp",
        help="what starts distributed nodes: processes of this machine, or Slurm jobs (default: "
        "mp)",
    )
    add(
        "--frames",
        metavar="N",
        type=count,
        default=10_000,
        help="frames to collect over all environments, rounded up to whole batches "
        "(default: 10,000)",
    )
    add(
        "--frames-per-batch",
        metavar="N",
        type=count,
        default=None,
        help="frames between two updates of the display (default: chosen to fit)",
    )
    add(
        "--seed",
        metavar="S",
        type=seed,
        default=None,
        help="seed of environments and policy (default: drawn, and printed)",
    )
    add(
        "--out",
        metavar="DIR",
        type=Path,
        default=None,
        help="keep the frames in DIR, a new directory",
    )
    _add_traceback(parser)
    parser.set_defaults(run=_collect)


def _add_env_and_policy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("env", metavar="ENV", help="Gymnasium id, such as CartPole-v1")
    parser.add_argument(
        "--policy",
        metavar="random|FILE.py:NAME",
        default="random",
        help="what acts: 'random' (default), or NAME in a Python file: an nn.Module, a callable, "
        "or a class or function that makes one when called without arguments",
    )


def _add_bench(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _add_env_and_policy(parser)
    add(
        "--seconds",
        metavar="S",
        type=seconds,
        default=3.0,
        help="how long each setting runs (default: 3)",
    )
    add(
        "--workers",
        metavar="LIST",
        type=counts,
        default=None,
        help="numbers of worker processes to try, such as 2,4 (default: half the cores and all)",
    )
    add(
        "--num-envs",
        metavar="LIST",
        type=counts,
        default=(1, 4, 16),
        help="numbers of environments to try, of each worker (default: 1,4,16)",
    )
    add(
        "--out", metavar="FILE.json", type=Path, default=None, help="keep the figures in a new file"
    )
    _add_traceback(parser)
    parser.set_defaults(run=_bench)


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", type=Path, help="written by collect --out")
    parser.add_argument(
        "--plot",
        metavar="FILE.png",
        type=Path,
        default=None,
        help="where to plot returns over frames (default: DIR/returns.png)",
    )
    _add_traceback(parser)
    parser.set_defaults(run=_inspect)


def _add_node(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "address", metavar="HOST:PORT", type=address, help="where the learner waits"
    )
    parser.add_argument(
        "--node",
        metavar="N",
        type=index,
        default=None,
        help="which of its nodes, from 0 (default: what the environment says)",
    )
    parser.add_argument(
        "--wait",
        metavar="S",
        type=seconds,
        default=120.0,
        help="seconds to look for the learner (default: 120)",
    )
    _add_traceback(parser)
    parser.set_defaults(run=_node)


def _add_traceback(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--traceback",
        action="store_true",
        help="show where an error comes from, not just what it is",
    )


def _collect(options: argparse.Namespace, arguments: list[str]) -> int:
    from gleanrl.cli import collect

    return collect.run(
        collect.CollectOptions(
            env=options.env,
            policy=options.policy,
            num_envs=options.num_envs,
            workers=options.workers,
            asynchronous=options.asynchronous,
            explain=options.explain,
            backend=options.backend,
            nodes=options.nodes,
            launcher=options.launcher,
            frames=options.frames,
            frames_per_batch=options.frames_per_batch,
            seed=options.seed,
            out=options.out,
            command=collect.command_line(arguments),
        )
    )


def _bench(options: argparse.Namespace, arguments: list[str]) -> int:
    from gleanrl.cli import bench

    return bench.run(
        bench.BenchOptions(
            env=options.env,
            policy=options.policy,
            seconds=options.seconds,
            workers=options.workers,
            num_envs=options.num_envs,
            out=options.out,
        )
    )


def _inspect(options: argparse.Namespace, arguments: list[str]) -> int:
    from gleanrl.cli import show

    return show.run(show.InspectOptions(directory=options.directory, plot=options.plot))


def _node(options: argparse.Namespace, arguments: list[str]) -> int:
    from gleanrl.cli import node

    host, port = options.address
    return node.run(node.NodeOptions(host=host, port=port, node=options.node, wait_s=options.wait))
