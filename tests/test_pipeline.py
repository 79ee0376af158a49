"""`pipeline("translation")` on transformers 5: what version 4 returned, for this model and for others."""

from __future__ import annotations

import copy
import json
import logging
import os
import subprocess
import sys

import pytest
import torch
from datasets import Dataset
from transformers import LogitsProcessor, LogitsProcessorList, pipeline, pipelines
from transformers.pipelines.pt_utils import KeyDataset

from conftest import TINY_CORPUS
from translators import varied_marian, varied_model
from vanilla_transformer import VanillaTransformerTranslationPipeline
from vanilla_transformer.translation import translate_lines


SOURCES = [source[:length] for length, (source, _) in zip((26, 9, 14, 5, 19), TINY_CORPUS, strict=False)]
BLANKS = ["", " ", "\t", "\u00a0", "\u3000", "\n"]


@pytest.fixture(scope="module")
def model(tiny_tokenizer):
    return varied_model(tiny_tokenizer)


@pytest.fixture(scope="module")
def translator(model, tiny_tokenizer):
    return pipeline("translation", model=model, tokenizer=tiny_tokenizer, device="cpu")


@pytest.fixture(scope="module")
def folder(model, tiny_tokenizer, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("pipeline")
    model.save_pretrained(path)
    tiny_tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def expected(model, tiny_tokenizer) -> list[str]:
    """The oracle: each sentence alone through tokenizer, generate() and decode."""
    texts = [
        tiny_tokenizer.decode(model.generate(**tiny_tokenizer(text, return_tensors="pt"))[0], skip_special_tokens=True)
        for text in SOURCES
    ]
    assert len(set(texts)) >= 4
    return texts


def records(texts: list[str]) -> list[dict[str, str]]:
    return [{"translation_text": text} for text in texts]


@pytest.fixture
def rows_generated(monkeypatch, model) -> list[int]:
    """Rows of each call of generate()."""
    rows = []
    generate = model.generate

    def counting(*args, **kwargs):
        rows.append(len(kwargs["input_ids"]))
        return generate(*args, **kwargs)

    monkeypatch.setattr(model, "generate", counting)
    return rows


# --- What goes in and comes out --------------------------------------------------------------------------------------


def test_a_string_gives_a_list_of_one_dictionary(translator, expected):
    assert translator(SOURCES[0]) == records(expected[:1])


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_a_list_gives_a_flat_list_in_order(translator, expected, batch_size):
    assert translator(SOURCES, batch_size=batch_size) == records(expected)


def test_every_kind_of_sequence_is_a_list(translator, expected):
    assert translator(tuple(SOURCES[:2])) == records(expected[:2])
    assert translator(SOURCES[0], SOURCES[1]) == records(expected[:2])
    column = Dataset.from_dict({"source": SOURCES[:2]})["source"]
    assert translator(column) == records(expected[:2])
    assert translator([SOURCES[1]]) == records(expected[1:2])
    assert translator([]) == []


@pytest.mark.parametrize("batch_size", [1, 8])
def test_generators_iterators_and_datasets_are_answered_one_by_one(translator, expected, batch_size):
    one_each = [records([text]) for text in expected]
    dataset = KeyDataset(Dataset.from_dict({"source": SOURCES}), "source")
    for inputs in ((text for text in SOURCES), iter(SOURCES), map(str, SOURCES), dataset):
        answers = translator(inputs, batch_size=batch_size)
        assert not isinstance(answers, list)
        assert list(answers) == one_each


def test_a_generator_is_read_as_it_is_needed(translator):
    read = []

    def endless():
        while True:
            read.append(1)
            yield "a"

    next(iter(translator(endless(), num_beams=1)))
    assert len(read) < 5


@pytest.mark.parametrize("batch_size", [1, 2])
def test_several_sequences_of_a_text_are_a_list_of_their_own(translator, model, tiny_tokenizer, batch_size):
    settings = {"num_return_sequences": 3, "num_beams": 4}
    texts = []
    for source in SOURCES[:3]:
        rows = model.generate(**tiny_tokenizer(source, return_tensors="pt"), **settings)
        texts.append(records(tiny_tokenizer.batch_decode(rows, skip_special_tokens=True)))
    assert translator(SOURCES[:3], batch_size=batch_size, **settings) == texts
    assert translator(SOURCES[0], **settings) == texts[0]


def test_token_ids_on_request(translator, model, tiny_tokenizer):
    (record,) = translator(SOURCES[0], return_tensors=True)
    assert list(record) == ["translation_token_ids"]
    expected = model.generate(**tiny_tokenizer(SOURCES[0], return_tensors="pt"))[0]
    assert torch.equal(record["translation_token_ids"], expected)
    blank, visible = translator(["", SOURCES[0]], return_tensors=True, batch_size=2)
    assert tiny_tokenizer.decode(blank["translation_token_ids"], skip_special_tokens=True) == ""
    assert torch.equal(visible["translation_token_ids"], expected)


def test_arguments_of_generate_are_taken_at_the_call_and_at_the_start(model, tiny_tokenizer, translator):
    settings = {"num_beams": 1, "max_new_tokens": 3}
    rows = model.generate(**tiny_tokenizer(SOURCES[0], return_tensors="pt"), **settings)
    expected = records(tiny_tokenizer.batch_decode(rows, skip_special_tokens=True))
    assert translator(SOURCES[0], **settings) == expected
    assert pipeline("translation", model=model, tokenizer=tiny_tokenizer, **settings)(SOURCES[0]) == expected
    assert translator(SOURCES[0]) != expected  # a call leaves nothing behind


@pytest.mark.parametrize("inputs", [5, None, ["a", 5], {"text": "a"}, [["a", "b"]]])
def test_what_is_no_string_is_refused(translator, inputs):
    with pytest.raises(TypeError, match="the translation pipeline takes strings"):
        translator(inputs)


@pytest.mark.parametrize("family", [varied_model, varied_marian])
@pytest.mark.parametrize("name", ["num_beams", "num_return_sequences", "max_new_tokens", "max_length"])
def test_counts_below_one_are_refused_with_their_name(family, name, tiny_tokenizer):
    other = family(tiny_tokenizer)
    translator = pipeline("translation", model=other, tokenizer=tiny_tokenizer)
    for count in (0, -1, 1.5, "2"):
        for texts in (SOURCES[0], [""]):  # a blank text reaches no model that could refuse
            with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1, got {count!r}"):
                translator(texts, **{name: count})
        with pytest.raises(ValueError, match=f"{name} must be"):
            pipeline("translation", model=other, tokenizer=tiny_tokenizer, **{name: count})
    assert translator(SOURCES[0], **{name: None}) == translator(SOURCES[0])


def test_more_sequences_than_beams_are_refused(translator):
    with pytest.raises(
        ValueError, match=r"num_return_sequences` \(5\) has to be smaller or equal to `num_beams` \(4\)"
    ):
        translator(SOURCES[0], num_return_sequences=5)


@pytest.mark.parametrize("inputs", ["ab\ud83d", ["a", "ab\ud83d"]])
def test_half_of_a_surrogate_pair_is_refused_by_its_place(translator, inputs):
    with pytest.raises(ValueError, match=r"lone surrogate U\+D83D at character 3"):
        translator(inputs)
    assert len(translator("ab\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"))) == 1


