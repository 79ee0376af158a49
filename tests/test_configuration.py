"""configuration_vanilla_transformer: the paper's values as defaults, presets, refusals, and JSON round trips."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
from transformers import AutoConfig, AutoModelForSeq2SeqLM, GenerationConfig
from transformers.utils import logging

from small_models import SMALL, small_config, small_model
from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerModel,
    list_presets,
)


BASE_OF_THE_PAPER = {
    "vocab_size": 37000,
    "d_model": 512,
    "d_ff": 2048,
    "num_heads": 8,
    "encoder_layers": 6,
    "decoder_layers": 6,
    "d_k": None,
    "d_v": None,
    "dropout": 0.1,
    "attention_dropout": 0,
    "activation_dropout": 0,
    "activation": "relu",
    "position_embedding": "sinusoidal",
    "max_position_embeddings": 1024,
    "norm_first": False,
    "final_norm": None,
    "attention_bias": False,
    "output_bias": False,
    "pruned_heads": None,
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "label_smoothing": 0.1,
    "use_cache": True,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}


@pytest.fixture
def _hear_transformers():
    """pytest listens at the root logger, to which transformers' loggers hand nothing on unless told to."""
    logging.enable_propagation()
    yield
    logging.disable_propagation()


# defaults and presets -----------------------------------------------------------------------------


def test_without_arguments_it_is_the_base_model_of_the_paper():
    config = VanillaTransformerConfig()
    assert {name: getattr(config, name) for name in BASE_OF_THE_PAPER} == BASE_OF_THE_PAPER
    assert config.model_type == "vanilla_transformer"
    assert config.is_encoder_decoder is True


