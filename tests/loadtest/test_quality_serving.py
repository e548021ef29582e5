"""The quality command on a real server with real weights: what it scores is the reference's."""

from __future__ import annotations

import json
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvpolicy.artifact import PointSpec, write_artifact
from loadtest import corpora
from loadtest.__main__ import main
from loadtest.quality_results import Result
from loadtest.quality_texts import build_prompts, load_texts
from loadtest.reference import MaskedReference
from tests.engine_patches import policies

ATOL = 1e-4  # nats
CONTEXT, SINKS = 640, 4  # beyond one chunk of prefill
COUNTS = {"texts": 2, "needles": 2}


@pytest.fixture
def texts(tmp_path) -> Path:
    """Source code of the standard library as held-out text."""
    sources = list(corpora.library_texts())
    random.Random(0).shuffle(sources)
    path = tmp_path / "code.jsonl"
    path.write_text("\n".join(json.dumps({"text": text[:20_000]}) for text in sources[:4]))
    return path


@pytest.mark.slow  # two starts of half a minute
def test_served_nll_is_the_references_and_full_finds_the_needles(
    smollm2, tokenizer, texts, tmp_path
):
    policy = policies.mixed(smollm2, SINKS, sizes=(24, 64, 100))
    points = [PointSpec("tau-0.99", policy)]
    folder = write_artifact(tmp_path, model_name="m", name="mixed", points=points)
    flags = ["--policy", str(folder), "--texts", str(texts), "--out", str(tmp_path / "out")]
    flags += ["--context", str(CONTEXT), "--texts-per-run", "2", "--needles", "2", "--servers", "1"]
    assert main(["quality", "--model", str(smollm2), *flags, "--baselines", "none"]) == 0
    result = msgspec.json.decode((tmp_path / "out" / "quality.json").read_bytes(), type=Result)
    prompts = build_prompts(load_texts([texts]), tokenizer(smollm2), CONTEXT, **COUNTS, seed=0)
    assert prompts.fingerprint == result.prompts_fingerprint
    for name, masks in {"full": (None, 0), "tau-0.99": (policy.windows, SINKS)}.items():
        logprobs = MaskedReference(smollm2, *masks).token_logprobs(prompts.texts[0].ids)
        score = result.row(name).texts[0]
        assert score.nll == pytest.approx(-logprobs.mean(dtype=np.float64), abs=ATOL)
        late = logprobs[CONTEXT // 2 - 1 :]
        assert score.late == pytest.approx(-late.mean(dtype=np.float64), abs=ATOL)
    full, windowed = result.rows
    assert [n.found for n in full.needles] == [True, True]
    assert windowed.texts[0].nll > full.texts[0].nll + 0.05, "windows were active in prefill"
    assert windowed.peak_pages < full.peak_pages
    assert [n.output_ids for n in windowed.needles] != [n.output_ids for n in full.needles]
