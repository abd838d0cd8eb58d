"""The pages of the documentation are tests, too: `tests/pages.py` runs their blocks."""

from tests.pages import pytest_collect_file as pytest_collect_file

collect_ignore_glob = ["docs/conf.py", "docs/_build/*", "docs/gallery/*", "docs/reference/*"]
