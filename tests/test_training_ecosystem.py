"""Training with what stands around it: precisions, compilation, PEFT, resized vocabularies, saved folders, processes.

Each under Trainer, Seq2SeqTrainer and our own trainer, where it makes sense under all of them.
"""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForSeq2SeqLM, Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments

from small_models import small_model, words
from test_hub_code_travels import SHIPPED, elsewhere
from test_training import (
    EIGHT,
    EOS,
    MANY,
    PAD,
    SGD,
    alone,
    arguments,
    collated,
    endless_translator,
    evaluator,
    launch,
    logged,
    manual_update,
    one_update,
    random_pairs,
    same_weights,
    token_losses,
    unpadded,
)
from translators import varied_model
from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.data import TranslationCollator, tokenize_pairs
from vanilla_transformer.modeling_vanilla_transformer import FusedLabelSmoothedLoss
from vanilla_transformer.training import VanillaTransformerTrainer, VanillaTransformerTrainingArguments


TRAINERS = [VanillaTransformerTrainer, Seq2SeqTrainer, Trainer]
WORD_MATRICES = ("model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head")


def trainer_for(cls: type, folder: Path, model, *, train=None, evaluation=None, options=None, **settings):
    """A trainer with batches of at most 40 tokens or of 4 sentences, and a constant rate."""
    if cls is VanillaTransformerTrainer:
        args_class: type = VanillaTransformerTrainingArguments
        settings = {"tokens_per_batch": 40, **settings}
    else:
        args_class = TrainingArguments if cls is Trainer else Seq2SeqTrainingArguments
        settings = {"per_device_train_batch_size": 4, **settings}
    settings = {
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "learning_rate": 0.01,
        "max_grad_norm": 0.0,
        "seed": 1,
        **settings,
    }
    return cls(
        model,
        arguments(folder, args_class, **settings),
        train_dataset=train,
        eval_dataset=evaluation,
        data_collator=TranslationCollator(PAD),
        **(options or {}),
    )


def warnings_of(capture: pytest.LogCaptureFixture, call) -> str:
    """What transformers and we log while `call` runs (their loggers do not reach the root)."""
    loggers = [logging.getLogger(name) for name in ("transformers", "vanilla_transformer")]
    for each in loggers:
        each.addHandler(capture.handler)
    try:
        call()
    finally:
        for each in loggers:
            each.removeHandler(capture.handler)
    return capture.text


# --- Half precision --------------------------------------------------------------------------------------------------


def outputs_of_a_projection(model) -> set[torch.dtype]:
    dtypes: set[torch.dtype] = set()
    model.model.decoder.layers[0].cross_attention.v_proj.register_forward_hook(
        lambda module, inputs, output: dtypes.add(output.dtype)
    )
    return dtypes


@pytest.mark.parametrize("cls", TRAINERS)
def test_bfloat16_trains_close_to_float32_under_every_trainer(tmp_path, cls):
    """The same batches in both precisions; all losses finite and close, the weights themselves in float32."""
    losses = {}
    for bf16 in (False, True):
        model = small_model(std=0.1)
        dtypes = outputs_of_a_projection(model)
        trainer = trainer_for(
            cls,
            tmp_path,
            model,
            train=random_pairs(MANY),
            evaluation=random_pairs(MANY[:6]),
            max_steps=5,
            learning_rate=0.01,
            bf16=bf16,
        )
        trainer.train()
        losses[bf16] = [*logged(trainer, "loss"), trainer.evaluate()["eval_loss"]]
        assert dtypes == {torch.bfloat16 if bf16 else torch.float32}
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert losses[True] == pytest.approx(losses[False], rel=5e-3)
    assert losses[True] != losses[False]
    assert losses[True][0] - losses[True][-1] > 0.02


@pytest.mark.parametrize("predict_with_generate", [True, False])
def test_an_evaluation_without_training_is_in_the_precision_asked_for(tmp_path, predict_with_generate):
    """As with the stock trainers, which prepare the model for it; generation included."""
    model = small_model(std=0.2)
    dtypes = outputs_of_a_projection(model)
    trainer = trainer_for(
        VanillaTransformerTrainer,
        tmp_path,
        model,
        evaluation=random_pairs(MANY[:6]),
        bf16=True,
        predict_with_generate=predict_with_generate,
        options={"compute_metrics": lambda prediction: {"rows": len(prediction.predictions)}},
    )
    model.generation_config.max_new_tokens_over_source = 0
    metrics = trainer.evaluate()
    assert dtypes == {torch.bfloat16}
    expected = token_losses(model, random_pairs(MANY[:6])).mean().item()
    assert metrics["eval_loss"] == pytest.approx(expected, rel=0.02)
    assert metrics["eval_rows"] == 6


