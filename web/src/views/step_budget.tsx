// V3: where a step goes. Parts add up to the mean wall time of a rank's step.
import { useSignal } from "@preact/signals";
import { isKnown, list, reasonOf } from "../data/known";
import type { Matrix } from "../data/matrix";
import { columnsOf, rowMean } from "../data/matrix";
import type { StepBudget } from "../data/page";
import type { Budget } from "../data/report";
import { drawText, makeStepAxis, timeLabel } from "../draw/axis";
import type { Frame, Spot } from "../draw/canvas";
import { Canvas } from "../draw/canvas";
import type { Kind } from "../draw/kinds";
import { KINDS, kindOf } from "../draw/kinds";
import { fillKind } from "../draw/texture";
import { Card } from "../parts/card";
import { Choice } from "../parts/menu";
import { Facts, hover } from "../parts/tip";
import { chosenFinding } from "../state/findings";
import { go, state } from "../state/fragment";
import type { Run } from "../state/run";
import { chosenAxis, chosenRanks, selectSteps } from "../state/scope";
import { clean, cleanText, sentence } from "../text/names";
import { duration, plural, ratio } from "../text/units";

export interface Part {
  readonly name: string;
  readonly share: string;
  readonly axis: string;
  readonly kind: Kind;
  readonly ns: number;
}

/** The budget of the selected steps and ranks: from the finest data that covers the selection. */
export function partsInScope(run: Run, budget: Budget): { readonly parts: readonly Part[]; readonly wallNs: number; readonly isScoped: boolean } {
  const { s: steps } = state.value;
  const ranks = chosenRanks.value;
  const byStep = isKnown(run.page.budget_steps) ? run.page.budget_steps : null;
  let means = budget.lines.map((line) => line.mean_ns);
  let isScoped = true;
  const cells = byStep ? run.lineMatrices() : null;
  if (steps && byStep) {
    means = budget.lines.map((line, i) => {
      const matrix = ranks.size ? cells?.[i] : undefined;
      return matrix ? meanOf(matrix, ranks, steps) : meanOfColumns(byStep, byStep.lines.indexOf(line.name), steps);
    });
    isScoped = ranks.size === 0 || Boolean(cells?.length);
  } else if (ranks.size) {
    const rows = budget.ranks.filter((row) => ranks.has(row.rank));
    const count = Math.max(1, rows.length * budget.num_steps);
    if (rows.length) means = budget.lines.map((_, i) => rows.reduce((sum, row) => sum + (row.time_ns[i] ?? 0), 0) / count);
  }
  const parts = budget.lines.map((line, i) => ({ name: line.name, share: line.share, axis: line.axis, kind: kindOf(line.share), ns: means[i] ?? 0 }));
  const sum = parts.reduce((total, part) => total + part.ns, 0);
  const rest = steps || ranks.size ? 0 : budget.residual_mean_ns;
  const all = rest > 0 ? [...parts, { name: "not explained", share: "not explained", axis: "", kind: "unknown" as const, ns: rest }] : parts;
  return { parts: sortParts(all), wallNs: sum + Math.max(0, rest), isScoped };
}

export function sortParts(parts: readonly Part[]): readonly Part[] {
  return [...parts].sort((a, b) => KINDS.indexOf(a.kind) - KINDS.indexOf(b.kind) || a.share.localeCompare(b.share) || b.ns - a.ns);
}

function meanOf(matrix: Matrix, ranks: ReadonlySet<number>, steps: readonly [number, number]): number {
  const [from, to] = columnsOf(matrix, steps);
  let [sum, count] = [0, 0];
  for (const rank of ranks) {
    const row = matrix.rowOf.get(rank);
    const value = row === undefined ? Number.NaN : rowMean(matrix, row, from, to);
    if (Number.isNaN(value)) continue;
    sum += value;
    count++;
  }
  return count ? sum / count : 0;
}

function meanOfColumns(byStep: StepBudget, line: number, steps: readonly [number, number]): number {
  let [sum, count] = [0, 0];
  for (let c = 0; c < byStep.num_steps.length; c++) {
    if (byStep.step_edges[c + 1]! - 1 < steps[0] || byStep.step_edges[c]! > steps[1]) continue;
    sum += (byStep.mean_ns[line]?.[c] ?? 0) * byStep.num_steps[c]!;
    count += byStep.num_steps[c]!;
  }
  return count ? sum / count : 0;
}

