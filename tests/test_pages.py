"""The documentation's pages, beside what `tests/pages.py` runs."""

from collections import Counter

from tests import pages

PAGES = {
    str(page.relative_to(pages.ROOT)): page
    for page in [*(pages.ROOT / "docs").rglob("*.md"), pages.ROOT / "README.md"]
    if not {"_build", "gallery"} & {*page.parts}
}


def test_blocks_that_are_not_run_are_listed():
    left_out = Counter(
        (name, block.not_run)
        for name in sorted(PAGES)
        for block in pages.blocks(PAGES[name])
        if block.not_run
    )
    lines = [f"- `{name}`: {why} ({count})" for (name, why), count in left_out.items()]
    text = (pages.ROOT / "CONTRIBUTING.md").read_text()
    listed = text.split("<!-- blocks that are not run -->\n")[1].split("<!-- end -->")[0]
    assert listed.splitlines() == lines


def test_pages_are_short():
    lines = {name: len(page.read_text().splitlines()) for name, page in PAGES.items()}
    assert [(name, count) for name, count in lines.items() if count > 250] == []
