"""The report of a compiled mix: shares, mixtures, retrieval heads, and what more room is worth."""

from __future__ import annotations

import dataclasses
from xml.etree.ElementTree import Element

import numpy as np
import pytest

from calib_cluster.compile import compile_tables
from calib_cluster.compile_fit import _evidence
from calib_cluster.report.palette import blend
from calib_cluster.report.retention import RetentionReportInput, render_retention_report
from calib_cluster.report.retention.scale import Scale
from kvpolicy.geometry import read_geometry
from kvpolicy.retention import MixTables
from kvpolicy.retention_evidence import CellEvidence, RetentionEvidence
from tests.calib_cluster.test_compile_mix import planted
from tests.calib_cluster.test_report import SHAPES, Page
from tests.calib_cluster.test_retention_report import (
    COSTS,
    RECORD,
    SIZE_LIMIT,
    classed,
    sections,
    text,
)
from tests.calib_cluster.tiny_models import save_tiny
from tests.kvpolicy.retention.tables import compiled_mix


def random_mix(shape: str, budgets: tuple[int, ...] = (64, 256)) -> RetentionReportInput:
    """A mix for a model of ``SHAPES``; the last two of three budgets have the same tables."""
    geom = SHAPES[shape]
    tables, rng = compiled_mix(geom, budgets), np.random.default_rng(3)
    if len(budgets) > 2:
        rows = [0, 1, 1]
        shares, quotas = tables.mix.shares[rows], tables.mix.quotas[rows]
        mix = dataclasses.replace(tables.mix, shares=shares, quotas=quotas)
        tables = dataclasses.replace(tables, mix=mix)
    size = tables.head_weights.shape
    records = rng.integers(1, 4, size) * 500
    cells = CellEvidence(records, records // 4, rng.random(size), records == 0)
    worth = rng.normal(0.01, 0.02, size).astype(np.float32)
    evidence = RetentionEvidence(cells, worth=worth)
    return RetentionReportInput("m", "p", geom, tables, evidence, RECORD, COSTS)


def mapped(block: Element) -> dict[tuple[int, int], Element]:
    """Cells of the one layer map in ``block``, by layer id and head."""
    (shown,) = classed(block, "div", "map")
    return {
        (int(strip.find("i").text), head): cell
        for strip in shown
        for head, cell in enumerate(strip.findall("b"))
    }


def blocks(section: Element, names: list[str]) -> list[Element]:
    found = classed(section, "div", "only")
    assert [text(block.find("h3")) for block in found] == [f"budget {n} tokens" for n in names]
    return found


MIX_SECTIONS = [
    "Rule: mix", "Shares of the budget", "Shares by layer and kv head",
    "What a doubled share is worth", "Mixtures", "Retrieval heads", "Support", "Provenance",
]  # fmt: skip


def test_a_mix_shows_shares_and_no_weights():
    data = random_mix("gemma3", (64, 128, 256))
    html = render_retention_report(data)
    found = sections(html)
    assert list(found) == MIX_SECTIONS
    heads = {(5, 0), (11, 0), (17, 0)}  # global layers of one kv head
    for row, block in enumerate(blocks(found["Shares by layer and kv head"], ["64", "128, 256"])):
        shown = mapped(block)
        assert set(shown) == heads
        for (layer, head), cell in shown.items():
            share = data.tables.mix.shares[row, layer, head]
            assert float(cell.text) == pytest.approx(share, abs=0.005)
            assert cell.get("title") == f"layer {layer}, kv head {head}: share {share:.3g}"
    low, high = (f(data.tables.mix.shares[:, [5, 11, 17]]) for f in (np.min, np.max))
    page = Page(html)
    assert f"deal it out, {low:.2g} to {high:.2g} times that to each" in page.text
    assert "head weight" not in page.text.lower()


def test_every_head_of_a_mix_has_its_mixture():
    data = random_mix("smollm2")
    found = sections(render_retention_report(data))["Mixtures"]
    for row, block in enumerate(blocks(found, ["64", "256"])):
        (table,) = block.iter("table")
        legend = {}
        for line in table.find("tbody"):
            number, *parts, count, _ = [text(cell) for cell in line]
            legend[number] = tuple(int(part.rstrip("%")) / 100 for part in parts)
            shown = [cell for cell in mapped(block).values() if cell.text == number]
            assert len(shown) == int(count)
            assert {c.get("class") for c in shown} == {line.find("th").find("b").get("class")}
        assert sorted(legend.values()) == [(0, 0.3, 0.7), (0.4, 0.3, 0.3), (1, 0, 0)]
        for at, cell in mapped(block).items():
            quotas = data.tables.mix.quotas[(row, *at)]
            assert legend[cell.text] == pytest.approx((quotas / quotas.sum()).tolist())


def test_bars_of_mixtures_are_as_long_as_their_parts():
    (first, *_) = classed(
        sections(render_retention_report(random_mix("smollm2")))["Mixtures"], "div", "only"
    )
    for line in next(first.iter("tbody")):
        parts = [float(text(cell).rstrip("%")) * 10 for cell in line.findall("td")[:3]]
        segments = [float(s.get("style").removeprefix("flex:")) for s in line.iter("span")]
        assert segments == [part for part in parts if part]


def test_query_weights_are_in_their_places_and_those_that_retrieve_are_numbered():
    data = random_mix("gemma3")
    found = sections(render_retention_report(data))["Retrieval heads"]
    weights, shown = data.tables.mix.query_weights, mapped(found)
    (heads,) = {layer.num_q_heads for layer in data.geometry.layers}
    assert set(shown) == {(layer, head) for layer in (5, 11, 17) for head in range(heads)}
    top = max(weights[at] for at in shown)
    numbered = 0
    for at, cell in shown.items():
        assert cell.get("title").endswith(f"(kv head 0): weight {weights[at]:.3g}")
        retrieves = weights[at] >= 0.1 * top
        numbered += retrieves
        assert cell.text == (f"{weights[at]:.2f}" if retrieves else "\u00a0")
        assert ("quiet" in cell.get("class")) == (weights[at] < 0.01 * top)
    assert f"{numbered} of {3 * heads} query heads weigh at least 0.1" in text(found)


def test_worth_is_in_its_place_in_thousandths_or_left_out():
    data = random_mix("smollm2")
    html = render_retention_report(data)
    for at, cell in mapped(sections(html)["What a doubled share is worth"]).items():
        value = float(cell.text.replace("\u2212", "-"))
        assert value == pytest.approx(1000 * data.evidence.worth[at], abs=0.5)
    bare = dataclasses.replace(data, evidence=dataclasses.replace(data.evidence, worth=None))
    html = render_retention_report(bare)
    left = [name for name in MIX_SECTIONS if name != "What a doubled share is worth"]
    assert list(sections(html)) == left and "thousandths" not in html.decode()


def test_heads_that_keep_most_and_least_stand_out():
    data = random_mix("smollm2")
    block = classed(sections(render_retention_report(data))["Shares of the budget"], "div", "only")[
        1
    ]
    (table,) = block.iter("table")
    rows = [[text(cell) for cell in row] for row in table.find("tbody")]
    ordered = np.sort(data.tables.mix.shares[1].ravel())[::-1]
    assert [row[1] for row in rows] == [f"{x:.2f}" for x in (*ordered[:5], *ordered[-5:])]
    for place, _, worth, _, records, sure in rows:
        at = tuple(int(part) for part in place.split(" / "))
        value = float(worth.replace("\u2212", "-"))
        assert value == pytest.approx(1000 * data.evidence.worth[at], abs=0.06)
        assert records == f"{data.evidence.heads.records[at]:,}"
        assert abs(float(sure.strip("<>%")) / 100 - data.evidence.heads.confidence[at]) <= 0.01


def test_a_mix_with_the_same_tables_at_every_budget_has_no_picker():
    data = random_mix("smollm2")
    first = (np.repeat(x[:1], 2, axis=0) for x in (data.tables.mix.shares, data.tables.mix.quotas))
    mix = MixTables(*first, data.tables.mix.query_weights)
    flat = dataclasses.replace(data, tables=dataclasses.replace(data.tables, mix=mix))
    page = Page(render_retention_report(flat))
    assert page.open == [] and not [tag for tag, _ in page.tags if tag == "input"]
    assert "compiled for budgets of 64, 256 tokens" in page.text
    assert page.row("best shares")[1:3] == ["90", "0"]


def test_a_compiled_mix_becomes_evidence_and_a_page(tmp_path):
    """From made-up records to what is published: worth lies where its units are."""
    geometry = read_geometry(save_tiny("gemma2", tmp_path / "gemma2"))
    records = planted(geometry, [0.4, 0.0, 0.1, 0.0], 2, count=800)
    found = compile_tables(records, geometry, (16, 32))
    evidence = _evidence(found, records)
    evidence.check_fits(found.tables)
    np.testing.assert_allclose(evidence.worth[[1, 1, 3, 3], [0, 1, 0, 1]], found.worth, rtol=1e-6)
    assert not evidence.worth[[0, 2]].any() and evidence.worth[1, 0] > 0
    data = RetentionReportInput("m", "p", geometry, found.tables, evidence, RECORD, COSTS)
    page = Page(render_retention_report(data))
    assert page.open == [] and "4 kv heads of 2 layers keep a budget of tokens" in page.text


@pytest.mark.parametrize("shape", SHAPES)
def test_a_mix_for_any_model_gives_a_whole_page(shape):
    data = random_mix(shape, (64, 128, 256))
    html = render_retention_report(data)
    page = Page(html)
    assert page.open == [] and len(html) < SIZE_LIMIT
    (block, _) = classed(sections(html)["Shares by layer and kv head"], "div", "only")
    assert len(mapped(block)) == data.heads.sum()
    for forbidden in ("http:", "https:", "<script", "url(", "//"):
        assert forbidden not in html.decode()


def test_shares_are_coloured_by_ratio():
    scale = Scale(0.25, 4.0, log=True)
    assert [scale.level(x) for x in (0.25, 0.5, 1, 2, 4)] == ["l0", "l5", "l10", "l15", "l20"]


def test_mixtures_are_coloured_between_their_sources():
    colours = ("#ff0000", "#00ff00", "#0000ff")
    assert blend(colours, (1, 0, 0)) == "#ff0000"
    assert blend(colours, (0.4, 0.4, 0.2)) == "#666633"
