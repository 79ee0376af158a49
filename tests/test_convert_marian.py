"""Marian in and out: equal logits, equal text, equal settings, and a reason where it cannot be equal.

The oracle is transformers' own MarianMTModel with its own tokenizer.
"""

from __future__ import annotations

import ast
import gzip
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, MarianMTModel, pipeline

import vanilla_transformer_cli as cli
from conftest import TINY_CORPUS
from hub_client import HubClient
from hub_server import HubServer
from marians import let_vary, marian_tokenizer_files, sentences, small_marian, with_exact_positions
from small_models import padded, randomise, small_model, words
from test_hub_code_travels import elsewhere
from vanilla_transformer import convert
from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.convert import FORMATS, convert_from, convert_to, new_folder
from vanilla_transformer.convert import marian as marian_format
from vanilla_transformer.convert.marian import from_marian, lost_settings, settings_for_marian, to_marian
from vanilla_transformer.hub import TrainingRun, add_evaluation, files_to_push, parameters_in, write_model_card
from vanilla_transformer.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration


SEPARATE = {"share_encoder_decoder_embeddings": False}
THREE = {**SEPARATE, "tie_word_embeddings": False}
FOREIGN = {
    "as OPUS-MT": {},
    "relu": {"activation_function": "relu"},
    "gelu": {"activation_function": "gelu"},
    "silu by its other name": {"activation_function": "silu"},
    "embeddings not scaled": {"scale_embedding": False},
    "embeddings not scaled, three matrices": {"scale_embedding": False, **THREE},
    "odd d_model": {"d_model": 15, "encoder_attention_heads": 3, "decoder_attention_heads": 3},
    "two matrices": SEPARATE,
    "three matrices": THREE,
    "three matrices, said otherwise": {"tie_word_embeddings": False},
    "more target words": {**SEPARATE, "decoder_vocab_size": 41},
    "more source words": {**SEPARATE, "vocab_size": 29, "decoder_vocab_size": 26, "pad_token_id": 25},
}
OURS = {
    "the paper's": {},
    "biases": {"attention_bias": True, "output_bias": True},
    "three matrices": {"tie_word_embeddings": False},
    "gelu": {"activation": "gelu"},
    "silu": {"activation": "silu"},
    "odd d_model": {"d_model": 15, "num_heads": 3},
    "widths of the heads given": {"d_k": 4, "d_v": 4},
    "no final norm, said so": {"final_norm": False},
}


def foreign(**settings) -> MarianMTModel:
    """A Marian whose start is its padding, whatever that is."""
    settings = dict(settings)
    if "pad_token_id" in settings:
        settings["decoder_start_token_id"] = settings["pad_token_id"]
    return small_marian(**settings)


