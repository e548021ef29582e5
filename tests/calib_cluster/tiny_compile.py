"""The compile command on the tiny model, run as a user runs it."""

from __future__ import annotations

from calib_cluster.run_state import STATE_FOLDER
from tests.calib_cluster.tiny import Calibration

PROMPTS, BUDGETS, DRAWS = 4, (24, 48), 6


class TinyCompile(Calibration):
    """``python -m calib_cluster compile`` with fixed inputs: 4 prompts of 160 and 16 tokens."""

    def arguments(self, *extra: str) -> list[str]:
        """Arguments of ``calib_cluster.__main__.main``; ``extra`` comes last and so overrides."""
        fixed = (
            f"compile --model {self.model} --out {self.out} --corpus key-value dialogue "
            f"--prompts {PROMPTS} --length 160 --continuation 16 --budgets 24,48 --draws {DRAWS} "
            "--entropy-bins 2 --perplexity-bins 2"
        )
        return [*fixed.split(), *extra]

    def fit_arguments(self, *extra: str) -> list[str]:
        """Arguments of a refit of its records, with the same bins, into the same folder."""
        fixed = f"fit --records {self.records} --out {self.out} --entropy-bins 2"
        return [*fixed.split(), "--perplexity-bins", "2", *extra]

    @property
    def records(self):
        """Folder of the records."""
        return self.out / STATE_FOLDER / f"{self.model.name}.compilerkv"

    @property
    def shards(self) -> list:
        """The shards of records that are there, sorted."""
        return sorted(self.records.glob("*.parquet"))
