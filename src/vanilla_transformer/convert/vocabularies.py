"""Two vocabularies of a foreign model as the one that this package's model and its tokenizer have.

Words are united by their string, which is exact: a tokenizer has one id for a string, the encoder sees only words of
sources and the decoder only those of targets, and each has a matrix of its own wherever the two vocabularies differ.
Separate ranges of ids would need two tokenizers. A word that one side lacks is its unknown word there, as it is in the
original, and the output gives it no probability.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast


SEGMENTATIONS = ("words", "characters")
# What Python's str.split() splits at; \s of the tokenizers library is not quite that.
WHITE_SPACE = "[\t-\r\x1c-\x20\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"


@dataclass(frozen=True)
class Vocabularies:
    """Words of the source and of the target by their ids in the original.

    Attributes:
        source, target: Words by id; the same list where the original has one vocabulary.
        start: First input of the decoder.
        end: End of a sentence, here and there.
        padding: Fills rows of a batch.
        unknown: Stands for every other word; the source needs it.
        bos: Opens sentences where that is not `start`; like it and `end`, no text of a translation. None for `start`.
        begin: What the original puts in front of each source; None for nothing.
        segmentation: "words" (separated by white space) or "characters".
        space: How the vocabulary writes a space, where words are characters.
    """

    source: Sequence[str]
    target: Sequence[str]
    start: str
    end: str
    padding: str
    unknown: str
    bos: str | None = None
    begin: str | None = None
    segmentation: str = "words"
    space: str = " "

    def check(self) -> None:
        """Raises ValueError for a word that stands twice, a special one that is missing, an unknown segmentation."""
        if self.segmentation not in SEGMENTATIONS:
            raise ValueError(f"segmentation must be one of {', '.join(SEGMENTATIONS)}, got {self.segmentation!r}.")
        for side, words in (("source", self.source), ("target", self.target)):
            seen: set[str] = set()
            twice = next((word for word in words if word in seen or seen.add(word)), None)  # type: ignore[func-returns-value]
            if twice is not None:
                raise ValueError(
                    f"the {side} vocabulary has the word {twice!r} twice; an id could not be told from it."
                )
            broken = next((word for word in words if not _is_text(word)), None)
            if broken is not None:
                raise ValueError(
                    f"the {side} vocabulary has {broken!r}, in which half of a surrogate pair is no text."
                )
        wanted = [("target", "start of the target", self.start), ("target", "end of sentence", self.end)]
        wanted += [("source", "unknown word", self.unknown), ("source", "end of sentence", self.end)]
        if self.begin is not None:
            wanted.append(("source", "begin of the source", self.begin))
        for side, role, word in wanted:
            if word not in getattr(self, side):
                raise ValueError(f"the {side} vocabulary lacks {word!r}, which is to be its {role}.")
        if self.padding not in self.ids:
            raise ValueError(f"no vocabulary has {self.padding!r}, which is to be the padding.")
        if self.padding in (self.start, self.end, self.unknown, self.begin):
            raise ValueError(
                f"{self.padding!r} is the padding and a word besides; this package masks it wherever it stands."
            )

    @cached_property
    def merged(self) -> list[str]:
        """All words: those of the source with their ids, then those that only the target has."""
        return list(dict.fromkeys([*self.source, *self.target]))

    @cached_property
    def ids(self) -> dict[str, int]:
        """Id of each word in the merged vocabulary."""
        return {word: index for index, word in enumerate(self.merged)}

    def spread(self, matrix: torch.Tensor, side: str, *, unknown: bool = True, fill: float = 0.0) -> torch.Tensor:
        """Rows of the original's vocabulary as rows of the merged one.

        Args:
            matrix: Shape `(words of the side, ...)`.
            side: "source" or "target".
            unknown: Whether a word of the other side alone gets the row of the unknown word.
            fill: What it gets otherwise.

        Returns:
            Shape `(len(merged), ...)`.
        """
        rows = {word: row for row, word in enumerate(getattr(self, side))}
        missing = rows.get(self.unknown, len(rows)) if unknown else len(rows)
        with_fill = torch.cat([matrix, torch.full_like(matrix[:1], fill)])
        return with_fill[torch.tensor([rows.get(word, missing) for word in self.merged])]

    def tokenizer(self, model_max_length: int) -> PreTrainedTokenizerFast:
        """A tokenizer of the merged vocabulary that `AutoTokenizer` opens, for sources and for targets.

        An unknown word in a translation stays there, as its own string.

        Args:
            model_max_length: Tokens at which `truncation=True` cuts.
        """
        ids = self.ids
        backend = Tokenizer(models.WordLevel(ids, unk_token=self.unknown))
        if self.segmentation == "words":
            backend.pre_tokenizer = pre_tokenizers.Split(Regex(f"{WHITE_SPACE}+"), "removed")
        else:
            backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
            joined: list = [decoders.Fuse()]
            if self.space != " ":
                backend.normalizer = normalizers.Replace(" ", self.space)
                joined = [decoders.Replace(self.space, " "), *joined]
            backend.decoder = decoders.Sequence(joined)
        framed = [self.end] if self.begin is None else [self.begin, self.end]
        backend.post_processor = processors.TemplateProcessing(
            single=[*framed[:-1], "$A", self.end],
            pair=[*framed[:-1], "$A", self.end, *framed[:-1], "$B", self.end],
            special_tokens=[(word, ids[word]) for word in dict.fromkeys(framed)],
        )
        return PreTrainedTokenizerFast(
            tokenizer_object=backend,
            bos_token=self.start if self.bos is None else self.bos,
            eos_token=self.end,
            pad_token=self.padding,
            model_max_length=model_max_length,
            split_special_tokens=True,
            clean_up_tokenization_spaces=False,
            padding_side="right",
            truncation_side="right",
            model_input_names=["input_ids", "attention_mask"],
        )


def _is_text(word: str) -> bool:
    """Whether a string has no half of a surrogate pair, which JSON can write and no file in UTF-8 has."""
    return not any("\ud800" <= character <= "\udfff" for character in word)


__all__ = ["SEGMENTATIONS", "Vocabularies"]
