"""Evidence and held-out losses: kept whole, read strictly."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save

from kvpolicy.artifact import load_artifact
from kvpolicy.errors import PolicyError
from kvpolicy.evidence import (
    Evidence,
    HeldOut,
    calibratable,
    margin,
    read_evidence,
    read_held_out,
    to_files,
)

CODEBOOK = (64, 256, 1024)


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_what_is_written_is_read(model, calibrated, tmp_path):
    made = calibrated(model)
    folder = made.write(tmp_path)
    found = read_evidence(folder)
    assert found.codebook == CODEBOOK
    np.testing.assert_array_equal(found.mean_cosine, made.cosine)  # NaN equals NaN
    assert found.positions.tolist() == [3000, 2000, 1000]
    assert read_held_out(folder) == made.held_out


def test_the_bytes_depend_on_the_values_only(calibrated):
    made = calibrated()
    losses = {"tau-0.99": 3.01, "tau-0.95": 3.2}
    one = HeldOut({}, 3, 6000, 3.0, losses)
    other = HeldOut({}, 3, 6000, 3.0, dict(reversed(losses.items())))
    fortran = Evidence(CODEBOOK, np.asfortranarray(made.cosine), made.evidence.positions)
    assert to_files(made.evidence, one) == to_files(fortran, other)


def test_an_artifact_without_them(calibrated, tmp_path, geometry):
    from kvpolicy.artifact import PointSpec, write_artifact
    from kvpolicy.windows import WindowPolicy

    point = PointSpec("only", WindowPolicy.full(geometry("smollm2")))
    folder = write_artifact(tmp_path, model_name="m", name="full", points=[point])
    assert read_evidence(folder) is None and read_held_out(folder) is None
    assert to_files(None) == {}


def test_calibratable_cells_are_the_global_heads(geometry):
    mask = calibratable(geometry("gemma3"))
    assert mask[:, 0].nonzero()[0].tolist() == [5, 11, 17] and mask.shape == (18, 1)


def test_margins_are_those_of_the_chosen_windows(calibrated, tmp_path):
    made = calibrated()
    # one chosen window at each of two points gets a cosine of its own, one is not measured
    layer, head = np.argwhere(made.steps[1] < 3)[0]
    made.cosine[1, layer, head, made.steps[1, layer, head]] = 0.991
    other = tuple(np.argwhere(made.steps[0] == 1)[0])
    made.cosine[0][other][1] = np.nan
    found = load_artifact(made.write(tmp_path))
    low = margin(made.evidence, found, "tau-0.95")
    units = made.geom.num_units
    assert low.units == units - 1
    assert low.least == pytest.approx(0.0005) and low.mean == pytest.approx(0.0005)
    middle = margin(made.evidence, found, "tau-0.99")
    finite = int((made.steps[1] < 3).sum())
    assert middle.units == finite
    assert middle.least == pytest.approx(0.0005)
    assert middle.mean == pytest.approx(0.0005 + 0.0005 / finite)
    # full heads have no margin
    high = margin(made.evidence, found, "tau-0.995")
    assert high.units == int((made.steps[2] < 3).sum()) < units


def test_a_chosen_window_must_have_been_a_candidate(calibrated, tmp_path):
    made = calibrated()
    made.windows[1, 0, 0] = 100
    found = load_artifact(made.write(tmp_path))
    with pytest.raises(PolicyError, match=r"tau-0.99 has window 100, .*codebook"):
        margin(made.evidence, found, "tau-0.99")


GOOD = {
    "codebook": np.array(CODEBOOK, dtype=np.int32),
    "mean_cosine": np.zeros((3, 30, 3, 3)),
    "positions": np.ones(3, dtype=np.int64),
}


def tensors(**changes) -> bytes:
    return save({k: v for k, v in (GOOD | changes).items() if v is not None})


MALFORMED = {
    "not safetensors": (b"x", "malformed"),
    "missing": (tensors(positions=None), "exactly"),
    "unknown": (tensors(extra=np.zeros(1)), "exactly"),
    "codebook dtype": (tensors(codebook=np.array(CODEBOOK)), "codebook must be int32"),
    "codebook order": (tensors(codebook=np.array([256, 64, 1024], dtype=np.int32)), "ascend"),
    "codebook twice": (tensors(codebook=np.array([64, 64, 1024], dtype=np.int32)), "ascend"),
    "codebook zero": (tensors(codebook=np.array([0, 64, 1024], dtype=np.int32)), "ascend"),
    "codebook full": (tensors(codebook=np.array([1, 2, 2**31 - 1], dtype=np.int32)), "ascend"),
    "codebook empty": (tensors(codebook=np.zeros(0, dtype=np.int32)), "ascend"),
    "positions dtype": (tensors(positions=np.ones(3)), "positions must be int64"),
    "positions shape": (tensors(positions=np.ones(2, dtype=np.int64)), "positions must be int64"),
    "positions sign": (tensors(positions=np.full(3, -1)), "negative"),
    "cosine dtype": (tensors(mean_cosine=np.zeros((3, 30, 3, 3), np.float32)), "float64"),
    "cosine shape": (tensors(mean_cosine=np.zeros((3, 30, 3, 4))), r"kv heads, 3\]"),
    "cosine layers": (tensors(mean_cosine=np.zeros((3, 29, 3, 3))), r"\[3, 29, 3\]"),
    "cosine points": (tensors(mean_cosine=np.zeros((2, 30, 3, 3))), r"has \[3, 30, 3\]"),
    "cosine size": (tensors(mean_cosine=np.full((3, 30, 3, 3), 1.01)), "outside -1..1"),
    "cosine infinite": (tensors(mean_cosine=np.full((3, 30, 3, 3), np.inf)), "outside -1..1"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_evidence_is_one_line(name, calibrated, tmp_path):
    data, message = MALFORMED[name]
    folder = calibrated().write(tmp_path, extra={"evidence.safetensors": data})
    load_artifact(folder)  # serving does not need it
    with pytest.raises(PolicyError, match=message) as error:
        read_evidence(folder)
    assert str(folder / "evidence.safetensors") in str(error.value)
    assert "\n" not in str(error.value)


def test_native_layers_have_no_evidence(calibrated, tmp_path):
    made = calibrated("gemma3")
    made.cosine[0, 0, 0, 0] = 0.5
    with pytest.raises(PolicyError, match="native layers"):
        read_evidence(made.write(tmp_path))


PLAIN = {"corpora": {}, "prompts": 1, "tokens": 1, "nll_full": 3.0, "nll": {}}
BAD_LOSSES = {
    "not json": (b"{", "malformed"),
    "not text": (b"\xff\xfe", "malformed"),
    "unknown field": (PLAIN | {"extra": 1}, "extra"),
    "missing field": ({k: v for k, v in PLAIN.items() if k != "nll"}, "nll"),
    "not a number": (PLAIN | {"nll": {"tau-0.99": "low"}}, "malformed"),
    "null": (PLAIN | {"nll_full": None}, "malformed"),
    "no tokens": (PLAIN | {"tokens": 0}, "tokens >= 1"),
    "foreign point": (PLAIN | {"nll": {"tau-0.5": 3.0}}, "tau-0.5"),
}


@pytest.mark.parametrize("name", BAD_LOSSES)
def test_malformed_losses_are_one_line(name, calibrated, tmp_path):
    value, message = BAD_LOSSES[name]
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    folder = calibrated().write(tmp_path, extra={"evaluation.json": data})
    with pytest.raises(PolicyError, match=message) as error:
        read_held_out(folder)
    assert str(folder / "evaluation.json") in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("read", [read_evidence, read_held_out])
def test_altered_files_are_refused(read, calibrated, tmp_path):
    folder = calibrated().write(tmp_path)
    for name in ("evidence.safetensors", "evaluation.json"):
        data = bytearray((folder / name).read_bytes())
        data[-3] ^= 1
        (folder / name).write_bytes(data)
    with pytest.raises(PolicyError, match="sha256"):
        read(folder)


def test_nothing_unreadable_is_written():
    with pytest.raises(PolicyError, match="finite"):
        HeldOut({}, 1, 1, 3.0, {"tau-0.99": float("nan")})
    with pytest.raises(PolicyError, match="float64"):
        Evidence(CODEBOOK, np.zeros((1, 1, 1, 3), np.float32), np.ones(3, dtype=np.int64))