def inputs_of(pad: int, start: int, highest: int = 25, length: int = 9):
    """Two padded sources and two targets."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, highest, (n,), generator=generator).tolist() for n in (length, length - 4)]
    input_ids, attention_mask = padded(rows, pad=pad)
    decoder_input_ids = torch.randint(3, highest, (2, 7), generator=generator)
    decoder_input_ids[:, 0] = start
    return {"input_ids": input_ids, "attention_mask": attention_mask, "decoder_input_ids": decoder_input_ids}


def inputs_for(model):
    return inputs_of(model.config.pad_token_id, model.config.decoder_start_token_id, 22)


def logits(model, inputs) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs).logits


# --- In -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("settings", FOREIGN.values(), ids=FOREIGN)
def test_a_marian_and_its_conversion_have_equal_logits(settings, dtype, tolerance):
    marian = with_exact_positions(foreign(**settings).to(dtype))
    ours = from_marian(marian)
    inputs = inputs_for(marian)
    expected, found = logits(marian, inputs), logits(ours, inputs)
    assert expected.std() > 0.5
    found, of_others = found.tensor_split([expected.shape[-1]], dim=-1)
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * expected.abs().max().item())
    if of_others.numel():
        shares = torch.softmax(logits(ours, inputs), dim=-1)[..., expected.shape[-1] :]
        assert shares.abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_precision_is_kept_both_ways(dtype):
    ours = from_marian(small_marian().to(dtype))
    assert {parameter.dtype for parameter in ours.parameters()} == {dtype}
    back = to_marian(ours)
    assert {tensor.dtype for tensor in back.state_dict().values()} == {dtype}


def test_there_and_back_every_weight_and_every_setting_is_the_same():
    marian = small_marian()
    back = to_marian(from_marian(marian))
    expected, found = marian.state_dict(), back.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    names = {name for name in marian.config.to_dict() if name not in ("init_std", "dtype", "activation_function")}
    assert {name: getattr(back.config, name) for name in names} == {
        name: getattr(marian.config, name) for name in names
    }
    assert back.generation_config.to_diff_dict() == marian.generation_config.to_diff_dict()


def test_the_conversion_shares_no_memory_with_the_original():
    marian = small_marian()
    ours = from_marian(marian)
    inputs = inputs_for(marian)
    before = logits(ours, inputs)
    randomise(marian, seed=9)
    marian.final_logits_bias.zero_()
    torch.testing.assert_close(logits(ours, inputs), before, rtol=0, atol=0)
    back = to_marian(ours)
    randomise(ours, seed=9)
    torch.testing.assert_close(logits(back, inputs), before, rtol=0, atol=1e-5)


def test_three_tied_matrices_stay_one_and_separate_ones_stay_separate():
    ours = from_marian(small_marian())
    assert ours.lm_head.weight is ours.model.encoder.embed_tokens.weight is ours.model.decoder.embed_tokens.weight
    marian = to_marian(ours)
    assert marian.lm_head.weight is marian.model.encoder.embed_tokens.weight is marian.model.shared.weight
    assert not from_marian(small_marian(**SEPARATE)).config.tie_word_embeddings
    unscaled = from_marian(small_marian(scale_embedding=False))
    assert unscaled.lm_head.weight is not unscaled.model.encoder.embed_tokens.weight


def test_the_loss_on_labels_is_marians_own():
    marian = small_marian()
    inputs = inputs_for(marian)
    labels = inputs.pop("decoder_input_ids").roll(-1, dims=1)
    labels[1, 4:] = -100
    with torch.no_grad():
        expected, found = marian(**inputs, labels=labels).loss, from_marian(marian)(**inputs, labels=labels).loss
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def test_marians_settings_of_generation_come_along_word_for_word():
    marian = small_marian()
    settings = from_marian(marian).generation_config
    assert settings.length_penalty_type == "hub"
    assert getattr(settings, "max_new_tokens_over_source", None) is None
    for name in (
        "num_beams",
        "max_length",
        "bad_words_ids",
        "forced_eos_token_id",
        "length_penalty",
        "early_stopping",
    ):
        assert getattr(settings, name) == getattr(marian.generation_config, name), name
    assert (settings.pad_token_id, settings.eos_token_id, settings.decoder_start_token_id) == (28, 0, 28)


@pytest.mark.parametrize(
    "settings, reason",
    [
        ({"decoder_attention_heads": 2}, "encoder_attention_heads=4 and decoder_attention_heads=2"),
        ({"decoder_ffn_dim": 12}, "encoder_ffn_dim=24 and decoder_ffn_dim=12"),
        ({"encoder_layerdrop": 0.1}, "encoder_layerdrop=0.1"),
        ({"decoder_layerdrop": 0.1}, "decoder_layerdrop=0.1"),
        ({"activation_function": "gelu_new"}, "activation_function='gelu_new'"),
        ({"eos_token_id": 28}, "pad_token_id must differ from eos_token_id"),
    ],
)
def test_a_marian_that_cannot_be_equalled_is_refused_with_the_reason(settings, reason):
    with pytest.raises(ValueError, match=reason):
        from_marian(small_marian(**settings))


def test_positions_that_are_no_sinusoids_are_refused():
    marian = small_marian()
    with torch.no_grad():
        marian.model.decoder.embed_positions.weight[3, 5] += 0.01
    with pytest.raises(ValueError, match="the positions of this Marian's decoder are not the sinusoids"):
        from_marian(marian)


def test_weights_without_a_place_and_models_of_another_kind_are_refused():
    marian, ours = small_marian(), small_model()
    marian.model.adapter = torch.nn.Linear(2, 2)
    ours.model.adapter = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"2 weights that it should not have, such as model\.adapter\.weight"):
        from_marian(marian)
    with pytest.raises(ValueError, match=r"2 weights that it should not have, such as model\.adapter\.weight"):
        to_marian(ours)
    with pytest.raises(TypeError, match="takes a MarianMTModel, got VanillaTransformerForConditionalGeneration"):
        from_marian(ours)
    with pytest.raises(TypeError, match="takes a VanillaTransformerForConditionalGeneration, got MarianMTModel"):
        to_marian(marian)


# --- Out ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("settings", OURS.values(), ids=OURS)
def test_our_model_and_its_marian_have_equal_logits(settings, dtype, tolerance):
    ours = small_model(dtype=dtype, **settings)
    inputs = inputs_for(ours)
    expected = logits(ours, inputs)
    assert expected.std() > 0.5
    largest = expected.abs().max().item()
    torch.testing.assert_close(logits(to_marian(ours), inputs), expected, rtol=0, atol=tolerance * largest)


def test_greedy_and_beams_with_the_same_settings_give_the_same_ids():
    ours = small_model(norm_first=False, tie_word_embeddings=False, output_bias=True, seed=4, dtype=torch.float64)
    marian = to_marian(ours)
    sources, mask = padded([row.tolist() for row in words(12, 6)] + [[5, 7], [9]])
    differing = 0
    for settings in ({"num_beams": 1}, {"length_penalty": 0.0}, {"length_penalty": 1.0, "early_stopping": False}):
        settings = {"num_beams": 4, "early_stopping": False, "max_length": 12, **settings}
        if settings["num_beams"] == 1:
            settings["length_penalty"] = 1.0
        expected = ours.generate(sources, attention_mask=mask, length_penalty_type="hub", **settings)
        found = marian.generate(sources, attention_mask=mask, **settings)
        assert found.tolist() == expected.tolist()
        differing += len(set(map(tuple, found.tolist())))
    assert differing > 6


def test_the_papers_penalty_becomes_its_tangent_and_its_limit_a_fixed_one():
    ours = small_model()
    settings = to_marian(ours).generation_config
    p = settings.length_penalty

    def paper(n: float) -> float:
        return ((5 + n) / 6) ** 0.6

    # Both prefer 21 to 19 tokens by the same factor.
    assert (21 / 19) ** p == pytest.approx(paper(21) / paper(19), rel=1e-4)
    assert (settings.num_beams, settings.max_length, settings.early_stopping) == (4, 512, False)
    assert to_marian(ours).config.forced_eos_token_id is None  # 0 is the end of sentence there, and a word here
    assert not hasattr(settings, "length_penalty_type")
    assert not hasattr(settings, "max_new_tokens_over_source")
    told = " / ".join(lost_settings(ours))
    assert "length penalty ((5 + n) / 6) ** 0.6" in told
    assert "at most source + 50 tokens is at most 512 tokens there" in told
    assert len(lost_settings(ours)) == 3
    assert lost_settings(from_marian(small_marian())) == []


def test_limits_that_our_own_limit_overrides_do_not_come_into_force_there():
    ours = small_model(max_position_embeddings=100)
    ours.generation_config.max_length = 20  # as Seq2SeqTrainer leaves it
    ours.generation_config.max_new_tokens = 3
    settings = settings_for_marian(ours)
    assert settings["max_length"] == 100
    assert "max_new_tokens" not in settings


@pytest.mark.parametrize(
    "settings, reason",
    [
        ({"norm_first": True}, "norm_first=True; Marian knows only layer normalisation after each sub-layer"),
        ({"final_norm": True}, "final_norm=True"),
        ({"position_embedding": "learned"}, "position_embedding='learned'"),
        ({"d_k": 3}, "d_k=3, d_v=4, num_heads=4 and d_model=16"),
        ({"d_v": 8}, "d_k=4, d_v=8, num_heads=4 and d_model=16"),
        ({"d_model": 14, "d_k": 4, "d_v": 4}, "num_heads=4 and d_model=14"),
        ({"layer_norm_eps": 1e-6}, "layer_norm_eps=1e-06"),
        ({"pruned_heads": {"cross": [[0], [], []]}}, "pruned_heads; Marian knows only one number of heads"),
    ],
)
def test_what_marian_lacks_is_refused_with_the_reason(settings, reason):
    with pytest.raises(ValueError, match=reason):
        to_marian(small_model(**settings))


# --- Folders in -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def marian_folder(tmp_path_factory) -> Path:
    """A Marian as on the Hub, in float64 so that no rounding decides between translations, and a card."""
    pytest.importorskip("sentencepiece", reason='pip install "vanilla-transformer[export]"')
    folder = tmp_path_factory.mktemp("marian") / "opus-mt-en-de"
    vocab_size, _ = marian_tokenizer_files(folder)
    model = small_marian(vocab_size, encoder_layers=1, decoder_layers=2).double()
    let_vary(model)
    model.save_pretrained(folder)
    (folder / "README.md").write_text(
        "---\nlanguage:\n- en\n- de\nlicense: cc-by-4.0\n---\n\n# opus\n\nTheir words.\n"
    )
    return folder


@pytest.fixture(scope="module")
def converted(marian_folder, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("converted") / "en-de"
    assert convert_from("marian", marian_folder, folder) == []
    return folder


def translations(folder: Path, lines: list[str], **settings) -> tuple[list[list[int]], list[str]]:
    """Ids and texts, the way that Marian's own documentation has it."""
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids, texts = [], []
    for start in range(0, len(lines), 125):
        encoded = tokenizer(lines[start : start + 125], padding=True, return_tensors="pt")
        rows = model.generate(**encoded, **settings)
        ids += rows.tolist()
        texts += tokenizer.batch_decode(rows, skip_special_tokens=True)
    return ids, texts


