"""``python -m calib_cluster corpus``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from calib_cluster.corpora.cli import add_corpus_commands
from calib_cluster.corpora.recipes import RECIPES
from calib_cluster.errors import CalibrationError


def run(*words: str | Path) -> None:
    parser = argparse.ArgumentParser()
    add_corpus_commands(parser.add_subparsers(required=True), argparse.ArgumentParser)
    args = parser.parse_args(["corpus", *map(str, words)])
    args.command(args)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_list(capsys, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("RAGGEDKV_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    run("list")
    out = capsys.readouterr().out
    rows = {line.split("│")[1].strip(): line for line in out.splitlines() if "│" in line}
    assert set(rows) - {""} == set(RECIPES)
    assert "needs npm" in rows["sotu"] and "evaluation" in rows["sotu"]
    assert "present" in rows["stdlib"] and "calibration" in rows["stdlib"]


def test_fetch_unknown() -> None:
    with pytest.raises(CalibrationError, match="no recipe 'kvj'; there are kjv, debian-reference"):
        run("fetch", "stdlib", "kvj")


def test_fetch_nothing_needed(capsys) -> None:
    run("fetch", "stdlib", "dialogue")
    assert capsys.readouterr().out.splitlines()[1] == "dialogue: needs nothing fetched"


def test_show(capsys, smollm2, tmp_path: Path) -> None:
    path = write(tmp_path / "x.txt", "".join(f"Line [bold] {i}\n" for i in range(500)))
    run("show", path)
    out = capsys.readouterr().out
    assert "Line [bold] 3" in out and "characters" in out and "tokens" not in out
    run("show", path, "--model", smollm2, "--length", "50", "--prompts", "4")
    out = capsys.readouterr().out
    assert "4 of 50 to 50 tokens" in out and "prompts' hash" in out


def test_show_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="has no tokenizer that loads"):
        run("show", "stdlib", "--model", tmp_path)
    with pytest.raises(CalibrationError, match="no model folder"):
        run("show", "stdlib", "--model", tmp_path / "none")


def test_check(capsys, tmp_path: Path) -> None:
    words = [f"word{i}" for i in range(40)]
    a = write(tmp_path / "a.txt", " ".join(words[:30]))
    b = write(tmp_path / "b.txt", " ".join(words[20:]))
    c = write(tmp_path / "c.txt", " ".join(words[10:]))
    run("check", "--calibration", a, "--evaluation", b)
    assert "disjoint: no 13 words in a row are in both a.txt and b.txt" in capsys.readouterr().out
    with pytest.raises(CalibrationError, match=r"'a.txt' and 'c.txt' share text"):
        run("check", "--calibration", a, "--evaluation", b, c)


def test_export_reads_back(capsys, tmp_path: Path) -> None:
    a = write(tmp_path / "a.txt", "one\ntwo")
    out = tmp_path / "out.jsonl"
    run("export", a, "key-value", "--out", out)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert rows[0] == {"corpus": "a.txt", "id": "a.txt", "text": "one\ntwo"}
    assert {row["corpus"] for row in rows[1:]} == {"key-value"}
    assert str(len(rows)) in capsys.readouterr().out
    run("show", out)
    assert f"{len(rows)}" in capsys.readouterr().out


def test_export_to_nowhere(tmp_path: Path) -> None:
    a = write(tmp_path / "a.txt", "one")
    with pytest.raises(CalibrationError, match=r"cannot write .*none/out.jsonl: No such"):
        run("export", a, "--out", tmp_path / "none" / "out.jsonl")
    with pytest.raises(CalibrationError, match="is a folder"):
        run("export", a, "--out", tmp_path)
    assert list(tmp_path.iterdir()) == [a]
