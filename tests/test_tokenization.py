"""The joint byte-level BPE: nothing is lost, nothing in a text is taken for a control token, EOS always closes."""

import gzip
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

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