@pytest.mark.parametrize(
    "settings",
    [{"num_beams": 1}, {"length_penalty": 0.0}, {"length_penalty": 1.0}, {}],
    ids=["greedy", "beam 4, penalty 0", "beam 4, penalty 1", "its own settings"],
)
def test_text_in_gives_the_text_out_that_marian_gives(settings, marian_folder, converted):
    lines = sentences(500 if settings.get("num_beams") == 1 else 125, seed=3)
    expected = translations(marian_folder, lines, **settings)
    assert len(set(expected[1])) > len(lines) / 2
    assert translations(converted, lines, **settings) == expected


def test_the_tokenizer_is_marians_to_the_letter_on_real_text(marian_folder, converted, multi30k):
    before, after = AutoTokenizer.from_pretrained(marian_folder), AutoTokenizer.from_pretrained(converted)
    for language, key in (("en", "text"), ("de", "text_target")):
        with gzip.open(multi30k / f"val.{language}.gz", "rt", encoding="utf-8") as file:
            lines = [line.rstrip("\n") for line, _ in zip(file, range(500), strict=False)]
        ids = before(**{key: lines})["input_ids"]
        assert after(**{key: lines})["input_ids"] == ids
        assert after.batch_decode(ids) == before.batch_decode(ids)


def test_the_command_translates_with_what_it_converted(marian_folder, tmp_path, capsys):
    output = tmp_path / "new" / "ours"
    code = cli.main(["convert", "--from", "marian", "--model", str(marian_folder), "--output_dir", str(output)])
    assert code == 0
    assert str(output) in capsys.readouterr().out
    lines = sentences(12, seed=5)
    lines[3:3] = ["", "   "]
    source, target = tmp_path / "source.txt", tmp_path / "target.txt"
    source.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    arguments = ["translate", "--model", str(output), "--input", str(source), "--output", str(target)]
    assert cli.main(arguments) == 0
    found = target.read_text(encoding="utf-8").split("\n")
    marian, tokenizer = MarianMTModel.from_pretrained(marian_folder).float(), AutoTokenizer.from_pretrained(output)
    expected = []
    for line in lines:
        rows = marian.generate(**tokenizer(line, return_tensors="pt")) if line.strip() else [[]]
        expected.append(tokenizer.decode(rows[0], skip_special_tokens=True))
    assert found == [*expected, ""]
    assert len(set(found)) > 6
    answers = pipeline("translation", model=str(output), dtype=torch.float32)(lines)
    assert [answer["translation_text"] for answer in answers] == expected


