"""Pushing to and pulling from a Hub, through the real client and over HTTP (`hub_server` plays the Hub)."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import load_file

from conftest import TINY_CORPUS
from hub_client import SOURCE, ClientError, HubClient
from hub_server import HubServer, card_errors, card_metadata, faultless
from small_models import padded
from test_hub_code_travels import SHIPPED
from translators import varied_model
from vanilla_transformer.hub import TrainingRun, add_evaluation, write_model_card


SENTENCES = [source for source, _ in TINY_CORPUS[:4]]
PAPER = {
    "num_beams": 4,
    "length_penalty": 0.6,
    "length_penalty_type": "gnmt",
    "max_new_tokens_over_source": 50,
    "early_stopping": "never",
}

# What pieces of code have at hand: `open_model(name)`, and the weights of a model as a hash.
TOOLS = """
import hashlib
import torch
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer

def weights(model):
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()

def remote(cls, name, **options):
    return cls.from_pretrained(name, trust_remote_code=True, **options)
"""

PUSH = TOOLS + "result = AutoModelForSeq2SeqLM.from_pretrained(folder).push_to_hub(name).oid"
UPLOAD = "^/storage/"


def weights_of(model) -> str:
    """The same hash of a model in this process."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


@dataclass
class Saved:
    """A model in a folder, and what it answers in this process."""

    folder: str
    model: torch.nn.Module
    ids: list[list[int]]
    mask: list[list[int]]
    generated: list[list[int]]
    texts: list[str]

    @property
    def files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in Path(self.folder).iterdir()}


@pytest.fixture(scope="module")
def hub():
    tokens = {"secret": "user", "reader": "user", "other": "stranger"}
    with HubServer(tokens, read_only=("reader",), organizations={"lab": ("user",)}) as server:
        yield server


@pytest.fixture(scope="module")
def clients(hub, tmp_path_factory):
    """Both interpreters, started at once: with the package, and without."""
    environments = [hub.environment(tmp_path_factory.mktemp(name), token="secret") for name in ("here", "elsewhere")]
    with HubClient(environments[0]) as here, HubClient(environments[1], package=False) as elsewhere:
        yield here, elsewhere


@pytest.fixture
def here(clients) -> HubClient:
    """Has the package."""
    return clients[0]


@pytest.fixture
def elsewhere(clients) -> HubClient:
    """Cannot import the package."""
    return clients[1]


def saved(folder: Path, tokenizer, seed: int) -> Saved:
    model = varied_model(tokenizer, seed=seed)
    model.generation_config.max_new_tokens_over_source = 50
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ids, mask = padded([tokenizer(text)["input_ids"] for text in SENTENCES], pad=tokenizer.pad_token_id)
    generated = model.generate(ids, attention_mask=mask)
    texts = tokenizer.batch_decode(generated, skip_special_tokens=True)
    return Saved(str(folder), model, ids.tolist(), mask.tolist(), generated.tolist(), texts)


@pytest.fixture(scope="module")
def first(tiny_tokenizer, tmp_path_factory) -> Saved:
    found = saved(tmp_path_factory.mktemp("first"), tiny_tokenizer, seed=4)
    assert len(set(found.texts)) == len(SENTENCES)
    return found


@pytest.fixture(scope="module")
def second(tiny_tokenizer, tmp_path_factory) -> Saved:
    return saved(tmp_path_factory.mktemp("second"), tiny_tokenizer, seed=5)


def publish(hub: HubServer, name: str, files: dict[str, bytes], **options) -> str:
    """A repository with these files; returns the hash of its commit."""
    hub.add_repository(name, files, **options)
    return hub.history(name)[0].id


# ---------------------------------------------------------------------------------------------------------------------
# There and back
# ---------------------------------------------------------------------------------------------------------------------


