"""The user's own files, good and bad."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from calib_cluster.corpora.documents import Message
from calib_cluster.corpora.specs import load_corpora
from calib_cluster.errors import CalibrationError

TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def texts(spec: Path | str, field: str | None = None) -> list[str]:
    (corpus,) = load_corpora([str(spec)], field=field)
    return [document.text for document in corpus.documents]


def refused(spec: Path | str, field: str | None = None) -> str:
    with pytest.raises(CalibrationError) as caught:
        load_corpora([str(spec)], field=field)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write_lines(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows))
    return path


def test_jsonl_rows(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "x.jsonl", {"text": "a b"}, "", {"prompt": "c"}, {"messages": TALK},
        {"text": "  "}, {"prompt": TALK, "other": 1}, {"messages": None, "text": "d"},
    )  # fmt: skip
    (corpus,) = load_corpora([str(path)])
    plain = "User: Hi\n\nAssistant: Hello"
    assert [d.text for d in corpus.documents] == ["a b", "c", plain, plain, "d"]
    assert [d.id for d in corpus.documents][:3] == ["x.jsonl:1", "x.jsonl:3", "x.jsonl:4"]
    assert corpus.documents[2].messages == (Message("user", "Hi"), Message("assistant", "Hello"))
    assert corpus.own and corpus.label == "x.jsonl"


def test_parquet_rows_equal_jsonl_rows(tmp_path: Path) -> None:
    rows = [{"text": "a b", "n": 1}, {"text": "c", "n": 2}]
    talks = [{"messages": TALK}] * 2
    for name, content in (("t", rows), ("m", talks)):
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist(content), tmp_path / f"{name}.parquet"
        )
        write_lines(tmp_path / f"{name}.jsonl", *content)
        assert texts(tmp_path / f"{name}.parquet") == texts(tmp_path / f"{name}.jsonl")


def test_field_overrides(tmp_path: Path) -> None:
    rows = [{"text": "a", "body": "b"}]
    path = write_lines(tmp_path / "x.jsonl", *rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "x.parquet")
    assert texts(path, "body") == texts(tmp_path / "x.parquet", "body") == ["b"]
    assert "x.jsonl line 1 has no field 'nope'" in refused(path, "nope")
    assert "x.parquet has no column 'nope' (its columns: text, body)" in refused(
        tmp_path / "x.parquet", "nope"
    )


def test_folder_of_everything(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    (folder / "code").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / "code" / "a.py").write_text("print(1)")
    (folder / ".git" / "b.py").write_text("hidden")
    (folder / "c.md").write_text("# title")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    write_lines(folder / "d.jsonl", {"text": "row"})
    (corpus,) = load_corpora([str(folder)])
    assert [(d.id, d.text) for d in corpus.documents] == [
        ("mine/c.md", "# title"), ("mine/d.jsonl:1", "row"), ("mine/code/a.py", "print(1)"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"text": "cut', "x.jsonl line 2 is not JSON"),
        ("[1]", "x.jsonl line 2 is not an object"),
        ('{"body": "b"}', "x.jsonl line 2 has none of the accepted fields"),
        ('{"text": 7}', "x.jsonl line 2: field 'text' is neither text nor a list of"),
        ('{"messages": [{"role": "user"}]}', "missing required field `content`"),
        ('{"messages": []}', "x.jsonl line 2: field 'messages' is a conversation without"),
        ('{"text": "\\ud800"}', "x.jsonl line 2 is not JSON"),
    ],
)
def test_malformed_line(tmp_path: Path, line: str, says: str) -> None:
    assert says in refused(write_lines(tmp_path / "x.jsonl", {"text": "fine"}, line))


def test_malformed_line_says_what_is_accepted(tmp_path: Path) -> None:
    message = refused(write_lines(tmp_path / "x.jsonl", "plain text"))
    assert "'messages' (a list of {role, content}), 'text' or 'prompt'" in message


def test_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"caf\xe9")
    assert "x.txt is not UTF-8 text (byte 3)" in refused(tmp_path / "x.txt")
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "ok"}\n{"text": "\xe9"}')
    assert "x.jsonl line 2 is not UTF-8" in refused(tmp_path / "x.jsonl")


def test_not_parquet(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_text("text")
    assert "x.parquet is not a readable Parquet file" in refused(tmp_path / "x.parquet")


def test_parquet_without_a_usable_column(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"n": [1]}), tmp_path / "x.parquet")
    message = refused(tmp_path / "x.parquet")
    assert "no column 'messages', 'text' or 'prompt' (its columns: n)" in message


def test_empty_corpora(tmp_path: Path) -> None:
    assert "'x.jsonl' is empty" in refused(write_lines(tmp_path / "x.jsonl", ""))
    (tmp_path / "folder").mkdir()
    assert "'folder': nothing to read in it" in refused(tmp_path / "folder")
    (tmp_path / "folder" / "a.md").write_text("\n")
    assert "'folder' is empty" in refused(tmp_path / "folder")


def test_unknown_kinds_and_names(tmp_path: Path) -> None:
    (tmp_path / "x.pdf").write_text("text")
    assert "x.pdf: cannot read this kind of file; accepted are .jsonl" in refused(
        tmp_path / "x.pdf"
    )
    assert "did you mean 'moby-dick'?" in refused("moby-dik")
    assert "neither a file or folder nor a recipe: kjv, debian-reference" in refused("/nowhere")
    with pytest.raises(CalibrationError, match="'stdlib' is named twice"):
        load_corpora(["stdlib", "stdlib"])


def test_halves_of_files_and_recipes(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", *({"text": f"row {i}"} for i in range(6)))
    assert sorted(texts(f"{path}/a") + texts(f"{path}/b")) == [f"row {i}" for i in range(6)]
    a, b = load_corpora(["stdlib/a", "stdlib/b"])
    (whole,) = load_corpora(["stdlib"])
    assert {d.id for d in a.documents} | {d.id for d in b.documents} == {
        d.id for d in whole.documents
    }
    a, b = load_corpora(["key-value/a", "key-value/b"])
    assert len(a.documents) + len(b.documents) == 128
    assert not {d.text for d in a.documents} & {d.text for d in b.documents}


def test_a_folder_called_a_is_no_half(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "only.txt").write_text("in the folder")
    (tmp_path / "other.txt").write_text("beside it")
    assert texts(tmp_path / "a") == ["in the folder"]


def test_namesakes_are_told_apart(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.txt").write_text(folder)
    specs = [str(tmp_path / folder / "x.txt") for folder in ("one", "two")]
    assert [c.label for c in load_corpora(specs)] == specs


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}')
    assert texts(tmp_path / "x.jsonl") == ["a"]
