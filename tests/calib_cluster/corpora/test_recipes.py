"""The real texts of every recipe: what they are, and that the two mixes share nothing."""

from __future__ import annotations

import shutil

import pytest

from calib_cluster.corpora import (
    CALIBRATION_MIX,
    EVALUATION_MIX,
    RECIPES,
    Corpus,
    Document,
    check_disjoint,
    load_corpora,
    load_prompts,
)
from calib_cluster.corpora.fetch import DebianPackage
from calib_cluster.corpora.html_text import html_text
from calib_cluster.errors import CalibrationError

TOOLS = ("apt-get", "dpkg-deb", "npm")
pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, TOOLS)), reason=f"needs {', '.join(TOOLS)}"
)
SENTENCES = {
    "kjv": "And God said, Let there be light: and there was light.",
    "debian-reference": "Debian is a volunteer organization",
    "python-doc": "Return the absolute value of a number.",
    "stdlib": "class ArgumentParser(",
    "moby-dick": "Call me Ishmael. Some years ago",
    "sotu": "Fellow-Citizens of the Senate and House of Representatives",
    "postgresql-doc": "SELECT",
}


@pytest.fixture(scope="module")
def corpora() -> dict[str, Corpus]:
    return {c.label: c for c in load_corpora([*CALIBRATION_MIX, *EVALUATION_MIX])}


def test_mixes_are_all_the_recipes_by_role() -> None:
    roles = {name: recipe.role for name, recipe in RECIPES.items()}
    assert roles == dict.fromkeys(CALIBRATION_MIX, "calibration") | dict.fromkeys(
        EVALUATION_MIX, "evaluation"
    )


@pytest.mark.parametrize("name", SENTENCES)
def test_text(corpora: dict[str, Corpus], name: str) -> None:
    corpus = corpora[name]
    assert any(SENTENCES[name] in document.text for document in corpus.documents)
    assert corpus.characters > 500_000
    assert len({d.id for d in corpus.documents}) == len(corpus.documents) >= 2
    assert any(char.isdigit() for char in corpus.source)  # a version


def test_the_bible_is_complete(corpora: dict[str, Corpus]) -> None:
    lines = [line for d in corpora["kjv"].documents for line in d.text.splitlines() if line]
    assert len(lines) == 31_102  # verses of the King James Version
    assert lines[-1].startswith("The grace of our Lord Jesus Christ be with you all")


def test_manuals_hold_no_markup_or_navigation(corpora: dict[str, Corpus]) -> None:
    for name in ("debian-reference", "postgresql-doc"):
        text = "\n".join(d.text for d in corpora[name].documents)
        assert text.count("</div>") < 5 and "\nPrev " not in text and "\n\n\n" not in text


def test_the_mixes_are_disjoint(corpora: dict[str, Corpus]) -> None:
    calibration, evaluation = (
        [corpora[name] for name in mix] for mix in (CALIBRATION_MIX, EVALUATION_MIX)
    )
    check_disjoint(calibration, evaluation)
    quoting = corpora["moby-dick"].documents[0].text + corpora["kjv"].documents[0].text[2000:2400]
    planted = Corpus("planted", (Document("planted:0", quoting),), "")
    with pytest.raises(CalibrationError, match="'kjv' and 'planted' share text"):
        check_disjoint(calibration[:1], [planted])


def test_long_prompts_of_the_whole_mix(smollm2, tokenizer) -> None:
    found = load_prompts(
        CALIBRATION_MIX, tokenizer(smollm2), prompts=12, length=4096, min_length=68, seed=0
    )
    assert [len(p.ids) for p in found.prompts] == [4096] * 12


@pytest.mark.skipif(
    DebianPackage("dpkg", "usr/bin/dpkg").installed() is None, reason="dpkg keeps no record here"
)
def test_installed_packages_are_used_in_place() -> None:
    tree = DebianPackage("dpkg", "usr/bin/dpkg").installed()
    assert str(tree.root) == "/" and tree.version[0].isdigit()
    assert DebianPackage("dpkg", "usr/share/nothing/of/the/kind").installed() is None
    assert DebianPackage("raggedkv-no-such-package", "usr").installed() is None


def test_html_text() -> None:
    html = (
        "<html><head><title>t</title></head><body><div class='navheader x'><p>Prev</p><hr></div>"
        "<h1>Title</h1><p>One\n  two<br>three &amp; <b>four</b></p><pre>a\n    b</pre>"
        "<table><tr><td>1</td><td>2</td></tr><tr><td>3</td></tr></table></body></html>"
    )
    assert html_text(html) == "Title\n\nOne two\nthree & four\n\na\n    b\n\n1  2\n3"
