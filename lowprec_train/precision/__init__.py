"""Layers: what a recipe is, how its three GEMMs run, and the Linear that carries it."""
