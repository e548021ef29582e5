"""Styles of the page beyond those that every page shares: its tiles, and a colour for each side."""

from __future__ import annotations

from kvpolicy.report.style import BASE, CHARTS, PHONE, TABLES

_COLOURS = {  # role: light, dark
    "stock": ("#5f6975", "#a3adb8"),
    "base": ("#5f6975", "#a3adb8"),
    "other": ("#5b5bd6", "#9d9bff"),
    "full": ("#5b5bd6", "#9d9bff"),
    "windows": ("#08775a", "#41cf9d"),
    "frozen": ("#b4500b", "#f3a25c"),
}
_MORE = (  # groups of a quality file, in their order
    ("#08775a", "#41cf9d"), ("#b4500b", "#f3a25c"), ("#5b5bd6", "#9d9bff"), ("#a3239c", "#e07fd8"),
    ("#1d6fa5", "#6fb9e8"), ("#7a6a00", "#d6c24a"), ("#5f6975", "#a3adb8"), ("#a02c2c", "#f08a8a"),
)  # fmt: skip
GROUPS = len(_MORE)
_PAGE = """
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,212px),1fr));gap:12px;
margin:18px 0 26px}
.tile{background:var(--panel);border-radius:10px;padding:12px 16px 14px;min-width:0}
.tile h2{margin:0 0 6px;font-size:14px;font-weight:500;color:var(--soft)}
.tile p{margin:0;display:flex;flex-wrap:wrap;align-items:baseline;column-gap:8px}
.tile p+p{margin-top:4px}
.tile b{font-size:25px;line-height:1.25;font-variant-numeric:tabular-nums}
.tile .who{color:var(--c);font-size:14px;font-weight:600}
.tile .how{font-size:13px;color:var(--soft);flex-basis:100%}
.more::before{content:"\\25B2\\00A0";font-size:13px}
.less::before{content:"\\25BC\\00A0";font-size:13px}
.more{color:var(--up)}
.less{color:var(--down)}
:root{--up:#0a6b4b;--down:#a8321f}
@media (prefers-color-scheme:dark){:root{--up:#4fd6a4;--down:#ff9483}}
.trio{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,350px),1fr));
gap:22px 34px}
.trio>*{min-width:0}
figcaption{margin-top:4px}
.trio h2{margin:0 0 6px;font-size:16px}
.who{color:var(--c)}
ul.sides{list-style:none;margin:10px 0 0;padding:0;display:flex;flex-wrap:wrap;gap:4px 22px;
font-size:14px;color:var(--soft)}
ul.said{margin:14px 0 0;padding-left:20px;max-width:62em}
ul.said li{margin:5px 0}
.curve.guess{stroke-dasharray:5 4}
.curve.limit{stroke-dasharray:1 4;stroke-linecap:round}
.scroll{margin-top:16px}
.figures thead th{white-space:normal;min-width:4.6em;overflow-wrap:normal}
details{margin-top:14px}
summary{cursor:pointer;color:var(--soft)}
pre{white-space:pre-wrap;background:var(--panel);padding:10px 14px;border-radius:8px}
.note{color:var(--down)}
@media (max-width:600px){.tiles{grid-template-columns:1fr 1fr;gap:8px}.tile{padding:10px 12px}
.tile b{font-size:21px}h1{margin-bottom:8px}.trio{gap:26px}}
"""


def stylesheet() -> str:
    """Every rule of the page."""
    dark = f"@media (prefers-color-scheme:dark){{{_colours(1)}}}"
    return "".join((BASE, TABLES, CHARTS, _PAGE, PHONE, _colours(0), dark))


def _colours(scheme: int) -> str:
    sides = [f".s-{role}{{--c:{pair[scheme]}}}\n" for role, pair in _COLOURS.items()]
    groups = [f".g{i}{{--c:{pair[scheme]}}}\n" for i, pair in enumerate(_MORE)]
    return "".join(sides + groups)
