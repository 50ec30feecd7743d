"""The course's own checkpoints: float16 safetensors beside the log of the run that made each of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from course_lib.models.decoder import DecoderConfig, DecoderLM
from course_lib.models.wheels import ModelUnavailableError

FOLDER = Path(__file__).parent / "trained"


def names() -> list[str]:
    """Return the names of the shipped checkpoints, as `course_lib.models.load` takes them after ``course/``."""
    return sorted(file.stem for file in FOLDER.glob("*.safetensors"))


def training_log(name: str, seed: int = 0) -> dict[str, Any]:
    """Return the log of the run that made a checkpoint, or of the same run from another seed.

    Parameters
    ----------
    name : str
        A shipped checkpoint's, such as ``"rope"``.
    seed : int
        The shipped weights are those of seed 0; of other seeds only the log is shipped.

    Returns
    -------
    dict
        ``config``, ``recipe``, ``losses`` (of each step, nats per byte), ``evaluation`` (bits per byte of each held-out text
        at each length), ``versions``, ``date`` and ``command``.

    Raises
    ------
    ValueError
        If there is no such log.
    """
    place = FOLDER / log_name(name, seed)
    if not place.exists():
        found = ", ".join(sorted(file.stem for file in FOLDER.glob("*.json")))
        raise ValueError(f"name {name!r} with seed {seed} has no training log; there are {found}")
    log: dict[str, Any] = json.loads(place.read_text(encoding="utf-8"))
    return log


def log_name(name: str, seed: int) -> str:
    """Return the file name of a training log."""
    return f"{name}.json" if seed == 0 else f"{name}-seed{seed}.json"


def read_checkpoint(place: Path, *, dtype: torch.dtype, device: torch.device) -> DecoderLM:
    """Return the decoder of a checkpoint, in evaluation mode.

    Parameters
    ----------
    place : Path
        A file that `write_checkpoint` wrote.
    dtype, device
        Of the weights. Those in the file are float16.

    Raises
    ------
    ModelUnavailableError
        If the file is damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(place, framework="pt") as file:
            config = DecoderConfig(**json.loads(file.metadata()["config"]))
            state = {name: file.get_tensor(name).to(device, dtype) for name in file.keys()}  # noqa: SIM118
        if config.tie_word_embeddings:
            state["lm_head.weight"] = state["embed_tokens.weight"]
        with torch.device("meta"):
            model = DecoderLM(config)
        model.load_state_dict(state, assign=True)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")
        raise ModelUnavailableError(f"{place.name} is damaged ({reason}): install the course anew.") from error
    if config.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    return model.eval()


def write_checkpoint(place: Path, model: DecoderLM, config: dict[str, Any]) -> None:
    """Write a decoder's weights as float16, whole or not at all.

    Parameters
    ----------
    place : Path
        The file.
    model : DecoderLM
        Whose weights to write.
    config : dict
        What `DecoderConfig` was built from.
    """
    from safetensors.torch import save_file

    state = {name: weight.to(torch.float16).contiguous() for name, weight in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    place.parent.mkdir(parents=True, exist_ok=True)
    fresh = place.with_suffix(".part")
    save_file(state, fresh, metadata={"config": json.dumps(config)})
    os.replace(fresh, place)