PRESETS = {
    "base": {},
    "big": {"d_model": 1024, "d_ff": 4096, "num_heads": 16, "dropout": 0.3},
    "tiny": {"encoder_layers": 4, "decoder_layers": 4, "d_model": 128, "d_ff": 256, "num_heads": 4, "dropout": 0.3},
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
# Table 3 prints d_k and d_v of these rows; they come from d_model / num_heads
HEADS_OF_TABLE_3 = {
    "base": (64, 64),
    "big": (64, 64),
    "A_h1": (512, 512),
    "A_h4": (128, 128),
    "A_h16": (32, 32),
    "A_h32": (16, 16),
    "B_dk16": (16, 64),
    "B_dk32": (32, 64),
    "C_d256": (32, 32),
    "C_d1024": (128, 128),
}


def test_presets_are_listed_by_their_exact_names():
    assert set(list_presets()) == set(PRESETS)
    assert len(list_presets()) == len(PRESETS)


@pytest.mark.parametrize("preset", PRESETS)
def test_each_preset_differs_from_the_base_model_by_what_its_row_says(preset):
    config = VanillaTransformerConfig.from_preset(preset)
    expected = {**BASE_OF_THE_PAPER, **PRESETS[preset]}
    given = {name: getattr(config, name) for name in expected}
    for name in ("d_k", "d_v"):  # a row may write out what None means
        if preset in HEADS_OF_TABLE_3:
            default = config.d_model // config.num_heads
            assert (given[name] or default) == HEADS_OF_TABLE_3[preset][("d_k", "d_v").index(name)]
        given.pop(name)
        expected.pop(name)
    assert given == expected


def test_overrides_replace_fields_of_a_preset():
    config = VanillaTransformerConfig.from_preset("tiny", vocab_size=8000, dropout=0.0)
    assert (config.vocab_size, config.dropout, config.d_model) == (8000, 0.0, 128)
    assert VanillaTransformerConfig.from_preset("tiny").dropout == 0.3


def test_an_unknown_preset_names_those_that_exist():
    with pytest.raises(ValueError, match=r"tiny") as error:
        VanillaTransformerConfig.from_preset("huge")
    assert "huge" in str(error.value)


def test_the_words_of_the_hub_name_the_same_fields():
    config = small_config()
    assert (config.hidden_size, config.num_attention_heads) == (16, 4)
    assert config.num_hidden_layers in (config.encoder_layers, config.decoder_layers)
    assert VanillaTransformerConfig(hidden_size=64, num_attention_heads=2).d_model == 64
    assert config.get_text_config(decoder=True).num_hidden_layers == config.decoder_layers


# refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields,words",
    [
        ({"d_model": 512, "num_heads": 7}, ["d_model=512", "num_heads=7"]),
        ({"d_model": 6, "num_heads": 4}, ["d_model=6", "num_heads=4"]),
        ({"d_model": 6, "num_heads": 4, "d_k": 2}, ["d_model=6", "num_heads=4"]),
        ({"d_model": 6, "num_heads": 4, "d_v": 2}, ["d_model=6", "num_heads=4"]),
        ({"pad_token_id": 2}, ["pad_token_id", "eos_token_id", "2"]),
        ({"pad_token_id": 5, "eos_token_id": [2, 5]}, ["pad_token_id", "eos_token_id"]),
        ({"bos_token_id": None}, ["decoder_start_token_id", "bos_token_id"]),
        ({"vocab_size": 0}, ["vocab_size", "0"]),
        ({"vocab_size": -5}, ["vocab_size", "-5"]),
        ({"d_model": -8}, ["d_model", "-8"]),
        ({"d_ff": 0}, ["d_ff", "0"]),
        ({"num_heads": 0}, ["num_heads", "0"]),
        ({"num_heads": -8}, ["num_heads", "-8"]),
        ({"encoder_layers": 0}, ["encoder_layers", "0"]),
        ({"decoder_layers": -1}, ["decoder_layers", "-1"]),
        ({"d_k": 0}, ["d_k", "0"]),
        ({"d_v": -3}, ["d_v", "-3"]),
        ({"max_position_embeddings": 0}, ["max_position_embeddings", "0"]),
        ({"dropout": 1.5}, ["dropout", "1.5"]),
        ({"dropout": -0.1}, ["dropout", "-0.1"]),
        ({"attention_dropout": 2.0}, ["attention_dropout", "2.0"]),
        ({"activation_dropout": -1.0}, ["activation_dropout", "-1.0"]),
        ({"label_smoothing": 1.1}, ["label_smoothing", "1.1"]),
        ({"label_smoothing": -0.1}, ["label_smoothing", "-0.1"]),
        ({"layer_norm_eps": -1e-5}, ["layer_norm_eps"]),
        ({"layer_norm_eps": float("inf")}, ["layer_norm_eps", "inf"]),
        ({"layer_norm_eps": float("nan")}, ["layer_norm_eps", "nan"]),
        ({"activation": "reluu"}, ["activation", "reluu", "relu"]),
        ({"position_embedding": "rotary"}, ["position_embedding", "rotary", "sinusoidal", "learned"]),
        ({"vocab_size": 2}, ["eos_token_id", "2"]),
        ({"pruned_heads": {"source": []}}, ["pruned_heads", "encoder, decoder, cross", "'source'"]),
        ({"pruned_heads": {"cross": [[0]]}}, ["pruned_heads['cross']", "6 lists, one for each layer", "[[0]]"]),
        ({"encoder_layers": 1, "pruned_heads": {"encoder": [[3, 1]]}}, ["['encoder'][0]", "ascending", "[3, 1]"]),
        ({"encoder_layers": 1, "pruned_heads": {"encoder": [[2, 2]]}}, ["['encoder'][0]", "different", "[2, 2]"]),
        ({"encoder_layers": 1, "pruned_heads": {"encoder": [[8]]}}, ["['encoder'][0]", "num_heads - 1 = 7", "[8]"]),
        ({"decoder_layers": 1, "num_heads": 1, "pruned_heads": {"cross": [[0]]}}, ["leave one head", "[0]"]),
        ({"decoder_start_token_id": 37000}, ["decoder_start_token_id", "37000"]),
    ],
    ids=lambda value: ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_a_value_that_cannot_be_is_refused_with_its_name(fields, words):
    with pytest.raises(ValueError) as error:
        VanillaTransformerConfig(**fields)
    for word in words:
        assert word in str(error.value)


def test_heads_need_not_divide_the_width_when_both_of_theirs_are_given():
    config = VanillaTransformerConfig(d_model=6, num_heads=4, d_k=2, d_v=3)
    assert (config.d_k, config.d_v) == (2, 3)


@pytest.mark.parametrize(
    "fields", [{"d_model": "512"}, {"num_heads": 2.5}, {"tie_word_embeddings": "yes"}, {"dropout": "0.1"}]
)
def test_a_value_of_another_type_is_refused_with_its_name(fields):
    with pytest.raises((ValueError, TypeError), match=next(iter(fields))):
        VanillaTransformerConfig(**fields)


def test_an_odd_width_is_allowed():
    for width, heads in ((5, 1), (7, 1), (33, 3)):
        assert VanillaTransformerConfig(d_model=width, num_heads=heads).d_model == width


# JSON, copies -------------------------------------------------------------------------------------


CHANGED = {
    **SMALL,
    "d_k": 3,
    "d_v": 5,
    "attention_dropout": 0.2,
    "activation_dropout": 0.3,
    "activation": "gelu",
    "position_embedding": "learned",
    "max_position_embeddings": 77,
    "norm_first": True,
    "final_norm": False,
    "attention_bias": True,
    "output_bias": True,
    "pruned_heads": {"encoder": [[0], [1, 3]], "cross": [[], [2], []]},
    "layer_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "label_smoothing": 0.0,
    "use_cache": False,
    "bos_token_id": 3,
    "pad_token_id": 4,
    "eos_token_id": 5,
    "decoder_start_token_id": 6,
}


@pytest.mark.parametrize("fields", [{}, CHANGED], ids=["defaults", "everything_changed"])
def test_every_field_survives_json(fields, tmp_path):
    config = VanillaTransformerConfig(**fields)
    config.save_pretrained(tmp_path)
    for loaded in (VanillaTransformerConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(loaded) is VanillaTransformerConfig
        for name in BASE_OF_THE_PAPER:
            assert getattr(loaded, name) == getattr(config, name), name
        assert {**loaded.to_dict(), "_name_or_path": ""} == config.to_dict()
    saved = json.loads((tmp_path / "config.json").read_text())
    assert {name: saved[name] for name in fields} == fields
    assert not [name for name in saved if name.startswith("_")]


def test_none_stays_none():
    config = VanillaTransformerConfig()
    again = VanillaTransformerConfig.from_dict(config.to_dict())
    assert (again.d_k, again.d_v, again.final_norm) == (None, None, None)
    assert VanillaTransformerConfig.from_dict(config.to_dict(), d_model=1024).d_k is None


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_is_equal_and_independent(how):
    config = small_config(attn_implementation="eager", num_beams=7)
    twin = copy.deepcopy(config) if how == "deepcopy" else pickle.loads(pickle.dumps(config))
    assert twin.to_dict() == config.to_dict()
    assert twin._attn_implementation == "eager"
    assert VanillaTransformerForConditionalGeneration(twin).generation_config.num_beams == 7
    twin.d_ff = 99
    assert config.d_ff == 24


def test_auto_map_names_all_three_auto_classes():
    auto_map = VanillaTransformerConfig().to_dict()["auto_map"]
    assert auto_map == {
        "AutoConfig": "configuration_vanilla_transformer.VanillaTransformerConfig",
        "AutoModel": "modeling_vanilla_transformer.VanillaTransformerModel",
        "AutoModelForSeq2SeqLM": "modeling_vanilla_transformer.VanillaTransformerForConditionalGeneration",
    }


def test_a_copied_folder_no_longer_names_the_repository_it_came_from(tmp_path):
    """transformers used to write "owner/name--" before each class; other people's classes keep theirs."""
    own = VanillaTransformerConfig().to_dict()["auto_map"]
    written = {name: f"some.one/a-model--{reference}" for name, reference in own.items()}
    others = {"AutoTokenizer": ["else/where--slow.Slow", None], "AutoModelForCausalLM": "else/where--other.Other"}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "vanilla_transformer", "auto_map": {**written, **others}})
    )
    config = VanillaTransformerConfig.from_pretrained(tmp_path)
    config.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["auto_map"] == {**own, **others}
    subclass = {**own, "AutoModelForSeq2SeqLM": "modeling_mine.Mine"}
    assert VanillaTransformerConfig(auto_map=subclass).auto_map == subclass


