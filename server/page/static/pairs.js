// The requests by the second in which their delay ended: as they were, and as the model has the same ones. Kept for as long as the page is open.

const STEPS = [1, 10, 60]; // seconds of a point: so many that most have requests
const FINE = 900; // longer views begin with the second
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
    found.at.forEach((at, row) => this.rows.set(at, { n: found.n[row], observed: found.observed[row], modelled: found.modelled[row], low: found.low?.[row] ?? null, high: found.high?.[row] ?? null }));
    const oldest = found.at.at(-1) - KEPT;
    for (const at of this.rows.keys()) if (at < oldest) this.rows.delete(at);
  }

  /** As `History.series`, up to `last`. */
  series(names, { seconds, zoom }, last) {
    const end = zoom?.end ?? last;
    const start = zoom?.start ?? last - seconds;
    const own = [...this.rows.keys()].filter((at) => at > start && at <= end + 1).sort((a, b) => a - b);
    const step = STEPS.slice(end - start <= FINE ? 0 : 1).find((each) => dense(own, each)) ?? STEPS.at(-1);
    const bins = new Map();
    for (const at of own) {
      const bin = Math.ceil(at / step) * step;
      bins.set(bin, [...(bins.get(bin) ?? []), this.rows.get(at)]);
    }
    const rows = [];
    for (const [at, members] of bins) {
      if (rows.length && at - rows.at(-1)[0] > 3 * step) rows.push([rows.at(-1)[0] + step, ...names.map(() => null)]);
      rows.push([at, ...names.map((name) => mean(members, name))]);
    }
    return { end, data: [0, ...names.map((_, index) => index + 1)].map((column) => rows.map((row) => row[column])) };
  }
}

const dense = (at, step) => at.length > 0 && 2 * new Set(at.map((each) => Math.ceil(each / step))).size * step >= at.at(-1) - at[0];

function mean(members, name) {
  const known = members.filter((each) => each[name] !== null);
  const n = known.reduce((sum, each) => sum + each.n, 0);
  return n ? known.reduce((sum, each) => sum + each.n * each[name], 0) / n : null;
}