def test_what_is_pushed_is_what_save_pretrained_writes_and_comes_back_equal(hub, here, first):
    pushed = here.run(
        """
        from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
        model = AutoModelForSeq2SeqLM.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        result = [model.push_to_hub("user/name").oid, tokenizer.push_to_hub("user/name").oid]
        """,
        folder=first.folder,
    )
    files = hub.files("user/name")
    card = files.pop("README.md").decode()
    assert card.startswith("---\n")
    assert set(files) == set(first.files)
    assert set(files) > SHIPPED | {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    before, after = (json.loads(content["tokenizer_config.json"]) for content in (first.files, files))
    for name in ("is_local", "local_files_only"):  # transformers notes how it opened the tokenizer
        after.pop(name, None)
    assert after == before
    assert {name for name in files if files[name] != first.files[name]} <= {"tokenizer_config.json"}
    config, generation = (json.loads(files[name]) for name in ("config.json", "generation_config.json"))
    assert set(config["auto_map"]) == {"AutoConfig", "AutoModel", "AutoModelForSeq2SeqLM"}
    assert config["custom_pipelines"]["translation"]["impl"].startswith("pipeline_vanilla_transformer.")
    assert {name: generation[name] for name in PAPER} == PAPER
    assert [commit.id for commit in hub.history("user/name")[:2]] == pushed[::-1]
    # the weights travel through the storage, the rest through git
    stored = {path for path, file in hub.history("user/name")[0].files.items() if file.sha256 is not None}
    assert stored == {"model.safetensors"}

    back = here.run(
        TOOLS
        + """
model = AutoModelForSeq2SeqLM.from_pretrained("user/name")
tokenizer = AutoTokenizer.from_pretrained("user/name")
generated = model.generate(torch.tensor(ids), attention_mask=torch.tensor(mask))
result = {
    "weights": weights(model),
    "generated": generated.tolist(),
    "texts": tokenizer.batch_decode(generated, skip_special_tokens=True),
    "ids": tokenizer(sentences)["input_ids"],
    "settings": {name: getattr(model.generation_config, name) for name in settings},
    "type": f"{type(model).__module__}.{type(model).__name__}",
}
""",
        fresh=True,
        ids=first.ids,
        mask=first.mask,
        sentences=SENTENCES,
        settings=list(PAPER),
    )
    kept = [[i for i, m in zip(*row, strict=True) if m] for row in zip(first.ids, first.mask, strict=True)]
    assert back == {
        "weights": weights_of(first.model),
        "generated": first.generated,
        "texts": first.texts,
        "ids": kept,
        "settings": PAPER,
        "type": "vanilla_transformer.modeling_vanilla_transformer.VanillaTransformerForConditionalGeneration",
    }
    assert here.connections == []


def test_where_the_package_is_not_it_opens_trains_is_pushed_and_opens_again(hub, here, elsewhere, first):
    commit = publish(hub, "user/travels", first.files)
    hub.add_commit("user/travels", {"config.json": b"{}"})  # the main branch is of no use, hence `revision`
    there = elsewhere.run(
        TOOLS
        + """
import sys
from transformers import pipeline
types = [type(remote(cls, "user/travels", revision=commit)).__name__ for cls in (AutoConfig, AutoModel, AutoTokenizer)]
model = remote(AutoModelForSeq2SeqLM, "user/travels", revision=commit)
generated = model.generate(torch.tensor(ids), attention_mask=torch.tensor(mask)).tolist()
translator = pipeline("translation", model="user/travels", revision=commit, trust_remote_code=True)
texts = [record["translation_text"] for record in translator(sentences)]
result = {"types": types, "weights": weights(model), "generated": generated, "texts": texts}

model.train()
loss = model(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask), labels=torch.tensor(ids)).loss
loss.backward()
torch.optim.SGD(model.parameters(), lr=0.01).step()
model.eval().push_to_hub("user/tuned")
translator.tokenizer.push_to_hub("user/tuned")
result |= {
    "tuned": weights(model),
    "tuned_generated": model.generate(torch.tensor(ids), attention_mask=torch.tensor(mask)).tolist(),
    "package": any(name.split(".")[0] == "vanilla_transformer" for name in sys.modules),
}
""",
        commit=commit,
        ids=first.ids,
        mask=first.mask,
        sentences=SENTENCES,
    )
    assert there["types"] == ["VanillaTransformerConfig", "VanillaTransformerModel", "TokenizersBackend"]
    assert there["weights"] == weights_of(first.model) != there["tuned"]
    assert there["generated"] == first.generated != there["tuned_generated"]
    assert there["texts"] == first.texts
    assert not there["package"]
    assert elsewhere.connections == []

    files = hub.files("user/tuned")
    assert set(files) == set(first.files) | {"README.md"}
    assert {name: files[name] for name in SHIPPED} == {name: first.files[name] for name in SHIPPED}
    config, original = (json.loads(content["config.json"]) for content in (files, first.files))
    for name in ("auto_map", "custom_pipelines"):  # not "user/travels--...", which would need that repository for ever
        assert config[name] == original[name]

    del hub.repositories["user/travels"]
    open_it = """
from transformers import pipeline
model = {opened}
translator = pipeline("translation", model="user/tuned", trust_remote_code=True)
result = {{
    "weights": weights(model),
    "generated": model.generate(torch.tensor(ids), attention_mask=torch.tensor(mask)).tolist(),
    "texts": [record["translation_text"] for record in translator(sentences)],
}}
"""
    values = {"ids": first.ids, "mask": first.mask, "sentences": SENTENCES}
    opened = 'remote(AutoModelForSeq2SeqLM, "user/tuned")'
    again = elsewhere.run(TOOLS + open_it.format(opened=opened), fresh=True, **values)
    opened = 'AutoModelForSeq2SeqLM.from_pretrained("user/tuned")'
    at_home = here.run(TOOLS + open_it.format(opened=opened), fresh=True, **values)
    assert again == at_home
    assert again["weights"] == there["tuned"]
    assert again["generated"] == there["tuned_generated"]


def test_shards_are_pushed_and_opened(hub, here, elsewhere, first):
    here.run(
        TOOLS + 'AutoModelForSeq2SeqLM.from_pretrained(folder).push_to_hub("user/shards", max_shard_size="30KB")',
        folder=first.folder,
    )
    files = hub.files("user/shards")
    shards = {name: content for name, content in files.items() if name.endswith(".safetensors")}
    assert len(shards) >= 3
    assert "model.safetensors" not in files
    index = json.loads(files["model.safetensors.index.json"])["weight_map"]
    assert set(index.values()) == set(shards)
    tensors = {name: tensor for content in shards.values() for name, tensor in load_safetensors(content).items()}
    whole = load_file(Path(first.folder) / "model.safetensors")
    assert set(tensors) == set(whole) == set(index)
    assert all(torch.equal(tensors[name], whole[name]) for name in whole)
    opened = here.run(TOOLS + 'result = weights(AutoModelForSeq2SeqLM.from_pretrained("user/shards"))', fresh=True)
    opened_elsewhere = elsewhere.run(
        TOOLS + 'result = weights(remote(AutoModelForSeq2SeqLM, "user/shards"))', fresh=True
    )
    assert opened == opened_elsewhere == weights_of(first.model)


# ---------------------------------------------------------------------------------------------------------------------
# Revisions
# ---------------------------------------------------------------------------------------------------------------------


def test_a_revision_is_the_weights_of_that_time(hub, here, first, second):
    result = here.run(
        TOOLS
        + """
from huggingface_hub import HfApi
api = HfApi()
one, two = (AutoModelForSeq2SeqLM.from_pretrained(folder) for folder in (first, second))
hashes = [model.push_to_hub("user/revisions").oid for model in (one, two)]
api.create_branch("user/revisions", branch="trial/new", revision=hashes[0])
api.create_tag("user/revisions", tag="v1.0", revision=hashes[0])
on_main = [ref.target_commit for ref in api.list_repo_refs("user/revisions").branches if ref.name == "main"]
made = two.push_to_hub("user/revisions", revision="trial/new").oid       # an existing branch
pushed = one.push_to_hub("user/revisions", revision="another").oid       # one that is made on the way
revisions = [None, "main", *hashes, hashes[0][:8], "v1.0", "trial/new", "another"]
open_at = lambda revision: AutoModelForSeq2SeqLM.from_pretrained("user/revisions", revision=revision)
opened = {str(each): weights(open_at(each)) for each in revisions}
result = {"hashes": hashes, "opened": opened, "on_main": on_main, "branch": made, "another": pushed}
""",
        first=first.folder,
        second=second.folder,
    )
    one, two = weights_of(first.model), weights_of(second.model)
    hashes = result["hashes"]
    assert one != two
    assert result["opened"] == {
        "None": two,
        "main": two,
        hashes[0]: one,
        hashes[1]: two,
        hashes[0][:8]: one,
        "v1.0": one,
        "trial/new": two,
        "another": one,
    }
    assert result["on_main"] == [hashes[1]]
    assert hub.history("user/revisions")[0].id == hashes[1]  # pushes to branches leave main alone
    assert hub.history("user/revisions", "trial/new")[0].id == result["branch"]
    assert [commit.id for commit in hub.history("user/revisions", "trial/new")[1:2]] == hashes[:1]


@pytest.mark.parametrize("revision", ["no-such-branch", "0" * 40])
def test_a_missing_revision_is_a_clear_error(hub, here, first, revision):
    publish(hub, "user/missing-revision", first.files)
    with pytest.raises(ClientError, match=f"{revision} is not a valid git identifier") as error:
        here.run(
            TOOLS + 'AutoModelForSeq2SeqLM.from_pretrained("user/missing-revision", revision=revision)',
            revision=revision,
        )
    assert error.value.type == "OSError"
    assert "RevisionNotFoundError" in error.value.causes


def test_the_code_is_that_of_the_revision_or_of_code_revision(hub, elsewhere, first):
    """A pinned revision also pins the code that runs, and code_revision pins it apart from the weights."""
    name = "modeling_vanilla_transformer.py"
    old = publish(hub, "user/code", {**first.files, name: first.files[name] + b"\nAGE = 'old'\n"})
    new = hub.add_commit("user/code", {name: first.files[name] + b"\nAGE = 'new'\n"}).id
    ages = elsewhere.run(
        TOOLS
        + """
import sys
def age(**options):
    return sys.modules[type(remote(AutoModelForSeq2SeqLM, "user/code", **options)).__module__].AGE
result = [age(), age(revision=old), age(revision=new, code_revision=old), age(revision=old, code_revision=new)]
""",
        fresh=True,
        old=old,
        new=new,
    )
    assert ages == ["new", "old", "old", "new"]


# ---------------------------------------------------------------------------------------------------------------------
# Who may
# ---------------------------------------------------------------------------------------------------------------------


def test_a_private_repository_opens_with_its_owners_token_alone(hub, here, first):
    here.run(
        TOOLS + 'AutoModelForSeq2SeqLM.from_pretrained(folder).push_to_hub("user/private", private=True)',
        folder=first.folder,
    )
    assert hub.repositories["user/private"].private
    open_it = TOOLS + 'result = weights(AutoModelForSeq2SeqLM.from_pretrained("user/private"))'
    assert here.run(open_it, fresh=True) == weights_of(first.model)
    assert here.run(open_it, fresh=True, token="reader") == weights_of(first.model)
    for token in (None, "other"):  # it is not said that there is such a repository
        with pytest.raises(ClientError, match="make sure to pass a token having permission") as error:
            here.run(open_it, fresh=True, token=token)
        assert (error.value.type, "RepositoryNotFoundError" in error.value.causes) == ("OSError", True)
    with pytest.raises(ClientError, match="401") as error:
        here.run(open_it, fresh=True, token="wrong")
    assert error.value.type == "OSError"
    given = TOOLS + 'result = weights(AutoModelForSeq2SeqLM.from_pretrained("user/private", token="secret"))'
    assert here.run(given, fresh=True, token=None) == weights_of(first.model)
    with pytest.raises(ClientError, match="is not a valid model identifier"):
        here.run(open_it.replace("user/private", "user/nothing"), fresh=True)


def test_a_gated_repository_says_that_it_is_gated(hub, here, first):
    publish(hub, "user/gated", first.files)
    hub.repositories["user/gated"].gated = "manual"
    for token in (None, "other"):
        with pytest.raises(ClientError, match="gated repo") as error:
            here.run(TOOLS + 'AutoModelForSeq2SeqLM.from_pretrained("user/gated")', fresh=True, token=token)
        assert "GatedRepoError" in error.value.causes


@pytest.mark.parametrize("token, status", [(None, 401), ("wrong", 401), ("reader", 403), ("other", 403)])
def test_a_push_without_the_right_to_it_leaves_nothing(hub, here, first, token, status):
    with pytest.raises(ClientError, match=str(status)) as error:
        here.run(PUSH, token=token, folder=first.folder, name="user/denied")
    assert error.value.type == "HfHubHTTPError"
    assert "user/denied" not in hub.repositories


def test_a_member_pushes_to_an_organization(hub, here, first):
    here.run(PUSH, folder=first.folder, name="lab/name")
    assert hub.files("lab/name")["model.safetensors"] == first.files["model.safetensors"]


def test_a_stranger_proposes_and_the_main_branch_stays(hub, here, first, second):
    before = publish(hub, "user/proposed", first.files)
    propose = PUSH.replace("push_to_hub(name)", "push_to_hub(name, create_pr=True)")
    proposed = here.run(propose, token="other", folder=second.folder, name="user/proposed")
    assert hub.history("user/proposed")[0].id == before
    assert hub.history("user/proposed", "refs/pr/1")[0].id == proposed
    opened = here.run(
        TOOLS + 'result = weights(AutoModelForSeq2SeqLM.from_pretrained("user/proposed", revision="refs/pr/1"))'
    )
    assert opened == weights_of(second.model)


# ---------------------------------------------------------------------------------------------------------------------
# What goes wrong on the way
# ---------------------------------------------------------------------------------------------------------------------


def test_an_upload_that_breaks_once_is_tried_again(hub, here, first):
    hub.log.clear()
    with faultless(hub):
        hub.drop_upload(after=1000)
        here.run(PUSH, folder=first.folder, name="user/shaky")
    tries = hub.requests("PUT", UPLOAD)
    size = len(first.files["model.safetensors"])
    assert [(each.status, each.received) for each in tries] == [(None, 1000), (200, size)]
    assert hub.files("user/shaky")["model.safetensors"] == first.files["model.safetensors"]


def test_an_upload_that_keeps_breaking_leaves_no_half_commit_and_can_be_repeated(hub, here, first, second):
    kept = here.run(PUSH, folder=first.folder, name="user/broken")
    hub.log.clear()
    with faultless(hub):
        fault = hub.drop_upload(after=1000, times=100)
        with pytest.raises(ClientError, match=r"model\.safetensors") as error:
            here.run(PUSH, folder=second.folder, name="user/broken")
        assert fault.times < 100
    assert error.value.type == "RuntimeError"
    assert hub.requests("POST", "/commit/") == []
    assert hub.history("user/broken")[0].id == kept
    assert hub.files("user/broken")["model.safetensors"] == first.files["model.safetensors"]
    here.run(PUSH, folder=second.folder, name="user/broken")
    assert hub.files("user/broken")["model.safetensors"] == second.files["model.safetensors"]
    assert len(hub.history("user/broken")) == 3  # the Hub's own, the first and the second


def test_what_arrived_before_a_refused_commit_is_not_sent_again(hub, here, first):
    with faultless(hub):
        hub.refuse("POST", "/commit/", status=500)
        with pytest.raises(ClientError, match="500"):
            here.run(PUSH, folder=first.folder, name="user/refused")
    assert hub.files("user/refused") == {}
    hub.log.clear()
    here.run(PUSH, folder=first.folder, name="user/refused")
    assert hub.uploaded_bytes() == 0
    assert hub.files("user/refused")["model.safetensors"] == first.files["model.safetensors"]


def test_a_commit_whose_answer_was_lost_is_not_made_twice(hub, here, first):
    with faultless(hub):
        hub.lose_answer("POST", "/commit/")
        with pytest.raises(ClientError, match="disconnected"):
            here.run(PUSH, folder=first.folder, name="user/lost")
    made = hub.history("user/lost")[0].id
    assert here.run(PUSH, folder=first.folder, name="user/lost") == made
    assert len(hub.history("user/lost")) == 2


@pytest.mark.parametrize("status", [500, 503])
def test_a_server_that_is_busy_for_a_while_is_asked_again(hub, here, first, status):
    name = f"user/busy-{status}"
    with faultless(hub):
        for method, path in [("POST", "/preupload/"), ("POST", "/objects/batch"), ("PUT", UPLOAD)]:
            hub.refuse(method, path, status=status, times=2)
        here.run(PUSH, folder=first.folder, name=name)
    assert hub.files(name)["model.safetensors"] == first.files["model.safetensors"]


def test_a_large_file_goes_in_parts(hub, here, first, monkeypatch):
    size = len(first.files["model.safetensors"])
    part = size // 11  # twelve parts: their order is that of numbers, not of their names
    monkeypatch.setattr(hub, "part_bytes", part)
    hub.log.clear()
    with faultless(hub):
        hub.drop_upload("/3$", after=100)
        here.run(PUSH, folder=first.folder, name="user/parts")
    sent = [each.received for each in hub.requests("PUT", UPLOAD) if each.status == 200]
    assert sent == [part] * 11 + [size - 11 * part]
    assert hub.files("user/parts")["model.safetensors"] == first.files["model.safetensors"]


def test_a_download_that_breaks_goes_on_where_it_broke(hub, here, first):
    publish(hub, "user/cut", first.files)
    open_it = (
        TOOLS
        + """
import huggingface_hub.constants
huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE = 4096  # of 10 MiB, so that a small model has more than one
result = weights(AutoModelForSeq2SeqLM.from_pretrained("user/cut"))
"""
    )
    hub.log.clear()
    with faultless(hub):
        hub.cut_download(after=40_960, times=2)
        assert here.run(open_it, fresh=True) == weights_of(first.model)
    downloads = hub.requests("GET", UPLOAD)
    assert [each.range for each in downloads] == [None, "bytes=40960-", "bytes=81920-"]
    assert sum(each.sent for each in downloads) == len(first.files["model.safetensors"])
    with faultless(hub):
        hub.cut_download(after=0, times=100)
        with pytest.raises(ClientError):
            here.run(open_it, fresh=True)
    assert here.run(open_it) == weights_of(first.model)  # in the cache that the broken download has left


def test_a_folder_whose_upload_broke_is_completed_without_sending_again(hub, here, first, tmp_path):
    first.model.save_pretrained(tmp_path, max_shard_size="30KB")
    shards = {path.name: path.read_bytes() for path in tmp_path.glob("*.safetensors")}
    assert len(shards) >= 3
    broken = hashlib.sha256(shards[sorted(shards)[1]]).hexdigest()
    upload = """
    from huggingface_hub import HfApi
    HfApi().create_repo("user/folder", exist_ok=True)
    result = HfApi().upload_folder(repo_id="user/folder", folder_path=folder).oid
    """
    with faultless(hub):
        hub.drop_upload(broken, after=100, times=100)
        with pytest.raises(ClientError, match="Error while uploading"):
            here.run(upload, folder=str(tmp_path))
    assert hub.files("user/folder") == {}
    here_already = set(hub.repositories["user/folder"].objects)
    assert broken not in here_already
    missing = {hashlib.sha256(content).hexdigest(): len(content) for content in shards.values()}
    missing = {oid: size for oid, size in missing.items() if oid not in here_already}
    hub.log.clear()
    here.run(upload, folder=str(tmp_path))
    sent = {each.path.rsplit("/", 1)[-1]: each.received for each in hub.requests("PUT", UPLOAD)}
    assert sent == missing
    assert hub.files("user/folder") == {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    hub.log.clear()
    here.run(upload, folder=str(tmp_path))  # a third time there is nothing to do
    assert hub.uploaded_bytes() == 0
    assert hub.requests("POST", "/commit/") == []


# ---------------------------------------------------------------------------------------------------------------------
# Safetensors only
# ---------------------------------------------------------------------------------------------------------------------


class Trap:
    """Leaves a mark when it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return (Path.touch, (self.marker,))


def test_pickled_weights_on_the_hub_are_refused_unread(hub, here, elsewhere, first, tmp_path):
    marker = tmp_path / "marker"
    trap = pickle.dumps(Trap(marker))
    files = {name: content for name, content in first.files.items() if not name.endswith(".safetensors")}
    publish(hub, "user/pickled", files | {"pytorch_model.bin": trap, "training_args.bin": trap})
    publish(hub, "user/both", first.files | {"pytorch_model.bin": trap, "training_args.bin": trap})
    opened = {here: "AutoModelForSeq2SeqLM.from_pretrained({})", elsewhere: "remote(AutoModelForSeq2SeqLM, {})"}
    for client, call in opened.items():
        code = TOOLS + f"result = weights({call.format('name')})"
        with pytest.raises(ClientError, match="safetensors"):
            client.run(code, fresh=True, name="user/pickled")
        assert client.connections == []
        assert client.run(code, fresh=True, name="user/both") == weights_of(first.model)
    assert not marker.exists()
    pickle.loads(trap)
    assert marker.exists()  # the trap works


# ---------------------------------------------------------------------------------------------------------------------
# The commands and the trainer
# ---------------------------------------------------------------------------------------------------------------------

COMMAND = """
import contextlib, io
import huggingface_hub.constants
import vanilla_transformer_cli
errors = io.StringIO()
address = huggingface_hub.constants.ENDPOINT
try:
    huggingface_hub.constants.ENDPOINT = endpoint or address
    with contextlib.redirect_stderr(errors):
        code = vanilla_transformer_cli.main(arguments)
finally:
    huggingface_hub.constants.ENDPOINT = address
result = [code, errors.getvalue()]
"""


def command(client: HubClient, *arguments: str, endpoint: str = "", **options) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command in the other interpreter."""
    code, errors = client.run(COMMAND, arguments=arguments, endpoint=endpoint, **options)
    return code, client.printed, errors


@pytest.fixture
def source_file(tmp_path) -> str:
    path = tmp_path / "source.txt"
    path.write_text("".join(f"{line}\n" for line in SENTENCES))
    return str(path)


def test_translate_opens_a_repository_at_a_revision(hub, here, first, second, source_file):
    old = publish(hub, "user/translator", first.files)
    hub.add_commit("user/translator", second.files)
    for revision, texts in (([], second.texts), (["--revision", old], first.texts)):
        arguments = ["--input", source_file, "--model", "user/translator", *revision]
        code, printed, errors = command(here, "translate", *arguments, fresh=True)
        assert (code, printed.splitlines()) == (0, texts), errors


def test_translate_says_in_one_line_what_is_wrong_with_a_repository(hub, here, first, source_file):
    files = {name: content for name, content in first.files.items() if not name.endswith(".safetensors")}
    publish(hub, "user/unreadable", files | {"pytorch_model.bin": b"\x80\x04N."})
    publish(hub, "user/hidden", first.files, private=True)
    publish(hub, "user/plain", first.files)
    cases = [
        ("user/nothing", [], "secret", "user/nothing is not a local folder and is not a valid model identifier"),
        ("user/hidden", [], None, "make sure to pass a token"),
        ("user/hidden", [], "wrong", "hf auth login"),
        ("user/plain", ["--revision", "none"], "secret", "none is not a valid git identifier"),
        ("user/unreadable", [], "secret", "safetensors"),
    ]
    for name, arguments, token, message in cases:
        arguments = ["--input", source_file, "--model", name, *arguments]
        code, printed, errors = command(here, "translate", *arguments, fresh=True, token=token)
        lines = [line for line in errors.splitlines() if "error:" in line]
        assert (code, len(lines), printed) == (2, 1, ""), (name, errors)
        assert message in lines[0]
        assert "Traceback" not in errors
        assert here.connections == []


def test_push_says_in_one_line_what_went_wrong_and_leaves_nothing_half_done(hub, here, first):
    arguments = ["push", "--model", first.folder, "--repo_id", "user/pushed"]
    cases = [
        # Nobody listens there.
        (lambda: None, {"endpoint": "http://127.0.0.1:1"}, "is not reached: [Errno 111] Connection refused"),
        (lambda: None, {"token": "wrong"}, "log in with `hf auth login`, or set HF_TOKEN"),
        (lambda: None, {"token": "other"}, "403"),
        (lambda: hub.refuse("POST", "/repos/create", status=500), {}, "500"),
        (lambda: hub.drop_upload(after=1000, times=100), {}, "model.safetensors"),
        (lambda: hub.refuse("PUT", UPLOAD, status=503, times=100), {}, "503"),
        (lambda: hub.refuse("POST", "/commit/", status=500), {}, "500"),
    ]
    for break_it, options, message in cases:
        with faultless(hub):
            break_it()
            code, printed, errors = command(here, *arguments, **options)
        lines = [line for line in errors.splitlines() if "error:" in line]
        assert (code, printed, len(lines)) == (2, "", 1), (message, errors)
        assert message in lines[0], lines
        assert "Traceback" not in errors
        assert "user/pushed" not in hub.repositories or hub.files("user/pushed") == {}
    code, printed, errors = command(here, *arguments)
    assert code == 0, errors
    assert hub.history("user/pushed")[0].id in printed
    assert hub.files("user/pushed")["model.safetensors"] == first.files["model.safetensors"]


def test_push_sends_one_commit_that_opens_without_the_package_and_later_only_what_is_new(
    hub, here, elsewhere, first, tmp_path
):
    folder = tmp_path / "run"
    shutil.copytree(first.folder, folder)
    (folder / "training_args.bin").write_bytes(b"a pickle")
    write_model_card(folder, TrainingRun(source_lang="en", target_lang="de", updates=7))
    arguments = ["push", "--model", str(folder), "--repo_id", "user/shared", "--license", "mit"]
    code, printed, errors = command(here, *arguments, "--private")
    assert code == 0, errors
    assert hub.repositories["user/shared"].private
    assert len(hub.history("user/shared")) == 2, "the commit that made the repository, and ours"
    files = hub.files("user/shared")
    assert set(files) - {".gitattributes"} == set(first.files) | {"README.md", "training_run.json"}
    card = files["README.md"].decode()
    assert card_errors(card) == []
    assert 'model="user/shared"' in card
    assert "license: mit" in card
    texts = elsewhere.run(
        """
        from transformers import pipeline
        translator = pipeline("translation", model="user/shared", trust_remote_code=True)
        result = [record["translation_text"] for record in translator(sentences)]
        """,
        sentences=SENTENCES,
        fresh=True,
    )
    assert texts == first.texts

    assert "license: mit" in (folder / "README.md").read_text(), "else the next push would lose it"
    arguments = arguments[:-2]
    sent = hub.uploaded_bytes()
    scores = {"bleu": {"score": 12.5, "signature": "s"}, "chrf": {"score": 34.5, "signature": "t"}}
    add_evaluation(folder, {"name": "newstest", "segments": 4, "decoding": "greedy", **scores})
    assert command(here, *arguments)[0] == 0
    assert hub.uploaded_bytes() == sent, "the weights are there already"
    card = hub.files("user/shared")["README.md"].decode()
    assert "| 12.50 |" in card
    assert "license: mit" in card
    code, printed, errors = command(here, *arguments)
    assert code == 0, errors
    assert printed.startswith("nothing to send, user/shared holds these"), printed
    add_evaluation(folder, {"name": "another", "segments": 4, "decoding": "greedy", **scores})
    assert command(here, *arguments, "--revision", "trial", "--commit_message", "on trial")[0] == 0
    assert hub.history("user/shared", "trial")[0].title == "on trial"
    assert hub.history("user/shared")[0].title == "Upload model"


def test_a_space_is_pushed_beside_the_model_of_the_same_name(hub, here, first):
    arguments = ["push", "--model", first.folder, "--repo_id", "user/both"]
    assert command(here, *arguments)[0] == 0
    code, printed, errors = command(here, *arguments, "--space", "--private")
    assert code == 0, errors
    assert hub.repositories["spaces/user/both"].private
    files = hub.files("spaces/user/both")
    assert hub.history("spaces/user/both")[0].id in printed
    assert {"app.py", "requirements.txt", "README.md", "vanilla_transformer/serving.py"} <= set(files)
    assert files["model/model.safetensors"] == first.files["model.safetensors"]
    assert card_metadata(files["README.md"].decode())["sdk"] == "gradio"
    assert "app.py" not in hub.files("user/both"), "the model's repository is another one"
    assert command(here, *arguments, "--space")[1].startswith("nothing to send, user/both holds these")


def test_a_push_that_is_to_be_private_does_not_go_into_a_public_repository(hub, here, first):
    publish(hub, "user/public", {"notes.txt": b"Nothing yet."})
    arguments = ["push", "--model", first.folder, "--repo_id", "user/public"]
    code, printed, errors = command(here, *arguments, "--private")
    assert (code, printed) == (2, "")
    assert "user/public exists already and is public; nothing was sent" in errors
    assert "model.safetensors" not in hub.files("user/public")
    assert command(here, *arguments)[0] == 0
    assert command(here, *arguments[:-1], "user/secret", "--private")[0] == 0
    assert command(here, *arguments[:-1], "user/secret", "--private")[0] == 0, "what is private stays so"
    publish(hub, "user/open", {"notes.txt": b"Nothing yet."})
    piped = """
        from transformers import pipeline
        pipeline("translation", model=folder).push_to_hub("user/open", private=True)
        """
    with pytest.raises(ClientError, match="user/open exists already and is public"):
        here.run(piped, folder=first.folder)
    assert "model.safetensors" not in hub.files("user/open")


def test_a_pipeline_pushes_its_model_and_tokenizer_and_leaves_a_card_that_is_there(hub, here, elsewhere, first):
    push = """
        from transformers import pipeline
        pipeline("translation_en_to_de", model=folder).push_to_hub("user/piped", private=True)
        """
    here.run(push, folder=first.folder)
    files = hub.files("user/piped")
    assert set(files) - {".gitattributes"} == set(first.files) | {"README.md"}
    assert card_errors(files["README.md"].decode()) == []
    assert 'model="user/piped"' in files["README.md"].decode()
    assert "pipeline_tag: translation" in files["README.md"].decode()
    hub.add_commit("user/piped", {"README.md": b"By hand.\n"})
    here.run(push, folder=first.folder)
    assert hub.files("user/piped")["README.md"] == b"By hand.\n"
    texts = elsewhere.run(
        """
        from transformers import pipeline
        translator = pipeline("translation", model="user/piped", trust_remote_code=True)
        result = [record["translation_text"] for record in translator(sentences)]
        """,
        sentences=SENTENCES,
        fresh=True,
    )
    assert texts == first.texts


@pytest.mark.slow
def test_the_console_command_translates_with_a_model_of_the_hub(hub, first, source_file, tmp_path):
    publish(hub, "user/console", first.files, private=True)
    arguments = ["translate", "--model", "user/console", "--input", source_file]
    done = subprocess.run(
        [sys.executable, "-m", "vanilla_transformer_cli", *arguments],
        env=hub.environment(tmp_path / "home", token="secret", PYTHONPATH=str(SOURCE)),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout.splitlines()) == (0, first.texts), done.stderr


TRAIN = (
    TOOLS
    + """
import os
import transformers, vanilla_transformer.training
from datasets import Dataset
from vanilla_transformer.data import TranslationCollator

tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForSeq2SeqLM.from_pretrained(folder)
rows = [{"input_ids": tokenizer(s)["input_ids"], "labels": tokenizer(t)["input_ids"]} for s, t in pairs]
if trainer == "VanillaTransformerTrainer":
    trainer = vanilla_transformer.VanillaTransformerTrainer
    arguments = vanilla_transformer.training.VanillaTransformerTrainingArguments
else:
    trainer, arguments = transformers.Seq2SeqTrainer, transformers.Seq2SeqTrainingArguments
trainer = trainer(
    model=model,
    args=arguments(
        output_dir=output,
        max_steps=4,
        learning_rate=1e-2,
        save_strategy="steps",
        save_steps=4,  # once: a push is left out while another is on its way
        report_to=[],
        use_cpu=True,
        push_to_hub=True,
        hub_model_id=name,
        hub_strategy=strategy,
        hub_private_repo=True,
        disable_tqdm=True,
    ),
    train_dataset=Dataset.from_list(rows),
    processing_class=tokenizer,
    data_collator=TranslationCollator(tokenizer.pad_token_id),
)
trainer.train()
trainer._finish_current_push()
if final:
    trainer.push_to_hub()
model.eval()
generated = model.generate(torch.tensor(ids), attention_mask=torch.tensor(mask)).tolist()
result = {"after": weights(model), "generated": generated}
"""
)


@pytest.mark.parametrize(
    "trainer", ["VanillaTransformerTrainer", pytest.param("Seq2SeqTrainer", marks=pytest.mark.slow)]
)
def test_a_trainer_pushes_all_that_it_takes_to_use_the_model(hub, here, elsewhere, first, tmp_path, trainer):
    name = f"user/{trainer}"
    trained = here.run(
        TRAIN,
        trainer=trainer,
        name=name,
        strategy="end",
        final=True,
        folder=first.folder,
        output=str(tmp_path),
        pairs=TINY_CORPUS,
        ids=first.ids,
        mask=first.mask,
    )
    assert trained["after"] != weights_of(first.model)
    files = hub.files(name)
    assert hub.repositories[name].private
    assert set(files) >= set(first.files) | {"README.md"}
    assert not {path for path in files if "checkpoint" in path or "optimizer" in path}
    assert {path: files[path] for path in SHIPPED} == {path: first.files[path] for path in SHIPPED}
    generation = json.loads(files["generation_config.json"])
    assert {key: generation[key] for key in PAPER} == PAPER
    assert files["README.md"].decode().startswith("---\n")
    there = elsewhere.run(
        TOOLS
        + """
from transformers import pipeline
model = remote(AutoModelForSeq2SeqLM, name)
generated = model.generate(torch.tensor(ids), attention_mask=torch.tensor(mask)).tolist()
translator = pipeline("translation", model=name, trust_remote_code=True)
result = {"weights": weights(model), "generated": generated, "texts": len(translator(sentences))}
""",
        name=name,
        ids=first.ids,
        mask=first.mask,
        sentences=SENTENCES,
    )
    assert there == {"weights": trained["after"], "generated": trained["generated"], "texts": len(SENTENCES)}


@pytest.mark.parametrize("strategy", ["every_save", pytest.param("checkpoint", marks=pytest.mark.slow)])
def test_each_push_during_training_can_be_opened_without_the_package(hub, here, elsewhere, first, tmp_path, strategy):
    name = f"user/{strategy}"
    trained = here.run(
        TRAIN,
        trainer="VanillaTransformerTrainer",
        name=name,
        strategy=strategy,
        final=False,
        folder=first.folder,
        output=str(tmp_path),
        pairs=TINY_CORPUS,
        ids=first.ids,
        mask=first.mask,
    )
    assert len(hub.history(name)) >= 2
    there = elsewhere.run(
        TOOLS
        + """
result = [weights(remote(AutoModelForSeq2SeqLM, name)), remote(AutoTokenizer, name)(sentences)["input_ids"]]
if strategy == "checkpoint":
    result.append(weights(remote(AutoModelForSeq2SeqLM, name, subfolder="last-checkpoint")))
""",
        name=name,
        strategy=strategy,
        sentences=SENTENCES,
    )
    kept = [[i for i, m in zip(*row, strict=True) if m] for row in zip(first.ids, first.mask, strict=True)]
    checkpoint = [trained["after"]] if strategy == "checkpoint" else []
    assert there == [trained["after"], kept, *checkpoint]


# ---------------------------------------------------------------------------------------------------------------------
# The Hub of these tests
# ---------------------------------------------------------------------------------------------------------------------


def test_the_client_lists_copies_and_deletes_what_the_server_has(hub, here, tmp_path, monkeypatch):
    files = {"a.txt": b"a", "b/c.txt": b"", "b/d/e f.bin": b"\x00e", "b/d/%20.txt": b"g", "h.safetensors": b"h"}
    publish(hub, "user/tree", files)
    monkeypatch.setattr(hub, "page_size", 2)
    listed = here.run(
        """
        from huggingface_hub import HfApi
        api = HfApi()
        listings = [api.list_repo_tree("user/tree", recursive=True), api.list_repo_tree("user/tree", "b/d"),
                    api.get_paths_info("user/tree", ["b", "a.txt", "none"])]
        result = [[entry.path for entry in listing] for listing in listings]
        api.snapshot_download("user/tree", local_dir=folder)
        api.delete_file("a.txt", "user/tree")
        api.delete_folder("b/d", "user/tree")
        """,
        folder=str(tmp_path),
    )
    everything = [".gitattributes", "a.txt", "b", "b/c.txt", "b/d", "b/d/%20.txt", "b/d/e f.bin", "h.safetensors"]
    assert listed == [everything, ["b/d/%20.txt", "b/d/e f.bin"], ["b", "a.txt"]]
    assert {name: (tmp_path / name).read_bytes() for name in files} == files
    assert hub.files("user/tree") == {"b/c.txt": b"", "h.safetensors": b"h"}
    assert hub.files("user/tree", hub.history("user/tree")[2].id) == files


def ask(url: str, method: str, body: bytes = b"", token: str | None = "secret") -> tuple[int, bytes]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(url, body or None, headers, method=method)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_the_server_takes_no_content_but_that_of_the_hash_and_no_commit_of_what_it_has_not():
    with HubServer({"secret": "user"}) as hub:
        before = publish(hub, "user/name", {"a.txt": b"a"})
        right = hashlib.sha256(b"right").hexdigest()
        asked = {"operation": "upload", "transfers": ["basic"], "objects": [{"oid": right, "size": 5}]}
        status, answer = ask(f"{hub.url}/user/name.git/info/lfs/objects/batch", "POST", json.dumps(asked).encode())
        href = json.loads(answer)["objects"][0]["actions"]["upload"]["href"]
        lines = [
            {"key": "header", "value": {"summary": "one of two", "description": ""}},
            {"key": "file", "value": {"path": "b.txt", "content": "Yg==", "encoding": "base64"}},
            {"key": "lfsFile", "value": {"path": "c.bin", "algo": "sha256", "oid": right, "size": 5}},
        ]
        commit = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        assert status == 200
        assert ask(href, "PUT", b"wrong", token=None)[0] == 400
        assert ask(href.split("?")[0], "PUT", b"right", token=None)[0] == 403
        assert ask(href, "PUT", b"right", token="secret")[0] == 400
        assert ask(f"{hub.url}/api/models/user/name/commit/main", "POST", commit)[0] == 400
        assert (hub.history("user/name")[0].id, hub.files("user/name")) == (before, {"a.txt": b"a"})
        assert len(hub.unexpected) == 2  # the wrong content, and the token sent to the storage
        hub.unexpected.clear()
        assert ask(href, "PUT", b"right", token=None)[0] == 200
        assert ask(f"{hub.url}/api/models/user/name/commit/main", "POST", commit)[0] == 200
        assert hub.files("user/name") == {"a.txt": b"a", "b.txt": b"b", "c.bin": b"right"}
        # as `git hash-object` counts it
        assert hub.history("user/name")[0].files["b.txt"].blob_id == "63d8dbd40c23542e740659a7168a0ce3138ea748"


@pytest.mark.parametrize(
    "card, problem",
    [
        ("---\nlanguage: no\n---\n", "language"),  # YAML reads Norwegian as False
        ("---\nlanguage: english\n---\n", "language"),
        ("---\ntags: translation\n---\n", "tags"),
        ("---\nbase_model: /home/me/model\n---\n", "base_model"),
        ("---\nlicense: [\n---\n", "YAML"),
        ("---\nmodel-index:\n- name: a\n  results:\n  - task: {type: translation}\n---\n", "model-index"),
        ("---\nlanguage: [en, de]\nlicense: apache-2.0\ntags: [translation]\n---\n# Model\n", None),
        ("# Model\n", None),
    ],
)
def test_the_server_checks_the_metadata_of_cards(card, problem):
    errors = card_errors(card)
    assert errors == [] if problem is None else problem in errors[0]
