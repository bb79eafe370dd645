// Steps that the heat map shows; null: all. Not part of the address: a selection of steps is.
import { signal } from "@preact/signals";

export const heatZoom = signal<readonly [number, number] | null>(null);

export function setHeatZoom(zoom: readonly [number, number] | null): void {
  heatZoom.value = zoom;
}
