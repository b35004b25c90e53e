"""The decoder for LLaMA and GPT; independent of recipes, which its Linears apply, and of meshes."""
