"""Models with recurrent layers: what is refused at start-up, and where a prefix can be resumed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_patches import serving
from engine_patches.errors import Refusal
from engine_patches.ledger import PageLedger
from engine_patches.prefix import longest_valid_hit
from engine_patches.recurrent import StateSlots, check_configurator
from engine_patches.residents import Residents
from engine_patches.snapshots import SnapshotGrid
from engine_patches.startup import startup_table
from kvpolicy.geometry import read_geometry
from kvpolicy.windows import FULL, Level
from tests.engine_patches.gdn.models import COMMON
from tests.engine_patches.launching import launch, parse_many

INTERVAL = "full_attention_interval"
PAGE = 16


def write_config(folder: Path, drop: tuple[str, ...] = (), **changes) -> Path:
    folder.mkdir()
    config = COMMON | {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"]}
    config = {key: value for key, value in (config | changes).items() if key not in drop}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# -- start-up ----------------------------------------------------------------------------------

every_second = ["linear_attention", "full_attention"] * 4
every_fourth = (["linear_attention"] * 3 + ["full_attention"]) * 2
BOUND = ["--max-mamba-cache-size", "8"]
CASES = {  # changes of config.json, flags, and the refusal (None: accepted)
    "bound": ({}, BOUND, None),
    "unbound": ({}, [], "give --max-mamba-cache-size"),
    "no_buffer": (
        {},
        [*BOUND, "--mamba-radix-cache-strategy", "no_buffer"],
        "--mamba-radix-cache-strategy no_buffer does not work with --kv-policy; drop it",
    ),
    "uncached": ({}, ["--disable-radix-cache", "--max-running-requests", "4"], None),
    "uncached_unbound": ({}, ["--disable-radix-cache"], "give --max-mamba-cache-size"),
    "uncached_no_buffer": (
        {},
        [*BOUND, "--disable-radix-cache", "--mamba-radix-cache-strategy", "no_buffer"],
        None,
    ),
    "listed_only": (
        {"drop": (INTERVAL,), "layer_types": every_second},
        BOUND,
        "SGLang does not read: without full_attention_interval it takes layers [3, 7]",
    ),
    "listed_as_sglang_takes_them": (
        {"drop": (INTERVAL,), "layer_types": every_fourth},
        BOUND,
        None,
    ),
    "interval_of_two": ({INTERVAL: 2}, BOUND, None),
}


@pytest.fixture(scope="module")
def parsed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parsed")
    lines = [
        ["--model-path", write_config(folder / name, **changes), "--kv-policy", "full", *flags]
        for name, (changes, flags, _) in CASES.items()
    ]
    return dict(zip(CASES, parse_many(lines, folder), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_flags_and_config_are_checked_before_anything_is_loaded(parsed, name):
    expected = CASES[name][2]
    if expected is None:
        assert (parsed[name].returncode, parsed[name].refusals) == (0, []), parsed[name].stderr
    else:
        assert expected in parsed[name].refused()


def configurator(full=(3, 7), conv=torch.float32, dtype=torch.float32) -> SimpleNamespace:
    params = SimpleNamespace(dtype=SimpleNamespace(conv=conv))
    config = SimpleNamespace(full_attention_layer_ids=list(full), mamba2_cache_params=params)
    return SimpleNamespace(mambaish_config=config, model_config=SimpleNamespace(dtype=dtype))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"full": (1, 3)}, r"layers \[1, 3\] as full attention, config.json says \[3, 7\]"),
        ({"conv": torch.bfloat16}, "runs in float32 .* set SGLANG_MAMBA_CONV_DTYPE=float32"),
        (
            {"conv": torch.bfloat16, "dtype": torch.float16},  # --dtype auto on fp32 weights
            "runs in float16 .* states are bfloat16.* SGLANG_MAMBA_CONV_DTYPE=float16",
        ),
    ],
)
def test_what_only_sglang_can_tell_is_refused(tmp_path, changes, expected):
    geometry = read_geometry(write_config(tmp_path / "model"))
    check_configurator(configurator(), geometry)
    with pytest.raises(Refusal, match=expected):
        check_configurator(configurator(**changes), geometry)


@pytest.mark.slow  # loads a model
def test_states_in_another_dtype_end_the_start_with_one_line(tmp_path):
    from tests.engine_patches.gdn import models

    models.save("qwen3_5", tmp_path)
    flags = ["--skip-tokenizer-init", "--kv-arena-bytes", "4MB", *BOUND]
    outcome = launch("--model-path", str(tmp_path), "--kv-policy", "full", *flags)
    assert "SGLANG_MAMBA_CONV_DTYPE=float16" in outcome.refused(), "auto serves fp32 as fp16"


def test_the_start_up_table_has_states_beside_kv_and_what_they_suffice_for(tmp_path):
    model = write_config(tmp_path / "model")
    served = serving.Serving(serving.ServeRequest(str(model), "full"))
    served.arena_bytes = 64 << 20
    assert "state" not in startup_table(served, 4096)
    served.states = StateSlots(slot_bytes=2 << 20, slots=17, per_request=5)
    assert (served.states.max_requests, served.states.request_bytes) == (3, 10 << 20)
    lines = startup_table(served, 4096).splitlines()
    row = next(line for line in lines if "1024" in line).split()
    assert "state MiB" in "".join(lines)
    assert [row[i] for i in (7, 9, 11)] == ["10.0", "3", "3"], "the states end before the arena"
    assert any(
        line.startswith("recurrent state: 2.00 MiB for 6 layers at any length; 17 states (34.0 MiB")
        and line.endswith("5 for a running request, so 3 at once")
        for line in lines
    )


# -- where states are kept ---------------------------------------------------------------------


@settings(deadline=None)
@given(
    page=st.sampled_from([1, 16, 64, 128]),
    start=st.integers(0, 400),
    count=st.integers(1, 700),
    branch=st.none() | st.integers(1, 1100),
)
def test_a_chunk_leaves_its_state_where_sglang_says(page, start, count, branch):
    """Beside SGLang's own method, which runs after the pages of the chunk are decided."""
    from sglang.srt.managers import schedule_batch

    chunk = max(64, page)
    start = start // 16 * 16
    kv = SimpleNamespace(mamba_next_track_idx=0, mamba_last_track_seqlen=None)
    req = SimpleNamespace(
        prefix_len=start, extend_len=count, extend_end=start + count, kv=kv,
        mamba_branching_seqlen=branch,
    )  # fmt: skip
    batch = SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace()),
        tree_cache=SimpleNamespace(page_size=page),
        req_to_token_pool=SimpleNamespace(get_mamba_ping_pong_other_idx=lambda i: 1 - i),
    )
    mamba = SimpleNamespace(enable_mamba_extra_buffer_lazy=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule_batch, "mamba_cache_chunk_size", lambda: chunk)
        patch.setattr(schedule_batch, "mamba_checkpoint_grid", lambda tree_page: chunk)
        patch.setattr(schedule_batch, "get_exec", lambda: SimpleNamespace(mamba=mamba))
        patch.setattr(schedule_batch, "get_parallel", lambda: SimpleNamespace(dcp_enabled=False))
        schedule_batch.ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend(batch, req)
    found = SnapshotGrid(prefill=chunk, decode=256, state=chunk).of_chunk(
        start, start + count, branch
    )
    assert found == (kv.mamba_last_track_seqlen or 0)


