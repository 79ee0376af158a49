"""ONNX: models of this package out to it, by `torch.export`, and translation with onnxruntime in place of torch.

The folder is laid out as the Hub's ONNX exports of encoder-decoders are:

- `encoder_model.onnx`: `input_ids`, `attention_mask` to `last_hidden_state`;
- `decoder_model_merged.onnx`: `input_ids`, `encoder_attention_mask`, `encoder_hidden_states`,
  `past_key_values.{layer}.{decoder,encoder}.{key,value}` and `use_cache_branch` to `logits` and `present.*`. With
  `use_cache_branch` False it reads `encoder_hidden_states`, makes the keys and values of the encoder's output, and
  ignores the past, which may be of any length and of one row. With True it reads the past, ignores
  `encoder_hidden_states`, and gives `present.*.encoder.*` with no row: those of the first call are kept;
- tokenizer, configuration and generation settings, and `onnx_search.py`, which translates with them and with
  onnxruntime and numpy alone, without this package and torch.

Rows, source, target and past are of any length. Masks are 1 for kept tokens and 0 for padding, which may stand on
either side of the source; a target is padded behind its words, where it needs no mask.
"""

import copy
import io
import json
import logging
import math
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase


try:
    import onnx
    import onnxruntime
    import onnxscript  # noqa: F401  (the exporter's)
    from onnx import TensorProto, helper, numpy_helper
except ImportError as error:
    raise ImportError(
        f'this needs ONNX: pip install "vanilla-transformer[export]" (the import said: {error})'
    ) from error

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.convert import onnx_search
from vanilla_transformer.convert.engines import EngineTranslator, Settings
from vanilla_transformer.convert.onnx_search import DECODER, ENCODER, OnnxModel
from vanilla_transformer.modeling_vanilla_transformer import (
    positions_of_kept_tokens,
    scaled_dot_product_attention,
)
from vanilla_transformer.translation import load_translator


OPSET = 18
QUANTIZATIONS = ("float32", "int8")
# A file of this format holds less than 2 GB; what would be greater keeps its weights in a file beside it.
MOST_BYTES_INSIDE = 2_000_000_000
KINDS = ("decoder.key", "decoder.value", "encoder.key", "encoder.value")


# ---------------------------------------------------------------------------------------------------------------------
# What is exported: the model's own layers, with equation (1) written out and the cache as plain tensors
# ---------------------------------------------------------------------------------------------------------------------


