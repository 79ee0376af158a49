"""The console command: quick help, one line for a mistake, results on stdout alone, files written whole."""

from __future__ import annotations

import gzip
import io
import json
import logging
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import vanilla_transformer_cli as cli
from conftest import TINY_CORPUS
from small_models import reference_sentence
from translators import CopyModel, varied_marian, varied_model
from vanilla_transformer import generation_vanilla_transformer, translation
from vanilla_transformer.commands import evaluate, translate
from vanilla_transformer.evaluation import corpus_scores, perplexity
from vanilla_transformer.tokenization import train_tokenizer
from vanilla_transformer.translation import translate_lines


SOURCES = ["The red train", "A dog", "", "We bought thr", "12"]
TARGETS = ["Der rote Zug", "Ein Hund", "", "Wir haben drei", "12"]
CLI_FILE = Path(cli.__file__)


@pytest.fixture(scope="module")
def folder(tiny_tokenizer, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("cli_model")
    varied_model(tiny_tokenizer).save_pretrained(path)
    tiny_tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture
def source(tmp_path) -> str:
    path = tmp_path / "source.txt"
    path.write_text("\n".join(SOURCES) + "\n")
    return str(path)


@pytest.fixture
def copying(monkeypatch):
    """Puts a model that copies in the place of the one that would be loaded."""
    tokenizer = train_tokenizer(["a b c"], 259, model_max_length=1024)
    model = CopyModel(tokenizer)
    for command in (translate, evaluate):
        monkeypatch.setattr(command, "load_translator", lambda *_, **__: (model, tokenizer))
    return model


def run(capsys, *argv: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command in this process."""
    try:
        code = cli.main(list(argv))
    except SystemExit as exit:
        code = exit.code
    out, err = capsys.readouterr()
    return code, out, err


def default_signals() -> None:
    """What a shell's background jobs and nohup ignore is heeded again."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def start(*argv: str, **options) -> subprocess.Popen:
    """The command in a process of its own."""
    paths = [str(CLI_FILE.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        [sys.executable, CLI_FILE, *argv],
        env=environment,
        # A shell's background jobs ignore Ctrl-C, and so would their children; a user's do not.
        preexec_fn=default_signals,
        **{**pipes, **options},
    )


# --- What needs no torch -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv, code, stream, text",
    [
        (["--help"], 0, "stdout", "translate  translate a file"),
        (["--version"], 0, "stdout", "vanilla-transformer "),
        ([], 2, "stderr", "usage: vanilla-transformer VERB"),
        (["transalte"], 2, "stderr", "vanilla-transformer: error: unknown verb 'transalte'"),
        (["translate", "--help"], 0, "stdout", "--n_best K"),
        (["evaluate", "--help"], 0, "stdout", "--reference F [F ...]"),
        (
            ["translate"],
            2,
            "stderr",
            "vanilla-transformer translate: error: the following arguments are required: --model",
        ),
        (["translate", "--model", "/no/such/folder"], 2, "stderr", "--model: no such folder: '/no/such/folder'"),
        (["translate", "--model", "a/b", "--input", "/no/such"], 2, "stderr", "--input: no such file: /no/such"),
        (["translate", "--model", "a/b", "--num_beams", "0"], 2, "stderr", "whole number of at least 1, got '0'"),
        (["translate", "--model", "a/b", "--beams", "4"], 2, "stderr", "unrecognized arguments: --beams 4"),
    ],
)
def test_help_and_wrong_arguments_answer_without_torch(capsys, argv, code, stream, text):
    """In a process of its own, in which torch and transformers cannot be imported at all."""
    program = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        f"sys.path.insert(0, {str(CLI_FILE.parent)!r})\n"
        "import vanilla_transformer_cli; sys.exit(vanilla_transformer_cli.main(sys.argv[1:]))"
    )
    done = subprocess.run([sys.executable, "-c", program, *argv], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert text in getattr(done, stream)
    other = done.stderr if stream == "stdout" else done.stdout
    assert other == ""
    if code == 2 and argv:
        assert done.stderr.count("\n") == 1


@pytest.mark.skipif(sys.platform == "win32", reason="children's processor time is not counted there")
def test_help_answers_within_a_second():
    """Of the processor's time, which other work on the machine leaves alone."""
    quickest = min(_processor_seconds_of_help() for _ in range(3))
    assert 0 < quickest < 1


def _processor_seconds_of_help() -> float:
    before = os.times()
    subprocess.run([sys.executable, CLI_FILE, "translate", "--help"], capture_output=True, check=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def test_every_verb_is_named_in_the_help(capsys):
    _, out, _ = run(capsys, "--help")
    for verb, line in cli.VERBS.items():
        assert f"{verb} " in out
        assert line in out


# --- translate -----------------------------------------------------------------------------------------------------


def test_translate_writes_line_i_for_line_i_and_nothing_else(capsys, folder, tiny_tokenizer, source, tmp_path):
    expected = [best.text for (best,) in translate_lines(varied_model(tiny_tokenizer), tiny_tokenizer, SOURCES)]
    assert len(set(expected)) >= 4
    code, out, err = run(capsys, "translate", "--model", folder, "--input", source)
    assert (code, out, err) == (0, "".join(line + "\n" for line in expected), "")

    zipped, output = tmp_path / "source.txt.gz", tmp_path / "out.txt"
    zipped.write_bytes(gzip.compress(Path(source).read_bytes()))
    code, out, err = run(
        capsys, "translate", "--model", folder, "--input", str(zipped), "--output", str(output), "--window", "2"
    )
    assert (code, out, err) == (0, "", "")
    assert output.read_text() == "".join(line + "\n" for line in expected)


def test_translate_reads_standard_input(capsys, monkeypatch, copying):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\ufeffone\r\n\ntwo\u2028x".encode())))
    assert run(capsys, "translate", "--model", "a/b") == (0, "one\n\ntwo\u2028x\n", "")


def test_translate_keeps_odd_lines_in_step(capsys, copying, tmp_path):
    """As many line ends out as in, each line where it was: blank, over-long, NUL, control and unknown signs."""
    lines = [f"line {number}" for number in range(200)]
    lines[3], lines[7], lines[8], lines[50] = "", "a\x00b", "\u2603\x85\x0c\x1c", " \t"
    lines[90] = "z" * 200_000
    lines[-2:] = ["", ""]
    path, output = tmp_path / "in.txt", tmp_path / "out.txt"
    path.write_bytes("".join(line + "\n" for line in lines).encode())
    code, _, err = run(capsys, "translate", "--model", "a/b", "--input", str(path), "--output", str(output))
    assert code == 0
    got = output.read_bytes().decode().split("\n")
    assert output.read_bytes().count(b"\n") == path.read_bytes().count(b"\n") == 200
    lines[50] = ""
    assert [(number, line) for number, line in enumerate(got[:200]) if line != lines[number]] == [(90, "z" * 1023)]
    assert err.count("\n") == 1
    assert f"{path}, line 91: cut from 200001 to 1024 tokens" in err


def test_a_last_line_without_an_end_counts(capsys, copying, tmp_path):
    path = tmp_path / "in.txt"
    path.write_bytes(b"one\ntwo")
    assert run(capsys, "translate", "--model", "a/b", "--input", str(path))[1] == "one\ntwo\n"
    path.write_bytes(b"")
    assert run(capsys, "translate", "--model", "a/b", "--input", str(path))[:2] == (0, "")


def test_n_best_and_scores_are_columns(capsys, folder, tiny_tokenizer, source):
    settings = {"num_beams": 3, "num_return_sequences": 2}
    model = varied_model(tiny_tokenizer)
    expected = list(translate_lines(model, tiny_tokenizer, SOURCES, scores=True, **settings))
    expected[2] *= 2  # a blank line has its one translation twice
    flags = ["--model", folder, "--input", source, "--num_beams", "3", "--n_best", "2"]

    code, out, _ = run(capsys, "translate", *flags)
    assert code == 0
    rows = [line.split("\t") for line in out.splitlines()]
    assert rows == [[str(number), h.text] for number, best in enumerate(expected, 1) for h in best]

    code, out, _ = run(capsys, "translate", *flags, "--scores")
    assert code == 0
    rows = [line.split("\t") for line in out.splitlines()]
    flat = [(number, h) for number, best in enumerate(expected, 1) for h in best]
    assert len(rows) == len(flat) == 10
    for (line, score, log_prob, length, text), (number, hypothesis) in zip(rows, flat, strict=True):
        assert (line, length, text) == (str(number), str(len(hypothesis.token_ids)), hypothesis.text)
        assert float(score) == pytest.approx(hypothesis.score, abs=1e-5)
        assert float(log_prob) == pytest.approx(hypothesis.log_prob, abs=1e-5)


def test_the_types_of_length_penalty_are_those_of_the_model():
    assert cli.LENGTH_PENALTY_TYPES == generation_vanilla_transformer.LENGTH_PENALTY_TYPES


def test_what_decoding_is_told_arrives(capsys, folder, tiny_tokenizer, source):
    settings = {"num_beams": 6, "length_penalty": 1.0, "length_penalty_type": "hub", "max_new_tokens": 8}
    others = {"num_beams": 1, "length_penalty": 0.0, "length_penalty_type": "gnmt", "max_new_tokens": 11}

    def texts(**settings):
        model = varied_model(tiny_tokenizer)
        return [best.text for (best,) in translate_lines(model, tiny_tokenizer, SOURCES, **settings)]

    lines = texts(**settings)
    for name in settings:  # each of them matters
        assert texts(**{**settings, name: others[name]}) != lines, name
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    code, out, _ = run(capsys, "translate", "--model", folder, "--input", source, *flags)
    assert (code, out.split("\n")) == (0, [*lines, ""])


def test_another_familys_model_knows_the_length_penalty_of_transformers_alone(
    capsys, tiny_tokenizer, source, tmp_path
):
    varied_marian(tiny_tokenizer).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    flags = ["translate", "--model", str(tmp_path), "--input", source, "--max_new_tokens", "4"]
    assert run(capsys, *flags, "--length_penalty_type", "hub")[:2] == run(capsys, *flags)[:2]
    code, out, err = run(capsys, *flags, "--length_penalty_type", "gnmt")
    assert (code, out) == (2, "")
    assert "--length_penalty_type gnmt is for models of this package" in err
    assert err.count("\n") == 1


def test_json_lines_say_every_number_of_every_hypothesis(capsys, folder, tiny_tokenizer, source):
    model = varied_model(tiny_tokenizer)
    flags = ["--model", folder, "--input", source, "--num_beams", "3", "--output_format", "jsonl"]
    code, out, err = run(capsys, "translate", *flags, "--n_best", "2", "--token_probabilities", "--window", "2")
    assert (code, err) == (0, "")
    records = [json.loads(line) for line in out.splitlines()]
    assert [record["source"] for record in records] == SOURCES
    assert records[2]["hypotheses"] == [
        {"text": "", "log_probability": 0, "length": 0, "score": 0, "tokens": [], "token_log_probabilities": []}
    ]
    for line, record in zip(SOURCES, records, strict=True):
        if not line:
            continue
        assert len(record["hypotheses"]) == 2
        sentence = reference_sentence(model, tiny_tokenizer(line)["input_ids"])
        for each in record["hypotheses"]:
            ids = tiny_tokenizer.convert_tokens_to_ids(each["tokens"])
            assert each["text"] == tiny_tokenizer.decode(ids, skip_special_tokens=True)
            assert each["length"] == len(ids) == len(each["token_log_probabilities"])
            assert each["log_probability"] == pytest.approx(sentence.log_prob(ids), abs=1e-4)
            assert each["log_probability"] == pytest.approx(sum(each["token_log_probabilities"]), abs=1e-6)
            assert each["score"] == pytest.approx(each["log_probability"] / ((5 + len(ids)) / 6) ** 0.6, abs=1e-5)
        scores = [each["score"] for each in record["hypotheses"]]
        assert scores == sorted(scores, reverse=True)

    code, out, _ = run(capsys, "translate", *flags)
    assert code == 0
    plain = [json.loads(line)["hypotheses"] for line in out.splitlines()]
    assert [each[0]["text"] for each in plain] == [record["hypotheses"][0]["text"] for record in records]
    assert all(set(each[0]) == {"text", "log_probability", "length", "score"} and len(each) == 1 for each in plain)


def test_json_lines_are_one_line_each_whatever_the_text(capsys, monkeypatch, tmp_path):
    path = tmp_path / "in.txt"
    path.write_text('say "a\\b"\tc\u2028d\x0ce\n', encoding="utf-8")
    tokenizer = train_tokenizer(["a b c"], 259)
    model = CopyModel(tokenizer)
    monkeypatch.setattr(translate, "load_translator", lambda *_, **__: (model, tokenizer))
    best = translation.Hypothesis("x\u2028y", -math.inf, [5], [-math.inf])
    monkeypatch.setattr(translate, "translate_lines", lambda model, tokenizer, lines, **_: ([best] for _ in lines))
    code, out, _ = run(capsys, "translate", "--model", "a/b", "--input", str(path), "--output_format", "jsonl")
    assert (code, out.count("\n")) == (0, 1)
    record = json.loads(out, parse_constant=pytest.fail)
    assert record["source"] == 'say "a\\b"\tc\u2028d\x0ce'
    expected = {"text": "x\u2028y", "log_probability": None, "length": 1, "score": None}
    assert record["hypotheses"] == [expected]


# --- score ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def target(tmp_path) -> str:
    path = tmp_path / "target.txt"
    path.write_text("".join(line + "\n" for line in TARGETS))
    return str(path)


def test_score_writes_the_log_probability_of_each_line(capsys, folder, tiny_tokenizer, source, target, tmp_path):
    model = varied_model(tiny_tokenizer)
    ids = [tiny_tokenizer(line)["input_ids"] for line in TARGETS]
    expected = [
        reference_sentence(model, tiny_tokenizer(line)["input_ids"]).log_prob(row) if line else 0.0
        for line, row in zip(SOURCES, ids, strict=True)
    ]
    flags = ["score", "--model", folder, "--source", source, "--target", target]
    code, out, err = run(capsys, *flags)
    assert (code, err) == (0, "")
    # The rigged bias makes some of these tokens all but impossible: a sum of tens of thousands.
    assert [float(line) for line in out.splitlines()] == pytest.approx(expected, rel=1e-6, abs=1e-4)

    penalties = [((5 + len(row)) / 6) ** 0.6 for row in ids]
    zipped = tmp_path / "scores.gz"
    code, out, _ = run(capsys, *flags, "--normalized", "--output", str(zipped), "--tokens_per_batch", "40")
    assert (code, out) == (0, "")
    given = [float(line) for line in gzip.decompress(zipped.read_bytes()).splitlines()]
    assert given == pytest.approx([a / b for a, b in zip(expected, penalties, strict=True)], rel=1e-6, abs=1e-4)
    hub = ["--length_penalty_type", "hub", "--length_penalty", "2"]
    code, out, _ = run(capsys, *flags, "--normalized", *hub)
    per_square = [total / len(row) ** 2 for total, row in zip(expected, ids, strict=True)]
    assert [float(line) for line in out.splitlines()] == pytest.approx(per_square, rel=1e-6, abs=1e-4)
    code, out, _ = run(capsys, *flags, "--normalized", "--length_penalty", "0")
    assert [float(line) for line in out.splitlines()] == pytest.approx(expected, rel=1e-6, abs=1e-4)

    code, out, _ = run(capsys, *flags, "--output_format", "jsonl", "--token_probabilities")
    records = [json.loads(line) for line in out.splitlines()]
    assert [(record["source"], record["target"]) for record in records] == list(zip(SOURCES, TARGETS, strict=True))
    assert [record["log_probability"] for record in records] == pytest.approx(expected, rel=1e-6, abs=1e-4)
    for row, record, penalty in zip(ids, records, penalties, strict=True):
        row = row if record["source"] else []
        assert record["tokens"] == tiny_tokenizer.convert_ids_to_tokens(row)
        assert record["length"] == len(row)
        assert sum(record["token_log_probabilities"]) == pytest.approx(record["log_probability"])
        assert record["score"] == pytest.approx(record["log_probability"] / penalty)


def test_score_agrees_with_translate(capsys, source, tmp_path):
    tokenizer = train_tokenizer(["a b c"], 259)  # bytes alone, so that a text has only one division into tokens
    model = varied_model(tokenizer, seed=6)
    model.generation_config.max_new_tokens_over_source = 8
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    flags = ["--model", str(tmp_path / "model"), "--output_format", "jsonl", "--token_probabilities"]
    _, out, _ = run(capsys, "translate", *flags, "--input", source)
    translated = [json.loads(line)["hypotheses"][0] for line in out.splitlines()]
    target = tmp_path / "translated.txt"
    target.write_text("".join(each["text"] + "\n" for each in translated))
    _, out, _ = run(capsys, "score", *flags, "--source", source, "--target", str(target))
    whole = 0
    for own, forced in zip(translated, map(json.loads, out.splitlines()), strict=True):
        length = own["length"]
        assert forced["tokens"][:length] == own["tokens"]
        assert forced["token_log_probabilities"][:length] == pytest.approx(own["token_log_probabilities"], abs=1e-5)
        if own["tokens"][-1:] in ([], ["</s>"]):  # else the length limit came first
            assert forced["log_probability"] == pytest.approx(own["log_probability"], abs=1e-5)
            assert forced["score"] == pytest.approx(own["score"], abs=1e-5)
            whole += 1
    assert whole >= 2


def test_score_reads_one_side_from_standard_input(capsys, monkeypatch, folder, source, target):
    _, expected, _ = run(capsys, "score", "--model", folder, "--source", source, "--target", target)
    for side, path, other in (("--target", source, "--source"), ("--source", target, "--target")):
        text = Path(target if side == "--target" else source).read_bytes()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
        assert run(capsys, "score", "--model", folder, other, path, side, "-")[:2] == (0, expected)


def test_score_writes_numbers_where_no_pass_is_made(capsys, folder, tmp_path):
    source, target = tmp_path / "s", tmp_path / "t"
    source.write_text("\na dog\n\n")
    target.write_text("ein Hund\n" + "x" * 5000 + "\n\n")
    flags = ["score", "--model", folder, "--source", str(source), "--target", str(target)]
    code, out, err = run(capsys, *flags)
    assert (code, out) == (0, "-inf\nnan\n0.000000\n")
    assert f"{target}, line 2: 5001 tokens are more than the 1024" in err
    _, out, _ = run(capsys, *flags, "--output_format", "jsonl")
    records = [json.loads(line, parse_constant=pytest.fail) for line in out.splitlines()]
    assert [record["log_probability"] for record in records] == [None, None, 0]


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--source", "{}/s", "--target", "{}/long"], "{}/s has 2 lines and {}/long has 3"),
        (["--source", "{}/long", "--target", "{}/s"], "{}/long has 3 lines and {}/s has 2"),
        (["--source", "-", "--target", "-"], "only one of --source and --target can be standard input"),
        (["--source", "{}/s", "--target", "{}/t", "--output", "{}/t"], "must name different files"),
        (["--source", "{}/s", "--target", "{}/t", "--token_probabilities"], "needs --output_format jsonl"),
        (["--source", "{}/s", "--target", "{}/t", "--output_format", "jsonl", "--normalized"], "jsonl has both"),
        (["--source", "{}/s"], "required: --target"),
        (["--source", "{}/s", "--target", "{}/t", "--num_beams", "2"], "unrecognized arguments: --num_beams 2"),
        (["--source", "{}/s", "--target", "{}/latin1"], "{}/latin1, line 2: expected UTF-8"),
    ],
)
def test_a_mistake_in_score_is_one_line(capsys, tmp_path, flags, message):
    for name, text in {"s": b"a\nb\n", "t": b"c\nd\n", "long": b"c\nd\ne", "latin1": b"c\n\xef\n"}.items():
        (tmp_path / name).write_bytes(text)
    before = sorted(os.listdir(tmp_path))
    arguments = [flag.format(tmp_path) for flag in flags]
    code, out, err = run(capsys, "score", "--model", "a/b", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message.replace("{}", str(tmp_path)) in err
    assert sorted(os.listdir(tmp_path)) == before


def test_score_leaves_a_good_output_where_standard_input_ends_early(capsys, monkeypatch, folder, source, tmp_path):
    output = tmp_path / "scores"
    output.write_text("good")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\n")))
    flags = ["--model", folder, "--source", source, "--target", "-", "--output", str(output)]
    code, out, err = run(capsys, "score", *flags)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"{source} has 5 lines and standard input has 1" in err
    assert output.read_text() == "good"


# --- evaluate ------------------------------------------------------------------------------------------------------


def test_evaluate_scores_what_translate_writes(capsys, folder, tiny_tokenizer, source, tmp_path):
    references = [tmp_path / "one.txt", tmp_path / "two.txt"]
    others = [line.lower() for line in TARGETS]
    for path, lines in zip(references, (TARGETS, others), strict=True):
        path.write_text("".join(line + "\n" for line in lines))
    results_path, hypotheses_path = tmp_path / "results.json", tmp_path / "hypotheses.txt"
    code, out, err = run(
        capsys,
        *("evaluate", "--model", folder, "--source", source, "--reference", *map(str, references)),
        *("--json", str(results_path), "--hypothesis_output", str(hypotheses_path), "--num_beams", "2"),
    )
    assert (code, err) == (0, "")
    _, translated, _ = run(capsys, "translate", "--model", folder, "--input", source, "--num_beams", "2")
    assert hypotheses_path.read_text() == translated
    hypotheses = translated.split("\n")[:-1]
    assert hypotheses[2] == ""

    results = json.loads(results_path.read_text())
    scores = corpus_scores(hypotheses, [TARGETS, others])
    assert {name: results[name] for name in scores} == scores
    model = varied_model(tiny_tokenizer)
    assert results["perplexity"] == pytest.approx(perplexity(model, tiny_tokenizer, SOURCES, TARGETS))
    assert (results["segments"], results["num_beams"]) == (5, 2)
    assert results["references"] == list(map(str, references))
    for expected in (
        f"{scores['bleu']['score']:.2f}",
        scores["bleu"]["signature"],
        scores["chrf"]["signature"],
        "nrefs:2",
    ):
        assert expected in out


def test_evaluate_json_to_standard_output_is_json_alone(capsys, folder, source, tmp_path):
    reference = tmp_path / "reference.txt"
    reference.write_text("\n".join(TARGETS))
    code, out, _ = run(
        capsys,
        "evaluate",
        "--model",
        folder,
        "--source",
        source,
        "--reference",
        str(reference),
        "--json",
        "-",
        "--num_beams",
        "1",
    )
    assert code == 0
    assert json.loads(out)["segments"] == 5


def test_evaluate_is_told_how_to_count(capsys, copying, monkeypatch, tmp_path):
    """A model that copies, so that the translations are known; the score is the sacrebleu command's on the files."""
    monkeypatch.setattr(evaluate, "perplexity", lambda *_, **__: 1.0)  # a copy has no probabilities
    source, reference = tmp_path / "source.txt", tmp_path / "reference.txt"
    source.write_text("The Red Train leaves at seven today\n我今天去了公园很好\n")
    reference.write_text("the red train leaves at SEVEN\n我今天去公园了很好\n")
    found = set()
    for flags, theirs in (([], []), (["--lowercase"], ["-lc"]), (["--tokenize", "zh"], ["-tok", "zh"])):
        code, out, _ = run(
            capsys,
            *("evaluate", "--model", "a/b", "--source", str(source), "--reference", str(reference)),
            *("--json", "-", *flags),
        )
        command = [sys.executable, "-m", "sacrebleu", str(reference), "-i", str(source), "-m", "bleu", "-w", "8"]
        expected = json.loads(subprocess.run([*command, *theirs], capture_output=True, check=True).stdout)
        bleu = json.loads(out)["bleu"]
        assert (code, bleu["signature"]) == (0, expected["signature"])
        assert bleu["score"] == pytest.approx(expected["score"], abs=1e-6)
        found.add(expected["score"])
    assert len(found) == 3


@pytest.mark.parametrize("extra", [1, -1])
def test_evaluate_refuses_unequal_files_with_both_numbers(capsys, source, tmp_path, extra):
    reference, results = tmp_path / "reference.txt", tmp_path / "results.json"
    reference.write_text("x\n" * (5 + extra))
    results.write_text("good")
    code, out, err = run(
        capsys,
        *("evaluate", "--model", "a/b", "--source", source, "--reference", str(reference), "--json", str(results)),
    )
    assert (code, out) == (2, "")
    assert f"{source} has 5 lines and {reference} has {5 + extra}" in err
    assert results.read_text() == "good"


# --- Mistakes ------------------------------------------------------------------------------------------------------


def a_model_without_weights(folder: str, tmp_path: Path) -> str:
    path = tmp_path / "model"
    path.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((Path(folder) / name).read_bytes())
    return str(path)


def spoilt(name: str, content: bytes):
    """A folder whose file `name` is spoilt."""

    def make(folder: str, tmp_path: Path) -> str:
        path = Path(a_model_without_weights(folder, tmp_path))
        (path / "model.safetensors").write_bytes((Path(folder) / "model.safetensors").read_bytes())
        (path / name).write_bytes(content)
        return str(path)

    return make


def pickled_weights_only(folder: str, tmp_path: Path) -> str:
    path = a_model_without_weights(folder, tmp_path)
    (Path(path) / "pytorch_model.bin").write_bytes(b"pickle")
    return path


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda folder, tmp_path: str(tmp_path), "no config.json in the folder"),
        (a_model_without_weights, "no safetensors in the folder"),
        (pickled_weights_only, "only pytorch_model.bin, which would have to be unpickled"),
        (spoilt("model.safetensors", b"garbage garbage"), "cannot be used: "),
        (spoilt("config.json", b"{"), "config.json"),
        (
            spoilt("config.json", b'{"model_type": "vanilla_transformer", "d_model": 512, "num_heads": 7}'),
            "num_heads=7",
        ),
        (spoilt("config.json", b'{"model_type": "vanilla_transformer", "d_model": "wide"}'), "d_model"),
        (spoilt("config.json", b'{"model_type": "no_such_type"}'), "no_such_type"),
        (lambda folder, tmp_path: "no_user/no_model", "no_user/no_model"),
    ],
)
def test_a_bad_model_is_one_line_and_the_output_stays(capsys, folder, source, tmp_path, make, message):
    output = tmp_path / "out.txt"
    output.write_text("good")
    model = make(folder, tmp_path)
    before = sorted(os.listdir(tmp_path))
    code, out, err = run(capsys, "translate", "--model", model, "--input", source, "--output", str(output))
    own = [line for line in err.splitlines() if line.startswith("vanilla-transformer")]
    assert (code, out) == (2, "")
    assert len(own) == 1
    assert own[0].startswith("vanilla-transformer translate: error: ")
    assert message in own[0]
    assert "Traceback" not in err
    assert output.read_text() == "good"
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--n_best", "9"], "--n_best 9 needs as many beams, but there are 4; add --num_beams 9"),
        (["--device", "cuda:77"], "device 'cuda:77' cannot be used here"),
        (["--num_beams", "100000"], "num_beams must be at most the vocabulary's"),
        (["--token_probabilities"], "--token_probabilities needs --output_format jsonl"),
    ],
)
def test_a_setting_that_cannot_be_is_one_line(capsys, folder, source, flags, message):
    code, out, err = run(capsys, "translate", "--model", folder, "--input", source, *flags)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


