"""Questions that end a prompt, or come after it: exact lengths, answers that the prompt holds."""

from __future__ import annotations

import pytest

from calib_cluster.corpora.asked import ANSWER, ASKED, asked_tasks
from calib_cluster.errors import CalibrationError


class Letters:
    """A tokenizer of single characters, with or without a <bos>."""

    bos_token_id = 7

    def __init__(self, starts: bool = False) -> None:
        self._starts = starts

    def __call__(self, text, add_special_tokens=True, verbose=True):
        ids = [ord(letter) + 10 for letter in text]
        return {"input_ids": ([7] if self._starts and add_special_tokens else []) + ids}

    @staticmethod
    def text(ids) -> str:
        return "".join(chr(i - 10) for i in ids if i != 7)


@pytest.mark.parametrize("starts", [False, True], ids=["plain", "bos"])
@pytest.mark.parametrize("kind", ASKED)
@pytest.mark.parametrize("length", [1500, 4001])
def test_prompts_are_exactly_as_long_and_hold_the_answer(kind, starts, length):
    for task in asked_tasks(Letters(starts), kind, 4, length, seed=3):
        assert len(task.prompt) == length and (task.prompt[0] == 7) == starts
        prompt = Letters.text(task.prompt)
        continuation = Letters.text(task.continuation)
        asked, answer = continuation[: task.scored], continuation[task.scored :]
        assert 2 <= len(answer) <= ANSWER
        value = answer.strip().strip('"}').rstrip(".")[:24]
        assert value and value in prompt, (kind, answer)
        assert bool(task.scored) == kind.endswith("-later")
        if task.scored:
            assert not prompt.endswith(asked)


def test_the_same_arguments_give_the_same_tasks_and_more_only_add():
    few, many = (asked_tasks(Letters(), "facts", n, 1500, seed=0) for n in (2, 5))
    assert few == many[:2]
    assert len({task.prompt for task in many}) == 5
    assert asked_tasks(Letters(), "facts", 2, 1500, seed=1) != few


@pytest.mark.parametrize(
    ("kind", "length", "message"),
    [
        ("fact", 500, "no task 'fact'; there are"),
        ("facts", 9, "128"),
        ("passages", 130, "passages: what is asked for does not fit into 130 tokens"),
    ],
)
def test_bad_input_is_one_line(kind, length, message):
    with pytest.raises(CalibrationError, match=message):
        asked_tasks(Letters(), kind, 1, length, seed=0)
