"""The `transformer` models of fairseq: their weights under other names, their positions as a table.

A checkpoint (`checkpoint_best.pt`, `model.pt` ...) holds the weights under `model` and the settings under `args` or
`cfg`; `dict.SOURCE.txt` and `dict.TARGET.txt` lie beside it. fairseq's positions are those of tensor2tensor: all sines
in the first half of d_model and all cosines in the second, at the wavelengths 2 pi 10000^(i / (d_model / 2 - 1)); the
paper's section 3.5 has 10000^(i / (d_model / 2)). No reordering of columns makes one of the other, so they become the
table of learned positions (Table 3, row E), written out from fairseq's formula as far as the model was made for.

Nothing in the checkpoint is run: settings are read as what they store, and any class other than those that fairseq
keeps its settings and meters in is refused.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vanilla_transformer.convert import file_of
from vanilla_transformer.convert.vocabularies import Vocabularies
from vanilla_transformer.convert.weights import (
    NUMPY_NUMBERS,
    Original,
    StandIn,
    Weights,
    check_heads,
    load_checkpoint,
    required_file,
    write_folder,
)


CHECKPOINTS = ("checkpoint_best.pt", "model.pt", "checkpoint_last.pt")
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "swish": "silu", "silu": "silu"}
LAYER_NORM_EPS = 1e-5  # fairseq has no setting for it
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")  # the ids 0 to 3 of every dictionary
FIRST_POSITION = SPECIAL.index("<pad>") + 1  # fairseq counts positions from the padding's id + 1
# What fairseq-generate does unless told otherwise; the padding is never chosen, nor an end of sentence at once.
GENERATION = {
    "num_beams": 5,
    "length_penalty": 1.0,
    "length_penalty_type": "hub",
    "early_stopping": True,
    "min_new_tokens": 1,
}
MAX_NEW_TOKENS = 201  # --max-len-b 200, and the end of sentence

# What checkpoints of fairseq name beside tensors: holders of settings, of running means, and of single numbers.
HARMLESS = (
    "argparse.Namespace",
    "typing.Any",
    "omegaconf.dictconfig.DictConfig",
    "omegaconf.listconfig.ListConfig",
    *(f"omegaconf.base.{name}" for name in ("ContainerMetadata", "Metadata")),
    *(
        f"omegaconf.nodes.{name}Node"
        for name in ("Any", "String", "Integer", "Float", "Boolean", "Enum", "Bytes", "Path")
    ),
    *(
        f"fairseq.{module}.{name}"
        for module in ("meters", "logging.meters")
        for name in ("AverageMeter", "TimeMeter", "StopwatchMeter", "MetersDict", "SumMeter")
    ),
    *NUMPY_NUMBERS,
)

# Settings that change what the model computes, and the value that this package's model has.
UNLIKE: dict[str, tuple[Any, str]] = {
    "no_token_positional_embeddings": (False, "positions"),
    "layernorm_embedding": (False, "no normalisation of embeddings"),
    "no_cross_attention": (False, "attention to the encoder"),
    "cross_self_attention": (False, "self-attention apart from attention to the encoder"),
    "adaptive_input": (False, "plain embeddings"),
    "adaptive_softmax_cutoff": (None, "a plain softmax"),
    "base_layers": (0, "plain layers"),
    "char_inputs": (False, "words as input"),
    "encoder_recurrent_stacking": (None, "weights of its own in each layer"),
    "decoder_recurrent_stacking": (None, "weights of its own in each layer"),
}
# Version of each stack (1 where the checkpoint tells none) from which its last normalisation is in use.
FIRST_WITH_FINAL_NORM = {"encoder": 2, "decoder": 3}
MOST_POSITIONS = 100_000  # fairseq's own limit
ATTENTIONS = {
    "encoder": {"self_attention": "self_attn"},
    "decoder": {"self_attention": "self_attn", "cross_attention": "encoder_attn"},
}


def read(name: str, folder: Path, revision: str | None = None, checkpoint: str | None = None) -> list[str]:
    """Writes a fairseq `transformer` as a model of this package, with a tokenizer of its dictionaries.

    The tokenizer does what fairseq-interactive does without --tokenizer and --bpe: words are separated by white space,
    and pieces of words, where the model was trained on such, go in and come out as they are.

    Args:
        name: A folder, or a name on the Hub.
        folder: Where to write, empty.
        revision: Branch, tag or commit on the Hub.
        checkpoint: Its file; None takes the first that is there of checkpoint_best.pt, model.pt, checkpoint_last.pt.

    Returns:
        What differs from the original, a line each.

    Raises:
        OSError: A file is missing.
        ValueError: A file is broken, or the model cannot be represented; the message says why.
    """
    if checkpoint is None:
        checkpoint = next((each for each in CHECKPOINTS if file_of(name, each, revision)), CHECKPOINTS[0])
    path = required_file(name, checkpoint, revision, f"a checkpoint of fairseq ({', '.join(CHECKPOINTS)})")
    content = load_checkpoint(path, HARMLESS)
    if not isinstance(content, Mapping) or "model" not in content:
        raise ValueError(f"{path} is no checkpoint of fairseq: it has no entry 'model'.")
    settings = settings_of(content, path)
    weights = Weights(content["model"], path)
    check_settings(settings, path)
    vocabularies = dictionaries(name, settings, weights, revision)
    original = original_of(weights, settings, vocabularies)
    return write_folder(folder, name, original, origin="the fairseq model", revision=revision)


def settings_of(content: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The settings of the model and of its task in a checkpoint, old (`args`) or new (`cfg`).

    Raises:
        ValueError: There are none.
    """
    if content.get("args") is not None:
        found = plain(content["args"])
    else:
        whole = plain(content.get("cfg"))
        if not isinstance(whole, dict) or not isinstance(whole.get("model"), dict):
            raise ValueError(f"{path} is no checkpoint of fairseq: it has settings neither as 'args' nor as 'cfg'.")
        task = whole.get("task")
        found = {**(task if isinstance(task, dict) else {}), **whole["model"]}
        for stack in ("encoder", "decoder"):  # the newest have a dictionary for each stack
            if isinstance(found.get(stack), dict):
                found.update({f"{stack}_{name}": value for name, value in found.pop(stack).items()})
    if not isinstance(found, dict):
        raise ValueError(f"{path} is no checkpoint of fairseq: its settings are of type {type(found).__name__}.")
    return found


