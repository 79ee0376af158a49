"""Every direction of `convert` for one model, in one table: what it changes, how fast it is, and how large.

    python scripts/exchange.py --model runs/en-de --source test.en --reference test.de
    python scripts/exchange.py --model runs/en-de --source test.en --reference test.de --only "onnx int8" --json t.json

The model goes out to each format and is used there: Marian by transformers' own class, CTranslate2 and ONNX by their
engines. It also comes in from each: its weights are written under the names of Marian, `torch.nn.Transformer`,
fairseq, The Annotated Transformer and JoeyNMT, and read back by `convert --from`. fairseq's positions are then a
learned table, and the end of sentence, from which its decoder starts, is our start there. Formats whose words are
separated by white space read and write the pieces of our tokenizer. Where a format has no place for a model such as
this one the reason stands below the table.

Columns: the largest difference of a logit from ours on the references (for CTranslate2, which does not hand out
logits, of a token's log-probability); lines with our text, greedy and with beams; BLEU, with beams; lines a second
with beams, the median of several rounds in which all take turns; the size of the folder. All searches have length
penalty 0, which every engine can do, and the same limit.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import GenerationConfig
from transformers.utils import logging

from vanilla_transformer.convert import convert_from, convert_to
from vanilla_transformer.data import read_lines
from vanilla_transformer.evaluation import corpus_scores
from vanilla_transformer.modeling_vanilla_transformer import sinusoidal_encoding
from vanilla_transformer.translation import encode_lines, load_translator, on_one_line, pad_rows, translate_lines
from vanilla_transformer_cli import while_read


OURS = "ours"
MOST_POSITIONS = 1024
# Written files of the formats that come in, and the order of their special words by id.
SPECIAL = {"fairseq": ("start", "pad", "end", "unk"), "joeynmt": ("unk", "pad", "start", "end")}
COLUMNS = {
    "direction": "direction",
    "difference": "largest difference",
    "greedy": "equal, greedy",
    "beams": "equal, beams",
    "bleu": "BLEU",
    "speed": "lines/s",
    "megabytes": "MB",
}


class NotRepresentable(Exception):
    """A format has no place for this model; the message says why."""


# ---------------------------------------------------------------------------------------------------------------------
# Our weights as checkpoints of other toolkits
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Words:
    """A vocabulary of another toolkit that holds our words.

    Attributes:
        names: Words by id there.
        ours: Our id of each; that of the padding, which is never likely, for the unknown word that we lack.
    """

    names: list[str]
    ours: list[int]

    def rows(self, matrix: torch.Tensor) -> torch.Tensor:
        """Rows by our ids as rows by ids there."""
        return matrix[torch.tensor(self.ours)]


def words_of(model: Any, tokenizer: Any, order: Sequence[str] = ()) -> Words:
    """Our words in their own order, or the special ones first in the order of another toolkit."""
    config = model.config
    by_id = {each: name for name, each in tokenizer.get_vocab().items()}
    names = [by_id.get(each, f"<unused_{each}>") for each in range(config.vocab_size)]
    if not order:
        return Words(names, list(range(len(names))))
    special = {
        "start": ("<s>", config.decoder_start_token_id),
        "pad": ("<pad>", config.pad_token_id),
        "end": ("</s>", config.eos_token_id),
        "unk": ("<unk>", config.pad_token_id),
    }
    taken = {each for _, each in special.values()}
    rest = [each for each in range(len(names)) if each not in taken]
    return Words(
        [special[role][0] for role in order] + [names[each] for each in rest],
        [special[role][1] for role in order] + rest,
    )


def layers_as(model: Any, names: dict[str, str], fuse: str = "") -> dict[str, torch.Tensor]:
    """Weights of both stacks under other names.

    Args:
        model: Ours.
        names: Beginning of the name of each part of a layer, `encoder self_attention.q_proj` and so on, there; and
            `encoder norm`, of the normalisation after the stack. A bias that the model lacks is written as zeros.
        fuse: How the name of the three matrices of query, key and value as one ends; "" leaves them apart.
    """
    written: dict[str, torch.Tensor] = {}
    for stack_name in ("encoder", "decoder"):
        stack = getattr(model.model, stack_name)
        for number, layer in enumerate(stack.layers):
            for part, module in layer.named_modules():
                if not hasattr(module, "weight"):
                    continue
                name = f"{stack_name}.layers.{number}.{names[f'{stack_name} {part}']}"
                bias = module.bias if module.bias is not None else torch.zeros(module.weight.shape[0])
                for kind, tensor in (("weight", module.weight.detach()), ("bias", bias.detach())):
                    separator = "_" if fuse and part.endswith(("q_proj", "k_proj", "v_proj")) else "."
                    key = f"{name}{separator}{kind}"
                    if separator == "_" and key in written:  # query, key, value come in this order
                        tensor = torch.cat([written[key], tensor])
                    written[key] = tensor.clone()
        if model.config.has_final_norm:
            for kind, tensor in stack.norm.state_dict().items():
                written[f"{stack_name}.{names[f'{stack_name} norm']}.{kind}"] = tensor.clone()
    return written


def attention_names(attentions: dict[str, str], projections: Sequence[str]) -> dict[str, str]:
    """What the four matrices of each attention are called; `attentions` begin with the name of the stack."""
    return {
        f"{ours}.{projection}_proj": f"{theirs}.{name}"
        for ours, theirs in attentions.items()
        for projection, name in zip(("q", "k", "v", "out"), projections, strict=True)
    }


def check_fits(model: Any, *, output_bias: bool = True, pre_norm: bool = False, eps: float | None = None) -> None:
    """Raises NotRepresentable for a model that the format has no place for."""
    config = model.config
    if set(config.head_dimensions) != {config.d_model / config.num_heads}:
        raise NotRepresentable("heads there have the width d_model / num_heads")
    if not output_bias and config.output_bias:
        raise NotRepresentable("the output there has no bias")
    if pre_norm and not (config.norm_first and config.has_final_norm):
        raise NotRepresentable("layers there are pre-norm, with a normalisation after each stack")
    if eps is not None and config.layer_norm_eps != eps:
        raise NotRepresentable(f"layer_norm_eps there is {eps}")


def embeddings_of(model: Any) -> dict[str, torch.Tensor]:
    """The three matrices of words, tied or not, by our ids."""
    return {
        "source": model.model.encoder.embed_tokens.weight.detach(),
        "target": model.model.decoder.embed_tokens.weight.detach(),
        "output": model.lm_head.weight.detach(),
    }


def described(model: Any, tokenizer: Any) -> dict[str, Any]:
    """What nn_transformer.json and annotated.json have in common."""
    config = model.config
    words = words_of(model, tokenizer).names
    start = words[config.decoder_start_token_id]
    return {
        "weights": "model.pt",
        "num_heads": config.num_heads,
        "activation": config.activation,
        "layer_norm_eps": config.layer_norm_eps,
        "source_vocabulary": words,
        "bos_token": start,
        "eos_token": words[config.eos_token_id],
        "pad_token": words[config.pad_token_id],
        "unk_token": start,  # every piece is a word
        "source_begins_with_bos": False,
    }


def write_nn_transformer(model: Any, tokenizer: Any, folder: Path) -> None:
    """A model around `torch.nn.Transformer`."""
    check_fits(model)
    attentions = {
        "encoder self_attention": "self_attn",
        "decoder self_attention": "self_attn",
        "decoder cross_attention": "multihead_attn",
    }
    names = attention_names(attentions, ("in_proj", "in_proj", "in_proj", "out_proj"))
    for stack, norms in (("encoder", 2), ("decoder", 3)):
        parts = ("self_attention_norm", *(("cross_attention_norm",) if norms == 3 else ()), "feed_forward_norm")
        names |= {f"{stack} {part}": f"norm{place}" for place, part in enumerate(parts, 1)}
        names |= {f"{stack} feed_forward.fc{place}": f"linear{place}" for place in (1, 2)}
        names[f"{stack} norm"] = "norm"
    state = {f"transformer.{name}": each for name, each in layers_as(model, names, fuse="in_proj").items()}
    matrices = embeddings_of(model)
    state |= {"source.weight": matrices["source"], "target.weight": matrices["target"]}
    state["out.weight"] = matrices["output"]
    if model.lm_head.bias is not None:
        state["out.bias"] = model.lm_head.bias.detach()
    description = {**described(model, tokenizer), "norm_first": model.config.norm_first}
    description |= {"source_embedding": "source.weight", "target_embedding": "target.weight", "output": "out"}
    description["embedding_scale"] = "sqrt(d_model)"
    add_learned_positions(model, state, description)
    torch.save(state, folder / "model.pt")
    (folder / "nn_transformer.json").write_text(json.dumps(description), encoding="utf-8")


def add_learned_positions(model: Any, state: dict[str, torch.Tensor], description: dict[str, Any]) -> None:
    """Tables of learned positions, where the model has them."""
    if model.config.position_embedding == "learned":
        for side, stack in (("source", model.model.encoder), ("target", model.model.decoder)):
            state[f"{side}_table"] = stack.positions.embed_positions.weight.detach()
            description[f"{side}_positions"] = f"{side}_table"


def write_annotated(model: Any, tokenizer: Any, folder: Path) -> None:
    """A model in the style of "The Annotated Transformer", with torch's layer norm."""
    check_fits(model, pre_norm=True)
    if model.config.position_embedding == "learned":
        raise NotRepresentable("positions there are sinusoids")
    attentions = {
        "encoder self_attention": "self_attn",
        "decoder self_attention": "self_attn",
        "decoder cross_attention": "src_attn",
    }
    names = attention_names(attentions, [f"linears.{place}" for place in range(4)])
    for stack, number in (("encoder", 2), ("decoder", 3)):
        parts = ("self_attention_norm", *(("cross_attention_norm",) if number == 3 else ()), "feed_forward_norm")
        names |= {f"{stack} {part}": f"sublayer.{place}.norm" for place, part in enumerate(parts)}
        names |= {f"{stack} feed_forward.fc{place}": f"feed_forward.w_{place}" for place in (1, 2)}
        names[f"{stack} norm"] = "norm"
    matrices, bias = embeddings_of(model), model.lm_head.bias
    state = layers_as(model, names)
    state |= {"src_embed.0.lut.weight": matrices["source"], "tgt_embed.0.lut.weight": matrices["target"]}
    state["generator.proj.weight"] = matrices["output"]
    state["generator.proj.bias"] = torch.zeros(model.config.vocab_size) if bias is None else bias.detach()
    torch.save(state, folder / "model.pt")
    (folder / "annotated.json").write_text(json.dumps(described(model, tokenizer)), encoding="utf-8")


