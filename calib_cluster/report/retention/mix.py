"""A mix: each head's share of the budget, its mixture of orders, and which query heads retrieve."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from xml.etree.ElementTree import Element

import numpy as np

from calib_cluster.report.palette import blend, ink
from calib_cluster.report.parts import layer_map, only, picker
from calib_cluster.report.retention.data import SURE, RetentionReportInput
from calib_cluster.report.retention.heads import EXTREMES, percent, sureness
from calib_cluster.report.retention.scale import Scale, bars, short
from kvpolicy.mix_view import RETRIEVES, mixture_text, mixtures, query_heads, retrieving
from kvpolicy.report import words
from kvpolicy.report.markup import Child, node
from kvpolicy.report.parts import definitions, figure, header, row, scroll_table, section
from kvpolicy.retention import SOURCES

SHARE_MEANING = (
    "The heads keep the budget on average, but not each of them: a head with share 2 keeps about "
    "twice the budget, one with share 0.5 about half of it, and all of them together exactly what "
    "equal shares would. A share is large where more room for that head kept the model's "
    "predictions closer to those with the whole prompt, on the calibration prompts."
)
MIXTURE_MEANING = (
    "What a head keeps, it picks from three orders of the prompt's tokens, in these proportions. A "
    "token that several orders want counts once, so others get in. Numbers and colours name a "
    "head's mixture; colours blend those of the orders."
)
_SOURCES = {
    "window": "tokens that the head itself attends to over the observed end of the prompt",
    "focus": "tokens that the head's last queries look hard at, and what follows those tokens",
    "retrieval": "tokens that the model's retrieval heads look at, and what follows them: the same "
    "order for every head",
}
QUERY_MEANING = (
    "How much each query head counts in the order retrieval: the square of the attention it pays, "
    "just before a token is copied from the prompt, to the place the token is copied from; the "
    "highest is 1. One column for each layer, one row for each query head; a gap closes the group "
    "that shares a kv head."
)
WORTH_MEANING = (
    "What doubling a head's share adds to the reward of calibration prompts while all else stays, "
    "in thousandths of a standard deviation of rewards. Below 0, more room for this head did harm, "
    "because its tokens were missing elsewhere. Each number is an estimate from noisy rewards: "
    "small ones may be noise alone."
)
_COLOURS = ("#3b6fb0", "#ddaa33", "#bb5566")
_SCALE = 1000
_QUIET = 0.01  # query weights below this part of the highest have no colour


def sentence(data: RetentionReportInput) -> str:
    """What the tables do, for the head of the page."""
    shares = data.mix.shares[:, data.heads]
    low, high = (f"{float(f(shares)):.2g}" for f in (np.min, np.max))
    count = len(_mixtures(data))
    pick = f"say by which of {count} mixtures" if count > 1 else "say by which one mixture"
    deal = f"{low} to {high} times that to each" if low != high else "the same to each"
    return (
        f"At the end of a long prompt, {words.plural(int(data.heads.sum()), 'kv head')} of "
        f"{words.plural(len(data.rows), 'layer')} keep a budget of tokens on average and let the "
        f"rest go. These tables deal it out, {deal}, and {pick} of three orders a head picks its "
        "tokens. "
        f"There is no gate; they are compiled for budgets of "
        f"{', '.join(map(str, data.tables.budgets))} tokens."
    )


def support_text(data: RetentionReportInput, sure: int) -> str:
    """For how many heads more room surely helps, and how many query heads retrieve."""
    some, total = retrieving(data.mix, data.geometry)
    return (
        f"For {sure:,} of {words.plural(int(data.heads.sum()), 'head')} it is at least {SURE:.0%} "
        f"sure that more room helps. {some:,} of {words.plural(total, 'query head')} retrieve."
    )


def styles(data: RetentionReportInput) -> str:
    """Colours of mixtures and sources, dark enough or light enough for both schemes."""
    if data.mix is None:
        return ""
    colours = {f"m{i}": blend(_COLOURS, parts) for i, parts in enumerate(_mixtures(data))}
    colours |= {f"s{i}": colour for i, colour in enumerate(_COLOURS)}
    return "".join(
        f".{name}{{background-color:{colour};color:{ink(colour)}}}\n"
        for name, colour in colours.items()
    )


def sections(data: RetentionReportInput) -> list[Element]:
    """The sections between the rule and the support."""
    several = len(data.budgets) > 1
    pick = picker("Budget", data.budgets, len(data.budgets) - 1, "budget shown")
    about = "One column for each layer, numbered on top; one row for each kv head."
    parts = [
        section("Shares of the budget", SHARE_MEANING, _blocks(data, _distribution)),
        section("Shares by layer and kv head", about, _blocks(data, _share_map)),
        section("Mixtures", MIXTURE_MEANING, _sources(), _blocks(data, _mixture_block)),
        section("Retrieval heads", QUERY_MEANING, _query_map(data)),
    ]
    if data.evidence.worth is not None:
        parts.insert(2, section("What a doubled share is worth", WORTH_MEANING, _worth(data)))
    return [pick, *parts] if several else parts


def _blocks(
    data: RetentionReportInput, part: Callable[[RetentionReportInput, int], Child]
) -> list[Child]:
    """``part`` of every budget that differs, named only if there are several."""
    if len(data.budgets) == 1:
        return [part(data, 0)]
    return [only(i, f"budget {name}", part(data, i)) for i, name in enumerate(data.budgets)]


# -- shares ----------------------------------------------------------------------------------------


def _distribution(data: RetentionReportInput, block: int) -> Element:
    shares = data.shares(block)[data.heads]
    chart = bars(shares, "share", "heads", f"p{block}", "distribution of shares")
    above = int((shares > 1).sum())
    caption = (
        f"Shares of {words.plural(shares.size, 'head')}: {short(shares.min())} to "
        f"{short(shares.max())}, median {short(np.median(shares))}; {above:,} keep more than the "
        "budget."
    )
    sure = sureness(
        data.of_heads("confidence"), "head", f"p{block}", "confidence that more room helps"
    )
    left = node("div", figure(chart, caption), sure)
    return node("div", left, node("div", _extremes(data, block)), cls="pair lean")


def _extremes(data: RetentionReportInput, block: int) -> list[Element]:
    shares = data.shares(block)
    places = np.argwhere(data.heads)
    order = np.argsort(-shares[data.heads], kind="stable")
    count = min(EXTREMES, len(order) // 2)
    chosen = [*order[:count], *order[len(order) - count :]] if count else order
    worth = data.evidence.worth
    names = ("layer/head", "share", "worth", "mixture", "records", "sure")
    head = header(*(name for name in names if worth is not None or name != "worth"))
    rows = [_extreme(data, block, *places[i].tolist()) for i in chosen]
    text = (
        "Those that keep most, then least: the share, "
        + ("what doubling it is worth in thousandths, " if worth is not None else "")
        + "the mixture's number, the head's records, and how sure it is that more room helps."
    )
    return [node("h4", "The heads that stand out"), node("p", text),
            scroll_table([head], rows, "compact")]  # fmt: skip


def _extreme(data: RetentionReportInput, block: int, at: int, head: int) -> Element:
    layer, found = data.geometry.attention_layers[at].layer_id, data.evidence.heads
    worth = data.evidence.worth
    cells = [f"{data.shares(block)[at, head]:.2f}"]
    if worth is not None:
        cells.append(words.signed(float(_SCALE * worth[at, head]), 1))
    cells.append(str(_number(data, block, at, head)))
    sure = percent(found.confidence[at, head]) if found.support[at, head] else words.NOTHING
    return row(f"{layer} / {head}", *cells, f"{int(found.records[at, head]):,}", sure)


def _share_map(data: RetentionReportInput, block: int) -> list[Element]:
    scale = Scale.of(data.mix.shares[:, data.heads], log=True)
    shares = data.shares(block)

    def cell(place: int, head: int) -> Element:
        at = data.rows[place]
        share = float(shares[at, head])
        title = f"{_name(data, place, head)}: share {share:.3g}"
        return node("b", f"{share:.2f}", cls=scale.level(share), title=title)

    return [scale.key("share (ratios)"), layer_map(data.layers, cell)]


def _worth(data: RetentionReportInput) -> list[Element]:
    values = _SCALE * data.evidence.worth.astype(np.float64)
    scale = Scale.of(values[data.heads])

    def cell(place: int, head: int) -> Element:
        value = float(values[data.rows[place], head])
        title = f"{_name(data, place, head)}: a doubled share adds {words.signed(value, 2)}"
        shown = f"{value:+.0f}".replace("-", "\u2212") if round(value) else "0"
        return node("b", shown, cls=scale.level(value), title=title)

    return [scale.key("thousandths of a standard deviation"), layer_map(data.layers, cell)]


def _name(data: RetentionReportInput, place: int, head: int) -> str:
    return f"layer {data.layers[place].layer_id}, kv head {head}"


# -- mixtures --------------------------------------------------------------------------------------


def _mixtures(data: RetentionReportInput) -> list[tuple[float, ...]]:
    """All mixtures in use at any budget, the most used first; number i + 1 names them."""
    used = data.mix.quotas[:, data.heads].reshape(-1, len(SOURCES))
    return [parts for parts, _ in mixtures(used)]


def _number(data: RetentionReportInput, block: int, at: int, head: int) -> int:
    return _mixtures(data).index(tuple(data.quotas(block)[at, head].tolist())) + 1


def _sources() -> Element:
    facts = [(name, _SOURCES[name]) for name in SOURCES]
    return definitions(facts)


def _mixture_block(data: RetentionReportInput, block: int) -> list[Element]:
    every = _mixtures(data)
    counts = dict(mixtures(data.quotas(block)[data.heads]))
    head = header("mixture", *SOURCES, "heads", "")
    rows = [
        row(
            node("b", str(i + 1), cls=f"m{i}"), *(f"{part:.0%}" for part in parts),
            f"{counts.get(parts, 0):,}", _bar(parts),
        )
        for i, parts in enumerate(every)
    ]  # fmt: skip
    cells = layer_map(data.layers, partial(_mixture_cell, data, block, every))
    return [scroll_table([head], rows, "compact mixes"), node("h4", "By layer and kv head"), cells]


def _mixture_cell(data: RetentionReportInput, block: int, every, place: int, head: int) -> Element:
    parts = tuple(data.quotas(block)[data.rows[place], head].tolist())
    title = f"{_name(data, place, head)}: {mixture_text(parts)}"
    index = every.index(parts)
    return node("b", str(index + 1), cls=f"m{index}", title=title)


def _bar(parts: tuple[float, ...]) -> Element:
    segments = [
        node("span", cls=f"s{i}", style=f"flex:{round(1000 * part)}", title=f"{name} {part:.0%}")
        for i, (name, part) in enumerate(zip(SOURCES, parts, strict=True))
        if part
    ]
    return node("div", segments, cls="bar")


# -- retrieval -------------------------------------------------------------------------------------


def _query_map(data: RetentionReportInput) -> list[Element]:
    weights = data.mix.query_weights
    read = weights[query_heads(data.geometry)]
    top = float(read.max()) or 1.0
    scale = Scale(0.0, top)
    some, total = retrieving(data.mix, data.geometry)
    text = (
        f"{some:,} of {words.plural(total, 'query head')} weigh at least {RETRIEVES:g} of the "
        "highest; these are numbered."
    )

    def cell(place: int, head: int) -> Element:
        at, layer = data.rows[place], data.layers[place]
        weight = float(weights[at, head])
        group = layer.num_q_heads // layer.num_kv_heads
        title = (
            f"layer {layer.layer_id}, query head {head} (kv head {head // group}): weight "
            f"{weight:.3g}"
        )
        last = " last" if (head + 1) % group == 0 else ""
        shown = f"{weight:.2f}" if read.max() > 0 and weight >= RETRIEVES * top else "\u00a0"
        colour = scale.level(weight) if weight >= _QUIET * top else "quiet"
        return node("b", shown, cls=colour + last, title=title)

    return [node("p", text), scale.key("weight"), layer_map(data.layers, cell, queries=True)]
