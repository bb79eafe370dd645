// One number per rank and step, quantised to 16 bits by the logarithm; packed as base64 of gzip.
import type { Known } from "./known";

export interface PackedMatrix {
  readonly metric: string;
  readonly phase: string | null;
  readonly unit: string;
  readonly ranks: readonly number[];
  readonly row_edges: readonly number[];
  readonly step_edges: readonly number[];
  readonly lo: number;
  readonly hi: number;
  readonly levels: number;
  readonly largest: Known<number>;
  readonly median: Known<number>;
  readonly p97: Known<number>;
  readonly largest_layer: string;
  readonly mean_layer: string | null;
}

export interface Matrix {
  readonly metric: string;
  readonly phase: string;
  readonly unit: string;
  readonly ranks: Int32Array;
  /** Row of each rank; ranks are looked up by number. */
  readonly rowOf: ReadonlyMap<number, number>;
  readonly numRows: number;
  readonly numColumns: number;
  /** Ranks and steps that one cell covers at most. */
  readonly ranksPerRow: number;
  readonly stepsPerColumn: number;
  /** Column c covers steps from `edges[c]` to below `edges[c + 1]`. */
  readonly edges: Float64Array;
  /** Row by row; largest and mean of what a cell covers. */
  readonly largest: Uint16Array;
  readonly mean: Uint16Array;
  /** Value of each code; NaN for the two codes without one. */
  readonly values: Float64Array;
  readonly top: number;
  readonly median: number;
  readonly p97: number;
}

export const NOT_RECORDED = 65535;
export const LEFT_OUT = 65534;
const MAX_CELLS = 64_000_000;

export async function unpackMatrix(packed: PackedMatrix): Promise<Matrix> {
  const numRows = Math.max(0, packed.row_edges.length - 1);
  const numColumns = Math.max(0, packed.step_edges.length - 1);
  if (numRows * numColumns > MAX_CELLS) throw new Error("a matrix is larger than this page draws");
  const largest = await unpackLayer(packed.largest_layer, numRows * numColumns);
  const mean = packed.mean_layer === null ? largest : await unpackLayer(packed.mean_layer, numRows * numColumns);
  return makeMatrix(packed, largest, mean);
}

export function makeMatrix(packed: Omit<PackedMatrix, "largest_layer" | "mean_layer">, largest: Uint16Array, mean: Uint16Array): Matrix {
  const edges = Float64Array.from(packed.step_edges);
  const rowOf = new Map<number, number>();
  let ranksPerRow = 1;
  for (let row = 0; row + 1 < packed.row_edges.length; row++) {
    const [from, to] = [packed.row_edges[row]!, packed.row_edges[row + 1]!];
    ranksPerRow = Math.max(ranksPerRow, to - from);
    for (let i = from; i < to; i++) rowOf.set(packed.ranks[i]!, row);
  }
  // A column of steps that were all left out may be wide; it is no cell that a pixel stands for.
  let stepsPerColumn = 1;
  for (let c = 0; c + 1 < edges.length; c++) {
    if (edges[c + 1]! - edges[c]! > stepsPerColumn && largest[c] !== LEFT_OUT) stepsPerColumn = edges[c + 1]! - edges[c]!;
  }
  return {
    metric: packed.metric, phase: packed.phase ?? "", unit: packed.unit,
    ranks: Int32Array.from(packed.ranks), rowOf, ranksPerRow, stepsPerColumn,
    numRows: Math.max(0, packed.row_edges.length - 1), numColumns: Math.max(0, edges.length - 1),
    edges, largest, mean, values: valuesOf(packed.lo, packed.hi, packed.levels),
    top: finite(packed.largest), median: finite(packed.median), p97: finite(packed.p97),
  };
}

function finite(value: Known<number>): number {
  return typeof value === "number" && Number.isFinite(value) ? value : 0;
}

const tables = new Map<string, Float64Array>();

function valuesOf(lo: number, hi: number, levels: number): Float64Array {
  const key = `${lo} ${hi} ${levels}`;
  const found = tables.get(key);
  if (found) return found;
  const values = new Float64Array(65536).fill(Number.NaN);
  values[0] = 0;
  const factor = Math.log(hi / lo) / (levels - 1);
  for (let code = 1; code <= levels && code < 65534; code++) values[code] = lo * Math.exp(factor * (code - 1));
  tables.set(key, values);
  return values;
}

async function unpackLayer(text: string, count: number): Promise<Uint16Array> {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const buffer = await new Response(stream).arrayBuffer();
  if (buffer.byteLength !== 2 * count) throw new Error("a matrix has another size than it says");
  const isLittle = new Uint8Array(new Uint16Array([1]).buffer)[0] === 1;
  if (isLittle) return new Uint16Array(buffer);
  const view = new DataView(buffer);
  return Uint16Array.from({ length: count }, (_, i) => view.getUint16(2 * i, true));
}

/** Column of a step; -1 where the matrix does not have it. */
export function columnOf(matrix: Matrix, step: number): number {
  const { edges } = matrix;
  if (edges.length < 2 || step < edges[0]! || step >= edges[edges.length - 1]!) return -1;
  let [low, high] = [0, edges.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (edges[middle]! <= step) low = middle;
    else high = middle;
  }
  return low;
}

