// Pictures. Each has a name for screen readers, and its page shows the same data as a table.

import uPlot from "./vendor/uplot.mjs";
import { html, useEffect, useRef } from "./html.js";
import { clip, compact, count, percent, size } from "./format.js";
import { Scroll } from "./parts.js";

const AXIS = 26;
const CHARACTER = 7; // pixels of a digit, in the font of the axes
const SIDES = 90; // pixels of a chart beside its positions: the vertical axis and the margins

// A colour of the style sheet as the present theme has it; a canvas knows no custom properties.
function colour(name) {
  const probe = document.createElement("i");
  probe.className = `colour-${name}`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

// Lines over positions from 0 to 1. `lines`: [{ name, colour, ys }] over `xs`; `marks`: [{ position, text }].
export function PositionChart({ xs, lines, marks, label, unit, height = 240 }) {
  const box = useRef(null);
  useEffect(() => {
    const element = box.current; // the reference is empty once the picture is gone
    let chart = null;
    const draw = () => {
      chart?.destroy();
      const axis = { stroke: colour("muted"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false }, font: "12px system-ui", labelFont: "12px system-ui" };
      const options = {
        width: Math.max(240, element.clientWidth),
        height,
        scales: { x: { time: false, range: [0, 1] }, y: { range: (_, __, most) => [0, Math.max(1, most) * 1.05] } },
        axes: [
          { ...axis, splits: () => marks.map((mark) => mark.position), values: (plot, splits) => labelsOf(marks, splits, plot.width), grid: { show: false }, size: AXIS },
          { ...axis, size: 56, values: (_, splits) => splits.map((files) => (Number.isInteger(files) ? compact(files) : "")) },
        ],
        series: [
          { label: "position", value: (_, at) => (at === null ? "–" : percent(at, 1)) },
          ...lines.map((line) => ({
            label: line.name,
            stroke: colour(line.colour),
            fill: colour(`${line.colour}-area`),
            width: 1.5,
            points: { show: false },
            paths: uPlot.paths.stepped({ align: 1 }),
            value: (_, files) => (files === null ? "–" : `${count(files)} ${unit}`),
          })),
        ],
        cursor: { y: false },
      };
      chart = new uPlot(options, [xs, ...lines.map((line) => line.ys)], element);
    };
    draw();
    const resized = new ResizeObserver(() => chart.setSize({ width: Math.max(240, element.clientWidth), height }));
    resized.observe(element);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", draw);
    addEventListener("seamark-theme", draw);
    return () => {
      resized.disconnect();
      dark.removeEventListener("change", draw);
      removeEventListener("seamark-theme", draw);
      chart.destroy();
    };
  }, [xs, lines, marks]);
  return html`<div class="chart" ref=${box} role="img" aria-label=${label}></div>`;
}

// The labels of positions; only the first and the last if the others have no room between them.
export function labelsOf(marks, positions, width) {
  const labels = positions.map((at) => labelAt(marks, at));
  const room = (at) => (positions[at] - positions[at - 1]) * (width - SIDES); // between the centres of two labels
  const fit = labels.every((label, at) => at === 0 || ((label.length + labels[at - 1].length) / 2 + 2) * CHARACTER <= room(at));
  return labels.map((label, at) => (fit || at === 0 || at === labels.length - 1 ? label : ""));
}

// The label of a position.
function labelAt(marks, at) {
  const mark = marks.find((one) => one.position === at);
  return mark ? clip(mark.text, 19) : "";
}

const WIDTH = 1000;
const HEIGHT = 300;

// The ranges of files: a bar from the lower to the upper bound, from top to bottom by lower bound.
export function RangeBars({ bars, marks, colour: of, label }) {
  const files = bars.reduce((sum, bar) => sum + bar.files, 0);
  let above = 0;
  return html`<figure class="ranges">
    <svg viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" role="img" aria-label=${label} class=${`series-${of}`}>
      ${[0.25, 0.5, 0.75].map((at) => html`<line class="grid" x1=${at * WIDTH} x2=${at * WIDTH} y1="0" y2=${HEIGHT} />`)}
      ${bars.map((bar) => {
        const y = (above / files) * HEIGHT;
        const height = (bar.files / files) * HEIGHT;
        above += bar.files;
        const gap = height > 4 ? 1 : 0;
        const span = (from, to) => ({ x: from * WIDTH, width: Math.max(2, (to - from) * WIDTH), y, height: Math.max(0.6, height - gap) });
        return html`<g>${bar.files > 1 && html`<rect class="faint" ...${span(bar.low, bar.high)} />`}<rect class="solid" ...${span(bar.low, bar.median)} /></g>`;
      })}
    </svg>
    <div class="marks" aria-hidden="true">
      ${marks.map((mark, at) => html`<span class=${at === 0 ? "first" : at === marks.length - 1 ? "last" : ""} style=${{ left: `${mark.position * 100}%` }}>${clip(mark.text, 19)}</span>`)}
    </div>
  </figure>`;
}

const HOT = 15;

// Cells of one or two dimensions. `cells`: [{ x, y, value, title }]; `columns`, `rows`: their names.
export function HeatMap({ cells, columns, rows, label }) {
  const most = Math.max(1, ...cells.map((cell) => cell.value));
  const left = rows.some((name) => name !== "") ? 110 : 0;
  const step = Math.ceil(columns.length / 8);
  const width = left + columns.length * HOT + 60;
  return html`<${Scroll} label=${label}>
    <svg class="heat" width=${width} height=${rows.length * HOT + 26} role="img" aria-label=${label}>
      ${rows.map((name, y) => html`<text class="axis" x=${left - 6} y=${y * HOT + HOT - 4} text-anchor="end">${clip(name, 15)}</text>`)}
      ${cells.map((cell) => html`<rect class="hot" x=${left + cell.x * HOT} y=${cell.y * HOT} width=${HOT - 1} height=${HOT - 1} rx="2" fill-opacity=${0.12 + 0.88 * Math.sqrt(cell.value / most)}><title>${cell.title}</title></rect>`)}
      ${columns.map((name, x) => (x % step ? null : html`<text class="axis" x=${left + x * HOT} y=${rows.length * HOT + 18}>${clip(name, 12)}</text>`))}
    </svg>
  <//>`;
}

// Horizontal bars as a table. `rows`: [{ name, values: [number] }]; one colour for each value.
export function BarTable({ rows, heads, colours, text = count, label }) {
  const most = Math.max(1, ...rows.flatMap((row) => row.values));
  return html`<${Scroll} label=${label}><table class="bars">
    <thead><tr>${heads.map((head, at) => html`<th scope="col" class=${at ? "" : "name"}>${head}</th>`)}</tr></thead>
    <tbody>
      ${rows.map((row) => html`<tr><th scope="row">${row.name}</th>${row.values.map((number, at) => html`<td><span hidden=${!number} class=${`bar series-${colours[at]}`} style=${{ width: `${(number / most) * 70}%` }}></span><span>${text(number)}</span></td>`)}</tr>`)}
    </tbody>
  </table><//>`;
}

export const sizeClass = (bytes) => (bytes ? `${size(bytes)} – ${size(bytes * 2)}` : "0 B");
