"""Marian of transformers (`MarianMTModel`, the OPUS-MT models): exactly this model with its columns in another order.

Marian's positions are the paper's (section 3.5) with all sines in the first half of d_model and all cosines in the
second, where the paper has them in turn. Nothing else in the model knows one column of d_model from another, so that
the same reordering of every weight along d_model makes one model of the other. What the two spell differently besides:
biases of the attention and of the output words, which the paper lacks, and the names.
"""

import json
import math
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoConfig, GenerationConfig, MarianConfig, MarianMTModel
from transformers.initialization import no_init_weights

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.convert import file_of, require, write_card
from vanilla_transformer.hub import use_section
from vanilla_transformer.modeling_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
    let_read_as_config,
    sinusoidal_encoding,
    without_conversion_service,
)
from vanilla_transformer.translation import load_translator, open_tokenizer


# Marian's names on the left; its "gelu" is the exact one, as ours is.
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "swish": "silu", "silu": "silu"}
LAYER_NORM_EPS = 1e-5  # Marian has no field for it
# The output bias of a word that only the source side has: no probability, and no infinite smoothed loss.
NEVER = -1e4
# What becomes of "source + 50 tokens" where a model knows only a fixed limit: that of the OPUS-MT models.
MAX_LENGTH = 512
# The paper's length penalty ranks as `length ** p` does near this number of tokens.
TYPICAL_LENGTH = 20

TOKENIZER_CONFIG = "tokenizer_config.json"
SENTENCEPIECE_FILES = ("source.spm", "target.spm")


# ---------------------------------------------------------------------------------------------------------------------
# Models
# ---------------------------------------------------------------------------------------------------------------------


def order_of_columns(d_model: int) -> torch.Tensor:
    """Which of Marian's columns is each of ours: `ours = marian[..., order]`, shape `(d_model,)`.

    With an odd d_model there is one sine more than there are cosines, here and there.
    """
    order = torch.empty(d_model, dtype=torch.long)
    sines = (d_model + 1) // 2
    order[0::2] = torch.arange(sines)
    order[1::2] = torch.arange(sines, d_model)
    return order


def weight_names(encoder_layers: int, decoder_layers: int) -> Iterator[tuple[str, str, int | None]]:
    """Our name of each weight, Marian's name, and the axis along which it has d_model (None: it has not).

    The output bias is left out, whose shape differs too.
    """
    yield "lm_head.weight", "lm_head.weight", 1
    for stack, layers in (("encoder", encoder_layers), ("decoder", decoder_layers)):
        yield f"model.{stack}.embed_tokens.weight", f"model.{stack}.embed_tokens.weight", 1
        attentions = {"self_attention": "self_attn"}
        if stack == "decoder":
            attentions["cross_attention"] = "encoder_attn"
        norms = {f"{ours}_norm": f"{theirs}_layer_norm" for ours, theirs in attentions.items()}
        norms["feed_forward_norm"] = "final_layer_norm"
        inward = {f"{ours}.{x}_proj": f"{theirs}.{x}_proj" for ours, theirs in attentions.items() for x in "qkv"}
        inward["feed_forward.fc1"] = "fc1"
        outward = {f"{ours}.out_proj": f"{theirs}.out_proj" for ours, theirs in attentions.items()}
        outward["feed_forward.fc2"] = "fc2"
        for layer in range(layers):
            prefix = f"model.{stack}.layers.{layer}."
            for modules, weight_axis, bias_axis in ((inward, 1, None), (outward, 0, 0), (norms, 0, 0)):
                for ours, theirs in modules.items():
                    yield f"{prefix}{ours}.weight", f"{prefix}{theirs}.weight", weight_axis
                    yield f"{prefix}{ours}.bias", f"{prefix}{theirs}.bias", bias_axis


