"""Ten questions of users: each is a heading, or nearly, of the page that answers it.

The site's search shows pages that have all words of a query, best those with a heading like it.
"""

import re

import pytest
from tests.pages import ROOT

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
"""Questions, and the page that answers each under a heading of its own."""
ASKING = {"how", "do", "i"}


def words(text):
    return set(re.findall(r"[a-z]+", text.lower())) - ASKING


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_is_answered_under_a_heading_with_its_words(question):
    page = ROOT / "docs" / f"{QUESTIONS[question]}.md"
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    assert any(words(question) <= words(heading) for heading in headings)
