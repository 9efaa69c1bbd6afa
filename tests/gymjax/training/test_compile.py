"""The persistent cache of compiled programs, and what is said of it."""

import os
import subprocess
import sys

import jax

from gymjax.training.compile import Program, describe_program, use_compile_cache

SCRIPT = """
import sys
import jax, jax.numpy as jnp
from gymjax.training.compile import compile_program, use_compile_cache

jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
if sys.argv[1:]:
    use_compile_cache(sys.argv[1])
for _ in range(2):
    print(compile_program(jax.jit(lambda x: jnp.sin(x) @ x), jnp.ones((4, 4))).cached)
    jax.clear_caches()
"""


def cached(*arguments):
    environment = {key: value for key, value in os.environ.items() if key != "JAX_COMPILATION_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, env=environment, check=True
    )
    return done.stdout.split()


def test_a_program_is_found_in_the_cache_the_second_time(tmp_path):
    folder = str(tmp_path / "cache")
    assert cached(folder) == ["False", "True"]
    assert cached(folder) == ["True", "True"]  # in another process
    assert cached() == ["None", "None"]
    assert cached("none") == ["None", "None"]


def test_the_line_says_hit_or_miss():
    text = describe_program(Program(lambda: None, 1.25, True, 2.0), (1, 4, 128))
    assert text.startswith("compiled the step for 1 x 4 x 128 tokens in 1.2 s (found in the cache)")
    assert "needs 2.00 GiB per device" in text
    assert "(not in the cache so far)" in describe_program(Program(lambda: None, 1.25, False, None), (1, 4, 128))
    assert "cache" not in describe_program(Program(lambda: None, 1.25, None, None), (1, 4, 128))


def test_on_the_cpu_nothing_is_cached_unless_asked_for():
    before = jax.config.jax_compilation_cache_dir
    use_compile_cache(None)
    assert jax.config.jax_compilation_cache_dir == before
