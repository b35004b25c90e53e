"""Hydra's configuration tree, found by `pkg://lowprec_train.configs` in a checkout and in a wheel alike."""
