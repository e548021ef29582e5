"""What max-batch and max-context check before a server starts, and what they predict."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

import numpy as np
import pytest

from kvpolicy.geometry import read_geometry
from kvpolicy.residency import peak_bytes
from kvpolicy.windows import WindowPolicy
from loadtest.__main__ import main
from loadtest.capacity import command, max_batch, max_context
from loadtest.capacity.flags import Setup, common_setup
from loadtest.capacity.needles import needles, spread
from loadtest.capacity.predict import Store, dense_store, page_bytes
from loadtest.capacity.quality_file import read_quality
from loadtest.capacity.sides import Role
from loadtest.capacity.texts import exact_prompts
from loadtest.errors import UserError
from loadtest.servers import free_port
from tests.loadtest import capacity_server
from tests.loadtest.capacity_fakes import PAGE_BYTES, TOKEN_BYTES, UNITS
from tests.loadtest.capacity_server import Behaviour
from tests.loadtest.quality_model import BOS, byte_tokenizer, write_model
from tests.loadtest.test_freeze import made

RESULTS = Path(__file__).parents[2] / "loadtest" / "results"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("capacity") / "model")


@pytest.fixture(scope="module")
def policy(model, tmp_path_factory) -> str:
    """Everything at full length, frozen by the rule ``head``."""
    return made(model, tmp_path_factory.mktemp("policies"), "--retention", "head")


@pytest.fixture(scope="module")
def windows(model, tmp_path_factory) -> str:
    """Windows of 64 tokens and 4 sinks in every head; no retention."""
    from kvpolicy.__main__ import main as kvpolicy

    root = tmp_path_factory.mktemp("windows")
    where = ["--model", str(model), "--out", str(root), "--name", "narrow"]
    assert kvpolicy(["new", *where, "--kind", "uniform", "--window", "64", "--sinks", "4"]) == 0
    (manifest,) = root.rglob("manifest.json")
    return str(manifest.parent)


def parsed(module, model: Path, out: Path, *flags: str) -> Namespace:
    parser = ArgumentParser()
    module.add_arguments(parser)
    return parser.parse_args(["--model", str(model), "--quick", "--out", str(out), *flags])


def setup(model: Path, out: Path, *flags: str) -> Setup:
    return common_setup(parsed(max_batch, model, out, *flags))


BAD = [
    (["--policy", "nothing-like-it"], "--policy: no policy 'nothing-like-it' found"),
    (["--policy", "native", "--point", "tau-1"], "built-in policy 'native' has no points"),
    (["--vs", "nothing-like-it"], "--vs: no policy 'nothing-like-it' found"),
    (["--vs", "native"], "--vs native is --policy itself"),
    (["--budget-tokens", "64"], "policy native has no retention tables to freeze by"),
    (["--budget-tokens", "512"], "--budget-tokens 512 is not accepted: give 1 to 511"),
    (["--kv-residency", "0.5"], "--kv-residency: policy native is built in"),
    (["--kv-residency-context", "9"], "--kv-residency-context needs --kv-residency"),
    (["--context", "255"], "--context 255 is not accepted: give at least 256"),
    (["--context", "2040"], "--context 2040 is not accepted: with --output 16 this model takes"),
    (["--output", "6"], "--output 6 is not accepted: give at least 7"),
    (["--needles", "-1"], "--needles -1 is not accepted"),
    (["--threads", "0"], "--threads 0 is not accepted"),
    (["--limit-seconds", "nan"], "--limit-seconds nan is not accepted"),
    (["--kv-bytes", "lots"], "--kv-bytes: size 'lots' not understood"),
    (["--kv-bytes", "100kB"], "fits in stock SGLang; give more"),
    (["--model", "nowhere"], "--model 'nowhere' is neither a demo model"),
    (["--out", "/dev/null/x"], "--out /dev/null/x: Not a directory"),
    (["--vs-url", "http://127.0.0.1:9"], "--vs-url compares with --url: give both"),
    (["--url", "here"], "--url 'here' is no address"),
    (["--quality", "/nowhere.json"], "--quality /nowhere.json: No such file"),
    (["--quality", __file__], "not JSON"),
    (["--port", "70000"], "--port 70000 cannot be used"),
]


@pytest.mark.parametrize("name", ["max-batch", "max-context"])
@pytest.mark.parametrize(("flags", "says"), BAD, ids=[" ".join(bad[0]) for bad in BAD])
def test_a_bad_flag_is_one_line_and_status_2(
    model, tmp_path, name, flags, says, capsys, monkeypatch
):
    monkeypatch.setattr(command, "started", None)  # nothing may start
    given = ["--model", str(model), "--policy", "native", "--quick", "--out", str(tmp_path)]
    assert main([name, *given, "--kv-bytes", "2MB", *flags]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and says in line


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--up-to", "255"], "--up-to 255 is not accepted: give 256 to 2025"),
        (["--up-to", "2026"], "--up-to 2026 is not accepted: give 256 to 2025"),
        (["--step", "8"], "--step 8 is not accepted: give 16 to"),
        (["--depths", "0"], "--depths 0 is not accepted"),
        (["--output", "8"], "--output 8 is not accepted: a needle's answer takes 12"),
    ],
)
def test_what_only_max_context_refuses(model, tmp_path, flags, says, capsys):
    given = ["--model", str(model), "--policy", "native", "--quick", "--out", str(tmp_path)]
    assert main(["max-context", *given, "--kv-bytes", "2MB", *flags]) == 2
    assert says in capsys.readouterr().err


def test_too_many_requests_to_measure_are_refused(model, tmp_path, capsys):
    given = ["--model", str(model), "--policy", "native", "--quick", "--out", str(tmp_path)]
    assert main(["max-batch", *given, "--kv-bytes", "1GB"]) == 2
    assert "at most 62 are measured" in capsys.readouterr().err


def test_a_port_that_is_in_use_is_one_line(model, tmp_path, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        given = ["--model", str(model), "--policy", "native", "--out", str(tmp_path)]
        assert main(["max-batch", "--quick", *given, "--port", port]) == 2
    assert f"--port {port} cannot be used: Address already in use" in capsys.readouterr().err


def test_an_earlier_result_that_cannot_be_read_is_told_before_anything_runs(
    model, tmp_path, capsys
):
    (tmp_path / "max-context.json").write_text('{"schema": "old"}')
    given = ["--model", str(model), "--policy", "native", "--out", str(tmp_path)]
    assert main(["max-batch", "--quick", *given, "--kv-bytes", "2MB"]) == 2
    assert "max-context.json is not readable" in capsys.readouterr().err


# -- sides -----------------------------------------------------------------------------------------


def test_stock_the_engine_and_the_policy_get_the_same_bytes(model, windows, tmp_path):
    found = setup(model, tmp_path, "--policy", windows, "--kv-bytes", "2MB")
    assert [side.role for side in found.sides] == [Role.STOCK, Role.FULL, Role.WINDOWS]
    stock, full, narrow = found.sides
    tokens = int(stock.flags[stock.flags.index("--max-total-tokens") + 1])
    assert tokens == 2_000_000 // TOKEN_BYTES // 16 * 16 and "torch_native" in stock.flags
    for side in (full, narrow):
        assert side.flags[side.flags.index("--kv-arena-bytes") + 1] == "2000000"
    assert narrow.flags[-2:] == ("--kv-policy-point", narrow.point)
    assert narrow.store.at_once(512, 16) > full.store.at_once(512, 16)


def test_a_policy_with_retention_is_frozen_too_and_not_measured_twice(model, policy, tmp_path):
    found = setup(model, tmp_path, "--policy", policy, "--kv-bytes", "2MB")
    assert [side.role for side in found.sides] == [Role.STOCK, Role.FULL, Role.FROZEN]
    frozen = found.sides[-1]
    assert frozen.flags[-2:] == ("--kv-budget-tokens", "64") and frozen.budget == 64
    assert frozen.policy_id == found.sides[1].policy_id
    asked = setup(model, tmp_path, "--policy", policy, "--kv-bytes", "2MB", "--budget-tokens", "48")
    assert asked.sides[-1].budget == 48


def test_another_policy_or_nothing_can_be_compared_with(model, windows, policy, tmp_path):
    given = ["--policy", windows, "--kv-bytes", "2MB"]
    roles = [side.role for side in setup(model, tmp_path, *given, "--vs", policy).sides]
    assert roles == [Role.BASE, Role.WINDOWS]
    roles = [side.role for side in setup(model, tmp_path, *given, "--vs", "none").sides]
    assert roles == [Role.WINDOWS]


# -- predictions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [500, 512, 513])
@pytest.mark.parametrize("size", [400_000, 1_000_000])
def test_what_fits_is_what_reserving_one_by_one_lets_in(model, windows, prompt, size, tmp_path):
    geometry = read_geometry(model).with_kv_dtype_bytes(4)
    found = setup(model, tmp_path, "--policy", windows, "--kv-bytes", str(size), "--vs", "none")
    (side,) = found.sides
    each = peak_bytes(side.store.levels, geometry, prompt + 16)
    room, count = size - PAGE_BYTES, 0  # one page is the write sink
    while room >= each:
        room, count = room - each, count + 1
    assert side.store.at_once(prompt, 16) == count
    assert side.store.decoding_bytes(prompt, 16) == side.store.peak_bytes(prompt, 16) == each


def test_the_longest_prompt_is_the_last_that_fits(model):
    geometry = read_geometry(model).with_kv_dtype_bytes(4)
    full = WindowPolicy.full(geometry).levels()
    store = dense_store(full, geometry, 1024)
    assert page_bytes(geometry) == PAGE_BYTES and store.pages == 1024 // 16 * UNITS
    # SGLang's PrefillAdder: prompt + output + one page must be less than what is free
    assert store.longest(16, 2000) == 1024 - 16 - 16 - 1
    assert store.at_once(512 - 16, 16) == 1 and store.at_once(512 - 16 - 17, 16) == 2
    assert store.longest(16, 500) == 500 and store.longest(2000, 2000) == 0
    narrow = Store(WindowPolicy.uniform(geometry, 64, 4).levels(), store.pages, PAGE_BYTES)
    assert narrow.longest(16, 100_000) == 100_000, "what stops growing has no longest prompt"


@pytest.mark.parametrize("kept", [100, np.array([4, 200, 90, 106, 1, 300, 50, 49])])
def test_a_frozen_prompt_is_held_whole_first_and_by_its_kept_tokens_then(model, kept):
    geometry = read_geometry(model).with_kv_dtype_bytes(4)
    full = WindowPolicy.full(geometry).levels()
    store = Store(full, 5000, PAGE_BYTES, lambda prompt: kept)
    each = [kept] * UNITS if isinstance(kept, int) else kept.tolist()
    copy = sum(-(-tokens // 16) for tokens in each)
    need = store.need(512, 16)
    assert need.new == UNITS * 512 // 16 + copy and need.peak == need.new
    assert need.decoding == copy + UNITS  # one page more for what is decoded
    assert store.at_once(512, 16) == 1 + (5000 - need.new) // need.decoding
    off = Store(full, 5000, PAGE_BYTES, lambda prompt: None)
    assert off.need(512, 16) == Store(full, 5000, PAGE_BYTES).need(512, 16)


# -- texts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bos", [False, True])
def test_texts_are_exactly_as_long_as_asked_and_the_same_for_every_count(bos):
    tokenizer = byte_tokenizer(bos=bos)
    prompts = exact_prompts(tokenizer, 5, 300, seed=4)
    assert len({prompt.text for prompt in prompts}) == 5
    for prompt in prompts:
        assert tokenizer(prompt.text)["input_ids"] == prompt.ids and len(prompt.ids) == 300
        assert (prompt.ids[0] == BOS) == bos
    assert exact_prompts(tokenizer, 2, 300, seed=4) == prompts[:2]
    assert exact_prompts(tokenizer, 2, 300, seed=5) != prompts[:2]


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("template", [None, "<u>{{ messages[0].content }}</u><a>"])
def test_needles_are_told_once_at_their_depth_and_asked_at_the_end(bos, template):
    tokenizer = byte_tokenizer(bos=bos)
    tokenizer.chat_template = template
    made = needles(tokenizer, 700, spread(4), seed=1)
    assert [needle.depth for needle in made] == pytest.approx([0.1625, 0.3875, 0.6125, 0.8375])
    for needle in made:
        text = bytes(i for i in needle.ids if i != BOS).decode(errors="replace")
        assert len(needle.ids) == 700 and text.count(needle.code) == 1
        assert text.index(needle.code) / 700 == pytest.approx(needle.depth, abs=0.2)
        assert text.rstrip().endswith(" is")
        assert text.startswith("<u>") == ("</u><a>" in text) == (template is not None)
        assert (needle.ids[0] == BOS) == (bos and template is None)
        assert needle.found_in(f" {needle.code}.") and not needle.found_in(f"9{needle.code}")
    assert needles(tokenizer, 700, spread(4), seed=1) == made


def test_a_context_too_short_for_a_question_is_told():
    with pytest.raises(UserError, match="--context 100: a needle's question alone takes"):
        needles(byte_tokenizer(), 100, [0.5], seed=0)


# -- servers that run already ----------------------------------------------------------------------


@pytest.fixture
def running(children):
    """``running(behaviour)`` is the address of a pretended server."""
    started: list[subprocess.Popen] = []

    def run(behaviour: Behaviour) -> str:
        port = free_port()
        words = [sys.executable, capacity_server.__file__, str(port), behaviour.words()]
        started.append(subprocess.Popen(words))
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return f"http://127.0.0.1:{port}"
            time.sleep(0.05)
        raise AssertionError("the pretended server did not start")

    yield run
    for process in started:
        process.kill()
        process.wait()


def test_servers_at_addresses_are_asked_what_they_are(model, running, tmp_path):
    ours, theirs = running(Behaviour(ragged=True)), running(Behaviour())
    found = setup(model, tmp_path, "--url", ours, "--vs-url", theirs)
    stock, ragged = found.sides
    assert (stock.role, ragged.role) == (Role.STOCK, Role.WINDOWS)
    assert stock.store.pages == 4096 // 16 * UNITS and ragged.store.pages == 2048
    assert ragged.policy_id == "it@1" and ragged.url == ours
    assert setup(model, tmp_path, "--url", theirs).sides[0].role is Role.OTHER


def test_an_address_of_something_else_is_one_line(model, running, tmp_path, capsys):
    dead = f"http://127.0.0.1:{free_port()}"
    for url in (dead, running(Behaviour(unfit=True))):
        assert main(["max-batch", "--model", str(model), "--url", url, "--quick"]) == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1 and f"--url {url} does not answer as an SGLang server" in line


# -- quality measured elsewhere --------------------------------------------------------------------


def test_both_kinds_of_quality_files_are_read():
    quality = read_quality(RESULTS / "quality-smollm2" / "quality.json")
    assert {point.group for point in quality} >= {"policy", "uniform"}
    full = next(point for point in quality if point.name == "full")
    assert full.share == 1 and 0.9 < full.score <= 1
    judged = read_quality(RESULTS / "judge-smollm2" / "aware.json")
    compiled = [point for point in judged if point.group == "compiled"]
    assert [round(point.share * 1024) for point in compiled] == [64, 128, 256]
    assert all(0 < point.score < 1 for point in judged)


@pytest.mark.parametrize("content", [{}, {"cells": []}, {"rows": [{"needles": 3}]}, []])
def test_another_json_file_is_refused_in_one_line(tmp_path, content):
    path = tmp_path / "it.json"
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="--quality"):
        read_quality(path)


def test_both_commands_have_the_same_common_flags(model, tmp_path):
    batch = vars(parsed(max_batch, model, tmp_path))
    context = vars(parsed(max_context, model, tmp_path))
    assert batch.keys() < context.keys()
