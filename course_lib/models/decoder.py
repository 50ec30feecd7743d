"""A Llama-style decoder, small enough to read: any position encoding, any head layout, any attention backend, any cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from transformers import Cache, LlamaConfig, PreTrainedModel

from course_lib.attention import attention
from course_lib.attention.rules import Rules
from course_lib.attention.sdpa import sdpa_attention
from course_lib.kv_cache import CacheLayer
from course_lib.memory.units import whole
from course_lib.models.layout import forget_plans, is_single, lay_out, product
from course_lib.positions import (
    LearnedPositions,
    alibi_slopes,
    apply_rope,
    rope_cos_sin,
    rope_frequencies,
    sinusoidal_embedding,
)

POSITIONS = ("rope", "alibi", "sinusoidal", "learned", "none")
CONVERTIBLE = ("llama", "mistral", "qwen2", "qwen3")


class DecoderConfig(LlamaConfig):  # type: ignore[misc]
    """The architecture of a `DecoderLM`: Llama's in Transformers, and a choice of positions.

    Attributes
    ----------
    position : str
        ``"rope"`` (with ``rope_parameters``), ``"alibi"``, ``"sinusoidal"``, ``"learned"`` or ``"none"``.
    sliding_window : int, optional
        Keys that a query sees, itself included; all by default.
    qkv_bias, qk_norm : bool
        Whether projections of queries, keys and values add a bias (Qwen2, and Llama with ``attention_bias``), and whether queries and
        keys are normalised (Qwen3).
    """

    model_type = "course_decoder"

    position: str = "rope"
    sliding_window: int | None = None
    qkv_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.qkv_bias = self.qkv_bias or self.attention_bias
        if self.position not in POSITIONS:
            raise ValueError(f"position is {self.position!r}; accepted are {', '.join(POSITIONS)}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads}, which num_key_value_heads, {self.num_key_value_heads}, "
                "does not divide"
            )


class DecoderOutput(NamedTuple):
    """What a forward pass returns: logits ``[batch, length, vocab_size]``, and the cache it was given, now longer."""

    logits: torch.Tensor
    cache: Cache | None


class Placement(NamedTuple):
    """Where the tokens of one forward pass stand, worked out once for all layers.

    Where all coordinates of a head turn, `tables` holds cosines and signed sines for each, with an axis for heads; `turn` needs fewer
    steps then.
    """

    past: int
    cos_sin: tuple[torch.Tensor, torch.Tensor] | None
    slopes: torch.Tensor | None
    mask: torch.Tensor | None
    tables: tuple[torch.Tensor, torch.Tensor] | None = None

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        """Return queries or keys ``[batch, heads, length, head_dim]`` turned as `apply_rope` does."""
        if self.tables is None:
            return x if self.cos_sin is None else apply_rope(x, *self.cos_sin)
        cos, sin = self.tables
        return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


class RMSNorm(nn.RMSNorm):
    """PyTorch's, with fewer steps for a single token on a CPU, where each has a fixed cost."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if not is_single(hidden):
            return super().forward(hidden)
        row = hidden.reshape(-1)
        assert self.eps is not None
        return (hidden * self.weight).mul_((torch.dot(row, row).item() / len(row) + self.eps) ** -0.5)


class SelfAttention(nn.Module):
    """Causal attention with grouped heads."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.window, self.backend = layer, config.sliding_window, "auto"
        self.head_dim: int = config.head_dim
        self.rules = Rules(self.head_dim**-0.5, causal=True, sliding_window=self.window)
        queries, keys = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=config.qkv_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.attention_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, hidden: torch.Tensor, place: Placement, cache: Cache | None) -> torch.Tensor:
        batch, length, _ = hidden.shape
        # A single token's heads need not be exchanged with its length of one.
        heads = (batch, length, -1, self.head_dim) if length > 1 else (batch, -1, 1, self.head_dim)
        q, k, v = (part.view(heads) for part in product(hidden, self.q_proj, self.k_proj, self.v_proj))
        q, k = self.q_norm(q), self.k_norm(k)
        if length > 1:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        attended = self._attend(place.turn(q), place.turn(k), v, place, cache)
        if length > 1:
            attended = attended.transpose(1, 2)
        merged: torch.Tensor = product(attended.reshape(batch, length, -1), self.o_proj)[0]
        return merged

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, place: Placement, cache: Cache | None
    ) -> torch.Tensor:
        """Store keys and values, and let the queries attend to all that are stored."""
        length, offset, mask = q.shape[2], 0, place.mask
        if cache is not None:
            own: Any = cache.layers[self.layer] if self.layer < len(cache.layers) else None
            itself = self.backend == "auto" and isinstance(own, CacheLayer) and self.window in (None, own.window)
            if itself and mask is None:
                attended: torch.Tensor | None = own.attend(q, k, v, alibi_slopes=place.slopes)
                if attended is not None:
                    return attended
            _, offset = cache.get_mask_sizes(length, self.layer)
            k, v = cache.update(k, v, self.layer)
            # A static cache also returns the slots it has not filled; without them the last query stands at the last key.
            filled = place.past + length - offset
            if filled < k.shape[2]:
                k, v = k[:, :, :filled], v[:, :, :filled]
        if length == 1 and mask is None and place.slopes is None and self.backend == "auto":
            # What follows, without the checks, which would take a tenth of a single token's attention.
            return sdpa_attention(q, k, v, self.rules)
        return attention(
            q,
            k,
            v,
            causal=True,
            attention_mask=None if mask is None else mask[..., offset:],
            alibi_slopes=place.slopes,
            sliding_window=self.window,
            backend=self.backend,
        )


class SwiGLU(nn.Module):
    """The gated feed-forward network of Llama."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = product(hidden, self.gate_proj, self.up_proj)
        projected: torch.Tensor = product(functional.silu(gate) * up, self.down_proj)[0]
        return projected