@pytest.mark.parametrize("cls", TRAINERS)
def test_float16_on_a_processor_trains_in_float32_and_ours_says_so(tmp_path, cls, caplog):
    """accelerate has no float16 there and is silent about it."""
    losses = []
    for fp16 in (False, True):
        trainers = []
        text = warnings_of(
            caplog,
            lambda fp16=fp16, trainers=trainers: trainers.append(
                trainer_for(cls, tmp_path, small_model(std=0.1), train=random_pairs(MANY), max_steps=2, fp16=fp16)
            ),
        )
        trainers[0].train()
        losses.append(logged(trainers[0], "loss"))
        assert ("fp16=True has no effect" in text) == (fp16 and cls is VanillaTransformerTrainer)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("cls", TRAINERS)
@pytest.mark.parametrize("precision, dtype, close", [("fp16", torch.float16, 2e-3), ("bf16", torch.bfloat16, 2e-2)])
def test_a_full_evaluation_in_half_precision_moves_the_model_there(tmp_path, cls, precision, dtype, close):
    model = small_model(std=0.2)
    exact = token_losses(model, random_pairs(MANY[:6])).mean().item()
    dtypes = outputs_of_a_projection(model)
    settings = {f"{precision}_full_eval": True, "per_device_eval_batch_size": 6}
    if cls is VanillaTransformerTrainer:
        settings["tokens_per_batch"] = 4096
    trainer = trainer_for(cls, tmp_path, model, evaluation=random_pairs(MANY[:6]), **settings)
    loss = trainer.evaluate()["eval_loss"]
    assert dtypes == {dtype}
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert model.lm_head.weight is model.model.decoder.embed_tokens.weight is model.get_input_embeddings().weight
    assert loss == pytest.approx(exact, rel=close)
    assert loss != exact


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype, close", [(torch.float16, 4e-3), (torch.bfloat16, 3e-2)])
def test_the_fused_loss_under_autocast_has_the_gradients_of_the_plain_formula(dtype, close, bias):
    """The formula in float64; several chunks are not needed to see the precision."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(40, 16, generator=generator)
    weight = torch.randn(50, 16, generator=generator) * 0.5
    offset = torch.randn(50, generator=generator) if bias else None
    labels = torch.randint(50, (40,), generator=generator)
    exact = [each.double().requires_grad_() for each in (hidden, weight, offset) if each is not None]
    logits = exact[0] @ exact[1].t() + (exact[2] if bias else 0.0)
    log_probabilities = logits.log_softmax(-1)
    target = torch.nn.functional.one_hot(labels, 50) * 0.9 + 0.1 / 50
    expected = -(target * log_probabilities).sum()
    expected.backward()
    given = [each.clone().requires_grad_() for each in (hidden, weight, offset) if each is not None]
    with torch.autocast("cpu", dtype):
        total = FusedLabelSmoothedLoss.apply(*given, *([] if bias else [None]), labels, 0.1)
    (total / 40).backward()
    assert total.item() == pytest.approx(expected.item(), rel=close)
    for each, right in zip(given, exact, strict=True):
        assert each.grad.dtype == torch.float32
        difference = (each.grad.double() - right.grad / 40).norm() / (right.grad / 40).norm()
        assert 1e-6 < difference < close


def test_a_gradient_scaler_scales_the_fused_loss_and_back():
    """The path of fp16=True on an accelerator: loss times 2 ** 16 under float16, gradients divided again."""
    batch = collated(random_pairs(EIGHT))
    model = small_model(std=0.2).train()
    model(**batch).loss.backward()
    right = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    with torch.autocast("cpu", torch.float16):
        loss = model(**batch).loss
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter.grad).all()
        assert (parameter.grad - right[name]).norm() < 0.05 * right[name].norm().clamp(min=1e-2), name
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**16  # nothing overflowed


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_in_half_precision_has_finite_gradients_near_the_exact_ones(dtype):
    batch = collated(random_pairs(EIGHT))
    exact = small_model(std=0.2).train()
    exact(**batch).loss.backward()
    model = small_model(std=0.2).to(dtype).train()
    loss = model(**batch).loss
    loss.backward()
    assert loss.dtype == torch.float32
    for (name, parameter), right in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert parameter.grad.dtype == dtype
        difference = (parameter.grad.float() - right.grad).norm() / right.grad.norm().clamp(min=1e-2)
        assert difference < (0.02 if dtype == torch.float16 else 0.15), name


# --- torch.compile ---------------------------------------------------------------------------------------------------


@pytest.fixture
def compiler():
    """The counters of torch's compiler, emptied before and after."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield counters
    torch._dynamo.reset()
    counters.clear()