export function StepBudgetView({ run, span }: { run: Run; span: readonly [number, number] }) {
  const { budget } = run.page.report;
  if (!isKnown(budget)) {
    return <Card id="budget" title="Where a step goes" span={span}><p class="dim">not known: {cleanText(reasonOf(budget))}</p></Card>;
  }
  const { parts, wallNs, isScoped } = partsInScope(run, budget);
  const note = list(budget.lines).find((line) => line.note)?.note;
  return (
    <Card id="budget" title="Where a step goes" span={span} isScoped
      sub={`${duration(wallNs)}, mean of a rank; the parts add up${isScoped ? "" : " (of all ranks: by rank and step is not in this page)"}`}
      not={<>what fixing a line would save; only findings are priced.{note && ` ${sentence(note)}.`}</>}
      table={() => ({ columns: ["line", "share", "axis", "mean_ns", "of_wall_ratio"], rows: parts.map((part) => [part.name, part.share, part.axis, part.ns, wallNs ? part.ns / wallNs : null]) })}>
      <PartsBars parts={parts} wallNs={wallNs} isWhole={!state.value.s && !state.value.r.length} />
      <LineTable parts={parts} wallNs={wallNs} axes={run.axes} />
      {isKnown(run.page.budget_steps) && <OverSteps run={run} budget={budget} byStep={run.page.budget_steps} />}
    </Card>
  );
}

const LABEL_FROM = 0.06;

function PartsBars({ parts, wallNs, isWhole }: { parts: readonly Part[]; wallNs: number; isWhole: boolean }) {
  const finding = chosenFinding.value;
  const saved = finding && isKnown(finding.saved_ns) && isKnown(finding.step_ns) && finding.saved_ns > 0 && finding.step_ns > 0 ? finding.saved_ns / finding.step_ns : null;
  return (
    <div class="labelled">
      <span>measured</span>
      <div class="parts" role="img" aria-label={`A step of ${duration(wallNs)}: ${parts.filter((part) => part.ns > 0).map((part) => `${part.name} ${duration(part.ns)}`).join(", ")}`}>
        {parts.filter((part) => part.ns > 0).map((part) => (
          <div key={part.name} class={`k-${part.kind} ${chosenAxis.value && part.axis !== chosenAxis.value ? "greyed" : ""}`} style={{ width: `${(100 * part.ns) / wallNs}%` }}
            {...hover(() => <Facts title={clean(part.name)} rows={[["per step", duration(part.ns)], ["of the wall", ratio(part.ns / wallNs)]]} />)}>
            {part.ns / wallNs >= LABEL_FROM && <div class="words"><b>{duration(part.ns)}</b><span>{shortName(part)}</span></div>}
          </div>
        ))}
      </div>
      {isWhole && saved !== null && finding && <span>{finding.code} gone</span>}
      {isWhole && saved !== null && finding && (
        <div class="gone" role="img" aria-label={`Without ${finding.code} a step would take ${ratio(1 - saved)} of the time`}
          {...hover(() => `Length only: without "${cleanText(finding.title)}" a step is replayed ${ratio(saved)} shorter; how it would be split is not claimed.`)}>
          <div style={{ width: `${100 * (1 - saved)}%` }} /><div>{saved > 0.05 ? `−${ratio(saved)}` : ""}</div>
        </div>
      )}
    </div>
  );
}

function shortName(part: Part): string {
  return clean(part.name.replace("exposed ", "").replace("pipeline ", "").replace("useful compute", "useful"), 30);
}

const AXIS_COLUMNS = ["tp", "cp", "ep", "pp", "dp", "world"];