def test_the_pipeline_and_translate_give_the_same_text(translator, model, tiny_tokenizer):
    texts = [best.text for (best,) in translate_lines(model, tiny_tokenizer, SOURCES)]
    assert translator(SOURCES, batch_size=3) == records(texts)


# --- Blank texts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 4])
def test_blank_texts_stay_blank_in_their_place_without_the_model(translator, expected, rows_generated, batch_size):
    mixed = [*BLANKS[:2], SOURCES[0], BLANKS[2], SOURCES[1], *BLANKS[3:], SOURCES[2]]
    answers = translator(mixed, batch_size=batch_size)
    assert answers == records(["", "", expected[0], "", expected[1], "", "", "", expected[2]])
    assert sum(rows_generated) == 3


def test_nothing_but_blanks_never_reaches_the_model(translator, rows_generated):
    assert translator(BLANKS, batch_size=4) == records([""] * len(BLANKS))
    assert translator(" ") == records([""])
    assert translator(BLANKS[:2], num_beams=2, num_return_sequences=2) == [records(["", ""])] * 2
    assert rows_generated == []


def test_signs_alone_do_reach_the_model(translator, rows_generated):
    assert len(translator(["-", ".", "\u200b"])) == 3  # str.strip() keeps U+200B
    assert rows_generated == [1, 1, 1]


