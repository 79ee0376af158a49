"""Cross-attention of a sentence pair against equation (1) on the own projections of the layer, and all pictures."""

import builtins
import json
import math
import re

import numpy as np
import pytest
import torch
from PIL import Image

from small_models import small_model
from vanilla_transformer.modeling_vanilla_transformer import sinusoidal_encoding
from vanilla_transformer.tokenization import train_tokenizer
from vanilla_transformer.visualization import (
    Attentions,
    all_attentions_of,
    attention_figure,
    attentions_figure,
    cross_attention_of,
    curves_figure,
    importance_figure,
    plot_attention,
    positions_figure,
    save_figure,
    token_texts,
    training_history,
)


SOURCE = "The ticket costs twelve euro."
TARGET = "Die Karte für fünf Züge."


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([SOURCE, TARGET] * 3, vocab_size=300)


@pytest.fixture
def model(tokenizer):
    return small_model(vocab_size=len(tokenizer), dropout=0.4)


def attention_by_hand(model, source_ids, decoder_ids, layer):
    """softmax(QK^T / sqrt(d_k)) of a cross-attention, (num_heads, T_target, T_source), from projections by hooks."""
    seen = {}
    module = model.model.decoder.layers[layer].cross_attention
    hooks = [
        projection.register_forward_hook(lambda _, inputs, output, name=name: seen.update({name: output}))
        for name, projection in (("query", module.q_proj), ("key", module.k_proj))
    ]
    with torch.no_grad():
        model.eval()(input_ids=source_ids, decoder_input_ids=decoder_ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    num_heads = model.config.num_heads
    query, key = (seen[name][0].double().unflatten(-1, (num_heads, -1)).transpose(0, 1) for name in ("query", "key"))
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    return torch.softmax(scores, dim=-1).numpy()


@pytest.mark.parametrize("layer, head", [(-1, None), (0, None), (1, 3), (-3, 0)])
def test_weights_are_the_attention_that_predicts_each_target_token(model, tokenizer, layer, head):
    weights, source_tokens, target_tokens = cross_attention_of(
        model, tokenizer, SOURCE, TARGET, layer=layer, head=head
    )
    source_ids = tokenizer(SOURCE, return_tensors="pt").input_ids
    target_ids = tokenizer(TARGET, return_tensors="pt").input_ids
    start = torch.tensor([[model.config.decoder_start_token_id]])
    expected = attention_by_hand(model, source_ids, torch.cat([start, target_ids[:, :-1]], dim=1), layer)
    expected = expected.mean(axis=0) if head is None else expected[head]
    assert weights.dtype == np.float32
    assert weights.shape == (target_ids.shape[1], source_ids.shape[1]) == (len(target_tokens), len(source_tokens))
    np.testing.assert_allclose(weights, expected, atol=1e-5)
    np.testing.assert_allclose(weights.sum(axis=1), 1, atol=1e-5)
    assert source_tokens[-1] == target_tokens[-1] == "</s>"
    assert "".join(source_tokens[:-1]) == SOURCE


def test_without_a_target_the_model_translates(model, tokenizer):
    weights, source_tokens, target_tokens = cross_attention_of(model, tokenizer, SOURCE)
    source_ids = tokenizer(SOURCE, return_tensors="pt").input_ids
    sequence = model.eval().generate(input_ids=source_ids)
    assert target_tokens == token_texts(tokenizer, sequence[0, 1:])
    expected = attention_by_hand(model, source_ids, sequence[:, :-1], -1).mean(axis=0)
    np.testing.assert_allclose(weights, expected, atol=1e-5)
    assert weights.shape == (len(target_tokens), len(source_tokens))


def test_the_model_is_left_as_it_was(model, tokenizer):
    model.train()
    model.model.encoder.eval()
    before = {name: module.training for name, module in model.named_modules()}
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first, second = (cross_attention_of(model, tokenizer, SOURCE, TARGET)[0] for _ in range(2))
    np.testing.assert_array_equal(first, second, "no dropout while looking")
    assert {name: module.training for name, module in model.named_modules()} == before
    assert model.config._attn_implementation == "sdpa"
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert not any(parameter.grad is not None for parameter in model.parameters())


def test_the_model_is_left_as_it_was_after_an_error(model, tokenizer):
    model.train()
    with pytest.raises(ValueError, match="layer must lie between -3 and 2, got 3"):
        cross_attention_of(model, tokenizer, SOURCE, TARGET, layer=3)
    assert model.training
    assert model.config._attn_implementation == "sdpa"


def test_half_precision_models_give_float32_weights(model, tokenizer):
    weights, _, _ = cross_attention_of(model.to(torch.bfloat16), tokenizer, SOURCE, TARGET)
    assert weights.dtype == np.float32
    np.testing.assert_allclose(weights.sum(axis=1), 1, atol=0.02)


@pytest.mark.parametrize("head", [-1, 4])
def test_a_head_that_does_not_exist_is_named(model, tokenizer, head):
    with pytest.raises(ValueError, match=f"head must lie between 0 and 3, .* got {head}"):
        cross_attention_of(model, tokenizer, SOURCE, TARGET, head=head)


@pytest.mark.parametrize("source", ["", " \t\n"])
def test_a_blank_source_is_refused(model, tokenizer, source):
    with pytest.raises(ValueError, match="source_text must have at least one character"):
        cross_attention_of(model, tokenizer, source)


def test_tokens_are_shown_as_text_and_parts_of_characters_as_bytes(tokenizer):
    plain = train_tokenizer(["ab ab"], vocab_size=261)
    ids = plain("ab für 日\n", add_special_tokens=False).input_ids
    assert token_texts(plain, ids) == [
        *("ab", " ", "f", "\\xc3", "\\xbc", "r"),
        *(" ", "\\xe6", "\\x97", "\\xa5", "\n"),
    ]
    for text in (SOURCE, TARGET):
        assert "".join(token_texts(tokenizer, tokenizer(text, add_special_tokens=False).input_ids)) == text
    replacement = plain("\ufffd", add_special_tokens=False).input_ids
    assert token_texts(plain, replacement) == ["\\xef", "\\xbf", "\\xbd"]
    assert token_texts(plain, torch.tensor([0, 1, 2])) == ["<s>", "<pad>", "</s>"]


def some_weights(rows: int, columns: int) -> np.ndarray:
    return np.random.default_rng(0).dirichlet(np.full(columns, 0.3), size=rows).astype(np.float32)


def labels_of(axes) -> tuple[list[str], list[str]]:
    return [label.get_text() for label in axes.get_xticklabels()], [
        label.get_text() for label in axes.get_yticklabels()
    ]


def test_axes_carry_the_tokens_with_visible_spaces():
    source, target = ["The", " ticket", "\u00a0$", "\n"], [" für", "$x$", ""]
    figure = attention_figure(some_weights(3, 4), source, target, title="$1 and $2")
    heat_map, bar = figure.axes
    assert labels_of(heat_map) == (["The", "␣ticket", "\\xa0$", "\\n"], ["␣für", "$x$", "(empty)"])
    assert [label.get_parse_math() for label in heat_map.get_xticklabels() + heat_map.get_yticklabels()] == [False] * 7
    assert heat_map.get_xlabel() == "source tokens"
    assert heat_map.get_ylabel() == "target tokens"
    assert bar.get_ylabel() == "attention weight"
    assert figure.get_suptitle() == "$1 and $2"


def test_cells_are_the_weights_with_target_tokens_downwards():
    weights = some_weights(3, 5)
    heat_map = attention_figure(weights, list("abcde"), list("xyz")).axes[0]
    (image,) = heat_map.get_images()
    np.testing.assert_array_equal(image.get_array(), weights)
    assert image.get_clim() == (0, 1), "as in the grids"
    bottom, top = heat_map.get_ylim()
    assert bottom > top, "the first target token is at the top"
    assert list(heat_map.get_xticks()) == [0, 1, 2, 3, 4]
    assert list(heat_map.get_yticks()) == [0, 1, 2]


@pytest.mark.parametrize("row, column", [(0, 0), (2, 5), (7, 1)])
def test_the_largest_weight_is_the_brightest_cell_of_the_file(tmp_path, row, column):
    weights = np.full((8, 6), 0.02)
    weights[row, column] = 1.0
    path = plot_attention(weights, list("abcdef"), list("stuvwxyz"), tmp_path / "attention.png")
    pixels = np.asarray(Image.open(path).convert("RGB")).astype(int)
    # Outside the colour bar, only the cell of the largest weight is yellow, and all other cells are dark violet.
    yellow = (abs(pixels - [253, 231, 37]) < 12).all(axis=2)
    violet = (abs(pixels - [68, 1, 84]) < 24).all(axis=2)
    violet_columns = np.flatnonzero(violet.sum(axis=0) > pixels.shape[0] / 3)
    violet_rows = np.flatnonzero(violet.sum(axis=1) > pixels.shape[1] / 3)
    left, right, top, bottom = violet_columns[0], violet_columns[-1], violet_rows[0], violet_rows[-1]
    found_rows, found_columns = np.nonzero(yellow[top : bottom + 1, left : right + 1])
    assert int(found_columns.mean() / (right - left + 1) * 6) == column
    assert int(found_rows.mean() / (bottom - top + 1) * 8) == row


def test_the_picture_grows_with_the_number_of_tokens(tmp_path):
    sizes = {}
    for rows, columns in [(1, 1), (10, 10), (10, 40), (40, 10)]:
        path = tmp_path / f"{rows}_{columns}.png"
        assert plot_attention(some_weights(rows, columns), ["ab"] * columns, ["cd"] * rows, path) == path
        with Image.open(path) as picture:
            assert picture.format == "PNG"
            sizes[rows, columns] = picture.size
    assert sizes[10, 40][0] > sizes[10, 10][0] + 1000
    assert sizes[40, 10][1] > sizes[10, 10][1] + 1000
    assert max(attention_figure(some_weights(700, 700), ["ab"] * 700, ["cd"] * 700).get_size_inches()) < 60
    assert min(sizes[1, 1]) > 200


def test_small_cells_have_fewer_labels():
    heat_map = attention_figure(np.full((2, 2000), 1 / 2000), [str(i) for i in range(2000)], ["a", "b"]).axes[0]
    labels, _ = labels_of(heat_map)
    assert 500 < len(labels) < 2000
    assert [int(label) for label in labels] == [round(tick) for tick in heat_map.get_xticks()]


def test_text_from_right_to_left_is_drawn(tmp_path):
    plot_attention(
        some_weights(2, 2), ["שלום", " עולם"], ["مرحبا", " بالعالم"], tmp_path / "a.png", title="שלום → مرحبا"
    )
    assert (tmp_path / "a.png").stat().st_size > 1000


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, list])
def test_tensors_and_lists_are_drawn_as_arrays_are(kind):
    weights = np.array([[0.25, 0.75], [0.5, 0.5]])
    given = weights.tolist() if kind is list else torch.tensor(weights, dtype=kind, requires_grad=True)
    image = attention_figure(given, ["a", "b"], ["c", "d"]).axes[0].get_images()[0]
    np.testing.assert_array_equal(image.get_array(), weights)