def write_fairseq(model: Any, tokenizer: Any, folder: Path) -> None:
    """A checkpoint of fairseq with learned positions, which hold our sinusoids."""
    config = model.config
    check_fits(model, output_bias=False, eps=1e-5)
    attentions = {
        "encoder self_attention": "self_attn",
        "decoder self_attention": "self_attn",
        "decoder cross_attention": "encoder_attn",
    }
    names = attention_names(attentions, ("q_proj", "k_proj", "v_proj", "out_proj"))
    names |= {f"{ours}_norm": f"{theirs}_layer_norm" for ours, theirs in attentions.items()}
    for stack in ("encoder", "decoder"):
        names |= {f"{stack} feed_forward_norm": "final_layer_norm", f"{stack} norm": "layer_norm"}
        names |= {f"{stack} feed_forward.fc{place}": f"fc{place}" for place in (1, 2)}
    words = words_of(model, tokenizer, SPECIAL["fairseq"])
    state = layers_as(model, names)
    matrices = {name: words.rows(each) for name, each in embeddings_of(model).items()}
    # There the decoder starts from the end of sentence, which it reads nowhere else.
    start, end = (SPECIAL["fairseq"].index(role) for role in ("start", "end"))
    matrices["target"][end] = matrices["target"][start]
    state |= {"encoder.embed_tokens.weight": matrices["source"], "decoder.embed_tokens.weight": matrices["target"]}
    state["decoder.output_projection.weight"] = matrices["output"]
    limit = config.max_position_embeddings if config.position_embedding == "learned" else MOST_POSITIONS
    for stack in ("encoder", "decoder"):
        table = getattr(model.model, stack).positions.embed_positions
        rows = sinusoidal_encoding(torch.arange(limit), config.d_model) if table is None else table.weight.detach()
        # The rows of words that are no padding begin behind its id.
        state[f"{stack}.embed_positions.weight"] = torch.cat([torch.zeros(2, config.d_model), rows])
        if config.has_final_norm:
            state[f"{stack}.version"] = torch.tensor([3.0])
    settings: dict[str, Any] = {"arch": "transformer", "source_lang": "source", "target_lang": "target"}
    for stack in ("encoder", "decoder"):
        settings |= {f"{stack}_attention_heads": config.num_heads, f"{stack}_normalize_before": config.norm_first}
        settings[f"{stack}_learned_pos"] = True
    settings |= {"max_source_positions": limit, "max_target_positions": limit}
    settings["activation_fn"] = {"silu": "swish"}.get(config.activation, config.activation)
    torch.save({"args": argparse.Namespace(**settings), "model": state}, folder / "model.pt")
    for side in ("source", "target"):
        lines = [f"{name} 1\n" for name in words.names[4:]]
        (folder / f"dict.{side}.txt").write_text("".join(lines), encoding="utf-8")