def plain(value: Any, depth: int = 0) -> Any:
    """What a stand-in for a holder of settings has stored, as dictionaries and lists."""
    if depth > 50:
        raise ValueError("the settings in the checkpoint hold one another without end.")
    if isinstance(value, StandIn):
        stored = vars(value)
        for holder in ("_content", "_val"):  # those of omegaconf
            if holder in stored:
                return plain(stored[holder], depth + 1)
        value = {name: each for name, each in stored.items() if name != "_arguments"}
    if isinstance(value, Mapping):
        return {name: plain(each, depth + 1) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each, depth + 1) for each in value]
    return value


def check_settings(settings: Mapping[str, Any], path: str) -> None:
    """Raises ValueError for settings that this package's model cannot equal."""
    arch = settings.get("arch") or settings.get("_name") or "transformer"
    if not str(arch).startswith("transformer") or str(arch).startswith("transformer_lm"):
        raise ValueError(f"{path} holds a model of the architecture {arch!r}; only fairseq's transformer can be read.")
    for name, (expected, what) in UNLIKE.items():
        if (settings.get(name) or expected) != expected:
            raise ValueError(f"this model has {name}={settings[name]!r}; this package's model has {what}.")
    if settings.get("activation_fn", "relu") not in ACTIVATIONS:
        raise ValueError(
            f"this model has activation_fn={settings['activation_fn']!r}; this package's model has only "
            f"{', '.join(ACTIVATIONS)}."
        )
    for name in ("attention_heads", "normalize_before", "learned_pos", "embed_dim"):
        encoder, decoder = (settings.get(f"{stack}_{name}") for stack in ("encoder", "decoder"))
        if (encoder or False) != (decoder or False):
            raise ValueError(
                f"this model has encoder_{name}={encoder!r} and decoder_{name}={decoder!r}; this package's model has "
                "one value for both stacks."
            )


def dictionaries(name: str, settings: Mapping[str, Any], weights: Weights, revision: str | None) -> Vocabularies:
    """The dictionaries beside the checkpoint: `dict.en.txt` of the settings' languages, else dict.src.txt and such."""
    sides = {}
    for side, short in (("source", "src"), ("target", "tgt")):
        language = settings.get(f"{side}_lang")
        names = [f"dict.{each}.txt" for each in (language, short) if isinstance(each, str) and "/" not in each]
        file = next((each for each in names if file_of(name, each, revision)), names[0])
        sides[side] = dictionary(required_file(name, file, revision, f"the dictionary of the {side}"))
    return Vocabularies(
        sides["source"], sides["target"], start="</s>", bos="<s>", end="</s>", padding="<pad>", unknown="<unk>"
    )


