// V12: what fills memory: each rank at its peak, the points of the profiled step, modules, and over steps.
import { useSignal } from "@preact/signals";
import { isKnown, num, reasonOf } from "../data/known";
import type { MemoryOverview, MemoryPoint, RankMemory } from "../data/memory";
import type { MemoryRank } from "../data/report";
import { drawText } from "../draw/axis";
import type { Frame, Spot } from "../draw/canvas";
import { Canvas } from "../draw/canvas";
import { MEMORY_CATEGORIES, memoryColour } from "../draw/kinds";
import { hatch } from "../draw/texture";
import { Card } from "../parts/card";
import { CurveChart } from "../parts/curve";
import { Severity } from "../parts/icons";
import { Choice, Select } from "../parts/menu";
import { Facts } from "../parts/tip";
import type { Run } from "../state/run";
import { chosenRanks, selectRanks } from "../state/scope";
import type { Cell } from "../text/files";
import { Words } from "../parts/words";
import { clean, cleanText, sentence } from "../text/names";
import { memory as size, ratio } from "../text/units";
import { ModuleMap } from "./modules";

const MAX_ROWS = 16;

interface Part {
  readonly name: string;
  readonly bytes: number;
}

export function partsOf(point: MemoryPoint): readonly Part[] {
  const names = Object.keys(point.categories_bytes).sort((a, b) => rankOf(a) - rankOf(b));
  const parts = names.map((name) => ({ name, bytes: point.categories_bytes[name]! })).filter((part) => part.bytes > 0);
  const rest = num(point.residual_bytes);
  return rest !== undefined && rest > 0 ? [...parts, { name: "residual", bytes: rest }] : parts;
}

function rankOf(category: string): number {
  const found = MEMORY_CATEGORIES.indexOf(category);
  return found < 0 ? MEMORY_CATEGORIES.length : found;
}

export const categoryWords = (name: string): string => (name === "residual" ? "residual: allocated, not attributed" : clean(name.replaceAll("_", " "), 30));

export function MemoryView({ run, span }: { run: Run; span: readonly [number, number] }) {
  const how = useSignal<"points" | "modules" | "sunburst">("points");
  const rank = useSignal("");
  const { memory: profile, report } = run.page;
  const curves = run.page.series.filter((one) => one.group === "memory");
  const overview = isKnown(profile) && profile.ranks.length ? profile : null;
  const summary = isKnown(report.memory) ? report.memory.ranks : [];
  const fullest = overview ? fullestOf(overview, summary) : null;
  const shown = overview?.ranks.find((one) => `${one.rank}` === rank.value) ?? overview?.ranks.find((one) => chosenRanks.value.has(one.rank)) ?? fullest;
  const limits = summary.filter((one) => isKnown(one.limit_bytes));
  const limitText = limits.length ? `limit ${size(Math.min(...limits.map((one) => num(one.limit_bytes)!)))} (${limits[0]!.place})` : `limit not known${summary[0] ? `: ${reasonOf(summary[0].limit_bytes)}` : ""}`;
  return (
    <Card id="memory" title="What fills memory" span={span} sub={overview ? `each rank at its peak, by category; ${cleanText(limitText)}` : cleanText(limitText)}
      not={overview ? "what the device has reserved: a profile counts live tensors; the hatched part is allocated and not attributed" : "what tensors need: resident memory also holds code, caches and the allocator's reserve"}
      tools={overview && <>
        <Select label="Rank of the points" value={shown ? `${shown.rank}` : ""} options={overview.ranks.slice(0, 512).map((one) => [`${one.rank}`, `rank ${one.rank}${one === fullest ? " (fullest)" : ""}`] as const)} choose={(value) => (rank.value = value)} />
        <Choice label="Right side" value={how.value} options={[["points", "points of the step"], ["modules", "modules"], ["sunburst", "sunburst"]]} choose={(value) => (how.value = value)} />
      </>}
      table={() => tableOf(run, overview)}>
      {run.findings.filter((one) => one.lamp === "fit").slice(0, 3).map((one) => (
        <p key={one.id} class="row"><Severity word={one.severity} /><span class="grow"><b>{sentence(one.title)}.</b> {sentence(one.summary)}</span></p>
      ))}
      {overview && (
        <div class="columns">
          <div><PeakBars run={run} overview={overview} /></div>
          <div>
            {shown && how.value === "points" && <Points one={shown} />}
            {shown && how.value !== "points" && <ModuleMap one={shown} isRound={how.value === "sunburst"} />}
          </div>
        </div>
      )}
      {overview && <CategoryLegend overview={overview} />}
      {overview && <Unexplained overview={overview} summary={summary} />}
      {!overview && <Coarse summary={summary} reason={reasonOf(profile)} />}
      {curves.length > 0
        ? <div class="columns">{curves.slice(0, 4).map((one) => <CurveChart key={one.key} curve={one} title={`${clean(one.key.replace("_bytes", "").replaceAll("_", " "), 24).replace("rss", "resident")}, ${clean(one.source, 40)}`} height={84} show={size} range={run.stepRange} isFromZero />)}</div>
        : <p class="dim">Memory over steps is not known: <Words text={reasonOf(report.memory, "it was not sampled")} />.</p>}
    </Card>
  );
}

