// V4: who is slow, since when. Rows are ranks, x is the number of the step.
import { useSignal } from "@preact/signals";
import { isKnown, list, reasonOf } from "../data/known";
import type { Matrix } from "../data/matrix";
import { columnOf, columnsOf, rowMean, worstRows } from "../data/matrix";
import type { StepAxis } from "../draw/axis";
import { drawText, makeStepAxis } from "../draw/axis";
import type { Frame, Spot } from "../draw/canvas";
import { Canvas } from "../draw/canvas";
import type { Plot, Scale } from "../draw/heat";
import { colourTable, largestOf, paintCells, scaleOf } from "../draw/heat";
import { hatch } from "../draw/texture";
import { rampColour } from "../draw/theme";
import { Card } from "../parts/card";
import { severityRank } from "../parts/icons";
import { Select } from "../parts/menu";
import { Facts } from "../parts/tip";
import { chosenFinding } from "../state/findings";
import { go, state } from "../state/fragment";
import { heatZoom, setHeatZoom } from "../state/heat_zoom";
import type { Run, ShownFinding } from "../state/run";
import { chosenRanks, selectRanks, selectSteps } from "../state/scope";
import type { Table } from "../text/files";
import { cleanText } from "../text/names";
import { change, count, duration, plural, withUnit } from "../text/units";

const JOB_HEIGHT = 44;
const LENS_ROWS = 10;
const LENS_ROW = 15;
const OVERVIEW = 384;
const AXIS = 20;
const RIGHT = 100;

export function heatMetric(run: Run): string {
  const asked = state.value.m;
  const metrics = run.page.matrices?.metrics ?? [];
  if (asked && metrics.some((one) => one.key === asked)) return asked;
  return metrics.find((one) => one.reason === null)?.key ?? "excess";
}

interface Layout {
  readonly matrix: Matrix;
  readonly ranks: readonly number[];
  readonly lens: readonly number[];
  readonly rowHeight: number;
  readonly left: number;
  readonly lensTop: number;
  readonly top: number;
  readonly height: number;
  readonly from: number;
  readonly to: number;
  readonly scale: Scale;
}

export function HeatView({ run, span }: { run: Run; span: readonly [number, number] }) {
  const metricKey = heatMetric(run);
  const metric = run.metric(metricKey);
  const phase = metric?.has_phases ? state.value.p : "";
  const found = run.matrix(metricKey, phase);
  const metrics = (run.page.matrices?.metrics ?? []).map((one) => [one.key, one.label + (one.reason ? " (not known)" : "")] as const);
  const tools = (
    <>
      <Select id="heat-metric" label="Metric" value={metricKey} options={metrics} choose={(value) => go({ m: value, p: "" })} />
      {metric?.has_phases && (run.page.matrices?.phases.length ?? 0) > 0 && (
        <Select label="Phase" value={phase} options={[["", "all phases"], ...run.page.matrices!.phases.filter(Boolean).map((name) => [name, cleanText(name)] as const)]} choose={(value) => go({ p: value })} />
      )}
      <Select id="heat-order" label="Order of ranks" value={state.value.o || "mesh"} choose={(value) => go({ o: value })}
        options={[["mesh", `order: ${run.axes.length ? run.axes.join(", ") : "rank"}`], ["worst", "worst first"], ["host", "by host"], ["rank", "by rank"]]} />
      {heatZoom.value && <button type="button" onClick={() => setHeatZoom(null)}>1:1</button>}
    </>
  );
  const title = "Who is slow, since when";
  if (found === "loading") return <Card id="heat" title={title} span={span} tools={tools}><p class="dim">unpacking…</p></Card>;
  if (!isKnown(found) || found.numColumns === 0) {
    return <Card id="heat" title={title} span={span} tools={tools}><p class="dim">{metric?.label ?? metricKey}: not known: {cleanText(reasonOf(found))}</p></Card>;
  }
  return <Heat run={run} matrix={found} span={span} tools={tools} title={title} isExcess={metric?.is_excess ?? true}
    label={`${metric?.label ?? metricKey}${phase ? ` in ${cleanText(phase)}` : ""}`} denial={metric?.denial ?? ""} />;
}

