// Marks that hue alone does not carry: hatch for bubbles and what is not known, dots for idle time.
import type { Kind } from "./kinds";
import { fillOf, outlineOf } from "./kinds";
import type { Theme } from "./theme";

const patterns = new Map<string, CanvasPattern | null>();

function makePattern(ctx: CanvasRenderingContext2D, key: string, size: number, paint: (tile: CanvasRenderingContext2D) => void): CanvasPattern | null {
  if (patterns.has(key)) return patterns.get(key) ?? null;
  const scale = Math.max(1, Math.round(devicePixelRatio || 1));
  const tile = document.createElement("canvas");
  tile.width = tile.height = size * scale;
  const inner = tile.getContext("2d");
  if (!inner) return null;
  inner.scale(scale, scale);
  paint(inner);
  const made = ctx.createPattern(tile, "repeat");
  made?.setTransform(new DOMMatrix().scale(1 / scale));
  patterns.set(key, made);
  return made;
}

export function hatch(ctx: CanvasRenderingContext2D, colour: string, alpha: number, size = 6): CanvasPattern | string {
  return makePattern(ctx, `hatch ${colour} ${alpha} ${size}`, size, (tile) => {
    tile.strokeStyle = colour;
    tile.globalAlpha = alpha;
    tile.lineWidth = 1;
    tile.beginPath();
    for (const offset of [-size, 0, size]) {
      tile.moveTo(offset - 1, size + 1);
      tile.lineTo(offset + size + 1, -1);
    }
    tile.stroke();
  }) ?? "transparent";
}

function dots(ctx: CanvasRenderingContext2D, colour: string): CanvasPattern | string {
  return makePattern(ctx, `dots ${colour}`, 5, (tile) => {
    tile.fillStyle = colour;
    tile.fillRect(1, 1, 1.4, 1.4);
  }) ?? "transparent";
}

/** A rectangle of a kind, with its texture where it is large enough to see one. */
export function fillKind(ctx: CanvasRenderingContext2D, kind: Kind, theme: Theme, x: number, y: number, w: number, h: number): void {
  ctx.fillStyle = fillOf(kind, theme);
  ctx.fillRect(x, y, w, h);
  if (kind === "bubble") {
    ctx.fillStyle = hatch(ctx, theme.colours.hatch, 0.5);
    ctx.fillRect(x, y, w, h);
  } else if (kind === "idle") {
    ctx.fillStyle = dots(ctx, theme.colours.card);
    ctx.fillRect(x, y, w, h);
  } else if (kind === "unknown") {
    ctx.fillStyle = hatch(ctx, theme.colours.ink3, 0.9);
    ctx.fillRect(x, y, w, h);
  }
  const outline = outlineOf(kind, theme);
  if (outline !== "transparent" && w > 4 && h > 4) {
    ctx.strokeStyle = outline;
    ctx.lineWidth = 1;
    ctx.setLineDash(kind === "unknown" ? [3, 2] : []);
    ctx.strokeRect(x + 0.5, y + 0.5, w - 1, h - 1);
    ctx.setLineDash([]);
  }
}
