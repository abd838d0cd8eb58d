"""Publish figures: ``python -m benchmarks.publish [--take NAME=RESULTS.json ...] [--check]``.

Published results lie in ``benchmarks/published``: one file per suite, ``scripts.json`` of
``tools.torchrl_scripts``, and ``reasons.json``, which says why a target is missed. Two things are
made from them and edited by nobody: the tables in README.md and docs, between
``<!-- figures: ... -->`` marks, and the plots in ``docs/pictures``. Several files of one name are
runs of one suite: the median of the runs is published, with the least and the largest run.
``--check`` changes nothing and names the pages and plots that differ from the files.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.torchrl_scripts import LIBRARIES, rate

from benchmarks import picture, scaling
from benchmarks.harness import OURS, compared
from benchmarks.picture import Group, markdown, spread, times

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = Path(__file__).with_name("published")
PICTURES = ROOT / "docs" / "pictures"
SUITES = ("single", "multi", "central", "distributed", "ray", "training_rates")
_MARKED = re.compile(r"(<!-- figures: (\S+)(?: only ([^>]*?))? -->\n)(.*?)(<!-- end -->)", re.S)


def take(name: str, results: Sequence[Path]) -> None:
    """Publish the runs of a suite; cases that were not run again stay as they are."""
    runs = [json.loads(file.read_text()) for file in results]
    path = PUBLISHED / f"{name}.json"
    if name == "scripts":
        _take_scripts(path, runs)
        return
    cases = _published(name)["cases"] if path.exists() else {}
    for case in dict.fromkeys(case for run in runs for case in run["cases"]):
        cases[case] = merged([_entry(run, case) for run in runs if case in run["cases"]])
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"cases": cases}, indent=1) + "\n")


def _take_scripts(path: Path, runs: Sequence[dict[str, Any]]) -> None:
    """Publish the last run of each script; scripts that were not run again stay as they are."""
    if any(len(row.keys() & LIBRARIES) == 1 for run in runs for row in run["scripts"]):
        sys.exit("a run with --only has nothing to compare: take runs of both libraries")
    rows: dict[str, dict[str, Any]] = {}
    for run in [*([_published("scripts")] if path.exists() else []), *runs]:
        origin = {key: run[key] for key in _PROVENANCE if key in run}  # else each row has its own
        for row in run["scripts"]:
            if "gleanrl" in row or row["script"] not in rows:
                rows[row["script"]] = {**row, **origin}
    path.write_text(json.dumps({"scripts": list(rows.values())}, indent=1) + "\n")


def _entry(run: dict[str, Any], case: str) -> dict[str, Any]:
    """Return a case of a run with date, commit, versions, machine and settings of the run."""
    entry = {k: v for k, v in run["cases"][case].items() if k not in ("rates", "cpu_rates")}
    return {**entry, **{key: run.get(key) for key in _PROVENANCE}, "settings": run["settings"]}


_PROVENANCE = "created", "commit", "versions", "machine"


def merged(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one entry for all runs of a case: their median, from the least to the largest."""
    last = entries[-1]
    if len(entries) == 1:
        return last

    def ratios(kind: str) -> dict[str, Any]:
        found = {}
        for name, ratio in last.get(kind, {}).items():
            runs = [one[kind][name]["median"] for one in entries if name in one[kind]]
            found[name] = {**compared(ratio["target"], runs), "between": [min(runs), max(runs)]}
        return found

    rates = {
        name: [
            one["frames_per_second"][name] for one in entries if name in one["frames_per_second"]
        ]
        for name in last["frames_per_second"]
    }
    return {
        **last,
        "frames_per_second": {name: round(statistics.median(rs)) for name, rs in rates.items()},
        "between": {name: [min(rs), max(rs)] for name, rs in rates.items()},
        "ratios": ratios("ratios"),
        "cpu_ratios": ratios("cpu_ratios"),
        "agreement": list(dict.fromkeys(line for one in entries for line in one["agreement"])),
        "skipped": {name: why for one in entries for name, why in one["skipped"].items()},
        "merged": [{k: one.get(k) for k in (*_PROVENANCE, "load_average")} for one in entries],
    }