function Heat({ run, matrix, span, tools, title, label, denial, isExcess }: {
  run: Run; matrix: Matrix; span: readonly [number, number]; tools: preact.ComponentChildren; title: string; label: string; denial: string; isExcess: boolean;
}) {
  const first = matrix.edges[0]!;
  const end = matrix.edges[matrix.numColumns]!;
  const zoom = heatZoom.value;
  const [from, to] = zoom ? [Math.max(first, zoom[0]), Math.min(end, zoom[1])] : [first, end];
  const [c0, c1] = columnsOf(matrix, state.value.s);
  const worth = (rank: number): number => { const row = matrix.rowOf.get(rank); return row === undefined ? 0 : rowMean(matrix, row, c0, c1); };
  const all = run.order(state.value.o || "mesh", worth);
  const ranks = all.filter((rank) => matrix.rowOf.has(rank) || all.length <= 128);
  const isLarge = ranks.length > 128;
  const rowHeight = ranks.length <= 8 ? 22 : ranks.length <= 16 ? 16 : ranks.length <= 32 ? 11 : ranks.length <= 128 ? 7 : OVERVIEW / ranks.length;
  const lens = isLarge ? pickLens(matrix, ranks) : [];
  const lensTop = JOB_HEIGHT + 18;
  const top = isLarge ? lensTop + lens.length * LENS_ROW + 22 : JOB_HEIGHT + 6;
  const height = top + Math.round(ranks.length * rowHeight) + AXIS;
  const step = run.page.report.steps.time;
  const scale = scaleOf(matrix, isExcess, isKnown(step) ? step.median_ns : 0);
  const left = ranks.length <= 32 ? Math.max(64, ...ranks.slice(0, 32).map((rank) => 12 + 6.1 * run.label(rank).length)) : 62;
  const layout: Layout = { matrix, ranks, lens, rowHeight, left, lensTop, top, height, from, to, scale };
  const axis = makeStepAxis(from, to, list(run.page.matrices?.left_out).map((gap) => [gap.first_step, gap.last_step + 1] as const));
  const x = (at: number, width: number): number => left + axis.x(at, width - left - RIGHT);
  const stepAt = (px: number, width: number): number => axis.stepAt(px - left, width - left - RIGHT);
  const rankAt = (y: number): number | undefined => {
    if (y >= top && y < height - AXIS) return ranks[Math.floor((y - top) / rowHeight)];
    if (lens.length && y >= lensTop && y < lensTop + lens.length * LENS_ROW) return lens[Math.floor((y - lensTop) / LENS_ROW)];
    return undefined;
  };
  const peers = run.page.ranks.reduce((most, rank) => Math.max(most, rank.num_peers), 0);
  const numSteps = Math.max(1, matrix.stepsPerColumn);
  const perPixel = Math.max(1, Math.ceil(ranks.length / Math.min(ranks.length, OVERVIEW)));
  const isReduced = perPixel > 1 || numSteps > 1 || matrix.ranksPerRow > 1;
  const panned = useSignal<readonly [number, number] | null>(null);

  const spot = (px: number, y: number, width: number): Spot | null => {
    const rank = rankAt(y);
    if (px < left || px > width - RIGHT) return rank === undefined ? null : rankSpot(run, rank, worth(rank), matrix.unit, c0 <= c1);
    const at = Math.floor(stepAt(px, width));
    const c = columnOf(matrix, at);
    if (rank === undefined || c < 0) return null;
    return cellSpot({ run, layout, rank, c, x: (step) => x(step, width), isExcess });
  };
  const draw = (frame: Frame): void => drawHeat(frame, run, layout, { isExcess, worth, x, axis });
  return (
    <Card id="heat" title={title} sub={`${label} of each rank, per step`} span={span} isScoped={Boolean(state.value.s || state.value.r.length)} tools={tools}
      table={() => tableOf(run, matrix, ranks, c0, c1)}
      not={<>
        {cleanText(denial)}. {isReduced && <b>A pixel is the largest of up to {plural(Math.max(perPixel, matrix.ranksPerRow), "rank")} × {plural(numSteps, "step")}, so nothing hot is lost.</b>}{" "}
        {hatchedText(run)}{axis.isCut && " Long gaps are drawn short."}{" "}
        {isExcess && peers === 1 && "Only two peers each: “slower” and “the other is faster” look alike in one step; the change over time decides."}
      </>}>
      <Canvas height={height} label={summary(run, matrix, ranks, worth, label)} draw={draw} spot={spot}
        click={(px, y, width, event) => {
          const rank = rankAt(y);
          if (rank === undefined) return;
          if (px < left || px > width - RIGHT) selectRanks([rank], event.shiftKey);
          else {
            const at = Math.floor(stepAt(px, width));
            go({ st: at, z: null });
            if (!chosenRanks.peek().has(rank) || event.shiftKey) selectRanks([rank], event.shiftKey);
          }
        }}
        drag={(a, b, width, isDone) => {
          if (heatZoom.peek()) {
            panned.value ??= heatZoom.peek();
            const start = panned.peek()!;
            const by = ((a - b) / (width - left - RIGHT)) * (start[1] - start[0]);
            const shift = Math.min(end - start[1], Math.max(first - start[0], by));
            setHeatZoom([start[0] + shift, start[1] + shift]);
            if (isDone) panned.value = null;
          } else {
            const inside = (px: number): number => Math.floor(Math.min(end - 1, Math.max(first, stepAt(px, width))));
            selectSteps(inside(a), inside(b), isDone);
          }
        }}
        wheel={(px, width, event) => {
          if (!(event.ctrlKey || event.metaKey) && document.activeElement !== event.currentTarget) return false;
          const at = stepAt(px, width);
          const factor = Math.exp(event.deltaY * 0.002);
          const next: [number, number] = [Math.max(first, at - (at - from) * factor), Math.min(end, at + (to - at) * factor)];
          setHeatZoom(next[1] - next[0] >= end - first - 0.5 ? null : next[1] - next[0] < 4 ? [from, to] : next);
          return true;
        }}
        double={() => setHeatZoom(null)}
        cursor={(at, dx, dy, width) => {
          const width1 = (width - left - RIGHT) / (to - from);
          if (!at) return [left + width1 / 2, top + rowHeight / 2];
          const next = Math.min(to - 0.5, Math.max(from + 0.5, stepAt(at[0], width) + dx));
          const y = Math.min(height - AXIS - 1, Math.max(top, at[1] + dy * rowHeight));
          return [x(next, width), y];
        }} />
    </Card>
  );
}

