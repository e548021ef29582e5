"""The suite from end to end on a random model, with servers that look back instead of one."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from transformers import AutoTokenizer

from calib_cluster.judge import bench
from calib_cluster.judge.results import CASES_FILE
from kvpolicy.artifact import PointSpec, write_artifact
from kvpolicy.geometry import read_geometry
from kvpolicy.windows import FULL, WindowPolicy
from loadtest import servers
from loadtest.__main__ import main
from loadtest.quality_suite.results import SERVED_FILE, SuiteResult, read_result
from tests.loadtest import suite_server
from tests.loadtest.suite_server import serving

SMALL = {"--length": "512", "--items": "1", "--budget-tokens": "20,64"}
RULER = {
    "index": 0, "outputs": ["7712"], "length": 90,
    "input": f"Hidden numbers.\n{'One more sentence. ' * 25}\nThe number for ash is 7712.\n"
    "What is it? The number for ash is",
}  # fmt: skip


@pytest.fixture
def suite(reader: Path, texts: Path, tmp_path: Path):
    """``suite(*flags)`` runs a small suite; returns its status. None takes a flag away."""

    def run(*flags: str | None, **more: str) -> int:
        given = {"--model": str(reader), "--texts": str(texts), "--out": str(tmp_path / "out")}
        given |= SMALL | dict(zip(flags[::2], flags[1::2], strict=True))
        words = [word for flag, value in given.items() if value for word in (flag, value)]
        return main(["quality", *words, *more.get("last", "").split()])

    return run


@pytest.fixture
def windows(reader: Path, tmp_path: Path) -> str:
    """An artifact of window 64 everywhere, and its point ``some``."""
    geometry = read_geometry(reader)
    few = np.full((4, 2), FULL, dtype=np.int32)
    few[0] = 64
    points = [
        PointSpec("tau-0.95", WindowPolicy.uniform(geometry, 64, 4)),
        PointSpec("some", WindowPolicy(geometry, few, 4)),
    ]
    return str(write_artifact(tmp_path / "a", model_name="m", name="w", points=points))


@pytest.fixture(scope="module")
def decode(reader: Path):
    return AutoTokenizer.from_pretrained(reader).decode


class Starts:
    """The servers of one test: the flags they were started with; their mode."""

    def __init__(self) -> None:
        self.flags: list[list[str]] = []
        self.mode = "answer"

    def command(self, model_dir: Path, port: int, _: bool, flags: Sequence[str]) -> list[str]:
        """Command line of a server that looks back instead of SGLang's."""
        self.flags.append(list(flags))
        policy = flags[flags.index("--kv-policy") + 1]
        return [sys.executable, suite_server.__file__, str(port), self.mode, str(model_dir), policy]


@pytest.fixture
def started(monkeypatch, children) -> Iterator[Starts]:
    """Makes every server one that looks back. No child may be left behind."""
    starts = Starts()
    monkeypatch.setattr(servers, "_command", starts.command)
    yield starts
    assert children() == []


def read(tmp_path: Path) -> SuiteResult:
    return read_result(tmp_path / "out" / "suite.json")


# -- in process ------------------------------------------------------------------------------------


def test_a_whole_suite_in_process(suite, tmp_path, capsys):
    """Every task and protocol; equal budgets; floors, tables, maps."""
    assert suite("--policies", "head", "--peers", "snapkv,random,recency") == 0
    result = read(tmp_path)
    assert result.finished and result.against == "head" and result.served == []
    asked = {(c.task, c.protocol) for c in result.cases}
    assert asked == {
        *((t, "aware") for t in ("needle", "multikey", "recall", "vartrack", "labels")),
        ("needle", "agnostic"), ("recall", "agnostic"), ("text", "plain"),
    }  # fmt: skip
    for case in result.cases:
        kept = {(s.arm, s.budget): s.kept for s in case.scores}
        assert [kept["full", None], kept["nothing", 20]] == [case.tokens, 1]
        for arm in ("head", "snapkv", "random", "recency"):
            assert [kept[arm, 20], kept[arm, 64]] == [20, 64]
    assert {(v.arm, v.budget) for v in result.verdicts} == {
        (arm, budget) for arm in ("head", "snapkv", "random", "recency") for budget in (20, 64)
    }  # fmt: skip
    assert {"recency", "full", "nothing"} <= {d.beside for d in result.differences}
    assert result.settings.parts[0].items == 1 and result.settings.per_task == 1
    out = capsys.readouterr().out
    assert "Needles by depth, T=512" in out and "labels" in out and "no signal" in out
    assert re.search(r"labels +512 +aware +\S+ +\S+ +\.25 +90% of full", out)
    for name in ("judge.png", "heatmap.png"):
        image = imread(tmp_path / "out" / name)
        assert min(image.shape[:2]) > 200 and image[..., :3].std() > 0.05
    assert not (tmp_path / "out" / "suite.json").read_text().count(str(tmp_path))