# --- Long texts ------------------------------------------------------------------------------------------------------


def test_an_overlong_text_is_cut_with_the_end_kept_and_a_warning(model, tiny_tokenizer, folder, caplog):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, model_max_length=6)
    translator = pipeline("translation", model=model, tokenizer=tokenizer)
    seen = []
    hook = model.model.encoder.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"]), with_kwargs=True
    )
    try:
        ids = tiny_tokenizer(SOURCES[0])["input_ids"]
        assert len(ids) > 6
        logger = logging.getLogger("transformers")
        logger.addHandler(caplog.handler)
        translator(SOURCES[0], num_beams=1)
        logger.removeHandler(caplog.handler)
        assert seen[0].tolist() == [[*ids[:5], tokenizer.eos_token_id]]
        (message,) = {record.getMessage() for record in caplog.records if "tokens is longer" in record.getMessage()}
        assert f"{len(ids)} tokens" in message
        assert "model_max_length of 6" in message
        translator(SOURCES[0], num_beams=1, truncation=False)
        assert seen[1].tolist() == [ids]
    finally:
        hook.remove()


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_text_beyond_max_position_embeddings_does_not_stop_its_neighbours(
    tiny_tokenizer, caplog, positions, batch_size
):
    model = varied_model(tiny_tokenizer, position_embedding=positions, max_position_embeddings=32)
    translator = pipeline("translation", model=model, tokenizer=tiny_tokenizer, device="cpu")
    long = " ".join(["a"] * 199)
    length = len(tiny_tokenizer(long)["input_ids"])
    assert length >= 200
    cut = 32 if positions == "learned" else None
    ids = tiny_tokenizer(long, truncation=True, max_length=cut)["input_ids"]
    expected = [
        tiny_tokenizer.decode(model.generate(torch.tensor([row]))[0], skip_special_tokens=True)
        for row in (tiny_tokenizer(SOURCES[0])["input_ids"], ids, tiny_tokenizer(SOURCES[1])["input_ids"])
    ]
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        assert translator([SOURCES[0], long, SOURCES[1]], batch_size=batch_size) == records(expected)
    finally:
        logger.removeHandler(caplog.handler)
    warnings = {record.getMessage() for record in caplog.records if "tokens is longer" in record.getMessage()}
    assert len(warnings) == (0 if cut is None else 1)
    for message in warnings:
        assert f"{length} tokens" in message
        assert "max_position_embeddings of 32" in message


def test_a_translation_of_60_tokens_needs_no_length_argument(model, tiny_tokenizer, translator):
    class Script(LogitsProcessor):
        def __call__(self, input_ids, scores):
            forced = torch.full_like(scores, -1e4)
            forced[:, tiny_tokenizer.eos_token_id if input_ids.shape[1] == 60 else 40] = 0
            return forced

    model = copy.deepcopy(model)
    model.generation_config.max_new_tokens_over_source = 50
    translator = pipeline("translation", model=model, tokenizer=tiny_tokenizer, device="cpu")
    (record,) = translator(SOURCES[0], return_tensors=True, logits_processor=LogitsProcessorList([Script()]))
    assert len(tiny_tokenizer(SOURCES[0])["input_ids"]) >= 10
    assert record["translation_token_ids"].tolist()[1:] == [40] * 59 + [tiny_tokenizer.eos_token_id]


# --- How it is made --------------------------------------------------------------------------------------------------


def test_a_folder_and_a_task_with_languages_do_as_well(folder, expected):
    by_folder = pipeline("translation", model=folder)
    assert isinstance(by_folder, VanillaTransformerTranslationPipeline)
    assert by_folder(SOURCES) == records(expected)
    by_languages = pipeline("translation_en_to_de", model=folder, device="cpu")
    assert by_languages.task == "translation_en_to_de"
    assert by_languages(SOURCES[1]) == records(expected[1:2])