@pytest.mark.parametrize(
    "weights, words",
    [
        (np.zeros((3, 2)), "(target tokens, source tokens) = (2, 3), got (3, 2)"),
        (np.zeros((4, 2, 3)), "got (4, 2, 3); choose a layer and a head"),
        (np.full((2, 3), np.nan), "weights must be finite and not negative"),
        (np.full((2, 3), -0.1), "weights must be finite and not negative"),
    ],
)
def test_weights_that_do_not_fit_are_named(tmp_path, weights, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        plot_attention(weights, ["a", "b", "c"], ["x", "y"], tmp_path / "a.png")
    assert not list(tmp_path.iterdir())


def test_no_tokens_are_refused(tmp_path):
    with pytest.raises(ValueError, match="at least one source and one target token, got 0 and 2"):
        plot_attention(np.zeros((2, 0)), [], ["x", "y"], tmp_path / "a.png")


@pytest.mark.parametrize(
    "name, error, words",
    [
        ("a.pdf", ValueError, "path must end in .png"),
        ("missing/a.png", FileNotFoundError, "the folder of path must exist"),
        ("folder.png", IsADirectoryError, "path must be a file"),
    ],
)
def test_paths_that_cannot_be_written_are_named(tmp_path, name, error, words):
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(error, match=words):
        plot_attention(some_weights(1, 1), ["a"], ["b"], tmp_path / name)


def test_an_older_picture_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "a.png"
    plot_attention(some_weights(1, 1), ["a"], ["b"], path)
    old = path.read_bytes()

    def fail(*_):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", fail)
        with pytest.raises(OSError, match="disk full"):
            plot_attention(some_weights(2, 2), ["a", "b"], ["c", "d"], path)
    assert path.read_bytes() == old
    assert [file.name for file in tmp_path.iterdir()] == ["a.png"]
    plot_attention(some_weights(2, 2), ["a", "b"], ["c", "d"], path)
    assert path.read_bytes() != old
    assert [file.name for file in tmp_path.iterdir()] == ["a.png"]


def test_pyplot_is_not_touched(tmp_path):
    import matplotlib.pyplot

    before = matplotlib.pyplot.get_fignums()
    plot_attention(some_weights(1, 1), ["a"], ["b"], tmp_path / "a.png")
    assert matplotlib.pyplot.get_fignums() == before


def test_missing_matplotlib_names_the_extra(monkeypatch):
    real_import = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(f"No module named '{name}'")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=re.escape('pip install "vanilla-transformer[demo]"')):
        attention_figure(some_weights(1, 1), ["a"], ["b"])


