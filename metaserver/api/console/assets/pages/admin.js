// Tokens, grants and the audit log, as far as the user may see them.

import { html, useState } from "../html.js";
import { BASE, request } from "../api.js";
import { ago, path, time } from "../format.js";
import { Badge, Grid, Loaded, Panel, useLoad } from "../parts.js";

const LISTED = 1000;
const AUDIT_PAGES = 20;

const listing = (url, name) => async (signal) => (await request(url, { signal, query: { pageSize: LISTED } }))[name];

// Audit records are listed oldest first; the newest are on the last page.
async function loadAudit(signal) {
  let kept = [];
  let token = "";
  for (let page = 0; page < AUDIT_PAGES; page += 1) {
    const answer = await request("/api/v1/audit", { signal, query: { pageSize: LISTED, pageToken: token } });
    kept = [...kept, ...answer.records].slice(-LISTED);
    token = answer["next-page-token"];
    if (!token) return { records: kept.reverse(), more: false };
  }
  return { records: kept.reverse(), more: true };
}

export function Admin() {
  const tokens = useLoad(listing("/api/v1/tokens", "tokens"), []);
  const grants = useLoad(listing("/api/v1/grants", "grants"), []);
  const warehouses = useLoad(listing("/api/v1/warehouses", "warehouses"), []);
  const audit = useLoad(loadAudit, []);
  const [text, setText] = useState("");
  const matches = (record) => !text || [record.who, record.action, record.resource, record.outcome].some((one) => String(one).toLowerCase().includes(text.toLowerCase()));
  return html`
    <div class="title"><h1>Access</h1></div>
    <div class="columns">
      <${Panel} title="Tokens" note=${html`Secrets are never shown. <code>seamark token</code> creates and revokes tokens.`}>
        <${Loaded} of=${tokens}>${(rows) => html`<${Grid} label="Tokens" empty="There is no token." rows=${rows} columns=${[
          { title: "Principal", cell: (token) => token.name },
          { title: "State", cell: (token) => html`<${Badge} kind=${token.live ? "good" : ""}>${token.live ? "valid" : token["revoked-ms"] ? "revoked" : "expired"}<//>` },
          { title: "Created", cell: (token) => html`<time title=${time(token["created-ms"])}>${ago(token["created-ms"])}</time>` },
          { title: "Expires", cell: (token) => (token["expires-ms"] ? time(token["expires-ms"]) : "never") },
        ]} />`}<//>
      <//>
      <${Panel} title="Grants" note="Your own, and those on objects whose grants you may manage.">
        <${Loaded} of=${grants}>${(rows) => html`<${Grid} label="Grants" empty="There is no grant." rows=${rows} columns=${[
          { title: "Principal", cell: (grant) => grant.principal },
          { title: "Right", cell: (grant) => html`<${Badge} kind=${grant.deny ? "bad" : ""}>${grant.deny ? "deny " : ""}${grant.role || grant.privilege}<//>` },
          { title: "On", cell: (grant) => (grant.server ? "the server" : grant.namespace.length ? path([...grant.namespace, ...[grant.table || grant.view || grant.function].filter(Boolean)]) : "the whole catalog") },
        ]} />`}<//>
      <//>
    </div>
    ${!BASE.includes("/warehouses/") && html`<${Panel} wide title="Warehouses" note=${html`<code>seamark warehouse</code> creates, changes and drops warehouses.`}>
      <${Loaded} of=${warehouses}>${(rows) => html`<${Grid} label="Warehouses" empty="There is no further warehouse." rows=${rows} columns=${[
        { title: "Name", cell: (warehouse) => html`<a href=${`${BASE}${warehouse.path}/`}>${warehouse.name}</a>` },
        { title: "Location", cell: (warehouse) => html`<code class="path" title=${warehouse.location}>${warehouse.location}</code>` },
        { title: "Keys", cell: (warehouse) => (warehouse["has-credentials"] ? "its own" : "those of the server") },
        { title: "Created", cell: (warehouse) => html`<time title=${time(warehouse["created-ms"])}>${ago(warehouse["created-ms"])}</time>` },
      ]} />`}<//>
    <//>`}
    <${Panel} wide title="Audit log" note="Newest first; records appear after a moment." actions=${html`<label class="field"><span>Filter</span><input type="search" value=${text} onInput=${(event) => setText(event.target.value)} /></label>`}>
      <${Loaded} of=${audit}>${({ records, more }) => html`
        ${more && html`<p class="note">The log is longer than this page reads; these are not the newest records.</p>`}
        <${Grid} label="Audit records" empty="There is no record." rows=${records.filter(matches).slice(0, 300)} columns=${[
          { title: "When", cell: (record) => html`<time title=${time(record["at-ms"])}>${ago(record["at-ms"])}</time>` },
          { title: "Who", cell: (record) => record.who },
          { title: "Action", cell: (record) => record.action },
          { title: "Resource", cell: (record) => html`<code class="path" title=${record.resource}>${record.resource}</code>` },
          { title: "Outcome", cell: (record) => html`<${Badge} kind=${record.outcome === "allowed" ? "good" : "bad"}>${record.outcome}<//>` },
          { title: "From", cell: (record) => record.remote },
        ]} />`}<//>
    <//>`;
}
