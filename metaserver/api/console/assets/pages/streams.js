// The stream tables: how fast rows arrive, what waits for a flush, and where the shards are.

import { html, useEffect, useRef } from "../html.js";
import { request } from "../api.js";
import { tableHref } from "../address.js";
import { ago, clip, count, decimal, path, size, time } from "../format.js";
import { Badge, Grid, Loaded, Panel, useLoad } from "../parts.js";

const REFRESH_MS = 2000;

async function loadStreams(signal) {
  const streams = [];
  let token = "";
  do {
    const page = await request(`/api/v1/streams?pageSize=1000${token && `&pageToken=${encodeURIComponent(token)}`}`, { signal });
    streams.push(...page.streams);
    token = page["next-page-token"];
  } while (token);
  return { streams, loadedMs: Date.now() };
}

const sumOf = (stream, name) => stream.shards.reduce((sum, shard) => sum + shard[name], 0);
const keyOf = (stream) => path(stream.namespace, stream.table);

// Rows a second since the last load; a new table has no rate yet.
function rateOf(stream, before, loadedMs) {
  const earlier = before?.durable[keyOf(stream)];
  const seconds = (loadedMs - (before?.loadedMs ?? loadedMs)) / 1000;
  return earlier === undefined || seconds <= 0 ? null : Math.max(0, sumOf(stream, "durable") - earlier) / seconds;
}

function useBefore(value) {
  const loads = useRef([]);
  if (value && value.loadedMs !== loads.current.at(-1)?.loadedMs) {
    const durable = Object.fromEntries(value.streams.map((stream) => [keyOf(stream), sumOf(stream, "durable")]));
    loads.current = [...loads.current.slice(-1), { loadedMs: value.loadedMs, durable }];
  }
  return loads.current.length > 1 ? loads.current[0] : undefined;
}

function StreamTables({ found }) {
  const before = useBefore(found);
  return html`<${Grid} label="Stream tables" empty="No stream table that you may see has rows in the log." rows=${found.streams} columns=${[
    { title: "Table", cell: (stream) => html`<a href=${tableHref(stream.namespace, stream.table)}>${keyOf(stream)}</a>` },
    { title: "State", cell: (stream) => stream["flush-error"] ? html`<${Badge} kind="bad">flush fails<//> ${clip(stream["flush-error"], 100)}` : stream.paused === null ? html`<${Badge} kind="good">takes rows<//>` : html`<${Badge} kind="warn">paused<//> ${clip(stream.paused, 100)}` },
    { title: "Rows/s", number: true, cell: (stream) => { const rate = rateOf(stream, before, found.loadedMs); return rate === null ? "–" : decimal(rate); } },
    { title: "Waiting rows", number: true, cell: (stream) => count(stream["waiting-rows"]) },
    { title: "Oldest", cell: (stream) => stream["oldest-ms"] === null ? "" : html`<time title=${time(stream["oldest-ms"])}>${ago(stream["oldest-ms"])}</time>` },
    { title: "Memory", number: true, cell: (stream) => size(stream["waiting-bytes"]) },
    { title: "Fresh files", number: true, cell: (stream) => count(stream["fresh-files"]) },
    { title: "Flushed", number: true, cell: (stream) => count(sumOf(stream, "flushed")) },
    { title: "Durable", number: true, cell: (stream) => count(sumOf(stream, "durable")) },
    { title: "Shards", number: true, cell: (stream) => count(stream.shards.length) },
  ]} />`;
}

export function Streams() {
  const streams = useLoad(loadStreams, []);
  useEffect(() => {
    const timer = setInterval(streams.reload, REFRESH_MS);
    return () => clearInterval(timer);
  }, []);
  return html`
    <div class="title"><h1>Streams</h1></div>
    <${Panel} wide title="Stream tables" note="Rows are durable in the log before a flush adds them to the table's files. Flushed and durable are offsets, summed over the shards.">
      <${Loaded} of=${streams}>${(found) => html`<${StreamTables} found=${found} />`}<//>
    <//>`;
}