def _published(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((PUBLISHED / f"{name}.json").read_text())
    return found


def table(name: str, only: str = "") -> str:
    """Return the part of a page with this name as Markdown; of `scaling` ``only`` one case."""
    if name in _ACROSS:
        lines = _ACROSS[name]()
    elif name == "scripts":
        lines = _scripts(_published(name))
    elif name == "scaling":
        lines = scaling.show(_published(name), only)
    else:
        entries = list(_published(name)["cases"].values())
        head, rows = _TABLES.get(name, (_AGAINST, _ratios))
        lines = markdown(head, (row for entry in entries for row in rows(entry)))
        lines += ["", _spread(entries), *_origin(entries)]
    return "\n".join([*lines, ""])


Row = tuple[Any, ...]


def _ratios(entry: dict[str, Any]) -> Iterator[Row]:
    title = entry["title"]
    for other, ratio in entry["ratios"].items():
        target = "" if ratio["target"] is None else f"{ratio['target']:g}"
        if ratio["met"] is False:
            target += ", **missed**"
        yield title, other, _ratio(ratio), target
        title = ""


def _by_cpu(entry: dict[str, Any]) -> Iterator[Row]:
    """Yield the rows of a case with ratios of the learner's CPU time, without Ray's actors."""
    for row, other in zip(_ratios(entry), entry["ratios"], strict=True):
        yield *row, _ratio(entry["cpu_ratios"][other])


def systems(entry: dict[str, Any]) -> Iterator[Row]:
    """Yield a row per system, with its rate."""
    title = entry["title"]
    for system, rate_of in entry["frames_per_second"].items():
        low, high = entry.get("between", entry["quartiles"])[system]
        share = _ratio(entry["ratios"][system]) if system in entry["ratios"] else ""
        name = "GleanRL" if system == OURS else system
        yield title, name, f"{rate_of:,} ({low:,} to {high:,})", share
        title = ""


_AGAINST = "work", "against", "ratio (spread)", "target"
RATES = "work", "loop", "frames/s (spread)", "GleanRL over it"
_TABLES = {
    "training_rates": (RATES, systems),
    "gpu": (RATES, systems),
    "ray": ((*_AGAINST, "ratio by the learner's CPU time"), _by_cpu),
}
"""Head and rows of suites whose rates are shown, not only ratios."""


def _ratio(ratio: dict[str, Any]) -> str:
    low, high = map(times, spread(ratio))
    return f"{times(ratio['median'])} ({low} to {high})"


# -- parts of pages about several suites -----------------------------------------------------------

_REASONS = "work", "against", "ratio (spread)", "target", "likely reason"


def _targets() -> tuple[str, list[tuple[float, dict[str, Any], Row]]]:
    """Return how many targets of all suites are missed, and these.

    Each of them is the part of the target that is reached, the case's entry and a row.
    """
    why = _published("reasons")
    number, missed = 0, []
    for suite in SUITES:
        for case, entry in _published(suite)["cases"].items():
            for other, ratio in entry["ratios"].items():
                number += ratio["target"] is not None
                if ratio["met"] is False:
                    reason = why.get(f"{suite}/{case}/{other}", "Not known.")
                    cells = entry["title"], other, _ratio(ratio), f"{ratio['target']:g}", reason
                    missed.append((ratio["median"] / ratio["target"], entry, cells))
    return f"{len(missed)} of {number} targets are missed", missed


def _all_missed() -> list[str]:
    """Return a row per missed target of all suites, with the reason."""
    count, missed = _targets()
    entries = [entry for _, entry, _ in missed]
    lines = [f"{count}:", "", *markdown(_REASONS, (row for _, _, row in missed)), ""]
    return [*lines, _spread(entries), *_origin(entries)] if entries else lines


def _limits() -> list[str]:
    """Return the number of missed targets and the three that are missed by most."""
    count, missed = _targets()
    worst = sorted(missed, key=lambda one: one[0])[:3]
    table = markdown(_REASONS, (row for _, _, row in worst))
    return [f"{count}. Furthest from the target are:", "", *table]


def _training_included() -> list[str]:
    """Return a sentence: the least and the largest median ratio of each training loop."""
    cases = _published("training_rates")["cases"]
    parts = []
    for title, case in TRAINING.items():
        medians = [ratio["median"] for ratio in cases[case]["ratios"].values()]
        parts.append(f"{times(min(medians))} to {times(max(medians))} times ({title})")
    return [f"With training included, the frame rate is {', '.join(parts)} that of the others."]


# -- other tables --------------------------------------------------------------------------------


def _scripts(document: dict[str, Any]) -> list[str]:
    """Return a row per script that ran on GleanRL."""
    rows = []
    for entry in document["scripts"]:
        ours, theirs = entry.get("gleanrl"), entry.get("torchrl")
        if ours and ours["ended"] in ("finished", "limit"):
            runs = (rate(run["ended"], run["collecting"]) if run else "-" for run in (ours, theirs))
            rows.append((f"`{entry['script']}`", *runs, ", ".join(map(times, _ratios_of([entry])))))
    head = "script", "GleanRL, frames/s", "TorchRL, frames/s", "ratio"
    measured = [entry for entry in document["scripts"] if "gleanrl" in entry]
    return [*markdown(head, rows), "", *_scripts_median(), *_origin(measured)]


def _ratios_of(scripts: Iterable[dict[str, Any]]) -> list[float]:
    """Return our rate over TorchRL's of each script that has both."""
    both = [(entry.get("gleanrl"), entry.get("torchrl")) for entry in scripts]
    rates = [(a["collecting"], b["collecting"]) for a, b in both if a and b]
    return [ours / theirs for ours, theirs in rates if ours and theirs]


def _scripts_median() -> list[str]:
    """Return a sentence on all scripts."""
    ratios = _ratios_of(_published("scripts")["scripts"])
    if not ratios:
        return ["No script was measured with both libraries."]
    return [
        f"Over {len(ratios)} of TorchRL's own scripts, with only the collector's import changed, "
        f"GleanRL collects {times(statistics.median(ratios))} times as fast in the median (from "
        f"{times(min(ratios))} to {times(max(ratios))})."
    ]


_ACROSS = {
    "missed": _all_missed,
    "limits": _limits,
    "training_included": _training_included,
    "scripts_median": _scripts_median,
}


def rates(cases: Iterable[dict[str, Any]]) -> list[str]:
    """Return the rows of a run that is not published."""
    return markdown(RATES, (row for one in cases for row in systems(one)))


# -- where figures come from -----------------------------------------------------------------------


def _origin(entries: Sequence[dict[str, Any]]) -> list[str]:
    """Return days, machine, load, commits and versions that figures were measured with."""
    runs = [run for entry in entries for run in entry.get("merged", [entry])]
    days = sorted({run["created"][:10] for run in runs})
    loads = [(run.get("load_average") or run["machine"]["load_average"])[0] for run in runs]
    machines, versions = [run["machine"] for run in runs], entries[-1]["versions"]
    torches = " or ".join(sorted({run["versions"]["torch"] for run in runs}))
    load = " to ".join(sorted({f"{min(loads):.1f}", f"{max(loads):.1f}"}, key=float))
    names = ("tensordict", "gymnasium", "torchrl", "stable-baselines3")
    installed = [f"{name} {versions[name]}" for name in names if versions[name]]
    cores = dict.fromkeys(f"{one['usable_cores']} cores of {one['cpu']}" for one in machines)
    gpus = dict.fromkeys(one["gpu"] for one in machines if one.get("gpu"))
    made_of = ", ".join([" or ".join(cores), *gpus])
    return [
        f"{' and '.join(days)}, {made_of}, load {load}.",
        _commits(runs),
        f"Python {versions['python']}, torch {torches}, {', '.join(installed)}.",
    ]


def _spread(entries: Sequence[dict[str, Any]]) -> str:
    """Return the meaning of the spread that a table or a picture shows."""
    numbers = sorted({len(entry.get("merged", [entry])) for entry in entries})
    runs = [run["created"][:13] for entry in entries for run in entry.get("merged", [])]
    hours = f", begun in {len(set(runs))} hours" if len(set(runs)) > 1 else ""
    single = "median and quartiles of the turns of one run"
    if numbers == [1]:
        return f"{single.capitalize()}."
    several = f"Median, least and largest of {' or '.join(f'{n}' for n in numbers if n > 1)} runs"
    return f"{several}{hours}{f'; some rows: {single}' if numbers[0] == 1 else ''}."


def _commits(runs: Sequence[dict[str, Any]]) -> str:
    """Return GleanRL's versions and commits; older files name neither."""
    known = []
    for run in runs:
        if commit := run.get("commit"):
            changed = " with changes" if commit["changed"] else ""
            known.append(f"{run['versions']['gleanrl']} ({commit['id'][:8]}{changed})")
    unknown = ["version and commit not recorded"] if len(known) < len(runs) else []
    return f"GleanRL: {', '.join([*dict.fromkeys(known), *unknown])}."


def rewritten(page: str) -> str:
    """Return ``page`` with every marked table written anew."""
    return _MARKED.sub(lambda m: f"{m[1]}{table(m[2], m[3] or '')}{m[5]}", page)


TRAINING = {
    "PPO, CartPole": "train-cartpole-ppo",
    "PPO, HalfCheetah": "train-halfcheetah-ppo",
    "DQN, Pong": "train-pong-dqn",
}
"""Cases of the suite of whole training loops, and how pages and pictures call them."""
_GLOO = "TorchRL DistributedCollector, mp, gloo"
_TRAINED = {"CleanRL loop": "CleanRL loop", "SB3": "SB3", "TorchRL Collector": "TorchRL"}
OVERVIEW = {
    "One process, CartPole": [
        ("single", "cartpole-mlp-x16", "CleanRL loop", "CleanRL loop"),
        ("single", "cartpole-mlp-x16", "SB3 PPO", "SB3"),
        ("single", "cartpole-mlp-x16", "TorchRL SerialEnv", "TorchRL"),
    ],
    "32 CartPoles: two workers, against a process for each": [
        ("multi", "process-peers", "AsyncVectorEnv", "Gymnasium AsyncVectorEnv"),
        ("multi", "process-peers", "SB3 SubprocVecEnv", "SB3 SubprocVecEnv"),
    ],
    "Two worker processes each, CartPole": [
        ("multi", "cartpole-sync", "TorchRL MultiSyncCollector", "TorchRL, sync"),
        ("multi", "cartpole-async", "TorchRL MultiAsyncCollector", "TorchRL, async"),
    ],
    "Two nodes over gloo, CartPole": [
        ("distributed", "torchrl-sync", _GLOO, "TorchRL, sync"),
        ("distributed", "torchrl-async", _GLOO, "TorchRL, async"),
    ],
    "Two Ray actors, CartPole": [
        ("ray", "cartpole-sync", "TorchRL RayCollector", "TorchRL, sync"),
        ("ray", "cartpole-async", "TorchRL RayCollector", "TorchRL, async"),
    ],
    **{
        f"Training included: {title}": [
            ("training_rates", case, *pair) for pair in _TRAINED.items()
        ]
        for title, case in TRAINING.items()
    },
}
"""Bars of the picture over all suites: suite, case, reference, and how the picture calls it."""
README = {
    name: OVERVIEW[name] for name in ("One process, CartPole", "Training included: PPO, CartPole")
}
"""Bars of the README's picture."""


def pictures() -> Iterator[tuple[Path, str]]:
    """Yield every plot with its path: one per suite, one over all and the README's."""
    suites = {name: _published(name) for name in SUITES}
    title = "Frames per second: GleanRL over others"
    for name, document in suites.items():
        entries = document["cases"].values()
        drawn = picture.draw(title, [*map(picture.group, entries)], _caption(*entries))
        yield PICTURES / f"benchmark-{name}.svg", drawn
    for name, heads in {"throughput": OVERVIEW, "speed": README}.items():
        groups, used = [], []
        for head, chosen in heads.items():
            found = [suites[suite]["cases"][case] for suite, case, _, _ in chosen]
            bars = [picture.bar(e, c[2], c[3]) for e, c in zip(found, chosen, strict=True)]
            groups.append(Group(head, bars))
            used += found
        yield PICTURES / f"{name}.svg", picture.draw(title, groups, _caption(*used))


def _caption(*entries: dict[str, Any]) -> list[str]:
    text = [
        "Bar and line: 1x is as fast. The axis is logarithmic.",
        _spread(entries),
        *_origin(entries),
    ]
    return [line for one in text for line in textwrap.wrap(one, 76)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Publish and rewrite, or check.

    Returns:
        1 if ``--check`` found a page that differs from the published figures, else 0.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.publish", description=__doc__)
    parser.add_argument("--take", nargs="+", default=[], metavar="NAME=FILE")
    parser.add_argument("--check", action="store_true", help="change nothing")
    given = parser.parse_args(arguments)
    runs: dict[str, list[Path]] = {}
    for name, _, file in (item.partition("=") for item in given.take):
        runs.setdefault(name, []).append(Path(file))
    for name, files in runs.items():
        take(name, files)
    stale = []
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    made = [(path, rewritten(path.read_text())) for path in pages]
    for path, new in [*made, *pictures()]:
        if not path.exists() or path.read_text() != new:
            stale.append(path.name)
            if not given.check:
                path.parent.mkdir(exist_ok=True)
                path.write_text(new)
    if given.check and stale:
        print(f"{', '.join(stale)}: run python -m benchmarks.publish", file=sys.stderr)
    return int(given.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