def test_another_familys_model_is_translated_with(tiny_tokenizer, tmp_path):
    model = varied_marian(tiny_tokenizer)
    texts = [
        tiny_tokenizer.decode(model.generate(**tiny_tokenizer(text, return_tensors="pt"))[0], skip_special_tokens=True)
        for text in SOURCES
    ]
    assert len(set(texts)) >= 4
    model.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    for opened in (model, str(tmp_path)):
        translator = pipeline("translation", model=opened, tokenizer=tiny_tokenizer)
        assert translator([*SOURCES, ""], batch_size=6) == records([*texts, ""])


@pytest.mark.parametrize("family", [varied_model, varied_marian])
@pytest.mark.parametrize(
    "options",
    [
        {"device": -1},
        {"device": torch.device("cpu")},
        {"device_map": "cpu"},
        {"device_map": {"": "cpu"}},
        {"dtype": "auto"},
        {"dtype": torch.float64},
        {"torch_dtype": "float64"},
    ],
)
def test_device_and_precision_are_as_asked(family, options, tiny_tokenizer, tmp_path):
    saved = family(tiny_tokenizer)
    saved.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    opened = pipeline("translation_en_to_de", model=str(tmp_path), **options)
    assert opened.model.device.type == "cpu"
    assert opened.model.dtype == (
        torch.float64 if torch.float64 in options.values() or "torch_dtype" in options else torch.float32
    )
    rows = [saved.to(opened.model.dtype).generate(**tiny_tokenizer(text, return_tensors="pt"))[0] for text in SOURCES]
    texts = tiny_tokenizer.batch_decode(rows, skip_special_tokens=True)
    assert opened(SOURCES, batch_size=2) == records(texts)


@pytest.mark.parametrize("task", ["translation", "translation_en_to_de"])
def test_without_a_model_the_error_says_that_there_is_no_default(task):
    with pytest.raises(ValueError, match="has no default model"):
        pipeline(task)


class Multilingual:
    """A tokenizer that, like those of multilingual models, marks both languages."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def _build_translation_inputs(self, text, return_tensors, src_lang, tgt_lang, **options):
        encoded = self.tokenizer(f"{src_lang} {text}", return_tensors=return_tensors, **options)
        return {**encoded, "forced_bos_token_id": self.tokenizer(tgt_lang)["input_ids"][0]}


def test_languages_reach_the_tokenizer_and_the_decoder(model, tiny_tokenizer):
    translator = pipeline("translation_fr_to_de", model=model, tokenizer=tiny_tokenizer)
    translator.tokenizer = Multilingual(tiny_tokenizer)
    quick = {"num_beams": 1, "max_new_tokens": 5}
    for languages, given in ((("fr", "de"), {}), (("it", "e"), {"src_lang": "it", "tgt_lang": "e"})):
        forced = tiny_tokenizer(languages[1])["input_ids"][0]
        rows = model.generate(
            **tiny_tokenizer(f"{languages[0]} {SOURCES[0]}", return_tensors="pt"),
            forced_bos_token_id=forced,
            **quick,
        )
        assert rows[0, 1] == forced
        text = tiny_tokenizer.decode(rows[0], skip_special_tokens=True)
        assert translator(SOURCES[0], **given, **quick) == records([text])
        assert translator(["", SOURCES[0], " "], batch_size=3, **given, **quick) == records(["", text, ""])


# --- The registry ----------------------------------------------------------------------------------------------------

WATCH = """
import json, sys
from transformers import pipelines
registry = pipelines.PIPELINE_REGISTRY
def name(entry):
    return getattr(entry, "__name__", entry)
def state():
    return {
        "tasks": {task: [name(entry["impl"]), list(map(name, entry["pt"]))]
                  for task, entry in registry.supported_tasks.items()},
        "aliases": dict(registry.task_aliases),
        "removed": sorted(getattr(pipelines, "REMOVED_TASKS", {})),
    }
