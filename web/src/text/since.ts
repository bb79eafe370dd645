// Since when a finding's cause is there, as the terminal says it (report/sections/run/findings.py).
import { isKnown, reasonOf } from "../data/known";
import type { Finding } from "../data/report";
import { cleanText } from "./names";
import { moment } from "./units";

/** `since step 15 (2026-01-05 09:30:01 UTC)`, `since when is not known: …`. */
export function sayOnset({ onset, first_step: first, last_step: last }: Finding): string {
  if (!isKnown(onset)) return `since when is not known: ${cleanText(reasonOf(onset, "this report does not date it"))}`;
  const when = isKnown(onset.start_unix_ns) ? ` (${moment(onset.start_unix_ns, 19)})` : "";
  const step = `step ${onset.step}${when}`;
  if (last !== null && last === first) return `in ${step}`;
  if (onset.is_over && onset.course !== "at times") return `from ${step} to ${last}`;
  if (onset.course === "always") return `since the first analysed step, ${onset.step}${when}`;
  if (onset.course === "at times") return `at times, first in ${step}`;
  return `since ${step}`;
}