def test_a_budget_of_the_prompt_is_the_full_cache(suite, tmp_path):
    flags = "--policies", "head", "--peers", "recency", "--budget-tokens", "5000"
    assert suite(*flags, "--tasks", "needle,text") == 0
    for case in read(tmp_path).cases:
        full, *others = case.scores
        for score in others:
            assert (score.nll, score.kl, score.accuracy) == (full.nll, 0, full.accuracy)


def test_resume_goes_on_after_an_interrupt_and_gives_the_same(suite, tmp_path, monkeypatch, capsys):
    flags = "--policies", "head", "--peers", "recency", "--tasks", "needle,labels"
    assert suite(*flags, "--out", str(tmp_path / "whole")) == 0
    plain, calls = bench.Bench.run, []

    def interrupted(self, *task):
        calls.append(task)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return plain(self, *task)

    monkeypatch.setattr(bench.Bench, "run", interrupted)
    assert suite(*flags) == 130
    assert "Not finished: --resume goes on" in capsys.readouterr().out
    assert not read(tmp_path).finished and len(read(tmp_path).cases) == 1
    assert suite(*flags) == 2
    assert "holds an earlier run: --resume goes on" in capsys.readouterr().err
    calls.append("more")
    assert suite(*flags, last="--resume") == 0 and read(tmp_path).finished
    whole = read_result(tmp_path / "whole" / "suite.json")
    assert [c.scores for c in read(tmp_path).cases] == [c.scores for c in whole.cases]
    assert suite(*flags, "--tasks", "needle", last="--resume") == 2
    assert "with other settings (" in capsys.readouterr().err


def test_files_are_asked_beside_the_suite(suite, tmp_path, capsys):
    (tmp_path / "vt.jsonl").write_text("\n".join([json.dumps(RULER)] * 3))
    spec = f"ruler:{tmp_path / 'vt.jsonl'}"
    flags = "--policies", "head", "--peers", "none", "--tasks", "needle", "--items", "2"
    assert suite(*flags, "--task-file", spec) == 0
    result = read(tmp_path)
    files = [c for c in result.cases if c.task == "ruler/vt"]
    assert [(c.index, c.corpus, c.protocol) for c in files] == [
        (0, "ruler:vt.jsonl", "aware"), (1, "ruler:vt.jsonl", "aware"),
    ]  # fmt: skip
    assert list(result.settings.task_files) == ["ruler:vt.jsonl"]
    assert "ruler/vt" in result.floors and result.settings.cut == result.settings.skipped == 0
    assert "Task files ruler:vt.jsonl: 0 prompts cut" in capsys.readouterr().out


# -- served ----------------------------------------------------------------------------------------


def test_windows_are_served_and_held_to_a_served_full(suite, started, windows, tmp_path, capsys):
    """The full cache is added to compare with; who forgets falls below, and fails if asked to."""
    flags = "--policies", windows, "--tasks", "needle,multikey,labels", "--items", "3"
    assert suite(*flags, last="--fail-under") == 1
    result = read(tmp_path)
    assert result.cases == [] and result.finished
    assert [list(result.settings.served), len(started.flags)] == [["full", windows], 2]
    answers = {(c.arm, c.task, c.index): c for c in result.served}
    assert len(answers) == 2 * 9
    for index in range(3):
        for task in ("needle", "multikey"):
            told = answers["full", task, index]
            assert told.exact and told.accuracy == told.found == 1, told.text
            assert answers[windows, task, index].text == " no idea"
    below = {(v.arm, v.task) for v in result.verdicts if v.below}
    assert below == {(windows, "needle"), (windows, "multikey")}
    assert result.kept == {"full": 1, windows: pytest.approx(68 / 512)}
    sizes = {flags[flags.index("--kv-arena-bytes") + 1] for flags in started.flags}
    assert len(sizes) == 1 and "Served, greedy" in capsys.readouterr().out
    assert suite(*flags, "--floor", "needle=0", last="--resume") == 0


def test_a_point_is_served_by_its_name(suite, started, windows, tmp_path):
    assert suite("--policies", f"{windows}:some", "--tasks", "needle") == 0
    assert started.flags[1][:4] == ["--kv-policy", windows, "--kv-policy-point", "some"]
    assert read(tmp_path).kept[f"{windows}:some"] == pytest.approx((3 + 68 / 512) / 4)