class DecoderLayer(nn.Module):
    """Attention, then the feed-forward network, each on a normalised copy and added to the stream."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, hidden: torch.Tensor, place: Placement, cache: Cache | None) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), place, cache)
        added: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return added


class DecoderLM(nn.Module):
    """A causal language model.

    Parameters
    ----------
    config : DecoderConfig
        The architecture. Weights are drawn from the normal distribution of Llama's ``initializer_range``.

    Attributes
    ----------
    attention_backend : str
        The backend of `course_lib.attention.attention` in every layer, ``"auto"`` at first; may be set.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        #: Rotary frequencies and what they were computed for, where they do not depend on the length.
        self._rope: tuple[tuple[Any, ...], tuple[torch.Tensor, float]] | None = None
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.position == "learned":
            self.embed_positions = LearnedPositions(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.apply(self._draw)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def _draw(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""
        return self.embed_tokens.weight.dtype

    @property
    def attention_backend(self) -> str:
        return self._attentions()[0].backend

    @attention_backend.setter
    def attention_backend(self, backend: str) -> None:
        for layer in self._attentions():
            layer.backend = backend

    def _attentions(self) -> list[SelfAttention]:
        return [module for module in self.modules() if isinstance(module, SelfAttention)]

    def forward(
        self,
        input_ids: torch.Tensor,
        *,
        cache: Cache | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
    ) -> DecoderOutput:
        """Return the logits of the next token after each token.

        Parameters
        ----------
        input_ids : Tensor
            Integers ``[batch, length]``; with a cache, the tokens that it does not hold yet.
        cache : transformers.Cache, optional
            Keys and values of earlier tokens, which the call lengthens. Any of Transformers' or of `course_lib.kv_cache`.
        attention_mask : Tensor, optional
            ``[batch, past + length]``, 0 or False where a token is padding.
        position_ids : Tensor, optional
            ``[batch, length]`` or ``[length]``; by default tokens are counted, padding left out.
        logits_to_keep : int or Tensor
            How many last positions to compute logits for, 0 for all; or which, int64 ``[positions]``.

        Raises
        ------
        ValueError
            If shapes do not fit, if `logits_to_keep` is neither a tensor nor a whole number of at least 0, if the model has no position
            for a token, or if the rotary base would change under cached keys.
        """
        batch, length = input_ids.shape
        past = 0 if cache is None else int(cache.get_seq_length())
        if attention_mask is not None and attention_mask.shape != (batch, past + length):
            raise ValueError(
                f"attention_mask has shape {list(attention_mask.shape)}; [batch, past + length] = {[batch, past + length]} is needed"
            )
        if position_ids is None:
            position_ids = torch.arange(past, past + length, device=input_ids.device)
            if attention_mask is not None:
                position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, past:]
        hidden = self.embed_tokens(input_ids)
        if self.config.position == "learned":
            hidden = hidden + self.embed_positions(position_ids)
        elif self.config.position == "sinusoidal":
            # The paper raises the embeddings to the encoding's size.
            hidden = hidden * self.config.hidden_size**0.5
            hidden = hidden + sinusoidal_embedding(position_ids, self.config.hidden_size).to(hidden.dtype)
        place = self._place(past, position_ids, attention_mask)
        for layer in self.layers:
            hidden = layer(hidden, place, cache)
        kept: slice | torch.Tensor
        if isinstance(logits_to_keep, torch.Tensor):
            kept = logits_to_keep
        else:
            kept = slice(-whole(logits_to_keep, "logits_to_keep"), None)
        return DecoderOutput(product(self.norm(hidden[:, kept]), self.lm_head)[0], cache)

    def _place(self, past: int, position_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> Placement:
        """Work out what all layers share: angles or slopes, and the mask of padding where there is padding."""
        cos_sin = slopes = mask = tables = None
        if self.config.position == "rope":
            cos_sin = cos, sin = rope_cos_sin(position_ids, *self._frequencies(past, position_ids))
            if 2 * cos.shape[-1] == self.config.head_dim:
                tables = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
                if position_ids.ndim == 2:
                    tables = tables[0][:, None], tables[1][:, None]
        elif self.config.position == "alibi":
            slopes = alibi_slopes(self.config.num_attention_heads).to(self.device)
        if attention_mask is not None and not attention_mask.all():
            mask = attention_mask.bool()[:, None, None, :]
        return Placement(past, cos_sin, slopes, mask, tables)

    def _frequencies(self, past: int, position_ids: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Return the rotary frequencies, in float32 whatever the weights are, for sequences as long as the positions say."""
        config, parameters = self.config, self.config.rope_parameters
        key = (str(parameters), config.head_dim, config.max_position_embeddings, self.device)
        if self._rope is not None and self._rope[0] == key:
            return self._rope[1]
        depends = parameters.get("rope_type", "default") in ("dynamic", "longrope")
        seq_len = int(position_ids.max()) + 1 if depends and position_ids.numel() else None

        def at(length: int | None) -> tuple[torch.Tensor, float]:
            return rope_frequencies(
                config.head_dim,
                scaling=parameters,
                max_position_embeddings=config.max_position_embeddings,
                seq_len=length,
            )

        inv_freq, factor = at(seq_len)
        if depends and past and not torch.equal(inv_freq, at(int(position_ids.min()))[0]):
            raise ValueError(
                f"rope_type {parameters['rope_type']!r} turns keys otherwise at length {seq_len} than at the lengths when the cache "
                "was filled; run the whole sequence without a cache"
            )
        found = inv_freq.to(self.device), factor
        self._rope = None if depends else (key, found)
        return found

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> DecoderLM:
        forget_plans(self)  # which would keep the weights of before
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def optimize_for_decoding(self) -> DecoderLM:
        """Order the weights in memory so that single tokens are computed as fast as a CPU reads them; float32 on a CPU only.

        Parameters keep their shapes, values and sharing, and go on training; only their strides change. What is written can differ from
        before in the last digits, for sums are added in another order. `course_lib.models.load` calls this.

        Returns
        -------
        DecoderLM
            Itself.

        Notes
        -----
        A change of dtype or device, a copy, or loaded weights may undo the order; then all is as right and slower.
        """
        for module in self.modules():
            if isinstance(module, SelfAttention):
                lay_out(module.q_proj, module.k_proj, module.v_proj)
                lay_out(module.o_proj)
            elif isinstance(module, SwiGLU):
                lay_out(module.gate_proj, module.up_proj)
                lay_out(module.down_proj)
        lay_out(self.lm_head)
        return self

    @classmethod
    def from_transformers(cls, model: PreTrainedModel) -> DecoderLM:
        """Return a decoder with a Transformers model's weights (shared, not copied), dtype and device.

        Parameters
        ----------
        model : PreTrainedModel
            A causal language model of type llama, mistral, qwen2 or qwen3.

        Raises
        ------
        ValueError
            If the model is of another type, or has what this decoder has not, such as quantised weights.
        """
        theirs = model.config
        if theirs.model_type not in CONVERTIBLE:
            raise ValueError(f"model is of type {theirs.model_type!r}; accepted are {', '.join(CONVERTIBLE)}")
        layers = set(getattr(theirs, "layer_types", None) or [])
        if len(layers) > 1:
            raise ValueError(f"model mixes layers of types {', '.join(sorted(layers))}; one type for all is needed")
        if theirs.hidden_act != "silu":
            raise ValueError(f"model has hidden_act {theirs.hidden_act!r}; 'silu' is needed")
        known = DecoderConfig().to_dict().keys() - {
            "model_type",
            "architectures",
            "transformers_version",
            "layer_types",
        }
        config = DecoderConfig(**{name: value for name, value in theirs.to_dict().items() if name in known})
        windowed = theirs.model_type == "mistral" or layers == {"sliding_attention"}
        config.sliding_window = getattr(theirs, "sliding_window", None) if windowed else None
        config.qkv_bias |= theirs.model_type == "qwen2"
        config.qk_norm = theirs.model_type == "qwen3"
        with torch.device("meta"):
            decoder = cls(config)
        state = {name.removeprefix("model."): weight for name, weight in model.state_dict().items()}
        if config.tie_word_embeddings:
            state["lm_head.weight"] = state["embed_tokens.weight"]
        found, plain = ({name: one.shape for name, one in held.items()} for held in (state, decoder.state_dict()))
        other = [name for name in plain | found if plain.get(name) != found.get(name)]
        if other:
            raise ValueError(
                f"model has other weights than its configuration says, {other[0]} among them; one that is not quantised and has no "
                "adapters is needed"
            )
        decoder.load_state_dict(state, assign=True)
        if config.tie_word_embeddings:
            decoder.lm_head.weight = decoder.embed_tokens.weight
        return decoder.train(model.training)
