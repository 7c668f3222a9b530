// Runs SQL: a statement, its plan, and its first rows. The statements of this tab are listed until it is reloaded.

import { html, useEffect, useRef, useState } from "../html.js";
import { onSignedOut, request } from "../api.js";
import { ago, clip, count, duration, percent, plural, size } from "../format.js";
import { Badge, Choice, Grid, Loaded, Notice, Panel, useLoad } from "../parts.js";

const PATH = "/api/v1/sql";
const ROWS = [100, 1000];
const HISTORY_MAX = 50;
const CELL_MAX = 300;
const EXAMPLE = "SELECT country, count(*) AS orders FROM shop.orders WHERE price > 15 GROUP BY country";

// In memory only: statements contain values of tables.
let history = [];
onSignedOut(() => (history = []));

const newId = () => [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");

export function Sql({ address }) {
  const state = useLoad((signal) => request(PATH, { signal }), []);
  return html`
    <div class="title"><h1>SQL</h1></div>
    <${Loaded} of=${state}>${(limits) =>
      limits["is-on"]
        ? html`<${Box} limits=${limits} given=${address.settings} />`
        : html`<${Notice} kind="warn" title="SQL is off">${limits.reason}<//>`}<//>`;
}

function Box({ limits, given }) {
  const [text, setText] = useState(given.sql ?? "");
  const [schema, setSchema] = useState(given.schema ?? "");
  const allowed = ROWS.filter((rows) => rows <= limits["rows-limit"]);
  const [rows, setRows] = useState(allowed.at(-1) ?? limits["rows-limit"]);
  const [done, setDone] = useState(null);
  const [running, setRunning] = useState(null);
  const current = useRef(null);
  useEffect(() => () => current.current?.abort(), []);

  async function ask(explain) {
    const statement = text.trim();
    if (!statement || current.current) return;
    const controller = new AbortController();
    const began = performance.now();
    const started = Date.now();
    const id = newId();
    current.current = controller;
    setRunning({ id, explain });
    const body = JSON.stringify({ statement, id, explain, ...(schema.trim() && { schema: schema.trim() }), ...(!explain && { "max-rows": rows }) });
    let outcome;
    try {
      outcome = { answer: await request(PATH, { method: "POST", body, signal: controller.signal }) };
    } catch (error) {
      outcome = controller.cancelled ? { cancelled: true } : { error };
    }
    if (controller.signal.aborted && !controller.cancelled) return; // the page was left
    current.current = null;
    const result = { ...outcome, statement, schema, explain, started, microseconds: Math.round((performance.now() - began) * 1000) };
    history = [result, ...history].slice(0, HISTORY_MAX).map(({ answer, ...kept }) => ({ ...kept, rows: kept.rows ?? answer?.rows?.length }));
    setRunning(null);
    setDone(result);
  }

  // Another process of the server may run the statement: closing the connection cancels it there.
  async function cancel() {
    const controller = current.current;
    if (!controller || controller.cancelled) return;
    controller.cancelled = true;
    await request(`${PATH}/${running.id}`, { method: "DELETE", silent: true }).catch(() => null);
    controller.abort();
  }

  function onKey(event) {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      ask(event.shiftKey);
    }
    if (event.key === "Escape" && running) cancel();
  }

  function repeat(entry) {
    setText(entry.statement);
    setSchema(entry.schema);
  }

  const limit = `At most ${count(limits["seconds-limit"])} s and ${size(limits["bytes-limit"])} of rows a statement (sql_time_s, sql_bytes_limit).`;
  return html`
    <${Panel} wide>
      <form class="controls" onSubmit=${(event) => (event.preventDefault(), ask(false))} onKeyDown=${onKey}>
        <label class="field whole"><span>Statement</span>
          <textarea rows="7" spellcheck="false" placeholder=${EXAMPLE} value=${text} onInput=${(event) => setText(event.target.value)}></textarea>
        </label>
        <label class="field"><span>Namespace of names without one</span><input value=${schema} spellcheck="false" onInput=${(event) => setSchema(event.target.value)} /></label>
        <${Choice} label="Rows shown" value=${String(rows)} onChange=${(chosen) => setRows(Number(chosen))} options=${(allowed.length ? allowed : [rows]).map((one) => [String(one), count(one)])} />
        <button type="submit" disabled=${running !== null}>Run</button>
        <button type="button" class="quiet" disabled=${running !== null} onClick=${() => ask(true)}>Explain</button>
        <button type="button" class="quiet" disabled=${running === null} onClick=${cancel}>Cancel</button>
      </form>
      <p class="note below">Queries only, with your rights. Ctrl+Enter runs, Ctrl+Shift+Enter explains, Escape cancels. ${limit}</p>
    <//>
    ${running ? html`<p class="loading" role="status">${running.explain ? "Planning" : "Running"} …</p>` : done && html`<${Outcome} of=${done} />`}
    <${Past} chosen=${repeat} />`;
}

