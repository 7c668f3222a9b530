// Requests to the server's API with the user's token, and its JSON without loss.

// The path of the server, or of a further warehouse: /warehouses/NAME. Empty at the root.
export const BASE = new URL(".", document.baseURI).pathname.replace(/\/$/, "");
const TOKEN = "seamark-token";
const listeners = new Set();

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const token = () => sessionStorage.getItem(TOKEN);

export function signIn(given) {
  sessionStorage.setItem(TOKEN, given);
}

export function signOut() {
  sessionStorage.removeItem(TOKEN);
  for (const listener of listeners) listener();
}

// Calls `listener` when the server refuses the login. Returns the function that ends this.
export function onSignedOut(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

const STRING_OR_NUMBER = /"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?/g;

// JSON in which whole numbers of 16 digits and more, such as snapshot ids, become strings: doubles would round them.
export function parse(text) {
  return JSON.parse(text.replace(STRING_OR_NUMBER, (part) => (/^-?\d{16,}$/.test(part) ? `"${part}"` : part)));
}

// The parsed answer of a request. `query`: values that are null or empty are left out. `body`: JSON as text.
export async function request(path, { method = "GET", query = {}, body, signal, silent = false } = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const text = new URLSearchParams(given).toString();
  const headers = { Accept: "application/json" };
  if (token()) headers.Authorization = `Bearer ${token()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let answer;
  try {
    answer = await fetch(BASE + path + (text ? `?${text}` : ""), { method, headers, body, signal, credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not answer. Check that it runs, then retry.");
  }
  let content;
  try {
    content = await answer.text();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server closed the connection before the end of its answer. Its log has the reason.");
  }
  if (answer.ok) return content ? parse(content) : null;
  if (answer.status === 401 && !silent) signOut();
  let message = `The server answered ${answer.status}.`;
  try {
    message = JSON.parse(content).error.message;
  } catch {
    // Not an error of the API; the status has to do.
  }
  throw new ApiError(answer.status, message);
}

export const levels = (namespace) => namespace.map(encodeURIComponent).join("%1F");

// Paths of a table: Iceberg's, and that of Seamark's API.
export const icebergPath = (namespace, name) => `/v1/namespaces/${levels(namespace)}/tables/${encodeURIComponent(name)}`;
export const tablePath = (namespace, name) => `/api/v1/tables/${levels(namespace)}/${encodeURIComponent(name)}`;

// The pages of a listing, one by one. `next`: the query parameter of the token.
export async function* pages(path, query = {}, { next = "pageToken", signal } = {}) {
  let from = "";
  do {
    const page = await request(path, { query: { ...query, [next]: from }, signal });
    yield page;
    from = page["next-page-token"];
  } while (from);
}
