// The frame around the pages: navigation, sign-in, theme, and the page that the address names.

import { html, render, useEffect, useRef, useState } from "./html.js";
import { onSignedOut, request, signIn, signOut, token } from "./api.js";
import { PAGES } from "./pages/registry.js";
import { hrefOf, parseAddress } from "./address.js";

const THEME = "seamark-theme";
const THEMES = ["auto", "light", "dark"];

function useAddress() {
  const [address, setAddress] = useState(() => parseAddress(location.hash));
  useEffect(() => {
    const read = () => setAddress(parseAddress(location.hash));
    addEventListener("hashchange", read);
    return () => removeEventListener("hashchange", read);
  }, []);
  return address;
}

function ThemeButton() {
  const [theme, setTheme] = useState(() => localStorage.getItem(THEME) ?? "auto");
  useEffect(() => {
    document.documentElement.dataset.theme = theme;
    localStorage.setItem(THEME, theme);
    dispatchEvent(new Event("seamark-theme"));
  }, [theme]);
  const next = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  return html`<button type="button" class="quiet" onClick=${() => setTheme(next)}>Theme: ${theme}</button>`;
}

function SignIn() {
  const [failure, setFailure] = useState("");
  async function submit(event) {
    event.preventDefault();
    signIn(new FormData(event.target).get("token").trim());
    try {
      await request("/v1/config", { silent: true });
      location.reload();
    } catch (error) {
      setFailure(error.status === 401 ? "The server does not accept this token." : error.message);
    }
  }
  return html`<main class="sign-in" id="main">
    <form class="panel" onSubmit=${submit}>
      <h1>Sign in</h1>
      <p class="note">This server requires a token. <code>seamark token create NAME --role reader</code> makes one. The browser keeps it until you close this tab.</p>
      <label class="field"><span>Token</span><input name="token" type="password" required autocomplete="off" spellcheck="false" autofocus /></label>
      ${failure && html`<p class="error" role="alert">${failure}</p>`}
      <button type="submit">Sign in</button>
    </form>
  </main>`;
}

function Console() {
  const address = useAddress();
  const [state, setState] = useState("loading");
  const main = useRef(null);
  useEffect(() => {
    const stop = onSignedOut(() => setState("signed out"));
    request("/v1/config", { silent: true }).then(
      () => setState("ready"),
      (error) => setState(error.status === 401 ? "signed out" : "ready"),
    );
    return stop;
  }, []);
  const page = PAGES.find((one) => one.id === address.page) ?? PAGES[0];
  const title = page.titleOf ? page.titleOf(address) : page.title;
  useEffect(() => {
    document.title = `${title} – Seamark`;
  }, [title]);
  // A screen reader announces the page after a change of place, not after a change of its settings.
  const place = address.parts.join("/");
  const known = useRef(place);
  useEffect(() => {
    if (known.current !== place) main.current?.focus({ preventScroll: true });
    known.current = place;
  }, [place]);
  const skip = (event) => {
    event.preventDefault();
    main.current?.focus();
  };
  return html`
    <a class="skip" href="#main" onClick=${skip}>Skip to the content</a>
    <header class="bar">
      <a class="brand" href=${hrefOf(["tables"])}>Seamark</a>
      <nav aria-label="Pages">
        ${PAGES.filter((one) => one.title).map((one) => html`<a href=${hrefOf([one.id])} aria-current=${(page.within ?? page.id) === one.id ? "page" : undefined}>${one.title}</a>`)}
      </nav>
      <div class="actions">
        <${ThemeButton} />
        ${token() && html`<button type="button" class="quiet" onClick=${signOut}>Sign out</button>`}
      </div>
    </header>
    ${state === "signed out" && html`<${SignIn} />`}
    ${state === "ready" && html`<main id="main" tabindex="-1" ref=${main}><${page.view} key=${page.id} address=${address} /></main>`}`;
}

const root = document.getElementById("console");
root.replaceChildren();
render(html`<${Console} />`, root);
