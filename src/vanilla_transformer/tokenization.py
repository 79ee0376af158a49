"""The joint vocabulary: one byte-level BPE for the source and the target language (Vaswani et al. 2017, 5.1).

The paper encodes sentences "using byte-pair encoding, which has a shared source-target vocabulary". Here the pairs are
merged over UTF-8 bytes, so that no text is unknown and every text comes back unchanged. What is trained is an ordinary
fast tokenizer: ``AutoTokenizer`` opens the saved folder without this package.
"""

from collections.abc import Iterable, Iterator

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast


# The order gives the ids 0, 1 and 2, which are the defaults of VanillaTransformerConfig.
SPECIAL_TOKENS = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>"}

_BYTE_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
_SMALLEST_VOCABULARY = len(_BYTE_ALPHABET) + len(SPECIAL_TOKENS)

# A pair of symbols that occurs once in the whole corpus teaches nothing and would cost a row of the embedding matrix.
_MIN_PAIR_FREQUENCY = 2


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, *, model_max_length: int = 1024, show_progress: bool = False
) -> PreTrainedTokenizerFast:
    """Trains the joint byte-level BPE on the sentences of both languages.

    Pieces follow the GPT-2 pattern (a space belongs to the word after it; digits, letters and signs never share a
    piece). There is no normaliser and no unknown token, EOS closes every encoded text, and the literal strings
    ``<s>``, ``<pad>`` and ``</s>`` inside a text are encoded as the characters they are. For every valid string,
    ``tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text``. The same texts in the same
    order give the same tokenizer.

    Args:
        texts: Sentences of both sides, in any order. It is read once and never held as a whole, so an iterator over
            millions of lines is fine; memory grows with the number of different words.
        vocab_size: Number of tokens wanted, the 3 special tokens and the 256 bytes included. A small corpus gives
            fewer: merging stops when no pair of symbols occurs twice. ``len(tokenizer)`` says how many there are.
        model_max_length: Number of tokens, EOS included, to which ``truncation=True`` cuts.
        show_progress: Whether to draw the progress bars of the ``tokenizers`` library on stderr.

    Returns:
        A tokenizer that pads on the right and gives ``input_ids`` and ``attention_mask``; ids: BOS 0, PAD 1, EOS 2.

    Raises:
        TypeError: ``texts`` is one string, or holds something that is no string.
        ValueError: ``vocab_size`` is below 259 or ``model_max_length`` below 2, or no text holds a character other
            than white space.

    Source:
        Vaswani et al. 2017, 5.1; Sennrich et al. 2016 (byte-pair encoding).
    """
    if isinstance(texts, (str, bytes)):
        raise TypeError(f"texts must be an iterable of strings, got one {type(texts).__name__}; pass [text] instead")
    if isinstance(vocab_size, bool) or not isinstance(vocab_size, int):
        raise TypeError(f"vocab_size must be an integer, got {vocab_size!r}")
    if vocab_size < _SMALLEST_VOCABULARY:
        raise ValueError(
            f"vocab_size must be at least {_SMALLEST_VOCABULARY} ({len(_BYTE_ALPHABET)} bytes and "
            f"{len(SPECIAL_TOKENS)} special tokens), got {vocab_size}"
        )
    if model_max_length < 2:
        raise ValueError(f"model_max_length must be at least 2 (one token and EOS), got {model_max_length}")

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=_MIN_PAIR_FREQUENCY,
        special_tokens=list(SPECIAL_TOKENS.values()),
        initial_alphabet=_BYTE_ALPHABET,
        show_progress=show_progress,
    )
    backend.train_from_iterator(_checked_texts(texts), trainer)

    eos_token = SPECIAL_TOKENS["eos_token"]
    # A template, unlike EOS appended by hand, survives truncation: the text is cut first, then EOS is added.
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A {eos_token}",
        pair=f"$A {eos_token} $B {eos_token}",
        special_tokens=[(eos_token, backend.token_to_id(eos_token))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **SPECIAL_TOKENS,
        model_max_length=model_max_length,
        # Without it a "</s>" in a user's text would end the sentence, and "<pad>" would be masked.
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        padding_side="right",
        truncation_side="right",
        # No "token_type_ids": the model has no such input.
        model_input_names=["input_ids", "attention_mask"],
    )


def _checked_texts(texts: Iterable[str]) -> Iterator[str]:
    """Passes the texts on and raises where one is no string, or where all of them are blank."""
    found_text = False
    count = 0
    for text in texts:
        count += 1
        if not isinstance(text, str):
            raise TypeError(
                f"texts must hold strings, but text {count} is of type {type(text).__name__}: {text!r:.80}"
            )
        found_text = found_text or not (text == "" or text.isspace())
        yield text
    if not found_text:
        raise ValueError(f"a tokenizer needs text to learn from, got {count} texts without any visible character")
