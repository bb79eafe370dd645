// V5: where on the mesh, and how the excess is shared along each axis.
import { isKnown, reasonOf } from "../data/known";
import type { Matrix } from "../data/matrix";
import { columnsOf, rowMean } from "../data/matrix";
import { drawText } from "../draw/axis";
import type { Frame, Spot } from "../draw/canvas";
import { Canvas } from "../draw/canvas";
import { scaleOf, shareOf } from "../draw/heat";
import { rampColour } from "../draw/theme";
import { Card } from "../parts/card";
import { Facts } from "../parts/tip";
import { state } from "../state/fragment";
import type { Run } from "../state/run";
import { chosenRanks, selectRanks } from "../state/scope";
import { clean, cleanText, ranges } from "../text/names";
import { plural, ratio, withUnit } from "../text/units";
import { heatMetric } from "./heat";

const MAX_CELLS = 2048;
const LEFT = 36;
const TOP = 18;

interface Block {
  readonly x: number;
  readonly y: number;
  readonly w: number;
  readonly h: number;
  readonly ranks: readonly number[];
}

export function MeshView({ run, span }: { run: Run; span: readonly [number, number] }) {
  const { layout } = run.page.report;
  const key = heatMetric(run);
  const metric = run.metric(key);
  const found = run.matrix(key, metric?.has_phases ? state.value.p : "");
  const title = "Where on the mesh";
  if (!isKnown(layout)) return <Card id="mesh" title={title} span={span}><p class="dim">Layout not known: {cleanText(reasonOf(layout))}</p></Card>;
  if (found === "loading") return <Card id="mesh" title={title} span={span}><p class="dim">unpacking…</p></Card>;
  const matrix = isKnown(found) ? found : null;
  const values = matrix ? meansOf(run, matrix) : new Map<number, number>();
  const excess = run.knownMatrix("excess");
  const shares = excess ? sharesOf(run, meansOf(run, excess)) : [];
  return (
    <Card id="mesh" title={title} span={span} isScoped sub={`mean ${metric?.label ?? key}`}
      not={excess ? "a cause by itself: one tall bar in every axis is one rank, only in host a host, only in pp a stage" : "a comparison: own work above peers is not known here"}
      table={() => ({ columns: ["rank", "place", "host", matrix?.unit === "bytes" ? "mean_bytes" : "mean_ns"], rows: run.rankNumbers.map((rank) => [rank, run.place(rank), run.host(rank), values.get(rank) ?? null]) })}>
      <MeshCells run={run} matrix={matrix} values={values} isExcess={metric?.is_excess ?? true} />
      {shares.length > 0 && <p class="note">share of all excess by coordinate; dashed: if spread evenly</p>}
      {shares.map((axis) => <ShareBars key={axis.name} axis={axis} />)}
    </Card>
  );
}

function meansOf(run: Run, matrix: Matrix): Map<number, number> {
  const [from, to] = columnsOf(matrix, state.value.s);
  const found = new Map<number, number>();
  for (const rank of run.rankNumbers) {
    const row = matrix.rowOf.get(rank);
    const value = row === undefined ? Number.NaN : rowMean(matrix, row, from, to);
    if (!Number.isNaN(value)) found.set(rank, value);
  }
  return found;
}

