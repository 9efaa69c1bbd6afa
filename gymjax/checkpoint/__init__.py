"""Weights and run states on disk: Hugging Face folders, GGUF files, PEFT adapters, training checkpoints."""
