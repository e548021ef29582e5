"""``python -m calib_cluster corpus``: list, fetch, look at, compare and export corpora."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from rich.table import Table
from rich.text import Text

from calib_cluster.corpora import fetch
from calib_cluster.corpora.disjoint import RUN_WORDS, check_disjoint
from calib_cluster.corpora.documents import Corpus
from calib_cluster.corpora.excerpts import plain_encoder
from calib_cluster.corpora.generated import Size
from calib_cluster.corpora.mix import choose_prompts
from calib_cluster.corpora.recipes import CALIBRATION_MIX, EVALUATION_MIX, RECIPES, Recipe
from calib_cluster.corpora.specs import load_corpora
from calib_cluster.errors import CalibrationError
from kvpolicy.render import make_console

SPEC_HELP = (
    f"a recipe ({', '.join(RECIPES)}), a .jsonl, .parquet, .txt, .md or code file, or a folder of "
    "these; with /a or /b after it, one of two disjoint halves"
)
SHOWN_LINES = 12


def add_corpus_commands(commands, parser_class: type[argparse.ArgumentParser]) -> None:
    """Register ``corpus`` and its subcommands on an argparse subparsers object.

    Each sets ``command``, a function of the parsed arguments that prints to stdout and raises
    CalibrationError.
    """
    text = "list, fetch, look at, compare and export the texts to calibrate and evaluate on"
    parser = commands.add_parser("corpus", help=text, description=text)
    sub = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=parser_class)
    _add(sub, "list", list_command, "name the recipes and say which texts are here")
    get = _add(sub, "fetch", fetch_command, "fetch the packages of recipes into the cache")
    get.add_argument("names", nargs="+", metavar="NAME", help=", ".join(RECIPES))
    _add_show(sub)
    check = _add(sub, "check", check_command, "fail if two groups of corpora share text")
    for group, mix in (("calibration", CALIBRATION_MIX), ("evaluation", EVALUATION_MIX)):
        check.add_argument(
            f"--{group}", nargs="+", metavar="SPEC", default=list(mix),
            help=f"default: {' '.join(mix)}",
        )  # fmt: skip
    check.add_argument("--field", metavar="F", help="field of the rows of your own files")
    export = _add(sub, "export", export_command, "write documents as JSON lines")
    export.add_argument("specs", nargs="+", metavar="SPEC", help=SPEC_HELP)
    export.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl")
    export.add_argument("--field", metavar="F", help="field of the rows of your own files")


def _add(commands, name: str, run: Callable, text: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(command=run)
    return parser


def _add_show(commands) -> None:
    show = _add(commands, "show", show_command, "describe a corpus; with --model, its prompts too")
    show.add_argument("spec", metavar="SPEC", help=SPEC_HELP)
    show.add_argument("--model", metavar="DIR", help="model folder: count tokens, show a prompt")
    show.add_argument("--length", type=int, default=2048, metavar="T", help="default 2048")
    show.add_argument("--prompts", type=int, default=8, metavar="N", help="default 8")
    show.add_argument("--seed", type=int, default=0)
    show.add_argument("--chat-template", action="store_true", help="as the model is served")
    show.add_argument("--field", metavar="F", help="field of the rows of your own files")


def list_command(args: argparse.Namespace) -> None:
    """Print the recipes."""
    table = Table()
    for column in ("name", "role", "text", "source", "state"):
        table.add_column(column, overflow="fold")
    for recipe in RECIPES.values():
        sources = ", ".join(package.name for package in recipe.packages)
        source = sources or ("generated" if recipe.generated else "running Python")
        table.add_row(recipe.name, recipe.role, recipe.title, source, _state(recipe))
    make_console().print(table)


def _state(recipe: Recipe) -> str:
    missing = []
    for package in recipe.packages:
        try:
            if fetch.find(package) is None:
                missing.append(package)
        except CalibrationError:
            return "damaged: fetch says more"
    if not missing:
        return "present"
    tools = {tool for package in missing for tool in package.tools()}
    lacking = sorted(tool for tool in tools if not shutil.which(tool))
    return f"needs {', '.join(lacking)}" if lacking else "fetchable"


def fetch_command(args: argparse.Namespace) -> None:
    """Fetch what the named recipes need; one line each."""
    for name in args.names:
        if name not in RECIPES:
            raise CalibrationError(f"no recipe {name!r}; there are {', '.join(RECIPES)}")
    for name in args.names:
        trees = [fetch.ensure(package) for package in RECIPES[name].packages]
        where = "; ".join(f"{tree.label} in {tree.root}" for tree in trees)
        print(f"{name}: {where or 'needs nothing fetched'}")


def show_command(args: argparse.Namespace) -> None:
    """Print size, source and hash of a corpus, and the first lines of a prompt of it."""
    tokenizer = _tokenizer(args.model) if args.model else None
    size = Size(documents=args.prompts, tokens=args.length, seed=args.seed)
    (corpus,) = load_corpora([args.spec], size, args.field)
    table = Table(show_header=False)
    table.add_row("corpus", Text(corpus.label))
    table.add_row("source", Text(corpus.source))
    table.add_row("documents", f"{len(corpus.documents):,}")
    table.add_row("characters", f"{corpus.characters:,}")
    if tokenizer is not None:
        encode = plain_encoder(tokenizer)
        table.add_row("tokens", f"{sum(len(encode(d.text)) for d in corpus.documents):,}")
    table.add_row("content hash", corpus.digest(args.chat_template))
    beginning = corpus.documents[0].text
    if tokenizer is not None:
        beginning = _add_prompts(table, corpus, tokenizer, args)
    console = make_console()
    console.print(table)
    for line in beginning.splitlines()[:SHOWN_LINES]:
        console.print(Text(line, overflow="ellipsis", no_wrap=True))


def _add_prompts(table: Table, corpus: Corpus, tokenizer, args: argparse.Namespace) -> str:
    """Rows about the prompts; returns the first one's text."""
    chosen = choose_prompts(
        [corpus], tokenizer, prompts=args.prompts, length=args.length, min_length=1,
        seed=args.seed, chat_template=args.chat_template,
    )  # fmt: skip
    shortest = min(len(prompt.ids) for prompt in chosen.prompts)
    table.add_row("prompts", f"{len(chosen.prompts)} of {shortest:,} to {args.length:,} tokens")
    table.add_row("prompts' hash", chosen.fingerprint)
    table.add_row("first prompt from", Text(chosen.prompts[0].source))
    return tokenizer.decode(chosen.prompts[0].ids)


