// Snapshots and their references as a graph: a row for each snapshot, a lane for each line of descent.

import { html, useMemo, useState } from "./html.js";
import { ago, compact, plural, time } from "./format.js";
import { Badge } from "./parts.js";

const ROW = 34;
const LANE = 18;
const FIRST = 100;

export const idOf = (snapshot) => String(snapshot["snapshot-id"]);

// Newest first; a snapshot is above its parent in any case.
export const newestFirst = (metadata) =>
  [...(metadata.snapshots ?? [])].sort((a, b) => (b["sequence-number"] ?? 0) - (a["sequence-number"] ?? 0) || b["timestamp-ms"] - a["timestamp-ms"]);

// Lane of each snapshot: 0 for main, the next ones for other references and for snapshots that none leads to.
export function lanesOf(snapshots, refs) {
  const byId = new Map(snapshots.map((snapshot) => [idOf(snapshot), snapshot]));
  const lane = new Map();
  let lanes = 0;
  const walk = (id) => {
    if (!byId.has(id) || lane.has(id)) return;
    const own = lanes++;
    for (let at = id; byId.has(at) && !lane.has(at); at = String(byId.get(at)["parent-snapshot-id"])) lane.set(at, own);
  };
  const heads = Object.entries(refs).sort(([a], [b]) => (a === "main" ? -1 : b === "main" ? 1 : a < b ? -1 : 1));
  for (const [, ref] of heads) walk(String(ref["snapshot-id"]));
  for (const snapshot of snapshots) walk(idOf(snapshot));
  return { lane, lanes: Math.max(1, lanes) };
}

export function SnapshotGraph({ metadata }) {
  const [most, setMost] = useState(FIRST);
  const snapshots = useMemo(() => newestFirst(metadata), [metadata]);
  const { lane, lanes } = useMemo(() => lanesOf(snapshots, metadata.refs ?? {}), [metadata]);
  if (!snapshots.length) return html`<p class="empty">The table has no snapshot yet.</p>`;
  const shown = snapshots.slice(0, most);
  const row = new Map(shown.map((snapshot, at) => [idOf(snapshot), at]));
  const names = new Map();
  for (const [name, ref] of Object.entries(metadata.refs ?? {})) {
    const id = String(ref["snapshot-id"]);
    names.set(id, [...(names.get(id) ?? []), { name, type: ref.type }]);
  }
  const x = (id) => 14 + Math.min(lane.get(id), 11) * LANE;
  const width = 20 + Math.min(lanes, 12) * LANE;
  const y = (at) => at * ROW + ROW / 2;
  return html`<div class="graph">
    <svg width=${width} height=${shown.length * ROW} aria-hidden="true">
      ${shown.map((snapshot, at) => {
        const id = idOf(snapshot);
        const parent = String(snapshot["parent-snapshot-id"]);
        if (!lane.has(parent)) return null;
        const to = row.has(parent) ? y(row.get(parent)) : shown.length * ROW;
        return html`<path class=${`lane-${lane.get(id) % 4}`} d=${x(id) === x(parent) ? `M${x(id)} ${y(at)}V${to}` : `M${x(id)} ${y(at)}V${to - ROW}C${x(id)} ${to - ROW / 2} ${x(parent)} ${to - ROW / 2} ${x(parent)} ${to}`} />`;
      })}
      ${shown.map((snapshot, at) => html`<circle class=${`lane-${lane.get(idOf(snapshot)) % 4}`} cx=${x(idOf(snapshot))} cy=${y(at)} r="5" />`)}
    </svg>
    <ol aria-label="Snapshots, newest first">
      ${shown.map((snapshot) => {
        const id = idOf(snapshot);
        const summary = snapshot.summary ?? {};
        const added = Number(summary["added-data-files"] ?? 0);
        const removed = Number(summary["deleted-data-files"] ?? 0);
        return html`<li>
          <strong>${summary.operation ?? "snapshot"}</strong>
          <span class="changes">${added > 0 && `+${compact(added)}`} ${removed > 0 && `−${compact(removed)}`} ${(added > 0 || removed > 0) && "files"}</span>
          <span class="muted">${summary["total-data-files"] !== undefined && `${plural(Number(summary["total-data-files"]), "file")}, ${compact(Number(summary["total-records"] ?? 0))} rows`}</span>
          <span class="refs">${(names.get(id) ?? []).map((ref) => html`<${Badge} kind=${ref.type === "tag" ? "tag" : "branch"}>${ref.name}<//>`)}</span>
          <time title=${time(snapshot["timestamp-ms"])}>${ago(snapshot["timestamp-ms"])}</time>
          <code>${id}</code>
        </li>`;
      })}
    </ol>
    ${snapshots.length > most && html`<button type="button" class="quiet" onClick=${() => setMost(most + 500)}>Show more of ${plural(snapshots.length, "snapshot")}</button>`}
  </div>`;
}
