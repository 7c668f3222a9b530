// What is wrong with a table, its policy, and what maintenance would do now.

import { html, useState } from "../html.js";
import { request, tablePath } from "../api.js";
import { count, decimal, path as nameOf, plural, size } from "../format.js";
import { Badge, Failure, Grid, Loaded, Panel, Stats, useLoad } from "../parts.js";

export function Health({ namespace, name }) {
  const path = tablePath(namespace, name);
  const health = useLoad((signal) => request(`${path}/health`, { signal }), []);
  const policy = useLoad((signal) => request(`${path}/policy`, { signal }), []);
  return html`
    <${Loaded} of=${health}>${(found) => html`
      <${Panel} wide>
        <${Stats} items=${[
          ["Data files", count(found.files), size(found["size-in-bytes"])],
          ["Small files", count(found["small-files"]), `the target is ${size(found["target-file-size-in-bytes"])}`],
          ["Files if compacted", count(found["files-if-compacted"])],
          ["Delete files", count(found["delete-files"]), `${count(found["deleted-records"])} deleted rows`],
          ["Manifests", count(found.manifests)],
          ["Expired snapshots", count(found["expired-snapshots"]), `of ${plural(found.snapshots, "snapshot")}`],
        ]} />
      <//>
      <${Panel} wide title="Problems">
        <${Grid} label="Problems" empty="Nothing is wrong with this table." rows=${found.problems} columns=${[
          { title: "Problem", cell: (one) => html`<strong>${one.problem}</strong>` },
          { title: "What", cell: (one) => one.detail },
          { title: "What it costs", cell: (one) => one.cost },
          { title: "Corrected by", cell: (one) => (one.service ? html`${one.service} <${Badge} kind=${one.enabled ? "good" : ""}>${one.enabled ? "on" : "off"}<//>` : html`<span class="muted">no service</span>`) },
        ]} />
      <//>`}<//>
    <div class="columns">
      <${Panel} title="Policy" note="The properties that table services follow.">
        <${Loaded} of=${policy}>${(found) => html`
          ${!found.runs && html`<p class="note">This server runs no table services (services_workers is 0).</p>`}
          <${Grid} label="Policy" rows=${found.properties} columns=${[
            { title: "Property", cell: (one) => html`<code>${one.name}</code>` },
            { title: "Value", cell: valueOf },
            { title: "Set by", cell: (one) => (one.source === "namespace" ? `namespace ${nameOf(one.namespace)}` : one.source) },
          ]} />`}<//>
      <//>
      <${Panel} title="Dry run" note="What maintenance would remove now. Nothing is removed. It needs the right to write the table.">
        <${DryRun} path=${`${path}/expire-snapshots`} title="Expire snapshots" show=${(report) => html`${plural(report.snapshots, "snapshot")}${report["snapshots-left"] ? ` (${count(report["snapshots-left"])} more in the next run)` : ""}, ${plural(report.refs.length, "reference")}, ${plural(report["content-files"], "data and delete file")}, ${plural(report.manifests, "manifest")}, ${plural(report["other-files"], "other file")}: ${size(report["size-in-bytes"])}`} />
        <${DryRun} path=${`${path}/remove-orphan-files`} title="Remove orphan files" show=${(report) => html`${plural(report.files, "orphan file")} of ${plural(report.listed, "file")} in the table's folders: ${size(report["size-in-bytes"])}`} />
      <//>
    </div>`;
}

function valueOf({ name, value }) {
  if (!value) return html`<span class="muted">not set</span>`;
  return name.endsWith("-ms") && Number(value) >= 3600000 ? html`${value} <span class="muted">(${decimal(value / 86400000)} days)</span>` : value;
}

function DryRun({ path, title, show }) {
  const [state, setState] = useState({});
  async function run() {
    setState({ running: true });
    try {
      setState({ report: await request(path, { method: "POST", body: '{"dry-run":true}' }) });
    } catch (error) {
      setState({ error });
    }
  }
  return html`<div class="dry-run">
    <button type="button" onClick=${run} disabled=${state.running}>${title}: dry run</button>
    <p role="status">${state.running ? "Running …" : state.report && html`Would remove ${show(state.report)}.`}</p>
    <${Failure} error=${state.error} />
  </div>`;
}
