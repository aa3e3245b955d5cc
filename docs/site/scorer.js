/* Search: who looks for something wants to do it. Pages that say how come before those that measured it, and before
   lists of what has changed. The other numbers are those of Sphinx. */
var Scorer = {
  first: ["docs/start/", "docs/how-to/"],
  last: ["docs/measured/", "reference/experiments", "files/", "CHANGELOG", "RELEASING"],
  score: ([page, _title, _anchor, _description, score]) => {
    if (Scorer.first.some((begin) => page.startsWith(begin))) return score + 20;
    return Scorer.last.some((begin) => page.startsWith(begin)) ? score - 100 : score;
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
