// A whole query: for each of its tables the condition that the query implies, its joins, and the files of each stage.

import { html, useEffect, useState } from "../html.js";
import { request } from "../api.js";
import { change, tableHref } from "../address.js";
import { count, duration, path, percent, size } from "../format.js";
import { Badge, Choice, Grid, Loaded, Panel, Scroll, useLoad } from "../parts.js";
import { Funnel, Incomplete, Layouts, NotUsed } from "./plan.js";

const EXAMPLE = "SELECT sum(o.price) FROM shop.orders o JOIN shop.customers c ON o.customer = c.id WHERE c.city = 'Bonn'";
const DIALECTS = [["trino", "Trino, Spark"], ["duckdb", "DuckDB"]];

export const isQuery = (text) => /^\s*(select|with|\()\s/i.test(text);

export function Query({ address }) {
  const { sql = "", dialect = "trino", namespace = "" } = address.settings;
  const [text, setText] = useState(sql);
  useEffect(() => setText(sql), [sql]);
  const [round, setRound] = useState(0);
  const submit = (event) => {
    event?.preventDefault();
    if (text.trim() === sql) setRound(round + 1);
    else change(address, { sql: text.trim() });
  };
  const onKey = (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && submit();
  return html`
    <div class="title"><h1>Explain a query</h1></div>
    <${Panel} wide>
      <form class="controls" onSubmit=${submit}>
        <label class="field grow"><span>Query in SQL</span>
          <textarea rows="5" spellcheck="false" placeholder=${EXAMPLE} value=${text} onInput=${(event) => setText(event.target.value)} onKeyDown=${onKey}></textarea>
        </label>
        <${Choice} label="SQL of" value=${dialect} onChange=${(given) => change(address, { dialect: given })} options=${DIALECTS} />
        <label class="field"><span>Namespace of names without one</span><input value=${namespace} spellcheck="false" onChange=${(event) => change(address, { namespace: event.target.value.trim() })} /></label>
        <button type="submit">Explain</button>
      </form>
      <p class="note below">Nothing is run. Ctrl+Enter explains. Engines get these plans through the Trino proxy, <code>seamark.spark.sql</code> and <code>seamark.duckdb.sql</code>.</p>
    <//>
    ${sql && html`<${QueryPlans} query=${sql} dialect=${dialect} namespace=${namespace ? namespace.split(".") : []} round=${round} />`}`;
}

export function QueryPlans({ query, dialect = "trino", namespace, round = 0 }) {
  const explained = useLoad(
    async (signal) => (await request("/api/v1/explain-query", { method: "POST", signal, body: JSON.stringify({ query, dialect, namespace }) })).tables,
    [query, dialect, namespace.join("\u001f"), round],
  );
  return html`<${Loaded} of=${explained}>${(tables) => html`
    <${Summary} tables=${tables} />
    ${tables.map((one) => html`<${TablePlan} one=${one} />`)}`}<//>`;
}

const filesOf = (plan) => plan.stages[0]?.["files-in"] ?? plan.files;
const spent = (plan) => plan.stages.reduce((sum, stage) => sum + stage.microseconds, 0);

function Summary({ tables }) {
  return html`<${Panel} wide title="Tables" note="What the query has to read of each table, by the server's plan.">
    <${Scroll} label="Tables"><table class="bars funnel">
      <thead><tr><th scope="col" class="name">Table</th><th scope="col">Files to read</th><th scope="col" class="number">of</th><th scope="col" class="number">Bytes</th><th scope="col" class="number">Planning</th></tr></thead>
      <tbody>${tables.map(({ table, plan }) => html`<tr>
        <th scope="row"><a href=${tableHref(table.slice(0, -1), table.at(-1))}>${path(table.slice(0, -1), table.at(-1))}</a></th>
        <td><span class="bar series-now" style=${{ width: `${filesOf(plan) ? (plan.files / filesOf(plan)) * 65 : 0}%` }}></span><span>${count(plan.files)} (${percent(plan.files, filesOf(plan))})</span></td>
        <td class="number">${count(filesOf(plan))}</td>
        <td class="number">${size(plan.bytes)}</td>
        <td class="number">${duration(spent(plan))}</td>
      </tr>`)}</tbody>
    </table><//>
  <//>`;
}

function TablePlan({ one }) {
  const { table, reference, predicate, plan } = one;
  return html`<${Panel} wide title=${reference}>
    <dl class="facts">
      <dt>Condition</dt><dd>${predicate ? html`<code>${predicate}</code>` : "none on its own columns that could leave files out"}</dd>
      ${(plan["unpruned-reasons"] ?? []).length > 0 && html`<dt>All files are read</dt><dd>${plan["unpruned-reasons"].join("; ")}</dd>`}
    </dl>
    <${Incomplete} plan=${plan} />
    <${NotUsed} plan=${plan} />
    <${Funnel} stages=${plan.stages} all=${filesOf(plan)} />
    ${(plan.joins ?? []).length > 0 && html`<${Grid} label=${`Joins of ${reference}`} rows=${plan.joins} columns=${[
      { title: "Join with", cell: (join) => join.table.join(".") },
      { title: "Outcome", cell: (join) => (join.used ? html`<${Badge} kind="good">used<//> ${join.keys === null ? join.indexes.join(", ") : `${count(join.keys)} keys`}` : html`<${Badge}>not used<//> ${join.reason}`) },
    ]} />`}
    <${Layouts} plan=${plan} namespace=${table.slice(0, -1)} name=${table.at(-1)} />
  <//>`;
}
