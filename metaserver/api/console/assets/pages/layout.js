// How a table's files lie over the values of a column: ranges, depth, sizes, partitions; before and after.

import { html, useMemo } from "../html.js";
import { pages, request, tablePath } from "../api.js";
import { change } from "../address.js";
import { ago, clip, count, decimal, percent, plural, size, value } from "../format.js";
import { AsTable, Choice, Failure, Loaded, Notice, Panel, Scroll, Stats, useLoad } from "../parts.js";
import { BarTable, HeatMap, PositionChart, RangeBars, sizeClass } from "../charts.js";
import { idOf, newestFirst } from "../snapshots.js";
import { columnsOf } from "./overview.js";

const SNAPSHOTS_MAX = 200;
const PARTITIONS_MAX = 5000;
const COLUMNS_MAX = 12;
const WITHOUT_BOUNDS = /^(list|map|struct|variant|geometry|geography|unknown)/;

const bounded = (metadata) => columnsOf(metadata).filter((column) => !WITHOUT_BOUNDS.test(column.shown));

// The column that the files are likely to be laid out by.
function favourite(metadata, columns) {
  const named = (metadata.properties?.["seamark.clustering.columns"] ?? "").split(",")[0].trim();
  const order = (metadata["sort-orders"] ?? []).find((one) => one["order-id"] === metadata["default-sort-order-id"]);
  const sorted = columns.find((column) => column.id === order?.fields[0]?.["source-id"]);
  return (columns.find((column) => column.full === named) ?? sorted ?? columns[0])?.full;
}

const describe = (snapshot) => `${snapshot.summary?.operation ?? "snapshot"}, ${ago(snapshot["timestamp-ms"])} · ${idOf(snapshot)}`;

export function Layout({ address, namespace, name, metadata }) {
  const columns = useMemo(() => bounded(metadata), [metadata]);
  const snapshots = useMemo(() => newestFirst(metadata), [metadata]);
  if (!snapshots.length) return html`<${Notice}>The table has no snapshot yet, so that it has no files.<//>`;
  if (!columns.length) return html`<${Notice}>No column of the table has bounds.<//>`;
  const { settings } = address;
  const column = settings.column ?? favourite(metadata, columns);
  const snapshot = settings.snapshot ?? String(metadata["current-snapshot-id"]);
  const compared = settings.before ?? "";
  const scale = settings.scale ?? "value";
  const rewrite = snapshots.find((one) => one.summary?.operation === "replace" && one["parent-snapshot-id"]);
  const options = snapshots.slice(0, SNAPSHOTS_MAX).map((one) => [idOf(one), describe(one)]);
  const set = (name) => (given) => change(address, { [name]: given });
  const layout = useLoad(
    (signal) => request(`${tablePath(namespace, name)}/layout/${encodeURIComponent(column)}`, { signal, query: { "snapshot-id": snapshot, "compare-to": compared, scale } }),
    [column, snapshot, compared, scale],
  );
  return html`
    <${Panel} wide>
      <div class="controls">
        <${Choice} label="Column" value=${column} onChange=${set("column")} options=${columns.map((one) => [one.full, `${one.full} (${one.shown})`])} />
        <${Choice} label="Snapshot" value=${snapshot} onChange=${set("snapshot")} options=${options} />
        <${Choice} label="Compare with" value=${compared} onChange=${set("before")} options=${[["", "no other snapshot"], ...options]} />
        <${Choice} label="Scale" value=${scale} onChange=${set("scale")} options=${[["value", "by value"], ["rank", "by rank of the bounds"]]} />
        ${rewrite && html`<button type="button" onClick=${() => change(address, { snapshot: idOf(rewrite), before: String(rewrite["parent-snapshot-id"]) })}>Before and after the last rewrite</button>`}
      </div>
    <//>
    <${Loaded} of=${layout}>${(made) => html`<${Pictures} layout=${made} column=${column} />`}<//>
    <${ColumnDepths} namespace=${namespace} name=${name} columns=${columns} snapshot=${snapshot} chosen=${column} address=${address} />
    <div class=${compared ? "columns" : ""}>
      ${compared && html`<${Partitions} namespace=${namespace} name=${name} metadata=${metadata} snapshot=${compared} title="Partitions: before" />`}
      <${Partitions} namespace=${namespace} name=${name} metadata=${metadata} snapshot=${snapshot} title=${compared ? "Partitions: after" : "Partitions"} />
    </div>`;
}

const DEPTH_NOTE = "Depth is the number of files whose range contains a value: what a lookup of the value opens when no index helps.";

