"""The Transformers of JoeyNMT: a checkpoint, its config.yaml and two vocabularies in one folder.

`best.ckpt` or `model.ckpt` holds the weights under `model_state`; `config.yaml` tells heads, the place of the layer
norms, scaling and decoding; `src_vocab.txt` and `trg_vocab.txt` hold one word a line. Its positions are the paper's
and its layer norms have eps 1e-6; everything else differs in names. A residual weight alpha other than 1 is refused.

Where config.yaml does not tell `layer_norm`, JoeyNMT 1 is pre-norm with a normalisation after each stack, which the
weights show. Without that one the versions differ: the first of JoeyNMT 2 are post-norm in both stacks, the later ones
pre-norm in the encoder (with none at its end) and post-norm in the decoder, which this package's model is not. Such a
model is refused until config.yaml tells.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from vanilla_transformer.convert import file_of
from vanilla_transformer.convert.descriptions import words_of_file
from vanilla_transformer.convert.vocabularies import Vocabularies
from vanilla_transformer.convert.weights import (
    NUMPY_NUMBERS,
    Original,
    Weights,
    add_stored_positions,
    check_heads,
    load_checkpoint,
    required_file,
    write_folder,
)


CHECKPOINTS = ("best.ckpt", "model.ckpt", "latest.ckpt")
CONFIG = "config.yaml"
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "swish": "silu"}
LAYER_NORM_EPS = 1e-6
SPECIAL = {"unk": "<unk>", "pad": "<pad>", "bos": "<s>", "eos": "</s>"}  # in the order of their ids
MOST_SETTINGS = 10_000
SPACE = "\u2581"  # as which newer versions write a space among characters
ATTENTIONS = {
    "encoder": {"self_attention": ("src_src_att", "layer_norm")},
    "decoder": {
        "self_attention": ("trg_trg_att", "x_layer_norm"),
        "cross_attention": ("src_trg_att", "dec_layer_norm"),
    },
}


def read(name: str, folder: Path, revision: str | None = None, checkpoint: str | None = None) -> list[str]:
    """Writes a Transformer of JoeyNMT as a model of this package, with a tokenizer of its vocabularies.

    Words are separated by white space; where JoeyNMT lower-cases, normalises or cuts words into pieces before, lines
    go in as it has them after that, and pieces come out as they are.

    Args:
        name: The folder of a trained model, or a name on the Hub.
        folder: Where to write, empty.
        revision: Branch, tag or commit on the Hub.
        checkpoint: Its file; None takes the first that is there of best.ckpt, model.ckpt, latest.ckpt.

    Returns:
        What differs from the original, a line each.

    Raises:
        OSError: A file is missing.
        ValueError: A file is broken, or the model cannot be represented; the message says why.
    """
    config = load_config(required_file(name, CONFIG, revision, "the settings of a model of JoeyNMT"))
    if checkpoint is None:
        checkpoint = next((each for each in CHECKPOINTS if file_of(name, each, revision)), CHECKPOINTS[0])
    path = required_file(name, checkpoint, revision, f"a checkpoint of JoeyNMT ({', '.join(CHECKPOINTS)})")
    content = load_checkpoint(path, NUMPY_NUMBERS)
    if not isinstance(content, Mapping) or "model_state" not in content:
        raise ValueError(f"{path} is no checkpoint of JoeyNMT: it has no entry 'model_state'.")
    original = original_of(Weights(content["model_state"], path), config, vocabularies(name, config, revision))
    return write_folder(folder, name, original, origin="the JoeyNMT model", revision=revision)


def load_config(path: str) -> dict[str, Any]:
    """The settings in config.yaml.

    Raises:
        ValueError: It is no YAML, or has no `model` with an encoder and a decoder that are Transformers.
    """
    try:
        with open(path, encoding="utf-8") as stream:
            config = yaml.safe_load(stream)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{path} is no YAML file: {reason}") from error
    check_size(config, path)
    for stack in ("encoder", "decoder"):
        found = section(config, "model", stack)
        if found.get("type", "recurrent") != "transformer":
            raise ValueError(
                f"{path}: model.{stack}.type is {found.get('type', 'recurrent')!r}; only the transformers of JoeyNMT "
                "can be read."
            )
    return config


def check_size(config: Any, path: str) -> None:
    """Raises ValueError for settings that aliases blow up, before anything compares or prints them."""
    left, seen = [config], 0
    while left:
        value = left.pop()
        seen += 1
        if seen > MOST_SETTINGS:
            raise ValueError(f"{path} has more than {MOST_SETTINGS} settings, aliases written out.")
        if isinstance(value, (dict, list)):
            left += value.values() if isinstance(value, dict) else value


def section(config: Any, *names: str) -> dict[str, Any]:
    """A part of the settings; the empty dictionary where there is none."""
    for name in names:
        config = config.get(name) if isinstance(config, dict) else None
    return config if isinstance(config, dict) else {}


def vocabularies(name: str, config: dict[str, Any], revision: str | None) -> Vocabularies:
    """The words of both sides, the special ones first, as JoeyNMT reads them.

    Raises:
        ValueError: Settings that the tokenizer here cannot have.
    """
    symbols = section(config, "data", "special_symbols")
    if symbols.get("lang_tags") or symbols.get("sep_token"):
        raise ValueError("data.special_symbols has lang_tags or sep_token; this package's models know none.")
    special = {role: symbols.get(f"{role}_token", default) for role, default in SPECIAL.items()}
    ids = {role: symbols.get(f"{role}_id", place) for place, role in enumerate(SPECIAL)}
    if list(ids.values()) != list(range(len(SPECIAL))) or not all(isinstance(each, str) for each in special.values()):
        raise ValueError(f"data.special_symbols must be words with the ids 0 to 3 in the order {', '.join(SPECIAL)}.")
    words = {}
    for side, short in (("source", "src"), ("target", "trg")):
        path = required_file(name, f"{short}_vocab.txt", revision, f"the vocabulary of the {side}")
        words[side] = list(dict.fromkeys([*special.values(), *words_of_file(path)]))
    levels = [level(config, short) for short in ("src", "trg")]
    if (levels[0] == "char") != (levels[1] == "char"):
        raise ValueError(
            f"the source's level is {levels[0]!r} and the target's {levels[1]!r}; this package has one tokenizer for "
            "both, of characters or of words."
        )
    return Vocabularies(
        words["source"],
        words["target"],
        start=special["bos"],
        end=special["eos"],
        padding=special["pad"],
        unknown=special["unk"],
        segmentation="characters" if levels[0] == "char" else "words",
        space=SPACE if SPACE in words["source"] else " ",
    )


def level(config: dict[str, Any], short: str) -> Any:
    """What the words of a side are: "word", "char" or "bpe", by the new place of the setting or by the old one."""
    return section(config, "data", short).get("level", section(config, "data").get("level", "word"))


def is_pre_norm(config: dict[str, Any], has_final_norm: bool) -> bool:
    """Whether the layers normalise before each sub-layer.

    Raises:
        ValueError: The settings say two things, or nothing where the weights do not tell either.
    """
    found = [section(config, "model", stack).get("layer_norm") for stack in ("encoder", "decoder")]
    if found == [None, None]:
        if has_final_norm:
            return True  # JoeyNMT 1
        raise ValueError(
            "config.yaml tells no model.encoder.layer_norm: without it the first versions of JoeyNMT 2 are post-norm, "
            "and the later ones pre-norm in the encoder alone, which this package's model is not. If one of the first "
            "trained this model, set layer_norm: post in its encoder and decoder."
        )
    if found[0] != found[1] or found[0] not in ("pre", "post"):
        raise ValueError(
            f"layer_norm is {found[0]!r} in the encoder and {found[1]!r} in the decoder; this package's model has "
            "'pre' or 'post' in both."
        )
    return found[0] == "pre"


def common_setting(config: dict[str, Any], name: str, default: Any) -> Any:
    """A setting that this package's model has once for both stacks.

    Raises:
        ValueError: The stacks differ in it.
    """
    encoder, decoder = (section(config, "model", stack).get(name, default) for stack in ("encoder", "decoder"))
    if encoder != decoder:
        raise ValueError(
            f"{name} is {encoder!r} in the encoder and {decoder!r} in the decoder; this package's model has one value "
            "for both."
        )
    return encoder


def original_of(weights: Weights, config: dict[str, Any], words: Vocabularies) -> Original:
    """The parts of the model, taken from its state dict."""
    source = weights.take("src_embed.lut.weight", None, None)
    d_model = source.shape[1]
    target = weights.take("trg_embed.lut.weight", None, d_model)
    output = weights.take("decoder.output_layer.weight", None, d_model)
    activation = common_setting(config, "activation", "relu")
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"this model has activation={activation!r}; this package's model has only {', '.join(ACTIVATIONS)}."
        )
    if common_setting(config, "alpha", 1.0) != 1:
        raise ValueError(
            f"this model weights residuals by alpha={common_setting(config, 'alpha', 1.0)!r}; this package's model "
            "adds them as they are."
        )
    # Each side may be scaled or not; the one factor of the model here is the source's.
    scales = [
        math.sqrt(d_model) if section(config, "model", stack, "embeddings").get("scale", False) else 1.0
        for stack in ("encoder", "decoder")
    ]
    if section(config, "model").get("tied_embeddings", False):
        scales[1] = scales[0]
    is_tied = torch.equal(source, target)
    if scales[1] != scales[0]:
        target = target * (scales[1] / scales[0])
    layers, sizes = stacks(weights, d_model)
    dropout = section(config, "model", "encoder").get("dropout", 0.1)
    original = Original(
        layers=layers,
        source_embedding=source,
        target_embedding=target,
        output=output,
        output_bias=None,
        scale=scales[0],
        vocabularies=words,
        generation=generation(config, words),
        settings={
            **sizes,
            "num_heads": check_heads(common_setting(config, "num_heads", None), d_model),
            "norm_first": is_pre_norm(config, sizes["final_norm"]),
            "activation": ACTIVATIONS[activation],
            "layer_norm_eps": LAYER_NORM_EPS,
            "dropout": dropout if isinstance(dropout, (int, float)) else 0.1,
        },
    )
    if scales[1] != scales[0] and is_tied:
        original.differences.append("one embedding, scaled on one side alone there, is two matrices here")
    names = [f"{stack}.pe.pe" for stack in ("encoder", "decoder")]
    add_stored_positions(original, weights, *(name if name in weights else None for name in names))
    weights.check_nothing_left()
    original.differences += preprocessing(config)
    original.differences += lost_settings(config)
    return original


def stacks(weights: Weights, d_model: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The weights of both stacks under our names, and what they tell of the configuration."""
    d_ff = weights.take("encoder.layers.0.feed_forward.pwff_layer.0.weight", None, d_model).shape[0]
    final_norms = {stack: f"{stack}.layer_norm.weight" in weights for stack in ATTENTIONS}
    if len(set(final_norms.values())) > 1:
        raise ValueError(
            f"this model has a last normalisation after the {'encoder' if final_norms['encoder'] else 'decoder'} "
            "alone; this package's model has one after both stacks or none."
        )
    layers: dict[str, torch.Tensor] = {}
    sizes: dict[str, Any] = {"d_ff": d_ff, "attention_bias": True, "final_norm": final_norms["encoder"]}

    def take(ours: str, theirs: str, *shape: int) -> None:
        layers[f"{ours}.weight"] = weights.take(f"{theirs}.weight", *shape)
        layers[f"{ours}.bias"] = weights.take(f"{theirs}.bias", shape[0])

    for stack, attentions in ATTENTIONS.items():
        count = sizes[f"{stack}_layers"] = weights.count(rf"{re.escape(stack)}\.layers\.(\d+)\.")
        for layer in range(count):
            own, their = f"model.{stack}.layers.{layer}.", f"{stack}.layers.{layer}."
            for ours, (attention, norm) in attentions.items():
                take(f"{own}{ours}_norm", f"{their}{norm}", d_model)
                for each in "qkv":
                    take(f"{own}{ours}.{each}_proj", f"{their}{attention}.{each}_layer", d_model, d_model)
                take(f"{own}{ours}.out_proj", f"{their}{attention}.output_layer", d_model, d_model)
            take(f"{own}feed_forward_norm", f"{their}feed_forward.layer_norm", d_model)
            take(f"{own}feed_forward.fc1", f"{their}feed_forward.pwff_layer.0", d_ff, d_model)
            take(f"{own}feed_forward.fc2", f"{their}feed_forward.pwff_layer.3", d_model, d_ff)
        if final_norms[stack]:
            take(f"model.{stack}.norm", f"{stack}.layer_norm", d_model)
    return layers, sizes