@pytest.mark.parametrize("output", ["{}", "{}/file/out.txt", "{}/nowhere/out.txt"])
def test_an_output_that_cannot_be_written_is_one_line(capsys, tmp_path, source, output):
    (tmp_path / "file").write_text("")
    output = output.format(tmp_path)
    code, out, err = run(capsys, "translate", "--model", "a/b", "--input", source, "--output", output)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "vanilla-transformer translate: error: argument --output: " in err
    assert output in err


def test_broken_utf8_is_named_by_line_and_leaves_no_half_output(capsys, copying, tmp_path):
    path, output = tmp_path / "latin1.txt", tmp_path / "out.txt"
    path.write_bytes(b"good\nna\xefve\n")
    output.write_text("good")
    code, out, err = run(
        capsys, "translate", "--model", "a/b", "--input", str(path), "--output", str(output), "--window", "1"
    )
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"{path}, line 2: expected UTF-8" in err
    assert output.read_text() == "good"
    assert sorted(os.listdir(tmp_path)) == ["latin1.txt", "out.txt"]


@pytest.mark.parametrize(
    "error, message",
    [
        (ValueError("two\nlines   here"), "two lines here"),
        (FileNotFoundError(2, "No such file or directory", "x.txt"), "No such file or directory: x.txt"),
        (PermissionError(13, "Permission denied", "x.txt"), "Permission denied: x.txt"),
        (ImportError('num2words is missing: pip install "vanilla-transformer[demo]"'), "vanilla-transformer[demo]"),
        (ValueError("word " * 1000), "word word ..."),
    ],
)
def test_an_error_of_the_user_is_one_line(capsys, monkeypatch, source, error, message):
    def fail(argv):
        raise error

    monkeypatch.setattr(translate, "main", fail)
    code, out, err = run(capsys, "translate", "--model", "a/b", "--input", source)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("vanilla-transformer translate: error: ")
    assert message in err
    assert len(err) < 1000
    monkeypatch.setenv(cli.TRACEBACK_VARIABLE, "1")
    with pytest.raises(type(error)):
        cli.main(["translate", "--model", "a/b", "--input", source])