def test_judged_and_served_arms_stand_side_by_side(suite, started, windows, tmp_path):
    flags = "--policies", f"head,{windows}", "--peers", "recency", "--tasks", "needle,text"
    assert suite(*flags) == 0
    result = read(tmp_path)
    assert list(result.settings.policies) == ["head"] and len(started.flags) == 1
    assert {c.task for c in result.served} == {"needle"}, "text has no answer to compare"
    assert {c.protocol for c in result.cases if c.task == "needle"} == {"aware", "agnostic"}
    digests = {c.item for c in result.cases}
    assert {c.item for c in result.served} <= digests, "the same items"


@pytest.mark.parametrize(("mode", "form"), [("answer", list), ("text", str)])
def test_any_server_at_a_url_is_judged(suite, decode, tmp_path, capsys, mode, form):
    """With OpenAI's own fields alone; by text if it does not take token ids."""
    with serving(decode, mode) as (url, seen):
        assert suite("--url", f"{url}/v1/", "--tasks", "needle,recall", "--items", "2") == 0
    result = read(tmp_path)
    assert [c.exact for c in result.served] == [True] * 4 and result.verdicts == []
    assert result.settings.served == {"served": url} and result.settings.model_weights == {}
    last = seen[-1]
    assert last.keys() == {"model", "prompt", "max_tokens", "temperature"}
    assert (last["model"], last["temperature"]) == ("the-model", 0)
    assert isinstance(last["prompt"], form)
    told = " ".join(capsys.readouterr().err.split())
    assert ("sent as token ids" if form is list else "does not take token ids") in told


def test_a_url_called_full_is_what_others_are_held_to(suite, decode, tmp_path):
    with serving(decode) as (good, _), serving(lambda ids: "nothing") as (bad, _):
        flags = "--tasks", "needle", "--items", "2", "--url", f"full={good}"
        assert suite(*flags, last=f"--url mine={bad} --fail-under") == 1
    (verdict,) = read(tmp_path).verdicts
    assert (verdict.arm, verdict.full, verdict.score, verdict.below) == ("mine", 1, 0, True)


def test_questions_are_wrapped_in_a_chat_template(reader, suite, decode, tmp_path, monkeypatch):
    template = "{% for m in messages %}USER {{ m.content }} END{% endfor %} MODEL "
    model = tmp_path / "chat"
    model.mkdir()
    for file in reader.iterdir():
        (model / file.name).symlink_to(file)
    (model / "chat_template.jinja").write_text(template)
    with serving(decode) as (url, seen):
        flags = "--model", str(model), "--url", url, "--tasks", "needle,recall"
        assert suite(*flags, last="--chat-template") == 0
    prompts = [decode(body["prompt"]) for body in seen]
    assert all(prompt.startswith("USER ") for prompt in prompts)
    assert re.search(r"\? END MODEL Th[ea]\w* [^\n]+$", prompts[0])
    assert re.search(r"Seen in the register: END MODEL \w+ \w+ ->$", prompts[1])
    lengths = [len(body["prompt"]) for body in seen]
    assert lengths == pytest.approx([512, 512], abs=3)
    assert [c.length for c in read(tmp_path).served] == [512, 512]
    assert all(c.exact for c in read(tmp_path).served)


# -- what goes wrong -------------------------------------------------------------------------------


def test_a_server_that_dies_keeps_what_was_answered(suite, started, windows, tmp_path, capsys):
    started.mode = "die"
    flags = "--policies", f"head,{windows}", "--peers", "recency", "--tasks", "needle"
    assert suite(*flags, "--items", "5", "--concurrency", "1") == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"error: {windows}: http://" in line and "MemoryError: no more pages; log: " in line
    result = read(tmp_path)
    assert len(result.served) == 2 and not result.finished
    judged = len(result.cases)
    assert judged == len((tmp_path / "out" / CASES_FILE).read_text().splitlines()) - 1 == 10
    assert len((tmp_path / "out" / SERVED_FILE).read_text().splitlines()) == 3
    started.mode = "answer"
    assert suite(*flags, "--items", "5", last="--resume") == 0
    assert read(tmp_path).finished and len(read(tmp_path).served) == 5


def test_a_server_that_does_not_start_is_one_line(suite, started, windows, capsys):
    started.mode = "refuse"
    assert suite("--policies", windows, "--tasks", "needle") == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "error: full: the server exited with 3" in line and "policy 'x' is damaged" in line


