import pytest

from gymjax import config

FILES = [
    ("lora_rank: 8\nlora_rank: 16\n", "run.yaml:2: lora_rank is given twice, first in line 1; keep one"),
    ("a: [1, 2\n", "run.yaml:2: not valid YAML: "),
    ("- a\n- b\n", "run.yaml:1: the file must hold `key: value` lines"),
    ("just text\n", "run.yaml:1: the file must hold `key: value` lines"),
    ("? [a, b]\n: 1\n", "run.yaml:1: a key must be a plain name"),
    ("a: 1\n---\nb: 2\n", "run.yaml:2: not valid YAML: but found another document"),
    ("lora_rank: 8\n\nlora_alfa: 16\n", "run.yaml:3: unknown key lora_alfa; did you mean lora_alpha?"),
    ("learning_rate: 1e-4\nseed: x\n", "run.yaml:2: seed must be a whole number, is 'x'"),
    ("lora_rank_pattern: {q_proj: 1, q_proj: 2}\n", "run.yaml:1: q_proj is given twice; keep one"),
    (
        "model_name_or_path: a\nbf16: true\nseed: 1\nfp16: true\n",
        "run.yaml:2, {path}:4: bf16: true and fp16: true exclude each other; keep one",
    ),
    ("", "model_name_or_path must be given: a folder, a .gguf file or a hub id"),
]


@pytest.mark.parametrize(("text", "message"), FILES)
def test_bad_file(write, text, message):
    path = write(text)
    with pytest.raises(config.ConfigError) as caught:
        config.load(path)
    assert message.format(path=path) in str(caught.value)


def test_bad_path_of_the_file(tmp_path):
    with pytest.raises(config.ConfigError, match=r"none\.yaml: no such configuration file; give the path"):
        config.load(tmp_path / "none.yaml")


def test_bad_bytes_in_the_file(tmp_path):
    (tmp_path / "run.yaml").write_bytes(b"lora_rank: \xff\xfe")
    with pytest.raises(config.ConfigError, match=r"run\.yaml: not valid YAML text: "):
        config.load(tmp_path / "run.yaml")


@pytest.mark.parametrize("argument", ["lora_rank", "=8", "8", "-x", "lora rank=8", "--"])
def test_bad_override(argument):
    with pytest.raises(config.ConfigError, match=r"command line: '.*' is no override; write key=value"):
        config.load(None, ["model_name_or_path=a", argument])


def test_bad_override_names_the_command_line(write):
    path = write("model_name_or_path: a\nval_size: 0.1\n")
    with pytest.raises(config.ConfigError) as caught:
        config.load(path, ["eval_dataset=b"])
    assert str(caught.value).startswith(f"{path}:2, command line: val_size: 0.1 and eval_dataset: b exclude")


def test_self_reference_in_yaml_ends(write):
    with pytest.raises(config.ConfigError, match=r"run\.yaml:3: seed must be a whole number, is 'no'"):
        config.load(write("model_name_or_path: a\nlora_target: &x [*x, 1]\nseed: no\n"))


def test_bad_output_dir_that_is_not_empty(make, tmp_path):
    (tmp_path / "notes.txt").touch()
    message = r"is not empty \(it has notes.txt\); give another folder, set overwrite_output_dir: true"
    with pytest.raises(config.ConfigError, match=message):
        config.check_output_dir(make(output_dir=str(tmp_path)), [])
    config.check_output_dir(make(output_dir=str(tmp_path), overwrite_output_dir=True), [])


def test_bad_output_dir_that_is_a_file(make, tmp_path):
    (tmp_path / "out").touch()
    with pytest.raises(config.ConfigError, match="out is a file; give a folder"):
        config.check_output_dir(make(output_dir=str(tmp_path / "out")), [])


