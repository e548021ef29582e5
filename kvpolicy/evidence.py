"""What a calibration measured, kept beside the windows it chose.

Two optional files of an artifact, listed in its manifest like any other: ``evidence.safetensors``
(mean cosine of every candidate window) and ``evaluation.json`` (loss on held-out texts). Serving
reads neither; people, reports and comparisons do.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from kvpolicy.artifact import Artifact, read_manifest
from kvpolicy.errors import PolicyError
from kvpolicy.geometry import LayerKind, ModelGeometry
from kvpolicy.manifest import Manifest
from kvpolicy.windows import FULL

EVIDENCE_FILE = "evidence.safetensors"
HELD_OUT_FILE = "evaluation.json"
REPORT_FILE = "report.html"
_DTYPES = {"codebook": np.int32, "mean_cosine": np.float64, "positions": np.int64}
# a mean of cosines can leave [-1, 1] by rounding only
_COSINE_SLACK = 1e-6


@dataclass(frozen=True, eq=False)
class Evidence:
    """Mean cosines behind the windows of every point (design section 3, SeqCalib).

    ``codebook``: the finite candidate windows, ascending, in tokens. ``mean_cosine``: float64
    [points, attention layers, max kv heads, len(codebook)], the mean over prompts, query positions
    at which the window binds and the query heads of the GQA group; NaN where a unit is not
    calibrated or no position binds. ``positions``: int64 [len(codebook)], the binding query
    positions over all prompts (of one query head).

    Raises:
        PolicyError: a dtype, shape or value that the above rules out.
    """

    codebook: tuple[int, ...]
    mean_cosine: np.ndarray
    positions: np.ndarray

    def __post_init__(self) -> None:
        windows, count = self.codebook, len(self.codebook)
        ascending = list(windows) == sorted(set(windows))
        if not windows or not ascending or not 0 < windows[0] <= windows[-1] < FULL:
            raise PolicyError(f"codebook must ascend within 1..{FULL - 1}, found {list(windows)}")
        if self.positions.dtype != np.int64 or self.positions.shape != (count,):
            raise PolicyError(f"positions must be int64 [{count}], found {_kind(self.positions)}")
        if (self.positions < 0).any():
            raise PolicyError("positions must not be negative")
        cosine = self.mean_cosine
        if cosine.dtype != np.float64 or cosine.ndim != 4 or cosine.shape[-1] != count:
            raise PolicyError(
                f"mean_cosine must be float64 [points, layers, kv heads, {count}], "
                f"found {_kind(cosine)}"
            )
        if (np.abs(cosine[~np.isnan(cosine)]) > 1 + _COSINE_SLACK).any():
            raise PolicyError("mean_cosine holds a value outside -1..1")


class HeldOut(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Next-token loss on texts disjoint from calibration, in nats per token.

    ``nll_full`` is the unchanged model's, ``nll`` maps a point's name to the loss with its windows
    active at every position; ``corpora`` maps a name to its content's sha256.
    """

    corpora: dict[str, str]
    prompts: int
    tokens: int
    nll_full: float
    nll: dict[str, float]

    def __post_init__(self) -> None:
        if min(self.prompts, self.tokens) < 1:
            raise PolicyError("a held-out evaluation needs prompts >= 1 and tokens >= 1")
        if not all(math.isfinite(loss) for loss in (self.nll_full, *self.nll.values())):
            raise PolicyError("a held-out evaluation needs finite losses")


def to_files(evidence: Evidence | None, held_out: HeldOut | None = None) -> dict[str, bytes]:
    """File name -> content, for ``write_artifact(extra_files=...)``; same input, same bytes."""
    files = {}
    if evidence is not None:
        tensors = {
            "codebook": np.array(evidence.codebook, dtype=np.int32),
            "mean_cosine": np.ascontiguousarray(evidence.mean_cosine),
            "positions": np.ascontiguousarray(evidence.positions),
        }
        files[EVIDENCE_FILE] = save_tensors(tensors)
    if held_out is not None:
        data = msgspec.json.encode(held_out, order="deterministic")
        files[HELD_OUT_FILE] = msgspec.json.format(data, indent=2) + b"\n"
    return files


