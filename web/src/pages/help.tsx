import { useEffect, useRef } from "preact/hooks";
import { base, servedRun } from "../data/http";
import { KEYS } from "../state/keys";
import { toast } from "../text/files";
import { isHelpOpen } from "./header";
import { RUNS_KEYS } from "./runs_page";

export function HelpDialog() {
  const box = useRef<HTMLDialogElement>(null);
  const isOpen = isHelpOpen.value;
  const isList = base !== null && servedRun === null && !/\/compare$/.test(location.pathname);
  useEffect(() => {
    if (isOpen && !box.current?.open) box.current?.showModal();
    if (!isOpen && box.current?.open) box.current.close();
  }, [isOpen]);
  return (
    <dialog ref={box} aria-label="Keys" onClose={() => (isHelpOpen.value = false)}>
      <h2>Keys</h2>
      <p class="note" hidden={isList}>Wheel zooms a picture that was clicked, or with Ctrl. Drag selects steps, or pans what is zoomed. Shift and click add ranks.</p>
      <div class="keys">{(isList ? RUNS_KEYS : KEYS).map(([key, what]) => [<span key={key}>{key.split(" ").map((one) => <kbd key={one}>{one}</kbd>)}</span>, <span key={`${key} what`}>{what}</span>])}</div>
      <p><button type="button" onClick={() => (isHelpOpen.value = false)}>Close</button></p>
    </dialog>
  );
}

export function Toast() {
  return <div role="status" aria-live="polite">{toast.value && <div class="toast">{toast.value}</div>}</div>;
}
