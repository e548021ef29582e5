"""Needle questions as token ids of an exact length: a number told at some depth of other text."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

import msgspec

from loadtest.corpora import bos, prompts
from loadtest.errors import UserError

NEEDLE = "\nRemember this: the secret code of the {place} is {code}.\n"
QUESTION = "\n\nQuestion: What is the secret code of the {place}?\n"
ANSWER = "The secret code of the {place} is"
PLACES = ("lighthouse", "library", "harbour", "museum", "castle", "bakery", "garden", "station")
CODES = (10_000, 99_999)
ANSWER_TOKENS = 12
"""Decoded after the question: a code takes five or six."""
LEAST_CONTEXT = 256  # needle, question and chat template take about 80 tokens
_MARK = "0MARK0"


class Needle(msgspec.Struct, frozen=True):
    """A prompt whose answer is ``code``, told at ``depth`` (0 to 1) of its text."""

    ids: list[int]
    depth: float
    code: str

    def found_in(self, answer: str) -> bool:
        """True if ``answer`` holds the code as a number of its own."""
        return re.search(rf"(?<!\d){self.code}(?!\d)", answer) is not None


def needles(tokenizer, context: int, depths: Sequence[float], seed: int) -> list[Needle]:
    """One needle prompt of exactly ``context`` tokens a depth, each in another text.

    The prompt carries the model's chat template if it has one, else <bos> where the model wants
    it. Everything follows from the arguments alone. Raises UserError if ``context`` is too short.
    """
    rng = random.Random(f"capacity needles {seed} {context}")
    texts = prompts(tokenizer, [context] * len(depths), seed=rng.randrange(1 << 30))
    skip = len(bos(tokenizer))
    return [
        _needle(tokenizer, context, text[skip:], depth, rng)
        for text, depth in zip(texts, depths, strict=True)
    ]


def spread(count: int) -> list[float]:
    """``count`` depths from 5 % to 95 %, in the middles of equal parts."""
    return [0.05 + 0.9 * (i + 0.5) / count for i in range(count)]


def _needle(tokenizer, context: int, text: list[int], depth: float, rng: random.Random) -> Needle:
    place, code = rng.choice(PLACES), str(rng.randint(*CODES))
    before, after = _frame(tokenizer)
    told = _ids(tokenizer, NEEDLE.format(place=place, code=code))
    asked = _ids(tokenizer, QUESTION.format(place=place))
    answer = after + _ids(tokenizer, ("" if after else "Answer: ") + ANSWER.format(place=place))
    room = context - sum(map(len, (before, told, asked, answer)))
    if room < 0:
        raise UserError(
            f"--context {context}: a needle's question alone takes {context - room} tokens here"
        )
    hay = text[:room]
    at = round(depth * len(hay))
    return Needle([*before, *hay[:at], *told, *hay[at:], *asked, *answer], depth, code)


def _frame(tokenizer) -> tuple[list[int], list[int]]:
    """Token ids before and after a user's message: the chat template's, or <bos> alone."""
    if not tokenizer.chat_template:
        return bos(tokenizer), []
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": _MARK}], add_generation_prompt=True, tokenize=False
    )
    before, after = text.split(_MARK)
    return _ids(tokenizer, before), _ids(tokenizer, after)


def _ids(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
