// V7: one step on the aligned clock. Upper band: pipeline actions; lower band: what the rank did inside.
import { useSignal } from "@preact/signals";
import { isKnown, num, reasonOf } from "../data/known";
import type { StepSpans } from "../data/report";
import { drawText, timeLabel, timeTicks } from "../draw/axis";
import type { Frame, Spot } from "../draw/canvas";
import { Canvas } from "../draw/canvas";
import type { Kind } from "../draw/kinds";
import { kindOf } from "../draw/kinds";
import type { Lane } from "../draw/lanes";
import { arrangeLanes, drawArrow, drawLane, findAction, findPiece } from "../draw/lanes";
import { Card } from "../parts/card";
import { KindLegend } from "../parts/legend";
import { Select } from "../parts/menu";
import { Facts } from "../parts/tip";
import { go, state } from "../state/fragment";
import type { Run } from "../state/run";
import { chosenRanks, selectRanks } from "../state/scope";
import type { Table } from "../text/files";
import { clean, cleanText } from "../text/names";
import { count, duration, memory, plural } from "../text/units";

const AXIS = 20;
const MAX_ROWS = 64;

/** The step that is shown: the one asked for, else the verdict's, else the median. */
export function shownStep(run: Run): number | null {
  if (state.value.st !== null) return state.value.st;
  const { timelines } = run.page;
  const picked = (name: string): number | undefined => timelines.find((one) => one.picked.includes(name))?.step;
  const first = run.page.verdict.finding;
  return (first ? picked(first) : undefined) ?? picked("median") ?? picked("slowest") ?? timelines[0]?.step ?? null;
}

export function TimelineView({ run, span }: { run: Run; span: readonly [number, number] }) {
  const step = shownStep(run);
  const rows = useSignal("");
  if (step === null) return null;
  const found = run.spans(step);
  const picked = (name: string): number | undefined => run.page.timelines.find((one) => one.picked.includes(name))?.step;
  const jump = (name: string, text: string) => {
    const to = picked(name);
    return to === undefined ? null : <button type="button" aria-pressed={to === step} onClick={() => go({ st: to, z: null })}>{text}</button>;
  };
  const spans = found !== "loading" && isKnown(found) ? found : null;
  const choices = spans ? rowChoices(run, spans) : [];
  const choice = choices.some(([name]) => name === rows.value) ? rows.value : (choices[0]?.[0] ?? "all");
  const hasActions = Boolean(spans?.actions?.rank.length);
  const pipeline = run.page.report.pipeline;
  const words = hasActions && isKnown(pipeline)
    ? `step ${step}, ${isKnown(pipeline.schedule) ? `${clean(pipeline.schedule, 20)}, ` : ""}${isKnown(pipeline.num_microbatches) ? `${pipeline.num_microbatches} microbatches, ` : ""}${pipeline.num_stages} stages`
    : `step ${step}`;
  const tools = (
    <>
      {jump("fastest", "◂ fastest")}{jump("median", "median")}{jump("slowest", "slowest ▸")}
      {choices.length > 1 && <Select label="Ranks of the timeline" value={choice} options={choices} choose={(value) => (rows.value = value)} />}
      {state.value.z && <button type="button" onClick={() => go({ z: null })}>whole step</button>}
    </>
  );
  return (
    <Card id="timeline" title={hasActions && isKnown(pipeline) ? "Pipeline, one step" : "One step"} span={span} tools={tools}
      sub={`${words}; rows share one clock${spans && spans.num_ranks > spans.ranks.length ? `; ${spans.ranks.length} of ${count(spans.num_ranks)} ranks are in this page` : ""}`}
      not="a typical step by itself: use fastest, median and slowest together"
      {...(spans ? { table: () => tableOf(run, spans) } : {})}>
      {found === "loading" && <p class="dim">reading…</p>}
      {found !== "loading" && !spans && <p class="dim">not known: {cleanText(reasonOf(found))}. In this page: {stepButtons(run)}</p>}
      {spans && <Lanes run={run} spans={spans} choice={choice} />}
    </Card>
  );
}

function stepButtons(run: Run) {
  return (run.source.spanSteps() ?? []).map((step) => <button key={step} type="button" onClick={() => go({ st: step, z: null })}>step {step}</button>);
}

