"""Texts to calibrate and to evaluate on: recipes, the user's files, and mixes of them as prompts.

Calibration calls ``load_corpora`` and ``choose_prompts``. Texts come from distribution packages at
run time (``recipes``, ``fetch``), from generators (``generated``) or from the user (``files``);
none is shipped with this project.
"""

from calib_cluster.corpora.disjoint import RUN_WORDS, Overlap, check_disjoint, find_overlap
from calib_cluster.corpora.documents import Corpus, Document, Message
from calib_cluster.corpora.generated import Size
from calib_cluster.corpora.mix import Prompt, PromptSet, choose_prompts, load_prompts
from calib_cluster.corpora.recipes import CALIBRATION_MIX, EVALUATION_MIX, RECIPES, Recipe
from calib_cluster.corpora.specs import load_corpora

__all__ = [
    "CALIBRATION_MIX",
    "EVALUATION_MIX",
    "RECIPES",
    "RUN_WORDS",
    "Corpus",
    "Document",
    "Message",
    "Overlap",
    "Prompt",
    "PromptSet",
    "Recipe",
    "Size",
    "check_disjoint",
    "choose_prompts",
    "find_overlap",
    "load_corpora",
    "load_prompts",
]
