"""A decoder model cut into embedding, blocks of layers and interface, and put together again.

Every piece is the model's own class with the rest of it taken away, so that rotary embeddings, kinds of masks (full,
sliding), scaled logits and whatever else a class does are its own code, and its bits are the teacher's.

L layers of the teacher; N rows, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

import zgstore
from zgtrain.pretrained import ModelPlace, dequantised, load_config, loading, read_weights

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Partition:
    """Which of the teacher's layers each of the student's blocks has.

    Args:
        kept: For each block the teacher's layers that it is copied from, in their order.
    """

    kept: tuple[tuple[int, ...], ...]

    @property
    def layers(self) -> list[int]:
        """The student's layers: the teacher's index of each."""
        return [layer for block in self.kept for layer in block]

    def first(self, block: int) -> int:
        """Where a block's layers begin in the student."""
        return sum(len(each) for each in self.kept[:block])


def partition(depth: int, layers: Sequence[Sequence[int]], keep: Sequence[Sequence[int]] | None = None) -> Partition:
    """A partition, checked.

    Args:
        depth: L.
        layers: Half-open ranges ``[start, stop)``, one a block, that cover 0 to L without a gap.
        keep: For each block the layers of its range that it is made of; None: all of them.

    Raises:
        zgstore.Invalid: naming the first block that does not fit.
    """
    at = 0
    for number, each in enumerate(layers):
        if len(each) != 2 or each[0] != at or not each[0] < each[1] <= depth:
            raise zgstore.Invalid(
                f"block {number} has the layers {list(each)}, and begins at {at} of {depth}",
                hint="give [start, stop) for each block, one after the other: layers = [[0, 8], [8, 15], …]",
            )
        at = each[1]
    if at != depth:
        raise zgstore.Invalid(f"the blocks end at layer {at} of {depth}", hint="let the last one end there")
    if keep is not None and len(keep) != len(layers):
        raise zgstore.Invalid(f"keep is for {len(keep)} blocks of {len(layers)}", hint="list the layers of each block")
    kept = [tuple(range(*each)) for each in layers] if keep is None else [tuple(each) for each in keep]
    for number, (each, (start, stop)) in enumerate(zip(kept, layers, strict=True)):
        if not each or list(each) != sorted(set(each)) or not start <= each[0] <= each[-1] < stop:
            raise zgstore.Invalid(
                f"block {number} keeps the layers {list(each)} of [{start}, {stop})",
                hint="keep at least one, each once, in their order, and of the block's own range",
            )
    return Partition(tuple(kept))


# ---- models without weights, and their parts ----


@dataclass(frozen=True, slots=True)
class Anatomy:
    """Where the layers of a model are.

    Args:
        owner: The module whose forward runs them.
        path: Its name in the model.
        attribute: What it calls the list of layers.
    """

    owner: Any
    path: str
    attribute: str

    @property
    def layers(self) -> nn.ModuleList:
        """The layers, in their order."""
        found: nn.ModuleList = getattr(self.owner, self.attribute)
        return found

    def name(self, layer: int) -> str:
        """The prefix of a layer's parameters in the model."""
        return f"{self.path}.{self.attribute}.{layer}."


def dtype_of(name: str) -> torch.dtype:
    """A dtype by the name that a recipe gives it.

    Raises:
        zgstore.Invalid: for one that nothing computes in.
    """
    if name not in DTYPES:
        raise zgstore.Invalid(f"a teacher cannot compute in {name!r}", hint=f"one of {', '.join(DTYPES)}")
    return DTYPES[name]


def whole_model(place: ModelPlace, *, dtype: torch.dtype, attn_implementation: str) -> Any:
    """The model with its weights, as transformers loads it: a ``PreTrainedModel``.

    Raises:
        zgstore.Invalid: if weights are missing: transformers would draw them at random.
    """
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 — heavy, and optional

    with loading():
        model, said = AutoModelForCausalLM.from_pretrained(
            place.folder,
            config=load_config(place),
            dtype=dtype,
            attn_implementation=attn_implementation,
            local_files_only=True,
            output_loading_info=True,
            **place.gguf,
            **dequantised(place),
        )
    if missing := sorted(said["missing_keys"]):
        raise _missing(place, missing[0])
    return model


def _missing(place: ModelPlace, name: str) -> zgstore.Invalid:
    return zgstore.Invalid(
        f"the model in {place.folder} has no weights for {name!r}", hint="name a folder that save_pretrained wrote"
    )


def bare_model(config: Any, *, dtype: torch.dtype, attn_implementation: str) -> Any:
    """A model whose parameters take no memory and whose buffers are real."""
    from accelerate import init_empty_weights  # noqa: PLC0415 — comes with transformers
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 — heavy, and optional

    with _uninitialised(), init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attn_implementation)
    return model.eval()


def thinned(config: Any, kept: Sequence[int]) -> Any:
    """A config with some of the layers alone: their count, and what it lists layer by layer."""
    depth = config.num_hidden_layers
    thin = copy.deepcopy(config)
    for name, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == depth and ("layer" in name or "type" in name):
            setattr(thin, name, [value[layer] for layer in kept])
    thin.num_hidden_layers = len(kept)
    return thin


def anatomy(model: Any) -> Anatomy:
    """Find the layers of a decoder.

    Raises:
        zgstore.Invalid: if it has no one list of them.
    """
    depth = model.config.num_hidden_layers
    for path, owner in model.named_modules():
        for attribute, child in owner.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == depth:
                return Anatomy(owner, path, attribute)
    raise zgstore.Invalid(
        f"{type(model).__name__} has no list of its {depth} layers",
        hint='write block and assemble for this class yourself: [student] block = "my_project:block"',
    )


@contextlib.contextmanager
def _uninitialised() -> Iterator[None]:
    """Parameters are not drawn: they are replaced at once."""
    names = [name for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")]
    kept = {name: getattr(nn.init, name) for name in names}
    try:
        for name in names:
            setattr(nn.init, name, lambda tensor, *_, **__: tensor)
        yield
    finally:
        for name, function in kept.items():
            setattr(nn.init, name, function)


class _NoPositions(nn.Module):
    """In place of learned positions, which the stored boundary has in it already: −0, which changes no number."""

    def forward(self, *_: Any, **__: Any) -> Tensor:
        return torch.tensor(-0.0)


def _without_ends(parts: Anatomy, *, embedding: nn.Module) -> None:
    """Take from the owner of the layers whatever is not a layer and has parameters, or drops out."""
    for name, child in list(parts.owner.named_children()):
        if child is embedding:
            setattr(parts.owner, name, None)
        elif isinstance(child, nn.Embedding):
            setattr(parts.owner, name, _NoPositions())
        elif name != parts.attribute and (isinstance(child, nn.Dropout) or any(True for _ in child.parameters())):
            setattr(parts.owner, name, nn.Identity())


@torch.no_grad()
def _see_transparent(parts: Anatomy, *, width: int) -> None:
    """See that without its layers the forward gives back what it is given, bit for bit."""
    layers, config = parts.layers, parts.owner.config
    setattr(parts.owner, parts.attribute, nn.ModuleList())
    parts.owner.config = thinned(config, [])
    try:
        given = torch.linspace(-1.0, 1.0, 2 * 3 * width).reshape(2, 3, width)
        back = _hidden(parts.owner, given, torch.ones(2, 3, dtype=torch.int64), torch.arange(3).expand(2, 3))
    except (RuntimeError, TypeError, NotImplementedError, AttributeError) as error:
        raise _opaque(parts.owner, str(error).split("\n")[0]) from error
    finally:
        setattr(parts.owner, parts.attribute, layers)
        parts.owner.config = config
    if not torch.equal(given, back):
        raise _opaque(parts.owner, "it changes states before or after its layers")


def _opaque(owner: nn.Module, why: str) -> zgstore.Invalid:
    return zgstore.Invalid(
        f"the layers of {type(owner).__name__} cannot be run apart: {why}",
        hint='write block and assemble for this class yourself: [student] block = "my_project:block"',
    )


def _hidden(decoder: Any, hidden: Tensor, mask: Tensor | None, positions: Tensor | None) -> Tensor:
    said: Tensor = decoder(
        inputs_embeds=hidden, attention_mask=mask, position_ids=positions, use_cache=False
    ).last_hidden_state
    return said


# ---- the pieces ----


class Block(nn.Module):
    """Some layers of a decoder, with their own rotary embedding and masks.

    Args:
        decoder: The class that runs them, without embedding and norm.
    """

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, hidden: Tensor, mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """Boundary b → boundary b + 1.

        Args:
            hidden: ``[N, T, D]``.
            mask: ``[N, T]``, true or 1 where a token is real; None: everywhere.
            positions: int64 ``[N, T]``; None: counted from 0.
        """
        return _hidden(self.decoder, hidden, None if mask is None else mask.to(torch.int64), positions)


class Interface(nn.Module):
    """The final norm and the head: boundary B → logits. Frozen.

    Args:
        model: The model's class without embedding and layers.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.requires_grad_(requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """``[N, T, D]`` → ``[N, T, V]``."""
        logits: Tensor = self.model(inputs_embeds=hidden, use_cache=False).logits
        return logits


class Embedding(nn.Module):
    """Ids and positions → boundary 0. Frozen.

    Args:
        decoder: The class that runs the layers, without layers and norm.
    """

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.decoder = decoder
        self.requires_grad_(requires_grad=False)

    def forward(self, input_ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """int64 ``[N, T]`` → ``[N, T, D]``."""
        said: Tensor = self.decoder(input_ids=input_ids, position_ids=positions, use_cache=False).last_hidden_state
        return said


def cut_block(model: Any, kept: Partition, block: int) -> tuple[Block, dict[str, str]]:
    """One block of a bare student, and for each of its tensors the name that the teacher's weights have for it."""
    parts = anatomy(model)
    first, mine = kept.first(block), kept.kept[block]
    _without_ends(parts, embedding=model.get_input_embeddings())
    _see_transparent(parts, width=model.config.hidden_size)
    config, owner = model.config, parts.owner
    setattr(owner, parts.attribute, parts.layers[first : first + len(mine)])
    owner.config = thinned(config, range(first, first + len(mine)))
    named = {
        f"decoder.{parts.attribute}.{at}.{name}": parts.name(layer) + name
        for at, layer in enumerate(mine)
        for name in parts.layers[at].state_dict()
    }
    return Block(owner), named


def cut_interface(model: Any) -> tuple[Interface, dict[str, str]]:
    """The interface of a bare model, and where the teacher's weights have its tensors."""
    parts = _without_layers(model)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    where = {f"model.{_path(model, head)}.weight": f"{_path(model, embedding)}.weight"} if _is_tied(model) else {}
    for name, child in list(parts.owner.named_children()):
        if child is embedding:
            setattr(parts.owner, name, None)
        elif isinstance(child, nn.Embedding):
            setattr(parts.owner, name, _NoPositions())
    if where:
        head.weight = nn.Parameter(torch.empty_like(head.weight))  # its own: the embedding is gone
    return Interface(model), {f"model.{name}": name for name in model.state_dict()} | where


def cut_embedding(model: Any) -> tuple[Embedding, dict[str, str]]:
    """The embedding of a bare model, and where the teacher's weights have its tensors."""
    parts = _without_layers(model)
    for name, child in list(parts.owner.named_children()):
        if not isinstance(child, nn.Embedding) and any(True for _ in child.parameters()):
            setattr(parts.owner, name, nn.Identity())
    return Embedding(parts.owner), {f"decoder.{name}": f"{parts.path}.{name}" for name in parts.owner.state_dict()}


def _without_layers(model: Any) -> Anatomy:
    parts = anatomy(model)
    setattr(parts.owner, parts.attribute, nn.ModuleList())
    parts.owner.config = thinned(model.config, [])
    return parts


def _path(model: Any, part: nn.Module) -> str:
    path: str = next(name for name, module in model.named_modules() if module is part)
    return path


def _is_tied(model: Any) -> bool:
    return bool(model.config.tie_word_embeddings) and model.get_output_embeddings() is not None


def join(model: Any, blocks: Sequence[nn.Module], kept: Partition) -> list[str]:
    """Put the blocks' layers into a bare student, sharing their memory.

    Returns:
        The names that have no weights yet: embedding, norm, head.

    Raises:
        zgstore.Invalid: if the blocks are not those of the partition.
    """
    parts = anatomy(model)
    if len(blocks) != len(kept.kept):
        raise zgstore.Invalid(f"{len(blocks)} blocks for {len(kept.kept)} of the partition", hint="give all of them")
    joined: dict[str, Tensor] = {}
    for number, block in enumerate(blocks):
        held = getattr(getattr(block, "decoder", None), parts.attribute, None)
        if not isinstance(block, Block) or held is None or len(held) != len(kept.kept[number]):
            raise zgstore.Invalid(
                f"block {number} is not the {len(kept.kept[number])} layers that the partition gives it",
                hint="assemble what `zgtrain.causal_lm:block` made with the same args",
            )
        for at, layer in enumerate(held):
            named = parts.name(kept.first(number) + at)
            joined.update({named + name: tensor.detach() for name, tensor in layer.state_dict().items()})
    names = list(model.state_dict())
    put(model, joined, strict=False)
    tied = f"{_path(model, model.get_output_embeddings())}.weight" if _is_tied(model) else ""
    return [name for name in names if name not in joined and name != tied]


def put(module: nn.Module, tensors: Mapping[str, Tensor], *, strict: bool = True) -> None:
    """Give a bare module its tensors, without a copy.

    Raises:
        zgstore.Invalid: if they are not of its shapes.
    """
    try:
        module.load_state_dict(tensors, strict=strict, assign=True)
    except RuntimeError as error:
        said = " ".join(str(error).split())[:300]
        raise zgstore.Invalid(
            f"the model's weights do not fit its config: {said}", hint="name a folder that save_pretrained wrote"
        ) from error


def fill(module: nn.Module, named: Mapping[str, str], place: ModelPlace, *, dtype: torch.dtype, attn: str) -> None:
    """Give a bare piece its own weights: from a folder of safetensors these alone, else the whole model's are read.

    Args:
        module: The piece.
        named: Its tensor → what the teacher's weights call it.
        place: Where those lie.
        dtype: What it computes in.
        attn: The attention of a model that is loaded whole.
    """
    read = read_weights(place, list(named.values()))
    if read is None:
        whole = whole_model(place, dtype=dtype, attn_implementation=attn).state_dict()
        read = {name: whole[name] for name in named.values() if name in whole}
        del whole
    put(module, {mine: _cast(read[theirs], dtype) for mine, theirs in named.items() if theirs in read}, strict=False)
    left = [name for name, tensor in module.state_dict().items() if tensor.is_meta and name in named]
    if left:
        raise _missing(place, named[left[0]])


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
