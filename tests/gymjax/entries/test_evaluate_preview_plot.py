import json
import math

import numpy as np
import pytest
from rich.console import Console

from gymjax import evaluate, plot, preview
from gymjax.config import ConfigError
from gymjax.generate import load_adapted
from gymjax.training import plotting
from gymjax.verify import logits


def test_loss_is_that_of_a_dense_softmax_over_the_answers(base, rows_file, tmp_path, capsys, make_config):
    out = tmp_path / "out"
    evaluate.main([f"model_name_or_path={base}", f"eval_dataset={rows_file}", "cutoff_len=128", f"output_dir={out}"])
    result = json.loads((out / "eval_results.json").read_text())
    config = make_config(eval_dataset=str(rows_file), cutoff_len=128)
    loaded = load_adapted(config)
    dataset = evaluate.prepare(config.data, loaded.tokenizer).eval
    total, count = 0.0, 0
    for i in range(len(dataset)):
        example = dataset[i]
        scores = logits(loaded.model, example.ids[None])[0].astype(np.float64)
        logprobs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
        trained = np.flatnonzero(example.weights[1:])
        total -= logprobs[trained, example.ids[1:][trained]].sum()
        count += len(trained)
    assert result["eval_tokens"] == count == len("I am a tiny model.") + len("2.") + len("Hello!") + 3
    assert result["eval_loss"] == pytest.approx(total / count, rel=1e-5)  # f32 logits
    assert result["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)
    assert "eval_loss" in capsys.readouterr().out


def test_nothing_to_evaluate_on_is_named(make_config):
    with pytest.raises(ConfigError, match="nothing to evaluate on: give eval_dataset"):
        evaluate.evaluate_config(make_config())


def test_bad_evaluations_are_named(base, tmp_path, rows_file):
    (tmp_path / "file").write_text("")
    arguments = [f"model_name_or_path={base}", "cutoff_len=1024"]
    with pytest.raises(ConfigError, match="file is a file; give a folder"):
        evaluate.main([*arguments, f"eval_dataset={rows_file}", f"output_dir={tmp_path / 'file'}"])
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * 300}]
    (tmp_path / "long.jsonl").write_text(json.dumps({"messages": turns}))
    with pytest.raises(ValueError, match=r"long\.jsonl:1: 322 tokens, but the model has 256 positions; set cutoff_len"):
        evaluate.main([*arguments, f"eval_dataset={tmp_path / 'long.jsonl'}"])


def shown(text_of):
    console = Console(width=200, record=True, force_terminal=False)
    text_of(console)
    return console.export_text()


def test_preview_shows_every_token_and_what_is_trained(base, rows_file, make_config):
    config = make_config(dataset=str(rows_file), cutoff_len=64)
    loader, tokenizer, lines = preview.preview_config(config)
    text = shown(lambda console: preview.show_row(loader, 1, tokenizer, console))
    assert "rows.jsonl:2" in text
    assert "<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\n2.<|im_end|>" in text
    on = [line.split()[-1] for line in text.splitlines() if " on " in line]
    assert on == ["'2'", "'.'", "'<|im_end|>'"]
    assert "3 trained" in text
    assert any("3 rows read" in line for line in lines)


def test_preview_of_packed_rows_restarts_positions(rows_file, make_config):
    config = make_config(dataset=str(rows_file), cutoff_len=128, packing=True)
    loader, tokenizer, _ = preview.preview_config(config)
    text = shown(lambda console: preview.show_row(loader, 0, tokenizer, console))
    starts = [line.split() for line in text.splitlines() if line.endswith("'<|im_start|>'") and line.split()[2] == "0"]
    assert len(starts) >= 2
    assert [line[1] for line in starts] == [str(i + 1) for i in range(len(starts))]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["row=9"], "row 9 does not exist; there are rows 0 to 2"),
        (["row=-1"], "row must be a number from 0, is -1"),
        (["split=eval"], "split: eval has no data; there is train"),
    ],
)
def test_bad_rows_are_named(base, rows_file, arguments, message):
    with pytest.raises(ValueError) as error:
        preview.main([f"model_name_or_path={base}", f"dataset={rows_file}", *arguments])
    assert message in str(error.value)


HISTORY = [
    {"step": 1, "loss": 3.0},
    {"step": 2, "loss": float("nan")},
    {"step": 3, "loss": 1.0},
    {"step": 3, "eval_loss": 2.0},
    {"train_runtime": 1.0, "step": 3},
]


def test_curves_leave_out_what_is_not_finite():
    assert plotting.points(HISTORY, "loss") == ([1, 3], [3.0, 1.0])
    assert plotting.points(HISTORY, "eval_loss") == ([3], [2.0])
    assert plotting.smooth([3.0]) == [3.0]
    wave = [3.0 + (-1) ** i for i in range(200)]
    assert max(plotting.smooth(wave)[50:]) - min(plotting.smooth(wave)[50:]) < 0.2  # 0.1 of the raw swing of 2
    axes = plotting.draw({"loss": ([1, 3], [3.0, 1.0])}, "nats per trained token").axes[0]
    assert list(axes.lines[0].get_ydata()) == [3.0, 1.0]


def test_plot_reads_the_run_or_its_newest_checkpoint(tmp_path, capsys):
    checkpoint = tmp_path / "checkpoint-3"
    checkpoint.mkdir()
    (checkpoint / "trainer_state.json").write_text(json.dumps({"log_history": HISTORY}))
    plot.main([str(tmp_path)])
    printed = capsys.readouterr().out
    for name in ("training_loss.png", "training_eval_loss.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
        assert f"wrote {tmp_path / name}" in printed
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": []}))
    plot.main([str(tmp_path)])
    assert "nothing to draw" in capsys.readouterr().out


def test_experts_get_curves_of_their_own(tmp_path):
    load = {"moe_aux_loss": 1.1, "expert_load_max": 1.5, "expert_load_min": 0.5, "expert_entropy": 0.9}
    files = plotting.plot_losses(tmp_path, [{"step": step, "loss": 2.0, **load} for step in (1, 2)])
    assert [file.name for file in files] == [
        "training_loss.png",
        "training_moe_aux_loss.png",
        "training_expert_load.png",
    ]
    figure = plotting.draw({key: ([1, 2], [value, value]) for key, value in load.items()}, "1 is even")
    assert len(figure.axes[0].lines) == 6  # three quantities, raw and smoothed, fit in a figure


def test_plot_says_what_is_wrong(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no trainer_state\.json, nor does a checkpoint"):
        plot.main([str(tmp_path)])
    entries = [{"step": None, "loss": 1}], [{"step": 1, "loss": "x"}], [1], {}
    texts = [b"{", b"\xff", b"[]", *(json.dumps({"log_history": entry}).encode() for entry in entries)]
    for text in texts:
        (tmp_path / "trainer_state.json").write_bytes(text)
        with pytest.raises(
            ValueError, match=r"trainer_state\.json (has no readable log_history|is not JSON|must hold)"
        ):
            plot.main([str(tmp_path)])
    with pytest.raises(ValueError, match="takes one argument"):
        plot.main([])
