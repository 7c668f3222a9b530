// Preact and htm as one: `html` makes elements of a template. Text is never markup.

import { h, render } from "./vendor/preact.mjs";
import htm from "./vendor/htm.mjs";

export { useCallback, useEffect, useMemo, useRef, useState } from "./vendor/hooks.mjs";
export { render };
export const html = htm.bind(h);
