"""Builds the documentation's site into ``docs/_build/html``; warnings and dead links are errors.

``python -m tools.site [--links]``: ``--links`` also asks every address outside of the site, which
takes a network.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
BUILT = DOCS / "_build"


def main() -> int:
    """Build; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--links", action="store_true", help="check addresses outside of the site")
    given = parser.parse_args()
    return int(build("html") or (given.links and build("linkcheck")))


def build(builder: str) -> bool:
    """Run one of Sphinx's builders; return whether it failed."""
    options = ["--jobs=auto", "--fail-on-warning", "--quiet"]
    options.append("--fresh-env")  # code, too, may have changed
    options.append(f"--doctree-dir={BUILT / 'doctrees'}")
    folders = [str(DOCS), str(BUILT / builder)]
    command = [sys.executable, "-m", "sphinx", "-b", builder, *options, *folders]
    return subprocess.run(command).returncode != 0


if __name__ == "__main__":
    sys.exit(main())
