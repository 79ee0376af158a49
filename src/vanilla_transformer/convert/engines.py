"""What translators on other engines than torch share: the `generate()` of transformers around a search of their own.

`translate_lines`, the pipeline and `evaluate` need no more of a model than `EngineTranslator` has.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar

import torch
from transformers import GenerationConfig
from transformers.utils import ModelOutput

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.generation_vanilla_transformer import LENGTH_PENALTY_TYPES


# Tokens of a translation where nothing sets a limit, as in transformers.
STOCK_NEW_TOKENS = 20

# Settings of generate() that every engine here follows; any other is refused where it would change something.
SETTINGS = frozenset(
    {
        *("num_beams", "num_return_sequences", "early_stopping", "length_penalty", "length_penalty_type"),
        *("max_new_tokens", "max_length", "max_new_tokens_over_source"),
        *("return_dict_in_generate", "output_scores"),
        *("bos_token_id", "pad_token_id", "eos_token_id", "decoder_start_token_id"),
        *("use_cache", "transformers_version"),
    }
)


@dataclass
class EngineOutput(ModelOutput):
    """What `EngineTranslator.generate` returns with `return_dict_in_generate=True`.

    Attributes:
        sequences: `torch.LongTensor` of shape `(rows, 1 + longest)`: the start token, the translation, padding.
        sequences_scores: Float, shape `(rows,)`: what ranks beams; None without beams.
        scores: Float, shape `(rows, longest)`: the log-probability of each token, 0 behind the end; None unless
            `output_scores`.
        beam_indices: Long, shape `(rows, longest)`: 0 for a token, -1 behind the end; None without beams.
    """

    sequences: torch.Tensor | None = None
    sequences_scores: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    beam_indices: torch.Tensor | None = None


class EngineTranslator(ABC):
    """A model in another engine with the `generate()` of transformers, for `translate_lines` and the pipeline.

    Attributes:
        engine: What people call the engine.
        greedy_settings: Settings beside `SETTINGS` that it follows without beams only.
        config: The configuration of the model that was converted.
        generation_config: Its generation settings.
        max_positions: Tokens of a source, and of a translation, that the model has positions for; None means any.
    """

    engine: ClassVar[str]
    greedy_settings: ClassVar[tuple[str, ...]] = ()

    device = torch.device("cpu")  # of the token ids; the engine has its own place for the weights
    dtype = torch.float32
    training = False
    input_modalities = "text"
    output_modalities = ("text",)

    def __init__(
        self, config: VanillaTransformerConfig, generation_config: GenerationConfig, max_positions: int | None
    ):
        self.config = config
        self.generation_config = generation_config
        self.max_positions = max_positions

    @abstractmethod
    def search(
        self, sources: list[list[int]], limits: list[int], settings: "Settings"
    ) -> list[list[tuple[list[int], float]]]:
        """The best `num_return_sequences` translations of each source with what ranks them, best first.

        Args:
            sources: Tokens, end of sentence included, without padding.
            limits: Most tokens of a translation, for each source.
            settings: Of the call.
        """

    @abstractmethod
    def log_probs(self, sources: list[list[int]], targets: list[list[int]]) -> list[list[float]]:
        """The log-probability of each token of each target, by forced decoding."""

    def eval(self) -> "EngineTranslator":
        """Nothing to do: there is no dropout here."""
        return self

    def train(self, mode: bool = True) -> "EngineTranslator":
        """Nothing to do, but refuses to train."""
        if mode:
            raise ValueError(
                f"a model in {self.engine} cannot be trained; train the model that it was converted from."
            )
        return self

    def to(self, *args: Any, **kwargs: Any) -> "EngineTranslator":
        """Nothing to do: whoever opened the model has decided where the weights are."""
        return self

    def can_generate(self) -> bool:
        """Whether there is a `generate()`."""
        return True

    @torch.no_grad()
    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor | EngineOutput:
        """Translates rows of token ids as `generate()` of the model that was converted does.

        How near the search of an engine comes to that of torch its class tells.

        Args:
            inputs: Source tokens, shape `(batch, length)`, end of sentence included.
            generation_config: Replaces settings of the model's own for this call.
            input_ids: Another name of `inputs`.
            attention_mask: 1 for tokens, 0 for padding, of the same shape; None means `input_ids != pad_token_id`.
            kwargs: Settings of this call: those of `SETTINGS` and the engine's `greedy_settings`.

        Returns:
            Long tensor of shape `(batch * num_return_sequences, 1 + longest)`, or with `return_dict_in_generate=True`
            an `EngineOutput`.

        Raises:
            ValueError: A setting that the engine does not have, a row without tokens, or more tokens than the
                converted model has positions for.

        Source: Vaswani et al. 2017, section 6.1.
        """
        given = inputs if input_ids is None else input_ids
        if given is None or given.ndim != 2:
            raise ValueError("give input_ids of the shape (batch, length).")
        settings = Settings(self, generation_config, kwargs)
        mask = given.ne(self.config.pad_token_id) if attention_mask is None else attention_mask.bool()
        sources = [row[kept].tolist() for row, kept in zip(given.cpu(), mask.cpu(), strict=True)]
        limits = [settings.limit(len(source), self.max_positions) for source in sources]
        self.check_lengths(sources, limits)
        hypotheses = [hypothesis for row in self.search(sources, limits, settings) for hypothesis in row]
        sequences = padded([[settings.start, *ids] for ids, _ in hypotheses], settings.pad, torch.long, given.device)
        if not settings.value("return_dict_in_generate"):
            return sequences
        output = EngineOutput(sequences=sequences)
        if settings.num_beams > 1:
            output.sequences_scores = torch.tensor([score for _, score in hypotheses], device=given.device)
            output.beam_indices = padded([[0] * len(ids) for ids, _ in hypotheses], -1, torch.long, given.device)
        if settings.value("output_scores"):
            per_source = len(hypotheses) // max(1, len(sources))
            repeated = [source for source in sources for _ in range(per_source)]
            log_probs = self.log_probs(repeated, [ids for ids, _ in hypotheses])
            output.scores = padded(log_probs, 0.0, torch.float32, given.device)
        return output

    def compute_transition_scores(
        self,
        sequences: torch.Tensor,
        scores: torch.Tensor,
        beam_indices: torch.Tensor | None = None,
        normalize_logits: bool = False,
    ) -> torch.Tensor:
        """The log-probability of each generated token, shape `(rows, longest)`: `scores` of this class' output."""
        return scores

    def check_lengths(self, sources: list[list[int]], limits: list[int]) -> None:
        """Raises ValueError where the model would have no position for a token, or no token at all."""
        if not all(sources):
            raise ValueError("expected at least one token in every row; leave blank lines out.")
        if self.max_positions is None:
            return
        for kind, longest in (("source", max(map(len, sources), default=0)), ("translation", max(limits, default=0))):
            if longest > self.max_positions:
                raise ValueError(
                    f"the {kind} may have {longest} tokens, but the converted model has positions for "
                    f"{self.max_positions}: shorten it{self.way_to_more_positions}."
                )

    way_to_more_positions: ClassVar[str] = ""


