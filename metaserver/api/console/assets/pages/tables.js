// Namespaces and tables, with search.

import { html, useEffect, useState } from "../html.js";
import { levels, pages } from "../api.js";
import { change, hrefOf, namespaceOf, partOf, tableHref } from "../address.js";
import { count, path, plural } from "../format.js";
import { Failure, LongList, Panel, useFiltered, useLoad } from "../parts.js";

const PAGE = 1000;
const TABLES_MAX = 50000;
const NAMESPACES_MAX = 5000;

// All namespaces, parents before children.
async function loadNamespaces(signal) {
  const found = [];
  const todo = [[]];
  while (todo.length && found.length < NAMESPACES_MAX) {
    const parent = todo.shift();
    for await (const page of pages("/v1/namespaces", { pageSize: PAGE, parent: parent.join("\u001f") }, { signal })) {
      found.push(...page.namespaces);
      todo.push(...page.namespaces);
    }
    if (!parent.length) todo.splice(200); // many namespaces are seldom nested; their children show when they are opened
  }
  return found.sort((a, b) => (path(a) < path(b) ? -1 : 1));
}

async function loadTables(namespaces, signal, report) {
  let tables = [];
  let refused = null;
  for (const namespace of namespaces) {
    try {
      for await (const page of pages(`/v1/namespaces/${levels(namespace)}/tables`, { pageSize: PAGE }, { signal })) {
        tables = tables.concat(page.identifiers);
        report({ tables, refused });
        if (tables.length >= TABLES_MAX) return { tables, refused, more: true };
      }
    } catch (error) {
      if (error.status !== 403 && error.status !== 404) throw error;
      refused = error; // a parent may be visible for the sake of a child
    }
  }
  return { tables, refused };
}

export function Tables({ address }) {
  const chosen = address.settings.namespace ? namespaceOf(address.settings.namespace) : null;
  const [text, setText] = useState(address.settings.search ?? "");
  const namespaces = useLoad(loadNamespaces, []);
  const all = namespaces.value;
  const tables = useLoad(
    async (signal, report) => (chosen || all ? loadTables(chosen ? [chosen] : all, signal, report) : undefined),
    [address.settings.namespace, all],
  );
  const shown = useFiltered(tables.value?.tables ?? [], text, (table) => path(table.namespace, table.name));
  useEffect(() => {
    const timer = setTimeout(() => text !== (address.settings.search ?? "") && change(address, { search: text }), 400);
    return () => clearTimeout(timer);
  }, [text]);
  const total = tables.value?.tables.length ?? 0;
  const where = chosen ? path(chosen) : "all namespaces";
  const state = tables.loading ? `${plural(total, "table")} so far …` : `${count(shown.length)} of ${plural(total, "table")} in ${where}`;
  return html`
    <div class="title"><h1>Tables</h1></div>
    <div class="columns side">
      <${Panel} title="Namespaces">
        <${Failure} error=${namespaces.error} />
        <nav aria-label="Namespaces" class="tree">
          <a href=${hrefOf(["tables"])} aria-current=${chosen ? undefined : "true"}>All namespaces</a>
          ${(all ?? []).slice(0, 1000).map((namespace) => html`<a class="depth-${Math.min(6, namespace.length)}" href=${hrefOf(["tables"], { namespace: partOf(namespace) })} aria-current=${chosen && path(chosen) === path(namespace) ? "true" : undefined} title=${path(namespace)}>${namespace[namespace.length - 1]}</a>`)}
        </nav>
      <//>
      <${Panel} title=${chosen ? path(chosen) : "All namespaces"}>
        <div class="search">
          <label class="field"><span>Search</span><input type="search" placeholder="Words of the name" value=${text} onInput=${(event) => setText(event.target.value)} /></label>
          <p role="status">${state}</p>
        </div>
        <${Failure} error=${tables.error ?? (chosen ? tables.value?.refused : null)} />
        ${tables.value?.more && html`<p class="note">Only the first ${count(TABLES_MAX)} tables are shown; choose a namespace.</p>`}
        ${!tables.loading && !total && !tables.error && html`<p class="empty">There is no table yet. <code>seamark connect pyiceberg</code> prints how a client connects; so do <code>spark</code>, <code>trino</code> and <code>duckdb</code>.</p>`}
        ${shown.length > 0 && html`<${LongList} label=${`Tables in ${where}`} items=${shown} row=${(table) => html`<a href=${tableHref(table.namespace, table.name)}><span class="muted">${path(table.namespace)}.</span>${table.name}</a>`} />`}
      <//>
    </div>`;
}
