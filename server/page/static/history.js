// What the charts draw: rows by the second and by ten seconds, from the gateway's history and from the stream.
// A restart of the gateway empties its history, not the page's; where nothing is known the lines have a gap.

const FINE = 900;
const COARSE = 720;
const STEP = 10; // fine rows to a coarse one

export class History {
  constructor() {
    this.columns = [];
    this.fine = [];
    this.coarse = [];
    this.open = [];
  }

  /** What the gateway remembers; rows that the page has of other times stay. */
  merge(found) {
    this.columns = found.columns;
    this.fine = joined(this.fine, rowsOf(found.fine)).slice(-FINE);
    this.coarse = joined(this.coarse, rowsOf(found.coarse)).slice(-COARSE);
    this.open = [];
  }

  add(row) {
    if (this.fine.length && row[0] <= this.fine.at(-1)[0]) return;
    this.fine.push(row);
    if (this.fine.length > FINE) this.fine.shift();
    this.open.push(row);
    if (this.open.length < STEP) return;
    this.coarse.push(row.map((_, column) => mean(this.open.map((each) => each[column]))));
    if (this.coarse.length > COARSE) this.coarse.shift();
    this.open = [];
  }

  get last() {
    return this.fine.at(-1) ?? null;
  }

  /** Columns by name over the last `seconds`, or over the zoomed part; gaps are filled with a row of nothing. */
  series(names, { seconds, zoom }) {
    const last = this.last?.[0] ?? Date.now() / 1e3;
    const end = zoom?.end ?? last;
    const start = zoom?.start ?? last - seconds;
    const detailed = zoom ? start >= (this.fine[0]?.[0] ?? 0) - STEP : seconds <= FINE;
    const rows = detailed ? this.fine : [...this.coarse, ...this.fine.slice(-1)];
    const shown = gapped(rows.filter((row) => row[0] >= start - STEP && row[0] <= end + STEP), detailed ? 1 : STEP);
    const at = names.map((name) => this.columns.indexOf(name));
    return { end, data: [shown.map((row) => row[0]), ...at.map((column) => shown.map((row) => (column < 0 ? null : row[column] ?? null)))] };
  }
}

const rowsOf = (columns) => (columns.length ? columns[0].map((_, index) => columns.map((column) => column[index])) : []);

function joined(mine, theirs) {
  if (!theirs.length) return mine;
  const first = theirs[0][0];
  const last = theirs.at(-1)[0];
  return [...mine.filter((row) => row[0] < first), ...theirs, ...mine.filter((row) => row[0] > last)];
}

function gapped(rows, step) {
  const out = [];
  for (const row of rows) {
    const before = out.at(-1);
    if (before && row[0] - before[0] > 3.5 * step) out.push([before[0] + step]);
    out.push(row);
  }
  return out;
}

function mean(values) {
  const known = values.filter((value) => value !== null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}
