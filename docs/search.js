// Sphinx scores a page by its best word only, so many pages tie. A heading that is what was asked
// comes first; then pages that teach, and pages with more of the words in their title.
var Scorer = {
  score: ([page, title, anchor, description, score, filename, kind]) => {
    const asked = new URLSearchParams(location.search).get("q").toLowerCase();
    const words = asked.split(/[^\p{L}\p{N}_]+/u).filter((word) => word.length > 2);
    const heading = title.toLowerCase();
    return (
      score +
      (kind === "title" ? 100 : 0) +
      (/^(start|concepts|howto|migration)\b/.test(page) ? 6 : 0) +
      3 * words.filter((word) => heading.includes(word)).length
    );
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
