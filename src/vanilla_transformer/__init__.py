"""The 2017 Transformer ("Attention Is All You Need") as a first-class Hugging Face model for translation.

Importing the package registers the model with `AutoConfig`, `AutoModel` and `AutoModelForSeq2SeqLM`, and brings
`pipeline("translation")` back, which transformers 5 removed, for every sequence-to-sequence model.
"""

from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, pipelines

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig, list_presets
from vanilla_transformer.modeling_vanilla_transformer import (
    VanillaTransformerDecoder,
    VanillaTransformerEncoder,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerModel,
)
from vanilla_transformer.pipeline_vanilla_transformer import VanillaTransformerTranslationPipeline


if TYPE_CHECKING:
    from vanilla_transformer.training import VanillaTransformerTrainer


__version__ = "0.1.0"
__all__ = [
    "VanillaTransformerConfig",
    "VanillaTransformerDecoder",
    "VanillaTransformerEncoder",
    "VanillaTransformerForConditionalGeneration",
    "VanillaTransformerModel",
    "VanillaTransformerTrainer",
    "VanillaTransformerTranslationPipeline",
    "list_presets",
]


class TranslationTaskAliases(dict):
    """The registry's aliases, in which every `translation_XX_to_YY` stands for `translation`."""

    def __contains__(self, task: object) -> bool:
        is_pair = isinstance(task, str) and task.startswith("translation_") and "_to_" in task
        return is_pair or super().__contains__(task)

    def __missing__(self, task: str) -> str:
        if task in self:
            return "translation"
        raise KeyError(task)


class NoDefaultModel(dict):
    """Stands in the registry for the default model that the task does not have, and says so when asked for it."""

    def __contains__(self, name: object) -> bool:
        return name == "model" or super().__contains__(name)

    def __missing__(self, name: str) -> Any:
        raise ValueError(
            "the translation task has no default model, and none was given; give one: "
            'pipeline("translation", model="a folder or a repository of the Hub").'
        )


def _register() -> None:
    AutoConfig.register(VanillaTransformerConfig.model_type, VanillaTransformerConfig, exist_ok=True)
    AutoModel.register(VanillaTransformerConfig, VanillaTransformerModel, exist_ok=True)
    AutoModelForSeq2SeqLM.register(VanillaTransformerConfig, VanillaTransformerForConditionalGeneration, exist_ok=True)
    registry = pipelines.PIPELINE_REGISTRY
    if "translation" in registry.supported_tasks:  # registered already, or a transformers that still has its own
        return
    getattr(pipelines, "REMOVED_TASKS", {}).pop("translation", None)
    registry.task_aliases = TranslationTaskAliases(registry.task_aliases)
    registry.register_pipeline(
        "translation",
        pipeline_class=VanillaTransformerTranslationPipeline,
        pt_model=AutoModelForSeq2SeqLM,
        default=NoDefaultModel(),
        type="text",
    )


_register()


def __getattr__(name: str) -> Any:
    """Imports the trainer, and with it accelerate and datasets, only when asked for."""
    if name == "VanillaTransformerTrainer":
        from vanilla_transformer.training import VanillaTransformerTrainer

        return VanillaTransformerTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