# --- Every attention, positions, importance, curves --------------------------------------------------------------


@pytest.fixture
def attentions(model, tokenizer):
    return all_attentions_of(model, tokenizer, SOURCE, TARGET)


def panels_of(figure) -> dict[str, np.ndarray]:
    """The heat maps of a figure by their titles."""
    return {axes.get_title(): axes.get_images()[0].get_array() for axes in figure.axes if axes.get_images()}


def test_a_figure_of_all_attentions_has_a_panel_for_each_head(attentions):
    panels = panels_of(attentions_figure(attentions))
    titles = {f"{kind} {layer}, head {head}" for kind, layer in [*ATTENTIONS] for head in range(4)}
    assert set(panels) - {""} == titles
    for kind, layer in ATTENTIONS:
        for head in range(4):
            np.testing.assert_array_equal(
                panels[f"{kind} {layer}, head {head}"], attentions.weights[kind][layer][head]
            )


ATTENTIONS = [("encoder", 0), ("encoder", 1), *((kind, layer) for kind in ("decoder", "cross") for layer in range(3))]


@pytest.mark.parametrize(
    "chosen, count",
    [({"kind": "cross"}, 12), ({"layer": -1}, 12), ({"head": 2}, 8), ({"kind": "encoder", "head": 0}, 2)],
)
def test_what_is_chosen_is_drawn(attentions, chosen, count):
    titles = [title for title in panels_of(attentions_figure(attentions, **chosen)) if title]
    assert len(titles) == count
    assert all(chosen.get("kind", "") in title for title in titles)
    assert all(f"head {chosen.get('head', '')}" in title for title in titles)


