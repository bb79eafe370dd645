// Rows of one step: spans and actions of a rank, drawn at any zoom without losing time.
import type { StepSpans } from "../data/report";
import { drawText, textWidth } from "./axis";
import type { Frame } from "./canvas";
import type { Kind } from "./kinds";
import { KINDS, inkOn, narrowFillOf } from "./kinds";
import { clean } from "../text/names";
import { fillKind } from "./texture";

export interface Lane {
  readonly rank: number;
  /** Indices of its pieces and actions, by start. */
  readonly pieces: readonly number[];
  readonly actions: readonly number[];
  /** For each of its pieces whether it is inside of an action. */
  readonly isInside: readonly boolean[];
}

const lanesOf = new WeakMap<StepSpans, readonly Lane[]>();

export function arrangeLanes(spans: StepSpans, ranks: readonly number[]): readonly Lane[] {
  let all = lanesOf.get(spans);
  if (!all) {
    const { pieces, actions } = spans;
    const own: { pieces: number[]; actions: number[] }[] = spans.ranks.map(() => ({ pieces: [], actions: [] }));
    pieces.rank.forEach((rank, i) => own[rank]?.pieces.push(i));
    actions?.rank.forEach((rank, i) => own[rank]?.actions.push(i));
    all = spans.ranks.map((rank, row) => {
      const mine = own[row]!;
      mine.pieces.sort((a, b) => pieces.start_ns[a]! - pieces.start_ns[b]!);
      if (actions) mine.actions.sort((a, b) => actions.start_ns[a]! - actions.start_ns[b]!);
      let k = 0;
      const isInside = mine.pieces.map((piece) => {
        if (!actions) return false;
        const middle = pieces.start_ns[piece]! + pieces.duration_ns[piece]! / 2;
        while (k < mine.actions.length && actions.start_ns[mine.actions[k]!]! + actions.duration_ns[mine.actions[k]!]! <= middle) k++;
        return k < mine.actions.length && actions.start_ns[mine.actions[k]!]! <= middle;
      });
      return { rank, pieces: mine.pieces, actions: mine.actions, isInside };
    });
    lanesOf.set(spans, all);
  }
  const byRank = new Map(all.map((lane) => [lane.rank, lane]));
  return ranks.map((rank) => byRank.get(rank)).filter((lane): lane is Lane => lane !== undefined);
}

export interface Where {
  readonly y: number;
  readonly height: number;
  readonly x: (ns: number) => number;
  readonly left: number;
  readonly right: number;
}

const UPPER = 0.62;

