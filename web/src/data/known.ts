// Any number of the document may be `{unavailable: reason}`. All reading of values goes through here,
// so that nothing missing becomes 0 and nothing is computed from what is not there.

export interface Unavailable {
  unavailable: string;
}

/** A value, or why it is not there; `null` is "does not apply". */
export type Known<T> = T | Unavailable | null | undefined;

export function isKnown<T>(value: Known<T>): value is T {
  return value !== null && value !== undefined && !isUnavailable(value);
}

export function isUnavailable(value: unknown): value is Unavailable {
  return typeof value === "object" && value !== null && "unavailable" in value;
}

export function reasonOf(value: Known<unknown>, otherwise = "not recorded"): string {
  return isUnavailable(value) ? String(value.unavailable) : otherwise;
}

/** The value as `show` writes it, else "not known". */
export function say<T>(value: Known<T>, show: (value: T) => string, missing = "not known"): string {
  return isKnown(value) ? show(value) : missing;
}

export function mapKnown<T, U>(value: Known<T>, change: (value: T) => U): Known<U> {
  return isKnown(value) ? change(value) : (value as Unavailable | null | undefined);
}

export function orElse<T>(value: Known<T>, other: T): T {
  return isKnown(value) ? value : other;
}

/** A finite number, else undefined: for marks, which are not drawn where nothing is known. */
export function num(value: Known<unknown>): number | undefined {
  return typeof value === "number" && Number.isFinite(value) ? value : undefined;
}

export function list<T>(value: Known<readonly T[]>): readonly T[] {
  return Array.isArray(value) ? value : [];
}