def test_custom_pipelines_are_written_but_read_as_empty_where_the_task_is_known(tmp_path):
    config = small_config()
    assert not config.custom_pipelines
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["custom_pipelines"]
    assert saved["translation"]["impl"] == "pipeline_vanilla_transformer.VanillaTransformerTranslationPipeline"
    assert saved["translation"]["pt"] == ["AutoModelForSeq2SeqLM"]
    loaded = VanillaTransformerConfig.from_pretrained(tmp_path)
    assert not loaded.custom_pipelines
    assert loaded.to_dict()["custom_pipelines"] == saved


def test_custom_pipelines_of_other_tasks_are_kept(tmp_path):
    mine = {"impl": "mine.Mine", "pt": ["AutoModelForSeq2SeqLM"], "type": "text"}
    config = small_config()
    config.custom_pipelines = {"my-task": mine}
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["custom_pipelines"]
    assert set(saved) == {"translation", "my-task"}
    assert VanillaTransformerConfig.from_pretrained(tmp_path).custom_pipelines == {"my-task": mine}


# decoding settings do not belong here -------------------------------------------------------------


DECODING = {"num_beams": 5, "length_penalty": 0.9, "max_length": 200}


@pytest.mark.usefixtures("_hear_transformers")
def test_generation_settings_given_to_the_config_move_to_the_generation_settings_with_a_warning(caplog, tmp_path):
    with caplog.at_level("WARNING"):
        config = small_config(**DECODING)
    assert any("num_beams" in record.getMessage() for record in caplog.records)
    model = VanillaTransformerForConditionalGeneration(config)
    assert {name: getattr(model.generation_config, name) for name in DECODING} == DECODING
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert not set(DECODING) & set(saved)
    saved = json.loads((tmp_path / "generation_config.json").read_text())
    assert {name: saved[name] for name in DECODING} == DECODING
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert {name: getattr(loaded.generation_config, name) for name in DECODING} == DECODING