/** What any run tells of the fullest rank's peak: parameters are counted, the rest is told by when it came. */
function Coarse({ summary, reason }: { summary: readonly MemoryRank[]; reason: string }) {
  const bytes = (one: MemoryRank): number => num(one.peak_bytes) ?? 0;
  const isOnDevice = summary.some((one) => one.place === "device");
  const fullest = summary.filter((one) => !isOnDevice || one.place === "device").sort((a, b) => bytes(b) - bytes(a))[0];
  const parts = fullest?.parts_bytes;
  const why = <p class="note">By category (gradients, optimizer state, activations, …) it is not known: <Words text={reason} />.</p>;
  if (!fullest || !parts) return why;
  const uncounted = parts.parameters ? "" : "parameters, ";
  const rest = `${uncounted}gradients, optimizer state, ${isOnDevice ? "whatever else the program keeps" : "code, libraries, whatever else the process keeps"}`;
  const rows: readonly (readonly [string, number, string, string])[] = [
    ["Trained parameters", parts.parameters, "counted", "var(--m-parameters)"],
    [`The rest of what was there at the end of step ${fullest.first_step}`, parts.other_at_start, rest, "var(--m-optimizer)"],
    ["Added by later steps", parts.added_later, `up to the peak, in step ${fullest.peak_step}`, "var(--bad)"],
    ["Freed before a step ends", parts.within_steps, "activations, their gradients, temporaries", "var(--m-activations)"],
  ];
  const shown = rows.filter(([, size]) => size > 0);
  return <>
    <table class="coarse" aria-label={`Parts of the peak of rank ${fullest.rank}`}>
      <caption>{size(bytes(fullest))} of rank {fullest.rank}, the fullest, at its peak</caption>
      <tbody>{shown.map(([name, part, note, colour]) => (
        <tr key={name}>
          <th scope="row"><i class="swatch" style={{ background: colour }} />{name} <span class="dim">{note}</span></th>
          <td class="right nowrap"><b>{size(part)}</b></td>
          <td class="right nowrap">{ratio(part / bytes(fullest))}</td>
          <td class="bar"><div class="meter"><div style={{ width: `${(100 * part) / bytes(fullest)}%`, background: colour }} /></div></td>
        </tr>
      ))}</tbody>
    </table>
    {why}
  </>;
}

