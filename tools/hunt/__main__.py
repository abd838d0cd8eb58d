"""Hunts for wrong frames and shrinks its finds: ``python -m tools.hunt --minutes 10 --seed 1``.

Each case is a random collector over environments that certify themselves (`tools.hunt.worlds`) with
random events between its batches. Every frame of every batch, buffer, sample and dataset is checked
alone and against the frame before it (`tools.hunt.checks`); where two ways promise the same bits,
both are run. Kills are in `tools.kills`, exits in `tools.exits`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path

import rich.markup
import rich.progress

from tools.hunt.cases import Case, draw, simpler
from tools.hunt.run import Refused, run

CASE_S = 60.0
"""A case that takes longer hangs."""
SHRINK_S = 60.0


def outcome(case: Case) -> str:
    """Run a case in a forked process; return what became of it: ``"right"``, or a word and why."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os.setpgid(0, 0)
        signal.alarm(int(CASE_S))
        said = "right"
        try:
            run(case)
        except Refused as err:
            said = f"refused {err}"
        except BaseException as err:
            said = f"wrong {type(err).__name__}: {str(err)[:300]}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode(errors="replace")
    _, status = os.waitpid(child, 0)
    if not said:
        said = f"wrong ended with signal {os.WTERMSIG(status)}" if status else "wrong said nothing"
    return said


def shrunk(case: Case, kind: str) -> Case:
    """Return the simplest case found within some time that goes wrong in the same way."""
    better, end = True, time.monotonic() + SHRINK_S
    while better:
        better = False
        for simple in simpler(case):
            if time.monotonic() > end:
                break
            if outcome(simple).split(":")[0] == kind:
                case, better = simple, True
                break
    return case


SCRIPT = """# {said}
# Found by tools.hunt, case {number}.
from tools.hunt.cases import Case
from tools.hunt.run import run

run(Case(**{case}))
"""


def _numbered(number: int) -> tuple[int, str]:
    """Run the case of a number with nothing on the terminal."""
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 2)
    return number, outcome(draw(number))


def outcomes_of(numbers: Iterable[int], seconds: float, jobs: int) -> Iterator[tuple[int, str]]:
    """Yield numbers and outcomes of cases, ``jobs`` at a time, for as long as there is time."""
    end, left = time.monotonic() + seconds, iter(numbers)
    with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
        running: set[Future[tuple[int, str]]] = set()
        while True:
            while time.monotonic() < end and len(running) < jobs:
                number = next(left, None)
                if number is None:
                    break
                running.add(pool.submit(_numbered, number))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (one.result() for one in done)


def report(number: int, said: str, out: Path) -> None:
    """Shrink the case of a finding, write its script and print it."""
    small = shrunk(draw(number), said.split(":")[0])
    path = out / f"case_{number}.py"
    described = small.json() | {"events": tuple(small.events)}
    path.write_text(SCRIPT.format(said=said, number=number, case=described))
    rich.print(f"[red]{rich.markup.escape(said)}[/red]\n  {json.dumps(small.json())}\n  {path}")


def hunt(numbers: range, seconds: float, out: Path, jobs: int) -> tuple[Counter[str], int]:
    """Run the cases of ``numbers`` for as long as there is time; return outcomes and findings."""
    import tools.hunt.torchrl_world  # noqa: F401  (the processes of the cases inherit it)

    outcomes: Counter[str] = Counter()
    findings: list[tuple[int, str]] = []
    with rich.progress.Progress(
        *rich.progress.Progress.get_default_columns()[:1],
        rich.progress.TextColumn("{task.fields[told]}"),
        rich.progress.TimeElapsedColumn(),
    ) as bar:
        task = bar.add_task("hunting", total=None, told="")
        for number, said in outcomes_of(numbers, seconds, jobs):
            kind = said.split()[0]
            outcomes[said if kind == "refused" else kind] += 1
            told = f"{outcomes.total()} cases, {len(findings)} findings"
            bar.update(task, told=told)
            if kind == "wrong":
                findings.append((number, said))
                bar.print(f"case {number}: {said}", markup=False)
    for number, said in findings:
        report(number, said, out)
    return outcomes, len(findings)


def main() -> int:
    """Hunt; return 1 if something was found."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.hunt",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="cases that run at once")
    parser.add_argument("--case", type=int, help="run the case of this number only")
    parser.add_argument("--out", type=Path, help="where scripts of findings are written")
    options = parser.parse_args()
    out = options.out or Path(tempfile.mkdtemp(prefix="gleanrl-hunt-"))
    out.mkdir(parents=True, exist_ok=True)
    first = options.seed * 10_000_000
    numbers = range(first, first + 10_000_000)
    if options.case is not None:
        numbers = range(options.case, options.case + 1)
    outcomes, findings = hunt(numbers, 60 * options.minutes, out, options.jobs)
    for said, count in outcomes.most_common():
        print(f"{count:6}  {said}")
    refused = sum(count for said, count in outcomes.items() if said.startswith("refused"))
    print(f"{refused / max(outcomes.total(), 1):.1%} of the cases were refused")
    return int(findings > 0)


if __name__ == "__main__":
    sys.exit(main())
