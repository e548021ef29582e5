"""SeqCalib against brute force; sharding and shared trajectories that change nothing; choosing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from calib_cluster.job import reduce_tallies
from calib_cluster.seqcalib import LayerRecord, SeqCalib, Settings, Sums, choose
from calib_cluster.worker import CalibrationWorker, PromptTally
from kvpolicy.geometry import LayerKind, read_geometry
from kvpolicy.windows import FULL
from tests.calib_cluster.brute_force import Answer, DenseModel, brute_force
from tests.calib_cluster.in_process import calibrate, make_plan
from tests.calib_cluster.tiny_models import VOCAB, save_tiny
from tests.harness import corpora

CODEBOOK = (8, 16, 32, 64, 100)
TAUS = (0.7, 0.8, 0.9, 0.97, 0.995)
LENGTHS = (150, 64, 20, 131, 90)  # only two reach all windows, one none but the smallest


def random_prompts(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, VOCAB, length).tolist() for length in lengths]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Callable[[str], Path]:
    """``folder(family)``: a tiny random model of four layers, made once."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = save_tiny(family, tmp_path_factory.mktemp(family), seed=3)
        return made[family]

    return get


def check_against_brute_force(
    model: Path, prompts: list[list[int]], settings: Settings, found: SeqCalib
) -> set[int]:
    """Every tau: the same windows, and means within 10^-4. Returns the windows that occur."""
    dense, evidence = DenseModel(model), found.evidence()
    attention = found.geometry.attention_layers
    rows = [i for i, layer in enumerate(attention) if layer.kind is LayerKind.GLOBAL]
    layers = [attention[i].layer_id for i in rows]
    for i, tau in enumerate(settings.taus):
        expected = brute_force(dense, layers, prompts, settings.codebook, tau, settings.sinks)
        assert found.chosen_rows(tau) == [tuple(expected.windows[layer]) for layer in layers]
        means = torch.stack([expected.means[layer] for layer in layers]).numpy()
        np.testing.assert_allclose(evidence.mean_cosine[i, rows], means, rtol=0, atol=1e-4)
        assert found.fidelity(tau) == pytest.approx(fidelity(expected, settings), abs=1e-4)
        native = np.setdiff1d(np.arange(len(attention)), rows)
        assert np.isnan(evidence.mean_cosine[i, native]).all()
    return {w for tau in settings.taus for row in found.chosen_rows(tau) for w in row}


def fidelity(answer: Answer, settings: Settings) -> float:
    scores = []
    for layer, windows in answer.windows.items():
        for head, window in enumerate(windows):
            column = None if window == FULL else settings.codebook.index(window)
            scores.append(1.0 if column is None else float(answer.means[layer][head, column]))
    return float(np.mean(scores))


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_next"])
def test_it_is_brute_force(folder, tmp_path, family, sinks):
    """All global layers; two global and two native ones with softcap; one after recurrent ones."""
    settings = Settings(CODEBOOK, TAUS, sinks)
    found = calibrate(folder(family), random_prompts(), settings, tmp_path / "run", workers=2)
    seen = check_against_brute_force(folder(family), random_prompts(), settings, found)
    assert len(seen) >= 3  # not all full, nor all the smallest
    expected = [sum(max(0, n - w - sinks) for n in LENGTHS) for w in CODEBOOK]
    assert found.evidence().positions.tolist() == expected


def test_it_is_brute_force_on_real_weights(smollm2, tokenizer, tmp_path):
    """The first three layers of SmolLM2 on real text."""
    config = json.loads((smollm2 / "config.json").read_text())
    model = tmp_path / "smollm2-3-layers"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    (model / "model.safetensors").symlink_to(smollm2 / "model.safetensors")
    prompts = [list(ids) for ids in corpora.prompts(tokenizer(smollm2), [512, 512])]
    settings = Settings((16, 32, 64, 128, 256), (0.9, 0.99), 4)
    found = calibrate(model, prompts, settings, tmp_path / "run")
    seen = check_against_brute_force(model, prompts, settings, found)
    assert len(seen) >= 4


