// A table: its head, and the tab that the address names.

import { html, useMemo } from "../html.js";
import { icebergPath, request } from "../api.js";
import { hrefOf, namespaceOf, partOf, tableHref } from "../address.js";
import { path } from "../format.js";
import { Loaded, useLoad } from "../parts.js";

export function Table({ address, tabs }) {
  const [, part = "", name = "", tab = tabs[0].id] = address.parts;
  const namespace = useMemo(() => namespaceOf(part), [part]);
  const loaded = useLoad((signal) => request(icebergPath(namespace, name), { signal }), [part, name]);
  const chosen = tabs.find((one) => one.id === tab) ?? tabs[0];
  const parents = namespace.map((_, at) => namespace.slice(0, at + 1));
  return html`
    <nav class="crumbs" aria-label="Path">
      <a href=${hrefOf(["tables"])}>Tables</a>
      ${parents.map((one) => html`<a href=${hrefOf(["tables"], { namespace: partOf(one) })}>${one[one.length - 1]}</a>`)}
    </nav>
    <div class="title"><h1>${name}</h1></div>
    <nav class="tabs" aria-label="Views of the table">
      ${tabs.map((one) => html`<a href=${tableHref(namespace, name, one.id)} aria-current=${one === chosen ? "page" : undefined}>${one.title}</a>`)}
    </nav>
    <${Loaded} of=${loaded}>${({ metadata }) => html`<${chosen.view} key=${`${path(namespace, name)} ${chosen.id}`} address=${address} namespace=${namespace} name=${name} metadata=${metadata} reload=${loaded.reload} />`}<//>`;
}
