"""The documentation links promises to the tests that pin them."""

import re

from tests.test_pages import PAGES

LINK = re.compile(r"\[`?(test_\w+)`?\]\(([^)#]+\.py)")


def test_linked_tests_exist():
    linked = [
        (name, test, page.parent / file)
        for name, page in PAGES.items()
        for test, file in LINK.findall(page.read_text())
    ]
    assert any(name == "README.md" for name, _, _ in linked)
    missing = [
        (name, test)
        for name, test, file in linked
        if not file.exists() or f"\ndef {test}(" not in file.read_text()
    ]
    assert missing == []
