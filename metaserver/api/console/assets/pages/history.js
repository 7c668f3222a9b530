// The statements that read a table, by their shapes, without the values that they compare.

import { html } from "../html.js";
import { request, tablePath } from "../api.js";
import { ago, count, percent, size, time } from "../format.js";
import { Grid, Loaded, Meter, Panel, Stats, useLoad } from "../parts.js";

const DAYS = 30;
const sum = (shapes, name) => shapes.reduce((total, shape) => total + shape.sums[name], 0);
const mean = (sums, name, statements) => (sums[statements] ? sums[name] / sums[statements] : 0);

export function History({ namespace, name }) {
  const loaded = useLoad((signal) => request(`${tablePath(namespace, name)}/history`, { signal, query: { days: DAYS } }), []);
  return html`<${Loaded} of=${loaded}>${({ shapes, reason }) => html`
    <${Panel} wide>
      <${Stats} items=${[
        ["Statements", count(sum(shapes, "statements")), `in ${DAYS} days`],
        ["Shapes", count(shapes.length), "statements that differ only in their values"],
        ["Files read", percent(sum(shapes, "files-after"), sum(shapes, "files-before")), "after pruning"],
        ["Bytes read", percent(sum(shapes, "bytes-after"), sum(shapes, "bytes-before")), "after pruning"],
      ]} />
    <//>
    <${Panel} wide title="Statements by shape" note="The values that statements compare are not shown. Files and bytes are the averages of a statement.">
      <${Grid} label="Statements by shape" empty=${reason ? `There is no history: ${reason}.` : "There is no history."} rows=${shapes} columns=${[
        { title: "Conditions", cell: (shape) => (shape.fingerprint ? shape.conditions.join(", ") || html`<span class="muted">none</span>` : html`<span class="muted">other statements</span>`) },
        { title: "Joins", cell: (shape) => shape.joins.join(", ") },
        { title: "Groups by", cell: (shape) => shape.grouping.join(", ") },
        { title: "Aggregates", cell: (shape) => shape.aggregates.join(", ") },
        { title: "Engine", cell: (shape) => shape.engine },
        { title: "Statements", number: true, cell: (shape) => count(shape.sums.statements) },
        { title: "Files", number: true, cell: ({ sums }) => html`${count(Math.round(mean(sums, "files-after", "statements")))} of ${count(Math.round(mean(sums, "files-before", "statements")))} <${Meter} part=${sums["files-after"]} whole=${sums["files-before"]} label=${percent(sums["files-after"], sums["files-before"])} />` },
        { title: "Bytes", number: true, cell: ({ sums }) => (sums["sized-statements"] ? size(Math.round(mean(sums, "bytes-after", "sized-statements"))) : "–") },
        { title: "Last", cell: (shape) => html`<time title=${time(shape["last-ms"])}>${ago(shape["last-ms"])}</time>` },
      ]} />
    <//>`}<//>`;
}
