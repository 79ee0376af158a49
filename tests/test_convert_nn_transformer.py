"""Models around torch.nn.Transformer: equal logits and translations, and a reason where it cannot be equal.

The oracle is torch.nn.Transformer itself, and a package that others published.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, pipeline

import vanilla_transformer_cli as cli
from foreign_models import (
    SOURCE_WORDS,
    SPECIAL,
    TARGET_WORDS,
    AroundTorch,
    Rules,
    assert_equal_logits,
    assert_equal_searches,
    assert_hostile_files_are_refused,
    assert_refused,
    random_rows,
    write_json,
)
from vanilla_transformer.convert import convert_from
from vanilla_transformer.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.translation import load_translator, translate_lines


START, END = SPECIAL.index("<bos>"), SPECIAL.index("<eos>")
DESCRIPTION = {
    "weights": "model.pt",
    "num_heads": 4,
    "norm_first": False,
    "activation": "relu",
    "embedding_scale": "sqrt(d_model)",
    "source_embedding": "source.weight",
    "target_embedding": "target.weight",
    "output": "out",
    "source_positions": "table",
    "source_vocabulary": SOURCE_WORDS,
    "target_vocabulary": TARGET_WORDS,
}
# Lines of known and unknown words.
LINES = ["rain in 12", "nowhere Haus", "seven at the", "im 12 train in rain at seven", "leaves leaves", "red the"]
ONE = {"target_words": len(SOURCE_WORDS), "shared": True, "tied": True}
COMPUTED = {"source_positions": "sinusoidal"}
LEARNED = {"source_positions": "source_table", "target_positions": "target_table"}
# What the module is built with, and what the description then says.
CASES = {
    "as in courses": ({}, {}),
    "pre-norm": ({"norm_first": True}, {"norm_first": True}),
    "gelu": ({"activation": "gelu"}, {"activation": "gelu"}),
    "silu": ({"activation": torch.nn.functional.silu}, {"activation": "silu"}),
    "no biases": ({"bias": False}, {}),
    "no final norms": ({"final_norm": False}, {}),
    "no final norms, pre-norm": ({"final_norm": False, "norm_first": True}, {"norm_first": True}),
    "another epsilon": ({"layer_norm_eps": 0.1}, {"layer_norm_eps": 0.1}),
    "no output bias": ({"output_bias": False}, {}),
    "not scaled": ({"scale": 1.0}, {"embedding_scale": 1}),
    "scaled otherwise": ({"scale": 2.5}, {"embedding_scale": 2.5}),
    "positions computed": ({"positions": "computed"}, COMPUTED),
    "positions learned": ({"positions": "learned"}, LEARNED),
    "target tied": ({"tied": True}, {}),
    "one vocabulary": (
        {**ONE, "tied": False},
        {"target_vocabulary": None, "target_embedding": None, "unused": ["target.weight"]},
    ),
    "one matrix": ({**ONE, "output_bias": False}, {"target_vocabulary": None}),
    "one matrix, not scaled": ({**ONE, "scale": 1.0}, {"target_vocabulary": None, "embedding_scale": 1.0}),
}


def saved(folder: Path, options: dict | None = None, changes: dict | None = None, dtype=torch.float32) -> AroundTorch:
    """A model and its description in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    model = AroundTorch(**(options or {})).to(dtype)
    torch.save(model.state_dict(), folder / "model.pt")
    description = {**DESCRIPTION, **(changes or {})}
    write_json(folder / "nn_transformer.json", {name: each for name, each in description.items() if each is not None})
    return model


def opened(folder: Path):
    return VanillaTransformerForConditionalGeneration.from_pretrained(folder, dtype="auto").eval()


def ids_in(tokenizer, words: list[str]) -> list[int]:
    return [tokenizer.vocab[word] for word in words]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-5), (torch.float64, 5e-6)])
