// The indexes of a table: what they cover, what they lag behind, builds under way, and what they removed.

import { html, useEffect } from "../html.js";
import { request, tablePath } from "../api.js";
import { ago, count, duration, percent, plural, size, time } from "../format.js";
import { Badge, Failure, Grid, Loaded, Meter, Panel, Stats, useLoad } from "../parts.js";

const REFRESH_MS = 5000;
const HEALTH = { ok: "good", behind: "warn", paused: "", damaged: "bad", broken: "bad" };

export function Indexes({ namespace, name }) {
  const path = tablePath(namespace, name);
  const listed = useLoad((signal) => request(`${path}/indexes`, { signal }), []);
  const builds = useLoad((signal) => loadBuilds(path, signal), []);
  const running = builds.value?.some((build) => build.progress) || listed.value?.indexes.some((index) => index["lag-files"]);
  useEffect(() => {
    if (!running) return undefined;
    const timer = setInterval(() => {
      listed.reload();
      builds.reload();
    }, REFRESH_MS);
    return () => clearInterval(timer);
  }, [running]);
  return html`
    <${Loaded} of=${listed}>${({ indexes }) => html`
      ${indexes.length === 0 && html`<${Panel} wide title="No index"><p>The table has no index. <code>seamark index create ${[...namespace, name].join(".")} COLUMN --kind bloom</code> defines one; a builder then indexes the files.</p><//>`}
      ${indexes.map((index) => html`<${Index} index=${index} />`)}
    `}<//>
    <${Panel} wide title="Builds">
      <${Failure} error=${builds.error} />
      <${Grid} label="Builds" empty="No build has run." rows=${builds.value ?? []} columns=${[
        { title: "Index", cell: (build) => build.index },
        { title: "State", cell: (build) => html`<${Badge} kind=${build.state === "completed" ? "good" : build.state === "rolled_back" ? "bad" : "warn"}>${build.state.replace("_", " ")}<//>` },
        { title: "Progress", cell: (build) => build.progress ? html`<${Meter} part=${build.progress["files-done"]} whole=${build.progress["files-total"]} label=${`${build.progress["files-done"]} of ${build.progress["files-total"]} files`} /> ${count(build.progress["files-done"])} of ${plural(build.progress["files-total"], "file")}${build.progress["eta-ms"] && `, ends ${time(build.progress["eta-ms"])}`}` : (build.reason ?? "") },
        { title: "Began", cell: (build) => html`<time title=${time(build.began)}>${ago(build.began)}</time>` },
        { title: "Took", number: true, cell: (build) => (build.ended ? duration((build.ended - build.began) * 1000) : "") },
      ]} />
    <//>`;
}

// The newest builds by the timeline; of those under way also their progress.
async function loadBuilds(path, signal) {
  const { instants } = await request(`${path}/timeline`, { signal, query: { action: "indexing", order: "desc", limit: 20 } });
  return Promise.all(
    instants.map(async (instant) => {
      const build = { index: instant.summary?.index ?? "", state: instant.state, began: instant["requested-ms"], ended: instant["completed-ms"], reason: instant.summary?.reason };
      if (instant.state !== "inflight" && instant.state !== "requested") return build;
      const state = await request(`${path}/indexes/${encodeURIComponent(build.index)}/builds/${instant.id}`, { signal }).catch(() => null);
      return { ...build, progress: state?.progress };
    }),
  );
}

function Index({ index }) {
  if (index.health === "broken") {
    return html`<${Panel} wide title=${index.name} actions=${html`<${Badge} kind="bad">broken<//>`}><p>${index.problem}</p><//>`;
  }
  const used = index.used;
  const lag = index["lag-files"] ?? 0;
  return html`<${Panel} wide title=${index.name} note=${html`<code>${index.definition}</code>`} actions=${html`<${Badge} kind=${HEALTH[index.health] ?? ""}>${index.health}<//>`}>
    ${index.problem && html`<p class="error">${index.problem}</p>`}
    <${Stats} items=${[
      ["Coverage", html`${percent(index.files, index["files-total"])} <${Meter} part=${index.files ?? 0} whole=${index["files-total"]} label=${`${index.files} of ${index["files-total"]} files`} />`, `${count(index.files)} of ${plural(index["files-total"] ?? 0, "file")}`],
      ["Lag", count(lag), lag ? "files without an entry" : "up to date"],
      ["Size", size(index["size-in-bytes"]), index["size-in-bytes"] && index["rows"] ? `${((8 * index["size-in-bytes"]) / index.rows).toFixed(1)} bits a row` : null],
      ["Removed files", used ? percent(used["files-removed"], used["files-in"]) : "–", used ? `${count(used["files-removed"])} of ${count(used["files-in"])} in ${plural(used.plans, "plan")}` : "no plan has used it since the server started"],
      ["Last verified", index["audited-ms"] ? ago(index["audited-ms"]) : "–"],
      ...(index.quarantined ? [["Quarantined", plural(index.quarantined, "index file")]] : []),
    ]} />
  <//>`;
}
