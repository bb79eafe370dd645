// V10: bus bandwidth by size. One hue; shape is the kind of operation, a ring has few samples.
import { isKnown, num } from "../data/known";
import type { Bandwidth, BandwidthFit, Communication } from "../data/report";
import { drawText, logScale, textWidth } from "../draw/axis";
import type { Frame, Spot } from "../draw/canvas";
import { Canvas } from "../draw/canvas";
import { Card } from "../parts/card";
import { Facts } from "../parts/tip";
import type { Run } from "../state/run";
import { chosenAxis } from "../state/scope";
import { clean } from "../text/names";
import { bandwidth as speed, count, duration, memory } from "../text/units";

const HEIGHT = 218;
const [LEFT, RIGHT, TOP, BOTTOM] = [68, 14, 10, 26];
const FEW = 20;
const SHAPES = ["circle", "triangle", "square", "diamond", "cross"] as const;

interface Line {
  readonly name: string;
  readonly kind: string;
  readonly axis: string;
  readonly points: readonly Bandwidth[];
  readonly fit: BandwidthFit | undefined;
}

export function BandwidthView({ communication, span }: { run: Run; communication: Communication; span: readonly [number, number] }) {
  const points = communication.bandwidth.filter((one) => (num(one.bus_bytes_per_s) ?? 0) > 0 && one.median_size_bytes > 0);
  const lines = linesOf(communication, points);
  const kinds = [...new Set(lines.map((line) => line.kind))];
  const sizes = points.map((one) => one.median_size_bytes);
  const speeds = points.flatMap((one) => [num(one.bus_bytes_per_s)!, num(one.p10_bus_bytes_per_s), num(one.p90_bus_bytes_per_s)].filter((value): value is number => value !== undefined && value > 0));
  const table = () => ({
    columns: ["axis", "kind", "across_hosts", "size_bytes", "bus_bytes_per_s", "transfer_ns", "operations"],
    rows: points.map((one) => [one.axis, one.kind, one.is_across_hosts ? "yes" : "no", one.median_size_bytes, num(one.bus_bytes_per_s) ?? null, one.median_transfer_ns, one.num_operations]),
  });
  return (
    <Card id="bandwidth" title="Bandwidth against size" span={span} sub="bus bandwidth, median; ring: fewer than 20 operations"
      not="the link's limit: it is what these operations reached beside everything else" table={table}>
      {points.length === 0 ? <p class="dim">no transfer is known apart from waiting</p> : <Plot lines={lines} kinds={kinds} sizes={sizes} speeds={speeds} />}
      <Fits lines={lines} />
    </Card>
  );
}

function linesOf(communication: Communication, points: readonly Bandwidth[]): readonly Line[] {
  const groups = new Map<string, Bandwidth[]>();
  for (const one of points) {
    const key = `${one.axis} ${one.kind.replaceAll("_", "-")}${one.is_across_hosts ? ", across hosts" : ""}`;
    const own = groups.get(key) ?? [];
    own.push(one);
    groups.set(key, own);
  }
  return [...groups].map(([name, own]) => ({
    name, kind: own[0]!.kind, axis: own[0]!.axis,
    points: own.sort((a, b) => a.median_size_bytes - b.median_size_bytes),
    fit: communication.fits.find((fit) => fit.axis === own[0]!.axis && fit.kind === own[0]!.kind && fit.is_across_hosts === own[0]!.is_across_hosts),
  }));
}

