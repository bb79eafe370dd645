// V11: messages from rank to rank; above 256 ranks from host to host, the largest of each.
import { useSignal } from "@preact/signals";
import { num } from "../data/known";
import type { Communication, Message } from "../data/report";
import { drawText } from "../draw/axis";
import type { Frame, Spot } from "../draw/canvas";
import { Canvas } from "../draw/canvas";
import { rampColour } from "../draw/theme";
import { Card } from "../parts/card";
import { Choice } from "../parts/menu";
import { Facts } from "../parts/tip";
import type { Run } from "../state/run";
import { chosenRanks, selectRanks } from "../state/scope";
import { clean } from "../text/names";
import { count, duration, memory, plural, withUnit } from "../text/units";

const LEFT = 40;
const TOP = 20;
const MAX_RANKS = 256;

interface Cell {
  readonly source: string;
  readonly target: string;
  readonly ranks: readonly number[];
  readonly messages: readonly Message[];
}

export function PairsView({ run, communication, span }: { run: Run; communication: Communication; span: readonly [number, number] }) {
  const how = useSignal<"latency" | "wait" | "data">("latency");
  const isByHost = run.rankNumbers.length > MAX_RANKS;
  const nameOf = (rank: number): string => (isByHost ? run.host(rank) || "?" : `${rank}`);
  const used = new Set(communication.messages.flatMap((one) => [one.source, one.target]));
  const names = [...new Set(run.order("rank").filter((rank) => used.has(rank)).map(nameOf))];
  const cells = new Map<string, Cell>();
  for (const one of communication.messages) {
    const key = `${nameOf(one.source)} ${nameOf(one.target)}`;
    const own = cells.get(key);
    cells.set(key, { source: nameOf(one.source), target: nameOf(one.target), ranks: [one.source, one.target], messages: [...(own?.messages ?? []), one] });
  }
  const valueOf = (one: Message): number => (how.value === "data" ? one.size_bytes : num(how.value === "wait" ? one.mean_wait_ns : one.mean_latency_ns) ?? Number.NaN);
  const worst = (cell: Cell): number => cell.messages.map(valueOf).reduce((a, b) => (b > a || Number.isNaN(a) ? b : a), Number.NaN);
  const unit = how.value === "data" ? "bytes" : "ns";
  const top = Math.max(1, ...[...cells.values()].map(worst).filter((value) => !Number.isNaN(value)));
  const table = () => ({
    columns: ["source", "target", "messages", "data_bytes", "mean_latency_ns", "mean_wait_ns", "across_hosts"],
    rows: communication.messages.map((one) => [one.source, one.target, one.num_messages, one.size_bytes, num(one.mean_latency_ns) ?? null, num(one.mean_wait_ns) ?? null, one.is_across_hosts ? "yes" : "no"]),
  });
  const size = (width: number): number => Math.min((width - LEFT - 4) / names.length, names.length > 64 ? 6 : 26);
  const height = Math.round(TOP + Math.min(names.length * (names.length > 64 ? 3 : names.length > 24 ? 8 : 22), 240) + 20);
  const cellAt = (px: number, py: number, width: number): Cell | undefined => {
    const [w, h] = [size(width), (height - TOP - 20) / names.length];
    const [target, source] = [names[Math.floor((px - LEFT) / w)], names[Math.floor((py - TOP) / h)]];
    return source === undefined || target === undefined ? undefined : cells.get(`${source} ${target}`);
  };
  const draw = ({ ctx, width, theme }: Frame): void => {
    const [w, h] = [size(width), (height - TOP - 20) / names.length];
    ctx.fillStyle = theme.colours.sunk;
    ctx.fillRect(LEFT, TOP, w * names.length, h * names.length);
    const index = new Map(names.map((name, i) => [name, i]));
    for (const cell of cells.values()) {
      const [i, k] = [index.get(cell.source)!, index.get(cell.target)!];
      const value = worst(cell);
      const ramp = theme.neutral;
      ctx.fillStyle = Number.isNaN(value) ? theme.colours.card : rampColour(ramp, 0.15 + 0.85 * (value / top));
      ctx.fillRect(LEFT + k * w, TOP + i * h, Math.max(1, w - (w > 6 ? 1 : 0)), Math.max(1, h - (h > 6 ? 1 : 0)));
      if (cell.ranks.some((rank) => chosenRanks.value.has(rank))) {
        ctx.strokeStyle = theme.colours.ink;
        ctx.lineWidth = 1.5;
        ctx.strokeRect(LEFT + k * w, TOP + i * h, w - 1, h - 1);
      }
    }
    const every = Math.max(1, Math.ceil(14 / h));
    const everyX = Math.max(1, Math.ceil(22 / w));
    names.forEach((name, i) => {
      if (i % every === 0) drawText(ctx, theme, isByHost ? name.slice(-6) : name, LEFT - 5, TOP + (i + 0.5) * h, { align: "right", size: 10.5 });
      if (i % everyX === 0) drawText(ctx, theme, isByHost ? name.slice(-4) : name, LEFT + (i + 0.5) * w, TOP - 7, { align: "center", size: 10.5 });
    });
    drawText(ctx, theme, "from", 0, TOP - 7, { size: 10.5 });
    for (let i = 0; i < 40; i++) {
      ctx.fillStyle = rampColour(theme.neutral, 0.15 + (0.85 * i) / 39);
      ctx.fillRect(LEFT + i, height - 12, 1.2, 8);
    }
    drawText(ctx, theme, `0 to ${withUnit(top, unit)}`, LEFT + 46, height - 8, { size: 10.5 });
  };
  const spot = (px: number, py: number, width: number): Spot | null => {
    const cell = cellAt(px, py, width);
    if (!cell) return null;
    const slowest = [...cell.messages].sort((a, b) => valueOf(b) - valueOf(a))[0]!;
    const rows: [string, string][] = [
      ["messages", count(cell.messages.reduce((sum, one) => sum + one.num_messages, 0))], ["data", memory(cell.messages.reduce((sum, one) => sum + one.size_bytes, 0))],
      ["mean latency", num(slowest.mean_latency_ns) === undefined ? "not known" : duration(num(slowest.mean_latency_ns)!)],
      ["mean wait", num(slowest.mean_wait_ns) === undefined ? "not known" : duration(num(slowest.mean_wait_ns)!)],
    ];
    const title = isByHost ? `${clean(cell.source)} → ${clean(cell.target)}, the slowest pair` : `rank ${cell.source} → rank ${cell.target}`;
    return { tip: <Facts title={title} rows={rows} />, text: `${title}: ${rows.map((row) => row.join(" ")).join(", ")}` };
  };
  const more = communication.num_message_pairs - communication.messages.length;
  return (
    <Card id="pairs" title="Pairs" span={span} sub={`${plural(communication.messages.length, "pair")}; row: from, column: to${isByHost ? ", by host: the largest" : ""}${more > 0 ? `, ${count(more)} more not listed` : ""}`}
      not="all traffic: only messages between two ranks" table={table}
      tools={<Choice label="What pairs show" value={how.value} options={[["latency", "latency"], ["wait", "wait"], ["data", "data"]]} choose={(value) => (how.value = value)} />}>
      <Canvas height={height} draw={draw} spot={spot} label={`Messages of ${plural(communication.messages.length, "pair")}; the largest is ${withUnit(top, unit)}`}
        click={(px, py, width, event) => { const cell = cellAt(px, py, width); if (cell) selectRanks(isByHost ? run.rankNumbers.filter((rank) => [cell.source, cell.target].includes(run.host(rank))) : [...new Set(cell.ranks)], event.shiftKey); }}
        cursor={(at, dx, dy, width) => {
          const [w, h] = [size(width), (height - TOP - 20) / names.length];
          if (!at) return [LEFT + w / 2, TOP + h / 2];
          return [Math.min(LEFT + w * names.length - 1, Math.max(LEFT + 1, at[0] + dx * w)), Math.min(TOP + h * names.length - 1, Math.max(TOP + 1, at[1] + dy * h))];
        }} />
    </Card>
  );
}
