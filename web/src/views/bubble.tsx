// V8: the bubble: what was measured, what the schedule makes inevitable, and what the rest is.
import { isKnown, list, num } from "../data/known";
import type { Pipeline } from "../data/report";
import { drawText, textWidth } from "../draw/axis";
import type { Frame } from "../draw/canvas";
import { Canvas } from "../draw/canvas";
import { Card } from "../parts/card";
import { hover } from "../parts/tip";
import type { Run } from "../state/run";
import { expandRanks } from "../state/run";
import { selectRanks } from "../state/scope";
import { clean, ranges } from "../text/names";
import { duration, plural, ratio } from "../text/units";

const PARTS: readonly (readonly [string, string, number])[] = [
  ["inherent", "few microbatches (inherent)", 0], ["imbalance", "unequal stages", 0.16], ["communication", "transfers", 0.32],
  ["gaps", "between actions", 0.48], ["stragglers", "stragglers and jitter", 0.62], ["unexplained", "not explained", 0.8],
];

export function BubbleView({ pipeline, span }: { run: Run; pipeline: Pipeline; span: readonly [number, number] }) {
  const parts = PARTS.map(([key, label, dark]) => ({ key, label, dark, ns: num(isKnown(pipeline.parts_ns) ? pipeline.parts_ns[key] : null) }));
  const shown = parts.filter((part) => part.ns !== undefined && Math.abs(part.ns) > 0);
  const total = shown.reduce((sum, part) => sum + Math.max(0, part.ns!), 0);
  const cost = num(pipeline.cost_ns);
  const marks = [
    ["measured", num(pipeline.bubble_ratio)], ["executed", num(pipeline.executed_ratio)],
    ["balanced", num(pipeline.balanced_ratio)], ["closed form", num(pipeline.closed_form_ratio)],
  ] as const;
  const title = isKnown(pipeline.bubble_ratio) ? `Bubble ${ratio(pipeline.bubble_ratio)}` : "Bubble";
  const form = isKnown(pipeline.closed_form_ratio) ? `; ${ratio(pipeline.closed_form_ratio)} is the schedule's minimum${isKnown(pipeline.closed_form) ? ` ${clean(pipeline.closed_form, 30)}` : ""}` : "";
  const fill = (dark: number): string => `color-mix(in srgb, var(--bubble), var(--ink) ${Math.round(dark * 80)}%)`;
  return (
    <Card id="pipeline" title={title} span={span} sub={`${cost === undefined ? "" : `of ${duration(cost)} in the pipeline`}${form}`}
      not="all that pipeline ranks wait: waits between steps are in the budget"
      table={() => ({ columns: ["part", "time_ns", "of_pipeline_ratio"], rows: parts.map((part) => [part.label, part.ns ?? null, part.ns !== undefined && cost ? part.ns / cost : null]) })}>
      <Ticks marks={marks} />
      {total > 0 && (
        <div class="parts" style={{ height: "16px" }} role="img" aria-label={`Parts of the bubble: ${shown.map((part) => `${part.label} ${duration(part.ns!)}`).join(", ")}`}>
          {shown.filter((part) => part.ns! > 0).map((part) => (
            <div key={part.key} style={{ width: `${(100 * part.ns!) / total}%`, background: `repeating-linear-gradient(135deg, transparent 0 4px, color-mix(in srgb, var(--hatch) 40%, transparent) 4px 5px), ${fill(part.dark)}` }} {...hover(() => `${part.label}: ${duration(part.ns!)}`)} />
          ))}
        </div>
      )}
      <div class="columns">
      <table>
        <tbody>
          {shown.map((part) => (
            <tr key={part.key}>
              <td><span class="swatch" style={{ background: fill(part.dark), borderColor: "var(--outline-bubble)" }} />{part.label}</td>
              <td class="right"><strong>{duration(part.ns!)}</strong></td>
              <td class="right dim">{cost ? ratio(part.ns! / cost) : ""}</td>
            </tr>
          ))}
        </tbody>
      </table>
      <div class="scroll" style={{ maxHeight: "230px" }}>
        <table>
          <thead><tr><th>stage</th><th>ranks</th><th class="right">forward</th><th class="right">backward</th><th class="right">bubble</th></tr></thead>
          <tbody>
            {list(pipeline.stages).map((stage) => (
              <tr key={stage.stage}>
                <td class="nowrap"><b>{stage.stage}</b> <span class="dim">{isKnown(stage.num_layers) ? plural(stage.num_layers, "layer") : ""}</span></td>
                <td><button type="button" class="plain" onClick={(event) => selectRanks(expandRanks(stage.ranks), event.shiftKey)}>{ranges(expandRanks(stage.ranks), 2)}</button></td>
                <td class="right">{isKnown(stage.forward_ns) ? duration(stage.forward_ns) : "n/a"}</td>
                <td class="right">{isKnown(stage.backward_ns) ? duration(stage.backward_ns) : "n/a"}</td>
                <td class="right">{isKnown(stage.bubble_ratio) ? ratio(stage.bubble_ratio) : "n/a"}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      </div>
    </Card>
  );
}

/** Four numbers on one axis: they differ by what they leave out. */
function Ticks({ marks }: { marks: readonly (readonly [string, number | undefined])[] }) {
  const known = marks.filter((mark): mark is readonly [string, number] => mark[1] !== undefined);
  const top = Math.max(0.05, ...known.map(([, value]) => value)) * 1.15;
  const draw = ({ ctx, width, theme }: Frame): void => {
    const room = width - 8;
    ctx.fillStyle = theme.colours.line;
    ctx.fillRect(4, 26, room, 1);
    // Labels take turns above and below, and move away from one that is near.
    const sorted = [...known].sort((a, b) => a[1] - b[1]);
    const ends = [-1, -1];
    const places: { text: string; w: number; side: number; x: number }[] = [];
    sorted.forEach(([name, value]) => {
      const at = 4 + (value / top) * room;
      ctx.fillStyle = theme.colours.ink;
      ctx.fillRect(at - 0.75, 20, 1.5, 13);
      const text = `${name} ${ratio(value)}`;
      const w = textWidth(ctx, text, 10.5) + 8;
      const side = ends[0]! <= Math.min(at, width - w) - 2 ? 0 : ends[1]! <= Math.min(at, width - w) ? 1 : ends[0]! <= ends[1]! ? 0 : 1;
      places.push({ text, w, side, x: Math.max(ends[side]!, Math.min(at - 3, width - w)) });
      ends[side] = places[places.length - 1]!.x + w;
    });
    // What ran over the right edge moves back, and pushes what is before it.
    for (const side of [0, 1]) {
      let edge = width;
      for (const place of places.filter((one) => one.side === side).reverse()) {
        const x = Math.max(0, Math.min(place.x, edge - place.w));
        drawText(ctx, theme, place.text, x, side === 0 ? 11 : 42, { size: 10.5, colour: theme.colours.ink2 });
        edge = x;
      }
    }
  };
  return <Canvas height={50} draw={draw} label={`Bubble: ${known.map(([name, value]) => `${name} ${ratio(value)}`).join(", ")}`} />;
}