def generation(config: dict[str, Any], words: Vocabularies) -> dict[str, Any]:
    """The decoding of config.yaml: its length penalty is that of the paper."""
    testing = section(config, "testing")
    beams, alpha = testing.get("beam_size", 1), testing.get("beam_alpha", testing.get("alpha", -1))
    for name, value, kinds in (("beam_size", beams, int), ("beam_alpha", alpha, (int, float))):
        if isinstance(value, bool) or not isinstance(value, kinds) or (name == "beam_size" and value < 1):
            raise ValueError(f"testing.{name} must be a number, and beam_size at least 1, got {value!r}.")
    settings: dict[str, Any] = {"num_beams": beams}
    if beams > 1:
        settings.update(length_penalty=float(max(alpha, 0)), length_penalty_type="gnmt", early_stopping="never")
    limit = max_output_length(config)
    settings.update({"max_new_tokens_over_source": 50} if limit is None else {"max_new_tokens": limit})
    if testing.get("generate_unk", True) is False:
        settings["suppress_tokens"] = [words.ids[words.unknown]]
    return settings


def max_output_length(config: dict[str, Any]) -> int | None:
    """The most words of a translation, by the new place of the setting or by the old one; None where none is set."""
    for part in ("testing", "training"):
        limit = section(config, part).get("max_output_length")
        if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0:
            return limit
    return None