def from_marian(model: MarianMTModel) -> VanillaTransformerForConditionalGeneration:
    """The same model as one of this package: the same logits up to rounding, in the same precision.

    Where Marian does not scale its embeddings, they are divided by sqrt(d_model), by which this model multiplies them;
    embeddings and output matrix are then no longer tied. Two vocabularies of unequal size become one of the larger
    size, in which the words that the target lacks have no probability. Settings of generation come along as they are.

    Unlike Marian, the result masks padding also where no `attention_mask` is given, and has no longest sequence.

    Args:
        model: Any `MarianMTModel`.

    Returns:
        A model in evaluation mode on the same device, which shares no memory with `model`.

    Raises:
        TypeError: Another kind of model.
        ValueError: A Marian that this model cannot equal; the message says why.
    """
    if not isinstance(model, MarianMTModel):
        raise TypeError(f"from_marian takes a MarianMTModel, got {type(model).__name__}.")
    marian = model.config
    check_marian(marian)
    weights = model.state_dict()
    order = order_of_columns(marian.d_model).to(model.device)
    table = sinusoidal_encoding(torch.arange(marian.max_position_embeddings), marian.d_model)
    for stack in ("encoder", "decoder"):
        positions = weights.pop(f"model.{stack}.embed_positions.weight")
        rounding = 8 * max(torch.finfo(positions.dtype).eps, torch.finfo(torch.float32).eps)
        if not torch.allclose(positions[:, order].cpu().double(), table.double(), rtol=0, atol=rounding):
            raise ValueError(
                f"the positions of this Marian's {stack} are not the sinusoids of its formula; it was trained with "
                "others, and this model would compute something else."
            )
    weights.pop("model.shared.weight", None)  # the matrix of both embeddings, or unused

    words = model.lm_head.weight
    embeddings = [model.model.encoder.embed_tokens.weight, model.model.decoder.embed_tokens.weight]
    tied = marian.scale_embedding and all(each is words for each in embeddings)
    vocab_size = max(each.shape[0] for each in (words, *embeddings))
    ours = VanillaTransformerConfig(
        vocab_size=vocab_size,
        d_model=marian.d_model,
        d_ff=marian.encoder_ffn_dim,
        num_heads=marian.encoder_attention_heads,
        encoder_layers=marian.encoder_layers,
        decoder_layers=marian.decoder_layers,
        dropout=marian.dropout,
        attention_dropout=marian.attention_dropout,
        activation_dropout=marian.activation_dropout,
        activation=ACTIVATIONS[marian.activation_function],
        max_position_embeddings=marian.max_position_embeddings,
        attention_bias=True,
        output_bias=True,
        layer_norm_eps=LAYER_NORM_EPS,
        tie_word_embeddings=tied,
        use_cache=marian.use_cache,
        bos_token_id=marian.bos_token_id,
        pad_token_id=cast(int, marian.pad_token_id),
        eos_token_id=marian.eos_token_id,
        decoder_start_token_id=marian.decoder_start_token_id,
    )
    state = {}
    bias = weights.pop("final_logits_bias").flatten()
    state["lm_head.bias"] = nn.functional.pad(bias, (0, vocab_size - bias.shape[0]), value=NEVER)
    for name, theirs, axis in weight_names(marian.encoder_layers, marian.decoder_layers):
        weight = weights.pop(theirs)
        if axis is not None:
            weight = weight.index_select(axis, order)
        if name.endswith("embed_tokens.weight") and not marian.scale_embedding:
            weight = weight / math.sqrt(marian.d_model)
        if name.endswith("embed_tokens.weight") or name == "lm_head.weight":
            weight = nn.functional.pad(weight, (0, 0, 0, vocab_size - weight.shape[0]))
        state[name] = weight
    check_nothing_left(weights)
    converted = filled(VanillaTransformerForConditionalGeneration, ours, state, model)
    converted.generation_config = GenerationConfig(**{**settings_of(model), "length_penalty_type": "hub"})
    return converted