def write_joeynmt(model: Any, tokenizer: Any, folder: Path) -> None:
    """A folder of JoeyNMT, whose layer norms have an eps of 1e-6."""
    config = model.config
    check_fits(model, output_bias=False)
    if config.position_embedding == "learned":
        raise NotRepresentable("positions there are sinusoids")
    if config.has_final_norm != config.norm_first:
        raise NotRepresentable("stacks there end in a normalisation where their layers are pre-norm")
    attentions = {
        "encoder self_attention": "src_src_att",
        "decoder self_attention": "trg_trg_att",
        "decoder cross_attention": "src_trg_att",
    }
    names = attention_names(attentions, ("q_layer", "k_layer", "v_layer", "output_layer"))
    names |= {"encoder self_attention_norm": "layer_norm", "decoder self_attention_norm": "x_layer_norm"}
    names["decoder cross_attention_norm"] = "dec_layer_norm"
    for stack in ("encoder", "decoder"):
        names |= {f"{stack} feed_forward_norm": "feed_forward.layer_norm", f"{stack} norm": "layer_norm"}
        names |= {f"{stack} feed_forward.fc1": "feed_forward.pwff_layer.0"}
        names |= {f"{stack} feed_forward.fc2": "feed_forward.pwff_layer.3"}
    words = words_of(model, tokenizer, SPECIAL["joeynmt"])
    matrices = {name: words.rows(each) for name, each in embeddings_of(model).items()}
    state = layers_as(model, names)
    state |= {"src_embed.lut.weight": matrices["source"], "trg_embed.lut.weight": matrices["target"]}
    state["decoder.output_layer.weight"] = matrices["output"]
    stack_settings = {
        "type": "transformer",
        "num_heads": config.num_heads,
        "layer_norm": "pre" if config.norm_first else "post",
        "activation": {"silu": "swish"}.get(config.activation, config.activation),
        "embeddings": {"scale": True},
    }
    settings = {"model": {"encoder": stack_settings, "decoder": dict(stack_settings)}}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    torch.save({"model_state": state}, folder / "best.ckpt")
    for side in ("src", "trg"):
        (folder / f"{side}_vocab.txt").write_text("".join(f"{name}\n" for name in words.names[4:]), encoding="utf-8")


