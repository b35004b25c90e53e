"""Load and export Hugging Face checkpoints: tensor names, row layouts, safetensors, config.json and tokenizers."""