def read_evidence(artifact_folder: str | Path) -> Evidence | None:
    """The mean cosines kept in an artifact, or None if its manifest lists none.

    Raises:
        PolicyError: altered, malformed, or of other points, layers or heads than the artifact's.
    """
    folder = Path(artifact_folder)
    manifest = read_manifest(folder)
    data = listed_content(folder, manifest, EVIDENCE_FILE)
    if data is None:
        return None
    path = folder / EVIDENCE_FILE
    try:
        evidence = _parse(data)
        _check_shape(evidence, manifest)
    except (PolicyError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise PolicyError(f"{path} is malformed: {error}") from None
    return evidence


def read_held_out(artifact_folder: str | Path) -> HeldOut | None:
    """The held-out losses kept in an artifact, or None if its manifest lists none.

    Raises:
        PolicyError: altered, malformed, or naming a point the artifact does not have.
    """
    folder = Path(artifact_folder)
    manifest = read_manifest(folder)
    data = listed_content(folder, manifest, HELD_OUT_FILE)
    if data is None:
        return None
    path = folder / HELD_OUT_FILE
    try:
        held_out = msgspec.json.decode(data, type=HeldOut)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PolicyError(f"{path} is malformed: {error}") from None
    foreign = sorted(name for name in held_out.nll if manifest.point_index(name) is None)
    if foreign:
        raise PolicyError(f"{path} names points the policy does not have: {', '.join(foreign)}")
    return held_out


def _kind(array: np.ndarray) -> str:
    return f"{array.dtype} {list(array.shape)}"


def listed_content(folder: Path, manifest: Manifest, name: str) -> bytes | None:
    """Verified content of a file that the manifest lists; None if it does not."""
    if name not in manifest.files:
        return None
    try:
        data = (folder / name).read_bytes()
    except OSError as error:
        raise PolicyError(f"cannot read {folder / name}: {error.strerror}") from None
    if hashlib.sha256(data).hexdigest() != manifest.files[name]:
        raise PolicyError(f"{folder}: {name} does not match its sha256 in the manifest")
    return data


def _parse(data: bytes) -> Evidence:
    tensors = load_tensors(data)
    if set(tensors) != set(_DTYPES):
        raise PolicyError(f"it must hold exactly {sorted(_DTYPES)}, found {sorted(tensors)}")
    codebook = tensors["codebook"]
    if codebook.dtype != np.int32 or codebook.ndim != 1:
        raise PolicyError(f"codebook must be int32 [windows], found {_kind(codebook)}")
    return Evidence(tuple(codebook.tolist()), tensors["mean_cosine"], tensors["positions"])


def _check_shape(evidence: Evidence, manifest: Manifest) -> None:
    geometry = manifest.model.geometry
    wanted = (len(manifest.points), len(geometry.attention_layers), geometry.max_kv_heads)
    found = evidence.mean_cosine.shape[:3]
    if found != wanted:
        raise PolicyError(f"mean_cosine covers {list(found)} cells, the policy has {list(wanted)}")
    outside = evidence.mean_cosine[:, ~calibratable(geometry)]
    if not np.isnan(outside).all():
        raise PolicyError("mean_cosine has values for native layers or heads that do not exist")


def calibratable(geometry: ModelGeometry) -> np.ndarray:
    """bool [attention layers, max kv heads]: cells of global units, the ones calibration sets."""
    mask = np.zeros((len(geometry.attention_layers), geometry.max_kv_heads), dtype=bool)
    for row, layer in zip(mask, geometry.attention_layers, strict=True):
        row[: layer.num_kv_heads] = layer.kind is LayerKind.GLOBAL
    return mask


class Margin(msgspec.Struct, frozen=True):
    """How far the chosen windows' mean cosines lie above tau, over the ``units`` with a finite
    window whose cosine was measured."""

    units: int
    least: float
    mean: float


def margin(evidence: Evidence, artifact: Artifact, point: str) -> Margin | None:
    """Margin over tau at one point; None without a tau or without a measured finite window.

    Raises:
        PolicyError: no such point, or a chosen window that was not a candidate.
    """
    windows = artifact.policy(point).windows
    index = artifact.manifest.point_index(point)
    tau = artifact.manifest.points[index].tau
    chosen = calibratable(artifact.geometry) & (windows != FULL)
    foreign = sorted(set(windows[chosen].tolist()) - set(evidence.codebook))
    if foreign:
        raise PolicyError(
            f"{artifact.path}: point {point} has window {foreign[0]}, which is not in the codebook "
            f"of its {EVIDENCE_FILE}"
        )
    columns = np.searchsorted(np.array(evidence.codebook), windows[chosen])
    cosines = evidence.mean_cosine[index][chosen, columns]
    cosines = cosines[~np.isnan(cosines)]
    if tau is None or not cosines.size:
        return None
    above = cosines - tau
    return Margin(int(above.size), float(above.min()), float(above.mean()))
