"""`python -m gymjax.generate CONFIG.yaml prompt="..."`: answers prompts with a model, adapted or not."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from gymjax.checkpoint.files import replacing
from gymjax.checkpoint.load import LoadedModel, with_adapter
from gymjax.checkpoint.peft import CONFIG as ADAPTER_CONFIG
from gymjax.config import Config, ConfigError, GenerateConfig, check_writable, load
from gymjax.inference import Answer, generate
from gymjax.inference.prompts import Prompt
from gymjax.inference.questions import Question, read_questions
from gymjax.training.command import flag, keys_text, run_process, split_arguments, take
from gymjax.training.compile import use_compile_cache
from gymjax.training.setup import ATTENTION, load_model

OWN = {
    "prompt": "a text to answer",
    "prompt_file": "json, jsonl, csv, parquet or txt of prompts; writes output_dir/generated_predictions.jsonl",
    "raw": "true: continue the text as it is; default: ask it through the chat template, where there is one",
}
PREDICTIONS = "generated_predictions.jsonl"
PARTIAL = "generated_predictions.partial.jsonl"


def load_adapted(config: Config) -> LoadedModel:
    """The model that a config names: its base, its adapter where adapter_name_or_path is given, and its tokenizer.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: files that are damaged or do not fit together.
    """
    use_compile_cache(config.train.compile_cache_dir)
    loaded = load_model(config)
    if config.model.adapter_name_or_path is None:
        trained = Path(config.train.output_dir)
        if "output_dir" in config.explicit and (trained / ADAPTER_CONFIG).exists():
            note = f"the base model answers; adapter_name_or_path={trained} uses the adapter trained there"
            print(f"note: {note}", file=sys.stderr)
        return loaded
    return with_adapter(loaded, Path(config.model.adapter_name_or_path))


def fitting(settings: GenerateConfig, config: Config, loaded: LoadedModel) -> GenerateConfig:
    """Settings whose default max_new_tokens leaves a small model half of its positions for the prompt."""
    half = loaded.model.cfg.max_positions // 2
    if "max_new_tokens" in config.explicit or settings.max_new_tokens <= half:
        return settings
    return dataclasses.replace(settings, max_new_tokens=half)


def answer_prompts(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    config: Config,
    *,
    raw: bool = False,
    names: Sequence[str] | None = None,
    on_batch: Callable[[dict[int, Answer]], None] | None = None,
) -> list[Answer]:
    """Answers prompts as a config says.

    Args:
        loaded: from `load_adapted`.
        prompts: texts, or conversations ([{"role", "content"}]).
        config: sampling, seed, template, default_system and attention are read.
        raw: continue texts as they are instead of asking them through the chat template.
        names: of the prompts in errors, such as "file:line"; None for their numbers.
        on_batch: as in `generate`.
    """
    has_template = config.data.template is not None or bool(loaded.tokenizer.chat_template)
    asked = has_template and not raw
    return generate(
        loaded.model,
        loaded.tokenizer,
        [[{"role": "user", "content": p}] if asked and isinstance(p, str) and p else p for p in prompts],
        fitting(config.generate, config, loaded),
        seed=config.train.seed,
        template=config.data.template,
        default_system=config.data.default_system,
        generation_eos=loaded.generation_config.get("eos_token_id"),
        batch_size=config.train.per_device_eval_batch_size,
        attention=ATTENTION[config.model.flash_attn],
        names=names,
        on_batch=on_batch,
    )


def answer_file(loaded: LoadedModel, questions: Sequence[Question], config: Config, *, raw: bool = False) -> Path:
    """Answers questions into output_dir and returns the file's path.

    It is written whole, {"prompt", "predict", "label"} a line. What ends the work before, an interrupt too, leaves the
    answers that there are in generated_predictions.partial.jsonl.
    """
    folder, answers = Path(config.train.output_dir), {}

    def keep(batch: dict[int, Answer]) -> None:
        answers.update(batch)
        if sys.stderr.isatty():
            end = "\n" if len(answers) == len(questions) else ""
            print(f"\r{len(answers)} of {len(questions)} prompts answered", end=end, file=sys.stderr, flush=True)

    def write(name: str) -> Path:
        rows = [
            {"prompt": question.prompt, "predict": answers[number].text, "label": question.label}
            for number, question in enumerate(questions)
            if number in answers
        ]
        with replacing(folder) as temporary:
            lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            (temporary / name).write_text(lines, encoding="utf-8")
        return folder / name

    prompts, names = [question.prompt for question in questions], [question.source for question in questions]
    try:
        answer_prompts(loaded, prompts, config, raw=raw, names=names, on_batch=keep)
    except BaseException:
        if answers:
            print(f"{len(answers)} of {len(questions)} answers are in {write(PARTIAL)}", file=sys.stderr)
        raise
    written = write(PREDICTIONS)
    (folder / PARTIAL).unlink(missing_ok=True)
    return written


def usage() -> str:
    """Text of --help."""
    return f"""
usage: python -m gymjax.generate [CONFIG.yaml] [key=value ...] prompt="..." | prompt_file=FILE

Answers one prompt, or all prompts of a file. Keys:
{keys_text(("model", "generate"), OWN)}
 data: template, default_system, cutoff_len (with rope_scaling)
 train: seed, output_dir, per_device_eval_batch_size (prompts at a time), bf16, fp16
"""


def main(arguments: Sequence[str]) -> None:
    """Loads a model, answers, prints; with a file of prompts, writes the answers."""
    path, overrides = split_arguments(arguments)
    own, overrides = take(overrides, OWN)
    if ("prompt" in own) == ("prompt_file" in own):
        raise ConfigError('give either prompt="..." or prompt_file=FILE')
    raw = flag(own, "raw")
    config = load(path, overrides)
    file = own.get("prompt_file")
    if file is not None:
        check_writable("output_dir", Path(config.train.output_dir))
    questions = None if file is None else read_questions(file)  # before the model, which takes longer
    loaded = load_adapted(config)
    if questions is None:
        print(answer_prompts(loaded, [own["prompt"]], config, raw=raw, names=["command line"])[0].text)
    else:
        print(f"wrote {len(questions)} answers to {answer_file(loaded, questions, config, raw=raw)}")


if __name__ == "__main__":
    run_process(main, usage)
