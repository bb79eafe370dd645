// A curve over steps: mean as a line, lowest to highest as a band, what is not finite as ticks on top.
import { effect } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import type { PageEvent } from "../data/page";
import type { Curve } from "../data/report";
import { drawText, stepTicks, textWidth } from "../draw/axis";
import { font, theme } from "../draw/theme";
import { state } from "../state/fragment";
import { selectSteps } from "../state/scope";
import { clean } from "../text/names";
import { tip } from "./tip";

export interface CurveProps {
  readonly curve: Curve;
  readonly title: string;
  readonly height: number;
  readonly show: (value: number) => string;
  /** On the axis, where it is not the same. */
  readonly tick?: (value: number) => string;
  readonly events?: readonly PageEvent[];
  readonly isFromZero?: boolean;
  readonly hasSteps?: boolean;
  readonly isSmoothed?: boolean;
  readonly range: readonly [number, number];
}

const SYNC = "steps";

export function CurveChart(props: CurveProps) {
  const { curve, title, height, show, events = [], isFromZero = false, hasSteps = true, range } = props;
  const host = useRef<HTMLDivElement>(null);
  useEffect(() => {
    const element = host.current!;
    let plot: uPlot | null = null;
    const make = (): void => {
      plot?.destroy();
      plot = makePlot(element, props);
    };
    // Colours are read when it is made: a new theme makes it again.
    const stop = effect(() => { void theme.value; make(); });
    const stopSelection = effect(() => { void state.value.s; plot?.redraw(false); });
    const watch = new ResizeObserver(() => {
      if (plot && Math.abs(plot.width - element.clientWidth) > 1) plot.setSize({ width: element.clientWidth, height });
    });
    watch.observe(element);
    return () => { stop(); stopSelection(); watch.disconnect(); plot?.destroy(); };
  }, [curve, height, isFromZero, hasSteps, props.isSmoothed, range[0], range[1], events]);
  const known = curve.mean.filter((value): value is number => value !== null);
  const label = known.length ? `${title} over steps: from ${show(known[0]!)} to ${show(known[known.length - 1]!)}` : `${title}: no value`;
  return <div ref={host} role="img" aria-label={label} data-curve={curve.key} style={{ height: `${height}px` }} />;
}

function smooth(values: readonly (number | null)[]): (number | null)[] {
  const alpha = 2 / (1 + Math.max(3, values.length / 25));
  let at: number | null = null;
  return values.map((value) => (value === null ? null : (at = at === null ? value : at + alpha * (value - at))));
}

function makePlot(element: HTMLElement, { curve, title, height, show, tick = show, events = [], isFromZero = false, hasSteps = true, isSmoothed = false, range }: CurveProps): uPlot {
  const { colours } = theme.peek();
  const shown = theme.peek();
  const means = curve.mean.map((value) => value ?? null);
  const data: uPlot.AlignedData = [[...curve.step], [...curve.high], [...curve.low], means, ...(isSmoothed ? [smooth(means)] : [])];
  const hasBand = curve.high.some((value, i) => value !== curve.low[i]);
  const options: uPlot.Options = {
    width: Math.max(80, element.clientWidth), height, legend: { show: false }, padding: [17, 10, hasSteps ? 0 : 7, 0],
    cursor: { sync: { key: SYNC, scales: ["x", null] }, drag: { x: true, y: false, setScale: false }, points: { size: 5 }, y: false },
    scales: {
      x: { time: false, range: () => [range[0], Math.max(range[0] + 1, range[1])] },
      y: { range: (_u, low, high) => widen(low, high, isFromZero) },
    },
    axes: [
      { show: hasSteps, size: 20, font: font(), stroke: colours.ink3, grid: { show: false }, ticks: { show: false }, gap: 2,
        splits: (u, _i, low, high) => stepTicks(low, high, u.bbox.width / devicePixelRatio), values: (_u, ticks) => ticks.map((step) => `${step}`) },
      { size: 64, font: font(), stroke: colours.ink3, gap: 4, grid: { stroke: colours.line, width: 1 }, ticks: { show: false },
        splits: (_u, _i, low, high) => [low, (low + high) / 2, high], values: (_u, ticks) => ticks.map((value) => tick(value)) },
    ],
    series: [
      {},
      { stroke: "transparent", points: { show: false } },
      { stroke: "transparent", points: { show: false } },
      { stroke: colours.ink, width: 1.4, points: { show: curve.step.length < 4, size: 5 }, spanGaps: false },
      ...(isSmoothed ? [{ stroke: colours.ink3, width: 1.2, dash: [4, 3], points: { show: false } }] : []),
    ],
    ...(hasBand ? { bands: [{ series: [1, 2] as [number, number], fill: `${colours.ink3}40` }] } : {}),
    hooks: {
      draw: [(u) => drawMarks(u, curve, events, title, shown.name)],
      setSelect: [(u) => {
        if (u.select.width < 4) return;
        const [a, b] = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")];
        u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        selectSteps(Math.max(range[0], Math.round(a)), Math.min(range[1], Math.round(b)), true);
      }],
      setCursor: [(u) => showTip(u, curve, title, show)],
    },
  };
  const plot = new uPlot(options, data, element);
  plot.over.addEventListener("mouseleave", () => (tip.value = null));
  return plot;
}

