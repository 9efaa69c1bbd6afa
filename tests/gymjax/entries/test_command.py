import importlib
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from gymjax import __main__ as listing
from gymjax.config import ConfigError
from gymjax.training import command

ENTRIES = ("train", "generate", "chat", "evaluate", "export", "preview", "verify", "plot")


def test_file_comes_first_and_own_keys_are_taken_out():
    assert command.split_arguments(["a.yaml", "x=1"]) == ("a.yaml", ["x=1"])
    assert command.split_arguments(["x=1", "y=2"]) == (None, ["x=1", "y=2"])
    assert command.split_arguments(["--seed", "3"]) == (None, ["--seed", "3"])
    own, others = command.take(["prompt=a = b", "--row", "3", "seed=1", "template=", "--raw"], {"prompt", "row", "raw"})
    assert own == {"prompt": "a = b", "row": "3", "raw": "true"}
    assert others == ["seed=1", "template="]


def raising(error):
    def main(arguments):
        raise error

    return main


def test_mistakes_print_one_line_and_bugs_their_traceback(capsys):
    assert command.run(lambda arguments: command.take(["what"], ()), str, []) == 2
    assert capsys.readouterr().err == "error: command line: 'what' is no override; write key=value\n"
    assert command.run(lambda arguments: Path("/nowhere/file").read_text(), str, []) == 2
    assert "No such file" in capsys.readouterr().err
    with pytest.raises(ValueError, match="invalid literal"):
        command.run(lambda arguments: json.loads("[1]") and int("x"), str, [])
    with pytest.raises(TypeError):
        command.run(raising(TypeError("bug")), str, [])
    assert command.run(lambda arguments: 1, str, []) == 1
    assert command.run(lambda arguments: None, str, []) == 0


def test_ctrl_c_ends_the_process_though_a_program_runs():
    """XLA's threads abort a process that waits for none of them."""
    lines = """
        import jax
        from gymjax.training.command import run_process

        def main(arguments):
            print("begun")
            jax.jit(lambda x: jax.lax.while_loop(lambda x: x < 2e9, lambda x: x + 1, x))(0)
            raise KeyboardInterrupt

        run_process(main, str)
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(lines)], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "begun\n", "interrupted\n")


def test_a_file_is_only_an_error_of_ours_or_the_system(capsys):
    assert command.is_expected(caught(lambda: listing.main(["x"])))
    assert not command.is_expected(caught(lambda: json.loads("{")))


def caught(function):
    with pytest.raises(ValueError) as error:
        function()
    return error.value


@pytest.mark.parametrize("name", ENTRIES)
def test_help_names_the_keys(name, capsys):
    module = importlib.import_module(f"gymjax.{name}")
    usage = getattr(module, "usage", None) or (lambda: module.USAGE)
    assert command.run(module.main, usage, ["--help"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"usage: python -m gymjax.{name}")
    if name != "plot":
        assert "model_name_or_path" in printed
    assert max(map(len, printed.splitlines())) <= 130


def test_flags():
    assert command.flag({}, "merge", default=True)
    assert not command.flag({"merge": "False"}, "merge", default=True)
    with pytest.raises(ConfigError, match="merge must be true or false, is 1"):
        command.flag({"merge": "1"}, "merge")


def test_the_listing_has_every_entry_versions_and_devices(capsys):
    listing.main([])
    printed = capsys.readouterr().out
    for name in ENTRIES:
        assert f"python -m gymjax.{name} " in printed
    assert all(name in printed for name in ("gymjax ", "jax ", "flax ", "numpy ", "device "))


def test_commands_end_with_their_status():
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(
        [sys.executable, "-m", "gymjax.chat", "modle_name_or_path=x"], capture_output=True, text=True, env=environment
    )
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    assert "model_name_or_path" in ended.stderr  # did you mean


def test_chat_reads_a_pipe(base):
    ended = subprocess.run(
        [sys.executable, "-m", "gymjax.chat", f"model_name_or_path={base}", "max_new_tokens=4", "do_sample=false"],
        input="Hello\n/exit\n",
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert ended.returncode == 0, ended.stderr
    first, *rest = ended.stdout.splitlines()
    assert "is ready" in first
    assert "".join(rest).strip()
