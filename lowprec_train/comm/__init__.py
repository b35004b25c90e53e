"""Gradient reduction: low-precision payloads on the wire, sums in FP32."""
