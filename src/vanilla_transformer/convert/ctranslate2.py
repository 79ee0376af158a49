"""CTranslate2: models of this package out to it, and translation with it in place of torch.

Every departure that the configuration knows has an exact counterpart there: positions are a table, heads of unequal
widths are padded with zeros, norms and biases are optional. What CTranslate2's own beam search lacks is the paper's
length penalty and a stop rule that waits for it; `CTranslate2Translator` says how it comes near.

Importing this module registers the model with CTranslate2's converter, so that

    python -m vanilla_transformer.convert.ctranslate2 --model FOLDER --output_dir D

is `ct2-transformers-converter` for models of this package, with all of its options.
"""

import copy
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase


try:
    import ctranslate2
    from ctranslate2.converters.transformers import ModelLoader, register_loader
    from ctranslate2.converters.transformers import main as stock_main
    from ctranslate2.converters.utils import fuse_linear
    from ctranslate2.specs import common_spec, transformer_spec
    from ctranslate2.specs.model_spec import ACCEPTED_MODEL_TYPES
except ImportError as error:
    raise ImportError(
        f'this needs CTranslate2: pip install "vanilla-transformer[export]" (the import said: {error})'
    ) from error

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.convert.engines import EngineTranslator, Settings
from vanilla_transformer.modeling_vanilla_transformer import sinusoidal_encoding
from vanilla_transformer.translation import load_translator, ranking_penalty, token_limit


ACTIVATIONS = {
    "relu": common_spec.Activation.RELU,
    "gelu": common_spec.Activation.GELU,
    "silu": common_spec.Activation.SWISH,
}

# Rows of the table of sinusoids, which have no end of their own; more where the tokenizer lets longer texts through.
POSITIONS = 2048
MOST_POSITIONS = 32768

# How many times more translations than beams are to be complete before the search ends, where the stop rule is not
# `early_stopping=True` (which is 1). With 2 it mostly ends with the translation that "never" ends with.
PATIENCE = 2.0

# Settings that forbid words. In transformers the scores of the others stay what they were, here they are made to sum
# to 1 again, which moves beams.
GREEDY_SETTINGS = ("min_new_tokens", "min_length", "no_repeat_ngram_size")

# The part of CTranslate2's config.json that is ours: the model's configuration and the length of its table.
OUR_SETTINGS = "vanilla_transformer"


# ---------------------------------------------------------------------------------------------------------------------
# Conversion
# ---------------------------------------------------------------------------------------------------------------------


class TransformerSpec(transformer_spec.TransformerSpec):
    """CTranslate2's model with files beside it, of which `--copy_files` may bring one again."""

    def register_file(self, path: str, filename: str | None = None) -> None:
        """Adds a file to the folder, in place of one of the same name."""
        self._files.pop(os.path.basename(path) if filename is None else filename, None)
        super().register_file(path, filename)


