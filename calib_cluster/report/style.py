"""The page's styles: fixed rules, and one rule for each point and each window level."""

from __future__ import annotations

from calib_cluster.report.palette import ink, point_colours, window_colours

_BASE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1c2126;--soft:#59636e;--line:#dbe0e5;--panel:#f4f6f8;
--hatch:#d9dee3}
@media (prefers-color-scheme:dark){:root{--bg:#14181c;--fg:#e4e8ec;--soft:#9aa5b1;--line:#323a42;
--panel:#1d2329;--hatch:#343c45}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1248px;padding:24px;background:var(--bg);color:var(--fg);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif;
overflow-wrap:anywhere}
p{margin:6px 0;max-width:46em}
header>p:first-child{color:var(--soft)}
header b{display:inline-block;max-width:100%}
h1{font-size:30px;line-height:1.2;margin:0 0 12px}
h2{font-size:21px;margin:44px 0 4px}
h3{font-size:16px;margin:20px 0 8px}
h4{font-size:15px;margin:4px 0 8px}
small,.meaning,figcaption{color:var(--soft)}
.lead{font-size:18px}
.meaning{margin-bottom:14px}
code{font:12.5px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
"""
_TABLES = """
.scroll{overflow-x:auto;background:
linear-gradient(270deg,var(--bg) 40%,transparent) right/36px 100% no-repeat local,
linear-gradient(270deg,var(--hatch),transparent) right/14px 100% no-repeat scroll}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:6px 12px;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th{font-weight:600}
thead th{color:var(--soft);font-weight:500;vertical-align:bottom}
thead tr:not(:last-child) th[colspan]{text-align:center;border-bottom:0;padding-bottom:0}
tbody th,thead tr:first-child th:first-child{text-align:left;padding-left:0}
tbody th{max-width:20em;overflow:hidden;text-overflow:ellipsis}
.figures tbody th,.figures thead tr:first-child th:first-child{position:sticky;left:0;
background:var(--bg)}
.reference *{color:var(--soft);font-weight:400}
.compact{font-size:14px}
.compact th,.compact td{padding-top:4px;padding-bottom:4px}
.compact tbody th{font-weight:400}
.evidence td:last-child{width:260px}
.meter{height:10px;background:var(--soft);min-width:1px;margin-right:auto}
.bars table,.bars .wide{width:100%}
.bar{display:flex;height:24px;min-width:180px}
.bar span{font-size:12px;line-height:24px;text-align:center;overflow:hidden;
border-left:1px solid var(--bg)}
.key{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:7px;
background:var(--c);vertical-align:-1px}
dl{margin:0}
dl div{display:grid;grid-template-columns:minmax(110px,190px) 1fr;gap:12px;padding:4px 0;
border-bottom:1px solid var(--line)}
dt{color:var(--soft)}
dd{margin:0}
"""
_CHARTS = """
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));
gap:24px 40px}
.pair>*{min-width:0}
@media (min-width:1000px){.lean{grid-template-columns:9fr 11fr}}
figure{margin:0}
figcaption{font-size:14px;max-width:38em}
.chart{display:block;width:100%;max-width:560px;height:auto}
.chart text{font-size:12px;fill:var(--soft)}
.chart .grid{stroke:var(--line)}
.chart .tick{stroke:var(--soft)}
.curve{fill:none;stroke:var(--c,var(--soft));stroke-width:1.8;stroke-linejoin:round}
.link{stroke:var(--c,var(--soft))}
.chart .name{fill:var(--c,var(--soft))}
.dot{fill:var(--c)}
.chart .count{fill:var(--c,var(--soft))}
"""
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
_PHONE = """
@media (max-width:600px){body{padding:16px}h1{font-size:24px}.lead{font-size:17px}
table,.compact{font-size:13.5px}th,td{padding:5px}thead th{white-space:normal;overflow-wrap:normal}
.slim{font-size:0!important}
nav label{padding:3px 8px;font-size:14px}
dl div{grid-template-columns:1fr;gap:0}}
@media print{nav{display:none}}
"""
_DASHES = ("none", "7 3", "2 3", "9 3 2 3")


def stylesheet(points: int, levels: int, more: str = "") -> str:
    """Every rule of a page with that many points and levels of colour, and ``more`` of its own."""
    dark = f"@media (prefers-color-scheme:dark){{{_colours(points, levels, dark=True)}}}"
    fixed = (_BASE, _TABLES, _CHARTS, _PICKER, _MAP, more, _PHONE)
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