def dictionary(path: str) -> list[str]:
    """The words of a dictionary of fairseq: a line for each, with the number of times that it was seen.

    Raises:
        ValueError: A line of another form, a word that stands twice, or bytes that are not UTF-8.
    """
    with open(path, "rb") as stream:
        content = stream.read()
    words = list(SPECIAL)
    known = set(words)
    for number, line in enumerate(re.split(rb"\r\n|\r|\n", content), 1):
        try:
            text = line.decode("utf-8").rstrip()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}, line {number}: not in UTF-8.") from error
        if not text and not line.strip():
            continue
        word, separator, count = text.rpartition(" ")
        if count.startswith("#fairseq:") or word in known:
            raise ValueError(
                f"{path}, line {number}: the word {word!r} stands twice; an id could not be told from it."
            )
        if not separator or not re.fullmatch(r"[+-]?\d+", count):
            raise ValueError(f"{path}, line {number}: expected a word, a space and a number, got {text[:80]!r}.")
        words.append(word)
        known.add(word)
    return words


def position_table(length: int, d_model: int) -> torch.Tensor:
    """fairseq's sinusoids at the positions of the first `length` tokens, shape `(length, d_model)`, in float32.

    In the table of fairseq itself the first token has the row `FIRST_POSITION`. An odd d_model ends in a zero.
    """
    half = d_model // 2
    if half < 2:
        raise ValueError(f"this model has d_model={d_model}, for which fairseq has no sinusoids.")
    # As there, in single precision, so that the roundings are the same.
    wavelengths = torch.exp(torch.arange(half, dtype=torch.float) * -(math.log(10000) / (half - 1)))
    positions = torch.arange(FIRST_POSITION, FIRST_POSITION + length, dtype=torch.float)
    angles = positions[:, None] * wavelengths
    table = torch.cat([angles.sin(), angles.cos()], dim=1)
    return torch.nn.functional.pad(table, (0, d_model - 2 * half))


def original_of(weights: Weights, settings: Mapping[str, Any], vocabularies: Vocabularies) -> Original:
    """The parts of the model, taken from its state dict."""
    source = weights.take("encoder.embed_tokens.weight", None, None)
    d_model = source.shape[1]
    target = weights.take("decoder.embed_tokens.weight", None, d_model)
    old_output = "decoder.embed_out"
    if "decoder.output_projection.weight" in weights:
        output = weights.take("decoder.output_projection.weight", None, d_model)
    elif old_output in weights:
        output = weights.take(old_output, None, d_model)
    elif settings.get("share_decoder_input_output_embed") or settings.get("share_all_embeddings"):
        output = target
    else:
        raise ValueError(f"{weights.where} lacks the weight decoder.output_projection.weight.")
    layers, sizes = stacks(weights, d_model)
    original = Original(
        layers=layers,
        source_embedding=source,
        target_embedding=target,
        output=output,
        output_bias=None,
        scale=1.0 if settings.get("no_scale_embedding") else math.sqrt(d_model),
        vocabularies=vocabularies,
        settings={
            **sizes,
            "num_heads": check_heads(settings.get("encoder_attention_heads"), d_model),
            "norm_first": bool(settings.get("encoder_normalize_before")),
            "activation": ACTIVATIONS[settings.get("activation_fn") or "relu"],
            "layer_norm_eps": LAYER_NORM_EPS,
            "dropout": number(settings, "dropout", 0.1),
            "attention_dropout": number(settings, "attention_dropout", 0.0),
            "activation_dropout": number(settings, "activation_dropout", 0.0) or number(settings, "relu_dropout", 0.0),
            "label_smoothing": number(settings, "label_smoothing", 0.1),
        },
    )
    for name in ("encoder_layerdrop", "decoder_layerdrop"):
        if settings.get(name):
            original.differences.append(
                f"{name}={settings[name]}, which leaves out layers in training, is no more: further training has all"
            )
    add_positions(original, weights, settings, d_model)
    weights.leave(
        *(
            f"{stack}.{name}"
            for stack in ("encoder", "decoder")
            for name in ("version", "embed_positions._float_tensor")
        )
    )
    weights.check_nothing_left()
    shortest = min(
        each.shape[0] for each in (original.source_positions, original.target_positions) if each is not None
    )
    padding = vocabularies.ids["<pad>"]
    original.generation = {
        **GENERATION,
        "suppress_tokens": [padding],
        "max_new_tokens": min(MAX_NEW_TOKENS, shortest),
    }
    return original