function LineTable({ parts, wallNs, axes }: { parts: readonly Part[]; wallNs: number; axes: readonly string[] }) {
  const shares = [...new Set(parts.map((part) => part.share))];
  const columns = [...new Set(parts.map((part) => part.axis).filter(Boolean))]
    .sort((a, b) => AXIS_COLUMNS.indexOf(a) - AXIS_COLUMNS.indexOf(b));
  const isOne = columns.length <= 1 && axes.length <= 1;
  return (
    <table>
      <thead><tr>
        <th>line</th><th class="right">time</th><th class="right">share</th>
        {!isOne && columns.map((axis) => (
          <th key={axis} class="right">
            <button type="button" aria-pressed={chosenAxis.value === axis} onClick={() => go({ ax: chosenAxis.value === axis ? "" : axis })}>{clean(axis, 16)}</button>
          </th>
        ))}
      </tr></thead>
      <tbody>
        {shares.map((share) => {
          const own = parts.filter((part) => part.share === share);
          const ns = own.reduce((sum, part) => sum + part.ns, 0);
          return (
            <tr key={share}>
              <td class="nowrap"><span class={`swatch k-${own[0]!.kind}`} />{clean(share, 40)}{isOne && own.length === 1 && own[0]!.axis ? ` ${clean(own[0]!.axis, 16)}` : ""}</td>
              <td class="right"><strong>{duration(ns)}</strong></td>
              <td class="right">{wallNs ? ratio(ns / wallNs) : "n/a"}</td>
              {!isOne && columns.map((axis) => {
                const part = own.find((one) => one.axis === axis);
                return <td key={axis} class={`right ${part && part.ns ? "" : "dim"}`}>{part && part.ns ? duration(part.ns) : "·"}</td>;
              })}
            </tr>
          );
        })}
      </tbody>
    </table>
  );
}

/** The findings beside it are this tall each; the picture uses the room that they leave. */
const FINDING_HEIGHT = 40;
const [LOWEST, HIGHEST] = [128, 260];
const LEFT = 52;