def compiled_equals_plain(cls, folder: Path, backend: str, counters, graphs: int, **sizes) -> None:
    """One epoch over batches of many shapes, plain and compiled; then saved, opened again and evaluated."""
    results = []
    for compiles in (False, True):
        model = small_model(std=0.1, **sizes)
        trainer = trainer_for(
            cls,
            folder,
            model,
            train=random_pairs(MANY),
            evaluation=random_pairs(MANY[:6]),
            num_train_epochs=1,
            learning_rate=0.01,
            optim="sgd",
            torch_compile=compiles,
            torch_compile_backend=backend if compiles else None,
        )
        trainer.train()
        results.append((logged(trainer, "loss"), model, trainer))
    (losses, plain, _), (compiled_losses, model, trainer) = results
    assert len(losses) >= 6
    assert compiled_losses == pytest.approx(losses, abs=1e-4)
    same_weights(model, plain, rtol=1e-4, atol=1e-5)
    assert 1 <= counters["stats"]["unique_graphs"] <= graphs
    assert not counters["graph_break"]
    trainer.save_model(str(folder / "saved"))
    reloaded, info = VanillaTransformerForConditionalGeneration.from_pretrained(
        folder / "saved", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    same_weights(reloaded, model, rtol=0, atol=0)
    exact = token_losses(plain.eval(), random_pairs(MANY[:6])).mean().item()
    # The stock trainers' is a mean over sentences' batches.
    assert trainer.evaluate()["eval_loss"] == pytest.approx(exact, rel=1e-4 if cls in TRAINERS[:1] else 0.1)


def test_a_compiled_model_trains_the_same_over_all_lengths(tmp_path, compiler):
    """The compiler is asked for its graphs only ("eager"), which tells how often it starts anew."""
    compiled_equals_plain(
        VanillaTransformerTrainer, tmp_path, "eager", compiler, 4, encoder_layers=1, decoder_layers=1
    )


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("cls", TRAINERS)
def test_a_compiled_model_trains_the_same_under_every_trainer(tmp_path, cls, backend, compiler):
    compiled_equals_plain(cls, tmp_path, backend, compiler, 4, encoder_layers=1, decoder_layers=2)


# --- PEFT ------------------------------------------------------------------------------------------------------------


PROJECTIONS = ["q_proj", "k_proj", "v_proj", "out_proj"]


def adapted(base, targets=PROJECTIONS, **settings):
    """The model with LoRA adapters of rank 2 and scale 4; they change nothing yet."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    return peft.get_peft_model(base, peft.LoraConfig(r=2, lora_alpha=8, target_modules=targets, **settings))


def stir(model, std: float = 0.3) -> None:
    """Random numbers into all that an adapter trains."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(std * torch.randn(parameter.shape, generator=generator))


def with_adapters_by_hand(model, **settings):
    """The oracle: a plain model, its matrices untied, with W + 4 B A, or what is saved beside, written into it."""
    right = small_model(tie_word_embeddings=False, **settings)
    weights = {name: tensor.clone() for name, tensor in small_model(**settings).state_dict().items()}
    found = {name.removeprefix("base_model.model."): tensor for name, tensor in model.state_dict().items()}
    adapters = 0
    for name in weights:
        module = name.removesuffix(".weight")
        if f"{module}.lora_A.default.weight" in found:
            weights[name] += 4 * found[f"{module}.lora_B.default.weight"] @ found[f"{module}.lora_A.default.weight"]
            adapters += 1
        elif f"{module}.modules_to_save.default.weight" in found:
            weights[name] = found[f"{module}.modules_to_save.default.weight"]
            adapters += 1
    assert adapters
    right.load_state_dict(weights)
    return right


@pytest.mark.parametrize("cls", TRAINERS)
def test_lora_on_the_projections_trains_nothing_but_the_adapters(tmp_path, cls):
    base = small_model(std=0.3)
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    expected = token_losses(base, random_pairs(EIGHT), 0.1).mean().item()
    model = adapted(base)
    trained = {name: parameter.detach().clone() for name, parameter in model.named_parameters() if "lora" in name}
    assert len(trained) == 2 * 4 * (2 + 2 * 3)  # every projection of 2 encoder and, twice, 3 decoder layers
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == set(trained)
    sizes = {"tokens_per_batch": 4096} if cls is VanillaTransformerTrainer else {"per_device_train_batch_size": 8}
    trainer = trainer_for(cls, tmp_path, model, train=random_pairs(EIGHT), max_steps=15, learning_rate=0.02, **sizes)
    trainer.train()
    losses = logged(trainer, "loss")
    assert losses[0] == pytest.approx(expected, rel=1e-5)
    assert losses[-1] < 0.9 * losses[0]
    after = {
        name.removeprefix("base_model.model.").replace("base_layer.", ""): tensor
        for name, tensor in model.state_dict().items()
    }
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name
    for name, parameter in model.named_parameters():
        assert name not in trained or not torch.equal(parameter, trained[name]), name
    assert token_losses(model.eval(), random_pairs(EIGHT)).mean() < expected


def test_an_adapter_is_what_its_matrices_say_merged_saved_and_generating(tmp_path):
    peft = pytest.importorskip("peft")
    model = adapted(small_model())
    stir(model)
    model.eval()
    batch = collated(random_pairs(MANY[:6]))
    right = with_adapters_by_hand(model)
    expected = right(**batch).logits
    torch.testing.assert_close(model(**batch).logits, expected, rtol=1e-5, atol=3e-5)
    sources = {name: batch[name] for name in ("input_ids", "attention_mask")}
    right.generation_config.max_new_tokens_over_source = model.generation_config.max_new_tokens_over_source = 5
    generated = model.generate(**sources)
    assert torch.equal(generated, right.generate(**sources))
    assert not torch.equal(generated, small_model().generate(**sources, max_new_tokens=generated.shape[1] - 1))
    model.save_pretrained(tmp_path / "adapter")
    size = sum(path.stat().st_size for path in (tmp_path / "adapter").glob("*.safetensors"))
    assert size < 4 * sum(parameter.numel() for parameter in small_model().parameters())  # not the model
    reloaded = peft.PeftModel.from_pretrained(small_model(), tmp_path / "adapter").eval()
    torch.testing.assert_close(reloaded(**batch).logits, model(**batch).logits, rtol=0, atol=1e-6)
    merged = model.merge_and_unload().eval()
    assert type(merged) is VanillaTransformerForConditionalGeneration
    torch.testing.assert_close(merged(**batch).logits, expected, rtol=1e-5, atol=3e-5)
    assert merged.lm_head.weight is merged.model.decoder.embed_tokens.weight is merged.get_input_embeddings().weight
    merged.save_pretrained(tmp_path / "merged")
    opened = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(opened(**batch).logits, expected, rtol=1e-5, atol=3e-5)


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning")
def test_with_an_adapter_on_the_output_projection_the_logits_are_made_in_training(monkeypatch):
    """The fused loss reads the matrix alone, so it must stand aside."""
    fused = []
    apply = FusedLabelSmoothedLoss.apply
    monkeypatch.setattr(FusedLabelSmoothedLoss, "apply", lambda *given: fused.append(1) or apply(*given))
    batch = collated(random_pairs(EIGHT))
    for targets, expects_fused in ((PROJECTIONS, True), ([*PROJECTIONS, "lm_head"], False)):
        fused.clear()
        model = adapted(small_model(), targets)
        stir(model)
        expected = token_losses(with_adapters_by_hand(model), random_pairs(EIGHT), 0.1).mean()
        outputs = model.train()(**batch)
        assert outputs.loss.item() == pytest.approx(expected.item(), rel=1e-5)
        assert bool(fused) is expects_fused
        assert (outputs.logits is None) is expects_fused
        outputs.loss.backward()
        for name, parameter in model.named_parameters():
            assert (parameter.grad is not None and bool(parameter.grad.any())) is ("lora" in name), name


@pytest.mark.filterwarnings("ignore:.*tied:UserWarning", "ignore:.*tie_word_embeddings:UserWarning")
@pytest.mark.parametrize("saved", [["lm_head"], ["embed_tokens"], ["embed_tokens", "lm_head"]])
def test_word_matrices_of_their_own_beside_the_adapters_survive_merging_and_saving(tmp_path, saved):
    """modules_to_save breaks the three-way tie: what was one matrix is several from then on, in the file as well."""
    base = small_model()
    shared = base.get_input_embeddings().weight.detach().clone()
    model = adapted(base, modules_to_save=saved)
    trainer = trainer_for(
        VanillaTransformerTrainer, tmp_path, model, train=random_pairs(MANY), max_steps=4, learning_rate=0.05
    )
    trainer.train()
    model.eval()
    right = with_adapters_by_hand(model)
    for name in WORD_MATRICES:
        assert torch.equal(right.get_submodule(name).weight, shared) is (name.rpartition(".")[2] not in saved), name
    batch = collated(random_pairs(MANY[:6]))
    expected = right(**batch).logits
    torch.testing.assert_close(model(**batch).logits, expected, rtol=1e-5, atol=3e-5)
    merged = model.merge_and_unload().eval()
    torch.testing.assert_close(merged(**batch).logits, expected, rtol=1e-5, atol=3e-5)
    merged.save_pretrained(tmp_path / "merged")
    opened, info = VanillaTransformerForConditionalGeneration.from_pretrained(
        tmp_path / "merged", output_loading_info=True
    )
    assert not info["missing_keys"]
    torch.testing.assert_close(opened.eval()(**batch).logits, expected, rtol=1e-5, atol=3e-5)


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning")
def test_lora_on_one_of_three_tied_matrices_is_merged_rightly_once_they_are_untied(tmp_path):
    """Merged into the one matrix it would change all three, and PEFT warns; an untied twin takes it."""
    peft = pytest.importorskip("peft")
    base = small_model()
    base.save_pretrained(tmp_path / "base")
    model = adapted(base, [*PROJECTIONS, "lm_head"])
    stir(model)
    batch = collated(random_pairs(MANY[:6]))
    expected = with_adapters_by_hand(model)(**batch).logits
    torch.testing.assert_close(model.eval()(**batch).logits, expected, rtol=1e-5, atol=3e-5)
    model.save_pretrained(tmp_path / "adapter")
    untied = VanillaTransformerForConditionalGeneration.from_pretrained(
        tmp_path / "base", tie_word_embeddings=False
    ).eval()
    torch.testing.assert_close(untied(**batch).logits, small_model()(**batch).logits)
    assert len({untied.get_submodule(name).weight.data_ptr() for name in WORD_MATRICES}) == 3
    merged = peft.PeftModel.from_pretrained(untied, tmp_path / "adapter").merge_and_unload().eval()
    torch.testing.assert_close(merged(**batch).logits, expected, rtol=1e-5, atol=3e-5)
    merged.save_pretrained(tmp_path / "merged")
    opened = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(opened(**batch).logits, expected, rtol=1e-5, atol=3e-5)
    with pytest.warns(UserWarning, match="tied_target_modules"):
        model.merge_and_unload()


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning")
def test_ours_refuses_pefts_own_tying_of_the_word_matrices(tmp_path):
    """It makes the decoder's embedding a linear layer, which then fails in the first batch."""
    peft = pytest.importorskip("peft")
    if "ensure_weight_tying" not in peft.LoraConfig.__dataclass_fields__:
        pytest.skip("this version of PEFT does not have it")
    model = adapted(small_model(), modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    with pytest.raises(ValueError, match="tie_word_embeddings=False"):
        trainer_for(VanillaTransformerTrainer, tmp_path, model, train=random_pairs(MANY), max_steps=1)


def test_ours_evaluates_a_model_with_adapters_by_generation(tmp_path, tiny_tokenizer):
    """Each segment by the merged model alone is the oracle."""
    model = adapted(varied_model(tiny_tokenizer))
    stir(model, std=0.2)
    model.eval()
    pairs = [
        {"source": text, "target": text[: 5 + 3 * number]}
        for number, text in enumerate(["A dog sleeps.", "The old bridge", "She reads a long book.", "We bought pears"])
    ]
    dataset, _ = tokenize_pairs(Dataset.from_list(pairs), tiny_tokenizer, drop=False)
    trainer = evaluator(tmp_path, (model, dataset, None), tiny_tokenizer, tokens_per_batch=60)
    output = trainer.predict(dataset)
    merged = copy.deepcopy(model).merge_and_unload().eval()
    texts = [tiny_tokenizer.decode(ids, skip_special_tokens=True) for ids in unpadded(output.predictions)]
    assert texts == alone(merged, tiny_tokenizer, [pair["source"] for pair in pairs], num_beams=1)
    assert len(set(texts)) > 1
    assert output.metrics["test_loss"] == pytest.approx(token_losses(merged, dataset).mean().item(), rel=1e-5)
    assert trainer.evaluate()["eval_bleu"] == pytest.approx(output.metrics["test_bleu"])


def test_a_run_with_adapters_resumes_bit_identical_and_keeps_the_best(tmp_path):
    pytest.importorskip("peft")
    settings = {
        "max_steps": 6,
        "learning_rate": 0.05,
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
    }

    def run(resume):
        model = adapted(small_model(dropout=0.1))
        trainer = trainer_for(
            VanillaTransformerTrainer,
            tmp_path,
            model,
            train=random_pairs(MANY),
            evaluation=random_pairs(MANY[:6]),
            **settings,
        )
        trainer.train(resume_from_checkpoint=resume)
        return model, trainer

    whole, trainer = run(None)
    assert not (tmp_path / "checkpoint-2" / "model.safetensors").exists()
    best = min(logged(trainer, "eval_loss"))
    assert trainer.evaluate()["eval_loss"] == best
    resumed, again = run(str(tmp_path / "checkpoint-2"))
    assert logged(again, "loss") == logged(trainer, "loss")
    same_weights(resumed, whole, rtol=0, atol=0)


# --- Resized vocabularies --------------------------------------------------------------------------------------------


def pairs_within(vocab_size: int) -> Dataset:
    """Eight pairs that use words up to the last one."""
    rows = []
    for number, (source, target) in enumerate(EIGHT):
        sides = [[*words(length - 1, vocab_size=vocab_size, seed=number).tolist(), EOS] for length in (source, target)]
        rows.append({"input_ids": sides[0], "labels": [vocab_size - 1, *sides[1][1:]]})
    return Dataset.from_list(rows)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size, multiple, rows", [(29, None, 29), (20, None, 20), (25, 8, 32)])
@pytest.mark.parametrize("cls", TRAINERS)
def test_a_resized_model_trains_as_one_of_that_size(tmp_path, cls, size, multiple, rows, tied):
    """One step by hand on a copy: every shape fits, and a tied matrix is one parameter and stays one."""
    model = small_model(output_bias=True, tie_word_embeddings=tied)
    torch.manual_seed(0)
    model.resize_token_embeddings(size, pad_to_multiple_of=multiple)
    assert model.config.vocab_size == len(model.lm_head.bias) == rows
    dataset = pairs_within(min(size, rows))
    twin = copy.deepcopy(model)
    expected_loss, expected = manual_update(dataset, 0.1, twin)
    # A copy of a tied model is tied; the padding's row is part of the one matrix.
    model, trainer = one_update(cls, tmp_path, 8, 1, dataset, model)
    assert logged(trainer, "loss") == pytest.approx([expected_loss], abs=1e-5)
    same_weights(model, expected, rtol=1e-5, atol=1e-6)
    matrices = {id(model.get_submodule(name).weight) for name in WORD_MATRICES}
    assert len(matrices) == (1 if tied else 3)
    held = [id(parameter) for group in trainer.optimizer.param_groups for parameter in group["params"]]
    assert len(held) == len(set(held))
    assert matrices <= set(held)
    trainer.save_model(str(tmp_path / "saved"))
    opened = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "saved")
    same_weights(opened, model, rtol=0, atol=0)
    assert len({opened.get_submodule(name).weight.data_ptr() for name in WORD_MATRICES}) == (1 if tied else 3)
    assert opened.config.vocab_size == rows


# --- Fine-tuning from a saved folder ---------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", TRAINERS)
def test_fine_tuning_from_a_folder_goes_on_as_the_model_itself(tmp_path, cls):
    """Same update as by hand on the model that was saved; what is saved again has its code and its settings."""
    origin = small_model()
    origin.generation_config.num_beams = 3
    origin.save_pretrained(tmp_path / "hub")
    expected_loss, expected = manual_update(random_pairs(EIGHT), label_smoothing=0.1)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "hub")
    model, trainer = one_update(cls, tmp_path / "run", 8, 1, model=model)
    assert logged(trainer, "loss") == pytest.approx([expected_loss], abs=1e-5)
    same_weights(model, expected, rtol=1e-5, atol=1e-6)
    trainer.save_model(str(tmp_path / "tuned"))
    assert {path.name for path in (tmp_path / "tuned").glob("*.py")} == SHIPPED
    for name in ("config.json", "generation_config.json"):
        before, after = (json.loads((tmp_path / folder / name).read_text()) for folder in ("hub", "tuned"))
        if name == "config.json" and cls is not VanillaTransformerTrainer:
            after["use_cache"] = before["use_cache"]  # the stock trainers write their own
        assert after == before