export function drawLane(frame: Frame, spans: StepSpans, kinds: readonly Kind[], lane: Lane, where: Where): void {
  const { ctx, theme } = frame;
  const { y, height, x, left, right } = where;
  const { pieces, actions } = spans;
  const hasBands = lane.actions.length > 0 && height >= 8;
  const [lowerY, lowerHeight] = hasBands ? [y + height * UPPER, height * (1 - UPPER)] : [y, height];
  // Pieces below half a pixel: each pixel gets the kind that has most of its time, with what longer
  // pieces have of it. Without those, short kernels between pauses would look like one long kernel.
  const small = new Map<number, Float64Array>();
  const edges = new Map<number, Float64Array>();
  const addEdge = (px: number, kind: Kind, share: number): void => {
    let sums = edges.get(px);
    if (!sums) edges.set(px, (sums = new Float64Array(KINDS.length)));
    sums[KINDS.indexOf(kind)]! += share;
  };
  lane.pieces.forEach((i, k) => {
    const [a, b] = [x(pieces.start_ns[i]!), x(pieces.start_ns[i]! + pieces.duration_ns[i]!)];
    if (b < left || a > right) return;
    const kind = kinds[pieces.line[i]!] ?? "other";
    if (b - a < 0.5) {
      const px = Math.floor(a);
      let sums = small.get(px);
      if (!sums) small.set(px, (sums = new Float64Array(2 * KINDS.length)));
      sums[(lane.isInside[k] ? 0 : KINDS.length) + KINDS.indexOf(kind)]! += pieces.duration_ns[i]!;
      return;
    }
    const isLower = hasBands && lane.isInside[k];
    if (!isLower) {
      const [first, last] = [Math.floor(a), Math.floor(b)];
      const nsOfPixel = pieces.duration_ns[i]! / (b - a);
      addEdge(first, kind, (Math.min(b, first + 1) - a) * nsOfPixel);
      if (last > first) addEdge(last, kind, (b - last) * nsOfPixel);
    }
    const [top, h] = isLower ? [lowerY, lowerHeight] : [y, height];
    if (b - a < 3) {
      ctx.fillStyle = narrowFillOf(kind, theme);
      ctx.fillRect(a, top, b - a, h);
    } else fillKind(ctx, kind === "other" && !isLower ? "other" : kind, theme, a, top, b - a - (b - a > 6 ? 0.5 : 0), h);
    const phase = kind === "unknown" && h >= 14 ? (spans.phases[pieces.phase[i]!] ?? "") : "";
    if (phase) labelPhase(frame, clean(phase, 24), Math.max(a, left), Math.min(b, right), top + h / 2);
  });
  for (const [px, sums] of small) {
    edges.get(px)?.forEach((share, kind) => (sums[KINDS.length + kind]! += share));
    const best = sums.indexOf(Math.max(...sums));
    ctx.fillStyle = narrowFillOf(KINDS[best % KINDS.length]!, theme);
    if (best < KINDS.length && hasBands) ctx.fillRect(px, lowerY, 1, lowerHeight);
    else ctx.fillRect(px, y, 1, height);
  }
  if (!actions || !hasBands) return;
  for (const i of lane.actions) {
    const [a, b] = [x(actions.start_ns[i]!), x(actions.start_ns[i]! + actions.duration_ns[i]!)];
    if (b < left || a > right) continue;
    const word = spans.action_kinds[actions.kind[i]!] ?? "F";
    const kind: Kind = word === "F" ? "compute" : word === "W" ? "weight" : "backward";
    fillKind(ctx, kind, theme, a, y, Math.max(0.6, b - a - (b - a > 3 ? 1 : 0)), height * UPPER);
    const [from, to] = [Math.max(a, left), Math.min(b, right)];
    const size = Math.min(11, height * UPPER - 2);
    if (size < 7) continue;
    const chunk = actions.chunk[i]! > 0 ? String.fromCharCode(97 + (actions.chunk[i]! % 26)) : "";
    const full = `${word}${actions.microbatch[i]}${chunk}`;
    const short = `${actions.microbatch[i]}`;
    const text = textWidth(frame.ctx, full, size, 600) < to - from - 3 ? full : textWidth(frame.ctx, short, size, 600) < to - from - 2 ? short : "";
    if (text) drawText(ctx, theme, text, (from + to) / 2, y + (height * UPPER) / 2 + 0.5, { align: "center", size, weight: 600, colour: inkOn(kind, theme) });
  }
}

/** What is not split has at least the name of the phase that it is in, on a plate of its own. */
function labelPhase({ ctx, theme }: Frame, name: string, from: number, to: number, y: number): void {
  const w = textWidth(ctx, name, 11, 400) + 6;
  if (w > to - from - 4) return;
  ctx.fillStyle = theme.colours.card;
  ctx.fillRect((from + to - w) / 2, y - 7, w, 14);
  drawText(ctx, theme, name, (from + to) / 2, y + 0.5, { align: "center", size: 11, colour: theme.colours.ink2 });
}

function findAt(starts: readonly number[], durations: readonly number[], indices: readonly number[], ns: number): number {
  let [low, high] = [0, indices.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (starts[indices[middle]!]! <= ns) low = middle + 1;
    else high = middle;
  }
  const found = indices[low - 1];
  return found !== undefined && starts[found]! + durations[found]! >= ns ? found : -1;
}

export function findAction(spans: StepSpans, lane: Lane, ns: number): number {
  return spans.actions ? findAt(spans.actions.start_ns, spans.actions.duration_ns, lane.actions, ns) : -1;
}

export function findPiece(spans: StepSpans, lane: Lane, ns: number): number {
  return findAt(spans.pieces.start_ns, spans.pieces.duration_ns, lane.pieces, ns);
}

export function drawArrow({ ctx, theme }: Frame, x0: number, y0: number, x1: number, y1: number): void {
  ctx.strokeStyle = ctx.fillStyle = theme.colours.ink;
  ctx.lineWidth = 1.6;
  const bend = Math.max(12, Math.abs(x1 - x0) / 2);
  ctx.beginPath();
  ctx.moveTo(x0, y0);
  ctx.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1, y1);
  ctx.stroke();
  ctx.beginPath();
  ctx.moveTo(x1 + 1, y1);
  ctx.lineTo(x1 - 6, y1 - 3.5);
  ctx.lineTo(x1 - 6, y1 + 3.5);
  ctx.fill();
}
