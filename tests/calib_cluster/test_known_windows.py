"""SeqCalib finds windows that are known by construction, and conditions on the layers below."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from calib_cluster.capture import SteppedModel
from calib_cluster.run_state import RunState
from calib_cluster.seqcalib import Settings, choose
from kvpolicy.geometry import read_geometry
from kvpolicy.windows import FULL
from tests.calib_cluster.brute_force import DenseModel, brute_force
from tests.calib_cluster.in_process import calibrate, calibrate_on_ray, make_plan
from tests.calib_cluster.known_model import (
    ONLY_FIRST,
    UNIFORM,
    Layer,
    Query,
    known_prompt,
    save_known,
)

CODEBOOK = (32, 64, 128, 200, 256)
TAU = 0.9


def back(distance: int) -> tuple[Query, Query]:
    """Both query heads look this far back: the window must be distance + 1 at least."""
    return Query(back=distance), Query(back=distance)


KNOWN = (
    # a window counts the current token: 31 back is its last token of 32, 32 back is just outside
    Layer([back(31), back(32), back(63), back(64)]),
    Layer([back(199), back(200), (UNIFORM, UNIFORM), (ONLY_FIRST, ONLY_FIRST)]),
    # one head of a group near, one far: their mean counts
    Layer([back(0), back(256), (Query(back=0), Query(back=199)), (ONLY_FIRST, Query(back=63))]),
)
WITH_SINKS = [(32, 64, 64, 128), (200, 256, FULL, 32), (32, FULL, 200, 64)]
WITHOUT_SINKS = [(32, 64, 64, 128), (200, 256, FULL, FULL), (32, FULL, 200, FULL)]


@pytest.fixture(scope="module")
def known(tmp_path_factory) -> Path:
    return save_known(tmp_path_factory.mktemp("known"), KNOWN)


@pytest.mark.parametrize(("sinks", "expected"), [(4, WITH_SINKS), (0, WITHOUT_SINKS)])
def test_finds_the_windows_that_heads_were_made_to_need(known, tmp_path, sinks, expected):
    prompts = [known_prompt(seed) for seed in range(2)]
    settings = Settings(CODEBOOK, (TAU,), sinks)
    assert calibrate(known, prompts, settings, tmp_path / "run").chosen_rows(TAU) == expected


def test_cosines_are_near_one_or_far_from_it(known, tmp_path):
    """The windows above are no accident of tau: anything from .84 to .998 gives the same."""
    settings = Settings(CODEBOOK, (0.84, TAU, 0.998), 4)
    found = calibrate(known, [known_prompt(0)], settings, tmp_path / "run")
    assert [found.chosen_rows(tau) for tau in settings.taus] == [WITH_SINKS] * 3


def test_a_group_is_judged_by_the_mean_of_its_heads(known, tmp_path):
    """One head of two is content with 32 tokens: that is a mean cosine of .5, enough for .45."""
    settings = Settings(CODEBOOK, (0.45, TAU), 0)
    found = calibrate(known, [known_prompt(0)], settings, tmp_path / "run")
    assert found.chosen_rows(0.45)[2][2] == 32
    assert found.chosen_rows(TAU)[2][2] == 200


@pytest.mark.slow  # a cluster of its own
def test_the_ray_job_finds_them_too(known, tmp_path):
    """Two Ray workers with a prompt each, through the real pool; every layer is kept on disk."""
    prompts = [known_prompt(seed) for seed in range(2)]
    settings = Settings(CODEBOOK, (TAU,), 4)
    outcome = calibrate_on_ray(make_plan(known, prompts, settings, workers=2), tmp_path)
    assert outcome.seqcalib.chosen_rows(TAU) == WITH_SINKS
    assert outcome.restarts == 0
    assert len(outcome.usage) == 2
    assert RunState(tmp_path).layers() == outcome.seqcalib.records
    alone = calibrate(known, prompts, settings, tmp_path / "alone")
    assert alone.records == outcome.seqcalib.records


# Layer 0, head 0: 85 % of the current token and 15 % of the first one, whose flag it passes on.
# Without the first token its cosine is .85 / sqrt(.85^2 + .15^2) = .985: enough for tau = .9.
# Layer 1, head 0: looks 199 back where its input has the flag, else at the current token.
MIXED = Query(back=0, first=1.0, first_bonus=math.log(0.15 / 0.85))
FLAG_DEPENDENT = Query(back=0, flagged=199)
CONDITIONED = (
    Layer([(MIXED, MIXED), back(40)], passes_flag=5.0),
    Layer([(FLAG_DEPENDENT, FLAG_DEPENDENT), back(63)], first_key=False, carries_flag=False),
)


@pytest.fixture(scope="module")
def conditioned(tmp_path_factory) -> Path:
    return save_known(tmp_path_factory.mktemp("conditioned"), CONDITIONED)


def calibrate_independently(model: Path, prompts: list[list[int]], sinks: int) -> list[tuple]:
    """What SeqCalib is not: each layer is judged with full history in all lower ones."""
    geometry = read_geometry(model)
    stepped = SteppedModel(model, geometry, torch.float32, "cpu")
    states, rows = [stepped.embed(ids) for ids in prompts], []
    for layer in range(len(geometry.layers)):
        tallies = [stepped.judge(layer, state, CODEBOOK, sinks) for state in states]
        sums = sum(tally.sums for tally in tallies)
        counts = sum(tally.positions for tally in tallies) * tallies[0].group
        rows.append(choose((sums / counts).numpy(), CODEBOOK, TAU))
        states = [stepped.step(layer, state, None, sinks) for state in states]
    return rows


def test_each_layer_is_judged_under_the_windows_chosen_below(conditioned, tmp_path):
    """Layer 0's window of 32 cuts the flag off from every query but the first 32.

    With it, layer 1's head 0 only ever looks at the current token where windows bind: 32 is
    right. Judged by itself, under a layer 0 with full history, the flag is everywhere, the head
    looks 199 back and seems to need 200. What is served has layer 0's window: 32 is the answer.
    """
    prompts = [known_prompt(seed) for seed in range(2)]
    settings = Settings(CODEBOOK, (TAU,), 0)
    found = calibrate(conditioned, prompts, settings, tmp_path / "run").chosen_rows(TAU)
    assert found == [(32, 64), (32, 64)]
    assert calibrate_independently(conditioned, prompts, 0) == [(32, 64), (200, 64)]
    dense = brute_force(DenseModel(conditioned), [0, 1], prompts, CODEBOOK, TAU, 0)
    assert [tuple(row) for row in dense.windows.values()] == found


def test_sinks_count_in_the_layers_below_too(conditioned, tmp_path):
    """With the first token kept as a sink, layer 0's window of 32 hides nothing from the mixing
    head: the flag arrives and layer 1 does need 200."""
    settings = Settings(CODEBOOK, (TAU,), 1)
    found = calibrate(conditioned, [known_prompt(0)], settings, tmp_path / "run")
    assert found.chosen_rows(TAU) == [(32, 64), (200, 64)]


def test_every_tau_conditions_on_its_own_lower_layers(conditioned, tmp_path):
    """tau .99 is above the mixing head's .985: it keeps full history, so the flag arrives."""
    settings = Settings(CODEBOOK, (TAU, 0.99), 0)
    found = calibrate(conditioned, [known_prompt(0)], settings, tmp_path / "run")
    assert found.chosen_rows(TAU) == [(32, 64), (32, 64)]
    assert found.chosen_rows(0.99) == [(FULL, 64), (200, 64)]
    assert list(found.trajectories.values()) == [(TAU,), (0.99,)]
