// Sphinx scores a page by its best word only, so many pages tie, and links to the top of the page.
// Here a heading that is what was asked comes first; then pages that teach, and pages and sections
// with more of the words in their titles. A page with such a section is linked to there.
var Scorer = {
  score: (result) => {
    const [page, title, anchor, description, score, filename, kind] = result;
    const asked = new URLSearchParams(location.search).get("q").toLowerCase();
    const words = asked.split(/[^\p{L}\p{N}_]+/u).filter((word) => word.length > 2);
    const hits = (heading) =>
      words.filter((word) => heading.toLowerCase().includes(word)).length;
    let most = hits(title);
    if (kind === "text")
      for (const [heading, places] of Object.entries(Search._index.alltitles))
        for (const [number, id] of places)
          if (id && Search._index.docnames[number] === page && hits(heading) > most) {
            most = hits(heading);
            result[1] = `${title} > ${heading}`;
            result[2] = `#${id}`;
          }
    const teaches = /^(start|concepts|howto|migration)\b/.test(page);
    return score + 3 * most + (teaches ? 6 : 0) + (kind === "title" ? 100 : 0);
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
