"""Words that the judge's tasks are about, and draws of them."""

from __future__ import annotations

import random
from itertools import product


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FIRST_NAMES = _words(
    "Agnes Anton Beatrix Bruno Cecilia Cyril Dagmar Dmitri Edith Edgar Fabian Fiona Gustav Greta "
    "Hector Hilda Ines Ivor Jonas Judith Karin Kaspar Leopold Lydia Magnus Maud Nestor Norma Olga "
    "Oswald Pablo Petra Quentin Ramona Roland Sigrid Silas Thea Ulric Vera Walter Xenia Yusuf"
)
SURNAMES = _words(
    "Abbott Ashby Brandt Calloway Castell Danvers Ekman Farrow Fenwick Gallo Hale Ibsen Janssen "
    "Keller Kovacs Lindqvist Marlow Meyer Norris Okafor Paxton Quill Rostov Sable Tanner Ulman "
    "Vance Whitby Yates Zimmer"
)
TREES = _words(
    "acacia alder ash aspen bamboo beech birch cedar cherry chestnut cypress dogwood ebony elm fir "
    "hazel hemlock hickory holly juniper larch laurel linden magnolia mahogany maple oak olive "
    "pecan pine poplar redwood rowan spruce sycamore teak walnut willow yew"
)
BIRDS = _words(
    "bittern bunting buzzard condor cormorant crane crow cuckoo curlew dove eagle egret falcon "
    "finch flamingo gannet grouse gull heron ibis jackdaw kestrel lark magpie nightjar osprey owl "
    "peacock pelican petrel pheasant plover puffin quail raven robin sparrow starling stork swan "
    "swift thrush vulture warbler wren"
)
METALS = _words(
    "brass bronze chrome cobalt copper gold iron lead mercury nickel silver steel tin zinc"
)
INSTRUMENTS = _words(
    "accordion banjo bassoon cello clarinet cornet drum fiddle flute guitar harp harpsichord lute "
    "mandolin oboe organ piano saxophone trombone trumpet tuba viola violin zither"
)
_HEADS = _words("Bra Cor Dun El Fal Gar Hol Kel Lor Mar Nor Or Pel Ros Sel Tor Ul Val Wes Zan")
_TAILS = _words(
    "bridge by combe dale den field ford gate ham haven kirk ley mere mont mouth port stead ton "
    "vale wick"
)


def people(rng: random.Random, count: int) -> list[str]:
    """Different people, with different surnames while there are enough."""
    if count <= len(SURNAMES):
        return [f"{rng.choice(FIRST_NAMES)} {name}" for name in rng.sample(SURNAMES, count)]
    pairs = [" ".join(pair) for pair in product(FIRST_NAMES, SURNAMES)]
    return rng.sample(pairs, count)


def entries(rng: random.Random, count: int) -> list[str]:
    """Different keys of a register: ``maple heron``, of three words where two do not suffice."""
    words = [TREES, BIRDS]
    if count > len(TREES) * len(BIRDS):
        words.append(METALS)
    keys = [" ".join(combination) for combination in product(*words)]
    return rng.sample(keys, count)


def towns(rng: random.Random, count: int) -> list[str]:
    """Different made-up names of towns."""
    return rng.sample([a + b for a, b in product(_HEADS, _TAILS)], count)


def numbers(rng: random.Random, count: int, digits: int = 6) -> list[str]:
    """Different numbers of so many digits."""
    return [str(n) for n in rng.sample(range(10 ** (digits - 1), 10**digits), count)]