@pytest.mark.parametrize("error", [KeyError("x"), RuntimeError("bug"), AssertionError()])
def test_a_fault_of_the_program_shows_its_traceback(monkeypatch, source, error):
    def fail(argv):
        raise error

    monkeypatch.setattr(translate, "main", fail)
    with pytest.raises(type(error)):
        cli.main(["translate", "--model", "a/b", "--input", source])


def test_a_type_error_is_the_users_only_where_the_package_raised_it(capsys, monkeypatch, source):
    monkeypatch.setattr(translate, "main", lambda argv: translate_lines(None, None, "one string"))
    code, _, err = run(capsys, "translate", "--model", "a/b", "--input", source)
    assert code == 2
    assert "pass [text]" in err
    monkeypatch.setattr(translate, "main", lambda argv: json.dumps(object()))
    with pytest.raises(TypeError):
        cli.main(["translate", "--model", "a/b", "--input", source])


# --- Processes -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_reader_that_leaves_ends_the_command_quietly(folder, tmp_path):
    """As in `translate ... | head -1`."""
    path = tmp_path / "long.txt"
    path.write_text("a\n\n\n\n\n\n\n\n" * 20_000)
    process = start("translate", "--model", folder, "--input", str(path), "--num_beams", "1", "--window", "8")
    assert process.stdout.readline().endswith(b"\n")
    process.stdout.close()
    err = process.stderr.read().decode()
    assert process.wait(timeout=60) == 141
    assert err == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, code, word", [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_ctrl_c_is_one_line_and_leaves_no_half_output(folder, tmp_path, number, code, word):
    output = tmp_path / "out.txt"
    process = start("translate", "--model", folder, "--output", str(output), "--window", "1")
    process.stdin.write(b"a\n")
    process.stdin.flush()
    deadline = time.monotonic() + 60
    while not list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.2)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert err.decode().strip() == f"vanilla-transformer translate: {word}"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_command_that_is_told_to_end_leaves_no_half_output(capsys, monkeypatch, source, tmp_path, number, code):
    output = tmp_path / "out.txt"
    output.write_text("good")
    half = []

    def write_and_be_killed(argv):
        with translation.open_output(str(output)) as file:
            file.write("half")
            half.extend(name for name in os.listdir(tmp_path) if name.startswith("."))
            os.kill(os.getpid(), number)
            time.sleep(10)

    monkeypatch.setattr(translate, "main", write_and_be_killed)
    before = signal.signal(number, signal.SIG_DFL)  # under nohup, SIGHUP is ignored
    result = run(capsys, "translate", "--model", "a/b", "--input", source, "--output", str(output))
    assert result == (code, "", "vanilla-transformer translate: terminated\n")
    assert len(half) == 1
    assert output.read_text() == "good"
    assert sorted(os.listdir(tmp_path)) == ["out.txt", "source.txt"]
    assert signal.signal(number, before) == signal.SIG_DFL