def to_marian(model: VanillaTransformerForConditionalGeneration) -> MarianMTModel:
    """The same model as transformers' own Marian: the same logits up to rounding, in the same precision.

    Settings of generation come along as far as transformers knows them; `lost_settings` tells which do not. Label
    smoothing belongs to the trainer there.

    Args:
        model: A model of this package, post-norm and with sinusoids, as the paper's; biases or none, tied or not.

    Returns:
        A model in evaluation mode on the same device, which shares no memory with `model`.

    Raises:
        TypeError: Another kind of model.
        ValueError: A departure from the paper that Marian lacks; the message says which.
    """
    if not isinstance(model, VanillaTransformerForConditionalGeneration):
        raise TypeError(f"to_marian takes a VanillaTransformerForConditionalGeneration, got {type(model).__name__}.")
    ours = model.config
    check_ours(ours)
    settings = settings_for_marian(model)
    marian = MarianConfig(
        vocab_size=ours.vocab_size,
        decoder_vocab_size=ours.vocab_size,
        d_model=ours.d_model,
        encoder_ffn_dim=ours.d_ff,
        decoder_ffn_dim=ours.d_ff,
        encoder_attention_heads=ours.num_heads,
        decoder_attention_heads=ours.num_heads,
        encoder_layers=ours.encoder_layers,
        decoder_layers=ours.decoder_layers,
        dropout=ours.dropout,
        attention_dropout=ours.attention_dropout,
        activation_dropout=ours.activation_dropout,
        activation_function=ours.activation,
        max_position_embeddings=ours.max_position_embeddings,
        scale_embedding=True,
        share_encoder_decoder_embeddings=ours.tie_word_embeddings,
        tie_word_embeddings=ours.tie_word_embeddings,
        use_cache=ours.use_cache,
        bos_token_id=ours.bos_token_id,
        pad_token_id=ours.pad_token_id,
        eos_token_id=ours.eos_token_id,
        decoder_start_token_id=cast(int, ours.decoder_start_token_id),
        forced_eos_token_id=settings.get("forced_eos_token_id"),  # 0 unless told otherwise, which is a word here
    )
    weights = model.state_dict()
    order = order_of_columns(ours.d_model).argsort().to(model.device)
    bias = weights.pop("lm_head.bias", torch.zeros(ours.vocab_size, dtype=model.dtype, device=model.device))
    state = {"final_logits_bias": bias[None]}
    for name, theirs, axis in weight_names(ours.encoder_layers, ours.decoder_layers):
        if name not in weights and name.endswith("_proj.bias") and not ours.attention_bias:
            state[theirs] = torch.zeros_like(state[theirs.removesuffix("bias") + "weight"][:, 0])
            continue
        weight = weights.pop(name)
        state[theirs] = weight if axis is None else weight.index_select(axis, order)
    check_nothing_left(weights)
    # Loaded from a file, Marian computes them anew, in float32.
    table = sinusoidal_encoding(torch.arange(ours.max_position_embeddings), ours.d_model, dtype=model.dtype)
    for stack in ("encoder", "decoder"):
        state[f"model.{stack}.embed_positions.weight"] = table[:, order.cpu()]
    if ours.tie_word_embeddings:
        state["model.shared.weight"] = state["lm_head.weight"]
    converted = filled(MarianMTModel, marian, state, model)
    converted.generation_config = GenerationConfig(**settings)
    return converted


def check_marian(config: MarianConfig) -> None:
    """Raises ValueError where this package's model cannot equal a Marian of this configuration."""
    for name in ("attention_heads", "ffn_dim"):
        encoder, decoder = (getattr(config, f"{stack}_{name}") for stack in ("encoder", "decoder"))
        if encoder != decoder:
            raise ValueError(
                f"this Marian has encoder_{name}={encoder} and decoder_{name}={decoder}; this package's model has one "
                "value for both stacks."
            )
    for stack in ("encoder", "decoder"):
        if getattr(config, f"{stack}_layerdrop"):
            raise ValueError(
                f"this Marian has {stack}_layerdrop={getattr(config, f'{stack}_layerdrop')}, which leaves out layers "
                "in training and which this package's model has not; set it to 0 in config.json if the model is to "
                "translate, or to be trained further without it."
            )
    if config.activation_function not in ACTIVATIONS:
        raise ValueError(
            f"this Marian has activation_function={config.activation_function!r}; this package's model has only "
            f"{', '.join(ACTIVATIONS)}."
        )
    if config.pad_token_id is None:
        raise ValueError("this Marian has pad_token_id=None; this package's model needs a padding token.")


def check_ours(config: VanillaTransformerConfig) -> None:
    """Raises ValueError where Marian cannot equal a model of this configuration."""
    d_k, d_v = config.head_dimensions
    for differs, found, expected in (
        (config.norm_first, "norm_first=True", "layer normalisation after each sub-layer"),
        (config.has_final_norm, "final_norm=True", "no normalisation after the stacks"),
        (
            config.position_embedding != "sinusoidal",
            f"position_embedding={config.position_embedding!r}",
            "sinusoids",
        ),
        (
            d_k * config.num_heads != config.d_model or d_v * config.num_heads != config.d_model,
            f"d_k={d_k}, d_v={d_v}, num_heads={config.num_heads} and d_model={config.d_model}",
            "d_k = d_v = d_model / num_heads",
        ),
        (config.pruned_heads is not None, "pruned_heads", "one number of heads for all layers"),
        (
            config.layer_norm_eps != LAYER_NORM_EPS,
            f"layer_norm_eps={config.layer_norm_eps}",
            f"layer_norm_eps={LAYER_NORM_EPS}",
        ),
    ):
        if differs:
            raise ValueError(f"this model has {found}; Marian knows only {expected}.")


