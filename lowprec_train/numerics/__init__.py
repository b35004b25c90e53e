"""Numbers: formats, quantisers and draws."""
