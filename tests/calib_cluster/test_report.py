"""The HTML report: every window is in it, and nothing from its input can break or extend it."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calib_cluster.errors import CalibrationError
from calib_cluster.report import ReportInput, render_report
from calib_cluster.report.palette import ink, point_colours, window_colours
from kvpolicy.artifact import PointSpec
from kvpolicy.evidence import Evidence, HeldOut
from kvpolicy.geometry import LayerGeometry, LayerKind, ModelGeometry
from kvpolicy.manifest import CalibrationRecord
from kvpolicy.report.charts import spread
from kvpolicy.windows import FULL, WindowPolicy

TAUS = (0.95, 0.98, 0.99, 0.995, 0.999)
CODEBOOK = (64, 128, 256, 512, 1024, 2048, 4096, 16384)
SIZE_LIMIT = 300_000
VOID = frozenset({"meta", "link", "input", "br"})
HOSTILE = '"><script src="http://evil.example/x.js"></script><img src=x onerror=y>&amp;\x00\ud800'


def geometry(kinds: str, heads: int, context: int, native: int = 512) -> ModelGeometry:
    """One layer for each letter: g global, n native, r recurrent."""
    layers = []
    for index, kind in enumerate(kinds):
        if kind == "r":
            layers.append(LayerGeometry(index, LayerKind.RECURRENT, state_bytes=1024))
            continue
        window = native if kind == "n" else 0
        which = LayerKind.NATIVE if kind == "n" else LayerKind.GLOBAL
        layers.append(LayerGeometry(index, which, 3 * heads, heads, 64, 64, window))
    return ModelGeometry("TestForCausalLM", "test", tuple(layers), context, 64, 1000, 2)


SHAPES = {
    "smollm2": geometry("g" * 30, 3, 8192),
    "gemma3": geometry("nnnnng" * 3, 1, 32768),
    "large": geometry("g" * 64, 8, 131072),
    "hybrid": geometry("rrrg" * 4, 2, 262144),
}


def policy(geom: ModelGeometry, rng: np.random.Generator) -> WindowPolicy:
    """Random windows of the codebook, native ones in place."""
    windows = np.zeros((len(geom.attention_layers), geom.max_kv_heads), dtype=np.int32)
    for row, layer in zip(windows, geom.attention_layers, strict=True):
        heads = layer.num_kv_heads
        row[:heads] = layer.native_window or rng.choice([*CODEBOOK, FULL], size=heads)
    return WindowPolicy(geom, windows, 4)


def report_input(geom: ModelGeometry, taus: tuple[float, ...] = TAUS) -> ReportInput:
    """A whole input with seeded random content."""
    rng = np.random.default_rng(7)
    points = [PointSpec(f"tau-{tau:g}", policy(geom, rng), tau, 1 - (1 - tau) / 2) for tau in taus]
    shape = (len(taus), len(geom.attention_layers), geom.max_kv_heads, len(CODEBOOK))
    cosine = np.sort(rng.uniform(0.9, 1.0, size=shape), axis=-1)
    held_out = HeldOut({"moby": "ab" * 32}, 12, 24576, 3.0, {p.name: 3.0123 for p in points})
    record = CalibrationRecord(
        "seqcalib", {"bible": "cd" * 32, "code": "ef" * 32}, 5, 10240, 3, "deadbeef",
        {"length": 2048, "codebook": list(CODEBOOK), "chat_template": False, "note": None},
    )  # fmt: skip
    evidence = Evidence(CODEBOOK, cosine, np.arange(len(CODEBOOK), 0, -1, dtype=np.int64) * 100)
    return ReportInput("model", "seqcalib-s4", points, points[-1].name, evidence, held_out, record)


class Page(HTMLParser):
    """Checks that tags balance, and collects text, attributes, tables and window maps."""

    def __init__(self, html: bytes) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.rows: list[list[str]] = []
        self.maps: list[dict[int, list[str]]] = []
        self.feed(html.decode("utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        if tag not in VOID:
            self.open.append(tag)
        if attributes.get("class") == "map":
            self.maps.append({})
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th") and self.rows:
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            raise AssertionError(f"</{tag}> closes another tag")

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if self.open and self.open[-1] in ("style", "script", "title"):
            return
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data
        elif self.maps and self.open[-2:] == ["div", "i"]:
            self.maps[-1][int(data)] = []
        elif self.maps and self.open[-2:] == ["div", "b"]:
            next(reversed(self.maps[-1].values())).append(data)

    @property
    def text(self) -> str:
        """All text."""
        return "".join(self.words)

    def row(self, first: str, nth: int = 0) -> list[str]:
        """The ``nth`` table row whose first cell is ``first``."""
        return [row for row in self.rows if row and row[0] == first][nth]


@pytest.fixture(scope="module")
def large_page() -> bytes:
    return render_report(report_input(SHAPES["large"]))


def decoded(cell: str) -> int:
    """Window that a map's cell names."""
    if cell == "full":
        return FULL
    return int(cell[:-1]) * 1024 if cell.endswith("k") else int(cell)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_window_of_every_point_is_in_its_map(shape):
    data = report_input(SHAPES[shape])
    page = Page(render_report(data))
    assert page.open == []
    assert len(page.maps) == len(data.points)
    for point, shown in zip(data.points, page.maps, strict=True):
        layers = data.geometry.attention_layers
        assert list(shown) == [layer.layer_id for layer in layers]
        for row, layer in zip(point.policy.windows, layers, strict=True):
            cells = [decoded(cell) for cell in shown[layer.layer_id]]
            assert cells == row[: layer.num_kv_heads].tolist()


