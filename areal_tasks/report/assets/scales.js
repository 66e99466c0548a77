// From numbers to pixels, and where the ticks go.
import { num, percent } from "./format.js";

/** The least and the greatest of all finite values; null without any. */
export function extent(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value === null || !Number.isFinite(value)) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  return low <= high ? [low, high] : null;
}

/** A linear or logarithmic scale from `domain` to `range`, with ticks. */
export function scale(domain, range, log = false) {
  const [from, to] = log ? domain.map(Math.log10) : domain;
  const span = to - from || 1;
  const at = (value) => range[0] + (((log ? Math.log10(value) : value) - from) / span) * (range[1] - range[0]);
  return { at, range, ticks: (count) => (log ? logTicks(domain) : linearTicks(domain, count)) };
}

/** The y domain: some air around the values, from zero where the chart says so, never without height. Shares stay shares. */
export function padded(found, { zero, percent: share }, log) {
  let [low, high] = found;
  if (log) return low === high ? [low / 2, high * 2] : [low / 1.1, high * 1.1];
  if (zero && low >= 0) low = 0;
  const air = (high - low || Math.abs(high) || 1) * 0.06;
  const within = (value) => (share && found[0] >= 0 && found[1] <= 1 ? Math.min(1, Math.max(0, value)) : value);
  return [zero && low === 0 ? 0 : within(low - air), within(high + air)];
}

function linearTicks([low, high], count) {
  const step = niceStep((high - low) / count);
  const ticks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) ticks.push(k * step);
  return ticks;
}

function niceStep(raw) {
  const power = 10 ** Math.floor(Math.log10(raw));
  return power * [1, 2, 2.5, 5, 10].find((factor) => factor * power >= raw * (1 - 1e-9));
}

function logTicks([low, high]) {
  const ticks = [];
  const decades = Math.log10(high / low);
  const every = Math.max(1, Math.ceil(decades / 4));
  const factors = decades > 2 ? [1] : [1, 2, 5];
  for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++) {
    if (p % every) continue;
    for (const factor of factors) if (factor * 10 ** p >= low && factor * 10 ** p <= high) ticks.push(factor * 10 ** p);
  }
  return ticks;
}

/** How a chart writes its values. */
export function formatOf(spec, digits = 4) {
  return spec.percent ? percent : (value) => num(value, digits);
}

/** A centred moving average over at most `widest` points and a quarter of the line; gaps stay where nothing is known. */
export function smoothed(values, widest) {
  const window = Math.min(widest, Math.floor(values.length / 4));
  if (window < 2) return values;
  const half = Math.floor(window / 2);
  return values.map((value, i) => {
    if (value === null) return null;
    const near = values.slice(Math.max(0, i - half), i + half + 1).filter((other) => other !== null);
    return near.reduce((sum, other) => sum + other, 0) / near.length;
  });
}

/** The index of the element of ascending `xs` that is nearest to x. */
export function nearest(xs, x) {
  let low = 0;
  let high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle;
    else high = middle;
  }
  return high >= 0 && Math.abs(xs[high] - x) < Math.abs(xs[low] - x) ? high : low;
}