@pytest.mark.parametrize("beams", [1, 4])
def test_two_vocabularies_of_unequal_size_translate_as_before(tmp_path, beams):
    pytest.importorskip("sentencepiece")
    sizes = marian_tokenizer_files(tmp_path / "marian", separate=True)
    assert sizes[0] != sizes[1]
    pad = json.loads((tmp_path / "marian" / "vocab.json").read_text())["<pad>"]
    settings = {"pad_token_id": pad, "decoder_start_token_id": pad, "decoder_vocab_size": sizes[1], **SEPARATE}
    marian = small_marian(sizes[0], encoder_layers=1, decoder_layers=2, **settings).double()
    let_vary(marian)
    marian.save_pretrained(tmp_path / "marian")
    differences = convert_from("marian", tmp_path / "marian", tmp_path / "ours")
    assert differences == [f"vocabularies of {sizes[0]} and {sizes[1]} words are one of {max(sizes)}"]
    lines = sentences(60, seed=6)
    ours = translations(tmp_path / "ours", lines, num_beams=beams)
    try:
        expected = translations(tmp_path / "marian", lines, num_beams=beams)
    except RuntimeError as error:  # transformers 5.10 shapes the target's scores by the source's vocabulary
        if beams == 1 or "is invalid for input of size" not in str(error):
            raise
        pytest.skip(f"the stock beam search of this transformers knows one vocabulary alone: {error}")
    assert len(set(expected[1])) > 20
    assert ours == expected


