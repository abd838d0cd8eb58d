"""Learning curves of the examples.

``python -m tools.curves NAME [--seeds 5] [--frames N] [--plot-only]`` runs ``train(frames, seed)``
of ``examples/NAME.py`` once per seed, each in a process of its own, and writes
``docs/curves/NAME.json``, ``docs/curves/NAME.png`` and the result in ``docs/examples.md``. The
files are complete after each seed, so a run may be cut short.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import re
import runpy
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import origin
from benchmarks.processes import in_fresh_process

ROOT = Path(__file__).parent.parent
CURVES, PAGE = ROOT / "docs" / "curves", ROOT / "docs" / "examples.md"
COLUMNS = "frames", "return", "loss", "seconds"
POINTS = 200
"""Rows kept of each seed."""
_CARTPOLE = "evaluate", "impala", "ppo", "ppo_ray", "recurrent_ppo", "resume"
SOLVED = {**dict.fromkeys(_CARTPOLE, 475), "ppo_continuous": 4800, "ppo_torchrl_losses": 950}
"""The ``reward_threshold`` of an example's task, where Gymnasium names one."""


def main() -> None:
    """Run the seeds, unless told only to plot, and write file, picture and page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("name", help="an example: a file in examples/, without .py")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--frames", type=int, help="default: that of train()")
    parser.add_argument("--plot-only", action="store_true")
    given = parser.parse_args()
    path = CURVES / f"{given.name}.json"
    doc = json.loads(path.read_text()) if given.plot_only else _describe(given.name)
    for seed in range(0 if given.plot_only else given.seeds):
        rows = in_fresh_process("tools.curves", "run", given.name, given.frames, seed)
        print(f"{given.name} seed {seed}: {dict(zip(COLUMNS, rows[-1], strict=True))}", flush=True)
        doc["runs"].append({"seed": seed, **_columns(rows)})
        text = json.dumps(doc, indent=1)
        path.write_text(re.sub(r"\[[^][{}]*\]", lambda row: " ".join(row[0].split()), text) + "\n")
    draw(doc, path.with_suffix(".png"))
    write_page(doc)
    print(summary(doc))


def _describe(name: str) -> dict[str, Any]:
    found = origin()
    versions = {package: version for package, version in found["versions"].items() if version}
    kept = {"commit": found["commit"], "machine": found["machine"], "versions": versions}
    return {"example": name, "date": found["created"][:10], **kept, "runs": []}


def run(name: str, frames: int | None, seed: int) -> list[list[float]]:
    """Train in this process; return a row per batch, with seconds from the call of ``train``."""
    train = runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name=name)["train"]
    budget = inspect.signature(train).parameters["frames"].default if frames is None else frames
    began = time.perf_counter()
    return [
        [row["frames"], row["return"], row["loss"], time.perf_counter() - began]
        for row in train(frames=budget, seed=seed)
    ]


def _columns(rows: list[list[float]]) -> dict[str, list[float]]:
    """Return at most ``POINTS`` rows, the last one among them, by column, to five digits."""
    rows = [row for row in rows if not math.isnan(row[1])]  # no episode had ended
    kept = rows[:: -(-len(rows) // POINTS)]
    kept += [] if kept[-1] is rows[-1] else [rows[-1]]
    columns = zip(COLUMNS, zip(*kept, strict=True), strict=True)
    return {
        name: [float(f"{x:.5g}") if name != "frames" else int(x) for x in xs]
        for name, xs in columns
    }


def draw(doc: dict[str, Any], path: Path) -> None:
    """Draw the mean of all seeds at common numbers of frames, and the band that they span."""
    import matplotlib as mpl
    import numpy as np

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    runs = doc["runs"]
    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained", facecolor="#f3f4f6")
    first, last = max(r["frames"][0] for r in runs), min(r["frames"][-1] for r in runs)
    frames = np.linspace(first, last, POINTS)
    each = np.array([np.interp(frames, run["frames"], run["return"]) for run in runs])
    label = f"mean of {len(runs)} seeds" if len(runs) > 1 else "one seed"
    axes.plot(frames, each.mean(0), color="#1b6e40", linewidth=2, label=label)
    if len(runs) > 1:
        low, high = each.min(0), each.max(0)
        axes.fill_between(frames, low, high, color="#2a9d5c", alpha=0.3, label="least to largest")
    if solved := SOLVED.get(doc["example"]):
        axes.axhline(solved, color="#59636e", linestyle="--", label=f"solved: {solved}")
    if each.min() >= 0:
        axes.set_ylim(bottom=0)
    axes.set_xlabel("frames")
    axes.set_ylabel("mean return")
    axes.set_title(f"examples/{doc['example']}.py, {doc['date']}", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize=8)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def summary(doc: dict[str, Any]) -> str:
    """Return one line: final return of each seed, frames, date, machine and versions.

    A ``note`` in the file, about that recording, follows.
    """
    runs, found, commit = doc["runs"], doc["versions"], doc.get("commit")
    ends = ", ".join(f"{run['return'][-1]:.4g}" for run in runs)
    return (
        f"Return at the end of each seed: {ends} ({runs[0]['frames'][-1]:,} frames; {doc['date']}, "
        f"{doc['machine']['cpu']}, {doc['machine']['usable_cores']} cores, torch {found['torch']}, "
        f"{'GleanRL ' + commit['id'][:8] if commit else 'commit not recorded'})."
        f"{doc.get('note', '')}"
    )


def write_page(doc: dict[str, Any]) -> None:
    """Write picture and summary between the example's two marks in the page, if it has them."""
    name = doc["example"]
    picture = f"![Return of {name}.py](curves/{name}.png)"
    block = f"<!-- curve: {name} -->\n{picture}\n\n{summary(doc)}\n<!-- end -->"
    found = re.compile(rf"<!-- curve: {name} -->.*?<!-- end -->", re.DOTALL)
    if PAGE.exists():
        PAGE.write_text(found.sub(lambda _: block, PAGE.read_text()))


if __name__ == "__main__":
    main()
