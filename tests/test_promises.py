"""The documentation links promises to the tests that pin them."""

import re

from tests.pages import ROOT
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


def test_the_design_names_what_exists():
    folders = [ROOT / "src" / "gleanrl", *(ROOT / name for name in ("tests", "tools"))]
    files = [str(file.relative_to(ROOT)) for folder in folders for file in folder.rglob("*.py")]
    words = set(re.findall(r"\w+", "".join((ROOT / file).read_text() for file in files)))
    missing = []
    for name in ("docs/design.md", "docs/decisions.md"):
        text = re.sub(r"```.*?```", "", PAGES[name].read_text(), flags=re.S)
        for code in re.findall(r"`([^`]+)`", text):
            for file in re.findall(r"^[\w/]+\.py", code):
                known = "KIND" in file or "NAME" in file
                if not known and not any(f"/{path}".endswith(f"/{file}") for path in files):
                    missing.append((name, file))
            if re.fullmatch(r"_?[A-Za-z][\w.]*", code) and not code.endswith(".py"):
                missing += [(name, code) for part in code.split(".") if part not in words]
    assert missing == []