/** What the hatched steps are, by the reason that most of them have. */
function hatchedText(run: Run): string {
  const byReason = new Map<string, number>();
  for (const gap of list(run.page.matrices?.left_out)) byReason.set(gap.reason, (byReason.get(gap.reason) ?? 0) + gap.last_step - gap.first_step + 1);
  const parts = [...byReason].sort((a, b) => b[1] - a[1]).slice(0, 3).map(([reason, steps]) => `${plural(steps, "step")}: ${cleanText(reason)}`);
  return parts.length ? `Hatched: ${parts.join("; ")}.` : "";
}

function pickLens(matrix: Matrix, ranks: readonly number[]): readonly number[] {
  const rows = worstRows(matrix);
  const worst = (rank: number): number => rows[matrix.rowOf.get(rank) ?? 0] || 0;
  return [...ranks].sort((a, b) => worst(b) - worst(a) || a - b).slice(0, LENS_ROWS);
}

function drawHeat(frame: Frame, run: Run, layout: Layout, how: { isExcess: boolean; worth: (rank: number) => number; x: (step: number, width: number) => number; axis: StepAxis }): void {
  const { ctx, width, theme } = frame;
  const { matrix, ranks, lens, left, lensTop, top, height, scale } = layout;
  const right = width - RIGHT;
  const bottom = height - AXIS;
  const colours = colourTable(matrix, scale, theme);
  const plot = (y: number, h: number): Plot => ({ x: left, y, width: right - left, height: h, at: (step) => how.axis.x(step, right - left) });
  const x = (step: number): number => how.x(step, width);
  drawJobStep(frame, run, layout, x);
  if (lens.length) {
    drawText(ctx, theme, `the ${lens.length} ranks that stand out most (mean of their worst 6 % of steps), worst first`, left, lensTop - 8);
    paintCells(ctx, matrix, lens, plot(lensTop, lens.length * LENS_ROW), colours);
    ctx.fillStyle = theme.colours.card;
    lens.forEach((rank, i) => {
      ctx.fillStyle = theme.colours.card;
      ctx.fillRect(left, lensTop + (i + 1) * LENS_ROW - 1, right - left, 1);
      const isChosen = chosenRanks.value.has(rank);
      drawText(ctx, theme, `rank ${rank}`, left - 6, lensTop + (i + 0.5) * LENS_ROW, { align: "right", colour: isChosen ? theme.colours.ink : theme.colours.ink2, weight: isChosen ? 640 : 400 });
      drawText(ctx, theme, `${run.place(rank)} ${run.host(rank)}`, right + 6, lensTop + (i + 0.5) * LENS_ROW, { size: 10.5, maxWidth: RIGHT - 8 });
    });
    drawText(ctx, theme, `all ${count(ranks.length)} ranks`, left, top - 8);
  }
  paintCells(ctx, matrix, ranks, plot(top, bottom - top), colours);
  drawLeftOut(frame, run, layout, x);
  drawGrid(frame, layout, x);
  drawRowLabels(frame, run, layout);
  drawMeans(frame, layout, how.worth);
  drawFindings(frame, run, layout, x);
  const { s } = state.value;
  if (s) {
    ctx.strokeStyle = theme.colours.ink;
    ctx.lineWidth = 1.5;
    const [a, b] = [Math.max(left, x(s[0])), Math.min(right, x(s[1] + 1))];
    if (b > a) ctx.strokeRect(a, JOB_HEIGHT + 2, b - a, bottom - JOB_HEIGHT - 1);
  }
  for (const step of how.axis.ticks(right - left)) {
    const at = (x(step) + x(step + 1)) / 2;
    drawText(ctx, theme, `${step}`, Math.min(at, right - 8), bottom + 11, { align: "center" });
  }
  drawText(ctx, theme, "step", left - 6, bottom + 11, { align: "right" });
  drawLegend(frame, matrix, scale, right + 6, bottom + 6);
}

