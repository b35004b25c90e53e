"""`lowprec study`: arms x seeds in blocks, trained on the GPUs of this machine, estimated with honest intervals."""