def test_native_cells_are_hatched_and_only_they():
    page = Page(render_report(report_input(SHAPES["gemma3"], (0.99,))))
    hatched = [a for tag, a in page.tags if tag == "b" and a.get("class") == "native"]
    assert len(hatched) == 15 + 1  # and the key's
    assert "native" not in str(Page(render_report(report_input(SHAPES["smollm2"]))).tags)


def test_same_input_same_bytes():
    first, second = report_input(SHAPES["smollm2"]), report_input(SHAPES["smollm2"])
    settings = dict(reversed(second.calibration.hyperparameters.items()))
    record = first.calibration
    reordered = CalibrationRecord(
        record.method, record.corpora, record.prompts, record.tokens, record.seed,
        record.code_version, settings,
    )  # fmt: skip
    second = dataclasses.replace(second, calibration=reordered)
    assert render_report(first) == render_report(second)


def test_other_windows_other_bytes():
    data = report_input(SHAPES["smollm2"])
    points = list(data.points)
    windows = points[0].policy.windows.copy()
    windows[29, 2] = 64 if windows[29, 2] != 64 else 128
    points[0] = dataclasses.replace(points[0], policy=WindowPolicy(data.geometry, windows, 4))
    assert render_report(data) != render_report(dataclasses.replace(data, points=points))


def test_needs_nothing_from_outside(large_page):
    html = large_page.decode()
    for forbidden in ("http:", "https:", "<script", "@import", "url(", "//"):
        assert forbidden not in html
    links = [a[k] for _, a in Page(large_page).tags for k in ("href", "src") if k in a]
    assert links == ["data:,"]


def test_large_model_stays_small(large_page):
    assert len(large_page) < SIZE_LIMIT


def test_hostile_names_are_only_text():
    data = report_input(SHAPES["gemma3"])
    points = [dataclasses.replace(p, name=f"{p.name}{HOSTILE}") for p in data.points]
    record = CalibrationRecord(
        HOSTILE, {HOSTILE: HOSTILE}, 1, 1, 0, HOSTILE, {HOSTILE: HOSTILE, "x": [1]}
    )
    hostile = dataclasses.replace(
        data, model_name=HOSTILE, policy_name=HOSTILE, points=points, default_point=points[2].name,
        held_out=HeldOut({HOSTILE: HOSTILE}, 1, 1, 2.0, {points[0].name: 2.5}), calibration=record,
    )  # fmt: skip
    page = Page(render_report(hostile))
    assert page.open == []
    plain = Page(render_report(data))
    assert {tag for tag, _ in page.tags} == {tag for tag, _ in plain.tags}
    handlers = [name for _, a in page.tags for name in a if name.startswith("on")]
    assert handlers == []
    assert '"><script src="http://evil.example/x.js"></script>' in page.text
    assert "\x00" not in page.text