def test_the_folder_is_complete_and_keeps_the_card(marian_folder, converted):
    names = {path.name for path in converted.iterdir()}
    assert {"config.json", "model.safetensors", "source.spm", "target.spm", "vocab.json", "README.md"} <= names
    assert "modeling_vanilla_transformer.py" in names
    assert AutoModelForSeq2SeqLM.from_pretrained(converted).dtype == torch.float64
    assert "local" not in (converted / "tokenizer_config.json").read_text()
    card = (converted / "README.md").read_text()
    for words_of_it in ("license: cc-by-4.0", "Their words.", "- vanilla-transformer", "trust_remote_code=True"):
        assert words_of_it in card
    assert "from the Marian model opus-mt-en-de." in card
    assert files_to_push(converted, "user/en-de").keys() >= {"source.spm", "target.spm", "vocab.json", "README.md"}


def test_a_pickled_marian_is_read_and_a_pickle_with_code_in_it_is_not_run(marian_folder, tmp_path, capsys):
    folder = tmp_path / "pickled"
    shutil.copytree(marian_folder, folder)
    (folder / "model.safetensors").unlink()
    torch.save(MarianMTModel.from_pretrained(marian_folder).state_dict(), folder / "pytorch_model.bin")
    convert_from("marian", folder, tmp_path / "ours")
    inputs = inputs_of(107, 107)
    expected = logits(MarianMTModel.from_pretrained(marian_folder), inputs)
    found = logits(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "ours"), inputs)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)  # Marian's positions are float32 even in float64

    class Planted:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "planted"),)

    torch.save({"lm_head.weight": Planted()}, folder / "pytorch_model.bin")
    assert_one_line(capsys, "--from", folder, tmp_path / "again", "weights_only|Weights only|cannot be used")
    assert not (tmp_path / "planted").exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)
    assert (tmp_path / "planted").exists()  # so the file would have done it


@pytest.mark.slow
def test_a_pickled_marian_on_the_hub_is_read_at_its_revision(marian_folder, tmp_path):
    """Through the real client, as most OPUS-MT repositories are, and without a word to any other service."""
    torch.save(MarianMTModel.from_pretrained(marian_folder).state_dict(), tmp_path / "pytorch_model.bin")
    files = {path.name: path.read_bytes() for path in [*marian_folder.iterdir(), tmp_path / "pytorch_model.bin"]}
    del files["model.safetensors"]
    with HubServer({"secret": "user"}) as hub, HubClient(hub.environment(tmp_path / "home", token="secret")) as client:
        hub.add_repository("user/opus-mt", {**files, "config.json": b"{}"})
        commit = hub.add_commit("user/opus-mt", files)
        hub.add_commit("user/opus-mt", {"vocab.json": b"{}"})
        code = """
            from vanilla_transformer.convert import convert_from
            result = convert_from("marian", "user/opus-mt", folder, revision=revision)
        """
        assert client.run(code, folder=str(tmp_path / "ours"), revision=commit.id) == []
        assert client.connections == []
    lines = sentences(40, seed=9)
    assert translations(tmp_path / "ours", lines) == translations(marian_folder, lines)
    card = (tmp_path / "ours" / "README.md").read_text()
    assert "base_model: user/opus-mt" in card
    assert "license: cc-by-4.0" in card


