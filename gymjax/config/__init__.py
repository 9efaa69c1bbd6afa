"""Configuration: LLaMA-Factory's flat keys in YAML and on the command line, strict; Axolotl's names as aliases."""

from gymjax.config.load import change, from_dict, load
from gymjax.config.output_dir import check_output_dir, check_trainable, check_unmixed, check_writable
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
from gymjax.config.show import describe, differences, texts, to_yaml
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
    "change",
    "check_output_dir",
    "check_trainable",
    "check_unmixed",
    "check_writable",
    "describe",
    "differences",
    "flat",
    "from_dict",
    "load",
    "texts",
    "to_yaml",
]
