"""Vocabulary and sentence patterns of the generated corpora."""

from __future__ import annotations

import random
import re

WORDS: dict[str, tuple[str, ...]] = {
    name: tuple(words.split())
    for name, words in {
        "name": (
            "Amara Bao Carlos Chiara Dmitri Elif Farid Greta Hana Ingrid Ivo Jamal Kenji Kofi "
            "Lena Leila Marek Mei Nadia Nikhil Olga Oskar Paolo Priya Quentin Rania Ravi Saoirse "
            "Selim Tariq Thea Tomas Uma Viktor Wanjiru Xavier Yara Yusuf Zofia Zeynep"
        ),
        "city": (
            "Accra Bergen Bogota Bruges Busan Cork Dakar Essen Fez Ghent Graz Hobart Izmir Kyoto "
            "Leeds Lima Lucca Lyon Malmo Nagoya Oaxaca Odense Porto Pune Quito Riga Salta Sfax "
            "Tartu Turin Utrecht Varna Windhoek Yerevan Zagreb"
        ),
        "adj": (
            "amber ancient blue brisk broken bright calm careful cheap clever cold crooked damp "
            "dusty early empty faint fragile green grey heavy hidden hollow humble iron late "
            "loose narrow noisy northern old pale patient quiet rapid rough rusty second shallow "
            "silver slow small spare steady strange tall thin unusual warm wooden yellow"
        ),
        "noun": (
            "anchor archive balcony barrel basket bell bicycle boiler bridge bucket cabinet camera "
            "candle carpet chapel clock compass copper counter crate drawer engine falcon fence "
            "ferry garden gate guitar hammer harbour kettle ladder lantern ledger library "
            "lighthouse map mill mirror museum needle notebook orchard oven packet paddle parcel "
            "pier pillow pump quarry radio rope saddle sail scale shelf signal stove telescope "
            "tower tractor valley vessel wagon wheel window workshop"
        ),
        "past": (
            "borrowed carried checked cleaned collected copied counted crossed described fixed "
            "found guarded hid ignored inspected lifted listed lost measured mended moved noticed "
            "opened ordered packed painted photographed praised rented repaired returned sold "
            "sorted studied tested traded weighed"
        ),
        "job": (
            "accountant archivist baker beekeeper botanist carpenter chemist cook dentist editor "
            "electrician farmer geologist gardener journalist librarian mechanic midwife nurse "
            "optician painter pharmacist pilot plumber potter sailor surveyor tailor teacher welder"
        ),
        "food": (
            "apricots barley beetroot bread cheese cherries chickpeas couscous dates dumplings "
            "figs ginger honey lentils mushrooms noodles olives oranges pancakes paprika peaches "
            "pickles plums pumpkin quinces rice saffron sesame spinach tomatoes walnuts yoghurt"
        ),
        "animal": (
            "badger canary cat cockatoo dog donkey ferret finch goat goldfish goose hamster "
            "hedgehog horse iguana lizard mule parrot pony rabbit tortoise turtle"
        ),
        "hobby": (
            "archery astronomy bookbinding calligraphy chess climbing cycling embroidery fencing "
            "fishing juggling kayaking knitting origami photography pottery rowing sailing "
            "sculpture skating swimming weaving woodcarving"
        ),
        "colour": (
            "blue brown crimson gold green grey indigo lilac orange pink purple red teal white"
        ),
        "day": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
        "month": (
            "January February March April May June July August September October November December"
        ),
        "unit": "boxes crates grams kilometres litres metres minutes pages pounds sacks tons",
        "place": (
            "attic barn basement bakery canteen cellar corridor courtyard depot greenhouse hall "
            "hospital kitchen laboratory market office pharmacy school shed square stable station "
            "studio theatre warehouse"
        ),
    }.items()
}

SENTENCES = (
    "{name} {past} the {adj} {noun} in the {place} before {day}.",
    "Nobody in {city} had {past} a {noun} like that since {month}.",
    "The {adj} {noun} beside the {place} belonged to a {job} from {city}.",
    "When the rain stopped, {name} and {name} {past} {digits} {unit} of {food}.",
    "A {job} needs a {adj} {noun}, and {name} knew it.",
    "It took {digits} {unit} of rope to lift the {noun} over the {adj} {noun}.",
    "On {day} the {place} was closed, so the {noun} stayed with {name}.",
    "Some say that {food} from {city} taste better in {month}.",
    "{name}, who used to be a {job}, {past} the {noun} and then {past} it again.",
    "Behind the {place} stood a {adj} {noun}, half covered by a {colour} sheet.",
    "The {animal} slept under the {noun} while {name} {past} the {food}.",
    "Every {month} the {job} of {city} wrote a letter about {hobby}.",
    "There were {digits} {unit} left, which was more than {name} had expected.",
    "Neither the {noun} nor the {adj} {noun} could be {past} without a key.",
    "They met at the {place} in {city}, {past} a {noun}, and spoke of {hobby}.",
    "If the {noun} is {adj}, ask the {job}; if it is {adj}, leave it in the {place}.",
    "Later that {day}, {name} {past} a {colour} {noun} near the {adj} {place}.",
    "The {noun} cost {digits} coins, the {noun} only {digits}.",
)

_SLOT = re.compile(r"\{(\w+)\}")
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeiou])")


def fill(rng: random.Random, pattern: str) -> str:
    """``pattern`` with every {slot} drawn at random; {digits} is a number of up to 3 digits."""
    return with_articles(_SLOT.sub(lambda slot: pick(rng, slot.group(1)), pattern))


def with_articles(text: str) -> str:
    """``text`` with "an" before a vowel."""
    return _ARTICLE.sub(r"\1n ", text)


def pick(rng: random.Random, kind: str) -> str:
    return str(rng.randrange(2, 999)) if kind == "digits" else rng.choice(WORDS[kind])


def paragraph(rng: random.Random, sentences: int) -> str:
    """Sentences about nothing in particular, to put distance between facts."""
    return " ".join(fill(rng, rng.choice(SENTENCES)) for _ in range(sentences))
