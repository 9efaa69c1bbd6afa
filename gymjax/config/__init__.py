"""Configuration: LLaMA-Factory's flat keys in YAML and on the command line, strict; Axolotl's names as aliases."""

from gymjax.config.load import from_dict, load
from gymjax.config.sections import (
    AdapterConfig,
    Config,
    DataConfig,
    ExportConfig,
    GenerateConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
    flat,
)
from gymjax.config.source import ConfigError

__all__ = [
    "AdapterConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "ExportConfig",
    "GenerateConfig",
    "ModelConfig",
    "OptimConfig",
    "TrainConfig",
    "flat",
    "from_dict",
    "load",
]
