"""Runs TorchRL's own scripts with only the collector's import changed, beside TorchRL's collector.

``python -m tools.torchrl_scripts PATH [-k TEXT] [--only gleanrl|torchrl] [--json FILE]``

PATH is a checkout of TorchRL. Each script runs in a temporary copy of its directory that imports
collectors from GleanRL (``tools.rebind``), with the budget of ``tools.script_list``.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.machine import origin
from benchmarks.processes import session

from tools import meter
from tools.rebind import rebind
from tools.script_list import SCRIPTS, Script

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = ("gleanrl", "torchrl")
_STARTUP_S = 120.0
_ERROR = re.compile(r"\s*[\w.]*(Error|Exception|Died|Exit|Timeout)\b")


@dataclass(frozen=True)
class Result:
    """What one run of a script came to.

    Attributes:
        ended: ``finished``, ``limit`` (it was still collecting), ``failed`` or ``timeout``.
        frames: steps collected after the first batch.
        collecting: frames per second of waiting for the collector.
        overall: frames per second of the script, learning included.
        error: the last line of a failure.
        kept: names of TorchRL's collectors that GleanRL does not have.
    """

    ended: str
    frames: int = 0
    collecting: float | None = None
    overall: float | None = None
    error: str = ""
    kept: tuple[str, ...] = ()

    @property
    def ran(self) -> bool:
        """Whether the script did what it was run for."""
        return self.ended in ("finished", "limit")


def prepare(script: Script, checkout: Path, into: Path, library: str) -> tuple[Path, set[str]]:
    """Copy a script with its directory, and return where it lies and what stays TorchRL's."""
    origin = checkout / script.path
    directory = into / origin.parent.name
    shutil.copytree(origin.parent, directory)
    kept: set[str] = set()
    for file in directory.rglob("*.py"):
        source = file.read_text()
        for pattern, text in script.edits:
            source = re.sub(pattern, text, source)
        if file.name == origin.name:
            source = _with_constants(source, script.constants)
        if library == "gleanrl":
            rebound = rebind(source)
            source = rebound.source
            kept |= set(rebound.kept) if _concerns(file, origin) else set()
        file.write_text(_metered(source) if file.name == origin.name else source)
    return directory / origin.name, kept


def _concerns(file: Path, origin: Path) -> bool:
    """Return whether ``file`` is the script, or a module it may import."""
    return file.name == origin.name or "utils" in file.name


def _with_constants(source: str, constants: dict[str, str]) -> str:
    for name, value in constants.items():
        source, count = re.subn(
            rf"^(\s*{name}) = [^\n(]*(?:\([^\n]*)?$", rf"\1 = {value}", source, flags=re.M
        )
        if not count:
            raise ValueError(f"the script assigns {name} nowhere: correct its budget")
    return source


def _metered(source: str) -> str:
    """Have the script import the meter before anything else, on a line it has already."""
    last = "from __future__ import annotations\n"
    head, future, rest = source.partition(last)
    if not future:
        return "import tools.meter  # noqa\n" + source
    return f"{head}{future.rstrip()}; import tools.meter\n{rest}"


def run(script: Script, checkout: Path, library: str, seconds: float) -> Result:
    """Run a script until it ends or has collected for ``seconds``."""
    with tempfile.TemporaryDirectory(prefix="torchrl-scripts-") as name:
        directory = Path(name)
        path, kept = prepare(script, checkout, directory, library)
        report = directory / "report.json"
        with (directory / "output.txt").open("w+") as output:
            code: int | None = None
            with (
                session(
                    [sys.executable, path.name, *script.arguments],
                    cwd=path.parent,
                    env=_environment(report, seconds),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                ) as process,
                contextlib.suppress(subprocess.TimeoutExpired),
            ):
                code = process.wait(_STARTUP_S + 2 * seconds)
            output.seek(0)
            text = output.read()
        return _result(code, report, text, tuple(sorted(kept)))