WRITERS: dict[str, Callable[[Any, Any, Path], None]] = {
    "nn_transformer": write_nn_transformer,
    "fairseq": write_fairseq,
    "annotated": write_annotated,
    "joeynmt": write_joeynmt,
}


# ---------------------------------------------------------------------------------------------------------------------
# The directions
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Direction:
    """A model after its way, ready for work.

    Attributes:
        name: In the table.
        model: With `generate()`.
        tokenizer: Its tokenizer.
        folder: Its files.
        pieces: Its words by our ids, where lines are pieces of our tokenizer separated by white space; None for plain
            text and our ids.
        log_probs: Whether it hands out log-probabilities in place of logits.
        note: What is to be known of it.
    """

    name: str
    model: Any
    tokenizer: Any
    folder: Path
    pieces: list[int] | None = None
    log_probs: bool = False
    note: str = ""
    seconds: list[float] = field(default_factory=list)
    texts: dict[str, list[str]] = field(default_factory=dict)


def open_directions(model_name: str, folder: Path, only: Sequence[str]) -> tuple[list[Direction], dict[str, str]]:
    """Converts the model in every direction; also gives those that there are not, with the reason."""
    model, tokenizer = load_translator(model_name, device="cpu")
    model.save_pretrained(folder / OURS)  # the size of the weights alone, without what a training left
    tokenizer.save_pretrained(folder / OURS)
    directions = [Direction(OURS, model, tokenizer, folder / OURS)]
    missing: dict[str, str] = {}

    @contextlib.contextmanager
    def attempt(name: str) -> Iterator[None]:
        tell(name)
        try:
            yield
        except (NotRepresentable, ImportError, ValueError) as error:
            missing[name] = " ".join(str(error).split())

    def wanted(name: str) -> bool:
        return not only or name in only

    if wanted("marian out") or wanted("marian in"):
        with attempt("marian out"):
            convert_to("marian", folder / OURS, folder / "marian")
            opened = load_translator(str(folder / "marian"), device="cpu")
            directions.append(Direction("marian out", *opened, folder / "marian"))
        if "marian out" in missing:
            missing["marian in"] = missing["marian out"]
        else:
            with attempt("marian in"):
                convert_from("marian", folder / "marian", folder / "marian in")
                opened = load_translator(str(folder / "marian in"), device="cpu")
                directions.append(Direction("marian in", *opened, folder / "marian in"))
    for name, write in WRITERS.items():
        if not wanted(f"{name} in"):
            continue
        with attempt(f"{name} in"):
            foreign = folder / name
            foreign.mkdir()
            write(model, tokenizer, foreign)
            differences = convert_from(name, foreign, folder / f"{name} in")
            theirs, its_tokenizer = load_translator(str(folder / f"{name} in"), device="cpu")
            theirs.generation_config = GenerationConfig(
                **{each: getattr(theirs.config, each) for each in ("bos_token_id", "eos_token_id", "pad_token_id")},
                decoder_start_token_id=theirs.config.decoder_start_token_id,
            )
            words = words_of(model, tokenizer, SPECIAL.get(name, ()))
            ids = its_tokenizer.get_vocab()
            pieces = [0] * model.config.vocab_size
            for word, ours in zip(words.names, words.ours, strict=True):
                if word != "<unk>":
                    pieces[ours] = ids[word]
            directions.append(
                Direction(
                    f"{name} in",
                    theirs,
                    its_tokenizer,
                    folder / f"{name} in",
                    pieces=pieces,
                    note="; ".join(differences),
                )
            )
    for precision in ("float32", "int8"):
        name = f"ctranslate2 {precision}"
        if wanted(name):
            with attempt(name):
                convert_to("ctranslate2", folder / OURS, folder / name, quantization=precision)
                from vanilla_transformer.convert.ctranslate2 import load_ctranslate2

                opened = load_ctranslate2(str(folder / name), device="cpu")
                directions.append(Direction(name, *opened, folder / name, log_probs=True))
    for precision in ("float32", "int8"):
        name = f"onnx {precision}"
        if wanted(name):
            with attempt(name):
                convert_to("onnx", folder / OURS, folder / name, quantization=precision)
                from vanilla_transformer.convert.onnx import load_onnx

                directions.append(Direction(name, *load_onnx(str(folder / name)), folder / name))
    return [each for each in directions if each.name == OURS or wanted(each.name)], {
        name: why for name, why in missing.items() if wanted(name)
    }