def preprocessing(config: dict[str, Any]) -> list[str]:
    """What JoeyNMT does with text before and after, and this tokenizer does not, a line each."""
    told = []
    for side, short in (("source", "src"), ("target", "trg")):
        own = {**section(config, "data"), **section(config, "data", short)}
        found = [name for name in ("lowercase", "normalize") if own.get(name)]
        pretokenizer = section(own, "tokenizer_cfg").get("pretokenizer", "none")
        found += [f"pretokenizer {pretokenizer}"] if str(pretokenizer).lower() != "none" else []
        found += ["level bpe"] if level(config, short) == "bpe" else []
        if found:
            told.append(
                f"{', '.join(found)} of the {side} is not done here: lines go in and come out as JoeyNMT has them "
                "inside of it"
            )
    return told


def lost_settings(config: dict[str, Any]) -> list[str]:
    """Settings of decoding that are not taken over, a line each."""
    testing = section(config, "testing")
    told = []
    if max_output_length(config) is None:
        told.append("at most 1.5 times the source's words is at most source + 50 words here")
    for name, usual in (("min_output_length", 1), ("repetition_penalty", -1), ("no_repeat_ngram_size", -1)):
        if testing.get(name, usual) != usual:
            told.append(f"testing.{name}={testing[name]!r} is not taken over; give its like to generate()")
    return told


__all__ = ["read"]
