"""What a file of weights does not tell of its model, in a small JSON file beside it."""

import json
from collections.abc import Mapping
from typing import Any

from vanilla_transformer.convert.vocabularies import Vocabularies
from vanilla_transformer.convert.weights import Weights, load_checkpoint, required_file


REQUIRED = object()
TEXT = (str,)
NUMBER = (int, float)

# Fields of every description: what each may be, and its default.
COMMON_FIELDS: dict[str, tuple[tuple[type, ...], Any]] = {
    "weights": (TEXT, REQUIRED),
    "state_dict": (TEXT, None),
    "unused": ((list,), []),
    "num_heads": ((int,), REQUIRED),
    "source_vocabulary": ((str, list), REQUIRED),
    "target_vocabulary": ((str, list), None),
    "segmentation": (TEXT, "words"),
    "space": (TEXT, " "),
    "bos_token": (TEXT, "<bos>"),
    "eos_token": (TEXT, "<eos>"),
    "pad_token": (TEXT, "<pad>"),
    "unk_token": (TEXT, "<unk>"),
    "source_begins_with_bos": ((bool,), True),
    "dropout": (NUMBER, 0.1),
    "generation": ((dict,), {}),
}


def read_description(
    name: str,
    file: str,
    given: Mapping[str, Any] | None,
    fields: Mapping[str, tuple[tuple[type, ...], Any]],
    revision: str | None,
) -> dict[str, Any]:
    """The fields of a description, defaults filled in.

    Args:
        name: Folder of the original, or its name on the Hub.
        file: The JSON file in it.
        given: Fields in place of that file; None reads it.
        fields: What is known besides `COMMON_FIELDS`.
        revision: On the Hub.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is no JSON, or a field is unknown, missing or of the wrong type.
    """
    where = "the description"
    if given is None:
        path = required_file(name, file, revision, "the description of the model")
        where = path
        try:
            with open(path, encoding="utf-8") as stream:
                given = json.load(stream)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is no JSON file in UTF-8: {error}") from error
    if not isinstance(given, Mapping):
        raise ValueError(f"{where} must be a JSON object, got {type(given).__name__}.")
    known = {**COMMON_FIELDS, **fields}
    unknown = [each for each in given if each not in known]
    if unknown:
        raise ValueError(f"{where} has the unknown field {unknown[0]!r}; expected some of {', '.join(known)}.")
    described = {}
    for field, (types, default) in known.items():
        if field not in given and default is REQUIRED:
            raise ValueError(f"{where} lacks the field {field!r}, which the weights do not tell.")
        value = given.get(field, default)
        is_bool = isinstance(value, bool)
        if value is not default and (not isinstance(value, types) or (is_bool and bool not in types)):
            expected = " or ".join(each.__name__ for each in types)
            raise ValueError(f"{where}: the field {field!r} must be {expected}, got {value!r}.")
        described[field] = value
    return described


def described_weights(name: str, description: Mapping[str, Any], revision: str | None) -> Weights:
    """The state dict that a description names."""
    path = required_file(name, description["weights"], revision, "the weights that the description names")
    tensors = load_checkpoint(path)
    key = description["state_dict"]
    if key is not None:
        if not isinstance(tensors, Mapping) or key not in tensors:
            raise ValueError(f"{path} has no entry {key!r}, under which the description has its state dict.")
        tensors = tensors[key]
    return Weights(tensors, path)


def described_vocabularies(name: str, description: Mapping[str, Any], revision: str | None) -> Vocabularies:
    """The vocabularies of a description, lists of words by id or files with one word a line."""

    def words(field: str) -> list[str]:
        value = description[field]
        if isinstance(value, str):
            return words_of_file(required_file(name, value, revision, f"the {field.replace('_', ' ')}"))
        wrong = next((each for each in value if not isinstance(each, str)), None)
        if wrong is not None:
            raise ValueError(f"the field {field!r} must hold words, got {wrong!r}.")
        return value

    source = words("source_vocabulary")
    target = source if description["target_vocabulary"] is None else words("target_vocabulary")
    return Vocabularies(
        source=source,
        target=target,
        start=description["bos_token"],
        end=description["eos_token"],
        padding=description["pad_token"],
        unknown=description["unk_token"],
        begin=description["bos_token"] if description["source_begins_with_bos"] else None,
        segmentation=description["segmentation"],
        space=description["space"],
    )


def words_of_file(path: str) -> list[str]:
    r"""One word a line; a line ends at ``\n``, and nothing else is taken away.

    Raises:
        ValueError: The file is not in UTF-8.
    """
    with open(path, "rb") as stream:
        content = stream.read()
    try:
        lines = content.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}, line {number}: not in UTF-8.") from error
    return lines[:-1] if lines[-1] == "" else lines


__all__ = ["COMMON_FIELDS", "described_vocabularies", "described_weights", "read_description", "words_of_file"]