@pytest.mark.parametrize("options, changes", CASES.values(), ids=CASES)
def test_the_original_and_its_conversion_have_equal_logits(options, changes, dtype, tolerance, tmp_path):
    theirs = saved(tmp_path / "theirs", options, changes, dtype)
    convert_from("nn_transformer", tmp_path / "theirs", tmp_path / "ours")
    ours, tokenizer = opened(tmp_path / "ours"), AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert ours.dtype == dtype
    target = SOURCE_WORDS if options.get("shared") else TARGET_WORDS
    sources = random_rows((9, 4, 1), 2, len(SOURCE_WORDS), first=[START, SPECIAL.index("<unk>")], last=[END])
    targets = random_rows((7, 7, 7), 4, len(target), first=[START], seed=2)
    ids = ids_in(tokenizer, SOURCE_WORDS), ids_in(tokenizer, target)
    assert_equal_logits(theirs, ours, *ids, sources, targets, tolerance)
    is_one = options.get("tied") and options.get("shared") and "scale" not in options
    assert ours.config.tie_word_embeddings == bool(is_one)


@pytest.mark.parametrize("case", ["as in courses", "pre-norm", "positions learned", "one matrix, not scaled"])
def test_the_original_and_its_conversion_translate_alike(case, tmp_path):
    options, changes = CASES[case]
    theirs = saved(tmp_path / "theirs", {**options, "seed": 2}, changes)
    convert_from("nn_transformer", tmp_path / "theirs", tmp_path / "ours")
    ours, tokenizer = opened(tmp_path / "ours"), AutoTokenizer.from_pretrained(tmp_path / "ours")
    target = SOURCE_WORDS if options.get("shared") else TARGET_WORDS
    sources = random_rows((3, 5, 1, 7, 4, 6, 2, 5), 4, len(SOURCE_WORDS), first=[START], last=[END])
    ids = ids_in(tokenizer, SOURCE_WORDS), ids_in(tokenizer, target)
    assert_equal_searches(theirs, ours, *ids, sources, Rules(START, END))


# --- Text -----------------------------------------------------------------------------------------------------------


def test_text_goes_in_and_out_as_the_vocabularies_say(tmp_path):
    theirs = saved(tmp_path / "theirs", {"seed": 4}, {"generation": {"num_beams": 1, "max_new_tokens": 8}})
    convert_from("nn_transformer", tmp_path / "theirs", tmp_path / "ours")
    model, tokenizer = load_translator(str(tmp_path / "ours"), device="cpu")
    # "im" is a word of both sides, "Zug" one of the target alone, and so unknown in a source.
    line = "  the  red\u3000train im\tZug rain <unk> nowhere\x1f12 <eos>"
    rows = {word: row for row, word in enumerate(SOURCE_WORDS)}
    expected = [rows.get(word, 0) for word in ("<bos>", *line.split(), "<eos>")]
    ids = ids_in(tokenizer, SOURCE_WORDS)
    found = tokenizer(line).input_ids
    embeddings = model.get_input_embeddings().weight
    assert found == [
        tokenizer.vocab["Zug"] if word == "Zug" else ids[rows.get(word, 0)]
        for word in ("<bos>", *line.split(), "<eos>")
    ]
    torch.testing.assert_close(embeddings[found], theirs.source.weight[expected], rtol=0, atol=1e-6)
    assert (
        tokenizer.decode(
            ids_in(tokenizer, ["<bos>", "rote", "<unk>", "12", "<eos>", "<pad>"]), skip_special_tokens=True
        )
        == "rote <unk> 12"
    )
    lines = ["the red train leaves", "", *LINES]
    translated = [each[0].text for each in translate_lines(model, tokenizer, lines)]
    assert translated[1] == ""
    assert len(set(translated)) > 3
    pipe = pipeline("translation", model=str(tmp_path / "ours"), trust_remote_code=False)
    assert [each["translation_text"] for each in pipe(lines)] == translated