def translate(direction: Direction, ours: Direction, lines: list[str], settings: dict[str, Any]) -> list[str]:
    """The best translation of each line, as text."""
    if direction.pieces is not None:
        rows = [row[:-1] for row in encode_lines(ours.tokenizer, lines, range(1, len(lines) + 1))]
        lines = [" ".join(ours.tokenizer.convert_ids_to_tokens(row)) for row in rows]
    answers = [each[0] for each in translate_lines(direction.model, direction.tokenizer, lines, **settings)]
    if direction.pieces is None:
        return [each.text for each in answers]
    back = {theirs: own for own, theirs in enumerate(direction.pieces)}
    ids = [[back[each] for each in answer.token_ids if each in back] for answer in answers]
    return [on_one_line(text) for text in ours.tokenizer.batch_decode(ids, skip_special_tokens=True)]


def largest_difference(direction: Direction, ours: Direction, pairs: Sequence[tuple[list[int], list[int]]]) -> float:
    """The largest difference from our logits, or log-probabilities, in forced decoding of source and target."""
    largest = 0.0
    start = ours.model.config.decoder_start_token_id
    for first in range(0, len(pairs), 16):
        sources, targets = zip(*pairs[first : first + 16], strict=True)
        (ids, mask), (labels, kept) = pad_rows(sources, ours.tokenizer), pad_rows(targets, ours.tokenizer)
        inputs = torch.cat([torch.full_like(labels[:, :1], start), labels[:, :-1]], dim=1)
        with torch.no_grad():
            expected = ours.model(input_ids=ids, attention_mask=mask, decoder_input_ids=inputs).logits
        if direction.log_probs:
            found = direction.model.log_probs(sources, targets)
            log_probs = torch.log_softmax(expected, dim=-1).gather(2, labels[:, :, None])[:, :, 0]
            for row, values in enumerate(found):
                difference = log_probs[row, : len(values)] - torch.tensor(values)
                largest = max(largest, float(difference.abs().max()))
            continue
        got = logits_of(direction, ids, mask, inputs)
        largest = max(largest, float((got - expected)[kept.bool()].abs().max()))
    return largest


