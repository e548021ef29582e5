"""The report of compiled retention tables: sections in reading order."""

from __future__ import annotations

from xml.etree.ElementTree import Element

import numpy as np

from calib_cluster.report.parts import picker
from calib_cluster.report.provenance import record_parts, setting
from calib_cluster.report.retention import gate, heads, mix, risk, support
from calib_cluster.report.retention.data import SURE, Cost, RetentionReportInput
from calib_cluster.report.retention.scale import STEPS, short
from calib_cluster.report.retention.style import RULES as STYLES
from calib_cluster.report.style import stylesheet
from kvpolicy.report import words
from kvpolicy.report.markup import node, to_bytes
from kvpolicy.report.parts import definitions, document, section
from kvpolicy.retention import RULES

_OPTIONS = {
    "observe": "last positions of the prompt whose attention is observed",
    "alpha_scope": "what that attention is averaged over: all heads, the layer's, or the head's",
    "pool": "odd kernel of an average over neighbouring tokens; 1 is none",
    "keep_window": "whether the observed positions themselves always stay",
    "gate": "whether thresholds decide beside the budget",
    "floor": "this many best tokens stay whatever the threshold",
    "share": "whether the heads of a layer keep one common set, or each its own",
    "mix": "whether compiled shares and mixtures decide instead of weights and scores",
    "sinks": "this many first tokens always stay",
    "recent": "this many last tokens always stay",
    "focus": "last queries that the sources focus and retrieval look at",
}


def render_retention_report(data: RetentionReportInput) -> bytes:
    """The report as one HTML file in UTF-8, fit for an artifact's ``report.html``.

    It needs no network and no script, and the same input gives the same bytes.
    """
    title = f"{data.model_name}: retention tables of {data.name}"
    styles = stylesheet(len(data.budgets), STEPS, STYLES + mix.styles(data))
    return to_bytes(document(title, styles, *_body(data)))


def _body(data: RetentionReportInput) -> list[Element]:
    if data.mix is not None:
        meaning = support.MIX_MEANING
        return [
            _headline(data), _rule(data), *mix.sections(data),
            section("Support", meaning, support.support_table(data)), _provenance(data),
        ]  # fmt: skip
    return [
        _headline(data),
        _rule(data),
        section("Head weights", heads.meaning(data), heads.distribution(data)),
        section(
            "Weights by layer and kv head",
            "One column for each layer, numbered on top; one row for each kv head.",
            heads.weight_map(data),
        ),
        *(_gate(data) if data.has_gate else []),
        section("Support", support.MEANING, support.support_table(data)),
        _provenance(data),
    ]


def _headline(data: RetentionReportInput) -> Element:
    return node(
        "header",
        node("p", f"Policy {data.name}, compiled by {data.record.method}"),
        node("h1", "Retention tables for ", data.model_name),
        node("p", _sentence(data), cls="lead"),
        node("p", _support_text(data)),
        node("p", _other_layers(data)) if _other_layers(data) else None,
    )


def _sentence(data: RetentionReportInput) -> str:
    if data.mix is not None:
        return mix.sentence(data)
    weights = data.weights()
    sentence = (
        f"At the end of a long prompt, {words.plural(weights.size, 'kv head')} of "
        f"{words.plural(len(data.rows), 'layer')} keep at most a budget of its tokens and let the "
        f"rest go. These tables say which: a weight for each head, {short(weights.min())} to "
        f"{short(weights.max())}"
    )
    return sentence + (f", and {_gate_text(data)}." if data.has_gate else "; there is no gate.")


def _gate_text(data: RetentionReportInput) -> str:
    e, p = data.bins
    budgets = ", ".join(str(budget) for budget in data.tables.budgets)
    return (
        f"a threshold for each layer and each of {e} × {p} kinds of prompt, compiled for budgets "
        f"of {budgets} tokens"
    )


def _support_text(data: RetentionReportInput) -> str:
    sure = int((data.of_heads("confidence") >= SURE).sum())
    if data.mix is not None:
        return mix.support_text(data, sure)
    text = f"{sure:,} of {data.weights().size:,} weights are at least {SURE:.0%} sure"
    if not data.has_gate:
        return text + "."
    budgets = range(len(data.budgets))
    confidence = np.stack([data.of_gate("confidence", i) for i in budgets])
    empty = np.stack([data.of_gate("empty", i) for i in budgets])
    return text + (
        f", and {int((confidence >= SURE).sum()):,} of {confidence.size:,} thresholds; "
        f"{int(empty.sum()):,} thresholds have no record behind them."
    )


def _other_layers(data: RetentionReportInput) -> str:
    other = len(data.geometry.layers) - len(data.rows)
    if not other:
        return ""
    return (
        f"The other {words.plural(other, 'layer')} of the model keep what they always do (a native "
        "sliding window, or a state of fixed size) and have no part in this."
    )


def _rule(data: RetentionReportInput) -> Element:
    rule, paper = data.tables.rule, RULES["paper"]
    facts = []
    for name in rule.__struct_fields__[1:]:
        value, usual = getattr(rule, name), getattr(paper, name)
        origin = "as in the paper" if value == usual else f"the paper's is {setting(usual)}"
        about = f": {_OPTIONS[name]}" if name in _OPTIONS else ""
        facts.append((name, [node("b", setting(value)), f" ({origin}){about}"]))
    text = "How tokens are scored and chosen with these tables. They were compiled for this rule."
    return section(f"Rule: {rule.name}", text, definitions(facts))


def _gate(data: RetentionReportInput) -> list[Element]:
    return [
        section("Risk cells", risk.MEANING, risk.prompt_table(data)),
        picker("Budget", data.budgets, len(data.budgets) - 1, "budget shown"),
        section("Thresholds by risk cell", gate.MEANING, gate.cell_blocks(data)),
        section("Thresholds by layer and risk cell", gate.MAP_MEANING, gate.map_blocks(data)),
    ]


def _provenance(data: RetentionReportInput) -> Element:
    parts = record_parts(data.record, data.geometry)
    if data.costs:
        costs = [(name, _cost(value)) for name, value in data.costs.items()]
        parts += [node("h3", "What it took"), definitions(costs)]
    return section("Provenance", "What these tables were made from.", parts)


def _cost(value: Cost) -> str:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return f"{value:,}" if whole else setting(value)
