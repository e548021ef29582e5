"""What a user names on the command line, as corpora."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from calib_cluster.corpora import files
from calib_cluster.corpora.documents import HALVES, Corpus
from calib_cluster.corpora.generated import Size
from calib_cluster.corpora.recipes import RECIPES
from calib_cluster.errors import CalibrationError


def load_corpora(
    specs: Sequence[str], size: Size | None = None, field: str | None = None
) -> tuple[Corpus, ...]:
    """The corpora of ``specs``, in order.

    A spec is a recipe's name, a file (.jsonl, .parquet, .txt, .md, code) or a folder of such
    files; a recipe's name wins over a path of the same name (write ./NAME for the path). With
    ``/a`` or ``/b`` after it, one of two disjoint halves (``Corpus.half``). ``size`` is that of
    generated recipes; a half of one has as many documents as the whole has by default.

    Labels are recipe names or file names; the whole path where two files share a name. Raises
    CalibrationError. Side effects: recipes may fetch packages into the cache.
    """
    if repeated := [spec for spec, count in Counter(specs).items() if count > 1]:
        raise CalibrationError(f"corpus {repeated[0]!r} is named twice")
    return tuple(_load(spec, specs, size or Size(), field) for spec in specs)


def _load(spec: str, specs: Sequence[str], size: Size, field: str | None) -> Corpus:
    name, half = _split(spec)
    if half is not None:
        twice = msgspec.structs.replace(size, documents=2 * size.documents)
        return _whole(name, specs, twice, field).half(half)
    return _whole(name, specs, size, field)


def _split(spec: str) -> tuple[str, str | None]:
    """(corpus, half or None). An existing path is never taken for a half."""
    name, slash, half = spec.rpartition("/")
    is_half = slash and half in HALVES and (name in RECIPES or not Path(spec).exists())
    return (name, half) if is_half else (spec, None)


def _whole(spec: str, specs: Sequence[str], size: Size, field: str | None) -> Corpus:
    if spec in RECIPES:
        return RECIPES[spec].corpus(size)
    path = Path(spec)
    if not path.exists():
        raise CalibrationError(_unknown(spec))
    path = path.resolve()
    namesakes = {Path(_split(other)[0]).resolve() for other in specs if other not in RECIPES}
    shared = sum(other.name == path.name for other in namesakes) > 1 or path.name in RECIPES
    return files.read_path(path, spec if shared else path.name, field)


def _unknown(spec: str) -> str:
    close = difflib.get_close_matches(spec, RECIPES, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else f": {', '.join(RECIPES)}"
    return f"corpus {spec!r} is neither a file or folder nor a recipe{hint}"
