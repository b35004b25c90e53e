"""How good a trained model is: perplexity and bits per byte of text, and tasks, under any recipe."""