class Settings:
    """The generation settings of one call, in the order call, its `generation_config`, the model's own.

    Raises:
        ValueError: A setting that the engine does not have, or a value that makes no sense.
    """

    def __init__(
        self, model: EngineTranslator, generation_config: GenerationConfig | None, call: dict[str, Any]
    ) -> None:
        own = {} if generation_config is model.generation_config else settings_of(generation_config)
        self.call = {**own, **{name: value for name, value in call.items() if value is not None}}
        self.all = {**settings_of(model.generation_config), **self.call}
        neutral = {**vars(GenerationConfig()), **getattr(GenerationConfig, "_get_default_generation_params", dict)()}
        known = SETTINGS.union(model.greedy_settings)
        for name, value in self.all.items():
            if name not in known and value is not None and value is not False and value != neutral.get(name):
                raise ValueError(
                    f"{model.engine} translates without the setting {name}={value!r:.60}; leave it out, or use the "
                    "torch backend, which knows every setting of generate()."
                )
        self.num_beams = self.whole_number("num_beams")
        self.num_sequences = self.whole_number("num_return_sequences")
        if self.num_sequences > self.num_beams:
            raise ValueError(
                f"num_return_sequences must be at most num_beams, got {self.num_sequences} and {self.num_beams}."
            )
        for name in model.greedy_settings:
            if self.num_beams > 1 and self.value(name):
                raise ValueError(
                    f"{model.engine} follows {name}={self.value(name)} only with num_beams=1: its beams share the "
                    "probability of forbidden words among the others; use one beam, or the torch backend."
                )
        penalty = self.value("length_penalty")
        self.penalty = 1.0 if penalty is None else float(penalty)
        self.penalty_type = self.value("length_penalty_type") or "hub"
        if self.penalty_type not in LENGTH_PENALTY_TYPES:
            raise ValueError(
                f"length_penalty_type must be one of {', '.join(LENGTH_PENALTY_TYPES)}, got {self.penalty_type!r}."
            )
        config = model.config
        self.start = self.token_id("decoder_start_token_id", config.decoder_start_token_id)
        if self.start != config.decoder_start_token_id:
            raise ValueError(
                f"the converted model starts from the token {config.decoder_start_token_id}, got "
                f"decoder_start_token_id={self.start}; convert the model again with another one."
            )
        self.pad = self.token_id("pad_token_id", config.pad_token_id)
        ends: Any = self.all.get("eos_token_id", config.eos_token_id)
        self.ends = [int(end) for end in ends] if isinstance(ends, Iterable) else [int(ends)]

    def value(self, name: str) -> Any:
        """A setting; None where nothing sets it."""
        return self.all.get(name)

    def token_id(self, name: str, default: int | None) -> int:
        """A token's id."""
        return int(self.all.get(name, default) or 0)

    def whole_number(self, name: str) -> int:
        """A number of at least 1, which is also what it is where nothing sets it."""
        number = self.all.get(name, 1)
        if not isinstance(number, Integral) or number < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {number!r}.")
        return int(number)

    def limit(self, source_length: int, max_positions: int | None) -> int:
        """How many tokens a translation may have, end of sentence included.

        Args:
            source_length: Tokens of the source, end of sentence included.
            max_positions: What the model has positions for, which shortens the limit that the source sets; None means
                any number.
        """
        over_source = self.value("max_new_tokens_over_source")
        given = self.call if "max_new_tokens" in self.call or "max_length" in self.call else self.all
        if given is self.all and over_source is not None:
            limit = source_length + int(over_source)
            return max(1, limit if max_positions is None else min(limit, max_positions))
        if given.get("max_new_tokens") is not None:
            return self.at_least_one("max_new_tokens", given["max_new_tokens"])
        if given.get("max_length") is not None:
            return self.at_least_one("max_length", given["max_length"] - 1)  # the start token counts
        return STOCK_NEW_TOKENS

    def at_least_one(self, name: str, new_tokens: int) -> int:
        """A limit that leaves room for a token."""
        if new_tokens < 1:
            raise ValueError(f"{name}={self.all[name]} leaves no room for a token.")
        return int(new_tokens)


def settings_of(generation_config: GenerationConfig | None) -> dict[str, Any]:
    """What a generation configuration sets."""
    if generation_config is None:
        return {}
    return {name: value for name, value in vars(generation_config).items() if value is not None and name[0] != "_"}


def padded(rows: list[list[Any]], fill: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Rows of unequal length as one tensor of shape `(rows, longest)`."""
    tensor = torch.full((len(rows), max(map(len, rows), default=0)), fill, dtype=dtype)
    for index, row in enumerate(rows):
        tensor[index, : len(row)] = torch.tensor(row, dtype=dtype)
    return tensor.to(device)
