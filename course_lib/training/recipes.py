"""What the course's own checkpoints are, and the one function that makes them."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import torch

from course_lib import machine
from course_lib.models import DecoderConfig, DecoderLM
from course_lib.models.checkpoints import FOLDER, log_name, write_checkpoint
from course_lib.training.corpus import Corpus, load_corpus
from course_lib.training.loop import Recipe, bits_per_byte, train

#: Equal but for the position encoding, so that nothing else can explain a difference.
SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
#: Larger, with grouped heads, for experiments that need weights never quantised before.
LARGE = SMALL | {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "position": "rope",
}
CONFIGS: dict[str, dict[str, Any]] = {
    position: SMALL | {"position": position} for position in ("none", "sinusoidal", "learned", "rope", "alibi")
} | {"native": LARGE}
SMALL_RECIPE = Recipe(steps=1000, batch_size=16, context=128, learning_rate=3e-3)
RECIPES = dict.fromkeys(CONFIGS, SMALL_RECIPE) | {
    "native": Recipe(steps=2600, batch_size=8, context=256, learning_rate=2e-3)
}
#: Seed 0 made the weights that are shipped; the others show how much chance there is in a result.
SEEDS = {name: (0,) if name == "native" else (0, 1, 2) for name in CONFIGS}
LENGTHS = (64, 128, 256, 512, 1024, 2048)
SCORED = 64


def evaluation_texts(corpus: Corpus, *, per_file: int = 4) -> torch.Tensor:
    """Return held-out texts long enough for the longest of `LENGTHS` and one byte to predict.

    Parameters
    ----------
    corpus : Corpus
        Whose held-out files to cut.
    per_file : int
        How many texts of one file at most, so that no file outweighs the others.

    Returns
    -------
    Tensor
        uint8 ``[texts, 2049]``. The first texts of all files come first, then the second ones.
    """
    size = max(LENGTHS) + 1
    ends = [size * (place + 1) for place in range(per_file)]
    return torch.stack([file[end - size : end] for end in ends for file in corpus.held_out if len(file) >= end])


def evaluate(model: DecoderLM, texts: torch.Tensor, lengths: tuple[int, ...] = LENGTHS) -> dict[int, torch.Tensor]:
    """Return bits per byte by the number of bytes that the model reads, always for the last 64 bytes of the same texts.

    Parameters
    ----------
    model : DecoderLM
        Byte-level.
    texts : Tensor
        As `evaluation_texts` returns them.
    lengths : tuple of int
        How many bytes to read; those that the model has no positions for are left out.

    Returns
    -------
    dict
        For each length float32 ``[texts]``.
    """
    table = model.config.position == "learned"
    usable = [length for length in lengths if not (table and length > model.config.max_position_embeddings)]
    return {length: bits_per_byte(model, texts[:, -length - 1 :], predict=SCORED) for length in usable}


def build(name: str, seed: int = 0) -> DecoderLM:
    """Return the untrained decoder of a checkpoint; a seed draws the same weights each time.

    Raises
    ------
    ValueError
        If the course has no checkpoint of that name.
    """
    if name not in CONFIGS:
        raise ValueError(f"name is {name!r}; the course trains {', '.join(CONFIGS)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return DecoderLM(DecoderConfig(**CONFIGS[name]))


def make_checkpoint(name: str, seed: int = 0, folder: Path = FOLDER) -> Path:
    """Train a checkpoint and write its log, and for seed 0 its weights.

    An interrupted run leaves a state in the folder, and the next call goes on from there.

    Parameters
    ----------
    name : str
        A key of `CONFIGS`.
    seed : int
        Of the weights and of the order of the texts.
    folder : Path
        Where log and weights go.

    Returns
    -------
    Path
        The log.

    Raises
    ------
    ValueError
        If the course has no checkpoint of that name.
    ModelUnavailableError
        If the corpus is not on this machine and cannot be fetched.
    """
    model = build(name, seed)
    recipe = Recipe(**vars(RECIPES[name]) | {"seed": seed})
    corpus = load_corpus()
    state = folder / f".{name}-seed{seed}.state"
    losses = train(model, corpus, recipe, state=state)
    if seed == 0:
        write_checkpoint(folder / f"{name}.safetensors", model, CONFIGS[name])
    # What is evaluated is what is shipped: weights rounded to float16.
    scores = evaluate(model.half().float(), evaluation_texts(corpus))
    log = {
        "name": name,
        "config": CONFIGS[name],
        "recipe": vars(recipe),
        "command": f"course train {name} --seed {seed}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": machine.versions(),
        "losses": [round(loss, 4) for loss in losses],
        "evaluation": {str(length): [round(bits, 4) for bits in found.tolist()] for length, found in scores.items()},
    }
    place = folder / log_name(name, seed)
    place.write_text(json.dumps(log, separators=(",", ":")) + "\n", encoding="utf-8")
    state.unlink()
    return place
