import { useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";

export type MenuItem = readonly [string, () => void];

/** A button with a list of commands. */
export function Menu({ label, text, items, id }: { label: string; text: string; items: readonly MenuItem[]; id?: string }) {
  const isOpen = useSignal(false);
  const box = useRef<HTMLDivElement>(null);
  useEffect(() => {
    if (!isOpen.value) return;
    box.current?.querySelector<HTMLButtonElement>("[role=menuitem]")?.focus();
    const away = (event: Event): void => {
      if (!box.current?.contains(event.target as Node)) isOpen.value = false;
    };
    addEventListener("pointerdown", away);
    return () => removeEventListener("pointerdown", away);
  }, [isOpen.value]);
  const keys = (event: KeyboardEvent): void => {
    const buttons = [...(box.current?.querySelectorAll<HTMLButtonElement>("[role=menuitem]") ?? [])];
    const at = buttons.indexOf(document.activeElement as HTMLButtonElement);
    if (event.key === "Escape" && isOpen.value) {
      isOpen.value = false;
      box.current?.querySelector("button")?.focus();
    } else if (event.key === "ArrowDown") buttons[(at + 1) % buttons.length]?.focus();
    else if (event.key === "ArrowUp") buttons.at(at - 1)?.focus();
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  return (
    <div class="menu" ref={box} onKeyDown={keys}>
      <button id={id} type="button" class={text.length < 3 ? "plain icon" : ""} aria-label={label} aria-haspopup="menu" aria-expanded={isOpen.value}
        onClick={() => (isOpen.value = !isOpen.value)}>{text}</button>
      {isOpen.value && (
        <div role="menu" aria-label={label}>
          {items.map(([name, act]) => (
            <button key={name} type="button" role="menuitem" onClick={() => { isOpen.value = false; act(); }}>{name}</button>
          ))}
        </div>
      )}
    </div>
  );
}

/** One of a few choices. */
export function Choice<T extends string>({ label, value, options, choose }: {
  label: string; value: T; options: readonly (readonly [T, string])[]; choose: (value: T) => void;
}) {
  return (
    <div class="row" role="group" aria-label={label} style={{ gap: "4px" }}>
      {options.map(([name, text]) => (
        <button key={name} type="button" aria-pressed={name === value} onClick={() => choose(name)}>{text}</button>
      ))}
    </div>
  );
}

/** One of many. */
export function Select({ label, value, options, choose, id }: {
  label: string; value: string; options: readonly (readonly [string, string])[]; choose: (value: string) => void; id?: string;
}) {
  return (
    <select id={id} aria-label={label} value={value} onChange={(event) => choose(event.currentTarget.value)}>
      {options.map(([name, text]) => <option key={name} value={name} selected={name === value}>{text}</option>)}
    </select>
  );
}
