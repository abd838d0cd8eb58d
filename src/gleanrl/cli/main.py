"""The ``gleanrl`` command. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import argparse
import difflib
import os
import shlex
import sys
import traceback
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

from gleanrl import __version__
from gleanrl.cli import options
from gleanrl.core.errors import ConfigError, WorkerError

FAILURE, USAGE_ERROR = 1, 2
INTERRUPTED = 130
"""After Ctrl-C, as shells have it."""
_EXAMPLES = """\
examples:
  gleanrl collect CartPole-v1
  gleanrl collect Pendulum-v1 --num-envs 8 --frames 100_000 --out data/pendulum
  gleanrl collect CartPole-v1 --policy my_policy.py:make_policy --seed 0
  gleanrl collect CartPole-v1 --workers 4 --num-envs 16 --frames 1_000_000
  gleanrl bench CartPole-v1
  gleanrl inspect data/pendulum
  gleanrl top
"""


class _Command(NamedTuple):
    """A command, whose module in this package has ``run(options) -> exit code``."""

    options: type[Any]
    help: str
    description: str
    examples: str


_COMMANDS = {
    "collect": _Command(
        options.CollectOptions,
        "run a policy in an environment; show or keep what happens",
        "Run a policy in an environment; show, and with --out keep, what happens.",
        """\
ENV is a Gymnasium id; 'module:id' imports the module that registers it first.

examples:
  gleanrl collect CartPole-v1
      act at random for 10,000 frames and print returns and speed
  gleanrl collect Pendulum-v1 --num-envs 8 --frames 100_000 --out data/pendulum
      keep the frames as a memory-mapped TensorDict; load them with
      gleanrl.load_dataset("data/pendulum"); --format parquet or minari for others
  gleanrl collect CartPole-v1 --policy my_policy.py:make_policy --seed 0
      call make_policy() for the policy; the same seed gives the same frames
  gleanrl collect CartPole-v1 --workers 4 --num-envs 16
      64 environments in four processes; --async takes what is there first, so that
      no worker waits for another ('gleanrl bench' says what is fastest here)
  gleanrl collect CartPole-v1 --backend distributed --nodes 8 --launcher submitit --async
      eight Slurm jobs; with --backend ray, eight actors

Frames of several environments are stored batch after batch; in a batch environment after
environment, each with its steps in order. ("collector", "traj_ids") tells episodes apart, and
modulo the number of environments it is the environment.

Ctrl-C stops after the current step; what was collected until then is kept.
""",
    ),
    "bench": _Command(
        options.BenchOptions,
        "try numbers of workers and environments, and say what is fastest here",
        "Measure a few numbers of workers and environments; say what to use here.",
        """\
Each setting runs for some seconds: environments in this process, in synchronous workers, and
the fastest of these as asynchronous workers. Nothing is learned meanwhile; a learner that is
busy leaves asynchronous workers collecting and synchronous ones waiting.

examples:
  gleanrl bench CartPole-v1
      settings that suit the number of cores, random actions
  gleanrl bench CartPole-v1 --policy my_policy.py:make_policy --seconds 10
  gleanrl bench Pendulum-v1 --workers 1,2,4 --num-envs 1,8,32 --out bench.json
""",
    ),
    "inspect": _Command(
        options.InspectOptions,
        "say what a directory written by collect holds, and plot its returns",
        "Say what a directory written by 'collect --out' holds; plot its returns.",
        """\
examples:
  gleanrl inspect data/pendulum
  gleanrl inspect data/pendulum --plot pendulum.png
  gleanrl inspect data/pendulum --play 3 --video pendulum.mp4
  gleanrl inspect data/pendulum --html pendulum.html
      returns, their distribution and episode lengths, to look at in a browser

Nothing in the directory is executed or unpickled; --play makes environments that are registered.
""",
    ),
    "convert": _Command(
        options.ConvertOptions,
        "write a dataset in another format, also one whose recording was killed",
        "Write what collect or a Recorder wrote in another format; SOURCE stays as it is.",
        """\
A recording that ended by kill -9 or a full disk is readable as it is, but not yet in its format.

examples:
  gleanrl convert data/pendulum data/pendulum-parquet --format parquet
  gleanrl convert data/killed data/pendulum/random-v0 --format minari
""",
    ),
    "top": _Command(
        options.TopOptions,
        "watch a collection that runs in another terminal",
        "Watch a running collection: its workers, rates, returns, and where the time goes.",
        """\
A collector of this user can be watched without preparing it; GLEANRL_TOP=0 in its environment
forbids that. Without PID, several processes that collect are listed. q or Ctrl-C ends.

env, policy, transfer and wait are shares of a worker's time; lag is how many policy versions old
the weights of the newest batch were; returns and lengths are means of the last 100 episodes.