states = [state()]
import vanilla_transformer
states.append(state())
import importlib
importlib.reload(vanilla_transformer)
states.append(state())
print(json.dumps(states))
"""


def test_importing_adds_translation_and_changes_nothing_else():
    output = subprocess.run([sys.executable, "-c", WATCH], capture_output=True, text=True, check=True).stdout
    before, after, again = json.loads(output)
    added = after["tasks"].pop("translation")
    assert added == ["VanillaTransformerTranslationPipeline", ["AutoModelForSeq2SeqLM"]]
    before["removed"] = [task for task in before["removed"] if task != "translation"]
    assert after == before
    again["tasks"].pop("translation")
    assert again == before


@pytest.mark.slow
@pytest.mark.parametrize("first", ["transformers", "vanilla_transformer"])
def test_the_order_of_the_imports_does_not_matter(first, folder, expected):
    """And of names got before the package was imported, as scripts have them."""
    lines = ["from transformers import pipeline", "import vanilla_transformer"]
    program = "\n".join(lines if first == "transformers" else lines[::-1])
    program += (
        "\nimport json, sys\n"
        "translator = pipeline('translation_en_to_de', model=sys.argv[1], device='cpu')\n"
        "print(json.dumps(translator(json.loads(sys.argv[2]), batch_size=8)))"
    )
    command = [sys.executable, "-c", program, folder, json.dumps(SOURCES)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert json.loads(output.splitlines()[-1]) == records(expected)


@pytest.mark.parametrize("task", ["summarization", "text2text-generation"])
def test_other_removed_tasks_raise_as_before(task, model, tiny_tokenizer):
    if task not in getattr(pipelines, "REMOVED_TASKS", {}):
        pytest.skip("this version of transformers does not list its removed tasks")
    with pytest.raises(KeyError, match="removed"):
        pipeline(task, model=model, tokenizer=tiny_tokenizer)


@pytest.mark.parametrize("task", ["translation_en", "translationen_to_de", "no-such-task"])
def test_tasks_that_never_were_raise_as_before(task, model, tiny_tokenizer):
    with pytest.raises(KeyError):
        pipeline(task, model=model, tokenizer=tiny_tokenizer)


def test_other_tasks_work_as_before(tiny_tokenizer):
    from transformers import GPT2Config, GPT2LMHeadModel

    other = GPT2LMHeadModel(GPT2Config(vocab_size=len(tiny_tokenizer), n_embd=8, n_layer=1, n_head=1, n_positions=32))
    tokenizer = copy.deepcopy(tiny_tokenizer)  # this task changes its padding side
    (record,) = pipeline("text-generation", model=other, tokenizer=tokenizer)("a", max_new_tokens=2)
    assert list(record) == ["generated_text"]


# --- Without the package ---------------------------------------------------------------------------------------------

STRANGER = """
import json, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "vanilla_transformer":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, pipeline
folder, resaved, sources = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
translator = pipeline("translation", model=folder, trust_remote_code=True)
answers = [translator(sources, batch_size=2)]
translator.save_pretrained(resaved + "/pipeline")
answers.append(pipeline("translation", model=resaved + "/pipeline", trust_remote_code=True)(sources))
# Fine-tuned by one step of size 0, saved elsewhere, and opened from there.
model = AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
import torch
batch = tokenizer(sources[0], return_tensors="pt")
model.train()(**batch, labels=batch["input_ids"]).loss.backward()
torch.optim.SGD(model.parameters(), lr=0.0).step()
model.save_pretrained(resaved + "/tuned")
tokenizer.save_pretrained(resaved + "/tuned")
answers.append(pipeline("translation", model=resaved + "/tuned", trust_remote_code=True)(sources))
assert not any(name.split(".")[0] == "vanilla_transformer" for name in sys.modules)
print(json.dumps(answers))
"""


@pytest.mark.slow
def test_a_machine_without_the_package_translates_the_same(folder, expected, tmp_path):
    """From the saved folder, from what the pipeline saves there, and from what is saved after training there."""
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "home"),
        "HF_MODULES_CACHE": str(tmp_path / "modules"),
    }
    arguments = [folder, str(tmp_path / "resaved"), json.dumps([*SOURCES, " "])]
    done = subprocess.run(
        [sys.executable, "-c", STRANGER, *arguments], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [records([*expected, ""])] * 3
    for saved in ("pipeline", "tuned"):
        path = tmp_path / "resaved" / saved
        config = json.loads((path / "config.json").read_text())
        named = [config["custom_pipelines"]["translation"]["impl"], *config["auto_map"].values()]
        assert config["custom_pipelines"]["translation"]["pt"] == ["AutoModelForSeq2SeqLM"]
        for reference in named:
            assert (path / (reference.split(".")[0] + ".py")).is_file(), reference
