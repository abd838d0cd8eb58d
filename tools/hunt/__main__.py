"""``python -m tools.hunt --minutes 10 --seed 1``: hunts for wrong frames and shrinks its finds."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

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


def hunt(numbers: range, seconds: float, out: Path, show: bool = True) -> tuple[Counter[str], int]:
    """Run the cases of ``numbers`` for as long as there is time; return outcomes and findings."""
    outcomes: Counter[str] = Counter()
    findings = 0
    end = time.monotonic() + seconds
    for number in rich.progress.track(numbers, "hunting", disable=not show):
        if time.monotonic() > end:
            break
        case = draw(number)
        said = outcome(case)
        outcomes[said if said != "right" and said.startswith("refused") else said.split()[0]] += 1
        if said.startswith("wrong"):
            findings += 1
            small = shrunk(case, said.split(":")[0])
            path = out / f"case_{number}.py"
            described = small.json() | {"events": tuple(small.events)}
            path.write_text(SCRIPT.format(said=said, number=number, case=described))
            if show:
                rich.print(f"[red]{said}[/red]\n  {json.dumps(small.json())}\n  {path}")
    return outcomes, findings


def main() -> int:
    """Hunt; return 1 if something was found."""
    parser = argparse.ArgumentParser(prog="python -m tools.hunt", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    out = options.out or Path(tempfile.mkdtemp(prefix="gleanrl-hunt-"))
    out.mkdir(parents=True, exist_ok=True)
    first = options.seed * 10_000_000
    numbers = range(first, first + 10_000_000)
    if options.case is not None:
        numbers = range(options.case, options.case + 1)
    outcomes, findings = hunt(numbers, 60 * options.minutes, out)
    for said, count in outcomes.most_common():
        rich.print(f"{count:6}  {said}")
    return int(findings > 0)


if __name__ == "__main__":
    sys.exit(main())
