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

// Changes settings of the present address.
export function change(address, settings) {
  location.hash = hrefOf(address.parts, { ...address.settings, ...settings });
}

const SEPARATOR = "\u001f";
export const namespaceOf = (part) => part.split(SEPARATOR);
export const partOf = (namespace) => namespace.join(SEPARATOR);
export const tableHref = (namespace, name, tab, settings) =>
  hrefOf(["table", partOf(namespace), name, ...(tab ? [tab] : [])], settings);