def test_decoding_keeps_a_state_on_a_grid_of_its_own():
    grid = SnapshotGrid(prefill=64, decode=256, state=64)
    assert [n for n in range(1, 800) if grid.of_decode(n)] == [256, 512, 768]


# -- their windows -----------------------------------------------------------------------------

windows = st.sampled_from([1, 15, 16, 17, 40, 64, 100, 300, FULL])
levels = st.lists(st.tuples(windows, st.sampled_from([0, 4, 20])), min_size=1, max_size=3)


class Run:
    """One request in an arena with room for everything, and its cached prefix afterwards."""

    def __init__(self, shapes) -> None:
        told = [Level(k, w, 0 if w == FULL else s, (k,)) for k, (w, s) in enumerate(shapes)]
        self.ledger = PageLedger(told, 4000, 400)
        self.residents = Residents(self.ledger, PAGE, cache=True, reclaim=lambda pages: None)
        self.request = self.residents.admit([])
        self.next = 1

    def pages(self, length: int) -> list[int]:
        count = -(-length // PAGE) - len(self.request.pages)
        self.next += count
        return list(range(self.next - count, self.next))

    def extend(self, length: int, stop: int) -> None:
        self.request.stop = stop
        fresh = self.pages(length)
        self.residents.prepare([(self.request, len(fresh), length)])
        self.residents.extend(self.request, fresh, length)

    def decode(self) -> None:
        fresh = self.pages(self.request.length + 1)
        self.residents.decode(self.request, fresh[0] if fresh else None)

    def hit(self, length: int) -> int:
        return longest_valid_hit(self.ledger, self.request.pages[: length // PAGE], PAGE) * PAGE


@settings(deadline=None)
@given(levels, st.lists(st.integers(1, 300), min_size=1, max_size=5))
def test_a_chunk_keeps_the_windows_of_its_snapshot(shapes, chunks):
    run, grid, length, stops = Run(shapes), SnapshotGrid(64, 256, 64), 0, []
    for chunk in chunks:
        start = length // PAGE * PAGE
        length = start + chunk
        stop = grid.of_chunk(start, length, None)
        run.extend(length, stop)
        stops += [stop] if stop else []
        assert all(run.hit(at) == at for at in stops), "an earlier one too: nothing was evicted"
    run.residents.release(run.request)
    run.ledger.lift_fence()
    assert all(run.hit(at) == at for at in stops)
    assert not run.ledger.check_integrity() and not run.ledger.pinned


@settings(deadline=None)
@given(levels, st.integers(64, 200), st.integers(1, 900), st.sampled_from([64, 128, 256]))
def test_decoding_keeps_the_windows_of_the_newest_two_snapshots(shapes, prompt, answer, interval):
    run, grid = Run(shapes), SnapshotGrid(64, interval, 64)
    stop = grid.of_chunk(0, prompt, None)
    run.extend(prompt, stop)
    run.ledger.lift_fence()
    tracked = []
    for _ in range(answer):
        run.decode()
        if grid.of_decode(run.request.length):
            run.residents.track(run.request)
            tracked.append(run.request.length)
        assert all(run.hit(at) == at for at in (stop, *tracked[-2:]))
    live = run.ledger.live[:, run.request.pages].sum(axis=1)
    for k, level in enumerate(run.ledger.levels):
        if not level.is_full:  # three windows, two intervals and the snapshot's, whatever was said
            bound = 4 * (level.window // PAGE + 2) + 2 * interval // PAGE + -(-level.sinks // PAGE)
            assert live[k] <= bound
    run.residents.release(run.request)
    assert all(run.hit(at) == at for at in (stop, *tracked[-2:]))
    assert not run.ledger.check_integrity() and not run.ledger.pinned


def test_a_frozen_request_leaves_no_windows_of_its_answer():
    run = Run([(40, 4)])
    run.extend(128, 128)
    run.request.freeze = object()
    run.request.length = 256
    run.residents.track(run.request)
    assert run.request.tracked == []


def test_states_do_not_change_where_hits_of_other_models_end():
    run = Run([(40, 0), (FULL, 0)])
    run.request.stop = None
    fresh = run.pages(100)
    run.residents.prepare([(run.request, len(fresh), 100)])
    run.residents.extend(run.request, fresh, 100)
    assert run.request.checkpoints == [100]
    assert np.flatnonzero(run.ledger.live[0, run.request.pages]).min() == 2
