import json
import shutil
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from gymjax import export, verify
from gymjax.config import ConfigError
from gymjax.generate import load_adapted


def test_merged_folder_computes_what_the_adapter_computes(base, adapter, tmp_path, make_config, capsys):
    out = tmp_path / "merged"
    arguments = [f"model_name_or_path={base}", f"adapter_name_or_path={adapter}", f"export_dir={out}"]
    export.main([*arguments, "export_size=0.00004"])
    assert f"with {adapter} merged in to {out}" in capsys.readouterr().out
    assert len(list(out.glob("model-*-of-*.safetensors"))) > 1
    assert (out / "tokenizer.json").exists()
    merged = load_adapted(make_config(model_name_or_path=str(out)))
    assert merged.tokenizer.chat_template == load_adapted(make_config()).tokenizer.chat_template
    tokens = np.arange(24, dtype=np.int32)[None]
    ours = verify.logits(merged.model, tokens)
    wanted = verify.logits(load_adapted(make_config(adapter_name_or_path=str(adapter))).model, tokens)
    np.testing.assert_allclose(ours, wanted, atol=1e-4 * np.abs(wanted).max())  # f32 sums in another order
    with pytest.raises(ConfigError, match="is not empty; give another folder, or overwrite=true"):
        export.main(arguments)
    export.main([*arguments, "overwrite=true", "export_dtype=bfloat16"])
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert [path.name for path in out.glob("*.safetensors")] == ["model.safetensors"]


def test_a_merge_rounds_once(base, adapter, tmp_path, make_config):
    """bf16 base: the written weight is bf16(f32(w) + f32 delta), whatever the run computes in."""
    half = tmp_path / base.name
    export.export_model(make_config(export_dtype="bfloat16"), half)
    merged = export.load_merged(make_config(model_name_or_path=str(half), quantization_bit=4), adapter)
    stored = load_file(half / "model.safetensors")["model.layers.1.mlp.up_proj.weight"].astype(np.float32)
    factors = load_file(adapter / "adapter_model.safetensors")
    a, b = (factors[f"base_model.model.model.layers.1.mlp.up_proj.lora_{kind}.weight"] for kind in "AB")
    wanted = jnp.asarray(stored + 2.0 * b.astype(np.float64) @ a, jnp.bfloat16)
    ours = merged.model.stacks[0][0].mlp.up.w.get_value()[1]
    assert ours.dtype == jnp.bfloat16
    # The f32 product may fall on the other side of a rounding border for a few of 1536 weights.
    assert np.mean(np.asarray(ours) == np.asarray(wanted)) > 0.995


def test_adapter_alone_is_copied_out_of_a_run_or_its_checkpoint(base, adapter, tmp_path):
    checkpoint = tmp_path / "run" / "checkpoint-7"
    shutil.copytree(adapter, checkpoint)
    (checkpoint / "trainer_state.json").write_text("{}")
    out = tmp_path / "out"
    export.main(
        [f"model_name_or_path={base}", f"adapter_name_or_path={checkpoint}", "merge=false", f"export_dir={out}"]
    )
    assert (out / "adapter_model.safetensors").read_bytes() == (adapter / "adapter_model.safetensors").read_bytes()
    assert (out / "adapter_config.json").exists()
    assert (out / "tokenizer.json").exists()
    assert not (out / "trainer_state.json").exists()


def test_a_model_and_an_adapter_are_not_written_beside_each_other(base, adapter, tmp_path):
    """transformers would put the adapter over the model that has it merged in already."""
    run, model = shutil.copytree(adapter, tmp_path / "run"), shutil.copytree(base, tmp_path / "model")
    arguments = [f"model_name_or_path={base}", f"adapter_name_or_path={adapter}", "overwrite=true"]
    with pytest.raises(ConfigError, match=r"export_dir: .*run holds adapter_config\.json and this run writes a model"):
        export.main([*arguments, f"export_dir={run}"])
    with pytest.raises(ConfigError, match=r"model holds model\.safetensors and this run writes an adapter"):
        export.main([*arguments, f"export_dir={model}", "merge=false"])


def test_the_adapter_of_output_dir_is_found(adapter, make_config):
    assert export.adapter_folder(make_config()) is None
    assert export.adapter_folder(make_config(output_dir=str(adapter))) == adapter
    assert export.adapter_folder(make_config(output_dir="a", adapter_name_or_path="b")).name == "b"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "export_dir must be given"),
        (["export_dir=FOLDER/file"], "is a file; give a folder"),
        (["export_dir=FOLDER/file/new"], "file/new cannot be written"),
        (["export_dir=FOLDER/new", "merge=false"], "merge=false needs an adapter"),
        (["export_dir=FOLDER/new", "merge=perhaps"], "merge must be true or false, is perhaps"),
    ],
)
def test_bad_exports_are_named(base, tmp_path, arguments, message):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as error:
        export.main([f"model_name_or_path={base}", *(a.replace("FOLDER", str(tmp_path)) for a in arguments)])
    assert message in str(error.value)