def _result(code: int | None, report: Path, output: str, kept: tuple[str, ...]) -> Result:
    found = json.loads(report.read_text()) if report.exists() else {}
    if code is None or code != 0 or not found:
        errors = [line for line in output.splitlines() if _ERROR.match(line)]
        error = errors[-1].strip() if errors else f"exit status {code}"
        return Result("timeout" if code is None else "failed", error=error, kept=kept)
    frames, waited, wall = found["frames"], found["waited_s"], found["wall_s"]
    return Result(
        "limit" if found["stopped"] else "finished",
        frames,
        frames / waited if frames and waited else None,
        frames / wall if frames and wall else None,
        kept=kept,
    )


def _environment(report: Path, seconds: float) -> dict[str, str]:
    path = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return {
        "OMP_NUM_THREADS": "1",
        "MUJOCO_GL": "disabled",
        "SDL_VIDEODRIVER": "dummy",
        "MPLBACKEND": "Agg",
        "WANDB_MODE": "disabled",
        "HYDRA_FULL_ERROR": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        meter.FILE: str(report),
        meter.LIMIT: str(seconds),
    }


def missing(script: Script) -> list[str]:
    """Return the modules that the script needs and this environment lacks."""
    return [name for name in script.needs if importlib.util.find_spec(name) is None]


def line(script: Script, results: dict[str, Result]) -> str:
    """Return one row of the table."""
    cells = [f"{script.path:66.66}"]
    for library in LIBRARIES:
        result = results.get(library)
        cells.append(f"{rate(result):>14}")
    ratio = _ratio(results)
    cells.append(f"{ratio:6.2f} x" if ratio else "")
    return "  ".join(cells).rstrip()


def rate(result: Result | None) -> str:
    """Return frames per second of collecting, or how the script ended."""
    if result is None:
        return "-"
    if not result.ran:
        return result.ended
    return f"{result.collecting:,.0f}" if result.collecting else "ran"


def _ratio(results: dict[str, Result]) -> float | None:
    rates = [results[name].collecting if name in results else None for name in LIBRARIES]
    ours, theirs = rates
    return ours / theirs if ours and theirs else None


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the command line's settings."""
    parser = argparse.ArgumentParser(prog="python -m tools.torchrl_scripts", description=__doc__)
    parser.add_argument("path", type=Path, help="a checkout of TorchRL")
    parser.add_argument("-k", default="", metavar="TEXT", help="only scripts whose path has TEXT")
    parser.add_argument("--only", choices=LIBRARIES, help="one library instead of both")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long a script collects")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results to FILE")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the scripts and return 0 if all ran on GleanRL that run on TorchRL."""
    given = parse(arguments)
    libraries = [given.only] if given.only else list(LIBRARIES)
    print(f"{'frames per second of collecting':66}  {'GleanRL':>14}  {'TorchRL':>14}")
    rows: list[dict[str, object]] = []
    worse = 0
    for script in SCRIPTS:
        if given.k not in script.path:
            continue
        if absent := missing(script):
            print(f"{script.path:66.66}  needs {', '.join(absent)}")
            rows.append({"script": script.path, "needs": absent})
            continue
        results = {name: run(script, given.path, name, given.seconds) for name in libraries}
        print(line(script, results), flush=True)
        for name, result in results.items():
            if result.error:
                print(f"    {name}: {result.error[:300]}", flush=True)
            if result.kept:
                print(f"    {name}: left with TorchRL: {', '.join(result.kept)}")
        worse += _worse(results)
        rows.append({"script": script.path, **{name: asdict(r) for name, r in results.items()}})
    if given.json:
        given.json.write_text(json.dumps({**origin(), "scripts": rows}, indent=1) + "\n")
    return int(worse > 0)


def _worse(results: dict[str, Result]) -> bool:
    ours, theirs = results.get("gleanrl"), results.get("torchrl")
    return ours is not None and not ours.ran and (theirs is None or theirs.ran)


if __name__ == "__main__":
    sys.exit(main())
