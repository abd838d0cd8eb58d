// Answers whose heading is what was asked come first, before pages that have its words somewhere.
var Scorer = {
  score: ([docname, title, anchor, description, score, filename, kind]) =>
    kind === "title" ? score + 100 : score,
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