FINE_TUNE = """
import json, sys
import torch
from pathlib import Path
from transformers import AutoModelForSeq2SeqLM, Seq2SeqTrainer, Seq2SeqTrainingArguments
torch.set_num_threads(1)
rows = json.loads({rows!r})
def collate(batch):
    def pad(name, value):
        width = max(len(row[name]) for row in batch)
        return torch.tensor([row[name] + [value] * (width - len(row[name])) for row in batch])
    ids = pad("input_ids", 1)
    return {{"input_ids": ids, "attention_mask": ids.ne(1).long(), "labels": pad("labels", -100)}}
model = AutoModelForSeq2SeqLM.from_pretrained({folder!r}, trust_remote_code=True)
assert "transformers_modules" in type(model).__module__
arguments = Seq2SeqTrainingArguments({out!r}, use_cpu=True, report_to="none", disable_tqdm=True, logging_steps=1,
    save_strategy="no", optim="sgd", learning_rate=0.01, lr_scheduler_type="constant", max_grad_norm=0.0, max_steps=1,
    per_device_train_batch_size=8, predict_with_generate=True)
trainer = Seq2SeqTrainer(model, arguments, train_dataset=rows, eval_dataset=rows, data_collator=collate,
    compute_metrics=lambda prediction: {{"rows": len(prediction.predictions)}})
trainer.train()
assert trainer.evaluate()["eval_rows"] == len(rows)
trainer.save_model({saved!r})
loss = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print("RESULT", json.dumps(loss))
"""

