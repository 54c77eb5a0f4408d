// The requests by the second in which their delay ended: as they were, and as the model has the same ones. Kept for as long as the page is open.

const SPANS = [1, 10, 60]; // seconds that a point is the mean of: so many that most points have requests
const KEPT = 7200;

export class Pairs {
  constructor() {
    Object.assign(this, { rows: new Map(), newest: null, compared: null });
  }

  /** Rows of a new assessment replace those of the same seconds. */
  merge(found) {
    if (!found || found === this.newest) return;
    if (found.compared !== this.compared) this.rows = new Map(); // other times are compared now
    Object.assign(this, { newest: found, compared: found.compared });
    found.at.forEach((at, row) => this.rows.set(at, { at, n: found.n[row], observed: found.observed[row], modelled: found.modelled[row], low: found.low?.[row] ?? null, high: found.high?.[row] ?? null }));
    const oldest = found.at.at(-1) - KEPT;
    for (const at of this.rows.keys()) if (at < oldest) this.rows.delete(at);
  }

  /** The columns at the instants of the other charts: means over the time before each. */
  columns(names, instants) {
    if (instants.length < 2) return names.map(() => instants.map(() => null));
    const rows = [...this.rows.values()].filter(({ at }) => at >= instants[0] - SPANS.at(-1)).sort((a, b) => a.at - b.at);
    const span = Math.max(SPANS.find((each) => dense(rows, each)) ?? SPANS.at(-1), Math.round(instants[1] - instants[0]));
    const found = [];
    let first = 0;
    let last = 0;
    for (const instant of instants) {
      while (last < rows.length && rows[last].at <= instant + 0.5) last += 1;
      while (first < last && rows[first].at <= instant + 0.5 - span) first += 1;
      found.push(names.map((name) => mean(rows.slice(first, last), name)));
    }
    return names.map((_, column) => found.map((row) => row[column]));
  }
}

const dense = (rows, span) => rows.length > 0 && 2 * new Set(rows.map(({ at }) => Math.ceil(at / span))).size * span >= rows.at(-1).at - rows[0].at;

function mean(rows, name) {
  const known = rows.filter((each) => each[name] !== null);
  const n = known.reduce((sum, each) => sum + each.n, 0);
  return n ? known.reduce((sum, each) => sum + each.n * each[name], 0) / n : null;
}