/** A process that holds far more than its profile: what fills it is not what was profiled. */
function Unexplained({ overview, summary }: { overview: MemoryOverview; summary: readonly MemoryRank[] }) {
  const bytes = (one: MemoryRank): number => num(one.peak_bytes) ?? 0;
  const held = summary.filter((one) => one.place === "host").sort((a, b) => bytes(b) - bytes(a))[0];
  const peak = overview.ranks.find((one) => one.rank === held?.rank)?.peak;
  if (!held || !isKnown(peak) || bytes(held) < 2 * peak.attributed_bytes) return null;
  return <p class="note">Of the {size(bytes(held))} that the process of rank {held.rank} had at most, this profile of step {peak.step} explains {size(peak.attributed_bytes)}; the rest is code, libraries, caches, what is no tensor, and what came after that step. <code>Recorder.profile_memory(model, optimizer, steps={"{…}"})</code> in the program profiles later steps.</p>;
}

/** By its profile; of equals the one whose process held most. */
function fullestOf(overview: MemoryOverview, summary: readonly MemoryRank[]): RankMemory | null {
  const held = (rank: number): number => Math.max(0, ...summary.filter((one) => one.rank === rank).map((one) => num(one.peak_bytes) ?? 0));
  let best: RankMemory | null = null;
  let most = -1;
  for (const one of overview.ranks) {
    const bytes = isKnown(one.peak) ? (num(one.peak.allocated_bytes) ?? one.peak.attributed_bytes) : -1;
    if (bytes > most || (best && bytes === most && held(one.rank) > held(best.rank))) [best, most] = [one, bytes];
  }
  return best;
}

function totalOf(parts: readonly Part[]): number {
  return parts.reduce((sum, part) => sum + part.bytes, 0);
}

function fillPart({ ctx, theme }: Frame, name: string, x: number, y: number, w: number, h: number): void {
  if (name === "residual") {
    ctx.fillStyle = theme.colours.card;
    ctx.fillRect(x, y, w, h);
    ctx.fillStyle = hatch(ctx, theme.colours.ink3, 0.9);
    ctx.fillRect(x, y, w, h);
    return;
  }
  ctx.fillStyle = theme.colours[memoryColour(name)];
  ctx.fillRect(x, y, w, h);
  if (["temporaries", "buffers"].includes(name) && theme.name === "light" && w > 3 && h > 3) {
    ctx.strokeStyle = theme.colours.ink3;
    ctx.lineWidth = 1;
    ctx.strokeRect(x + 0.5, y + 0.5, w - 1, h - 1);
  }
}

function PeakBars({ run, overview }: { run: Run; overview: MemoryOverview }) {
  const order = run.order("mesh");
  const all = [...overview.ranks].sort((a, b) => order.indexOf(a.rank) - order.indexOf(b.rank)).filter((one) => isKnown(one.peak));
  const rows = all.length <= MAX_ROWS ? all : extremes(run, all);
  const label = (one: RankMemory): string => run.label(one.rank);
  const parts = rows.map((one) => partsOf(one.peak as MemoryPoint));
  const top = Math.max(1, ...parts.map(totalOf));
  const left = Math.max(52, ...rows.map((one) => 12 + 6.1 * label(one).length));
  const row = rows.length <= 8 ? 22 : 17;
  const draw = (frame: Frame): void => {
    const { ctx, width, theme } = frame;
    const room = width - left - 62;
    rows.forEach((one, i) => {
      let x = left;
      for (const part of parts[i]!) {
        const w = (part.bytes / top) * room;
        fillPart(frame, part.name, x, i * row + 2, Math.max(0.4, w - (w > 3 ? 0.7 : 0)), row - 5);
        x += w;
      }
      drawText(ctx, theme, label(one), left - 6, i * row + row / 2, { align: "right", colour: theme.colours.ink2, weight: chosenRanks.value.has(one.rank) ? 640 : 400 });
      drawText(ctx, theme, size(totalOf(parts[i]!)), x + 5, i * row + row / 2, { colour: theme.colours.ink, weight: 600, size: 11 });
    });
  };
  const spot = (_x: number, y: number): Spot | null => {
    const i = Math.floor(y / row);
    const one = rows[i];
    if (!one) return null;
    const facts = parts[i]!.map((part) => [categoryWords(part.name), size(part.bytes)] as [string, string]);
    const title = `rank ${one.rank} ${run.place(one.rank)}, peak in ${clean((one.peak as MemoryPoint).during || "no module", 60)}`;
    return { tip: <Facts title={title} rows={facts} />, text: `${title}: ${facts.map((fact) => fact.join(" ")).join(", ")}` };
  };
  return (
    <>
      <Canvas height={rows.length * row + 2} draw={draw} spot={spot} label={`Memory of ${rows.length} ranks at their peaks; the largest is ${size(top)}`}
        click={(_x, y, _w, event) => { const one = rows[Math.floor(y / row)]; if (one) selectRanks([one.rank], event.shiftKey); }}
        cursor={(at, _dx, dy) => [left + 4, Math.min(rows.length * row - 1, Math.max(row / 2, at ? at[1] + dy * row : row / 2))]} />
      {all.length > MAX_ROWS && <p class="note">fullest and emptiest rank of each stage, of {all.length} ranks</p>}
    </>
  );
}