OPEN_AGAIN = """
import torch
from transformers import AutoModelForSeq2SeqLM
model = AutoModelForSeq2SeqLM.from_pretrained({saved!r}, trust_remote_code=True).eval()
assert "transformers_modules" in type(model).__module__
ids = torch.load({ids!r})
torch.save(model.generate(ids), {output!r})
assert not connections
"""


def test_fine_tuning_without_the_package_gives_a_folder_that_opens_without_it(tmp_path):
    """The stock Seq2SeqTrainer on a machine that has transformers and torch; then another such machine."""
    small_model().save_pretrained(tmp_path / "hub")
    dataset = random_pairs(EIGHT)
    expected_loss, expected = manual_update(dataset, label_smoothing=0.1)
    paths = {"folder": str(tmp_path / "hub"), "out": str(tmp_path / "out"), "saved": str(tmp_path / "tuned")}
    printed = elsewhere(tmp_path, FINE_TUNE.format(rows=json.dumps(list(dataset)), **paths))
    losses = json.loads(printed.splitlines()[-1].removeprefix("RESULT "))
    assert losses == pytest.approx([expected_loss], abs=1e-5)
    assert {path.name for path in (tmp_path / "tuned").glob("*.py")} == SHIPPED
    config = json.loads((tmp_path / "tuned" / "config.json").read_text())
    assert all("--" not in reference for reference in config["auto_map"].values())
    tuned = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path / "tuned").eval()
    same_weights(tuned, expected, rtol=1e-5, atol=1e-6)
    torch.save(words(2, 6), tmp_path / "ids.pt")
    tasks = {"ids": str(tmp_path / "ids.pt"), "output": str(tmp_path / "generated.pt")}
    elsewhere(tmp_path, OPEN_AGAIN.format(saved=paths["saved"], **tasks))
    assert torch.equal(torch.load(tmp_path / "generated.pt"), tuned.generate(words(2, 6)))


