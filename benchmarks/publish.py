"""Publish figures: ``python -m benchmarks.publish [--take NAME=RESULTS.json ...] [--check]``.

Published results lie in ``benchmarks/published``: one file per suite, and ``scripts.json`` of
``tools.torchrl_scripts``. Two things are made from them and edited by nobody: the tables in
README.md and docs, between ``<!-- figures: ... -->`` marks, and the plots in ``docs/pictures``.
``--check`` changes nothing and names the pages and plots that differ from the files.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.torchrl_scripts import Result, rate

from benchmarks import picture, scaling
from benchmarks.harness import OURS, summary
from benchmarks.picture import Group, times

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = Path(__file__).with_name("published")
PICTURES = ROOT / "docs" / "pictures"
SUITES = ("single", "multi", "distributed", "ray", "training_rates")
_MARKED = re.compile(r"(<!-- figures: (\S+)(?: only ([^>]*?))? -->\n)(.*?)(<!-- end -->)", re.S)


def take(name: str, results: Path) -> None:
    """Publish the results of a suite; cases that were not run again stay as they are."""
    found = json.loads(results.read_text())
    path = PUBLISHED / f"{name}.json"
    if "scripts" in found:
        path.write_text(json.dumps(found, indent=1) + "\n")
        return
    cases: dict[str, Any] = json.loads(path.read_text())["cases"] if path.exists() else {}
    here = {"created": found["created"], "versions": found["versions"], "machine": found["machine"]}
    for case, entry in found["cases"].items():
        entry = {key: entry[key] for key in entry if key not in ("rates", "cpu_rates")}
        cases[case] = {**entry, **here, "settings": found["settings"]}
    document = {"cases": cases}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def table(name: str, only: str = "") -> str:
    """Return the rows of a published suite as Markdown; ``only`` some cases, by commas."""
    document = json.loads((PUBLISHED / f"{name}.json").read_text())
    if name in _WHOLE:
        return "\n".join([*_WHOLE[name](document, only), ""])
    chosen = [case.strip() for case in only.split(",")] if only else list(document["cases"])
    head, lines = _TABLES.get(name, (_AGAINST, _rows))
    rows = [*head]
    for case in chosen:
        rows += lines(document["cases"][case])
    entries = [document["cases"][case] for case in chosen]
    return "\n".join([*rows, "", *_origin(entries), ""])


def _rows(entry: dict[str, Any]) -> Iterator[str]:
    title = entry["title"]
    for other, ratio in entry["ratios"].items():
        asked = "" if ratio["target"] is None else f"{ratio['target']:g}"
        if ratio["met"] is False:
            asked += ", **missed**"
        spread = f"{times(ratio['q1'])} to {times(ratio['q3'])}"
        yield f"| {title} | {other} | {times(ratio['median'])} ({spread}) | {asked} |"
        title = ""


def systems(entry: dict[str, Any]) -> Iterator[str]:
    """Yield a row per system, with its rate."""
    title = entry["title"]
    for system, rate_of in entry["frames_per_second"].items():
        low, high = entry["quartiles"][system]
        ratio = entry["ratios"].get(system)
        share = "" if ratio is None else times(ratio["median"])
        spread = "" if ratio is None else f" ({times(ratio['q1'])} to {times(ratio['q3'])})"
        name = "GleanRL" if system == OURS else system
        yield f"| {title} | {name} | {rate_of:,} ({low:,} to {high:,}) | {share}{spread} |"
        title = ""


_AGAINST = "| work | against | ratio (quartiles) | asked for |", "|---|---|---|---|"
RATES = "| work | loop | frames/s (quartiles) | GleanRL over it |", "|---|---|---|---|"
_TABLES = {"training_rates": (RATES, systems)}
"""Head and rows of suites whose rates are shown, not only ratios."""


def _scripts(document: dict[str, Any], _: str) -> Iterator[str]:
    """Yield a row per script that ran on GleanRL."""
    yield "| script | GleanRL, frames/s | TorchRL, frames/s |"
    yield "|---|---|---|"
    for entry in document["scripts"]:
        ours, theirs = (
            Result(**entry[name]) if name in entry else None for name in ("gleanrl", "torchrl")
        )
        if ours is not None and ours.ran:
            yield f"| `{entry['script']}` | {rate(ours)} | {rate(theirs)} |"
    yield from ("", *_origin([document]))


def _training(document: dict[str, Any], _: str) -> Iterator[str]:
    """Yield a row per collector: seconds until a return is reached."""
    yield "| collector | seconds: median (least to most) | times GleanRL's |"
    yield "|---|---|---|"
    ratio = document["ratio"]
    more = {"TorchRL": f"{times(ratio['median'])} ({times(ratio['min'])} to {times(ratio['max'])})"}
    for name, found in document["seconds"].items():
        seconds = f"{found['median']:.1f} ({found['min']:.1f} to {found['max']:.1f})"
        yield f"| {name} | {seconds} | {more.get(name, '')} |"
    runs = len(next(iter(document["runs"].values())))
    yield from ("", f"Until a return of {document['target']:g}, {runs} seeds.")
    yield from _origin([document])


def _watching(document: dict[str, Any], _: str) -> Iterator[str]:
    """Yield a row per size of batches: percent of the time that each part of watching takes."""
    cases = document["cases"]
    names = list(dict.fromkeys(n for one in cases.values() for n in one["rounds"][0]["parts"]))
    heads = " | ".join((*names, "all (quartiles)", "by turns", "timeline"))
    yield f"| batches | microseconds each | {heads} |"
    yield f"|---|---|{'---|' * len(names)}---|---|---|"
    for case, found in cases.items():
        parts = [[one["parts"][n] for one in found["rounds"] if n in one["parts"]] for n in names]
        own = " | ".join(f"{summary(part)['median']:.2f} %" if part else "" for part in parts)
        percent, timeline = found["percent"], found["timeline"]
        turns = f"{found['turns']['median']:.1f} %" if "turns" in found else ""
        spread = f"{percent['median']:.2f} % ({percent['q1']:.2f} to {percent['q3']:.2f})"
        micro = f"{found['microseconds']['median']:,.0f}"
        others = f"{turns} | {timeline['median']:.2f} %"
        yield f"| {case} | {micro} | {own} | {spread} | {others} |"
    yield from ("", *_origin([document]))


def _scaling(document: dict[str, Any], only: str) -> list[str]:
    """Return the simulated rows of one case, or the straggler factors."""
    if only == "stragglers":
        return scaling.show_stragglers(document[only])
    return scaling.show(document["tables"][only])


_WHOLE: dict[str, Callable[[dict[str, Any], str], Iterable[str]]] = {
    "scripts": _scripts,
    "training": _training,
    "scaling": _scaling,
    "watching": _watching,
}
"""Files that are not a suite's, and what their tables are."""


