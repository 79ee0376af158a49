"""transformers' own common tests, for this package's classes.

Not collected by name: `test_conformance.py` runs it beside the common tests, which it unpacks as the package
`transformers_tests`. Twice: for the paper's model, and for one that departs from it wherever a field lets it.
"""

import tempfile
import unittest

import pytest
import torch
from transformers.models.auto import modeling_auto
from transformers_tests.generation.test_utils import GenerationTesterMixin
from transformers_tests.test_configuration_common import ConfigTester
from transformers_tests.test_modeling_common import ModelTesterMixin, ids_tensor
from transformers_tests.test_training_mixin import TrainingTesterMixin

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerModel,
)
from vanilla_transformer.modeling_vanilla_transformer import VanillaTransformerDecoder, VanillaTransformerEncoder


torch.set_num_threads(1)

# The common tests look a class up by its name in these tables, which `AutoModel.register` does not fill: without the
# entries they make no labels and take neither class for what it is.
modeling_auto.MODEL_MAPPING_NAMES["vanilla_transformer"] = "VanillaTransformerModel"
modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES["vanilla_transformer"] = (
    "VanillaTransformerForConditionalGeneration"
)

PAPER = {
    "vocab_size": 99,
    "d_model": 16,
    "d_ff": 32,
    "num_heads": 4,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "d_k": None,
    "d_v": None,
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "activation": "relu",
    "position_embedding": "sinusoidal",
    "max_position_embeddings": 100,
    "norm_first": False,
    "final_norm": None,
    "attention_bias": False,
    "output_bias": False,
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "label_smoothing": 0.1,
    "use_cache": True,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
}
DEPARTURES = {
    **PAPER,
    "d_k": 3,
    "d_v": 5,
    "attention_dropout": 0.1,
    "activation_dropout": 0.1,
    "activation": "gelu",
    "position_embedding": "learned",
    "norm_first": True,
    "final_norm": True,
    "attention_bias": True,
    "output_bias": True,
    "layer_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)


class Tester:
    """A small model and its inputs in the form that the mixins ask for.

    Args:
        fields: Fields of the configuration.
        encoder_seq_length: Length of the sources; the targets have 7 tokens.
        masks: Whether the inputs have masks. Some of the mixin's tests use the source's mask for the target, and so
            want both sides equally long.
    """

    batch_size = 13
    seq_length = 7
    is_training = True
    causal_lm_class = VanillaTransformerForConditionalGeneration  # TrainingTesterMixin: the class with a loss

    def __init__(self, fields, encoder_seq_length=7, masks=True):
        self.fields = fields
        self.encoder_seq_length = encoder_seq_length
        self.masks = masks
        self.vocab_size = fields["vocab_size"]
        self.hidden_size = fields["d_model"]
        self.num_hidden_layers = fields["encoder_layers"]
        self.num_attention_heads = fields["num_heads"]

    def get_config(self):
        return VanillaTransformerConfig(**self.fields)

    def prepare_config_and_inputs_for_common(self):
        config = self.get_config()
        source = ids_tensor([self.batch_size, self.encoder_seq_length], self.vocab_size).clamp(4)
        source[:, -1] = config.eos_token_id
        target = ids_tensor([self.batch_size, self.seq_length], self.vocab_size).clamp(4)
        inputs = {"input_ids": source, "decoder_input_ids": target}
        if self.masks:
            inputs["attention_mask"] = torch.ones_like(source)
            inputs["decoder_attention_mask"] = torch.ones_like(target)
        return config, inputs


class CommonTests(ModelTesterMixin, GenerationTesterMixin):
    all_model_classes = (VanillaTransformerModel, VanillaTransformerForConditionalGeneration)
    is_encoder_decoder = True
    # The mixin exempts models of before 2023, and takes a file without a year in its first line for one.
    test_can_init_all_missing_weights_before_2023 = True

    def test_config(self):
        ConfigTester(self, config_class=VanillaTransformerConfig, **self.model_tester.fields).run_common_tests()

    def test_can_capture_specific_layers_hidden_states(self):
        """The mixin's looks for `hidden_states`, which a model of two stacks has under two other names."""
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        for model_class in self.all_model_classes:
            model = model_class(config).eval()
            full = model(**inputs, output_hidden_states=True)
            some = model(**inputs, output_hidden_states=[0, -1])
            for name in ("encoder_hidden_states", "decoder_hidden_states"):
                assert [state is None for state in some[name]] == [False, True, False]
                for index in (0, -1):
                    torch.testing.assert_close(some[name][index], full[name][index])

    def test_nothing_is_missing_and_nothing_left_over_after_a_round_trip(self):
        config, _ = self.model_tester.prepare_config_and_inputs_for_common()
        for model_class in self.all_model_classes:
            with tempfile.TemporaryDirectory() as folder:
                model_class(config).save_pretrained(folder)
                _, info = model_class.from_pretrained(folder, output_loading_info=True)
            assert not info["missing_keys"]
            assert not info["unexpected_keys"]

    def test_stacks_saved_alone_give_what_the_whole_model_gives(self):
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        model = VanillaTransformerModel(config).eval()
        with torch.no_grad():
            whole = model(**inputs)
            with tempfile.TemporaryDirectory() as folder:
                model.get_encoder().save_pretrained(folder)
                encoder = VanillaTransformerEncoder.from_pretrained(folder).eval()
            memory = encoder(inputs["input_ids"], attention_mask=inputs.get("attention_mask")).last_hidden_state
            torch.testing.assert_close(memory, whole.encoder_last_hidden_state, atol=1e-5, rtol=1e-5)
            with tempfile.TemporaryDirectory() as folder:
                model.get_decoder().save_pretrained(folder)
                decoder = VanillaTransformerDecoder.from_pretrained(folder).eval()
            states = decoder(inputs["decoder_input_ids"], encoder_hidden_states=memory).last_hidden_state
            torch.testing.assert_close(states, whole.last_hidden_state, atol=1e-5, rtol=1e-5)


class TestPaper(CommonTests, unittest.TestCase):
    def setUp(self):
        self.model_tester = Tester(PAPER)


class TestDepartures(CommonTests, unittest.TestCase):
    def setUp(self):
        self.model_tester = Tester(DEPARTURES, encoder_seq_length=9, masks=False)

    def test_inputs_embeds_matches_input_ids(self):
        """The mixin's embeds both sides with the source's matrix; untied, the target has one of its own."""
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        model = VanillaTransformerModel(config).eval()
        with torch.no_grad():
            by_ids = model(**inputs).last_hidden_state
            by_embeddings = model(
                inputs_embeds=model.get_encoder().get_input_embeddings()(inputs["input_ids"]),
                decoder_inputs_embeds=model.get_decoder().get_input_embeddings()(inputs["decoder_input_ids"]),
            ).last_hidden_state
        torch.testing.assert_close(by_embeddings, by_ids)


class TestTraining(TrainingTesterMixin, unittest.TestCase):
    all_model_classes = (VanillaTransformerForConditionalGeneration,)
    model_tester = None  # abstract in the mixin

    def setUp(self):
        # The mixin trains on the words 1 to 19 and ends generation at 0; a smoothed loss has a floor above its bound.
        special = {"bos_token_id": 97, "pad_token_id": 98, "eos_token_id": 0, "decoder_start_token_id": 97}
        self.model_tester = Tester(
            {**PAPER, **special, "d_model": 32, "d_ff": 64, "dropout": 0.0, "label_smoothing": 0.0}
        )

    def _get_trainable_model_class(self):
        source = self._create_text_training_batch(1, self.training_overfit_seq_length, 99)["input_ids"]

        class Prompted(VanillaTransformerForConditionalGeneration):
            def generate(self, prompt, **settings):
                """The mixin is made for models of one stack: its prompt is the target's beginning."""
                start = torch.full_like(prompt, self.config.decoder_start_token_id)
                prompt = torch.cat([start, prompt], dim=1)
                return super().generate(source, decoder_input_ids=prompt, **settings)[:, 1:]

        Prompted.__name__ = VanillaTransformerForConditionalGeneration.__name__
        return Prompted