examples:
  gleanrl top
  gleanrl top 4711 --every 5
  gleanrl top --once
  gleanrl top --json | jq '.[0].stats.fps'
""",
    ),
    "node": _Command(
        options.NodeOptions,
        "be a node of a DistributedCollector on another machine",
        "Be a node of a DistributedCollector: run its environments and policy here.",
        """\
For collectors with launcher="manual", which print these commands. The secret of the learner has
to be in the environment variable GLEANRL_SECRET. Without --node the number is that in
GLEANRL_NODE, SLURM_PROCID, OMPI_COMM_WORLD_RANK, PMI_RANK or JOB_COMPLETION_INDEX.

examples:
  gleanrl node 10.0.0.5:10003 --node 0
  mpirun -n 8 -x GLEANRL_SECRET gleanrl node 10.0.0.5:10003

The node ends with its learner. SIGTERM ends it after the current step, and the learner is told.
""",
    ),
}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and what may have been meant."""

    commands: Mapping[str, _Parser] = {}

    def read(self, arguments: Sequence[str]) -> dict[str, Any]:
        """Return what ``arguments`` say; exits if they make no sense."""
        name = next((text for text in arguments if not text.startswith("-")), "")
        if name and name not in self.commands:
            self.error(f"there is no command {name!r}" + _meant(name, self.commands))
        if not name and not set(arguments) & set(self._option_string_actions):
            self.refuse(arguments[0])
        found, unknown = self.parse_known_args(_hyphenated(arguments))
        if unknown:
            self.commands[found.name].refuse(unknown[0])
        return vars(found)

    def refuse(self, text: str) -> NoReturn:
        """Exit because of an argument that does not exist."""
        if not text.startswith("-"):
            self.error(f"{text!r} is one argument too many")
        option = text.partition("=")[0]
        self.error(f"there is no option {option}" + _meant(option, self._option_string_actions))

    def error(self, message: str) -> NoReturn:
        """Exit with code 2."""
        self.exit(USAGE_ERROR, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _meant(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _hyphenated(arguments: Sequence[str]) -> list[str]:
    """Spell ``--num_envs`` as ``--num-envs``."""
    split = [text.partition("=") if text.startswith("--") else ("", "", text) for text in arguments]
    return [option.replace("_", "-") + equals + value for option, equals, value in split]


def parser() -> _Parser:
    """Return the parser of the whole command line."""
    raw = argparse.RawDescriptionHelpFormatter
    top = _Parser(
        prog="gleanrl",
        description="Gather experience for reinforcement learning: environments and a policy in, "
        "data out.",
        epilog=_EXAMPLES,
        formatter_class=raw,
    )
    top.add_argument("--version", action="version", version=f"gleanrl {__version__}")
    commands = top.add_subparsers(metavar="COMMAND", dest="name", required=True)
    top.commands = commands.choices
    for name, command in _COMMANDS.items():
        below = commands.add_parser(
            name,
            help=command.help,
            description=command.description,
            epilog=command.examples,
            formatter_class=raw,
        )
        options.add_options(below, command.options)
        below.add_argument(
            "--traceback",
            action="store_true",
            help="show where an error comes from, not just what it is",
        )
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    0: done, 1: it failed, 2: an option or id is wrong, 130: interrupted. Errors are one line on
    standard error; ``--traceback`` adds where they come from.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if not arguments:
            parser().print_help()
            return 0
        found = parser().read(arguments)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    found["command"] = shlex.join(["gleanrl", *arguments])
    kind = _COMMANDS[found["name"]].options
    try:
        module = import_module(f"gleanrl.cli.{found['name']}")
        asked = kind(**{item.name: found[item.name] for item in fields(kind)})
        return int(module.run(asked))
    except KeyboardInterrupt:
        return _fail(INTERRUPTED, "interrupted", False)
    except BrokenPipeError:
        # The reader (a pager, head) left; leave quietly too, also when Python flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILURE
    except ConfigError as err:
        # What a worker says of an option is what this process would have said.
        message = err.args[0] if isinstance(err, WorkerError) else err
        return _fail(USAGE_ERROR, str(message), found["traceback"])
    except WorkerError as err:
        return _fail(FAILURE, err.headline + _notes(err), found["traceback"])
    except Exception as err:
        name = "" if type(err).__module__.startswith("gleanrl.") else f"{type(err).__name__}: "
        return _fail(FAILURE, name + str(err) + _notes(err), found["traceback"])


def _notes(error: Exception) -> str:
    return "".join(f"; {note}" for note in getattr(error, "__notes__", ()))


def _fail(code: int, message: str, with_traceback: bool) -> int:
    if with_traceback:
        traceback.print_exc()
    sys.stderr.write(f"gleanrl: error: {' '.join(message.split())}\n")
    return code
