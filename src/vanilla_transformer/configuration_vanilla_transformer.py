"""Configuration of the 2017 Transformer: the paper's symbols as fields, the paper's base model as defaults.

This file ships with every saved model, so it imports nothing but the standard library, huggingface_hub and
transformers.
Source: Vaswani et al. 2017, "Attention Is All You Need", sections 3 and 6.2 (Table 3).
"""

import copy
import functools
import sys
from typing import Any

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import GenerationConfig, PretrainedConfig
from transformers.utils import logging


logger = logging.get_logger(__name__)

# Table 3 of the paper, one entry a row: what the row changes against base. "tiny" is ours, for small corpora and tests
# (the shape of Wu et al. 2021, "Good for Misconceived Reasons", for Multi30k).
PRESETS: dict[str, dict[str, Any]] = {
    "base": {},
    "big": {"d_model": 1024, "d_ff": 4096, "num_heads": 16, "dropout": 0.3},
    "tiny": {
        "d_model": 128,
        "d_ff": 256,
        "num_heads": 4,
        "encoder_layers": 4,
        "decoder_layers": 4,
        "dropout": 0.3,
    },
    "A_h1": {"num_heads": 1},
    "A_h4": {"num_heads": 4},
    "A_h16": {"num_heads": 16},
    "A_h32": {"num_heads": 32},
    "B_dk16": {"d_k": 16},
    "B_dk32": {"d_k": 32},
    "C_N2": {"encoder_layers": 2, "decoder_layers": 2},
    "C_N4": {"encoder_layers": 4, "decoder_layers": 4},
    "C_N8": {"encoder_layers": 8, "decoder_layers": 8},
    "C_d256": {"d_model": 256},
    "C_d1024": {"d_model": 1024},
    "C_ff1024": {"d_ff": 1024},
    "C_ff4096": {"d_ff": 4096},
    "D_drop0.0": {"dropout": 0.0},
    "D_drop0.2": {"dropout": 0.2},
    "D_ls0.0": {"label_smoothing": 0.0},
    "D_ls0.2": {"label_smoothing": 0.2},
    "E_learned": {"position_embedding": "learned"},
}

POSITION_EMBEDDINGS = ("sinusoidal", "learned")
ACTIVATIONS = ("relu", "gelu", "silu")
# The three uses of attention (section 3.2.3): self-attention of encoder and decoder, and attention to the encoder.
ATTENTION_KINDS = ("encoder", "decoder", "cross")

# What AutoConfig, AutoModel and AutoModelForSeq2SeqLM load from a repository on a machine without this package.
AUTO_MAP = {
    "AutoConfig": "configuration_vanilla_transformer.VanillaTransformerConfig",
    "AutoModel": "modeling_vanilla_transformer.VanillaTransformerModel",
    "AutoModelForSeq2SeqLM": "modeling_vanilla_transformer.VanillaTransformerForConditionalGeneration",
}
CUSTOM_PIPELINES = {
    "translation": {
        "impl": "pipeline_vanilla_transformer.VanillaTransformerTranslationPipeline",
        "pt": ["AutoModelForSeq2SeqLM"],
        "type": "text",
    }
}

# Section 6.1: beam size 4, length penalty ((5 + |Y|) / 6) ** 0.6, at most input length + 50, and the stop rule that
# gives up only when no running beam can still win.
PAPER_DECODING: dict[str, Any] = {
    "num_beams": 4,
    "length_penalty": 0.6,
    "length_penalty_type": "gnmt",
    "max_new_tokens_over_source": 50,
    "early_stopping": "never",
}


def _generation_setting_names() -> frozenset[str]:
    """Names that belong to a `GenerationConfig`, not to a model's configuration."""
    shared = {"bos_token_id", "pad_token_id", "eos_token_id", "decoder_start_token_id", "use_cache"}
    shared |= {"output_attentions", "output_hidden_states", "transformers_version", "is_assistant"}
    names = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    return frozenset((names | set(PAPER_DECODING)) - shared)


