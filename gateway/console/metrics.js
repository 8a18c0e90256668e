// Reads the gateway's metrics in Prometheus's text format.

const LINE = /^([a-z_]+)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;
const MAX_LINES = 20_000;

/** Series of each metric: a Map from its name to a list of {labels, value}. Lines that are none are left out. */
export function parseMetrics(text) {
  const found = new Map();
  for (const line of text.split("\n", MAX_LINES)) {
    const match = LINE.exec(line);
    const value = match ? Number(match[3]) : NaN;
    if (!match || !match[1].startsWith("yardstick_") || Number.isNaN(value)) continue;
    const pairs = [...(match[2] ?? "").matchAll(LABEL)].map(([, name, told]) => [name, told.replace(/\\(.)/g, "$1")]);
    if (!found.has(match[1])) found.set(match[1], []);
    found.get(match[1]).push({ labels: Object.fromEntries(pairs), value });
  }
  return found;
}

/** The sum of the series of `name` whose labels `wanted` accepts. */
export const sum = (metrics, name, wanted = () => true) =>
  (metrics.get(`yardstick_${name}`) ?? []).filter(({ labels }) => wanted(labels)).reduce((total, { value }) => total + value, 0);

/** The histograms of `name` whose labels `wanted` accepts: a Map from their labels as JSON to pairs of upper bound and number below it. */
export function histograms(metrics, name, wanted = () => true) {
  const found = new Map();
  for (const { labels: { le, ...labels }, value } of metrics.get(`yardstick_${name}_bucket`) ?? []) {
    if (!wanted(labels)) continue;
    const key = JSON.stringify(labels);
    if (!found.has(key)) found.set(key, []);
    found.get(key).push([le === "+Inf" ? Infinity : Number(le), value]);
  }
  return found;
}

/** What a histogram has counted since `before`; all of it where that is nothing, or more than there is now. */
export function since(buckets, before) {
  const more = buckets.map(([bound, value], place) => [bound, value - (before?.[place]?.[1] ?? 0)]);
  return totalOf(more) > 0 ? more : buckets;
}

/** The number of values in a histogram. */
export const totalOf = (buckets) => buckets.at(-1)?.[1] ?? 0;

/** The value below which a share of a histogram lies, linear within a bucket as in Prometheus's histogram_quantile: {value, above}. */
export function quantile(buckets, share) {
  const wanted = share * totalOf(buckets);
  const place = Math.max(0, buckets.findIndex(([, number]) => number >= wanted));
  const [low, below] = place ? buckets[place - 1] : [0, 0];
  const [high, number] = buckets[place];
  if (high === Infinity) return { value: low, above: true };
  return { value: low + ((high - low) * (wanted - below)) / Math.max(1e-9, number - below), above: false };
}

/** Samples of one number at regular times, and the rate of a counter between them. */
export class Series {
  constructor(most) {
    this.most = most;
    this.values = [];
    this.before = null;
  }

  push(value) {
    this.values.push(value);
    if (this.values.length > this.most) this.values.shift();
  }

  /** Take a counter's value at `seconds`; a smaller one than before means that the server began anew. */
  pushCounter(value, seconds) {
    const { before } = this;
    if (before && value >= before.value) this.push((value - before.value) / Math.max(0.1, seconds - before.seconds));
    this.before = { value, seconds };
  }

  get last() {
    return this.values.at(-1) ?? null;
  }
}