function drawJobStep({ ctx, width, theme }: Frame, run: Run, { left, from, to }: Layout, x: (step: number) => number): void {
  const curve = run.page.series.find((one) => one.key === "step");
  if (!curve) return;
  const inside = curve.step.map((step, i) => [step, curve.mean[i], curve.high[i]] as const).filter(([step]) => step >= from && step < to);
  const values = inside.map(([, , high]) => high ?? 0).sort((a, b) => a - b);
  const top = Math.max(1, Math.min(values[values.length - 1] ?? 1, 2.5 * (values[values.length >> 1] ?? 1)));
  const isCut = (values[values.length - 1] ?? 0) > 1.05 * top;
  drawText(ctx, theme, `${isCut ? "≥ " : ""}${duration(top)}`, left - 6, 7, { align: "right" });
  drawText(ctx, theme, "job step", left - 6, 22, { align: "right" });
  drawText(ctx, theme, "0", left - 6, JOB_HEIGHT - 5, { align: "right" });
  ctx.strokeStyle = theme.colours.line;
  ctx.lineWidth = 1;
  ctx.beginPath();
  ctx.moveTo(left, JOB_HEIGHT - 2.5);
  ctx.lineTo(width - RIGHT, JOB_HEIGHT - 2.5);
  ctx.stroke();
  ctx.save();
  ctx.beginPath();
  ctx.rect(left, 0, width - RIGHT - left, JOB_HEIGHT);
  ctx.clip();
  ctx.strokeStyle = theme.colours.ink2;
  ctx.lineWidth = 1.3;
  ctx.beginPath();
  let before = Number.NaN;
  const gap = Math.max(2, ((curve.step[curve.step.length - 1]! - curve.step[0]!) / Math.max(1, curve.step.length - 1)) * 2.5);
  for (const [step, mean] of inside) {
    if (mean === null || mean === undefined) continue;
    const y = JOB_HEIGHT - 3 - (Math.min(mean, 1.05 * top) / top) * (JOB_HEIGHT - 8);
    const at = x(step + 0.5);
    if (step - before <= gap) ctx.lineTo(at, y);
    else ctx.moveTo(at, y);
    before = step;
  }
  ctx.stroke();
  ctx.restore();
}

