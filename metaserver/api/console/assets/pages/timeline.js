// What happened to a table, or to all: newest first, and live by long polls.

import { html, useEffect, useState } from "../html.js";
import { request, tablePath } from "../api.js";
import { tableHref } from "../address.js";
import { ago, clip, count, path, time } from "../format.js";
import { Badge, Choice, Failure, Grid, Panel } from "../parts.js";

const FIRST = 100;
const SHOWN_MAX = 1000;
const WAIT_S = 20;
const PAUSE_MS = 3000;
const STATES = { completed: "good", "rolled_back": "bad", inflight: "warn", requested: "warn" };
const ACTIONS = ["", "commit", "create", "drop", "undrop", "purge", "rename", "indexing", "maintenance"];

// { instants, error, live, more }: the newest instants, and later ones as they happen.
export function useTimeline(url, action) {
  const [state, setState] = useState({ instants: [], live: false, loading: true });
  useEffect(() => {
    const controller = new AbortController();
    const { signal } = controller;
    const add = (instants) => setState((before) => {
      const known = new Map([...instants, ...before.instants].map((one) => [one.position, one]));
      return { ...before, loading: false, error: null, live: true, instants: [...known.values()].slice(0, SHOWN_MAX) };
    });
    setState({ instants: [], live: false, loading: true });
    (async () => {
      let since = null;
      while (!signal.aborted) {
        try {
          if (since === null) {
            // The position is taken before the newest instants are read, so that none is missed in between.
            const end = await request(url, { signal, query: { action, limit: 1, order: "desc" } });
            const first = await request(url, { signal, query: { action, limit: FIRST, order: "desc" } });
            since = end.instants[0]?.position ?? "";
            add(first.instants);
          }
          const later = await request(url, { signal, query: { action, since, wait: WAIT_S } });
          since = later["next-since"] ?? since;
          add([...later.instants].reverse());
        } catch (error) {
          if (signal.aborted || error.name === "AbortError") return;
          setState((before) => ({ ...before, loading: false, live: false, error }));
          if (error.status >= 400 && error.status < 500 && error.status !== 429) return;
          await new Promise((done) => setTimeout(done, PAUSE_MS));
        }
      }
    })();
    return () => controller.abort();
  }, [url, action]);
  return state;
}

const HIDDEN = new Set(["request-id", "folder", "definition-id"]);

// What the instant says about itself, in short.
function summaryOf(instant) {
  // A commit without a snapshot changes properties, schemas or references, which `updates` lists.
  const { operation, updates } = instant.summary ?? {};
  if (!operation && Array.isArray(updates)) return clip([...new Set(updates)].map((one) => String(one).replaceAll("-", " ")).join(", "), 200);
  const parts = Object.entries(instant.summary ?? {}).filter(([name, value]) => !HIDDEN.has(name) && ["string", "number", "boolean"].includes(typeof value));
  return parts.slice(0, 8).map(([name, value]) => `${name.replaceAll("-", " ")}: ${/^\d{1,15}$/.test(value) ? count(Number(value)) : clip(String(value), 60)}`).join(", ");
}

const subjectOf = (instant) =>
  instant.kind === "table" ? html`<a href=${tableHref(instant.namespace, instant.name)}>${path(instant.namespace, instant.name)}</a>` : path(instant.namespace, instant.name || undefined);

function Instants({ url, withTable, label }) {
  const [action, setAction] = useState("");
  const { instants, error, live, loading } = useTimeline(url, action);
  const columns = [
    { title: "When", cell: (instant) => html`<time title=${time(instant["requested-ms"])}>${ago(instant["requested-ms"])}</time>` },
    { title: "Action", cell: (instant) => html`<strong>${instant.action}</strong>` },
    { title: "State", cell: (instant) => html`<${Badge} kind=${STATES[instant.state] ?? ""}>${instant.state.replace("_", " ")}<//>` },
    ...(withTable ? [{ title: "On", cell: subjectOf }] : []),
    { title: "By", cell: (instant) => instant.who },
    { title: "Summary", cell: (instant) => html`<span class="muted" title=${instant.summary?.["request-id"] && `Request ${instant.summary["request-id"]}`}>${summaryOf(instant)}</span>` },
  ];
  return html`<${Panel} wide title=${label} actions=${html`<${Badge} kind=${live ? "good live" : ""}>${live ? "live" : loading ? "loading" : "not live"}<//><${Choice} label="Action" value=${action} onChange=${setAction} options=${ACTIONS.map((one) => [one, one || "all"])} />`}>
    <${Failure} error=${error} />
    ${!loading && !error && html`<div class="tall"><${Grid} label="Instants, newest first" empty="Nothing has happened yet. New instants appear here." rows=${instants} columns=${columns} /></div>`}
    ${instants.length >= SHOWN_MAX && html`<p class="note">The newest ${count(SHOWN_MAX)} instants.</p>`}
  <//>`;
}

export const TableTimeline = ({ namespace, name }) => html`<${Instants} url=${`${tablePath(namespace, name)}/timeline`} label="Timeline" />`;

export const CatalogTimeline = () => html`<div class="title"><h1>Timeline</h1></div><${Instants} url="/api/v1/timeline" withTable label="All tables" />`;
