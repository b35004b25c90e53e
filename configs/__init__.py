"""Hydra's configuration groups. A Python package, so that a wheel carries them as `lowprec_train.configs`."""
