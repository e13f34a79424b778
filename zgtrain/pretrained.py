"""Where a pretrained model lies: a folder, a GGUF file, or the data of an installed package.

Never a hub's name: nothing here reaches for a network, and no package is imported to be looked into. transformers is
an optional dependency (``pip install 'zgstore[hf]'``) and is imported when it is first needed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

import zgstore


@dataclass(frozen=True, slots=True)
class ModelPlace:
    """Where a model lies: a folder, and the GGUF file in it if it is one."""

    folder: Path
    gguf_file: str | None

    @property
    def gguf(self) -> dict[str, str]:
        """The keyword that transformers wants for a GGUF file; nothing for a folder."""
        return {} if self.gguf_file is None else {"gguf_file": self.gguf_file}


def find_model(path: str) -> ModelPlace:
    """The place that ``path`` names.

    Args:
        path: A folder, a ``.gguf`` file, or ``package:NAME``: a package's folder, found without importing it.

    Raises:
        zgstore.Invalid: if there is no such package or file, or no single model in it.
    """
    place = _package_folder(path.removeprefix("package:")) if path.startswith("package:") else Path(path).absolute()
    if place.is_file() and place.suffix == ".gguf":
        return ModelPlace(place.parent, place.name)
    if (place / "config.json").is_file():
        return ModelPlace(place, None)
    files = sorted(each.name for each in place.glob("*.gguf")) if place.is_dir() else []
    if len(files) != 1:
        found = f"{len(files)} .gguf files" if files else "neither config.json nor a .gguf file"
        raise zgstore.Invalid(
            f"there is no model at {path!r}: {found} in {place}",
            hint="name a folder that save_pretrained wrote, one .gguf file, or package:NAME",
        )
    return ModelPlace(place, files[0])


def _package_folder(name: str) -> Path:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise zgstore.Invalid(f"the package {name!r} is not installed", hint=f"pip install {name.replace('_', '-')}")
    return Path(spec.submodule_search_locations[0])


def load_config(place: ModelPlace) -> Any:
    """The model's config: of its folder, or made from the GGUF file's metadata."""
    from transformers import AutoConfig  # noqa: PLC0415 — heavy, and optional

    config = AutoConfig.from_pretrained(place.folder, local_files_only=True, **place.gguf)
    config.use_cache = False  # one forward a batch: a cache of keys and values would be made and thrown away
    return config


def load_tokenizer(path: str) -> Any:
    """The tokenizer that lies beside a model, or in its GGUF file: a transformers ``PreTrainedTokenizerFast``."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: PLC0415 — heavy, and optional

    place = find_model(path)
    # For a GGUF file the general class asks for the model's config first, which takes seconds and decides nothing.
    kind = AutoTokenizer if place.gguf_file is None else PreTrainedTokenizerFast
    return kind.from_pretrained(place.folder, local_files_only=True, **place.gguf)


def save_tokenizer(path: str, folder: str | Path) -> None:
    """Save the tokenizer that lies beside a model, or in its GGUF file, into a folder; where there is none, nothing."""
    place = find_model(path)
    if place.gguf_file is not None or any(any(place.folder.glob(name)) for name in ("tokenizer*", "vocab.*")):
        load_tokenizer(path).save_pretrained(folder)


def dequantised(place: ModelPlace) -> dict[str, Any]:
    """The keyword that asks for a dense model where this version of transformers could keep a GGUF file's blocks."""
    import transformers  # noqa: PLC0415 — heavy, and optional

    config = getattr(transformers, "GgufConfig", None)
    return {} if place.gguf_file is None or config is None else {"quantization_config": config(dequantize=True)}


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Around a load: without progress bars (whoever called has one already), and reading a GGUF file once."""
    with _without_bars(), _gguf_read_once() if importlib.util.find_spec("gguf") else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    # transformers' own switch does not reach all of them.
    from tqdm.auto import tqdm  # noqa: PLC0415 — of transformers
    from transformers.utils import logging  # noqa: PLC0415 — heavy, and optional

    shown, begin = logging.is_progress_bar_enabled(), tqdm.__init__
    logging.disable_progress_bar()
    tqdm.__init__ = functools.partialmethod(begin, disable=True)
    try:
        yield
    finally:
        tqdm.__init__ = begin
        if shown:
            logging.enable_progress_bar()


@contextlib.contextmanager
def _gguf_read_once() -> Iterator[None]:
    # transformers reads all strings of the file for the config and again for the weights, and makes the table of
    # tensor names anew for every module: half of the time of a load (docs/LOG.md).
    import gguf  # noqa: PLC0415 — optional

    slow = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    for name, function in slow.items():
        setattr(gguf, name, functools.cache(function))
    try:
        yield
    finally:
        for name, function in slow.items():
            setattr(gguf, name, function)


def share(folder: Path) -> None:
    """Let a folder's files be read by whoever may read the folder: safetensors writes for its owner alone."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(folder.stat().st_mode & 0o666)


def read_weights(place: ModelPlace, names: Sequence[str]) -> dict[str, Tensor] | None:
    """Some tensors of a folder's safetensors files, and nothing else of them.

    A tied head is the embedding under another name; a base model's weights may lack the prefix of the whole.

    Returns:
        By name; None if they are not all there under these names, as of a GGUF file, whose blocks transformers unpacks
        all together, or of a class whose weights it converts as it loads them.
    """
    if place.gguf_file is not None:
        return None
    index, single = place.folder / "model.safetensors.index.json", place.folder / "model.safetensors"
    if index.is_file():
        places = {str(name): str(file) for name, file in json.loads(index.read_text("utf-8"))["weight_map"].items()}
    elif single.is_file():
        with safe_open(single, framework="pt") as file:
            places = dict.fromkeys(file.keys(), single.name)
    else:
        return None
    found = {name: next((each for each in (name, name.partition(".")[2]) if each in places), None) for name in names}
    if None in found.values():
        return None
    read: dict[str, Tensor] = {}
    for part in sorted({places[there] for there in found.values() if there is not None}):
        with safe_open(place.folder / part, framework="pt") as file:
            read.update(
                {name: file.get_tensor(there) for name, there in found.items() if there and places[there] == part}
            )
    return read
