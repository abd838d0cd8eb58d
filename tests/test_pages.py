"""The documentation's pages, beside what `tests/pages.py` runs."""

from collections import Counter

import pytest
from tests import pages
from tools import reference

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


def test_what_the_readme_shows_and_start_runs_is_one_program():
    start = [block.source for block in pages.blocks(PAGES["docs/start.md"])]
    shown = [b.source for b in pages.blocks(PAGES["README.md"]) if b.language == "python"]
    assert [source in start for source in shown] == [True, True]


PAGE = """
- in a list:
  ```python
  print(1)
  ```
  <!-- prints -->
  ```text
  1
  ```
<!-- not run: takes a cluster -->
```bash
sbatch job.sh
```
"""


def test_blocks_know_their_lines_and_remarks(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    shown, left_out = pages.blocks(page)
    assert (shown.line, shown.language, shown.source) == (3, "python", "print(1)\n")
    assert (shown.prints, shown.not_run) == ("1\n", None)
    assert (left_out.language, left_out.not_run) == ("bash", "takes a cluster")


def test_blocks_in_a_language_that_would_not_run_are_refused(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```py\nprint(1)\n```\n")
    with pytest.raises(ValueError, match=r"page.md:1: 'py' is neither python, bash nor text"):
        pages.blocks(page)


def test_a_public_name_that_the_site_lacks_is_found():
    assert "gleanrl.SyncDataCollector" in reference.undocumented({"gleanrl.Collector"})


def test_every_public_name_has_a_group_in_the_reference():
    assert all(reference.grouped().values())
