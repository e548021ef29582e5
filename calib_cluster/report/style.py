"""The page's styles: fixed rules, and one rule for each point and each window level."""

from __future__ import annotations

from calib_cluster.report.palette import ink, point_colours, window_colours
from kvpolicy.report.style import BASE, CHARTS, PHONE, TABLES

_PICKER = """
nav{position:sticky;top:0;z-index:1;max-height:40vh;overflow:auto;display:flex;flex-wrap:wrap;gap:6px;align-items:center;
margin-top:44px;padding:8px 0;background:var(--bg);border-bottom:1px solid var(--line)}
nav>span{color:var(--soft);margin-right:4px}
nav label{display:flex;align-items:center;max-width:100%;padding:4px 10px;border-radius:6px;
border:1px solid var(--line);cursor:pointer}
nav label span:last-child{overflow:hidden;text-overflow:ellipsis;white-space:nowrap}
nav input{position:absolute;opacity:0;pointer-events:none}
nav .key{flex:none}
nav label:has(:checked){border-color:var(--fg);background:var(--panel);font-weight:600}
nav label:has(:focus-visible){outline:2px solid var(--fg);outline-offset:2px}
nav+section h2{margin-top:20px}
"""
_MAP = """
.legend{display:flex;flex-wrap:wrap;gap:6px 16px;list-style:none;margin:0 0 12px;padding:0;
font-size:14px}
.legend b{display:inline-block;min-width:42px;padding:1px 5px;text-align:center}
.legend b,.map b{font-weight:500;font-size:11.5px;font-variant-numeric:tabular-nums}
.native{color:var(--fg);background:repeating-linear-gradient(135deg,var(--hatch) 0 2px,
var(--panel) 2px 7px)}
.box{container-type:inline-size}
.map{display:grid;grid-template-columns:repeat(var(--n),minmax(0,1fr));gap:10px 0;
padding-left:26px;--n:8}
.map>div{counter-reset:head -1}
.map i,.map b{display:block;text-align:center;white-space:nowrap}
.map i{font-size:11px;font-style:normal;color:var(--soft)}
.map b{position:relative;line-height:22px;border:solid var(--bg);border-width:0 1px 1px 0;
background-clip:padding-box}
.map b::before{counter-increment:head;position:absolute;right:calc(100% + 5px);font-size:11px;
color:var(--soft)}
@container (min-width:640px){.map{--n:16}}
@container (min-width:1120px){.map{--n:32}}
@container (max-width:639.9px){.map>div:nth-child(8n+1) b::before{content:"h" counter(head)}}
@container (min-width:640px) and (max-width:1119.9px){
.map>div:nth-child(16n+1) b::before{content:"h" counter(head)}}
@container (min-width:1120px){.map>div:nth-child(32n+1) b::before{content:"h" counter(head)}}
"""
_DASHES = ("none", "7 3", "2 3", "9 3 2 3")


def stylesheet(points: int, levels: int, more: str = "") -> str:
    """Every rule of a page with that many points and levels of colour, and ``more`` of its own."""
    dark = f"@media (prefers-color-scheme:dark){{{_colours(points, levels, dark=True)}}}"
    fixed = (BASE, TABLES, CHARTS, _PICKER, _MAP, more, PHONE)
    return "".join(
        (*fixed, _colours(points, levels, dark=False), dark, _dashes(points), _picks(points))
    )


def _colours(points: int, levels: int, dark: bool) -> str:
    cells = [
        f".l{i}{{background-color:{colour};color:{ink(colour)}}}\n"
        for i, colour in enumerate(window_colours(levels, dark))
    ]
    lines = [f".p{i}{{--c:{c}}}\n" for i, c in enumerate(point_colours(points, dark))]
    return "".join(cells + lines)


def _dashes(points: int) -> str:
    rules = [
        f".curve.{kind}{i}{{stroke-dasharray:{_DASHES[i % len(_DASHES)]}}}\n"
        for kind, count in (("p", points), ("c", len(_DASHES)))
        for i in range(count)
    ]
    return "".join(rules)


def _picks(points: int) -> str:
    """Rules that follow the radio buttons. Without ``:has`` none applies and all is shown."""
    rules = [
        f"body:has(#pick{i}:checked) .only:not(.p{i}){{display:none}}\n"
        f"body:has(#pick{i}:checked) .curve.p{i}{{stroke-width:3.6}}\n"
        f"body:has(#pick{i}:checked) tr.p{i}>*{{background:var(--panel)}}\n"
        for i in range(points)
    ]
    return f"@media screen{{{''.join(rules)}}}"
