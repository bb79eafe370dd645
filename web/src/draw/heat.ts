// Paints cells of a matrix: a pixel has the largest value of what it covers, so that nothing hot is lost.
import type { Matrix } from "../data/matrix";
import { LEFT_OUT } from "../data/matrix";
import type { Theme } from "./theme";

export interface Scale {
  readonly low: number;
  readonly high: number;
  readonly isHot: boolean;
}

/** Excess: from 0, with a top that keeps noise pale. Others: from near the lowest to the highest value. */
export function scaleOf(matrix: Matrix, isExcess: boolean, medianStepNs: number): Scale {
  if (isExcess) {
    const floor = matrix.unit === "ns" ? 0.25 * medianStepNs : 0;
    return { low: 0, high: Math.max(0.72 * matrix.top, 1.6 * matrix.p97, floor, 1), isHot: true };
  }
  let lowest = 65535;
  for (const code of matrix.largest) if (code < lowest && code < LEFT_OUT) lowest = code;
  const low = lowest < LEFT_OUT ? matrix.values[lowest]! : 0;
  return { low: Math.min(low, 0.75 * matrix.top), high: Math.max(matrix.top, 1), isHot: false };
}

export function shareOf(scale: Scale, value: number): number {
  return Math.min(1, Math.max(0, (value - scale.low) / (scale.high - scale.low || 1)));
}

const tables = new WeakMap<Matrix, Map<string, Uint32Array>>();

/** Colour of every code, made once per matrix, theme and scale. */
export function colourTable(matrix: Matrix, scale: Scale, theme: Theme): Uint32Array {
  let own = tables.get(matrix);
  if (!own) tables.set(matrix, (own = new Map()));
  const key = `${theme.name} ${scale.low} ${scale.high}`;
  const found = own.get(key);
  if (found) return found;
  const ramp = scale.isHot ? theme.heat : theme.neutral;
  const table = new Uint32Array(65536);
  for (let code = 0; code < LEFT_OUT; code++) {
    const value = matrix.values[code]!;
    table[code] = Number.isNaN(value) ? 0 : ramp[Math.round(255 * shareOf(scale, value))]!;
  }
  own.set(key, table);
  return table;
}

export interface Plot {
  readonly x: number;
  readonly y: number;
  readonly width: number;
  readonly height: number;
  /** Where a step begins, from 0 to the width. */
  readonly at: (step: number) => number;
}

interface Painted {
  readonly matrix: Matrix;
  readonly ranks: readonly number[];
  readonly colours: Uint32Array;
  readonly first: Int32Array;
  readonly last: Int32Array;
  readonly canvas: HTMLCanvasElement;
}

const NUM_PAINTED = 3;
/** What was painted last: a selection draws the same cells again. */
let painted: readonly Painted[] = [];

function isSame(a: ArrayLike<number>, b: ArrayLike<number>): boolean {
  if (a.length !== b.length) return false;
  for (let i = 0; i < a.length; i++) if (a[i] !== b[i]) return false;
  return true;
}

/** Draws ranks, top to bottom, each row of equal height. */
export function paintCells(ctx: CanvasRenderingContext2D, matrix: Matrix, ranks: readonly number[], plot: Plot, colours: Uint32Array): void {
  const scale = ctx.getTransform().a;
  const width = Math.max(1, Math.round(plot.width * scale));
  const height = Math.max(1, Math.min(ranks.length, Math.round(plot.height * scale)));
  const { first, last } = mapColumns(matrix, plot, width);
  let kept = painted.find((one) => one.matrix === matrix && one.colours === colours && one.canvas.width === width && one.canvas.height === height
    && isSame(one.ranks, ranks) && isSame(one.first, first) && isSame(one.last, last));
  if (!kept) {
    kept = { matrix, ranks, colours, first, last, canvas: document.createElement("canvas") };
    kept.canvas.width = width;
    kept.canvas.height = height;
    paintPixels(kept);
    painted = [kept, ...painted.slice(0, NUM_PAINTED - 1)];
  }
  ctx.imageSmoothingEnabled = false;
  ctx.drawImage(kept.canvas, 0, 0, width, height, plot.x, plot.y, plot.width, plot.height);
}

function paintPixels({ matrix, ranks, colours, first, last, canvas }: Painted): void {
  const { width, height } = canvas;
  const inner = canvas.getContext("2d");
  if (!inner) return;
  const image = inner.createImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  const best = new Int32Array(width);
  const { largest, numColumns } = matrix;
  for (let line = 0; line < height; line++) {
    best.fill(-1);
    const end = Math.max(Math.floor(((line + 1) * ranks.length) / height), Math.floor((line * ranks.length) / height) + 1);
    for (let i = Math.floor((line * ranks.length) / height); i < end && i < ranks.length; i++) {
      const row = matrix.rowOf.get(ranks[i]!);
      if (row === undefined) continue;
      const start = row * numColumns;
      for (let c = 0; c < numColumns; c++) {
        const code = largest[start + c]!;
        if (code >= LEFT_OUT) continue;
        for (let px = first[c]!; px <= last[c]!; px++) if (code > best[px]!) best[px] = code;
      }
    }
    const at = line * width;
    for (let px = 0; px < width; px++) pixels[at + px] = best[px]! < 0 ? 0 : colours[best[px]!]!;
  }
  inner.putImageData(image, 0, 0);
}

/** First and last pixel of each column: a column has one at least, so that none is lost. */
function mapColumns(matrix: Matrix, plot: Plot, width: number): { first: Int32Array; last: Int32Array } {
  const first = new Int32Array(matrix.numColumns);
  const last = new Int32Array(matrix.numColumns).fill(-1);
  for (let c = 0; c < matrix.numColumns; c++) {
    const from = (plot.at(matrix.edges[c]!) / plot.width) * width;
    const to = (plot.at(matrix.edges[c + 1]!) / plot.width) * width;
    if (to <= 0 || from >= width) continue;
    first[c] = Math.max(0, Math.floor(from + 0.001));
    last[c] = Math.min(width - 1, Math.max(first[c]!, Math.ceil(to - 0.001) - 1));
  }
  return { first, last };
}

/** The largest value of a rank between two steps; NaN where there is none. */
export function largestOf(matrix: Matrix, rank: number, from: number, to: number): number {
  const row = matrix.rowOf.get(rank);
  if (row === undefined) return Number.NaN;
  let best = -1;
  for (let c = from; c <= to; c++) {
    const code = matrix.largest[row * matrix.numColumns + c]!;
    if (code < LEFT_OUT && code > best) best = code;
  }
  return best < 0 ? Number.NaN : matrix.values[best]!;
}
