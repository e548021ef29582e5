"""Fixtures shared by all tests: thread limits, demo models, tokenizers, live servers."""

from __future__ import annotations

import os

# Before torch is imported: threads that fight for a core (a test's own, its servers') cost 8x.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.harness.server import Server


def _interpret_triton() -> None:
    """Without an NVIDIA device, this process runs Triton kernels in Triton's interpreter.

    Triton reads the variable when a kernel is declared, those of its own library at its import.
    Processes that tests start do not inherit it: a test that wants it there says so. A value
    already set is left alone: 0 collects the GPU's tests on any machine.
    """
    if "TRITON_INTERPRET" in os.environ or Path("/dev/nvidia0").exists():
        return
    os.environ["TRITON_INTERPRET"] = "1"
    import triton

    triton.knobs.runtime.interpret = True
    del os.environ["TRITON_INTERPRET"]


_interpret_triton()

TEST_TIMEOUT = 900  # seconds
SLOW_TIMEOUT = 1500


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files that start servers come first: of two workers none should be left with the longest.

    Every test has a timeout that ends its servers, unless it names its own.
    """
    serving = {item.path for item in items if "server_factory" in getattr(item, "fixturenames", ())}
    items.sort(key=lambda item: item.path not in serving)
    if not config.pluginmanager.hasplugin("timeout"):
        return  # a bare GPU machine, which runs the kernels' tests only
    for item in items:
        if item.get_closest_marker("timeout") is None:
            slow = item.get_closest_marker("slow") is not None
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT if slow else TEST_TIMEOUT))


def _model(name: str) -> Path:
    """Folder of a demo model, fetched on first use. A failure fails the tests, with its output."""
    fetch = subprocess.run(
        [sys.executable, "-m", "loadtest", "model", name], capture_output=True, text=True,
        cwd=Path(__file__).parents[1],
    )  # fmt: skip
    if fetch.returncode != 0:
        pytest.fail(f"python -m loadtest model {name}: {fetch.stderr.strip()}", pytrace=False)
    return Path(fetch.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct: 30 global layers, 9 query and 3 KV heads."""
    return _model("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """Gemma-3-270m: 15 local layers (window 512) and 3 global, 4 query heads and 1 KV head."""
    return _model("gemma-3-270m")


@pytest.fixture(scope="session")
def tokenizer() -> Callable:
    """``tokenizer(model_dir)``: its tokenizer, loaded once."""
    from functools import cache

    from transformers import AutoTokenizer

    return cache(AutoTokenizer.from_pretrained)


@pytest.fixture(scope="module")
def server_factory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """``server_factory(model_dir, *flags, env=None)``: a healthy Server of those flags.

    The latest server is kept for the module's next test, its prefix cache emptied, because
    starting one costs half a minute. Only that one: a Gemma server takes 7 GB of this machine.
    """
    from tests.harness.server import Server

    alive: dict[tuple, Server] = {}
    logs = tmp_path_factory.mktemp("servers")

    with ExitStack() as stack:

        def start(model_dir: Path, *flags: str, env: dict[str, str] | None = None) -> Server:
            key = (model_dir, flags, tuple(sorted((env or {}).items())))
            if key in alive and alive[key].returncode is None:
                alive[key].flush_cache()
                return alive[key]
            alive.clear()
            stack.close()
            log = logs / f"{len(list(logs.iterdir()))}.log"
            alone = "PYTEST_XDIST_WORKER" not in os.environ
            server = Server(model_dir, *flags, env=env, log=log, threads=2 if alone else 1)
            alive[key] = stack.enter_context(server)
            return server

        yield start
