// V13: does it learn: loss, gradient norm and learning rate, with what happened beside them.
import { useSignal } from "@preact/signals";
import type { Curve } from "../data/report";
import { Card } from "../parts/card";
import { CurveChart } from "../parts/curve";
import { Choice, Select } from "../parts/menu";
import type { Run } from "../state/run";
import { clean } from "../text/names";
import { brief, logged, plural } from "../text/units";

const NAMES: Readonly<Record<string, string>> = { loss: "loss", grad_norm: "gradient norm", lr: "learning rate" };

export function TrainingView({ run, span }: { run: Run; span: readonly [number, number] }) {
  const isSmoothed = useSignal<"raw" | "smoothed">("raw");
  const extra = useSignal("");
  void run.seriesTick.value;
  const training = run.page.series.filter((one) => one.group === "training");
  const others = run.page.series.filter((one) => one.group === "logged");
  const main = ["loss", "grad_norm", "lr"].map((key) => training.find((one) => one.key === key)).filter((one): one is Curve => Boolean(one));
  const further = [...training.filter((one) => !main.includes(one)), ...others];
  const chosen = further.find((one) => one.key === extra.value) ?? (main.length ? undefined : further[0]);
  const curves = [...main, ...(chosen ? [chosen] : [])];
  const events = run.page.events.filter((one) => one.kind !== "trace").slice(0, 60);
  const bad = new Set(curves.flatMap((one) => one.bad_steps)).size;
  const range = run.stepRange;
  return (
    <Card id="training" title="Does it learn?" span={span} sub={`${curves[0] ? clean(curves[0].source, 60) : ""}; band: lowest to highest${bad ? `; ${plural(bad, "step")} not finite (ticks on top)` : ""}`}
      not="a prediction, and not smoothed: a dashed line is drawn beside the values, never instead"
      tools={<>
        <Choice label="Smoothing" value={isSmoothed.value} options={[["raw", "raw"], ["smoothed", "+ smooth"]]} choose={(value) => (isSmoothed.value = value)} />
        {further.length > 0 && main.length > 0 && <Select label="Further series" value={extra.value} options={[["", "more…"], ...further.map((one) => [one.key, clean(one.key, 40)] as const)]} choose={(value) => (extra.value = value)} />}
      </>}
      table={() => ({ columns: ["series", "step", "lowest", "mean", "highest"], rows: curves.flatMap((one) => one.step.map((step, i) => [one.key, step, one.low[i] ?? null, one.mean[i] ?? null, one.high[i] ?? null])) })}>
      {curves.map((one, i) => (
        <CurveChart key={one.key} curve={one} title={NAMES[one.key] ?? clean(one.key, 40)} height={one.key === "loss" || curves.length === 1 ? 120 : 76} show={logged} tick={brief} range={range}
          events={i === 0 ? events : NONE} hasSteps={i === curves.length - 1} isSmoothed={isSmoothed.value === "smoothed"} />
      ))}
    </Card>
  );
}

const NONE: readonly never[] = [];