def test_missing_evidence_is_said_not_printed_as_a_number():
    data = report_input(SHAPES["smollm2"])
    cosine = data.evidence.mean_cosine.copy()
    cosine[:, :, :, 2:] = np.nan
    positions = data.evidence.positions.copy()
    positions[2:] = 0
    evidence = Evidence(CODEBOOK, cosine, positions)
    page = Page(render_report(dataclasses.replace(data, evidence=evidence)))
    shown = [*page.words, *(str(a.get("title")) for _, a in page.tags)]
    assert not [text for text in shown if re.search(r"\bnan\b", text, re.IGNORECASE)]
    assert page.row("256")[1] == "not tested"
    assert "no measured cosine" in page.text


def test_without_any_evidence_it_still_renders():
    data = report_input(SHAPES["gemma3"])
    evidence = Evidence(
        CODEBOOK, np.full_like(data.evidence.mean_cosine, np.nan),
        np.zeros_like(data.evidence.positions),
    )  # fmt: skip
    page = Page(render_report(dataclasses.replace(data, evidence=evidence, held_out=None)))
    assert page.open == []
    assert "No unit of this point has a measured window." in page.text


def known_case(**changes: object) -> ReportInput:
    """Three units at tau .99 whose every figure is known by hand: windows 128, 64 and full."""
    geom = geometry("ggg", 1, 1024)
    windows = np.array([[128], [64], [FULL]], dtype=np.int32)
    cosine = np.array([[[[0.97, 0.992]], [[0.991, 0.999]], [[0.5, 0.875]]]])
    record = CalibrationRecord("seqcalib", {"text": "ab" * 32}, 1, 256, 0, "v", {})
    data = ReportInput(
        "model", "seqcalib", [PointSpec("tau-0.99", WindowPolicy(geom, windows, 4), 0.99, 0.9943)],
        "tau-0.99", Evidence((64, 128), cosine, np.array([192, 128])),
        HeldOut({"held": "cd" * 32}, 2, 512, 3.0, {"tau-0.99": 2.9975}), record,
    )  # fmt: skip
    return dataclasses.replace(data, **changes)