def test_a_window_that_binds_nowhere_is_never_chosen(folder, tmp_path):
    """Prompts of 20 tokens say nothing about 32: its mean is NaN, and heads go to full."""
    settings = Settings((8, 32), (0.999,), 0)
    found = calibrate(folder("llama"), random_prompts((20, 20)), settings, tmp_path / "run")
    assert np.isnan(found.evidence().mean_cosine[..., 1]).all()
    assert not np.isnan(found.evidence().mean_cosine[..., 0]).any()
    assert found.evidence().positions.tolist() == [24, 0]
    assert {w for row in found.chosen_rows(0.999) for w in row} == {FULL}


def test_workers_change_no_bit(folder, tmp_path):
    """1, 2, 3 and 5 workers: the same records, to the last bit of every mean."""
    settings = Settings(CODEBOOK, TAUS, 4)
    runs = [
        calibrate(folder("gemma2"), random_prompts(), settings, tmp_path / str(n), workers=n)
        for n in (1, 2, 3, 5)
    ]
    records = [msgspec.json.encode(run.records) for run in runs]
    assert records[0] == records[1] == records[2] == records[3]
    assert len(runs[0].trajectories) > 1  # several trajectories, each sharded


def test_tallies_do_not_depend_on_the_other_prompts_of_a_shard(folder):
    """One worker with all prompts and one worker a prompt: equal tallies, in any order."""
    prompts = random_prompts()
    spec = make_plan(folder("llama"), prompts, Settings(CODEBOOK, (0.9,), 4)).spec
    moves = [("tau0", "tau0", (8, FULL)), ("other", "tau0", (32, 16))]

    def tallies(shard: list[tuple[int, list[int]]]) -> dict[str, list[PromptTally]]:
        worker = CalibrationWorker(spec)
        worker.start(shard, "tau0")
        worker.advance(0, moves, 4)
        return worker.judge(1, CODEBOOK, 4)

    shard = list(enumerate(prompts))
    together = tallies(shard)
    backwards = [tallies([item]) for item in reversed(shard)]
    for name in ("tau0", "other"):
        apart = [tally for answer in backwards for tally in answer[name]]
        assert sorted(apart, key=lambda tally: tally.prompt) == together[name]
        sums, same = reduce_tallies(apart), reduce_tallies(together[name])
        assert sums.sums.tobytes() == same.sums.tobytes()
        assert sums.positions.tolist() == same.positions.tolist()
    assert together["tau0"] != together["other"]


@given(st.permutations(range(6)), st.integers(0, 99))
def test_reduction_is_in_prompt_order(order, seed):
    """Sums of float64 depend on the order of their terms; that of the prompts is the one used."""
    generator = np.random.default_rng(seed)
    scales = 10.0 ** generator.integers(-8, 9, 6)
    terms = [generator.normal(size=(2, 3)) * scale for scale in scales]
    tallies = [PromptTally(i, term.tolist(), [i, 1, 0], 4) for i, term in enumerate(terms)]
    found = reduce_tallies([tallies[i] for i in order])
    expected = np.zeros((2, 3))
    for term in terms:
        expected = expected + term
    assert found.sums.tobytes() == expected.tobytes()
    assert found.positions.tolist() == [15, 6, 0]
    assert found.group == 4


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_taus_that_share_work_are_the_same_as_alone(folder, tmp_path, family):
    settings = Settings(CODEBOOK, TAUS, 4)
    together = calibrate(folder(family), random_prompts(), settings, tmp_path / "all")
    for i, tau in enumerate(TAUS):
        single = Settings(CODEBOOK, (tau,), 4)
        alone = calibrate(folder(family), random_prompts(), single, tmp_path / str(tau))
        assert alone.chosen_rows(tau) == together.chosen_rows(tau)
        assert alone.policy(tau) == together.policy(tau)
        assert alone.fidelity(tau) == together.fidelity(tau)
        np.testing.assert_array_equal(
            alone.evidence().mean_cosine[0], together.evidence().mean_cosine[i]
        )


