// The offline page: everything is in the file, in <script type="application/json">.
import type { Known } from "./known";
import type { Matrix, PackedMatrix } from "./matrix";
import { unpackMatrix } from "./matrix";
import type { PageDocument } from "./page";
import type { StepSpans } from "./report";
import type { Source } from "./source";

const WITH_SERVE = "open the run with `meshscope serve` to see it";

export class EmbeddedSource implements Source {
  readonly isLive = false;
  private document: PageDocument | null = null;

  constructor(private readonly text: string) {}

  load(): Promise<PageDocument> {
    this.document ??= JSON.parse(this.text) as PageDocument;
    return Promise.resolve(this.document);
  }

  async matrix(metric: string, phase: string): Promise<Known<Matrix>> {
    const { matrices } = await this.load();
    const found = matrices?.layers.find((one) => one.metric === metric && (one.phase ?? "") === phase);
    if (found) return unpackMatrix(found);
    const reason = matrices?.metrics.find((one) => one.key === metric)?.reason;
    return { unavailable: reason ?? `it is not in this page; ${WITH_SERVE}` };
  }

  async window(metric: string, phase: string, ranks: readonly [number, number], steps: readonly [number, number]): Promise<Known<Matrix>> {
    const { matrices } = await this.load();
    const parts = (matrices?.parts ?? []).filter((one) => one.metric === metric && (one.phase ?? "") === phase);
    const found = parts.find((one) => covers(one, ranks, steps));
    return found ? unpackMatrix(found) : { unavailable: `this resolution is not in this page; ${WITH_SERVE}` };
  }

  async spans(step: number): Promise<Known<StepSpans>> {
    const { timelines } = await this.load();
    return timelines.find((one) => one.step === step) ?? { unavailable: `step ${step} is not in this page; ${WITH_SERVE}` };
  }

  spanSteps(): readonly number[] {
    return (this.document?.timelines ?? []).map((one) => one.step).sort((a, b) => a - b);
  }

  follow(): () => void {
    return () => undefined;
  }
}

function covers(part: PackedMatrix, ranks: readonly [number, number], steps: readonly [number, number]): boolean {
  const edges = part.step_edges;
  return part.ranks.includes(ranks[0]) && part.ranks.includes(ranks[1]) && (edges[0] ?? 0) <= steps[0] && (edges[edges.length - 1] ?? 0) > steps[1];
}
