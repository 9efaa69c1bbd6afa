import pytest

from gymjax import config


@pytest.fixture
def write(tmp_path):
    """Write a YAML text and return its path."""

    def _write(text):
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return _write


@pytest.fixture
def make():
    """Build a Config from keys, with a model so that only the keys under test can be wrong."""

    def _make(**values):
        return config.from_dict({"model_name_or_path": "tiny"} | values)

    return _make


@pytest.fixture
def refusal(make):
    """Return the message with which keys are refused."""

    def _refusal(**values):
        with pytest.raises(config.ConfigError) as caught:
            make(**values)
        return str(caught.value)

    return _refusal
