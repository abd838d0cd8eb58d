"""Random trials in forked processes: the one harness of hunt, kills, fuzz and exits.

Each tool draws a trial from a number and says what became of it. All take the same options::

    --cases N --minutes M --seed S --kind PATTERN --jobs J --only NUMBER
"""

from __future__ import annotations

import argparse
import math
import os
import select
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatch
from itertools import islice
from typing import IO, Any, NamedTuple

import rich.markup
import rich.progress

Call = Callable[[], str]
WRONG = "wrong "
"""The beginning of an answer that is a finding."""
_SHOWN = 500
"""Letters of a dead process's output that its answer repeats."""
_PER_SEED = 10_000_000


class Found(NamedTuple):
    """The end of a trial."""

    number: int
    kind: str
    said: str

    @property
    def wrong(self) -> bool:
        """Whether it is a finding."""
        return self.said.startswith(WRONG)


def main(
    tool: str,
    about: str | None,
    draw: Callable[[int], tuple[str, Call]],
    limit_s: float,
    cases: int | None = None,
    alone: bool = False,
) -> list[Found]:
    """Run the trials that the command line asks for, print findings and outcomes.

    Args:
        tool: Name of the module below `tools`.
        about: Its docstring.
        draw: Returns kind and call of the trial of a number.
        limit_s: Seconds that one trial may take.
        cases: How many run by default; ``None`` for as many as there is time for.
        alone: Whether only one may run at once.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m tools.{tool}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    time_m = 10.0 if cases is None else math.inf
    parser.add_argument("--cases", type=int, default=cases or _PER_SEED, help="trials at most")
    parser.add_argument("--minutes", type=float, default=time_m, help="begin none later")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", metavar="PATTERN", default="*", help="only kinds like 'central*'")
    if not alone:
        parser.add_argument("--jobs", type=int, default=1, help="trials that run at once")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="run this trial alone")
    given = parser.parse_args()
    first = given.seed * _PER_SEED
    numbers = range(first, first + _PER_SEED) if given.only is None else [given.only]
    drawn = ((number, *draw(number)) for number in numbers)
    wanted = (trial for trial in drawn if fnmatch(trial[1], given.kind))
    end = time.monotonic() + 60 * given.minutes
    kinds = {}

    def calls() -> Iterator[tuple[int, Call]]:
        for number, kind, call in islice(wanted, given.cases):
            if time.monotonic() > end:
                return
            kinds[number] = kind
            yield number, call

    found = []
    said_by = answers(calls(), limit_s, 1 if alone else given.jobs)
    # A thread that redraws would be copied by forks, with its locks as they are.
    for number, said in rich.progress.track(
        said_by, tool, total=cases and given.cases, auto_refresh=False
    ):
        found.append(Found(number, kinds.pop(number), said))
        if found[-1].wrong:
            rich.print(rich.markup.escape(f"{number}: {found[-1].kind}: {said}"))
    outcomes = Counter("wrong" if one.wrong else one.said.splitlines()[0] for one in found)
    for said, count in outcomes.most_common():
        print(f"{count:6}  {said}")
    return found


# -- processes -------------------------------------------------------------------------------------


class _Process(NamedTuple):
    name: Any
    pid: int
    end: int
    """A descriptor that can be read when the process has ended."""
    answer: IO[bytes]
    output: IO[bytes]
    deadline: float


def answers(
    calls: Iterable[tuple[Any, Call]], limit_s: float, jobs: int = 1
) -> Iterator[tuple[Any, str]]:
    """Call functions in forked processes; yield the name of each call and its answer.

    An answer is what the function returned; its first line is the outcome. It begins with `WRONG`
    if the function raised, if its process died, or if it needed more than ``limit_s`` seconds.

    Args:
        calls: Names and functions; each is taken when its process can begin.
        limit_s: Seconds that one call may take.
        jobs: Processes that run at once.
    """
    left, running = iter(calls), list[_Process]()
    try:
        while True:
            for name, call in islice(left, jobs - len(running)):
                running.append(_begin(name, call, limit_s))
            if not running:
                return
            wait_s = min(one.deadline for one in running) - time.monotonic()
            ended = select.select([one.end for one in running], [], [], max(0.0, wait_s))[0]
            for one in list(running):
                if one.end in ended or time.monotonic() > one.deadline:
                    running.remove(one)
                    yield one.name, _finish(one, one.end not in ended, limit_s)
    finally:
        for one in running:
            _finish(one, True, limit_s)


def answer(call: Call, limit_s: float) -> str:
    """Return the answer of one call."""
    ((_, said),) = answers([(None, call)], limit_s)
    return said


def _begin(name: Any, call: Call, limit_s: float) -> _Process:
    said, output = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
        os.write(said.fileno(), _said(call).encode())
        os._exit(0)
    end = os.pidfd_open(pid)
    return _Process(name, pid, end, said, output, time.monotonic() + limit_s)


def _said(call: Call) -> str:
    try:
        return call()
    except BaseException as err:
        last = traceback.extract_tb(err.__traceback__)[-1]
        return f"{WRONG}{type(err).__name__}: {str(err)[:300]} ({last.filename}:{last.lineno})"


def _finish(one: _Process, late: bool, limit_s: float) -> str:
    """Return the answer of a process, which is killed with its group if it is late."""
    if late:
        os.killpg(one.pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(one.pid, 0)[1])
    os.close(one.end)
    with one.answer, one.output:
        one.answer.seek(0)
        one.output.seek(0)
        said, output = (file.read().decode(errors="replace") for file in (one.answer, one.output))
    if late:
        return f"{WRONG}hangs for {limit_s:.0f} s: {output[-_SHOWN:]}"
    return said or f"{WRONG}ended with code {code}: {output[-_SHOWN:]}"