def test_the_stock_evaluation_by_generation_does_not_cut_at_twenty_tokens(tmp_path, tiny_tokenizer):
    """Seq2SeqTrainer writes max_length=20 into the model's settings: the limit stays source + 50, in file and run."""
    model, dataset, _ = endless_translator(tiny_tokenizer)
    model.save_pretrained(tmp_path / "before")
    trainer = evaluator(
        tmp_path,
        (model, dataset, None),
        tiny_tokenizer,
        Seq2SeqTrainer,
        options={"data_collator": TranslationCollator(PAD)},
    )
    for _ in range(2):  # the second time with what the first has left in the settings
        rows = unpadded(trainer.predict(dataset).predictions, tiny_tokenizer.pad_token_id)
        assert [len(row) for row in rows] == [1 + len(row["input_ids"]) + 50 for row in dataset]
    trainer.save_model(str(tmp_path / "after"))
    files = [(tmp_path / folder / "generation_config.json").read_text() for folder in ("before", "after")]
    assert files[0] == files[1]
    assert model.generation_config.max_length == 20  # what is in memory is the trainer's affair


# --- The best model, several processes -------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", TRAINERS)
def test_the_model_with_the_lowest_loss_is_kept(tmp_path, cls):
    """A rate so high that the loss soon rises."""
    model = small_model(std=0.3)
    trainer = trainer_for(
        cls,
        tmp_path,
        model,
        train=random_pairs(EIGHT),
        evaluation=random_pairs(MANY[:6], seed=40),
        max_steps=6,
        learning_rate=0.6,
        save_strategy="steps",
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        options={"compute_metrics": None},
        **({"predict_with_generate": False} if cls is not Trainer else {}),
    )
    trainer.train()
    losses = logged(trainer, "eval_loss")
    best = losses.index(min(losses)) + 1
    assert best < 6
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")
    kept = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path / f"checkpoint-{best}")
    same_weights(model, kept, rtol=0, atol=0)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(losses), rel=1e-6)