# --- Folders out ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def our_folder(tiny_tokenizer, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ours") / "model"
    model = small_model(vocab_size=len(tiny_tokenizer), tie_word_embeddings=False, seed=4)
    model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    scores = {"bleu": {"score": 12.5, "signature": "s"}, "chrf": {"score": 34.5, "signature": "t"}}
    run = TrainingRun(source_lang="en", target_lang="de", evaluations=[{"name": "newstest", "segments": 4, **scores}])
    write_model_card(folder, run, license="mit")
    return folder


def test_plain_transformers_opens_the_result_as_a_marian(our_folder, tmp_path, capsys):
    """In a process in which neither this package nor a network can be reached, and without trust_remote_code."""
    output = tmp_path / "marian"
    assert cli.main(["convert", "--to", "marian", "--model", str(our_folder), "--output_dir", str(output)]) == 0
    assert "length penalty ((5 + n) / 6) ** 0.6" in capsys.readouterr().out
    assert not list(output.glob("*.py"))
    ours = VanillaTransformerForConditionalGeneration.from_pretrained(our_folder)
    tokenizer = AutoTokenizer.from_pretrained(our_folder)
    texts = [pair[0] for pair in TINY_CORPUS] + ["Naïve </s> 日本 🙂"]
    encoded = tokenizer(texts, padding=True, return_tensors="pt")
    greedy = ours.generate(**encoded, num_beams=1, max_length=12)
    beams = ours.generate(
        **encoded, length_penalty_type="hub", length_penalty=1.0, early_stopping=False, max_length=12
    )
    expected = {
        "input_ids": encoded.input_ids,
        "logits": logits(ours, {**encoded, "decoder_input_ids": greedy}),
        "decoder_input_ids": greedy,
        "greedy": tokenizer.batch_decode(greedy, skip_special_tokens=True),
        "beams": tokenizer.batch_decode(beams, skip_special_tokens=True),
    }
    torch.save(expected, tmp_path / "expected.pt")
    script = f"""
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
expected = torch.load({str(tmp_path / "expected.pt")!r})
model, report = AutoModelForSeq2SeqLM.from_pretrained({str(output)!r}, output_loading_info=True)
assert type(model).__module__.startswith("transformers.") and type(model).__name__ == "MarianMTModel", type(model)
assert not report["missing_keys"] and not report["unexpected_keys"], report
tokenizer = AutoTokenizer.from_pretrained({str(output)!r})
encoded = tokenizer({texts!r}, padding=True, return_tensors="pt")
assert torch.equal(encoded.input_ids, expected["input_ids"])
logits = model(**encoded, decoder_input_ids=expected["decoder_input_ids"]).logits
assert (logits - expected["logits"]).abs().max() < 1e-5
assert model.generation_config.num_beams == 4 and model.generation_config.max_length == 512
for name, settings in (("greedy", dict(num_beams=1)), ("beams", dict(length_penalty=1.0))):
    rows = model.generate(**encoded, max_length=12, **settings)
    assert tokenizer.batch_decode(rows, skip_special_tokens=True) == expected[name], name
assert not connections and "vanilla_transformer" not in sys.modules
print("equal")
"""
    assert elsewhere(tmp_path, script) == "equal\n"


def test_the_card_of_the_result_says_what_it_is_and_what_is_different(our_folder, tmp_path):
    convert_to("marian", our_folder, tmp_path / "marian")
    card = (tmp_path / "marian" / "README.md").read_text()
    head = card.split("---")[1]
    assert "license: mit" in head
    assert "- marian" in head
    assert "- vanilla-transformer" not in head
    assert "trust_remote_code" not in card
    assert 'AutoModelForSeq2SeqLM.from_pretrained("marian")' in card
    assert "at most 512 tokens there" in card
    # It decodes by other rules, and nobody has scored it yet.
    assert "otherwise: beam 4, length penalty n ** 0.48" in card
    assert "model-index" not in head
    assert "Measured before the conversion, on the original:" in card
    assert TrainingRun.load(tmp_path / "marian").evaluations == []
    assert f"| parameters | {parameters_in(tmp_path / 'marian'):,} |" in card


