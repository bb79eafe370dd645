import type { Kind } from "../draw/kinds";
import { KINDS } from "../draw/kinds";

const WORDS: Readonly<Record<Kind, string>> = {
  compute: "compute", backward: "backward", weight: "weight gradient", inefficiency: "kernel inefficiency", transfer: "exposed transfer", copy: "copies",
  wait: "wait", bubble: "bubble", idle: "idle", input: "input", outside: "checkpoint, eval, log", other: "other", unknown: "not split",
};

export function KindLegend({ kinds, words = {} }: { kinds: readonly Kind[]; words?: Partial<Record<Kind, string>> }) {
  return (
    <div class="legend">
      {KINDS.filter((kind) => kinds.includes(kind)).map((kind) => <span key={kind}><span class={`swatch k-${kind}`} />{words[kind] ?? WORDS[kind]}</span>)}
    </div>
  );
}
