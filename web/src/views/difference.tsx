// Heat map of B − A by rank and step, aligned by the rank's place, else by its number.
import { useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { isKnown } from "../data/known";
import type { Matrix } from "../data/matrix";
import { LEFT_OUT, columnOf, unpackMatrix } from "../data/matrix";
import type { ComparedRun } from "../data/page";
import { drawText, stepTicks } from "../draw/axis";
import type { Frame, Spot } from "../draw/canvas";
import { Canvas } from "../draw/canvas";
import { Card } from "../parts/card";
import { Select } from "../parts/menu";
import { Facts } from "../parts/tip";
import type { Table } from "../text/files";
import { clean } from "../text/names";
import { change, withUnit } from "../text/units";

const LEFT = 110;
const AXIS = 20;

interface Pair {
  readonly label: string;
  readonly a: number;
  readonly b: number;
}

export function DifferenceView({ a, b }: { a: ComparedRun; b: ComparedRun }) {
  const metrics = a.matrices.metrics.filter((one) => hasLayer(a, one.key) && hasLayer(b, one.key));
  const key = useSignal(metrics.find((one) => one.key === "period")?.key ?? metrics[0]?.key ?? "");
  const both = useSignal<readonly [Matrix, Matrix] | null>(null);
  useEffect(() => {
    both.value = null;
    const [x, y] = [layerOf(a, key.value), layerOf(b, key.value)];
    if (x && y) void Promise.all([unpackMatrix(x), unpackMatrix(y)]).then((found) => (both.value = found));
  }, [key.value, a, b]);
  if (!metrics.length) return null;
  const pairs = pairRanks(a, b);
  const metric = metrics.find((one) => one.key === key.value);
  return (
    <Card id="difference" title="Where on ranks and steps" span={[12, 12]} sub={`B − A of ${metric?.label ?? key.value}, same place and same step number`}
      not="certain by cell: single steps differ by chance; look for rows and for a change that stays"
      tools={<Select label="Metric" value={key.value} options={metrics.map((one) => [one.key, one.label] as const)} choose={(value) => (key.value = value)} />}
      {...(both.value ? { table: () => tableOf(pairs, both.value![0], both.value![1]) } : {})}>
      {both.value && pairs.length ? <Cells pairs={pairs} a={both.value[0]} b={both.value[1]} /> : <p class="dim">{pairs.length ? "unpacking…" : "no rank is in both runs"}</p>}
    </Card>
  );
}

function layerOf(run: ComparedRun, metric: string) {
  return run.matrices.layers.find((one) => one.metric === metric && !one.phase);
}

function hasLayer(run: ComparedRun, metric: string): boolean {
  return Boolean(layerOf(run, metric));
}

function pairRanks(a: ComparedRun, b: ComparedRun): readonly Pair[] {
  const byLabel = new Map(b.ranks.map((rank) => [isKnown(rank.label) ? rank.label : `rank ${rank.rank}`, rank.rank]));
  const byNumber = new Set(b.ranks.map((rank) => rank.rank));
  return a.ranks.map((rank) => {
    const label = isKnown(rank.label) ? rank.label : `rank ${rank.rank}`;
    const other = byLabel.get(label) ?? (byNumber.has(rank.rank) ? rank.rank : undefined);
    return other === undefined ? null : { label: `${clean(label, 24)}  ${rank.rank}`, a: rank.rank, b: other };
  }).filter((pair): pair is Pair => pair !== null);
}

function valueAt(matrix: Matrix, rank: number, step: number): number {
  const [row, column] = [matrix.rowOf.get(rank), columnOf(matrix, step)];
  if (row === undefined || column < 0) return Number.NaN;
  const code = matrix.mean[row * matrix.numColumns + column]!;
  return code >= LEFT_OUT ? Number.NaN : matrix.values[code]!;
}

/** By rank: the mean over steps that both have. */
function tableOf(pairs: readonly Pair[], a: Matrix, b: Matrix): Table {
  const [first, end] = commonSteps(a, b);
  const unit = a.unit === "ns" ? "_ns" : a.unit === "bytes" ? "_bytes" : "";
  return {
    columns: ["place", "rank_a", "rank_b", "steps", `mean_a${unit}`, `mean_b${unit}`],
    rows: pairs.map((pair) => {
      const both: [number, number][] = [];
      for (let step = first; step < end; step++) {
        const [x, y] = [valueAt(a, pair.a, step), valueAt(b, pair.b, step)];
        if (!Number.isNaN(x + y)) both.push([x, y]);
      }
      const mean = (i: 0 | 1): number | null => (both.length ? both.reduce((sum, one) => sum + one[i], 0) / both.length : null);
      return [pair.label.replace(/ +\d+$/, ""), pair.a, pair.b, both.length, mean(0), mean(1)];
    }),
  };
}

function commonSteps(a: Matrix, b: Matrix): readonly [number, number] {
  return [Math.max(a.edges[0] ?? 0, b.edges[0] ?? 0), Math.min(a.edges[a.numColumns] ?? 0, b.edges[b.numColumns] ?? 0)];
}

function Cells({ pairs, a, b }: { pairs: readonly Pair[]; a: Matrix; b: Matrix }) {
  const [first, end] = commonSteps(a, b);
  const num = Math.min(600, end - first);
  if (num <= 0) return <p class="dim">The runs have no step number in common.</p>;
  const stepOf = (i: number): number => Math.floor(first + ((i + 0.5) * (end - first)) / num);
  const shown = pairs.length <= 256 ? pairs : pairs.filter((_, i) => i % Math.ceil(pairs.length / 256) === 0);
  const cells = shown.map((pair) => Float64Array.from({ length: num }, (_, i) => valueAt(b, pair.b, stepOf(i)) - valueAt(a, pair.a, stepOf(i))));
  const sizes = cells.flatMap((row) => [...row].filter((value) => !Number.isNaN(value)).map(Math.abs)).sort((x, y) => x - y);
  const top = Math.max(sizes[Math.floor(0.97 * sizes.length)] ?? 1, 1e-9);
  const row = shown.length <= 8 ? 20 : shown.length <= 32 ? 12 : Math.max(2, Math.floor(320 / shown.length));
  const height = shown.length * row + AXIS;
  const draw = ({ ctx, width, theme }: Frame): void => {
    const w = (width - LEFT - 150) / num;
    cells.forEach((values, i) => {
      values.forEach((value, k) => {
        if (Number.isNaN(value)) return;
        ctx.globalAlpha = Math.min(1, 0.06 + 0.94 * (Math.abs(value) / top));
        ctx.fillStyle = value > 0 ? theme.colours.worse : theme.colours.better;
        ctx.fillRect(LEFT + k * w, i * row, Math.max(0.8, w - (w > 5 ? 1 : 0)), row - (row > 5 ? 1 : 0));
      });
      ctx.globalAlpha = 1;
      if (row >= 10) drawText(ctx, theme, shown[i]!.label, LEFT - 6, i * row + row / 2, { align: "right", colour: theme.colours.ink2 });
      const known = [...values].filter((value) => !Number.isNaN(value));
      const mean = known.reduce((x, y) => x + y, 0) / Math.max(1, known.length);
      if (row >= 10 && known.length) drawText(ctx, theme, `${mean > 0 ? "▲" : "▼"} ${a.unit === "ns" ? change(mean) : withUnit(mean, a.unit)}`, width - 144, i * row + row / 2, { colour: theme.colours.ink2 });
    });
    for (const step of stepTicks(first, end - 1, width - LEFT - 150)) drawText(ctx, theme, `${step}`, LEFT + ((step + 0.5 - first) / (end - first)) * (width - LEFT - 150), height - 8, { align: "center" });
    drawText(ctx, theme, "step", LEFT - 6, height - 8, { align: "right" });
    drawText(ctx, theme, `full colour ≥ ${withUnit(top, a.unit)}`, width - 2, height - 8, { align: "right", size: 10.5 });
  };
  const spot = (px: number, y: number, width: number): Spot | null => {
    const pair = shown[Math.floor(y / row)];
    const k = Math.floor((px - LEFT) / ((width - LEFT - 150) / num));
    if (!pair || k < 0 || k >= num) return null;
    const step = stepOf(k);
    const [va, vb] = [valueAt(a, pair.a, step), valueAt(b, pair.b, step)];
    const text = (value: number): string => (Number.isNaN(value) ? "not recorded" : withUnit(value, a.unit));
    const rows: [string, string][] = [["A", text(va)], ["B", text(vb)]];
    return { tip: <Facts title={`${pair.label}, step ${step}`} rows={rows} />, text: `${pair.label}, step ${step}: A ${text(va)}, B ${text(vb)}` };
  };
  return (
    <Canvas height={height} draw={draw} spot={spot} label={`Difference of ${shown.length} ranks over steps ${first} to ${end - 1}`}
      cursor={(at, dx, dy, width) => [Math.min(width - 151, Math.max(LEFT + 1, at ? at[0] + (dx * (width - LEFT - 150)) / num : LEFT + 1)), Math.min(height - AXIS - 1, Math.max(1, at ? at[1] + dy * row : row / 2))]} />
  );
}