def test_generation_settings_in_an_old_config_json_move_to_the_generation_settings(tmp_path):
    small_model().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **DECODING}))
    (tmp_path / "generation_config.json").unlink()
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert {name: getattr(model.generation_config, name) for name in DECODING} == DECODING
    assert model.generation_config.length_penalty_type == "gnmt"
    model.save_pretrained(tmp_path / "again")
    assert not set(DECODING) & set(json.loads((tmp_path / "again" / "config.json").read_text()))
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "again")
    assert {name: getattr(again.generation_config, name) for name in DECODING} == DECODING


def test_generation_settings_survive_a_config_that_is_saved_alone_or_with_the_base_model(tmp_path):
    config = small_config(**DECODING)
    config.save_pretrained(tmp_path / "config")
    VanillaTransformerModel(small_config(**DECODING)).save_pretrained(tmp_path / "base")
    for model in (
        AutoModelForSeq2SeqLM.from_config(AutoConfig.from_pretrained(tmp_path / "config")),
        AutoModelForSeq2SeqLM.from_config(VanillaTransformerConfig.from_dict(config.to_dict())),
        AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "base"),
    ):
        assert {name: getattr(model.generation_config, name) for name in DECODING} == DECODING
        model.save_pretrained(tmp_path / "whole")
        assert not set(DECODING) & set(json.loads((tmp_path / "whole" / "config.json").read_text()))
    for _ in range(2):  # a config serves several models, and saving one takes nothing from it
        model = VanillaTransformerForConditionalGeneration(config)
        assert model.generation_config.num_beams == DECODING["num_beams"]
        model.save_pretrained(tmp_path / "again")


@pytest.mark.usefixtures("_hear_transformers")
def test_generation_settings_given_while_loading_count_more_than_the_folder(caplog, tmp_path):
    small_model().save_pretrained(tmp_path)
    with caplog.at_level("WARNING"):
        config = AutoConfig.from_pretrained(tmp_path, **DECODING)
    assert any("num_beams" in record.getMessage() for record in caplog.records)
    for model in (
        AutoModelForSeq2SeqLM.from_pretrained(tmp_path, config=config),
        AutoModelForSeq2SeqLM.from_pretrained(tmp_path, config=small_config(**DECODING)),
        AutoModelForSeq2SeqLM.from_pretrained(tmp_path, **DECODING),
    ):
        assert {name: getattr(model.generation_config, name) for name in DECODING} == DECODING
        assert model.generation_config.length_penalty_type == "gnmt"
        model.save_pretrained(tmp_path / "again")
        again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "again")
        assert {name: getattr(again.generation_config, name) for name in DECODING} == DECODING


@pytest.mark.usefixtures("_hear_transformers")
def test_of_two_files_that_disagree_generation_config_json_counts_with_a_warning(caplog, tmp_path):
    small_model().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_beams": 7}))
    with caplog.at_level("WARNING"):
        model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert model.generation_config.num_beams == 4
    assert any("7 in config.json and 4 in generation_config.json" in each.getMessage() for each in caplog.records)


@pytest.mark.usefixtures("_hear_transformers")
@pytest.mark.parametrize("name,value", [("pad_token_id", 2), ("eos_token_id", 1), ("eos_token_id", [2, 1])])
def test_padding_set_to_the_end_of_sentence_later_is_warned_of_and_refused_once_saved(name, value, caplog, tmp_path):
    config = small_config()
    with caplog.at_level("WARNING"):
        setattr(config, name, value)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "pad_token_id" in message
    assert "eos_token_id" in message
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="pad_token_id"):
        AutoConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "name,value",
    [("num_beams", 4), ("length_penalty", 0.6), ("max_length", 200), ("early_stopping", True), ("do_sample", True)],
)
def test_a_generation_setting_set_as_an_attribute_raises_at_once(name, value):
    config = small_config()
    with pytest.raises((ValueError, AttributeError, TypeError), match="generation_config") as error:
        setattr(config, name, value)
    assert name in str(error.value)
    assert not hasattr(config, name)
    with pytest.raises((ValueError, AttributeError, TypeError)):
        config.update({name: value})


def test_the_usual_settings_of_generate_are_known_as_such():
    config = small_config()
    for name in (
        "top_k",
        "temperature",
        "max_new_tokens",
        "num_return_sequences",
        "repetition_penalty",
        "forced_eos_token_id",
    ):
        assert hasattr(GenerationConfig(), name)
        with pytest.raises((ValueError, AttributeError, TypeError)):
            setattr(config, name, 1)


def test_saving_a_config_that_the_package_made_never_raises(tmp_path):
    for number, fields in enumerate(({}, CHANGED, DECODING, {"output_attentions": False})):
        VanillaTransformerConfig(**{**SMALL, **fields}).save_pretrained(tmp_path / str(number))
