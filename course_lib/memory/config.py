"""Reading a model's configuration: a published name, a file, a dictionary or a Transformers configuration object.

Nothing is guessed. A formula asks for a field by name; a field that is absent is completed from Transformers' class
defaults, and a field that no formula asked for and that differs from its default is reported, so that the caller can
let the real class decide.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from course_lib.memory.units import MOST, shown, whole

PUBLISHED_DIR = Path(__file__).parent / "published"

# Fields that change neither the shapes of weights nor what is cached, unless a formula reads them.
_HARMLESS = re.compile(
    r"""^_|rope|rotary|dropout|pdrop|layerdrop|_drop$|token_id|token_index|initializer|init_(std|factor|range|method)|_init$|_eps$
    |epsilon|^eps$|activation|hidden_act|^model_type$|^architectures$|transformers_version|^origin$|^basis$|^auto_map$|dtype$
    |^id2label$|^label2id$|num_labels|problem_type|chunk_size_feed|output_(attentions|hidden_states)|return_dict
    |is_encoder_decoder|finetuning_task|pretraining_tp|use_cache|use_return_dict
    |router_aux|router_z|router_jitter|jitter|output_router|routed_scaling|route_scale|scaling_factor|norm_topk
    |scoring_func|score_func|topk_method|topk_group|n_group$|^num_expert_group$|softcap|soft_cap|_multiplier$|logits_scaling
    |logit_scale|attention_scale|query_pre_attn_scalar|max_position_embeddings$|model_max_length|max_window_layers
    |sliding_window_pattern|use_sliding_window|summary_|task_specific|scale_attn|reorder_and_upcast|_in_fp32|time_step
    |kernels$|^is_decoder$|^classifier_|quantization_config|use_mambapy|associative_scan
    |num_logits_to_keep|^rescale_|clip_qkv|swiglu_|^quantization$|^moe_routed|^num_experts_per_tok|^num_selected_experts|^moe_k$|^moe_topk$|^top_k_experts$|^experts_per_token$|^num_nextn_predict_layers$|aux_loss|^decoder_start
    |use_bidirectional_attention|attn_implementation|z_loss|^seq_length$|^pruned_heads$
    |^tokenizer_class$|^prefix$|^min_length$|^max_length$|^do_sample$|^temperature$|^top_[kp]$|num_beams|^torchscript$
    |^tf_legacy_loss$|^tie_encoder_decoder$|^use_bfloat16$|^typical_p$|repetition_penalty|length_penalty|early_stopping
    |^ep_size$|^attn_temperature|^floor_scale$|^attn_scale$|^scale_embedding$|^init_device$
    """,
    re.VERBOSE,
)
_NESTED = ("text_config", "thinker_config", "language_config", "llm_config")
# One field under two names, before and after Transformers renamed it.
_SYNONYMS = {"num_local_experts": "num_experts", "num_experts": "num_local_experts"}
_LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "encoder_layers",
    "decoder_layers",
    "num_decoder_layers",
)
MOST_LAYERS = 10_000  # a class makes lists and modules of as many as it is told
# Read from the source alone: whatever Transformers makes of them depends on what else is installed.
_STORAGE = ("dtype", "torch_dtype", "quantization_config", "compression_config", "quantization")
_ABSENT = object()


class MissingFieldError(ValueError):
    """A formula needs a field that the configuration does not have."""

    def __init__(self, field: str, model_type: str) -> None:
        super().__init__(f"the configuration of model_type {model_type!r} leaves out {field!r}")
        self.field = field


class UnsupportedError(ValueError):
    """No formula covers this configuration."""


class Fields:
    """A configuration's fields, remembering which of them were read.

    Parameters
    ----------
    source : mapping or transformers.PretrainedConfig
        Where the fields are.
    label : str
        What to call the configuration in an error.
    overrides : mapping, optional
        Fields that have another value than in the source.
    """

    def __init__(self, source: Any, label: str, overrides: Mapping[str, Any] | None = None) -> None:
        self.source = source
        self.label = label
        self.overrides = overrides or {}
        self._read: set[str] = set()
        self._aliases: Mapping[str, str] = getattr(source, "attribute_map", None) or {}

    @property
    def model_type(self) -> str:
        """The configuration's `model_type`, or an empty string."""
        return str(self._lookup("model_type") or "") if self._lookup("model_type") is not _ABSENT else ""

    @property
    def is_mapping(self) -> bool:
        """Whether the fields come from a plain dictionary, as opposed to a Transformers configuration."""
        return isinstance(self.source, Mapping)

    def _lookup(self, name: str) -> Any:
        if name in self.overrides:
            self._read.add(name)
            return self.overrides[name]
        for known in (name, _SYNONYMS.get(name)):
            try:
                value = (
                    self.source.get(known, _ABSENT) if self.is_mapping else getattr(self.source, str(known), _ABSENT)
                )
            except RuntimeError as error:  # Transformers' way to say that the layers differ
                raise UnsupportedError(f"{self.label}: no formula for a {name} of its own in each layer") from error
            if known is not None and value is not _ABSENT:
                self._read.update((known, self._aliases.get(known, known)))
                return value
        return _ABSENT

    def __getitem__(self, name: str) -> Any:
        value = self._lookup(name)
        if value is _ABSENT:
            raise MissingFieldError(name, self.model_type)
        return value

    def whole(self, name: str, least: int = 0, most: int = MOST) -> int:
        """Return a field that must be a whole number of at least `least`."""
        return whole(self[name], f"{self.label}: {name}", least=least, most=most)

    def optional(self, name: str | None, default: int, least: int = 0) -> int:
        """Return a field that must be a whole number, or `default` where it is absent or None."""
        return default if name is None or self.get(name) is None else self.whole(name, least)

    def largest(self, name: str, least: int = 1) -> int | None:
        """Return a whole number, the largest where layers have their own, or None where the field is absent."""
        try:
            value = self.get(name)
        except UnsupportedError:
            value = [getattr(own, name) for own in self.source.per_layer_config]
        values = value if isinstance(value, list | tuple) else [value]
        found = [whole(number, f"{self.label}: {name}", least=least) for number in values if number is not None]
        return max(found, default=None)

    def switch(self, name: str) -> bool:
        """Return a field that must be true or false; None is false."""
        # Where a class has no such field, Transformers does not tie.
        absent_is_false = name == "tie_word_embeddings" and not self.is_mapping
        value = self.get(name) if absent_is_false else self[name]
        if value not in (None, False, True):
            raise ValueError(f"{self.label}: {name} must be true or false, got {shown(value)}")
        return bool(value)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field that the class itself may not have."""
        value = self._lookup(name)
        return default if value is _ABSENT or value is None else value

    def ignore(self, *names: str) -> None:
        """Declare fields that matter to no weight and no cached tensor of this architecture."""
        self._read.update(names)

    def nested(self) -> Fields | None:
        """Return the configuration of the language model inside a composite one, if there is one."""
        if not self.is_mapping:
            with quiet():
                inner = self.source.get_text_config(decoder=True)  # of an encoder-decoder, a copy of itself
            return None if type(inner) is type(self.source) else Fields(inner, self.label)
        for key in _NESTED:
            inner = self.source.get(key)
            if isinstance(inner, Mapping):
                return Fields(inner, self.label)
        return None

    def leftover(self) -> list[str]:
        """Fields that nobody read and that could matter: not harmless and not at their class default."""
        values = self.source if self.is_mapping else self.source.to_dict()
        names = [name for name in values if name not in self._read and not _HARMLESS.search(name)]
        if self.is_mapping or not names:
            return names
        config_class: Any = type(self.source)
        defaults = _defaults(config_class)
        return [name for name in names if name in defaults and defaults[name] != values[name]]

    def completed(self) -> Fields:
        """Return the same configuration with Transformers' class defaults for whatever it leaves out.

        Raises
        ------
        ImportError
            If Transformers is not installed.
        UnsupportedError
            If Transformers does not know the model type.
        ValueError
            If it rejects the configuration.
        """
        with quiet():
            from transformers import CONFIG_MAPPING

        if self.model_type not in CONFIG_MAPPING:
            raise UnsupportedError(f"{self.label} has model_type {self.model_type!r}, which Transformers does not know")
        try:
            values = self._shapes(self.source)
        except RecursionError:
            raise ValueError(f"{self.label} is nested too deeply to be a configuration") from None
        for name in ("model_type", "origin"):
            values.pop(name, None)
        try:
            with quiet():
                return Fields(CONFIG_MAPPING[self.model_type].from_dict(values), self.label, self.overrides)
        except Exception as error:
            # A field of several types has an error for each of them.
            reason = " ".join(str(error).split(". Errors:")[0].split()) or type(error).__name__
            raise ValueError(f"{self.label} is not a valid {self.model_type!r} configuration: {reason}") from error

    def _shapes(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Copy a configuration without what says only how weights are stored; refuse absurd whole numbers."""
        copied: dict[str, Any] = {}
        for name, value in values.items():
            if isinstance(value, Mapping):
                copied[name] = self._shapes(value)
            elif hasattr(value, "__index__") and not isinstance(value, bool):
                most = MOST_LAYERS if name in _LAYERS else MOST
                copied[name] = whole(value, f"{self.label}: {name}", least=-MOST, most=most)
            else:
                copied[name] = value
        return {name: value for name, value in copied.items() if name not in _STORAGE}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep Transformers' and PyTorch's remarks about a configuration off the screen; errors are raised all the same."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)


