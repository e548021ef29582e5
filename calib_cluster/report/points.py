"""The headline, the table of points, and residency against context and tau."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree.ElementTree import Element

from calib_cluster.report.data import ReportInput
from kvpolicy.geometry import LayerKind
from kvpolicy.render import human_bytes
from kvpolicy.report import words
from kvpolicy.report.charts import Axis, Dot, Line, line_chart
from kvpolicy.report.markup import Child, node
from kvpolicy.report.parts import figure, row, scroll_table
from kvpolicy.residency import DEFAULT_PAGE_SIZE, peak_bytes, residency
from kvpolicy.windows import FULL, WindowPolicy

_STEPS_PER_OCTAVE = 4
_SHARES = [(part / 4, f"{part * 25}%") for part in range(5)]


def headline(data: ReportInput) -> Element:
    """What the policy is, and what each point keeps."""
    longest = data.geometry.max_context
    kept = [residency(point.policy, data.geometry, longest) for point in data.points]
    default = data.points[data.default_index]
    peak, part = _kv_cells(data, default.policy)
    dense = human_bytes(_peak(data, WindowPolicy.full(data.geometry)))
    sentence = [
        f"At {longest:,} tokens, the longest context of the model, the default point ",
        node("b", default.name),
        f" keeps {words.share(kept[data.default_index])} of the global layers' KV cache. ",
        f"One request then holds {peak}, {part} of the {dense} of a dense cache.",
    ]
    return node(
        "header",
        node("p", f"Policy {data.policy_name}, calibrated by {data.calibration.method}"),
        node("h1", "Windows for ", data.model_name),
        node("p", sentence, cls="lead"),
        node("p", _kept_by_each(data, kept)),
        node("p", _shape(data)),
    )


def points_table(data: ReportInput) -> Element:
    """One row a point, and the dense cache to compare with."""
    rows = [_point_row(data, index) for index in range(len(data.points))]
    return scroll_table(_point_header(data), [*rows, *_reference_rows(data)], "figures")


def points_meaning(data: ReportInput) -> str:
    """What the columns of the table are."""
    text = (
        "Residency is the share of the global layers' tokens that stays in memory (2k is 2,048 "
        "tokens). KV is the peak of one request of "
        f"{data.geometry.max_context:,} tokens in pages of {DEFAULT_PAGE_SIZE}, at "
        f"{data.geometry.kv_dtype_bytes} bytes a number, and its share of a dense cache. tau is "
        "the least mean cosine with full history that a unit's window had to reach; fidelity is "
        "the mean over units of the cosine reached (1 for full)."
    )
    if data.held_out is not None:
        text += (
            f" NLL is nats per token on {words.plural(data.held_out.prompts, 'held-out prompt')} "
            f"({data.held_out.tokens:,} tokens), and its difference to full history."
        )
    return text


def residency_charts(data: ReportInput) -> Element:
    """Residency against context, and against tau where the points have one."""
    figures = [_context_chart(data)]
    if any(point.tau is not None for point in data.points):
        figures.append(_tau_chart(data))
    return node("div", figures, cls="pair")


def _kept_by_each(data: ReportInput, kept: Sequence[float]) -> Child:
    if len(data.points) == 1:
        return None
    parts: list[Child] = ["Points to choose from, with what each keeps there: "]
    for index, (point, share) in enumerate(zip(data.points, kept, strict=True)):
        parts += [", " if index else None, node("b", point.name), f" {words.share(share)}"]
    return [*parts, "."]


def _shape(data: ReportInput) -> str:
    geom = data.geometry
    kinds = {kind: sum(layer.kind is kind for layer in geom.layers) for kind in LayerKind}
    text = (
        f"{geom.architecture}: {words.plural(len(geom.layers), 'layer')}, "
        f"{kinds[LayerKind.GLOBAL]} of them global, with "
        f"{words.plural(data.num_global_units, 'unit')} (kv heads of global layers). "
        "Each unit keeps its own window of recent tokens"
    )
    text += f" and the first {words.plural(data.sinks, 'token')}" if data.sinks else ""
    text += "; units marked full keep everything."
    if data.native_windows:
        sizes = ", ".join(map(str, data.native_windows))
        text += (
            f" {words.plural(kinds[LayerKind.NATIVE], 'layer')} have a native sliding window "
            f"({sizes} tokens) that the model was trained with: keeping only that loses nothing."
        )
    if kinds[LayerKind.RECURRENT]:
        count = words.plural(kinds[LayerKind.RECURRENT], "recurrent layer")
        text += f" {count} hold a state of fixed size, which is not counted here."
    return text


def _peak(data: ReportInput, policy: WindowPolicy) -> int:
    return peak_bytes(policy.levels(), data.geometry, data.geometry.max_context)


def _point_header(data: ReportInput) -> list[Element]:
    contexts = data.contexts
    groups = [("point", 1), ("residency at", len(contexts)), ("KV per request", 2)]
    groups += [("held-out NLL", 2)] if data.held_out else []
    groups += [("tau", 1), ("fidelity", 1)]
    top = [
        node("th", title, colspan=span, scope="colgroup")
        if span > 1 or title == "residency at"
        else node("th", title, rowspan=2, scope="col")
        for title, span in groups
    ]
    names = [words.tokens(context) for context in contexts] + ["peak", "of dense"]
    names += ["nats", "to full"] if data.held_out else []
    return [node("tr", top), node("tr", [node("th", name, scope="col") for name in names])]


def _point_row(data: ReportInput, index: int) -> Element:
    point = data.points[index]
    mark = node("small", " default") if index == data.default_index else None
    kept = [residency(point.policy, data.geometry, c) for c in data.contexts]
    cells = [
        *map(words.share, kept),
        *_kv_cells(data, point.policy),
        *_loss_cells(data, point.name),
        words.NOTHING if point.tau is None else f"{point.tau:g}",
        words.NOTHING if point.fidelity is None else words.cosine(point.fidelity),
    ]
    return row([node("span", cls="key"), point.name, mark], *cells, cls=f"p{index}")


def _kv_cells(data: ReportInput, policy: WindowPolicy) -> list[str]:
    peak, dense = _peak(data, policy), _peak(data, WindowPolicy.full(data.geometry))
    return [human_bytes(peak), words.share(peak / dense)]


def _loss_cells(data: ReportInput, name: str) -> list[str]:
    held_out = data.held_out
    if held_out is None:
        return []
    if name not in held_out.nll:
        return [words.NOTHING] * 2
    loss = held_out.nll[name]
    return [f"{loss:.4f}", words.signed(loss - held_out.nll_full)]


def _reference_rows(data: ReportInput) -> list[Element]:
    geom = data.geometry
    policies = [("dense cache", WindowPolicy.full(geom))]
    if data.native_windows:
        policies.insert(0, ("native windows only", WindowPolicy.native(geom)))
    blank = [words.NOTHING] * 2
    loss: list[Child] = []
    if data.held_out is not None:
        loss = [f"{data.held_out.nll_full:.4f}", words.NOTHING]
    return [
        row(name, *["100%"] * len(data.contexts), *_kv_cells(data, policy), *loss, *blank,
            cls="reference")
        for name, policy in policies
    ]  # fmt: skip


def _sampled_contexts(data: ReportInput) -> list[int]:
    """Contexts from the smallest window to the model's longest, evenly spaced in log."""
    longest = data.geometry.max_context
    start = min([level for level in data.levels if level != FULL], default=longest)
    start = max(1, min(start, longest // 64))
    values, step = [], 0
    while (value := round(start * 2 ** (step / _STEPS_PER_OCTAVE))) < longest:
        values.append(value)
        step += 1
    return sorted({*values, *data.contexts})


def _context_chart(data: ReportInput) -> Element:
    contexts = _sampled_contexts(data)
    lines = [
        Line(words.short(point.name), point.name, f"p{index}",
             [(c, residency(point.policy, data.geometry, c)) for c in contexts])
        for index, point in enumerate(data.points)
    ]  # fmt: skip
    powers = [1 << bit for bit in range(40) if contexts[0] <= 1 << bit <= contexts[-1]]
    step = 1 + len(powers) // 8
    ticks = [(power, words.tokens(power)) for power in reversed(powers[::-step])]
    x = Axis(contexts[0], contexts[-1], ticks, "context, tokens (log scale)", log=True)
    chart = line_chart(lines, [], x, Axis(0, 1, _SHARES, "residency"), "residency against context")
    return figure(
        chart,
        "Residency against context: once a request is longer than most windows, each point keeps "
        "an ever smaller share; it levels off at the share of units that keep everything.",
    )


def _tau_chart(data: ReportInput) -> Element:
    known = [(i, point) for i, point in enumerate(data.points) if point.tau is not None]
    known.sort(key=lambda item: item[1].tau)
    lines, dots = [], []
    for order, context in enumerate(data.contexts):
        name = words.tokens(context)
        shares = [residency(point.policy, data.geometry, context) for _, point in known]
        values = list(enumerate(shares))
        lines.append(Line(f"at {name}", f"at {name} tokens", f"c{order}", values))
        for at, share in values:
            index, point = known[at]
            text = f"{point.name} at {name}: {words.share(share)}"
            dots.append(Dot(at, share, text, f"p{index}"))
    ticks = [(at, f"{point.tau:g}") for at, (_, point) in enumerate(known)]
    x = Axis(-0.3, len(known) - 0.7, ticks, "tau (evenly spaced, not to scale)")
    y = Axis(0, 1, _SHARES, "residency")
    return figure(
        line_chart(lines, dots, x, y, "residency against tau"),
        "Residency against tau: what asking for more fidelity costs in memory, for requests of "
        "several lengths.",
    )
