"""The bench's table as a picture: a bar for each line, the ratio to the rival on a logarithmic scale."""
import math
from html import escape

ROW, LEFT, WIDTH = 22, 400, 480
COLOURS = {"pass": "#2f8f4e", "shown": "#5b7fa6", "miss": "#c0392b"}


def svg(results):
    measured = [r for r in results if r["verdict"] != "error"]
    low, high = 0.5, max([10.0, *(r["ratio"] for r in measured)]) * 1.3

    def x(ratio):
        return LEFT + WIDTH * math.log(max(ratio, low) / low) / math.log(high / low)

    height = ROW * (len(results) + 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 90}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<text x="8" y="15" font-weight="bold">times the rival (bar), target (mark)</text>',
    ]
    for tick in (1, 2, 5, 10, 20, 50, 100, 200, 500):
        if low < tick < high:
            parts.append(f'<line x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{ROW}" y2="{height}" stroke="#ddd"/>')
            parts.append(f'<text x="{x(tick):.1f}" y="15" text-anchor="middle" fill="#777">{tick}</text>')
    for index, r in enumerate(results):
        y = ROW * (index + 1) + 4
        parts.append(f'<text x="8" y="{y + 12}">{escape(r["line"])}</text>')
        if r["verdict"] == "error":
            parts.append(f'<text x="{LEFT}" y="{y + 12}" fill="#c0392b">not measured</text>')
            continue
        end = x(r["ratio"])
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{end - LEFT:.1f}" height="{ROW - 7}" fill="{COLOURS[r["verdict"]]}"/>')
        parts.append(f'<text x="{end + 5:.1f}" y="{y + 12}">{r["ratio"]:.2f}</text>')
        if r["ratio_min"]:
            mark = x(r["ratio_min"])
            parts.append(f'<line x1="{mark:.1f}" x2="{mark:.1f}" y1="{y - 2}" y2="{y + ROW - 5}" stroke="#000" stroke-width="2"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"