def _origin(entries: Sequence[dict[str, Any]]) -> list[str]:
    """Return the days, machine, load and versions that figures were measured with."""
    days = sorted({entry["created"][:10] for entry in entries})
    loads = [entry["load_average"][0] for entry in entries if entry.get("load_average")]
    machine, versions = entries[-1]["machine"], entries[-1]["versions"]
    spread = sorted({f"{min(loads):.1f}", f"{max(loads):.1f}"}, key=float) if loads else []
    load = f", load {' to '.join(spread)}" if spread else ""
    names = ("torch", "tensordict", "gymnasium", "torchrl", "stable-baselines3")
    return [
        f"{' and '.join(days)}, {machine['usable_cores']} cores of {machine['cpu']}{load}.",
        f"Python {versions['python']}, {', '.join(f'{n} {versions[n]}' for n in names)}.",
    ]


def rewritten(page: str) -> str:
    """Return ``page`` with every marked table written anew."""
    return _MARKED.sub(lambda m: f"{m[1]}{table(m[2], m[3] or '')}{m[5]}", page)


_GLOO = "TorchRL DistributedCollector, mp, gloo"
OVERVIEW = {
    "One process, CartPole": [
        ("single", "cartpole-mlp-x16", "CleanRL loop", "CleanRL loop"),
        ("single", "cartpole-mlp-x16", "SB3 PPO", "SB3"),
        ("single", "cartpole-mlp-x16", "TorchRL SerialEnv", "TorchRL"),
    ],
    "Two worker processes, CartPole": [
        ("multi", "process-peers", "AsyncVectorEnv", "Gymnasium AsyncVectorEnv"),
        ("multi", "process-peers", "SB3 SubprocVecEnv", "SB3 SubprocVecEnv"),
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
        title: [
            ("training_rates", case, "CleanRL loop", "CleanRL loop"),
            ("training_rates", case, "SB3", "SB3"),
            ("training_rates", case, "TorchRL Collector", "TorchRL"),
        ]
        for title, case in {
            "Training included: PPO, CartPole": "train-cartpole-ppo",
            "Training included: PPO, HalfCheetah": "train-halfcheetah-ppo",
            "Training included: DQN, Pong": "train-pong-dqn",
        }.items()
    },
}
"""Bars of the README's picture: suite, case, reference, and how the picture calls it."""


def pictures() -> Iterator[tuple[Path, str]]:
    """Yield every plot with its path: one per suite, and ``throughput.svg`` over all."""
    suites = {name: json.loads((PUBLISHED / f"{name}.json").read_text()) for name in SUITES}
    title = "Frames per second: GleanRL over others"
    for name, document in suites.items():
        entries = document["cases"].values()
        drawn = picture.draw(title, [*map(picture.group, entries)], _caption(*entries))
        yield PICTURES / f"benchmark-{name}.svg", drawn
    groups, used = [], []
    for head, chosen in OVERVIEW.items():
        entries = [suites[suite]["cases"][case] for suite, case, _, _ in chosen]
        bars = [picture.bar(e, c[2], c[3]) for e, c in zip(entries, chosen, strict=True)]
        groups.append(Group(head, bars))
        used += entries
    simulated = json.loads((PUBLISHED / "scaling.json").read_text())
    yield PICTURES / "scaling.svg", scaling.draw(simulated["tables"])
    yield PICTURES / "throughput.svg", picture.draw(title, groups, _caption(*used))


def _caption(*entries: dict[str, Any]) -> list[str]:
    first, second = _origin(entries)
    head, _, tail = second.partition(", torchrl")
    return [
        "Bars: median of alternating runs. Lines: quartiles. 1x: as fast.",
        *(first, f"{head},", f"torchrl{tail}"),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Publish and rewrite, or check.

    Returns:
        1 if ``--check`` found a page that differs from the published figures, else 0.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.publish", description=__doc__)
    parser.add_argument("--take", nargs="+", default=[], metavar="NAME=FILE")
    parser.add_argument("--check", action="store_true", help="change nothing")
    given = parser.parse_args(arguments)
    for name, _, file in (item.partition("=") for item in given.take):
        take(name, Path(file))
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