def logits_of(direction: Direction, ids: torch.Tensor, mask: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Logits of a model after its way, by our ids."""
    if direction.name.startswith("onnx"):
        from vanilla_transformer.convert.onnx_search import DecoderState

        sources = [row[kept].tolist() for row, kept in zip(ids, mask.bool(), strict=True)]
        state = DecoderState(direction.model.model, *direction.model.model.encode(sources))
        return torch.from_numpy(state.logits(inputs.numpy()))
    if direction.pieces is not None:
        order = torch.tensor(direction.pieces)
        ids, inputs = order[ids], order[inputs]
    with torch.no_grad():
        logits = direction.model(input_ids=ids, attention_mask=mask, decoder_input_ids=inputs).logits
    return logits if direction.pieces is None else logits[:, :, order]


# ---------------------------------------------------------------------------------------------------------------------
# The table
# ---------------------------------------------------------------------------------------------------------------------


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All rows of the table."""
    lines = list(read_lines(arguments.source))
    references = list(read_lines(arguments.reference))
    if len(lines) != len(references):
        raise ValueError(f"{arguments.source} has {len(lines)} lines and {arguments.reference} {len(references)}.")
    lines, references = lines[: arguments.lines], references[: arguments.lines]
    directions, missing = open_directions(arguments.model, folder, arguments.only)
    ours = directions[0]
    visible = [place for place, pair in enumerate(zip(lines, references, strict=True)) if all(map(str.strip, pair))]
    numbers = [place + 1 for place in visible]
    sources = encode_lines(ours.tokenizer, [lines[place] for place in visible], numbers)
    targets = encode_lines(ours.tokenizer, [references[place] for place in visible], numbers, target=True)
    pairs = list(zip(sources, targets, strict=True))[: arguments.scored_lines]
    common = {"max_new_tokens": arguments.max_new_tokens, "length_penalty": 0.0, "early_stopping": False}
    beams = {"num_beams": arguments.num_beams, **common}
    greedy = {"num_beams": 1, "max_new_tokens": arguments.max_new_tokens}
    for round_number in range(arguments.rounds + 1):  # the first warms up, and is greedy
        for direction in directions:
            start = time.perf_counter()
            texts = translate(direction, ours, lines, beams if round_number else greedy)
            if round_number:
                direction.seconds.append(time.perf_counter() - start)
            direction.texts["beams" if round_number else "greedy"] = texts
            tell(f"round {round_number}: {direction.name}")
    rows = []
    for direction in directions:
        row: dict[str, Any] = {"direction": direction.name}
        row["difference"] = None if direction is ours else largest_difference(direction, ours, pairs)
        for search in ("greedy", "beams"):
            row[search] = sum(map(str.__eq__, direction.texts[search], ours.texts[search]))
        row["bleu"] = corpus_scores(direction.texts["beams"], [references])["bleu"]["score"]
        row["speed"] = len(lines) / statistics.median(direction.seconds)
        row["megabytes"] = sum(each.stat().st_size for each in direction.folder.rglob("*") if each.is_file()) / 1e6
        row["note"] = direction.note
        rows.append(row)
    rows += [{**dict.fromkeys(COLUMNS), "direction": name, "note": why} for name, why in missing.items()]
    return {
        "model": arguments.model,
        "lines": len(lines),
        "settings": f"beam {arguments.num_beams}, length penalty 0, at most {arguments.max_new_tokens} tokens, "
        f"{torch.get_num_threads()} thread(s)",
        "rows": rows,
    }


def as_markdown(result: dict[str, Any]) -> str:
    """The table, and below it what is to be known of its rows."""
    written = [f"| {' | '.join(COLUMNS.values())} |", f"|{' --- |' * len(COLUMNS)}"]
    forms = {"difference": "{:.1e}", "bleu": "{:.2f}", "speed": "{:.1f}", "megabytes": "{:.1f}"}
    notes = []
    for row in result["rows"]:
        cells = []
        for name in COLUMNS:
            cell = "-" if row[name] is None else forms.get(name, "{}").format(row[name])
            if name in ("greedy", "beams") and row[name] is not None:
                cell = f"{cell} of {result['lines']}"
            if name == "difference" and row["direction"].startswith("ctranslate2") and row[name] is not None:
                cell += " (log-probabilities)"
            cells.append(cell)
        written.append(f"| {' | '.join(cells)} |")
        if row["note"]:
            notes.append(f"{row['direction']}: {row['note']}")
    return "\n".join([*written, "", *notes, f"{result['lines']} lines, {result['settings']}"])


def tell(text: str) -> None:
    """A word on what is being done, on stderr."""
    print(text, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Runs the script; see its docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or name of a model of this package")
    parser.add_argument("--source", required=True, help="text to translate")
    parser.add_argument("--reference", required=True, help="its translation")
    parser.add_argument("--lines", type=int, help="only so many lines, from the first (default: all)")
    parser.add_argument("--scored_lines", type=int, default=200, help="of which logits are compared (default: 200)")
    parser.add_argument("--num_beams", type=int, default=4)
    parser.add_argument("--max_new_tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3, help="how often each translates with beams (default: 3)")
    parser.add_argument("--only", action="append", default=[], metavar="DIRECTION", help='such as "onnx int8"')
    parser.add_argument("--folder", help="where the converted models are left (default: nowhere)")
    parser.add_argument("--json", metavar="FILE", help="where the figures are written besides")
    arguments = parser.parse_args(argv)
    logging.disable_progress_bar()
    try:
        with contextlib.ExitStack() as stack:
            folder = arguments.folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="exchange_"))
            os.makedirs(folder, exist_ok=True)
            result = measure(arguments, Path(folder))
    except (ValueError, OSError) as error:
        tell(f"error: {' '.join(str(error).split())}")
        return 2
    print(as_markdown(result))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(while_read(main))
