"""What the course's own checkpoints are, and the one function that makes them."""

from __future__ import annotations

import copy
import datetime
import json
from pathlib import Path
from typing import Any

import torch

from course_lib import machine
from course_lib.models import DecoderConfig, DecoderLM, mha_to_gqa
from course_lib.models.checkpoints import FOLDER, log_name, read_checkpoint, write_checkpoint
from course_lib.models.conversion import INITS
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
#: Equal to the checkpoint "rope" but for the number of key-value heads.
HEADS = {"gqa": 2, "mqa": 1}
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
}
CONFIGS |= {name: CONFIGS["rope"] | {"num_key_value_heads": heads} for name, heads in HEADS.items()}
CONFIGS["native"] = LARGE
SMALL_RECIPE = Recipe(steps=1000, batch_size=16, context=128, learning_rate=3e-3)
RECIPES = dict.fromkeys(CONFIGS, SMALL_RECIPE) | {
    "native": Recipe(steps=2600, batch_size=8, context=256, learning_rate=2e-3)
}
#: The checkpoint "rope" with its heads grouped to so many, and trained on for 5 percent of its steps.
UPTRAINED = {f"{name}-uptrained": heads for name, heads in HEADS.items()}
UPTRAINING = Recipe(steps=50, batch_size=16, context=128, learning_rate=2e-3, warmup=5)
#: Seed 0 made the weights that are shipped; the others show how much chance there is in a result.
SEEDS = {name: (0,) if name == "native" else (0, 1, 2) for name in (*CONFIGS, "uptraining")}
LENGTHS = (64, 128, 256, 512, 1024, 2048)
SCORED = 64
#: Bytes that all but the checkpoint "native" were trained to read.
TRAINED = 128


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
        A key of `CONFIGS`, or ``"uptraining"``: what becomes of the checkpoint ``"rope"`` when its heads are grouped, with the weights
        of `UPTRAINED`.
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
    if name == "uptraining":
        return _make_uptraining(seed, folder)
    model = build(name, seed)
    recipe = Recipe(**vars(RECIPES[name]) | {"seed": seed})
    corpus = load_corpus()
    state = folder / f".{name}-seed{seed}.state"
    losses = train(model, corpus, recipe, state=state)
    if seed == 0:
        write_checkpoint(folder / f"{name}.safetensors", model, CONFIGS[name])
    # What is evaluated is what is shipped: weights rounded to float16.
    scores = evaluate(model.half().float(), evaluation_texts(corpus))
    place = _write_log(
        name,
        seed,
        folder,
        config=CONFIGS[name],
        recipe=vars(recipe),
        losses=_rounded(losses),
        evaluation={str(length): _rounded(found.tolist()) for length, found in scores.items()},
    )
    state.unlink()
    return place


def _make_uptraining(seed: int, folder: Path) -> Path:
    """Group the heads of the checkpoint "rope" of a seed in several ways, and train each of them on, and itself as well."""
    corpus = load_corpus()
    texts = evaluation_texts(corpus)
    state = folder / f".rope-seed{seed}.state"
    if seed == 0:
        start = read_checkpoint(FOLDER / "rope.safetensors", dtype=torch.float32, device=torch.device("cpu"))
    else:
        # The weights of other seeds are not shipped and are made again.
        start = build("rope", seed)
        train(start, corpus, Recipe(**vars(RECIPES["rope"]) | {"seed": seed}), state=state)
        start = start.half().float()
    runs = []
    for heads, init, share in _uptrainings():
        model = copy.deepcopy(start) if init is None else mha_to_gqa(start, heads, init=init, seed=seed)
        before = evaluate(model, texts, (TRAINED,))[TRAINED]
        # A seed of its own, so that the first texts are not those of the training before.
        recipe = Recipe(**vars(UPTRAINING) | {"steps": UPTRAINING.steps * share, "seed": seed + 100})
        losses = train(model, corpus, recipe)
        model = model.half().float()
        for name, kept in UPTRAINED.items():
            if (seed, heads, init, share) == (0, kept, "mean", 1):
                write_checkpoint(folder / f"{name}.safetensors", model, CONFIGS["rope"] | {"num_key_value_heads": kept})
        after = evaluate(model, texts, (TRAINED,))[TRAINED]
        runs.append(
            {
                "kv_heads": heads,
                "init": init,
                "recipe": vars(recipe),
                "before": _rounded(before.tolist()),
                "after": _rounded(after.tolist()),
                "losses": _rounded(losses),
            }
        )
    place = _write_log("uptraining", seed, folder, runs=runs)
    state.unlink(missing_ok=True)
    return place


def _uptrainings() -> list[tuple[int, str | None, int]]:
    """Return key-value heads, how they are made, and how many times 5 percent of the steps they are trained."""
    short: list[tuple[int, str | None, int]] = [(heads, init, 1) for heads in HEADS.values() for init in INITS]
    return [(4, None, 1), *short, (4, None, 4), *((heads, "mean", 4) for heads in HEADS.values())]


def _rounded(values: list[float]) -> list[float]:
    return [round(value, 4) for value in values]


def _write_log(name: str, seed: int, folder: Path, **content: Any) -> Path:
    log = {
        "name": name,
        "command": f"course train {name} --seed {seed}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": machine.versions(),
    }
    place = folder / log_name(name, seed)
    place.write_text(json.dumps(log | content, separators=(",", ":")) + "\n", encoding="utf-8")
    return place
