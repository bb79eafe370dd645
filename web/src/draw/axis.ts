// Ticks and text of canvases.
import { clean } from "../text/names";
import { duration } from "../text/units";
import type { Theme } from "./theme";
import { font } from "./theme";

/** The next of 1, 2, 5, 10 … at or above. */
function roundUp(value: number): number {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((k) => k * power).find((k) => k >= value * 0.999) ?? 10 * power;
}

/** From a range of values to a range of pixels, evenly in the logarithm. */
export function logScale(domain: readonly [number, number], range: readonly [number, number]): (value: number) => number {
  const factor = (range[1] - range[0]) / Math.log(domain[1] / domain[0]);
  return (value) => range[0] + factor * Math.log(value / domain[0]);
}

/** Whole steps at round numbers, so that labels do not touch. */
export function stepTicks(first: number, last: number, width: number): number[] {
  const span = Math.max(1, last - first);
  const most = Math.max(2, Math.floor(width / 70));
  const rough = span / most;
  const every = Math.max(1, roundUp(Math.max(1, rough)));
  const ticks: number[] = [];
  for (let step = Math.ceil(first / every) * every; step <= last; step += every) ticks.push(step);
  return ticks;
}

/** Steps along x, from 0 to the width. */
export interface StepAxis {
  /** Long gaps are drawn short. */
  readonly isCut: boolean;
  readonly x: (step: number, width: number) => number;
  readonly stepAt: (px: number, width: number) => number;
  readonly ticks: (width: number) => number[];
}

const GAP_PX = 12;

/** By the number of the step; where gaps would take most of the room, each of them is a narrow band. */
export function makeStepAxis(from: number, to: number, gaps: readonly (readonly [number, number])[]): StepAxis {
  const span = Math.max(1e-9, to - from);
  const long = joinGaps(gaps).map(([a, b]) => [Math.max(a, from), Math.min(b, to)] as const).filter(([a, b]) => b - a > 0.04 * span);
  const hidden = long.reduce((sum, [a, b]) => sum + b - a, 0);
  if (hidden < 0.6 * span || hidden >= span) {
    const x = (step: number, width: number): number => ((step - from) / span) * width;
    return { isCut: false, x, stepAt: (px, width) => from + (px / Math.max(1, width)) * span, ticks: (width) => stepTicks(from, to - 1, width) };
  }
  const perStep = (width: number): number => Math.max(0, width - GAP_PX * long.length) / (span - hidden);
  const x = (step: number, width: number): number => {
    let px = (step - from) * perStep(width);
    for (const [a, b] of long) if (step > a) px += (GAP_PX * (Math.min(step, b) - a)) / (b - a) - (Math.min(step, b) - a) * perStep(width);
    return px;
  };
  const stepAt = (px: number, width: number): number => {
    let [low, high] = [from, to];
    for (let i = 0; i < 50; i++) {
      const middle = (low + high) / 2;
      if (x(middle, width) <= px) low = middle;
      else high = middle;
    }
    return low;
  };
  return { isCut: true, x, stepAt, ticks: (width) => spread([from, ...long.map(([, b]) => b)].filter((step) => step < to), (step) => x(step, width)) };
}

/** In order; those that touch are one. */
function joinGaps(gaps: readonly (readonly [number, number])[]): readonly (readonly [number, number])[] {
  const found: [number, number][] = [];
  for (const [a, b] of [...gaps].sort((one, other) => one[0] - other[0])) {
    const last = found[found.length - 1];
    if (last && a <= last[1]) last[1] = Math.max(last[1], b);
    else found.push([a, b]);
  }
  return found;
}

function spread(steps: readonly number[], x: (step: number) => number): number[] {
  let last = Number.NEGATIVE_INFINITY;
  return steps.filter((step) => x(step) - last >= 44 && Boolean((last = x(step)) + 1));
}

export function timeTicks(maxNs: number, width: number): number[] {
  const every = roundUp(maxNs / Math.max(2, Math.floor(width / 90)));
  const ticks: number[] = [];
  for (let i = 0; i * every <= maxNs; i++) ticks.push(i * every);
  return ticks;
}

/** Tick labels of one axis: all in the unit of the largest, so that they line up. */
export function timeLabel(ns: number, maxNs: number): string {
  if (ns === 0) return "0";
  const [unit, factor] = maxNs >= 1e9 ? ["s", 1e9] : maxNs >= 1e6 ? ["ms", 1e6] : maxNs >= 1e3 ? ["µs", 1e3] : ["ns", 1];
  const value = ns / (factor as number);
  if (maxNs >= 120e9) return duration(ns);
  return `${Number(value.toPrecision(3))} ${unit}`;
}

export interface TextOptions {
  colour?: string;
  size?: number;
  weight?: number;
  align?: CanvasTextAlign;
  baseline?: CanvasTextBaseline;
  maxWidth?: number;
  /** Colour behind the text, where lines cross it. */
  plate?: string;
}

const widths = new Map<string, number>();

export function textWidth(ctx: CanvasRenderingContext2D, text: string, size = 11.5, weight = 400): number {
  const key = `${size} ${weight} ${text}`;
  const known = widths.get(key);
  if (known !== undefined) return known;
  ctx.font = font(size, weight);
  const width = ctx.measureText(text).width;
  if (widths.size > 5000) widths.clear();
  widths.set(key, width);
  return width;
}

/** All text of canvases: cleaned, and cut to the room that there is. */
export function drawText(ctx: CanvasRenderingContext2D, theme: Theme, text: string, x: number, y: number, options: TextOptions = {}): void {
  const { size = 11.5, weight = 400, maxWidth } = options;
  let shown = clean(text);
  if (maxWidth !== undefined && textWidth(ctx, shown, size, weight) > maxWidth) {
    while (shown.length > 1 && textWidth(ctx, `${shown}…`, size, weight) > maxWidth) shown = shown.slice(0, -1);
    shown = shown.length > 1 ? `${shown}…` : "";
  }
  ctx.font = font(size, weight);
  if (options.plate && shown) {
    const w = textWidth(ctx, shown, size, weight);
    ctx.font = font(size, weight);
    ctx.fillStyle = options.plate;
    ctx.fillRect(x - (options.align === "right" ? w : options.align === "center" ? w / 2 : 0) - 2, y - size * 0.6, w + 4, size * 1.2);
  }
  ctx.fillStyle = options.colour ?? theme.colours.ink3;
  ctx.textAlign = options.align ?? "left";
  ctx.textBaseline = options.baseline ?? "middle";
  ctx.fillText(shown, x, y);
}