function extremes(run: Run, all: readonly RankMemory[]): readonly RankMemory[] {
  const byStage = new Map<number, RankMemory[]>();
  for (const one of all) {
    const stage = run.stage(one.rank) ?? 0;
    byStage.set(stage, [...(byStage.get(stage) ?? []), one]);
  }
  const bytes = (one: RankMemory): number => totalOf(partsOf(one.peak as MemoryPoint));
  return [...byStage.values()].flatMap((own) => {
    const sorted = [...own].sort((a, b) => bytes(b) - bytes(a));
    return sorted.length > 1 ? [sorted[0]!, sorted[sorted.length - 1]!] : sorted;
  }).slice(0, 2 * MAX_ROWS);
}

const POINTS_HEIGHT = 170;

function Points({ one }: { one: RankMemory }) {
  const at = (point: MemoryPoint): number => num(point.seconds) ?? 0;
  const points = [...one.points].sort((a, b) => at(a) - at(b)).slice(0, 200);
  const parts = points.map(partsOf);
  const top = Math.max(1, ...parts.map(totalOf));
  const left = 58;
  const peak = isKnown(one.peak) ? one.peak : null;
  const draw = (frame: Frame): void => {
    const { ctx, width, theme } = frame;
    const w = (width - left - 4) / points.length;
    const bottom = POINTS_HEIGHT - 18;
    ctx.strokeStyle = theme.colours.line;
    for (const share of [0.5, 1]) {
      const y = Math.round(bottom - share * (bottom - 6)) + 0.5;
      ctx.beginPath();
      ctx.moveTo(left, y);
      ctx.lineTo(width, y);
      ctx.stroke();
      drawText(ctx, theme, size(share * top), left - 6, y, { align: "right" });
    }
    drawText(ctx, theme, "0", left - 6, bottom - 3, { align: "right" });
    points.forEach((point, i) => {
      let y = bottom;
      for (const part of parts[i]!) {
        const h = (part.bytes / top) * (bottom - 6);
        y -= h;
        fillPart(frame, part.name, left + i * w + 1, y, Math.max(0.6, w - 4), h);
      }
      if (w >= 22) drawText(ctx, theme, shortPoint(point), left + (i + 0.5) * w - 1, bottom + 10, { align: "center", size: 10.5, maxWidth: w - 1, weight: isPeak(point, peak) ? 640 : 400, colour: isPeak(point, peak) ? theme.colours.ink : theme.colours.ink3 });
    });
  };
  const spot = (px: number, _y: number, width: number): Spot | null => {
    const i = Math.floor(((px - left) / (width - left - 4)) * points.length);
    const point = points[i];
    if (!point) return null;
    const facts = parts[i]!.map((part) => [categoryWords(part.name), size(part.bytes)] as [string, string]);
    const title = `${clean(point.name.replaceAll("_", " "), 40)}${point.step >= 0 ? `, step ${point.step}` : ""}${point.during ? `: ${clean(point.during, 60)}` : ""}`;
    return { tip: <Facts title={title} rows={[...facts, ["total", size(totalOf(parts[i]!))]]} />, text: `${title}: ${facts.map((fact) => fact.join(" ")).join(", ")}` };
  };
  return (
    <>
      <p class="note">
        Rank {one.rank}: {peak ? <>peak in <b>{cleanText(peak.during || "no module")}</b>{peak.step >= 0 && `, step ${peak.step}`}{peak.microbatch >= 0 && !peak.during.startsWith("backward") && `, microbatch ${peak.microbatch}`}</> : cleanText(reasonOf(one.peak))}
      </p>
      <Canvas height={POINTS_HEIGHT} draw={draw} spot={spot} label={`Memory of rank ${one.rank} at ${points.length} points of the profiled step, in order of time; the most is ${size(top)}`}
        cursor={(at, dx, _dy, width) => [Math.min(width - 6, Math.max(left + 2, at ? at[0] + (dx * (width - left)) / points.length : left + 4)), 60]} />
    </>
  );
}

