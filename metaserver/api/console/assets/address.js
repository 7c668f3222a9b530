// The address of a page: #/page/part/…?setting=value.

export function parseAddress(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").filter(Boolean).map(decodePart);
  return { page: parts[0] ?? "", parts, settings: Object.fromEntries(new URLSearchParams(query)) };
}

function decodePart(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

export function hrefOf(parts, settings = {}) {
  const given = Object.entries(settings).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const query = new URLSearchParams(given).toString();
  return `#/${parts.map(encodeURIComponent).join("/")}${query ? `?${query}` : ""}`;
}

// Changes settings of the address of a page. Does nothing if another page was opened before: a link sets location.hash
// at once, but the timer of a search may still run before the event that closes its page.
export function change(address, settings) {
  if (hrefOf(parseAddress(location.hash).parts) !== hrefOf(address.parts)) return;
  location.hash = hrefOf(address.parts, { ...address.settings, ...settings });
}

const SEPARATOR = "\u001f";
export const namespaceOf = (part) => part.split(SEPARATOR);
export const partOf = (namespace) => namespace.join(SEPARATOR);
export const tableHref = (namespace, name, tab, settings) =>
  hrefOf(["table", partOf(namespace), name, ...(tab ? [tab] : [])], settings);