def test_points_table_by_hand():
    page = Page(render_report(known_case()))
    # 1024 tokens: units keep 4 + 128, 4 + 64 and 1024 of 1024
    share = f"{(132 + 68 + 1024) / 3072:.1%}"
    # peak at 1009 tokens: windows start at pages 54 and 58 of 64, and one sink page each
    pages = (64 - (1009 - 144) // 16 + 1) + (64 - (1009 - 80) // 16 + 1) + 64
    peak = f"{pages * 16 * 128 * 2 / 1000:.2f} kB"
    of_dense = f"{pages / 192:.1%}"
    cells = [share, peak, of_dense, "2.9975", "−0.0025", "0.99", "0.9943"]
    assert page.row("tau-0.99 default") == ["tau-0.99 default", *cells]
    assert page.row("dense cache")[1:5] == ["100%", "786.43 kB", "100.0%", "3.0000"]


def test_tightest_units_by_hand():
    page = Page(render_report(known_case()))
    assert page.row("1 / 0")[1:] == ["64", "0.9910", "+0.00100", "none", "–", "–"]
    assert page.row("0 / 0")[1:] == ["128", "0.9920", "+0.00200", "64", "0.9700", "0.0200"]
    order = [row[0] for row in page.rows if row and " / " in row[0]]
    assert order == ["1 / 0", "0 / 0"]
    note = "1 unit keeps full history: even the largest measured window, 128, reached only 0.8750"
    assert note in page.text
    assert ["tau-0.99", "0.01", "+0.00100", "+0.00150", "2", "1"] in page.rows


def test_a_cosine_below_tau_is_called_out():
    cosine = np.array([[[[0.97, 0.98]], [[0.991, 0.999]], [[0.5, 0.875]]]])
    evidence = Evidence((64, 128), cosine, np.array([192, 128]))
    assert "1 unit below tau" in Page(render_report(known_case(evidence=evidence))).text
    assert "below tau: this" not in Page(render_report(known_case())).text


def test_points_without_tau_or_loss():
    data = known_case()
    points = [PointSpec("plain", data.points[0].policy)]
    bare = dataclasses.replace(
        data, points=points, default_point="plain", held_out=HeldOut({}, 1, 1, 3.0, {})
    )
    page = Page(render_report(bare))
    assert page.row("plain default")[-4:] == ["–"] * 4
    assert "has no tau" in page.text
    assert "Residency against tau" not in page.text


@pytest.mark.parametrize("index", [0, 3])
def test_the_default_point_is_picked(index):
    data = report_input(SHAPES["gemma3"])
    data = dataclasses.replace(data, default_point=data.points[index].name)
    radios = [a for tag, a in Page(render_report(data)).tags if tag == "input"]
    assert [a["id"] for a in radios if "checked" in a] == [f"pick{index}"]
    assert {a["name"] for a in radios} == {"point"} and len(radios) == len(TAUS)


def test_wrong_input_is_refused():
    data = known_case()
    with pytest.raises(CalibrationError, match="at least one point"):
        dataclasses.replace(data, points=[])
    with pytest.raises(CalibrationError, match="'tau-1' is not among the points"):
        dataclasses.replace(data, default_point="tau-1")
    evidence = Evidence((64, 128), np.zeros((2, 3, 1, 2)), np.array([1, 1]))
    with pytest.raises(CalibrationError, match=r"found \[2, 3, 1, 2\]"):
        dataclasses.replace(data, evidence=evidence)
    other = PointSpec("other", WindowPolicy.full(SHAPES["smollm2"]))
    with pytest.raises(CalibrationError, match="share one model"):
        dataclasses.replace(data, points=[*data.points, other])
    native = geometry("nn", 1, 1024)
    with pytest.raises(CalibrationError, match="no unit"):
        dataclasses.replace(
            data, points=[PointSpec("tau-0.99", WindowPolicy.native(native))],
            evidence=Evidence((64,), np.full((1, 2, 1, 1), np.nan), np.array([1])),
        )  # fmt: skip


def luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(digit * 2 for digit in colour[1:])
    parts = np.frombuffer(bytes.fromhex(digits), dtype=np.uint8) / 255
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("count", [2, 3, 8, 13])
def test_colours_are_ordered_and_readable(dark, count):
    colours = window_colours(count, dark)
    levels = [luminance(colour) for colour in colours]
    assert levels == sorted(levels, reverse=not dark)
    for colour, level in zip(colours, levels, strict=True):
        low, high = sorted((level, luminance(ink(colour))))
        assert (high + 0.05) / (low + 0.05) >= 4.5
    background = luminance("#14181c" if dark else "#ffffff")
    for colour in point_colours(count, dark):
        low, high = sorted((luminance(colour), background))
        assert (high + 0.05) / (low + 0.05) >= 3


@given(st.lists(st.floats(0, 100), max_size=7))
def test_labels_never_overlap(wanted):
    placed = spread(wanted, gap=12, low=0, high=100)
    ordered = sorted(placed)
    assert all(b - a >= 12 - 1e-9 for a, b in pairwise(ordered))
    assert all(-1e-9 <= value <= 100 + 1e-9 for value in placed)
    assert sorted(range(len(wanted)), key=lambda i: (wanted[i], i)) == sorted(
        range(len(placed)), key=lambda i: placed[i]
    )