def test_characters_may_be_the_words(tmp_path):
    words = [*SPECIAL, *"abc\u2581\n"]
    changes = {"source_vocabulary": words, "target_vocabulary": None, "segmentation": "characters", "space": "\u2581"}
    saved(tmp_path / "theirs", {"source_words": 9, "target_words": 9}, changes)
    convert_from("nn_transformer", tmp_path / "theirs", tmp_path / "ours")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert tokenizer("a  b\n<pad>").input_ids == [2, 4, 7, 7, 5, 8, 0, 0, 4, 0, 0, 3]
    assert tokenizer.decode([2, 4, 7, 7, 5, 8, 0, 6, 3, 1], skip_special_tokens=True) == "a  b\n<unk>c"


def test_a_source_may_begin_without_its_start(tmp_path):
    saved(tmp_path / "theirs", {}, {"source_begins_with_bos": False})
    differences = convert_from("nn_transformer", tmp_path / "theirs", tmp_path / "ours")
    assert AutoTokenizer.from_pretrained(tmp_path / "ours")("rain").input_ids == [SOURCE_WORDS.index("rain"), END]
    assert not any("begins every sentence" in each for each in differences)


def test_vocabularies_and_weights_may_be_files_of_other_kinds(tmp_path):
    changes = {"source_vocabulary": "source.txt", "target_vocabulary": "target.txt", "weights": "model.safetensors"}
    theirs = saved(tmp_path / "theirs", {}, changes)
    save_file(theirs.state_dict(), tmp_path / "theirs" / "model.safetensors")
    (tmp_path / "theirs" / "source.txt").write_text("\n".join(SOURCE_WORDS), encoding="utf-8")
    (tmp_path / "theirs" / "target.txt").write_text("\n".join(TARGET_WORDS) + "\n", encoding="utf-8")
    (tmp_path / "theirs" / "model.pt").unlink()
    convert_from("nn_transformer", tmp_path / "theirs", tmp_path / "ours")
    saved(tmp_path / "plain")
    convert_from("nn_transformer", tmp_path / "plain", tmp_path / "others")
    one, other = opened(tmp_path / "ours").state_dict(), opened(tmp_path / "others").state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one.keys() | other.keys())
    vocabularies = [AutoTokenizer.from_pretrained(tmp_path / each).vocab for each in ("ours", "others")]
    assert vocabularies[0] == vocabularies[1]


def test_half_precision_is_widened_and_a_state_dict_is_found_under_its_name(tmp_path):
    theirs = saved(
        tmp_path / "theirs",
        {},
        {
            "state_dict": "model_state",
            "transformer": "net.transformer",
            "source_embedding": "net.source.weight",
            "target_embedding": "net.target.weight",
            "output": "net.out",
            "source_positions": "net.table",
        },
    )
    state = {f"net.{name}": tensor.bfloat16() for name, tensor in theirs.state_dict().items()}
    torch.save({"epoch": 3, "model_state": state}, tmp_path / "theirs" / "model.pt")
    convert_from("nn_transformer", tmp_path / "theirs", tmp_path / "ours")
    ours = opened(tmp_path / "ours")
    assert ours.dtype == torch.float32
    # In half precision the stored positions are no longer those of the formula: they stay a table.
    assert ours.config.position_embedding == "learned"
    table = ours.model.encoder.positions.embed_positions.weight
    assert torch.equal(table, state["net.table"].float().squeeze(1))


def test_what_is_different_is_said_and_written_into_the_card(tmp_path, capsys):
    saved(tmp_path / "theirs", {"positions": "learned", "scale": 1.0}, {**LEARNED, "embedding_scale": 1.0})
    argv = ["convert", "--from", "nn_transformer", "--model", str(tmp_path / "theirs")]
    assert cli.main([*argv, "--output_dir", str(tmp_path / "ours")]) == 0
    told = capsys.readouterr().out
    card = (tmp_path / "ours" / "README.md").read_text(encoding="utf-8")
    merged = len({*SOURCE_WORDS, *TARGET_WORDS})
    for each in (
        f"vocabularies of {len(SOURCE_WORDS)} and {len(TARGET_WORDS)} words are one of {merged}",
        "tables of 40 and 30 positions are two of 30",
        "begins every sentence",
    ):
        assert each in told
        assert each in card
    ours = opened(tmp_path / "ours")
    assert (
        ours.config.max_position_embeddings == AutoTokenizer.from_pretrained(tmp_path / "ours").model_max_length == 30
    )
    assert ours.generation_config.num_beams == 4
    assert ours.generation_config.length_penalty_type == "gnmt"