def number(settings: Mapping[str, Any], name: str, default: float) -> float:
    """A setting that is a number; the default where it is missing or something else."""
    value = settings.get(name)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else default


def stacks(weights: Weights, d_model: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The weights of both stacks under our names, and what they tell of the configuration."""
    d_ff = weights.take("encoder.layers.0.fc1.weight", None, d_model).shape[0]
    final_norms = {stack: has_final_norm(weights, stack) for stack in ATTENTIONS}
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
        count = sizes[f"{stack}_layers"] = weights.count(rf"{stack}\.layers\.(\d+)\.")
        norms = {f"{ours}_norm": f"{theirs}_layer_norm" for ours, theirs in attentions.items()}
        norms["feed_forward_norm"] = "final_layer_norm"
        for layer in range(count):
            own, their = f"model.{stack}.layers.{layer}.", f"{stack}.layers.{layer}."
            take(f"{own}feed_forward.fc1", f"{their}fc1", d_ff, d_model)
            take(f"{own}feed_forward.fc2", f"{their}fc2", d_model, d_ff)
            for index, (ours, theirs) in enumerate(norms.items()):
                old = f"layer_norms.{index}"  # before 2019
                take(f"{own}{ours}", f"{their}{old if f'{their}{old}.weight' in weights else theirs}", d_model)
            for ours, theirs in attentions.items():
                take(f"{own}{ours}.out_proj", f"{their}{theirs}.out_proj", d_model, d_model)
                if f"{their}{theirs}.in_proj_weight" in weights:  # before 2020
                    matrices = weights.take(f"{their}{theirs}.in_proj_weight", 3 * d_model, d_model).chunk(3)
                    biases = weights.take(f"{their}{theirs}.in_proj_bias", 3 * d_model).chunk(3)
                    for each, matrix, bias in zip("qkv", matrices, biases, strict=True):
                        layers[f"{own}{ours}.{each}_proj.weight"] = matrix
                        layers[f"{own}{ours}.{each}_proj.bias"] = bias
                    continue
                for each in "qkv":
                    take(f"{own}{ours}.{each}_proj", f"{their}{theirs}.{each}_proj", d_model, d_model)
        if final_norms[stack]:
            take(f"model.{stack}.norm", f"{stack}.layer_norm", d_model)
    return layers, sizes


def has_final_norm(weights: Weights, stack: str) -> bool:
    """Whether a stack ends in a normalisation: it has the weights, and is not of a version that did not use them."""
    name = f"{stack}.layer_norm.weight"
    if name not in weights:
        return False
    version = weights.tensors.get(f"{stack}.version")
    if version is None or version.numel() != 1 or float(version) < FIRST_WITH_FINAL_NORM[stack]:
        weights.leave(name, f"{stack}.layer_norm.bias")
        return False
    return True


def add_positions(original: Original, weights: Weights, settings: Mapping[str, Any], d_model: int) -> None:
    """Adds both tables of positions: the learned ones, or fairseq's sinusoids written out."""
    limits: dict[str, int] = {}
    for side in ("source", "target"):
        limit = settings.get(f"max_{side}_positions")
        limit = 1024 if limit is None else limit
        if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MOST_POSITIONS:
            raise ValueError(f"max_{side}_positions must be a whole number in [1, {MOST_POSITIONS}], got {limit!r}.")
        limits[side] = limit
    if settings.get("encoder_learned_pos"):
        tables = {}
        for side, stack in (("source", "encoder"), ("target", "decoder")):
            rows = limits[side] + FIRST_POSITION
            tables[side] = weights.take(f"{stack}.embed_positions.weight", rows, d_model)[FIRST_POSITION:]
        original.source_positions, original.target_positions = tables["source"], tables["target"]
        return
    weights.leave(*(f"{stack}.embed_positions.weights" for stack in ("encoder", "decoder")))
    longest = max(limits.values())
    original.source_positions = original.target_positions = position_table(longest, d_model)
    original.differences.append(
        f"positions have fairseq's wavelengths 2 pi 10000^(i / (d_model / 2 - 1)) and not the paper's: they are the "
        f"table of learned positions here, {longest} of them for each stack; training it further would change them"
    )


__all__ = ["read"]