function Pictures({ layout, column }) {
  const [now, before] = layout.snapshots;
  const shown = before ? [{ ...before, of: "before", title: "Before" }, { ...now, of: "now", title: "After" }] : [{ ...now, of: "now", title: "" }];
  const xs = useMemo(() => now.depth.map((point) => point.position), [layout]);
  const lines = useMemo(() => shown.map((one) => ({ name: one.title || "depth", colour: one.of, ys: one.depth.map((point) => point.files) })), [layout]);
  const marks = useMemo(() => layout.marks.map((mark) => ({ position: mark.position, text: typeof mark.value === "number" ? count(mark.value) : value(mark.value) })), [layout]);
  if (!marks.length) return html`<${Notice} kind="warn" title="No bounds">No data file has bounds of ${column}. Its writer may have turned off the statistics of this column.<//>`;
  const scale = layout.scale === "value" ? "by value" : "by rank";
  const fact = (of) => (before ? html`${of(before)} <span aria-hidden="true">→</span><span class="sr"> before, after: </span> ${of(now)}` : of(now));
  const sizes = [...new Set(shown.flatMap((one) => one.sizes.map((part) => part["size-in-bytes"])))].sort((a, b) => a - b);
  const filesIn = (one, from) => one.sizes.find((part) => part["size-in-bytes"] === from)?.files ?? 0;
  return html`
    <${Panel} wide>
      <${Stats} items=${[
        ["Data files", fact((one) => count(one.files))],
        ["Mean depth", fact((one) => (one["depth-mean"] === null ? "–" : decimal(one["depth-mean"]))), "files with a value, without an index"],
        ["Largest depth", fact((one) => count(one["depth-max"]))],
        ["Share of the files", fact((one) => percent(one["depth-mean"] ?? 0, one.files)), "mean depth / files"],
        ["Files without bounds", fact((one) => count(one.files - one["bounded-files"]))],
      ]} />
    <//>
    <div class=${before ? "columns" : ""}>
      ${shown.map((one) => html`<${Panel} wide title=${`Ranges of the files${one.title ? `: ${one.title.toLowerCase()}` : ""}`} note=${`Each bar is ${one.files === one.bars.length ? "a file" : `about ${plural(Math.round(one["bounded-files"] / Math.max(1, one.bars.length)), "file")}`}, from the lower to the upper bound of ${column}, ${scale}.${one.bars.some((bar) => bar.files > 1) ? " The solid part ends at the median upper bound, the faint part at the highest." : ""}`}>
        <${RangeBars} bars=${one.bars} marks=${marks} colour=${one.of} label=${`Ranges of ${plural(one.files, "file")} over ${column}, from ${marks[0].text} to ${marks.at(-1).text}. Mean depth ${decimal(one["depth-mean"] ?? 0)}, largest depth ${one["depth-max"]}.`} />
      <//>`)}
    </div>
    <div class="columns">
      <${Panel} title="Depth" note=${DEPTH_NOTE}>
        <${PositionChart} xs=${xs} lines=${lines} marks=${marks} unit="files" label=${`Depth over ${column}: ${shown.map((one) => `${one.title} mean ${decimal(one["depth-mean"] ?? 0)}, largest ${one["depth-max"]}`).join("; ")}`} />
        <${AsTable} label="Depth" rows=${now.depth.map((point, at) => ({ ...point, other: before?.depth[at].files }))} columns=${[
          { title: "Position", number: true, cell: (row) => percent(row.position, 1) },
          ...(before ? [{ title: "Before", number: true, cell: (row) => count(row.other) }] : []),
          { title: before ? "After" : "Files", number: true, cell: (row) => count(row.files) },
        ]} />
      <//>
      <${Panel} title="File sizes">
        <${BarTable} label="Files by size" heads=${["Size", ...(before ? ["Before", "After"] : ["Files"])]} rows=${sizes.map((from) => ({ name: sizeClass(from), values: shown.map((one) => filesIn(one, from)) }))} colours=${shown.map((one) => one.of)} />
      <//>
    </div>`;
}

// The mean depth by each column, one after the other: which one the files are laid out by.
function ColumnDepths({ namespace, name, columns, snapshot, chosen, address }) {
  const asked = columns.slice(0, COLUMNS_MAX);
  const depths = useLoad(async (signal, report) => {
    const found = [];
    for (const column of asked) {
      const layout = await request(`${tablePath(namespace, name)}/layout/${encodeURIComponent(column.full)}`, { signal, query: { "snapshot-id": snapshot, bars: 1, points: 1 } });
      found.push({ column: column.full, ...layout.snapshots[0] });
      report([...found]);
    }
    return found;
  }, [snapshot]);
  if (asked.length < 2) return null;
  const rows = depths.value ?? [];
  return html`<${Panel} wide title="Depth by column" note=${`The number of files that a lookup of a value opens, as a mean, without an index.${columns.length > COLUMNS_MAX ? ` The first ${COLUMNS_MAX} of ${columns.length} columns.` : ""}`}>
    <${Failure} error=${depths.error} />
    <${Scroll} label="Mean depth by column"><table class="bars">
      <thead><tr><th scope="col" class="name">Column</th><th scope="col">Mean depth of ${plural(rows[0]?.files ?? 0, "file")}</th></tr></thead>
      <tbody>${rows.map((row) => html`<tr>
        <th scope="row"><button type="button" class="link" aria-pressed=${row.column === chosen} onClick=${() => change(address, { column: row.column })}>${row.column}</button></th>
        <td>${row["bounded-files"] ? html`<span class="bar series-now" style=${{ width: `${(row["depth-mean"] / row.files) * 70}%` }}></span><span>${decimal(row["depth-mean"])} <span class="muted">${percent(row["depth-mean"], row.files)}</span></span>` : html`<span class="muted">no bounds</span>`}</td>
      </tr>`)}</tbody>
    </table><//>
  <//>`;
}

