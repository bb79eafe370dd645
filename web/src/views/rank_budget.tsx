// V6: the budget of each rank: who works, who waits.
import { useSignal } from "@preact/signals";
import { isKnown, reasonOf } from "../data/known";
import { columnsOf, rowMean } from "../data/matrix";
import { drawText, timeLabel, timeTicks } from "../draw/axis";
import type { Frame, Spot } from "../draw/canvas";
import { Canvas } from "../draw/canvas";
import { kindOf } from "../draw/kinds";
import { fillKind } from "../draw/texture";
import { Card } from "../parts/card";
import { KindLegend } from "../parts/legend";
import { Choice } from "../parts/menu";
import { Facts } from "../parts/tip";
import { state } from "../state/fragment";
import type { Run } from "../state/run";
import { chosenRanks, selectRanks } from "../state/scope";
import { cleanText } from "../text/names";
import { duration } from "../text/units";
import type { Part } from "./step_budget";
import { sortParts } from "./step_budget";

const AXIS = 18;
const COLUMNS_HEIGHT = 190;

export function RankBudgetView({ run, span }: { run: Run; span: readonly [number, number] }) {
  const how = useSignal<"time" | "share">("time");
  const { budget } = run.page.report;
  const title = "Budget by rank";
  if (!isKnown(budget)) return <Card id="rank-budget" title={title} span={span}><p class="dim">not known: {cleanText(reasonOf(budget))}</p></Card>;
  const cells = state.value.s ? run.lineMatrices() : null;
  const steps = state.value.s;
  const byRank = new Map(budget.ranks.map((row) => {
    const parts = budget.lines.map((line, i): Part => {
      const matrix = cells?.[i];
      const at = matrix?.rowOf.get(row.rank);
      const scoped = matrix && at !== undefined ? rowMean(matrix, at, ...columnsOf(matrix, steps)) : Number.NaN;
      const ns = Number.isNaN(scoped) ? (row.time_ns[i] ?? 0) / Math.max(1, budget.num_steps) : scoped;
      return { name: line.name, share: line.share, axis: line.axis, kind: kindOf(line.share), ns };
    });
    return [row.rank, sortParts(parts)] as const;
  }));
  const isScoped = Boolean(steps && cells?.length);
  const ranks = run.order("mesh").filter((rank) => byRank.has(rank));
  const wall = (rank: number): number => byRank.get(rank)!.reduce((sum, part) => sum + part.ns, 0);
  const top = Math.max(1, ...ranks.map(wall));
  const kinds = [...new Set([...byRank.values()].flatMap((parts) => parts.filter((part) => part.ns > 0).map((part) => part.kind)))];
  const shared = { run, ranks, byRank, top, how: how.value } as const;
  return (
    <Card id="rank-budget" title={title} span={span} sub={`who works, who waits${isScoped || !steps ? "" : " (all steps: by rank and step is not in this page)"}`} isScoped={isScoped}
      not="how fast a rank is: ranks that wait for each other take equally long; look who waits least"
      tools={<Choice label="Scale" value={how.value} options={[["time", "time"], ["share", "share"]]} choose={(value) => (how.value = value)} />}
      table={() => ({ columns: ["rank", "place", "wall_ns", ...budget.lines.map((line) => `${line.name}_ns`)], rows: ranks.map((rank) => [rank, run.place(rank), wall(rank), ...budget.lines.map((line) => byRank.get(rank)!.find((part) => part.name === line.name)?.ns ?? null)]) })}>
      {ranks.length <= 16 ? <Rows {...shared} /> : <Columns {...shared} />}
      <KindLegend kinds={kinds} />
    </Card>
  );
}

interface Shared {
  readonly run: Run;
  readonly ranks: readonly number[];
  readonly byRank: ReadonlyMap<number, readonly Part[]>;
  readonly top: number;
  readonly how: "time" | "share";
}

function spotOf({ run, byRank }: Shared, rank: number): Spot {
  const parts = byRank.get(rank)!.filter((part) => part.ns > 0);
  const rows = parts.map((part) => [part.name, duration(part.ns)] as [string, string]);
  const title = `rank ${rank} ${run.place(rank)}`;
  return { tip: <Facts title={title} rows={rows} />, text: `${title}: ${rows.map((row) => row.join(" ")).join(", ")}` };
}