function MeshCells({ run, matrix, values, isExcess }: { run: Run; matrix: Matrix | null; values: ReadonlyMap<number, number>; isExcess: boolean }) {
  const step = run.page.report.steps.time;
  const scale = matrix ? scaleOf(matrix, isExcess, isKnown(step) ? step.median_ns : 0) : null;
  const degrees = isKnown(run.page.report.layout) ? run.page.report.layout.degrees : {};
  const numRows = Math.max(1, degrees["pp"] ?? 1);
  const inner = run.axes.filter((axis) => axis !== "pp" && axis !== "dp");
  const innerCells = inner.reduce((product, axis) => product * (degrees[axis] ?? 1), 1);
  const numBlocks = Math.max(1, degrees["dp"] ?? 1);
  // Without a pipeline there is room below: blocks go on in further lines.
  const cellsPerLine = Math.max(16, 2 ** Math.ceil(Math.log2(Math.sqrt(2 * numBlocks * innerCells))));
  const perLine = numRows === 1 ? Math.max(1, Math.ceil(numBlocks / Math.max(1, Math.ceil((numBlocks * innerCells) / cellsPerLine)))) : numBlocks;
  const numLines = numRows === 1 ? Math.ceil(numBlocks / perLine) : numRows;
  const rowHeight = numLines <= 4 ? 34 : numLines <= 8 ? 22 : Math.max(7, Math.floor(180 / numLines));
  const height = TOP + numLines * (rowHeight + 3) + 4;
  const isFolded = run.rankNumbers.length > MAX_CELLS;

  const blocks = (width: number): readonly Block[] => {
    const blockWidth = (width - LEFT) / perLine;
    const gap = blockWidth > 12 && innerCells > 1 ? 4 : 1;
    const found: Block[] = [];
    const folded = new Map<string, { block: Omit<Block, "ranks">; ranks: number[] }>();
    for (const rank of run.rankNumbers) {
      const at = run.coordinates(rank);
      if (!at) continue;
      const dp = at["dp"] ?? 0;
      const line = numRows === 1 ? Math.floor(dp / perLine) : (at["pp"] ?? 0);
      const x0 = LEFT + (numRows === 1 ? dp % perLine : dp) * blockWidth;
      const y = TOP + line * (rowHeight + 3);
      if (isFolded) {
        const key = `${line} ${dp}`;
        const own = folded.get(key) ?? { block: { x: x0, y, w: Math.max(1, blockWidth - gap), h: rowHeight }, ranks: [] };
        own.ranks.push(rank);
        folded.set(key, own);
        continue;
      }
      const index = inner.reduce((sum, axis) => sum * (degrees[axis] ?? 1) + (at[axis] ?? 0), 0);
      const w = (blockWidth - gap) / innerCells;
      found.push({ x: x0 + index * w, y, w: Math.max(0.8, w - (w > 5 ? 1.5 : w > 2 ? 0.5 : 0)), h: rowHeight, ranks: [rank] });
    }
    return isFolded ? [...folded.values()].map(({ block, ranks }) => ({ ...block, ranks })) : found;
  };
  const worst = (ranks: readonly number[]): number => ranks.reduce((most, rank) => Math.max(most, values.get(rank) ?? Number.NEGATIVE_INFINITY), Number.NEGATIVE_INFINITY);

  const draw = ({ ctx, width, theme }: Frame): void => {
    const chosen = chosenRanks.value;
    const all = blocks(width);
    for (const block of all) {
      const value = worst(block.ranks);
      const share = scale && value > Number.NEGATIVE_INFINITY ? shareOf(scale, value) : -1;
      ctx.fillStyle = share < 0 ? theme.colours.card : rampColour(scale!.isHot ? theme.heat : theme.neutral, share);
      ctx.fillRect(block.x, block.y, block.w, block.h);
      if (share < 0) {
        ctx.strokeStyle = theme.colours.ink3;
        ctx.setLineDash([2, 2]);
        ctx.strokeRect(block.x + 0.5, block.y + 0.5, block.w - 1, block.h - 1);
        ctx.setLineDash([]);
      }
      if (block.w >= 22 && block.h >= 14 && block.ranks.length === 1) {
        const isLight = theme.name === "light";
        const colour = share < 0 ? theme.colours.ink2 : share > 0.45 ? (isLight ? "#fff" : "#0b0e11") : theme.colours.ink2;
        drawText(ctx, theme, `${block.ranks[0]}`, block.x + block.w / 2, block.y + block.h / 2, { align: "center", colour, weight: chosen.has(block.ranks[0]!) ? 640 : 400 });
      }
    }
    for (const block of all) {
      if (!block.ranks.some((rank) => chosen.has(rank))) continue;
      ctx.strokeStyle = theme.colours.ink;
      ctx.lineWidth = 2;
      ctx.strokeRect(block.x - 0.5, block.y - 0.5, block.w + 1, block.h + 1);
    }
    if (numRows > 1) for (let i = 0; i < numRows; i++) if (rowHeight >= 12 || i % 4 === 0) drawText(ctx, theme, `pp${i}`, LEFT - 6, TOP + i * (rowHeight + 3) + rowHeight / 2, { align: "right" });
    if (numBlocks > 1) {
      const blockWidth = (width - LEFT) / perLine;
      const every = Math.max(1, Math.ceil(30 / blockWidth));
      for (let i = 0; i < perLine; i += every) drawText(ctx, theme, numLines > 1 && numRows === 1 ? `+${i}` : `dp${i}`, LEFT + (i + 0.5) * blockWidth - 2, 8, { align: "center" });
      if (numRows === 1 && numLines > 1) for (let line = 0; line < numLines; line++) drawText(ctx, theme, `dp${line * perLine}`, LEFT - 4, TOP + line * (rowHeight + 3) + rowHeight / 2, { align: "right", size: 10 });
    }
  };
  const hit = (px: number, py: number, width: number): readonly number[] => {
    const all = blocks(width);
    const inside = all.find((block) => px >= block.x - 1 && px < block.x + block.w + 1 && py >= block.y - 1 && py < block.y + block.h + 2);
    if (inside) return inside.ranks;
    if (px < LEFT && py >= TOP && numRows > 1) return run.rankNumbers.filter((rank) => run.coordinates(rank)?.["pp"] === Math.floor((py - TOP) / (rowHeight + 3)));
    if (py < TOP && px >= LEFT) return run.rankNumbers.filter((rank) => (run.coordinates(rank)?.["dp"] ?? 0) % perLine === Math.floor(((px - LEFT) / (width - LEFT)) * perLine));
    return [];
  };
  const spot = (px: number, py: number, width: number): Spot | null => {
    const ranks = hit(px, py, width);
    if (!ranks.length) return null;
    const value = worst(ranks);
    const text = value > Number.NEGATIVE_INFINITY ? withUnit(value, matrix?.unit ?? "ns") : "not known";
    const title = ranks.length === 1 ? `rank ${ranks[0]} ${run.place(ranks[0]!)}` : `${plural(ranks.length, "rank")}: ${ranges(ranks)}`;
    const rows: [string, string][] = [[ranks.length === 1 ? "mean" : "largest mean", text]];
    if (ranks.length === 1) rows.push(["host", run.host(ranks[0]!) || "not known"]);
    return { tip: <Facts title={title} rows={rows} />, text: `${title}, ${text}` };
  };
  return (
    <>
      <Canvas height={height} draw={draw} spot={spot} label={`Mesh of ${plural(run.rankNumbers.length, "rank")}, ${run.axes.join(" × ") || "no axis in use"}`}
        click={(px, py, width, event) => { const ranks = hit(px, py, width); if (ranks.length) selectRanks(ranks, event.shiftKey); }}
        cursor={(at, dx, dy, width) => {
          const all = blocks(width);
          const first = all[0];
          if (!first) return null;
          if (!at) return [first.x + first.w / 2, first.y + first.h / 2];
          const next = all.filter((block) => (dx ? Math.sign(Math.round(block.x + block.w / 2 - at[0])) === dx && Math.abs(block.y + block.h / 2 - at[1]) < 2 : Math.sign(Math.round(block.y + block.h / 2 - at[1])) === dy && Math.abs(block.x + block.w / 2 - at[0]) < block.w))
            .sort((a, b) => Math.abs(a.x - at[0]) + Math.abs(a.y - at[1]) - Math.abs(b.x - at[0]) - Math.abs(b.y - at[1]))[0];
          return next ? [next.x + next.w / 2, next.y + next.h / 2] : at;
        }} />
      <p class="note">
        {innerCells > 1 && `cells inside a block: ${inner.map((axis) => `${axis}0…${(degrees[axis] ?? 1) - 1}`).join(", ")}. `}
        {isFolded ? "A block is the largest of its ranks." : run.rankNumbers.length <= 64 ? "Number: global rank." : ""}
      </p>
    </>
  );
}

