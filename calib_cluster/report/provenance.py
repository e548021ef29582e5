"""How much was measured, and what the policy was made from."""

from __future__ import annotations

from xml.etree.ElementTree import Element

from calib_cluster.report.data import ReportInput
from kvpolicy.geometry import ModelGeometry
from kvpolicy.manifest import CalibrationRecord
from kvpolicy.report import words
from kvpolicy.report.markup import Child, node
from kvpolicy.report.parts import definitions, header, row, scroll_table


def evidence_table(data: ReportInput) -> Element:
    """Query positions that tested each window of the codebook."""
    counts = data.evidence.positions.tolist()
    top = max([*counts, 1])
    rows = [
        row(words.window(window), f"{count:,}" if count else "not tested", _meter(count / top))
        for window, count in zip(data.evidence.codebook, counts, strict=True)
    ]
    return scroll_table([header("window", "query positions", "")], rows, "evidence")


def provenance(data: ReportInput) -> list[Element]:
    """Everything needed to make the policy again."""
    parts = record_parts(data.calibration, data.geometry)
    if data.held_out is not None:
        parts += _corpora("Held-out texts (sha256)", data.held_out.corpora)
    return parts


def record_parts(record: CalibrationRecord, geom: ModelGeometry) -> list[Element]:
    """A calibration record: counts, every setting, and the texts."""
    facts: list[tuple[str, Child]] = [
        ("method", record.method),
        ("prompts", f"{record.prompts:,}"),
        ("tokens", f"{record.tokens:,}"),
        ("seed", record.seed),
        ("code version", node("code", record.code_version)),
        ("model config", node("code", geom.config_hash or words.NOTHING)),
        ("geometry", node("code", geom.fingerprint())),
        *((name, setting(value)) for name, value in sorted(record.hyperparameters.items())),
    ]
    return [definitions(facts), *_corpora("Calibration texts (sha256)", record.corpora)]


def _meter(part: float) -> Element | None:
    if not part:
        return None
    return node("div", cls="meter", style=f"width:{100 * part:.1f}%")


def setting(value: object) -> str:
    """A setting's value for people."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(setting, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _corpora(title: str, corpora: dict[str, str]) -> list[Element]:
    items = [(name, node("code", digest)) for name, digest in sorted(corpora.items())]
    return [node("h3", title), definitions(items)]