GENERATION_SETTING_NAMES = _generation_setting_names()


def list_presets() -> list[str]:
    """Names that `VanillaTransformerConfig.from_preset` knows: base, big, tiny and the rows of the paper's Table 3."""
    return list(PRESETS)


def without_repository(auto_map: dict[str, Any]) -> dict[str, Any]:
    """`auto_map` without the repository in front of classes of this package, whose files lie beside the weights.

    transformers writes "owner/name--module.Class" when it saves what it loaded from the Hub; a copy of such a folder
    would run the code of that repository, and not open without the Hub.
    """
    own = {reference.partition(".")[0] for reference in AUTO_MAP.values()}

    def local(reference: Any) -> Any:
        if not isinstance(reference, str):
            return reference  # AutoTokenizer has a pair
        path = reference.rpartition("--")[2]
        return path if path.partition(".")[0] in own else reference

    return {name: local(reference) for name, reference in auto_map.items()}


def warn_of_moved_settings(moved: dict[str, Any]) -> None:
    """Warns that settings of `generate()` are kept for the model that will be built."""
    if moved:
        logger.warning(
            f"{', '.join(sorted(moved))}: settings of generate() do not belong to the model's configuration; they "
            "were moved to the generation settings of the model built from it (model.generation_config)."
        )


def with_plain_errors(config_class: type) -> type:
    """Lets the constructor of a strict dataclass raise TypeError for a value of the wrong type, on one line."""
    construct = config_class.__init__  # type: ignore[misc]

    @functools.wraps(construct)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        try:
            construct(self, *args, **kwargs)
        except StrictDataclassFieldValidationError as error:
            raise TypeError(" ".join(str(error.__cause__ or error).split())) from error

    config_class.__init__ = __init__  # type: ignore[misc]
    return config_class