def check_nothing_left(weights: dict[str, torch.Tensor]) -> None:
    """Raises ValueError where the original has weights that the other model has no place for."""
    if weights:
        raise ValueError(
            f"the model has {len(weights)} weights that it should not have, such as {next(iter(weights))}; merge "
            "adapters into it first."
        )


def filled(model_class: Any, config: Any, state: dict[str, torch.Tensor], like: nn.Module) -> Any:
    """A model of a class with these weights, on the device and in the precision of another one."""
    with no_init_weights():
        model = model_class(config)
    model.to(device=like.device, dtype=like.dtype)
    model.load_state_dict(state)
    model.tie_weights()
    return model.eval()


# ---------------------------------------------------------------------------------------------------------------------
# Settings of generation
# ---------------------------------------------------------------------------------------------------------------------


def settings_of(model: Any) -> dict[str, Any]:
    """What a model's settings of generation say; what they leave open is left out."""
    settings = model.generation_config.to_dict()
    return {
        name: value
        for name, value in settings.items()
        if value is not None and not name.startswith("_") and name != "transformers_version"
    }


def settings_for_marian(model: VanillaTransformerForConditionalGeneration) -> dict[str, Any]:
    """Our settings of generation without what only this package knows, which is replaced by what comes closest."""
    settings = settings_of(model)
    exponent = settings.get("length_penalty")
    if settings.pop("length_penalty_type", "hub") == "gnmt" and exponent is not None:
        # d log ((5 + n) / 6) ** p / d log n, at the typical n: there both rank longer against shorter alike.
        settings["length_penalty"] = round(exponent * TYPICAL_LENGTH / (5 + TYPICAL_LENGTH), 4)
    if settings.pop("max_new_tokens_over_source", None) is not None:
        # Other limits of the model's own settings are not in force beside that one.
        settings.pop("max_new_tokens", None)
        settings["max_length"] = min(MAX_LENGTH, model.config.max_position_embeddings)
        if settings.get("early_stopping") == "never":
            # It asks what the longest translation could still reach, which is useful with a limit near the source's.
            settings["early_stopping"] = False
    return settings


def lost_settings(model: VanillaTransformerForConditionalGeneration) -> list[str]:
    """What the settings of generation lose on the way to Marian, a line each."""
    before, after = settings_of(model), settings_for_marian(model)
    lost = []
    if before.get("length_penalty_type") == "gnmt" and "length_penalty" in before:
        lost.append(
            f"length penalty ((5 + n) / 6) ** {before['length_penalty']}, which only this package knows, is "
            f"n ** {after['length_penalty']} there, its like at {TYPICAL_LENGTH} tokens: beams may rank otherwise, "
            "greedy translations are the same"
        )
    if "max_new_tokens_over_source" in before:
        lost.append(
            f"at most source + {before['max_new_tokens_over_source']} tokens is at most {after['max_length']} tokens "
            "there, for all lines alike"
        )
        if before.get("early_stopping") != after.get("early_stopping"):
            lost.append(f"early_stopping {before['early_stopping']!r} is {after['early_stopping']} there")
    return lost


# ---------------------------------------------------------------------------------------------------------------------
# Folders
# ---------------------------------------------------------------------------------------------------------------------


def read(name: str, folder: Path, revision: str | None = None) -> list[str]:
    """Writes a saved Marian as a model of this package, with the Marian's own tokenizer.

    Text to ids and ids to text thus stay Marian's own to the letter; no fast tokenizer has two SentencePiece models.

    Args:
        name: A folder, or a name on the Hub.
        folder: Where to write, empty.
        revision: Branch, tag or commit on the Hub.

    Returns:
        What differs from the original, a line each.

    Raises:
        OSError: There is no such model.
        ValueError: It is no Marian, is broken, or cannot be represented; see `from_marian`.
        ImportError: The package sentencepiece is missing.
    """
    original, tokenizer = load_marian(name, revision)
    model = from_marian(original)
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    differences = []
    if not original.config.scale_embedding:
        differences.append(
            "scale_embedding is False there: the embeddings are divided by sqrt(d_model) and no longer tied to the "
            f"output words, {model.num_parameters():,} parameters in the place of {original.num_parameters():,}"
        )
    sizes = original.config.vocab_size, original.lm_head.weight.shape[0]
    if sizes[0] != sizes[1]:
        differences.append(f"vocabularies of {sizes[0]} and {sizes[1]} words are one of {model.config.vocab_size}")
    write_card(
        folder,
        name,
        revision=revision,
        use=use_section(folder.name),
        origin="the Marian model",
        differences=differences,
        tags={"vanilla-transformer": True, "marian": False},
        config=model.config,
    )
    return differences


