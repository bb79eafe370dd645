// One layer for all own canvases: sharp on any screen, drawn again when what it shows changes, with
// hover, click, drag, wheel, and a cell cursor for the keyboard that a live region reads out.
import { effect, useSignal } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { useEffect, useLayoutEffect, useRef } from "preact/hooks";
import { tip } from "../parts/tip";
import type { Theme } from "./theme";
import { theme } from "./theme";

export interface Frame {
  readonly ctx: CanvasRenderingContext2D;
  readonly width: number;
  readonly height: number;
  readonly theme: Theme;
}

/** What is under a point: a sentence for the tooltip and the live region, and where it is. */
export interface Spot {
  readonly tip: ComponentChildren;
  readonly text: string;
  /** Outlined while the pointer is there. */
  readonly box?: readonly [number, number, number, number];
  readonly overlay?: (frame: Frame) => void;
}

export interface CanvasProps {
  readonly height: number;
  /** One sentence: what a reader who does not see the picture should know. */
  readonly label: string;
  readonly draw: (frame: Frame) => void;
  readonly spot?: (x: number, y: number, width: number) => Spot | null;
  readonly click?: (x: number, y: number, width: number, event: MouseEvent | KeyboardEvent) => void;
  /** A drag from one x to another; called while it lasts and, with `isDone`, at its end. */
  readonly drag?: (from: number, to: number, width: number, isDone: boolean) => void;
  readonly wheel?: (x: number, width: number, event: WheelEvent) => boolean;
  readonly double?: () => void;
  /** Moves the cell cursor: the next point for a step of -1, 0 or 1 in x and y. */
  readonly cursor?: (at: readonly [number, number] | null, dx: number, dy: number, width: number) => readonly [number, number] | null;
  readonly className?: string;
}

const DRAG_FROM_PX = 4;

export function Canvas(props: CanvasProps) {
  const host = useRef<HTMLDivElement>(null);
  const base = useRef<HTMLCanvasElement>(null);
  const over = useRef<HTMLCanvasElement>(null);
  const outline = useRef<HTMLDivElement>(null);
  const width = useSignal(0);
  const latest = useRef(props);
  latest.current = props;
  const cursor = useRef<readonly [number, number] | null>(null);
  const said = useSignal("");

  useLayoutEffect(() => {
    const element = host.current!;
    width.value = Math.floor(element.clientWidth);
    const watch = new ResizeObserver(() => (width.value = Math.floor(element.clientWidth)));
    watch.observe(element);
    return () => watch.disconnect();
  }, []);

  // Draws again when the props change or a signal that `draw` read does.
  useLayoutEffect(() => effect(() => {
    const w = width.value;
    const shown = theme.value;
    if (w <= 0 || !base.current) return;
    const ctx = prepare(base.current, w, props.height);
    const begin = performance.now();
    if (ctx) latest.current.draw({ ctx, width: w, height: props.height, theme: shown });
    // Read by benchmarks/page_budget.py.
    host.current!.dataset["drawMs"] = (performance.now() - begin).toFixed(2);
    mark(null);
  }));

  // What the pointer is over costs no pixel of the picture: the outline is an element of its own, and
  // the second canvas is touched only by what draws on it.
  const isDrawnOver = useRef(false);
  const mark = (found: Spot | null): void => {
    const { height } = latest.current;
    if (over.current && (isDrawnOver.current || found?.overlay)) {
      const ctx = prepare(over.current, width.peek(), height);
      isDrawnOver.current = Boolean(found?.overlay);
      if (ctx) found?.overlay?.({ ctx, width: width.peek(), height, theme: theme.peek() });
    }
    const style = outline.current?.style;
    if (!style) return;
    style.visibility = found?.box ? "visible" : "hidden";
    if (!found?.box) return;
    const [x, y, w, h] = found.box;
    style.transform = `translate(${x - 1}px,${y - 1}px)`;
    style.width = `${Math.max(2, w + 2)}px`;
    style.height = `${Math.max(2, h + 2)}px`;
  };

  const show = (x: number, y: number): Spot | null => {
    const found = latest.current.spot?.(x, y, width.peek()) ?? null;
    mark(found);
    return found;
  };

  const at = (event: MouseEvent): readonly [number, number] => {
    const box = host.current!.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  const pressed = useRef<readonly [number, number] | null>(null);
  const isDragging = useRef(false);

  const move = (event: PointerEvent): void => {
    const [x, y] = at(event);
    const start = pressed.current;
    if (start && latest.current.drag && (isDragging.current || Math.abs(x - start[0]) >= DRAG_FROM_PX)) {
      isDragging.current = true;
      latest.current.drag(start[0], x, width.peek(), false);
      tip.value = null;
      return;
    }
    const found = show(x, y);
    tip.value = found ? { x: event.clientX, y: event.clientY, content: found.tip } : null;
  };
  const leave = (): void => {
    tip.value = null;
    mark(null);
  };
  const down = (event: PointerEvent): void => {
    if (event.button !== 0) return;
    pressed.current = at(event);
    isDragging.current = false;
    if (latest.current.drag) host.current!.setPointerCapture(event.pointerId);
  };
  const up = (event: PointerEvent): void => {
    const start = pressed.current;
    pressed.current = null;
    if (!start) return;
    const [x, y] = at(event);
    if (isDragging.current) latest.current.drag?.(start[0], x, width.peek(), true);
    else latest.current.click?.(x, y, width.peek(), event);
    isDragging.current = false;
  };

  const keys = (event: KeyboardEvent): void => {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    const { cursor: next, click } = latest.current;
    if (step && next) {
      cursor.current = next(cursor.current, step[0]!, step[1]!, width.peek()) ?? cursor.current;
      if (cursor.current) said.value = show(cursor.current[0], cursor.current[1])?.text ?? "";
    } else if (event.key === "Enter" && cursor.current && click) {
      click(cursor.current[0], cursor.current[1], width.peek(), event);
    } else return;
    event.preventDefault();
    event.stopPropagation();
  };

  useEffect(() => {
    const element = host.current!;
    const turn = (event: WheelEvent): void => {
      const handled = latest.current.wheel?.(at(event)[0], width.peek(), event);
      if (handled) event.preventDefault();
    };
    element.addEventListener("wheel", turn, { passive: false });
    return () => element.removeEventListener("wheel", turn);
  }, []);

  const isActive = Boolean(props.cursor);
  return (
    <div
      ref={host}
      class={`canvas ${props.className ?? ""}`}
      style={{ height: `${props.height}px`, cursor: props.click ? "crosshair" : "default" }}
      tabIndex={isActive ? 0 : -1}
      role={isActive ? "application" : undefined}
      aria-roledescription={isActive ? "chart; arrow keys move, Enter selects" : undefined}
      aria-label={isActive ? props.label : undefined}
      onPointerMove={move}
      onPointerLeave={leave}
      onPointerDown={down}
      onPointerUp={up}
      onDblClick={() => latest.current.double?.()}
      onKeyDown={keys}
    >
      <canvas ref={base} role="img" aria-label={props.label} />
      <canvas ref={over} class="over" aria-hidden="true" />
      <div ref={outline} class="outline" aria-hidden="true" />
      <span class="sr" role="status" aria-live="polite">{said}</span>
    </div>
  );
}

function prepare(canvas: HTMLCanvasElement, width: number, height: number): CanvasRenderingContext2D | null {
  const scale = devicePixelRatio || 1;
  const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
  }
  const ctx = canvas.getContext("2d");
  if (!ctx) return null;
  ctx.setTransform(scale, 0, 0, scale, 0, 0);
  ctx.clearRect(0, 0, width, height);
  return ctx;
}
