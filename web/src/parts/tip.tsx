// The one tooltip of the page.
import { signal } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { useLayoutEffect, useRef } from "preact/hooks";

export interface Tip {
  readonly x: number;
  readonly y: number;
  readonly content: ComponentChildren;
}

export const tip = signal<Tip | null>(null);

export function TipLayer() {
  const box = useRef<HTMLDivElement>(null);
  const shown = tip.value;
  useLayoutEffect(() => {
    const element = box.current;
    if (!element || !shown) return;
    const { width, height } = element.getBoundingClientRect();
    const x = shown.x + 14 + width > innerWidth - 6 ? shown.x - 14 - width : shown.x + 14;
    const y = shown.y + 16 + height > innerHeight - 6 ? shown.y - 12 - height : shown.y + 16;
    element.style.transform = `translate(${Math.round(Math.max(6, x))}px,${Math.round(Math.max(6, y))}px)`;
  });
  return shown ? <div class="tip" ref={box} aria-hidden="true">{shown.content}</div> : null;
}

/** For elements of the document: shows a tooltip while the pointer is over them. */
export function hover(content: () => ComponentChildren) {
  return {
    onPointerMove: (event: PointerEvent) => (tip.value = { x: event.clientX, y: event.clientY, content: content() }),
    onPointerLeave: () => (tip.value = null),
  };
}

export function Facts({ title, rows }: { title: string; rows: readonly (readonly [string, string])[] }) {
  return (
    <>
      <b>{title}</b>
      <dl>{rows.map(([name, value]) => [<dt key={`${name}t`}>{name}</dt>, <dd key={`${name}d`}>{value}</dd>])}</dl>
    </>
  );
}