function widen(low: number, high: number, isFromZero: boolean): [number, number] {
  if (low === null || high === null || !Number.isFinite(low) || !Number.isFinite(high)) return [0, 1];
  if (isFromZero) return [Math.min(0, low), high <= 0 ? 1 : high * 1.04];
  const room = (high - low) * 0.06 || Math.abs(high) * 0.05 || 1;
  return [low - room, high + room];
}

function showTip(u: uPlot, curve: Curve, title: string, show: (value: number) => string): void {
  const { idx, left = -1 } = u.cursor;
  if (idx === null || idx === undefined || left < 0 || !u.over.matches(":hover")) return;
  const mean = curve.mean[idx];
  if (mean === null || mean === undefined) return;
  const [low, high] = [curve.low[idx], curve.high[idx]];
  const box = u.over.getBoundingClientRect();
  const band = typeof low === "number" && typeof high === "number" && low !== high ? `, ${show(low)} to ${show(high)}${curve.is_of_ranks ? " over ranks" : ""}` : "";
  tip.value = { x: box.left + left, y: box.top + (u.cursor.top ?? 0), content: `${title}, step ${curve.step[idx]}: ${show(mean)}${band}` };
}

const LOUD = new Set(["finding", "exception", "nan", "fault"]);

function drawMarks(u: uPlot, curve: Curve, events: readonly PageEvent[], title: string, name: string): void {
  const shown = theme.peek();
  if (shown.name !== name) return;
  const { ctx } = u;
  const scale = devicePixelRatio || 1;
  const { left, top, width, height } = u.bbox;
  ctx.save();
  ctx.beginPath();
  ctx.rect(left - 2 * scale, 0, width + 4 * scale, top + height);
  ctx.clip();
  for (const step of curve.bad_steps) {
    ctx.fillStyle = shown.colours.bad;
    ctx.fillRect(u.valToPos(step, "x", true) - scale, top, 2 * scale, 7 * scale);
  }
  let end = -1;
  const titleStart = left + width - scale * (textWidth(ctx, title, 11.5, 600) + 10);
  for (const one of events) {
    const x = u.valToPos(Math.max(one.step, u.scales["x"]!.min ?? 0), "x", true);
    if (x < left || x > left + width) continue;
    const isLoud = LOUD.has(one.kind);
    ctx.strokeStyle = isLoud ? shown.colours.bad : shown.colours.ink3;
    ctx.lineWidth = scale;
    ctx.setLineDash([3 * scale, 3 * scale]);
    ctx.beginPath();
    ctx.moveTo(x, top);
    ctx.lineTo(x, top + height);
    ctx.stroke();
    ctx.setLineDash([]);
    if (x < end) continue;
    const text = one.kind === "finding" ? (one.finding ?? "finding") : one.kind;
    ctx.save();
    ctx.setTransform(scale, 0, 0, scale, 0, 0);
    const isRight = x > titleStart - scale * (textWidth(ctx, clean(text, 12), 10) + 6);
    drawText(ctx, shown, clean(text, 12), Math.min(x / scale - 3, isRight ? titleStart / scale : Infinity) + (isRight ? 0 : 6), top / scale - 7, { size: 10, colour: isLoud ? shown.colours.bad : shown.colours.ink3, align: isRight ? "right" : "left" });
    ctx.restore();
    end = x + 52 * scale;
  }
  const { s } = state.peek();
  if (s) {
    const [a, b] = [u.valToPos(s[0], "x", true), u.valToPos(s[1], "x", true)];
    ctx.strokeStyle = shown.colours.ink;
    ctx.lineWidth = 1.5 * scale;
    ctx.strokeRect(a, top, Math.max(2, b - a), height);
  }
  ctx.restore();
  ctx.save();
  ctx.setTransform(scale, 0, 0, scale, 0, 0);
  drawText(ctx, shown, title, (left + width) / scale - 2, top / scale - 8, { align: "right", weight: 600, colour: shown.colours.ink, size: 11.5 });
  ctx.restore();
}
