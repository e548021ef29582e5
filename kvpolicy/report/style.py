"""Styles that every page shares: text, tables, charts, and what changes on a phone."""

from __future__ import annotations

BASE = """
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
TABLES = """
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
CHARTS = """
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
PHONE = """
@media (max-width:600px){body{padding:16px}h1{font-size:24px}.lead{font-size:17px}
table,.compact{font-size:13.5px}th,td{padding:5px}thead th{white-space:normal;overflow-wrap:normal}
.slim{font-size:0!important}
nav label{padding:3px 8px;font-size:14px}
dl div{grid-template-columns:1fr;gap:0}}
@media print{nav{display:none}}
"""
