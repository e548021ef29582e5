"""Natural, diverse, deterministic prompts from the standard library's own sources: no network."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

FILES = (
    "argparse.py asyncio/tasks.py bisect.py calendar.py collections/__init__.py configparser.py "
    "csv.py dataclasses.py datetime.py decimal.py difflib.py email/message.py enum.py fractions.py "
    "functools.py heapq.py http/client.py inspect.py ipaddress.py json/decoder.py locale.py "
    "logging/__init__.py mailbox.py optparse.py pathlib.py pickletools.py pprint.py random.py "
    "shlex.py shutil.py smtplib.py statistics.py string.py subprocess.py tarfile.py textwrap.py "
    "threading.py traceback.py turtle.py typing.py unittest/mock.py urllib/parse.py uuid.py "
    "zipfile.py"
)
QUESTIONS = (
    "What does this code do?",
    "Which errors can it raise, and when?",
    "Explain the next part in one sentence.",
    "Show a short example of how to call it.",
)
CHARS_PER_TOKEN = 12  # generous: even code with long identifiers stays below it


@lru_cache(maxsize=1)
def library_texts() -> tuple[str, ...]:
    """Texts of those ``FILES`` that this Python has (a few move between versions)."""
    library = Path(sysconfig.get_path("stdlib"))
    return tuple((library / f).read_text("utf-8") for f in FILES.split() if (library / f).is_file())


def bos(tokenizer) -> list[int]:
    """[<bos>] for a tokenizer that starts every text with it (Gemma), else []."""
    first = tokenizer("a")["input_ids"][:1]
    return first if first == [tokenizer.bos_token_id] else []


def _excerpt(tokenizer, length: int, rng: random.Random) -> list[int]:
    """Exactly ``length`` token ids, no <bos>, of text from one or more random files."""
    ids: list[int] = []
    while len(ids) < length:
        text = rng.choice(library_texts())
        start = rng.randrange(len(text))
        start = text.rfind("\n", 0, start) + 1  # at a line, as a reader would quote it
        piece = text[start : start + CHARS_PER_TOKEN * (length - len(ids))]
        ids += tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
    return ids[:length]


def _prompt(tokenizer, length: int, rng: random.Random) -> list[int]:
    start = bos(tokenizer)
    return start + _excerpt(tokenizer, length - len(start), rng)


def prompts(tokenizer, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """One prompt of token ids per length (<bos> included), each from another place."""
    rng = random.Random(f"prompts {seed}")
    return [_prompt(tokenizer, length, rng) for length in lengths]


def branching(
    tokenizer, shared_len: int, branches: Sequence[int], seed: int = 0
) -> list[list[int]]:
    """Prompts that share exactly their first ``shared_len`` ids, as a system prompt is shared.

    ``branches`` are the lengths of the tails; no two tails begin with the same id.
    """
    rng = random.Random(f"branching {seed}")
    shared = _prompt(tokenizer, shared_len, rng)
    tails: dict[int, list[int]] = {}
    for length in branches:
        while (tail := _excerpt(tokenizer, length, rng))[0] in tails:
            pass
        tails[tail[0]] = tail
    return [shared + tail for tail in tails.values()]


def turns(tokenizer, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """User turns of a conversation as token ids of ``lengths``; <bos> on the first only.

    The prompt of turn i is turns[0] + answer 0 + turns[1] + ... + turns[i].
    """
    rng = random.Random(f"turns {seed}")
    first = _prompt(tokenizer, lengths[0], rng)
    return [first] + [_excerpt(tokenizer, length, rng) for length in lengths[1:]]


def questions(count: int, chars: int, seed: int = 0) -> list[str]:
    """User messages for a chat: each quotes ``chars`` characters of code and asks about it."""
    rng = random.Random(f"questions {seed}")
    messages = []
    for _ in range(count):
        text = rng.choice(library_texts())
        start = rng.randrange(len(text) - chars)
        quote = text[start : start + chars]
        messages.append(f"```python\n{quote}\n```\n{rng.choice(QUESTIONS)}")
    return messages
