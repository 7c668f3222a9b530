// The parts of a plan that the pages for a predicate and for a query share.

import { html } from "../html.js";
import { count, duration, path, percent, size } from "../format.js";
import { Badge, Copy, Grid, Notice, Scroll } from "../parts.js";

export const STAGES = { manifests: "Manifests", appended: "Appended files", partition: "Partitions", column_stats: "Column statistics", bloom: "Bloom filters", bitmap: "Bitmap indexes", bitmap_rows: "Rows by bitmap indexes", disjunctions: "Indexes or column statistics", record: "Record indexes", cube: "Cubes", join_keys: "Keys of joins" };

export function Incomplete({ plan }) {
  if (plan.complete) return null;
  return html`<${Notice} kind="warn" title="Not complete">A time limit ended the plan or an index was late; unchecked files stay. Another attempt may keep fewer files.<//>`;
}

export function NotUsed({ plan }) {
  if (!plan["not-used"].length) return null;
  return html`<${Notice} kind="warn" title="Parts of the predicate that cannot prune">
    <ul>${plan["not-used"].map((part, at) => html`<li><code>${part}</code>: ${plan["not-used-reasons"][at]}</li>`)}</ul>
    The planner takes them as true; the engine evaluates them on the rows.
  <//>`;
}

export function Funnel({ stages, all }) {
  return html`<${Scroll} label="Files after each stage"><table class="bars funnel">
    <thead><tr><th scope="col" class="name">Stage</th><th scope="col">Files left</th><th scope="col" class="number">Removed</th><th scope="col" class="number">Bytes left</th><th scope="col" class="number">Time</th></tr></thead>
    <tbody>
      <tr><th scope="row">All files</th><td><span class="bar rest" style=${{ width: "65%" }}></span><span>${count(all)}</span></td><td></td><td class="number">${size(stages[0]?.["bytes-in"] ?? 0)}</td><td></td></tr>
      ${stages.map((stage) => html`<tr>
        <th scope="row">${STAGES[stage.name] ?? stage.name}${!stage.complete && html` <${Badge} kind="warn">out of time<//>`}</th>
        <td><span class="bar series-now" style=${{ width: `${all ? (stage["files-left"] / all) * 65 : 0}%` }}></span><span>${count(stage["files-left"])}</span></td>
        <td class="number">${stage["files-removed"] ? `−${count(stage["files-removed"])}` : "0"}</td>
        <td class="number">${size(stage["bytes-left"])}</td>
        <td class="number">${duration(stage.microseconds)}</td>
      </tr>`)}
    </tbody>
  </table><//>`;
}

// What a sort or a clustering would leave, by the server's estimate, with the command.
export function Layouts({ plan, namespace, name }) {
  if (!plan.layouts.length) return null;
  const command = (layout) => `seamark table set ${quote(path(namespace, name))} ${quote(`seamark.clustering.columns=${layout.columns.join(",")}`)}`;
  return html`<${Grid} label="Layouts that would help" rows=${plan.layouts} columns=${[
    { title: "With the layout", cell: (layout) => `${layout.columns.length > 1 ? "Clustered" : "Sorted"} by ${layout.columns.join(", ")}` },
    { title: "Files, about", number: true, cell: (layout) => `${count(layout.files)} of ${count(layout["files-in"])} (${percent(layout.files, layout["files-in"])})` },
    { title: "Command", cell: (layout) => html`<code>${command(layout)}</code> <${Copy} text=${command(layout)} label="the command" />` },
  ]} />`;
}

const quote = (text) => (/^[\w.,=/-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`);