def test_bad_output_dir_that_cannot_be_written(make, tmp_path, monkeypatch):
    """Seen before a model is loaded; root may write anywhere, so the system's answer is played."""
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    with pytest.raises(config.ConfigError, match=rf"a/b cannot be written, {tmp_path} does not allow it; give another"):
        config.check_output_dir(make(output_dir=str(tmp_path / "a" / "b")), [])


@pytest.mark.parametrize(
    ("kind", "name"),
    [("lora", "model.safetensors"), ("full", "adapter_config.json"), ("freeze", "adapter_config.json")],
)
def test_bad_output_dir_with_weights_of_another_kind(make, tmp_path, kind, name):
    """An adapter beside a whole model: transformers would load the adapter's base in place of the model."""
    (tmp_path / name).touch()
    with pytest.raises(config.ConfigError, match=rf"holds {name} and this run writes a.*; remove it, or give another"):
        config.check_output_dir(make(output_dir=str(tmp_path), overwrite_output_dir=True, finetuning_type=kind), [])


@pytest.mark.parametrize("key", ["model_name_or_path", "adapter_name_or_path"])
def test_bad_overwriting_of_what_is_read(make, tmp_path, key):
    source = tmp_path / "out" / "checkpoint-3"
    source.mkdir(parents=True)
    changes = {"output_dir": str(tmp_path / "out"), "overwrite_output_dir": True, key: str(source)}
    with pytest.raises(config.ConfigError, match=rf"{key}: .*checkpoint-3 lies in output_dir: .* clears; give another"):
        config.check_output_dir(make(**changes), [3])


def test_bad_resume_without_a_checkpoint(make, tmp_path):
    with pytest.raises(config.ConfigError, match=r"resume_from_checkpoint: true, but output_dir: .* has no checkpoint"):
        config.check_output_dir(make(output_dir=str(tmp_path), resume_from_checkpoint=True), [])


def test_bad_resume_path(make, tmp_path):
    with pytest.raises(config.ConfigError, match=r"resume_from_checkpoint: gone/checkpoint-1 is no folder; give a"):
        config.check_output_dir(make(output_dir=str(tmp_path), resume_from_checkpoint="gone/checkpoint-1"), [])


def test_bad_output_dir_when_resuming_is_off(make, tmp_path):
    (tmp_path / "checkpoint-10").mkdir()
    with pytest.raises(config.ConfigError, match="is not empty"):
        config.check_output_dir(make(output_dir=str(tmp_path), resume_from_checkpoint=False), [10])


@pytest.mark.parametrize("resume", [None, True])
def test_bad_checkpoints_without_a_train_state(make, tmp_path, resume):
    """Of save_only_model, or of another trainer: nothing goes on from them, and a new start would remove them."""
    (tmp_path / "checkpoint-10").mkdir()
    with pytest.raises(config.ConfigError, match="no train state of gymjax is in checkpoint-10"):
        config.check_output_dir(make(output_dir=str(tmp_path), resume_from_checkpoint=resume), [])


@pytest.mark.parametrize("resume", [None, True, "itself"])
def test_output_dir_with_a_checkpoint_resumes(make, tmp_path, resume):
    (tmp_path / "checkpoint-10").mkdir()
    resume = str(tmp_path / "checkpoint-10") if resume == "itself" else resume
    config.check_output_dir(make(output_dir=str(tmp_path), resume_from_checkpoint=resume), [10])


def test_new_output_dir_is_good(make, tmp_path):
    config.check_output_dir(make(output_dir=str(tmp_path / "new")), [])


def test_bad_training_without_a_dataset(make):
    with pytest.raises(config.ConfigError, match=r"dataset must be given: a name in dataset_info\.json, a file, a"):
        config.check_trainable(make())


def test_bad_training_that_must_not_train(make):
    with pytest.raises(config.ConfigError, match=r"do_train: false, but gymjax\.train always trains; to evaluate run"):
        config.check_trainable(make(dataset="a", do_train=False))
    config.check_trainable(make(dataset="a"))