function OverSteps({ run, budget, byStep }: { run: Run; budget: Budget; byStep: StepBudget }) {
  const how = useSignal<"time" | "share">("time");
  const height = Math.min(HIGHEST, LOWEST + FINDING_HEIGHT * Math.max(0, run.findings.length - 4));
  const order = sortParts(budget.lines.map((line) => ({ name: line.name, share: line.share, axis: line.axis, kind: kindOf(line.share), ns: 0 })));
  const index = order.map((part) => byStep.lines.indexOf(part.name));
  const [first, end] = [byStep.step_edges[0] ?? 0, byStep.step_edges[byStep.step_edges.length - 1] ?? 1];
  const top = Math.max(1, ...byStep.highest_wall_ns.map((x) => x || 0));
  const meanTop = Math.max(1, ...byStep.wall_ns.map((x) => x || 0));
  const typical = [...byStep.wall_ns].filter((x) => x > 0).sort((a, b) => a - b);
  const limit = Math.min(top, 1.3 * meanTop, 2.5 * (typical[typical.length >> 1] ?? meanTop));
  const isCut = top > 1.01 * limit;
  const empty = byStep.num_steps.flatMap((count, c) => (count ? [] : [[byStep.step_edges[c]!, byStep.step_edges[c + 1]!] as const]));
  const axis = makeStepAxis(first, end, empty);
  const x = (step: number, width: number): number => LEFT + axis.x(step, width - LEFT - 4);
  const stepAt = (px: number, width: number): number => Math.floor(axis.stepAt(px - LEFT, width - LEFT - 4));
  const column = (step: number): number => {
    for (let c = 0; c < byStep.num_steps.length; c++) if (step >= byStep.step_edges[c]! && step < byStep.step_edges[c + 1]!) return c;
    return -1;
  };
  const draw = ({ ctx, width, theme }: Frame): void => {
    const bottom = height - 16;
    const isShare = how.value === "share";
    for (let c = 0; c < byStep.num_steps.length; c++) {
      const [from, to] = [x(byStep.step_edges[c]!, width), x(byStep.step_edges[c + 1]!, width)];
      const w = Math.max(0.6, to - from - (to - from > 4 ? 1 : 0));
      if (!byStep.num_steps[c]) continue;
      const whole = isShare ? byStep.wall_ns[c]! || 1 : limit;
      let y = bottom;
      for (const [k, part] of order.entries()) {
        const h = Math.min(y - 6, (((byStep.mean_ns[index[k]!]?.[c] ?? 0)) / whole) * (bottom - 6));
        if (h <= 0) continue;
        y -= h;
        fillKind(ctx, part.kind === "bubble" && w < 3 ? "bubble" : part.kind, theme, from, y, w, h);
      }
      const high = byStep.highest_wall_ns[c]!;
      if (!isShare && high > limit) {
        ctx.fillStyle = theme.colours.ink;
        ctx.beginPath();
        ctx.moveTo((from + to) / 2, 0);
        ctx.lineTo((from + to) / 2 - 3.5, 5);
        ctx.lineTo((from + to) / 2 + 3.5, 5);
        ctx.fill();
      }
      if (!isShare && to - from > 3 && high > byStep.wall_ns[c]!) {
        ctx.strokeStyle = theme.colours.ink3;
        ctx.lineWidth = 1;
        const middle = Math.round((from + to) / 2) + 0.5;
        ctx.beginPath();
        ctx.moveTo(middle, y);
        ctx.lineTo(middle, Math.max(5, bottom - (high / limit) * (bottom - 6)));
        ctx.stroke();
      }
    }
    const { s } = state.value;
    if (s) {
      ctx.strokeStyle = theme.colours.ink;
      ctx.lineWidth = 1.5;
      ctx.strokeRect(x(s[0], width), 1, Math.max(2, x(s[1] + 1, width) - x(s[0], width)), bottom);
    }
    drawText(ctx, theme, isShare ? "100 %" : timeLabel(limit, limit), LEFT - 6, 8, { align: "right" });
    drawText(ctx, theme, "0", LEFT - 6, bottom - 4, { align: "right" });
    for (const step of axis.ticks(width - LEFT - 4)) {
      const at = (x(step, width) + x(step + 1, width)) / 2;
      drawText(ctx, theme, `${step}`, Math.min(at, width - 12), height - 6, { align: "center" });
    }
  };
  const spot = (px: number, _y: number, width: number): Spot | null => {
    const c = column(stepAt(px, width));
    if (c < 0) return null;
    const [from, to] = [byStep.step_edges[c]!, byStep.step_edges[c + 1]! - 1];
    const title = from === to ? `step ${from}` : `steps ${from}–${to}, mean`;
    if (!byStep.num_steps[c]) return { tip: `${title}: left out`, text: `${title}: left out` };
    const rows = order.map((part, k) => [clean(part.name), byStep.mean_ns[index[k]!]?.[c] ?? 0] as const).filter(([, ns]) => ns > 0);
    const all = [["wall, mean of a rank", duration(byStep.wall_ns[c]!)], ["longest of any rank", duration(byStep.highest_wall_ns[c]!)], ...rows.map(([name, ns]) => [name, duration(ns)])] as [string, string][];
    return { tip: <Facts title={title} rows={all} />, text: `${title}: ${all.map((row) => row.join(" ")).join(", ")}`, box: [x(from, width), 4, x(to + 1, width) - x(from, width) - 1, height - 20] };
  };
  return (
    <div>
      <div class="row">
        <span class="note grow">over steps: mean of a rank, same colours{byStep.num_steps.some((n) => n > 1) ? `; a column is the mean of up to ${plural(Math.max(...byStep.num_steps), "step")}` : ""}; whisker: the longest of any rank{isCut && how.value === "time" ? `; ▴ goes on above, to ${duration(top)}` : ""}</span>
        <Choice label="Scale over steps" value={how.value} options={[["time", "time"], ["share", "share"]]} choose={(value) => (how.value = value)} />
      </div>
      <Canvas height={height} label={`Budget over steps ${first} to ${end - 1}; a mean step takes ${duration(budget.mean_wall_ns)}`} draw={draw} spot={spot}
        drag={(from, to, width, isDone) => selectSteps(clampStep(stepAt(from, width), run), clampStep(stepAt(to, width), run), isDone)}
        click={(px, _y, width) => go({ st: clampStep(stepAt(px, width), run), z: null })}
        cursor={(at, dx, _dy, width) => {
          const step = at ? stepAt(at[0], width) + dx : first;
          const inside = Math.min(end - 1, Math.max(first, step));
          return [(x(inside, width) + x(inside + 1, width)) / 2, height / 2];
        }} />
    </div>
  );
}

export function clampStep(step: number, run: Run): number {
  const [first, last] = run.stepRange;
  return Math.min(last, Math.max(first, step));
}
