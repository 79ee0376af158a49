"""The joint byte-level BPE: nothing is lost, nothing in a text is taken for a control token, EOS always closes."""

import copy
import gzip
import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, PreTrainedTokenizerFast, pipeline

from conftest import TINY_CORPUS
from vanilla_transformer.data import TranslationCollator, tokenize_pairs
from vanilla_transformer.tokenization import SPECIAL_TOKENS, train_tokenizer


BOS, PAD, EOS = 0, 1, 2

HARD_TEXTS = [
    "use the </s> tag, <pad>, <s> and <unk> here",
    "</s>",
    "<pad><pad>",
    " <s> leading and trailing spaces   ",
    "",
    " ",
    "\t\ttabs\tand\nnew lines\r\n",
    "123 fdsa ~_! ./ 1,000.50 don't we'll",
    "Grüße aus Köln; façade, œuvre, Straße",
    "cafe\u0301 and cafe\u0301 in NFD, caf\u00e9 in NFC",
    "机器翻译很有趣。mixed 中文 and Latin",
    "नमस्ते दुनिया",
    "مرحبا بالعالم",
    "\u200fשלום\u200e עולם\u202b!\u202c",
    "\U0001f44d\U0001f3fd \U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f1e9\U0001f1ea",
    "https://example.org/a?b=c&d=%20#e",
    "\u2028line\u2029separators\x85\x0c\x1c\x00",
    "\ufffd was there before, \ufeff too",
    "x" * 3000,
]


def literal_bytes(tokenizer, ids):
    """Spells ids by the vocabulary itself: the byte-to-character table of GPT-2, written out here once more."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in visible}
    table.update({chr(256 + i): byte for i, byte in enumerate(b for b in range(256) if b not in visible)})
    names = {index: token for token, index in tokenizer.get_vocab().items()}
    return bytes(table[character] for index in ids for character in names[index])


@pytest.fixture(scope="module")
def saved(tiny_tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(params=["trained", "reloaded"], scope="module")
def tokenizer(request, tiny_tokenizer, saved):
    return tiny_tokenizer if request.param == "trained" else AutoTokenizer.from_pretrained(saved)


def test_special_tokens_have_the_ids_of_the_default_config(tokenizer):
    assert (tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id) == (BOS, PAD, EOS)
    assert tokenizer.convert_ids_to_tokens([BOS, PAD, EOS]) == ["<s>", "<pad>", "</s>"]
    assert tokenizer.unk_token is None
    assert list(SPECIAL_TOKENS) == ["bos_token", "pad_token", "eos_token"]


def test_every_byte_is_a_token(tokenizer):
    singles = {literal_bytes(tokenizer, [i]) for i in range(3, 3 + 256)}
    assert singles == {bytes([byte]) for byte in range(256)}


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_hard_texts_come_back_unchanged_and_hold_no_control_token(tokenizer, text):
    ids = tokenizer(text).input_ids
    assert literal_bytes(tokenizer, ids[:-1]) == text.encode("utf-8")
    assert Counter(i for i in ids if i < 3) == {EOS: 1}
    assert ids[-1] == EOS
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.encode(text) == ids
    assert tokenizer.batch_decode([ids], skip_special_tokens=True) == [text]


@settings(max_examples=300, deadline=None)
@given(text=st.text() | st.text(alphabet="<>/spad \n's'\r\u0301中"))
def test_any_text_comes_back_unchanged(tiny_tokenizer, text):
    ids = tiny_tokenizer(text).input_ids
    assert tiny_tokenizer.decode(ids, skip_special_tokens=True) == text
    assert [i for i in ids if i < 3] == [EOS]


def test_saved_folder_opens_without_this_package(tiny_tokenizer, saved, tmp_path):
    # Beside the model, whose type AutoTokenizer does not know either.
    (saved / "config.json").write_text(json.dumps({"model_type": "vanilla_transformer", "vocab_size": 400}))
    (tmp_path / "texts.json").write_text(json.dumps(HARD_TEXTS))
    program = (
        "import json, sys\n"
        "from transformers import AutoTokenizer\n"
        f"tokenizer = AutoTokenizer.from_pretrained({str(saved)!r})\n"
        f"texts = json.load(open({str(tmp_path / 'texts.json')!r}))\n"
        "ids = [tokenizer(text).input_ids for text in texts]\n"
        "back = [tokenizer.decode(i, skip_special_tokens=True) for i in ids]\n"
        "assert 'vanilla_transformer' not in sys.modules\n"
        "print(json.dumps([ids, back, tokenizer.padding_side, tokenizer.model_max_length]))\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, env=environment, check=False
    )
    (saved / "config.json").unlink()
    assert result.returncode == 0, result.stderr
    ids, back, padding_side, model_max_length = json.loads(result.stdout)
    assert ids == [tiny_tokenizer(text).input_ids for text in HARD_TEXTS]
    assert back == HARD_TEXTS
    assert (padding_side, model_max_length) == ("right", 1024)


def mixed_texts(count: int) -> list[str]:
    """The hard texts and random ones of several scripts, signs and control characters."""
    drawn = random.Random(3)
    ranges = [(32, 126), (32, 126), (0xA0, 0x24F), (0x300, 0x36F), (0x370, 0x5FF), (0x600, 0x6FF), (0x900, 0x97F)]
    ranges += [(0x2000, 0x206F), (0x4E00, 0x9FFF), (0x1F300, 0x1FAFF), (0, 31)]
    texts = list(HARD_TEXTS)
    while len(texts) < count:
        spans = [drawn.choice(ranges) for _ in range(drawn.randrange(1, 5))]
        texts.append("".join(chr(drawn.randint(*drawn.choice(spans))) for _ in range(drawn.randrange(1, 40))))
    return texts


OPEN_TOKENIZERS = """
import json, sys
from transformers import AutoTokenizer
folders, texts = json.load(open(sys.argv[1]))
answers = []
for folder in folders:
    for options in ({}, {"trust_remote_code": False}, {"trust_remote_code": True}):
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        ids = tokenizer(texts)["input_ids"]
        back = tokenizer.batch_decode(ids, skip_special_tokens=True)
        settings = [tokenizer.padding_side, tokenizer.truncation_side, tokenizer.model_max_length,
                    tokenizer.clean_up_tokenization_spaces, tokenizer.split_special_tokens,
                    tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id,
                    sorted(tokenizer.all_special_tokens), len(tokenizer), tokenizer.decode(ids[0])]
        answers.append([ids, back == texts, settings])
