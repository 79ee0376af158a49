"""A saved folder opens where the package is not installed: the code travels with the weights."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForSeq2SeqLM, pipeline

from small_models import padded, small_model
from translators import varied_model
from vanilla_transformer import VanillaTransformerModel


SHIPPED = {
    "configuration_vanilla_transformer.py",
    "generation_vanilla_transformer.py",
    "modeling_vanilla_transformer.py",
    "pipeline_vanilla_transformer.py",
}
PACKAGE = Path(__file__).parents[1] / "src" / "vanilla_transformer"
SOURCES = [[5, 9, 4, 2], [7, 8, 2]]

# Runs before anything else in the other interpreter: neither the package nor the network is there.
GUARD = """
import socket, sys

class NoPackage:
    def find_spec(self, name, path=None, target=None):
        if name == "vanilla_transformer" or name.startswith("vanilla_transformer."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoPackage())
connections = []

def refuse(self, address):
    connections.append(address)
    raise OSError(f"connection to {address} in a test without a network")

socket.socket.connect = refuse
"""


def elsewhere(tmp_path: Path, script: str, **more: str) -> str:
    """What a script prints in a new interpreter that has transformers and torch, but not the package.

    `more` are further variables of its environment.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {
        "HF_HOME": str(tmp_path / "empty_home"),
        "HF_MODULES_CACHE": str(tmp_path / "empty_modules"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        **more,
    }
    work = tmp_path / "elsewhere"
    work.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-I", "-c", GUARD + textwrap.dedent(script)],
        env=environment,
        cwd=work,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def saved_model(folder: Path, **overrides):
    model = small_model(**overrides)
    model.save_pretrained(folder)
    return model


def test_a_saved_folder_has_every_file_that_it_names(tmp_path):
    saved_model(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == SHIPPED | {"config.json", "generation_config.json", "model.safetensors"}
    config = json.loads((tmp_path / "config.json").read_text())
    assert set(config["auto_map"]) == {"AutoConfig", "AutoModel", "AutoModelForSeq2SeqLM"}
    references = [*config["auto_map"].values(), config["custom_pipelines"]["translation"]["impl"]]
    for reference in references:
        assert "--" not in reference
        module, name = reference.split(".")
        assert re.search(rf"^class {name}\b", (tmp_path / f"{module}.py").read_text(), re.MULTILINE)
    for name in SHIPPED:
        assert (tmp_path / name).read_bytes() == (PACKAGE / name).read_bytes()


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_a_shipped_file_imports_only_its_siblings_and_what_transformers_brings(name):
    allowed = {"transformers", "torch", "huggingface_hub", *sys.stdlib_module_names}
    for line in (PACKAGE / name).read_text().splitlines():
        match = re.match(r"\s*(?:from\s+(\S+)\s+import|import\s+(\S+))", line)
        if match is None or not line.strip().startswith(("from", "import")):
            continue
        module = match.group(1) or match.group(2)
        if module.startswith("."):
            assert f"{module[1:]}.py" in SHIPPED, line
        else:
            assert module.split(".")[0].rstrip(",") in allowed, line


def test_nothing_else_in_the_package_uses_relative_imports():
    for path in PACKAGE.rglob("*.py"):
        if path.name not in SHIPPED:
            assert not re.search(r"^\s*from\s+\.", path.read_text(), re.MULTILINE), path


def test_a_checkpoint_loads_and_generates_the_same_without_the_package(tmp_path):
    model = saved_model(tmp_path / "model", pruned_heads={"encoder": [[1], []], "cross": [[], [0, 2, 3], [1]]})
    ids, mask = padded(SOURCES)
    expected = model.generate(ids, attention_mask=mask)
    logits = model(input_ids=ids, attention_mask=mask, decoder_input_ids=expected[:, :3]).logits
    torch.save({"ids": ids, "mask": mask, "expected": expected, "logits": logits.detach()}, tmp_path / "right.pt")
    printed = elsewhere(
        tmp_path,
        f"""
        import json, torch
        from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM

        folder = {str(tmp_path / "model")!r}
        right = torch.load({str(tmp_path / "right.pt")!r}, weights_only=True)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
        base = AutoModel.from_pretrained(folder, trust_remote_code=True)
        model = AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True)
        torch.manual_seed(0)
        ids, mask = right["ids"], right["mask"]
        generated = model.generate(ids, attention_mask=mask)
        logits = model(input_ids=ids, attention_mask=mask, decoder_input_ids=right["expected"][:, :3]).logits
        # train a step, save, open again from there
        model.train()
        loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
        loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.01).step()
        model.eval().save_pretrained({str(tmp_path / "again")!r})
        again = AutoModelForSeq2SeqLM.from_pretrained({str(tmp_path / "again")!r}, trust_remote_code=True)
        print(json.dumps({{
            "types": [type(config).__name__, type(base).__name__, type(model).__name__],
            "modules": type(model).__module__,
            "same_ids": torch.equal(generated, right["expected"]),
            "logits": (logits - right["logits"]).abs().max().item(),
            "again": torch.equal(again.generate(ids, attention_mask=mask), model.generate(ids, attention_mask=mask)),
            "beams": again.generation_config.num_beams,
            "connections": len(connections),
            "package": "vanilla_transformer" in sys.modules,
        }}))
        """,
    )
    result = json.loads(printed.splitlines()[-1])
    assert result.pop("modules").startswith("transformers_modules.")
    assert result.pop("logits") <= 1e-6
    assert result == {
        "types": [
            "VanillaTransformerConfig",
            "VanillaTransformerModel",
            "VanillaTransformerForConditionalGeneration",
        ],
        "same_ids": True,
        "again": True,
        "beams": 4,
        "connections": 0,
        "package": False,
    }
    again = tmp_path / "again"
    assert {path.name for path in again.iterdir()} >= SHIPPED
    config = json.loads((again / "config.json").read_text())
    assert set(config["auto_map"]) == {"AutoConfig", "AutoModel", "AutoModelForSeq2SeqLM"}
    assert all("--" not in value for value in config["auto_map"].values())
    assert config["custom_pipelines"]["translation"]["impl"].startswith("pipeline_vanilla_transformer.")


SENTENCES = ["The red train", "", "A dog"]

# Opens each place with all four auto classes and the pipeline, trains a step of size 0, saves from there by model,
# tokenizer and pipeline, and opens what it saved.
OPEN_EVERYWHERE = """
import json, os, torch
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

places, sentences, saved = json.loads({arguments!r})
trust = {{"trust_remote_code": True}}

def translations(place, **options):
    tokenizer = AutoTokenizer.from_pretrained(place, **trust, **options)
    model = AutoModelForSeq2SeqLM.from_pretrained(place, **trust, **options)
    rows = [model.generate(**tokenizer(text, return_tensors="pt"))[0].tolist() for text in sentences if text]
    translator = pipeline("translation", model=place, **trust)
    return model, tokenizer, translator, rows, [record["translation_text"] for record in translator(sentences)]

results = {{}}
for number, place in enumerate(places):
    options = {{"local_files_only": True}} if number % 2 else {{}}
    config = AutoConfig.from_pretrained(place, **trust, **options)
    base = AutoModel.from_pretrained(place, **trust, **options)
    assert type(base.encoder).__name__ == "VanillaTransformerEncoder", type(base)
    model, tokenizer, translator, *found = translations(place, **options)
    batch = tokenizer(sentences[0], return_tensors="pt")
    model.train()(**batch, labels=batch["input_ids"]).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    folders = [os.path.join(saved, f"{{number}} tuned"), os.path.join(saved, f"{{number}}.pipe")]
    model.save_pretrained(folders[0])
    tokenizer.save_pretrained(folders[0])
    translator.save_pretrained(folders[1])
    results[place] = [found, *(list(translations(folder)[3:]) for folder in folders)]
print(json.dumps([results, len(connections), "vanilla_transformer" in sys.modules]))
"""

REGISTER_AND_SAVE = """
import sys
from transformers import AutoModelForSeq2SeqLM
from vanilla_transformer import (
    VanillaTransformerConfig, VanillaTransformerForConditionalGeneration, VanillaTransformerModel
)
VanillaTransformerConfig.register_for_auto_class()
VanillaTransformerModel.register_for_auto_class("AutoModel")
VanillaTransformerForConditionalGeneration.register_for_auto_class("AutoModelForSeq2SeqLM")
AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2])
"""


def assert_self_contained(folder: Path) -> None:
    """Every file that the configuration names lies in the folder, and nothing names a repository."""
    config = json.loads((folder / "config.json").read_text())
    assert set(config["auto_map"]) >= {"AutoConfig", "AutoModel", "AutoModelForSeq2SeqLM"}
    translation = config["custom_pipelines"]["translation"]
    assert translation["pt"] == ["AutoModelForSeq2SeqLM"]
    for reference in [*config["auto_map"].values(), translation["impl"]]:
        assert "--" not in reference
        code = (folder / f"{reference.split('.')[0]}.py").read_text()
        assert not re.search(r"^\s*(from|import)\s+vanilla_transformer\b", code, re.MULTILINE)


@pytest.mark.slow
def test_whatever_a_place_is_called_it_opens_there_and_so_does_what_is_saved_from_it(tmp_path, tiny_tokenizer):
    """Odd folder names, a relative path, a Hub's cache with symbolic links, a save after register_for_auto_class."""
    model = varied_model(tiny_tokenizer)
    plain = tmp_path / "plain"
    model.save_pretrained(plain)
    tiny_tokenizer.save_pretrained(plain)
    registered = tmp_path / "registered"
    subprocess.run([sys.executable, "-c", REGISTER_AND_SAVE, str(plain), str(registered)], check=True)
    tiny_tokenizer.save_pretrained(registered)
    work = tmp_path / "elsewhere"
    shutil.copytree(plain, work / "models" / "relative.v1")
    places = [str(registered), "models/relative.v1"]
    for name in ("with space", "v1.0-final", "\u00fcn\u00ef \u4e2d", "a--b", "2017"):
        shutil.copytree(plain, tmp_path / "odd" / name)
        places.append(f"{tmp_path / 'odd' / name}/")
    repository = tmp_path / "hub" / "models--some.one--a-model.v2"
    revision = "0123456789abcdef" * 2 + "01234567"
    snapshot = repository / "snapshots" / revision
    for folder in (snapshot, repository / "blobs", repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    for number, file in enumerate(sorted(plain.iterdir())):
        blob = repository / "blobs" / f"{number:040x}"
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", blob.name))
    places += ["some.one/a-model.v2", str(snapshot)]

    rows = [model.generate(**tiny_tokenizer(text, return_tensors="pt"))[0].tolist() for text in SENTENCES if text]
    texts = iter(tiny_tokenizer.batch_decode(rows, skip_special_tokens=True))
    expected = [rows, [next(texts) if text else "" for text in SENTENCES]]
    saved = tmp_path / "saved again"
    script = OPEN_EVERYWHERE.format(arguments=json.dumps([places, SENTENCES, str(saved)]))
    printed = elsewhere(tmp_path, script, HF_HUB_CACHE=str(tmp_path / "hub"))
    results, connections, package = json.loads(printed.splitlines()[-1])
    assert (connections, package) == (0, False)
    assert results == {place: [expected] * 3 for place in places}
    folders = list(saved.iterdir())
    assert len(folders) == 2 * len(places)
    for folder in [plain, registered, *folders]:
        assert_self_contained(folder)
    for name in SHIPPED:
        assert (registered / name).read_bytes() == (PACKAGE / name).read_bytes()


@pytest.mark.slow
def test_a_second_save_elsewhere_opens_elsewhere_again(tmp_path):
    saved_model(tmp_path / "first")
    for source, target in (("first", "second"), ("second", "third")):
        elsewhere(
            tmp_path,
            f"""
            from transformers import AutoModelForSeq2SeqLM
            model = AutoModelForSeq2SeqLM.from_pretrained({str(tmp_path / source)!r}, trust_remote_code=True)
            model.save_pretrained({str(tmp_path / target)!r})
            """,
        )
    first, third = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "third"))
    assert first == third
    assert {path.name for path in (tmp_path / "third").iterdir()} >= SHIPPED


def test_a_pickle_beside_the_weights_is_never_opened(tmp_path, tiny_tokenizer):
    """Loading a folder must not run code from it that nobody asked for (trust_remote_code is another matter)."""
    marker = tmp_path / "marker"

    class Trap:
        def __reduce__(self):
            return (Path.touch, (marker,))

    good = tmp_path / "good"
    model = varied_model(tiny_tokenizer)
    model.save_pretrained(good)
    tiny_tokenizer.save_pretrained(good)
    expected = pipeline("translation", model=model, tokenizer=tiny_tokenizer)(SENTENCES)
    for name in ("pytorch_model.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"):
        torch.save(Trap(), good / name)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(good)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert torch.equal(
        AutoModel.from_pretrained(good).encoder.embed_tokens.weight, model.get_input_embeddings().weight
    )
    assert pipeline("translation", model=str(good))(SENTENCES) == expected
    assert not marker.exists()
    (good / "model.safetensors").unlink()
    for opens in (
        AutoModelForSeq2SeqLM.from_pretrained,
        AutoModel.from_pretrained,
        VanillaTransformerModel.from_pretrained,
    ):
        with pytest.raises((OSError, ValueError), match="safetensors"):
            opens(good)
    with pytest.raises((OSError, ValueError), match="safetensors"):
        pipeline("translation", model=str(good))
    assert not marker.exists()
    Trap().__reduce__()[0](marker)  # it would have gone off
    assert marker.exists()


def test_no_source_file_unpickles_freely():
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        assert "weights_only=False" not in text, path
        for call in re.finditer(r"torch\.load\(([^)]*)\)", text):
            assert "weights_only=True" in call.group(1), f"{path}: {call.group(0)}"
        assert not re.search(r"\bpickle\.loads?\(", text), path
