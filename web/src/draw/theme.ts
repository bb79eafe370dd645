// Colours are defined once, in page.css; canvases read them from there when the theme changes.
import { computed, signal } from "@preact/signals";
import { state } from "../state/fragment";

const NAMES = [
  "bg", "card", "sunk", "line", "ink", "ink2", "ink3", "bad", "good", "warn", "better", "worse",
  "compute", "backward", "weight", "inefficiency", "transfer", "copy", "wait", "bubble", "idle", "input",
  "outside", "other", "on-compute", "on-backward", "on-weight", "on-inefficiency", "on-transfer", "on-copy",
  "on-wait", "on-bubble", "on-idle", "on-input", "on-outside", "on-other", "outline-inefficiency",
  "outline-bubble", "outline-input", "outline-other", "outline-weight", "m-parameters", "m-gradients",
  "m-optimizer", "m-activations", "m-activation-gradients", "m-temporaries", "m-communication", "m-buffers",
  "m-other", "heat0", "heat1", "heat2", "heat3", "heat4", "hatch",
] as const;
export type ColourName = (typeof NAMES)[number];

export interface Theme {
  readonly name: "light" | "dark";
  readonly colours: Readonly<Record<ColourName, string>>;
  /** 256 colours of the heat ramp as RGBA words in the machine's order. */
  readonly heat: Uint32Array;
  /** 256 colours from card to ink, for metrics that are neither good nor bad. */
  readonly neutral: Uint32Array;
}

export const FONT = 'Inter, system-ui, -apple-system, "Segoe UI", sans-serif';
export const font = (size = 11.5, weight = 400): string => `${weight} ${size}px ${FONT}`;

const system = typeof matchMedia === "undefined" ? null : matchMedia("(prefers-color-scheme: dark)");
const systemIsDark = signal(system?.matches ?? false);
const isPrinting = signal(false);

export function followSystem(): void {
  system?.addEventListener("change", (event) => (systemIsDark.value = event.matches));
  addEventListener("beforeprint", () => (isPrinting.value = true));
  addEventListener("afterprint", () => (isPrinting.value = false));
}

export const theme = computed<Theme>(() => {
  const asked = state.value.t;
  const isDark = !isPrinting.value && (asked === "dark" || (asked !== "light" && systemIsDark.value));
  document.documentElement.dataset["theme"] = isDark ? "dark" : "light";
  return readTheme(isDark ? "dark" : "light");
});

const themes = new Map<string, Theme>();

function readTheme(name: "light" | "dark"): Theme {
  const found = themes.get(name);
  if (found) return found;
  const style = getComputedStyle(document.documentElement);
  const colours = Object.fromEntries(
    NAMES.map((colour) => [colour, style.getPropertyValue(`--${colour}`).trim() || "transparent"]),
  ) as Record<ColourName, string>;
  const stops: [number, string][] = [
    [0, colours.heat0], [0.18, colours.heat1], [0.42, colours.heat2], [0.72, colours.heat3], [1, colours.heat4],
  ];
  const made: Theme = {
    name, colours, heat: makeRamp(stops), neutral: makeRamp([[0, colours.sunk], [1, colours.ink]]),
  };
  themes.set(name, made);
  return made;
}

function parseHex(colour: string): [number, number, number] {
  const hex = colour.replace("#", "");
  const long = hex.length === 3 ? [...hex].map((c) => c + c).join("") : hex;
  const value = Number.parseInt(long, 16);
  return [(value >> 16) & 255, (value >> 8) & 255, value & 255];
}

function makeRamp(stops: readonly [number, string][]): Uint32Array {
  const ramp = new Uint32Array(256);
  for (let i = 0; i < 256; i++) {
    const at = i / 255;
    let k = 0;
    while (k < stops.length - 2 && at > stops[k + 1]![0]) k++;
    const [[a, from], [b, to]] = [stops[k]!, stops[k + 1]!];
    const share = Math.min(1, Math.max(0, (at - a) / (b - a)));
    const [x, y] = [parseHex(from), parseHex(to)];
    const mix = (c: 0 | 1 | 2): number => Math.round(x[c] + (y[c] - x[c]) * share);
    ramp[i] = packColour(mix(0), mix(1), mix(2));
  }
  return ramp;
}

const IS_LITTLE = new Uint8Array(new Uint32Array([1]).buffer)[0] === 1;

export function packColour(r: number, g: number, b: number, a = 255): number {
  return (IS_LITTLE ? (a << 24) | (b << 16) | (g << 8) | r : (r << 24) | (g << 16) | (b << 8) | a) >>> 0;
}

export function packHex(colour: string, a = 255): number {
  const [r, g, b] = parseHex(colour);
  return packColour(r, g, b, a);
}

export function rampColour(ramp: Uint32Array, share: number): string {
  const word = ramp[Math.round(255 * Math.min(1, Math.max(0, share)))]!;
  const bytes = new Uint8Array(new Uint32Array([word]).buffer);
  return IS_LITTLE ? `rgb(${bytes[0]} ${bytes[1]} ${bytes[2]})` : `rgb(${bytes[3]} ${bytes[2]} ${bytes[1]})`;
}
