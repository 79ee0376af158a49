"""The translation pipeline: text in, text out, for this model and for any other sequence-to-sequence model.

transformers 5 removed its own; this one returns what that of version 4 returned. This file ships with every
saved model.
"""

import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, ModelCardData
from torch.utils.data import IterableDataset
from transformers import Pipeline
from transformers.utils import logging


logger = logging.get_logger(__name__)

# Above this a tokenizer's model_max_length means "not known" (transformers writes 10 ** 30).
NO_LENGTH_LIMIT = 10**9
# Arguments of generate() that it divides by, or tests too late: some models' generate() takes a 0 for "not given".
COUNTS = ("num_beams", "num_return_sequences", "max_new_tokens", "max_length")


class ReadAsNeeded(IterableDataset):
    """An iterator as a dataset: the older transformers 5 make a list of a generator before they begin."""

    def __init__(self, texts: Iterator[str]) -> None:
        self.texts = texts

    def __iter__(self) -> Iterator[str]:
        return self.texts


class VanillaTransformerTranslationPipeline(Pipeline):
    """Translates strings.

    `pipeline("translation", model=...)` and `pipeline("translation_en_to_de", model=...)` build it. A string gives
    `[{"translation_text": str}]`, a list of strings a list of such dictionaries in the same order (with
    `num_return_sequences` above 1: a list of lists), a generator or dataset an iterator of lists. White space alone
    translates to the empty string (as token ids: padding) and never reaches the model. A text longer than the
    tokenizer's `model_max_length`, or than the model has positions for, is cut there, the end of sentence kept, with a
    warning.

    Call-time arguments: `return_tensors=True` gives `translation_token_ids` in place of the text,
    `clean_up_tokenization_spaces`, `truncation`, `src_lang` and `tgt_lang` (tokenizers of multilingual models),
    `batch_size`, and every argument of `generate()`.
    """

    _load_tokenizer = True  # type: ignore[assignment]
    _load_processor = False  # type: ignore[assignment]
    _load_image_processor = False  # type: ignore[assignment]
    _load_video_processor = False  # type: ignore[assignment]
    _load_feature_extractor = False  # type: ignore[assignment]
    # generate() takes its settings from the model; what the call adds goes straight to it.
    _pipeline_calls_generate = False

    def _sanitize_parameters(
        self,
        return_tensors: bool | None = None,
        return_text: bool | None = None,
        clean_up_tokenization_spaces: bool | None = None,
        truncation: Any = None,
        src_lang: str | None = None,
        tgt_lang: str | None = None,
        **generate_kwargs: Any,
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        preprocess: dict[str, Any] = {"truncation": truncation, "src_lang": src_lang, "tgt_lang": tgt_lang}
        parts = (self.task or "").split("_")
        if len(parts) == 4 and parts[0] == "translation" and parts[2] == "to":  # translation_XX_to_YY
            preprocess["src_lang"] = src_lang or parts[1]
            preprocess["tgt_lang"] = tgt_lang or parts[3]
        for name in COUNTS:
            count = generate_kwargs.get(name)
            if count is not None and (not isinstance(count, Integral) or count < 1):
                raise ValueError(f"{name} must be a whole number of at least 1, got {count!r}.")
            if count is None:
                generate_kwargs.pop(name, None)
        if return_tensors is None and return_text is not None:
            return_tensors = not return_text
        postprocess = {"return_tensors": return_tensors, "clean_up_tokenization_spaces": clean_up_tokenization_spaces}
        return (
            {name: value for name, value in preprocess.items() if value is not None},
            generate_kwargs,
            {name: value for name, value in postprocess.items() if value is not None},
        )

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Translates one string, a list or tuple of strings, a generator or a dataset.

        Args:
            inputs (`str`, `list[str]`, generator or dataset): What to translate.
            args: Further strings, as version 4 took them.
            kwargs: See the class.

        Returns:
            `list[dict]` for a string or a list; `list[list[dict]]` for a list with several sequences each; an iterator
            of `list[dict]` for a generator or dataset.

        Raises:
            TypeError: An input that is not a string.
            ValueError: A string with half of a surrogate pair, which is no character.
        """
        if args:
            inputs = [inputs, *args]
        if isinstance(inputs, Sequence) and not isinstance(inputs, (str, bytes)):
            inputs = list(inputs)  # a tuple, or a column of a dataset
        elif isinstance(inputs, Iterator):
            inputs = ReadAsNeeded(inputs)
        if isinstance(inputs, list) and not inputs:
            return []
        result = super().__call__(inputs, **kwargs)
        if isinstance(inputs, list) and all(len(each) == 1 for each in result):
            return [each[0] for each in result]
        return result

    def preprocess(  # type: ignore[override]
        self, text: str, truncation: Any = None, src_lang: str | None = None, tgt_lang: str | None = None
    ) -> dict[str, Any]:
        """Token ids and mask of one text, shape `(1, length)`; a blank text has a mask of zeros."""
        if not isinstance(text, str):
            raise TypeError(
                f"the translation pipeline takes strings, got {type(text).__name__}: {text!r:.80}; pass a string, a "
                "list of strings, or KeyDataset(dataset, column)."
            )
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"expected text, got the lone surrogate U+{ord(text[error.start]):04X} at character "
                f"{error.start + 1} of {text!r:.80}; decode the text as UTF-8, or with errors='replace'."
            ) from None
        tokenizer: Any = self.tokenizer
        build = getattr(tokenizer, "_build_translation_inputs", None)

        def encode(text: str, **options: Any) -> Any:
            if build is None or src_lang is None or tgt_lang is None:
                return tokenizer(text, return_tensors="pt", **options)
            return build(text, return_tensors="pt", src_lang=src_lang, tgt_lang=tgt_lang, **options)

        blank = not text.strip()
        # In place of a blank text anything will do, for its mask hides it; but a batch needs the same keys.
        text = self._task_prefix() + ("." if blank else text)
        limit, reason = tokenizer.model_max_length, "the tokenizer's model_max_length"
        positions = getattr(self.model.config, "max_position_embeddings", None) or limit
        if positions < limit and getattr(self.model.config, "position_embedding", None) != "sinusoidal":
            limit, reason = positions, "the model's max_position_embeddings"
        encoded = encode(text, truncation=False, verbose=False)
        length = encoded["input_ids"].shape[1]
        if truncation is not False and limit < NO_LENGTH_LIMIT and length > limit:
            logger.warning(
                f"a text of {length} tokens is longer than {reason} of {limit} and was cut there: {text!r:.60}"
            )
            encoded = encode(text, truncation=True, max_length=limit)
        names = ("input_ids", "attention_mask", "forced_bos_token_id")
        inputs = {name: encoded[name] for name in names if name in encoded}
        if blank:
            ids = inputs["input_ids"][:, :1]
            inputs.update(input_ids=ids, attention_mask=torch.zeros_like(ids))
        return inputs

    def _task_prefix(self) -> str:
        """What models such as T5 want before the text of this task; the empty string for others."""
        settings = getattr(self.model.config, "task_specific_params", None) or {}
        return (settings.get(self.task) or {}).get("prefix") or getattr(self.model.config, "prefix", None) or ""

    def _forward(  # type: ignore[override]
        self, model_inputs: dict[str, Any], **generate_kwargs: Any
    ) -> dict[str, torch.Tensor]:
        """Generates for the rows that are not blank; returns `output_ids` of shape `(batch, sequences, length)`."""
        input_ids, mask = model_inputs["input_ids"], model_inputs["attention_mask"]
        forced = model_inputs.get("forced_bos_token_id")
        if forced is not None:
            generate_kwargs.setdefault("forced_bos_token_id", int(torch.as_tensor(forced).reshape(-1)[0]))
        model: Any = self.model  # with generate(), which its declared type does not promise
        tokenizer: Any = self.tokenizer
        settings = generate_kwargs.get("generation_config") or model.generation_config
        sequences = generate_kwargs.get("num_return_sequences") or settings.num_return_sequences or 1
        kept = mask.any(dim=-1)
        pad = tokenizer.pad_token_id
        blank_fill = pad if pad is not None else tokenizer.eos_token_id
        if not bool(kept.any()):
            return {"output_ids": input_ids.new_full((input_ids.shape[0], sequences, 1), blank_fill), "kept": kept}
        if bool(kept.all()):
            rows = model.generate(input_ids=input_ids, attention_mask=mask, **generate_kwargs)
        else:
            rows = model.generate(input_ids=input_ids[kept], attention_mask=mask[kept], **generate_kwargs)
        rows = rows if isinstance(rows, torch.Tensor) else rows.sequences
        output = rows.new_full((input_ids.shape[0], sequences, rows.shape[-1]), blank_fill)
        output[kept] = rows.view(-1, sequences, rows.shape[-1])
        return {"output_ids": output, "kept": kept}

    def postprocess(  # type: ignore[override]
        self,
        model_outputs: dict[str, torch.Tensor],
        return_tensors: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> list[dict[str, Any]]:
        """One dictionary for each sequence of one text."""
        tokenizer: Any = self.tokenizer
        records: list[dict[str, Any]] = []
        blank = not bool(model_outputs["kept"].reshape(-1)[0])
        for ids in model_outputs["output_ids"].reshape(-1, model_outputs["output_ids"].shape[-1]):
            if return_tensors:
                records.append({"translation_token_ids": ids})
                continue
            text = tokenizer.decode(
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=clean_up_tokenization_spaces
            )
            records.append({"translation_text": "" if blank else text})
        return records

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """Saves model, tokenizer and generation settings, and a short model card where there is none.

        The model brings its code along. For models of other families the stock method would add this file and an
        entry for it in their configuration, and they would then ask for `trust_remote_code` where the task is known.
        """
        self.model.save_pretrained(save_directory, **kwargs)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(save_directory)
        card = Path(save_directory) / "README.md"
        if not card.exists():
            card.write_text(self._model_card(card.parent.resolve().name), encoding="utf-8")

    def push_to_hub(  # type: ignore[override]
        self,
        repo_id: str,
        *,
        commit_message: str = "Upload pipeline",
        private: bool | None = None,
        token: str | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Uploads what `save_pretrained` writes, as one commit; a card that is there already stays.

        Args:
            repo_id: `user/name`; made where it does not exist.
            commit_message: Of the commit.
            private: Whether a new repository is private; None means what the owner's settings say.
            token: None means that of `hf auth login` or of HF_TOKEN.
            revision: Branch, made where it does not exist.
            create_pr: Whether to open a pull request instead of committing.
            kwargs: For the model's `save_pretrained`, such as `max_shard_size`.

        Returns:
            `huggingface_hub.CommitInfo`.

        Raises:
            ValueError: `private` for a repository that exists and is public.
        """
        api = HfApi(token=token)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if private and api.repo_info(repo_id).private is False:
            raise ValueError(
                f"{repo_id} exists already and is public; nothing was sent. Make it private in its settings on the "
                "Hub, or give another name."
            )
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(parent) / repo_id.rpartition("/")[2]
            folder.mkdir()
            (folder / "README.md").write_text(self._model_card(folder.name, repo_id), encoding="utf-8")
            self.save_pretrained(folder, **kwargs)
            if api.file_exists(repo_id, "README.md", revision=revision):
                (folder / "README.md").unlink()
            return api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                commit_message=commit_message,
                revision=revision,
                create_pr=create_pr,
            )

    def _model_card(self, name: str, model_id: str = "PATH_OR_NAME") -> str:
        """A card that says no more than a pipeline knows: the model's family and size, the languages of the task.

        Args:
            name: The heading.
            model_id: Where the model is found.
        """
        model: Any = self.model
        origin = str(getattr(model.config, "_name_or_path", "") or "")
        from_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", origin) is not None and not os.path.exists(origin)
        languages = re.fullmatch(r"translation_([a-z]{2,3})_to_([a-z]{2,3})", self.task or "")
        data = ModelCardData(
            library_name="transformers",
            pipeline_tag="translation",
            tags=["translation", str(model.config.model_type).replace("_", "-")],
            language=list(languages.groups()) if languages else None,
            base_model=origin if from_hub else None,
        )
        code = ", trust_remote_code=True" if getattr(model.config, "auto_map", None) else ""
        return "\n".join(
            [
                f"---\n{data.to_yaml()}\n---\n",
                f"# {re.sub(r'[^0-9A-Za-z._ -]', '', name)}\n",
                f"A translation model (`{type(model).__name__}`) with {model.num_parameters():,} parameters and its "
                "tokenizer.\n",
                "```python",
                "from transformers import pipeline\n",
                f'translate = pipeline("translation", model="{model_id}"{code})',
                'print(translate("A sentence to translate."))',
                "```",
                "",
            ]
        )


__all__ = ["VanillaTransformerTranslationPipeline"]
