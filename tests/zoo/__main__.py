"""Check the law for many pairs: ``python -m tests.zoo --help``."""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
from collections import Counter, defaultdict
from fnmatch import fnmatch

from tests.zoo.environments import ENVIRONMENTS
from tests.zoo.laws import check, check_workers, pairs
from tests.zoo.policies import POLICIES


def main() -> int:
    """Check pairs, print those that break the law, and a table of what broke how often."""
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("--all", action="store_true", help="every pair (hours)")
    parser.add_argument("--sample", type=int, default=500, help="so many pairs (500)")
    parser.add_argument("--seed", type=int, default=0, help="which sample")
    parser.add_argument("--policy", default="*", help="only policies named like this")
    parser.add_argument("--env", default="*", help="only environments named like this")
    parser.add_argument("--workers", action="store_true", help="in worker processes")
    given = parser.parse_args()
    chosen = [
        (policy, env)
        for policy, env in pairs(POLICIES, ENVIRONMENTS)
        if fnmatch(policy, given.policy) and fnmatch(env, given.env)
    ]
    if not given.all and len(chosen) > given.sample:
        chosen = random.Random(given.seed).sample(chosen, given.sample)
    broken = judge(chosen, check_workers if given.workers else check)
    return 1 if broken else 0


def judge(chosen: list[tuple[str, str]], law: object) -> int:
    """Check every pair and return how many break the law."""
    start, causes, by = time.monotonic(), Counter(), defaultdict(Counter)
    broken = 0
    for policy, env in chosen:
        found = law(POLICIES[policy], ENVIRONMENTS[env])
        broken += bool(found)
        for part, name in (("policy", policy), ("environment", env)):
            by[part][name] += bool(found)
        if found:
            print(f"{policy} x {env}: {found[0]}", *found[1:4], sep="\n    ", flush=True)
            causes[re.sub(r"\d+", "#", found[0])[:160]] += 1
    taken = time.monotonic() - start
    print(f"\n{broken} of {len(chosen)} pairs break the law ({taken:.0f} s)")
    for title, table in (("cause", causes), *by.items()):
        for name, count in table.most_common(25):
            if count:
                print(f"{title:>12} {count:5} {name}")
    return broken


if __name__ == "__main__":
    sys.exit(main())
