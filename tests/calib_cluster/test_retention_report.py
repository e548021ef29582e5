"""The report of compiled retention tables: its numbers are the tables' and their evidence's."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser
from itertools import pairwise
from xml.etree.ElementTree import Element, TreeBuilder

import numpy as np
import pytest

from calib_cluster.errors import CalibrationError
from calib_cluster.report.retention import RetentionReportInput, render_retention_report
from calib_cluster.report.retention.risk import labels
from calib_cluster.report.retention.scale import STEPS, Scale, bars
from kvpolicy.__main__ import main as kvpolicy_main
from kvpolicy.artifact import PointSpec, load_artifact, write_artifact
from kvpolicy.evidence import REPORT_FILE
from kvpolicy.geometry import ModelGeometry, read_geometry
from kvpolicy.manifest import CalibrationRecord
from kvpolicy.retention import RULES, RetentionRule, RetentionTables
from kvpolicy.retention_evidence import CellEvidence, RetentionEvidence
from kvpolicy.windows import WindowPolicy
from tests.calib_cluster.test_compile import World, compiled
from tests.calib_cluster.test_report import HOSTILE, SHAPES, VOID, Page
from tests.calib_cluster.tiny_models import save_tiny

RECORD = CalibrationRecord(
    "cql-exact", {"bible": "cd" * 32}, 40, 640, 3, "deadbeef",
    {"alpha": 0.75, "joint": True, "budgets": [4, 8]},
)  # fmt: skip
COSTS = {"reward records": 3000, "records per CPU second": 12.5}
SIZE_LIMIT = 1_200_000
BINS = (20, 4)


class _Tree(HTMLParser):
    """The page as elements."""

    def __init__(self, html: bytes) -> None:
        super().__init__(convert_charrefs=True)
        self._builder = TreeBuilder()
        self.feed(html.decode())
        self.close()
        self.root = self._builder.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._builder.start(tag, {name: value or "" for name, value in attrs})
        if tag in VOID:
            self._builder.end(tag)

    def handle_endtag(self, tag: str) -> None:
        self._builder.end(tag)

    def handle_data(self, data: str) -> None:
        self._builder.data(data)


def sections(html: bytes) -> dict[str, Element]:
    """Sections of a page by title."""
    found = _Tree(html).root.iter("section")
    return {section.find("h2").text: section for section in found}


def text(element: Element) -> str:
    return "".join(element.itertext())


def classed(element: Element, tag: str, cls: str) -> list[Element]:
    """Elements below of that tag and class."""
    return [e for e in element.iter(tag) if cls in e.get("class", "").split()]


def table_over_cells(table: Element, kind: type = float) -> np.ndarray:
    """[E, P] numbers of a table over risk cells."""
    rows = [list(row.iter("td"))[1:] for row in table.find("tbody")]
    return np.array([[kind(text(cell).replace(",", "")) for cell in row] for row in rows])


@pytest.fixture(scope="module")
def geometry(tmp_path_factory) -> ModelGeometry:
    """Four layers, native and global in turn, of two kv heads."""
    return read_geometry(save_tiny("gemma2", tmp_path_factory.mktemp("gemma2")))


@pytest.fixture(scope="module")
def data(geometry) -> RetentionReportInput:
    """Tables compiled from made-up records in which one diagonal of risk cells has no prompt."""
    world = World(geometry)
    plain = world.records(2000, noise=0.3)
    some = plain.where((plain["entropy"] < 0.25) == (plain["perplexity"] > 1.5))
    found = compiled(world, some)
    arrays = found.evidence(some)
    evidence = RetentionEvidence(
        cells(arrays, "head"), cells(arrays, "gate"), np.array([[0, 10], [10, 0]])
    )
    return RetentionReportInput("tiny", "cql", geometry, found.tables, evidence, RECORD, COSTS)


def cells(arrays: dict[str, np.ndarray], table: str) -> CellEvidence:
    kinds = ("records", "support", "confidence", "empty")
    return CellEvidence(**{kind: arrays[f"{table}_{kind}"] for kind in kinds})


def random_input(shape: str, rule: RetentionRule = RULES["paper"]) -> RetentionReportInput:
    """A whole input of a model of ``test_report.SHAPES`` with seeded random content."""
    geom, rng = SHAPES[shape], np.random.default_rng(3)
    heads = len(geom.attention_layers), geom.max_kv_heads
    weights = rng.uniform(0.8, 1.5, heads).astype(np.float32)
    budgets, bins = ((128, 256, 512), BINS) if rule.gate == "table" else ((), (1, 1))
    gate = rng.uniform(0.8, 1, (len(budgets), heads[0], *bins)).astype(np.float32)
    edges = [np.sort(rng.uniform(0, 9, n - 1)).astype(np.float32) for n in bins]
    found = []
    for size in (heads, gate.shape):
        records = rng.integers(0, 4, size) * 500
        found.append(CellEvidence(records, records // 4, rng.random(size), records == 0))
    evidence = RetentionEvidence(found[0])
    if budgets:
        evidence = RetentionEvidence(*found, rng.integers(0, 5, bins))
    tables = RetentionTables(rule, weights, budgets, gate, *edges)
    return RetentionReportInput("m", "p", geom, tables, evidence, RECORD, COSTS)


# -- numbers ---------------------------------------------------------------------------------------


def test_every_weight_is_in_its_place_with_its_support(data):
    found = sections(render_retention_report(data))["Weights by layer and kv head"]
    (shown,) = classed(found, "div", "map")
    assert [strip.find("i").text for strip in shown] == ["1", "3"]  # global layers
    for row, strip in zip((1, 3), shown, strict=True):
        for head, cell in enumerate(strip.findall("b")):
            assert float(cell.text) == pytest.approx(data.tables.head_weights[row, head])
            counts = [getattr(data.evidence.heads, k)[row, head] for k in ("support", "records")]
            said = f"layer {row}, kv head {head}: weight {cell.text}, {counts[0]} of {counts[1]:,} "
            assert cell.get("title").startswith(said)


def test_every_threshold_is_in_its_place_with_its_support(data):
    found = sections(render_retention_report(data))["Thresholds by layer and risk cell"]
    blocks = classed(found, "div", "only")
    assert [text(block.find("h3")) for block in blocks] == ["budget 4 tokens", "budget 8 tokens"]
    for budget, block in enumerate(blocks):
        panels = classed(block, "div", "gate")
        assert len(panels) == 2
        for p, panel in enumerate(panels):
            head, *rows = panel
            assert [span.text for span in head.findall("span")] == ["1", "2"]
            assert [row.find("i").text for row in rows] == ["1", "3"]
            for layer, row in zip((1, 3), rows, strict=True):
                for e, cell in enumerate(row.findall("b")):
                    check_threshold(data, cell, (budget, layer, e, p))


def check_threshold(data: RetentionReportInput, cell: Element, at: tuple[int, ...]) -> None:
    threshold, said = cell.get("title").split(": ")
    assert float(threshold) == pytest.approx(data.tables.gate[at])
    records, support, confidence, empty = (
        getattr(data.evidence.gate, k)[at] for k in ("records", "support", "confidence", "empty")
    )
    assert empty == (at[2] == at[3])  # the diagonal without prompts
    assert (cell.get("class") == "none") == empty
    if empty:
        assert said == "no record" and threshold == "0.8"
    else:
        assert said.startswith(f"{support} of {records}, ")
        assert abs(float(re.search(r"(\d+)%", said)[1]) / 100 - confidence) <= 0.01


def test_tables_over_risk_cells(data):
    found = sections(render_retention_report(data))
    (prompts,) = found["Risk cells"].iter("table")
    assert (table_over_cells(prompts, int) == data.evidence.cell_prompts).all()
    assert [cell.text for cell in classed(prompts, "td", "none")] == ["0", "0"]
    assert "20 prompts in 4 cells; 2 of them hold none" in text(found["Risk cells"])
    edges = [text(cell).replace("\u00a0", " ") for cell in classed(prompts, "td", "edge")]
    # of prompts at 0 and .5, 1 and 2: the medians between
    assert edges == ["< 0.25", "≥ 0.25"]
    heads = [text(cell).replace("\u00a0", " ") for cell in prompts.find("thead")[1]]
    assert heads == ["< 1.5", "≥ 1.5"]
    for budget, block in enumerate(classed(found["Thresholds by risk cell"], "div", "only")):
        means, records = block.iter("table")
        gate = data.tables.gate[budget, [1, 3]].mean(axis=0)
        np.testing.assert_allclose(table_over_cells(means), gate, atol=5e-4)
        counts = data.evidence.gate.records[budget, 1]
        assert (table_over_cells(records, int) == counts).all()
        assert "4 of 8 thresholds had no record" in text(block)


def test_support_in_sum(data):
    page = Page(render_retention_report(data))
    records = {int(x) for x in data.evidence.heads.records[[1, 3]].flat}
    (each,) = records
    head = page.row("head weights")
    assert head[1:6] == ["4", "0", *[f"{each:,}"] * 3]
    for budget, name in enumerate(("4 tokens", "8 tokens")):
        counts = data.evidence.gate.records[budget, [1, 3]]
        support = data.evidence.gate.support[budget, [1, 3]]
        row = page.row(f"gate, {name}")
        most, median = f"{counts.max():,}", f"{int(np.median(counts)):,}"
        assert row[1:8] == [
            "8", "4", "0", median, most, f"{int(np.median(support)):,}", f"{(support == 0).sum()}",
        ]  # fmt: skip
    sure = data.evidence.heads.confidence[[1, 3]] >= 0.95
    gate_sure = data.evidence.gate.confidence[:, [1, 3]] >= 0.95
    assert (
        f"{sure.sum()} of 4 weights are at least 95% sure, and {gate_sure.sum()} of 16 thresholds; "
        "8 thresholds have no record behind them."
    ) in page.text


def test_histograms_count_everything(data):
    found = sections(render_retention_report(data))
    for name, total in (("Head weights", 4), ("Thresholds by risk cell", 4)):
        for chart in found[name].iter("svg"):
            counts = [int(text(bar).split(":")[0]) for bar in classed(chart, "rect", "count")]
            assert sum(counts) == total


def test_values_on_a_grid_get_a_bar_each():
    values = np.array([0.8, 0.825, 0.825, 0.9], np.float32)
    chart = bars(values, "weight", "heads", "", "weights")
    shown = [text(bar).split(":") for bar in classed(chart, "rect", "count")]
    assert [int(count) for count, _ in shown] == [1, 2, 1]
    for (_, where), value in zip(shown, (0.8, 0.825, 0.9), strict=True):
        low, high = map(float, re.findall(r"[\d.]+", where))
        assert low < value < high and high - low == pytest.approx(0.025, abs=1e-4)


def test_heads_that_stand_out_are_the_extremes():
    data = random_input("smollm2")
    (table,) = sections(render_retention_report(data))["Head weights"].iter("table")
    rows = [[text(cell) for cell in row] for row in table.find("tbody")]
    ordered = np.sort(data.tables.head_weights.ravel())[::-1]
    expected = [f"{w:.4g}" for w in (*ordered[:5], *ordered[-5:])]
    assert [row[1] for row in rows] == expected
    for place, weight, support, records, _ in rows:
        at = tuple(int(part) for part in place.split(" / "))
        assert weight == f"{data.tables.head_weights[at]:.4g}"
        assert support == f"{data.evidence.heads.support[at]:,}"
        assert records == f"{data.evidence.heads.records[at]:,}"


def test_records_without_the_chosen_threshold_are_marked(data):
    support = data.evidence.gate.support.copy()
    support[0, 1, 0, 1] = 0
    gate = dataclasses.replace(data.evidence.gate, support=support)
    changed = dataclasses.replace(data, evidence=dataclasses.replace(data.evidence, gate=gate))
    before, after = (
        sections(render_retention_report(d))["Thresholds by layer and risk cell"]
        for d in (data, changed)
    )
    assert not classed(before, "b", "untried")
    marked = [cell for cell in classed(after, "b", "untried") if cell.get("title")]
    assert len(marked) == 1 and ": 0 of " in marked[0].get("title")
    assert "none of this threshold" in text(after)


def test_rule_costs_and_provenance_are_all_there(data):
    page = Page(render_retention_report(data))
    for part in (
        "Policy cql, compiled by cql-exact", "Retention tables for tiny", "cd" * 32, "deadbeef",
        "reward records3,000", "records per CPU second12.5", "alpha0.75", "budgets4, 8",
        "alpha_scopeglobal (as in the paper)",
    ):  # fmt: skip
        assert part in page.text
    assert "sliding window" in page.text  # of the two native layers


def test_without_a_gate_there_is_none():
    data = random_input("smollm2", RULES["head"])
    html = render_retention_report(data)
    assert list(sections(html)) == [
        "Rule: head", "Head weights", "Weights by layer and kv head", "Support", "Provenance",
    ]  # fmt: skip
    page = Page(html)
    assert "there is no gate" in page.text and "a weight changes nothing" in page.text
    assert "pool5 (the paper's is 1)" in page.text
    assert not [tag for tag, _ in page.tags if tag == "input"]


# -- the page --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_any_model_gives_a_whole_page(shape):
    data = random_input(shape)
    html = render_retention_report(data)
    page = Page(html)
    assert page.open == []
    assert len(html) < SIZE_LIMIT
    maps = sections(html)["Thresholds by layer and risk cell"]
    cells = [b for gate in classed(maps, "div", "gate") for b in gate.iter("b")]
    assert len(cells) == 3 * len(data.rows) * 20 * 4
    levels = {f"l{i}" for i in range(STEPS)} | {"none", "untried"}
    assert {cls for cell in cells for cls in cell.get("class").split()} <= levels
    radios = [a for tag, a in page.tags if tag == "input"]
    assert [a["id"] for a in radios if "checked" in a] == ["pick2"] and len(radios) == 3


def test_uniform_tables_give_a_page():
    data = random_input("gemma3")
    tables = RetentionTables.uniform(data.geometry, RULES["paper"])
    kinds = dataclasses.asdict(data.evidence.gate)
    gate = CellEvidence(**{kind: array[:1, :, :1, :1] for kind, array in kinds.items()})
    evidence = RetentionEvidence(data.evidence.heads, gate, np.array([[7]]))
    flat = dataclasses.replace(data, tables=tables, evidence=evidence)
    page = Page(render_retention_report(flat))
    assert page.open == [] and "7 prompts in 1 cell; none is empty." in page.text


def test_same_input_same_bytes_and_other_other(data):
    assert render_retention_report(data) == render_retention_report(dataclasses.replace(data))
    weights = data.tables.head_weights.copy()
    weights[1, 0] += 0.1
    other = dataclasses.replace(data, tables=dataclasses.replace(data.tables, head_weights=weights))
    assert render_retention_report(data) != render_retention_report(other)


def test_needs_nothing_from_outside(data):
    html = render_retention_report(data).decode()
    for forbidden in ("http:", "https:", "<script", "@import", "url(", "//"):
        assert forbidden not in html


def test_hostile_names_are_only_text(data):
    record = CalibrationRecord(HOSTILE, {HOSTILE: HOSTILE}, 1, 1, 0, HOSTILE, {HOSTILE: HOSTILE})
    hostile = dataclasses.replace(
        data, model_name=HOSTILE, name=HOSTILE, record=record, costs={HOSTILE: HOSTILE}
    )
    page = Page(render_retention_report(hostile))
    plain = Page(render_retention_report(data))
    assert page.open == []
    assert {tag for tag, _ in page.tags} == {tag for tag, _ in plain.tags}
    assert not [name for _, a in page.tags for name in a if name.startswith("on")]


def test_it_goes_into_an_artifact_and_show_names_it(data, tmp_path, capsys):
    html = render_retention_report(data)
    folder = write_artifact(
        tmp_path, model_name="tiny", name="cql", retention=data.tables,
        points=[PointSpec("default", WindowPolicy.native(data.geometry))],
        retention_calibration=RECORD, extra_files={REPORT_FILE: html},
    )  # fmt: skip
    assert REPORT_FILE in load_artifact(folder).manifest.files
    assert (folder / REPORT_FILE).read_bytes() == html
    assert kvpolicy_main(["show", str(folder)]) == 0
    assert "report: report.html in the policy's folder" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"geometry": SHAPES["smollm2"]}, r"head_weights must have shape \[30, 3\]"),
        ({"evidence": random_input("gemma3").evidence}, r"head evidence covers \[18, 1\] cells"),
        ({"evidence": random_input("smollm2", RULES["head"]).evidence}, "evidence"),
    ],
)
def test_wrong_input_is_refused(data, changes, message):
    with pytest.raises(CalibrationError, match=message):
        dataclasses.replace(data, **changes)


# -- colours and labels ----------------------------------------------------------------------------


def test_colours_ascend_with_values():
    scale = Scale(0.8, 1.0)
    levels = [int(scale.level(0.8 + 0.01 * i)[1:]) for i in range(21)]
    assert levels == list(range(STEPS))
    assert scale.level(0.5) == "l0" and scale.level(2) == f"l{STEPS - 1}"
    assert Scale(1, 1).level(1) == f"l{STEPS // 2}"


def test_bins_are_named_by_their_edges():
    assert labels(np.zeros(0, np.float32)) == ["any"]
    named = [label.replace("\u00a0", " ") for label in labels(np.array([1, 2.5, 40], np.float32))]
    assert named == ["< 1", "1 – 2.5", "2.5 – 40", "≥ 40"]
    inner = [label.split(" – ") for label in named[1:-1]]
    assert all(a[1] == b[0] for a, b in pairwise(inner))
