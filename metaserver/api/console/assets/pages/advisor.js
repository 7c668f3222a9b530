// Proposed changes of a table, with a button that applies them, and what applied changes have brought.

import { html, useState } from "../html.js";
import { request, tablePath } from "../api.js";
import { ago, count, decimal, plural, size, time } from "../format.js";
import { AsTable, Badge, Failure, Grid, Loaded, Panel, useLoad } from "../parts.js";

const DAYS = 30;
const STATES = { kept: "good", measuring: "warn", applying: "warn", failed: "bad" };

export function Advisor({ namespace, name }) {
  const path = tablePath(namespace, name);
  const advice = useLoad((signal) => request(`${path}/advice`, { signal, query: { days: DAYS } }), []);
  return html`<${Loaded} of=${advice}>${({ statements, before, proposals, applied, reason }) => html`
    <${Panel} wide title="Proposals" note=${`From ${plural(statements, "statement")} in ${DAYS} days. Applying a proposal needs the right to write the table.`}>
      ${before && html`<p>An average statement with a condition reads ${plural(Math.round(before.files), "file")}, ${size(before.bytes)}.</p>`}
      <${Grid} label="Proposals" empty=${`There is no proposal: ${reason}.`} rows=${proposals} columns=${[
        { title: "Proposal", cell: (one) => html`<strong>${one.title}</strong>` },
        { title: "Files", number: true, cell: (one) => count(Math.round(one.predicted.files)) },
        { title: "Bytes", number: true, cell: (one) => size(one.predicted.bytes) },
        { title: "Cost", number: true, cell: (one) => size(one["cost-bytes"]) },
        { title: "Pays after", number: true, cell: (one) => (one["pays-after-days"] === null ? "never" : `${decimal(one["pays-after-days"])} days`) },
        { title: "", cell: (one) => html`<${Apply} path=${path} proposal=${one} reload=${advice.reload} />` },
      ]} />
    <//>
    ${applied.map((one) => html`<${Applied} applied=${one} now=${before} />`)}`}<//>`;
}

function Apply({ path, proposal, reload }) {
  const [state, setState] = useState({});
  async function apply() {
    setState({ running: true });
    try {
      await request(`${path}/advice/apply`, { method: "POST", body: JSON.stringify({ id: proposal.id, days: DAYS }) });
      setState({ done: true });
      reload();
    } catch (error) {
      setState({ error });
    }
  }
  return html`
    <button type="button" onClick=${apply} disabled=${state.running || state.done} aria-label=${`Apply: ${proposal.title}`}>${state.done ? "Applied" : "Apply"}</button>
    <${Failure} error=${state.error} />`;
}

function Applied({ applied, now }) {
  const { proposal, trial } = applied;
  const bars = [
    ["before", proposal.before],
    ["predicted", proposal.predicted],
    ["measured", applied.measured ?? now],
    ["statements since then", applied.recorded],
  ].filter(([, reads]) => reads);
  return html`<${Panel} wide title=${proposal.title} note=${html`Applied <time title=${time(applied["applied-ms"])}>${ago(applied["applied-ms"])}</time>`} actions=${trial && html`<${Badge} kind=${STATES[trial.state] ?? ""}>${trial.state}<//>`}>
    ${trial && html`<p>Applied automatically: ${trial.reason}.</p>`}
    <${Picture} bars=${bars} label=${`Bytes that an average statement reads: ${bars.map(([title, reads]) => `${title} ${size(reads.bytes)}`).join(", ")}`} />
    <${AsTable} label="Reads of an average statement" rows=${bars} columns=${[
      { title: "An average statement", cell: ([title]) => title },
      { title: "Files", number: true, cell: ([, reads]) => decimal(reads.files) },
      { title: "Bytes", number: true, cell: ([, reads]) => size(reads.bytes) },
      { title: "Time", number: true, cell: ([, reads]) => `${reads.seconds.toFixed(2)} s` },
    ]} />
  <//>`;
}

const ROW = 30;
const WIDTH = 600;

// Bars of the bytes, before and after the change, in one scale.
function Picture({ bars, label }) {
  const most = Math.max(1, ...bars.map(([, reads]) => reads.bytes));
  return html`<svg class="compared" role="img" aria-label=${label} viewBox=${`0 0 ${WIDTH} ${bars.length * ROW}`}>
    ${bars.map(([title, reads], at) => html`
      <g transform=${`translate(0 ${at * ROW})`} class=${title === "before" ? "series-before" : "series-now"}>
        <text x="0" y="20">${title}</text>
        <rect class=${title === "predicted" ? "faint" : "solid"} x="150" y="5" height="20" width=${(300 * reads.bytes) / most}></rect>
        <text x=${158 + (300 * reads.bytes) / most} y="20">${size(reads.bytes)}</text>
      </g>`)}
  </svg>`;
}
