"""Builds the documentation's site into ``docs/_build/html``; warnings and dead links are errors.

``python -m tools.site [--links] [--serve PORT]``: ``--links`` asks every address outside of the
site, too, which takes a network; ``--serve`` shows the built site to this machine's browsers.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
BUILT = DOCS / "_build"
QUESTIONS = {
    "How do I get log-probs into the batch?": "concepts/batch",
    "How many frames does a batch have when it does not divide?": "concepts/batch",
    "Which worker died and why?": "howto/debug_a_hang",
    "What does truncated mean at a batch's end?": "concepts/episodes",
    "Where does the next observation live at an episode's end?": "concepts/episodes",
    "How do I send new weights to workers?": "concepts/weights",
    "Why is my async data off-policy, and by how much?": "concepts/sync_async",
    "Can I keep a batch?": "concepts/memory",
    "How do I seed everything?": "concepts/seeds",
    "How do I evaluate without disturbing training?": "howto/evaluate",
}
"""What readers ask, and the page with such a heading; `tools.screenshots` asks the search."""
WORDS = {
    "log_prob": "howto/policies",
    "set_seed": "concepts/seeds",
    "stale policy": "concepts/sync_async",
    "update_policy_weights_": "concepts/weights",
}
"""What readers search for, and the page that has to come first."""


def main() -> int:
    """Build; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--links", action="store_true", help="check addresses outside of the site")
    parser.add_argument("--serve", type=int, metavar="PORT", help="serve the site on localhost")
    given = parser.parse_args()
    failed = build("html") or (given.links and build("linkcheck"))
    if not failed and given.serve is not None:
        folder = str(BUILT / "html")
        handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
        http.server.ThreadingHTTPServer(("127.0.0.1", given.serve), handler).serve_forever()
    return int(failed)


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