@pytest.mark.parametrize("cls", TRAINERS)
@pytest.mark.parametrize("average", [True, False])
def test_on_one_process_averaging_tokens_across_devices_changes_nothing(tmp_path, cls, average):
    expected_loss, expected = manual_update(random_pairs(EIGHT), label_smoothing=0.1)
    model, trainer = one_update(cls, tmp_path, 2, 4, average_tokens_across_devices=average)
    assert logged(trainer, "loss") == pytest.approx([expected_loss], abs=1e-5)
    same_weights(model, expected, rtol=1e-5, atol=1e-6)


AVERAGE_SCRIPT = """
import json, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
import conftest, torch
import transformers
from test_training import EIGHT, one_update, random_pairs, received_batches, rows_of
from small_models import small_model
from vanilla_transformer.training import VanillaTransformerTrainer
torch.set_num_threads(1)
cls = {{"ours": VanillaTransformerTrainer, "stock": transformers.Seq2SeqTrainer}}[sys.argv[2]]
model = small_model()
seen = received_batches(model)
model, trainer = one_update(cls, Path(sys.argv[1]), 2, 2, model=model,
                            average_tokens_across_devices=sys.argv[3] == "True")
torch.save([model.state_dict(), [row for batch in seen for row in rows_of(batch)]],
           sys.argv[1] + f"/rank{{trainer.args.process_index}}.pt")
trainer.accelerator.wait_for_everyone()
trainer.accelerator.end_training()
"""