def test_a_process_forked_off_by_a_command_ends_at_once(capsys, monkeypatch, source):
    """As the workers of a pool do, which end by SIGTERM; they must not take themselves for the command."""
    ends = []

    def fork_and_end(argv):
        child = os.fork()
        if child == 0:
            try:
                time.sleep(10)
            finally:
                os._exit(0)
        time.sleep(0.1)
        os.kill(child, signal.SIGTERM)
        ends.append(os.waitpid(child, 0)[1])

    monkeypatch.setattr(translate, "main", fork_and_end)
    assert run(capsys, "translate", "--model", "a/b", "--input", source)[0] == 0
    assert os.WIFSIGNALED(ends[0])
    assert os.WTERMSIG(ends[0]) == signal.SIGTERM


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["translate", "evaluate", "score"])
def test_the_commands_run_as_processes(folder, tmp_path, verb):
    source, target = tmp_path / "s", tmp_path / "t"
    source.write_text(TINY_CORPUS[1][0][:9] + "\n")
    target.write_text(TINY_CORPUS[1][1] + "\n")
    files = {
        "translate": ["--input", source],
        "evaluate": ["--source", source, "--reference", target],
        "score": ["--source", source, "--target", target],
    }[verb]
    process = start(verb, "--model", folder, *map(str, files))
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, b"")
    assert out.count(b"\n") == {"translate": 1, "evaluate": 6, "score": 1}[verb]