def load_marian(name: str, revision: str | None) -> tuple[MarianMTModel, Any]:
    """A saved Marian in the precision it was saved in, and its tokenizer."""
    if os.path.isdir(name) and not os.path.isfile(os.path.join(name, "config.json")):
        raise FileNotFoundError(f"no config.json in the folder {name}; expected that of a MarianMTModel.")
    options: dict[str, Any] = {"revision": revision}
    marian: Any = MarianMTModel  # from_pretrained returns a pair here, which its type does not say
    try:
        config = AutoConfig.from_pretrained(name, **options)
        if config.model_type != "marian":
            raise ValueError(f"{name} holds a model of type {config.model_type!r}, not a MarianMTModel.")
        check_marian(config)
        if any(file_of(name, file, revision) for file in SENTENCEPIECE_FILES):
            require(("sentencepiece",), "the tokenizer of this model", "export")
        with without_conversion_service():
            # weights_only: many OPUS-MT repositories have nothing but a pickle, which may not run code.
            model, report = marian.from_pretrained(
                name, dtype="auto", weights_only=True, output_loading_info=True, **options
            )
    except OSError as error:
        where = "" if os.path.isdir(name) else " (no folder of that name here, so it was looked for on the Hub)"
        raise OSError(f"cannot open the model {name}{where}: {error}") from error
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"the weights in {name} cannot be used: {error}") from error
    for kind, what in (("missing_keys", "lacks"), ("unexpected_keys", "has no place for")):
        if report[kind]:
            raise ValueError(f"{name} {what} {len(report[kind])} weights, such as {min(report[kind])}.")
    return model, open_tokenizer(name, options)


def write(name: str, folder: Path, revision: str | None = None) -> list[str]:
    """Writes a model of this package so that plain transformers opens it as a Marian, without any code of ours.

    Args:
        name: A folder, or a name on the Hub.
        folder: Where to write, empty.
        revision: Branch, tag or commit on the Hub.

    Returns:
        What the settings of generation lost, a line each; see `lost_settings`.

    Raises:
        OSError: There is no such model.
        ValueError: It is none of this package, is broken, or has what Marian has not; see `to_marian`.
    """
    model, tokenizer = load_translator(name, device="cpu", dtype="auto", revision=revision)
    if not isinstance(model, VanillaTransformerForConditionalGeneration):
        raise ValueError(
            f"{name} holds a model of type {model.config.model_type!r}; --to marian writes those of this package."
        )
    to_marian(model).save_pretrained(folder)
    let_read_as_config(folder)
    save_tokenizer(tokenizer, folder)
    settings = json.loads((folder / TOKENIZER_CONFIG).read_text(encoding="utf-8"))
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # the same class by a name that transformers 4 knows
        (folder / TOKENIZER_CONFIG).write_text(json.dumps(settings, indent=2, ensure_ascii=False), encoding="utf-8")
    differences = lost_settings(model)
    write_card(
        folder,
        name,
        revision=revision,
        use=MARIAN_USE.format(model=json.dumps(folder.name, ensure_ascii=False).replace("`", "")),
        origin="the model of the package `vanilla-transformer`",
        differences=differences,
        tags={"vanilla-transformer": False, "marian": True},
        config=model.config,
    )
    return differences


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Saves a tokenizer without what loading noted of this machine."""
    for name in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(name, None)
    tokenizer.save_pretrained(folder)


MARIAN_USE = """```python
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({model})
model = AutoModelForSeq2SeqLM.from_pretrained({model})
ids = model.generate(**tokenizer(["A sentence to translate."], padding=True, return_tensors="pt"))
print(tokenizer.batch_decode(ids, skip_special_tokens=True))
```"""


__all__ = ["from_marian", "lost_settings", "read", "to_marian", "write"]