def test_verify_compares_merged_weights_with_the_adapter(base, adapter, capsys):
    arguments = [f"model_name_or_path={base}", f"adapter_name_or_path={adapter}", "quantization_bit=4", "torch=false"]
    assert verify.main([*arguments, "tokens=12"]) == 0
    printed = capsys.readouterr().out
    assert "merged in f32; adapter " in printed
    assert "over the 4-bit base" in printed
    assert printed.count("reported only") == 2
    assert verify.main([*arguments, "tokens=12", "tolerance=1e-12"]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_comparison_counts_differences_and_argmax():
    theirs = np.zeros((1, 2, 3), np.float32)
    theirs[0, :, 1] = 4.0
    ours = theirs.copy()
    ours[0, 1, 2] = 5.0
    row = verify.compare("x", ours, theirs, 1e-4)
    assert (row.max_difference, row.max_logit, row.agreement, row.passed) == (5.0, 4.0, 0.5, False)
    assert verify.compare("x", theirs, theirs, 1e-4).passed is True
    assert verify.compare("x", ours, theirs, None).passed is None
    with pytest.raises(ValueError, match="must have one shape"):
        verify.compare("x", ours, theirs[:, :1], 1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["torch=false"], "nothing to compare"),
        (["tolerance=small"], "tolerance and tokens must be numbers"),
        (["tokens=0"], "must be above 0"),
        (["tolerance=nan"], "must be above 0, are nan and 64"),
        (["tolerance=inf"], "must be above 0, are inf and 64"),
    ],
)
def test_bad_verifications_are_named(base, arguments, message):
    with pytest.raises(ConfigError) as error:
        verify.main([f"model_name_or_path={base}", *arguments])
    assert message in str(error.value)


def test_missing_torch_interpreter_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv(verify.PYTHON, str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError, match="give a Python that has torch and transformers"):
        verify.torch_python()
    monkeypatch.delenv(verify.PYTHON)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verify.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="or give torch=false"):
        verify.torch_python()


def test_failing_interpreter_is_quoted(base, monkeypatch):
    monkeypatch.setattr(verify, "_TORCH_SCRIPT", "import nothing")
    with pytest.raises(ValueError, match=r"could not compute transformers' logits of .*No module named 'nothing'"):
        verify.torch_logits(sys.executable, base, np.zeros((1, 4), np.int32))


@pytest.mark.interop
@pytest.mark.parametrize(
    ("family", "options"),
    [("phi3", []), ("gemma3_text", []), ("qwen2", ["rope_scaling=yarn", "cutoff_len=200"])],
    ids=["phi3", "gemma3_text", "qwen2-yarn"],
)
def test_verify_other_families(
    family, options, tiny_families, byte_tokenizer, torch_side, torch_python, tmp_path, monkeypatch, capsys
):
    """At the first and at the last positions, also of a context that is extended."""
    torch_side.make_model(folder=tmp_path / "base", config=tiny_families[family] | {"vocab_size": 272})
    byte_tokenizer.save_pretrained(tmp_path / "base")
    monkeypatch.setenv(verify.PYTHON, str(torch_python))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert verify.main([f"model_name_or_path={tmp_path / 'base'}", "tokens=24", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines[1:]] == ["passed", "passed"]
    last = 255 if options else tiny_families[family]["max_position_embeddings"] - 1
    assert f"to {last};" in lines[2]


def test_an_extended_context_is_exported(base, tmp_path, make_config):
    longer = {"rope_scaling": "yarn", "cutoff_len": 700}
    loaded = export.export_model(make_config(**longer), tmp_path / "longer")
    assert loaded.model.cfg.max_positions == 768
    hf = json.loads((tmp_path / "longer" / "config.json").read_text())
    assert hf["max_position_embeddings"] == 768
    settings = {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 256}
    assert hf["rope_parameters"] == {"rope_theta": 10000.0} | settings
    again = load_adapted(make_config(model_name_or_path=str(tmp_path / "longer"))).model
    tokens = np.arange(40, dtype=np.int32)[None]
    np.testing.assert_array_equal(verify.logits(again, tokens), verify.logits(loaded.model, tokens))
    assert np.abs(verify.logits(again, tokens) - verify.logits(load_adapted(make_config()).model, tokens)).max() > 0.1


def test_bad_extension_of_the_context(make_config):
    with pytest.raises(ValueError, match="cutoff_len 256 fits into the model's 256 positions"):
        load_adapted(make_config(rope_scaling="linear", cutoff_len=256))


@pytest.mark.interop
def test_verify_against_transformers_and_peft(base, adapter, torch_python, monkeypatch, capsys):
    monkeypatch.setenv(verify.PYTHON, str(torch_python))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert verify.main([f"model_name_or_path={base}", f"adapter_name_or_path={adapter}", "tokens=24"]) == 0
    assert capsys.readouterr().out.count("passed") == 4