@cache
def _defaults(config_class: Any) -> dict[str, Any]:
    try:
        with quiet():
            defaults: dict[str, Any] = config_class().to_dict()
    except Exception:
        return {}
    return defaults


def published_names() -> list[str]:
    """Return the names of the published configurations that ship with the course, in alphabetical order."""
    return sorted(path.stem for path in PUBLISHED_DIR.glob("*.json"))


def published_config(name: str) -> dict[str, Any]:
    """Return the configuration that ships under a published name, with the keys ``origin`` and ``basis``.

    Raises
    ------
    ValueError
        If no configuration has that name.
    """
    if name.lower() not in published_names():
        raise ValueError(f"name must be one of {', '.join(published_names())}, got {name!r}")
    return _read_json(PUBLISHED_DIR / f"{name.lower()}.json")


def _read_json(path: Path) -> dict[str, Any]:
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"model: {shown(str(path))} is not a regular file; it should be a model's config.json")
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a byte order mark
    except FileNotFoundError:
        raise FileNotFoundError(f"model: there is no configuration file at {shown(str(path))}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"model: {shown(str(path))} cannot be read as a configuration: {error}") from None
    if not text.strip():
        raise ValueError(f"model: {shown(str(path))} is empty; it should hold a model's config.json")
    try:
        values = json.loads(text)
    except RecursionError:
        raise ValueError(f"model: {shown(str(path))} is nested too deeply to be a configuration") from None
    except ValueError as error:  # not JSON, or a number of more digits than Python reads
        reason = str(error).split(";")[0]
        raise ValueError(f"model: {shown(str(path))} is not JSON that can be read ({reason})") from None
    if not isinstance(values, dict):
        raise ValueError(f"model: {shown(str(path))} should hold a JSON object, not a {type(values).__name__}")
    return values


def resolve(model: Any) -> Fields:
    """Find a model's configuration.

    Parameters
    ----------
    model : str, path, mapping or transformers.PretrainedConfig
        A published name or its repository's in any case ("octocoder", "bigcode/octocoder"), a config.json or a folder that holds one, its content as a
        dictionary, or a configuration object.

    Returns
    -------
    Fields
        The configuration, not yet completed.

    Raises
    ------
    FileNotFoundError
        If a path does not exist.
    ValueError
        If a name is unknown (close names are listed) or a file is not a regular one, empty, or not a JSON object.
    TypeError
        If `model` is something else.
    """
    if isinstance(model, Mapping):
        if not model:
            raise ValueError("model is an empty dictionary; it should hold the fields of a config.json")
        return Fields(model, "model")
    if isinstance(model, type):
        raise TypeError(f"model must be an instance of a configuration class, got the class {model.__name__} itself")
    if hasattr(model, "to_dict") and hasattr(model, "model_type"):
        return Fields(model, f"model ({type(model).__name__})")
    if not isinstance(model, str | os.PathLike):
        raise TypeError(
            "model must be a published name, a path to a config.json, a dictionary or a Transformers configuration, "
            f"got {type(model).__name__}"
        )
    if not os.fspath(model):
        raise ValueError("model must be a published name or a path to a config.json, got an empty text")
    names = published_names()
    path = Path(model)
    if isinstance(model, str) and not os.path.exists(path):
        model = next((name for name in names if published_config(name)["origin"].lower() == model.lower()), model)
    if isinstance(model, str) and model.lower() in names:
        return Fields(published_config(model), f"model {model.lower()!r}")
    if os.path.isdir(path):
        path = path / "config.json"
    if os.path.isfile(path) or path.suffix == ".json" or not isinstance(model, str) or "/" in model or os.sep in model:
        return Fields(_read_json(path), f"model {str(path)!r}")
    close = difflib.get_close_matches(str(model).lower(), names, n=3) or names
    raise ValueError(
        f"model {shown(model)} is neither a published name nor a path to a config.json; published names close to it: "
        f"{', '.join(close)}"
    )