def test_a_single_head_is_one_heat_map_with_its_tokens(attentions):
    figure = attentions_figure(attentions, kind="decoder", layer=1, head=3, title="$1")
    image = figure.axes[0].get_images()[0].get_array()
    np.testing.assert_array_equal(image, attentions.weights["decoder"][1][3])
    assert figure.axes[0].get_title() == "decoder attention, layer 1, head 3"
    columns, rows = labels_of(figure.axes[0])
    assert columns == [token.replace(" ", "␣") for token in attentions.read_tokens]
    assert rows == [token.replace(" ", "␣") for token in attentions.target_tokens]


def cross_of(rows: int, columns: int, token: str = "token", layers: int = 1, heads: int = 2) -> Attentions:
    weights = [np.full((heads, rows, columns), 1 / columns, np.float32)] * layers
    source, target = [token] * columns, [token] * rows
    return Attentions("s", "t", source, target, target, {"cross": weights}, {"cross": [list(range(heads))] * layers})


@pytest.mark.parametrize("rows, columns, letters", [(4, 4, 24), (5, 12, 16), (30, 30, 14)])
def test_labels_of_a_row_of_panels_stay_clear_of_the_next_rows_titles(rows, columns, letters):
    figure = attentions_figure(cross_of(rows, columns, "n" * letters, layers=4, heads=4), title="t")
    figure.draw_without_rendering()
    panels = [axes for axes in figure.axes if axes.get_images()][:16]
    assert len(panels) == 16
    for above, below in zip(panels[:-4], panels[4:], strict=True):
        labels = min(label.get_window_extent().y0 for label in above.get_xticklabels())
        assert labels > below.title.get_window_extent().y1
        assert below.get_window_extent().height > 20
    # Older versions of matplotlib lay text out a pixel or so beyond the edge, where no letter has ink.
    assert min(label.get_window_extent().y0 for label in panels[-1].get_xticklabels()) >= -2
    assert min(label.get_window_extent().x0 for label in panels[0].get_yticklabels()) >= -2


