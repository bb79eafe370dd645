// What time was spent on: one kind, one hue, on every view. The names are those of the budget's shares.
import type { ColourName, Theme } from "./theme";

export type Kind =
  | "compute" | "backward" | "weight" | "inefficiency" | "transfer" | "copy" | "wait" | "bubble" | "idle"
  | "input" | "outside" | "other" | "unknown";

/** In the order in which parts are drawn: work first, then what holds it up. */
export const KINDS: readonly Kind[] = [
  "compute", "backward", "weight", "inefficiency", "unknown", "transfer", "copy", "wait", "bubble", "idle",
  "input", "outside", "other",
];

const KIND_OF_SHARE: Readonly<Record<string, Kind>> = {
  "useful compute": "compute",
  "compute": "compute",
  "kernel inefficiency": "inefficiency",
  "in phases, not split": "unknown",
  "between phases, not split": "unknown",
  "not split": "unknown",
  "exposed transfer": "transfer",
  "exposed wait": "wait",
  "exposed communication": "unknown",
  "exposed, not waited for": "unknown",
  "pipeline bubble": "bubble",
  "exposed copies": "copy",
  "input stall": "input",
  "compile": "outside",
  "checkpoint": "outside",
  "eval": "outside",
  "evaluation": "outside",
  "logging": "outside",
  "other": "other",
};

export function kindOf(share: string): Kind {
  const found = KIND_OF_SHARE[share];
  if (found) return found;
  if (share.startsWith("idle")) return "idle";
  if (share.includes("not split")) return "unknown";
  return "other";
}

export function fillOf(kind: Kind, theme: Theme): string {
  return kind === "unknown" ? theme.colours.card : theme.colours[kind];
}

/** For marks too narrow for a texture: what is not split is grey there, never the card's colour. */
export function narrowFillOf(kind: Kind, theme: Theme): string {
  return kind === "unknown" ? theme.colours.ink3 : theme.colours[kind];
}

export function inkOn(kind: Kind, theme: Theme): string {
  return kind === "unknown" ? theme.colours.ink : theme.colours[`on-${kind}` as ColourName];
}

export function outlineOf(kind: Kind, theme: Theme): string {
  switch (kind) {
    case "inefficiency":
    case "bubble":
    case "input":
    case "other":
    case "weight":
      return theme.colours[`outline-${kind}`];
    case "unknown":
      return theme.colours.ink3;
    default:
      return "transparent";
  }
}

const MEMORY_COLOURS: Readonly<Record<string, ColourName>> = {
  parameters: "m-parameters",
  gathered_parameters: "m-parameters",
  gradients: "m-gradients",
  optimizer_state: "m-optimizer",
  activations: "m-activations",
  activation_gradients: "m-activation-gradients",
  temporaries: "m-temporaries",
  communication: "m-communication",
  buffers: "m-buffers",
};
/** State first, then what a step adds: the order of stacks. */
export const MEMORY_CATEGORIES: readonly string[] = [
  "parameters", "gathered_parameters", "gradients", "optimizer_state", "activations", "activation_gradients",
  "temporaries", "communication", "buffers",
];

export function memoryColour(category: string): ColourName {
  return MEMORY_COLOURS[category] ?? "m-other";
}