function drawLeftOut({ ctx, width, theme }: Frame, run: Run, { left, from, to, top, height }: Layout, x: (step: number) => number): void {
  for (const gap of list(run.page.matrices?.left_out)) {
    const [a, b] = [Math.max(gap.first_step, from), Math.min(gap.last_step + 1, to)];
    if (b <= a) continue;
    ctx.fillStyle = theme.colours.sunk;
    const [px, w] = [Math.max(left, x(a)), Math.max(1, Math.min(width - RIGHT, x(b)) - x(a))];
    ctx.fillRect(px, top, w, height - AXIS - top);
    ctx.fillStyle = hatch(ctx, theme.colours.ink3, 0.35);
    ctx.fillRect(px, top, w, height - AXIS - top);
  }
}

function drawGrid({ ctx, width, theme }: Frame, { matrix, ranks, rowHeight, left, from, to, top, height }: Layout, x: (step: number) => number): void {
  ctx.fillStyle = theme.colours.card;
  const right = width - RIGHT;
  if (rowHeight >= 6) for (let i = 1; i < ranks.length; i++) ctx.fillRect(left, top + i * rowHeight - (rowHeight > 10 ? 2 : 1), right - left, rowHeight > 10 ? 2 : 1);
  const cell = (right - left) / Math.max(1, to - from);
  if (cell >= 6) for (const edge of matrix.edges) if (edge > from && edge < to) ctx.fillRect(x(edge) - 0.5, top, 1, height - AXIS - top);
}

function drawRowLabels({ ctx, width, theme }: Frame, run: Run, { ranks, rowHeight, left, top, height }: Layout): void {
  const chosen = chosenRanks.value;
  if (rowHeight >= 10) {
    ranks.forEach((rank, i) => {
      const isChosen = chosen.has(rank);
      const isBad = run.page.ranks.length > 0 && run.findings.some((one) => severityRank(one.severity) > 1 && one.rankList.includes(rank));
      drawText(ctx, theme, run.label(rank), left - 6, top + (i + 0.5) * rowHeight - 0.5, {
        align: "right", colour: isBad ? theme.colours.bad : isChosen ? theme.colours.ink : theme.colours.ink2, weight: isChosen || isBad ? 640 : 400, size: rowHeight > 14 ? 11.5 : 10,
      });
    });
    return;
  }
  // Too many rows for names: the outermost axis, where the order follows it; else every so many ranks.
  const axis = run.axes[0];
  const isMesh = (state.value.o || "mesh") === "mesh" && axis !== undefined;
  let last: number | undefined;
  let lastY = -20;
  ranks.forEach((rank, i) => {
    const at = isMesh ? run.coordinates(rank)?.[axis] : Math.floor(i / Math.max(1, Math.ceil(ranks.length / 8)));
    if (at === last) return;
    last = at;
    const y = top + i * rowHeight;
    if (i > 0) {
      ctx.fillStyle = theme.colours.card;
      ctx.fillRect(left, Math.round(y) - 1, width - RIGHT - left, 1.5);
    }
    if (y - lastY < 13) return;
    lastY = y;
    drawText(ctx, theme, isMesh ? `${axis}${at}` : `${rank}`, left - 6, Math.min(y + 7, height - AXIS - 4), { align: "right" });
  });
  for (const [i, rank] of ranks.entries()) {
    if (!chosen.has(rank)) continue;
    ctx.fillStyle = theme.colours.ink;
    ctx.fillRect(left - 4, top + i * rowHeight, 3, Math.max(1, rowHeight));
  }
}

function drawMeans({ ctx, width, theme }: Frame, { matrix, ranks, rowHeight, top, scale }: Layout, worth: (rank: number) => number): void {
  const left = width - RIGHT + 8;
  const means = ranks.map((rank) => worth(rank));
  const largest = Math.max(...means.filter((value) => !Number.isNaN(value)), 1e-9);
  const room = RIGHT - 66;
  drawText(ctx, theme, "mean", left, top - 8);
  means.forEach((mean, i) => {
    if (Number.isNaN(mean)) return;
    const y = top + i * rowHeight;
    const w = (mean / (scale.isHot ? Math.max(largest, 0.04 * scale.high) : largest)) * room;
    ctx.fillStyle = scale.isHot && mean > 0.04 * scale.high ? theme.colours.bad : theme.colours.ink3;
    ctx.fillRect(left, y + rowHeight * 0.2, Math.max(scale.isHot ? 0.5 : 0, w), Math.max(1, rowHeight * 0.55));
    if (rowHeight >= 10 && (!scale.isHot || mean > 0.01 * scale.high)) {
      const text = matrix.unit === "ns" && scale.isHot ? change(mean) : withUnit(mean, matrix.unit);
      drawText(ctx, theme, text, left + w + 4, y + rowHeight / 2, { size: 10.5, colour: theme.colours.ink2 });
    }
  });
}