@pytest.mark.parametrize("chosen", [{}, {"layer": 0, "head": 0}])
def test_a_long_text_keeps_its_labels_and_a_title_within_the_picture(caplog, chosen):
    text = " ".join(f"word{number}" for number in range(150))
    figure = attentions_figure(cross_of(20, 150, layers=2), kind="cross", title=text, **chosen)
    figure.draw_without_rendering()
    title = figure._suptitle.get_window_extent()
    assert 0 <= title.x0 < title.x1 <= figure.bbox.width
    assert title.y1 <= figure.bbox.height
    shown = figure.get_suptitle()
    assert shown.startswith("word0 word1")
    assert shown.endswith("word149")
    assert len(shown.split("\n")) == 2
    columns, rows = labels_of(figure.axes[0])
    assert 30 < len(columns) <= 150
    assert len(rows) > 5
    # In cells of the usual size all labels are legible.
    assert [record.message for record in caplog.records] == (
        []
        if chosen
        else [
            "150 tokens are too many for this picture to label each of them; an .html page, or one head, suits better"
        ]
    )


def test_letters_without_a_glyph_are_told_in_one_line(tmp_path, caplog, recwarn):
    texts = ["\U0001f436", "\u65e5\u672c", "\u0645\u0631\u062d\u0628\u0627"]
    path = plot_attention(some_weights(2, 3), texts, ["a", "b"], tmp_path / "a.png", title=" ".join(texts))
    (record,) = caplog.records
    assert "no glyph for" in record.message
    assert set("\U0001f436\u65e5\u672c") <= set(record.message)
    assert record.message.count("\n") == 0
    assert not recwarn.list
    assert path.exists()


