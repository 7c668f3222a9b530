// Numbers, sizes, times and values as text.

const counts = new Intl.NumberFormat("en");
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export const count = (number) => (number === null || number === undefined ? "–" : counts.format(number));
export const compact = (number) => (Math.abs(number) < 10000 ? counts.format(number) : short.format(number));
export const plural = (number, noun) => `${count(number)} ${noun}${Number(number) === 1 ? "" : "s"}`;

// Of powers of 1024, as the command line shows it (`show_size` in terminal.py).
export function size(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let number = Number(bytes);
  let unit = 0;
  while (number >= 1024 && unit < units.length - 1) {
    number /= 1024;
    unit += 1;
  }
  return `${number >= 100 || unit === 0 || Number.isInteger(number) ? counts.format(Math.round(number)) : (Math.floor(number * 10 + 0.5) / 10).toFixed(1)} ${units[unit]}`;
}

export function duration(microseconds) {
  if (microseconds < 1000) return `${count(microseconds)} µs`;
  if (microseconds < 1e6) return `${(microseconds / 1000).toFixed(1)} ms`;
  return `${(microseconds / 1e6).toFixed(2)} s`;
}

export const percent = (part, whole) => {
  if (!whole) return "–";
  const share = (100 * part) / whole;
  if (share > 0 && share < 0.1) return "< 0.1 %";
  return share > 99.9 && share < 100 ? "> 99.9 %" : `${Number.isInteger(share) ? share : share.toFixed(1)} %`;
};

export const decimal = (number) => (number >= 100 ? count(Math.round(number)) : count(Math.round(number * 100) / 100));

export function time(ms) {
  return ms === null || ms === undefined ? "–" : new Date(ms).toISOString().replace("T", " ").slice(0, 19) + " UTC";
}

export function ago(ms, now = Date.now()) {
  const seconds = Math.max(0, (now - ms) / 1000);
  const steps = [[60, "second"], [60, "minute"], [24, "hour"], [365, "day"], [Infinity, "year"]];
  let number = seconds;
  for (const [most, unit] of steps) {
    if (number < most) return Math.floor(number) < 1 ? "now" : `${plural(Math.floor(number), unit)} ago`;
    number /= most;
  }
  return "";
}

export const path = (namespace, name) => [...namespace, ...(name === undefined ? [] : [name])].join(".");

export function value(given) {
  if (given === null || given === undefined) return "null";
  return typeof given === "object" ? JSON.stringify(given) : String(given);
}

export const clip = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

// An Iceberg type as text.
export function type(given) {
  if (typeof given === "string") return given;
  if (given.type === "list") return `list<${type(given.element)}>`;
  if (given.type === "map") return `map<${type(given.key)}, ${type(given.value)}>`;
  return `struct<${given.fields.map((field) => `${field.name}: ${type(field.type)}`).join(", ")}>`;
}

// An Iceberg expression as a predicate.
export function expression(given) {
  if (given === true || given === false) return String(given);
  const symbols = { eq: "=", "not-eq": "≠", lt: "<", "lt-eq": "≤", gt: ">", "gt-eq": "≥", "starts-with": "starts with", "not-starts-with": "does not start with" };
  const term = (of) => (typeof of === "string" ? of : `${of.transform}(${term(of.term ?? of.reference)})`);
  switch (given.type) {
    case "true":
    case "false":
      return given.type;
    case "and":
    case "or":
      return `(${expression(given.left)} ${given.type} ${expression(given.right)})`;
    case "not":
      return `not ${expression(given.child)}`;
    case "is-null":
      return `${term(given.term)} is null`;
    case "not-null":
      return `${term(given.term)} is not null`;
    case "is-nan":
      return `${term(given.term)} is NaN`;
    case "not-nan":
      return `${term(given.term)} is not NaN`;
    case "in":
    case "not-in": {
      const shown = given.values.slice(0, 5).map(value).join(", ");
      const more = given.values.length > 5 ? `, … ${plural(given.values.length, "value")}` : "";
      return `${term(given.term)} ${given.type.replace("-", " ")} (${shown}${more})`;
    }
    default:
      return `${term(given.term)} ${symbols[given.type] ?? given.type} ${value(given.value)}`;
  }
}