def test_the_size_of_the_rounding_of_stored_sinusoids_is_told(tmp_path):
    theirs = saved(tmp_path / "theirs")
    (told,) = [
        line for line in convert_from("nn_transformer", tmp_path / "theirs", tmp_path / "ours") if "sinusoids" in line
    ]
    exact = [
        [math.sin(p / 10000 ** (j / 16)) if j % 2 == 0 else math.cos(p / 10000 ** ((j - 1) / 16)) for j in range(16)]
        for p in range(50)
    ]
    difference = (theirs.table.squeeze(1).double() - torch.tensor(exact, dtype=torch.float64)).abs().max().item()
    assert f"difference is {difference:.1e}," in told
    moved = theirs.table.clone()
    moved[30, 0, 4] += 0.001
    torch.save({**theirs.state_dict(), "table": moved}, tmp_path / "theirs" / "model.pt")
    convert_from("nn_transformer", tmp_path / "theirs", tmp_path / "other")
    assert opened(tmp_path / "other").config.position_embedding == "learned"


def test_settings_of_generation_and_a_description_may_be_given(tmp_path):
    saved(tmp_path / "theirs")
    (tmp_path / "theirs" / "nn_transformer.json").unlink()
    generation = {"num_beams": 1, "max_new_tokens_over_source": 9}
    convert_from(
        "nn_transformer", tmp_path / "theirs", tmp_path / "ours", description={**DESCRIPTION, "generation": generation}
    )
    settings = opened(tmp_path / "ours").generation_config
    assert (settings.num_beams, settings.max_new_tokens_over_source) == (1, 9)
    assert getattr(settings, "length_penalty_type", None) is None


# --- Mistakes -------------------------------------------------------------------------------------------------------


def test_hostile_files_are_one_line_and_leave_nothing(tmp_path, capsys):
    theirs = saved(tmp_path / "theirs")
    assert_hostile_files_are_refused(
        capsys,
        "nn_transformer",
        tmp_path / "theirs",
        "model.pt",
        lambda planted, path: torch.save({**theirs.state_dict(), "extra": planted}, path),
    )


MISTAKES = [
    ({"num_heads": 5}, "num_heads must be a whole number that divides d_model=16, got num_heads=5"),
    ({"num_heads": None}, "lacks the field 'num_heads'"),
    ({"num_heads": True}, "'num_heads' must be int, got True"),
    ({"norm_first": None}, "lacks the field 'norm_first'"),
    ({"norm_first": 1}, "'norm_first' must be bool, got 1"),
    ({"activation": "tanh"}, "activation must be one of relu, gelu, silu"),
    ({"embedding_scale": "16"}, "embedding_scale must be a number or \"sqrt(d_model)\", got '16'"),
    ({"embedding_scale": 0}, "embedding_scale must be a finite number other than 0"),
    ({"heads": 4}, "unknown field 'heads'"),
    ({"weights": "other.pt"}, "no other.pt in the folder"),
    ({"weights": "../model.pt"}, "without folders, got '../model.pt'"),
    ({"state_dict": "model"}, "has no entry 'model'"),
    ({"transformer": "net"}, "lacks the weight net.encoder.layers.0.linear1.weight"),
    ({"source_embedding": "out.bias"}, "out.bias has the shape (19,), expected (any, any)"),
    ({"output": None}, "has 2 weights that this package's model has no place for, such as out.weight, out.bias"),
    ({"source_positions": "sinusoidal"}, "no place for, such as table"),
    ({"source_positions": "out.bias"}, "the table of positions out.bias has the shape"),
    ({"source_vocabulary": SOURCE_WORDS[:-1]}, "the weights are of 15 source words, but the source vocabulary has 14"),
    ({"target_vocabulary": [*TARGET_WORDS, "x"]}, "the weights are of 19 target words"),
    ({"source_vocabulary": [*SOURCE_WORDS[:-1], "red"]}, "has the word 'red' twice"),
    ({"source_vocabulary": [*SOURCE_WORDS[:-1], 7]}, "must hold words, got 7"),
    ({"source_vocabulary": [*SOURCE_WORDS[:-1], "\ud800"]}, "half of a surrogate pair is no text"),
    ({"source_vocabulary": "words.txt"}, "no words.txt in the folder"),
    ({"unk_token": "unk"}, "the source vocabulary lacks 'unk', which is to be its unknown word"),
    ({"bos_token": "<s>"}, "the target vocabulary lacks '<s>', which is to be its start of the target"),
    ({"eos_token": "ab"}, "the source vocabulary lacks 'ab', which is to be its end of sentence"),
    ({"pad_token": "<nothing>"}, "no vocabulary has '<nothing>'"),
    ({"pad_token": "<bos>"}, "'<bos>' is the padding and a word besides"),
    ({"segmentation": "bytes"}, "segmentation must be one of words, characters"),
    ({"layer_norm_eps": 0}, "layer_norm_eps must be positive"),
    ({"dropout": 1.5}, "dropout must lie in [0, 1)"),
]


