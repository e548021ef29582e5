"""Readers of published task files: LongBench, RULER, LoCoMo and needle-in-a-haystack.

Files are the user's own: nothing is fetched. The wording around a context and a question is this
suite's own and short, so figures compare the arms of a run with each other, not with a leaderboard.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from loadtest.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class FileTask:
    """One row: ``context``, then ``question``, then ``lead``, which a chat model's own turn begins
    with; ``answers`` that are accepted, any one or (``all_of``) all of them.

    ``place``: the character of ``context`` where the answer is told, if it is one; ``depth`` 0 to 1
    where to put ``needle`` into ``context``, which then holds no answer yet; ``tokens``: of the
    prompt at most (0: no such wish).
    """

    task: str
    context: str
    question: str
    answers: tuple[str, ...]
    lead: str = ""
    all_of: bool = False
    place: int | None = None
    needle: str = ""
    depth: float | None = None
    tokens: int = 0


@dataclass(frozen=True)
class Format:
    """``read(path)`` gives a row's task, or None where it has no answer; ``wanted`` says what rows
    are."""

    read: Callable[[Path], Iterator[FileTask | None]]
    wanted: str


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except OSError as error:
        raise UserError(f"--task-file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--task-file {path}: not UTF-8 ({error.reason})") from error


def _wrong(path: Path, line: int, error: object, wanted: str) -> UserError:
    return UserError(f"--task-file {path}, line {line}: {error}; expected {wanted}")


def _rows(path: Path, kind: type[T], wanted: str) -> Iterator[T]:
    """Rows of a .jsonl file. Raises UserError naming the line."""
    found = False
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if line.strip():
            found = True
            try:
                yield msgspec.json.decode(line, type=kind)
            except msgspec.DecodeError as error:
                raise _wrong(path, number, error, wanted) from error
    if not found:
        raise UserError(f"--task-file {path}: no row in it; expected {wanted}")


# -- LongBench -------------------------------------------------------------------------------------

FEW_SHOT = ("trec", "triviaqa", "samsum", "lsht", "nq")
"""Their context is examples, their input one more of the same form."""
CODE = ("lcc", "repobench-p")
SUMMARIES = ("gov_report", "multi_news", "qmsum", "vcsum")


class _LongBench(msgspec.Struct):
    context: str
    answers: list[str]
    dataset: str
    input: str = ""
    length: int = 0
    language: str = ""
    all_classes: list[str] | None = None


LONGBENCH = (
    "LongBench's rows: {input, context, answers: [text, …], length, dataset, language, "
    "all_classes, _id}"
)


def read_longbench(path: Path) -> Iterator[FileTask | None]:
    """THUDM/LongBench's data/*.jsonl. ``_e`` at the end of a dataset's name is dropped."""
    for row in _rows(path, _LongBench, LONGBENCH):
        name = row.dataset.removesuffix("_e")
        answers = tuple(answer for answer in row.answers if answer.strip())
        if not answers:
            yield None
        elif name in CODE:
            yield FileTask(f"longbench/{name}", row.context, row.input or "\n", answers)
        elif name in FEW_SHOT:
            yield FileTask(f"longbench/{name}", row.context, f"\n{row.input}", answers)
        else:
            cue = "Summary:" if name in SUMMARIES else "Answer:"
            asked = f"Question: {row.input}\n" if row.input.strip() else ""
            place = _only_place(row.context, answers)
            question = f"\n\n{asked}{cue}"
            yield FileTask(f"longbench/{name}", row.context, question, answers, place=place)


def _only_place(context: str, answers: tuple[str, ...]) -> int | None:
    """Where the one answer is told, if it is told once."""
    if len(answers) == 1 and context.count(answers[0]) == 1:
        return context.index(answers[0])
    return None


# -- RULER -----------------------------------------------------------------------------------------


class _Ruler(msgspec.Struct):
    index: int
    input: str
    outputs: list[str]
    length: int
    answer_prefix: str = ""


RULER = "RULER's rows: {index, input, outputs: [text, …], length}, answer_prefix if there is one"


def read_ruler(path: Path) -> Iterator[FileTask | None]:
    """NVIDIA/RULER's TASK/validation.jsonl; the task is named after its folder.

    A row has one text for context and question: its last line is the question. All outputs are
    wanted, as RULER's own score does.
    """
    stem = path.parent.name if path.stem in ("validation", "test") else path.stem
    for number, row in enumerate(_rows(path, _Ruler, RULER), start=1):
        body = row.input.rstrip("\n")
        context, line, last = body.rpartition("\n")
        if not context.strip():
            raise _wrong(path, number, "`input` is one line: no context before the question", RULER)
        outputs = tuple(output for output in row.outputs if output.strip())
        if not outputs:
            yield None
            continue
        question = f"{line}{last}{row.answer_prefix}".rstrip(" ")
        place = _only_place(context, outputs)
        yield FileTask(f"ruler/{stem}", context, question, outputs, all_of=True, place=place)


# -- LoCoMo ----------------------------------------------------------------------------------------


class _Turn(msgspec.Struct):
    speaker: str
    dia_id: str
    text: str
    blip_caption: str | None = None


class _Asked(msgspec.Struct):
    question: str
    answer: str | int | float | None = None
    evidence: list[str] = []
    category: int = 0


class _Sample(msgspec.Struct):
    conversation: dict[str, Any]
    qa: list[_Asked]
    sample_id: str = ""


LOCOMO = (
    "LoCoMo's list of samples: [{conversation: {speaker_a, speaker_b, session_1_date_time, "
    "session_1: [{speaker, dia_id, text}, …], …}, qa: [{question, answer, evidence: [dia_id, …], "
    "category}, …]}, …]"
)
CATEGORIES = {1: "multi-hop", 2: "temporal", 3: "open-domain", 4: "single-hop"}
_SESSION = re.compile(r"session_(\d+)")


def read_locomo(path: Path) -> Iterator[FileTask | None]:
    """snap-research/locomo's data/locomo10.json; a task for each category of questions.

    Adversarial questions (category 5) have no answer in the conversation and are left out.
    """
    text = _text(path)
    try:
        samples = msgspec.json.decode(text, type=list[_Sample])
    except msgspec.ValidationError as error:
        raise _wrong(path, 1, error, LOCOMO) from error
    except msgspec.DecodeError as error:
        at = re.search(r"byte (\d+)", str(error))
        line = text.encode()[: int(at[1])].count(b"\n") + 1 if at else 1
        raise _wrong(path, line, error, LOCOMO) from error
    for sample in samples:
        context, places = _conversation(path, sample)
        for asked in sample.qa:
            answer = "" if asked.answer is None else str(asked.answer).strip()
            if not answer or asked.category not in CATEGORIES:
                yield None
                continue
            where = [places[name] for name in asked.evidence if name in places]
            question = f"\nQuestion: {asked.question}\nShort answer:"
            place = where[0] if len(where) == 1 else None
            task = f"locomo/{CATEGORIES[asked.category]}"
            yield FileTask(task, context, question, (answer,), place=place)


def _conversation(path: Path, sample: _Sample) -> tuple[str, dict[str, int]]:
    """All sessions as one text, and the character at which each turn begins."""
    sessions = sorted(
        (int(match[1]), name) for name in sample.conversation if (match := _SESSION.fullmatch(name))
    )
    if not sessions:
        raise _wrong(path, 1, f"sample {sample.sample_id!r} has no session_1", LOCOMO)
    text, places = "", {}
    for _, name in sessions:
        try:
            turns = msgspec.convert(sample.conversation[name], list[_Turn])
        except msgspec.ValidationError as error:
            where = f"sample {sample.sample_id!r}, {name}"
            raise _wrong(path, 1, f"{where}: {error}", LOCOMO) from error
        text += f"{sample.conversation.get(f'{name}_date_time', '')}\n"
        for turn in turns:
            places[turn.dia_id] = len(text)
            shared = f" [shares {turn.blip_caption}]" if turn.blip_caption else ""
            text += f"{turn.speaker}: {turn.text}{shared}\n"
        text += "\n"
    return text, places


# -- needle in a haystack --------------------------------------------------------------------------

NEEDLE = (
    "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny "
    "day."
)
NEEDLE_QUESTION = "What is the best thing to do in San Francisco?"
NEEDLE_LEAD = "The best thing to do in San Francisco is"
NEEDLE_DEPTHS = tuple(step / 10 for step in range(11))


class _Needle(msgspec.Struct):
    context_length: int
    depth_percent: float
    needle: str
    context: str = ""
    retrieval_question: str = ""


NIAH = (
    "a haystack (.txt, or a folder of them), or rows of results (.jsonl, .json): {context_length, "
    "depth_percent, needle}, retrieval_question and context if there are any"
)


def read_niah(path: Path) -> Iterator[FileTask | None]:
    """gkamradt/LLMTest_NeedleInAHaystack: its essays, its contexts or its results.

    Essays get the needle at 0, 10, … 100 % of the prompt. A text that holds the needle already is
    asked as it is. A row of results is asked again: with its context, or in held-out text of its
    length (at most the run's) with its needle at its depth.
    """
    if path.is_dir():
        texts = [_text(file) for file in sorted(path.glob("*.txt"))]
        if not texts:
            raise UserError(f"--task-file {path}: no .txt in it; expected {NIAH}")
        yield from _essays("\n\n".join(texts))
    elif path.suffix in (".json", ".jsonl"):
        for number, row in enumerate(_rows(path, _Needle, NIAH), start=1):
            yield _result(path, number, row)
    elif path.suffix == ".txt":
        yield from _essays(_text(path))
    else:
        raise UserError(f"--task-file {path}: not this kind of file; expected {NIAH}")


def _essays(text: str) -> Iterator[FileTask]:
    if NEEDLE in text:
        yield _told(text, NEEDLE, NEEDLE_QUESTION)
        return
    for depth in NEEDLE_DEPTHS:
        yield _hidden(text, NEEDLE, NEEDLE_QUESTION, depth, 0)


def _result(path: Path, number: int, row: _Needle) -> FileTask:
    needle = " ".join(row.needle.split())
    question = row.retrieval_question or (NEEDLE_QUESTION if needle == NEEDLE else "")
    if not needle or not question:
        raise _wrong(path, number, "a needle of its own needs its retrieval_question", NIAH)
    if not 0 <= row.depth_percent <= 100:
        raise _wrong(path, number, f"depth_percent {row.depth_percent} is not 0 to 100", NIAH)
    context = row.context
    if not context:
        return _hidden("", needle, question, row.depth_percent / 100, row.context_length)
    if row.needle.strip() not in context:
        raise _wrong(path, number, "the context does not hold the needle", NIAH)
    return _told(context, row.needle.strip(), question)


def _asked(needle: str, question: str) -> tuple[str, str, str]:
    """(question, lead, answer): what the needle says after its first words, if they are known."""
    lead = NEEDLE_LEAD if needle.startswith(NEEDLE_LEAD) else ""
    return f"\n\n{question}\n", lead, needle.removeprefix(lead).strip()


def _told(context: str, needle: str, question: str) -> FileTask:
    asked, lead, answer = _asked(needle, question)
    place = context.index(needle)
    return FileTask("niah", context, asked, (answer,), lead, place=place)


def _hidden(context: str, needle: str, question: str, depth: float, tokens: int) -> FileTask:
    asked, lead, answer = _asked(needle, question)
    return FileTask(
        "niah", context, asked, (answer,), lead, needle=f"\n{needle}\n", depth=depth, tokens=tokens
    )


FORMATS: dict[str, Format] = {
    "longbench": Format(read_longbench, LONGBENCH),
    "ruler": Format(read_ruler, RULER),
    "locomo": Format(read_locomo, LOCOMO),
    "niah": Format(read_niah, NIAH),
}