function Plot({ lines, kinds, sizes, speeds }: { lines: readonly Line[]; kinds: readonly string[]; sizes: readonly number[]; speeds: readonly number[] }) {
  const sizeDomain: [number, number] = [2 ** Math.floor(Math.log2(Math.min(...sizes)) - 0.5), 2 ** Math.ceil(Math.log2(Math.max(...sizes)) + 0.5)];
  const speedDomain: [number, number] = [10 ** Math.floor(Math.log10(Math.min(...speeds)) - 0.05), 10 ** Math.ceil(Math.log10(Math.max(...speeds)) + 0.05)];
  const scales = (width: number) => ({
    x: logScale(sizeDomain, [LEFT, width - RIGHT]), y: logScale(speedDomain, [HEIGHT - BOTTOM, TOP]),
  });
  const draw = (frame: Frame): void => {
    const { ctx, width, theme } = frame;
    const { x, y } = scales(width);
    drawAxes(frame, x, y, sizeDomain, speedDomain);
    const placed = lines.flatMap((line) => line.points.map((one) => ({ x: x(one.median_size_bytes) - 6, y: y(num(one.bus_bytes_per_s)!), w: 12 })));
    for (const line of lines) {
      const isFaint = chosenAxis.value !== "" && chosenAxis.value !== line.axis;
      ctx.globalAlpha = isFaint ? 0.25 : 1;
      ctx.strokeStyle = theme.colours.transfer;
      ctx.lineWidth = 1.5;
      ctx.beginPath();
      line.points.forEach((one, i) => {
        const [px, py] = [x(one.median_size_bytes), y(num(one.bus_bytes_per_s)!)];
        if (i) ctx.lineTo(px, py);
        else ctx.moveTo(px, py);
      });
      ctx.stroke();
      for (const one of line.points) {
        const [low, high] = [num(one.p10_bus_bytes_per_s), num(one.p90_bus_bytes_per_s)];
        if (low && high) {
          ctx.beginPath();
          ctx.moveTo(x(one.median_size_bytes), y(low));
          ctx.lineTo(x(one.median_size_bytes), y(high));
          ctx.stroke();
        }
        drawShape(frame, SHAPES[kinds.indexOf(one.kind) % SHAPES.length]!, x(one.median_size_bytes), y(num(one.bus_bytes_per_s)!), one.num_operations < FEW);
      }
      const last = line.points[line.points.length - 1]!;
      placeLabel(frame, placed, line.name, x(last.median_size_bytes), y(num(last.bus_bytes_per_s)!), width);
      ctx.globalAlpha = 1;
    }
  };
  const nearest = (px: number, py: number, width: number): { one: Bandwidth; line: Line } | null => {
    const { x, y } = scales(width);
    let best: { one: Bandwidth; line: Line; far: number } | null = null;
    for (const line of lines) for (const one of line.points) {
      const far = Math.hypot(x(one.median_size_bytes) - px, y(num(one.bus_bytes_per_s)!) - py);
      if (far < 18 && (!best || far < best.far)) best = { one, line, far };
    }
    return best;
  };
  const spot = (px: number, py: number, width: number): Spot | null => {
    const found = nearest(px, py, width);
    if (!found) return null;
    const { one, line } = found;
    const rows: [string, string][] = [
      ["bus bandwidth", speed(num(one.bus_bytes_per_s)!)], ["median size", memory(one.median_size_bytes)], ["median transfer", duration(one.median_transfer_ns)],
      ["operations", count(one.num_operations)], ["ranks of a group", `${one.num_ranks}`],
    ];
    return { tip: <Facts title={clean(line.name)} rows={rows} />, text: `${line.name}: ${rows.map((row) => row.join(" ")).join(", ")}` };
  };
  return <Canvas height={HEIGHT} draw={draw} spot={spot} label={`Bus bandwidth against size of ${lines.map((line) => line.name).join("; ")}`} />;
}

type LogScale = (value: number) => number;

