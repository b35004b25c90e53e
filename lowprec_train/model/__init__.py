"""One decoder for LLaMA and GPT: knows nothing of precision schemes (its Linears carry them) nor of meshes."""