def test_a_card_that_went_there_and_back_is_true(our_folder, tmp_path):
    convert_to("marian", our_folder, tmp_path / "marian")
    convert_from("marian", tmp_path / "marian", tmp_path / "back")
    card = (tmp_path / "back" / "README.md").read_text()
    config = VanillaTransformerConfig.from_pretrained(tmp_path / "back")
    assert config.attention_bias
    assert "`attention_bias=True`" in card
    assert f"| parameters | {parameters_in(tmp_path / 'back'):,} |" in card
    assert card.count("Measured before the conversion, on the original:") == 1
    assert "length penalty ((5 + n) / 6)" in card, "what the first conversion lost is still told"
    assert card.count("Converted by `vanilla-transformer convert` from") == 2
    record = TrainingRun.load(tmp_path / "back")
    assert (record.source_lang, record.evaluations) == ("en", [])
    scores = {"bleu": {"score": 3.5, "signature": "s"}, "chrf": {"score": 4.5, "signature": "t"}}
    add_evaluation(tmp_path / "back", {"name": "newstest", "segments": 4, "decoding": "greedy", **scores})
    card = (tmp_path / "back" / "README.md").read_text()
    assert "12.5" not in card, "the original's scores are not this model's"
    assert "| newstest | 4 | 3.50 | 4.50 |" in card
    # transformers 4 does not know the newer name of the class.
    settings = json.loads((tmp_path / "marian" / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_a_converted_marian_goes_out_again_with_its_own_tokenizer(converted, marian_folder, tmp_path):
    assert convert_to("marian", converted, tmp_path / "again") == []
    assert MarianMTModel.from_pretrained(tmp_path / "again").dtype == torch.float64
    lines = sentences(40, seed=8)
    assert translations(tmp_path / "again", lines) == translations(marian_folder, lines)
    for name in ("source.spm", "target.spm"):
        assert (tmp_path / "again" / name).read_bytes() == (marian_folder / name).read_bytes()


# --- The command and its mistakes -----------------------------------------------------------------------------------


def assert_one_line(capsys, direction: str, model, output, reason: str, format: str = "marian") -> None:
    """The command ends with code 2 and one line on stderr that matches, and leaves nothing behind."""
    before = sorted(Path(output).parent.iterdir()) if Path(output).parent.is_dir() else None
    capsys.readouterr()
    try:
        code = cli.main(["convert", direction, format, "--model", str(model), "--output_dir", str(output)])
    except SystemExit as exit:
        code = exit.code
    out, err = capsys.readouterr()
    own = [line for line in err.splitlines() if line.startswith("vanilla-transformer convert: error: ")]
    assert code == 2, err
    assert out == ""
    assert len(own) == 1, err
    assert re.search(reason, own[0]), own[0]
    assert "Traceback" not in err
    if before is not None:
        assert sorted(Path(output).parent.iterdir()) == before


def test_mistakes_of_the_user_are_one_line_each(our_folder, tmp_path, capsys):
    new = tmp_path / "new"
    full = tmp_path / "full"
    full.mkdir()
    (full / "precious.txt").write_text("mine")
    empty = tmp_path / "empty"
    empty.mkdir()
    pre_norm = tmp_path / "pre_norm"
    shutil.copytree(our_folder, pre_norm)
    small_model(vocab_size=len(AutoTokenizer.from_pretrained(our_folder)), norm_first=True).save_pretrained(pre_norm)
    marian = tmp_path / "a_marian"
    small_marian().save_pretrained(marian)
    broken = tmp_path / "broken"
    shutil.copytree(marian, broken)
    (broken / "model.safetensors").write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00{}")
    deep = tmp_path / "deep"
    shutil.copytree(marian, deep)
    settings = json.loads((deep / "config.json").read_text())
    (deep / "config.json").write_text(json.dumps({**settings, "encoder_layers": 3}))
    uneven = tmp_path / "uneven"
    shutil.copytree(marian, uneven)
    (uneven / "config.json").write_text(json.dumps({**settings, "decoder_attention_heads": 2}))
    for direction, model, output, reason in (
        ("--from", our_folder, new, "model of type 'vanilla_transformer', not a MarianMTModel"),
        ("--from", empty, new, "no config.json in the folder"),
        ("--from", tmp_path / "nowhere", new, "no such folder"),
        ("--from", "no-such/model", new, r"cannot open the model no-such/model \(no folder of that name here"),
        ("--from", broken, new, "(?i)safetensor|header|invalid"),
        ("--from", deep, new, "lacks 16 weights, such as model.encoder.layers.2"),
        ("--from", uneven, new, "encoder_attention_heads=4 and decoder_attention_heads=2"),
        ("--to", pre_norm, new, "norm_first=True; Marian knows only"),
        ("--to", empty, new, "no config.json in the folder"),
        ("--to", our_folder, full, "new or an empty folder, but .* is not empty"),
        ("--to", our_folder, full / "precious.txt", "expected a folder to write to, but .* is a file"),
    ):
        assert_one_line(capsys, direction, model, output, reason)
    assert (full / "precious.txt").read_text() == "mine"
    assert not new.exists()
    assert_one_line(capsys, "--to", our_folder, new, "invalid choice: 'tensorflow'", "tensorflow")


@pytest.mark.parametrize("both", [True, False])
def test_one_direction_is_asked_for(both, capsys, tmp_path):
    directions = ["--from", "marian", "--to", "marian"] if both else []
    with pytest.raises(SystemExit) as exit:
        cli.main(["convert", *directions, "--model", "a/b", "--output_dir", str(tmp_path / "new")])
    assert exit.value.code == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "--from" in err
    assert "--to" in err


def test_a_missing_package_is_one_line_that_names_the_extra(monkeypatch, capsys, tmp_path):
    marian = tmp_path / "marian"
    small_marian().save_pretrained(marian)
    (marian / "source.spm").write_bytes(b"never opened")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    reason = r'needs the package sentencepiece: pip install "vanilla-transformer\[export\]"'
    assert_one_line(capsys, "--from", marian, tmp_path / "new", reason)


def test_the_command_line_and_the_registry_know_the_same_formats():
    assert list(cli.READ_FORMATS) == [name for name, each in FORMATS.items() if each.reads]
    assert list(cli.WRITTEN_FORMATS) == [name for name, each in FORMATS.items() if each.writes]
    with pytest.raises(ValueError, match="'tensorflow' cannot be read from; choose one of marian"):
        convert_from("tensorflow", "a", "b")


def test_the_registry_imports_nothing_but_the_standard_library_before_it_is_used():
    tree = ast.parse(Path(convert.__file__).read_text(encoding="utf-8"))
    imported = {
        name.split(".")[0]
        for node in tree.body
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    assert imported <= set(sys.stdlib_module_names)


def test_an_output_folder_appears_whole_or_not_at_all(tmp_path):
    target = tmp_path / "sub" / "model"
    with pytest.raises(RuntimeError, match="half way"), new_folder(target) as folder:  # noqa: PT012
        (folder / "config.json").write_text("{}")
        assert not target.exists()
        raise RuntimeError("half way")
    assert list(tmp_path.iterdir()) == [tmp_path / "sub"]
    assert list((tmp_path / "sub").iterdir()) == []
    target.mkdir()
    with new_folder(target) as folder:
        (folder / "config.json").write_text("{}")
    assert [path.name for path in target.iterdir()] == ["config.json"]
    assert list((tmp_path / "sub").iterdir()) == [target]
    assert target.stat().st_mode & 0o777 == (tmp_path / "sub").stat().st_mode & 0o777  # not a temporary folder's 0700
    with pytest.raises(FileExistsError, match="it is not empty"), new_folder(target):
        pass


def test_a_folder_that_was_filled_meanwhile_is_left_alone(tmp_path, our_folder, monkeypatch):
    target = tmp_path / "model"
    write = marian_format.write

    def slow_write(name, folder, **options):
        target.mkdir()
        (target / "theirs.txt").write_text("theirs")
        return write(name, folder, **options)

    monkeypatch.setattr(marian_format, "write", slow_write)
    with pytest.raises(OSError):
        convert_to("marian", our_folder, target)
    assert [path.name for path in target.iterdir()] == ["theirs.txt"]
    assert list(tmp_path.iterdir()) == [target]