@pytest.mark.parametrize("stream, arguments", [("stdin", ["--output", "out"]), ("stdout", ["--input", "in"])])
def test_a_closed_standard_stream_is_one_line(stream, arguments, tmp_path, tiny_tokenizer, monkeypatch, capsys):
    varied_model(tiny_tokenizer).save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "in").write_text("one\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, stream, None)
    assert cli.main(["translate", "--model", str(tmp_path / "model"), *arguments]) == 2
    monkeypatch.undo()
    assert "is closed" in capsys.readouterr().err


def test_retries_of_the_hubs_client_are_told_once():
    retries, shown = cli.FewerRetries(), []
    for number in range(1, 6):
        for text, values in (
            ("%s thrown while requesting %s %s", ("'refused'", "HEAD", "http://hub/x")),
            ("Retrying in %ss [Retry %d/%d].", (2**number, number, 5)),
            ("something else %d", (number,)),
        ):
            record = logging.LogRecord("huggingface_hub.utils._http", logging.WARNING, "", 0, text, values, None)
            if retries.filter(record):
                shown.append(record.getMessage())
    assert shown[0].startswith("the Hub, ")
    assert "('refused' thrown while requesting HEAD http://hub/x); trying again for a while" in shown[0]
    assert shown[1:] == [f"something else {number}" for number in range(1, 6)]