function Outcome({ of }) {
  if (of.cancelled) return html`<${Notice} title="Cancelled">After ${duration(of.microseconds)}.<//>`;
  if (of.error) return html`<${Notice} kind="bad" title=${of.error.status === 403 ? "Not permitted" : "The statement failed"}><pre class="wrapped">${of.error.message}</pre><//>`;
  return html`
    ${!of.explain && html`<${Rows} answer=${of.answer} microseconds=${of.microseconds} />`}
    <${Plan} plan=${of.answer} />`;
}

function Rows({ answer, microseconds }) {
  const { columns, rows, complete } = answer;
  const told = `${plural(rows.length, "row")} in ${duration(microseconds)}${complete ? "" : "; there are more"}`;
  const isNumber = (column) => /int|decimal|double|real|float/.test(column.type);
  return html`<${Panel} wide title="Result">
    <p class="note" role="status">${told}</p>
    <div class="tall"><${Grid} label="Result" empty="The query has no rows." rows=${rows} columns=${columns.map((column, at) => ({
      title: html`${column.name} <span class="muted">${column.type}</span>`,
      number: isNumber(column),
      cell: (row) => html`<${Cell} value=${row[at]} />`,
    }))} /></div>
  <//>`;
}

function Cell({ value }) {
  if (value === null) return html`<span class="muted">null</span>`;
  const text = typeof value === "object" ? JSON.stringify(value) : String(value);
  return text.length > CELL_MAX ? html`<span title=${text}>${clip(text, CELL_MAX)}</span>` : text;
}

function Plan({ plan }) {
  return html`<${Panel} wide title="Plan">
    <dl class="facts"><dt>Engine</dt><dd>${plan.engine}, because ${plan.why}</dd></dl>
    <${Grid} label="Tables" empty="It reads no table." rows=${plan.tables} columns=${[
      { title: "Table", cell: (one) => one.table },
      { title: "Files to read", number: true, cell: (one) => `${count(one.files)} (${percent(one.files, one["considered-files"])})` },
      { title: "of", number: true, cell: (one) => count(one["considered-files"]) },
      { title: "Bytes", number: true, cell: (one) => size(one.bytes) },
      { title: "Columns", number: true, cell: (one) => count(one.columns) },
      { title: "Joins that left out files", cell: (one) => one.joins.map(([name, keys]) => (keys === null ? `${name}: index on attributes` : `${name}: ${plural(keys, "key")}`)).join(", ") },
    ]} />
  <//>`;
}

function Past({ chosen }) {
  if (!history.length) return null;
  return html`<${Panel} wide title="Statements of this tab" note="Until the page is loaded again. A click puts a statement into the box.">
    <${Grid} label="Statements of this tab" rows=${history} columns=${[
      { title: "When", cell: (one) => html`<time>${ago(one.started)}</time>` },
      { title: "Statement", cell: (one) => html`<button type="button" class="link" onClick=${() => chosen(one)}><code>${clip(one.statement.replace(/\s+/g, " "), 160)}</code></button>` },
      { title: "Result", cell: (one) => html`<${Told} of=${one} />` },
      { title: "Time", number: true, cell: (one) => duration(one.microseconds) },
    ]} />
  <//>`;
}

function Told({ of }) {
  if (of.cancelled) return html`<${Badge} kind="warn">cancelled<//>`;
  if (of.error) return html`<${Badge} kind="bad">failed<//>`;
  return of.explain ? html`<${Badge}>explained<//>` : html`<${Badge} kind="good">${plural(of.rows, "row")}<//>`;
}
