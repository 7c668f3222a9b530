// A table at a glance: totals, schema, partitions, snapshots, properties.

import { html } from "../html.js";
import { ago, count, size, time, type } from "../format.js";
import { Copy, Grid, Panel, Stats } from "../parts.js";
import { SnapshotGraph, idOf } from "../snapshots.js";

function* fieldsOf(schema, prefix = "", depth = 0) {
  for (const field of schema.fields) {
    const isStruct = field.type?.type === "struct";
    yield { ...field, name: field.name, full: prefix + field.name, depth, shown: isStruct ? "struct" : type(field.type) };
    if (isStruct) yield* fieldsOf(field.type, `${prefix}${field.name}.`, depth + 1);
  }
}

export const columnsOf = (metadata) => {
  const schema = (metadata.schemas ?? []).find((one) => one["schema-id"] === metadata["current-schema-id"]) ?? { fields: [] };
  return [...fieldsOf(schema)];
};

export const currentOf = (metadata) =>
  (metadata.snapshots ?? []).find((snapshot) => idOf(snapshot) === String(metadata["current-snapshot-id"]));

const termsOf = (fields, names) => fields.map((field) => {
  const source = names.get(field["source-id"]) ?? `field ${field["source-id"]}`;
  return field.transform === "identity" ? source : `${field.transform}(${source})`;
});

export function Overview({ metadata }) {
  const columns = columnsOf(metadata);
  const names = new Map(columns.map((column) => [column.id, column.full]));
  const current = currentOf(metadata);
  const totals = current?.summary ?? {};
  const spec = (metadata["partition-specs"] ?? []).find((one) => one["spec-id"] === metadata["default-spec-id"]) ?? { fields: [] };
  const order = (metadata["sort-orders"] ?? []).find((one) => one["order-id"] === metadata["default-sort-order-id"]) ?? { fields: [] };
  const total = (name) => (totals[name] === undefined ? "–" : count(Number(totals[name])));
  const identifiers = new Set((metadata.schemas ?? []).find((one) => one["schema-id"] === metadata["current-schema-id"])?.["identifier-field-ids"] ?? []);
  const properties = Object.entries(metadata.properties ?? {}).sort();
  return html`
    <${Panel} wide>
      <${Stats} items=${[
        ["Rows", total("total-records")],
        ["Data files", total("total-data-files")],
        ["Size", totals["total-files-size"] === undefined ? "–" : size(Number(totals["total-files-size"]))],
        ["Delete files", total("total-delete-files")],
        ["Snapshots", count((metadata.snapshots ?? []).length)],
        ["Last change", ago(metadata["last-updated-ms"]), time(metadata["last-updated-ms"])],
      ]} />
    <//>
    <div class="columns">
      <${Panel} title="Schema">
        <${Grid} label="Columns" rows=${columns} columns=${[
          { title: "Column", cell: (column) => html`<span class=${`depth-${Math.min(6, column.depth)}`}>${column.name}</span>${identifiers.has(column.id) && html` <small class="muted">identifier</small>`}` },
          { title: "Type", cell: (column) => html`<code>${column.shown}</code>` },
          { title: "Required", cell: (column) => (column.required ? "yes" : "") },
          { title: "Id", number: true, cell: (column) => column.id },
        ]} />
      <//>
      <${Panel} title="About">
        <dl class="facts">
          <dt>Partitioned by</dt><dd>${termsOf(spec.fields, names).join(", ") || "nothing"}</dd>
          <dt>Sorted by</dt><dd>${termsOf(order.fields, names).join(", ") || "nothing"}</dd>
          <dt>Format version</dt><dd>${metadata["format-version"]}</dd>
          <dt>Location</dt><dd><code>${metadata.location}</code> <${Copy} text=${metadata.location} label="the location" /></dd>
          <dt>UUID</dt><dd><code>${metadata["table-uuid"]}</code></dd>
          ${properties.map(([name, value]) => html`<dt class="property">${name}</dt><dd><code>${value}</code></dd>`)}
        </dl>
      <//>
    </div>
    <${Panel} title="Snapshots and branches" wide><${SnapshotGraph} metadata=${metadata} /><//>`;
}