interface AxisShare {
  readonly name: string;
  readonly entries: readonly { readonly label: string; readonly share: number; readonly ranks: readonly number[] }[];
}

function sharesOf(run: Run, values: ReadonlyMap<number, number>): readonly AxisShare[] {
  const total = [...values.values()].reduce((sum, value) => sum + value, 0);
  if (!(total > 0)) return [];
  const groupings: [string, (rank: number) => string][] = run.axes.map((axis) => [axis, (rank) => `${axis}${run.coordinates(rank)?.[axis] ?? "?"}`]);
  if (new Set(run.rankNumbers.map((rank) => run.host(rank))).size > 1) groupings.push(["host", (rank) => run.host(rank) || "not known"]);
  return groupings.map(([name, nameOf]) => {
    const groups = new Map<string, { sum: number; ranks: number[] }>();
    for (const [rank, value] of values) {
      const own = groups.get(nameOf(rank)) ?? { sum: 0, ranks: [] };
      own.sum += value;
      own.ranks.push(rank);
      groups.set(nameOf(rank), own);
    }
    const entries = [...groups].map(([label, { sum, ranks }]) => ({ label, share: sum / total, ranks }))
      .sort((a, b) => a.label.localeCompare(b.label, "en", { numeric: true }));
    return { name, entries };
  });
}

