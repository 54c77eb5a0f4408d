// Numbers for people: three digits that matter, a unit always, an en dash for what is not known.

export const NONE = "–";
const ENDLESS = 1e5; // seconds: an upper end that says nothing
const THIN = "\u202f";
const grouped = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** Three significant digits, without an exponent. */
export function digits(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  const size = Math.abs(value);
  if (size >= 999.5) return grouped.format(value);
  if (size === 0) return "0";
  if (size < 0.00005) return "0.00";
  if (size < 0.0995) return value.toPrecision(2);
  return size < 0.9995 ? value.toFixed(3) : value.toPrecision(3);
}

export const whole = (value) => (value === null || value === undefined ? NONE : grouped.format(value));

/** Milliseconds below a second. What is compared is written in one unit, that of its mean. */
export const unitOf = (seconds) => (seconds !== null && Math.abs(seconds) >= 0.9995 ? "s" : "ms");
export const inUnit = (seconds, unit) => (seconds === null || seconds === undefined ? NONE : digits(unit === "ms" ? seconds * 1e3 : seconds));

/** Of everything that is set beside one comparison. */
export const unitOfComparison = (comparison) => unitOf(Math.max(comparison?.observed.value ?? 0, comparison?.predicted.value ?? 0));

/** `12.3 ms`. */
export function duration(seconds, unit = unitOf(seconds ?? 0)) {
  return seconds === null || seconds === undefined ? NONE : `${inUnit(seconds, unit)}${THIN}${unit}`;
}

/** For the ticks of an axis: no more digits than needed. */
export const plain = (value) => String(Number(value.toPrecision(3)));
export const tickDuration = (seconds, unit) => `${plain(unit === "ms" ? seconds * 1e3 : seconds)}${THIN}${unit}`;

/** `11.5 to 13.1 ms`; the low end of an interval of delays is not below 0. */
export function interval(low, high, unit) {
  if (low === null || high === null || low === undefined || high === undefined) return "interval not known";
  if (high >= ENDLESS) return `${duration(Math.max(0, low), unit)} and more`;
  return `${inUnit(Math.max(0, low), unit)} to ${duration(high, unit)}`;
}

export const percent = (share, places = 0) => (share === null || share === undefined ? NONE : `${(100 * share).toFixed(places)}${THIN}%`);

/** `+1.6 %`, with a real minus. */
export function signed(share) {
  if (share === null || share === undefined) return NONE;
  const size = Math.abs(100 * share);
  return `${share < 0 ? "−" : "+"}${size >= 99.5 ? grouped.format(size) : size.toFixed(1)}${THIN}%`;
}

const two = (number) => String(number).padStart(2, "0");

/** Of the reader's own clock. */
export function clock(at, seconds = true) {
  const when = new Date(at * 1e3);
  return `${two(when.getHours())}:${two(when.getMinutes())}${seconds ? `:${two(when.getSeconds())}` : ""}`;
}

/** `2 h 5 min`. */
export function since(seconds) {
  const minutes = Math.floor(seconds / 60);
  if (minutes < 1) return `${Math.max(0, Math.floor(seconds))}${THIN}s`;
  const [days, hours] = [Math.floor(minutes / 1440), Math.floor(minutes / 60) % 24];
  const parts = days ? [[days, "d"], [hours, "h"]] : [[hours, "h"], [minutes % 60, "min"]];
  return parts.filter(([count]) => count).map(([count, unit]) => `${count}${THIN}${unit}`).join(" ");
}

/** `5 min`. */
export const span = (seconds) => (seconds < 90 ? `${Math.round(seconds)}${THIN}s` : `${Math.round(seconds / 60)}${THIN}min`);

/** `4 s ago`, of an instant of the gateway's clock. */
export const ago = (at, now) => `${since(Math.max(0, now - at))} ago`;