def _tokenizer(folder: str):
    from transformers import AutoTokenizer  # seconds to import, and only this needs it

    if not Path(folder).is_dir():
        raise CalibrationError(f"no model folder {folder}")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise CalibrationError(f"{folder} has no tokenizer that loads: {error}") from error


def check_command(args: argparse.Namespace) -> None:
    """Print one line if the two groups are disjoint; CalibrationError if not."""
    a = load_corpora(args.calibration, field=args.field)
    b = load_corpora(args.evaluation, field=args.field)
    check_disjoint(a, b)
    names = " and ".join(", ".join(corpus.label for corpus in group) for group in (a, b))
    print(f"disjoint: no {RUN_WORDS} words in a row are in both {names}")


def export_command(args: argparse.Namespace) -> None:
    """Write every document of the corpora to one file, in order."""
    corpora = load_corpora(args.specs, field=args.field)
    if args.out.is_dir():
        raise CalibrationError(f"{args.out} is a folder; --out names a file")
    try:
        fetch.write_durably(args.out, _json_lines(corpora))
    except OSError as error:
        raise CalibrationError(f"cannot write {args.out}: {error.strerror or error}") from error
    count = sum(len(corpus.documents) for corpus in corpora)
    print(f"{args.out}: {count} documents of {', '.join(corpus.label for corpus in corpora)}")


def _json_lines(corpora: Sequence[Corpus]) -> bytes:
    rows = ({"corpus": c.label, "id": d.id, "text": d.text} for c in corpora for d in c.documents)
    return b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
