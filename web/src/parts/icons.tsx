// Shapes that carry their meaning without colour.

export type LampState = "ok" | "attention" | "bad" | "unknown";

const WORDS: Record<LampState, string> = { ok: "ok", attention: "attention", bad: "bad", unknown: "not known" };

export function StateIcon({ state, size = 14 }: { state: LampState; size?: number }) {
  const common = { fill: "none", stroke: "currentColor", "stroke-width": 1.6, "stroke-linecap": "round", "stroke-linejoin": "round" } as const;
  return (
    <svg class={state} width={size} height={size} viewBox="0 0 16 16" role="img" aria-label={WORDS[state]}>
      {state === "ok" && <g {...common}><circle cx="8" cy="8" r="6.6" /><path d="M5 8.3l2.1 2.1L11.2 6" /></g>}
      {state === "attention" && <g {...common}><path d="M8 1.4L14.6 8 8 14.6 1.4 8z" /><path d="M8 5.2v3.4M8 11v.1" /></g>}
      {state === "bad" && <g><path d="M8 1.6L15 14H1z" fill="currentColor" /><path d="M8 6.2v3.6M8 11.9v.1" stroke="var(--card)" stroke-width="1.6" stroke-linecap="round" /></g>}
      {state === "unknown" && <g {...common}><circle cx="8" cy="8" r="6.6" stroke-dasharray="2.4 2.2" /><path d="M6.4 6.4c.2-2 3.3-1.8 3.2.1-.1 1.2-1.5 1.3-1.6 2.6M8 11.4v.1" /></g>}
    </svg>
  );
}

const SEVERITIES = ["low", "medium", "high", "critical"];

export function severityRank(word: string): number {
  return SEVERITIES.indexOf(word) + 1;
}

/** One to four rising bars; red from high on. The word is for readers and the tooltip. */
export function Severity({ word }: { word: string }) {
  const rank = severityRank(word);
  const colour = rank >= 3 ? "var(--bad)" : "var(--ink2)";
  return (
    <svg class="severity" viewBox="0 0 16 14" role="img" aria-label={`severity ${word}`}>
      <title>{`severity ${word}`}</title>
      {[0, 1, 2, 3].map((i) => (
        <rect key={i} x={i * 4} y={10 - i * 3} width="3" height={4 + i * 3} rx="0.6" fill={i < rank ? colour : "var(--line)"} />
      ))}
    </svg>
  );
}

export function Logo() {
  const shades = [0.35, 0.35, 0.35, 0.35, 1, 0.35, 0.35, 0.35, 0.35];
  return (
    <svg class="logo" viewBox="0 0 20 20" aria-hidden="true">
      {shades.map((shade, i) => (
        <rect key={i} x={(i % 3) * 7} y={Math.floor(i / 3) * 7} width="5.6" height="5.6" rx="1.2" fill={shade === 1 ? "var(--bad)" : "var(--ink)"} opacity={shade} />
      ))}
    </svg>
  );
}