function rowChoices(run: Run, spans: StepSpans): readonly (readonly [string, string])[] {
  const found: (readonly [string, string])[] = [];
  if (spans.ranks.length <= 16) found.push(["all", "all ranks"]);
  const chosen = spans.ranks.filter((rank) => chosenRanks.value.has(rank));
  const dps = [...new Set(spans.ranks.map((rank) => run.coordinates(rank)?.["dp"]).filter((dp): dp is number => dp !== undefined))];
  const worst = worstRank(run, spans);
  const worstDp = worst === undefined ? undefined : run.coordinates(worst)?.["dp"];
  if (dps.length > 1 || spans.ranks.length > 16) {
    if (worstDp !== undefined) found.push([`dp${worstDp}`, `dp${worstDp} (worst)`]);
    for (const dp of dps.slice(0, 32)) if (dp !== worstDp) found.push([`dp${dp}`, `dp${dp}`]);
  }
  if (run.axes.includes("pp") && spans.ranks.length > 16) found.push(["stage", "one row per stage: its slowest rank"]);
  if (spans.ranks.length > 16) found.push(["all", spans.ranks.length <= MAX_ROWS ? "all ranks" : `first ${MAX_ROWS} ranks`]);
  if (chosen.length) found.push(["chosen", "selected ranks"]);
  return found.length ? found : [["all", "all ranks"]];
}

/** The rank of the leading finding, else the one that worked longest in this step. */
function worstRank(run: Run, spans: StepSpans): number | undefined {
  const named = run.findings[0]?.rankList.find((rank) => spans.ranks.includes(rank));
  if (named !== undefined) return named;
  const work = new Float64Array(spans.ranks.length);
  const kinds = spans.lines.map((line) => kindOf(line.share));
  spans.pieces.rank.forEach((rank, i) => { if (kinds[spans.pieces.line[i]!] === "compute") work[rank]! += spans.pieces.duration_ns[i]!; });
  return spans.ranks[work.indexOf(Math.max(...work))];
}

function pickRows(run: Run, spans: StepSpans, choice: string): readonly number[] {
  const order = run.order("mesh").filter((rank) => spans.ranks.includes(rank));
  const ordered = order.length ? order : spans.ranks;
  if (choice === "chosen") return ordered.filter((rank) => chosenRanks.value.has(rank)).slice(0, MAX_ROWS);
  if (choice.startsWith("dp")) return ordered.filter((rank) => run.coordinates(rank)?.["dp"] === Number(choice.slice(2))).slice(0, MAX_ROWS);
  if (choice === "stage") {
    const byStage = new Map<number, number>();
    const last = (rank: number): number => spans.period_end_ns[spans.ranks.indexOf(rank)] ?? 0;
    for (const rank of ordered) {
      const stage = run.stage(rank) ?? 0;
      const now = byStage.get(stage);
      if (now === undefined || last(rank) > last(now)) byStage.set(stage, rank);
    }
    return [...byStage.values()];
  }
  return ordered.slice(0, MAX_ROWS);
}