function drawAxes({ ctx, width, theme }: Frame, x: LogScale, y: LogScale, sizes: readonly number[], speeds: readonly number[]): void {
  ctx.strokeStyle = theme.colours.line;
  ctx.lineWidth = 1;
  const decades = Math.round(Math.log10(speeds[1]! / speeds[0]!));
  for (let i = 0; i <= decades; i++) {
    const at = Math.round(y(speeds[0]! * 10 ** i)) + 0.5;
    ctx.beginPath();
    ctx.moveTo(LEFT, at);
    ctx.lineTo(width - RIGHT, at);
    ctx.stroke();
    if (decades <= 6 || i % 2 === 0) drawText(ctx, theme, speed(speeds[0]! * 10 ** i), LEFT - 6, at, { align: "right" });
  }
  const [a, b] = [Math.ceil(Math.log2(sizes[0]!)), Math.floor(Math.log2(sizes[1]!))];
  const every = Math.max(1, Math.ceil(((b - a) * 66) / (width - LEFT - RIGHT)));
  for (let i = a; i <= b; i += every) {
    const at = x(2 ** i);
    drawText(ctx, theme, memory(2 ** i).replace(/\.0+ /, " "), Math.min(Math.max(at, LEFT + 14), width - 26), HEIGHT - 9, { align: "center" });
  }
}

function drawShape({ ctx, theme }: Frame, shape: string, x: number, y: number, isRing: boolean): void {
  const r = 4.5;
  ctx.beginPath();
  if (shape === "circle") ctx.arc(x, y, r, 0, 7);
  else if (shape === "triangle") { ctx.moveTo(x, y - r); ctx.lineTo(x + r, y + r); ctx.lineTo(x - r, y + r); ctx.closePath(); }
  else if (shape === "square") ctx.rect(x - r + 0.5, y - r + 0.5, 2 * r - 1, 2 * r - 1);
  else if (shape === "diamond") { ctx.moveTo(x, y - r - 1); ctx.lineTo(x + r + 1, y); ctx.lineTo(x, y + r + 1); ctx.lineTo(x - r - 1, y); ctx.closePath(); }
  else { ctx.rect(x - r, y - 1.2, 2 * r, 2.4); ctx.rect(x - 1.2, y - r, 2.4, 2 * r); }
  ctx.fillStyle = isRing ? theme.colours.card : theme.colours.transfer;
  ctx.strokeStyle = theme.colours.transfer;
  ctx.lineWidth = 1.6;
  ctx.fill();
  ctx.stroke();
}

/** Beside the end of its line, or above or below where a mark or another label is. */
function placeLabel({ ctx, theme }: Frame, placed: { x: number; y: number; w: number }[], name: string, x: number, y: number, width: number): void {
  const text = clean(name, 34);
  const w = textWidth(ctx, text, 11, 600) + 4;
  const left = x + 9 + w > width - 2 ? x - 9 - w : x + 9;
  const clash = (at: number): boolean => placed.some((one) => Math.abs(one.y - at) < 13 && left < one.x + one.w && one.x < left + w) || at < 8 || at > HEIGHT - BOTTOM - 4;
  const tries = [0, -13, 13, -26, 26, -39, 39, -52, 52];
  const at = y + (tries.find((by) => !clash(y + by)) ?? 0);
  placed.push({ x: left, y: at, w });
  drawText(ctx, theme, text, left, at, { size: 11, weight: 600, colour: theme.colours.ink });
}

function Fits({ lines }: { lines: readonly Line[] }) {
  const fits = lines.filter((line) => line.fit && isKnown(line.fit.latency_ns));
  if (!fits.length) return null;
  return (
    <p class="note">
      {fits.map((line, i) => (
        <span key={line.name}>
          {i > 0 && " · "}<b>{clean(line.name, 40)}</b>: latency {duration(num(line.fit!.latency_ns)!)}
          {isKnown(line.fit!.latency_low_ns) && isKnown(line.fit!.latency_high_ns) && ` (${duration(line.fit!.latency_low_ns)} to ${duration(line.fit!.latency_high_ns)})`}
          {isKnown(line.fit!.bus_bytes_per_s) && `, then ${speed(line.fit!.bus_bytes_per_s)}`}
        </span>
      ))}
    </p>
  );
}