@pytest.mark.parametrize(
    ("mode", "told"),
    [
        ("broken", "/v1/completions answered 500: cannot do that"),
        ("odd", "/v1/completions gave no choices[0].text"),
    ],
)
def test_a_server_that_answers_oddly_is_one_line(suite, decode, tmp_path, capsys, mode, told):
    with serving(decode, mode) as (url, _):
        assert suite("--url", url, "--tasks", "needle") == 2
    assert told in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out" / "suite.json").exists()


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--policies", "nothing-like-it"), "--policies nothing-like-it: no policy"),
        (("--policies", "w:x"), "--policies w:x: no policy 'w' found"),
        (("--policies", "head,head"), "'head' is named twice"),
        (("--policies", "head~gates"), "has no part 'gates' to take out"),
        (("--peers", "snapkv,h2o"), "--peers 'snapkv,h2o': 'h2o' is not accepted: give snapkv"),
        (("--tasks", "needle,riddle"), "--tasks: 'riddle' is no task of suite ci: give needle"),
        (("--tasks", "none"), "--tasks none and no --task-file leave nothing to ask"),
        (("--budget-tokens", "0"), "--budget-tokens '0' is not accepted: give whole numbers"),
        (("--budget-tokens", "10"), "--budget-tokens 10: chunkkv keeps whole chunks of 20"),
        (("--items", "0"), "--items 0 is not accepted: give at least 1"),
        (("--length", "100"), "--length 100 is not accepted: give at least 256"),
        (("--length", "2000"), "take 2128 tokens, this model at most 2048; give --length 1920"),
        (("--workers", "0"), "--workers 0 is not accepted"),
        (("--floor", "riddle=1"), "--floor 'riddle=1' is not accepted: give TASK=SHARE"),
        (("--task-file", "ruler:none"), "--task-file ruler:none: no such file"),
        (("--against", "tova2"), "--against 'tova2' is judged by nobody here: give head, snapkv"),
        (("--texts", "no-such-text"), "'no-such-text' is neither a file or folder nor a recipe"),
        (("--model", "nowhere"), "--model 'nowhere' is neither a demo model"),
        (("--url", "localhost:80"), "--url 'localhost:80' is not accepted: give http://HOST:PORT"),
        (("--url", "http://127.0.0.1:9"), "http://127.0.0.1:9 does not answer: GET /v1/models"),
        (("--policies", "none", "--peers", "none"), "nothing to judge: give --policies A,B"),
        (
            ("--needles", "3"),
            "--needles goes with one policy, served (--policy): give --policy, or",
        ),
        (
            ("--policy", "x"),
            "goes with a suite of tasks (--policies, --peers, --url), --policy was",
        ),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(suite, tmp_path, capsys, flags, told):
    given = {"--policies": "head"} | dict(zip(flags[::2], flags[1::2], strict=True))
    assert suite(*(word for pair in given.items() for word in pair)) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1
    assert error.startswith("python -m loadtest quality: error: ")
    assert not (tmp_path / "out").exists()


def test_a_server_is_not_asked_text_alone(suite, started, windows, capsys):
    assert suite("--policies", windows, "--tasks", "text") == 2
    assert "a server cannot be asked text alone" in capsys.readouterr().err
    assert started.flags == []


def test_files_alone_are_cut_to_the_suites_longest(suite, decode, tmp_path):
    (tmp_path / "vt.jsonl").write_text(json.dumps({**RULER, "input": "word. " * 3000 + "\nWhat?"}))
    with serving(decode) as (url, seen):
        spec = f"ruler:{tmp_path / 'vt.jsonl'}"
        assert suite("--tasks", "none", "--task-file", spec, "--url", url, "--length", None) == 0
    assert [len(body["prompt"]) for body in seen] == [1024]
    result = read(tmp_path)
    assert (result.settings.cut, result.settings.tasks) == (1, ("ruler/vt",))


def test_two_arms_of_one_name_are_refused(suite, capsys):
    url = "http://127.0.0.1:9"
    assert suite("--url", url, last=f"--url {url}") == 2
    assert "two served arms are called 'served'" in capsys.readouterr().err


def test_without_either_form_one_line_names_both(tmp_path, capsys):
    assert main(["quality", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "give --policy P (its points on real servers) or --policies A,B" in error


def test_a_model_without_a_chat_template_is_one_line(suite, capsys):
    assert suite("--policies", "head", last="--chat-template") == 2
    assert "--chat-template: the model's tokenizer has no usable" in capsys.readouterr().err