function Lanes({ run, spans, choice }: { run: Run; spans: StepSpans; choice: string }) {
  const ranks = pickRows(run, spans, choice);
  const lanes = arrangeLanes(spans, ranks);
  const rowHeight = ranks.length <= 8 ? 30 : ranks.length <= 16 ? 22 : ranks.length <= 32 ? 15 : 10;
  const left = Math.max(56, ...ranks.map((rank) => 12 + 6.1 * (rowHeight >= 15 ? run.label(rank).length : 6)));
  const height = ranks.length * rowHeight + AXIS;
  const zoom = state.value.z ?? [0, 1];
  const length = Math.max(1, spans.length_ns);
  const [t0, t1] = [zoom[0] * length, zoom[1] * length];
  const x = (ns: number, width: number): number => left + ((ns - t0) / (t1 - t0)) * (width - left - 6);
  const timeAt = (px: number, width: number): number => t0 + ((px - left) / (width - left - 6)) * (t1 - t0);
  const kinds = spans.lines.map((line) => kindOf(line.share));
  const startZoom = useSignal<readonly [number, number] | null>(null);
  const uncertainty = Math.max(0, ...spans.clock_uncertainty_ns.map((value) => num(value) ?? 0));

  const draw = (frame: Frame): void => {
    const { ctx, width, theme } = frame;
    ctx.save();
    ctx.beginPath();
    ctx.rect(left, 0, width - left, height);
    ctx.clip();
    for (const ns of timeTicks(length, width - left)) {
      ctx.fillStyle = theme.colours.line;
      ctx.fillRect(Math.round(x(ns, width)), 0, 1, height - AXIS);
    }
    lanes.forEach((lane, i) => drawLane(frame, spans, kinds, lane, { y: i * rowHeight + 1, height: rowHeight - (rowHeight > 12 ? 3 : 1), x: (ns) => x(ns, width), left, right: width - 6 }));
    ctx.restore();
    lanes.forEach((lane, i) => {
      const isChosen = chosenRanks.value.has(lane.rank);
      const isBad = run.findings.some((one) => one.severity !== "low" && one.rankList.length < ranks.length && one.rankList.includes(lane.rank));
      if (rowHeight >= 10) drawText(ctx, theme, rowHeight >= 15 ? run.label(lane.rank) : `${lane.rank}`, left - 6, (i + 0.5) * rowHeight, { align: "right", size: rowHeight >= 15 ? 11.5 : 9.5, colour: isBad ? theme.colours.bad : theme.colours.ink2, weight: isChosen || isBad ? 640 : 400 });
      if (isChosen) {
        ctx.strokeStyle = theme.colours.ink;
        ctx.lineWidth = 1.5;
        ctx.strokeRect(left - 0.5, i * rowHeight + 0.5, width - left - 4, rowHeight - 1.5);
      }
    });
    const ticks = timeTicks(t1 - t0, width - left).map((ns) => ns + t0);
    for (const ns of zoom[0] === 0 ? timeTicks(t1, width - left) : ticks) {
      const at = x(ns, width);
      if (at <= width - 4) drawText(ctx, theme, timeLabel(ns, length), Math.max(left, Math.min(at, width - 22)), height - 7, { align: at < left + 12 ? "left" : "center" });
    }
    const blur = x(t0 + uncertainty, width) - left;
    if (blur > 1) {
      ctx.fillStyle = theme.colours.ink3;
      ctx.fillRect(left, height - AXIS + 1, blur, 3);
    }
  };
  const spot = (px: number, y: number, width: number): Spot | null => {
    const lane = lanes[Math.floor(y / rowHeight)];
    if (!lane || px < left) return null;
    const ns = timeAt(px, width);
    return spotOf({ run, spans, kinds, lane, lanes, ns, isUpper: (y % rowHeight) / rowHeight < 0.62, rowHeight, x: (at) => x(at, width) });
  };
  const setZoom = (a: number, b: number, how: "push" | "replace"): void => {
    const [low, high] = [Math.max(0, Math.min(a, b)), Math.min(1, Math.max(a, b))];
    go({ z: high - low > 0.999 || high - low < 1e-4 ? null : [low, high] }, how);
  };
  const shown = [...new Set(kinds.filter((_, i) => spans.pieces.line.includes(i)))] as Kind[];
  const actionKinds = [...new Set([...(spans.actions?.kind ?? [])].map((kind) => ({ F: "compute", B: "backward", I: "backward", W: "weight" } as const)[spans.action_kinds[kind] ?? ""]).filter(Boolean))] as Kind[];
  return (
    <>
      <Canvas height={height} draw={draw} spot={spot} label={summary(spans, ranks.length)}
        click={(_px, y, _w, event) => { const lane = lanes[Math.floor(y / rowHeight)]; if (lane) selectRanks([lane.rank], event.shiftKey); }}
        drag={(a, b, width, isDone) => {
          if (state.peek().z && !startZoom.peek()) startZoom.value = state.peek().z;
          const start = startZoom.peek();
          if (start) {
            const by = Math.min(1 - start[1], Math.max(-start[0], ((a - b) / (width - left - 6)) * (start[1] - start[0])));
            setZoom(start[0] + by, start[1] + by, "replace");
            if (isDone) startZoom.value = null;
          } else if (isDone) setZoom(timeAt(a, width) / length, timeAt(b, width) / length, "push");
        }}
        wheel={(px, width, event) => {
          if (!(event.ctrlKey || event.metaKey) && document.activeElement !== event.currentTarget) return false;
          const at = timeAt(px, width) / length;
          const factor = Math.exp(event.deltaY * 0.002);
          setZoom(at - (at - zoom[0]) * factor, at + (zoom[1] - at) * factor, "replace");
          return true;
        }}
        double={() => go({ z: null })}
        cursor={(at, dx, dy, width) => {
          if (!at) return [left + 4, rowHeight * 0.3];
          return [Math.min(width - 8, Math.max(left + 1, at[0] + dx * 12)), Math.min(ranks.length * rowHeight - 2, Math.max(2, at[1] + dy * rowHeight))];
        }} />
      <KindLegend kinds={[...new Set([...shown, ...actionKinds])]} words={actionKinds.length ? { compute: "F forward", backward: "B backward" } : {}} />
      {(spans.merged_below_ns > 0 || uncertainty > 0 || spans.actions) && (
        <p class="note">
          {spans.actions && "Upper band: action and its microbatch; lower band: what the rank did inside. "}
          {spans.merged_below_ns > 0 && `Spans below ${duration(spans.merged_below_ns)} are joined with their neighbours. `}
          {uncertainty > 0 && `Clocks agree to ±${duration(uncertainty)}.`}
        </p>
      )}
    </>
  );
}

