"""Published task files: tiny ones of the same format, wrong ones, and their prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from loadtest.errors import UserError
from loadtest.quality_suite.judging import Chat, encoder
from loadtest.quality_suite.task_files import FileSpec, Tokens, chosen_tasks, file_item
from loadtest.quality_suite.task_formats import (
    NEEDLE,
    NEEDLE_LEAD,
    read_locomo,
    read_longbench,
    read_niah,
    read_ruler,
)

WORDS = " ".join(f"word{number}." for number in range(900))
LONGBENCH = {
    "input": "Who found it?", "context": f"{WORDS} Ada Lovelace found it. {WORDS}",
    "answers": ["Ada Lovelace"], "length": 1800, "dataset": "hotpotqa", "language": "en",
    "all_classes": None, "_id": "a1",
}  # fmt: skip
RULER = {
    "index": 3, "outputs": ["7712", "9004"], "length": 600,
    "input": f"Numbers are hidden here.\n{WORDS} for ash: 7712 {WORDS} for ash: 9004\nWhat are all "
    "the special magic numbers for ash mentioned in the provided text?",
    "answer_prefix": " The special magic numbers for ash are",
}  # fmt: skip
LOCOMO = [
    {
        "sample_id": "conv-1",
        "conversation": {
            "speaker_a": "Ann", "speaker_b": "Bo",
            "session_10_date_time": "9 May, 2023", "session_10": [
                {"speaker": "Bo", "dia_id": "D10:1", "text": "I moved to Oslo.", "img_url": ["x"],
                 "blip_caption": "a photo of a harbour"},
            ],
            "session_2_date_time": "8 May, 2023", "session_2": [
                {"speaker": "Ann", "dia_id": "D2:1", "text": "I adopted a cat in 2022."},
            ],
        },
        "qa": [
            {"question": "When did Ann adopt a cat?", "answer": 2022, "evidence": ["D2:1"],
             "category": 2},
            {"question": "Where does Bo live?", "answer": "Oslo", "evidence": ["D10:1"],
             "category": 4},
            {"question": "When did Bo adopt a dog?", "adversarial_answer": "2022", "evidence": [],
             "category": 5},
        ],
    }
]  # fmt: skip
RESULT = {
    "model": "gpt-4", "context_length": 400, "depth_percent": 50.0, "version": 1,
    "needle": f"\n    {NEEDLE}\n    ", "model_response": "eat a sandwich", "score": 10,
}  # fmt: skip


def write(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


@pytest.fixture(scope="module")
def tokenizer(reader):
    return AutoTokenizer.from_pretrained(reader)


@pytest.fixture
def tokens(tokenizer) -> Tokens:
    return tokens_of(tokenizer)


def tokens_of(tokenizer, length: int = 512, chat: Chat | None = None) -> Tokens:
    chat = chat or Chat.none(tokenizer)
    return Tokens(encoder(tokenizer), tokenizer.decode, chat, length)


# -- formats ---------------------------------------------------------------------------------------


def test_longbench_rows_of_every_kind(tmp_path):
    rows = [
        LONGBENCH, {**LONGBENCH, "answers": [""]}, {**LONGBENCH, "dataset": "trec_e"},
        {**LONGBENCH, "dataset": "lcc", "input": ""},
        {**LONGBENCH, "dataset": "gov_report", "input": ""},
    ]  # fmt: skip
    found = list(read_longbench(write(tmp_path / "f.jsonl", *rows)))
    assert [task and task.task for task in found] == [
        "longbench/hotpotqa", None, "longbench/trec", "longbench/lcc", "longbench/gov_report",
    ]  # fmt: skip
    first, _, few, code, summary = found
    assert first.question == "\n\nQuestion: Who found it?\nAnswer:"
    assert first.context[first.place :].startswith("Ada Lovelace")
    assert few.question == "\nWho found it?" and code.question == "\n"
    assert summary.question == "\n\nSummary:"


def test_ruler_rows_are_parted_before_their_last_line(tmp_path):
    (tmp_path / "niah_multivalue").mkdir()
    path = write(tmp_path / "niah_multivalue" / "validation.jsonl", RULER)
    (task,) = read_ruler(path)
    assert task.task == "ruler/niah_multivalue" and task.all_of
    assert task.context + task.question == RULER["input"] + RULER["answer_prefix"]
    assert task.question.startswith("\nWhat are all")
    old = {k: v for k, v in RULER.items() if k != "answer_prefix"}
    (task,) = read_ruler(write(tmp_path / "vt.jsonl", old))
    assert task.task == "ruler/vt" and task.question.endswith("provided text?")


def test_locomo_sessions_are_in_order_and_evidence_is_found(tmp_path):
    first, second, adversarial = read_locomo(write(tmp_path / "locomo10.json", LOCOMO))
    assert (first.task, second.task, adversarial) == ("locomo/temporal", "locomo/single-hop", None)
    assert first.answers == ("2022",) and first.question.endswith("adopt a cat?\nShort answer:")
    assert first.context.index("8 May") < first.context.index("9 May")
    assert "Bo: I moved to Oslo. [shares a photo of a harbour]" in first.context
    assert first.context[first.place :].startswith("Ann: I adopted a cat")
    assert second.context[second.place :].startswith("Bo: I moved")


def test_niah_haystacks_contexts_and_results(tmp_path):
    essays = tmp_path / "essays"
    essays.mkdir()
    for name in ("b", "a"):
        (essays / f"{name}.txt").write_text(f"{name} begins. {WORDS}")
    found = list(read_niah(essays))
    assert [task.depth for task in found] == [step / 10 for step in range(11)]
    assert found[0].context.startswith("a begins.") and found[0].needle.strip() == NEEDLE
    (tmp_path / "c.txt").write_text(f"{WORDS}\n{NEEDLE}\n{WORDS}")
    (told,) = read_niah(tmp_path / "c.txt")
    assert told.context[told.place :].startswith(NEEDLE) and not told.needle
    own = {**RESULT, "needle": "The code is blue.", "retrieval_question": "What is the code?"}
    own["context"] = f"{WORDS} The code is blue. {WORDS}"
    asked, with_context = read_niah(write(tmp_path / "r.jsonl", RESULT, own))
    assert (asked.depth, asked.tokens, asked.context) == (0.5, 400, "")
    assert asked.answers == ("eat a sandwich and sit in Dolores Park on a sunny day.",)
    assert asked.lead == NEEDLE_LEAD
    assert with_context.answers == ("The code is blue.",) and with_context.place


@pytest.mark.parametrize(
    ("spec", "name", "rows", "told"),
    [
        ("longbench", "f.jsonl", [LONGBENCH, {"context": "x"}], "line 2: .*`answers`.*expected Lo"),
        ("longbench", "f.jsonl", [{**LONGBENCH, "answers": "x"}], r"line 1: .*array.*\$\.answers"),
        ("longbench", "f.jsonl", ["", "{"], "line 2: .*truncated; expected LongBench's rows"),
        ("longbench", "f.jsonl", [""], "no row in it; expected LongBench"),
        ("longbench", "f.jsonl", [{**LONGBENCH, "answers": []}], "no row has an answer"),
        ("ruler", "f.jsonl", [RULER, LONGBENCH], "line 2: .*expected RULER's rows"),
        ("ruler", "f.jsonl", [{**RULER, "input": "one line?"}], "line 1: `input` is one line"),
        ("locomo", "f.json", ['[\n{"qa": []}\n]'], "missing required field `conversation`"),
        ("locomo", "f.json", ["[", "{", "oops", "]"], "line 3: .*expected LoCoMo's list"),
        ("locomo", "f.json", [RULER], "expected LoCoMo's list of samples"),
        ("locomo", "f.json", [[{**LOCOMO[0], "conversation": {}}]], "has no session_1"),
        (
            "locomo", "f.json", [[{**LOCOMO[0], "conversation": {"session_1": [{"text": "x"}]}}]],
            "sample 'conv-1', session_1: .*`speaker`",
        ),
        ("niah", "f.jsonl", [{**RESULT, "needle": "Blue."}], "line 1: a needle of its own needs"),
        ("niah", "f.jsonl", [RESULT, {**RESULT, "depth_percent": 101}], "line 2: depth_perc.* 101"),
        ("niah", "f.jsonl", [{**RESULT, "context": "x"}], "does not hold the needle"),
        ("niah", "f.csv", ["a,b"], "not this kind of file; expected a haystack"),
    ],
)  # fmt: skip
def test_a_file_in_another_format_is_one_line(tmp_path, spec, name, rows, told):
    path = write(tmp_path / name, *rows)
    with pytest.raises(UserError, match=told) as error:
        chosen_tasks(FileSpec.of(f"{spec}:{path}"), 5)
    assert name in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("f.jsonl", "give FORMAT:PATH, FORMAT one of longbench, ruler, locomo, niah"),
        ("squad:f.jsonl", "give FORMAT:PATH"),
        ("ruler:nowhere.jsonl", "no such file"),
    ],
)
def test_a_bad_task_file_flag_is_one_line(text, told):
    with pytest.raises(UserError, match=told):
        FileSpec.of(text)


def test_a_file_that_is_no_text_is_named(tmp_path):
    (tmp_path / "f.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"f\.jsonl: not UTF-8"):
        chosen_tasks(FileSpec.of(f"ruler:{tmp_path / 'f.jsonl'}"), 1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no \.txt in it"):
        chosen_tasks(FileSpec.of(f"niah:{tmp_path / 'empty'}"), 1)


# -- prompts ---------------------------------------------------------------------------------------


def test_rows_are_spread_over_a_file_and_those_without_an_answer_are_counted(tmp_path):
    rows = [{**LONGBENCH, "input": str(n), "answers": ["a"] if n % 2 else []} for n in range(20)]
    spec = FileSpec.of(f"longbench:{write(tmp_path / 'f.jsonl', *rows)}")
    found = chosen_tasks(spec, 5)
    asked = [int(task.question.split()[1]) for task in found.tasks]
    assert (asked, found.skipped) == ([1, 5, 9, 13, 17], 10)
    assert len(chosen_tasks(spec, 50).tasks) == 10


def test_a_long_prompt_loses_its_middle_as_in_longbench(tmp_path, tokenizer, tokens):
    (task,) = read_longbench(write(tmp_path / "f.jsonl", LONGBENCH))
    item, cut = file_item(task, tokens, 0, "longbench:f", "")
    assert cut and len(item.context) + len(item.question) == 512 and item.depth is None
    whole = [*tokens.encode(task.context), *tokens.encode(task.question)]
    assert [*item.context, *item.question] == [*whole[:256], *whole[-256:]]
    assert tokenizer.decode(item.answer) == " Ada Lovelace" and item.held == 1
    longer = tokens_of(tokenizer, length=len(whole) + 7)
    item, cut = file_item(task, longer, 0, "longbench:f", "")
    assert not cut and [*item.context, *item.question] == whole
    told = tokenizer.decode(item.context[round(item.depth * len(item.context)) - 1 :])
    assert "Ada Lovelace" in told[:20]


@pytest.mark.parametrize("place", [20, -60])
def test_a_place_outside_the_cut_keeps_its_depth(tmp_path, tokenizer, tokens, place):
    at = place if place > 0 else len(WORDS) + place
    context = f"{WORDS[:at]} Ada Lovelace found it. {WORDS[at:]}"
    row = {**LONGBENCH, "context": context}
    (task,) = read_longbench(write(tmp_path / "f.jsonl", row))
    item, cut = file_item(task, tokens, 0, "longbench:f", "")
    assert cut and (item.depth < 0.2) == (place > 0)
    told = tokenizer.decode(item.context[max(0, round(item.depth * len(item.context)) - 1) :])
    assert "Ada Lovelace" in told[:40]


def test_a_question_that_fills_half_the_prompt_is_skipped(tmp_path, tokens):
    row = {**LONGBENCH, "input": WORDS}
    (task,) = read_longbench(write(tmp_path / "f.jsonl", row))
    assert file_item(task, tokens, 0, "longbench:f", "") is None


def test_all_outputs_of_ruler_are_the_answer(tmp_path, tokenizer, tokens):
    (task,) = read_ruler(write(tmp_path / "vt.jsonl", RULER))
    item, _ = file_item(task, tokens, 0, "ruler:f", "")
    assert tokenizer.decode(item.answer) == " 7712, 9004"
    assert tokenizer.decode(item.question).endswith("numbers for ash are")


@pytest.mark.parametrize("depth", [0, 0.3, 1])
def test_a_needle_lies_at_its_depth_after_a_sentence(tmp_path, tokenizer, tokens, depth):
    (tmp_path / "essay.txt").write_text("Once upon a time. " + WORDS[:2000])
    task = next(t for t in read_niah(tmp_path / "essay.txt") if t.depth == depth)
    item, cut = file_item(task, tokens, 0, "niah:f", "")
    text = tokenizer.decode(item.context)
    assert not cut and text.count(NEEDLE) == 1
    assert len(item.context) + len(item.question) == 512
    before, _, after = text.partition(f"\n{NEEDLE}\n")
    assert before == "" or depth == 1 or before.endswith(".")
    assert len(before) / len(text) == pytest.approx(depth * (1 - len(NEEDLE) / len(text)), abs=0.06)
    assert item.depth == pytest.approx(depth, abs=0.15) and (after == "") == (depth == 1)
    assert tokenizer.decode(item.question).endswith(NEEDLE_LEAD)
    assert tokenizer.decode(item.answer).startswith(" eat a sandwich")


def test_a_published_result_is_asked_again_in_held_out_text(tmp_path, tokenizer, tokens):
    (task,) = read_niah(write(tmp_path / "r.jsonl", RESULT))
    item, _ = file_item(task, tokens, 0, "niah:r", WORDS)
    assert len(item.context) + len(item.question) == 400 and item.length == 512
    assert tokenizer.decode(item.context).count(NEEDLE) == 1 and 0.3 < item.depth < 0.55


def test_a_chat_template_goes_around_question_and_lead(tmp_path, tokenizer):
    before, after = tokenizer.encode("user: "), tokenizer.encode("\nmodel: ")
    tokens = tokens_of(tokenizer, chat=Chat(tuple(before), tuple(after)))
    (tmp_path / "essay.txt").write_text(WORDS)
    task = next(iter(read_niah(tmp_path / "essay.txt")))
    item, _ = file_item(task, tokens, 0, "niah:f", "")
    text = tokenizer.decode([*item.context, *item.question])
    assert text.startswith("user: ") and len(item.context) + len(item.question) == 512
    assert text.endswith(f"{task.question}\nmodel: {NEEDLE_LEAD}")
    (task,) = read_longbench(write(tmp_path / "f.jsonl", LONGBENCH))
    item, _ = file_item(task, tokens, 0, "longbench:f", "")
    assert tokenizer.decode(item.question).endswith("Answer:\nmodel: ")
    assert tokenizer.decode(item.answer) == "Ada Lovelace", "the template's end is a space already"
