"""Texts whose continuation depends on what was said far back: facts to recall, keys to look up.

Natural text seldom forces a model to look back thousands of tokens, so windows calibrated on it
alone may cut the heads that copy and retrieve. All through these texts, questions ask for facts
given at distances drawn half uniformly, half log-uniformly: any part has near and far recall.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec

from calib_cluster.corpora.documents import Document, Message, conversation_text
from calib_cluster.corpora.words import fill, paragraph, pick, with_articles

CHARACTERS = 6  # per token asked for: more than these texts have, so that documents suffice


class Size(msgspec.Struct, frozen=True):
    """How much to generate: documents of at least ``tokens`` tokens each."""

    documents: int = 64
    tokens: int = 2048
    seed: int = 0


class Fact(msgspec.Struct, frozen=True):
    """Something said once, and what it answers later."""

    key: str
    value: str


def dialogues(size: Size) -> tuple[Document, ...]:
    """Conversations of a user who tells facts and asks for them later; one document each."""
    return tuple(_dialogue(number, size) for number in range(size.documents))


def key_values(size: Size) -> tuple[Document, ...]:
    """Tables, records, settings, variables and hidden facts, each with questions on them."""
    return tuple(_key_value(number, size) for number in range(size.documents))


def recalled(rng: random.Random, facts: Sequence[Fact], count: int = 1) -> list[Fact]:
    """``count`` different facts (fewer if there are fewer) from near and far back."""
    chosen: dict[str, Fact] = {}
    while len(chosen) < min(count, len(facts)):
        near = rng.random() < 0.5
        back = int(len(facts) ** rng.random()) if near else rng.randint(1, len(facts))
        fact = facts[-min(max(back, 1), len(facts))]
        chosen[fact.key] = fact
    return list(chosen.values())


# Dialogues. A persona's facts: (what it is called in a question, pattern of its value, patterns
# of the user's sentence that tells it).
PERSONA = (
    ("the name of my {animal}", "{name}",
     ("My {animal} is called {value}.", "{value} is what we named the {animal}.")),
    ("the city where my {job} lives", "{city}",
     ("My {job} lives in {value}.", "I know a {job}; the address is in {value}.")),
    ("the day I have {hobby}", "{day}",
     ("I have {hobby} every {value}.", "On {value} I always go to {hobby}.")),
    ("the code of the {adj} {noun}", "{code}",
     ("The code of the {adj} {noun} is {value}.", "Keep this: {adj} {noun}, code {value}.")),
    ("the colour of my {adj} {noun}", "{colour}",
     ("I painted my {adj} {noun} {value}.", "My {adj} {noun} is {value} now.")),
    ("the month {name} visits", "{month}",
     ("{name} will visit me in {value}.", "In {value} we expect {name} here.")),
    ("what {name} cannot eat", "{food}",
     ("Remember that {name} cannot eat {value}.", "Please no {value} for {name}.")),
    ("who has the key of the {place}", "{name}",
     ("The key of the {place} is with {value}.", "{value} keeps the key of the {place}.")),
    ("how many {unit} the {noun} needs", "{digits}",
     ("The {noun} needs {value} {unit}.", "Plan {value} {unit} for the {noun}.")),
    ("the job of {name}", "{job}",
     ("{name} works as a {value} these days.", "{name} trained to be a {value}.")),
)  # fmt: skip
NOTED = ("Noted.", "Thanks, I will remember that.", "Got it: {value}.", "{value}, understood.",
         "I have written that down.", "Good to know.")  # fmt: skip
ASKED = ("Do you remember {key}?", "What did I say about {key}?", "Remind me: {key}?",
         "I forgot {key}. Can you help?", "Before we go on, {key}, please.")  # fmt: skip
ANSWERED = ("You told me: {value}.", "{value}.", "That is {value}.", "It was {value}.",
            "As you said, {value}.")  # fmt: skip
CHATTED = ("Tell me a story about a {noun}.", "What is new in {city}?", "I am bored of {hobby}.",
           "Write something about {food} and a {job}.", "Describe the {adj} {place}.",
           "How was {day}?")  # fmt: skip


def _dialogue(number: int, size: Size) -> Document:
    rng = random.Random(f"dialogue {size.seed} {number}")
    messages: list[Message] = []
    facts: dict[str, Fact] = {}
    basket: list[str] = []
    while sum(len(m.content) for m in messages) < CHARACTERS * size.tokens:
        turn = rng.choices((_tell, _ask, _chat, _basket), (4, 4, 2, 1))[0]
        user, model = turn(rng, facts, basket)
        messages += [Message("user", user), Message("assistant", model)]
    text = conversation_text(messages)
    return Document(f"dialogue:{number}", text, tuple(messages), from_start=True)


Turn = tuple[str, str]  # what the user says, what the model answers


def _tell(rng: random.Random, facts: dict[str, Fact], basket: list[str]) -> Turn:
    """One to three new facts. A key told again would be ambiguous, so it is told once."""
    said, last = [], ""
    for _ in range(rng.randint(1, 3)):
        key, value, patterns = rng.choice(PERSONA)
        while "{" in key:  # one draw for the slots that question and sentence share
            slot = key[key.index("{") : key.index("}") + 1]
            word = pick(rng, slot[1:-1])
            key = key.replace(slot, word, 1)
            patterns = tuple(p.replace(slot, word, 1) for p in patterns)
        if key in facts:
            continue
        last = _code(rng) if value == "{code}" else fill(rng, value)
        facts[key] = Fact(key, last)
        said.append(with_articles(rng.choice(patterns).replace("{value}", last)))
    if not said:
        return _chat(rng, facts, basket)
    return " ".join(said), rng.choice(NOTED).replace("{value}", last)


def _ask(rng: random.Random, facts: dict[str, Fact], basket: list[str]) -> Turn:
    if not facts:
        return _tell(rng, facts, basket)
    (fact,) = recalled(rng, list(facts.values()))
    question = rng.choice(ASKED).replace("{key}", fact.key)
    return question, rng.choice(ANSWERED).replace("{value}", fact.value)


def _chat(rng: random.Random, facts: dict[str, Fact], basket: list[str]) -> Turn:
    return fill(rng, rng.choice(CHATTED)), paragraph(rng, rng.randint(2, 9))


def _basket(rng: random.Random, facts: dict[str, Fact], basket: list[str]) -> Turn:
    """A shopping list that grows turn by turn and is repeated whole."""
    if len(basket) > 8:
        basket.clear()
        return "I bought everything, start a new list.", "The list is empty."
    item = f"{pick(rng, 'digits')} {pick(rng, 'unit')} of {pick(rng, 'food')}"
    basket.append(item)
    return f"Add {item} to the list.", "The list: " + "; ".join(basket) + "."


def _code(rng: random.Random) -> str:
    """A value that only looking it up can give."""
    kind = rng.randrange(4)
    if kind == 0:
        return str(rng.randrange(10_000, 10_000_000))
    if kind == 1:
        return f"{rng.getrandbits(40):010x}"
    if kind == 2:
        return "-".join((pick(rng, "adj"), pick(rng, "noun"), str(rng.randrange(10, 99))))
    return "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(6))


# Key-value texts. A style is (line that gives a fact, question, answer).
STYLES = (
    ('{"key": "KEY", "value": "VALUE"}', '{"get": "KEY"}', '{"value": "VALUE"}'),
    ("The access code of the KEY is VALUE.", "What is the access code of the KEY?", "VALUE"),
    ("KEY = VALUE", "print(config['KEY'])", "VALUE"),
    ("| KEY | VALUE |", "Look up KEY:", "VALUE"),
    ("- KEY: VALUE", "Question: which entry belongs to KEY?", "Answer: VALUE"),
    ("INSERT INTO store VALUES ('KEY', 'VALUE');", "SELECT v FROM store WHERE k = 'KEY';", "VALUE"),
    ("export KEY=VALUE", "$ echo $KEY", "VALUE"),
    ("Extension of KEY: VALUE.", "Please connect me with KEY.", "Dialling VALUE."),
)


def _key_value(number: int, size: Size) -> Document:
    rng = random.Random(f"key-value {size.seed} {number}")
    write = (_store, _store, _haystack, _variables)[number % 4]
    sections = write(rng, CHARACTERS * size.tokens)
    return Document(f"key-value:{number}", "\n".join(sections), from_start=True)


def _fill_up(characters: int, more: Callable[[], list[str]]) -> list[str]:
    lines: list[str] = []
    size = 0
    while size < characters:
        added = more()
        lines += added
        size += sum(len(line) + 1 for line in added)
    return lines


def new_fact(rng: random.Random, facts: dict[str, Fact]) -> Fact:
    while (key := _key(rng)) in facts:
        pass
    facts[key] = Fact(key, _code(rng))
    return facts[key]


def _key(rng: random.Random) -> str:
    words = f"{pick(rng, 'adj')}-{pick(rng, 'noun')}"
    return words if rng.random() < 0.5 else f"{words}-{rng.randrange(1000)}"


def _store(rng: random.Random, characters: int) -> list[str]:
    """Records in one notation, in blocks, each block followed by look-ups."""
    given, asked, answer = rng.choice(STYLES)
    facts: dict[str, Fact] = {}

    def block() -> list[str]:
        new = [new_fact(rng, facts) for _ in range(rng.randint(4, 24))]
        lines = [put(given, fact) for fact in new]
        for fact in recalled(rng, list(facts.values()), rng.randint(2, 8)):
            lines += [put(asked, fact), put(answer, fact)]
        return [*lines, ""]

    return _fill_up(characters, block)


def put(pattern: str, fact: Fact) -> str:
    return pattern.replace("KEY", fact.key, 1).replace("VALUE", fact.value, 1)


def _haystack(rng: random.Random, characters: int) -> list[str]:
    """Paragraphs with a fact hidden here and there, and questions between them."""
    facts: dict[str, Fact] = {}

    def block() -> list[str]:
        given, asked, answer = rng.choice(STYLES[1:2] + STYLES[4:5] + STYLES[7:])
        fact = new_fact(rng, facts)
        hay = paragraph(rng, rng.randint(2, 10)), paragraph(rng, rng.randint(1, 6))
        lines = [f"{hay[0]} {put(given, fact).lstrip('- ')} {hay[1]}", ""]
        if rng.random() < 0.6:
            (old,) = recalled(rng, list(facts.values()))
            lines += [put(asked, old), put(answer, old), ""]
        return lines

    return _fill_up(characters, block)


def _variables(rng: random.Random, characters: int) -> list[str]:
    """Assignments that copy earlier ones: a value is found by following its names back."""
    facts: list[Fact] = []

    def block() -> list[str]:
        lines = []
        for _ in range(rng.randint(3, 15)):
            name = f"{pick(rng, 'noun')}_{len(facts)}"
            if facts and rng.random() < 0.6:
                (source,) = recalled(rng, facts)
                lines.append(f"{name} = {source.key}")
                facts.append(Fact(name, source.value))
            else:
                facts.append(Fact(name, str(rng.randrange(1000, 100_000))))
                lines.append(f"{name} = {facts[-1].value}")
        for fact in recalled(rng, facts, rng.randint(1, 5)):
            lines += [f">>> {fact.key}", fact.value]
        return [*lines, ""]

    return _fill_up(characters, block)