function summary(spans: StepSpans, numRows: number): string {
  return `Step ${spans.step}, ${duration(spans.length_ns)}, ${plural(numRows, "rank")} on one clock; ${plural(spans.pieces.rank.length, "span")}${spans.actions ? `, ${plural(spans.actions.rank.length, "pipeline action")}` : ""}`;
}

function spotOf({ run, spans, kinds, lane, lanes, ns, isUpper, rowHeight, x }: {
  run: Run; spans: StepSpans; kinds: readonly Kind[]; lane: Lane; lanes: readonly Lane[]; ns: number; isUpper: boolean; rowHeight: number; x: (ns: number) => number;
}): Spot | null {
  const i = lanes.indexOf(lane);
  const { actions, pieces } = spans;
  const action = isUpper && actions ? findAction(spans, lane, ns) : -1;
  if (actions && action >= 0) {
    const kind = spans.action_kinds[actions.kind[action]!] ?? "?";
    const start = actions.start_ns[action]!;
    const length = actions.duration_ns[action]!;
    const rows: [string, string][] = [["takes", duration(length)], ["starts at", duration(start)], ["stage", `${actions.stage[action]}`]];
    if (actions.chunk[action]! > 0) rows.push(["chunk", `${actions.chunk[action]}`]);
    if (actions.wait_ns[action]! > 0) rows.push(["waited for input", duration(actions.wait_ns[action]!)]);
    const title = `${kind}${actions.microbatch[action]} on rank ${lane.rank} ${run.place(lane.rank)}`;
    return {
      tip: <Facts title={title} rows={rows} />, text: `${title}: ${rows.map((row) => row.join(" ")).join(", ")}`,
      box: [x(start), i * rowHeight + 1, x(start + length) - x(start), (rowHeight - 3) * 0.62],
      overlay: (frame) => drawLinks(frame, run, spans, lanes, action, rowHeight, x),
    };
  }
  const piece = findPiece(spans, lane, ns);
  if (piece < 0) return null;
  const line = spans.lines[pieces.line[piece]!]!;
  const operation = pieces.operation[piece]!;
  const rows: [string, string][] = [["takes", duration(pieces.duration_ns[piece]!)], ["starts at", duration(pieces.start_ns[piece]!)]];
  if (spans.phases[pieces.phase[piece]!]) rows.push(["phase", clean(spans.phases[pieces.phase[piece]!]!, 40)]);
  if (operation >= 0) {
    const size = spans.operations.size_bytes[operation]!;
    rows.push(["operation", `${clean(spans.operations.kind[operation] ?? "", 30)} ${clean(spans.operations.axis[operation] ?? "", 16)}`]);
    if (size >= 0) rows.push(["size", memory(size)]);
  }
  const title = `${clean(line.share)} ${clean(line.axis, 16)} on rank ${lane.rank} ${run.place(lane.rank)}`;
  return {
    tip: <Facts title={title} rows={rows} />, text: `${title}: ${rows.map((row) => row.join(" ")).join(", ")}`,
    box: [x(pieces.start_ns[piece]!), i * rowHeight + 1, x(pieces.start_ns[piece]! + pieces.duration_ns[piece]!) - x(pieces.start_ns[piece]!), rowHeight - 3],
    overlay: (frame) => markMatches(frame, spans, kinds, lanes, operation, rowHeight, x),
  };
}