@pytest.mark.parametrize("changes, reason", MISTAKES)
def test_a_description_that_does_not_fit_is_refused_with_the_reason(changes, reason, tmp_path, capsys):
    saved(tmp_path / "theirs", {}, changes)
    assert_refused(capsys, "nn_transformer", tmp_path / "theirs", tmp_path / "new", reason)


@pytest.mark.parametrize(
    "name, change, reason",
    [
        ("transformer.encoder.layers.1.linear1.weight", None, "lacks the weight transformer.encoder.layers.1.linear1"),
        ("transformer.decoder.norm.weight", None, "lacks the weight transformer.decoder.norm.weight"),
        (
            "transformer.encoder.layers.1.linear2.weight",
            torch.zeros(16, 23),
            "has the shape (16, 23), expected (16, 24)",
        ),
        ("transformer.encoder.layers.5.linear2.weight", torch.zeros(16, 24), "found 0, 1, 5"),
        (
            "transformer.encoder.norm3.weight",
            torch.zeros(16),
            "no place for, such as transformer.encoder.norm3.weight",
        ),
        ("out.bias", torch.zeros(19, dtype=torch.long), "is of torch.int64, expected floating-point numbers"),
        ("out.weight", torch.ones(20, 16).to_sparse(), "the weight out.weight is no plain tensor"),
        ("out.weight", torch.ones(19, 16, device="meta"), "the weight out.weight is no plain tensor"),
        ("source.weight", torch.ones(15, 0), "the weight source.weight is empty"),
        ("out.bias", "text", "its entry 'out.bias' is an object of type str"),
    ],
)
def test_weights_that_do_not_fit_are_refused_with_the_reason(name, change, reason, tmp_path, capsys):
    state = saved(tmp_path / "theirs").state_dict()
    if change is None:
        del state[name]
    else:
        state[name] = change
    torch.save(state, tmp_path / "theirs" / "model.pt")
    assert_refused(capsys, "nn_transformer", tmp_path / "theirs", tmp_path / "new", reason)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff{}", b"[" * 100000, b"7"])
def test_a_description_that_is_no_json_object_is_refused(content, tmp_path, capsys):
    saved(tmp_path / "theirs")
    (tmp_path / "theirs" / "nn_transformer.json").write_bytes(content)
    assert_refused(capsys, "nn_transformer", tmp_path / "theirs", tmp_path / "new", "nn_transformer.json")


def test_a_folder_without_a_description_says_which_file_is_missing(tmp_path, capsys):
    saved(tmp_path / "theirs")
    (tmp_path / "theirs" / "nn_transformer.json").unlink()
    reason = "no nn_transformer.json in the folder"
    assert_refused(capsys, "nn_transformer", tmp_path / "theirs", tmp_path / "new", reason)
    saved(tmp_path / "theirs", {}, {"source_vocabulary": "words.txt"})
    (tmp_path / "theirs" / "words.txt").write_bytes(b"a\nb\n\xff\n")
    assert_refused(capsys, "nn_transformer", tmp_path / "theirs", tmp_path / "new", "words.txt, line 3: not in UTF-8")


# --- A model that others published ----------------------------------------------------------------------------------

PUBLISHED = """
import json, sys
sys.path.insert(0, sys.argv[1])
from tg2fa_translit.decode import BOS_IDX, EOS_IDX, decode, fa_voc, greedy, tg_keys, fa_values, tg_voc
from tg2fa_translit.transformer import transformer
import numpy as np, torch
words = json.load(sys.stdin)
def complete(word):
    # The package's own decode() cuts the last character where the limit ends a word; this tells whether it does.
    source = np.array([BOS_IDX] + [tg_voc[each] for each in word] + [EOS_IDX]).reshape(-1, 1)
    mask = np.zeros((len(source), len(source)), bool)
    return bool(greedy(transformer, source, mask, len(source) + 10).flatten()[-1] == EOS_IDX)
with torch.no_grad():
    answers = [decode(transformer, word) for word in words]
    whole = [complete(word) for word in words]
json.dump({"answers": answers, "whole": whole, "source": tg_keys, "target": fa_values}, sys.stdout)
"""


def tajik_words(number: int, seed: int = 0) -> list[str]:
    """Syllables of Tajik letters, here and there two words or a hyphen: made up, since any word will do."""
    draw = random.Random(seed)
    consonants, vowels = "бвгджзйклмнпрстфхчшғқҳҷъ", "аеиоуэюяёӣӯ"

    def word() -> str:
        return "".join(
            draw.choice(consonants) * (draw.random() < 0.9) + draw.choice(vowels) + draw.choice(["", *consonants[:20]])
            for _ in range(draw.randint(1, 4))
        )

    made: dict[str, None] = dict.fromkeys(["то ғами фардо нахӯрем", "тоҷикӣ", "душанбе"])  # the first is its example
    while len(made) < number:
        made[draw.choice(["{}", "{}", "{}", "{} {}", "{}-{}"]).format(word(), word())] = None
    return list(made)


@pytest.mark.slow
def test_a_published_transliterator_gives_the_same_text(tmp_path):
    """The package tg2fa-translit: 3 + 3 layers around torch.nn.Transformer, which others wrote and trained."""
    target = tmp_path / "site"
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--target",
        str(target),
        "tg2fa-translit==1.0",
    ]
    installed = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if installed.returncode:
        pytest.skip(f"the package tg2fa-translit cannot be installed: {installed.stderr.strip().splitlines()[-1:]}")
    words = tajik_words(1000)
    run = subprocess.run(
        [sys.executable, "-c", PUBLISHED, str(target)],
        input=json.dumps(words),
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    published = json.loads(run.stdout)
    folder = tmp_path / "theirs"
    folder.mkdir()
    shutil.copyfile(target / "tg2fa_translit" / "model_2.9.zip", folder / "model_2.9.zip")
    description = {
        "weights": "model_2.9.zip",
        "state_dict": "model_state_dict",
        "num_heads": 8,
        "norm_first": False,
        "activation": "relu",
        "embedding_scale": "sqrt(d_model)",
        "source_embedding": "src_tok_emb.embedding.weight",
        "target_embedding": "tgt_tok_emb.embedding.weight",
        "output": "generator",
        "source_positions": "positional_encoding.pos_embedding",
        "source_vocabulary": published["source"],
        "target_vocabulary": published["target"],
        "segmentation": "characters",
        "generation": {"num_beams": 1, "max_new_tokens_over_source": 9},
    }
    write_json(folder / "nn_transformer.json", description)
    convert_from("nn_transformer", folder, tmp_path / "ours")
    model, tokenizer = load_translator(str(tmp_path / "ours"), device="cpu")
    found = [each[0].text for each in translate_lines(model, tokenizer, words)]
    assert len(set(found)) > 900
    expected = published["answers"]
    assert sum(published["whole"]) > 990
    assert [text if whole else text[:-1] for text, whole in zip(found, published["whole"], strict=True)] == expected
