"""The ``gleanrl`` command. It imports heavy modules only for commands that need them."""

from __future__ import annotations

import argparse
import difflib
import inspect
import os
import re
import shlex
import sys
import traceback
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from typing import Any, NoReturn

from gleanrl import __version__
from gleanrl.cli import command_options as options
from gleanrl.core.errors import ConfigError, WorkerError

FAILURE, USAGE_ERROR = 1, 2
INTERRUPTED = 130
"""The exit code after Ctrl-C, by the convention of shells."""
_EXAMPLES = """\
Examples:
  gleanrl collect CartPole-v1
  gleanrl collect Pendulum-v1 --num-envs 8 --frames 100_000 --out data/pendulum
  gleanrl collect CartPole-v1 --policy my_policy.py:make_policy --seed 0
  gleanrl collect CartPole-v1 --workers 4 --num-envs 16 --frames 1_000_000
  gleanrl bench CartPole-v1
  gleanrl inspect data/pendulum
  gleanrl top
  gleanrl doctor
"""


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line, with a suggestion."""

    commands: Mapping[str, _Parser] = {}

    def read(self, arguments: Sequence[str]) -> dict[str, Any]:
        """Return the parsed ``arguments``; exit if they are invalid."""
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
    for name, kind in options.COMMANDS.items():
        about, _, more = inspect.cleandoc(kind.__doc__ or "").partition("\n\n")
        below = commands.add_parser(
            name, help=about, description=about, epilog=more, formatter_class=raw
        )
        options.add_options(below, kind)
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
    # The shell may have closed them: >&-
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    try:
        if not arguments:
            parser().print_help()
            return 0
        found = parser().read(arguments)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    found["command"] = shlex.join(["gleanrl", *arguments])
    kind = options.COMMANDS[found["name"]]
    if os.getcwd() not in sys.path:  # 'module:id' names modules there, as python -m finds them
        sys.path.append(os.getcwd())
    try:
        module = import_module(f"gleanrl.cli.{found['name']}_command")
        return int(module.run(kind(**{item.name: found[item.name] for item in fields(kind)})))
    except KeyboardInterrupt:
        return _fail(INTERRUPTED, "interrupted", False)
    except BrokenPipeError:
        # The reader (a pager, head) left; leave quietly too, also when Python flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILURE
    except ConfigError as err:
        # A worker's message about an option is the one that this process would give.
        message = err.args[0] if isinstance(err, WorkerError) else err
        return _fail(USAGE_ERROR, str(message), found["traceback"])
    except WorkerError as err:
        return _fail(FAILURE, err.headline + _notes(err), found["traceback"])
    except Exception as err:
        name = "" if type(err).__module__.startswith("gleanrl.") else f"{type(err).__name__}: "
        return _fail(FAILURE, name + str(err) + _notes(err), found["traceback"])


def _notes(error: Exception) -> str:
    """Return the notes of ``error``, whose message has named the worker."""
    notes = getattr(error, "__notes__", ())
    return "".join("; " + re.sub(r"^(worker \d+: )+", "", note) for note in notes)


def _fail(code: int, message: str, with_traceback: bool) -> int:
    if with_traceback:
        traceback.print_exc()
    sys.stderr.write(f"gleanrl: error: {' '.join(message.split())}\n")
    return code
