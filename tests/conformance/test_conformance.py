"""transformers' own common tests pass on this package's classes.

They come from the source distribution of the installed transformers, which pip fetches into the user's cache; nothing
of it is kept in this repository. `suite_vanilla_transformer.py` says what they are run on. The generation mixin
(`tests/generation/`) is not in that distribution, nor are the exporters' tests: empty classes stand in for them.
"""

import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import pytest
import transformers


SUITE = Path(__file__).with_name("suite_vanilla_transformer.py")
SOURCE = Path(__file__).parents[2] / "src"
IN_CI = os.environ.get("VANILLA_TRANSFORMER_CI") == "1"
PASSED_AT_LEAST = 200

# What the common tests import from files that the source distribution leaves out.
STAND_INS = {
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    # Arguments that every configuration takes, none at its default; ConfigTester sets them and reads them back.
    "utils/test_configuration_utils.py": (
        "config_common_kwargs = {'return_dict': False, 'output_hidden_states': True, 'output_attentions': True,\n"
        "    'dtype': 'float16', 'chunk_size_feed_forward': 3, 'architectures': ['Any'], 'id2label': {0: 'x'},\n"
        "    'label2id': {'x': 0}, 'problem_type': 'regression'}\n"
    ),
}

# "test: reason" of each common test that may be skipped, and why that is right for this model. Any other skip fails.
RIGHT_SKIPS = {
    # The machine
    r".*: test requires (accelerator|multiple accelerators|MPS)": "the suite runs on one CPU, also where a GPU is",
    r".*: test requires deepspeed": "an optional package of Trainer's, no part of the model",
    r".*: test requires the kernels library": "kernels are fetched from the Hub and run on accelerators",
    r".*: test requires Flash Attention( \d)?": "declared unsupported; SDPA reaches flash kernels by itself",
    # Other architectures
    r".*: (Model is not a composite model\.|This model is not composite)": "one configuration for the whole model",
    r".*: No subconfigs so the test does not make sense": "one configuration for the whole model",
    r"test_sdpa_can_dispatch_composite_models: \w+ does not support SDPA": "means: is not composite",
    r".*: No decoder-only language modeling head to check": "its twin for encoder-decoders runs",
    r".*: (\w+ does not support grouped_mm|This model has no sparse experts\.)": "no experts",
    r".*: This model has no `output_router_logits` in its config\.": "no experts",
    r".*: This model does not (support RoPE scaling|have RoPE)": "positions are sinusoids or a table, no rotations",
    r".*: <class '.*'> has no axial RoPE layer defined\.": "positions are sinusoids or a table, no rotations",
    r".*: Model does not support sliding window mask": "attention reaches every token",
    # What this model does not need
    r"test_keep_in_fp32_\w+: .*_keep_in_fp32_modules.*": "sinusoids and loss see to their precision themselves",
    r".*: No conversion found for <class '.*'>": "no older layout of checkpoints to convert from",
    r"test_resize_position_vector_embeddings: Model does not have position embeddings": (
        "a test of resize_position_embeddings(), which only few models offer"
    ),
    r".*: Model does not have a TP plan\.": "small models are not split over devices",
    r"test_eager_matches_sdpa_inference_\w+_output_attentions: Model does not support output_attentions": (
        "read off the annotation of forward(); test_attention_outputs asks for the weights themselves"
    ),
}


def unavailable(reason: str) -> None:
    """Skips the test, or fails it where it has to run."""
    (pytest.fail if IN_CI else pytest.skip)(reason)


def common_tests() -> Path:
    """The archive of the installed transformers' sources, fetched once per user and version."""
    version = transformers.__version__
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vanilla-transformer" / "conformance"
    archive = cache / f"transformers-{version}.tar.gz"
    if archive.is_file():
        return archive
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "transformers"]
        command += ["--dest", folder, f"transformers=={version}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        fetched = Path(folder) / archive.name
        if done.returncode or not fetched.is_file():
            unavailable(f"pip could not fetch the sources of transformers {version}: {done.stderr.strip()[-300:]}")
        fetched.replace(archive)
    return archive


def lay_out(package: Path) -> None:
    """Unpacks the common tests into `package`, and nothing else of the archive."""
    for folder in ("", "generation", "exporters", "utils"):
        (package / folder).mkdir()
        (package / folder / "__init__.py").touch()
    with tarfile.open(common_tests()) as archive:
        for member in archive:
            match = re.fullmatch(r"[^/]+/tests/(test_\w+\.py)", member.name)
            content = archive.extractfile(member) if match else None
            if match and content is not None:
                (package / match[1]).write_bytes(content.read())
    for name, text in STAND_INS.items():
        (package / name).write_text(text)
    for name in ("test_modeling_common.py", "test_configuration_common.py", "test_training_mixin.py"):
        if not (package / name).is_file():
            unavailable(f"the source distribution of transformers {transformers.__version__} has no tests/{name}")


def environment(work: Path) -> dict[str, str]:
    paths = [str(work), str(SOURCE), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "RUN_SLOW": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }


@pytest.mark.slow
def test_common_tests_of_transformers_pass_and_each_skip_is_right(tmp_path):
    pytest.importorskip("parameterized", reason="the common tests need it: pip install 'vanilla-transformer[test]'")
    lay_out(tmp_path / "transformers_tests")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "--noconftest", "-p", "no:cacheprovider", "--tb=short"]
    command += ["--disable-warnings", "-c", str(tmp_path / "pytest.ini"), "--rootdir", str(tmp_path)]
    command += ["--junitxml", str(tmp_path / "report.xml"), str(SUITE)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, check=False, timeout=1500
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    cases = list(ElementTree.parse(tmp_path / "report.xml").getroot().iter("testcase"))
    assert not [case.get("name") for case in cases if {"failure", "error"} & {child.tag for child in case}]
    skips = {f"{case.get('name')}: {skip.get('message')}" for case in cases for skip in case.findall("skipped")}
    assert not {skip for skip in skips if not any(re.fullmatch(known, skip) for known in RIGHT_SKIPS)}
    assert sum(len(case) == 0 for case in cases) >= PASSED_AT_LEAST