function drawFindings({ ctx, width, theme }: Frame, run: Run, { matrix, ranks, lens, rowHeight, left, lensTop, top, from, to }: Layout, x: (step: number) => number): void {
  const right = width - RIGHT;
  const chosen = chosenFinding.value;
  const isShown = (one: ShownFinding): boolean => one.shown.some((link) => link.view === "heat" && (link.metric === "memory") === (matrix.metric === "memory"));
  const shown = run.findings.filter((one) => isShown(one) && one.rankList.length > 0 && one.rankList.length < Math.max(2, ranks.length) && (severityRank(one.severity) > 1 || one.id === chosen?.id)).slice(0, 12);
  const indexOf = new Map(ranks.map((rank, i) => [rank, i]));
  for (const one of shown) {
    const [a, b] = [Math.max(left, x(Math.max(from, one.first_step ?? from))), Math.min(right, x(Math.min(to, (one.last_step ?? to - 1) + 1)))];
    if (b <= a) continue;
    ctx.strokeStyle = theme.colours.ink;
    ctx.lineWidth = one.id === chosen?.id ? 2 : 1;
    const rows = one.rankList.map((rank) => indexOf.get(rank)).filter((i): i is number => i !== undefined).sort((p, q) => p - q);
    for (let i = 0; i < rows.length; ) {
      let j = i;
      while (j + 1 < rows.length && rows[j + 1] === rows[j]! + 1) j++;
      const [y0, y1] = [top + rows[i]! * rowHeight, top + (rows[j]! + 1) * rowHeight];
      if (y1 - y0 >= 6) ctx.strokeRect(a + 0.5, y0 - 0.5, b - a - 1, y1 - y0 - (rowHeight > 10 ? 1 : 0));
      else drawBrackets(ctx, a, b, (y0 + y1) / 2);
      i = j + 1;
    }
    lens.forEach((rank, i) => {
      if (one.rankList.includes(rank)) ctx.strokeRect(a + 0.5, lensTop + i * LENS_ROW + 0.5, b - a - 1, LENS_ROW - 2);
    });
    if (rowHeight >= 14 && rows.length) {
      const label = one.code;
      const y = top + rows[0]! * rowHeight;
      const at = Math.min(a, right - 7 * label.length - 3);
      ctx.fillStyle = theme.colours.ink;
      ctx.fillRect(at, y - 1, 7 * label.length + 3, 13);
      drawText(ctx, theme, label, at + 4, y + 6, { size: 10, weight: 600, colour: theme.colours.bg });
    }
  }
}

function drawBrackets(ctx: CanvasRenderingContext2D, a: number, b: number, y: number): void {
  ctx.beginPath();
  for (const [at, inward] of [[a, 4], [b, -4]] as const) {
    ctx.moveTo(at + inward, y - 4);
    ctx.lineTo(at, y - 4);
    ctx.lineTo(at, y + 4);
    ctx.lineTo(at + inward, y + 4);
  }
  ctx.stroke();
}

function drawLegend({ ctx, theme }: Frame, matrix: Matrix, scale: Scale, x: number, y: number): void {
  const ramp = scale.isHot ? theme.heat : theme.neutral;
  for (let i = 0; i < 26; i++) {
    ctx.fillStyle = rampColour(ramp, i / 25);
    ctx.fillRect(x + i, y, 1.2, 9);
  }
  drawText(ctx, theme, `≥${withUnit(scale.high, matrix.unit)}`, x + 30, y + 5, { size: 10.5 });
}