@register_loader("VanillaTransformerConfig")
class VanillaTransformerLoader(ModelLoader):
    """Describes a model of this package to CTranslate2.

    Args:
        max_positions: Rows of the table of sinusoids; None means `POSITIONS`, or what the tokenizer's limit asks for.
    """

    def __init__(self, max_positions: int | None = None):
        self.max_positions = max_positions

    @property
    def architecture_name(self) -> str:
        """Where transformers finds the class that opens the model."""
        return "AutoModelForSeq2SeqLM"

    def __call__(self, model: Any, tokenizer: PreTrainedTokenizerBase) -> TransformerSpec:
        """The whole model, with its tokenizer and generation settings as files beside it."""
        config = model.config
        if len(tokenizer) > config.vocab_size:
            raise ValueError(
                f"the tokenizer has {len(tokenizer)} words and the model {config.vocab_size}: it is not the tokenizer "
                "of this model."
            )
        if config.pruned_heads is not None:
            raise ValueError("this model has pruned_heads; CTranslate2 knows only one number of heads for all layers.")
        for name in ("decoder_start_token_id", "eos_token_id"):
            if getattr(config, name) is None:
                raise ValueError(f"CTranslate2 needs {name}, and the configuration of the model has none.")
        rows = self.rows_of_positions(model, tokenizer)
        encoder = self.stack_spec(transformer_spec.TransformerEncoderSpec, model.model.encoder, rows)
        decoder = self.stack_spec(transformer_spec.TransformerDecoderSpec, model.model.decoder, rows)
        set_linear(decoder.projection, model.lm_head)
        spec = TransformerSpec(encoder, decoder)
        tokens = self.get_vocabulary(model, tokenizer)
        spec.register_source_vocabulary(tokens)
        spec.register_target_vocabulary(tokens)
        ends = config.eos_token_id
        spec.config.eos_token = tokens[ends[0] if isinstance(ends, list) else ends]
        spec.config.decoder_start_token = tokens[config.decoder_start_token_id]
        # Used only where a text holds words that the vocabulary lacks, which those of its own tokenizer never do.
        spec.config.bos_token = spec.config.decoder_start_token
        spec.config.unk_token = tokens[config.pad_token_id]
        spec.config.layer_norm_epsilon = config.layer_norm_eps
        settings = {"config": json.loads(config.to_json_string()), "max_positions": rows}
        spec.config.add_attribute(OUR_SETTINGS, settings)
        register_files(spec, model, tokenizer)
        return spec

    def get_model_spec(self, model: Any) -> TransformerSpec:
        """Part of the interface of CTranslate2; `__call__` does all of it."""
        raise TypeError("a model of this package is converted together with its tokenizer: call the loader.")

    def get_vocabulary(self, model: Any, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """One token for each row of the embedding matrix, also for those that the tokenizer leaves unused."""
        by_id = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
        return [by_id.get(token_id, f"<unused_{token_id}>") for token_id in range(model.config.vocab_size)]

    def rows_of_positions(self, model: Any, tokenizer: PreTrainedTokenizerBase) -> int:
        """How many positions the converted model knows."""
        if model.config.position_embedding == "learned":
            return model.config.max_position_embeddings
        if self.max_positions is not None:
            return self.max_positions
        over_source = getattr(model.generation_config, "max_new_tokens_over_source", None) or 0
        return max(POSITIONS, min((token_limit(tokenizer) or 0) + over_source, MOST_POSITIONS))

    def stack_spec(self, spec_class: Callable[..., Any], stack: Any, rows: int) -> Any:
        """The encoder or the decoder, without the output projection."""
        config = stack.config
        spec = spec_class(
            len(stack.layers),
            config.num_heads,
            pre_norm=config.has_final_norm,  # which only decides whether there is a place for the last norm
            activation=ACTIVATIONS[config.activation],
        )
        spec.pre_norm = config.norm_first
        if config.has_final_norm:
            set_layer_norm(spec.layer_norm, stack.norm)
        spec.scale_embeddings = True  # by sqrt(d_model)
        embeddings = spec.embeddings[0] if isinstance(spec.embeddings, list) else spec.embeddings
        embeddings.weight = weights_of(stack.embed_tokens.weight)
        learned = stack.positions.embed_positions
        if learned is None:
            table = sinusoidal_encoding(torch.arange(rows), config.d_model).to(embeddings.weight.dtype)
        else:
            table = weights_of(learned.weight)
        spec.position_encodings.encodings = table
        for layer_spec, layer in zip(spec.layer, stack.layers, strict=True):
            set_attention(layer_spec.self_attention, layer.self_attention)
            set_layer_norm(layer_spec.self_attention.layer_norm, layer.self_attention_norm)
            if hasattr(layer, "cross_attention"):
                set_attention(layer_spec.attention, layer.cross_attention)
                set_layer_norm(layer_spec.attention.layer_norm, layer.cross_attention_norm)
            set_linear(layer_spec.ffn.linear_0, layer.feed_forward.fc1)
            set_linear(layer_spec.ffn.linear_1, layer.feed_forward.fc2)
            set_layer_norm(layer_spec.ffn.layer_norm, layer.feed_forward_norm)
        return spec


def weights_of(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter's numbers, where CTranslate2 can read them."""
    return parameter.detach().cpu()


def set_linear(spec: Any, linear: torch.nn.Linear) -> None:
    """Copies a projection."""
    spec.weight = weights_of(linear.weight)
    if linear.bias is not None:
        spec.bias = weights_of(linear.bias)


def set_layer_norm(spec: Any, norm: torch.nn.LayerNorm) -> None:
    """Copies a layer normalisation."""
    spec.gamma, spec.beta = weights_of(norm.weight), weights_of(norm.bias)


def set_attention(spec: Any, attention: Any) -> None:
    """Copies multi-head attention, with the projections side by side as CTranslate2 has them.

    There every head has one width for queries, keys and values. Where d_k and d_v differ the narrower gets zeros up to
    the wider, which add nothing to q . k, nor, behind zeros in W^O, to the output.
    """
    d_k, d_v = attention.config.head_dimensions
    num_heads, width = attention.num_heads, max(d_k, d_v)
    projections = []
    for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
        projection = common_spec.LinearSpec()
        projection.weight = widen_heads(weights_of(linear.weight), num_heads, width)
        if linear.bias is not None:
            projection.bias = widen_heads(weights_of(linear.bias), num_heads, width)
        projections.append(projection)
    if attention.is_cross_attention:
        fuse_linear(spec.linear[0], projections[:1])
        fuse_linear(spec.linear[1], projections[1:])
    else:
        fuse_linear(spec.linear[0], projections)
    set_linear(spec.linear[-1], attention.out_proj)
    spec.linear[-1].weight = widen_heads(weights_of(attention.out_proj.weight).T, num_heads, width).T.contiguous()
    spec.queries_scale = float(d_k**-0.5)


def widen_heads(matrix: torch.Tensor, num_heads: int, width: int) -> torch.Tensor:
    """Shape `(num_heads * old_width, ...)` to `(num_heads * width, ...)`: zeros behind each head's rows."""
    heads = matrix.unflatten(0, (num_heads, -1))
    wide = heads.new_zeros(num_heads, width, *matrix.shape[1:])
    wide[:, : heads.shape[1]] = heads
    return wide.flatten(0, 1)


def register_files(spec: TransformerSpec, model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Lets tokenizer and generation settings come into the folder when CTranslate2 writes it."""
    folder = tempfile.TemporaryDirectory(prefix="vanilla_transformer_")
    tokenizer.save_pretrained(folder.name)
    model.generation_config.save_pretrained(folder.name)
    for path in sorted(Path(folder.name).iterdir()):
        if path.is_file():
            spec.register_file(str(path))
    object.__setattr__(spec, "_folder_of_files", folder)  # lives, with its files, as long as the description


def to_ctranslate2(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    output_dir: str | os.PathLike,
    quantization: str | None = None,
    *,
    max_positions: int | None = None,
) -> None:
    """Writes a model of this package as a CTranslate2 model, with its tokenizer and generation settings.

    Args:
        model: A `VanillaTransformerForConditionalGeneration`.
        tokenizer: Its tokenizer.
        output_dir: A folder, made where it does not exist. A CTranslate2 model that is there already is replaced.
        quantization: How to store the weights: float32, float16, bfloat16, int8, int8_float32, int8_float16,
            int8_bfloat16 or int16; None keeps the model's own precision. What CTranslate2 computes in is decided when
            it loads the model.
        max_positions: Positions that the model knows, for the source and for the translation each; None means 2048,
            or more where the tokenizer's limit asks for it. Learned positions have the length that they have.

    Raises:
        ValueError: The model is not of this package, the tokenizer is not that of the model, `quantization` is
            unknown, `max_positions` is below 1, or the folder holds another kind of model.
    """
    if not isinstance(model.config, VanillaTransformerConfig):
        raise ValueError(
            f"expected a model of this package, got one of type {model.config.model_type!r}; "
            "ct2-transformers-converter converts those of transformers."
        )
    if quantization is not None and quantization not in ACCEPTED_MODEL_TYPES:
        raise ValueError(f"quantization must be one of {', '.join(ACCEPTED_MODEL_TYPES)}, got {quantization!r}.")
    if max_positions is not None and max_positions < 1:
        raise ValueError(f"max_positions must be at least 1, got {max_positions}.")
    target = Path(output_dir)
    if (target / "config.json").exists() and not (target / "model.bin").exists():
        raise ValueError(f"{output_dir} holds a model of another kind; choose another folder for the converted one.")
    if quantization is not None and quantization.startswith("int"):
        model = copy.deepcopy(model)  # CTranslate2 scales the numbers where they are
    spec = VanillaTransformerLoader(max_positions)(model, tokenizer)
    spec.validate()
    spec.optimize(quantization=quantization)
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".ctranslate2.", dir=target) as folder:
        spec.save(folder)
        for path in sorted(Path(folder).iterdir()):
            os.replace(path, target / path.name)


def write(
    name: str,
    folder: str | os.PathLike,
    *,
    quantization: str | None = None,
    max_positions: int | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> list[str]:
    """Writes a saved model of this package as a CTranslate2 model: `to_ctranslate2` for the command.

    Args:
        name: A folder that `save_pretrained` wrote, or the name of a model on the Hub.
        folder: Where to write.
        quantization: As in `to_ctranslate2`; None is float32.
        max_positions: As in `to_ctranslate2`.
        revision: As in `load_translator`.
        trust_remote_code: As in `load_translator`.

    Returns:
        What CTranslate2 could not take over, a line each.

    Raises:
        ValueError: As `to_ctranslate2` and `load_translator` do.
    """
    model, tokenizer = load_translator(name, device="cpu", revision=revision, trust_remote_code=trust_remote_code)
    to_ctranslate2(model, tokenizer, folder, quantization, max_positions=max_positions)
    lost = []
    if getattr(model.generation_config, "length_penalty_type", None) == "gnmt":
        lost.append(
            "CTranslate2's own search knows length ** p, not the paper's length penalty; this package's translator "
            "ranks by the paper's what that search finds."
        )
    if model.config.position_embedding == "sinusoidal":
        rows = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))[OUR_SETTINGS]["max_positions"]
        lost.append(f"Positions end at {rows}, where sinusoids have no end.")
    return lost


# ---------------------------------------------------------------------------------------------------------------------
# Translation
# ---------------------------------------------------------------------------------------------------------------------


class CTranslate2Translator(EngineTranslator):
    """A model in CTranslate2 with the `generate()` of transformers, for `translate_lines` and the pipeline.

    `load_ctranslate2` builds it; `pipeline("translation", model=translator, tokenizer=tokenizer)` takes it.

    Greedy search, and beam search with `early_stopping=True`, find what they find in transformers, up to rounding.
    Other stop rules ("never", which is the paper's, and False) wait for translations that may yet win, for which
    CTranslate2 has no counterpart: here the search goes on until `PATIENCE` times as many translations are complete as
    there are beams. With the length penalty type "gnmt" what it has found is ranked by the paper's penalty. For the
    paper's settings that gives the same translations but for rare cases; the stronger the length penalty, the more
    they differ.

    Attributes:
        translator: The `ctranslate2.Translator`.
    """

    engine = "CTranslate2"
    greedy_settings = GREEDY_SETTINGS
    way_to_more_positions = ", or convert with a greater max_positions"

    def __init__(
        self,
        translator: "ctranslate2.Translator",
        config: VanillaTransformerConfig,
        generation_config: GenerationConfig,
        tokens: list[str],
        max_positions: int,
    ):
        super().__init__(config, generation_config, max_positions)
        self.translator = translator
        self.tokens = tokens
        self.ids = {token: token_id for token_id, token in enumerate(tokens)}

    def search(
        self, sources: list[list[int]], limits: list[int], settings: Settings
    ) -> list[list[tuple[list[int], float]]]:
        """See `EngineTranslator.search`; CTranslate2 has one limit for a call."""
        found: dict[int, list[tuple[list[int], float]]] = {}
        for limit in sorted(set(limits)):
            rows = [row for row, its in enumerate(limits) if its == limit]
            results = self.search_to([sources[row] for row in rows], limit, settings)
            found.update(zip(rows, results, strict=True))
        return [found[row] for row in range(len(sources))]

    def search_to(
        self, sources: list[list[int]], limit: int, settings: Settings
    ) -> list[list[tuple[list[int], float]]]:
        """`search` with one limit for all sources."""
        beams = settings.num_beams
        patience = 1.0 if settings.value("early_stopping") is True or beams == 1 else PATIENCE
        # min_length counts the start token.
        least = settings.value("min_new_tokens") or max(0, (settings.value("min_length") or 0) - 1)
        rank_here = beams > 1 and settings.penalty_type == "gnmt"
        # Of more complete translations than beams CTranslate2 keeps the best: n ** (2/3 p) grows as ((5 + n) / 6) ** p
        # does around n = 10.
        penalty = settings.penalty * 2 / 3 if rank_here else settings.penalty
        results = self.translator.translate_batch(
            [[self.tokens[token] for token in source] for source in sources],
            beam_size=beams,
            patience=patience,
            num_hypotheses=beams if rank_here or settings.num_sequences > 1 else 1,
            length_penalty=penalty,
            max_input_length=0,
            max_decoding_length=limit,
            min_decoding_length=min(least, limit),
            no_repeat_ngram_size=settings.value("no_repeat_ngram_size") or 0,
            end_token=[self.tokens[token] for token in settings.ends],
            return_end_token=True,
            return_scores=True,
        )
        rows = []
        for result in results:
            hypotheses = []
            for tokens, score in zip(result.hypotheses, result.scores, strict=True):
                ids = [self.ids[token] for token in tokens]
                if rank_here:
                    score *= len(ids) ** penalty / len(ids) ** ranking_penalty(settings.penalty, "gnmt")
                hypotheses.append((ids, score))
            if rank_here:
                hypotheses.sort(key=lambda hypothesis: -hypothesis[1])
            rows.append(hypotheses[: settings.num_sequences])
        return rows

    def log_probs(self, sources: list[list[int]], targets: list[list[int]]) -> list[list[float]]:
        """The log-probability of each token of each target, by forced decoding."""
        results = self.translator.score_batch(
            [[self.tokens[token] for token in source] for source in sources],
            [[self.tokens[token] for token in target] for target in targets],
            max_input_length=0,
        )
        # An end of sentence that CTranslate2 adds to each target is not part of it.
        return [list(result.log_probs)[: len(target)] for result, target in zip(results, targets, strict=True)]


def load_ctranslate2(
    name: str,
    *,
    device: str | None = None,
    compute_type: str = "default",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[CTranslate2Translator, PreTrainedTokenizerBase]:
    """Opens a model for translation with CTranslate2.

    Args:
        name: A folder that `to_ctranslate2` or CTranslate2's converter wrote, or whatever `load_translator` opens,
            which is converted on the way, in memory and a temporary folder.
        device: "cpu", "cuda" or "cuda:1" and so on; None means "cuda" where CTranslate2 finds one, else "cpu".
        compute_type: What to compute in: float32, float16, bfloat16, int8, int8_float32, int8_float16, int8_bfloat16,
            int16; "default" is how the weights are stored, or the nearest to it that the device is able to, and "auto"
            the fastest.
        revision: As in `load_translator`, for a model that is converted on the way.
        trust_remote_code: Likewise.

    Returns:
        The translator, which uses as many threads as torch, and the tokenizer.

    Raises:
        ValueError: The device does not exist or cannot compute so, the folder holds a CTranslate2 model that does not
            come from this package, or whatever `to_ctranslate2` and `load_translator` raise.
    """
    place, index = device_of(device)
    if is_ctranslate2_folder(name):
        return open_folder(name, place, index, compute_type)
    model, tokenizer = load_translator(name, device="cpu", revision=revision, trust_remote_code=trust_remote_code)
    with tempfile.TemporaryDirectory(prefix="vanilla_transformer_") as folder:
        to_ctranslate2(model, tokenizer, folder)
        translator, _ = open_folder(folder, place, index, compute_type)
    return translator, tokenizer


def is_ctranslate2_folder(name: str) -> bool:
    """Whether a folder holds a CTranslate2 model."""
    return os.path.isdir(name) and ctranslate2.contains_model(name)


def open_folder(
    folder: str, device: str, device_index: int, compute_type: str
) -> tuple[CTranslate2Translator, PreTrainedTokenizerBase]:
    """The translator and the tokenizer of a CTranslate2 model that this package wrote."""
    try:
        settings = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))[OUR_SETTINGS]
        config = VanillaTransformerConfig.from_dict(settings["config"])
        tokens = json.loads(Path(folder, "shared_vocabulary.json").read_text(encoding="utf-8"))
        generation_config = GenerationConfig.from_pretrained(folder)
    except (OSError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(
            f"the CTranslate2 model in {folder} lacks what this package writes beside it ({error}); convert the "
            "model that it comes from again, with vanilla_transformer.convert.ctranslate2."
        ) from error
    try:
        translator = ctranslate2.Translator(
            folder,
            device=device,
            device_index=device_index,
            compute_type=compute_type,
            intra_threads=torch.get_num_threads(),
        )
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"CTranslate2 cannot open {folder} on {device} as {compute_type}: {error}") from error
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return CTranslate2Translator(translator, config, generation_config, tokens, settings["max_positions"]), tokenizer


def device_of(device: str | None) -> tuple[str, int]:
    """CTranslate2's words for a device."""
    if device is None:
        return ("cuda" if ctranslate2.get_cuda_device_count() else "cpu"), 0
    place, _, number = device.partition(":")
    if place not in ("cpu", "cuda") or (number and not number.isdecimal()):
        raise ValueError(f"CTranslate2 computes on cpu, cuda, cuda:1 ..., got device {device!r}.")
    found = ctranslate2.get_cuda_device_count() if place == "cuda" else 1
    if int(number or 0) >= found:
        raise ValueError(f"device {device!r} cannot be used here: CTranslate2 finds {found} of its kind.")
    return place, int(number or 0)


def main() -> None:
    """CTranslate2's own converter command, which knows models of this package once this module is imported."""
    try:
        stock_main()
    except (ValueError, RuntimeError, OSError) as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