function isPeak(point: MemoryPoint, peak: MemoryPoint | null): boolean {
  return peak !== null && point.name === peak.name && point.step === peak.step;
}

function shortPoint(point: MemoryPoint): string {
  if (point.name === "at_peak") return "peak";
  const words = point.name.replace("construction", "built").replace("after_", "").replace("forward", "F").replace("backward", "B").replaceAll("_", " ");
  // A backward pass has no number: what is recorded is that of the forward pass before it.
  if (words === "step") return "end";
  return point.microbatch >= 0 && words === "F" ? `F${point.microbatch}` : words;
}

function CategoryLegend({ overview }: { overview: MemoryOverview }) {
  const names = new Set(overview.ranks.flatMap((one) => [...one.points, ...(isKnown(one.peak) ? [one.peak] : [])].flatMap((point) => partsOf(point).map((part) => part.name))));
  const isOther = (name: string): boolean => name !== "residual" && !MEMORY_CATEGORIES.includes(name);
  const others = [...names].filter(isOther).sort();
  const shown = [...MEMORY_CATEGORIES.filter((name) => names.has(name)), ...(others.length ? [others.join(", ")] : []), ...(names.has("residual") ? ["residual"] : [])];
  return (
    <div class="legend">
      {shown.map((name) => <span key={name}><span class={`swatch ${name === "residual" ? "k-unknown" : ""}`} style={name === "residual" ? {} : { background: `var(--${memoryColour(name)})`, borderColor: ["temporaries", "buffers"].includes(name) ? "var(--outline-other)" : "transparent" }} />{name === "residual" ? categoryWords(name) : cleanText(name.replaceAll("_", " "))}</span>)}
    </div>
  );
}

function tableOf(run: Run, overview: MemoryOverview | null): { columns: readonly string[]; rows: readonly (readonly Cell[])[] } {
  if (overview) {
    return {
      columns: ["rank", "place", "point", "step", "category", "size_bytes"],
      rows: overview.ranks.flatMap((one) => (isKnown(one.peak) ? partsOf(one.peak).map((part) => [one.rank, run.place(one.rank), "peak", (one.peak as MemoryPoint).step, part.name, part.bytes] as const) : [])),
    };
  }
  const ranks = isKnown(run.page.report.memory) ? run.page.report.memory.ranks : [];
  return { columns: ["rank", "place", "host", "peak_bytes", "limit_bytes"], rows: ranks.map((one) => [one.rank, one.place, one.host, num(one.peak_bytes) ?? null, num(one.limit_bytes) ?? null]) };
}