@pytest.mark.parametrize(
    "chosen, words",
    [
        ({"kind": "self"}, "kind must be one of encoder, decoder, cross, got 'self'"),
        ({"layer": 2}, "layer must lie between -2 and 1 for encoder attention, got 2"),
        ({"kind": "cross", "layer": -4}, "layer must lie between -3 and 2 for cross attention, got -4"),
        ({"head": 4}, "has the heads 0, 1, 2, 3, got head 4"),
    ],
)
def test_a_choice_that_does_not_exist_is_named(attentions, chosen, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        attentions_figure(attentions, **chosen)


@pytest.mark.parametrize("ending, begins", [("png", b"\x89PNG"), ("svg", b"<?xml"), ("PDF", b"%PDF")])
def test_the_ending_of_the_file_names_the_format(tmp_path, ending, begins):
    path = save_figure(attention_figure(some_weights(2, 2), ["a", "b"], ["c", "d"]), tmp_path / f"a.{ending}")
    assert path.read_bytes().startswith(begins)
    with pytest.raises(ValueError, match="must end in one of .png, .svg, .pdf, got"):
        save_figure(attention_figure(some_weights(1, 1), ["a"], ["b"]), tmp_path / "a.jpg")


def test_positions_are_drawn_with_the_values_given():
    """Hand-computed: the sine and the cosine of the position stand in the first two dimensions."""
    values = sinusoidal_encoding(torch.arange(20), 8)
    figure = positions_figure({"sinusoids": values, "others": torch.zeros(3, 2)})
    assert [axes.get_title() for axes in figure.axes[:2]] == ["sinusoids", "others"]
    (image,) = figure.axes[0].get_images()
    assert image.get_array().shape == (20, 8)
    np.testing.assert_allclose(image.get_array()[:, 0], [math.sin(position) for position in range(20)], atol=1e-6)
    np.testing.assert_allclose(image.get_array()[:, 1], [math.cos(position) for position in range(20)], atol=1e-6)
    assert image.get_clim() == (-1, 1)
    with pytest.raises(ValueError, match=r"shape \(positions, d_model\), got \(3,\)"):
        positions_figure({"a": torch.zeros(3)})


def test_importances_stand_in_the_cell_of_their_head():
    figure = importance_figure([("encoder", 0, 0, 0.5), ("encoder", 0, 2, 0.25), ("cross", 1, 1, 1.0)])
    axes = figure.axes[0]
    cells = np.ma.filled(axes.get_images()[0].get_array(), np.nan)
    np.testing.assert_array_equal(cells, [[0.5, np.nan, 0.25], [np.nan, 1.0, np.nan]])
    assert labels_of(axes)[1] == ["encoder 0", "cross 1"]
    assert {text.get_position(): text.get_text() for text in axes.texts} == {
        (0, 0): "0.5000",
        (2, 0): "0.2500",
        (1, 1): "1.0000",
    }


def test_heads_that_are_taken_out_are_crossed_out():
    heads = [("encoder", 0, 0, 0.5), ("encoder", 0, 2, 0.25), ("cross", 1, 1, 1.0)]
    (axes, _) = importance_figure(heads, [("encoder", 0, 2)]).axes
    middles = {tuple(line.get_xydata().mean(axis=0)) for line in axes.get_lines()}
    assert middles == {(2, 0)}
    assert "each attention keeps at least one" in axes.get_xlabel()
    plain = importance_figure(heads).axes[0]
    assert (list(plain.get_lines()), plain.get_xlabel()) == ([], "head")


LOG = [
    {"step": 10, "epoch": 0.5, "loss": 5.0, "learning_rate": 0.1},
    {"step": 20, "epoch": 1.0, "loss": 4.0, "learning_rate": 0.2},
    {"step": 20, "epoch": 1.0, "eval_loss": 4.5, "eval_bleu": 1.5, "note": "text"},
]
HISTORY = {
    "loss": [(10, 5.0), (20, 4.0)],
    "learning_rate": [(10, 0.1), (20, 0.2)],
    "eval_loss": [(20, 4.5)],
    "eval_bleu": [(20, 1.5)],
}


def test_the_log_of_a_training_is_that_of_the_state_that_knows_most(tmp_path, caplog):
    for name, state in {
        "checkpoint-10": json.dumps({"global_step": 10, "log_history": LOG[:1]}),
        "checkpoint-20": json.dumps({"global_step": 20, "log_history": LOG}),
        "checkpoint-30": '{"global_step": 30, "log_his',
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "trainer_state.json").write_text(state)
    assert training_history(tmp_path) == HISTORY
    assert "stepped over" in caplog.text
    assert "checkpoint-30" in caplog.text
    assert training_history(tmp_path / "checkpoint-10") == {"loss": [(10, 5.0)], "learning_rate": [(10, 0.1)]}
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": 40, "log_history": LOG[:2]}))
    assert set(training_history(tmp_path)) == {"loss", "learning_rate"}
    with pytest.raises(NotADirectoryError, match="expected the folder of a training"):
        training_history(tmp_path / "trainer_state.json")


def test_before_the_first_checkpoint_the_log_is_that_of_tensorboard(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    with pytest.raises(ValueError, match="holds no log of a training"):
        training_history(tmp_path)
    with SummaryWriter(tmp_path / "runs" / "now") as writer:
        for name, values in HISTORY.items():
            group, _, rest = name.partition("_")
            for step, value in values:
                writer.add_scalar(f"eval/{rest}" if group == "eval" else f"train/{name}", value, step)
    found = training_history(tmp_path)
    assert set(found) == set(HISTORY)
    for name, values in HISTORY.items():
        assert found[name] == [(step, pytest.approx(value, rel=1e-6)) for step, value in values]


def test_curves_go_through_what_was_logged():
    figure = curves_figure(HISTORY, title="run")
    drawn = {
        axes.get_ylabel(): [list(map(tuple, line.get_xydata())) for line in axes.get_lines()] for axes in figure.axes
    }
    assert drawn == {
        "loss, nats a token": [HISTORY["loss"], HISTORY["eval_loss"]],
        "learning rate": [HISTORY["learning_rate"]],
        "BLEU": [HISTORY["eval_bleu"]],
    }
    assert len(curves_figure({"loss": [(1, 2.0)], "other": [(1, 1.0)]}).axes) == 1
    with pytest.raises(ValueError, match="expected loss, learning_rate or eval_bleu in the log, got other"):
        curves_figure({"other": [(1, 1.0)]})
