// The state of the server, and what its table services did.

import { html, useEffect } from "../html.js";
import { BASE, parse, request } from "../api.js";
import { tableHref } from "../address.js";
import { ago, clip, count, path, percent, plural, size, time } from "../format.js";
import { Badge, Failure, Grid, Loaded, Meter, Panel, useLoad } from "../parts.js";
import { useTimeline } from "./timeline.js";

const REFRESH_MS = 10000;
const JOBS_REFRESH_MS = 3000;

// A server that is not ready answers 503 with the same body.
async function loadReadiness(signal) {
  const answer = await fetch(`${BASE}/readyz`, { signal, credentials: "omit" });
  return parse(await answer.text());
}

const loadJobs = (signal) => request("/api/v1/jobs", { signal });

function Jobs({ jobs }) {
  return html`<${Grid} label="Running jobs" empty="No job is running." rows=${jobs} columns=${[
    { title: "Service", cell: (job) => job.service },
    { title: "Table", cell: (job) => html`<a href=${tableHref(job.namespace, job.table)}>${path(job.namespace, job.table)}</a>` },
    { title: "Since", cell: (job) => html`<time title=${time(job["started-ms"])}>${ago(job["started-ms"])}</time>` },
    { title: "On", cell: (job) => job.launcher },
    { title: "Progress", cell: (job) => html`<${Progress} of=${job.progress} />` },
  ]} />`;
}

function Waiting({ jobs, complete }) {
  const note = complete ? "" : `The first ${count(jobs.length)}; more jobs wait.`;
  return html`
    ${note && html`<p class="note">${note}</p>`}
    <${Grid} label="Waiting jobs" empty="No job waits." rows=${jobs} columns=${[
      { title: "Service", cell: (job) => job.service },
      { title: "Table", cell: (job) => html`<a href=${tableHref(job.namespace, job.table)}>${path(job.namespace, job.table)}</a>` },
      { title: "Proposed", cell: (job) => html`<time title=${time(job["asked-ms"])}>${ago(job["asked-ms"])}</time>` },
      { title: "Starts", cell: (job) => (job["due-ms"] <= Date.now() ? "in its turn" : html`not before <time>${time(job["due-ms"])}</time>`) },
      { title: "Failed runs", number: true, cell: (job) => (job.failures ? html`<${Badge} kind="bad">${count(job.failures)}<//>` : "") },
    ]} />`;
}

function Progress({ of }) {
  const [done, total] = [of["files-done"], of["files-total"]];
  if (!total) return html`<span class="muted">reads no data files, or has just begun</span>`;
  return html`<${Meter} part=${done} whole=${total} label=${percent(done, total)} /> ${count(done)} of ${plural(total, "file")}, ${size(of["bytes-done"])} of ${size(of["bytes-total"])}`;
}

export function Services() {
  const ready = useLoad(loadReadiness, []);
  const jobs = useLoad(loadJobs, []);
  useEffect(() => {
    const timers = [setInterval(ready.reload, REFRESH_MS), setInterval(jobs.reload, JOBS_REFRESH_MS)];
    return () => timers.forEach(clearInterval);
  }, []);
  const runs = useTimeline("/api/v1/timeline", "maintenance");
  const totalsOf = (run) => Object.entries(run.summary?.totals ?? {}).map(([name, value]) => `${name.replaceAll("_", " ")}: ${typeof value === "number" ? count(value) : value}`).join(", ");
  return html`
    <div class="title"><h1>Services</h1></div>
    <${Panel} wide title="Server">
      <${Loaded} of=${ready}>${(state) => html`<ul class="checks">
        <li><${Badge} kind=${state.status === "ready" ? "good" : "bad"}>${state.status}<//></li>
        ${Object.entries(state.checks ?? {}).map(([name, value]) => html`<li>${name} <${Badge} kind=${value === "ok" ? "good" : "bad"}>${value}<//></li>`)}
      </ul>`}<//>
    <//>
    <${Loaded} of=${jobs}>${(found) => found.services?.problem && html`<${Panel} wide title="Table services">
      <p><${Badge} kind="bad">off<//> ${found.services.problem}</p>
    <//>`}<//>
    <${Panel} wide title="Running jobs" note="What table services do now, on all replicas; the progress is some seconds old.">
      <${Loaded} of=${jobs}>${(found) => html`<${Jobs} jobs=${found.jobs} />`}<//>
    <//>
    <${Panel} wide title="Waiting jobs" note="What starts next. A job waits for a free worker, for the pause after the last run of its service, or for the window of its policy.">
      <${Loaded} of=${jobs}>${(found) => html`<${Waiting} jobs=${found.waiting} complete=${found.complete} />`}<//>
    <//>
    <${Panel} wide title="Runs of table services" note="Jobs that did something or failed, newest first. A job that found nothing to do is listed only after a failed run." actions=${html`<${Badge} kind=${runs.live ? "good live" : ""}>${runs.live ? "live" : "not live"}<//>`}>
      <${Failure} error=${runs.error} />
      ${!runs.error && html`<${Grid} label="Runs" empty="No job has done anything yet." rows=${runs.instants.slice(0, 300)} columns=${[
        { title: "When", cell: (run) => html`<time title=${time(run["requested-ms"])}>${ago(run["requested-ms"])}</time>` },
        { title: "Service", cell: (run) => run.summary?.service ?? "" },
        { title: "Table", cell: (run) => html`<a href=${tableHref(run.namespace, run.name)}>${path(run.namespace, run.name)}</a>` },
        { title: "Result", cell: (run) => html`<${Badge} kind=${run.summary?.error ? "bad" : "good"}>${run.summary?.error ? "failed" : "done"}<//> ${run.summary?.error ? clip(run.summary.error, 300) : totalsOf(run)}` },
        { title: "Seconds", number: true, cell: (run) => run.summary?.seconds ?? "" },
      ]} />`}
    <//>`;
}
