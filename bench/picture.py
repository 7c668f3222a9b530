"""The picture of the README, which shows how much faster each operation is than the peer, from `bench/results/`."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from pathlib import Path

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "pictures" / "ratios.svg"
_WIDTH, _ROW, _LEFT, _RIGHT, _TOP = 860, 26, 330, 90, 12
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1f2328}.bar{fill:#1f6feb}.slower{fill:#8c959f}line{stroke:#8c959f}"
    "@media (prefers-color-scheme:dark){text{fill:#e6edf3}}"
)


def draw_ratio_bars(rows: Sequence[tuple[str, str]]) -> str:
    """Return an SVG with a bar for each pair of an operation and a ratio such as `1,240×`.

    The axis is logarithmic and begins at 1×, the peer.
    """
    ratios = [float(text.rstrip("× ").replace(",", "")) for _, text in rows]
    low, high = math.log10(min([1.0, *ratios])), math.log10(max([10.0, *ratios]))
    scale = (_WIDTH - _LEFT - _RIGHT) / (high - low)
    peer, height = _LEFT - low * scale, _TOP + _ROW * len(rows) + 30
    label = "; ".join(f"{operation}: {text}" for operation, text in rows)
    parts = [f"<style>{_STYLE}</style>", f"<title>{html.escape(label)}</title>"]
    for number, ((operation, text), ratio) in enumerate(zip(rows, ratios, strict=True)):
        middle = _TOP + _ROW * number + _ROW / 2
        end = _LEFT + (math.log10(ratio) - low) * scale
        start, stop = min(peer, end), max(peer, end)
        kind = "bar" if ratio >= 1 else "slower"
        parts.append(f'<text x="{_LEFT - 12}" y="{middle + 4:.0f}" text-anchor="end">{html.escape(operation)}</text>')
        width = max(1.0, stop - start)
        parts.append(f'<rect class="{kind}" x="{start:.1f}" y="{middle - 8:.0f}" width="{width:.1f}" height="16"/>')
        parts.append(f'<text x="{stop + 8:.1f}" y="{middle + 4:.0f}">{html.escape(text)}</text>')
    bottom = _TOP + _ROW * len(rows)
    parts.append(f'<line x1="{peer:.1f}" y1="{_TOP}" x2="{peer:.1f}" y2="{bottom}"/>')
    parts.append(f'<text x="{peer:.1f}" y="{bottom + 20}">1×: the peer; logarithmic axis</text>')
    size = f'width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>\n' + "\n".join(parts) + "\n</svg>\n"