const filesOf = (partition) => partition["file-count"];

function Partitions({ namespace, name, metadata, snapshot, title }) {
  const spec = (metadata["partition-specs"] ?? []).find((one) => one["spec-id"] === metadata["default-spec-id"]) ?? { fields: [] };
  const loaded = useLoad(async (signal) => {
    const found = [];
    if (!spec.fields.length) return found;
    for await (const page of pages(`${tablePath(namespace, name)}/partitions`, { "snapshot-id": snapshot }, { next: "page-token", signal })) {
      found.push(...page.partitions);
      if (found.length >= PARTITIONS_MAX) break;
    }
    return found;
  }, [snapshot]);
  if (!spec.fields.length) return null;
  return html`<${Panel} wide title=${title} note="A cell for each partition; the stronger its colour, the more files.">
    <${Loaded} of=${loaded}>${(partitions) => html`<${PartitionMap} partitions=${partitions.filter((one) => one["spec-id"] === spec["spec-id"])} fields=${spec.fields.map((field) => field.name)} />`}<//>
  <//>`;
}

const COLUMNS_OF_MAP = 30;
const natural = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0);

function PartitionMap({ partitions, fields }) {
  const nameOf = (one) => fields.map((field) => `${field}=${value(one.partition[field])}`).join(", ");
  const { cells, columns, rows, sorted } = useMemo(() => mapOf(partitions, fields, nameOf), [partitions]);
  if (!partitions.length) return html`<p class="empty">No partition of the current partition spec has files.</p>`;
  const files = partitions.map(filesOf);
  const [least, most] = [Math.min(...files), Math.max(...files)];
  const label = `${plural(partitions.length, "partition")} with ${least === most ? "" : `${count(least)} to `}${plural(most, "file")} each`;
  return html`<p>${label}${partitions.length >= PARTITIONS_MAX ? "; the first of more" : ""}.</p>
    <${HeatMap} cells=${cells} columns=${columns} rows=${rows} label=${label} />
    <${AsTable} label="Partitions" rows=${sorted} columns=${[
      { title: "Partition", cell: nameOf },
      { title: "Files", number: true, cell: (one) => count(filesOf(one)) },
      { title: "Rows", number: true, cell: (one) => count(one["record-count"]) },
      { title: "Size", number: true, cell: (one) => size(one["file-size-in-bytes"]) },
    ]} />`;
}

// Two fields: a row for each value of the first. One field, or very many values: in order, line by line.
function mapOf(partitions, fields, nameOf) {
  const sorted = [...partitions].sort((a, b) => fields.reduce((found, field) => found || natural(a.partition[field], b.partition[field]), 0));
  const distinct = (field) => [...new Set(sorted.map((one) => value(one.partition[field])))];
  const cell = (one, x, y) => ({ x, y, value: filesOf(one), title: `${nameOf(one)}: ${plural(filesOf(one), "file")}, ${size(one["file-size-in-bytes"])}` });
  if (fields.length === 2) {
    const ys = distinct(fields[0]);
    const xs = [...new Set([...partitions].map((one) => one.partition[fields[1]]))].sort(natural).map(value);
    if (ys.length <= 200 && xs.length <= 200) {
      return { cells: sorted.map((one) => cell(one, xs.indexOf(value(one.partition[fields[1]])), ys.indexOf(value(one.partition[fields[0]])))), columns: xs, rows: ys, sorted };
    }
  }
  const rows = Array.from({ length: Math.ceil(sorted.length / COLUMNS_OF_MAP) }, (_, y) => clip(fields.map((field) => value(sorted[y * COLUMNS_OF_MAP].partition[field])).join(" "), 15));
  const columns = Array.from({ length: Math.min(COLUMNS_OF_MAP, sorted.length) }, () => "");
  return { cells: sorted.map((one, at) => cell(one, at % COLUMNS_OF_MAP, Math.floor(at / COLUMNS_OF_MAP))), columns, rows, sorted };
}
