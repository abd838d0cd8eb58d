"""Check the law for many pairs: ``python -m tests.zoo --help``."""

from __future__ import annotations

import argparse
import itertools
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from fnmatch import fnmatch

from tests.zoo.compositions import Composition
from tests.zoo.environments import ENVIRONMENTS
from tests.zoo.laws import check, check_workers, pairs
from tests.zoo.policies import POLICIES


def main() -> int:
    """Check pairs, show those that break the law, and a table of what broke how often."""
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("--all", action="store_true", help="every pair (hours)")
    parser.add_argument("--sample", type=int, default=500, help="so many pairs (500)")
    parser.add_argument("--seed", type=int, default=0, help="which sample")
    parser.add_argument("--policy", default="*", help="only policies named like this")
    parser.add_argument("--env", default="*", help="only environments named like this")
    parser.add_argument("--workers", action="store_true", help="in worker processes")
    parser.add_argument(
        "--compositions",
        type=int,
        metavar="N",
        help="instead N environments with TorchRL's transforms drawn at random, from --seed on",
    )
    given = parser.parse_args()
    if given.compositions is not None:
        return 1 if judge_compositions(given.seed, given.compositions, given.workers) else 0
    chosen = [
        (policy, env)
        for policy, env in pairs(POLICIES, ENVIRONMENTS)
        if fnmatch(policy, given.policy) and fnmatch(env, given.env)
    ]
    if not given.all and len(chosen) > given.sample:
        chosen = random.Random(given.seed).sample(chosen, given.sample)
    return 1 if judge(chosen, check_workers if given.workers else check) else 0


def judge_compositions(first: int, count: int, workers: bool) -> int:
    """Check so many compositions, and return how many break the law."""
    start, broken, law = time.monotonic(), 0, check_workers if workers else check
    made = 0
    for one in map(Composition, itertools.count(first)):
        if made == count:
            break
        if (env := one.case()) is None:
            continue
        made += 1
        policy = one.policy_of(env)
        if found := law(policy, env):
            broken += 1
            show(f"seed {one.seed}, {policy.name}: " + "\n    ".join(found[:4]))
    taken = time.monotonic() - start
    show(f"\n{broken} of {made} compositions, up to seed {one.seed}, break the law ({taken:.0f} s)")
    return broken


def judge(chosen: list[tuple[str, str]], law: Callable[..., list[str]]) -> int:
    """Check every pair and return how many break the law."""
    start, broken = time.monotonic(), 0
    tables: dict[str, Counter[str]] = {"cause": Counter(), "policy": Counter(), "env": Counter()}
    for policy, env in chosen:
        found = law(POLICIES[policy], ENVIRONMENTS[env])
        if not found:
            continue
        broken += 1
        show(f"{policy} x {env}: " + "\n    ".join(found[:4]))
        rows = (("cause", re.sub(r"\d+", "#", found[0])[:160]), ("policy", policy), ("env", env))
        for title, name in rows:
            tables[title][name] += 1
    taken = time.monotonic() - start
    show(f"\n{broken} of {len(chosen)} pairs break the law ({taken:.0f} s)")
    for title, table in tables.items():
        for name, count in table.most_common(25):
            show(f"{title:>8} {count:5} {name}")
    return broken


def show(text: str) -> None:
    """Write ``text`` at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