def keys_and_values(attention: Any, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K W^K and V W^V, split into heads."""
    return attention.split_heads(attention.k_proj(states)), attention.split_heads(attention.v_proj(states))


def attend(
    attention: Any, states: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Multi-head attention to keys and values that are known."""
    query = attention.split_heads(attention.q_proj(states))
    heads, _ = scaled_dot_product_attention(query, key, value, mask)
    return attention.out_proj(heads.transpose(1, 2).flatten(2))


def encode_layer(layer: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """One layer of the encoder."""

    def self_attention(y: torch.Tensor) -> torch.Tensor:
        key, value = keys_and_values(layer.self_attention, y)
        return attend(layer.self_attention, y, key, value, mask)

    x = layer.add_and_norm(x, self_attention, layer.self_attention_norm)
    return layer.add_and_norm(x, layer.feed_forward, layer.feed_forward_norm)


def decode_layer(
    layer: Any,
    x: torch.Tensor,
    causal: torch.Tensor,
    source_mask: torch.Tensor,
    past_key: torch.Tensor,
    past_value: torch.Tensor,
    source_key: torch.Tensor,
    source_value: torch.Tensor,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One layer of the decoder, and its keys and values of self-attention with the new ones behind."""
    present: list[torch.Tensor] = []

    def self_attention(y: torch.Tensor) -> torch.Tensor:
        key, value = keys_and_values(layer.self_attention, y)
        present.extend((torch.cat([past_key, key], dim=2), torch.cat([past_value, value], dim=2)))
        return attend(layer.self_attention, y, present[0], present[1], causal)

    def cross_attention(y: torch.Tensor) -> torch.Tensor:
        return attend(layer.cross_attention, y, source_key, source_value, source_mask)

    x = layer.add_and_norm(x, self_attention, layer.self_attention_norm)
    x = layer.add_and_norm(x, cross_attention, layer.cross_attention_norm)
    return layer.add_and_norm(x, layer.feed_forward, layer.feed_forward_norm), present


class Sinusoids(nn.Module):
    """`sinusoidal_encoding` with cos(x) as sin(x + pi / 2), since not every onnxruntime has a cosine in float64."""

    def __init__(self, d_model: int):
        super().__init__()
        self.d_model = d_model

    def forward(self, positions: torch.Tensor, length: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """See `PositionEncoding.forward`; computed anew from the positions, at any length."""
        column = torch.arange(self.d_model)
        wavelength_over_2_pi = torch.pow(10000.0, (column - column % 2).double() / self.d_model)
        angle = positions.double().unsqueeze(-1) / wavelength_over_2_pi + (column % 2).double() * (math.pi / 2)
        return angle.sin().to(dtype)


class Encoder(nn.Module):
    """The encoder as a function of tensors alone."""

    def __init__(self, model: Any):
        super().__init__()
        self.encoder = model.model.encoder

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """See the module's docstring."""
        kept = attention_mask != 0
        # No length is asked for: learned positions end where the table does, which whoever translates sees to.
        x = self.encoder.embed(input_ids, None, positions_of_kept_tokens(kept), 0)
        mask = kept[:, None, None, :]
        for layer in self.encoder.layers:
            x = encode_layer(layer, x, mask)
        return self.encoder.norm(x)


class SourceKeys(nn.Module):
    """Keys and values that the decoder's layers make of the encoder's output, once for each source."""

    def __init__(self, model: Any):
        super().__init__()
        self.layers = model.model.decoder.layers

    def forward(self, encoder_hidden_states: torch.Tensor) -> list[torch.Tensor]:
        """Shape `(batch, source_length, d_model)` to key and value of each layer, split into heads."""
        return [
            each for layer in self.layers for each in keys_and_values(layer.cross_attention, encoder_hidden_states)
        ]


class Decoder(nn.Module):
    """The decoder and the output projection as a function of tensors alone."""

    def __init__(self, model: Any):
        super().__init__()
        self.decoder = model.model.decoder
        self.lm_head = model.lm_head

    def forward(
        self, input_ids: torch.Tensor, encoder_attention_mask: torch.Tensor, *memory: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Logits, and keys and values of self-attention with the new ones behind, layer by layer.

        Args:
            input_ids: Target tokens, shape `(batch, length)`.
            encoder_attention_mask: Shape `(batch, source_length)`.
            memory: Of each layer the four of `KINDS`: those of earlier tokens, which may be none, and of the source.
        """
        past, length = memory[0].shape[2], input_ids.shape[1]
        index = torch.arange(length, device=input_ids.device) + past
        x = self.decoder.embed(input_ids, None, index[None], 0)
        causal = (torch.arange(past + length, device=x.device) <= index[:, None])[None, None]
        source_mask = (encoder_attention_mask != 0)[:, None, None, :]
        present: list[torch.Tensor] = []
        for number, layer in enumerate(self.decoder.layers):
            x, new = decode_layer(layer, x, causal, source_mask, *memory[4 * number : 4 * number + 4])
            present.extend(new)
        # In two dimensions the product takes the matrix as it is, and shares it with the embedding where they are one.
        logits = self.lm_head(self.decoder.norm(x).flatten(0, 1)).unflatten(0, (input_ids.shape[0], length))
        return (logits, *present)


@contextmanager
def quietly() -> Iterator[None]:
    """Keeps the exporter's talk of packages and names from the user."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir", "root")]
    levels = [each.level for each in loggers]
    try:
        for each in loggers:
            each.setLevel(logging.ERROR)
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)


def exported(
    module: nn.Module,
    inputs: dict[str, tuple[torch.Tensor, dict[int, str]]],
    outputs: list[str],
    positional: int | None = None,
) -> "onnx.ModelProto":
    """A module as an ONNX graph.

    Args:
        module: In evaluation mode.
        inputs: Name of each input, in order, with an example and the names of its dimensions of any size.
        outputs: Names of the outputs.
        positional: How many inputs are arguments by name; those behind go into `*memory`. None means all.
    """
    sizes: dict[str, Any] = {}
    shapes = [
        {place: sizes.setdefault(name, torch.export.Dim(name)) for place, name in dimensions.items()}
        for _, dimensions in inputs.values()
    ]
    dynamic = tuple(shapes) if positional is None else (*shapes[:positional], tuple(shapes[positional:]))
    with quietly(), torch.no_grad():
        program: Any = torch.onnx.export(
            module,
            tuple(example for example, _ in inputs.values()),
            dynamo=True,
            input_names=list(inputs),
            output_names=outputs,
            dynamic_shapes=dynamic,
            opset_version=OPSET,
            verbose=False,
        )
    return program.model_proto


# The sizes of the examples differ from each other and from 1, so that no two dimensions are taken for one.
BATCH, SOURCE = (2, "batch_size"), (5, "encoder_sequence_length")
TARGET, PAST = (3, "decoder_sequence_length"), (4, "past_decoder_sequence_length")


def example(*sizes: int | tuple[int, str], dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, dict[int, str]]:
    """A tensor to trace with, and the names of its dimensions of any size."""
    shape = [size if isinstance(size, int) else size[0] for size in sizes]
    names = {place: size[1] for place, size in enumerate(sizes) if not isinstance(size, int)}
    return torch.ones(shape, dtype=dtype), names


def heads_of(config: VanillaTransformerConfig, name: str) -> int:
    """Heads of what `{layer}.{kind}` remembers; pruned layers have fewer."""
    layer, kind, _ = name.split(".")
    return len(config.heads_of("decoder" if kind == "decoder" else "cross", int(layer)))


def graphs_of(model: Any) -> tuple["onnx.ModelProto", "onnx.ModelProto", "onnx.ModelProto"]:
    """Encoder, keys of the source, and decoder, the parts of the two files.

    Args:
        model: In evaluation mode, in float32, on the CPU; its positions are replaced.
    """
    config = model.config
    if config.position_embedding == "sinusoidal":
        for stack in (model.model.encoder, model.model.decoder):
            stack.positions = Sinusoids(config.d_model)
    widths = config.head_dimensions
    tokens, mask = example(BATCH, SOURCE, dtype=torch.long), example(BATCH, SOURCE, dtype=torch.long)
    encoder = exported(Encoder(model), {"input_ids": tokens, "attention_mask": mask}, ["last_hidden_state"])
    layers = range(config.decoder_layers)
    names = [f"{layer}.{kind}" for layer in layers for kind in KINDS]
    source_names = [name for name in names if ".encoder." in name]
    keys = exported(
        SourceKeys(model),
        {"encoder_hidden_states": example(BATCH, SOURCE, config.d_model)},
        [f"present.{name}" for name in source_names],
    )
    memory = {
        f"past_key_values.{name}": example(
            BATCH, heads_of(config, name), PAST if ".decoder." in name else SOURCE, widths[name.endswith("value")]
        )
        for name in names
    }
    inputs = {"input_ids": example(BATCH, TARGET, dtype=torch.long), "encoder_attention_mask": mask, **memory}
    outputs = ["logits", *(f"present.{name}" for name in names if ".decoder." in name)]
    return encoder, keys, exported(Decoder(model), inputs, outputs, positional=2)


def fold_transposes(model: "onnx.ModelProto") -> None:
    """Stores matrices the way round in which they are multiplied."""
    graph = model.graph
    constants = {each.name: each for each in graph.initializer}
    for node in [each for each in graph.node if each.op_type == "Transpose" and each.input[0] in constants]:
        array = numpy_helper.to_array(constants[node.input[0]])
        order = next((list(each.ints) for each in node.attribute if each.name == "perm"), None)
        graph.initializer.append(numpy_helper.from_array(array.transpose(order).copy(), node.output[0]))
        graph.node.remove(node)
    drop_unused_weights(model)


def split_products(model: "onnx.ModelProto") -> None:
    """Makes `Gemm` of a matrix that it transposes a plain product with one of its own, which quantisation can change.

    onnxruntime's own way to this turns the matrix around where it is, and the embedding may be the same one.
    """
    graph = model.graph
    constants = {each.name: each for each in graph.initializer}
    nodes = []
    for node in graph.node:
        if node.op_type != "Gemm":
            nodes.append(node)
            continue
        matrix, result = numpy_helper.to_array(constants[node.input[1]]), node.output[0]
        if any(each.name == "transB" and each.i for each in node.attribute):
            matrix = matrix.T.copy()
        graph.initializer.append(numpy_helper.from_array(matrix, f"{result}.matrix"))
        product = f"{result}.product" if len(node.input) > 2 else result
        nodes.append(helper.make_node("MatMul", [node.input[0], f"{result}.matrix"], [product]))
        if len(node.input) > 2:
            nodes.append(helper.make_node("Add", [product, node.input[2]], [result]))
    del graph.node[:]
    graph.node.extend(nodes)
    drop_unused_weights(model)


def drop_unused_weights(model: "onnx.ModelProto") -> None:
    """Takes weights out that no node reads any more."""
    used = {name for node in model.graph.node for name in node.input}
    for each in [each for each in model.graph.initializer if each.name not in used]:
        model.graph.initializer.remove(each)


def merged(decoder: "onnx.ModelProto", keys: "onnx.ModelProto", config: VanillaTransformerConfig) -> "onnx.ModelProto":
    """`decoder_model_merged.onnx`: the decoder at the first call or after it, by `use_cache_branch`.

    Both branches use the same weights, which stand outside them.
    """
    names = [f"{layer}.{kind}" for layer in range(config.decoder_layers) for kind in KINDS]
    widths = config.head_dimensions
    outputs = ["logits", *(f"present.{name}" for name in names)]
    types = {each.name: each.type.tensor_type for each in (*decoder.graph.output, *keys.graph.output)}
    weights = [*decoder.graph.initializer]
    renamed = {}
    for each in keys.graph.initializer:
        weight = TensorProto()
        weight.CopyFrom(each)
        weight.name = renamed[each.name] = f"source_keys/{each.name}"
        weights.append(weight)
    renamed |= {each.name: each.name for each in keys.graph.input}

    def branch(title: str, nodes: list[Any], results: dict[str, str]) -> Any:
        """A branch; `results` names those outputs that are not called after the decoder's."""
        declared = [
            helper.make_tensor_value_info(results.get(name, f"{title}/{name}"), types[name].elem_type, None)
            for name in outputs
        ]
        return helper.make_graph(nodes, title, [], declared)

    # After the first call nothing is made of the encoder's output.
    unchanged = {each.name: each.name for each in (*decoder.graph.initializer, *decoder.graph.input)}
    later = [with_prefix(node, "later/", unchanged) for node in decoder.graph.node]
    # At the first call keys of the source are made, and nothing is remembered.
    first = [with_prefix(node, "source_keys/", renamed) for node in keys.graph.node]
    first.append(helper.make_node("Shape", ["input_ids"], ["rows"], start=0, end=1))
    past, made = {}, {}
    for name in names:
        width = widths[name.endswith("value")]
        if ".encoder." in name:
            made[f"present.{name}"] = past[f"past_key_values.{name}"] = f"source_keys/present.{name}"
            empty = numpy_helper.from_array(np.zeros((0, heads_of(config, name), 1, width), np.float32))
            later.append(helper.make_node("Constant", [], [f"later/present.{name}"], value=empty))
        else:
            nothing = past[f"past_key_values.{name}"] = f"nothing.{name}"
            tail = numpy_helper.from_array(np.array([heads_of(config, name), 0, width], np.int64))
            first += [
                helper.make_node("Constant", [], [f"{nothing}.tail"], value=tail),
                helper.make_node("Concat", ["rows", f"{nothing}.tail"], [f"{nothing}.shape"], axis=0),
                helper.make_node("ConstantOfShape", [f"{nothing}.shape"], [nothing]),
            ]
    first += [with_prefix(node, "first/", {**unchanged, **past}) for node in decoder.graph.node]

    inputs = {each.name: each for each in (*decoder.graph.input, *keys.graph.input)}
    declared = []
    for name in outputs:
        sizes = [each.dim_param or each.dim_value for each in types[name].shape.dim]
        if ".decoder." in name:
            sizes[2] = "present_decoder_sequence_length"
        declared.append(helper.make_tensor_value_info(name, types[name].elem_type, sizes))
    graph = helper.make_graph(
        [
            helper.make_node(
                "If",
                ["use_cache_branch"],
                outputs,
                then_branch=branch("later", later, {}),
                else_branch=branch("first", first, made),
            )
        ],
        "decoder",
        [
            *(inputs[name] for name in ("encoder_attention_mask", "input_ids", "encoder_hidden_states")),
            *(inputs[f"past_key_values.{name}"] for name in names),
            helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1]),
        ],
        declared,
        weights,
    )
    opsets = {each.domain: each for each in (*decoder.opset_import, *keys.opset_import)}
    return helper.make_model(graph, opset_imports=list(opsets.values()), ir_version=decoder.ir_version)


def with_prefix(node: Any, prefix: str, names: dict[str, str]) -> Any:
    """A copy of a node, for a branch, whose results have names of their own.

    Args:
        node: Of a graph that becomes a branch.
        prefix: Put before the names of results.
        names: Inputs of the graph and weights, which have no prefix, with their names outside of the branch.
    """
    copied = onnx.NodeProto()
    copied.CopyFrom(node)
    for place, name in enumerate(node.input):
        copied.input[place] = names.get(name, prefix + name if name else name)
    for place, name in enumerate(node.output):
        copied.output[place] = prefix + name if name else name
    copied.name = prefix + node.name if node.name else ""
    return copied


def quantized(model: "onnx.ModelProto") -> "onnx.ModelProto":
    """Matrices in 8 bits, one scale a column; products in whole numbers, of inputs scaled as they come."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    split_products(model)
    with tempfile.TemporaryDirectory(prefix="vanilla_transformer_") as folder, quietly():
        path = os.path.join(folder, "model.onnx")
        quantize_dynamic(model, path, per_channel=True, weight_type=QuantType.QInt8)
        return onnx.load(path)


def save(model: "onnx.ModelProto", path: Path) -> None:
    """Writes a model that onnx has checked, with the weights in a file beside it where the format demands that."""
    inside = model.ByteSize() <= MOST_BYTES_INSIDE
    if not inside:
        onnx.save_model(
            model, str(path), save_as_external_data=True, all_tensors_to_one_file=True, location=f"{path.name}_data"
        )
    else:
        onnx.save_model(model, str(path))
    onnx.checker.check_model(str(path))


def to_onnx(
    model: Any, tokenizer: PreTrainedTokenizerBase, output_dir: str | os.PathLike, quantization: str | None = None
) -> None:
    """Writes a model of this package in the ONNX format, with its tokenizer and generation settings.

    Args:
        model: A `VanillaTransformerForConditionalGeneration`.
        tokenizer: Its tokenizer.
        output_dir: A folder, made where it does not exist. An ONNX model that is there already is replaced.
        quantization: "int8" stores the matrices in 8 bits and multiplies so, by onnxruntime's dynamic quantisation;
            None and "float32" are float32, whatever the model's own precision.

    Raises:
        ValueError: The model is not of this package, the tokenizer is not that of the model, `quantization` is
            unknown, or the folder holds another kind of model.
    """
    if not isinstance(model.config, VanillaTransformerConfig):
        raise ValueError(
            f"expected a model of this package, got one of type {model.config.model_type!r}; optimum-cli export onnx "
            "converts those of transformers."
        )
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise ValueError(f"quantization must be one of {', '.join(QUANTIZATIONS)}, got {quantization!r}.")
    config = model.config
    if len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} words and the model {config.vocab_size}: it is not the tokenizer of "
            "this model."
        )
    for name in ("decoder_start_token_id", "eos_token_id"):
        if getattr(config, name) is None:
            raise ValueError(
                f"translation with onnxruntime needs {name}, and the configuration of the model has none."
            )
    target = Path(output_dir)
    if (target / "config.json").exists() and not (target / ENCODER).exists():
        raise ValueError(f"{output_dir} holds a model of another kind; choose another folder for the converted one.")
    # A copy: the exporter traces in evaluation mode, in float32, on a CPU.
    encoder, keys, decoder = graphs_of(copy.deepcopy(model).cpu().float().eval())
    for each in (encoder, keys, decoder):
        fold_transposes(each)
    if quantization == "int8":
        encoder, keys, decoder = (quantized(each) for each in (encoder, keys, decoder))
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".onnx.", dir=target) as name:
        folder = Path(name)
        save(encoder, folder / ENCODER)
        save(merged(decoder, keys, config), folder / DECODER)
        settings = {
            key: value for key, value in config.to_dict().items() if key not in ("auto_map", "custom_pipelines")
        }  # no code of this package lies there
        (folder / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        tokenizer.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
        shutil.copyfile(onnx_search.__file__, folder / Path(onnx_search.__file__).name)
        for path in sorted(folder.iterdir()):
            os.replace(path, target / path.name)


def write(
    name: str,
    folder: str | os.PathLike,
    *,
    quantization: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> list[str]:
    """Writes a saved model of this package in the ONNX format: `to_onnx` for the command.

    Args:
        name: A folder that `save_pretrained` wrote, or the name of a model on the Hub.
        folder: Where to write.
        quantization: As in `to_onnx`.
        revision: As in `load_translator`.
        trust_remote_code: As in `load_translator`.

    Returns:
        What the format could not take over, a line each.

    Raises:
        ValueError: As `to_onnx` and `load_translator` do.
    """
    model, tokenizer = load_translator(name, device="cpu", revision=revision, trust_remote_code=trust_remote_code)
    to_onnx(model, tokenizer, folder, quantization)
    return []


# ---------------------------------------------------------------------------------------------------------------------
# Translation
# ---------------------------------------------------------------------------------------------------------------------


class OnnxTranslator(EngineTranslator):
    """A model in onnxruntime with the `generate()` of transformers, for `translate_lines` and the pipeline.

    `load_onnx` builds it; `pipeline("translation", model=translator, tokenizer=tokenizer)` takes it. It finds what
    torch finds, up to rounding, by every stop rule and length penalty. Without this package the same searches run from
    the file `onnx_search.py` in the model's folder.

    Attributes:
        model: The `OnnxModel`.
    """

    engine = "onnxruntime"

    def __init__(self, model: OnnxModel, config: VanillaTransformerConfig, generation_config: GenerationConfig):
        super().__init__(config, generation_config, model.max_positions)
        self.model = model

    def search(
        self, sources: list[list[int]], limits: list[int], settings: Settings
    ) -> list[list[tuple[list[int], float]]]:
        """See `EngineTranslator.search`."""
        return self.model.search(
            sources,
            limits,
            num_beams=settings.num_beams,
            num_best=settings.num_sequences,
            length_penalty=settings.penalty,
            length_penalty_type=settings.penalty_type,
            early_stopping=settings.value("early_stopping") or False,
            ends=settings.ends,
        )

    def log_probs(self, sources: list[list[int]], targets: list[list[int]]) -> list[list[float]]:
        """The log-probability of each token of each target, by forced decoding."""
        return self.model.log_probs(sources, targets)


def load_onnx(
    name: str, *, device: str | None = None, revision: str | None = None, trust_remote_code: bool = False
) -> tuple[OnnxTranslator, PreTrainedTokenizerBase]:
    """Opens a model for translation with onnxruntime.

    Args:
        name: A folder that `to_onnx` or `convert --to onnx` wrote, or whatever `load_translator` opens, which is
            converted on the way, in a temporary folder.
        device: "cpu", or "cuda" with the package onnxruntime-gpu; None means the CPU.
        revision: As in `load_translator`, for a model that is converted on the way.
        trust_remote_code: Likewise.

    Returns:
        The translator, which uses as many threads as torch, and the tokenizer.

    Raises:
        ValueError: The device cannot be used, the folder holds an ONNX model that does not come from this package, or
            whatever `to_onnx` and `load_translator` raise.
    """
    providers = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
    provider = providers.get(device or "cpu", "")
    if provider not in onnxruntime.get_available_providers():
        raise ValueError(
            f"device {device!r} cannot be used here: onnxruntime computes on cpu, or on cuda with the package "
            "onnxruntime-gpu."
        )
    if os.path.isfile(os.path.join(name, ENCODER)):
        return open_folder(name, provider)
    model, tokenizer = load_translator(name, device="cpu", revision=revision, trust_remote_code=trust_remote_code)
    with tempfile.TemporaryDirectory(prefix="vanilla_transformer_") as folder:
        to_onnx(model, tokenizer, folder)
        translator, _ = open_folder(folder, provider)
    return translator, tokenizer


def open_folder(folder: str, provider: str) -> tuple[OnnxTranslator, PreTrainedTokenizerBase]:
    """The translator and the tokenizer of an ONNX model that this package wrote."""
    try:
        model = OnnxModel(folder, threads=torch.get_num_threads(), providers=[provider])
        config = VanillaTransformerConfig.from_dict(model.config)
        generation_config = GenerationConfig.from_pretrained(folder)
    except (OSError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{folder} is no ONNX model that this package wrote ({error}); convert the model that it comes "
            "from again, with vanilla-transformer convert --to onnx."
        ) from error
    return OnnxTranslator(model, config, generation_config), AutoTokenizer.from_pretrained(folder)