const BAR = 30;

function ShareBars({ axis }: { axis: AxisShare }) {
  const { entries } = axis;
  const most = entries.reduce((a, b) => (b.share > a.share ? b : a), entries[0]!);
  const even = 1 / entries.length;
  const top = Math.max(most.share, 1.5 * even);
  const right = 74;
  const draw = ({ ctx, width, theme }: Frame): void => {
    const room = width - LEFT - right;
    const w = room / entries.length;
    entries.forEach((entry, i) => {
      const h = (entry.share / top) * (BAR - 4);
      ctx.fillStyle = entry.share > 1.6 * even && entry.share > 0.1 ? theme.colours.bad : theme.colours.ink3;
      ctx.fillRect(LEFT + i * w, BAR - h, Math.max(0.7, w - (w > 4 ? 1.5 : 0)), h);
    });
    ctx.strokeStyle = theme.colours.ink2;
    ctx.setLineDash([3, 2]);
    ctx.lineWidth = 1;
    const y = Math.round(BAR - (even / top) * (BAR - 4)) + 0.5;
    ctx.beginPath();
    ctx.moveTo(LEFT, y);
    ctx.lineTo(width - right, y);
    ctx.stroke();
    ctx.setLineDash([]);
    drawText(ctx, theme, axis.name, LEFT - 6, BAR / 2 + 2, { align: "right" });
    drawText(ctx, theme, `${clean(most.label, 14)} ${ratio(most.share)}`, width - right + 6, BAR / 2 + 2, { weight: 600, colour: theme.colours.ink, maxWidth: right - 6 });
  };
  const at = (px: number, width: number) => entries[Math.floor(((px - LEFT) / (width - LEFT - right)) * entries.length)];
  return (
    <Canvas height={BAR + 2} draw={draw} label={`Share of excess by ${axis.name}: ${clean(most.label)} has ${ratio(most.share)}, an even share is ${ratio(even)}`}
      spot={(px, _y, width) => { const entry = at(px, width); return entry ? { tip: `${clean(entry.label)}: ${ratio(entry.share)}, even ${ratio(even)}`, text: `${entry.label} ${ratio(entry.share)}` } : null; }}
      click={(px, _y, width, event) => { const entry = at(px, width); if (entry) selectRanks(entry.ranks, event.shiftKey); }} />
  );
}