def test_trajectories_are_shared_until_choices_differ(folder, tmp_path):
    """The first layer is judged once for all taus; later ones once per set of choices below."""
    settings = Settings(CODEBOOK, TAUS, 4)
    found = calibrate(folder("llama"), random_prompts(), settings, tmp_path / "run")
    below: dict[float, tuple] = dict.fromkeys(TAUS, ())
    for record in found.records:
        assert len(record.means) == len(set(below.values()))
        for branch in record.branches:
            assert branch.parent in record.means
            for tau in branch.taus:
                below[tau] = (*below[tau], branch.windows)
        assert sorted(tau for branch in record.branches for tau in branch.taus) == list(TAUS)
    assert len(found.records[0].means) == 1
    assert len(found.records[-1].means) > 1


def test_policy_holds_native_windows_and_what_was_chosen(folder, tmp_path):
    settings = Settings(CODEBOOK, (0.9,), 4)
    found = calibrate(folder("gemma2"), random_prompts(), settings, tmp_path / "run")
    policy = found.policy(0.9)
    assert policy.sinks == 4
    assert policy.windows[[0, 2]].tolist() == [[8, 8], [8, 8]]
    assert [tuple(row) for row in policy.windows[[1, 3]].tolist()] == found.chosen_rows(0.9)


mean_rows = hnp.arrays(
    np.float64,
    st.tuples(st.integers(1, 4), st.just(len(CODEBOOK))),
    elements=st.one_of(st.just(np.nan), st.floats(-1, 1)),
)
taus = st.floats(0, 1, exclude_min=True)


@given(mean_rows, taus)
def test_choose_takes_the_smallest_window_that_reaches_tau(means, tau):
    for row, window in zip(means.tolist(), choose(means, CODEBOOK, tau), strict=True):
        reached = [w for w, mean in zip(CODEBOOK, row, strict=True) if mean >= tau]
        assert window == min(reached, default=FULL)


@given(mean_rows, taus, taus)
def test_choose_never_gets_smaller_as_tau_grows(means, a, b):
    low, high = (choose(means, CODEBOOK, tau) for tau in sorted((a, b)))
    assert all(x <= y for x, y in zip(low, high, strict=True))


@given(mean_rows, taus)
def test_choose_never_takes_a_window_without_evidence(means, tau):
    for row, window in zip(means, choose(means, CODEBOOK, tau), strict=True):
        assert window == FULL or not np.isnan(row[CODEBOOK.index(window)])


def test_choose_is_full_without_any_evidence_and_reaches_tau_exactly():
    assert choose(np.full((3, 5), np.nan), CODEBOOK, 1e-9) == (FULL,) * 3
    row = np.array([[0.1, 0.9, 0.5, 0.95, 1.0]])
    assert choose(row, CODEBOOK, 0.9) == (16,)
    assert choose(row, CODEBOOK, np.nextafter(0.9, 1)) == (64,)


def test_mean_counts_positions_and_query_heads():
    sums = Sums(np.array([[6.0, 1.5, 0.0]]), np.array([4, 1, 0]), group=2)
    np.testing.assert_array_equal(sums.means(), [[0.75, 0.75, np.nan]])


def test_records_come_in_order_and_rebuild_the_state(folder, tmp_path):
    """What a resumed run does: records, through JSON, are all there is to the state."""
    settings = Settings(CODEBOOK, TAUS, 4)
    found = calibrate(folder("llama"), random_prompts(), settings, tmp_path / "run")
    again = SeqCalib(read_geometry(folder("llama")), settings, LENGTHS)
    with pytest.raises(ValueError, match="record of layer 1, expected 0"):
        again.record(found.records[1])
    for record in found.records:
        data = msgspec.json.encode(record)
        again.record(msgspec.json.decode(data, type=LayerRecord))
    assert again.done
    assert again.trajectories == found.trajectories
    np.testing.assert_array_equal(again.evidence().mean_cosine, found.evidence().mean_cosine)
