"""Tiny models as the judge loads them, beside their masked reference; one that copies."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from calib_cluster.corpora.words import paragraph
from calib_cluster.judge import JudgedModel, names
from calib_cluster.judge.tasks import FACTS
from kvpolicy.geometry import read_geometry
from kvpolicy.retention import RULES, RetentionTables
from tests.calib_cluster.known_model import HEAD_DIM, Layer, Query, save_known
from tests.calib_cluster.rewards.frozen import Pair
from tests.calib_cluster.tiny_models import save_tiny
from tests.harness.frozen_reference import FrozenReference

BACK = 99
"""The model that copies predicts the token this many positions back."""


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``tiny(family)``: folder of a random model."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = save_tiny(family, tmp_path_factory.mktemp(family))
        return made[family]

    return get


@pytest.fixture(scope="session")
def both(tiny) -> Callable[[str], Pair]:
    """``both(family)``: a random model as ``JudgedModel`` and as ``FrozenReference``."""
    made: dict[str, Pair] = {}

    def get(family: str) -> Pair:
        if family not in made:
            geometry = read_geometry(tiny(family))
            model = JudgedModel(tiny(family), geometry)
            units = model.units.layers, model.units.heads
            tables = RetentionTables.uniform(geometry, RULES["paper"])
            made[family] = Pair(model, FrozenReference(tiny(family), None, 0, units, tables))
        return made[family]

    return get


@pytest.fixture(scope="session")
def copier(tmp_path_factory: pytest.TempPathFactory) -> JudgedModel:
    """A model of one kv head that says again what stood ``BACK`` tokens before."""
    looks = Layer([(Query(back=BACK), Query(back=BACK))], first_key=False, carries_flag=False)
    folder = save_known(tmp_path_factory.mktemp("copier"), [looks])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        attention = model.model.layers[0].self_attn
        attention.o_proj.weight[:, :HEAD_DIM] = 20 * torch.eye(HEAD_DIM)
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    model.save_pretrained(folder)
    return JudgedModel(folder, read_geometry(folder))


@pytest.fixture
def rng() -> np.random.Generator:
    """Random numbers of a fixed seed."""
    return np.random.default_rng(5)


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A .jsonl file of two corpora with 20 documents each, about 3000 tokens a document."""
    path = tmp_path_factory.mktemp("texts") / "held-out.jsonl"
    rng = random.Random(0)
    rows = [{"corpus": name, "text": paragraph(rng, 160)} for name in ("one", "two") * 20]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def smol(smollm2, tokenizer):
    """The tokenizer of SmolLM2."""
    return tokenizer(smollm2)


@pytest.fixture(scope="session")
def reader(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random model with a tokenizer of few tokens, which makes its runs quick."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    wordings = (part for fact in FACTS for part in fact)
    tokenizer.train_from_iterator([*wordings, *names.FIRST_NAMES, texts.read_text()], trainer)
    folder = tmp_path_factory.mktemp("reader")
    size = tokenizer.get_vocab_size()
    save_tiny("llama", folder, vocab_size=size, max_position_embeddings=2048)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder
