"""Weights of foreign checkpoints: opened without running code, taken by name and shape, put together as our model."""

import math
import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import GenerationConfig
from transformers.initialization import no_init_weights

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.convert import file_of, write_card
from vanilla_transformer.convert.vocabularies import Vocabularies
from vanilla_transformer.hub import use_section
from vanilla_transformer.modeling_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
    sinusoidal_encoding,
)


# The output bias of a word that only the source side has: no probability, and no infinite smoothed loss.
NEVER = -1e4
# What a single number of numpy, such as the best score, names in a checkpoint.
NUMPY_NUMBERS = (
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray.scalar",
    "numpy.dtype",
    "numpy.dtypes.Float64DType",
)
# Tokens to which a tokenizer cuts where the original has computed positions and so no limit of its own.
MODEL_MAX_LENGTH = 1024


class StandIn:
    """In the place of an object that a checkpoint holds beside its weights: keeps what was stored and does nothing."""

    def __init__(self, *arguments: Any, **named: Any):
        self.__dict__.update(named)
        self.__dict__["_arguments"] = arguments

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"_state": state})


def load_checkpoint(path: str, stand_ins: Iterable[str] = ()) -> Any:
    """What a file of safetensors, or one that `torch.save` wrote, holds; no code in it runs.

    Args:
        path: The file.
        stand_ins: Full names of classes and functions that may be named in it; a `StandIn` is in their place.

    Raises:
        ValueError: The file is broken, or names other classes or functions; on one line.
    """
    try:
        if path.endswith(".safetensors"):
            return load_file(path)
        allowed = [(StandIn, each) for each in stand_ins]
        with torch.serialization.safe_globals(allowed) if allowed else nullcontext():  # type: ignore[arg-type]
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a broken or hostile file can end in any
        if isinstance(error, OSError) and error.filename is not None:  # no permission to read it
            raise
        raise ValueError(f"the checkpoint {path} cannot be used: {_reason(error)}.") from error


def _reason(error: Exception) -> str:
    """Why a file cannot be opened, in our words: those of torch advise to open it with its code."""
    text = str(error)
    named = re.search(r"(?:Unsupported|Trying to load unsupported|Found) global:?\s+(?:global\s+)?(\S+)", text, re.I)
    if isinstance(error, pickle.UnpicklingError) and named:
        return f"it would have to call {named[1]}, and nothing in a checkpoint is run"
    if "TorchScript" in text:
        return "it is a TorchScript archive; save the state dict of its model with torch.save"
    if isinstance(error, SafetensorError):
        return f"it is no file of safetensors ({text})"
    return f"it is cut off, or not what torch.save writes of tensors and plain values ({type(error).__name__})"


