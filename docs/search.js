// Sphinx scores a page by its best word only, so many pages tie, and links to the top of the page.
// Here a heading that is what was asked comes first; then pages that teach, and pages and sections
// with more of the words in their titles. A page with such a section is linked to there. A name of
// the API that is what was asked comes after pages that have its words in their titles.
const wordsOf = (text) => text.toLowerCase().split(/[^\p{L}\p{N}]+/u);
const TEACHES = { concepts: 9, start: 8, howto: 8, migration: 8 };
var Scorer = {
  score: (result) => {
    const [page, title, anchor, description, score, filename, kind] = result;
    if (kind === "object") return score;
    const asked = new URLSearchParams(location.search).get("q");
    const words = wordsOf(asked).filter((word) => word.length > 2);
    const hits = (heading) => {
      const there = wordsOf(heading);
      return words.filter((word) => there.some((other) => other.startsWith(word))).length;
    };
    let most = 5 * hits(title);
    if (kind === "text")
      for (const [heading, places] of Object.entries(Search._index.alltitles))
        for (const [number, id] of places)
          if (id && Search._index.docnames[number] === page && 4 * hits(heading) > most) {
            most = 4 * hits(heading);
            result[1] = `${title} > ${heading}`;
            result[2] = `#${id}`;
          }
    const whole = kind === "title" && words.length > 1;
    return score + most + (TEACHES[page.split("/")[0]] ?? 0) + (whole ? 100 : 0);
  },
  objNameMatch: 13,
  objPartialMatch: 1,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
