// The plan of a predicate, or of a query: the files that each stage leaves, and what each term of the predicate does alone.

import { html, useEffect, useRef, useState } from "../html.js";
import { request, tablePath } from "../api.js";
import { change } from "../address.js";
import { count, decimal, duration, expression, percent, plural, size } from "../format.js";
import { Badge, Choice, Failure, Grid, Loaded, Panel, Stats, useLoad } from "../parts.js";
import { columnsOf } from "./overview.js";
import { Funnel, Incomplete, Layouts, NotUsed, STAGES } from "./plan.js";
import { isQuery, QueryPlans } from "./query.js";

const TERMS_MAX = 8;
const KEPT = 100;

const EXAMPLES = { string: "'…'", date: "DATE '2024-01-01'", timestamp: "TIMESTAMP '2024-01-01 00:00:00'", timestamptz: "TIMESTAMP '2024-01-01 00:00:00+00:00'", boolean: "true" };

function example(metadata) {
  const column = columnsOf(metadata).find((one) => one.depth === 0 && typeof one.type === "string");
  return column ? `For instance: ${column.name} = ${EXAMPLES[column.type] ?? "42"}` : "";
}

export function Explain({ address, namespace, name, metadata }) {
  const { where = "", ref = "" } = address.settings;
  const [text, setText] = useState(where);
  const box = useRef(null);
  useEffect(() => setText(where), [where]);
  const [round, setRound] = useState(0);
  const plan = useLoad(
    async (signal) => (where && !isQuery(where) ? explain(namespace, name, { where, ref, files: true, limit: KEPT }, signal) : null),
    [where, ref, round],
  );
  const submit = (event) => {
    event?.preventDefault();
    if (text.trim() === where) setRound(round + 1);
    else change(address, { where: text.trim() });
  };
  const onKey = (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && submit();
  const refs = Object.keys(metadata.refs ?? {});
  return html`
    <${Panel} wide>
      <form class="controls" onSubmit=${submit}>
        <label class="field grow"><span>Predicate or query in SQL</span>
          <textarea ref=${box} rows="3" spellcheck="false" placeholder=${example(metadata)} value=${text} onInput=${(event) => setText(event.target.value)} onKeyDown=${onKey}></textarea>
        </label>
        ${refs.length > 1 && html`<${Choice} label="Branch or tag" value=${ref} onChange=${(given) => change(address, { ref: given })} options=${[["", "current snapshot"], ...refs.map((one) => [one, one])]} />`}
        <button type="submit">Explain</button>
      </form>
      <p class="note below">What an engine would put after WHERE, or a whole query. Ctrl+Enter explains it. The plan cache is not used, so that the times are those of a complete plan.</p>
    <//>
    ${isQuery(where) && html`<${QueryPlans} query=${where} namespace=${namespace} round=${round} />`}
    ${plan.value === null || (plan.value === undefined && !plan.error && !where) ? null : html`<${Loaded} of=${plan}>${(made) => made && html`<${Plan} plan=${made} namespace=${namespace} name=${name} at=${ref} />`}<//>`}`;
}

const explain = (namespace, name, body, signal) =>
  request(`${tablePath(namespace, name)}/explain`, { method: "POST", signal, body: typeof body === "string" ? body : JSON.stringify({ ...body, ref: body.ref || null }) });

function Plan({ plan, namespace, name, at }) {
  const all = plan.stages[0]?.["files-in"] ?? plan.files;
  const bytes = plan.stages[0]?.["bytes-in"] ?? plan.bytes;
  const spent = plan.stages.reduce((sum, stage) => sum + stage.microseconds, 0);
  return html`
    <${Incomplete} plan=${plan} />
    <${NotUsed} plan=${plan} />
    <${Panel} wide>
      <${Stats} items=${[
        ["Files to read", count(plan.files), `of ${count(all)}: ${percent(plan.files, all)}`],
        ["Bytes to read", size(plan.bytes), `of ${size(bytes)}`],
        ["Rows in them", count(plan.records)],
        ["Delete files", count(plan["delete-files"])],
        ["Planning", duration(spent)],
      ]} />
    <//>
    <${Panel} wide title="Files after each stage">
      <${Funnel} stages=${plan.stages} all=${all} />
      ${plan.indexes.length > 0 && html`<${Grid} label="Indexes" rows=${plan.indexes} columns=${[
        { title: "Index", cell: (index) => index.name },
        { title: "Kind", cell: (index) => html`<${Badge}>${index.kind}<//>` },
        { title: "Files in", number: true, cell: (index) => count(index["files-in"]) },
        { title: "Removed", number: true, cell: (index) => `${count(index["files-removed"])} (${percent(index["files-removed"], index["files-in"])})` },
      ]} />`}
    <//>
    ${plan.layouts.length > 0 && html`<${Panel} wide title="Layouts that would help" note="An estimate from rows of some files and the target size. Table services lay new files out so; seamark run cluster --full rewrites all."><${Layouts} plan=${plan} namespace=${namespace} name=${name} /><//>`}
    <${Terms} plan=${plan} all=${all} namespace=${namespace} name=${name} at=${at} />
    <${Panel} wide title="Left to check" note=${`What an engine evaluates on the rows of the files, by number of files${plan["not-used"].length ? ", besides the parts that cannot prune" : ""}.`}>
      <${Grid} label="Residuals" empty="No file is left." rows=${plan.residuals.slice(0, 20)} columns=${[
        { title: "Predicate", cell: (one) => (one.residual === true ? (plan["not-used"].length ? "Only the parts that cannot prune" : "Nothing: all rows match") : html`<code>${expression(one.residual)}</code>`) },
        { title: "Files", number: true, cell: (one) => count(one.files) },
      ]} />
    <//>
    <${Panel} wide title="Files" note=${plan.files > KEPT ? `The first ${KEPT} of ${count(plan.files)}.` : null}>
      <${Grid} label="Files to read" empty="No file can contain a matching row." rows=${plan.kept ?? []} columns=${[
        { title: "File", cell: (file) => html`<code class="path" title=${file["file-path"]}>${file["file-path"].split("/").slice(-2).join("/")}</code>` },
        { title: "Partition", cell: (file) => Object.entries(file.partition).map(([field, given]) => `${field}=${given}`).join(", ") },
        { title: "Rows", number: true, cell: (file) => count(file["record-count"]) },
        { title: "Size", number: true, cell: (file) => size(file["file-size-in-bytes"]) },
        { title: "Delete files", number: true, cell: (file) => count(file["delete-files"]) },
      ]} />
    <//>`;
}

const conjuncts = (given) => (given?.type === "and" ? [...conjuncts(given.left), ...conjuncts(given.right)] : [given]);
const namesOf = (given) => {
  if (!given || typeof given !== "object") return [];
  const term = given.term;
  const own = typeof term === "string" ? [term] : term ? [term.term ?? term.reference] : [];
  return [...new Set([...own, ...["left", "right", "child"].flatMap((side) => namesOf(given[side]))])];
};

// The expression as JSON; whole numbers that were read as strings become numbers again.
function textOf(given, types) {
  const names = namesOf(given);
  const isLong = names.length === 1 && types.get(names[0]) === "long";
  return JSON.stringify(given).replace(isLong ? /"(-?\d{16,})"/g : /$^/g, "$1");
}

// Each term of the conjunction by itself: which stage removes files by it, and if none, why.
function Terms({ plan, all, namespace, name, at }) {
  const terms = conjuncts(plan.filter).filter((term) => typeof term === "object" && !["true", "false"].includes(term?.type));
  const types = new Map(plan.columns.map((column) => [column.name, column.type]));
  const done = useLoad(async (signal, report) => {
    const found = [];
    for (const term of terms.slice(0, TERMS_MAX)) {
      const ref = at ? `,"ref":${JSON.stringify(at)}` : "";
      const alone = await explain(namespace, name, `{"filter":${textOf(term, types)}${ref}}`, signal);
      const column = namesOf(term)[0];
      let layout = null;
      if (alone.files > 1 && alone.files > all / 10 && column) {
        layout = await request(`${tablePath(namespace, name)}/layout/${encodeURIComponent(column)}`, { signal, query: { ref: at, bars: 1, points: 1 } }).catch(() => null);
      }
      found.push({ term, alone, column, layout: layout?.snapshots[0] });
      report([...found]);
    }
    return found;
  }, [plan]);
  if (!terms.length) return null;
  return html`<${Panel} wide title="Terms by themselves" note="What each term of the predicate would leave without the others, and why it does not remove more.">
    <${Failure} error=${done.error} />
    <${Grid} label="Terms" rows=${done.value ?? []} empty="…" columns=${[
      { title: "Term", cell: ({ term }) => html`<code>${expression(term)}</code>` },
      { title: "Files left", number: true, cell: ({ alone }) => `${count(alone.files)} (${percent(alone.files, all)})` },
      { title: "Removed by", cell: ({ alone }) => removers(alone) },
      { title: "Why not more", cell: (row) => reason(row, all) },
    ]} />
    ${terms.length > TERMS_MAX && html`<p class="note">The first ${TERMS_MAX} of ${terms.length} terms.</p>`}
  <//>`;
}

const removers = (alone) => {
  const by = alone.stages.filter((stage) => stage["files-removed"]).map((stage) => `${STAGES[stage.name] ?? stage.name}: ${count(stage["files-removed"])}`);
  return by.length ? by.join(", ") : html`<span class="muted">no stage</span>`;
};

function reason({ term, alone, column, layout }, all) {
  if (alone.files <= Math.max(1, all / 10)) return html`<span class="muted">–</span>`;
  if (!layout) return "The statistics of files do not decide a predicate of this form.";
  if (!layout["bounded-files"]) return `No file has bounds of ${column}.`;
  const share = percent(layout["depth-mean"], layout.files);
  if (layout["depth-mean"] > layout.files / 10) {
    const index = ["eq", "in"].includes(term.type) ? ` Clustering by ${column} separates them; an index on ${column} finds the files of a value.` : ` Clustering by ${column} separates them.`;
    return `The ranges of ${column} overlap: a value lies in ${decimal(layout["depth-mean"])} of ${plural(layout.files, "file")} (${share}) in the mean.${index}`;
  }
  return `The predicate covers much of the range of ${column}: files are well separated (${decimal(layout["depth-mean"])} for a value).`;
}