class Weights:
    """The tensors of a checkpoint by name; knows which were taken.

    Args:
        tensors: What the file has where a state dict is expected.
        where: What errors call the checkpoint.

    Raises:
        ValueError: That is no state dict.
    """

    def __init__(self, tensors: Any, where: str):
        if not isinstance(tensors, Mapping) or not tensors:
            raise ValueError(f"{where} holds no state dict, but {_kind(tensors)}.")
        for name, tensor in tensors.items():
            if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
                raise ValueError(f"{where} holds no state dict: its entry {name!r} is {_kind(tensor)}.")
        self.where = where
        self.tensors: Mapping[str, torch.Tensor] = tensors
        self.taken: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def take(self, name: str, *shape: int | None) -> torch.Tensor:
        """A weight in float32, or in float64 where it is so; half precision is widened, for positions are exacter.

        Args:
            name: In the checkpoint.
            shape: What it must be; None for a size that may be any.

        Raises:
            ValueError: There is none, or it has another shape.
        """
        if name not in self.tensors:
            raise ValueError(f"{self.where} lacks the weight {name}.")
        tensor = self.tensors[name]
        self.taken.add(name)
        fits = tensor.ndim == len(shape) and all(
            wanted in (None, size) for wanted, size in zip(shape, tensor.shape, strict=True)
        )
        if shape and not fits:
            wanted_text = ", ".join("any" if each is None else str(each) for each in shape)
            raise ValueError(
                f"{self.where}: the weight {name} has the shape {tuple(tensor.shape)}, expected ({wanted_text})."
            )
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized or tensor.is_nested:
            raise ValueError(
                f"{self.where}: the weight {name} is no plain tensor, but {tensor.layout}, {tensor.dtype}."
            )
        if tensor.numel() == 0:
            raise ValueError(f"{self.where}: the weight {name} is empty, of the shape {tuple(tensor.shape)}.")
        if not tensor.is_floating_point():
            raise ValueError(f"{self.where}: the weight {name} is of {tensor.dtype}, expected floating-point numbers.")
        return tensor.detach().to(torch.float64 if tensor.dtype == torch.float64 else torch.float32)

    def leave(self, *names: str) -> None:
        """Marks names that no result depends on."""
        self.taken.update(names)

    def count(self, pattern: str) -> int:
        """How many layers there are: the numbers in `pattern`, of which group 1 is one, from 0 without a gap.

        Raises:
            ValueError: There are none, or one is missing.
        """
        numbers = {int(found[1]) for name in self.tensors if (found := re.match(pattern, name))}
        if not numbers or numbers != set(range(len(numbers))):
            found_text = ", ".join(map(str, sorted(numbers)[:20])) or "none"
            raise ValueError(f"{self.where}: expected layers from 0 on under {pattern}, found {found_text}.")
        return len(numbers)

    def check_nothing_left(self, hint: str = "") -> None:
        """Raises ValueError where weights are left that this package's model has no place for."""
        left = [name for name in self.tensors if name not in self.taken]
        if left:
            raise ValueError(
                f"{self.where} has {len(left)} weights that this package's model has no place for, such as "
                f"{', '.join(left[:3])}{hint or '; without them it would compute something else'}."
            )


def _kind(value: Any) -> str:
    """What a value in a checkpoint is, in a few words."""
    if isinstance(value, Mapping):
        return f"a dictionary with {', '.join(map(repr, list(value)[:5]))}" if value else "an empty dictionary"
    return f"an object of type {type(value).__name__}"


@dataclass
class Original:
    """What all translation models of this architecture have, in our names for the layers.

    Attributes:
        layers: Weights of the stacks: `model.encoder.layers.0.self_attention.q_proj.weight` and so on.
        source_embedding, target_embedding: Shape `(words of that side, d_model)`.
        output: Shape `(words of the target, d_model)`.
        output_bias: Shape `(words of the target,)`, or None.
        scale: What the original multiplies its embeddings by.
        vocabularies: The words.
        settings: Fields of the configuration that the weights do not tell.
        source_positions, target_positions: A table of shape `(positions, d_model)`; None for the paper's sinusoids.
        most_tokens: Tokens of the longest source that the original takes; None for any.
        generation: Settings of generation; the empty dictionary for the paper's.
        differences: From the original, a line each, as far as known.
    """

    layers: dict[str, torch.Tensor]
    source_embedding: torch.Tensor
    target_embedding: torch.Tensor
    output: torch.Tensor
    output_bias: torch.Tensor | None
    scale: float
    vocabularies: Vocabularies
    settings: dict[str, Any]
    source_positions: torch.Tensor | None = None
    target_positions: torch.Tensor | None = None
    most_tokens: int | None = None
    generation: dict[str, Any] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)


def check_heads(num_heads: Any, d_model: int) -> int:
    """`num_heads`, which must divide d_model; the weights' shapes do not tell it.

    Raises:
        ValueError: It does not.
    """
    if isinstance(num_heads, bool) or not isinstance(num_heads, int) or num_heads < 1 or d_model % num_heads:
        raise ValueError(
            f"num_heads must be a whole number that divides d_model={d_model}, got num_heads={num_heads!r}."
        )
    return num_heads


def is_paper_sinusoids(table: torch.Tensor) -> tuple[bool, float, int]:
    """Whether a table, shape `(positions, d_model)`, is the paper's section 3.5 up to rounding of its angles.

    Returns:
        Whether it is, the largest difference, and the position where that is.
    """
    positions = torch.arange(table.shape[0])
    difference = (table.double() - sinusoidal_encoding(positions, table.shape[1], torch.float64)).abs().amax(dim=1)
    # An angle made in single precision: some roundings, each relative to the angle, which the position bounds.
    is_rounding = bool((difference <= 16 * torch.finfo(torch.float32).eps * (positions + 1)).all())
    worst = int(difference.nan_to_num(nan=math.inf).argmax())
    return is_rounding, float(difference[worst]), worst


