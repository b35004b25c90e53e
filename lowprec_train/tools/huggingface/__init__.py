"""Models in the form that Hugging Face's `transformers` opens: names, layouts of rows, files and tokenizers."""