@pytest.mark.slow
@pytest.mark.parametrize("cls", ["ours", "stock"])
@pytest.mark.parametrize("average", [True, False])
def test_tokens_are_averaged_across_processes_or_within_each(tmp_path, cls, average):
    """Two processes, two micro-batches each: one mean over all tokens, or the mean of each process's own."""
    script = tmp_path / "average.py"
    script.write_text(AVERAGE_SCRIPT.format(tests=str(Path(__file__).parent)))
    launch(2, [str(script), str(tmp_path), cls, str(average)])
    saved = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    weights, rows = zip(*saved, strict=True)
    everything = sorted(rows[0] + rows[1])
    assert everything == sorted((tuple(row["input_ids"]), tuple(row["labels"])) for row in random_pairs(EIGHT))
    expected = small_model()
    parts = [
        token_losses(expected, [{"input_ids": list(row[0]), "labels": list(row[1])} for row in part], 0.1)
        for part in rows
    ]
    assert len(parts[0]) != len(parts[1])
    loss = torch.cat(parts).mean() if average else (parts[0].mean() + parts[1].mean()) / 2
    loss.backward()
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter -= SGD["learning_rate"] * parameter.grad
    for name, value in expected.state_dict().items():
        assert torch.equal(weights[0][name], weights[1][name]), name
        torch.testing.assert_close(weights[0][name], value, rtol=1e-5, atol=1e-6)
