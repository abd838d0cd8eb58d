"""Ten questions of users: each is a heading, or nearly, of the page that answers it.

The site's search shows pages that have all words of a query, best those with a heading like it.
"""

import re

import pytest
from tests.pages import ROOT
from tools.site import QUESTIONS

ASKING = {"how", "do", "i"}


def words(text):
    return set(re.findall(r"[a-z]+", text.lower())) - ASKING


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_is_answered_under_a_heading_with_its_words(question):
    page = ROOT / "docs" / f"{QUESTIONS[question]}.md"
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    assert any(words(question) <= words(heading) for heading in headings)
