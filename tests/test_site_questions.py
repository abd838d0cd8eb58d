"""Ten questions of users, and the heading of the page that answers each.

The site's search ranks headings first, so a question is found by its words if they are in one.
"""

import re

import pytest
from tests.pages import ROOT

QUESTIONS = {
    "How do I get log-probs into the batch?": ("concepts/batch", "log-probs batch"),
    "What does truncated mean at a batch's end?": ("concepts/episodes", "truncated batch end"),
    "How many frames has a batch that does not divide?": ("concepts/batch", "frames batch divide"),
    "How do I send new weights to workers?": ("concepts/weights", "send new weights workers"),
    "Why is my async data off-policy, by how much?": (
        "concepts/sync_async",
        "asynchronous data off-policy much",
    ),
    "Where does the next observation live at an episode's end?": (
        "concepts/episodes",
        "next observation episode end",
    ),
    "Can I keep a batch?": ("concepts/memory", "keep batch"),
    "How do I seed everything?": ("concepts/seeds", "seed everything"),
    "How do I evaluate without disturbing training?": (
        "howto/evaluate",
        "evaluate without disturbing training",
    ),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_is_answered_under_a_heading_with_its_words(question):
    page, words = QUESTIONS[question]
    text = (ROOT / "docs" / f"{page}.md").read_text()
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    found = [line for line in headings if all(word in line.lower() for word in words.split())]
    assert found, f"no heading of {page} has the words {words!r}"
