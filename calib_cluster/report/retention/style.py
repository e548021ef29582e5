"""Rules of the retention report that the other report does not need."""

RULES = """
.none{color:var(--fg);background:repeating-linear-gradient(135deg,var(--hatch) 0 2px,
var(--panel) 2px 6px)}
.ramp{display:inline-flex;align-items:center;white-space:pre;vertical-align:middle}
.ramp b{min-width:0;width:9px;height:14px;padding:0}
.legend .none,.legend .untried{min-width:20px;height:14px;vertical-align:middle}
.heat{margin-bottom:16px}
.heat td{text-align:center;border:1px solid var(--bg);min-width:64px}
.heat tbody th,.heat .edge{border-color:transparent}
.heat .edge{text-align:left;color:var(--soft)}
.heat thead th{text-align:center!important}
.heat thead th:nth-child(-n+2)[rowspan]{text-align:left!important}
.gates{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,270px),1fr));
gap:16px 24px}
.gates>div{min-width:0}
.gates h4{font-weight:500;margin-bottom:2px}
.gate{font-size:10px;color:var(--soft)}
.gate>div{display:flex}
.gate i{flex:none;width:24px;padding-right:5px;text-align:right;font-style:normal;line-height:14px}
.gate span{flex:1;min-width:0;display:flex;justify-content:center;white-space:nowrap}
.gate b{flex:1;min-width:0;height:14px;border:solid var(--bg);border-width:0 1px 1px 0}
.untried{position:relative}
.untried::after{content:"";position:absolute;inset:4px 3px;border-radius:50%;
background:currentColor;opacity:.8}
.legend .untried{background:var(--hatch)}
.mixes{margin-top:14px}
.mixes+h4{margin-top:18px}
.mixes td:last-child{min-width:200px}
.mixes th b{display:inline-block;min-width:28px;padding:0 5px;text-align:center;font-weight:500}
.mixes .bar{min-width:180px;height:18px}
.mixes .bar span{line-height:18px}
.quiet{background:var(--panel)}
.map .last{border-bottom-width:5px}
dd b{font-weight:600}
@media (max-width:600px){.heat td{min-width:0;padding:4px 3px}.heat .edge{font-size:12px}
.heat thead th{font-size:12px;padding:4px 3px}
.mixes td:last-child,.mixes .bar{min-width:70px}}
.lean figure+figure,.lean p+figure{margin-top:20px}
"""