@with_plain_errors
@strict
class VanillaTransformerConfig(PretrainedConfig):
    r"""Configuration of a `VanillaTransformerModel`. Without arguments it is the base model of the paper.

    Args:
        vocab_size (`int`, defaults to 37000): Words of the joint source and target vocabulary (section 5.1).
        d_model (`int`, defaults to 512): Width of every sub-layer's output.
        d_ff (`int`, defaults to 2048): Inner width of the feed-forward block (section 3.3).
        num_heads (`int`, defaults to 8): Attention heads h (section 3.2.2).
        encoder_layers (`int`, defaults to 6): Layers N of the encoder.
        decoder_layers (`int`, defaults to 6): Layers N of the decoder.
        d_k (`int`, *optional*): Width of a query and a key of one head; None means `d_model / num_heads`.
        d_v (`int`, *optional*): Width of a value of one head; None means `d_model / num_heads`.
        dropout (`float`, defaults to 0.1): P_drop on each sub-layer's output and on embeddings + positions (section
            5.4).
        attention_dropout (`float`, defaults to 0.0): Dropout on attention weights. Not in the paper.
        activation_dropout (`float`, defaults to 0.0): Dropout inside the feed-forward block. Not in the paper.
        activation (`str`, defaults to "relu"): "relu" (the paper), "gelu" or "silu".
        position_embedding (`str`, defaults to "sinusoidal"): "sinusoidal" (section 3.5) or "learned" (Table 3, row E).
        max_position_embeddings (`int`, defaults to 1024): Rows of the learned position table; sinusoids have no limit.
        norm_first (`bool`, defaults to False): x + Sublayer(LayerNorm(x)) instead of the paper's LayerNorm(x +
            Sublayer(x)).
        final_norm (`bool`, *optional*): LayerNorm after each stack; None means `norm_first`, which needs it.
        attention_bias (`bool`, defaults to False): Biases in the four attention projections. Not in the paper's
            equations.
        output_bias (`bool`, defaults to False): Bias of the output projection. Not in the paper.
        pruned_heads (`dict[str, list[list[int]]]`, *optional*): Heads that are taken out of "encoder" and "decoder"
            self-attention and of "cross" attention: for each kind one list a layer, of ascending numbers below
            `num_heads`; each attention keeps one at least. None means that all are there. Not in the paper.
        layer_norm_eps (`float`, defaults to 1e-5): Added to the variance in LayerNorm.
        tie_word_embeddings (`bool`, defaults to True): One matrix for source, target and output (section 3.4).
        label_smoothing (`float`, defaults to 0.1): epsilon_ls of the training loss (section 5.4), spread over all
            words.
        use_cache (`bool`, defaults to True): Whether the decoder returns its keys and values for the next step.
        bos_token_id (`int`, defaults to 0): Begin of sentence.
        pad_token_id (`int`, defaults to 1): Padding; must differ from `eos_token_id`.
        eos_token_id (`int`, defaults to 2): End of sentence.
        decoder_start_token_id (`int`, *optional*): First decoder input; None means `bos_token_id`.

    Settings of `generate()` do not belong here: given as arguments (or found in an old config.json) they move to the
    model's `generation_config` with a warning; set as attributes they raise.

    Raises:
        ValueError: A size that is not positive, `num_heads` that does not divide `d_model` where d_k or d_v is None, a
            probability outside [0, 1), an unknown activation or position embedding, pruned heads that do not exist,
            or pad and end of sentence alike.

    Source: Vaswani et al. 2017, sections 3 and 5.4, and Table 3.
    """

    model_type = "vanilla_transformer"
    attribute_map = {
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "encoder_layers",
    }

    vocab_size: int = 37000
    d_model: int = 512
    d_ff: int = 2048
    num_heads: int = 8
    encoder_layers: int = 6
    decoder_layers: int = 6
    d_k: int | None = None
    d_v: int | None = None
    dropout: float | int = 0.1
    attention_dropout: float | int = 0.0
    activation_dropout: float | int = 0.0
    activation: str = "relu"
    position_embedding: str = "sinusoidal"
    max_position_embeddings: int = 1024
    norm_first: bool = False
    final_norm: bool | None = None
    attention_bias: bool = False
    output_bias: bool = False
    pruned_heads: dict[str, list[list[int]]] | None = None
    layer_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    label_smoothing: float | int = 0.1
    use_cache: bool = True
    is_encoder_decoder: bool = True
    bos_token_id: int | None = 0
    pad_token_id: int = 1
    eos_token_id: int | list[int] | None = 2
    decoder_start_token_id: int | None = None

    def __post_init__(self, **kwargs):
        moved = {name: kwargs.pop(name) for name in list(kwargs) if name in GENERATION_SETTING_NAMES}
        moved = {name: value for name, value in moved.items() if value is not None}
        self._moved_generation_settings = moved
        self._generation_settings_of_file = {}
        self._extra_custom_pipelines = {}
        super().__post_init__(**kwargs)
        warn_of_moved_settings(moved)
        if self.decoder_start_token_id is None:
            self.decoder_start_token_id = self.bos_token_id
        self.auto_map = {**AUTO_MAP, **without_repository(getattr(self, "auto_map", None) or {})}
        self.check_values()
        if self.pad_token_id in self._end_ids():
            raise ValueError(
                f"pad_token_id must differ from eos_token_id, got {self.pad_token_id} for both: an end of sentence "
                "would be masked as padding; give the tokenizer a padding token of its own."
            )

    def _end_ids(self) -> list[int | None]:
        return list(self.eos_token_id) if isinstance(self.eos_token_id, list) else [self.eos_token_id]

    def check_values(self) -> None:
        """Raises ValueError for values that cannot be or do not fit together.

        A model that is built calls it again, for a field may have been set in between.
        """
        if not self.is_encoder_decoder:
            raise ValueError("is_encoder_decoder must be True, got False: the model has an encoder and a decoder.")
        for name in ("vocab_size", "d_model", "d_ff", "num_heads", "encoder_layers", "decoder_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {name}={getattr(self, name)}.")
        if self.max_position_embeddings < 1:
            raise ValueError(
                "max_position_embeddings must be at least 1, got "
                f"max_position_embeddings={self.max_position_embeddings}."
            )
        for name in ("d_k", "d_v"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, or None for d_model / num_heads, got {name}={value}.")
        if (self.d_k is None or self.d_v is None) and self.d_model % self.num_heads != 0:
            raise ValueError(
                f"d_model must be divisible by num_heads, got d_model={self.d_model} and num_heads={self.num_heads}; "
                "choose another num_heads or give both d_k and d_v."
            )
        for name in ("dropout", "attention_dropout", "activation_dropout", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must lie in [0, 1), got {name}={getattr(self, name)}.")
        if not 0 < self.layer_norm_eps < float("inf"):
            raise ValueError(f"layer_norm_eps must be positive and finite, got layer_norm_eps={self.layer_norm_eps}.")
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation must be one of {', '.join(ACTIVATIONS)}, got activation={self.activation!r}."
            )
        if self.position_embedding not in POSITION_EMBEDDINGS:
            raise ValueError(
                f"position_embedding must be one of {', '.join(POSITION_EMBEDDINGS)}, "
                f"got position_embedding={self.position_embedding!r}."
            )
        self._check_pruned_heads()
        if self.decoder_start_token_id is None:
            raise ValueError("decoder_start_token_id must be given where bos_token_id is None, got None for both.")
        for name in ("bos_token_id", "pad_token_id", "decoder_start_token_id"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < self.vocab_size:
                raise ValueError(f"{name} must lie in [0, vocab_size={self.vocab_size}), got {name}={value}.")
        for value in self._end_ids():
            if value is not None and not 0 <= value < self.vocab_size:
                raise ValueError(f"eos_token_id must lie in [0, vocab_size={self.vocab_size}), got {value}.")

    def _check_pruned_heads(self) -> None:
        for kind, layers in (self.pruned_heads or {}).items():
            if kind not in ATTENTION_KINDS:
                raise ValueError(f"pruned_heads knows {', '.join(ATTENTION_KINDS)}, got {kind!r}.")
            depth = self.encoder_layers if kind == "encoder" else self.decoder_layers
            if len(layers) != depth:
                raise ValueError(f"pruned_heads[{kind!r}] must be {depth} lists, one for each layer, got {layers}.")
            for layer, heads in enumerate(layers):
                if heads != sorted(set(heads) & set(range(self.num_heads))) or len(heads) == self.num_heads:
                    raise ValueError(
                        f"pruned_heads[{kind!r}][{layer}] must be different numbers from 0 to num_heads - 1 = "
                        f"{self.num_heads - 1} in ascending order, and leave one head at least, got {heads}."
                    )

    def heads_of(self, kind: str, layer: int) -> list[int]:
        """Numbers of the heads that an attention has, as they were before any was pruned.

        Args:
            kind (`str`): "encoder", "decoder" (self-attention) or "cross".
            layer (`int`): Its number, from 0.
        """
        pruned = (self.pruned_heads or {}).get(kind)
        return [head for head in range(self.num_heads) if not pruned or head not in pruned[layer]]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in GENERATION_SETTING_NAMES:
            raise AttributeError(
                f"{name} is a setting of generate(), not of the model's configuration; "
                f"set model.generation_config.{name} = {value!r} instead."
            )
        super().__setattr__(name, value)
        # Not an error: the other of the two may be about to be set.
        is_special = name in ("pad_token_id", "eos_token_id") and "_moved_generation_settings" in vars(self)
        if is_special and self.pad_token_id in self._end_ids():
            logger.warning(
                f"pad_token_id and eos_token_id are both {self.pad_token_id} now: where no attention_mask is given, "
                "ends of sentences are masked as padding, and the configuration, once saved, is refused; choose "
                "another pad_token_id."
            )

    @property
    def head_dimensions(self) -> tuple[int, int]:
        """Widths (d_k, d_v) of one head, with None resolved to d_model / num_heads (section 3.2.2)."""
        default = self.d_model // self.num_heads
        return (default if self.d_k is None else self.d_k), (default if self.d_v is None else self.d_v)

    @property
    def has_final_norm(self) -> bool:
        """Whether a LayerNorm follows each stack: `final_norm`, or `norm_first` where that is None."""
        return self.norm_first if self.final_norm is None else self.final_norm

    @property
    def custom_pipelines(self) -> dict[str, Any]:
        """Pipelines whose code travels with the model.

        Empty where this process already knows the translation task: `pipeline()` would ask for
        `trust_remote_code=True` before it looked at its own registry. `to_dict()` writes the entry in any case.
        """
        pipelines = sys.modules.get("transformers.pipelines")
        registry = getattr(pipelines, "PIPELINE_REGISTRY", None)
        if registry is not None and "translation" in registry.supported_tasks:
            return copy.deepcopy(self._extra_custom_pipelines)
        # A copy, since pipeline() writes classes into what it gets.
        return copy.deepcopy({**CUSTOM_PIPELINES, **self._extra_custom_pipelines})

    @custom_pipelines.setter
    def custom_pipelines(self, value: dict[str, Any] | None) -> None:
        extra = {task: entry for task, entry in (value or {}).items() if task not in CUSTOM_PIPELINES}
        object.__setattr__(self, "_extra_custom_pipelines", extra)

    def to_dict(self) -> dict[str, Any]:
        """The configuration as JSON-ready values, `auto_map`, `custom_pipelines` and moved settings included."""
        output = super().to_dict()
        for name in ("_generation_settings_of_file", "_moved_generation_settings"):
            output.update(output.pop(name, None) or {})
        extra = output.pop("_extra_custom_pipelines", None) or {}
        output["custom_pipelines"] = copy.deepcopy({**CUSTOM_PIPELINES, **extra})
        return output

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """See `PretrainedConfig.from_dict`; settings of `generate()` in `kwargs` move like those of the constructor.

        Those in `config_dict`, which is a file's content, move too, but yield to a generation_config.json.
        """
        given = {name: kwargs.pop(name) for name in list(kwargs) if name in GENERATION_SETTING_NAMES}
        given = {name: value for name, value in given.items() if value is not None}
        result = super().from_dict(config_dict, **kwargs)
        config = result[0] if isinstance(result, tuple) else result
        config._generation_settings_of_file = config._moved_generation_settings
        config._moved_generation_settings = given
        warn_of_moved_settings(given)
        return result

    def take_generation_settings(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Hands over the moved settings (the constructor's, and those of a file), which are then no longer here."""
        taken = self._moved_generation_settings, self._generation_settings_of_file
        self.give_generation_settings(({}, {}))
        return taken

    def give_generation_settings(self, taken: tuple[dict[str, Any], dict[str, Any]]) -> None:
        """Takes back what `take_generation_settings` gave."""
        self._moved_generation_settings, self._generation_settings_of_file = taken

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> "VanillaTransformerConfig":
        """Configuration of a named model: base, big, tiny, or a row of Table 3.

        Args:
            name (`str`): One of `list_presets()`.
            overrides: Fields that replace those of the preset.

        Raises:
            ValueError: `name` is not a preset.

        Source: Vaswani et al. 2017, Table 3.
        """
        if name not in PRESETS:
            raise ValueError(f"unknown preset {name!r}; choose one of {', '.join(PRESETS)}.")
        return cls(**{**PRESETS[name], **overrides})


__all__ = ["VanillaTransformerConfig", "list_presets"]
