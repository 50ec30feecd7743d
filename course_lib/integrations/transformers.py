"""Our attention under Transformers' models: after `register`, they take ``attn_implementation="course"``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from course_lib.attention import attention, attention_varlen
from course_lib.attention.backends import RUNNERS

# Neither "flash" nor "sdpa" may be part of the name: Transformers treats such names as its own.
NAME = "course"
OLDEST = (5, 17)


def register(backend: str = "auto") -> None:
    """Make ``attn_implementation="course"`` known to Transformers.

    It is then accepted by ``from_pretrained``, ``from_config`` and ``model.set_attn_implementation``. Calling it again changes
    the backend, also for models that are already there.

    Parameters
    ----------
    backend : str
        What every attention call is given, see :func:`course_lib.attention.attention`.

    Raises
    ------
    ImportError
        If Transformers is missing, or older than 5.17.
    ValueError
        If the backend is unknown.

    Notes
    -----
    A model's forward raises ValueError where it asks for what our attention does not have: dropout of attention weights, the
    weights themselves, or a selection of blocks; and where the model computes attention itself, whatever it is told.
    Chapter 05 runs it.
    """
    if backend not in ("auto", *RUNNERS):
        raise ValueError(f"backend is {backend!r}; accepted are auto, {', '.join(RUNNERS)}")
    needed = f"attn_implementation={NAME!r} needs transformers {OLDEST[0]}.{OLDEST[1]} or newer"
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"{needed}, which is not installed here") from error
    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < OLDEST:
        raise ImportError(f"{needed}, found {transformers.__version__}")
    transformers.AttentionInterface.register(NAME, partial(_attend, backend=backend))
    transformers.AttentionMaskInterface.register(NAME, _mask)  # without it, padding would be dropped in silence


class _CausalMask(torch.Tensor):
    """A mask that causality, a window and a number of keys explain: built only if someone looks into it.

    Models may slice, combine or concatenate masks, which builds it; our attention takes the explanation. Its own data is a single
    False, so that code which slips past sees nothing, rather than a little too much.

    Attributes
    ----------
    keys : int
        Later keys, the empty places of a static cache, are hidden; the last query stands at the last of these.
    window : int or None
        Of those, each query sees the nearest ones.
    build : Callable
        Returns the mask, boolean ``[batch, 1, query_len, kv_len]``.
    """

    keys: int
    window: int | None
    build: Callable[[], torch.Tensor]

    @classmethod
    def explained(
        cls, shape: Any, device: Any, keys: int, window: int | None, build: Callable[[], torch.Tensor]
    ) -> _CausalMask:
        mask = torch.zeros((), dtype=torch.bool, device=device).expand(shape).as_subclass(cls)
        mask.keys, mask.window, mask.build = keys, window, cache(build)
        return mask

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        given = (*args[1:], *kwargs.values())
        if func is torch.Tensor.to and not any(isinstance(x, (torch.dtype, torch.Tensor)) for x in given):
            mask, rest = args[0], args[1:]  # a model spread over devices moves its masks
            device = torch.empty(0, device=mask.device).to(*rest, **kwargs).device
            return cls.explained(mask.shape, device, mask.keys, mask.window, lambda: mask.build().to(*rest, **kwargs))
        args, kwargs = tree_map_only(cls, lambda mask: mask.build(), (args, kwargs))
        return func(*args, **kwargs)


_TENSOR: Any = torch.Tensor
_METADATA = {_TENSOR.size, _TENSOR.dim, _TENSOR.stride} | {
    getattr(_TENSOR, name).__get__ for name in ("shape", "ndim", "dtype", "device", "layout", "requires_grad")
}


def _mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **options: Any,
) -> Any:
    """Return a mask for attention, boolean and True where seen; None only where Transformers' own function returns it.

    Parameters
    ----------
    batch_size, q_length, kv_length : int
        Its sizes.
    q_offset, kv_offset : int
        Positions of the first query and key. With a static cache, there are keys beyond the last query's position.
    mask_function : Callable
        Tells of indices of batch, head, query and key whether the key is seen.
    attention_mask : Tensor, optional
        ``[batch, positions]``, False at padding, and taken as False beyond its end.
    local_size : int, optional
        The size of a window or of chunks.
    allow_is_causal_skip : bool
        Whether ``mask_function`` is plainly causal, within ``local_size`` if there is one.
    """
    from transformers.masking_utils import sdpa_mask

    _refuse_own_attention(options.get("config"))
    build: Callable[..., Any] = partial(
        sdpa_mask,
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        **options,
    )
    if torch.compiler.is_compiling():  # offsets and padding are unknown while tracing
        return build(allow_is_causal_skip=allow_is_causal_skip)
    build = partial(build, allow_is_causal_skip=False)
    end = int(q_offset) + q_length
    if not allow_is_causal_skip or not q_length <= end - kv_offset <= kv_length:
        return build()
    seen = None if attention_mask is None else attention_mask[:, kv_offset:end]
    if seen is not None and (seen.shape[1] < end - kv_offset or not seen.all()):
        return build()
    window = None
    if local_size is not None and end > local_size:
        if not _is_window(mask_function, local_size):
            return build()
        window = local_size if end - kv_offset > local_size else None
    device = options.get("device", "cpu")
    return _CausalMask.explained((batch_size, 1, q_length, kv_length), device, end - kv_offset, window, build)


def _is_window(mask_function: Callable[..., torch.Tensor], size: int) -> bool:
    """Tell a window from chunks: at two queries in a row, the last key that is seen is ``size - 1`` back."""
    queries = torch.tensor([[size], [size + 1]])
    seen = mask_function(torch.tensor(0), torch.tensor(0), queries, queries - size + torch.arange(2))
    return seen.tolist() == [[False, True], [False, True]]


def _refuse_own_attention(config: Any) -> None:
    """Raise for a model that takes a mask from here but attention from itself, which adds masks to scores (Bloom, MPT)."""
    kind = type(config)
    modeling = sys.modules.get(kind.__module__.replace(".configuration_", ".modeling_"))
    if modeling and modeling.__name__ != kind.__module__ and not hasattr(modeling, "ALL_ATTENTION_FUNCTIONS"):
        raise ValueError(
            f"attn_implementation is {NAME!r}, but the model of {kind.__name__} computes attention itself; 'eager' is needed"
        )


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    backend: str,
    is_causal: bool | None = None,
    softcap: float | None = None,
    position_bias: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    block_indices: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    output_attentions: bool = False,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Run an attention layer of Transformers.

    A ``sliding_window`` among the unused arguments says nothing that the mask does not say too, and some layers give none.

    Parameters
    ----------
    module : Module
        The layer; its ``is_causal`` counts where there is neither mask nor `is_causal`.
    query, key, value : Tensor
        ``[batch, heads, length, head_dim]``.
    attention_mask : Tensor, optional
        What `_mask` returned, or what the caller of the model gave: boolean or additive, four axes.
    scaling, softcap : float, optional
        Factor on the dot products, and the bound of scores.
    position_bias : Tensor, optional
        Added to the scores, ``[1 or batch, heads, query_len, kv_len]``.
    s_aux, sinks : Tensor, optional
        One more score that takes weight and gives no value: ``[heads]``, or ``[batch, heads, query_len, 1]``.
    indices : Tensor, optional
        The only keys that a query sees, ``[batch, query_len, chosen]``.
    cu_seq_lens_q, cu_seq_lens_k : Tensor, optional
        Cumulative lengths of packed sequences.

    Returns
    -------
    output : Tensor
        ``[batch, query_len, heads, value_dim]``.
    weights : None
    """
    refused = {
        "dropout": dropout or None,
        "output_attentions": output_attentions or None,
        "block_indices": block_indices,
    }
    for name, given in refused.items():
        if given is not None:
            raise ValueError(f"{name} is {given!r:.60}, which attn_implementation={NAME!r} does not have; 'eager' does")
    if torch.is_autocast_enabled(query.device.type) and query.dtype != torch.float64:
        query, key, value = (x.to(torch.get_autocast_dtype(x.device.type)) for x in (query, key, value))
    query_len, mask, window, causal = query.shape[2], attention_mask, None, False
    if isinstance(mask, _CausalMask) and mask.shape[2:] == (query_len, key.shape[2]):
        causal, window, keys, mask = True, mask.window, mask.keys, None
        key, value = key[:, :, :keys], value[:, :, :keys]
    elif mask is None and query_len > 1:
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        if causal:  # here Transformers means that the first query stands at the first key
            key, value = key[:, :, :query_len], value[:, :, :query_len]
    if indices is not None:
        chosen = torch.zeros(query.shape[0], query_len, key.shape[2], dtype=torch.bool, device=query.device)
        mask = _both(mask, chosen.scatter_(-1, indices.long(), True)[:, None])
    if position_bias is not None:
        mask = _both(mask, position_bias[..., : key.shape[2]])

    rules: dict[str, Any] = {
        "causal": causal,
        "scale": scaling,
        "sliding_window": window,
        "softcap": softcap,
        "backend": backend,
    }
    run: Callable[..., Any] = partial(attention, attention_mask=mask, **rules)
    if mask is None and cu_seq_lens_q is not None and len(cu_seq_lens_q) > 2:
        run = partial(_packed, cu_seqlens_q=cu_seq_lens_q, cu_seqlens_k=cu_seq_lens_k, **rules)
    sink = sinks[..., 0] if sinks is not None else None if s_aux is None else s_aux[:, None]
    if sink is None:
        output = run(query, key, value)
    else:
        output, lse = run(query, key, value, return_lse=True)
        # exp(lse) / (exp(lse) + exp(sink)): what is left of the weights when the sink has its share
        output = (output * torch.sigmoid(lse - sink)[..., None]).to(value.dtype)
    return output.transpose(1, 2).contiguous(), None


def _both(mask: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """Return one mask for two, of which each may be boolean or additive."""
    if mask is None or (mask.dtype == other.dtype == torch.bool):
        return other if mask is None else mask & other
    if torch.bool in (mask.dtype, other.dtype):
        seen, added = (mask, other) if mask.dtype == torch.bool else (other, mask)
        return torch.where(seen, added, -torch.inf)
    return mask + other


def _packed(*tensors: torch.Tensor, return_lse: bool = False, **rules: Any) -> Any:
    """Run attention over sequences packed in a batch of one; shapes as for :func:`course_lib.attention.attention`."""
    result: Any = attention_varlen(*(x[0].transpose(0, 1) for x in tensors), return_lse=return_lse, **rules)
    return [x.transpose(0, 1)[None] for x in result] if return_lse else result.transpose(0, 1)[None]
