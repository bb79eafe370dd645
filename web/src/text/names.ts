// Names, hosts, paths and command lines come from the run and are hostile: they become text nodes or
// `fillText`, without characters that change the direction of writing, and cut where space is short.

// C0, C1, soft hyphen, zero-width and direction controls, separators, tags, non-characters.
const CONTROLS =
  /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\uffff\u{e0000}-\u{e0fff}]/gu;

const LONE = /\p{Surrogate}/gu;

/** Characters of a name that a canvas or a label shows; a tooltip has more. */
export const MAX_LABEL = 80;
const MAX_TEXT = 2000;

/** A name for a label, a cell or a canvas. */
export function clean(text: unknown, limit = MAX_LABEL): string {
  const whole = typeof text === "string" ? text : String(text ?? "");
  const shown = whole.slice(0, 4 * limit).replace(CONTROLS, "").replace(LONE, "?");
  return shown.length > limit ? `${shown.slice(0, limit - 1).replace(LONE, "")}…` : shown;
}

/** A sentence or a path, which may be long. */
export function cleanText(text: unknown): string {
  return clean(text, MAX_TEXT);
}

/** `0-3, 7`: ranks or steps. */
export function ranges(values: readonly number[], limit = 6): string {
  const parts: string[] = [];
  const sorted = [...values].sort((a, b) => a - b);
  for (let i = 0; i < sorted.length; ) {
    let j = i;
    while (j + 1 < sorted.length && sorted[j + 1]! <= sorted[j]! + 1) j++;
    parts.push(i === j ? `${sorted[i]}` : `${sorted[i]}–${sorted[j]}`);
    i = j + 1;
  }
  if (parts.length <= limit) return parts.join(", ");
  return `${parts.slice(0, limit).join(", ")} and ${parts.length - limit} more`;
}

export function nameRanks(ranks: readonly number[]): string {
  return `rank${ranks.length === 1 ? "" : "s"} ${ranges(ranks)}`;
}

export function sentence(text: string): string {
  const shown = cleanText(text);
  return shown.charAt(0).toUpperCase() + shown.slice(1);
}