function Rows(shared: Shared) {
  const { run, ranks, byRank, top, how } = shared;
  const row = ranks.length <= 8 ? 24 : 18;
  const left = Math.max(52, ...ranks.map((rank) => 12 + 6.1 * run.label(rank).length));
  const height = ranks.length * row + AXIS;
  const draw = ({ ctx, width, theme }: Frame): void => {
    const room = width - left - 8;
    ranks.forEach((rank, i) => {
      const parts = byRank.get(rank)!;
      const whole = how === "share" ? parts.reduce((sum, part) => sum + part.ns, 0) || 1 : top;
      let x = left;
      for (const part of parts) {
        const w = (part.ns / whole) * room;
        if (w > 0) fillKind(ctx, part.kind, theme, x, i * row + 2, Math.max(0.3, w - (w > 3 ? 0.7 : 0)), row - 5);
        x += w;
      }
      const isChosen = chosenRanks.value.has(rank);
      const isBad = run.findings.some((one) => one.severity !== "low" && one.rankList.includes(rank));
      drawText(ctx, theme, run.label(rank), left - 6, i * row + row / 2, { align: "right", colour: isBad ? theme.colours.bad : theme.colours.ink2, weight: isChosen || isBad ? 640 : 400 });
      if (isChosen) {
        ctx.strokeStyle = theme.colours.ink;
        ctx.lineWidth = 1.5;
        ctx.strokeRect(left - 1, i * row + 1, room + 2, row - 3);
      }
    });
    if (how === "share") for (const at of [0, 0.5, 1]) drawText(ctx, theme, `${at * 100} %`, left + at * room, height - 7, { align: at === 1 ? "right" : "center" });
    else for (const ns of timeTicks(top, room)) drawText(ctx, theme, timeLabel(ns, top), Math.min(left + (ns / top) * room, width - 22), height - 7, { align: "center" });
  };
  const rankAt = (y: number): number | undefined => ranks[Math.floor(y / row)];
  return (
    <Canvas height={height} draw={draw} label={`Budget of ${ranks.length} ranks; the longest step is ${duration(top)}`}
      spot={(_x, y) => { const rank = rankAt(y); return rank === undefined ? null : spotOf(shared, rank); }}
      click={(_x, y, _w, event) => { const rank = rankAt(y); if (rank !== undefined) selectRanks([rank], event.shiftKey); }}
      cursor={(at, _dx, dy) => [left + 4, Math.min(ranks.length * row - 1, Math.max(row / 2, (at ? at[1] : -row / 2) + (at ? dy * row : row)))]} />
  );
}

function Columns(shared: Shared) {
  const { run, ranks, byRank, top, how } = shared;
  const left = 48;
  const height = COLUMNS_HEIGHT + AXIS;
  const axis = run.axes[0];
  const draw = ({ ctx, width, theme }: Frame): void => {
    const room = width - left - 4;
    const num = Math.min(ranks.length, Math.floor(room));
    const w = room / num;
    const names = byRank.get(ranks[0]!)!;
    for (let c = 0; c < num; c++) {
      const [a, b] = [Math.floor((c * ranks.length) / num), Math.floor(((c + 1) * ranks.length) / num)];
      const sums = names.map((_, k) => { let sum = 0; for (let i = a; i < b; i++) sum += byRank.get(ranks[i]!)![k]?.ns ?? 0; return sum / Math.max(1, b - a); });
      const whole = how === "share" ? sums.reduce((x, y) => x + y, 0) || 1 : top;
      let y = COLUMNS_HEIGHT;
      sums.forEach((ns, k) => {
        const h = (ns / whole) * (COLUMNS_HEIGHT - 6);
        if (h <= 0) return;
        y -= h;
        fillKind(ctx, names[k]!.kind, theme, left + c * w, y, w + 0.3, h);
      });
    }
    drawText(ctx, theme, how === "share" ? "100 %" : timeLabel(top, top), left - 6, 10, { align: "right" });
    drawText(ctx, theme, "0", left - 6, COLUMNS_HEIGHT - 4, { align: "right" });
    let last: number | undefined;
    let lastX = -40;
    ranks.forEach((rank, i) => {
      const at = axis ? run.coordinates(rank)?.[axis] : undefined;
      if (at === undefined || at === last) return;
      last = at;
      const x = left + (i / ranks.length) * room;
      if (i) { ctx.fillStyle = theme.colours.card; ctx.fillRect(x - 0.5, 0, 1.5, COLUMNS_HEIGHT); }
      if (x - lastX < 30) return;
      lastX = x;
      drawText(ctx, theme, `${axis}${at}`, x + 2, height - 7);
    });
    for (const [i, rank] of ranks.entries()) {
      if (!chosenRanks.value.has(rank)) continue;
      ctx.fillStyle = theme.colours.ink;
      ctx.fillRect(left + (i / ranks.length) * room, COLUMNS_HEIGHT + 1, Math.max(2, w), 4);
    }
  };
  const rankAt = (x: number, width: number): number | undefined => ranks[Math.floor(((x - left) / (width - left - 4)) * ranks.length)];
  return (
    <Canvas height={height} draw={draw} label={`Budget of ${ranks.length} ranks as columns; the longest step is ${duration(top)}`}
      spot={(x, _y, width) => { const rank = rankAt(x, width); return rank === undefined ? null : spotOf(shared, rank); }}
      click={(x, _y, width, event) => { const rank = rankAt(x, width); if (rank !== undefined) selectRanks([rank], event.shiftKey); }}
      cursor={(at, dx, _dy, width) => [Math.min(width - 5, Math.max(left + 1, (at ? at[0] : left) + dx * ((width - left) / ranks.length))), 40]} />
  );
}