function rankSpot(run: Run, rank: number, mean: number, unit: string, isKnownMean: boolean): Spot {
  const rows: [string, string][] = [["host", run.host(rank) || "not known"]];
  if (isKnownMean && !Number.isNaN(mean)) rows.push(["mean", withUnit(mean, unit)]);
  const title = `rank ${rank} ${run.place(rank)}`;
  return { tip: <Facts title={title} rows={rows} />, text: `${title}, ${rows.map((row) => row.join(" ")).join(", ")}` };
}

function cellSpot({ run, layout, rank, c, x, isExcess }: { run: Run; layout: Layout; rank: number; c: number; x: (step: number) => number; isExcess: boolean }): Spot {
  const { matrix, ranks, lens, rowHeight, lensTop, top } = layout;
  const [a, b] = [matrix.edges[c]!, matrix.edges[c + 1]! - 1];
  const gap = list(run.page.matrices?.left_out).find((one) => one.first_step <= a && one.last_step >= b);
  const value = largestOf(matrix, rank, c, c);
  const steps = a === b ? `step ${a}` : `steps ${a}–${b}, the largest`;
  const rows: [string, string][] = [];
  if (Number.isNaN(value)) rows.push(["value", gap ? `left out: ${cleanText(gap.reason)}` : "not recorded"]);
  else {
    rows.push([isExcess ? "above" : "value", withUnit(value, matrix.unit)]);
    if (matrix.metric === "excess" && !matrix.phase) {
      const work = run.page.matrices?.layers.some((one) => one.metric === "work" && !one.phase) ? run.knownMatrix("work") : undefined;
      const own = work && columnOf(work, a) >= 0 ? largestOf(work, rank, columnOf(work, a), columnOf(work, b)) : Number.NaN;
      if (!Number.isNaN(own)) {
        rows.push(["own work", duration(own)]);
        if (value > 0 && a === b) rows.push(["peers’ median", duration(Math.max(0, own - value))]);
      }
      for (const phase of run.page.matrices?.phases ?? []) {
        const part = run.page.matrices?.layers.some((one) => one.metric === "excess" && one.phase === phase) ? run.knownMatrix("excess", phase) : undefined;
        const above = part ? largestOf(part, rank, columnOf(part, a), columnOf(part, b)) : Number.NaN;
        if (above > 0) rows.push([`above in ${phase || "no phase"}`, duration(above)]);
      }
    }
  }
  rows.push(["host", run.host(rank) || "not known"]);
  const title = `rank ${rank} ${run.place(rank)}, ${steps}`;
  const i = ranks.indexOf(rank);
  const k = lens.indexOf(rank);
  const box = rowHeight >= 4 ? ([x(a), top + i * rowHeight, x(b + 1) - x(a), rowHeight - 1] as const) : k >= 0 ? ([x(a), lensTop + k * LENS_ROW, x(b + 1) - x(a), LENS_ROW - 1] as const) : undefined;
  return { tip: <Facts title={title} rows={rows} />, text: `${title}: ${rows.map((row) => row.join(" ")).join(", ")}`, ...(box ? { box } : {}) };
}

function summary(run: Run, matrix: Matrix, ranks: readonly number[], worth: (rank: number) => number, label: string): string {
  const sorted = [...ranks].filter((rank) => !Number.isNaN(worth(rank))).sort((a, b) => worth(b) - worth(a));
  const worst = sorted[0];
  const middle = sorted[sorted.length >> 1];
  if (worst === undefined || middle === undefined) return `${label}: no values`;
  return `${label}: rank ${worst} ${run.place(worst)} has the most, ${withUnit(worth(worst), matrix.unit)} on average; the median rank ${withUnit(worth(middle), matrix.unit)}`;
}

function tableOf(run: Run, matrix: Matrix, ranks: readonly number[], c0: number, c1: number): Table {
  const unit = matrix.unit === "ns" ? "_ns" : matrix.unit === "bytes" ? "_bytes" : "";
  const rows = ranks.map((rank) => {
    const row = matrix.rowOf.get(rank);
    const mean = row === undefined ? Number.NaN : rowMean(matrix, row, c0, c1);
    const largest = row === undefined ? Number.NaN : largestOf(matrix, rank, c0, c1);
    return [rank, run.place(rank), run.host(rank), Number.isNaN(mean) ? null : mean, Number.isNaN(largest) ? null : largest] as const;
  });
  return { columns: ["rank", "place", "host", `mean${unit}`, `largest${unit}`], rows };
}