/** Arrows from an action's input and to its consumer. */
function drawLinks(frame: Frame, run: Run, spans: StepSpans, lanes: readonly Lane[], action: number, rowHeight: number, x: (ns: number) => number): void {
  const actions = spans.actions!;
  const isForward = (i: number): boolean => spans.action_kinds[actions.kind[i]!] === "F";
  const isBackward = (i: number): boolean => ["B", "I"].includes(spans.action_kinds[actions.kind[i]!] ?? "");
  const at = (i: number): { x0: number; x1: number; y: number } | null => {
    const rank = spans.ranks[actions.rank[i]!]!;
    const row = lanes.findIndex((lane) => lane.rank === rank);
    return row < 0 ? null : { x0: x(actions.start_ns[i]!), x1: x(actions.start_ns[i]! + actions.duration_ns[i]!), y: row * rowHeight + 1 + rowHeight * 0.3 };
  };
  const same = run.coordinates(spans.ranks[actions.rank[action]!]!) ?? {};
  const isPeer = (i: number): boolean => {
    const other = run.coordinates(spans.ranks[actions.rank[i]!]!) ?? {};
    return run.axes.every((axis) => axis === "pp" || same[axis] === other[axis]);
  };
  const here = at(action);
  const stage = actions.stage[action]!;
  const step = isForward(action) ? 1 : isBackward(action) ? -1 : 0;
  if (!here || step === 0) return;
  for (let i = 0; i < actions.rank.length; i++) {
    if (actions.microbatch[i] !== actions.microbatch[action] || !isPeer(i) || (isForward(action) ? !isForward(i) : !isBackward(i))) continue;
    const there = at(i);
    if (!there) continue;
    if (actions.stage[i] === stage - step) drawArrow(frame, there.x1, there.y, here.x0, here.y);
    if (actions.stage[i] === stage + step) drawArrow(frame, here.x1, here.y, there.x0, there.y);
  }
}

/** The same operation on the other ranks. */
function markMatches(frame: Frame, spans: StepSpans, _kinds: readonly Kind[], lanes: readonly Lane[], operation: number, rowHeight: number, x: (ns: number) => number): void {
  const match = operation < 0 ? -1 : spans.operations.match[operation]!;
  if (match < 0) return;
  frame.ctx.strokeStyle = frame.theme.colours.ink;
  frame.ctx.lineWidth = 1;
  lanes.forEach((lane, row) => {
    for (const i of lane.pieces) {
      const own = spans.pieces.operation[i]!;
      if (own < 0 || spans.operations.match[own] !== match) continue;
      const start = x(spans.pieces.start_ns[i]!);
      frame.ctx.strokeRect(start, row * rowHeight + 1, Math.max(2, x(spans.pieces.start_ns[i]! + spans.pieces.duration_ns[i]!) - start), rowHeight - 3);
    }
  });
}

function tableOf(run: Run, spans: StepSpans): Table {
  const { actions, pieces } = spans;
  if (actions?.rank.length) {
    return {
      columns: ["rank", "place", "action", "microbatch", "stage", "chunk", "start_ns", "duration_ns"],
      rows: actions.rank.map((rank, i) => [spans.ranks[rank]!, run.place(spans.ranks[rank]!), spans.action_kinds[actions.kind[i]!] ?? "", actions.microbatch[i]!, actions.stage[i]!, actions.chunk[i]!, actions.start_ns[i]!, actions.duration_ns[i]!]),
    };
  }
  return {
    columns: ["rank", "line", "axis", "phase", "start_ns", "duration_ns"],
    rows: pieces.rank.map((rank, i) => [spans.ranks[rank]!, spans.lines[pieces.line[i]!]?.share ?? "", spans.lines[pieces.line[i]!]?.axis ?? "", spans.phases[pieces.phase[i]!] ?? "", pieces.start_ns[i]!, pieces.duration_ns[i]!]),
  };
}