/** First and last column of steps from a to b. */
export function columnsOf(matrix: Matrix, steps: readonly [number, number] | null): readonly [number, number] {
  if (matrix.numColumns === 0) return [0, -1];
  if (!steps) return [0, matrix.numColumns - 1];
  const first = matrix.edges[0]!;
  const last = matrix.edges[matrix.numColumns]! - 1;
  if (steps[1] < first || steps[0] > last) return [0, -1];
  return [columnOf(matrix, Math.max(first, steps[0])), columnOf(matrix, Math.min(last, steps[1]))];
}

interface Means {
  readonly from: number;
  readonly to: number;
  readonly rows: Map<number, number>;
}

const meansOf = new WeakMap<Matrix, Means>();

/** Mean of a row over columns; NaN where nothing is known. A column counts by its steps. Several
 * views ask for the same columns of a selection: those asked for last are kept. */
export function rowMean(matrix: Matrix, row: number, from: number, to: number): number {
  let kept = meansOf.get(matrix);
  if (kept?.from !== from || kept.to !== to) meansOf.set(matrix, (kept = { from, to, rows: new Map() }));
  let mean = kept.rows.get(row);
  if (mean === undefined) kept.rows.set(row, (mean = measureMean(matrix, row, from, to)));
  return mean;
}

function measureMean(matrix: Matrix, row: number, from: number, to: number): number {
  let [sum, weight] = [0, 0];
  const start = row * matrix.numColumns;
  for (let c = from; c <= to; c++) {
    const value = matrix.values[matrix.mean[start + c]!]!;
    if (Number.isNaN(value)) continue;
    const steps = matrix.edges[c + 1]! - matrix.edges[c]!;
    sum += value * steps;
    weight += steps;
  }
  return weight ? sum / weight : Number.NaN;
}

const worstOf = new WeakMap<Matrix, Float64Array>();

/** By row the mean of the largest 6 % of its cells: how much a rank stands out in its worst steps. */
export function worstRows(matrix: Matrix): Float64Array {
  let worst = worstOf.get(matrix);
  if (!worst) worstOf.set(matrix, (worst = Float64Array.from({ length: matrix.numRows }, (_, row) => measureWorst(matrix, row))));
  return worst;
}

function measureWorst({ largest, values, numColumns }: Matrix, row: number): number {
  // Codes are in the order of their values.
  const codes = largest.subarray(row * numColumns, (row + 1) * numColumns).filter((code) => code < LEFT_OUT).sort();
  if (!codes.length) return Number.NaN;
  const kept = codes.subarray(codes.length - Math.max(1, Math.ceil(0.06 * codes.length)));
  return kept.reduce((sum, code) => sum + values[code]!, 0) / kept.length;
}

const MAX_LIVE_COLUMNS = 6000;

/** A matrix with the columns of steps that came later; null where they cannot be added. */
export function appendColumns(matrix: Matrix, added: { readonly ranks: readonly number[]; readonly step_edges: readonly number[]; readonly codes: string }): Matrix | null {
  if (matrix.ranksPerRow > 1 || matrix.numColumns > MAX_LIVE_COLUMNS) return null;
  const end = matrix.edges[matrix.numColumns] ?? 0;
  const first = added.step_edges.findIndex((step) => step >= end);
  const last = added.step_edges.length - 1;
  if (first < 0 || first >= last) return null;
  const bytes = Uint8Array.from(atob(added.codes), (one) => one.charCodeAt(0));
  const codes = new Uint16Array(bytes.buffer);
  const hasGap = added.step_edges[first]! > end;
  const numNew = last - first + (hasGap ? 1 : 0);
  const numColumns = matrix.numColumns + numNew;
  const largest = new Uint16Array(matrix.numRows * numColumns).fill(NOT_RECORDED);
  const mean = new Uint16Array(matrix.numRows * numColumns).fill(NOT_RECORDED);
  for (let row = 0; row < matrix.numRows; row++) {
    const from = row * matrix.numColumns;
    largest.set(matrix.largest.subarray(from, from + matrix.numColumns), row * numColumns);
    mean.set(matrix.mean.subarray(from, from + matrix.numColumns), row * numColumns);
    if (hasGap) largest[row * numColumns + matrix.numColumns] = mean[row * numColumns + matrix.numColumns] = LEFT_OUT;
  }
  let top = matrix.top;
  added.ranks.forEach((rank, i) => {
    const row = matrix.rowOf.get(rank);
    if (row === undefined) return;
    for (let c = first; c < last; c++) {
      const code = codes[i * last + c]!;
      const at = row * numColumns + matrix.numColumns + (hasGap ? 1 : 0) + c - first;
      largest[at] = mean[at] = code;
      if (code < LEFT_OUT) top = Math.max(top, matrix.values[code] ?? 0);
    }
  });
  const edges = Float64Array.from([...matrix.edges, ...added.step_edges.slice(hasGap ? first : first + 1)]);
  return { ...matrix, numColumns, edges, largest, mean, top };
}