assert "vanilla_transformer" not in sys.modules
print()  # transformers may have asked a question, which stands unanswered
print(json.dumps(answers))
"""


@pytest.mark.slow
def test_ids_are_the_same_wherever_the_tokenizer_is_saved(tmp_path):
    """Beside a model or alone, by trainer, checkpoint and pipeline, with and without trust in code; nothing rebuilt.

    The oracle is the tokenizers library on the file itself.
    """
    from translators import varied_model
    from vanilla_transformer import VanillaTransformerTrainer
    from vanilla_transformer.training import VanillaTransformerTrainingArguments

    tokenizer = train_tokenizer(HARD_TEXTS * 2, 700, model_max_length=77)
    model = varied_model(tokenizer)
    tokenizer.save_pretrained(tmp_path / "alone")
    for folder in ("model", "no_config"):
        model.save_pretrained(tmp_path / folder)
        tokenizer.save_pretrained(tmp_path / folder)
    (tmp_path / "no_config" / "config.json").unlink()
    rows = [{"input_ids": ids[-9:], "labels": ids[-9:]} for ids in tokenizer(HARD_TEXTS[:4])["input_ids"]]
    args = VanillaTransformerTrainingArguments(
        output_dir=str(tmp_path / "run"),
        max_steps=1,
        save_steps=1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = VanillaTransformerTrainer(model, args, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    trainer.save_model()
    pipeline("translation", model=str(tmp_path / "model")).save_pretrained(tmp_path / "pipeline")

    texts = mixed_texts(200)
    folders = [str(tmp_path / name) for name in ("alone", "model", "no_config", "run", "run/checkpoint-1", "pipeline")]
    (tmp_path / "task.json").write_text(json.dumps([folders, texts]))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-I", "-c", OPEN_TOKENIZERS, str(tmp_path / "task.json")]
    pipes = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    done = subprocess.run(command, cwd=tmp_path, env=environment, check=False, **pipes)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])
    assert len(answers) == 3 * len(folders)
    ids = [Tokenizer.from_file(str(tmp_path / "alone" / "tokenizer.json")).encode(text).ids for text in texts]
    special = sorted(SPECIAL_TOKENS.values())
    settings = ["right", "right", 77, False, True, BOS, PAD, EOS, None, special, len(tokenizer), f"{texts[0]}</s>"]
    # The file knows no split_special_tokens, so it reads the names of control tokens as control tokens.
    ordinary = [number for number, text in enumerate(texts) if not any(name in text for name in special)]
    assert len(ordinary) > 190
    for found, unchanged, kept in answers:
        assert unchanged
        assert kept == settings
        assert found == tokenizer(texts)["input_ids"]
        assert [found[number] for number in ordinary] == [ids[number] for number in ordinary]


@pytest.mark.parametrize("tokens", [6, 7, 29])
@pytest.mark.parametrize("side", ["text", "text_target"])
def test_truncation_cuts_to_the_limit_and_keeps_eos(tokenizer, tokens, side):
    text = "!?" * 40
    full = tokenizer(text).input_ids[:-1]
    text = tokenizer.decode(full[:tokens])
    assert len(tokenizer(text).input_ids) == tokens + 1
    ids = tokenizer(**{side: text}, truncation=True, max_length=8).input_ids
    assert len(ids) == min(tokens + 1, 8)
    assert ids == [*full[: min(tokens, 7)], EOS]


def test_truncation_without_a_limit_cuts_to_1024(tokenizer):
    ids = tokenizer("?!" * 2000, truncation=True).input_ids
    assert (len(ids), ids[-1]) == (1024, EOS)


def test_batches_are_padded_on_the_right_and_do_not_change_the_ids(tokenizer):
    batch = tokenizer(HARD_TEXTS[:6], padding=True, return_tensors="np")
    assert set(batch) == {"input_ids", "attention_mask"}
    for text, ids, mask in zip(HARD_TEXTS, batch["input_ids"], batch["attention_mask"], strict=False):
        alone = tokenizer(text).input_ids
        assert ids.tolist() == alone + [PAD] * (len(ids) - len(alone))
        assert mask.tolist() == [1] * len(alone) + [0] * (len(ids) - len(alone))
        assert ((ids != PAD) == mask).all()


def test_no_way_of_asking_makes_control_tokens_of_text(tokenizer):
    text = HARD_TEXTS[0]
    plain = tokenizer(text).input_ids
    batch = tokenizer([text, "x"], padding=True, return_tensors="pt")
    assert batch["input_ids"][0].tolist() == plain
    assert batch["attention_mask"].equal((batch["input_ids"] != PAD).long())
    assert tokenizer(text_target=text).input_ids == plain
    assert tokenizer([text], truncation=True, max_length=9)["input_ids"][0] == [*plain[:8], EOS]
    assert tokenizer(text, add_special_tokens=False).input_ids == plain[:-1]
    assert tokenizer.convert_tokens_to_ids(tokenizer.tokenize(text)) == plain[:-1]
    assert tokenizer(text, "</s>").input_ids == [*plain, *tokenizer("</s>").input_ids]


def test_labels_end_in_the_one_end_of_sentence_whatever_the_settings(tiny_tokenizer):
    """Counted in the labels after the collators, also where a tokenizer pads with its end of sentence."""
    targets = [target for _, target in TINY_CORPUS]
    padding_with_eos = copy.deepcopy(tiny_tokenizer)
    padding_with_eos.pad_token = padding_with_eos.eos_token
    assert padding_with_eos.pad_token_id == EOS
    for tokenizer in (tiny_tokenizer, padding_with_eos):
        pairs = Dataset.from_dict({"source": targets[::-1], "target": targets})

        def encode(batch, tokenizer=tokenizer, **options):
            return tokenizer(batch["source"], text_target=batch["target"], **options)

        ways = [
            tokenize_pairs(pairs, tokenizer)[0],
            tokenize_pairs(pairs, tokenizer, max_source_tokens=8, max_target_tokens=8, drop=False)[0],
            pairs.map(encode, batched=True, batch_size=3),
            pairs.map(encode, batched=True, fn_kwargs={"truncation": True, "max_length": 8}),
            pairs.map(encode),
        ]
        for rows in ways:
            rows = [{name: row[name] for name in ("input_ids", "labels")} for row in rows]
            for collate in (TranslationCollator(tokenizer.pad_token_id), DataCollatorForSeq2Seq(tokenizer)):
                for labels in collate(copy.deepcopy(rows))["labels"].tolist():
                    kept = [label for label in labels if label != -100]
                    assert labels[: len(kept)] == kept
                    assert kept.count(EOS) == 1
                    assert kept[-1] == EOS


def test_both_texts_of_a_pair_are_closed(tokenizer):
    first, second = tokenizer("The red train").input_ids, tokenizer("Der Zug").input_ids
    assert tokenizer("The red train", "Der Zug").input_ids == first + second


def test_the_most_frequent_pair_is_merged_first():
    # Pieces: "abab" x 3, " cd" x 2. Pairs: ab 6, ba 3, " c" 2, cd 2; then "ab ab" 3.
    tokenizer = train_tokenizer(["abab", "abab cd", "abab cd"], 261)
    assert sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)[259:] == ["ab", "abab"]


def test_pairs_that_occur_once_are_not_merged():
    assert len(train_tokenizer(["every word here is different from all others"], 1000)) < 265
    assert len(train_tokenizer(["abcdefg"], 1000)) == 259


def test_control_tokens_in_the_training_text_are_ordinary_text():
    tokenizer = train_tokenizer(["use the </s> tag </s></s> <pad> <s>"] * 20, 600)
    vocabulary = tokenizer.get_vocab()
    assert len(set(vocabulary.values())) == len(vocabulary) == len(tokenizer)
    assert [vocabulary[token] for token in ("<s>", "<pad>", "</s>")] == [BOS, PAD, EOS]
    for text in HARD_TEXTS[:4]:
        ids = tokenizer(text).input_ids
        assert [i for i in ids if i < 3] == [EOS]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_vocabulary_never_exceeds_the_size_asked_for():
    texts = ["the cat sat on the mat and the hat"] * 3
    assert len(train_tokenizer(texts, 259)) == 259
    assert len(train_tokenizer(texts, 265)) == 265


def test_the_same_texts_give_the_same_tokenizer_in_every_process(tmp_path):
    program = (
        "import sys\n"
        "from vanilla_transformer.tokenization import train_tokenizer\n"
        "words = [a + b for a in 'abcdefgh' for b in 'stuvwxyz']\n"
        "texts = (' '.join(words[i:] + words[:i]) for i in range(60))\n"
        "train_tokenizer(texts, 330).save_pretrained(sys.argv[1])\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "there")], check=True, env=environment)
    # Every pair of letters is equally frequent: only a fixed rule for ties gives the same merges.
    words = [a + b for a in "abcdefgh" for b in "stuvwxyz"]
    train_tokenizer([" ".join(words[i:] + words[:i]) for i in range(60)], 330).save_pretrained(tmp_path / "here")
    there, here = ((tmp_path / name / "tokenizer.json").read_bytes() for name in ("there", "here"))
    assert there == here
    assert len(json.loads(here)["model"]["merges"]) > 50


def test_texts_may_be_an_iterator_that_is_read_once():
    reads = []

    def texts():
        for i in range(1000):
            reads.append(i)
            yield "once upon a time"

    assert isinstance(train_tokenizer(texts(), 300), PreTrainedTokenizerFast)
    assert reads == list(range(1000))


def test_an_error_while_reading_the_texts_reaches_the_caller():
    def texts():
        yield "a line"
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        train_tokenizer(texts(), 300)


@pytest.mark.parametrize(
    "texts, vocab_size, error, message",
    [
        (["text"], 258, ValueError, "at least 259"),
        (["text"], 300.0, TypeError, "integer"),
        (["text"], True, TypeError, "integer"),
        ([], 300, ValueError, "0 texts"),
        (["", "  ", "\u3000"], 300, ValueError, "3 texts"),
        ("one string", 300, TypeError, r"\[text\]"),
        (["a", None], 300, TypeError, "text 2 is of type NoneType"),
    ],
)
def test_wrong_arguments_are_refused(texts, vocab_size, error, message):
    with pytest.raises(error, match=message):
        train_tokenizer(texts, vocab_size)


def test_a_model_max_length_without_room_for_a_token_is_refused():
    with pytest.raises(ValueError, match="at least 2"):
        train_tokenizer(["text"], 300, model_max_length=1)


def test_real_text_comes_back_unchanged_and_is_compressed(multi30k: Path):
    with gzip.open(multi30k / "val.de.gz", "rt", encoding="utf-8", newline="\n") as file:
        lines = [line.rstrip("\n") for line in file]
    tokenizer = train_tokenizer(iter(lines), 2000)
    ids = tokenizer(lines).input_ids
    assert tokenizer.batch_decode(ids, skip_special_tokens=True) == lines
    assert len(tokenizer) == 2000
    # Bytes per token: far from 1 (no merge) on the text it learnt from.
    assert sum(len(line.encode()) for line in lines) / sum(map(len, ids)) > 3