def add_stored_positions(original: Original, weights: Weights, source: str | None, target: str | None) -> None:
    """Adds the tables of positions that a state dict holds, and says where they are computed in their place.

    Args:
        original: What to add them to.
        weights: The state dict.
        source: Name of the source's table, of shape `(positions, d_model)` with sizes of 1 anywhere; None where the
            original computes the paper's sinusoids.
        target: The same of the target.

    Raises:
        ValueError: A table has another shape.
    """
    d_model = original.source_embedding.shape[1]
    tables: dict[str | None, torch.Tensor | None] = {None: None}
    for name in dict.fromkeys((source, target)):
        if name is None:
            continue
        table = weights.take(name).squeeze()
        if table.ndim != 2 or table.shape[1] != d_model:
            raise ValueError(
                f"the table of positions {name} has the shape {tuple(weights.tensors[name].shape)}, expected "
                f"(positions, d_model={d_model}) and sizes of 1."
            )
        is_sinusoids, difference, position = is_paper_sinusoids(table)
        tables[name] = None if is_sinusoids else table
        if is_sinusoids:
            original.most_tokens = min(table.shape[0], original.most_tokens or table.shape[0])
            original.differences.append(
                f"the table {name} of {table.shape[0]} sinusoids is computed here, for any length; the largest "
                f"difference is {difference:.1e}, at position {position}, rounding in the original"
            )
    original.source_positions, original.target_positions = tables[source], tables[target]


def model_of(original: Original) -> VanillaTransformerForConditionalGeneration:
    """The same model as one of this package: the same logits of the target's words, up to rounding.

    `original.differences` grows by what is different here.

    Raises:
        ValueError: Sizes that do not fit together, or a value that the configuration refuses.
    """
    words = original.vocabularies
    words.check()
    for side, rows in (
        ("source", original.source_embedding.shape[0]),
        ("target", original.target_embedding.shape[0]),
        ("target", original.output.shape[0]),
    ):
        if rows != len(getattr(words, side)):
            raise ValueError(
                f"the weights are of {rows} {side} words, but the {side} vocabulary has {len(getattr(words, side))}."
            )
    d_model = original.source_embedding.shape[1]
    is_one_vocabulary = list(words.source) == list(words.target)
    is_one_matrix = (
        is_one_vocabulary
        and torch.equal(original.source_embedding, original.target_embedding)
        and torch.equal(original.source_embedding, original.output)
    )
    is_scaled = math.isclose(original.scale, math.sqrt(d_model), rel_tol=1e-9)
    tables = original.source_positions, original.target_positions
    lengths = [table.shape[0] for table in tables if table is not None]
    config = VanillaTransformerConfig(
        vocab_size=len(words.merged),
        d_model=d_model,
        position_embedding="learned" if lengths else "sinusoidal",
        max_position_embeddings=min(lengths) if lengths else original.most_tokens or MODEL_MAX_LENGTH,
        tie_word_embeddings=is_one_matrix and is_scaled,
        output_bias=original.output_bias is not None or not is_one_vocabulary,
        bos_token_id=words.ids[words.start if words.bos is None else words.bos],
        pad_token_id=words.ids[words.padding],
        eos_token_id=words.ids[words.end],
        decoder_start_token_id=words.ids[words.start],
        **original.settings,
    )
    factor = 1.0 if is_scaled else original.scale / math.sqrt(d_model)
    state = dict(original.layers)
    state["model.encoder.embed_tokens.weight"] = words.spread(original.source_embedding, "source") * factor
    state["model.decoder.embed_tokens.weight"] = words.spread(original.target_embedding, "target") * factor
    state["lm_head.weight"] = words.spread(original.output, "target", unknown=False)
    if config.output_bias:
        bias = original.output_bias
        bias = original.output.new_zeros(original.output.shape[0]) if bias is None else bias
        state["lm_head.bias"] = words.spread(bias, "target", unknown=False, fill=NEVER)
    if lengths:
        number = config.max_position_embeddings
        for stack, table in zip(("encoder", "decoder"), tables, strict=True):
            whole = sinusoidal_encoding(torch.arange(number), d_model) if table is None else table
            state[f"model.{stack}.positions.embed_positions.weight"] = whole[:number]
    with no_init_weights():
        model = VanillaTransformerForConditionalGeneration(config)
    if any(tensor.dtype == torch.float64 for tensor in state.values()):
        model.double()
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    if expected != found:
        name = min(name for name in {**expected, **found} if expected.get(name) != found.get(name))
        raise ValueError(
            f"the weights do not fit together: {name} is {found.get(name)}, expected {expected.get(name)}."
        )
    model.load_state_dict(state)
    model.tie_weights()
    if original.generation:
        special = {name: getattr(config, name) for name in ("bos_token_id", "pad_token_id", "eos_token_id")}
        settings = {**special, "decoder_start_token_id": config.decoder_start_token_id, **original.generation}
        model.generation_config = GenerationConfig(**settings)
    _tell(original, model, is_one_vocabulary, is_one_matrix and not is_scaled, lengths)
    return model.eval()


