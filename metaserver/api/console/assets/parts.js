// The parts that pages are made of.

import { html, useCallback, useEffect, useMemo, useRef, useState } from "./html.js";
import { count } from "./format.js";

// The result of an asynchronous function, again whenever one of `inputs` changes.
export function useLoad(load, inputs) {
  const [state, setState] = useState({ loading: true });
  const [round, setRound] = useState(0);
  useEffect(() => {
    const controller = new AbortController();
    setState((before) => ({ ...before, loading: true }));
    const report = (partial) => controller.signal.aborted || setState({ loading: true, value: partial });
    load(controller.signal, report).then(
      (value) => controller.signal.aborted || setState({ loading: false, value }),
      (error) => controller.signal.aborted || setState({ loading: false, error }),
    );
    return () => controller.abort();
  }, [...inputs, round]);
  return { ...state, reload: useCallback(() => setRound((before) => before + 1), []) };
}

export function Notice({ kind = "info", title, children }) {
  return html`<div class="notice ${kind}" role=${kind === "bad" ? "alert" : "status"}>
    ${title && html`<strong>${title}</strong>`}<div>${children}</div>
  </div>`;
}

export function Failure({ error }) {
  if (!error) return null;
  const title = error.status === 403 ? "Not permitted" : error.status === 404 ? "Not found" : "The request failed";
  return html`<${Notice} kind=${error.status === 403 ? "warn" : "bad"} title=${title}>${error.message}<//>`;
}

// What `useLoad` returned: the failure, or the children for the value.
export function Loaded({ of, children }) {
  if (of.error) return html`<${Failure} error=${of.error} />`;
  if (of.value === undefined) return html`<p class="loading" role="status">Loading …</p>`;
  return html`<div aria-busy=${of.loading} class="loaded">${children(of.value)}</div>`;
}

export function Panel({ title, note, actions, children, wide }) {
  return html`<section class="panel ${wide ? "wide" : ""}">
    ${(title || actions) && html`<header><h2>${title}</h2>${actions && html`<div class="actions">${actions}</div>`}</header>`}
    ${note && html`<p class="note">${note}</p>`}
    ${children}
  </section>`;
}

export function Stats({ items }) {
  return html`<dl class="stats">
    ${items.map(([name, value, note]) => html`<div><dt>${name}</dt><dd>${value}${note && html`<small>${note}</small>`}</dd></div>`)}
  </dl>`;
}

export const Badge = ({ kind = "", children }) => html`<span class="badge ${kind}">${children}</span>`;

// What may be wider than the page, and then scrolls by itself, by keyboard too.
export const Scroll = ({ label, children }) => html`<div class="scroll" tabindex="0" role="region" aria-label=${label}>${children}</div>`;

// A table of all rows. `columns`: [{ title, cell(row), number }].
export function Grid({ columns, rows, label, empty = "There is none." }) {
  if (!rows.length) return html`<p class="empty">${empty}</p>`;
  return html`<${Scroll} label=${label}>
    <table>
      <thead><tr>${columns.map((column) => html`<th scope="col" class=${column.number ? "number" : ""}>${column.title}</th>`)}</tr></thead>
      <tbody>${rows.map((row) => html`<tr>${columns.map((column) => html`<td class=${column.number ? "number" : ""}>${column.cell(row)}</td>`)}</tr>`)}</tbody>
    </table>
  <//>`;
}

const ROW = 36;
const SPARE = 12;

// A list of any length, of which only the visible rows are elements. `row(item)` has a fixed height.
export function LongList({ items, row, label, height = 640 }) {
  const [top, setTop] = useState(0);
  const box = useRef(null);
  useEffect(() => {
    box.current.scrollTop = 0;
    setTop(0);
  }, [label]);
  const first = Math.max(0, Math.floor(top / ROW) - SPARE);
  const shown = items.slice(first, first + Math.ceil(height / ROW) + 2 * SPARE);
  const limit = { maxHeight: `${height}px` };
  return html`<div class="long" style=${limit} ref=${box} tabindex="0" role="region" aria-label=${label} onScroll=${(event) => setTop(event.target.scrollTop)}>
    <ul style=${{ height: `${items.length * ROW}px` }}>
      ${shown.map((item, at) => html`<li key=${first + at} style=${{ top: `${(first + at) * ROW}px` }} aria-setsize=${items.length} aria-posinset=${first + at + 1}>${row(item)}</li>`)}
    </ul>
  </div>`;
}

export function Meter({ part, whole, label }) {
  const share = whole ? Math.min(1, part / whole) : 0;
  return html`<span class="meter" role="img" aria-label=${label}><span style=${{ width: `${share * 100}%` }}></span></span>`;
}

export function Choice({ label, value, options, onChange }) {
  return html`<label class="field"><span>${label}</span>
    <select value=${value} onChange=${(event) => onChange(event.target.value)}>
      ${options.map(([key, text]) => html`<option value=${key} selected=${key === value}>${text}</option>`)}
    </select>
  </label>`;
}

// The data of a picture as text, for those who do not see it.
export function AsTable({ columns, rows, label }) {
  const [open, setOpen] = useState(false);
  return html`<details class="as-table" onToggle=${(event) => setOpen(event.target.open)}>
    <summary>Show as a table (${count(rows.length)} rows)</summary>
    ${open && html`<${Grid} columns=${columns} rows=${rows.slice(0, 500)} label=${label} />`}
  </details>`;
}

export function Copy({ text, label }) {
  const [done, setDone] = useState(false);
  const copy = useCallback(() => navigator.clipboard?.writeText(text).then(() => setDone(true)), [text]);
  return html`<button type="button" class="quiet" onClick=${copy} aria-label=${`Copy ${label}`}>${done ? "Copied" : "Copy"}</button>`;
}

export function useFiltered(items, text, textOf) {
  return useMemo(() => {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    return words.length ? items.filter((item) => words.every((word) => textOf(item).toLowerCase().includes(word))) : items;
  }, [items, text]);
}
