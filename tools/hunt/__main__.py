"""Hunts for wrong frames and shrinks its finds: ``python -m tools.hunt --minutes 10 --seed 1``.

Each case is a random collector over environments that certify themselves (`tools.hunt.worlds`) with
random events between its batches. Every frame of every batch, buffer, sample and dataset is checked
alone and against the frame before it (`tools.hunt.checks`); where two ways promise the same bits,
both are run. Kills are in `tools.kills`, exits in `tools.exits`.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import rich
import rich.markup
import torchrl.envs  # noqa: F401  (the processes of the cases inherit it)

from tools import trials
from tools.hunt.cases import Case, draw, simpler
from tools.hunt.run import Refused, run

CASE_S = 60.0
"""A case that takes longer hangs."""
SHRINK_S = 60.0
SCRIPT = """# {said}
# Found by tools.hunt, case {number}.
from tools.hunt.cases import Case
from tools.hunt.run import run

run(Case(**{case}))
"""


def outcome(case: Case) -> str:
    """Run a case; tell whether it is right or refused."""
    try:
        run(case)
    except Refused as err:
        return f"refused {err}"
    return "right"


def shrunk(case: Case, wrong: str) -> Case:
    """Return the simplest case found within some time that goes wrong in the same way."""

    def fails_alike(simple: Case) -> bool:
        said = trials.answer(partial(outcome, simple), CASE_S)
        return said.split(":")[0] == wrong.split(":")[0]

    def in_time() -> Iterator[Case]:
        for simple in simpler(case):
            if time.monotonic() > end:
                return
            yield simple

    end = time.monotonic() + SHRINK_S
    while better := next(filter(fails_alike, in_time()), None):
        case = better
    return case


def report(finding: trials.Found, folder: Path) -> None:
    """Shrink the case of a finding, write its script and print it."""
    small, first = shrunk(draw(finding.number), finding.said), finding.said.splitlines()[0]
    path = folder / f"case_{finding.number}.py"
    described = small.json() | {"events": tuple(small.events)}
    path.write_text(SCRIPT.format(said=first, number=finding.number, case=described))
    rich.print(f"[red]{rich.markup.escape(first)}[/red]\n  {json.dumps(small.json())}\n  {path}")


def main() -> int:
    """Hunt; return 1 if something was found."""

    def trial(number: int) -> tuple[str, trials.Call]:
        case = draw(number)
        return f"{case.backend} {case.env} {case.policy}", partial(outcome, case)

    found = trials.main("hunt", __doc__, trial, CASE_S)
    refused = sum(one.said.startswith("refused") for one in found)
    print(f"{refused / max(len(found), 1):.1%} of the cases were refused")
    findings = [one for one in found if one.wrong]
    folder = Path(tempfile.mkdtemp(prefix="gleanrl-hunt-")) if findings else Path()
    for finding in findings:
        report(finding, folder)
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
