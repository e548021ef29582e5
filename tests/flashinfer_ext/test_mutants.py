"""The kernels' tests catch seeded faults: see ``mutants``."""

from __future__ import annotations

import pytest

from tests.flashinfer_ext.conftest import INTERPRETED
from tests.flashinfer_ext.mutant_list import DECODE, EXTEND, TILES, WORK, Mutant

Console = pytest.importorskip("rich.console").Console
pytest.importorskip("pytest_timeout")
mutants = pytest.importorskip("tests.flashinfer_ext.mutants")


def test_every_mutant_applies_to_the_kernels_as_they_are(tmp_path):
    assert {mutant.file for mutant in mutants.MUTANTS} == {TILES, WORK, DECODE, EXTEND}
    assert len({mutant.name for mutant in mutants.MUTANTS}) == len(mutants.MUTANTS)
    for mutant in mutants.MUTANTS:
        source = (mutants.ROOT / "flashinfer_ext" / mutant.file).read_text()
        (tmp_path / mutant.file).write_text(source)
        mutant.apply(tmp_path)
        mutated = (tmp_path / mutant.file).read_text()
        assert mutated != source
        compile(mutated, mutant.file, "exec")


def test_a_mutant_that_no_longer_applies_is_an_error(monkeypatch, capsys):
    gone = Mutant("gone", WORK, "no such text", "", ())
    monkeypatch.setattr(mutants, "MUTANTS", [gone])
    monkeypatch.setattr(mutants, "run_tests", lambda folder, tests: mutants.Verdict(True, "", 0.0))
    assert mutants.main([]) == 1
    assert capsys.readouterr().err == "gone: triton_work.py has no 'no such text' number 0\n"


def test_a_survivor_is_an_error(monkeypatch):
    monkeypatch.setattr(mutants, "run_tests", lambda folder, tests: mutants.Verdict(True, "", 0.0))
    first = mutants.MUTANTS[0]
    assert mutants.judge([first], Console(quiet=True)) == [f"{first.name}: survived"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not INTERPRETED, reason="a faulty kernel may spoil a GPU's other work")
def test_every_mutant_is_caught():
    assert mutants.judge(mutants.MUTANTS, Console()) == []
