"""Building, storing and loading the FlashInfer variants without a GPU; one test compiles."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashinfer_ext import flashinfer_build, flashinfer_store
from flashinfer_ext.contract import ArenaLayout, LayerHeads
from flashinfer_ext.flashinfer_build import build_command, build_module, load_module
from flashinfer_ext.flashinfer_decode import FlashInferDecode
from flashinfer_ext.flashinfer_extend import FlashInferExtend
from flashinfer_ext.flashinfer_reference import DecodeModule
from flashinfer_ext.flashinfer_source import ModuleSpec
from flashinfer_ext.flashinfer_store import (
    ModuleEntry,
    VariantError,
    add_module,
    find_module,
    load_prebuilt,
    read_manifest,
    runs_on,
    version_of,
)
from tests.flashinfer_ext.cases import Shape, make_case
from tests.flashinfer_ext.flashinfer_cases import SCALE, planned_decode

SPEC = ModuleSpec("decode", 64, "bf16")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[ModuleSpec]:
    """Compiling writes a few bytes instead, noted here."""
    if version_of("flashinfer-python") == "":
        pytest.skip("needs flashinfer")
    specs = []

    def write(spec: ModuleSpec, archs, home, work: Path, jobs: int) -> Path:
        specs.append(spec)
        (work / "built.so").write_bytes(b"machine code of " + spec.name.encode())
        return work / "built.so"

    monkeypatch.setattr(flashinfer_build, "_compile", write)
    monkeypatch.setattr(flashinfer_build, "find_cuda_home", lambda: tmp_path)
    monkeypatch.setattr(flashinfer_build, "_cuda_version", lambda home: "13.0")
    return specs


def store(folder: Path, data: bytes = b"code", **changes) -> ModuleEntry:
    """An entry of SPEC with its file."""
    folder.mkdir(exist_ok=True)
    library = folder / "library"
    library.write_bytes(data)
    fields = {
        "name": SPEC.name, "digest": SPEC.digest, "archs": ("8.0", "9.0a"), "file": "a.so",
        "size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "flashinfer": "0.7.2",
        "tvm_ffi": version_of("apache-tvm-ffi"), "cuda": "13.0", "seconds": 1.0,
    }  # fmt: skip
    entry = ModuleEntry(**fields | changes)
    add_module(folder, library, entry)
    library.unlink()
    return entry


def test_a_stored_module_is_found_for_the_gpus_it_runs_on(tmp_path: Path) -> None:
    entry = store(tmp_path)
    for capability in ((8, 0), (8, 6), (9, 0), None):
        assert find_module(tmp_path, SPEC, capability) == entry
    with pytest.raises(VariantError, match=r"is for 8.0, 9.0a, the GPU is \(10, 0\)"):
        find_module(tmp_path, SPEC, (10, 0))


@pytest.mark.parametrize(
    ("arch", "capability", "runs"),
    [("8.0", (8, 0), True), ("8.0", (8, 9), True), ("8.9", (8, 0), False), ("8.0", (9, 0), False),
     ("9.0a", (9, 0), True), ("12.0f", (12, 0), True), ("12.0a", (12, 1), False)],
)  # fmt: skip
def test_which_machine_code_runs_where(arch: str, capability: tuple, runs: bool) -> None:
    assert runs_on(arch, capability) is runs


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "ragged_decode_d64_fp16"}, "no prebuilt ragged_decode_d64_bf16"),
        ({"digest": "0" * 64}, "was built from other sources"),
        ({"tvm_ffi": "99.1.0"}, "needs tvm-ffi 99.1.0"),
        ({"sha256": "0" * 64}, "is damaged"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(tmp_path, changes, message) -> None:
    store(tmp_path, **changes)
    with pytest.raises(VariantError, match=message) as caught:
        load_prebuilt(tmp_path, SPEC, (9, 0))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_library_or_is_gone(tmp_path: Path) -> None:
    entry = store(tmp_path)
    with pytest.raises(VariantError, match="cannot load"):
        load_prebuilt(tmp_path, SPEC, (9, 0))
    (tmp_path / entry.file).unlink()
    with pytest.raises(VariantError, match="No such file"):
        load_prebuilt(tmp_path, SPEC, (9, 0))


@pytest.mark.parametrize("text", ['{"schema": 2, "modules": []}', "{", '{"schema": 1, "x": 0}'])
def test_a_manifest_is_read_strictly(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(VariantError, match=r"manifest.json"):
        read_manifest(tmp_path)


def test_an_entry_replaces_its_own_file_only(tmp_path: Path) -> None:
    store(tmp_path)
    store(tmp_path, b"newer", file="b.so")
    newest = store(tmp_path, b"newest", cuda="13.1")
    assert [entry.file for entry in read_manifest(tmp_path).modules] == ["a.so", "b.so"]
    assert read_manifest(tmp_path).modules[0] == newest
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        ".lock", "a.so", "b.so", "manifest.json",
    ]  # fmt: skip


def test_the_digest_covers_source_and_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {ModuleSpec(k, 64, "bf16").digest for k in ("decode", "prefill")}
    assert len(before) == 2
    monkeypatch.setattr("flashinfer_ext.flashinfer_source.DECODE_VARIANT", "struct Other {};")
    assert SPEC.digest not in before


def test_the_command_builds_once_and_says_what(built, tmp_path: Path, capsys) -> None:
    argv = ["--out", str(tmp_path / "out"), "--head-dims", "64", "--dtypes", "bf16"]
    assert build_command(argv) == 0
    assert [spec.name for spec in built] == ["ragged_decode_d64_bf16", "ragged_prefill_d64_bf16"]
    out = capsys.readouterr().out
    assert "[2/2] ragged_prefill_d64_bf16 for 8.0 9.0a" in out
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert [entry["cuda"] for entry in manifest["modules"]] == ["13.0", "13.0"]
    assert not list((tmp_path / "out").glob(".build-*"))

    assert build_command(argv) == 0 and len(built) == 2
    assert capsys.readouterr().out.count("kept") == 2
    assert build_command([*argv, "--force", "--kinds", "decode"]) == 0 and len(built) == 3
    next((tmp_path / "out").glob("ragged_decode*.so")).write_bytes(b"damaged")
    assert build_command(argv) == 0 and len(built) == 4
    assert build_command([*argv, "--archs", "10.0a", "--kinds", "decode"]) == 0 and len(built) == 5
    assert len(read_manifest(tmp_path / "out").modules) == 3


@pytest.mark.parametrize("flags", [["--archs", "sm90"], ["--archs", "7.5"], ["--jobs", "0"],
                                   ["--head-dims", "80"], ["--dtypes", "fp32"]])  # fmt: skip
def test_bad_flags_are_refused(flags: list[str], capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        build_command(flags)
    assert flags[1] in capsys.readouterr().err


def test_without_a_compiler_the_command_says_so(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert build_command(["--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"nvcc is not in CUDA_HOME={tmp_path}" in error
    assert not (tmp_path / "out").exists()


def test_a_script_named_nvcc_is_not_cudas_home(tmp_path: Path, monkeypatch) -> None:
    """Debian-like installs have one in /usr/local/bin, beside an /usr/local/include."""
    (tmp_path / "bin").mkdir(), (tmp_path / "include").mkdir()
    (tmp_path / "bin" / "nvcc").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CUDA_HOME", raising=False), monkeypatch.delenv("CUDA_PATH", raising=False)
    try:
        assert flashinfer_build.find_cuda_home() == Path("/usr/local/cuda")
    except VariantError as error:
        assert "no CUDA compiler" in str(error)


def test_a_failing_compiler_is_quoted_and_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    home = tmp_path / "cuda"
    (home / "bin").mkdir(parents=True), (home / "include").mkdir()
    (home / "include" / "cuda_runtime.h").touch()
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo "release 13.0" && exit 0\n'
        'echo "x.cu(3): error: no such luck" >&2; exit 1\n'
    )
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(home))
    with pytest.raises(VariantError, match=r"compiling ragged_decode_d64_bf16 failed.*such luck"):
        build_module(SPEC, ["9.0a"], tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_loading_builds_what_is_missing_for_the_gpu(built, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(flashinfer_build, "capability_of", lambda device: (9, 0))
    with pytest.raises(VariantError, match="cannot load"):  # the bytes are no library
        load_module(SPEC, "cuda", tmp_path)
    assert built == [SPEC] and read_manifest(tmp_path).modules[0].archs == ("9.0",)
    with pytest.raises(VariantError, match="no prebuilt"):
        load_module(ModuleSpec("prefill", 64, "bf16"), "cuda", tmp_path, build=False)


def test_where_nothing_works_both_reasons_are_given(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(flashinfer_build, "capability_of", lambda device: (9, 0))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(VariantError, match=r"no prebuilt .*; no CUDA compiler") as caught:
        load_module(SPEC, "cuda", tmp_path / "out")
    assert "\n" not in str(caught.value)


def test_the_folder_can_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(flashinfer_store.FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(VariantError, match=f"no prebuilt .* in {tmp_path}"):
        load_module(SPEC, "cpu")


@pytest.mark.parametrize(
    ("layout", "group", "dtype", "message"),
    [
        (ArenaLayout(4, 16, 64, 64), 2, torch.float32, "bf16 and fp16, not torch.float32"),
        (ArenaLayout(4, 16, 64, 32), 2, torch.bfloat16, "equal head dims"),
        (ArenaLayout(4, 16, 80, 80), 2, torch.bfloat16, "not 80"),
        (ArenaLayout(4, 16, 64, 64), 5, torch.bfloat16, "query heads of a kv head, not 5"),
    ],
)
def test_what_the_templates_cannot_do_is_refused(layout, group, dtype, message) -> None:
    heads = LayerHeads(*(torch.zeros(1, 1, dtype=torch.int32) for _ in range(3)))
    with pytest.raises(VariantError, match=message):
        FlashInferDecode(layout, heads, group, 4, "cpu", dtype, module=object())
    if group != 5:
        with pytest.raises(VariantError, match=message):
            FlashInferExtend(layout, heads, group, "cpu", dtype, module=object())


def test_generated_sources_hold_the_variant(tmp_path: Path) -> None:
    pytest.importorskip("flashinfer")
    program = (
        "from flashinfer_ext.flashinfer_worker import jit_spec\n"
        "from flashinfer_ext.flashinfer_source import ModuleSpec\n"
        "for kind in ('decode', 'prefill'):\n"
        "    print(jit_spec(ModuleSpec(kind, 128, 'fp16')).sources[0].parent)\n"
    )
    environment = {**os.environ, "FLASHINFER_WORKSPACE_BASE": str(tmp_path),
                   "FLASHINFER_CUDA_ARCH_LIST": "9.0a"}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, cwd=ROOT,
        check=True,
    )  # fmt: skip
    for kind, folder in zip(("decode", "prefill"), done.stdout.splitlines()[-2:], strict=True):
        spec = ModuleSpec(kind, 128, "fp16")
        config = (Path(folder) / f"batch_{kind}_config.inc").read_text()
        name, source = spec.variant
        assert source in config and f"using AttentionVariant = {name};" in config
        assert "constexpr int HEAD_DIM_QK = 128;" in config and "using DTypeKV = half;" in config
        for argument, kind_of in (spec.tensors | spec.scalars).items():
            star = "*" if argument in spec.tensors else ""
            assert f"{kind_of}{star} {argument};" in config


@pytest.mark.slow
def test_the_decode_module_really_compiles(tmp_path: Path) -> None:
    pytest.importorskip("flashinfer")
    try:
        flashinfer_build.find_cuda_home()
    except VariantError as error:
        pytest.skip(str(error))
    argv = ["--out", str(tmp_path), "--head-dims", "64", "--dtypes", "bf16", "--kinds", "decode"]
    assert build_command(argv) == 0
    module = load_prebuilt(tmp_path, SPEC, (9, 0))
    assert all(module[name] is not None for name in ("plan", "run"))
    if not torch.cuda.is_available():
        _arguments_reach_cuda(module)
    (entry,) = read_manifest(tmp_path).modules
    assert entry.archs == ("8.0", "9.0a") and (tmp_path / entry.file).stat().st_size == entry.size
    tool = shutil.which("cuobjdump") or _triton_tool()
    if tool is not None:
        listed = subprocess.run(
            [tool, "-res-usage", str(tmp_path / entry.file)], capture_output=True, text=True
        )
        kernels = listed.stdout.split("Function ")[1:]
        ours = [text for text in kernels if "RaggedDecode" in text.splitlines()[0]]
        assert ours and all("STACK:0 " in text and "LOCAL:0 " in text for text in ours)


def _arguments_reach_cuda(module) -> None:
    """The compiled binding takes what we pass: it gets as far as asking for a driver."""

    class Planned(DecodeModule):
        run = staticmethod(module["run"])

        def plan(self, *arguments):
            with pytest.raises(RuntimeError, match="CUDA"):
                module["plan"](*arguments)
            return [0] * 10

    case = make_case(Shape(lengths=(20, 0), dtype=torch.bfloat16), 0)
    runner = planned_decode(case, Planned())
    out, lse = torch.empty_like(case.q), torch.empty(case.q.shape[:2])
    with pytest.raises(RuntimeError, match="CUDA"):
        runner.run(case.q, case.arena, case.table, 0, case.batch, out, SCALE, lse=lse)
    with pytest.raises(TypeError):
        module["plan"](out)


def _triton_tool() -> str | None:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return str(tool) if tool.is_file() else None
