"""The small hybrid: what it is trained on, how, and that the weights in the repository do it."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from loadtest.__main__ import main
from loadtest.hybrid import train as training
from loadtest.hybrid.command import LOG, SUMS
from loadtest.hybrid.model import VOCAB, make_model, make_tokenizer, save
from loadtest.hybrid.tasks import TASKS, Tasks
from loadtest.hybrid.train import Progress, evaluate, train

SHIPPED = Path(__file__).parents[1] / "weights" / "recall-hybrid"


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.mark.parametrize("length", [64, 200, 1024])
@pytest.mark.parametrize("task", TASKS)
def test_a_sample_is_exactly_as_long_as_asked(tokenizer, task, length):
    tasks = Tasks(tokenizer, 0)
    for _ in range(5):
        sample = tasks.sample(task, length)
        assert len(sample.ids) == len(sample.weights) == length
        assert sample.task == task and sample.answers
        assert all(0 < a < b <= length for a, b in sample.answers)
        assert all(weight == 1 for a, b in sample.answers for weight in sample.weights[a:b])


def test_what_is_asked_was_told(tokenizer):
    tasks = Tasks(tokenizer, 1)
    sample = tasks.sample("recall", 600)
    text = tokenizer.decode(sample.ids)
    told = dict(re.findall(r"\n(\w+) = (\d+)", text))
    asked = re.findall(r"\? (\w+) = (\d+)", text)
    assert len(told) > 5 and len(asked) >= len(sample.answers) > 5
    assert all(told[word] == code for word, code in asked if len(code) == 3)
    sample = tasks.sample("needle", 600)
    text = tokenizer.decode(sample.ids)
    told = dict(re.findall(r"the secret code of the (\w+) is (\d+)\.\n", text))
    answers = [tokenizer.decode(sample.ids[a:b]) for a, b in sample.answers]
    assert {answer.strip(" .\n") for answer in answers} == set(told.values())
    sample = tasks.sample("copy", 300)
    start, end = sample.answers[0]
    assert sample.ids[start:end] == sample.ids[: end - start]


def test_far_recall_asks_for_the_oldest_first(tokenizer):
    text = tokenizer.decode(Tasks(tokenizer, 2).far_recall(800).ids)
    told = re.findall(r"\n(\w+) = (\d+)", text)
    asked = re.findall(r"\? (\w+) = (\d+)", text)
    assert len(told) > 20 and len(asked) > 10
    assert asked[:10] == told[:10]


def test_samples_follow_from_the_seed(tokenizer):
    draw = [Tasks(tokenizer, seed).sample("needle", 200).ids for seed in (3, 3, 4)]
    assert draw[0] == draw[1] != draw[2]


def test_digits_are_tokens_of_their_own(tokenizer):
    assert tokenizer.vocab_size == VOCAB
    assert len(tokenizer("12345")["input_ids"]) == 5


@pytest.mark.slow  # half a minute
def test_training_lowers_the_loss(tokenizer, monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(training, "ROWS", 4)
    monkeypatch.setattr(training, "WARMUP", 5)
    losses: list[float] = []
    done = train(make_model(0), Tasks(tokenizer, 0), 30, 3e-3, lambda now: losses.append(now.loss))
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert (done.step, done.tokens) == (30, 4 * sum(_lengths(30)))


def _lengths(steps: int) -> list[int]:
    """64 tokens a sample, until the last steps come to the longer ones."""
    return [64 if step / steps <= 0.7 else 1024 for step in range(steps)]


def test_samples_stay_short_until_looking_up_is_passed():
    half = Progress(length=128, accuracy={"needle": 0.99, "recall": 0.5, "copy": 0.99})
    assert training._length(half, 0.1) == 128
    assert training._length(half, 0.8) == 1024, "near the end long ones come anyway"
    both = Progress(length=128, accuracy={"needle": 0.95, "recall": 0.95})
    assert training._length(both, 0.1) == 256


def test_an_untrained_model_knows_nothing(tokenizer):
    scores = evaluate(make_model(0), Tasks(tokenizer, 0), [128], 2)
    assert [score.task for score in scores] == list(TASKS)
    assert all(score.right == 0 and score.answers for score in scores)


def test_what_is_saved_is_what_sglang_reads(tokenizer, tmp_path):
    model = make_model(0)
    save(model, tokenizer, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["full_attention_interval"] == 4
    assert config["architectures"] == ["Qwen3_5ForCausalLM"]
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.arange(20)[None]
    assert torch.equal(again(ids).logits, model.eval()(ids).logits)
    assert AutoTokenizer.from_pretrained(tmp_path)("a 7")["input_ids"] == tokenizer("a 7").input_ids


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["train-hybrid", "--out", "{tmp}"], "exists; remove it"),
        (["train-hybrid", "--out", "{tmp}/new", "--steps", "0"], "--steps"),
        (["train-hybrid", "--out", "{tmp}/new", "--rate", "2"], "--rate"),
        (
            ["hybrid-recall", "--model", "{tmp}", "--policies", "full", "--out", "{tmp}/o"],
            "no config.json",
        ),
    ],
)
def test_bad_input_is_one_line(argv, expected, tmp_path, capsys):
    assert main([word.format(tmp=tmp_path) for word in argv]) == 2
    line = capsys.readouterr().err
    assert expected in line and line.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


# -- the weights in the repository -------------------------------------------------------------


def test_the_shipped_files_are_those_that_were_trained():
    lines = (SHIPPED / SUMS).read_text().splitlines()
    told = dict(reversed(line.split("  ")) for line in lines)
    files = {path.name for path in SHIPPED.iterdir()} - {SUMS}
    assert set(told) == files
    for name, digest in told.items():
        assert hashlib.sha256((SHIPPED / name).read_bytes()).hexdigest() == digest, name


def test_the_shipped_model_answers_what_its_log_says():
    """A part of the held-out questions of its log, asked again."""
    torch.set_num_threads(1)
    lines = [json.loads(line) for line in (SHIPPED / LOG).read_text().splitlines()]
    logged = {(s["task"], s["length"]): s["right"] for x in lines if (s := x.get("held_out"))}
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    model = AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32)
    for score in evaluate(model, Tasks(tokenizer, "asked again"), [1024], 6):
        if score.task in training.LOOKED_UP:
            wanted = logged[score.task, 1024]
            assert wanted > 0.85 and abs(score.right - wanted) < 0.12