def _tell(original: Original, model: Any, is_one_vocabulary: bool, is_untied: bool, lengths: Sequence[int]) -> None:
    """Adds to the differences what putting together made different."""
    words = original.vocabularies
    if is_untied:
        original.differences.append(
            f"the embeddings, multiplied by {original.scale:.6g} there, are multiplied by sqrt(d_model) here and hold "
            f"the quotient; they are no longer tied to the output words, {model.num_parameters():,} parameters in all"
        )
    if not is_one_vocabulary:
        original.differences.append(
            f"vocabularies of {len(words.source)} and {len(words.target)} words are one of {len(words.merged)}, "
            "united by string: a word that one side lacks is its unknown word there and never in the output"
        )
    if len(set(lengths)) > 1:
        original.differences.append(
            f"tables of {max(lengths)} and {min(lengths)} positions are two of {min(lengths)}: "
            "longer sentences are cut"
        )
    if words.begin is not None:
        original.differences.append(
            f"the tokenizer begins every sentence with {words.begin}, which the original does with sources: labels "
            "made with it, in training and in scoring, begin so too, where the original has it only as the start"
        )


def write_folder(folder: Path, name: str, original: Original, *, origin: str, revision: str | None) -> list[str]:
    """Writes the model, its tokenizer and its card; returns the differences.

    Args:
        folder: Where to write, empty.
        name: Folder or name of the original.
        original: What it is.
        origin: What the card calls it, such as "the fairseq model".
        revision: Of the original on the Hub.
    """
    model = model_of(original)
    model.save_pretrained(folder)
    limit = original.most_tokens or MODEL_MAX_LENGTH
    if model.config.position_embedding == "learned":
        limit = min(limit, model.config.max_position_embeddings)
    original.vocabularies.tokenizer(limit).save_pretrained(folder)
    write_card(
        folder,
        name,
        revision=revision,
        use=use_section(folder.name),
        origin=origin,
        differences=original.differences,
        tags={"vanilla-transformer": True},
        config=model.config,
    )
    return original.differences


def required_file(name: str, file: str, revision: str | None, what: str) -> str:
    """Path of a file of the original.

    Args:
        name: Folder, or name on the Hub.
        file: Its name, without folders.
        revision: On the Hub.
        what: What an error calls it.

    Raises:
        FileNotFoundError: There is none.
        ValueError: The name leads out of the folder.
    """
    if not file or re.search(r"[/\\]", file) or file in (".", ".."):
        raise ValueError(f"expected the name of a file beside the others, without folders, got {file!r}.")
    path = file_of(name, file, revision)
    if path is None:
        where = "the folder" if Path(name).is_dir() else "the repository"
        raise FileNotFoundError(f"no {file} in {where} {name}; expected {what}.")
    return path


__all__ = ["Original", "StandIn", "Weights", "load_checkpoint", "model_of", "write_folder"]
