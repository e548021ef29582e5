"""The page and the tables: whole, honest about losses, readable at every width."""

from __future__ import annotations

import html
import io
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console

from kvpolicy.report.charts import Axis
from loadtest.capacity import terminal
from loadtest.capacity.compare import at_equal, at_largest, base_of, offered, tax_of
from loadtest.capacity.page import render, write_report
from loadtest.capacity.page.plots import axis_to
from loadtest.capacity.quality_file import QualityPoint
from loadtest.capacity.sides import Role
from loadtest.errors import UserError
from tests.loadtest.capacity_samples import (
    RATES,
    batch_result,
    batch_side,
    context_result,
    context_side,
)

CHROMIUM = shutil.which("chromium")


class Tags(HTMLParser):
    """Counts tags, checks that they nest, and collects text and addresses."""

    VOID = ("meta", "link")

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.counts: dict[str, int] = {}
        self.addresses: list[str] = []
        self.feed(page.decode())
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.addresses += [value for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


# -- what is compared ------------------------------------------------------------------------------


def test_ratios_are_of_the_runs_they_say():
    result = batch_result()
    stock, full, narrow, frozen = result.sides
    assert base_of(result.sides) is stock and offered(result.sides) == [narrow, frozen]
    assert tax_of(result).ratio == pytest.approx(6.6 / 8.0)
    assert at_equal(result, narrow, stock).ratio == pytest.approx(7.2 / 8.0)
    assert at_largest(frozen, stock).ratio == pytest.approx(17.0 / 8.0)
    alone = replace(result, sides=[narrow])
    assert base_of(alone.sides) is None and offered(alone.sides) == [narrow]
    assert tax_of(replace(result, sides=[stock, narrow])) is None
    assert full not in offered(result.sides)
    assert offered([stock, full]) == [full], "full is what is offered if nothing else is"


def test_a_side_that_holds_less_than_the_equal_batch_is_compared_at_its_own():
    result = batch_result()
    small = replace(result.sides[2], largest=1, runs=result.sides[2].runs[:1])
    assert at_equal(result, small, result.sides[0]).ratio == pytest.approx(4.4 / 5.0)


# -- the terminal ----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [batch_result, context_result])
def test_tables_are_whole_at_100_columns(make):
    result = make()
    console = Console(file=io.StringIO(), width=100, highlight=False, markup=False)
    terminal.show(result, [Path("a.json")], console)
    text = console.file.getvalue()
    assert "…" not in text and max(map(len, text.splitlines())) <= 100
    for side in result.sides:
        assert f"{side.server.name}: {side.server.what}" in text


def test_losses_are_said_as_plainly_as_gains():
    said = " ".join(terminal.batch_meaning(batch_result(finished=False)))
    assert "RaggedKV windows ran 6 requests together where stock SGLang ran 3 (2.00x" in said
    assert "nothing dropped: 0.82x of stock's output rate at batch 3 (slower), CPU" in said
    assert "RaggedKV windows, output tokens/s: 0.90x at batch 3 (slower), 1.24x" in said
    assert "stock SGLang 10, RaggedKV full 10, RaggedKV windows 8, RaggedKV frozen 9" in said
    assert "not finished" in said and "Other work" not in said
    busy = " ".join(terminal.batch_meaning(batch_result(busy=True)))
    assert "Other work ran" in busy and "slower" not in busy and "0.90x" in busy
    said = " ".join(terminal.context_meaning(context_result()))
    assert (
        "windows completes prompts up to 8128 tokens where stock SGLang reaches 3200 (2.54x)"
        in said
    )
    assert "found in most depths only up to 5120" in said
    assert "reaches 3200 (0.92x), which is less: a prompt is held whole" in said
    assert "Other work" not in said and "not finished" not in said


def test_a_ratio_within_noise_is_no_gain_and_no_loss():
    same = replace(batch_side(Role.WINDOWS), runs=batch_side(Role.STOCK).runs, largest=3)
    result = replace(batch_result(), sides=[batch_side(Role.STOCK), same])
    said = " ".join(terminal.batch_meaning(result))
    assert said.count("the same within one run's noise") == 2


# -- the page --------------------------------------------------------------------------------------


def test_the_page_holds_every_figure_and_fetches_nothing():
    page = render(batch_result(), context_result())
    tags = Tags(page)
    assert b"default-src 'none'" in page and set(tags.addresses) == {"data:,"}
    assert "script" not in tags.counts and b"url(" not in page
    assert tags.counts["svg"] == 3 and b"prefers-color-scheme:dark" in page
    for figure in ("2.00x", "3.33x", "1.24x", "0.90x", "0.82x", "2.54x", "0.92x", "8 of 10"):
        assert figure in tags.text
    for rates in RATES.values():
        assert all(f"{rate:.2f}" in tags.text for rate in rates.values())
    assert "python -m loadtest max-batch --policy compiled" in tags.text
    assert "sglang 0.5.23" in tags.text and "understood to 5,120" in tags.text


def test_losses_are_marked_and_gains_too():
    page = render(batch_result(), None).decode()
    assert re.search(r'<b class="less">0\.90x</b><span class="who">windows', page)
    assert re.search(r'<b class="more">2\.00x</b><span class="who">windows', page)
    assert re.search(r'<b class="less">8 of 10</b>', page)
    busy = render(batch_result(busy=True), None).decode()
    assert "<b>0.90x</b>" in busy and '<b class="more">2.00x</b>' in busy
    assert "Other work ran on this machine: tokens/s vary" in busy


@pytest.mark.parametrize(
    ("batch", "context", "plots"),
    [(batch_result(), None, 2), (None, context_result(), 2), (batch_result(False), None, 2)],
)
def test_one_result_makes_a_page_of_its_own(batch, context, plots):
    tags = Tags(render(batch, context))
    assert tags.counts["svg"] == plots
    assert ("not finished" in tags.text) == (batch is not None and not batch.finished)


def test_nothing_to_report_is_refused():
    with pytest.raises(ValueError, match="nothing to report"):
        render(None, None)


def test_results_of_one_server_or_without_needles_are_shown_too():
    alone = replace(batch_result(), sides=[replace(batch_side(Role.WINDOWS), needles=None)])
    tags = Tags(render(alone, None))
    assert tags.counts["svg"] == 1 and "6" in tags.text
    nothing = replace(
        context_side(Role.WINDOWS), longest=0, answered=0, curve=[], attempts=[], kv_bytes=None,
        memory_bytes=None, prefill_seconds=None, needles=None,
    )  # fmt: skip
    assert Tags(render(None, replace(context_result(), sides=[nothing]))).counts["svg"] == 1


def test_quality_measured_apart_replaces_the_needle_counts():
    points = [
        QualityPoint("policy", "full", 1.0, 0.98, "needles found"),
        QualityPoint("policy", "tau-0.9", 0.3, 0.7, "needles found"),
        QualityPoint("uniform", "uniform", 0.3, 0.2, "needles found"),
    ]
    page = render(batch_result(), None, points).decode()
    assert "tau-0.9: 70% at 30%" in page and "as measured apart" in page
    assert "this run's few questions" not in page


def test_text_of_a_result_cannot_become_markup():
    evil = "<script>alert(1)</script>"
    side = batch_side(Role.WINDOWS)
    side = replace(side, server=replace(side.server, what=evil, flags=[evil]))
    page = render(replace(batch_result(), sides=[side], model=evil), None).decode()
    assert "<script" not in page and "&lt;script&gt;" in page


def test_the_page_is_written_whole_or_not_at_all(tmp_path):
    assert write_report(batch_result(), None, (), tmp_path).read_bytes().endswith(b"</html>\n")
    with pytest.raises(UserError, match=r"cannot write .*report\.html: No such file"):
        write_report(batch_result(), None, (), tmp_path / "gone")


@pytest.mark.parametrize("high", [0.07, 1, 3.1, 10.4, 99, 8500])
def test_axes_have_few_round_ticks_within_their_range(high):
    axis = axis_to(high, "it")
    assert isinstance(axis, Axis) and 2 <= len(axis.ticks) <= 7
    assert axis.ticks[0][0] == 0 and axis.ticks[-1][0] <= high


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_never_scrolls_sideways(tmp_path, width):
    """A frame as wide as the screen holds the page; a script outside measures what is inside."""
    inner = html.escape(render(batch_result(), context_result()).decode())
    outer = tmp_path / "outer.html"
    outer.write_text(
        f'<body><iframe width="{width}" height="900" srcdoc="{inner}"></iframe><script>'
        "addEventListener('load', () => { document.title = 'wide:' + document.querySelector("
        "'iframe').contentDocument.documentElement.scrollWidth })</script></body>"
    )
    words = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,1000"]
    words += ["--virtual-time-budget=2000", "--dump-dom", outer.as_uri()]
    home = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    told = subprocess.run(words, capture_output=True, text=True, env=home, timeout=120).stdout
    (wide,) = re.findall(r"<title>wide:(\d+)</title>", told)
    assert 0 < int(wide) <= width
